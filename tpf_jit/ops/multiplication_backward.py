"""The backward of a triangle multiplication on kernels: which, in what order, from what the forward left.

    back_backward      dx, and the output gate's part of the gradient of LN(z)
    back_weights       sums for p_out, g_out and both norms; skipped where those are frozen
    two products       the gradients of a and b from dx
    front_backward     dz; skipped where z needs none
    front_weights      sums for p_in, g_in and norm_in; skipped where those are frozen
    front_gradients    these two in one, for some widths, where both are wanted
    finish             gradients of the weights from the sums; in PyTorch for some kinds of weights (`kernel_finishes`)

Without a gradient of z, p_in, g_in or norm_in only back_weights runs. A forward that saved neither the contraction nor the
factors gets both again from the kernels of front and contraction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit.kernels import Flags
from tpf_jit.ops import multiplication_routing, plans, routing
from tpf_jit.ops.launch import on_device
from tpf_jit.ops.multiplication_launch import Saved, find_centre, kernel_input
from tpf_jit.shape import TriangleMultiplicationShape, dtype_name
from tpf_jit.templates.triangle_multiplication import layout, layout_backward
from tpf_jit.templates.triangle_multiplication.layout import Weights

_NORM_IN = {"norm_in_weight", "norm_in_bias"}
_FRONT = {"p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias"} | _NORM_IN
_BACK = {
    "norm_out_weight", "norm_out_bias", "p_out_weight", "p_out_bias", "g_out_weight", "g_out_bias",
} | _NORM_IN  # fmt: skip
"""The weights whose gradients the sums of front and back are for; LN(z) is in both."""


class Steps(NamedTuple):
    """What of a backward the wanted gradients take."""

    z: bool
    front_weights: bool
    back_weights: bool
    finish: Flags | None
    """Of the kernel that ends it; None where PyTorch does, or there are no gradients of weights."""

    @property
    def through(self) -> bool:
        """Whether gradients pass the contraction."""
        return self.z or self.front_weights


def steps(weights: Weights, needed: Sequence[bool]) -> Steps:
    """The steps for the gradients of (z, *weights) that are `needed`; absent weights have none."""
    given = zip(Weights._fields, weights, needed[1:], strict=True)
    wanted = {name for name, x, need in given if need and x is not None}
    finish = None
    if layout_backward.kernel_finishes(weights, needed[1:]):
        finish = multiplication_routing.finish_flags(layout.has_biases(weights), dtype_name(weights.norm_in_weight.dtype))
    return Steps(bool(needed[0]), bool(wanted & _FRONT), bool(wanted & _BACK), finish)


class Kernels(NamedTuple):
    """The kernels of one backward, loaded; those that it does not take are None. front and contraction make again what
    the forward did not save; left and right give the gradients of a and b, in the order of an outgoing or an incoming update."""

    outgoing: bool
    front: routing.Launch | None
    contraction: routing.Launch | None
    back_backward: routing.Launch | None
    back_weights: routing.Launch | None
    left: routing.Launch | None
    right: routing.Launch | None
    front_backward: routing.Launch | None
    front_weights: routing.Launch | None
    front_gradients: routing.Launch | None
    finish: routing.Launch | None
    centre: routing.Launch | None


def variants(
    shape: TriangleMultiplicationShape, take: Steps, saved: tuple[bool, bool], together: bool = True
) -> tuple[tuple[str, Flags, bool], ...]:
    """(family, flags, whether it runs) of the fields of `Kernels`, but the last.

    Args:
        take: the steps.
        saved: whether x and the factors were.
        together: whether front_gradients may run, where it serves.
    """
    has_x, has_factors = saved
    again = not has_x or take.through and not has_factors
    families = multiplication_routing.backward_families(shape)
    together = together and take.z and take.front_weights and multiplication_routing.front_gradients_together(shape)
    apart = take.z and not together, take.front_weights and not together
    runs = (take.through, take.back_weights, take.through, take.through, *apart)
    return (
        (multiplication_routing.front_again(shape), (), again),
        (multiplication_routing.contraction(shape.direction), (), not has_x),
        *((family, (), run) for family, run in zip(families, runs, strict=True)),
        (routing.FRONT_GRADIENTS, (), together),
        (multiplication_routing.FINISH, take.finish or (), take.finish is not None),
    )


def all_variants(shape: TriangleMultiplicationShape, partial: bool = False) -> list[tuple[str, Flags]]:
    """(family, flags) of backwards in which everything has a gradient, nothing is made again and projections have no biases; the
    norms have the matrices' dtype, or are float32. `partial`: those too that run where some gradients are not wanted, or where
    factors are made again."""
    found = {}
    for together in (True, False) if partial else (True,):
        for norm_dtype in (shape.weight_dtype, "float32"):
            take = Steps(True, True, True, multiplication_routing.finish_flags(False, norm_dtype))
            wanted = variants(shape, take, (True, True), together)
            found |= dict.fromkeys((family, flags) for family, flags, runs in wanted if runs)
    if partial:
        found[multiplication_routing.front_again(shape), ()] = None
    return list(found)


def find(shape: TriangleMultiplicationShape, z: Tensor, take: Steps, saved: tuple[bool, bool]) -> Kernels | str:
    """The kernels for some steps, loaded, or why there is none (but for finish and centre, whose work PyTorch does as well);
    arguments as for `variants`. Raises as `routing.find_kernel`; nothing has been launched then."""
    wanted, found, both = variants(shape, take, saved), [], None
    if (routing.FRONT_GRADIENTS, (), True) in wanted:
        both = routing.find_kernel(routing.FRONT_GRADIENTS, shape, (), z.device)
        if isinstance(both, str):  # the two that it stands for will do
            wanted, both = variants(shape, take, saved, together=False), None
    for family, flags, runs in wanted:
        if family == routing.FRONT_GRADIENTS:
            found.append(both)
            continue
        launch = routing.find_kernel(family, shape, flags, z.device) if runs else None
        if isinstance(launch, str):
            if family != multiplication_routing.FINISH:
                return launch
            launch = None
        found.append(launch)
    return Kernels(shape.direction == "outgoing", *found, find_centre(shape, z))


def backward(
    found: Kernels,
    grad_out: Tensor,
    z: Tensor,
    mask: Tensor | None,
    weights: Weights,
    saved: Saved,
    eps: float,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of z and the weights, by the kernels that were found for `needed`; None where there is none.

    Args:
        grad_out: like the update, any strides.
        z, mask, weights: as the forward had them.
        saved: what it left; nothing of it is written over.
    """
    hidden, grads = weights.hidden, Weights(*(None,) * len(needed[1:]))
    # Turning autocast off takes 2 us, and is of use only where it is on.
    plain = nullcontext() if plans.autocast_dtype(z) is None else torch.autocast(z.device.type, enabled=False)
    with on_device(z), plain:
        like, z = z, kernel_input(z, found.centre)
        folded = layout.folded_parts(weights, saved.matrices, saved.terms)
        masked = found.front is not None or found.back_backward is not None
        operands = layout.prepare(z, mask if masked else None, folded)
        x, factors = _rebuilt(found, operands, saved, eps, hidden)
        dout = layout.pair_operand(grad_out.to(z.dtype))
        back = (operands.z, saved.z_stats, x, saved.x_stats, dout, folded.p_out, folded.g_out, folded.out_terms)
        back_sums = _sums(found.back_weights, back, z, hidden, layout_backward.back_planes_empty)
        front_sums = None, None
        dz = None
        if found.back_backward is not None:
            dx, dzn = torch.empty_like(x), layout_backward.pair_empty(z)
            found.back_backward.function(*back, dx, dzn, found.back_backward.num_ctas)
            del back, x, dout  # what was rebuilt or copied makes room
            dfactors = _factor_gradients(found, dx, factors)
            del dx, factors
            given, front = (operands.z, saved.z_stats, operands.mask, dfactors), (folded.p_in, folded.g_in, folded.in_terms)
            front_sums = _sums(found.front_weights, (*given, *front), z, hidden, layout_backward.front_planes_empty)
            if found.front_backward is not None or found.front_gradients is not None:
                dz = torch.empty_like(like) if z is like else None
                own = dz is not None and dz.is_contiguous() and layout.complies(dz)
                target = dz if own else layout_backward.pair_empty(z)
                arguments = (*given, dzn, *front, target)
                if found.front_backward is not None:
                    found.front_backward.function(*arguments, found.front_backward.num_ctas)
                else:
                    front_sums = _sums(found.front_gradients, arguments, z, hidden, layout_backward.front_planes_empty)
                if dz is None:
                    del given, arguments, dzn, dfactors, operands, z  # what gave dz makes room for it
                    dz = torch.empty_like(like)
                if not own:
                    dz.copy_(target)
        if front_sums[0] is not None or back_sums[0] is not None:
            grads = _weight_gradients(found.finish, weights, (*front_sums, *back_sums), needed[1:])
    return [dz, *grads]


