"""What the backward kernels of triangle attention read and write beyond the forward's operands.

    backward_stats   fn(out, residual, dout, lse, lse_low, stats, num_ctas)
    backward_key     fn(q, k, v, bias, mask, dout, stats, dk, dv, scale, num_ctas)
    backward_query   fn(q, k, v, bias, mask, dout, stats, dq, dbias, scale, slabs, num_ctas)

    q, k, v, bias, mask, lse, lse_low   as the forward takes them (see `layout`)
    out, residual, dout, dq, dk, dv     like q; residual and lse_low are None in the variant without compensation
    stats    float32 (B, I, H, 3, M), M being N rounded up to 256, in three planes; contiguous, or a slice along H of that
               0: (LSE + low) * log2 e; low * log2 e where |LSE| > 4096; +inf where there is no query, or no key for it
               1: delta = sum_d dout * (out + residual); 0 where there is no query
               2: -LSE where |LSE| > 4096, else 0
             so that P = exp2((x + plane 2) * log2 e - plane 0) for a natural-log logit x, and dS = P * (dP - plane 1)
    dbias    None where the bias is frozen, else float32 (slabs, B, H, N, N4) contiguous, N4 being N rounded up to 4: the sums
             of dS over the rows of every slab. The gradient is their sum, slab 0 first.

The slabs of `dbias` are the largest buffer there is, so heads (and batch elements, where one head is too much) take turns in it.
Every element is computed alike whoever shares its turn: results do not depend on the budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpf_jit.templates.triangle_attention import layout

STATS_ALIGN = 256
"""The statistics cover whole tiles of queries, whatever the tile."""
PLANE_ALIGN = 4
SUBTRACT_LSE = 4096.0
"""|LSE| from which on it is subtracted from the logits before they are multiplied by log2 e."""


def stats_empty(q: Tensor) -> Tensor:
    """Uninitialised statistics for queries `(B, I, H, N, D)`."""
    size = (*q.shape[:3], 3, layout.round_up(q.shape[3], STATS_ALIGN))
    return torch.empty(size, dtype=torch.float32, device=q.device)


def subtract_from_delta(stats: Tensor, grad_lse: Tensor) -> None:
    """Account for a gradient `(B, I, H, N)` of the LSE: dS = P * (dP - delta + dLSE)."""
    stats[..., 1, : grad_lse.shape[-1]].sub_(grad_lse)


def planes_empty(slabs: int, batch: int, heads: int, crop: int, device: torch.device) -> Tensor:
    """Uninitialised slabs of the bias gradient."""
    size = (slabs, batch, heads, crop, layout.round_up(crop, PLANE_ALIGN))
    return torch.empty(size, dtype=torch.float32, device=device)


def sum_planes(planes: Tensor) -> Tensor:
    """The bias gradient `(B, H, N, N)` float32, in place of the first slab; always added in the order of the slabs."""
    total = planes[0]
    for plane in planes[1:]:
        total += plane
    return total[..., : planes.shape[3]]


def turns(budget_bytes: int, slabs: int, batch: int, heads: int, crop: int) -> Iterator[tuple[slice, slice]]:
    """Runs of batch elements and heads whose slabs fit into a budget together; at least one head of one element at a time."""
    units = max(1, budget_bytes // (slabs * crop * layout.round_up(crop, PLANE_ALIGN) * 4))
    elements = min(batch, units)
    heads_each = min(heads, units // batch) if units >= batch else 1
    for b in range(0, batch, elements):
        for h in range(0, heads, heads_each):
            yield slice(b, min(b + elements, batch)), slice(h, min(h + heads_each, heads))


def written_in_place(x: Tensor, outer: tuple[int, int]) -> Tensor | None:
    """A gradient `(B, I, H, N, D)` as kernels write it, a view of its own memory; None if its layout does not allow that."""
    if x.shape[-1] % layout.OPERAND_ALIGN or x.stride(-1) != 1 or x.data_ptr() % layout.ALIGN_BYTES:
        return None
    batch, rows = x.shape[:2]
    if outer != (batch, rows) and batch > 1 and rows > 1 and x.stride(0) != rows * x.stride(1):
        return None
    x = layout.refold(x, outer)
    legal = layout.legal_strides(x.shape, x.stride(), layout.OPERAND_ALIGN)
    return None if legal is None else x if legal == x.stride() else x.as_strided(x.shape, legal)
