"""Damaged database files: recognised, set aside under another name (never deleted), and salvaged row by row.

A salvaged row is kept only if its content still has the hash it was stored under, so damage cannot invent a measurement.
Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.tuning_db.reader import decode_trial, open_readonly, trial_query
from tpf_jit.tuning_db.rows import TrialRow

MAGIC = b"SQLite format 3\x00"
SUFFIXES = (".db", ".sqlite", ".sqlite3")
DEEP_CHECK_BYTES = 64 << 20
"""Files up to this size are checked page by page when they are opened for writing (some 0.1 s at that size)."""

_CODES = (11, 26)  # SQLITE_CORRUPT, SQLITE_NOTADB
_MESSAGES = ("malformed", "not a database", "database corruption")


class Damaged(Exception):
    """The file is no sound database; callers set it aside."""


def is_damage(error: BaseException) -> bool:
    """Whether an SQLite error means that the file itself is bad, rather than busy, full or forbidden."""
    if isinstance(error, Damaged):
        return True
    code = getattr(error, "sqlite_errorcode", None)  # Python 3.11
    if code is not None:
        return code & 0xFF in _CODES
    return isinstance(error, sqlite3.DatabaseError) and any(text in str(error) for text in _MESSAGES)


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raises Damaged when the pages or indexes of an open file are inconsistent; large files are not looked through."""
    if path.stat().st_size <= DEEP_CHECK_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(found)


@contextmanager
def folder_lock(folder: Path, exclusive: bool, timeout: float) -> Iterator[None]:
    """Keep others from setting a file of this folder aside (shared), or everybody from opening one (exclusive).

    Moving a database away while another process opens it could pair one file with the other's journal. The lock is on the
    folder itself: it leaves no file behind and goes when the process does. File systems without such locks go without.

    Raises:
        DatabaseError: after `timeout` seconds.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _acquire(handle, folder, exclusive, timeout)
        yield
    finally:
        os.close(handle)


def _acquire(handle: int, folder: Path, exclusive: bool, timeout: float) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise DatabaseError(f"{folder} was locked by another process for {timeout:.0f} s") from None
            time.sleep(0.01)
        except OSError:
            return


def set_aside(path: Path) -> Path:
    """Rename a damaged database, with its journal; returns the new path. Hold the exclusive folder lock.

    Raises:
        DatabaseError: when the file was never one of ours, or cannot be renamed.
    """
    with path.open("rb") as file:
        genuine = file.read(len(MAGIC)) == MAGIC
    if not genuine and path.suffix not in SUFFIXES:
        raise DatabaseError(f"{path} is not a tuning database; name another file with TPF_JIT_DB or the path argument")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = path.with_name(f"{path.name}.damaged-{stamp}-{os.getpid()}")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.damaged-{stamp}-{os.getpid()}-{number}")
    try:
        # The database last: a crash in between leaves a damaged file, not a new one beside an old journal.
        for suffix in ("-wal", "-journal", "-shm", ""):
            part = path.with_name(path.name + suffix)
            if part.exists():
                os.replace(part, target.with_name(target.name + suffix))
    except OSError as error:
        raise DatabaseError(f"{path} is damaged and cannot be set aside ({error.strerror}); move it away by hand") from error
    return target


def salvage(path: Path) -> list[TrialRow]:
    """All trials of a damaged file that can still be read and still match their content hash."""
    rows: dict[str, TrialRow] = {}
    try:
        with closing(open_readonly(path)) as connection:
            # From both ends, as a bad page stops the scan.
            for order in ("ASC", "DESC"):
                _collect(connection, order, rows)
    except (sqlite3.Error, OSError):
        pass
    return list(rows.values())


def _collect(connection: sqlite3.Connection, order: str, rows: dict[str, TrialRow]) -> None:
    try:
        for stored in connection.execute(trial_query(f"ORDER BY t.rowid {order}")):
            try:
                row = decode_trial(stored)
            except (InvalidInput, ValueError, TypeError):
                continue
            if row.id == stored[0]:
                rows[row.id] = row
    except (sqlite3.Error, UnicodeDecodeError):
        pass
