"""Which rows may go: those that decide nothing any more and that nothing will ask for again.

A row goes when a newer measuring method, newer sources or a newer row of the same kernel has taken its place. What stays,
whatever its age: every row behind a winner or a runner-up, what is known about the sources of today, what is known about the
sources measured last, what was measured of device code that is still in use, and every verdict that bars a configuration
which could win otherwise. A template that is not installed here cannot be judged, so its rows stay. Last, the winners are
derived again without the rows: where anything differs, no row of that cell goes.

Standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from tpf_jit.tuning_db.rows import REFUTING, SAME_CODE
from tpf_jit.tuning_db.trust import Present
from tpf_jit.tuning_db.winner import Evidence, admissible, kernel_of, protocol_order, rank

PROTOCOL = "measured by an older method"
SOURCES = "of other sources, measured again since"
REPEATED = "a newer row says the same"
STATEMENT = "speaks of sources that are gone"

Presents = Callable[[str], "Present | None"]
"""Name of a template -> what it is compiled from today; None where it is not installed."""


def plan(rows: Iterable[Evidence], present: Presents) -> dict[str, str]:
    """Ids of the rows that may go, each with the reason.

    Args:
        rows: all rows of a database.
        present: see `Presents`; asked once a template and cell.
    """
    cells: dict[str, list[Evidence]] = defaultdict(list)
    for row in rows:
        cells[row.cell].append(row)
    going: dict[str, str] = {}
    for members in cells.values():
        models: dict[str, list[Evidence]] = defaultdict(list)
        for row in members:
            if row.status != SAME_CODE:
                models[row.model].append(row)
        found: dict[str, str] = {}
        for group in models.values():
            found |= _of_group(group, present)
        going |= found | _statements(members, present)
    return going


def _of_group(rows: list[Evidence], present: Presents) -> dict[str, str]:
    """Of one cell on one device model."""
    now = {name: present(name) for name in {row.template for row in rows}}
    deciding = {row.id for row in admissible(rows)}
    newest = {}
    latest: dict[str, tuple[str, str]] = {}
    for row in rows:
        newest[row.template] = max(newest.get(row.template, (0, "")), protocol_order(row.protocol))
        latest[row.template] = max(latest.get(row.template, ("", "")), (row.date, row.source_hash))

    def in_force(row: Evidence) -> bool:
        known = now[row.template]
        return known is None or known.source_hash is None or row.source_hash in (known.source_hash, latest[row.template][1])

    staying = [row for row in rows if row.id in deciding or in_force(row)]
    code = {row.cubin_sha256 for row in staying} - {""}
    kernels = {kernel_of(row) for row in staying}
    last: dict[tuple, tuple[str, str]] = {}
    for row in rows:
        last[_same(row)] = max(last.get(_same(row), ("", "")), (row.date, row.id))
    going = {}
    for row in rows:
        if row.id in deciding or now[row.template] is None:
            continue
        known = row.cubin_sha256 in code or kernel_of(row) in kernels
        if row.status != "ok" and last[_same(row)][1] != row.id:
            going[row.id] = REPEATED
        elif row.status in REFUTING and known:
            continue
        elif row.protocol and protocol_order(row.protocol) != newest[row.template] and deciding:
            going[row.id] = PROTOCOL
        elif not in_force(row) and row.cubin_sha256 not in code:
            going[row.id] = SOURCES
    rest = [row for row in rows if row.id not in going]
    return going if rank(rest) == rank(rows) else {}


def _same(row: Evidence) -> tuple:
    """Rows that agree in this say the same about a failure."""
    return (row.template, row.config, kernel_of(row), row.cubin_sha256, row.protocol, row.grade, row.status)


def _statements(rows: list[Evidence], present: Presents) -> dict[str, str]:
    """Of one cell. What a statement speaks of may lie in another layer, so only its sources are judged."""
    going = {}
    for row in rows:
        now = present(row.template) if row.status == SAME_CODE else None
        if now is not None and now.source_hash not in (None, row.source_hash):
            going[row.id] = STATEMENT
    return going
