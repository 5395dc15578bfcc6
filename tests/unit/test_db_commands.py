"""The database commands about trust: stale, prune, diff, verify --re-measure; and that reading commands only read."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from isolated_fakes import Faults, plain
from tune_fakes import H200, InlinePool, ToyBackend, ToyConfig, ToyShape, ToyTemplate, ToyTimer, install, options
from tuning_samples import H100, trial
from tuning_samples import H200 as SAMPLE_H200

from tpf_jit import resolve, shape
from tpf_jit.cache import ObjectStore
from tpf_jit.cli import db_trust, doctor
from tpf_jit.cli.app import run
from tpf_jit.device import Device
from tpf_jit.resolve import Dispatcher
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.tune import tune
from tpf_jit.tune.build import Builder
from tpf_jit.tune.isolated import Isolation
from tpf_jit.tuning_db import TuningStore, device_model
from tpf_jit.tuning_db.reader import read_layer

CONFIGS = tuple(ToyConfig(tile, stages) for tile in (32, 64) for stages in (2, 3))
BEST = ToyConfig(64, 3)
OTHER_SOURCES = "other sources of the template"


@pytest.fixture
def call(private_state: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process; gives (exit code, stdout, stderr)."""

    def calling(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return calling


@pytest.fixture
def reading(call: Any) -> Any:
    """Run a command line with --json and give (exit code, document)."""

    def read(*argv: object) -> tuple[int, Any]:
        code, out, err = call(*argv, "--json")
        assert out, err
        return code, json.loads(out)

    return read


@pytest.fixture
def toy(private_state: Path, monkeypatch: pytest.MonkeyPatch) -> ToyTemplate:
    """The toy operation, tuned in the user database; compiles run in this process."""
    monkeypatch.setattr(ToyTimer, "dead", False)
    monkeypatch.setitem(shape.SHAPES, "toy", ToyShape)
    monkeypatch.setattr(resolve, "_warned_stale", set())

    @contextlib.contextmanager
    def builder(store: Any, jobs: Any):
        with Builder(ObjectStore(), store, InlinePool) as made:
            yield made

    monkeypatch.setattr(db_trust, "_builder", builder)
    template = install(CONFIGS)
    tune(ToyShape(), progress=False, options=options(template, ToyTimer()))
    return template


def new_sources(monkeypatch: pytest.MonkeyPatch, digit: str = "6") -> None:
    monkeypatch.setattr(ToyTemplate, "source_hash", lambda self: digit * 64)


def other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gives other device code from now on."""
    compile_ = ToyBackend.compile

    def changed(self: ToyBackend, *arguments: Any) -> Any:
        found = compile_(self, *arguments)
        found.resources["cubin_sha256"] = found.resources["cubin_sha256"][::-1]
        return found

    monkeypatch.setattr(ToyBackend, "compile", changed)


def answer(user: Path) -> resolve.Resolution:
    device = Device(**{**H200, "compute_capability": (9, 0)})
    return Dispatcher(user, shipped=False, device=device).resolve("toy", "forward", ToyShape())


def user(private_state: Path) -> Path:
    return private_state / "user.db"


class TestStale:
    def test_fresh_winners_are_current(self, toy: Any, reading: Any, call: Any) -> None:
        code, found = reading("db", "stale", "--no-shipped")
        assert (code, found["stale"], found["winners"], found["rows"]) == (0, 0, 1, [])
        assert call("db", "stale", "--no-shipped")[1].strip() == "all 1 winners are current"
        _, found = reading("db", "stale", "--no-shipped", "--all")
        assert found["rows"][0]["serves"] == "this winner"

    def test_other_sources(self, toy: Any, reading: Any, private_state: Path, monkeypatch: Any) -> None:
        new_sources(monkeypatch)
        code, found = reading("db", "stale", "--no-shipped")
        (row,) = found["rows"]
        assert code == 1 and row["changes"] == [OTHER_SOURCES]
        assert row["serves"] == "this winner, with a note"
        assert row["rows"] == row["stale_rows"] == 8
        assert OTHER_SOURCES in answer(user(private_state)).note

    def test_another_compiler(self, toy: Any, reading: Any, private_state: Path, monkeypatch: Any, caplog: Any) -> None:
        monkeypatch.setattr(ToyBackend, "version", "2")
        code, found = reading("db", "stale", "--no-shipped")
        assert code == 1 and found["rows"][0]["changes"] == ["toy 1 (now 2)"]
        assert not caplog.records, "the report needs no warning beside it"
        for _ in range(2):
            found = answer(user(private_state))
            assert found.source == "tuned" and "measured with toy 1 (now 2): tune again" in found.note
        # Said even to those who never ask for an explanation, but once.
        assert [record.levelname for record in caplog.records if "tpf-jit db stale" in record.getMessage()] == ["WARNING"]

    def test_the_table_says_what_to_do(self, toy: Any, call: Any, monkeypatch: Any) -> None:
        new_sources(monkeypatch)
        code, out, _ = call("db", "stale", "--no-shipped")
        assert code == 1 and OTHER_SOURCES in out and "8 of 8" in out and "--recompile" in out

    @pytest.mark.parametrize("change", ["sources", "compiler", "both"])
    def test_equal_code_keeps_the_measurement_in_force(
        self, toy: Any, reading: Any, private_state: Path, monkeypatch: Any, change: str
    ) -> None:
        before = answer(user(private_state))
        if change != "compiler":
            new_sources(monkeypatch)
        if change != "sources":
            monkeypatch.setattr(ToyBackend, "version", "2")
        code, found = reading("db", "stale", "--no-shipped", "--recompile")
        assert code == 0 and found["stale"] == 0
        assert [verdict["outcome"] for verdict in found["recompiled"]] == ["same code"] * 4, "runners-up as well"
        after = answer(user(private_state))
        assert (after.source, after.note, after.trial_id) == ("tuned", before.note, before.trial_id)
        with TuningStore() as store:
            rows = store.trials()
            assert Counter(row.status for row in rows) == {"ok": 8, "same_code": 4}, "what was measured is left as it was"
            assert store.verify() == []
            assert {row.kernel_key for row in rows if row.status == "same_code"} == {k["key"] for k in store.kernels()} - {
                row.kernel_key for row in rows if row.status == "ok"
            }
        # The next change makes it stale again.
        new_sources(monkeypatch, "7")
        assert reading("db", "stale", "--no-shipped")[0] == 1

    def test_statements_travel_and_tuning_ignores_them(
        self, toy: Any, reading: Any, call: Any, private_state: Path, monkeypatch: Any, tmp_path: Path
    ) -> None:
        new_sources(monkeypatch)
        reading("db", "stale", "--no-shipped", "--recompile")
        text, other = tmp_path / "rows.jsonl", tmp_path / "other.db"
        assert call("db", "export", text)[0] == 0 and call("db", "import", text, "--db", other)[0] == 0
        assert "tune again" not in answer(other).note and "tune again" not in answer(text).note
        with TuningStore() as store:
            store.export(text, grade="final")
        assert "tune again" not in answer(text).note, "with a part of the rows go the statements about them"
        # What was stated is no measurement: a sweep writes rows of its own, though it need not time equal code again.
        assert tune(ToyShape(), progress=False, options=options(toy, ToyTimer())).new_trials == 4

    def test_a_statement_of_the_user_confirms_what_another_layer_measured(
        self, toy: Any, private_state: Path, monkeypatch: Any, tmp_path: Path, call: Any
    ) -> None:
        measured = tmp_path / "measured.jsonl"
        call("db", "export", measured)
        new_sources(monkeypatch)
        call("db", "stale", "--no-shipped", "--recompile")
        with TuningStore() as store, TuningStore(tmp_path / "statements.db") as only:
            only.put_trials(row for row in store.trials() if row.status == "same_code")
        device = Device(**{**H200, "compute_capability": (9, 0)})

        def note(*layers: Path) -> str:
            return Dispatcher(layers, shipped=False, device=device).resolve("toy", "forward", ToyShape()).note

        assert OTHER_SOURCES in note(measured)
        assert OTHER_SOURCES not in note(tmp_path / "statements.db", measured)

    def test_other_code_stays_stale(self, toy: Any, reading: Any, monkeypatch: Any) -> None:
        new_sources(monkeypatch)
        other_code(monkeypatch)
        code, found = reading("db", "stale", "--no-shipped", "--recompile")
        assert code == 1 and {verdict["outcome"] for verdict in found["recompiled"]} == {"other code"}
        with TuningStore() as store:
            assert {row.status for row in store.trials()} == {"ok"}

    def test_what_is_refused_or_does_not_compile_is_said(self, toy: Any, reading: Any, monkeypatch: Any) -> None:
        new_sources(monkeypatch)
        monkeypatch.setattr(ToyTemplate, "check", lambda self, shape, config: "tile 64" if config.tile == 64 else None)
        code, found = reading("db", "stale", "--no-shipped", "--recompile")
        outcomes = {(v["winner"]["config"]["tile"], v["outcome"]) for v in found["recompiled"]}
        assert code == 1 and outcomes == {(64, "failed"), (32, "same code")}
        assert "tile=32" in found["rows"][0]["serves"], "the runner-up serves meanwhile"

    def test_a_template_that_is_not_installed(self, private_state: Path, reading: Any) -> None:
        with TuningStore() as store:
            store.put_trial(trial(grade="final"))
        code, found = reading("db", "stale", "--no-shipped")
        assert code == 1 and found["rows"][0]["changes"] == ["fake_forward is not installed"]
        assert found["rows"][0]["serves"].startswith("default: triangle_attention_forward")

    def test_rows_that_say_nothing_of_the_compiler_are_not_called_stale(self, toy: Any, reading: Any) -> None:
        with TuningStore() as store:
            rows = [row.to_dict() for row in store.trials()]
        other = user(Path(store.path).parent).with_name("other.db")
        with TuningStore(other) as store:
            store.put_trials(type(trial()).from_dict({**row, "toolchain": {"torch": "1.0"}}) for row in rows)
        assert reading("db", "stale", "--no-shipped", "--db", other)[0] == 0


    def test_the_doctor_mentions_them(self, toy: Any, monkeypatch: Any) -> None:
        device = Device(**{**H200, "compute_capability": (9, 0)})
        monkeypatch.setattr("tpf_jit.device.current_device", lambda index=None: device)
        assert doctor._winners() == doctor.Finding("tuned for this GPU", doctor.OK, "1 problems")
        new_sources(monkeypatch)
        found = doctor._winners()
        assert found.state == doctor.NOTE and "1 with other sources" in found.found and "tpf-jit db stale" in found.remedy


class TestPrune:
    def retuned(self, toy: Any, monkeypatch: Any) -> None:
        """The toy measured again with other sources that give other code: the first eight rows decide nothing any more."""
        new_sources(monkeypatch)
        other_code(monkeypatch)
        tune(ToyShape(), progress=False, options=options(toy, ToyTimer()))

    def test_without_yes_nothing_changes(self, toy: Any, call: Any, private_state: Path, monkeypatch: Any) -> None:
        self.retuned(toy, monkeypatch)
        code, out, _ = call("db", "prune")
        assert code == 0 and "8 of 16 rows would go; nothing was changed, --yes drops them" in out
        with TuningStore() as store:
            assert len(store.trials()) == 16

    def test_with_yes_the_superseded_rows_go_and_the_winner_stays(
        self, toy: Any, call: Any, reading: Any, private_state: Path, monkeypatch: Any, tmp_path: Path
    ) -> None:
        self.retuned(toy, monkeypatch)
        before = read_layer(user(private_state)).winners
        kept = tmp_path / "kept.jsonl"
        code, found = reading("db", "prune", "--yes", "--keep", kept)
        assert code == 0 and found["dropped"] and set(found["going"].values()) == {"of other sources, measured again since"}
        assert read_layer(user(private_state)).winners == before
        with TuningStore() as store:
            assert {row.source_hash for row in store.trials()} == {"6" * 64} and store.verify() == []
        assert call("db", "prune", "--yes")[1].strip() == "every row is still of use"
        # What was dropped can come back.
        assert "trials=8" in call("db", "import", kept)[2]

    def test_a_stale_winner_keeps_its_evidence(self, toy: Any, reading: Any, monkeypatch: Any) -> None:
        new_sources(monkeypatch)
        assert reading("db", "prune", "--yes")[1]["going"] == {}

    def test_statements_go_with_their_sources(self, toy: Any, reading: Any, monkeypatch: Any) -> None:
        new_sources(monkeypatch)
        reading("db", "stale", "--no-shipped", "--recompile")
        assert reading("db", "prune", "--yes")[1]["going"] == {}
        new_sources(monkeypatch, "7")
        going = reading("db", "prune", "--yes")[1]["going"]
        assert set(going.values()) == {"speaks of sources that are gone"} and len(going) == 4

    def test_a_verdict_that_bars_a_configuration_stays(self, toy: Any, reading: Any, monkeypatch: Any) -> None:
        with TuningStore() as store:
            best = next(row for row in store.trials() if row.config["tile"] == 64 and row.config["stages"] == 3)
            values = {**best.to_dict(), "status": "wrong", "samples_us": [], "detail": "off", "date": "2030-01-01T00:00:00Z"}
            for name in ("median_us", "p10_us", "p90_us"):
                values.pop(name)
            store.put_trial(type(best).from_dict(values))
        before = read_layer(store.path).winners
        assert (before[next(iter(before))][0].config["tile"], before[next(iter(before))][0].config["stages"]) != (64, 3)
        self.retuned(toy, monkeypatch)
        after = read_layer(store.path).winners
        reading("db", "prune", "--yes")
        assert read_layer(store.path).winners == after

    def test_templates_that_are_not_installed_are_left_alone(self, private_state: Path, reading: Any) -> None:
        with TuningStore() as store:
            store.put_trials(trial(us=100 + n, source_hash=f"{n}" * 64, date=f"2026-12-0{n}T00:00:00Z") for n in (1, 2, 3))
        assert reading("db", "prune")[1] == {"dropped": False, "rows": 3, "going": {}}


class TestDiff:
    def file(self, path: Path, *rows: Any) -> Path:
        with TuningStore(path) as store:
            store.put_trials(rows)
        return path

    def test_equal(self, tmp_path: Path, call: Any) -> None:
        a = self.file(tmp_path / "a.db", trial(us=100.0))
        b = self.file(tmp_path / "b.db", trial(us=101.0))
        code, out, _ = call("db", "diff", a, b)
        assert (code, out.strip()) == (0, "1 problems, no difference")

    def test_differences(self, tmp_path: Path, reading: Any, call: Any) -> None:
        small, large, huge = (TriangleAttentionShape(crop=crop) for crop in (256, 512, 1024))
        other = {"tile_n": 64, "stages": 3, "crop": 0}
        a = self.file(tmp_path / "a.db", trial(us=100.0), trial(small, us=50.0), trial(large, us=200.0))
        b = self.file(tmp_path / "b.db", trial(us=90.0), trial(small, us=49.0, config=other), trial(huge, us=800.0))
        code, found = reading("db", "diff", a, b)
        assert code == 1
        kinds = {row["cell"].split("/")[4]: (row["kind"], row["ratio"]) for row in found}
        assert kinds["N384"] == ("time", pytest.approx(0.9))
        assert kinds["N256"][0] == "won differently"
        assert kinds["N512"] == ("only in A", None) and kinds["N1024"] == ("only in B", None)
        code, out, _ = call("db", "diff", a, b)
        assert code == 1 and "the same" in out and "stages=3" in out and "1 won differently" in out
        assert reading("db", "diff", a, b, "--device", "h200") == (1, found)
        text = tmp_path / "a.jsonl"
        call("db", "export", text, "--db", a)
        assert call("db", "diff", a, text)[0] == 0, "a file of rows is as good as a database"


class TestMeasuringAgain:
    @pytest.fixture
    def gpu(self, monkeypatch: Any, tmp_path: Path) -> list[float]:
        """A GPU that is as fast as when it was tuned, times what the list says; measured in a child process."""
        speed = [1.0]

        @contextlib.contextmanager
        def device(index: Any):
            with Isolation() as isolation:
                faults = Faults(str(tmp_path))

                class Scaled:
                    def __init__(self, inner: Any) -> None:
                        self.inner = inner

                    def measure(self, job: Any) -> Any:
                        found = self.inner.measure(job)
                        found.samples_us = [value * speed[0] for value in found.samples_us]
                        return found

                    def close(self) -> None:
                        self.inner.close()

                yield device_model(H200), lambda t, s: Scaled(isolation.measurer(plain, t, s, faults))

        monkeypatch.setattr(db_trust, "device_measurer", device)
        return speed

    @pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.04, 0), (0.96, 0), (1.06, 1), (0.9, 1)])
    def test_drift_above_five_percent_is_flagged(
        self, toy: Any, reading: Any, gpu: list[float], factor: float, code: int
    ) -> None:
        gpu[0] = factor
        found_code, found = reading("db", "verify", "--re-measure", "3")
        (row,) = found["remeasured"]
        assert found_code == code and row["drift"] == pytest.approx(factor - 1, abs=1e-3)
        assert row["outcome"] == ("drifted" if code else "steady")

    def test_the_table(self, toy: Any, call: Any, gpu: list[float]) -> None:
        code, out, _ = call("db", "verify", "--re-measure", "1")
        assert code == 0 and "the database is sound" in out and "all are steady" in out
        gpu[0] = 1.2
        code, out, _ = call("db", "verify", "--re-measure", "1")
        assert code == 1 and "+20.0 %" in out and "1 of 1 differ by more than 5.00 %" in out

    def test_a_winner_that_is_wrong_today_fails(self, toy: Any, reading: Any, gpu: list[float], monkeypatch: Any) -> None:
        with TuningStore() as store:
            for row in store.trials():
                if row.config["tile"] == 64 and row.config["stages"] == 3:
                    values = {**row.to_dict(), "config": {**row.config, "trick": "skip"}, "kernel_key": "k", "cubin_sha256": ""}
                    times = {"samples_us": [1.0], "median_us": 1.0, "p10_us": 1.0, "p90_us": 1.0}
                    store.put_trial(type(row).from_dict({**values, **times}))
        code, found = reading("db", "verify", "--re-measure", "1")
        assert code == 1 and found["remeasured"][0]["outcome"] == "failed" and "wrong" in found["remeasured"][0]["detail"]

    def test_no_winner_of_this_gpu(self, private_state: Path, call: Any, gpu: list[float], toy: Any, monkeypatch: Any) -> None:
        with TuningStore(private_state / "empty.db") as store:
            store.put_trial(trial())
        code, out, _ = call("db", "verify", "--re-measure", "1", "--db", private_state / "empty.db")
        assert code == 0 and "no winner was measured on Toy H200" in out
        assert call("db", "verify", "--re-measure", "0")[0] == 1

    def test_without_a_gpu(self, toy: Any, call: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr("tpf_jit.device.current_device", lambda index=None: None)
        code, _, err = call("db", "verify", "--re-measure", "1")
        assert code == 1 and err.startswith("Error: measuring again needs the GPU")


class TestReadingOnlyReads:
    @pytest.fixture
    def database(self, private_state: Path) -> Path:
        with TuningStore() as store:
            store.put_trials([trial(us=100.0 + n, config={"tile_n": 16 * n, "stages": 2, "crop": 0}) for n in range(1, 60)])
        with closing(sqlite3.connect(store.path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        return store.path

    @pytest.mark.parametrize("damage", ["garbage", "truncated", "holes"])
    @pytest.mark.parametrize("words", ["show N384", "export out.jsonl", "stale", "prune", "prune --yes", "diff {db} {db}"])
    def test_a_damaged_file_is_left_alone(
        self, database: Path, call: Any, tmp_path: Path, monkeypatch: Any, words: str, damage: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        content = database.read_bytes()
        hole = content[:4096] + bytes(len(content) - 4096)
        database.write_bytes({"garbage": b"no database " * 500, "truncated": content[: len(content) // 2], "holes": hole}[damage])
        before = database.read_bytes()
        code, _, err = call("db", *words.format(db=database).split())
        assert code == 1 and "is damaged" in err and "left as it is" in err and "tpf-jit db verify" in err
        assert database.read_bytes() == before and not (tmp_path / "out.jsonl").exists()
        assert not list(database.parent.glob("*damaged*")) and not list(database.parent.glob("*-wal"))

    def test_a_locked_file_is_said(self, database: Path, call: Any) -> None:
        with closing(sqlite3.connect(database)) as other:
            other.execute("BEGIN EXCLUSIVE")
            code, _, err = call("db", "show", "N384")
        assert code == 1 and "locked" in err

    def test_shipped_rows_are_shown(self, private_state: Path, reading: Any, call: Any) -> None:
        code, found = reading("db", "show", "N1024", "--limit", "1000")
        assert code == 0 and found and {row["layer"] for row in found} == {"shipped tables"}
        assert "shipped tables" in call("db", "show", "N1024")[1]
        with TuningStore() as store:
            store.put_trial(trial(TriangleAttentionShape(crop=1024)))
        _, more = reading("db", "show", "N1024", "--limit", "1000")
        assert len(more) == len(found) + 1 and sum(row["layer"] == str(store.path) for row in more) == 1
        assert len(reading("db", "show", "N1024", "--no-shipped")[1]) == 1

    def test_export_makes_no_folders(self, database: Path, call: Any, tmp_path: Path) -> None:
        target = tmp_path / "new" / "rows.jsonl"
        code, _, err = call("db", "export", target)
        assert code == 1 and "whose folder does not exist" in err and "mkdir -p" in err and not target.parent.exists()
        target.parent.mkdir()
        assert call("db", "export", target)[0] == 0 and len(target.read_text().splitlines()) == 60

    def test_export_refuses_altered_rows(self, database: Path, call: Any, tmp_path: Path) -> None:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("UPDATE trial SET median_us = 1.0")
            connection.commit()
        code, _, err = call("db", "export", tmp_path / "rows.jsonl")
        assert code == 1 and "was altered" in err and not (tmp_path / "rows.jsonl").exists()


class TestUnknownDevices:
    """A device that no row is of is refused, and the message says which there are."""

    @pytest.fixture
    def database(self, private_state: Path) -> Path:
        with TuningStore() as store:
            store.put_trials([trial(grade="final"), trial(device=H100.facts(), grade="final")])
        return store.path

    PART = "Error: --device: got 'b300'; allowed: a part of one of these device models: "
    REFUSED = (1, "", f"{PART}{device_model(H100)}, {device_model(SAMPLE_H200)}\n")
    NOTHING = "nothing is tuned yet: tpf-jit tune TARGET"

    @pytest.mark.parametrize("json", [(), ("--json",)])
    @pytest.mark.parametrize("words", ["list --no-shipped", "show N384 --no-shipped", "stale --no-shipped", "diff {db} {db}"])
    def test_the_devices_that_there_are_are_named(self, database: Path, call: Any, words: str, json: tuple[str, ...]) -> None:
        assert call("db", *words.format(db=database).split(), "--device", "b300", *json) == self.REFUSED

    def test_of_a_report_too_which_leaves_its_files_alone(self, database: Path, call: Any, tmp_path: Path) -> None:
        page, studies = tmp_path / "page.html", tmp_path / "studies.db"
        page.write_text("an earlier page")
        words = ("db", "report", "--no-shipped", "--out", page, "--studies", studies, "--device")
        assert call(*words, "b300") == self.REFUSED
        assert page.read_text() == "an earlier page" and not studies.exists()
        assert call(*words[:-3], "--device", "h100")[0] == 0 and "an earlier page" not in page.read_text()

    def test_recompiling_asks_first(self, database: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(db_trust, "_recompile", lambda *_: pytest.fail("it compiles"))
        assert call("db", "stale", "--no-shipped", "--recompile", "--device", "b300") == self.REFUSED

    def test_shipped_devices_count(self, private_state: Path, call: Any) -> None:
        code, out, err = call("db", "list", "--device", "b300")
        assert (code, out) == (1, "") and err.startswith(f"{self.PART}NVIDIA H200")

    def test_a_device_that_only_other_problems_have(self, database: Path, call: Any) -> None:
        with TuningStore(database) as store:
            store.put_trial(trial(TriangleAttentionShape(256)))
        code, out, err = call("db", "show", "N256", "--no-shipped", "--device", "h100")
        assert (code, out) == (1, "") and err.endswith(f"these device models: {device_model(SAMPLE_H200)}\n")

    @pytest.mark.parametrize("words", ["list --no-shipped", "stale --no-shipped", "report --no-shipped --out {page}"])
    def test_without_rows_that_is_said_and_no_error_where_no_device_is_asked_for(
        self, private_state: Path, call: Any, tmp_path: Path, words: str
    ) -> None:
        page = tmp_path / "page.html"
        line = ("db", *words.format(page=page).split())
        assert call(*line, "--device", "b300") == (1, "", f"Error: --device: got 'b300'; allowed: nothing, as {self.NOTHING}\n")
        assert not page.exists()
        code, out, _ = call(*line)
        assert code == 0 and (page.exists() or out.strip() == self.NOTHING)


class TestUnknownStatus:
    @pytest.mark.parametrize("word", ["nope", "compile_error"])
    def test_the_statuses_of_these_trials_are_named(self, private_state: Path, call: Any, word: str) -> None:
        with TuningStore() as store:
            store.put_trials([trial(), trial(status="wrong", config={"tile_n": 32}, errors={"out": 0.5}, detail="out is off")])
            store.put_trial(trial(TriangleAttentionShape(256), status="compile_error", config={"tile_n": 32}, detail="no"))
        text = f"Error: --status: got {word!r}; allowed: ok, wrong, as the trials of 'N384' are\n"
        assert call("db", "show", "N384", "--no-shipped", "--status", word) == (1, "", text)
        assert call("db", "show", "N384", "--no-shipped", "--status", "wrong")[0] == 0


class TestMergingNamesTheFile:
    """Whatever is wrong with a file that is merged or imported, messages name it, and no file that the user has not seen."""

    @pytest.fixture
    def other(self, private_state: Path, tmp_path: Path) -> Path:
        with TuningStore(tmp_path / "other.db") as store:
            store.put_trials([trial(us=100.0 + n, config={"tile_n": 16 * n, "stages": 2, "crop": 0}) for n in range(1, 60)])
        with closing(sqlite3.connect(store.path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        return store.path

    def change(self, path: Path, *statements: str) -> None:
        with closing(sqlite3.connect(path)) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    @pytest.mark.parametrize(
        ("statement", "text"),
        [
            ("PRAGMA user_version = 99", "was written by a newer tpf_jit (schema 99"),
            ("PRAGMA application_id = 7", "is an SQLite database of another application"),
            ("UPDATE trial SET status = 'no such'", "has an unreadable row ("),
            ("UPDATE trial SET samples_us = 'x'", "has an unreadable row ("),
            ("DROP TABLE kernel", "cannot be read: no such table: kernel"),
        ],
    )
    def test_a_database_that_cannot_be_read(self, other: Path, call: Any, statement: str, text: str) -> None:
        self.change(other, statement)
        before = other.read_bytes()
        code, out, err = call("db", "merge", other)
        assert (code, out) == (1, "") and err.startswith(f"Error: {other} {text}"), err
        assert "copy.db" not in err and "tpf_jit_merge_" not in err and err.count("\n") == 1
        assert other.read_bytes() == before

    def test_what_is_no_database(self, other: Path, call: Any) -> None:
        other.write_bytes(b"no database " * 500)
        assert call("db", "merge", other) == (1, "", f"Error: {other} cannot be read: file is not a database\n")

    def test_what_can_be_read_of_a_damaged_one_is_added(self, other: Path, call: Any, recwarn: Any) -> None:
        content = bytearray(other.read_bytes())
        with closing(sqlite3.connect(other)) as connection:
            (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trial_by_cell'").fetchone()
            (size,) = connection.execute("PRAGMA page_size").fetchone()
        content[(root - 1) * size : root * size] = b"\xa5" * size
        other.write_bytes(content)
        code, _, err = call("db", "merge", other)
        assert code == 0 and "added: trials=59" in err
        (said,) = [str(warning.message) for warning in recwarn if "damaged" in str(warning.message)]
        assert said.startswith(f"tuning database {other} is damaged (") and said.endswith("; 59 trials could be read")
        assert other.read_bytes() == bytes(content) and not list(other.parent.glob("*damaged*"))

    def test_an_empty_database_adds_nothing(self, private_state: Path, call: Any, tmp_path: Path) -> None:
        (tmp_path / "empty.db").touch()
        assert call("db", "merge", tmp_path / "empty.db")[::2] == (0, "added: trials=0 kernels=0\n")

    @pytest.mark.parametrize("text", ["", "{}", "no json", '{"format": "tpf_jit.tuning_db", "version": 99}'])
    @pytest.mark.parametrize("verb", ["import", "merge"])
    def test_a_file_of_lines_that_cannot_be_read(
        self, private_state: Path, call: Any, tmp_path: Path, verb: str, text: str
    ) -> None:
        file = tmp_path / "rows.jsonl"
        file.write_text(text)
        code, out, err = call("db", verb, file)
        assert (code, out) == (1, "") and err.startswith(f"Error: {file}")
