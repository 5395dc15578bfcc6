"""`make` sets up where it has to, and leaves a Python that has everything as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the Makefile itself looks at, without an environment."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def plan(checkout: Path, target: str, python: str) -> str:
    """The commands that `make TARGET` would run."""
    dropped = ("MAKEFLAGS", "MAKELEVEL", "PYTHONPATH", "VENV", "TORCH_SPEC", "EXTRAS", "JOBS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    command = ["make", "--dry-run", "--no-print-directory", target, f"PYTHON={python}"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with nothing but its standard library."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("target", ["demo", "test", "lint", "wheel"])
def test_a_fresh_machine_is_set_up_first(checkout: Path, bare_python: str, target: str) -> None:
    commands = plan(checkout, target, bare_python)
    create, torch, project = (
        commands.index(text) for text in ("-m venv .venv", 'pip install -q "torch==', 'pip install -q -e ".[cu13,dev]"')
    )
    assert create < torch < project < commands.rindex(".venv/bin/python")


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_python_with_everything_is_used_as_it_is(checkout: Path, target: str) -> None:
    commands = plan(checkout, target, sys.executable)
    assert "venv" not in commands.replace(sys.executable, "python")
    assert "pip" not in commands
    assert sys.executable in commands


def test_the_environment_is_made_once(checkout: Path, bare_python: str) -> None:
    stamp = checkout / ".venv" / ".installed"
    stamp.parent.mkdir()
    stamp.touch()
    assert "pip" not in plan(checkout, "demo", bare_python)
    later = stamp.stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (later, later))
    assert "pip install" in plan(checkout, "demo", bare_python), "changed requirements are installed"


def test_ci_runs_the_same_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")
