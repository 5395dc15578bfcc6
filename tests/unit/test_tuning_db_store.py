"""The read-write store: rows in and out, leases, exchange, verification, schema versions, refusals."""

from __future__ import annotations

import itertools
import json
import os
import re
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from tuning_samples import H100, H200, kernel, on, shape, trial

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.tuning_db import merge, schema
from tpf_jit.tuning_db.reader import kernel_hashes, kernel_resources, user_database_path
from tpf_jit.tuning_db.rows import canonical_json
from tpf_jit.tuning_db.store import TuningStore


@pytest.fixture
def store(tmp_path: Path):
    with TuningStore(tmp_path / "sub" / "folder" / "tuning.db") as opened:
        yield opened


def tile(number: int) -> dict:
    return {"tile_n": number, "stages": 2, "crop": 0}


def edit(path: Path, sql: str, *values: object) -> None:
    """Change a database behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql, values)


# trials


def test_trials_come_back_as_they_went_in(store: TuningStore) -> None:
    rows = [
        trial(us=101.0, date="2026-12-01T10:20:31Z"),
        trial(us=99.5, date="2026-12-01T10:20:30Z", grade="final", cubin_sha256="c" * 64, detail="a 'quoted' \u00e9 text"),
        trial(status="compile_error", device={}, detail="ptxas", date="2026-12-01T10:20:29Z"),
        trial(status="wrong", errors={"out": float("inf")}, date="2026-12-01T10:20:28Z"),
    ]
    assert [store.put_trial(row) for row in rows] == [row.id for row in rows]
    assert store.trials() == rows[::-1]
    assert [row.id for row in store.trials()] == [row.id for row in rows[::-1]]


def test_putting_a_trial_again_changes_nothing(store: TuningStore) -> None:
    row = trial()
    assert store.put_trial(row) == store.put_trial(row) == row.id
    assert store.put_trials([row, trial(us=98), row]) == 1
    assert len(store.trials()) == 2


def test_trials_can_be_narrowed(store: TuningStore) -> None:
    near, far = shape(crop=384), shape(crop=768)
    store.put_trials(
        [
            trial(near),
            trial(near, status="slow"),
            trial(near, device=on(H100)),
            trial(far, template="other"),
            trial(far, status="compile_error", device={}),
        ]
    )
    cell = trial(near).cell
    assert len(store.trials(cell=cell)) == 3
    assert len(store.trials(cell=cell, status="ok")) == 2
    assert len(store.trials(template="other")) == 1
    assert len(store.trials(device=H100)) == len(store.trials(device=H100.model)) == len(store.trials(device=H100.name)) == 1
    assert len(store.trials(device=H200.facts(), status="ok")) == 2
    assert store.trials(cell="none/at/all") == []
    assert store.cells() == sorted([cell, trial(far).cell])
    assert store.devices() == sorted([H100.model, H200.model])


def test_winners_are_derived(store: TuningStore) -> None:
    cell = trial().cell
    assert store.best(cell, H200) is None
    store.put_trials([trial(us=100, config=tile(64)), trial(us=90, config=tile(128)), trial(us=70, device=on(H100))])
    best = store.best(cell, H200)
    assert best is not None
    assert (best.config, best.us, best.device_name) == (tile(128), 90.0, "NVIDIA H200")
    assert best == store.best(cell, H200.facts()) == store.best(cell, "NVIDIA H200") == store.best(cell, H200.model)
    store.put_trial(trial(status="wrong", config=tile(128)))
    assert store.best(cell, H200).config == tile(64)


def test_a_name_that_stands_for_several_models_is_refused(store: TuningStore) -> None:
    cut_down = {**H200.facts(), "sms": 66}
    store.put_trials([trial(), trial(device=cut_down)])
    with pytest.raises(InvalidInput, match="several models.*66sm"):
        store.best(trial().cell, "NVIDIA H200")
    assert store.best(trial().cell, cut_down) is not None


# kernels


def test_kernels(store: TuningStore) -> None:
    store.put_kernel(kernel("1" * 64))
    store.put_kernel(kernel("1" * 64, variant=(("dtype", "float16"), ("mask", True)), sha256="b" * 64))
    store.put_kernel(kernel("2" * 64, template="other", compile_s=None))
    first, second = store.kernels()
    assert first["variant"] == {"dtype": "float16", "mask": True}
    assert (first["sha256"], first["compile_s"], first["size"]) == ("b" * 64, 2.5, 123456)
    assert second["config"] == kernel()["config"]
    assert [row["key"] for row in store.kernels(template="other")] == ["2" * 64]
    assert kernel_hashes(store.path) == {"1" * 64: "b" * 64, "2" * 64: "a" * 64}
    assert kernel_resources(store.path, "2" * 64) == {"registers": 168, "spill_bytes": 0}
    assert kernel_resources(store.path, "3" * 64) == {}
    for name in ("template", "sha256"):
        with pytest.raises(InvalidInput, match=name):
            store.put_kernel({key: value for key, value in kernel().items() if key != name})


# leases


def test_a_lease_keeps_others_off_until_it_ends(store: TuningStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("tpf_jit.tuning_db.store.time.time", lambda: now)
    assert store.claim("cell", "work", "a", 60)
    assert not store.claim("cell", "work", "b", 60)
    assert store.claim("cell", "other work", "b", 60)
    now = 1050.0
    assert store.claim("cell", "work", "a", 60), "its owner may extend it"
    now = 1090.0
    assert not store.claim("cell", "work", "b", 60)
    assert [lease["owner"] for lease in store.leases()] == ["a"]
    now = 1110.0
    assert store.claim("cell", "work", "b", 60), "the time of a dead owner is over"
    assert not store.release("cell", "work", "a")
    assert store.release("cell", "work", "b")
    assert not store.release("cell", "work", "b")
    assert store.leases() == []


# exchange


def fill(store: TuningStore, *numbers: int) -> None:
    for number in numbers:
        store.put_trial(trial(shape(crop=128 * (1 + number % 3)), us=100 + number, config=tile(number)))
        store.put_kernel(kernel(f"{number:064x}", config=tile(number)))


def test_export_is_sorted_lines_without_what_stays_here(store: TuningStore, tmp_path: Path) -> None:
    fill(store, 5, 3, 4)
    target = tmp_path / "out" / "rows.jsonl"
    assert store.export(target) == 3
    first = target.read_bytes()
    assert store.export(target) == 3
    assert target.read_bytes() == first
    header, *lines = first.decode().splitlines()
    assert json.loads(header) == {"format": "tpf_jit.tuning_db", "version": 1}
    assert lines == sorted(lines, key=lambda line: (json.loads(line)["kind"], line))
    assert len(lines) == 6
    assert "sha256" not in json.loads(lines[0])
    assert first.endswith(b"\n")


def test_export_can_be_narrowed(store: TuningStore, tmp_path: Path) -> None:
    key = trial().kernel_key
    store.put_trials([trial(), trial(grade="final"), trial(device=on(H100), grade="final"), trial(template="other")])
    store.put_kernel(kernel(key))
    store.put_kernel(kernel("2" * 64))
    assert store.export(tmp_path / "rows.jsonl", device=H200, grade="final") == 1
    content = merge.read_lines(tmp_path / "rows.jsonl")
    assert [row.grade for row in content.trials.values()] == ["final"]
    assert list(content.kernels) == [key]
    assert store.export(tmp_path / "rows.jsonl", template="other") == 1


def test_import_is_idempotent_and_reports(store: TuningStore, tmp_path: Path) -> None:
    fill(store, 1, 2, 3)
    store.export(tmp_path / "rows.jsonl")
    with TuningStore(tmp_path / "other.db") as other:
        fill(other, 3)
        assert other.import_(tmp_path / "rows.jsonl") == {"trials": 2, "kernels": 2}
        assert other.import_(tmp_path / "rows.jsonl") == {"trials": 0, "kernels": 0}
        assert other.verify() == []
        other.export(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "rows.jsonl").read_bytes()


def test_imported_kernels_are_known_but_not_trusted(store: TuningStore, tmp_path: Path) -> None:
    """The hash that lets an object file be loaded is only ever written by the machine that built the file."""
    fill(store, 1)
    store.export(tmp_path / "rows.jsonl")
    with TuningStore(tmp_path / "other.db") as other:
        other.import_(tmp_path / "rows.jsonl")
        other.merge(store.path)
        assert len(other.kernels()) == 1
        assert kernel_hashes(other.path) == {}


def test_merging_does_not_depend_on_the_order(tmp_path: Path) -> None:
    parts = []
    for number, rows in enumerate([(1, 2), (2, 3), (4,)]):
        path = tmp_path / f"part{number}.db"
        with TuningStore(path) as part:
            fill(part, *rows)
            part.put_kernel(kernel("f" * 64, resources={"registers": 160 + number}))
        parts.append(path)
    exports = set()
    for number, order in enumerate(itertools.permutations(parts)):
        with TuningStore(tmp_path / f"whole{number}.db") as whole:
            added = [whole.merge(path) for path in order]
            assert sum(each["trials"] for each in added) == 4
            assert all(whole.merge(path)["trials"] == 0 for path in parts)
            assert whole.verify() == []
            whole.export(tmp_path / "whole.jsonl")
        exports.add((tmp_path / "whole.jsonl").read_bytes())
    assert len(exports) == 1
    for path, count in zip(parts, (2, 2, 1), strict=True):
        with TuningStore(path) as part:
            assert len(part.trials()) == count


def test_merging_text_needs_no_database(tmp_path: Path) -> None:
    files = []
    for number, rows in enumerate([(1, 2), (2, 3)]):
        with TuningStore(tmp_path / f"{number}.db") as part:
            fill(part, *rows)
            files.append(tmp_path / f"{number}.jsonl")
            part.export(files[-1])
    assert merge.union(files, tmp_path / "one.jsonl") == merge.union(files[::-1], tmp_path / "two.jsonl") == 3
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_merge_reads_its_source_only(store: TuningStore, tmp_path: Path) -> None:
    with TuningStore(tmp_path / "other.db") as other:
        fill(other, 1)
    before = (tmp_path / "other.db").read_bytes()
    assert store.merge(tmp_path / "other.db") == {"trials": 1, "kernels": 1}
    assert (tmp_path / "other.db").read_bytes() == before
    assert store.merge(store.path) == {"trials": 0, "kernels": 0}
    with pytest.raises(DatabaseError, match="does not exist"):
        store.merge(tmp_path / "none.db")


def test_altered_rows_are_refused(store: TuningStore, tmp_path: Path) -> None:
    fill(store, 1, 2)
    store.export(tmp_path / "rows.jsonl")
    text = (tmp_path / "rows.jsonl").read_text()
    with TuningStore(tmp_path / "other.db") as other:
        (tmp_path / "rows.jsonl").write_text(text.replace('"median_us":101.0', '"median_us":50.0'))
        with pytest.raises(DatabaseError, match=r"line 4: the row was altered"):
            other.import_(tmp_path / "rows.jsonl")
        assert other.trials() == []
        edit(store.path, "UPDATE trial SET median_us = 50 WHERE median_us = 101")
        with pytest.raises(DatabaseError, match="was altered"):
            store.export(tmp_path / "laundered.jsonl")
        assert not (tmp_path / "laundered.jsonl").exists()
        assert other.merge(store.path) == {"trials": 1, "kernels": 2, "refused": 1}
        assert other.verify() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ('{"kind":"trial"}\n', "line 1: the first line must be"),
        ('{"format":"tpf_jit.tuning_db","version":2}\n', "line 1: written by a newer tpf_jit"),
        ('{"format":"something.else","version":1}\n', "line 1: not a file of measurements"),
        ('{"format":"tpf_jit.tuning_db","version":1}\n{"kind":"tri', "line 2: "),
        ('{"format":"tpf_jit.tuning_db","version":1}\n{"kind":"song"}', "line 2: unknown kind of row 'song'"),
        ('{"format":"tpf_jit.tuning_db","version":1}\n[1]', "line 2: not a JSON object"),
    ],
)
def test_bad_files_are_refused_by_line(store: TuningStore, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DatabaseError, match=message):
        store.import_(tmp_path / "rows.jsonl")


# verify


def test_a_sound_database_passes(store: TuningStore) -> None:
    fill(store, 1, 2, 3)
    store.claim("cell", "work", "me", 10)
    assert store.verify() == []


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("UPDATE trial SET median_us = 1 WHERE rowid = 1", "trial .*does not match its hash"),
        ("UPDATE trial SET samples_us = '[1, 2' WHERE rowid = 1", "trial .*not a valid row"),
        ("UPDATE trial SET status = 'great' WHERE rowid = 1", "trial .*not a valid row"),
        ("UPDATE trial SET model = 'GPU/1sm/16g' WHERE rowid = 1", "trial .*device model does not match"),
        ("UPDATE trial SET device = 'nowhere' WHERE rowid = 1", "refers to a missing device"),
        ("UPDATE config SET fields = '{}'", "config .*does not match its hash"),
        ("UPDATE toolchain SET facts = 'no json'", "toolchain .*not JSON"),
        ("UPDATE device SET name = 'NVIDIA H100'", "device .*name or model does not match"),
        ("UPDATE problem SET direction = 'backward'", "problem .*does not match the name"),
        ("UPDATE kernel SET resources = '[]'", "kernel .*not JSON objects"),
        ("UPDATE trial SET id = 'x' WHERE rowid = 1", "trial x: content does not match its hash"),
        ("PRAGMA user_version = 0", "schema version 0 instead of"),
    ],
)
def test_verify_finds_what_was_tampered_with(store: TuningStore, sql: str, found: str) -> None:
    fill(store, 1, 2)
    edit(store.path, sql)
    problems = store.verify()
    assert any(re.search(found, problem) for problem in problems), problems


def test_verify_finds_duplicates(store: TuningStore) -> None:
    fill(store, 1)
    with closing(sqlite3.connect(store.path)) as connection:
        columns = [name for _, name, *_ in connection.execute("PRAGMA table_info(trial)") if name != "id"]
    names = ", ".join(columns)
    edit(store.path, f"INSERT INTO trial (id, {names}) SELECT 'copy', {names} FROM trial")
    assert any("the same content as trial" in problem for problem in store.verify())


# schema


def add_column(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE trial ADD COLUMN colour TEXT NOT NULL DEFAULT ''")


def break_down(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE trial ADD COLUMN taste TEXT")
    connection.execute("this is no SQL")


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA user_version").fetchone()[0]


def test_every_table_is_strict(store: TuningStore) -> None:
    with closing(sqlite3.connect(store.path)) as connection:
        tables = {name: strict for _, name, kind, _, _, strict in connection.execute("PRAGMA table_list") if kind == "table"}
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    ours = {name for name in tables if not name.startswith("sqlite_")}
    assert ours == {"device", "toolchain", "config", "problem", "kernel", "object", "trial", "lease"}
    assert all(tables[name] for name in ours)
    with pytest.raises(sqlite3.IntegrityError):
        edit(store.path, "INSERT INTO lease VALUES ('c', 'w', 'o', 'not a number')")


def test_an_older_database_is_migrated_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        fill(store, 1, 2)
        ids = [row.id for row in store.trials()]
    newer = (*schema.MIGRATIONS, add_column)
    with closing(sqlite3.connect(path)) as connection:
        assert schema.migrate(connection, path, newer)
        assert not schema.migrate(connection, path, newer)
        assert "colour" in [row[1] for row in connection.execute("PRAGMA table_info(trial)")]
    assert version_of(path) == len(newer)
    monkeypatch.setattr(schema.version, "__defaults__", (len(newer),))
    monkeypatch.setattr(schema.migrate, "__defaults__", (newer,))
    with TuningStore(path) as store:
        assert [row.id for row in store.trials()] == ids


def test_a_failed_migration_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        fill(store, 1)
    with closing(sqlite3.connect(path)) as connection:
        with pytest.raises(sqlite3.OperationalError):
            schema.migrate(connection, path, (*schema.MIGRATIONS, add_column, break_down))
        assert not connection.in_transaction
        assert not {"colour", "taste"} & {row[1] for row in connection.execute("PRAGMA table_info(trial)")}
    assert version_of(path) == schema.SCHEMA_VERSION
    with TuningStore(path) as store:
        assert store.verify() == []


def test_a_newer_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        fill(store, 1)
    edit(path, f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=rf"newer tpf_jit \(schema {schema.SCHEMA_VERSION + 1}.*upgrade tpf_jit"):
        TuningStore(path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["tuning.db"]


def test_databases_of_others_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    edit(path, "CREATE TABLE bookmark (url TEXT)")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="another application"):
        TuningStore(path)
    assert path.read_bytes() == before


# the file


def test_where_the_user_database_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPF_JIT_DB", str(tmp_path / "env.db"))
    assert user_database_path() == tmp_path / "env.db"
    assert user_database_path(tmp_path / "argument.db") == tmp_path / "argument.db"
    monkeypatch.setenv("TPF_JIT_DB", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert user_database_path() == tmp_path / "data" / "tpf_jit" / "tuning.db"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_database_path("~/own.db") == tmp_path / "own.db"


def test_paths_with_odd_characters(tmp_path: Path) -> None:
    path = tmp_path / "50% off? #1 \u00fc" / "my tuning.db"
    with TuningStore(path) as store:
        store.put_kernel(kernel())
    assert kernel_hashes(path) == {"k" * 64: "a" * 64}


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = TuningStore(tmp_path / "tuning.db")
    store.close()
    store.close()
    for call in (store.trials, store.cells, lambda: store.put_trial(trial())):
        with pytest.raises(DatabaseError, match="was closed"):
            call()


def test_a_failing_transaction_leaves_nothing(store: TuningStore) -> None:
    with pytest.raises(AttributeError):
        store.put_trials([trial(), "not a row"])
    assert store.trials() == []
    store.put_trial(trial())
    assert store.verify() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_must_open_its_own(store: TuningStore) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.trials()
        except DatabaseError as error:
            code = 0 if "after a fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_canonical_json_refuses_what_json_lacks() -> None:
    assert canonical_json({"b": 1, "a": [True, None, "\u00e9"]}) == '{"a":[true,null,"\\u00e9"],"b":1}'
    with pytest.raises(ValueError):
        canonical_json(float("nan"))


def test_many_threads_make_one_new_database(tmp_path: Path) -> None:
    """A file that another is filling is ours, not another application's."""
    for attempt in range(30):
        path, start, failures = tmp_path / f"{attempt}.db", threading.Barrier(8), []

        def open_it(path: Path = path, start: threading.Barrier = start, failures: list = failures) -> None:
            start.wait()
            try:
                TuningStore(path).close()
            except DatabaseError as error:
                failures.append(error)

        threads = [threading.Thread(target=open_it) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_a_file_that_may_not_be_read_is_a_database_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without the rights, whom a test that runs as root cannot be."""
    path = tmp_path / "user.db"
    TuningStore(path).close()

    def refused(*arguments, **options):
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", refused)
    with pytest.raises(DatabaseError, match="cannot be opened"):
        TuningStore(path)
