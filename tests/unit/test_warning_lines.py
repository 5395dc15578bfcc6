"""Warnings show the line of the user's that led to them, whatever lies between: PyTorch, an import, other lines of ours."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tuning_samples import H200, FakeRegistry, trial

import tpf_jit
from tpf_jit import _logging, cache, errors, resolve
from tpf_jit.errors import CacheWarning, FallbackWarning
from tpf_jit.ops import fallback, routing
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.tuning_db import DatabaseWarning, TuningStore, reader

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, private_state: Path) -> None:
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.setattr(reader, "_warned", set())
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(resolve, "_warned_stale", set())


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def only(caught: list[Any], category: type[Warning]) -> tuple[str, int]:
    (found,) = [warning for warning in caught if warning.category is category]
    return found.filename, found.lineno


def attention(**options: Any) -> tuple[torch.Tensor, ...]:
    q = torch.randn(1, 2, 1, 8, 16, **options)
    return q, q, q, torch.randn(1, 1, 1, 8, 8)


@pytest.mark.parametrize("mode", ["plain", "no_grad", "training", "compiled"])
def test_a_fallback_of_attention(mode: str) -> None:
    tensors = attention(requires_grad=mode == "training")
    call = torch.compile(tpf_jit.triangle_attention, backend="eager") if mode == "compiled" else tpf_jit.triangle_attention
    with pytest.warns(FallbackWarning) as caught, torch.set_grad_enabled(mode != "no_grad"):
        here = line() + 1
        call(*tensors)
    assert only(list(caught), FallbackWarning) == (__file__, here)


def test_inside_a_module_of_the_users() -> None:
    class Block(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            self.line = line() + 1
            return tpf_jit.triangle_attention(*tensors)

    block = Block()
    with pytest.warns(FallbackWarning) as caught:
        block(*attention())
    assert only(list(caught), FallbackWarning) == (__file__, block.line)


@pytest.mark.filterwarnings("ignore:triangle_attention takes:tpf_jit.errors.FallbackWarning")
def test_a_fallback_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    out = tpf_jit.triangle_attention(*attention(requires_grad=True))
    monkeypatch.setattr(routing, "_warned", set())
    ours = {"__name__": "tpf_jit.ops.of_a_test", "warn_once": routing.warn_once, "usual": fallback.backward}
    exec("def backward(*arguments):\n    warn_once('there is none', 'the backward')\n    return usual(*arguments)", ours)
    monkeypatch.setattr(fallback, "backward", ours["backward"])
    with pytest.warns(FallbackWarning, match="the backward takes") as caught:
        here = line() + 1
        out.sum().backward()
    assert only(list(caught), FallbackWarning) == (__file__, here)


def test_a_multiplication_and_warmup() -> None:
    from tpf_jit.templates.triangle_multiplication.inputs import make_inputs

    x = make_inputs(tpf_jit.TriangleMultiplicationShape(8, 32))
    with pytest.warns(FallbackWarning) as caught:
        here = line() + 1
        tpf_jit.triangle_multiplication(x.z, "outgoing", None, *x.weights)
    assert only(list(caught), FallbackWarning) == (__file__, here)
    with pytest.warns(FallbackWarning) as caught:
        here = line() + 1
        tpf_jit.warmup(TriangleAttentionShape(8))
    assert only(list(caught), FallbackWarning) == (__file__, here)


def test_a_database_that_cannot_be_read(tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_bytes(b"no database " * 100)
    with pytest.warns(DatabaseWarning) as caught:
        here = line() + 1
        resolve.Dispatcher(bad, shipped=False).layers()
    assert only(list(caught), DatabaseWarning) == (__file__, here)


def test_the_cache_and_the_log_level() -> None:
    with pytest.warns(CacheWarning) as caught:
        here = line() + 1
        cache._warn_once("subject", "message")
    assert only(list(caught), CacheWarning) == (__file__, here)
    with pytest.warns(UserWarning, match="TPF_JIT_LOG") as caught:
        here = line() + 1
        _logging.configure("loud")
    assert only(list(caught), UserWarning) == (__file__, here)


def test_the_record_of_a_stale_configuration(caplog: pytest.LogCaptureFixture) -> None:
    with TuningStore() as store:
        store.put_trial(trial(grade="final", source_hash="6" * 64))
    dispatcher = resolve.Dispatcher(store.path, shipped=False, device=H200, registry=FakeRegistry())
    with caplog.at_level(logging.WARNING, "tpf_jit"):
        here = line() + 1
        found = dispatcher.resolve("triangle_attention", "forward", TriangleAttentionShape(384))
    assert found.source == "tuned"
    (record,) = [each for each in caplog.records if "it serves until tuned again" in each.getMessage()]
    assert (record.pathname, record.lineno) == (__file__, here)


def test_where_no_line_is_the_users_the_outermost_is_taken() -> None:
    scope: dict[str, Any] = {"__name__": "tpf_jit.somewhere", "errors": errors}
    exec(compile("def level():\n    return errors.user_level()\n", "inside.py", "exec"), scope)
    assert scope["level"]() == 2, "one line of ours, then this one"


SCRIPT = """import warnings
warnings.simplefilter("always")
import tpf_jit
from tpf_jit.tuning_db.reader import read_layer
read_layer(BAD)
"""


def test_a_script_that_imports_us_while_a_variable_is_wrong(tmp_path: Path) -> None:
    """In a process of its own, where importing is what warns; nothing but the standard library is needed."""
    (tmp_path / "bad.db").write_bytes(b"no database " * 100)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("BAD", repr(str(tmp_path / "bad.db"))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TPF_JIT_LOG": "loud"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{script}:3: UserWarning: TPF_JIT_LOG is 'loud'" in done.stderr
    assert f"{script}:5: DatabaseWarning: tuning database" in done.stderr


def test_an_error_filter_still_raises() -> None:
    with warnings.catch_warnings(), pytest.raises(FallbackWarning):
        warnings.simplefilter("error")
        tpf_jit.triangle_attention(*attention())
