"""The object cache: compiled kernels on disk, named by content key, checked before they are loaded.

A cached object is native code that runs with the user's rights, so an entry is used only if

* the folder (argument, else TPF_JIT_CACHE, else the platform's cache folder) belongs to this user and nobody else may write
  to it; otherwise CacheUntrusted is raised;
* its sha256 is the one the tuning database recorded when this user compiled it; anything else (truncated, corrupted, foreign)
  is not used but built again, with a log line.

Writers are atomic: temporary file, fsync, rename. Two processes that want the same kernel take an OS lock, so one compiles
and the other finds the result; the lock vanishes with its process. A file system without locks costs a duplicate compile
at worst. Where nothing can be written (read-only, full, no permission) kernels live in memory, with one CacheWarning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpf_jit import errors
from tpf_jit.errors import CacheUntrusted, CacheWarning, TpfError
from tpf_jit.object_records import DatabaseRecords, KernelRecords

if TYPE_CHECKING:
    from tpf_jit.compiler import CompiledObject, KernelSpec

log = logging.getLogger("tpf_jit")

_LOCK_LIMIT_S = 300.0
_LOCK_POLL_S = 0.05
_TEMPORARY_LIMIT_S = 3600.0
_LOCKS = ".locks"
_warned: set[str] = set()
_warned_lock = threading.Lock()


@dataclass(frozen=True)
class Entry:
    """One object in the cache."""

    key: str
    kind: str
    path: Path
    size: int
    """Bytes."""
    used: float
    """Seconds since the epoch when it was last written or loaded (to the day)."""


class ObjectStore:
    """The objects of one cache folder. Cheap to create; touches the disk when used. Thread- and process-safe.

    Args:
        root: folder; by default TPF_JIT_CACHE, else the platform's cache folder for tpf_jit.
        store: where hashes are recorded; by default the user's tuning database.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, store: KernelRecords | None = None) -> None:
        self._chosen = root
        self._records: KernelRecords = store if store is not None else DatabaseRecords()
        self._memory: dict[str, CompiledObject] = {}
        self._resources: dict[str, dict[str, Any]] = {}
        self._unrecorded: dict[str, str] = {}

    @property
    def root(self) -> Path:
        """The cache folder; it need not exist yet. Raises OSError where it lies in a home folder that cannot be found."""
        chosen = self._chosen or os.environ.get("TPF_JIT_CACHE")
        try:
            return Path(chosen).expanduser().absolute() if chosen else _platform_folder() / "objects"
        except RuntimeError as error:
            raise FileNotFoundError(errno.ENOENT, f"its place is unknown: {error}", chosen) from error

    def get(self, spec: KernelSpec) -> Path | None:
        """The verified object of a kernel, or None if there is none or it fails the check.

        Raises CacheUntrusted if others may write to the folder.
        """
        try:
            root = self.root
        except OSError:
            return None
        if not self._trusted(root):
            return None
        for path in self._paths(root, spec.key):
            if self._verified(path, spec.key):
                _touch(path)
                return path
        return None

    def put(self, obj: CompiledObject) -> Path | None:
        """Store a compiled object and record its hash; None if nothing can be written (it is then kept in memory).

        Raises CacheUntrusted if others may write to the folder.
        """
        key, where = obj.spec.key, "the object cache"
        self._resources[key] = obj.resources
        try:
            root = self.root
            where = f"the object cache {root}"
            self._prepare(root)
            # Before the file, so that no process ever sees an entry without its hash.
            self._record(obj)
            path = root / f"{key}.{obj.kind}"
            _write(path, obj.data)
        except OSError as error:
            self._memory[key] = obj
            _warn_once(
                where,
                f"{where} cannot be written ({error.strerror or error}): kernels stay in memory, and the next "
                "process compiles them again; remedy: set TPF_JIT_CACHE to a writable folder",
            )
            return None
        return path

    def _record(self, obj: CompiledObject) -> None:
        try:
            self._records.record(obj.to_row())
        except (OSError, TpfError, ImportError) as error:
            self._unrecorded[obj.spec.key] = obj.sha256
            _warn_once(
                "records",
                f"the tuning database cannot be written ({error}): the next process cannot verify cached kernels and compiles "
                "them again; remedy: set TPF_JIT_DB to a writable file",
            )

    def ensure(
        self, spec: KernelSpec, compile: Callable[[KernelSpec], CompiledObject] | None = None
    ) -> Path | CompiledObject:
        """The object of a kernel, compiled if need be: its verified file, or the object itself if nothing can be written.

        Args:
            compile: how to compile; `compiler.compile_kernel` by default.

        Raises what `compile` raises, and CacheUntrusted.
        """
        if compile is None:
            from tpf_jit.compiler import compile_kernel as compile
        key = spec.key
        found = self._memory.get(key) or self.get(spec)
        if found is not None:
            return found
        with self._locked(key):
            found = self._memory.get(key) or self.get(spec)
            if found is not None:
                return found
            obj = compile(spec)
            return self.put(obj) or obj

    def keeps(self, spec: KernelSpec) -> bool:
        """Whether the next process finds a kernel that this one has compiled: its object was written, and its hash recorded."""
        return spec.key not in self._memory and spec.key not in self._unrecorded

    def resources(self, spec: KernelSpec) -> dict[str, Any]:
        """What is recorded about a compiled kernel (see `inspect_sass`); empty if nothing is."""
        return self._resources.get(spec.key) or self._records.resources(spec.key)

    def entries(self) -> list[Entry]:
        """Objects in the folder, most recently used first, whether verified or not. Raises CacheUntrusted."""
        root = self.root
        if not self._trusted(root):
            return []
        found = []
        for path in root.iterdir():
            key, _, kind = path.name.partition(".")
            if len(key) == 64 and kind and path.is_file():
                facts = path.stat()
                found.append(Entry(key, kind, path, facts.st_size, facts.st_mtime))
        return sorted(found, key=lambda entry: (-entry.used, entry.key))

    def prune(self, max_bytes: int | None = None, keep: Collection[str] = ()) -> int:
        """Remove what cannot be used (unrecorded, damaged, left by a killed writer), and with `max_bytes` the least recently
        used entries beyond that many bytes. Keys in `keep` stay if they are sound. Returns how many files went."""
        removed, sound = 0, []
        for entry in self.entries():
            if self._verified(entry.path, entry.key):
                sound.append(entry)
            else:
                removed += _remove(entry.path)
        total = sum(entry.size for entry in sound if entry.key in keep)
        for entry in sound:
            if entry.key in keep:
                continue
            if max_bytes is not None and total + entry.size > max_bytes:
                removed += _remove(entry.path)
            else:
                total += entry.size
        return removed + _sweep(self.root)

    def _paths(self, root: Path, key: str) -> list[Path]:
        """Candidate files of a key; shared libraries first, as they load fastest."""
        found = [path for path in root.glob(f"{key}.*") if path.is_file()]
        return sorted(found, key=lambda path: (path.suffix != ".so", path.suffix))

    def _verified(self, path: Path, key: str) -> bool:
        expected = self._unrecorded.get(key) or self._records.sha256(key)
        try:
            actual = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            log.info("cache entry %s cannot be read: %s", path.name, error.strerror)
            return False
        if actual == expected:
            return True
        reason = "is not recorded in the tuning database" if expected is None else "is damaged"
        log.info("cache entry %s %s and is not used", path.name, reason)
        return False

    def _trusted(self, root: Path) -> bool:
        """Whether the folder exists. Raises CacheUntrusted if it may not be used."""
        folders = [root] if self._chosen or os.environ.get("TPF_JIT_CACHE") else [root.parent, root]
        for folder in folders:
            try:
                facts = folder.stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                log.info("cache folder %s cannot be read: %s", folder, error.strerror)
                return False
            if not stat.S_ISDIR(facts.st_mode):
                return False
            _check_owner(folder, facts)
        return True

    def _prepare(self, root: Path) -> None:
        """Create the folder and what is missing above it, for this user only, and check it."""
        missing = []
        folder = root
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        if not self._trusted(root):
            raise NotADirectoryError(errno.ENOTDIR, "it is not a folder", str(root))

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the OS lock of a key. Locks are few files that stay; being flocks, they are free when their holder is gone."""
        descriptor = None
        try:
            root = self.root
            self._prepare(root)
            (root / _LOCKS).mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(root / _LOCKS / key[:2], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            _wait_for_lock(descriptor, key)
        except OSError as error:
            # Read-only folders and network file systems without locks: the rename is atomic all the same.
            log.debug("no lock for %s: %s", key, error)
        try:
            yield
        finally:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for descriptors that a fork has copied
                os.close(descriptor)


def _platform_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_path("tpf_jit"))


def _check_owner(folder: Path, facts: os.stat_result) -> None:
    remedy = "or set TPF_JIT_CACHE to a folder of your own"
    # Root's too, as in a container that comes with its kernels: root could replace this package as well.
    if facts.st_uid not in (os.geteuid(), 0):
        raise CacheUntrusted(
            f"the object cache folder {folder} belongs to user id {facts.st_uid}, not to {os.geteuid()}: loading kernels from it "
            f"would run another user's code; remedy: remove it, {remedy}"
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheUntrusted(
            f"others may write to the object cache folder {folder} (mode {stat.S_IMODE(facts.st_mode):04o}): loading kernels "
            f"from it would run their code; remedy: chmod go-w '{folder}' if you trust its content, {remedy}"
        )


def _wait_for_lock(descriptor: int, key: str) -> None:
    deadline, told = time.monotonic() + _LOCK_LIMIT_S, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                log.warning("gave up waiting for another process that compiles %s; compiling it here too", key[:24])
                return
            if not told:
                log.info("waiting for another process that compiles %s", key[:24])
                told = True
            time.sleep(_LOCK_POLL_S)


def _write(path: Path, data: bytes) -> None:
    """Put a file in place atomically and durably."""
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _sweep(root: Path) -> int:
    """Remove temporary files of writers that were killed long ago."""
    limit = time.time() - _TEMPORARY_LIMIT_S
    with contextlib.suppress(OSError):
        return sum(_remove(path) for path in root.glob(".tmp-*") if path.stat().st_mtime < limit)
    return 0


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _touch(path: Path) -> None:
    """Note the use of an entry, at most once a day."""
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime > 86400:
            os.utime(path)


def _warn_once(subject: str, message: str) -> None:
    with _warned_lock:
        if subject in _warned:
            return
        _warned.add(subject)
    errors.warn(message, CacheWarning)
