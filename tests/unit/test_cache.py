"""The object cache: what it keeps, what it refuses to load, and what it does when disks, locks or processes fail."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import toy_template as toy

from tpf_jit import cache
from tpf_jit.cache import ObjectStore
from tpf_jit.compiler import CompiledObject, KernelSpec, compile_kernel
from tpf_jit.errors import CacheUntrusted, CacheWarning, CompileFailed, DatabaseError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> toy.ToyBackend:
    monkeypatch.setattr(cache, "_warned", set())
    return toy.install()


@pytest.fixture
def records() -> toy.MemoryRecords:
    return toy.MemoryRecords()


@pytest.fixture
def store(tmp_path: Path, records: toy.MemoryRecords) -> ObjectStore:
    return ObjectStore(tmp_path / "objects", records)


def spec(tile: int = 1, mood: str = "good", log: str = "") -> KernelSpec:
    return KernelSpec.make("toy_forward", toy.ToyShape(), toy.ToyConfig(tile, mood, log))


def test_an_object_comes_back(store: ObjectStore, records: toy.MemoryRecords) -> None:
    assert store.get(spec()) is None
    obj = compile_kernel(spec())
    path = store.put(obj)
    assert store.get(spec()) == path and path.read_bytes() == obj.data and path.name == f"{spec().key}.toy"
    assert store.get(spec(2)) is None
    assert store.resources(spec())["registers"] == 32
    assert records.rows[spec().key]["sha256"] == obj.sha256 and records.rows[spec().key]["size"] == len(obj.data)


def test_folder_and_files_are_private(tmp_path: Path, records: toy.MemoryRecords) -> None:
    old = os.umask(0)
    try:
        path = ObjectStore(tmp_path / "a" / "b", records).put(compile_kernel(spec()))
    finally:
        os.umask(old)
    assert [oct(p.stat().st_mode & 0o777) for p in (path.parent.parent, path.parent, path)] == ["0o700", "0o700", "0o600"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda b: b + b"x"])
def test_a_damaged_entry_is_built_again(store: ObjectStore, fresh: toy.ToyBackend, damage: Callable[[bytes], bytes]) -> None:
    path = store.ensure(spec())
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert store.get(spec()) is None
    assert store.ensure(spec()) == path and path.read_bytes() == good
    assert fresh.compiles == 2


def test_a_foreign_entry_is_not_used(store: ObjectStore, records: toy.MemoryRecords, fresh: toy.ToyBackend) -> None:
    """An object nobody recorded, as if copied from elsewhere under the right name."""
    path = store.ensure(spec())
    records.rows.clear()
    assert store.get(spec()) is None
    assert store.ensure(spec()) == path and fresh.compiles == 2


def test_an_entry_of_another_kernel_under_this_name_is_not_used(store: ObjectStore, fresh: toy.ToyBackend) -> None:
    one, two = store.ensure(spec(1)), store.ensure(spec(2))
    one.write_bytes(two.read_bytes())
    assert store.get(spec(1)) is None and store.get(spec(2)) == two


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_folder_others_may_write_to_is_refused(store: ObjectStore, mode: int) -> None:
    store.ensure(spec())
    store.root.chmod(mode)
    obj = compile_kernel(spec(2))
    for use in (lambda: store.get(spec()), lambda: store.ensure(spec()), lambda: store.put(obj), store.entries):
        with pytest.raises(CacheUntrusted, match=rf"mode 0{mode:o}.*chmod go-w '.*objects'.*TPF_JIT_CACHE"):
            use()
    store.root.chmod(0o755)
    assert store.get(spec()) is not None, "others may read"


def test_a_folder_of_another_user_is_refused(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.ensure(spec())
    facts, usual = list(store.root.stat()), type(store.root).stat
    facts[4] = 4711  # st_uid

    def stat(self: Path, **options: bool) -> os.stat_result:
        return os.stat_result(facts) if self == store.root else usual(self, **options)

    monkeypatch.setattr(type(store.root), "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    with pytest.raises(CacheUntrusted, match="belongs to user id 4711, not to 123456"):
        store.get(spec())
    facts[4] = 0  # a container's
    assert store.get(spec()) is not None


def test_the_folder_is_argument_then_environment_then_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPF_JIT_CACHE", str(tmp_path / "env"))
    assert ObjectStore(tmp_path / "arg").root == tmp_path / "arg"
    assert ObjectStore().root == tmp_path / "env"
    monkeypatch.delenv("TPF_JIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ObjectStore().root == tmp_path / "xdg" / "tpf_jit" / "objects"


def test_the_parent_of_the_platform_folder_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPF_JIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = ObjectStore(None, toy.MemoryRecords())
    store.ensure(spec())
    store.root.parent.chmod(0o777)
    with pytest.raises(CacheUntrusted, match="tpf_jit .mode 0777"):
        store.get(spec())


def only_memory(store: ObjectStore, backend: toy.ToyBackend) -> list[warnings.WarningMessage]:
    """Use a store whose folder cannot be written; the warnings that came."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first, again, other = store.ensure(spec()), store.ensure(spec()), store.ensure(spec(2))
    assert isinstance(first, CompiledObject) and again is first and other.spec == spec(2)
    assert backend.compiles == 2
    assert store.resources(spec())["registers"] == 32
    return [w for w in caught if issubclass(w.category, CacheWarning)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_cannot_be_written_means_memory_and_one_warning(
    store: ObjectStore, fresh: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    caught = only_memory(store, fresh)
    assert len(caught) == 1 and os.strerror(code) in str(caught[0].message) and "TPF_JIT_CACHE" in str(caught[0].message)
    assert list(store.root.glob(".tmp-*")) == [] == store.entries()


@pytest.mark.parametrize("place", ["/proc/tpf_jit/objects", "/dev/null/objects"])
def test_a_place_where_no_folder_can_be_means_memory_and_one_warning(place: str, fresh: toy.ToyBackend) -> None:
    assert len(only_memory(ObjectStore(place, toy.MemoryRecords()), fresh)) == 1


@pytest.mark.parametrize("chosen", ["~tpf_jit-no-such-user/cache", None])
def test_without_a_home_folder_kernels_stay_in_memory(
    chosen: str | None, fresh: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(*arguments: object, **options: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TPF_JIT_CACHE", raising=False)
    monkeypatch.setattr(cache, "_platform_folder", homeless)
    caught = only_memory(ObjectStore(chosen, toy.MemoryRecords()), fresh)
    assert len(caught) == 1 and "home directory" in str(caught[0].message)


def test_without_a_home_folder_hashes_cannot_be_kept_and_this_process_goes_on(
    tmp_path: Path, fresh: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPF_JIT_DB", "~tpf_jit-no-such-user/tuning.db")
    store = ObjectStore(tmp_path / "objects")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = store.ensure(spec())
    assert store.ensure(spec()) == path and fresh.compiles == 1
    assert sum("TPF_JIT_DB" in str(w.message) for w in caught if w.category is CacheWarning) == 1


def test_a_file_in_place_of_the_folder_means_memory(tmp_path: Path, fresh: toy.ToyBackend) -> None:
    (tmp_path / "objects").write_text("")
    assert len(only_memory(ObjectStore(tmp_path / "objects", toy.MemoryRecords()), fresh)) == 1


def test_a_read_only_cache_still_serves(
    store: ObjectStore, records: toy.MemoryRecords, fresh: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.ensure(spec())
    real_open = os.open

    def read_only(name, flags, *args, **kwargs):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return real_open(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ObjectStore(store.root, records).ensure(spec()) == path
    assert fresh.compiles == 1


def test_an_unwritable_database_costs_one_warning_and_this_process_goes_on(
    store: ObjectStore, records: toy.MemoryRecords, fresh: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(row: object) -> None:
        raise DatabaseError("attempt to write a readonly database")

    monkeypatch.setattr(records, "record", fail)
    with pytest.warns(CacheWarning, match="readonly database.*TPF_JIT_DB") as caught:
        path = store.ensure(spec())
        assert store.ensure(spec()) == path and store.ensure(spec(2)).exists()
    assert len(caught) == 1 and fresh.compiles == 2
    assert store.resources(spec())["registers"] == 32
    assert ObjectStore(store.root, records).get(spec()) is None


def test_a_failed_compile_leaves_nothing_and_frees_the_lock(store: ObjectStore) -> None:
    for _ in range(2):
        with pytest.raises(CompileFailed, match="toy compiler says no: C7508$"):
            store.ensure(spec(mood="broken"))
    assert store.entries() == []
    assert store.ensure(spec()).exists()


def test_threads_compile_once(store: ObjectStore, fresh: toy.ToyBackend) -> None:
    """Two stores, as two parts of a program may have; the lock is the operating system's."""
    other = ObjectStore(store.root, store._records)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda s=s: found.append(s.ensure(spec(mood="slow")))) for s in (store, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fresh.compiles == 1 and found[0] == found[1]


ENSURE = """
import sys; sys.path.insert(0, sys.argv[1])
import toy_template as toy
from tpf_jit.cache import ObjectStore
from tpf_jit.compiler import KernelSpec
config = toy.ToyConfig(1, sys.argv[5], sys.argv[4])
store = ObjectStore(sys.argv[2], toy.FileRecords(sys.argv[3]))
print("go", flush=True)
print(store.ensure(KernelSpec.make("toy_forward", toy.ToyShape(), config)), flush=True)
"""


def process(folder: Path, mood: str) -> subprocess.Popen:
    arguments = [str(ROOT / "tests"), str(folder / "objects"), str(folder / "records.jsonl"), str(folder / "log"), mood]
    return subprocess.Popen([sys.executable, "-c", ENSURE, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def test_processes_compile_once(tmp_path: Path) -> None:
    processes = [process(tmp_path, "slow") for _ in range(3)]
    outputs = {p.communicate(timeout=60)[0] for p in processes}
    assert [p.returncode for p in processes] == [0, 0, 0] and len(outputs) == 1
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_killed_process_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = process(tmp_path, "hanging")
    wait_for((tmp_path / "log").exists)
    same_lock = spec(1, "hanging", str(tmp_path / "log"))
    store = ObjectStore(tmp_path / "objects", toy.MemoryRecords())
    compiled = []

    def quick(wanted: KernelSpec) -> CompiledObject:
        compiled.append(wanted)
        return CompiledObject(wanted, b"made by the survivor", "toy", {}, 0.0)

    waiter = threading.Thread(target=store.ensure, args=(same_lock, quick))
    waiter.start()
    time.sleep(0.3)
    assert not compiled, "the lock is held"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    waiter.join(10)
    assert compiled == [same_lock]
    assert store.get(same_lock).read_bytes() == b"made by the survivor"


def test_a_lock_that_never_comes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: toy.ToyBackend) -> None:
    monkeypatch.setattr(cache, "_LOCK_LIMIT_S", 0.2)
    store = ObjectStore(tmp_path / "objects", toy.MemoryRecords())
    with store._locked(spec().key):
        assert store.ensure(spec()).exists()
    assert fresh.compiles == 1


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks_is_tolerated(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.ensure(spec()).exists()


def test_readers_never_see_a_half_written_object(store: ObjectStore) -> None:
    """One thread rewrites an entry over and over, the other reads it: always whole."""
    obj = CompiledObject(spec(), bytes(1 << 20), "toy", {}, 0.0)
    path = store.put(obj)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            store.put(obj)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        sizes = {path.stat().st_size for _ in range(300)} | {len(path.read_bytes()) for _ in range(100)}
    finally:
        stop.set()
        thread.join()
    assert sizes == {1 << 20}


def test_entries_and_prune(store: ObjectStore, records: toy.MemoryRecords) -> None:
    paths = {tile: store.ensure(spec(tile)) for tile in (1, 2, 3, 4)}
    now = time.time()
    for age, tile in enumerate((3, 1, 2, 4)):
        os.utime(paths[tile], (now - age * 100_000,) * 2)
    assert [e.key for e in store.entries()] == [spec(tile).key for tile in (3, 1, 2, 4)]
    assert {e.kind for e in store.entries()} == {"toy"}
    del records.rows[spec(1).key]
    old, young = store.root / ".tmp-old", store.root / ".tmp-young"
    for path in (old, young):
        path.write_bytes(b"left by a killed writer")
    os.utime(old, (now - 1e5,) * 2)
    assert store.prune() == 2, "the unrecorded entry and the old temporary file"
    assert young.exists() and {e.key for e in store.entries()} == {spec(tile).key for tile in (2, 3, 4)}
    size = paths[3].stat().st_size
    assert store.prune(max_bytes=2 * size, keep={spec(4).key}) == 1
    assert {e.key for e in store.entries()} == {spec(tile).key for tile in (3, 4)}
    assert store.get(spec(4)) is not None and store.entries()[0].used > now - 1000, "loading counts as use"


def test_the_database_keeps_the_hashes(private_state: Path, fresh: toy.ToyBackend) -> None:
    """With the real tuning database in place of a dict: another process (another store) verifies by it."""
    path = ObjectStore().ensure(spec())
    assert path.parent == private_state / "objects"
    second = ObjectStore()
    assert second.get(spec()) == path and second.ensure(spec()) == path and fresh.compiles == 1
    assert second.resources(spec())["registers"] == 32
    path.write_bytes(b"something else")
    assert ObjectStore().get(spec()) is None


def test_without_a_database_entries_count_as_unknown(private_state: Path, fresh: toy.ToyBackend) -> None:
    ObjectStore().ensure(spec())
    for file in private_state.glob("user.db*"):
        file.unlink()
    assert ObjectStore().get(spec()) is None
    assert ObjectStore().ensure(spec()).exists() and fresh.compiles == 2
