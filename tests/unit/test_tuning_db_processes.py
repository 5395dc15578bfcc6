"""Many processes at once, processes killed at any point, damaged files, full and read-only disks."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from tuning_samples import H200, kernel, open_folder, shape, trial

from tpf_jit.errors import DatabaseError
from tpf_jit.tuning_db import repair
from tpf_jit.tuning_db.reader import DatabaseWarning, read_layer
from tpf_jit.tuning_db.rows import TrialRow
from tpf_jit.tuning_db.store import TuningStore

UNIT = Path(__file__).parent
PRELUDE = f"import sys; sys.path[:0] = {[str(UNIT), str(UNIT.parents[1])]}\n"


def start(code: str, *arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(processes: list[subprocess.Popen]) -> list[str]:
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        if process.returncode == 77:
            pytest.skip("root cannot become another user here, and may write everywhere")
        assert process.returncode == 0, err
        assert "Warning" not in err, err
        outputs.append(out)
    return outputs


# many at once

WORKER = """
    import time
    from pathlib import Path
    from tuning_samples import H200, kernel, shape, trial
    from tpf_jit.tuning_db.reader import read_layer
    from tpf_jit.tuning_db.store import TuningStore

    path, number, gate = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    while not gate.exists():
        time.sleep(0.001)
    claimed = 0
    with TuningStore(path) as store:
        for step in range(25):
            own = trial(shape(crop=128 + step), us=100 + number, config={"tile_n": number}, session=f"process {number}")
            common = trial(shape(crop=128 + step), us=90, session="all alike")
            store.put_trials([own, common])
            store.put_kernel(kernel(f"{step:064x}", compile_s=float(number)))
            if store.claim(own.cell, f"step {step}", f"process {number}", 60):
                claimed += 1
            layer = read_layer(path)
            assert layer.problem is None and layer.winners[own.cell, H200.model][0].us == 90, layer
            assert store.best(own.cell, H200).us == 90
    print(claimed)
"""


def test_eight_processes_write_and_read_at_once(tmp_path: Path) -> None:
    """From the creation of the file on: all open it, write, claim and read at the same moment."""
    path, gate = tmp_path / "new" / "tuning.db", tmp_path / "gate"
    processes = [start(WORKER, path, number, gate) for number in range(8)]
    time.sleep(0.5)
    gate.touch()
    outputs = finish(processes)
    assert sum(int(out) for out in outputs) == 25, "every piece of work belongs to exactly one process"
    with TuningStore(path) as store:
        assert store.verify() == []
        assert len(store.trials()) == 25 * (8 + 1)
        assert len(store.kernels()) == 25
    assert [item.name for item in path.parent.iterdir()] == ["tuning.db"]


MIGRATING = """
    import sqlite3, time
    from pathlib import Path
    from tpf_jit.tuning_db import schema

    def slow_step(connection):
        connection.execute("ALTER TABLE trial ADD COLUMN colour TEXT")
        time.sleep(0.05)

    path, gate = Path(sys.argv[1]), Path(sys.argv[2])
    while not gate.exists():
        time.sleep(0.001)
    connection = sqlite3.connect(path, timeout=30)
    print(schema.migrate(connection, path, (*schema.MIGRATIONS, slow_step)))
"""


def test_processes_migrate_one_database_at_once(tmp_path: Path) -> None:
    path, gate = tmp_path / "tuning.db", tmp_path / "gate"
    TuningStore(path).close()
    processes = [start(MIGRATING, path, gate) for _ in range(6)]
    time.sleep(0.4)
    gate.touch()
    assert sorted(out.strip() for out in finish(processes)) == ["False"] * 5 + ["True"]


# killed at any point

KILLED = """
    import itertools, os
    from tuning_samples import kernel, shape, trial
    from tpf_jit.tuning_db.store import TuningStore

    session = f"session {os.getpid()}"
    with TuningStore(sys.argv[1]) as store:
        for step in itertools.count():
            row = trial(shape(crop=128 + step % 5), us=100 + step, session=session, detail="x" * (step % 3000))
            store.put_trial(row)
            print(row.id, flush=True)
            store.put_kernel(kernel(f"{step % 50:064x}", size=step + 1))
            store.claim(row.cell, "work", session, 60)
