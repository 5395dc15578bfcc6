"""Launching the kernels of a triangle multiplication's forward: which, on what, into what, and what is kept for the backward."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit.ops import multiplication_routing, routing
from tpf_jit.ops.launch import on_device
from tpf_jit.shape import TriangleMultiplicationShape, dtype_name
from tpf_jit.templates.triangle_multiplication import layout
from tpf_jit.templates.triangle_multiplication.layout import Weights


class Kernels(NamedTuple):
    """The kernels of one update, loaded. fold: None where front folds as well; centre: where z is not float32."""

    fold: routing.Launch | None
    front: routing.Launch
    contraction: routing.Launch
    back: routing.Launch
    centre: routing.Launch | None = None


class Saved(NamedTuple):
    """What a forward leaves for its backward; each may be None.

    x: the contraction, `(B, D, N, N)` for a backward in PyTorch, `(B, D, N, P)` beside statistics. factors: `(B, 2, D, N, P)`.
    z_stats, x_stats: mean and reciprocal deviation of every pair's z and x, float32 `(B, N, N, 2)`. matrices, terms: the folded
    weights, as `layout.folded_empty` has them. With the last four the backward runs on kernels, and rebuilds of x and the factors
    what is missing.
    """

    x: Tensor | None = None
    factors: Tensor | None = None
    z_stats: Tensor | None = None
    x_stats: Tensor | None = None
    matrices: Tensor | None = None
    terms: Tensor | None = None


class Keep(NamedTuple):
    """What of a forward is kept: the contraction, the factors, and what kernels of a backward always read: both statistics and
    the folded weights."""

    x: bool = False
    factors: bool = False
    stats: bool = False


NOTHING = Keep()


def kernel_input(z: Tensor, centre: routing.Launch | None = None) -> Tensor:
    """z as kernels take it: itself, or a float32 z (under bf16 autocast) less the mean of each pair, rounded to bfloat16; by a
    kernel of `multiplication_routing.CENTRE` where there is one.

    A LayerNorm does not see the mean, and neither do gradients; without it, rounding z costs what rounding LN(z) before its bias
    would. From one layout, so that equal values give equal bits.
    """
    if z.dtype != torch.float32:
        return z
    z = layout.pair_operand(z)
    out = torch.empty(z.shape, dtype=torch.bfloat16, device=z.device)
    if centre is None:
        return torch.sub(z, z.mean(-1, keepdim=True), out=out)
    centre.function(z, out, centre.num_ctas)
    return out


def find_centre(shape: TriangleMultiplicationShape, z: Tensor) -> routing.Launch | None:
    """The kernel that makes a float32 z ready; None for any other z, or where PyTorch must. Raises as `routing.find_kernel`."""
    found = routing.find_kernel(multiplication_routing.CENTRE, shape, (), z.device) if z.dtype == torch.float32 else None
    return None if isinstance(found, str) else found


def find(
    shape: TriangleMultiplicationShape, z: Tensor, weights: Weights, residual: Tensor | None, stats: bool
) -> Kernels | str:
    """All kernels of a call, loaded, or why there is none. Raises as `routing.find_kernel`; nothing has been launched then."""
    of_fold = multiplication_routing.fold_flags(layout.has_biases(weights))
    inside = residual is not None and dtype_name(residual.dtype) == shape.dtype
    of_back = multiplication_routing.back_flags(inside, stats)
    flags = {multiplication_routing.BACK: of_back, **dict.fromkeys(multiplication_routing.FOLDING, of_fold)}
    problems = dict.fromkeys(multiplication_routing.FOLDING, fold_shape(shape, weights))

    def loaded(families: tuple[str, ...]) -> list[routing.Launch] | str:
        found = []
        for family in families:
            launch = routing.find_kernel(family, problems.get(family, shape), flags.get(family, ()), z.device)
            if isinstance(launch, str):
                return launch
            found.append(launch)
        return found

    wanted = multiplication_routing.families(shape)
    found = loaded(wanted)
    if isinstance(found, str) and multiplication_routing.folds_in_front(shape):  # the two that one stands for will do
        wanted = multiplication_routing.families(shape, together=False)
        found = loaded(wanted)
    if isinstance(found, str):
        return found
    fold = [None] if multiplication_routing.FOLD_FRONT == wanted[0] else []
    return Kernels(*fold, *found, find_centre(shape, z))


def fold_shape(shape: TriangleMultiplicationShape, weights: Weights) -> TriangleMultiplicationShape:
    """The problem as a kernel that folds weights sees it: its weight dtype is that in which `layout.fold_operands` passes the
    matrices."""
    name = dtype_name(layout.matrix_dtype(weights))
    return shape if shape.weight_dtype == name else replace(shape, weight_dtype=name)


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
    """The update by four launches, three where front folds the weights, and what is to be kept.

    Args:
        z: `(B, N, N, C)` bfloat16 or float32, any strides; mask, weights, residual: as `multiplication_fallback.forward` takes
            them. A residual that is not bfloat16 is added to the rounded update, in the dtype to which PyTorch promotes both.
        out: where to write the update; z or another tensor of its shape and of the result's dtype.
    """
    with on_device(z):
        given, z = z, kernel_input(z, found.centre)
        outside = None if residual is None or residual.dtype == z.dtype else residual
        matrices, terms = layout.folded_empty(weights, z.dtype)
        folded = layout.folded_parts(weights, matrices, terms)
        if found.fold is not None:
            found.fold.function(*layout.fold_operands(weights, folded), found.fold.num_ctas)
        operands = layout.prepare(z, mask, folded)
        z_stats, factors = layout.stats_empty(z), layout.factors_empty(operands.z, weights.hidden)
        # Nothing else may hold the factors, which make room once they are contracted.
        if found.fold is not None:
            found.front.function(*operands.front(factors, z_stats), eps, found.front.num_ctas)
        else:
            found.front.function(*operands.fold_front(weights, factors, z_stats), eps, found.front.num_ctas)
        x = layout.contraction_empty(operands.z, weights.hidden)
        found.contraction.function(*factors.unbind(1), x, found.contraction.num_ctas)
        factors = factors if keep.factors else None
        # Where CTAs share a tile of z, one must not write over what the other has not read yet.
        in_place = out is not None and out.dtype == z.dtype and layout.complies(out) and found.back.readers == 1
        target = out if in_place else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        if outside is not None:
            residual = None
        elif residual is not None:
            residual = operands.z if residual is given else layout.pair_operand(residual)
        x_stats = layout.stats_empty(z) if keep.stats else None
        found.back.function(*operands.back(z_stats, x, residual, target, x_stats), eps, found.back.num_ctas)
        x = x if keep.x else None
        if outside is not None:
            del operands, z  # what is not kept makes room
            if out is None:
                wide = torch.promote_types(outside.dtype, target.dtype)
                out = torch.empty(target.shape, dtype=wide, device=target.device)
            torch.add(outside, target, out=out)
        elif out is None:
            out = target
        elif not in_place:
            out.copy_(target)
    if keep.stats:
        return out, Saved(x, factors, z_stats, x_stats, matrices, terms)
    return out, Saved(None if x is None else x[..., : given.shape[1]], factors)


def write_over(
    found: Kernels, z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, eps: float
) -> None:
    """`forward` over z, of which autograd is told."""
    forward(found, z, mask, weights, apart(residual, z), eps, out=z)
    if not z.is_inference():
        # PyTorch does not see what a kernel writes, and z may be saved for some other backward.
        torch.autograd.graph.increment_version(z)


def apart(operand: Tensor | None, z: Tensor) -> Tensor | None:
    """An operand that can be read while z is written: of another view of its memory, whoever owns it, parts would be overwritten
    before they are read."""
    if operand is None or operand is z or _is_same(operand, z):
        return operand
    (first, last), (start, end) = _extent(operand), _extent(z)
    return operand.clone() if first < end and start < last else operand


def all_apart(
    z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None
) -> tuple[Tensor | None, Weights, Tensor | None]:
    """The operands beside z, `apart` from it where PyTorch reads them anew for every batch element."""
    return apart(mask, z), Weights(*(apart(x, z) for x in weights)), apart(residual, z)


def _extent(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of that behind the last."""
    elements = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


def _is_same(x: Tensor, z: Tensor) -> bool:
    """Whether both are the same view of the same memory."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (z.data_ptr(), z.shape, z.stride(), z.dtype)
