"""One SQLite file opened for reading and writing: short transactions, set aside and rebuilt when damaged, errors as sentences.

Every change is one transaction that begins with the write lock (`BEGIN IMMEDIATE`): a deferred one that reads first fails at
once, whatever the timeout, when another process writes in between. In WAL mode readers never wait. A process killed at any point
leaves the last committed transaction.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tpf_jit.errors import DatabaseError
from tpf_jit.tuning_db import repair, schema
from tpf_jit.tuning_db.reader import folder_problem, open_readonly, warn_once
from tpf_jit.tuning_db.rows import TrialRow

if TYPE_CHECKING:
    from sqlite_utils import Database

T = TypeVar("T")

_ADVICE = "name a file on another disk with TPF_JIT_DB"


class DatabaseFile:
    """An open database file. Usable from several threads, but not across a fork.

    Args:
        path: the file, made with its folder if need be.
        timeout: longest wait for other writers, in seconds.
        restore: writes one salvaged trial into a new file.

    Attributes:
        writable: False where the file or its folder is read-only; reading works then.

    Raises:
        DatabaseError: from every method.
    """

    def __init__(self, path: Path, timeout: float, restore: Callable[[Database, TrialRow], bool]) -> None:
        self.path = path
        self.timeout = timeout
        self.writable = True
        self._restore = restore
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._db: Database | None = None
        self._open()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            db, self._db = self._db, None
            if db is not None and os.getpid() == self._pid:
                db.close()

    def read(self, work: Callable[[Database], T]) -> T:
        """What `work` returns; it must not write."""
        with self._lock:
            db = self._connection()
            try:
                return work(db)
            except (sqlite3.Error, OSError) as error:
                raise self._explained(error) from error
            except ValueError as error:
                raise DatabaseError(f"{self.path} has an unreadable row ({error}); see `tpf-jit db verify`") from error

    def write(self, work: Callable[[Database], T]) -> T:
        """Run `work` in one transaction; all it did is undone when it raises. It may run twice, on a new file the second time."""
        with self._lock:
            self._connection()
            if not self.writable:
                raise DatabaseError(f"{self.path} or its folder is read-only: {_ADVICE}")
            try:
                return self._transaction(work)
            except sqlite3.Error as error:
                if not repair.is_damage(error):
                    raise self._explained(error) from error
                damage = error
            try:
                self._replace(str(damage))
                return self._transaction(work)
            except (sqlite3.Error, OSError) as error:
                raise self._explained(error) from error

    def _connection(self) -> Database:
        if self._db is None:
            raise DatabaseError(f"{self.path} was closed")
        if os.getpid() != self._pid:
            raise DatabaseError(f"{self.path} was opened in another process; open it anew after a fork")
        return self._db

    def _transaction(self, work: Callable[[Database], T]) -> T:
        db = self._connection()
        db.execute("BEGIN IMMEDIATE")
        try:
            result = work(db)
            db.execute("COMMIT")
            return result
        except BaseException:
            db.rollback()
            raise

    def _open(self) -> None:
        try:
            existed = self.path.exists()
        except OSError as error:  # a folder that may not be searched
            raise self._explained(error) from error
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with repair.folder_lock(self.path.parent, exclusive=False, timeout=self.timeout):
                    self._db = self._connect()
            except (sqlite3.Error, repair.Damaged) as error:
                if not repair.is_damage(error):
                    raise
                self._replace(str(error))
        except (sqlite3.Error, repair.Damaged, OSError) as error:
            if not (existed and self._open_readonly(error)):
                raise self._explained(error) from error

    def _connect(self) -> Database:
        from sqlite_utils import Database

        connection = sqlite3.connect(self.path, timeout=self.timeout, check_same_thread=False)
        try:
            # Plugins of sqlite-utils that happen to be installed have no business in this file.
            db = Database(connection, execute_plugins=False)
            if schema.version(connection, self.path):
                repair.check(connection, self.path)
            self._enable_wal(db)
            schema.migrate(connection, self.path)
            db.execute("PRAGMA foreign_keys = ON")
            return db
        except BaseException:
            connection.close()
            raise

    def _enable_wal(self, db: Database) -> None:
        # Changing the mode ignores the busy timeout when another process opens the new file at the same moment.
        end = time.monotonic() + self.timeout
        while True:
            try:
                return db.enable_wal()
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def _open_readonly(self, error: BaseException) -> bool:
        from sqlite_utils import Database

        if not any(text in str(error) for text in ("readonly", "unable to open")) or not self.path.is_file():
            return False
        try:
            connection = open_readonly(self.path, self.timeout)
        except sqlite3.Error:
            return False
        if not schema.version(connection, self.path):
            connection.close()
            return False
        self._db, self.writable = Database(connection, execute_plugins=False), False
        return True

    def _replace(self, problem: str) -> None:
        """Set the damaged file aside, open a new one, and move over what can be saved."""
        if self._db is not None:
            self._db.close()
            self._db = None
        with repair.folder_lock(self.path.parent, exclusive=True, timeout=self.timeout):
            if self._mended_by_another():
                return
            kept = repair.set_aside(self.path)
            self._db = self._connect()
        rows = repair.salvage(kept)
        saved = self._transaction(lambda db: sum([self._restore(db, row) for row in rows]))
        message = f"tuning database {self.path} was damaged ({problem}); it is kept as {kept.name}, {saved} trials were saved"
        warn_once(str(kept), message)

    def _mended_by_another(self) -> bool:
        try:
            db = self._connect()
        except (sqlite3.Error, repair.Damaged) as error:
            if repair.is_damage(error):
                return False
            raise
        # Large files are not looked through when they are opened, but this one gave reason to.
        try:
            (found,) = db.conn.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.Error:
            found = "unreadable"
        if found == "ok":
            self._db = db
        else:
            db.close()
        return found == "ok"

    def _explained(self, error: BaseException) -> DatabaseError:
        text = " ".join(str(error).split())
        if repair.is_damage(error):
            return DatabaseError(f"{self.path} is damaged ({text}); the next write sets it aside and saves what is readable")
        if wrong := folder_problem(self.path):
            return DatabaseError(f"{self.path} {wrong}")
        if "is full" in text or "No space" in text or "File too large" in text:
            return DatabaseError(f"{self.path} cannot grow, the disk is full: free space, or {_ADVICE}")
        if "readonly" in text or "Read-only" in text or isinstance(error, PermissionError):
            return DatabaseError(f"{self.path} or its folder is read-only: {_ADVICE}")
        if "locked" in text:
            return DatabaseError(f"{self.path} was locked by another process for {self.timeout:g} s")
        if "unable to open" in text:
            return DatabaseError(f"{self.path} cannot be opened or made; its folder may be read-only or full: {_ADVICE}")
        if "disk I/O" in text:
            return DatabaseError(f"{self.path}: the disk fails, is full or over its quota ({text}): {_ADVICE}")
        return DatabaseError(f"{self.path}: {text}")
