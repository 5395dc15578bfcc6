"""Read-only access to measurements, for the launch path: standard library only, loaded once, never raising for a bad file.

Layers, first hit wins: user database, then the tables that ship with the package. A layer that cannot be read (locked, damaged,
from a newer version) is left out with one warning; a missing one is simply empty.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpf_jit import errors
from tpf_jit.errors import DatabaseError, TpfError
from tpf_jit.tuning_db import merge, schema, trust
from tpf_jit.tuning_db.rows import REFUTING, SAME_CODE, TrialRow, canonical_json, cell_family
from tpf_jit.tuning_db.winner import Evidence, Winner, rank

SHIPPED = Path(__file__).resolve().parent / "shipped"
"""Folder of the tables that install with the package: JSON lines, one file a device."""

BUSY_TIMEOUT_S = 2.0
"""Longest wait for a locked file on the launch path."""

_EVIDENCE = """SELECT t.id, t.cell, t.model, t.template, c.fields, t.kernel_key, t.source_hash, t.cubin_sha256, t.protocol,
    t.grade, t.status, t.median_us, t.p10_us, t.p90_us, t.date, k.facts FROM trial t JOIN config c ON c.id = t.config
    JOIN toolchain k ON k.id = t.toolchain"""
_TRIALS = """SELECT t.id, t.template, t.cell, c.fields, t.kernel_key, t.source_hash, t.cubin_sha256, d.facts, t.device_state,
    k.facts, t.protocol, t.samples_us, t.median_us, t.p10_us, t.p90_us, t.errors, t.status, t.detail, t.grade, t.date, t.session
    FROM trial t JOIN config c ON c.id = t.config JOIN device d ON d.id = t.device JOIN toolchain k ON k.id = t.toolchain"""
TRIAL_FIELDS = (
    *("template", "cell", "config", "kernel_key", "source_hash", "cubin_sha256", "device", "device_state", "toolchain"),
    *("protocol", "samples_us", "median_us", "p10_us", "p90_us", "errors", "status", "detail", "grade", "date", "session"),
)
"""Columns of a stored trial after its id, in the order of the trial query. Config, device and toolchain are ids in the table."""
_REFUTING = ", ".join(f"'{status}'" for status in REFUTING)

_warned: set[tuple[str, str]] = set()


class DatabaseWarning(UserWarning):
    """A tuning database could not be used as asked: it was left out, or set aside and rebuilt."""


@dataclass(frozen=True)
class Layer:
    """What one source knows.

    Attributes:
        name: for people: a path, or "shipped tables".
        winners: (cell, device model) -> the winner and those kept behind it.
        problem: why the layer is empty, None if it was read.
        statements: what was seen to give the device code of an earlier measurement (`trust.statements`).
    """

    name: str
    winners: dict[tuple[str, str], tuple[Winner, ...]] = field(default_factory=dict)
    problem: str | None = None
    statements: trust.Statements = field(default_factory=dict)


def user_database_path(path: str | os.PathLike[str] | None = None) -> Path:
    """Where the user's database lies: the argument, else `TPF_JIT_DB`, else `tuning.db` in the platform's data folder.

    Raises:
        DatabaseError: when that is in a home folder that cannot be found, as for a user id without an entry and without HOME.
    """
    chosen = path or os.environ.get("TPF_JIT_DB")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        import platformdirs

        return platformdirs.user_data_path("tpf_jit", appauthor=False) / "tuning.db"
    except RuntimeError as error:
        name = str(chosen) if chosen else "the user's tuning database"
        raise DatabaseError(f"the place of {name} is unknown ({error}); set TPF_JIT_DB to the path of a file") from error


def folder_problem(path: Path) -> str | None:
    """What is wrong with a folder in the place of the database, or a file in that of its folder, to follow the database's name;
    None for anything else."""
    # os.path, unlike Path, does not raise where a folder may not be searched.
    if os.path.isdir(path):
        return f"is a folder; {_who_names(path)} a file"
    folder = next((parent for parent in path.absolute().parents if os.path.exists(parent)), None)
    if folder is None or os.path.isdir(folder):
        return None
    return f"cannot exist, as {folder} is no folder; {_who_names(path)} a file in a folder"


def _who_names(path: Path) -> str:
    named = os.environ.get("TPF_JIT_DB")
    return "TPF_JIT_DB names" if named and path == user_database_path() else "the tuning database is"


def load_winners(paths: Sequence[str | os.PathLike[str]] | None = None) -> dict[tuple[str, str, str], tuple[Winner, ...]]:
    """(family `op/direction`, cell, device model) -> the winner and those kept behind it, from the first layer that has any.

    Args:
        paths: databases and JSON-lines files, first wins; the user's database and then the shipped tables when left out.
    """
    merged: dict[tuple[str, str, str], tuple[Winner, ...]] = {}
    for layer in default_layers() if paths is None else [read_layer(path) for path in paths]:
        for (cell, model), entry in layer.winners.items():
            merged.setdefault((cell_family(cell), cell, model), entry)
    return merged


def default_layers(shipped: bool = True) -> list[Layer]:
    """The user's database, then the shipped tables. Never raises for a file."""
    try:
        layers = [read_layer(user_database_path())]
    except DatabaseError as error:
        warn_once("user database", str(error))
        layers = []
    except (ImportError, OSError) as error:
        warn_once("user database", f"the place of the user's tuning database is unknown ({error}); set TPF_JIT_DB")
        layers = []
    return [*layers, read_shipped()] if shipped else layers


