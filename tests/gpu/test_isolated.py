"""Measuring in a child process on a real GPU: same figures, and hangs, crashes and ruined contexts cost one trial."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from test_tune import SHAPE, job

from tpf_jit.device import current_device
from tpf_jit.templates import registry
from tpf_jit.tune import measure
from tpf_jit.tune.isolated import HardLimits, Isolation

pytestmark = pytest.mark.gpu

FORWARD = "triangle_attention_forward_sm90"
LIMITS = HardLimits(start_s=300.0, first_s=300.0, step_s=20.0)


def hang(*arguments: Any) -> None:
    torch.cuda._sleep(2**62)


def corrupt(*arguments: Any) -> None:
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]


def crash(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


FAULTS = {"hang": hang, "corrupt": corrupt, "crash": crash}


def faulty(template: Any, *arguments: Any) -> measure.WorkloadMeasurer:
    """The CUDA measurer; a job whose symbol names a fault gets that instead of a kernel."""
    used = measure.cuda_measurer(template, *arguments)
    real = used._load
    used._load = lambda binary, symbol, kind: FAULTS.get(symbol) or real(binary, symbol, kind)
    return used


@pytest.fixture
def isolation():
    with Isolation(LIMITS) as isolation:
        yield isolation


def test_the_figures_are_those_of_this_process(isolation):
    here = measure.cuda_measurer(registry.get(FORWARD), SHAPE, current_device(), 0)
    there = isolation.measurer(measure.cuda_measurer, registry.get(FORWARD), SHAPE, current_device(), 0)
    assert (there.protocol, there.device) == (here.protocol, here.device)
    ours, theirs = here.measure(job()), there.measure(job())
    assert (ours.status, theirs.status) == ("ok", "ok"), (ours, theirs)
    assert theirs.median_us == pytest.approx(ours.median_us, rel=0.1)
    here.close()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_costs_one_trial(isolation, fault):
    used = isolation.measurer(faulty, registry.get(FORWARD), SHAPE, current_device(), 0)
    before = used.measure(job())
    good = job()
    bad = measure.Job("bad", good.config, good.binary, fault, good.kind)
    found = used.measure(bad)
    assert found.status == "launch_error" and not found.fatal, found
    after = used.measure(good)
    assert after.status == "ok" and after.median_us == pytest.approx(before.median_us, rel=0.1)
    assert isolation.started == 2
    # The context of this process has seen nothing of it.
    assert int(torch.ones(1, device="cuda").item()) == 1
