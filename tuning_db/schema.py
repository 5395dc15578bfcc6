"""Tables of the tuning database and the steps from one version to the next.

The version is SQLite's `user_version`, one integer in the file header: it changes in the same transaction as the tables, and
the standard-library reader sees it without knowing any table. `application_id` tells our files from those of others.

    device, toolchain, config, problem   what trials refer to, stored once, keyed by content
    kernel                               what a compiled kernel is and needs (portable)
    object                               the object file built on this machine, with its hash (never exported)
    trial                                append-only measurements, keyed by content hash
    lease                                who is working on what, until when

Standard library only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from tpf_jit.errors import DatabaseError

APPLICATION_ID = 0x5450464A
"""ASCII "TPFJ"."""
MIN_SQLITE = (3, 37, 0)
"""First release with STRICT tables."""

_VERSION_1 = (
    "CREATE TABLE device (id TEXT PRIMARY KEY, name TEXT NOT NULL, model TEXT NOT NULL, facts TEXT NOT NULL) STRICT",
    "CREATE TABLE toolchain (id TEXT PRIMARY KEY, facts TEXT NOT NULL) STRICT",
    "CREATE TABLE config (id TEXT PRIMARY KEY, fields TEXT NOT NULL) STRICT",
    "CREATE TABLE problem (key TEXT PRIMARY KEY, op TEXT NOT NULL, direction TEXT NOT NULL, shape TEXT NOT NULL) STRICT",
    """CREATE TABLE kernel (
        key TEXT PRIMARY KEY,
        template TEXT NOT NULL,
        variant TEXT NOT NULL,
        config TEXT NOT NULL REFERENCES config(id),
        arch TEXT NOT NULL,
        source_hash TEXT NOT NULL,
        toolchain TEXT NOT NULL REFERENCES toolchain(id),
        resources TEXT NOT NULL
    ) STRICT""",
    """CREATE TABLE object (
        key TEXT PRIMARY KEY REFERENCES kernel(key),
        sha256 TEXT NOT NULL,
        kind TEXT NOT NULL,
        size INTEGER NOT NULL,
        compile_s REAL,
        date TEXT NOT NULL
    ) STRICT""",
    """CREATE TABLE trial (
        id TEXT PRIMARY KEY,
        template TEXT NOT NULL,
        cell TEXT NOT NULL REFERENCES problem(key),
        config TEXT NOT NULL REFERENCES config(id),
        kernel_key TEXT NOT NULL,
        source_hash TEXT NOT NULL,
        cubin_sha256 TEXT NOT NULL,
        device TEXT NOT NULL REFERENCES device(id),
        model TEXT NOT NULL,
        device_state TEXT NOT NULL,
        toolchain TEXT NOT NULL REFERENCES toolchain(id),
        protocol TEXT NOT NULL,
        samples_us TEXT NOT NULL,
        median_us REAL,
        p10_us REAL,
        p90_us REAL,
        errors TEXT NOT NULL,
        status TEXT NOT NULL,
        detail TEXT NOT NULL,
        grade TEXT NOT NULL,
        date TEXT NOT NULL,
        session TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX trial_by_cell ON trial (cell, model, status, grade)",
    "CREATE INDEX trial_by_evidence ON trial (status, grade, cell, model)",
    """CREATE TABLE lease (
        cell TEXT NOT NULL,
        work TEXT NOT NULL,
        owner TEXT NOT NULL,
        expires REAL NOT NULL,
        PRIMARY KEY (cell, work)
    ) STRICT""",
)


def _create(connection: sqlite3.Connection) -> None:
    for statement in _VERSION_1:
        connection.execute(statement)


Migration = Callable[[sqlite3.Connection], None]

MIGRATIONS: tuple[Migration, ...] = (_create,)
"""Step i takes a database from version i to i + 1. Steps are only ever appended; each is single statements, no script."""

SCHEMA_VERSION = len(MIGRATIONS)
"""The version this code writes. It reads all earlier ones."""


def version(connection: sqlite3.Connection, path: object, newest: int = SCHEMA_VERSION) -> int:
    """Schema version of an open database; 0 for an empty file.

    Raises:
        DatabaseError: for a database of another application, one from a newer tpf_jit, or an SQLite library too old for it.
    """
    if sqlite3.sqlite_version_info < MIN_SQLITE:
        raise DatabaseError(
            f"the tuning database needs SQLite {'.'.join(map(str, MIN_SQLITE))}; this Python has {sqlite3.sqlite_version}"
        )
    application, found, tables = _facts(connection)
    if application != APPLICATION_ID:
        if application or found or tables:
            raise DatabaseError(f"{path} is an SQLite database of another application; name another file with TPF_JIT_DB")
        return 0
    if found > newest:
        raise DatabaseError(
            f"{path} was written by a newer tpf_jit (schema {found}, this version knows up to {newest}): "
            "upgrade tpf_jit, or name another file with TPF_JIT_DB"
        )
    return found


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether a file holds nothing at all, as one of no bytes does: the next write makes it a database."""
    return not any(_facts(connection))


def _facts(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Application id, user version and number of tables, all of one moment: another process may be filling the file."""
    queries = ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    outer = connection.in_transaction
    if not outer:
        connection.execute("BEGIN")
    try:
        # A transaction begins to see with its first read of the file, which not every pragma is.
        connection.execute(queries[2]).fetchone()
        return tuple(connection.execute(query).fetchone()[0] for query in queries)
    finally:
        if not outer:
            connection.execute("ROLLBACK")


def migrate(connection: sqlite3.Connection, path: object, migrations: Sequence[Migration] = MIGRATIONS) -> bool:
    """Bring an open database to the newest version; says whether anything was done. Safe with many processes at once.

    Raises:
        DatabaseError: see `version`.
        sqlite3.Error: from a step; the database is then as it was.
    """
    newest = len(migrations)
    if version(connection, path, newest) == newest:
        return False
    # A deferred BEGIN would read the version first and fail to upgrade its lock when another process migrates as well.
    connection.execute("BEGIN IMMEDIATE")
    try:
        start = version(connection, path, newest)
        for step in migrations[start:]:
            step(connection)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {newest}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return start < newest
