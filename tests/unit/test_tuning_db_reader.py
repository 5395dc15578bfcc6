"""Reading for the launch path: standard library only, fast, and never an exception for a bad file."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from tuning_samples import H100, H200, kernel, on, open_folder, shape, trial

from tpf_jit.tuning_db import merge, reader
from tpf_jit.tuning_db.reader import DatabaseWarning, kernel_hashes, kernel_resources, load_winners, read_layer
from tpf_jit.tuning_db.rows import SAME_CODE
from tpf_jit.tuning_db.store import TuningStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_warned", set())


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        store.put_trials([trial(us=100), trial(shape(crop=768), us=900, grade="final"), trial(us=90, device=on(H100))])
        store.put_kernel(kernel())
    return path


@pytest.fixture
def world_readable():
    with open_folder() as folder:
        yield folder


def python(code: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)
    if done.returncode == 77:
        pytest.skip("root cannot become another user here, and may write everywhere")
    return done


def one_warning(path: Path, match: str, **options) -> None:
    """The layer is empty and the reason is told exactly once, however often it is read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            layer = read_layer(path, **options)
            assert layer.winners == {}
            assert layer.problem
    told = [str(each.message) for each in caught if issubclass(each.category, DatabaseWarning)]
    assert len(told) == 1, told
    assert match in told[0]
    assert str(path) in told[0]


def test_winners_by_family_cell_and_device(database: Path) -> None:
    winners = load_winners([database])
    cell = trial().cell
    assert set(winners) == {
        ("triangle_attention/forward", cell, H200.model),
        ("triangle_attention/forward", cell, H100.model),
        ("triangle_attention/forward", trial(shape(crop=768)).cell, H200.model),
    }
    (best,) = winners["triangle_attention/forward", cell, H200.model]
    assert (best.us, best.config, best.trial_id) == (100.0, trial().config, trial(us=100).id)


def test_the_reader_and_the_store_agree(tmp_path: Path) -> None:
    """The reader looks at few rows; what it finds must be what all rows say."""
    path = tmp_path / "tuning.db"
    configs = [{"tile_n": tile, "stages": 2, "crop": 0} for tile in (64, 96, 128, 160, 192)]
    cells = [shape(crop=crop) for crop in (128, 256, 384, 512, 640)]
    with TuningStore(path) as store:
        for number, problem in enumerate(cells):
            rows = [trial(problem, us=100 + (7 * i + number) % 5, config=config) for i, config in enumerate(configs)]
            if number % 2:
                rows += [trial(problem, us=101 + i, config=config, grade="final") for i, config in enumerate(configs[:3])]
            if number in (1, 2):
                rows += [trial(problem, status="wrong", config=configs[0])]
            if number == 3:
                rows += [trial(problem, status="wrong", config=config) for config in configs[:3]]
            store.put_trials(rows)
        winners = load_winners([path])
        assert len(winners) == len(cells)
        for (_, cell, model), entry in winners.items():
            assert entry[0] == store.best(cell, model)


def test_text_and_database_give_the_same_winners(database: Path, tmp_path: Path) -> None:
    with TuningStore(database) as store:
        store.export(tmp_path / "rows.jsonl")
    assert load_winners([tmp_path / "rows.jsonl"]) == load_winners([database])


def test_the_first_layer_wins(database: Path, tmp_path: Path) -> None:
    with TuningStore(tmp_path / "second.db") as store:
        store.put_trials([trial(us=50), trial(shape(crop=512), us=300)])
    key = ("triangle_attention/forward", trial().cell, H200.model)
    assert load_winners([database, tmp_path / "second.db"])[key][0].us == 100.0
    assert load_winners([tmp_path / "second.db", database])[key][0].us == 50.0
    assert len(load_winners([database, tmp_path / "second.db"])) == 4


