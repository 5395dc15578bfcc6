"""The backward kernels' arithmetic on the CPU: what the output residual buys, and rows whose logits are all huge.

The emulation follows templates/triangle_attention/backward_*_sm90.py: P from the saved LSE in float32, P and dS rounded to
bf16 only as GEMM operands, delta in float32 from out (+ residual), the bias gradient summed over the rows in float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

ROWS, N, D = 6, 256, 32
SCALE = D**-0.5
BF16 = torch.bfloat16


class Problem(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    bias: Tensor


def problem(seed: int) -> Problem:
    make = torch.Generator().manual_seed(seed)
    q, k, v, d_out = (torch.randn(ROWS, N, D, generator=make).to(BF16) for _ in range(4))
    return Problem(q, k, v, d_out, torch.randn(N, N, generator=make).to(BF16))


def exact(x: Problem) -> dict[str, Tensor]:
    q, k, v, d_out, bias = (t.double() for t in x)
    p = torch.softmax(SCALE * q @ k.mT + bias, -1)
    out = p @ v
    ds = p * (d_out @ v.mT - (d_out * out).sum(-1, keepdim=True))
    return {"out": out, "dq": SCALE * ds @ k, "dk": SCALE * ds.mT @ q, "dv": p.mT @ d_out, "dbias": ds.sum(0)}


def emulated(x: Problem, compensated: bool) -> dict[str, Tensor]:
    q, k, v, d_out, bias = (t.float() for t in x)
    s = SCALE * q @ k.mT + bias
    lse = torch.logsumexp(s, -1, keepdim=True)
    p = torch.exp(s - lse)
    # The forward's rounding: P relative to the row maximum, as a bf16 operand, in training as two.
    top = s.amax(-1, keepdim=True)
    relative = torch.exp(s - top)
    operand = relative.to(BF16).float()
    if compensated:
        operand += (relative - operand).to(BF16).float()
    out = (operand @ v) * torch.exp(top - lse)
    rounded = out.to(BF16).float()
    residual = (out - rounded).to(BF16).float() if compensated else 0.0
    delta = (d_out * (rounded + residual)).sum(-1, keepdim=True)
    ds = p * (d_out @ v.mT - delta)
    operand = ds.to(BF16).float()
    return {
        "out": rounded,
        "dq": (SCALE * (operand @ k)).to(BF16),
        "dk": (SCALE * (operand.mT @ q)).to(BF16),
        "dv": (p.to(BF16).float().mT @ d_out).to(BF16),
        "dbias": ds.sum(0),
    }


def errors(compensated: bool, seeds: range) -> dict[str, float]:
    squares: dict[str, list[float]] = {}
    for seed in seeds:
        x = problem(seed)
        reference, found = exact(x), emulated(x, compensated)
        for name, ref in reference.items():
            total = squares.setdefault(name, [0.0, 0.0])
            total[0] += float((found[name].double() - ref).square().sum())
            total[1] += float(ref.square().sum())
    return {name: math.sqrt(error / norm) for name, (error, norm) in squares.items()}


def test_the_residual_pays_in_every_gradient_that_delta_enters() -> None:
    plain, compensated = errors(False, range(4)), errors(True, range(4))
    # dQ and dK are dominated by roundings of their own; dbias is not rounded at all and shows the whole gain.
    for name, factor in (("out", 0.9), ("dq", 0.98), ("dk", 0.98), ("dbias", 0.01)):
        assert compensated[name] < factor * plain[name], (name, compensated, plain)
    assert compensated["dv"] == plain["dv"], "dV does not use delta"
    # The design's floors: a tensor's own rounding and that of one operand.
    assert max(compensated[name] for name in ("dq", "dk", "dv")) <= 2.40e-3
    assert compensated["out"] <= 1.70e-3, "its own rounding alone"
    assert compensated["dbias"] <= 1e-5, "summed in float32, rounded nowhere"


@pytest.mark.parametrize("mask", [-1e9, -1e6, -5e3])
def test_rows_of_huge_logits_stay_a_softmax(mask: float) -> None:
    """P = exp2((x + shift) log2e - low log2e) with the LSE's low part, as the statistics kernel splits it; float32 throughout."""
    s = (torch.randn(8, N, generator=torch.Generator().manual_seed(1)) + mask).float()
    top = s.amax(-1, keepdim=True)
    log_sum = torch.log(torch.exp(s - top).sum(-1, keepdim=True))
    lse = top + log_sum
    low = (top - lse) + log_sum
    huge = lse.abs() > 4096
    shift, plane = torch.where(huge, -lse, 0.0), torch.where(huge, low, lse + low) * math.log2(math.e)
    p = torch.exp2((s + shift) * math.log2(math.e) - plane)
    assert float((p - torch.softmax(s.double(), -1)).abs().max() * N) <= 2e-3
    assert torch.allclose(p.sum(-1), torch.ones(8), atol=1e-4)
    if mask == -1e9:
        naive = torch.exp(s - lse)
        assert not torch.allclose(naive.sum(-1), torch.ones(8), atol=0.5), "one float32 LSE would do; drop the low part"
