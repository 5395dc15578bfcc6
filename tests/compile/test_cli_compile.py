"""The verbs that compile, on a machine without a GPU: `compile` and `demo`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tpf_jit import demo
from tpf_jit.cli.app import run
from tpf_jit.errors import FallbackWarning

ROOT = Path(__file__).resolve().parents[2]


def test_compile_groups_the_shapes_that_share_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    # float16: no shipped row is near, so both crops take the default.
    assert run(["compile", "384,768", "--arch", "sm_90a", "--dtype", "float16", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)
    assert kernel["arch"] == "sm_90a"
    assert [served["shape"].split("/")[4] for served in kernel["serves"]] == ["N384", "N768"]
    assert kernel["resources"]["hgmma"] > 0
    assert kernel["resources"]["utmaldg"] > 0
    assert kernel["resources"]["smem_bytes"] > 0
    # The second time it is in the cache, and the table for people is made from what was recorded.
    assert run(["compile", "384", "--arch", "sm_90a", "--dtype", "float16"]) == 0
    assert str(kernel["resources"]["smem_bytes"]) in capsys.readouterr().out


def test_compile_takes_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", "384", "--arch", "sm_90a", "--json"]) == 0
    (default,) = json.loads(capsys.readouterr().out)
    other = 64 if default["config"]["tile_n"] != 64 else 32
    assert run(["compile", "384", "--arch", "sm_90a", "--config", f"tile_n={other}", "--json"]) == 0
    (kernel,) = json.loads(capsys.readouterr().out)
    assert kernel["config"]["tile_n"] == other
    assert kernel["key"] != default["key"]
    assert [served["config_from"] for served in kernel["serves"]] == ["explicit"]


def test_demo_without_a_gpu() -> None:
    """In a process that sees no GPU, so that it is the same everywhere."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error::tpf_jit.errors.FallbackWarning", "-m", "tpf_jit.cli", "demo", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled, checked = json.loads(done.stdout)
    assert [row["head dim"] for row in compiled["rows"]] == list(demo.HEAD_DIMS)
    assert all(row["spilled bytes"] == 0 and row["wgmma"] > 0 and row["TMA loads"] > 0 for row in compiled["rows"])
    assert [row["tensor"] for row in checked["rows"]] == list(demo.BOUNDS)
    assert all(row["within"] for row in checked["rows"])
    assert "Hopper" in checked["note"]


@pytest.mark.filterwarnings(f"ignore::{FallbackWarning.__module__}.{FallbackWarning.__qualname__}")
def test_demo_fails_when_a_result_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import tpf_jit

    real = tpf_jit.triangle_attention

    def off_by_a_percent(*arguments: Any) -> Any:
        return real(*arguments) * 1.01

    monkeypatch.setattr("tpf_jit.device.current_device", lambda index=None: None)
    monkeypatch.setattr(demo, "HEAD_DIMS", (32,))
    monkeypatch.setattr(tpf_jit, "triangle_attention", off_by_a_percent)
    assert run(["demo"]) == 1
    captured = capsys.readouterr()
    assert "Error: not as it should be: the operator on random input" in captured.err
    assert " no " in captured.out


@pytest.mark.parametrize("variable", ["TPF_JIT_CACHE", "TPF_JIT_DB"])
def test_compile_says_when_nothing_could_be_kept(tmp_path: Path, variable: str) -> None:
    """A script that compiles ahead must see it."""
    (tmp_path / "file").write_text("in the way")
    places = {"TPF_JIT_CACHE": str(tmp_path / "objects"), "TPF_JIT_DB": str(tmp_path / "user.db")}
    environment = {**os.environ, **places, variable: str(tmp_path / "file" / "inside")}
    command = [sys.executable, "-m", "tpf_jit", "compile", "384", "--arch", "sm_90a"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "could not be kept" in done.stderr and "triangle_attention" in done.stdout
    assert variable in done.stderr, "the warning names the remedy"
