"""The tuning database: what was measured, and which configuration wins where.

Imports as ``tpf_jit.tuning_db``. Measurements (`rows.TrialRow`) are append-only and keyed by the hash of their content; winners
are derived from them by one pure function (`winner.rank`), so every process and every merge order agrees on them.

    rows.py     one measurement as plain data, its content hash, device models            stdlib
    winner.py   from measurements to the winner of a cell                                 stdlib
    reader.py   read-only layers for the dispatcher: user database, shipped tables        stdlib (sqlite3)
    trust.py    whether a winner still speaks for the code of today                       stdlib
    prune.py    which rows decide nothing any more                                        stdlib
    contents.py all rows of a file, only read; compare.py two of them side by side        stdlib
    merge.py    sorted JSON lines: export, import, union                                  stdlib
    schema.py   tables and migrations                                                     stdlib
    store.py    the read-write store: kernels, trials, leases, exchange                   sqlite-utils
    connection.py  its file: transactions, recovery, errors                               sqlite-utils
    repair.py   damaged files: recognised, set aside, salvaged                            stdlib
    audit.py    what verify looks at                                                      stdlib
    shipped/    JSON lines that install with the package, one file a device
    records/    measured claims (see `tpf_jit.records`)

Names below load on first use, so that the launch path never imports sqlite-utils.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_EXPORTS = {
    "DatabaseWarning": "reader",
    "TrialRow": "rows",
    "TuningStore": "store",
    "Winner": "winner",
    "cell_key": "rows",
    "device_model": "rows",
    "load_winners": "reader",
    "user_database_path": "reader",
}

__all__ = [*_EXPORTS]

if TYPE_CHECKING:
    from .reader import DatabaseWarning, load_winners, user_database_path
    from .rows import TrialRow, cell_key, device_model
    from .store import TuningStore
    from .winner import Winner


def __getattr__(name: str):
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
