"""TPF_JIT_LOG: silent without it, on stderr with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import logging
logging.basicConfig(level=logging.ERROR)
import tpf_jit
log = logging.getLogger("tpf_jit")
log.debug("a detail")
log.info("a fact")
log.warning("a problem")
"""


def stderr(level: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TPF_JIT_LOG"}
    if level is not None:
        environment["TPF_JIT_LOG"] = level
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize(
    ("level", "messages"),
    [
        (None, []),
        ("error", []),
        ("WARNING", ["a problem"]),
        ("info", ["a fact", "a problem"]),
        ("DEBUG", ["a detail", "a fact", "a problem"]),
    ],
)
def test_what_is_said(level: str | None, messages: list[str]) -> None:
    lines = stderr(level).splitlines()
    assert [line.rpartition("] ")[2] for line in lines] == messages


def test_an_unknown_level_is_named() -> None:
    text = stderr("loud")
    assert "TPF_JIT_LOG is 'loud'" in text
    assert "a fact" not in text
