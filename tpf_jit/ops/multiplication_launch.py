"""Launching the kernels of a triangle multiplication's forward: which, on what, into what, and what is kept for the backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit.ops import multiplication_routing, routing
from tpf_jit.ops.launch import on_device
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_multiplication import layout, layout_backward
from tpf_jit.templates.triangle_multiplication.layout import Weights


class Kernels(NamedTuple):
    """The kernels of one update, loaded."""

    front: routing.Launch
    contraction: routing.Launch
    back: routing.Launch


class Saved(NamedTuple):
    """What a forward leaves for its backward; each may be None.

    x: the contraction, `(B, D, N, N)` for a backward in PyTorch, `(B, D, N, P)` beside statistics. factors: `(B, 2, D, N, P)`.
    z_stats, x_stats: mean and reciprocal deviation of every pair's z and x, float32 `(B, N, N, 2)`; with them the backward runs
    on kernels, and rebuilds of x and the factors what is missing.
    """

    x: Tensor | None = None
    factors: Tensor | None = None
    z_stats: Tensor | None = None
    x_stats: Tensor | None = None


class Keep(NamedTuple):
    """What of a forward is kept: the contraction, the factors, both statistics."""

    x: bool = False
    factors: bool = False
    stats: bool = False


NOTHING = Keep()


def find(
    shape: TriangleMultiplicationShape, weights: Weights, residual: Tensor | None, stats: bool, device: torch.device
) -> Kernels | str:
    """All kernels of a call, loaded, or why there is none. Raises as `routing.find_kernel`; nothing has been launched then."""
    of_front = multiplication_routing.front_flags(has_biases(weights, "in"), stats)
    of_back = multiplication_routing.back_flags(has_biases(weights, "out"), residual is not None, stats)
    found = []
    for family, chosen in zip(multiplication_routing.families(shape), (of_front, (), of_back), strict=True):
        launch = routing.find_kernel(family, shape, chosen, device)
        if isinstance(launch, str):
            return launch
        found.append(launch)
    return Kernels(*found)


def forward(
    found: Kernels,
    z: Tensor,
    mask: Tensor | None,
    weights: Weights,
    residual: Tensor | None,
    eps: float,
    keep: Keep = NOTHING,
    out: Tensor | None = None,
) -> tuple[Tensor, Saved]:
    """The update by three launches, and what is to be kept.

    Args:
        z: `(B, N, N, C)` bfloat16, any strides; mask, weights, residual: as `multiplication_fallback.forward` takes them,
            residual bfloat16.
        out: where to write the update; z or another tensor of its shape.
    """
    operands = layout.prepare(z, mask, paired(weights))
    with on_device(z):
        z_stats, x_stats = (layout_backward.stats_empty(z) if keep.stats else None for _ in range(2))
        factors = layout.factors_empty(operands.z, weights.hidden)
        found.front.function(*operands.front(factors), z_stats, eps, found.front.num_ctas)
        x = layout.contraction_empty(operands.z, weights.hidden)
        found.contraction.function(factors[:, 0], factors[:, 1], x, found.contraction.num_ctas)
        factors = factors if keep.factors else None
        in_place = out is not None and layout.complies(out)
        target = out if in_place else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        if residual is not None:
            residual = operands.z if residual is z else layout.pair_operand(residual)
        found.back.function(*operands.back(x, residual, target), x_stats, eps, found.back.num_ctas)
        if out is not None and not in_place:
            out.copy_(target)
    if not keep.stats:
        x = x[..., : z.shape[1]]
    return target if out is None else out, Saved(x if keep.x else None, factors, z_stats, x_stats)


def has_biases(weights: Weights, end: str) -> bool:
    """Whether a projection of the front ("in") or of the back ("out") has a bias."""
    given = weights._asdict()
    return given[f"p_{end}_bias"] is not None or given[f"g_{end}_bias"] is not None


def paired(weights: Weights) -> Weights:
    """Projection biases that come alone get zeros beside them, as a kernel has both or none."""
    given = weights._asdict()
    for end in ("in", "out"):
        p, g = given[f"p_{end}_bias"], given[f"g_{end}_bias"]
        if (p is None) != (g is None):
            given[f"p_{end}_bias"] = torch.zeros_like(g) if p is None else p
            given[f"g_{end}_bias"] = torch.zeros_like(p) if g is None else g
    return Weights(**given)