def shipped_files() -> list[Path]:
    """The tables that install with the package, one JSON-lines file a device."""
    return sorted(SHIPPED.glob("*.jsonl"))


def read_shipped() -> Layer:
    """The tables that install with the package, as one layer."""
    winners: dict[tuple[str, str], tuple[Winner, ...]] = {}
    statements: trust.Statements = {}
    for path in shipped_files():
        layer = read_layer(path)
        for pair, entry in layer.winners.items():
            winners.setdefault(pair, entry)
        trust.add(statements, layer.statements)
    return Layer("shipped tables", winners, statements=statements)


def read_layer(path: str | os.PathLike[str], timeout: float = BUSY_TIMEOUT_S) -> Layer:
    """A database or a JSON-lines file as a layer; empty, with one warning, when it cannot be read."""
    path = Path(path)
    try:
        if not path.exists():
            return Layer(str(path), problem="there is no such file")
        if wrong := folder_problem(path):
            raise IsADirectoryError(f"it {wrong}")
        if path.suffix == ".jsonl":
            trials = merge.read_lines(path, check=False).trials
            rows = [evidence(identity, row) for identity, row in trials.items()]
            return Layer(str(path), _rank_all(rows), statements=trust.statements(rows))
        with closing(open_readonly(path, timeout)) as connection:
            if not schema.version(connection, path):
                return Layer(str(path))
            said = trust.statements(select_evidence(connection, f"t.status = '{SAME_CODE}'"))
            return Layer(str(path), _winners(connection), statements=said)
    except (sqlite3.Error, TpfError, OSError, ValueError) as error:
        return Layer(str(path), problem=_leave_out(path, error))


