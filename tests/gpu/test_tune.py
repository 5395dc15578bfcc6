"""Tuning and benches on a real GPU: the clock is right, the check gates, errors become outcomes, a sweep ends in a winner."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tpf_jit
from tpf_jit import kernels, resolve
from tpf_jit.bench import BenchSettings, bench_attention, bench_latency
from tpf_jit.device import current_device
from tpf_jit.errors import FallbackWarning
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.tune import measure, timing, tune
from tpf_jit.tune.measure import Job, MeasureSettings, WorkloadMeasurer
from tpf_jit.tuning_db import TuningStore

pytestmark = pytest.mark.gpu

SHAPE = TriangleAttentionShape(crop=256)
FORWARD = "triangle_attention_forward_sm90"
ROOT = Path(__file__).resolve().parents[2]


def cuda_timer() -> timing.CudaTimer:
    return timing.CudaTimer(0, torch.cuda.get_device_properties(0).L2_cache_size)


def measurer(load=None, timer=None, shape=SHAPE, **options) -> WorkloadMeasurer:
    template = registry.get(FORWARD)
    used = measure.cuda_measurer(template, shape, current_device(), 0)
    if load is None and timer is None and not options:
        return used
    return WorkloadMeasurer(
        template, shape, timer or cuda_timer(), load or used._load, "cuda:0", used.device, MeasureSettings(heat_s=0.05), options
    )


def job(shape=SHAPE) -> Job:
    template = registry.get(FORWARD)
    kernel = kernels.get_kernel(FORWARD, shape, config=template.default(shape))
    path = kernels.default_store().ensure(kernel.spec)
    return Job(kernel.spec.key, kernel.config, path, kernel.spec.symbol, "so")


def test_the_clock_agrees_with_memory_bandwidth():
    """A 1 GiB copy reads and writes 2 GiB; H100 and H200 boards move 1.6 to 4.9 TB/s."""
    a = torch.randn(1 << 28, device="cuda")
    b = torch.empty_like(a)
    timer = cuda_timer()
    timing.heat(timer, [lambda: b.copy_(a)], 0.1)
    us = timing.median(timer.sample([lambda: b.copy_(a)], 20))
    assert 2 * 2**30 / 4.9e6 < us < 2 * 2**30 / 1.5e6
    again = timing.median(timer.sample([lambda: b.copy_(a)], 20))
    assert again == pytest.approx(us, rel=0.03)


def test_launch_overhead_is_not_counted():
    """Ten empty kernels' worth of host time hide behind the delay: a tiny kernel costs a few us, not the host's 5-10 us each."""
    x = torch.zeros(16, device="cuda")
    timer = cuda_timer()
    launches = [lambda: x.add_(1.0)]
    timing.heat(timer, launches, 0.05)
    assert timing.median(timer.sample(launches, 20, group=16)) < 5.0


def test_a_flushed_cache_is_cold():
    """32 MiB fit into the L2: read again at once they come from there, after a flush from memory."""
    a = torch.randn(1 << 23, device="cuda")
    timer = cuda_timer()
    launches = [lambda: a.sum()]
    timing.heat(timer, launches, 0.05)
    warm = timing.median(timer.sample(launches, 20))
    cold = timing.median(timer.sample(launches, 20, flush=True))
    assert cold > 1.05 * warm


def test_a_right_kernel_is_checked_and_timed():
    outcome = measurer().measure(job())
    assert outcome.status == "ok", outcome
    assert outcome.errors["out"] <= 2.1e-3
    assert outcome.state["clocks_before"]["sm_clock_mhz"] > 500 and outcome.state["clocks_after"]["sm_clock_mhz"] > 500
    assert outcome.state["rotated_sets"] >= 2
    spread = timing.quantile(outcome.samples_us, 0.9) / timing.quantile(outcome.samples_us, 0.1)
    assert spread < 1.2 and 5 < outcome.median_us < 2000


def test_a_kernel_that_does_nothing_is_fast_and_loses():
    outcome = measurer(load=lambda *_: lambda *arguments: None).measure(job())
    assert outcome.status == "wrong" and outcome.samples_us == [] and outcome.errors["out"] == float("inf")


def test_a_kernel_that_skips_its_last_rows_loses():
    real = measurer()._load

    def load(binary, symbol, kind):
        kernel = real(binary, symbol, kind)

        def lazy(q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas):
            lse = lse[:, :-1].contiguous()
            kernel(q[:, :-1], k[:, :-1], v[:, :-1], bias, mask, out[:, :-1], residual, lse, lse_low, scale, num_ctas)

        return lazy

    assert measurer(load=load).measure(job()).status == "wrong"


def test_memory_that_runs_out_is_an_outcome():
    used = measurer(seed=1)
    used.verify(job())
    held = []
    try:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + (8 << 20)) / current_device().memory_bytes)
        for size in (1 << 26, 1 << 23, 1 << 21):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        outcome = used.measure(job())
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert outcome.status == "launch_error" and not outcome.fatal and "out of device memory" in outcome.detail, outcome
    assert used.measure(job()).status == "ok"


LOST = """
import torch
from test_tune import measurer, job
def load(*_):
    return lambda *arguments: torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]