def test_defaults_are_the_user_database_over_the_shipped_tables(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TuningStore(tmp_path / "shipping.db") as store:
        store.put_trials([trial(us=50), trial(shape(crop=512), us=300)])
        (tmp_path / "shipped").mkdir()
        store.export(tmp_path / "shipped" / "h200.jsonl")
    monkeypatch.setattr(reader, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("TPF_JIT_DB", str(database))
    winners = load_winners()
    assert winners["triangle_attention/forward", trial().cell, H200.model][0].us == 100.0
    assert winners["triangle_attention/forward", trial(shape(crop=512)).cell, H200.model][0].us == 300.0


def test_the_shipped_tables_are_sound() -> None:
    files = reader.shipped_files()
    assert files
    for path in files:
        content = merge.read_lines(path, check=True)
        assert "\n".join(content.lines()) + "\n" == path.read_text(encoding="utf-8"), f"{path.name} is not as `export` writes it"
        measured = {row.cubin_sha256 for row in content.trials.values() if (row.grade, row.status) == ("final", "ok")}
        others = [row for row in content.trials.values() if (row.grade, row.status) != ("final", "ok")]
        assert all(row.status == SAME_CODE and row.cubin_sha256 in measured for row in others), "what is said of what is there"


# bad files


def test_missing_files_are_empty_and_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = read_layer(tmp_path / "none" / "tuning.db")
        assert layer.winners == {}
        assert "no such file" in layer.problem
        assert kernel_hashes(tmp_path / "none.db") == {}
    assert not (tmp_path / "none").exists()


def test_an_empty_file_is_an_empty_database(tmp_path: Path) -> None:
    (tmp_path / "tuning.db").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_layer(tmp_path / "tuning.db").problem is None
        assert kernel_hashes(tmp_path / "tuning.db") == {}


def test_garbage(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    path.write_bytes(os.urandom(8192))
    one_warning(path, "not a database")


def test_truncated(database: Path) -> None:
    database.write_bytes(database.read_bytes()[: 4096 * 6])
    one_warning(database, "malformed")


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    one_warning(tmp_path, "was left out: it is a folder")


def test_a_newer_schema(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA user_version = 99")
    one_warning(database, "newer tpf_jit")


def test_another_application(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE bookmark (url TEXT)")
    one_warning(path, "was left out: it is an SQLite database of another application")  # the path once


def test_a_damaged_text_table(tmp_path: Path) -> None:
    path = tmp_path / "h200.jsonl"
    path.write_text('{"format":"tpf_jit.tuning_db","version":1}\n{"kind":')
    one_warning(path, "was left out: line 2")


def test_locked(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        one_warning(database, "locked", timeout=0.1)
        assert time.monotonic() - start < 2


def test_a_writer_does_not_block_readers(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM trial")
        assert len(read_layer(database, timeout=0.1).winners) == 3


def test_warnings_as_errors_do_not_reach_the_launch_path(tmp_path: Path) -> None:
    (tmp_path / "tuning.db").write_bytes(b"garbage" * 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_layer(tmp_path / "tuning.db").problem
        assert kernel_hashes(tmp_path / "tuning.db") == {}
        assert kernel_resources(tmp_path / "tuning.db", "k") == {}


READ_AS_NOBODY = """
    import os, sys, warnings
    from pathlib import Path
    from tpf_jit.tuning_db.reader import kernel_hashes, read_layer
    warnings.simplefilter("error")
    Path("/").as_uri()  # imports what another user may not be allowed to read
    try:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
    except OSError:
        sys.exit(77)
    path = Path(sys.argv[1])
    assert not os.access(path.parent, os.W_OK)
    layer = read_layer(path)
    print(len(layer.winners), layer.problem, len(kernel_hashes(path)), sorted(os.listdir(path.parent)))
"""


def test_a_read_only_folder(database: Path, world_readable: Path) -> None:
    """A WAL database wants to create a file beside itself to be read; in a container image it cannot."""
    path = world_readable / "tuning.db"
    shutil.copy(database, path)
    path.chmod(0o444)
    world_readable.chmod(0o555)
    done = python(READ_AS_NOBODY, path)
    assert done.stdout.strip() == "3 None 1 ['tuning.db']", done.stderr


def test_a_file_that_may_not_be_read(database: Path, world_readable: Path) -> None:
    path = world_readable / "tuning.db"
    shutil.copy(database, path)
    path.chmod(0o000)
    world_readable.chmod(0o555)
    done = python(READ_AS_NOBODY, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 unable to open")


# cost


def test_importing_the_reader_is_cheap() -> None:
    """<= 50 ms beyond the package's own import: CPU time in a new process, best of a few."""
    code = """
        import sys, time, tpf_jit
        start = time.process_time()
        import tpf_jit.tuning_db.reader
        print(time.process_time() - start)
        print(*sorted({"sqlite_utils", "platformdirs", "torch", "numpy"} & set(sys.modules)))
    """
    times = []
    for _ in range(4):
        done = python(code)
        assert done.returncode == 0, done.stderr
        seconds, heavy = done.stdout.split("\n")[:2]
        assert heavy == ""
        times.append(float(seconds))
    print(f"import of the reader: {1e3 * min(times):.1f} ms")
    assert min(times) <= 0.05


def test_reading_ten_thousand_rows_is_quick(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        store.put_trials(
            trial(shape(crop=32 + crop), us=100 + tile, config={"tile_n": tile, "stages": 2, "crop": 0}, grade=grade)
            for crop in range(500)
            for tile in range(16)
            for grade in (("search", "final") if tile < 4 else ("search",))
        )
    seconds = []
    for _ in range(3):
        start = time.process_time()
        layer = read_layer(path)
        seconds.append(time.process_time() - start)
    assert len(layer.winners) == 500
    print(f"reading 10,000 rows of 500 cells: {1e3 * min(seconds):.0f} ms")
    assert min(seconds) < 0.5