"""


def test_a_killed_writer_leaves_a_sound_database(tmp_path: Path) -> None:
    """Kill -9 from the first moments of the file on; whatever was acknowledged is there."""
    path = tmp_path / "tuning.db"
    acknowledged: set[str] = set()
    moments = random.Random(5)
    for round_number in range(10):
        process = start(KILLED, path)
        if round_number < 4:
            # While the file is made, or a little later.
            while not path.exists() and process.poll() is None:
                time.sleep(0.0005)
            time.sleep(moments.uniform(0, 0.02))
        else:
            first = process.stdout.readline().strip()
            acknowledged.add(first)
            time.sleep(moments.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        acknowledged |= {line for line in out.splitlines() if len(line) == 64}
        if round_number in (3, 6, 9):
            with TuningStore(path) as store:
                assert store.verify() == []
                assert acknowledged <= {row.id for row in store.trials()}
    assert len(acknowledged) > 20
    assert [item.name for item in tmp_path.iterdir()] == ["tuning.db"]


# damaged files


def filling() -> list[TrialRow]:
    return [trial(shape(crop=64 + number), us=100 + number, detail="d" * 500) for number in range(200)]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        store.put_trials(filling())
        store.put_kernel(kernel())
    return path


def reopened(path: Path, match: str) -> tuple[TuningStore, Path]:
    """Open a damaged database: one warning, the file kept, a sound new one in its place."""
    damaged = path.read_bytes()
    with pytest.warns(DatabaseWarning, match=match) as caught:
        store = TuningStore(path)
    assert len(caught) == 1
    (kept,) = [item for item in path.parent.iterdir() if ".damaged-" in item.name and not item.name.endswith(("-wal", "-shm"))]
    assert kept.name in str(caught[0].message)
    assert kept.read_bytes() == damaged
    assert store.verify() == []
    store.put_trial(trial(us=77))
    return store, kept


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\x00"], ids=["no magic", "magic"])
def test_garbage_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tuning.db"
    path.write_bytes(content + random.Random(1).randbytes(9000))
    store, _ = reopened(path, "0 trials were saved")
    assert len(store.trials()) == 1
    store.close()


def test_a_truncated_file_is_set_aside_and_salvaged(filled: Path) -> None:
    """SQLite refuses a file that is shorter than it says; all rows before the cut are in it nevertheless."""
    filled.write_bytes(filled.read_bytes()[: filled.stat().st_size * 97 // 100])
    store, _ = reopened(filled, "trials were saved")
    saved = {row.id for row in store.trials()} - {trial(us=77).id}
    assert 180 <= len(saved) < 200
    assert saved <= {row.id for row in filling()}
    store.close()


def test_what_can_be_read_of_a_truncated_file_is_merged(filled: Path, tmp_path: Path) -> None:
    content = filled.read_bytes()[: filled.stat().st_size * 97 // 100]
    filled.write_bytes(content)
    with TuningStore(tmp_path / "other.db") as store:
        with pytest.warns(DatabaseWarning, match="left as it is; 1[89][0-9] trials could be read"):
            added = store.merge(filled)
        assert added["trials"] == len(store.trials()) >= 180
        assert store.verify() == []
    assert filled.read_bytes() == content


def test_reading_goes_on_behind_every_lost_page(filled: Path) -> None:
    """Pages of rows lost here and there, the first and the last among them, and the index of configurations: of the rows only
    those on a lost page are lost, not those between, nor the last one before it."""
    with closing(sqlite3.connect(filled)) as connection:
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
        sql = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_config_1'"
        (root,) = connection.execute(sql).fetchone()
    content = bytearray(filled.read_bytes())
    places = {}  # row -> its page; no row is so long that it needs a second one
    for row in filling():
        # Ids are in the index as well; before the name of the template they are in the table.
        at = content.find(row.id.encode() + row.template.encode())
        assert content.count(row.id.encode() + row.template.encode()) == 1
        places[row.id] = at // page_size
    pages = sorted(set(places.values()))
    lost = {pages[0], pages[len(pages) // 3], pages[len(pages) // 2], pages[len(pages) // 2 + 1], pages[-1]}
    for page in (*lost, root - 1):
        content[page * page_size : (page + 1) * page_size] = bytes(page_size)
    filled.write_bytes(content)
    assert {row.id for row in repair.salvage(filled)} == {name for name, page in places.items() if page not in lost}


def test_a_rowid_that_damage_made_huge_ends_the_reading() -> None:
    class Connection:
        def execute(self, sql: str, values: tuple[int, int]):
            if values[0] > 2**63 - 1:
                raise OverflowError("as SQLite's module does")
            yield 2**63 - 1, "a"
            raise sqlite3.DatabaseError("database disk image is malformed")

    assert list(repair._scan(Connection(), "trial", ("id",), 5)) == [["a"]]


def test_salvage_of_what_is_no_database_of_ours(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE bookmark (url TEXT)")
    (tmp_path / "noise.db").write_bytes(os.urandom(9000))
    assert repair.salvage(tmp_path / "other.db") == repair.salvage(tmp_path / "noise.db") == []


def test_what_is_still_readable_moves_over(filled: Path) -> None:
    """A page of zeros in the middle of the rows and one row altered: those around are kept, and none that is not as it was."""
    with closing(sqlite3.connect(filled)) as connection:
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
    content = bytearray(filled.read_bytes())
    needle = trial(shape(crop=64 + 100), us=200, detail="d" * 500).id.encode()
    page = content.find(b"d" * 500, content.find(needle)) // page_size
    content[page * page_size : (page + 1) * page_size] = bytes(page_size)
    altered = content.find(b"d" * 500)
    assert altered // page_size != page
    content[altered : altered + 4] = b"else"
    filled.write_bytes(content)
    original = {row.id for row in filling()}
    store, _ = reopened(filled, r"(1[0-9][0-9]) trials were saved")
    saved = {row.id for row in store.trials()} - {trial(us=77).id}
    assert 190 <= len(saved) < 200
    assert saved <= original
    store.close()


def test_damage_found_while_writing_is_mended_in_place(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files are not looked through when they are opened; the write that meets the damage starts anew and succeeds."""
    monkeypatch.setattr(repair, "DEEP_CHECK_BYTES", 0)
    with closing(sqlite3.connect(filled)) as connection:
        page_size = connection.execute("PRAGMA page_size").fetchone()[0]
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trial_by_cell'").fetchone()
    content = bytearray(filled.read_bytes())
    content[(root - 1) * page_size : root * page_size] = b"\xff" * page_size
    filled.write_bytes(content)
    with TuningStore(filled) as store:
        with pytest.warns(DatabaseWarning, match="200 trials were saved"):
            store.put_trial(trial(us=55))
        assert len(store.trials()) == 201
        assert store.verify() == []