outcome = measurer(load=load).measure(job())
print(outcome.status, outcome.fatal, outcome.detail.splitlines()[0])
"""


def test_a_lost_device_is_a_fatal_outcome():
    """In a process of its own, as its CUDA context is lost."""
    path = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, "-c", LOST], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("launch_error True"), done.stdout + done.stderr


@pytest.fixture
def fresh(private_state):
    """Choices and kernels as in a new process with an empty database, and none of them left behind."""
    kernels.forget()
    resolve.reload()
    yield
    kernels.forget()
    resolve.reload()


def test_a_sweep_finds_a_winner_that_is_used(fresh):
    result = tpf_jit.tune(SHAPE, max_trials=6, progress=False)
    assert result.stopped == "trials" and result.new_trials == 6
    assert result.best is not None and result.best.grade == "final", result
    assert all(row.status in ("ok", "slow") for row in result.trials), result.table()
    default = [row.median_us for row in result.trials if row.config == result.default_config and row.status == "ok"]
    assert not default or result.best.us <= 1.05 * default[-1]
    again = tune(SHAPE, max_trials=0, progress=False)
    assert again.new_trials == 0 and again.best == result.best
    with TuningStore() as store:
        assert store.verify() == [] and store.leases() == []
    kernel = tpf_jit.compile(SHAPE)
    assert kernel.config_from == "tuned" and dict(kernel.spec.config) == result.best_config


def test_the_bench_times_the_kernel_beside_pytorch():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        record = bench_attention([SHAPE], ("forward",), BenchSettings(rounds=4, samples=5, heat_s=0.1))
    rows = {row["impl"]: row for row in json.loads(json.dumps(record))["rows"]}
    assert rows["tpf_jit"]["config"] and rows["tpf_jit"]["config_from"] in ("tuned", "nearest", "sibling", "default")
    assert rows["tpf_jit"]["rel_rms"]["out"] <= 2.1e-3
    assert rows["tpf_jit"]["ms"] < rows["torch"]["ms"] and rows["tpf_jit"]["peak_mib"] < rows["torch"]["peak_mib"]
    assert record["device"]["sm_clock_mhz"] > 500 and record["method"]["timer"] == "cuda events"


def test_calls_are_cheap_and_warm_processes_import_no_compiler():
    tpf_jit.warmup([SHAPE])
    record = bench_latency(SHAPE, repeats=1, cold=False)
    calls = {row["impl"]: row["us"] for row in record["rows"] if row["what"] == "call overhead"}
    # 10 us, or on a slow host no more than PyTorch's cheapest operator costs there.
    assert calls["tpf_jit, launch alone"] <= max(10.0, 1.2 * calls["torch.add"])
    assert calls["tpf_jit"] <= 10.0 * calls["torch.add"]
    first = next(row for row in record["rows"] if row["what"] == "first result")
    assert first["compiler_imported"] is False
