"""All rows of a database or of an exported file, only read: nothing is made, migrated, set aside or mended.

For commands that look and for those that write elsewhere. A file that cannot be read is an error that says so and leaves it as
it is. Standard library only.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from tpf_jit.errors import DatabaseError, TpfError
from tpf_jit.tuning_db import merge, repair, schema
from tpf_jit.tuning_db.reader import evidence, folder_problem, open_readonly, select_trials, shipped_files, warn_once
from tpf_jit.tuning_db.repair import is_damage
from tpf_jit.tuning_db.rows import TrialRow
from tpf_jit.tuning_db.winner import Evidence

_KERNELS = """SELECT k.key, k.template, k.variant, c.fields, k.arch, k.source_hash, t.facts, k.resources
    FROM kernel k JOIN config c ON c.id = k.config JOIN toolchain t ON t.id = k.toolchain"""
_JSON = ("variant", "config", "toolchain", "resources")


def read(path: str | os.PathLike[str]) -> merge.Content:
    """Rows of a database or of an exported `.jsonl` file, by their stored names.

    Raises:
        DatabaseError: there is no such file, or it cannot be read: damaged, locked, of another application, of a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise DatabaseError(f"{path} {folder_problem(path) or 'does not exist'}")
    if path.suffix == ".jsonl":
        return merge.read_lines(path)
    try:
        with closing(open_readonly(path)) as connection:
            if not schema.version(connection, path):
                return merge.Content()
            return merge.Content(dict(select_trials(connection)), _kernels(connection))
    except (sqlite3.Error, OSError, ValueError, UnicodeDecodeError) as error:
        raise DatabaseError(_explained(path, error)) from error


def sound(path: str | os.PathLike[str]) -> merge.Content:
    """As `read`, refusing a database with a row that is not what its name says.

    Raises:
        DatabaseError: see `read`; or a row was altered.
    """
    content = read(path)
    for identity, row in content.trials.items():
        if identity != row.id:
            raise DatabaseError(f"{path}: trial {identity} was altered; `tpf-jit db verify` shows all that is wrong")
    return content


def of_another(path: Path) -> tuple[merge.Content, int]:
    """Rows of a database that are to be added to one of ours, by way of a private copy that is brought to our schema; and how
    many are not what their names say, and left out. Of a damaged one the trials that can be read, with one warning.

    Raises:
        DatabaseError: it cannot be read: locked, of another application, of a newer version, or damaged throughout.
    """
    import tempfile

    try:
        with tempfile.TemporaryDirectory(prefix="tpf_jit_merge_") as folder:
            copy = Path(folder) / "copy.db"
            # Errors are to name the file that was asked for, not the copy.
            with closing(open_readonly(path)) as source, closing(sqlite3.connect(copy)) as target:
                if not schema.version(source, path):
                    return merge.Content(), 0
                source.backup(target)
                repair.check(target, copy)
                schema.migrate(target, path)
                trials, kernels = list(select_trials(target)), _kernels(target)
    except (sqlite3.Error, repair.Damaged, ValueError) as error:
        rows = repair.salvage(path) if is_damage(error) else []
        text = " ".join(str(error).split())
        if rows:
            message = f"tuning database {path} is damaged ({text}) and was left as it is; {len(rows)} trials could be read"
            warn_once(str(path), message)
            return merge.Content({row.id: row for row in rows}), 0
        if isinstance(error, ValueError):
            raise DatabaseError(f"{path} has an unreadable row ({text}); `tpf-jit db verify --db {path}` shows all") from error
        raise DatabaseError(f"{path} cannot be read: {text}") from error
    sound = {identity: row for identity, row in trials if identity == row.id}
    return merge.Content(sound, kernels), len(trials) - len(sound)


def shipped() -> dict[str, TrialRow]:
    """Trials of the tables that install with the package, by id; a table that cannot be read is an error.

    Raises:
        DatabaseError: naming the table and the line.
    """
    trials: dict[str, TrialRow] = {}
    for path in shipped_files():
        trials |= merge.read_lines(path).trials
    return trials


def all_evidence(content: merge.Content) -> list[Evidence]:
    """The deciding columns of all trials."""
    return [evidence(identity, row) for identity, row in content.trials.items()]


def _kernels(connection: sqlite3.Connection) -> dict[str, dict]:
    kernels = {}
    for stored in connection.execute(_KERNELS):
        row = dict(zip(merge.KERNEL_FIELDS, stored, strict=True))
        kernels[row["key"]] = row | {name: json.loads(row[name]) for name in _JSON}
    return kernels


def _explained(path: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    if is_damage(error):
        return (
            f"{path} is damaged ({text}) and was left as it is: `tpf-jit db verify` shows what is wrong, "
            "and the next command that writes to it sets it aside and saves what is readable"
        )
    if isinstance(error, TpfError) or isinstance(error, (ValueError, UnicodeDecodeError)):
        return f"{path} has an unreadable row ({text}); `tpf-jit db verify` shows all"
    return f"{path} cannot be read: {text}"
