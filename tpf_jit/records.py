"""Measured claims: one JSON file a run, written by the project's own commands on the machine that measured it.

    write(record)     validate and keep a record under its own name; never overwrites
    validate(record)  what is wrong with it, as sentences
    list_records()    the records of a folder
    check()           which are current: every template they name still has the sources that were measured
    table()           Markdown tables from current records only

The format: kind, date, command, device, versions, method, source_hash (template -> sha256 of its sources), absent_peers, rows.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.record_tables import record_table, row_keys
from tpf_jit.tuning_db.merge import write_atomically
from tpf_jit.tuning_db.rows import normal_date

KINDS = (
    "bench.attention",
    "bench.trimul",
    "bench.openfold3",
    "bench.modules",
    "accuracy.attention",
    "accuracy.trimul",
    "correctness.attention",
    "correctness.trimul",
    "sweep",
    "latency",
)
"""What records are about; tables appear in this order."""

STATES = ("current", "stale", "invalid")

_FIELDS: dict[str, type] = {
    "kind": str,
    "date": str,
    "command": str,
    "device": dict,
    "versions": dict,
    "method": dict,
    "source_hash": dict,
    "rows": list,
}
_TIMED = ("bench.attention", "bench.trimul")


@dataclass(frozen=True)
class Record:
    """A record and the file it lies in. `problems` is empty for a valid one; `content` is empty for an unreadable one."""

    path: Path
    content: dict[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """File name without its ending."""
        return self.path.stem

    @property
    def kind(self) -> str:
        """Kind of the record, "" if it has none."""
        return str(self.content.get("kind", ""))

    @property
    def date(self) -> str:
        """When it was measured, UTC."""
        return str(self.content.get("date", ""))

    @property
    def device(self) -> str:
        """Name of the device, "" if it has none."""
        device = self.content.get("device")
        return str(device.get("name", "")) if isinstance(device, dict) else ""


@dataclass(frozen=True)
class Verdict:
    """Whether a record may still be quoted: `state` is one of `STATES`, `detail` says why it is not current."""

    record: Record
    state: str
    detail: str = ""


def records_folder() -> Path:
    """Where the records of this tree, or of the installed package, lie."""
    from tpf_jit import tuning_db

    return Path(tuning_db.__file__).resolve().parent / "records"


def source_hashes(registry: Any = None) -> dict[str, str]:
    """Template name -> sha256 of its sources in this tree; what a new record carries of the templates it measured."""
    return {template.name: template.source_hash() for template in _registry(registry).templates()}


def write(record: Mapping[str, Any], folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep a record in a file named after its kind, date and device. Existing files are never overwritten.

    Raises:
        InvalidInput: when it breaks the format; the message lists everything that is wrong.
        DatabaseError: when the folder cannot be written.
    """
    problems = validate(record)
    if problems:
        raise InvalidInput.of("record", "; ".join(problems), "a record in the format of `tpf_jit.records`")
    target = Path(folder) if folder is not None else records_folder()
    stem = "-".join([record["kind"], re.sub(r"[-:]", "", record["date"]), _slug(record["device"]["name"])])
    path, number = target / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = target / f"{stem}-{number}.json"
    try:
        write_atomically(path, _text(record))
    except OSError as error:
        raise DatabaseError(f"{path} cannot be written ({error.strerror or error}); choose another folder") from error
    return path


def validate(record: Any) -> list[str]:
    """Everything that breaks the format, as sentences; empty for a valid record."""
    if not isinstance(record, Mapping):
        return [f"a record is a JSON object, not {type(record).__name__}"]
    problems = [f"{name} is missing" for name in _FIELDS if name not in record]
    wrong = [name for name, kind in _FIELDS.items() if name in record and not isinstance(record[name], kind)]
    problems += [f"{name} must be {_article(_FIELDS[name])}" for name in wrong]
    if problems:
        return problems
    return [*_head_problems(record), *_hash_problems(record), *_row_problems(record), *_number_problems(record, "record")]


def list_records(folder: str | os.PathLike[str] | None = None, kind: str | None = None) -> list[Record]:
    """The records of a folder by date, unreadable and invalid ones included (see `Record.problems`).

    Args:
        folder: `records_folder()` when left out; one that does not exist has none.
        kind: only this kind, e.g. "bench.attention", or everything of a group, e.g. "bench".
    """
    paths = sorted((Path(folder) if folder is not None else records_folder()).glob("*.json"))
    records = [read(path) for path in paths]
    chosen = [record for record in records if kind is None or record.kind == kind or record.kind.startswith(f"{kind}.")]
    return sorted(chosen, key=lambda record: (record.date, record.name))


