"""The command line: exit codes, one-line errors, JSON that programs can read, and that the verbs do what they say."""

from __future__ import annotations

import importlib
import io
import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from tuning_samples import H200, kernel, trial

import tpf_jit
from tpf_jit import records
from tpf_jit.cli import _output, _shapes, doctor
from tpf_jit.cli import records as cli_records
from tpf_jit.cli.app import app, run
from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape
from tpf_jit.tuning_db import TuningStore

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def call(private_state: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process; gives (exit code, stdout, stderr)."""

    def calling(*argv: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return calling


@pytest.fixture
def reading(call: Any) -> Any:
    """Run a command line with --json and give the document."""

    def read(*argv: str | Path, code: int = 0) -> Any:
        found, out, err = call(*argv, "--json")
        assert found == code, err
        return json.loads(out)

    return read


@pytest.fixture
def database(private_state: Path) -> Path:
    """A user database with two problems: one finished, one where a configuration was wrong."""
    path = private_state / "user.db"
    small = TriangleAttentionShape(crop=256)
    with TuningStore(path) as store:
        store.put_kernel(kernel())
        store.put_trials(
            [
                trial(us=120.0, grade="final"),
                trial(us=100.0, grade="final", config={"tile_n": 64, "stages": 3, "crop": 0}),
                trial(small, us=50.0),
                trial(small, status="wrong", config={"tile_n": 32}, errors={"out": 0.5}, detail="out is off"),
            ]
        )
    return path


class TestErrors:
    def test_a_failure_is_one_line_and_exit_code_1(self, call: Any) -> None:
        code, out, err = call("explain", "384", "--head-dim", "200")
        assert code == 1
        assert out == ""
        assert err.startswith("Error: head_dim: got 200")
        assert err.count("\n") == 1

    @pytest.mark.parametrize("argv", [["no-such-verb"], ["explain"], ["explain", "384", "--no-such-option"], ["db", "nothing"]])
    def test_a_wrong_command_line_is_exit_code_2(self, call: Any, argv: list[str]) -> None:
        code, out, err = call(*argv)
        assert code == 2
        assert err.startswith("Error: ")
        assert "Traceback" not in err

    @pytest.mark.parametrize("target", ["no_such_preset", "triangle_attention/B1", "384,x"])
    def test_targets_that_name_nothing(self, call: Any, target: str) -> None:
        code, _, err = call("explain", target)
        assert code == 1
        assert err.startswith("Error: ")

    def test_an_interrupt_is_exit_code_130(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(doctor, "examine", interrupted)
        assert call("doctor") == (130, "", "interrupted\n")

    def test_a_bug_keeps_its_traceback(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "examine", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(["doctor"])

    def test_a_reader_that_leaves_early_is_no_error(self) -> None:
        crops = ",".join(map(str, range(1, 301)))  # far more text than a pipe holds
        command = f"{sys.executable} -m tpf_jit.cli explain {crops} | head -n 1"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "BrokenPipe" not in done.stderr
        assert len(done.stdout.splitlines()) == 1

    def test_module_and_function_agree(self) -> None:
        done = subprocess.run([sys.executable, "-m", "tpf_jit.cli", "--version"], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, f"tpf-jit {tpf_jit.__version__}")


@pytest.mark.parametrize("group", ["", "db", "bench", "records"])
def test_a_group_without_a_command_is_its_help(call: Any, group: str) -> None:
    code, out, err = call(*group.split())
    assert (code, out) == (2, "") and err.startswith(f"Usage: tpf-jit {group}".rstrip() + " [OPTIONS] COMMAND")
    assert err.rstrip() == call(*group.split(), "--help")[1].rstrip()


def test_the_help_names_both_operations(call: Any) -> None:
    text = " ".join(call("--help")[1].split())
    assert "Triangle attention and triangle multiplication kernels" in text


def test_every_command_answers_help(call: Any) -> None:
    groups = typer.main.get_command(app).commands
    for name, command in groups.items():
        for words in [[name], *([name, child] for child in getattr(command, "commands", ()))]:
            code, out, err = call(*words, "--help")
            assert code == 0, err
            assert "Usage: tpf-jit" in out


class TestShapes:
    def test_crops_take_the_options(self) -> None:
        found = _shapes.shapes(["384,640", "128"], head_dim="16,32", heads=8)
        assert [(shape.crop, shape.head_dim) for shape in found] == [
            (384, 16), (640, 16), (384, 32), (640, 32), (128, 16), (128, 32)
        ]  # fmt: skip
        assert {shape.heads for shape in found} == {8}

    def test_keys_presets_and_repeats(self) -> None:
        key = TriangleAttentionShape(crop=77, mask="bool").key()
        found = _shapes.shapes([key, "openfold3", key, "openfold3"])
        assert found == [TriangleAttentionShape.parse(key), *tpf_jit.preset("openfold3")]

    def test_what_is_no_number_is_named(self) -> None:
        with pytest.raises(InvalidInput, match="--head-dim: got '32;64'"):
            _shapes.shapes(["384"], head_dim="32;64")

    def test_crops_of_multiplications(self) -> None:
        op = TriangleMultiplicationShape.op
        found = _shapes.shapes(["8,16"], op, channels="64,32", hidden=96, mask="float")
        assert [(shape.channels, shape.direction, shape.crop) for shape in found] == [
            (c, way, n) for c in (64, 32) for way in ("outgoing", "incoming") for n in (8, 16)
        ]
        assert {(shape.hidden, shape.mask, shape.weight_dtype) for shape in found} == {(96, "float", "float32")}
        assert _shapes.shapes(["8"], op, direction="incoming") == [TriangleMultiplicationShape(8, direction="incoming")]
        assert _shapes.shapes(["8"], op, {"direction": "outgoing"}) == [TriangleMultiplicationShape(8)]

    def test_an_operation_narrows_what_presets_and_keys_name(self) -> None:
        ops = {shape.op for shape in _shapes.shapes(["openfold3"])}
        assert ops == {TriangleAttentionShape.op, TriangleMultiplicationShape.op}
        for op in ops:
            found = _shapes.shapes(["openfold3"], op)
            assert found == [shape for shape in tpf_jit.preset("openfold3") if shape.op == op]
        with pytest.raises(InvalidInput, match="TARGET: .* allowed: problems of triangle_multiplication"):
            _shapes.shapes([TriangleAttentionShape(8).key()], TriangleMultiplicationShape.op)

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["--op", "attention"], "--op: got 'attention'; allowed: triangle_attention, triangle_multiplication"),
            (["--op", "triangle_multiplication", "--head-dim", "16"], "--head-dim: got 16; allowed: nothing, as crops are"),
            (["--weight-dtype", "float32"], "--weight-dtype: got 'float32'; allowed: nothing, as crops are triangle_attention"),
            (["--op", "triangle_multiplication", "--mask", "additive"], "mask: got 'additive'; allowed: none, bool, float"),
        ],
    )
    def test_options_of_the_other_operation_are_refused(self, call: Any, words: list[str], text: str) -> None:
        code, _, err = call("explain", "384", *words)
        assert code == 1 and err.startswith(f"Error: {text}")

    def test_short_names_what_is_unusual(self) -> None:
        plain = TriangleAttentionShape(crop=384)
        assert _shapes.short(plain) == "N=384 H=4 D=32 bf16"
        odd = TriangleAttentionShape(crop=384, rows=3, batch=2, bias_dtype="float32", mask="bool")
        assert _shapes.short(odd) == "B=2 N=384 I=3 H=4 D=32 bf16 bias float32 bool mask"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""), (True, "yes"), (False, "no"), (384, "384"), (1234.5, "1234"), (12.345, "12.3"), (1.2345, "1.23"),
        (0.12345, "0.123"), (0.00166, "1.66e-03"), (0.0, "0"), (float("inf"), "inf"), (float("nan"), "nan"),
        ({"tile_n": 64, "mask": False}, "tile_n=64 mask=no"),
    ],
)  # fmt: skip
def test_cells_read_as_people_read(value: Any, text: str) -> None:
    assert _output.cell(value) == text


class TestDoctor:
    def test_a_healthy_machine(self, reading: Any) -> None:
        report = reading("doctor")
        assert report["healthy"] is True
        states = {finding["what"]: finding["state"] for finding in report["findings"]}
        assert states["Python"] == "ok"
        assert states["kernels"] == "ok"
        assert states["object cache"] == "ok"
        assert "wrong" not in states.values()

    def test_the_report_for_people_has_every_finding(self, call: Any) -> None:
        code, out, _ = call("doctor")
        assert code == 0
        assert all(finding.what in out for finding in doctor.examine())

    def test_a_missing_package_is_named_with_its_remedy(self, reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        real = doctor.metadata.version

        def version(name: str) -> str:
            if name == "nvidia-cutlass-dsl":
                raise doctor.metadata.PackageNotFoundError(name)
            return "3.99" if name == "sqlite-utils" else real(name)

        monkeypatch.setattr(doctor.metadata, "version", version)
        report = reading("doctor", code=1)
        found = {finding["what"]: finding for finding in report["findings"]}
        assert report["healthy"] is False
        assert found["nvidia-cutlass-dsl"]["state"] == "wrong"
        assert found["nvidia-cutlass-dsl"]["remedy"] == 'pip install "nvidia-cutlass-dsl>=4.8,<4.9"'
        assert found["sqlite-utils"]["state"] == "wrong", "too old"

    def test_a_cache_that_others_may_write_is_wrong(self, reading: Any, private_state: Path) -> None:
        folder = private_state / "objects"
        folder.mkdir()
        folder.chmod(0o777)
        report = reading("doctor", code=1)
        (finding,) = [finding for finding in report["findings"] if finding["what"] == "object cache"]
        assert finding["state"] == "wrong"
        assert "TPF_JIT_CACHE" in finding["remedy"]

    def test_folders_that_cannot_be_written(self, reading: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("TPF_JIT_CACHE", str(tmp_path / "file" / "objects"))
        monkeypatch.setenv("TPF_JIT_DB", str(tmp_path / "file" / "user.db"))
        found = {finding["what"]: finding for finding in reading("doctor", code=1)["findings"]}
        for what, variable in (("object cache", "TPF_JIT_CACHE"), ("user database", "TPF_JIT_DB")):
            assert found[what]["state"] == "wrong" and variable in found[what]["remedy"]
        assert not (tmp_path / "objects").exists(), "only looked at"

    def test_a_check_that_breaks_is_a_finding(self, reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> None:
            raise OSError("disk on fire")

        monkeypatch.setattr("tpf_jit.device.current_device", broken)
        report = reading("doctor", code=1)
        (finding,) = [finding for finding in report["findings"] if finding["what"] == "GPU"]
        assert "disk on fire" in finding["found"]

    @pytest.mark.parametrize(
        ("text", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.1.15.post2", (0, 1, 15)), ("5.0.0rc1", (5, 0))]
    )
    def test_versions(self, text: str, numbers: tuple[int, ...]) -> None:
        assert doctor._release(text) == numbers


class TestKernels:
    def test_explain_as_json(self, reading: Any) -> None:
        (found,) = reading("explain", "384")
        shape = TriangleAttentionShape(crop=384)
        assert found["shape"] == shape.key()
        assert found["config"] == tpf_jit.explain(shape).config
        assert found["path"] in ("kernel", "fallback")

    def test_explain_for_people(self, call: Any) -> None:
        code, out, _ = call("explain", "384,640")
        assert code == 0
        assert out.count("\n  kernel ") == 2

    @pytest.mark.parametrize(
        ("text", "config"),
        [(None, None), ("tile_n=96, crop=0", {"tile_n": 96, "crop": 0}), ("a=true,b=no,c=-1", {"a": True, "b": "no", "c": -1})],
    )
    def test_configurations_are_read_with_their_types(self, text: str | None, config: Any) -> None:
        from tpf_jit.cli.kernels import _config

        assert _config(text) == config

    def test_an_illegal_configuration_is_refused(self, call: Any) -> None:
        code, _, err = call("compile", "384", "--config", "no_such_field=3")
        assert code == 1
        assert "no_such_field" in err

    @pytest.mark.parametrize(("words", "isolate"), [((), True), (("--no-isolate",), False)])
    def test_a_sweep_is_isolated_unless_asked(
        self, call: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], isolate: bool
    ) -> None:
        from tpf_jit.tune import node
        from tpf_jit.tune.summary import Summary

        asked: list[Any] = []

        def sweep_node(cells: Any, db: Any, options: Any, *more: Any) -> Summary:
            asked.append(options)
            return Summary(())

        monkeypatch.setattr(node, "sweep_node", sweep_node)
        code, _, err = call("sweep", "384", "--direction", "forward", *words)
        assert code == 0, err
        assert [options.isolate for options in asked] == [isolate]

    @pytest.mark.parametrize(
        ("words", "directions"),
        [
            (["--op", "triangle_multiplication"], ["front", "product_nt", "back", "product_tn"]),
            (["--op", "triangle_multiplication", "--direction", "front_weights"], ["front_weights"]),
            ([], ["forward"]),
        ],
    )
    def test_tune_takes_what_inference_runs_unless_told(
        self, call: Any, monkeypatch: pytest.MonkeyPatch, words: list[str], directions: list[str]
    ) -> None:
        class Result:
            interrupted = False

        importlib.import_module("tpf_jit.tune")  # sets the name that is replaced below
        asked: list[tuple[str, str]] = []
        monkeypatch.setattr(tpf_jit, "tune", lambda shape, each, *rest, **options: asked.append((shape.op, each)) or Result())
        code, _, err = call("tune", "384", *words)
        assert code == 0, err
        assert [each for _, each in asked] == directions
        assert {op for op, _ in asked} == {words[1] if words else "triangle_attention"}

    @pytest.mark.parametrize("words", [(), ("--training",)])
    def test_compile_compiles_for_training_when_asked(
        self, call: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
    ) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(tpf_jit, "compile", lambda *arguments: asked.append(arguments) or [])
        code, _, err = call("compile", "384", "--op", "triangle_multiplication", *words)
        assert code == 0, err
        ((shapes, *_, training),) = asked
        assert [shape.direction for shape in shapes] == ["outgoing", "incoming"] and training is bool(words)

    @pytest.mark.parametrize("terminal", [False, True])
    def test_compile_says_how_many_kernels_the_cache_lacks(
        self, call: Any, private_state: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
    ) -> None:
        """On stderr, and where that is a terminal with a bar that follows the cache."""
        from tpf_jit.cli import kernels
        from tpf_jit.kernels import default_store
        from tpf_jit.tune import report

        kept: set[Any] = set()
        told: list[int] = []
        seen = threading.Event()

        class Bar:
            def __init__(self, title: str, total: int) -> None:
                told.append(-total)

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, done: int, note: str) -> None:
                told.append(done)
                if done == 1:
                    seen.set()

        shapes = [TriangleMultiplicationShape(128, direction=way) for way in ("outgoing", "incoming")]
        specs = {kernel.spec for kernel in tpf_jit.api.chosen_kernels(shapes, None, None, None, False, False)}
        number = len(specs)

        def compile(*_: Any) -> list[Any]:
            kept.add(next(iter(specs)))
            assert not terminal or seen.wait(10)
            kept.update(specs)
            return []

        monkeypatch.setattr(type(default_store()), "get", lambda self, spec: Path("kept") if spec in kept else None)
        monkeypatch.setattr(tpf_jit, "compile", compile)
        monkeypatch.setattr(report, "Progress", Bar)
        monkeypatch.setattr(kernels, "WATCH_S", 0.01)
        monkeypatch.setattr(kernels, "_on_terminal", lambda: terminal)
        words = ("compile", "128", "--op", "triangle_multiplication")
        code, _, err = call(*words)
        assert code == 0 and err == f"compiling {number} kernels\n" and number > 2
        assert ([told[0], told[-1], 1 in told] == [-number, number, True]) if terminal else told == []
        told.clear()
        assert call(*words)[2] == "", "all are there"
        kept.clear()
        assert call(*words, "--json")[2] == "" and told == []

    def test_tuning_without_a_gpu_says_what_to_do(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tpf_jit.device.current_device", lambda index=None: None)
        code, _, err = call("tune", "384")
        assert code == 1
        assert err.startswith("Error: ")
        assert "tpf-jit db import" in err


class TestDatabase:
    def test_list(self, call: Any, reading: Any, database: Path) -> None:
        found = reading("db", "list", "--no-shipped")
        assert [(row["us"], row["grade"]) for row in found] == [(50.0, "search"), (100.0, "final")]
        assert found[1]["config"] == {"tile_n": 64, "stages": 3, "crop": 0}
        assert {row["layer"] for row in found} == {str(database)}
        _, out, _ = call("db", "list", "--no-shipped")
        assert "tile_n=64" in out
        assert reading("db", "list", "--no-shipped", "--device", "h200") == found

    def test_show(self, call: Any, reading: Any, database: Path) -> None:
        def show(*words: str) -> list:
            return reading("db", "show", *words, "--no-shipped")

        assert len(show("triangle_attention")) == 4
        found = show("N256")
        assert [row["status"] for row in found] == ["ok", "wrong"]
        assert found[0]["id"] == trial(TriangleAttentionShape(crop=256), us=50.0).id
        assert [row["status"] for row in show("N256", "--status", "wrong")] == ["wrong"]
        assert len(show("triangle_attention", "--limit", "1")) == 1
        assert show("N256", "--device", "h200") == found
        code, out, _ = call("db", "show", "N256", "--no-shipped")
        assert (code, "out is off" in out) == (0, True)

    @pytest.mark.parametrize("words", [(), ("--json",)])
    def test_a_problem_that_nothing_is_of_is_an_error(self, call: Any, database: Path, words: tuple[str, ...]) -> None:
        text = "Error: no problem has 'N9999' in its name; `tpf-jit db list` shows those that there are\n"
        assert call("db", "show", "N9999", "--no-shipped", *words) == (1, "", text)

    @pytest.mark.parametrize("content", [b"# Some text\n", b"\n\x89PNG\r\n\xff"])
    @pytest.mark.parametrize("verb", ["import", "merge"])
    def test_a_file_that_is_no_export(self, call: Any, database: Path, tmp_path: Path, verb: str, content: bytes) -> None:
        file = tmp_path / "some.jsonl"
        file.write_bytes(content)
        code, out, err = call("db", verb, file)
        assert (code, out) == (1, "") and err.startswith(f"Error: {file} is no export: ") and "`tpf-jit db export FILE`" in err

    def test_export_and_import(self, call: Any, reading: Any, database: Path, tmp_path: Path) -> None:
        text, other = tmp_path / "rows.jsonl", tmp_path / "other.db"
        assert call("db", "export", text)[0] == 0
        code, _, err = call("db", "import", text, "--db", other)
        assert (code, err.strip()) == (0, "added: trials=4 kernels=1")
        assert "trials=0" in call("db", "import", text, "--db", other)[2], "importing again adds nothing"
        ours, theirs = (reading("db", "list", "--no-shipped", "--db", path) for path in (database, other))
        assert [row["trial_id"] for row in ours] == [row["trial_id"] for row in theirs]

    def test_merge(self, call: Any, reading: Any, database: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.db"
        with TuningStore(other) as store:
            store.put_trial(trial(TriangleAttentionShape(crop=640), us=300.0))
        code, _, err = call("db", "merge", other)
        assert (code, err.strip()) == (0, "added: trials=1 kernels=0")
        assert len(reading("db", "list", "--no-shipped")) == 3

    def test_verify(self, call: Any, reading: Any, database: Path) -> None:
        assert reading("db", "verify") == {"problems": []}
        with closing(sqlite3.connect(database)) as connection:
            # Whatever protects the table from its own library does not protect it from a stranger.
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute("UPDATE trial SET median_us = 1.0 WHERE status = 'ok'")
            connection.commit()
        assert reading("db", "verify", code=1)["problems"]
        code, out, _ = call("db", "verify")
        assert code == 1
        assert "problems" in out

    @pytest.mark.parametrize("damage", ["garbage", "truncated"])
    def test_verify_and_doctor_report_a_damaged_file_and_leave_it_alone(
        self, call: Any, reading: Any, database: Path, damage: str
    ) -> None:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        content = database.read_bytes()
        database.write_bytes(b"no database " * 500 if damage == "garbage" else content[: len(content) // 2])
        before = database.read_bytes()
        assert reading("db", "verify", code=1)["problems"]
        states = {finding["what"]: finding["state"] for finding in reading("doctor", code=1)["findings"]}
        assert states["user database"] == doctor.FAIL
        assert database.read_bytes() == before and not list(database.parent.glob("*.damaged-*"))

    @pytest.mark.parametrize("words", ["show x", "export x.jsonl", "verify", "merge missing.db", "import missing.jsonl"])
    def test_a_missing_file_is_one_line(self, call: Any, tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        code, _, err = call("db", *words.split())
        assert code == 1
        assert err.startswith("Error: ")
        assert err.count("\n") == 1


class TestRecords:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """One record that is current with this tree, and one that is stale."""
        place = tmp_path / "records"
        place.mkdir()
        current = records.source_hashes()
        row = {"op": "triangle_attention", "pass": "forward", "impl": "tpf_jit", "N": 384, "ms": 0.125}
        for day, hashes in (("02", current), ("01", dict.fromkeys(current, "0" * 64))):
            record = {
                "kind": "bench.attention",
                "date": f"2026-12-{day}T10:20:30Z",
                "command": "tpf-jit bench attention",
                "device": {"name": "Test GPU"},
                "versions": {"tpf_jit": "0.1.0", "torch": "2.13.0", "python": "3.11"},
                "method": {"timer": "invented for a test"},
                "source_hash": hashes,
                "rows": [row],
            }
            records.write(record, place)
        return place

    def test_list_and_show(self, call: Any, reading: Any, folder: Path) -> None:
        listed = reading("records", "list", "--folder", folder)
        assert [record["date"][:10] for record in listed] == ["2026-12-01", "2026-12-02"]
        shown = reading("records", "show", listed[0]["name"], "--folder", folder)
        assert shown["rows"][0]["ms"] == 0.125
        code, out, _ = call("records", "show", "20261201", "--folder", folder)
        assert (code, "Test GPU" in out) == (0, True)
        assert call("records", "show", "nothing", "--folder", folder)[0] == 1

    KINDS = "bench.attention, or the part of one before its dot"

    @pytest.mark.parametrize("words", ["list", "list --json", "check", "check --json", "table"])
    def test_a_kind_that_no_record_has(self, call: Any, folder: Path, tmp_path: Path, words: str) -> None:
        line = ("records", *words.split(), "--kind")
        for kind in ("nope", "sweep", "bench.att"):
            text = f"Error: --kind: got {kind!r}; allowed: {self.KINDS}\n"
            assert call(*line, kind, "--folder", folder) == (1, "", text)
        assert call(*line, "bench", "--folder", folder)[1]
        (tmp_path / "empty").mkdir()
        text = f"Error: --kind: got 'bench'; allowed: nothing, as no record in {tmp_path / 'empty'} has a kind\n"
        assert call(*line, "bench", "--folder", tmp_path / "empty") == (1, "", text)

    def test_a_table_of_no_kind_is_not_written(self, call: Any, folder: Path, tmp_path: Path) -> None:
        document = tmp_path / "README.md"
        document.write_text(f"{cli_records.BEGIN}\nold\n{cli_records.END}\n", encoding="utf-8")
        assert call("records", "table", "--kind", "nope", "--folder", folder, "--update", document)[0] == 1
        assert cli_records.marked(document.read_text(encoding="utf-8")) == "old"

    def test_a_table_of_stale_records_only_is_no_error(self, call: Any, folder: Path) -> None:
        next(folder.glob("*20261202*")).unlink()
        code, out, _ = call("records", "table", "--kind", "bench", "--folder", folder)
        assert (code, out.strip()) == (0, cli_records.NONE_CURRENT)

    @pytest.mark.parametrize("words", ["list", "check", "table", "show bench", "check --json"])
    def test_a_folder_that_is_none(self, call: Any, tmp_path: Path, words: str) -> None:
        (tmp_path / "file").touch()
        for place in (tmp_path / "none", tmp_path / "file"):
            text = f"Error: --folder: got {place}; allowed: a folder that exists\n"
            assert call("records", *words.split(), "--folder", place) == (1, "", text)

    @pytest.mark.parametrize(("verb", "text"), [("list", "there are none"), ("check", "there are none"), ("table", "No record")])
    def test_an_empty_folder_is_no_error(self, call: Any, tmp_path: Path, verb: str, text: str) -> None:
        code, out, _ = call("records", verb, "--folder", tmp_path)
        assert code == 0 and out.startswith(text)

    def test_check_tells_current_from_stale(self, reading: Any, call: Any, folder: Path) -> None:
        verdicts = reading("records", "check", "--folder", folder, code=1)
        assert [verdict["state"] for verdict in verdicts] == ["stale", "current"]
        next(folder.glob("*20261201*")).unlink()
        assert call("records", "check", "--folder", folder)[0] == 0

    def test_table_has_current_records_only(self, call: Any, folder: Path) -> None:
        code, out, _ = call("records", "table", "--folder", folder)
        assert code == 0
        assert "0.125" in out
        assert "2026-12-02" in out
        assert "2026-12-01" not in out

    def test_update_writes_between_the_markers(self, call: Any, folder: Path, tmp_path: Path) -> None:
        document = tmp_path / "README.md"
        document.write_text(f"before\n{cli_records.BEGIN}\nold\n{cli_records.END}\nafter\n", encoding="utf-8")
        assert call("records", "table", "--folder", folder, "--update", document)[0] == 0
        text = document.read_text(encoding="utf-8")
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert cli_records.marked(text) == call("records", "table", "--folder", folder)[1].strip()
        again = call("records", "table", "--folder", folder, "--update", document)
        assert (again[0], "unchanged" in again[2]) == (0, True)
        document.write_text("no markers", encoding="utf-8")
        assert call("records", "table", "--folder", folder, "--update", document)[0] == 1


@pytest.mark.filterwarnings("ignore::tpf_jit.errors.FallbackWarning")
class TestBench:
    QUICK = ("--crops", "24", "--device", "cpu", "--rounds", "2", "--samples", "2", "--impls", "tpf_jit,torch")

    def test_attention_makes_a_valid_record(self, reading: Any, tmp_path: Path) -> None:
        record = reading("bench", "attention", *self.QUICK, "--out", tmp_path)
        assert records.validate(record) == []
        assert [row["impl"] for row in record["rows"]] == ["tpf_jit", "torch"]
        assert [json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")] == [record]

    def test_attention_for_people(self, call: Any) -> None:
        code, out, _ = call("bench", "attention", *self.QUICK)
        assert code == 0
        assert "N=24" in out

    def test_an_unknown_implementation(self, call: Any) -> None:
        code, _, err = call("bench", "attention", "--crops", "24", "--device", "cpu", "--impls", "abacus")
        assert code == 1
        assert "abacus" in err

    def test_latency(self, reading: Any) -> None:
        record = reading("bench", "latency", "--crop", "24", "--device", "cpu", "--repeats", "1", "--no-cold")
        assert records.validate(record) == []
        (first,) = [row for row in record["rows"] if row["what"] == "first result"]
        assert first["compiler_imported"] is False


def test_output_to_a_file_is_not_cut(tmp_path: Path, database: Path) -> None:
    """In a file or a log there is no terminal to be as narrow as."""
    environment = {**os.environ, "TPF_JIT_DB": str(database), "COLUMNS": "40"}
    command = [sys.executable, "-m", "tpf_jit.cli", "db", "list", "--no-shipped"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert trial().cell in done.stdout
    assert H200.name in done.stdout


class TestNarrowTerminals:
    """A terminal too narrow for a table shows all of it all the same."""

    COLUMNS = ("problem", "device", "us", "configuration", "grade", "date", "layer")
    ROWS = (("a/name/of/a/problem/" * 4, "NVIDIA H200", 2723.0, "kv_stages=3 tile_n=64 " * 4, "final", "2026-11-29", "last"),)

    @pytest.fixture
    def shown(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        from rich.console import Console

        def show(width: int, *arguments: Any) -> list[str]:
            stream = io.StringIO()
            screen = Console(file=stream, width=width, force_terminal=True, color_system=None, markup=False, highlight=False)
            monkeypatch.setattr(_output, "console", lambda: screen)
            _output.print_table(*arguments)
            return stream.getvalue().splitlines()

        return show

    @pytest.mark.parametrize("width", [20, 40, 80, 100, 120, 200])
    def test_no_column_vanishes(self, shown: Any, width: int) -> None:
        lines = shown(width, "tuned problems", self.COLUMNS, self.ROWS, "a note")
        assert max(map(len, lines)) <= width
        text = "".join("\n".join(lines).split())
        assert all(name in text for name in (*self.COLUMNS, "2026-11-29", "last", "anote"))
        assert text.count("kv_stages=3") == 4

    def test_what_has_room_is_a_table_and_what_has_none_a_listing(self, shown: Any) -> None:
        assert any(all(name in line for name in self.COLUMNS) for line in shown(100, "", self.COLUMNS, self.ROWS))
        assert "layer: last" in shown(60, "", self.COLUMNS, self.ROWS)

    def test_a_table_takes_no_more_room_than_it_needs(self, shown: Any) -> None:
        (head, *_) = [line for line in shown(200, "", ("a", "b"), [(1, "x y")]) if line.strip()]
        assert len(head.rstrip()) < 10


class TestWrongValues:
    @pytest.mark.parametrize(
        "line",
        [
            "compile 128 --jobs 0", "demo --crop 0", "demo --budget -1", "db verify --tolerance -1", "db show N768 --limit -1",
            "sweep 128 --trials -1", "sweep 128 --budget -1", "tune 128 --trials -1", "tune 128 --budget -1",
            "bench search --jobs 0",
        ],
    )  # fmt: skip
    def test_numbers_out_of_range_are_usage_errors(self, call: Any, line: str) -> None:
        code, _, err = call(*line.split())
        assert code == 2
        assert line.split()[-2] in err

    @pytest.mark.parametrize("verb", [("compile",), ("sweep", "--plan")])
    @pytest.mark.parametrize(
        ("op", "template"),
        [
            ("triangle_attention", "triangle_multiplication_back_sm90"),
            ("triangle_multiplication", "triangle_attention_forward_sm90"),
        ],
    )
    def test_a_template_of_another_operation(self, call: Any, verb: tuple[str, ...], op: str, template: str) -> None:
        code, _, err = call(*verb, "128", "--op", op, "--template", template)
        assert code == 1
        assert err.startswith(f"Error: template: got {template}, which computes ")
        assert f"templates of {op}: {op}_" in err

    def test_a_sweep_of_both_operations_leaves_out_what_a_template_does_not_compute(self, reading: Any) -> None:
        plan = reading("sweep", "openfold3", "--plan", "--template", "triangle_attention_forward_sm90")
        assert plan["cells"]
        assert all(key.startswith("triangle_attention/") for key in plan["cells"])

    def test_a_folder_in_the_place_of_the_database(
        self, call: Any, reading: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TPF_JIT_DB", str(tmp_path))
        text = f"{tmp_path} is a folder; TPF_JIT_DB names a file"
        for line in ("list", "show N768", "verify", f"export {tmp_path / 'x.jsonl'}", "stale", "prune", "report"):
            assert call("db", *line.split())[::2] == (1, f"Error: {text}\n"), line
        (found,) = [each for each in reading("doctor", code=1)["findings"] if each["what"] == "user database"]
        assert (found["state"], found["found"]) == (doctor.FAIL, text)
        code, _, err = call("db", "verify", "--db", tmp_path / "..")
        assert (code, "the tuning database is a file" in err) == (1, True)

    def test_doctor_reads_the_workspace_as_launches_do(self, reading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TPF_JIT_WORKSPACE_MIB", "lots")
        (found,) = [each for each in reading("doctor", code=1)["findings"] if each["what"] == "workspace"]
        assert found["state"] == doctor.FAIL
        assert "'lots'" in found["found"]

    def test_training_says_what_pytorch_does(self, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tpf_jit, "compile", lambda *arguments: [])
        wide = ("compile", "128", "--op", "triangle_multiplication", "--channels", "512")
        _, _, err = call(*wide, "--training", "--json")
        assert err.startswith("the backward takes the PyTorch path for N=128 C=512 outgoing bf16 and 1 more: ")
        assert err.count("\n") == 1
        assert call(*wide, "--json")[2] == ""
        assert call("compile", "128", "--training", "--json")[2] == ""