def _rebuilt(found: Kernels, operands: layout.Operands, saved: Saved, eps: float, hidden: int) -> tuple[Tensor, Tensor | None]:
    """x and the factors: those that were saved, or made again."""
    x, factors = saved.x, saved.factors
    if found.front is not None:
        factors = layout.factors_empty(operands.z, hidden)
        again = layout.stats_empty(operands.z)  # those that were saved, and stay as they are
        found.front.function(*operands.front(factors, again), eps, found.front.num_ctas)
    if found.contraction is not None:
        x = layout.contraction_empty(operands.z, hidden)
        found.contraction.function(*factors.unbind(1), x, found.contraction.num_ctas)
    return x, factors


def _factor_gradients(found: Kernels, dx: Tensor, factors: Tensor) -> Tensor:
    """The gradients of a and b, laid out as these are."""
    a, b = factors.unbind(1)
    grads = torch.empty_like(factors)
    da, db = grads.unbind(1)
    # Outgoing da = dx b, db = dx^T a; incoming da = b dx^T, db = a dx, as matrices of one channel.
    left, right = ((dx, b), (dx, a)) if found.outgoing else ((b, dx), (a, dx))
    found.left.function(*left, da, found.left.num_ctas)
    found.right.function(*right, db, found.right.num_ctas)
    return grads


def _sums(
    launch: routing.Launch | None, arguments: tuple, z: Tensor, hidden: int, planes_empty: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor | None, Tensor | None]:
    """The planes and sums that a kernel fills; None where nothing of them is wanted."""
    if launch is None:
        return None, None
    parts = planes_empty(z, hidden, launch.splits)
    launch.function(*arguments, *parts, launch.splits, launch.num_ctas)
    return parts


def _weight_gradients(
    launch: routing.Launch | None, weights: Weights, sums: tuple[Tensor | None, ...], needed: Sequence[bool]
) -> Weights:
    """From planes and sums of front and back the gradients, laid out as their weights are."""
    if launch is None:
        return layout_backward.finish(weights, *sums, needed)
    grads, arguments = layout_backward.finish_operands(weights, *sums)
    launch.function(*arguments, launch.num_ctas)
    return Weights(*[None if grad is None else _like(w, grad) for w, grad in zip(weights, grads, strict=True)])


def _like(weight: Tensor, grad: Tensor) -> Tensor:
    """A contiguous gradient in the layout of its weight."""
    return grad if weight.is_contiguous() else torch.empty_like(weight).copy_(grad)