def read(path: str | os.PathLike[str]) -> Record:
    """One record file; never raises for what is in it."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Record(path, {}, (f"unreadable: {error}",))
    return Record(path, content if isinstance(content, dict) else {}, tuple(validate(content)))


def show(name: str, folder: str | os.PathLike[str] | None = None) -> Record:
    """The record of that name: its file, with or without ending, a path, or an unambiguous part of the name.

    Raises:
        InvalidInput: when there is none, or several.
    """
    if Path(name).is_file():
        return read(name)
    records = list_records(folder)
    exact = [record for record in records if name in (record.name, record.path.name)]
    found = exact or [record for record in records if name in record.name]
    if len(found) != 1:
        known = ", ".join(record.name for record in found or records) or "there are none"
        raise InvalidInput.of("name", f"{name!r}, which {len(found) or 'no'} records match", f"one of: {known}")
    return found[0]


def check(folder: str | os.PathLike[str] | None = None, registry: Any = None, kind: str | None = None) -> list[Verdict]:
    """Which records are current: valid, and measured with the sources that every template they rest on has now.

    A record names all templates there were. One whose rows are all of one operation or all of the forward pass rests on the
    templates of that alone: an edit of a gradient kernel leaves it current.

    Args:
        folder, kind: as for `list_records`.
        registry: templates to compare with; those of this process when left out.
    """
    hashes: dict[str, set[str]] = {}
    families: dict[str, tuple[str, str]] = {}
    for template in _registry(registry).templates():
        # The record may name a template or, where one architecture is meant, its family.
        for name in (template.name, f"{template.op}_{template.direction}"):
            hashes.setdefault(name, set()).add(template.source_hash())
            families[name] = template.op, template.direction
    return [_judge(record, hashes, families) for record in list_records(folder, kind)]


def table(kind: str | None = None, folder: str | os.PathLike[str] | None = None, registry: Any = None) -> str:
    """Markdown: a table for every current record that no newer current one covers; "" when there is none.

    Args:
        kind, folder, registry: as for `check`.
    """
    current = [verdict.record for verdict in check(folder, registry, kind) if verdict.state == "current"]
    seen: set[tuple] = set()
    chosen = []
    for record in reversed(current):
        keys = {(record.kind, record.device, key) for key in row_keys(record.content)}
        if not keys <= seen:
            chosen.append(record)
        seen |= keys
    chosen.sort(key=lambda record: (KINDS.index(record.kind), record.device, record.date, record.name))
    return "\n".join(record_table(record.content, record.name) for record in chosen)


def _registry(registry: Any) -> Any:
    if registry is not None:
        return registry
    from tpf_jit.templates import registry as process_wide

    return process_wide


def _judge(record: Record, hashes: Mapping[str, set[str]], families: Mapping[str, tuple[str, str]]) -> Verdict:
    if record.problems:
        return Verdict(record, "invalid", "; ".join(record.problems))
    reasons = []
    rows = record.content["rows"]
    ops = {row.get("op") for row in rows}
    forward_only = all(row.get("pass") == "forward" for row in rows)
    for name, measured in sorted(record.content["source_hash"].items()):
        op, direction = families.get(name, (None, None))
        if op is not None and (None not in ops and op not in ops or forward_only and direction != "forward"):
            continue
        if name not in hashes:
            reasons.append(f"there is no template {name} any more")
        elif measured not in hashes[name]:
            reasons.append(f"the sources of {name} have changed since")
    return Verdict(record, "stale" if reasons else "current", "; ".join(reasons))


def _head_problems(record: Mapping[str, Any]) -> Iterator[str]:
    if record["kind"] not in KINDS:
        yield f"kind is {record['kind']!r}; known: {', '.join(KINDS)}"
    try:
        sound = normal_date(record["date"]) == record["date"]
    except InvalidInput:
        sound = False
    if not sound:
        yield f"date is {record['date']!r}; it must be UTC, like 2026-12-01T10:20:30Z"
    if not record["command"].strip():
        yield "command is empty; it must be the command line that measured"
    if not isinstance(record["device"].get("name"), str) or not record["device"]["name"]:
        yield "device has no name"
    yield from (f"versions has no {name}" for name in ("tpf_jit", "torch", "python") if not record["versions"].get(name))
    if not record["method"]:
        yield "method is empty; it must say how it was measured"
    peers = record.get("absent_peers", {})
    if not isinstance(peers, Mapping) or not all(isinstance(why, str) and why for why in peers.values()):
        yield "absent_peers must give the reason for every name"


def _hash_problems(record: Mapping[str, Any]) -> Iterator[str]:
    if not record["source_hash"]:
        yield "source_hash is empty; it must name every template that was measured"
    for name, value in record["source_hash"].items():
        if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
            yield f"source_hash of {name} is no sha256"


def _row_problems(record: Mapping[str, Any]) -> Iterator[str]:
    if not record["rows"]:
        yield "rows is empty"
    for number, row in enumerate(record["rows"]):
        if not isinstance(row, Mapping) or not row:
            yield f"rows[{number}] is no object with fields"
        elif record["kind"] in _TIMED:
            yield from _timing_problems(number, row)


def _timing_problems(number: int, row: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"rows[{number}] has no {name}" for name in ("op", "pass", "impl") if not row.get(name))
    times = [row.get(name) for name in ("ms_p10", "ms", "ms_p90") if row.get(name) is not None]
    if not _is_number(row.get("ms")) or not all(_is_number(time) and time > 0 for time in times):
        yield f"rows[{number}]: ms must be a time > 0"
    elif times != sorted(times):
        yield f"rows[{number}]: ms lies outside ms_p10..ms_p90"


def _number_problems(value: Any, where: str) -> Iterator[str]:
    """Numbers that JSON does not have; `json` would write and read them all the same."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{where} is {value}"
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _number_problems(item, f"{where}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _number_problems(item, f"{where}[{number}]")
    elif not isinstance(value, (str, int, float, bool, type(None))):
        yield f"{where} is a {type(value).__name__}, which JSON does not have"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _article(kind: type) -> str:
    return {str: "a string", dict: "an object", list: "a list"}[kind]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _text(record: Mapping[str, Any]) -> str:
    """One field and one row a line, so that records can be read and compared as text."""
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items() if name != "rows"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["rows"])
    return "{\n" + ",\n".join([*fields, f' "rows": [\n{rows}\n ]']) + "\n}\n"
