"""Right before fast, on the real workload of triangle attention with emulated kernels on the CPU."""

from __future__ import annotations

import dataclasses
import math
from array import array

import pytest
import torch
from tune_fakes import ToyConfig, ToyKernel, ToyShape, ToyTemplate

from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape
from tpf_jit.tune import check
from tpf_jit.tune.check import Case, Checker, plan, same_bits

SHAPE = TriangleAttentionShape(crop=48, rows=7, heads=2, head_dim=16)


def attention(q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas):
    """A right kernel: the calling convention's operation in float32."""
    scores = scale * q.float() @ k.float().mT + bias.float().unsqueeze(1)
    if mask is not None:
        scores = scores + mask[:, :, None, None, : k.shape[-2]]
    empty = (scores == -math.inf).all(-1, keepdim=True)
    out.copy_(torch.softmax(scores, -1).masked_fill(empty, 0.0) @ v.float())
    lse.copy_(torch.logsumexp(scores, -1))


class Attention:
    """As much of a template as a check needs."""

    crops = ()

    def workload(self, shape, device, seed=0, family="normal"):
        from tpf_jit.templates.triangle_attention.workload import ForwardWorkload

        return ForwardWorkload(shape, device, seed, family)

    def check(self, shape, config):
        return None if config is None or shape.crop == config else "compiled for another crop"

    def variant(self, shape):
        return {"dtype": shape.dtype}


def verdict(kernel, shape=SHAPE, config=None, template=None):
    return Checker(template or Attention(), shape, "cpu", seed=3).verdict(kernel, config)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_a_right_kernel_passes(mask):
    shape = TriangleAttentionShape(crop=48, rows=7, heads=2, head_dim=16, mask=mask)
    found = verdict(attention, shape)
    assert found.ok, found
    assert 1e-3 < found.errors["out"] < 3e-3 and found.errors["lse"] < 1e-4
    assert "5 cases" in found.detail and "seed 3" in found.detail


def broken(change):
    def kernel(*arguments):
        attention(*arguments)
        change(arguments)

    return kernel


BUGS = {
    "forgets the last row": lambda a: a[5][:, -1].fill_(math.nan),
    "leaves the ragged tail of the queries unwritten": lambda a: a[5][..., 64 * (a[5].shape[-2] // 64) :, :].fill_(math.nan),
    "swaps two heads": lambda a: a[5].copy_(a[5].flip(2)),
    "scales the output": lambda a: a[5].mul_(1.01),
    "one wrong element": lambda a: a[5][0, 0, 0, 0].fill_(9.0),
    "base-2 LSE": lambda a: a[7].div_(math.log(2.0)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_kernel_is_found(bug):
    found = verdict(broken(BUGS[bug]))
    assert found.status == "wrong", found
    assert "at triangle_attention/" in found.detail


def test_a_bug_on_ragged_crops_only_is_found():
    """A problem that is a multiple of every tile does not show it; a configuration for one crop need not be right elsewhere."""

    def kernel(*arguments):
        attention(*arguments)
        if arguments[0].shape[-2] % 16:
            arguments[5][..., -1, :] = 0.0

    assert verdict(kernel).status == "wrong"
    assert "N47/" in verdict(kernel).detail
    assert verdict(kernel, config=48).ok


def test_a_bug_that_only_large_logits_show_is_found():
    def kernel(q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas):
        scores = scale * q.float() @ k.float().mT + bias.float().unsqueeze(1)
        exponentials = scores.exp()  # without the row maximum: infinite from 89 on
        out.copy_((exponentials / exponentials.sum(-1, keepdim=True)) @ v.float())
        lse.copy_(exponentials.sum(-1).log())

    found = verdict(kernel)
    assert found.status == "wrong" and "normal inputs" not in found.detail


def test_a_kernel_that_changes_its_mind_is_found():
    calls = []

    def kernel(*arguments):
        attention(*arguments)
        calls.append(1)
        if len(calls) == 3:
            bits = arguments[5].view(torch.int16)
            bits[0, 0, 0, 0, 0] ^= 1

    found = verdict(kernel)
    assert found.status == "nondeterministic" and "out" in found.detail and len(calls) == 3


def test_errors_of_the_launch_are_no_verdict():
    def kernel(*arguments):
        raise RuntimeError("CUDA error: invalid argument")

    with pytest.raises(RuntimeError, match="invalid argument"):
        verdict(kernel)


def test_every_launch_is_waited_for():
    waits = []
    Checker(ToyTemplate(), ToyShape(), "cpu", seed=1, wait=lambda: waits.append(1)).verdict(ToyKernel(ToyConfig()), ToyConfig())
    # The problem (1 + 2 repeats), the ragged one in the two families that the toy has (1 + 1 repeat each).
    assert len(waits) == 3 + 2 + 2


def test_inputs_are_fresh_every_time():
    seeds = {plan(SHAPE)[0].seed for _ in range(5)}
    assert len(seeds) == 5
    assert [case.seed for case in plan(SHAPE, seed=9)] == [9, 10, 11, 12, 13, 14]


def test_a_problem_without_rows_is_checked_whole_and_ragged():
    shape = TriangleMultiplicationShape(384, mask="bool")
    whole, *ragged = plan(shape, "cuda", seed=1)
    assert whole == Case(shape, 1)
    assert [(case.shape, case.family) for case in ragged] == [
        (dataclasses.replace(shape, crop=check.RAGGED_CROP), family) for family in check.FAMILIES
    ]
    assert [case.shape.crop for case in plan(TriangleMultiplicationShape(1))] == [1]


def test_large_problems_are_checked_on_fewer_rows_at_their_own_crop():
    cases = plan(TriangleAttentionShape(crop=2048), "cuda")
    assert cases[0].shape.crop == 2048 and 1 <= cases[0].shape.rows < 2048
    assert cases[0].shape.rows * 4 * 2048**2 <= check.SCORES_LIMIT["cuda"]
    assert plan(TriangleAttentionShape(crop=768), "cuda")[0].shape.rows == 768
    assert plan(TriangleAttentionShape(crop=8192), "cpu")[0].shape.rows == 1


@pytest.mark.parametrize(("crop", "ragged"), [(768, 203), (384, 203), (128, 127), (17, 15), (2, 1), (1, None)])
def test_ragged_crops_fit_no_tile(crop, ragged):
    cases = plan(TriangleAttentionShape(crop=crop), "cuda")
    crops = {case.shape.crop for case in cases[1:]}
    assert crops == ({ragged} if ragged else set())


def test_a_workload_without_bounds_proves_nothing():
    class Boundless(ToyTemplate):
        def workload(self, *arguments):
            workload = super().workload(*arguments)
            workload.bounds = dict
            return workload

    found = Checker(Boundless(), ToyShape(), "cpu").verdict(ToyKernel(ToyConfig()), ToyConfig())
    assert found.status == "wrong" and "bound" in found.detail


def test_same_bits():
    x = torch.tensor([1.0, math.nan, -0.0])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([1.0, math.nan, 0.0]))
    assert not same_bits(x, x.double()) and not same_bits(x, x[:2])
    strided = torch.arange(12.0).view(3, 4).T
    assert same_bits(strided, strided.contiguous())
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
    assert same_bits(array("d", [math.nan, 1.0]), array("d", [math.nan, 1.0]))
    assert not same_bits(array("d", [1.0]), array("d", [2.0]))
