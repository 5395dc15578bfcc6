"""The demo's tables for a GPU, from results as the tuner and the bench give them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tuning_samples import H200, trial

import tpf_jit
from tpf_jit import demo
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.tune.report import Result
from tpf_jit.tuning_db import TuningStore, cell_key

SHAPE = TriangleAttentionShape(crop=384)
CONFIGS = [{"tile_n": tile_n, "stages": 2, "crop": 0} for tile_n in (64, 96, 128)]


@pytest.fixture
def result(private_state: Any) -> Result:
    """A finished sweep of three configurations, of which the second wins."""
    rows = [trial(SHAPE, us=us, config=config, grade="final") for us, config in zip((110.0, 100.0, 105.0), CONFIGS, strict=True)]
    with TuningStore() as store:
        store.put_trials(rows)
        best = store.best(cell_key(SHAPE, "forward"), H200.model)
    return Result(SHAPE, "forward", cell_key(SHAPE, "forward"), H200.model, best, rows, "s", "complete", 12.0)


def row(impl: str, ms: float, error: float) -> dict[str, Any]:
    problem = {"op": SHAPE.op, "pass": "forward", "B": 1, "I": 384, "N": 384, "H": 4, "D": 32, "dtype": "bfloat16"}
    return {**problem, "impl": impl, "ms": ms, "peak_mib": 100.0, "rel_rms": {"out": error}}


def record(*rows: dict[str, Any], **absent: str) -> dict[str, Any]:
    return {"device": {"name": "NVIDIA H200"}, "rows": list(rows), "absent_peers": absent}


def test_the_tuned_table_marks_the_winner(result: Result) -> None:
    part = demo._tuned(result)
    assert part.passed
    assert [row["us"] for row in part.to_dict()["rows"]] == [100.0, 105.0, 110.0]
    assert [row["winner"] for row in part.to_dict()["rows"]] == [True, False, False]
    assert "100.0 us" in part.note


def test_a_sweep_without_winner_fails(result: Result) -> None:
    assert not demo._tuned(dataclasses.replace(result, best=None, trials=[])).passed


def test_the_comparison_is_in_factors_of_ours() -> None:
    part = demo._compared(record(row("torch", 2.0, 2.2e-3), row("tpf_jit", 0.5, 1.9e-3), cuequivariance="not installed"))
    assert part.passed
    rows = part.to_dict()["rows"]
    assert [(row["implementation"], row["times tpf_jit"]) for row in rows] == [("tpf_jit", 1.0), ("torch", 4.0)]
    assert "I=384 N=384" in part.title
    assert part.note == "not measured: cuequivariance: not installed"


@pytest.mark.parametrize("rows", [[row("tpf_jit", 0.5, 3e-3)], [row("torch", 2.0, 2e-3)]], ids=["wrong", "absent"])
def test_a_wrong_or_missing_result_fails(rows: list[dict[str, Any]]) -> None:
    assert not demo._compared(record(*rows)).passed


@pytest.mark.filterwarnings("ignore::tpf_jit.errors.FallbackWarning")
def test_the_gpu_path_in_order(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tune, explain, repeat, compare; with the GPU's parts replaced, as the order is what is tested."""
    measured = record(row("tpf_jit", 0.5, 1.9e-3), row("torch", 2.0, 2.2e-3))
    asked: dict[str, Any] = {}

    def bench(shapes: Any, passes: Any, settings: Any, command: str) -> dict[str, Any]:
        asked.update(shapes=shapes, impls=settings.impls)
        return measured

    monkeypatch.setattr("tpf_jit.device.current_device", lambda index=None: H200)
    monkeypatch.setattr(tpf_jit, "tune", lambda shape, budget_s: asked.update(tuned=shape, budget_s=budget_s) or result)
    explanation = dataclasses.replace(tpf_jit.explain(SHAPE), path="kernel")
    monkeypatch.setattr(tpf_jit, "explain", lambda shape: explanation)
    monkeypatch.setattr("tpf_jit.bench.bench_attention", bench)
    real = demo._repeats
    monkeypatch.setattr(demo, "_repeats", lambda shape: real(TriangleAttentionShape(crop=20), "cpu"))
    said: list[str] = []
    parts = list(demo.run(384, 5.0, said.append))
    assert [part.title.split(":")[0].split(" on ")[0] for part in parts] == ["tuned", "repeated calls", "compared"]
    assert all(part.passed for part in parts)
    assert asked["tuned"] == SHAPE and asked["budget_s"] == 5.0
    assert asked["shapes"] == [SHAPE] and asked["impls"][:1] == ["tpf_jit"]
    assert any("config" in text for text in said)


def test_a_machine_that_takes_the_other_path_fails(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpf_jit.device.current_device", lambda index=None: H200)
    monkeypatch.setattr(tpf_jit, "tune", lambda shape, budget_s: result)
    explanation = dataclasses.replace(tpf_jit.explain(SHAPE), path="fallback", reason="a reason")
    monkeypatch.setattr(tpf_jit, "explain", lambda shape: explanation)
    *_, last = demo.run(384, 5.0, lambda text: None)
    assert not last.passed
    assert last.rows == [("fallback", "a reason")]
