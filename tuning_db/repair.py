"""Damaged database files: recognised, set aside under another name (never deleted), and salvaged row by row.

A salvaged row is kept only if its content still has the hash it was stored under, so damage cannot invent a measurement.
Standard library only.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.tuning_db.reader import TRIAL_FIELDS, decode_trial, open_readonly
from tpf_jit.tuning_db.rows import TrialRow

MAGIC = b"SQLite format 3\x00"
SUFFIXES = (".db", ".sqlite", ".sqlite3")
DEEP_CHECK_BYTES = 64 << 20
"""Files up to this size are checked page by page when they are opened for writing (some 0.1 s at that size)."""

_REFERRED = {"config": "fields", "device": "facts", "toolchain": "facts"}
_ROW_BYTES = 512
"""Trials take more than this each, with their share of the indexes: a file has no room for more rows than its size over this."""

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


def replaceable(path: Path) -> bool:
    """Whether a damaged file may be set aside: it begins or is named as databases do, and not like something of the user's."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC or path.suffix in SUFFIXES


def set_aside(path: Path) -> Path:
    """Rename a damaged database, with its journal; returns the new path. Hold the exclusive folder lock.

    Raises:
        DatabaseError: when the file was never one of ours, or cannot be renamed.
    """
    if not replaceable(path):
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
    """All trials of a damaged file that can still be read and still match their content hash.

    Tables are read by themselves, by rowid: that needs no index, and goes on after a page that cannot be read.
    """
    rows: dict[str, TrialRow] = {}
    try:
        patience = 1000 + path.stat().st_size // _ROW_BYTES
        with closing(open_readonly(path, damaged=True)) as connection:
            # A text that is not UTF-8 any more would end the reading; so it is a row that does not match its hash.
            connection.text_factory = lambda text: text.decode(errors="replace")
            known = {table: dict(_scan(connection, table, ("id", name), patience)) for table, name in _REFERRED.items()}
            for identity, *values in _scan(connection, "trial", ("id", *TRIAL_FIELDS), patience):
                pairs = zip(TRIAL_FIELDS, values, strict=True)
                stored = [known[name].get(value) if name in known else value for name, value in pairs]
                try:
                    row = decode_trial([identity, *stored])
                except (InvalidInput, ValueError, TypeError, AttributeError):
                    continue
                if row.id == identity:
                    rows[row.id] = row
    except (sqlite3.Error, OSError):
        pass
    return list(rows.values())


def _scan(connection: sqlite3.Connection, table: str, columns: Sequence[str], patience: int) -> Iterator[list]:
    """Rows of a table in the order of their rowids. Where a page cannot be read it goes on behind the rows on it, up to
    `patience` rowids in turn that cannot be read: the end of the table may be what is missing.
    """
    sql = f"SELECT rowid, {', '.join(columns)} FROM {table} NOT INDEXED WHERE rowid >= ? ORDER BY rowid LIMIT ?"
    start, failures, limit = 0, 0, -1
    while failures <= patience and start < 1 << 63:  # SQLite has no larger numbers; damage may have made one of a rowid
        found = False
        try:
            for rowid, *values in connection.execute(sql, (start, limit)):
                found, failures = True, 0
                start = max(start, rowid) + 1  # damage may have put rows out of order
                yield values
            if limit < 0 or not found:
                return
            limit = -1
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            # Python's cursor reads a row ahead and loses it with the error: the next row by itself, then all that follow.
            if limit > 0:
                start, failures = start + 1, failures + 1
            limit = 1
