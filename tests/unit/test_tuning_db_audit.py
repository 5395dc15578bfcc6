"""What a look at a database file says of it, where it is no sound one of ours: empty, damaged, of others."""

from __future__ import annotations

import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from tuning_samples import trial

from tpf_jit.errors import DatabaseError
from tpf_jit.tuning_db.audit import audit_file, is_empty, is_refused
from tpf_jit.tuning_db.reader import DatabaseWarning
from tpf_jit.tuning_db.store import TuningStore


def make(path: Path, kind: str) -> Path:
    """A file of one of the kinds below."""
    if kind in ("no bytes", "no tables"):
        path.touch()
    if kind == "no tables":
        edit(path, "PRAGMA journal_mode = WAL")
    if kind in ("ours", "truncated", "newer", "no version"):
        with TuningStore(path) as store:
            store.put_trials([trial(us=100 + number, detail="d" * 500) for number in range(50)])
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if kind in ("newer", "no version"):
        edit(path, f"PRAGMA user_version = {99 if kind == 'newer' else 0}")
    if kind == "of others":
        edit(path, "CREATE TABLE bookmark (url TEXT)")
    if kind == "text":
        path.write_text("buy milk\n" * 500)
    return path


def edit(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)


@pytest.mark.parametrize("kind", ["no bytes", "no tables"])
def test_an_empty_file_is_no_problem_but_said(tmp_path: Path, kind: str) -> None:
    path = make(tmp_path / "tuning.db", kind)
    assert is_empty(path) and not is_refused(path)
    with pytest.warns(DatabaseWarning, match=f"{path} is empty; the next write makes it"):
        assert audit_file(path) == []
    TuningStore(path).close()
    assert not is_empty(path)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("truncated", "{path}: database disk image is malformed"),
        ("newer", "{path} was written by a newer tpf_jit"),
        ("no version", "schema version 0 instead of"),
        ("of others", "{path} is an SQLite database of another application"),
        ("text", "{path}: file is not a database"),
    ],
)
def test_problems_name_the_file_once(tmp_path: Path, kind: str, problem: str) -> None:
    path = make(tmp_path / "tuning.db", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (said,) = audit_file(path)
    assert said.startswith(problem.format(path=path))
    assert said.count(str(path)) == ("{path}" in problem)
    assert not is_empty(path)


@pytest.mark.parametrize(
    ("name", "kind", "refused"),
    [
        ("tuning.db", "ours", False),
        ("tuning.db", "truncated", False),
        ("tuning.db", "text", False),
        ("notes.txt", "text", True),
        ("tuning.db", "of others", True),
        ("tuning.db", "newer", True),
    ],
)
@pytest.mark.filterwarnings("ignore::tpf_jit.tuning_db.reader.DatabaseWarning")
def test_refused_is_what_a_write_refuses(tmp_path: Path, name: str, kind: str, refused: bool) -> None:
    path = make(tmp_path / name, kind)
    assert is_refused(path) is refused
    try:
        TuningStore(path).close()
    except DatabaseError:
        assert refused
    else:
        assert not refused
