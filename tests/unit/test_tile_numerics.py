"""The forward kernel's arithmetic, step by step on the CPU: tile order, lazy offset, rounding of P, output residual.

The emulation follows templates/triangle_attention/forward_sm90.py: float32 everywhere, P rounded to bf16 only as a GEMM
operand, and a floating offset: the tile's maximum, or the row's less 8 log2 units. What must hold is the error of design:
2.03e-3 for a bf16 output, less than with the running maximum, and no overflow or NaN on inputs made against such tricks.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

OFFSET_DROP = 8.0 * math.log(2.0)


def tiled_softmax_product(
    scores: Tensor, v: Tensor, tile_n: int, drop: float = OFFSET_DROP, halves: int = 1
) -> tuple[Tensor, Tensor]:
    """(O, LSE) in float32 of scores (Q, K) float32 and v (K, D) bf16, keys taken tile_n at a time; drop 0 gives the usual
    running maximum, 2 halves P as training takes it."""
    rows = scores.shape[0]
    top, offset = torch.full((rows, 1), -math.inf), torch.full((rows, 1), -math.inf)
    total, out = torch.zeros(rows, 1), torch.zeros(rows, v.shape[1])
    for start in range(0, scores.shape[1], tile_n):
        s = scores[:, start : start + tile_n]
        tile_top = s.amax(1, keepdim=True)
        top = torch.maximum(top, tile_top)
        new = torch.maximum(tile_top, top - drop)
        empty = new == -math.inf
        factor = torch.where(empty, 1.0, torch.exp(offset - new))
        offset = new
        p = torch.exp(s - torch.where(empty, 0.0, offset))
        total = total * factor + p.sum(1, keepdim=True)
        operand = torch.zeros_like(p)
        for _ in range(halves):
            operand += (p - operand).to(torch.bfloat16).float()
        out = out * factor + operand @ v[start : start + tile_n].float()
    empty = total == 0
    lse = torch.where(empty, -math.inf, offset + torch.log(total))
    return torch.where(empty, 0.0, out / total), lse[:, 0]


def exact(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(scores.double(), 1)
    p = torch.exp(scores.double() - torch.where(lse == -math.inf, 0.0, lse)[:, None])
    return p @ v.double(), lse


def relative_rms(x: Tensor, ref: Tensor) -> float:
    return float((x.double() - ref).norm() / ref.norm())


def values(keys: int, dim: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(keys, dim, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def normal_scores(rows: int, keys: int, seed: int = 0) -> Tensor:
    return math.sqrt(2) * torch.randn(rows, keys, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tile_n", [64, 96, 128, 192])
@pytest.mark.parametrize("keys", [1, 64, 129, 601])
def test_error_of_every_tile_size(keys: int, tile_n: int) -> None:
    scores, v = normal_scores(1024, keys), values(keys)
    out, lse = tiled_softmax_product(scores, v, tile_n)
    ref, ref_lse = exact(scores, v)
    assert relative_rms(out.to(torch.bfloat16), ref) <= 2.03e-3
    assert float((lse - ref_lse).abs().max()) <= 2e-6 * max(1.0, float(ref_lse.abs().max()))


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_two_halves_of_p_leave_only_float32_roundings(spread: float) -> None:
    scores, v = spread * normal_scores(1024, 384), values(384)
    ref, _ = exact(scores, v)
    one, two = (relative_rms(tiled_softmax_product(scores, v, 96, halves=n)[0], ref) for n in (1, 2))
    assert two < 6e-6 and one > 100 * two


@pytest.mark.parametrize("keys", [384, 768, 2048])
def test_floating_offset_rounds_better_than_the_running_maximum(keys: int) -> None:
    scores, v = normal_scores(1024, keys), values(keys)
    ref, _ = exact(scores, v)
    outs = [tiled_softmax_product(scores, v, 96, drop)[0].to(torch.bfloat16) for drop in (OFFSET_DROP, 0.0)]
    floating, running = (relative_rms(out, ref) for out in outs)
    assert floating < 0.97 * running


def test_tile_size_is_part_of_the_bitwise_contract() -> None:
    scores, v = normal_scores(64, 384), values(384)
    first, again, other = (tiled_softmax_product(scores, v, n)[0] for n in (128, 128, 96))
    assert torch.equal(first, again)
    assert not torch.equal(first, other), "if this ever holds, the documentation of determinism can be simplified"


@pytest.mark.parametrize("step_log2", [5, 60, 200])
@pytest.mark.parametrize("falling", [False, True])
def test_growing_and_falling_maxima(step_log2: int, falling: bool) -> None:
    keys, tile = 640, 64
    ramp = torch.arange(keys // tile).repeat_interleave(tile) * (step_log2 * math.log(2.0))
    scores = normal_scores(32, keys) + (ramp.flip(0) if falling else ramp)
    v = values(keys)
    out, lse = tiled_softmax_product(scores.float(), v, tile)
    ref, ref_lse = exact(scores.float(), v)
    assert torch.isfinite(out).all() and relative_rms(out.to(torch.bfloat16), ref) <= 2.6e-3
    assert torch.allclose(lse.double(), ref_lse, rtol=1e-6)


def test_rows_without_keys_and_late_first_key() -> None:
    scores, v = normal_scores(4, 256), values(256)
    scores[0] = -math.inf
    scores[1, :200] = -math.inf  # nothing in the first three tiles
    out, lse = tiled_softmax_product(scores, v, 64)
    assert torch.equal(out[0], torch.zeros(32)) and lse[0] == -math.inf
    ref, _ = exact(scores[1:2], v)
    assert relative_rms(out[1:2], ref) <= 3e-3


def test_residual_restores_the_output() -> None:
    scores, v = normal_scores(256, 384), values(384)
    out, _ = tiled_softmax_product(scores, v, 96)
    rounded = out.to(torch.bfloat16)
    residual = (out - rounded.float()).to(torch.bfloat16)
    plain = relative_rms(rounded, out.double())
    restored = relative_rms(rounded.double() + residual.double(), out.double())
    assert 1.4e-3 <= plain <= 1.9e-3, "the rounding of a bf16 tensor costs 1.66e-3"
    assert restored <= 1e-5
    # What it is for: delta = sum dO * O enters every dS.
    d_out = values(256, seed=3).float()
    exact_delta = (d_out.double() * out.double()).sum(1)
    without = (d_out.double() * rounded.double()).sum(1) - exact_delta
    with_residual = (d_out.double() * (rounded.double() + residual.double())).sum(1) - exact_delta
    assert float(with_residual.norm()) <= 0.02 * float(without.norm())
