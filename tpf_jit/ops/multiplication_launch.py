"""Launching the kernels of a triangle multiplication: which, on what, into what."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit.ops import multiplication_routing, routing
from tpf_jit.ops.launch import on_device
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_multiplication import layout
from tpf_jit.templates.triangle_multiplication.layout import Weights


class Kernels(NamedTuple):
    """The kernels of one update, loaded."""

    front: routing.Launch
    contraction: routing.Launch
    back: routing.Launch


def flags(weights: Weights, residual: Tensor | None) -> tuple[tuple, tuple]:
    """What of a call is compiled into its front and back kernels beside the shape, as `kernels.get_kernel` takes it."""
    front = weights.p_in_bias is not None or weights.g_in_bias is not None
    back = weights.p_out_bias is not None or weights.g_out_bias is not None
    return (("bias", front),), (("bias", back), ("residual", residual is not None))


def find(
    shape: TriangleMultiplicationShape, weights: Weights, residual: Tensor | None, device: torch.device
) -> Kernels | str:
    """All kernels of a call, loaded, or why there is none. Raises as `routing.find_kernel`; nothing has been launched then."""
    of_front, of_back = flags(weights, residual)
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
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The update and its contraction by three launches, as `multiplication_fallback.forward` gives them.

    Args:
        z: `(B, N, N, C)` bfloat16, any strides; mask, weights, residual: as there, residual bfloat16.
        out: where to write the update; z or another tensor of its shape.
    """
    weights = _paired(weights)
    operands = layout.prepare(z, mask, weights)
    crop, hidden = z.shape[1], weights.hidden
    with on_device(z):
        factors = layout.factors_empty(operands.z, hidden)
        found.front.function(*operands.front(factors), eps, found.front.num_ctas)
        x = layout.contraction_empty(operands.z, hidden)
        found.contraction.function(factors[:, 0], factors[:, 1], x, found.contraction.num_ctas)
        del factors
        in_place = out is not None and layout.complies(out)
        target = out if in_place else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        if residual is not None:
            residual = operands.z if residual is z else layout.pair_operand(residual)
        found.back.function(*operands.back(x, residual, target), eps, found.back.num_ctas)
        if out is not None and not in_place:
            out.copy_(target)
    return target if out is None else out, x[..., :crop]


def _paired(weights: Weights) -> Weights:
    """Projection biases that come alone get zeros beside them, as a kernel has both or none."""
    given = weights._asdict()
    for end in ("in", "out"):
        p, g = given[f"p_{end}_bias"], given[f"g_{end}_bias"]
        if (p is None) != (g is None):
            given[f"p_{end}_bias"] = torch.zeros_like(g) if p is None else p
            given[f"g_{end}_bias"] = torch.zeros_like(p) if g is None else g
    return Weights(**given)