def kernel_hashes(path: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Kernel key -> sha256 of the object that was built on this machine. Empty, with one warning, when it cannot be read."""
    return dict(_query(path, "SELECT key, sha256 FROM object"))


def kernel_resources(path: str | os.PathLike[str] | None, key: str) -> dict[str, Any]:
    """Resources of a kernel as its compiler reported them; empty when unknown, with one warning when it cannot be read."""
    rows = _query(path, "SELECT resources FROM kernel WHERE key = ?", (key,))
    try:
        return json.loads(rows[0][0]) if rows else {}
    except ValueError as error:
        warn_once(key, f"resources of kernel {key} are unreadable: {error}")
        return {}


def _query(path: str | os.PathLike[str] | None, sql: str, values: Sequence[object] = ()) -> list[tuple]:
    try:
        path = user_database_path(path)
        if not path.exists():
            return []
        if wrong := folder_problem(path):
            raise IsADirectoryError(f"it {wrong}")
        with closing(open_readonly(path)) as connection:
            return connection.execute(sql, values).fetchall() if schema.version(connection, path) else []
    except (sqlite3.Error, TpfError, OSError, ImportError, RuntimeError) as error:
        _leave_out(path or "(of the user)", error)
        return []


def open_readonly(path: Path, timeout: float = BUSY_TIMEOUT_S, damaged: bool = False) -> sqlite3.Connection:
    """A connection that cannot write, also where the whole folder is read-only.

    Args:
        damaged: read what there is of a file that is shorter than it says, which SQLite refuses otherwise.

    Raises:
        sqlite3.Error: when the file is locked for longer than `timeout` (s), damaged, or cannot be opened.
    """
    address = path.absolute().as_uri()
    try:
        return _connect(f"{address}?mode=ro", timeout, damaged)
    except sqlite3.OperationalError as error:
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
    # SQLite wants to create the shared-memory file of a WAL database beside it; where that is forbidden only `immutable`
    # opens it, without the writes that wait in a WAL file.
    return _connect(f"{address}?mode=ro&immutable=1", timeout, damaged)


def _connect(address: str, timeout: float, damaged: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, timeout=timeout, check_same_thread=False)
    try:
        if damaged:
            # With it SQLite takes the file's length for its page count; nothing can be written all the same.
            connection.execute("PRAGMA writable_schema = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def select_evidence(connection: sqlite3.Connection, where: str = "1", values: Sequence[object] = ()) -> list[Evidence]:
    """The deciding columns of the trials that meet an SQL condition on `t` (trial)."""
    return [Evidence._make(row) for row in connection.execute(f"{_EVIDENCE} WHERE {where}", values)]


def select_trials(
    connection: sqlite3.Connection, where: str = "1", values: Sequence[object] = (), trusted: bool = False
) -> Iterator[tuple[str, TrialRow]]:
    """Stored id and row of the trials that meet an SQL condition on `t` (trial), oldest first.

    Args:
        trusted: take the rows as they are, without checking their fields.

    Raises:
        InvalidInput, ValueError: when a stored row is no valid trial.
    """
    for stored in connection.execute(trial_query(f"WHERE {where} ORDER BY t.date, t.rowid"), values):
        yield stored[0], decode_trial(stored, trusted)


def decode_trial(stored: Sequence, trusted: bool = False) -> TrialRow:
    """A row of the trial query (`trial_query`) as a `TrialRow`; `trusted` as for `select_trials`."""
    values = dict(zip(TRIAL_FIELDS, stored[1:], strict=True))
    for name in ("config", "device", "toolchain", "samples_us", "errors"):
        values[name] = json.loads(values[name])
    values["device"].update(json.loads(values.pop("device_state")))
    if not trusted:
        return TrialRow(**values)
    values["errors"] = {name: float(value) for name, value in values["errors"].items()}
    return TrialRow.trusted(values)


def trial_query(tail: str) -> str:
    """The SQL whose rows `decode_trial` takes, with `tail` (conditions, order) appended."""
    return f"{_TRIALS} {tail}"


def warn_once(subject: str, message: str) -> None:
    """Warn once per subject and message in this process; never raises, even where warnings are errors."""
    if (subject, message) in _warned:
        return
    _warned.add((subject, message))
    try:
        errors.warn(message, DatabaseWarning)
    except DatabaseWarning:
        pass


def _winners(connection: sqlite3.Connection) -> dict[tuple[str, str], tuple[Winner, ...]]:
    # Rows of the search outnumber the finals ten to one and cannot win where finals exist, so they are read for the rest only.
    decisive = f"t.status IN ({_REFUTING}) OR (t.status = 'ok' AND t.grade = 'final')"
    winners = _rank_all(select_evidence(connection, decisive))
    cells = connection.execute("SELECT DISTINCT cell, model FROM trial WHERE status = 'ok' AND grade = 'search'").fetchall()
    searched = {pair for pair in cells if pair not in winners}
    if len(searched) * 4 > len(cells):
        rows = select_evidence(connection, f"t.status IN ('ok', {_REFUTING})")
        winners.update(_rank_all(row for row in rows if (row.cell, row.model) in searched))
    else:
        for pair in searched:
            rows = select_evidence(connection, f"t.cell = ? AND t.model = ? AND t.status IN ('ok', {_REFUTING})", pair)
            winners.update(_rank_all(rows))
    return winners


def _rank_all(rows: Iterable[Evidence]) -> dict[tuple[str, str], tuple[Winner, ...]]:
    cells = defaultdict(list)
    for row in rows:
        cells[row.cell, row.model].append(row)
    ranked = ((pair, tuple(rank(members))) for pair, members in cells.items())
    return {pair: winners for pair, winners in ranked if winners}


def evidence(identity: str, row: TrialRow) -> Evidence:
    """The deciding columns of a row."""
    return Evidence(
        id=identity,
        cell=row.cell,
        model=row.device_model,
        template=row.template,
        config=canonical_json(row.config),
        kernel_key=row.kernel_key,
        source_hash=row.source_hash,
        cubin_sha256=row.cubin_sha256,
        protocol=row.protocol,
        grade=row.grade,
        status=row.status,
        median_us=row.median_us,
        p10_us=row.p10_us,
        p90_us=row.p90_us,
        date=row.date,
        toolchain=canonical_json(row.toolchain),
    )


def _leave_out(path: object, error: Exception) -> str:
    problem = " ".join(str(error).split()) or type(error).__name__
    # The warning names the file already.
    for name, instead in ((f"{path}, ", ""), (f"{path} ", "it ")):
        if problem.startswith(name):
            problem = instead + problem.removeprefix(name)
    warn_once(str(path), f"tuning database {path} was left out: {problem}. `tpf-jit doctor` says how to mend it")
    return problem