OPENING = """
    import time, warnings
    from pathlib import Path
    from tuning_samples import shape, trial
    from tpf_jit.tuning_db.store import TuningStore

    path, number, gate = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    while not gate.exists():
        time.sleep(0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with TuningStore(path) as store:
            store.put_trial(trial(us=50 + number))
    print(len(caught))
"""


def test_processes_that_find_the_damage_together_set_it_aside_once(tmp_path: Path) -> None:
    path, gate = tmp_path / "tuning.db", tmp_path / "gate"
    path.write_bytes(b"SQLite format 3\x00" + random.Random(2).randbytes(9000))
    processes = [start(OPENING, path, number, gate) for number in range(6)]
    time.sleep(0.5)
    gate.touch()
    assert sum(int(out) for out in finish(processes)) == 1
    with TuningStore(path) as store:
        assert len(store.trials()) == 6
        assert store.verify() == []
    assert sum(".damaged-" in item.name for item in tmp_path.iterdir()) == 1


def test_a_file_that_was_never_a_database_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("buy milk\n" * 500)
    with pytest.raises(DatabaseError, match="not a tuning database"):
        TuningStore(path)
    assert path.read_text().startswith("buy milk")
    assert [item.name for item in tmp_path.iterdir()] == ["notes.txt"]


# disks


def test_a_full_disk(tmp_path: Path) -> None:
    with TuningStore(tmp_path / "tuning.db") as store:
        store.put_trial(trial())
        pages = store._file._db.execute("PRAGMA page_count").fetchone()[0]
        store._file._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(DatabaseError, match="disk is full: free space, or name a file on another disk with TPF_JIT_DB"):
            for number in range(100):
                store.put_trial(trial(us=200 + number, detail="x" * 2000))
        stored = len(store.trials())
        assert store.verify() == []
        store._file._db.execute("PRAGMA max_page_count = 1000000")
        store.put_trial(trial(us=1))
        assert len(store.trials()) == stored + 1


