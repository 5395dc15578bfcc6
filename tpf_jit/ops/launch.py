"""Launching the kernels of a call: outputs, outer sizes, padded head dims, the device, and which gradients are computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit import kernels
from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import InvalidInput, NoKernel
from tpf_jit.ops import checks, plans, routing, settings
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import layout, layout_backward


def forward(
    launch: routing.Launch, operands: layout.Operands, q: Tensor, scale: float, need_residual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch a forward kernel: output, LSE, and both their roundings (empty unless asked for). `q` is the call's own."""
    batch, rows, heads, crop, dim = q.shape
    padded = (batch, rows, heads, crop, operands.q.shape[-1])
    out = layout.projection_layout_empty(padded, q.dtype, q.device)
    lse = torch.empty((batch, rows, heads, crop), dtype=torch.float32, device=q.device)
    residual = lse_low = None
    if need_residual:
        residual, lse_low = layout.projection_layout_empty(padded, q.dtype, q.device), torch.empty_like(lse)
    arguments = operands.arguments(out, residual, lse, lse_low)
    with on_device(q):
        launch.function(*arguments, scale, launch.num_ctas)
    if residual is None:
        return layout.trim(out, dim), lse, q.new_empty(0), lse.new_empty(0)
    return layout.trim(out, dim), lse, layout.trim(residual, dim), lse_low


class Saved(NamedTuple):
    """What the forward left for the backward: out `(B, I, H, N, D)` and lse `(B, I, H, N)` fp32, and what rounding took from each
    (None without compensation)."""

    out: Tensor
    residual: Tensor | None
    lse: Tensor
    lse_low: Tensor | None


class BackwardKernels(NamedTuple):
    """The kernels of one backward; those that no wanted gradient needs are None."""

    stats: routing.Launch
    key: routing.Launch | None
    query: routing.Launch | None


def backward_variants(compensated: bool, needed: Sequence[bool]) -> tuple[tuple[str, kernels.Flags, bool], ...]:
    """(family, flags, whether it runs) of the three kernels, for the gradients of (q, k, v, bias) that are `needed`."""
    need_q, need_k, need_v, need_bias = needed
    return (
        (routing.BACKWARD_STATS, (("residual", compensated),), True),
        (routing.BACKWARD_KEY, (), need_k or need_v),
        (routing.BACKWARD_QUERY, (("dbias", bool(need_bias)),), need_q or need_bias),
    )


def training_variants(shape: TriangleAttentionShape) -> list[tuple[str, kernels.Flags]]:
    """(family, flags) of a training step in which everything has a gradient: its forward as `settings` have it, then the three
    of the backward."""
    compensated = settings.compensates(shape.mask == "additive")
    forward = routing.FORWARD_TRAINING if compensated else routing.FORWARD
    return [(forward, ()), *((family, flags) for family, flags, _ in backward_variants(compensated, (True,) * 4))]


def find_backward(
    shape: TriangleAttentionShape, compensated: bool, needed: Sequence[bool], device: torch.device
) -> BackwardKernels | str:
    """All kernels for the gradients of (q, k, v, bias) that are `needed`, loaded, or why there is none. Raises as
    `routing.find_kernel`; nothing has been launched then."""
    found = []
    for family, flags, is_needed in backward_variants(compensated, needed):
        launch = routing.find_kernel(family, shape, flags, device) if is_needed else None
        if isinstance(launch, str):
            return launch
        found.append(launch)
    return BackwardKernels(*found)


def repeats(q: Tensor, bias: Tensor) -> str | None:
    """Why the kernels cannot give a bias its gradient: they would sum it over axes that it has. None if they can."""
    batch, rows = q.shape[:2]
    if is_expanded(bias, 0) or is_expanded(bias, 1):
        return "the bias has an expanded axis, whose gradient kernels sum"
    if bias.shape[0] == 1 < batch and bias.shape[1] == rows > 1:
        return "every row has a bias of its own that all batch elements share"
    return None


def repeats_in_training(q: Tensor, bias: Tensor) -> str | None:
    """`repeats` for a bias as training reads it."""
    return repeats(q, unexpanded(bias))


def is_expanded(x: Tensor, axis: int) -> bool:
    """Whether all elements along an axis are one."""
    return x.shape[axis] > 1 and x.stride(axis) == 0


def unexpanded(bias: Tensor) -> Tensor:
    """A bias with one element where its batch or row axis is expanded, as training reads it."""
    for axis in (0, 1):
        if is_expanded(bias, axis):
            bias = bias.narrow(axis, 0, 1)
    return bias


