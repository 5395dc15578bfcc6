"""What is known about compiled objects: the sha256 that an object must have to be loaded, and the resources it uses.

Kept apart from the objects (`tpf_jit.cache`), in the user's tuning database.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from tpf_jit.errors import DatabaseError

log = logging.getLogger("tpf_jit")


class KernelRecords(Protocol):
    """Where the sha256 of every object compiled by this user is kept. `DatabaseRecords` keeps it in the tuning database."""

    def sha256(self, key: str) -> str | None:
        """Recorded hash of an object, or None."""
        ...

    def resources(self, key: str) -> dict[str, Any]:
        """Recorded resources of a kernel; empty if unknown."""
        ...

    def record(self, row: Mapping[str, Any]) -> None:
        """Keep a compiled kernel (`CompiledObject.to_row`). Raises OSError or DatabaseError if it cannot be written."""
        ...


class DatabaseRecords:
    """`KernelRecords` in the tuning database: read with the standard library, written (rarely) with sqlite-utils.

    Args:
        path: database file; the user's by default.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._hashes: dict[str, str] | None = None
        self._lock = threading.Lock()

    def sha256(self, key: str) -> str | None:
        """Recorded hash of an object, or None. Reads the database once, and again for a key that is not known yet."""
        with self._lock:
            if self._hashes is None or key not in self._hashes:
                self._hashes = self._read()
            return self._hashes.get(key)

    def resources(self, key: str) -> dict[str, Any]:
        """Recorded resources; empty if unknown or unreadable."""
        from tpf_jit.tuning_db import reader

        try:
            return reader.kernel_resources(self._path, key)
        except (OSError, DatabaseError) as error:
            log.info("kernel resources cannot be read: %s", error)
            return {}

    def record(self, row: Mapping[str, Any]) -> None:
        """Keep a compiled kernel; idempotent."""
        from tpf_jit.tuning_db.store import TuningStore

        with TuningStore(self._path) as store:
            store.put_kernel(dict(row))
        with self._lock:
            if self._hashes is not None:
                self._hashes[row["key"]] = row["sha256"]

    def _read(self) -> dict[str, str]:
        from tpf_jit.tuning_db import reader

        try:
            return reader.kernel_hashes(self._path)
        except (OSError, DatabaseError) as error:
            log.info("kernel hashes cannot be read, cached kernels count as unknown: %s", error)
            return {}