LIMITED = """
    import resource, signal
    from tuning_samples import shape, trial
    from tpf_jit.errors import DatabaseError
    from tpf_jit.tuning_db.store import TuningStore

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with TuningStore(sys.argv[1]) as store:
        store.put_trial(trial())
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        stored = 1
        try:
            for number in range(1000):
                store.put_trial(trial(us=200 + number, detail="x" * 3000))
                stored += 1
        except DatabaseError as error:
            print(stored, error)
"""


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    """A quota: the operating system fails the write itself. What was stored before stays."""
    path = tmp_path / "tuning.db"
    (out,) = finish([start(LIMITED, path)])
    stored, message = out.split(" ", 1)
    assert "full" in message and "TPF_JIT_DB" in message
    with TuningStore(path) as store:
        assert len(store.trials()) >= int(stored) > 1
        assert store.verify() == []


READ_ONLY = """
    import os
    from pathlib import Path
    from tuning_samples import trial
    from tpf_jit.errors import DatabaseError
    from tpf_jit.tuning_db.store import TuningStore

    Path("/").as_uri()  # imports what another user may not be allowed to read
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
    except OSError:
        sys.exit(77)
    path = Path(sys.argv[1])
    with TuningStore(path) as store:
        print(store.writable, len(store.trials()), store.verify())
        try:
            store.put_trial(trial(us=1))
        except DatabaseError as error:
            print(error)
    try:
        TuningStore(path.with_name("another.db"))
    except DatabaseError as error:
        print(error)
    try:
        TuningStore(path.parent / "folder" / "tuning.db")
    except DatabaseError as error:
        print(error)
    print(os.listdir(path.parent))
"""


def test_a_read_only_folder_reads_and_refuses_to_write(tmp_path: Path) -> None:
    with TuningStore(tmp_path / "tuning.db") as store:
        store.put_trial(trial())
    with open_folder() as folder:
        path = folder / "tuning.db"
        shutil.copy(tmp_path / "tuning.db", path)
        path.chmod(0o444)
        folder.chmod(0o555)
        (out,) = finish([start(READ_ONLY, path)])
    lines = out.splitlines()
    assert lines[0] == "False 1 []"
    assert "read-only" in lines[1] and "TPF_JIT_DB" in lines[1]
    assert "cannot be opened or made" in lines[2] and "TPF_JIT_DB" in lines[2]
    assert "read-only" in lines[3] and "TPF_JIT_DB" in lines[3]
    assert lines[4] == "['tuning.db']"


def test_a_lock_that_is_not_released(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningStore(path, timeout=0.2) as store, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="locked by another process for 0.2 s"):
            store.put_trial(trial())
        assert store.trials() == []
        other.execute("ROLLBACK")
        store.put_trial(trial())


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="is a folder"):
        TuningStore(tmp_path)


@pytest.mark.parametrize("below", ["x.db", "more/x.db"])
def test_a_file_in_the_place_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / below
    said = f"{path} cannot exist, as {tmp_path / 'file'} is no folder; "
    with pytest.raises(DatabaseError, match=re.escape(f"{said}the tuning database is a file in a folder")):
        TuningStore(path)
    monkeypatch.setenv("TPF_JIT_DB", str(path))
    with pytest.raises(DatabaseError, match=re.escape(f"{said}TPF_JIT_DB names a file in a folder")):
        TuningStore()


def test_threads_share_a_store(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with TuningStore(tmp_path / "tuning.db") as store, ThreadPoolExecutor(8) as pool:
        rows = [trial(us=100 + number) for number in range(80)]
        assert sorted(pool.map(store.put_trial, rows)) == sorted(row.id for row in rows)
        assert len(store.trials()) == 80
        assert store.verify() == []


def test_readers_are_not_disturbed_by_repair(filled: Path) -> None:
    """A layer that was read stays as it was; the next read sees the new file."""
    before = read_layer(filled)
    filled.write_bytes(os.urandom(5000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with TuningStore(filled) as store:
            store.put_trial(trial(us=42))
    assert len(before.winners) == 200
    assert read_layer(filled).winners[trial().cell, H200.model][0].us == 42