def backward(
    found: BackwardKernels,
    operands: layout.Operands,
    saved: Saved,
    incoming: tuple[Tensor | None, Tensor | None],
    scale: float,
    grads: Sequence[Tensor | None],
    budget_bytes: int,
) -> None:
    """Write the gradients of q, k, v and bias that are not None in `grads`, whose layouts are the results'.

    `incoming` are those of the output and of the LSE; one of them may be None.

    The statistics come first, then dK and dV, then dQ and the bias's gradient. A neighbour that a kernel computes anyway goes to
    memory of its own.
    """
    q, outer = operands.q, operands.outer
    grad_out, grad_lse = incoming
    dq, dk, dv, dbias = grads

    def like_q(x: Tensor | None) -> Tensor | None:
        return None if x is None else layout.kernel_operand(layout.refold(x.to(q.dtype), outer))

    def lines(x: Tensor | None) -> Tensor | None:
        return None if x is None else layout.refold(x, outer).contiguous()

    # The statistics are about the output; a call of which only the LSE is used has none of its gradient.
    dout = layout.projection_layout_empty(q.shape, q.dtype, q.device).zero_() if grad_out is None else like_q(grad_out)
    stats = layout_backward.stats_empty(q)
    with on_device(q):
        found.stats.function(
            like_q(saved.out), like_q(saved.residual), dout, lines(saved.lse), lines(saved.lse_low), stats, found.stats.num_ctas
        )
        if grad_lse is not None:
            layout_backward.subtract_from_delta(stats, lines(grad_lse))
        if found.key is not None:
            targets = [_Target(x, operands) for x in (dk, dv)]
            found.key.function(
                *operands[:5], dout, stats, targets[0].buffer, targets[1].buffer, scale, found.key.num_ctas
            )
            for target in targets:
                target.deliver()
        if found.query is not None:
            target = _Target(dq, operands)
            _query(found.query, operands, (dout, stats, target.buffer), dbias, scale, budget_bytes)
            target.deliver()


def _query(
    launch: routing.Launch,
    operands: layout.Operands,
    tensors: tuple[Tensor, Tensor, Tensor],
    dbias: Tensor | None,
    scale: float,
    budget_bytes: int,
) -> None:
    """dQ and, unless the bias is frozen, its gradient, by runs of heads whose slabs fit into the budget."""
    q, k, v, bias, mask, outer = operands
    dout, stats, dq = tensors
    if dbias is None:
        launch.function(q, k, v, bias, mask, dout, stats, dq, None, scale, launch.slabs, launch.num_ctas)
        return
    batch, heads, crop, _ = bias.shape
    # A bias without a row axis, or one whose rows the kernel sees as batch elements.
    target = dbias.select(1, 0) if dbias.shape[1] == 1 else dbias.flatten(0, 1)
    for b, h in layout_backward.turns(budget_bytes, launch.slabs, batch, heads, crop):
        planes = layout_backward.planes_empty(launch.slabs, b.stop - b.start, h.stop - h.start, crop, q.device)
        launch.function(
            q[b, :, h], k[b, :, h], v[b, :, h], bias[b, h], None if mask is None else mask[b], dout[b, :, h], stats[b, :, h],
            dq[b, :, h], planes, scale, launch.slabs, launch.num_ctas,
        )  # fmt: skip
        target[b, h] = layout_backward.sum_planes(planes)
        del planes  # before the next turn asks for its own
    if target.data_ptr() != dbias.data_ptr():
        dbias.copy_(target.view(dbias.shape))


class _Target:
    """Where a kernel writes one gradient: in the gradient itself, or in a buffer of the kernels' layout."""

    def __init__(self, grad: Tensor | None, operands: layout.Operands) -> None:
        q = operands.q
        self.grad = grad
        self.in_place = None if grad is None else layout_backward.written_in_place(grad, operands.outer)
        if self.in_place is not None:
            self.buffer = self.in_place
        else:
            self.buffer = layout.projection_layout_empty(q.shape, q.dtype, q.device)

    def deliver(self) -> None:
        """Bring what the kernel wrote into the gradient's own layout."""
        if self.grad is not None and self.in_place is None:
            self.grad.copy_(layout.refold(self.buffer[..., : self.grad.shape[-1]], self.grad.shape[:2]))


def run_kernel(
    kernel: kernels.Kernel, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Launch one particular forward kernel: output and LSE, without autograd and without a PyTorch path.

    Args:
        kernel: a kernel of the family "triangle_attention/forward" or "triangle_attention/forward_training".
        Others as in `triangle_attention`, five-dimensional.

    Raises:
        InvalidInput: the tensors do not fit together, or are not what the kernel was compiled for.
        NoKernel: the tensors are not on a device that the kernel runs on.
    """
    checks.check_types(q, k, v, bias, mask)
    plans.check_canonical(q, k, v, bias, mask)
    spec, here = kernel.spec, routing.hardware(q.device)
    if here.arch != spec.arch:
        raise NoKernel(f"{spec} is built for {spec.arch}; {here.reason or f'the device is {here.arch}'}")
    reason = routing.fallback_reason(q, bias, q.device)
    if reason is not None:
        raise InvalidInput.of("q, k, v, bias", reason, "what the kernel was compiled for")
    shape = routing.kernel_shape(q, bias, mask)
    residual = bool(dict(spec.variant).get("residual", False))
    try:
        same = KernelSpec.make(spec.template, shape, kernel.config) == spec
    except InvalidInput:  # this shape's variant has no such configuration
        same = False
    if not same:
        raise InvalidInput.of("q, k, v, bias, mask", shape.key(), f"what the kernel was compiled for: {dict(spec.variant)}")
    operands = layout.prepare(q, k, v, bias, mask)
    return forward(routing.Launch(kernel.function, here.sms), operands, q, checks.scale_of(q, scale), residual)[:2]


def on_device(q: Tensor):
    """Makes q's device the current one, where it is not."""
    return torch.cuda.device(q.device) if q.is_cuda and q.device.index != torch.cuda.current_device() else nullcontext()
