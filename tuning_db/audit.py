"""What `TuningStore.verify` and `tpf-jit db verify` look at: the file, its schema, and every row against the hash of its content.

Standard library only.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tpf_jit.errors import TpfError
from tpf_jit.tuning_db import repair, schema
from tpf_jit.tuning_db.reader import decode_trial, folder_problem, open_readonly, trial_query, warn_once
from tpf_jit.tuning_db.rows import content_hash, device_model, split_cell

_KEYED = {"device": "facts", "toolchain": "facts", "config": "fields"}


def audit_file(path: Path) -> list[str]:
    """All problems of a database file, which is only read: unlike `TuningStore`, this never sets a damaged file aside.

    An empty file has none, but a warning says so: it may not be the file that was meant.
    """
    if wrong := folder_problem(path):
        return [f"{path} {wrong}"]
    try:
        with closing(open_readonly(path)) as connection:
            if schema.is_empty(connection):
                warn_once(str(path), f"tuning database {path} is empty; the next write makes it")
                return []
            return audit(connection, path)
    except (sqlite3.Error, OSError) as error:
        return [f"{path}: {error}"]


def is_empty(path: Path) -> bool:
    """Whether a file is an empty database, as one of no bytes is: the next write makes it. False where it cannot be read."""
    try:
        with closing(open_readonly(path)) as connection:
            return schema.is_empty(connection)
    except (sqlite3.Error, OSError):
        return False


def is_refused(path: Path) -> bool:
    """Whether the next write refuses a file that is no sound database of ours, instead of setting it aside: it is of another
    application or of a newer version, or is not named as databases are.
    """
    try:
        with closing(open_readonly(path)) as connection:
            schema.version(connection, path)
    except TpfError:
        return True
    except sqlite3.Error as error:
        return repair.is_damage(error) and not repair.replaceable(path)
    return False


def audit(connection: sqlite3.Connection, path: Path) -> list[str]:
    """All problems of an open database as sentences; empty when it is sound."""
    try:
        problems = [f"integrity: {found}" for (found,) in connection.execute("PRAGMA integrity_check(20)") if found != "ok"]
        version = schema.version(connection, path)
    except TpfError as error:  # it names the file
        return [str(error)]
    except sqlite3.Error as error:
        return [f"{path}: {error}"]
    if version != schema.SCHEMA_VERSION:
        return [*problems, f"schema version {version} instead of {schema.SCHEMA_VERSION}"]
    for part in (_references, _keyed, _problems, _kernels, _trials):
        try:
            problems += part(connection)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            problems.append(f"{part.__name__.strip('_')}: unreadable ({error})")
    return problems


def _references(connection: sqlite3.Connection) -> Iterator[str]:
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"{table}, row {row}: refers to a missing {parent}"


def _keyed(connection: sqlite3.Connection) -> Iterator[str]:
    for table, column in _KEYED.items():
        for identity, text in connection.execute(f"SELECT id, {column} FROM {table}"):
            try:
                sound = content_hash(json.loads(text)) == identity
            except ValueError as error:
                yield f"{table} {identity[:12]}: not JSON ({error})"
                continue
            if not sound:
                yield f"{table} {identity[:12]}: content does not match its hash"
    for identity, name, model, facts in connection.execute("SELECT id, name, model, facts FROM device"):
        if _facts(facts) is not None and (_facts(facts).get("name", ""), device_model(_facts(facts))) != (name, model):
            yield f"device {identity[:12]}: name or model does not match its facts"


def _problems(connection: sqlite3.Connection) -> Iterator[str]:
    for key, op, direction, shape in connection.execute("SELECT key, op, direction, shape FROM problem"):
        try:
            sound = split_cell(key) == (op, shape, direction)
        except TpfError as error:
            yield f"problem {key}: {error}"
            continue
        if not sound:
            yield f"problem {key}: operation, shape or direction does not match the name"


def _kernels(connection: sqlite3.Connection) -> Iterator[str]:
    for key, variant, resources in connection.execute("SELECT key, variant, resources FROM kernel"):
        if _facts(variant) is None or _facts(resources) is None:
            yield f"kernel {key[:12]}: variant or resources are not JSON objects"


def _trials(connection: sqlite3.Connection) -> Iterator[str]:
    seen: dict[str, str] = {}
    for stored in connection.execute(trial_query("ORDER BY t.rowid")):
        identity = stored[0]
        try:
            row = decode_trial(stored)
        except (TpfError, ValueError, TypeError) as error:
            yield f"trial {identity[:12]}: not a valid row ({error})"
            continue
        if row.id != identity:
            yield f"trial {identity[:12]}: content does not match its hash"
        if row.id in seen:
            yield f"trial {identity[:12]}: the same content as trial {seen[row.id][:12]}"
        seen[row.id] = identity
    models = connection.execute("SELECT t.id FROM trial t JOIN device d ON d.id = t.device WHERE t.model != d.model")
    for (identity,) in models:
        yield f"trial {identity[:12]}: device model does not match its device"


def _facts(text: str) -> dict | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
