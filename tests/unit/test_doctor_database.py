"""What `tpf-jit doctor` and `tpf-jit db verify` say of the user's database file, and the remedy: the one that works."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tuning_samples import trial

from tpf_jit.cli import doctor
from tpf_jit.cli.app import run
from tpf_jit.tuning_db.reader import DatabaseWarning
from tpf_jit.tuning_db.store import TuningStore


@pytest.fixture
def path(private_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's database, which is not there yet."""
    monkeypatch.setenv("TPF_JIT_DB", str(tmp_path / "own.db"))
    return tmp_path / "own.db"


def test_an_empty_file_is_as_good_as_none(path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert doctor._database().state == doctor.OK
    path.touch()
    found = doctor._database()
    assert (found.state, found.remedy) == (doctor.OK, "")
    assert found.found.startswith(f"{path}, empty (the next write")
    assert not recwarn.list, "the finding says it"
    assert run(["db", "verify"]) == 0
    assert "is empty; the next write makes it" in str(recwarn.pop(DatabaseWarning).message)


def test_a_file_of_others_is_not_promised_to_be_set_aside(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmark (url TEXT)")
    found = doctor._database()
    assert found.state == doctor.FAIL
    assert found.found.startswith(f"{path} is an SQLite database of another application")
    assert found.found.count(str(path)) == 1
    assert "set TPF_JIT_DB to another file" in found.remedy and "set aside" not in found.remedy


def test_a_damaged_file_is_set_aside(path: Path) -> None:
    with TuningStore(path) as store:
        store.put_trial(trial())
    path.write_bytes(path.read_bytes()[:9000])
    found = doctor._database()
    assert found.state == doctor.FAIL and "is set aside at the next write" in found.remedy


def test_a_file_in_the_place_of_the_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("no folder")
    monkeypatch.setenv("TPF_JIT_DB", str(path / "x.db"))
    found = doctor._database()
    assert found.state == doctor.FAIL
    assert found.found == f"{path / 'x.db'} cannot exist, as {path} is no folder; TPF_JIT_DB names a file in a folder"
    assert "TPF_JIT_DB" in found.remedy
