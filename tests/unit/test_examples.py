"""Every example runs to its end, on whatever this machine has; on a CPU they take the PyTorch path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
ARGUMENTS = {"01_call.py": ["40"], "02_autograd.py": ["24"], "04_warmup_and_graph.py": ["64"]}


def test_examples_are_numbered_without_gaps() -> None:
    assert [path.name[:3] for path in EXAMPLES] == [f"{number:02d}_" for number in range(1, len(EXAMPLES) + 1)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    command = [sys.executable, str(path), *ARGUMENTS.get(path.name, [])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_in_the_readme(path: Path) -> None:
    assert f"(examples/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
