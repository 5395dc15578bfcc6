"""What the command line says beside its results: that it was interrupted, and warnings without lines of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import tpf_jit
import tpf_jit.bench  # so that its names can be replaced
from tpf_jit import cli
from tpf_jit.cli import app, doctor, kernels
from tpf_jit.errors import FallbackWarning
from tpf_jit.kernels import default_store
from tpf_jit.shape import TriangleMultiplicationShape

ROOT = Path(__file__).resolve().parents[2]


def stop(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


class TestInterrupts:
    WORDS = ("compile", "128", "--op", "triangle_multiplication")

    def test_a_command_says_so(self, private_state: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setattr(tpf_jit.bench, "bench_multiplication", stop)
        assert app.run(["bench", "trimul", "--device", "cpu", "--crops", "24"]) == 130
        assert capsys.readouterr() == ("", "interrupted\n")

    def test_in_a_process_of_its_own(self, private_state: Path) -> None:
        """By the signal that Ctrl-C sends."""
        script = (
            "import os, signal\nfrom tpf_jit.cli import doctor, main\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "doctor.examine = lambda: os.kill(os.getpid(), signal.SIGINT)\nmain(['doctor'])"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")

    @pytest.fixture
    def specs(self, private_state: Path) -> list[Any]:
        """The kernels that `WORDS` asks for."""
        shapes = [TriangleMultiplicationShape(128, direction=way) for way in ("outgoing", "incoming")]
        found = list(dict.fromkeys(k.spec for k in tpf_jit.api.chosen_kernels(shapes, None, None, None, False, False)))
        assert len(found) > 3
        return found

    @pytest.fixture
    def kept(self, specs: list[Any], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
        """The kernels that the cache has: the first, for a start."""
        found = {specs[0]}
        monkeypatch.setattr(type(default_store()), "get", lambda store, spec: Path("kept") if spec in found else None)
        return found

    @pytest.mark.parametrize("terminal", [False, True])
    @pytest.mark.parametrize("json", [[], ["--json"]])
    def test_compile_says_what_is_kept(
        self, specs: list[Any], kept: set[Any], json: list[str], terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
    ) -> None:
        """Of those that it said it would compile."""
        monkeypatch.setattr(kernels, "_on_terminal", lambda: terminal)
        monkeypatch.setattr(tpf_jit, "compile", lambda *_: stop(kept.update(specs[:3])))
        assert app.run([*self.WORDS, *json]) == 130
        out, err = capsys.readouterr()
        total = len(specs) - 1
        last = f"interrupted; 2 of {total} kernels are kept, the same command goes on from there"
        assert (out, err.splitlines()) == ("", [last] if json else [f"compiling {total} kernels", last])

    def test_a_compile_that_had_nothing_to_do(self, specs: list[Any], kept: set[Any], monkeypatch: Any, capsys: Any) -> None:
        kept.update(specs)
        monkeypatch.setattr(tpf_jit, "compile", stop)
        assert app.run([*self.WORDS]) == 130
        assert capsys.readouterr() == ("", "interrupted\n")


class TestWarnings:
    TEXT = "triangle_multiplication takes the PyTorch path"
    BENCH = "bench trimul --device cpu --crops 8 --channels 32 --rounds 1 --samples 1 --impls tpf_jit --json".split()

    def bench(self, *python: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *python, "-m", "tpf_jit", *self.BENCH]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True)

    def test_one_line_of_text_only(self, private_state: Path) -> None:
        done = self.bench()
        assert done.returncode == 0, done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"warning: {self.TEXT}")

    def test_filters_still_work(self, private_state: Path) -> None:
        quiet = self.bench("-W", "ignore:triangle_multiplication takes:UserWarning")
        assert (quiet.returncode, quiet.stderr) == (0, "")
        failed = self.bench(PYTHONWARNINGS="error:triangle_multiplication takes:UserWarning")
        assert failed.returncode == 1 and f"FallbackWarning: {self.TEXT}" in failed.stderr and "warning: " not in failed.stderr

    def test_elsewhere_they_stay_as_they_are(self, private_state: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        """Before and after the process's own command line, and where another program runs one."""
        usual, during = warnings.formatwarning, []
        monkeypatch.setattr(doctor, "examine", lambda: during.append(warnings.formatwarning) or [])
        with pytest.raises(SystemExit):
            cli.main(["doctor"])
        app.run(["doctor"])
        assert during[0](FallbackWarning("the text"), FallbackWarning, "file.py", 1, line="x") == "warning: the text\n"
        assert during[1] is warnings.formatwarning is usual
