"""Triangle attention as a PyTorch operator: autograd, autocast, torch.compile and CUDA graphs.

    triangle_attention(...)                        the function users call: any rank, autocast, shared rows
      -> torch.ops.tpf_jit.triangle_attention_forward      (B, I, H, N, D) only; kernel or PyTorch path
      -> torch.ops.tpf_jit.triangle_attention_backward     recomputes in chunks (PyTorch path)

The operators are registered with `torch.library.Library` and an autograd kernel of their own, as `torch.library.custom_op` costs
5 us more a call without gradients and 21 us more with them (`register_autograd` 2 and 17; one core, PyTorch 2.13).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit import kernels
from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import InvalidInput, NoKernel, NotDifferentiable
from tpf_jit.ops import checks, fallback, routing
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import layout

_LIBRARY = torch.library.Library("tpf_jit", "DEF")
_LIBRARY.define(
    "triangle_attention_forward(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale, bool need_residual)"
    " -> (Tensor out, Tensor lse, Tensor residual)"
)
_LIBRARY.define(
    "triangle_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask,"
    " float scale, bool[4] output_mask) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)
_forward_op = torch.ops.tpf_jit.triangle_attention_forward.default
_backward_op = torch.ops.tpf_jit.triangle_attention_backward.default


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + bias + mask) v, with a pair bias that all rows share.

    Takes a compiled Hopper kernel for bf16 and fp16 up to head dim 128, and PyTorch in bounded memory for everything else
    (`is_supported` says which and why). Differentiable once, in q, k, v and bias, also through the LSE.

    Args:
        q, k, v: `(B, I, H, N, D)`; without a batch axis `(I, H, N, D)`, or with several `(*, I, H, N, D)`. Any strides; views of
            `(B, I, N, H, D)` storage are read in place.
        bias: `(B or 1, 1, H, N, N)` or `(B or 1, H, N, N)`, any strides, any floating dtype, e.g. fp32 beside bf16 q. One with a
            row axis of its own, `(B or 1, I, H, N, N)`, is correct too, and slower. Its gradient comes back in its dtype and
            layout; that of a row axis expanded with stride 0 is spread evenly over it.
        mask: None, boolean (True keeps a key), or floating (added to the scores in fp32), broadcastable to `(B, I, 1, 1, N)`.
            Has no gradient.
        scale: any finite number; `D ** -0.5` when None.
        return_lse: whether to also return the log-sum-exp.

    Returns:
        The output, shaped and typed like q, as a view of `(B, I, N, H, D)` storage; with `return_lse` also the natural-log LSE
        `(B, I, H, N)` fp32. A query whose keys are all excluded (boolean, or additive -inf) gives zeros and LSE -inf.

        Under autocast q, k and v are cast to its dtype; the bias keeps its own, so that an fp32 bias and its gradient are never
        rounded.

    Raises:
        InvalidInput: the arguments do not fit together; nothing has been allocated or launched.
        ColdKernelInCapture: in CUDA-graph capture with a kernel that is not loaded yet (`warmup` loads it).
    """
    checks.check_types(q, k, v, bias, mask)
    cast_to = _autocast_dtype(q)
    canonical = checks.is_canonical(q, bias, mask)
    if cast_to is not None or not canonical:
        # The operator checks too, and remembers what it has checked; here only where tensors are changed before they reach it.
        checks.check(q, k, v, bias, mask, one_dtype=cast_to is None)
    scale = _scale(q, scale)
    if cast_to is not None:
        q, k, v = (x if x.dtype == torch.float64 else x.to(cast_to) for x in (q, k, v))
    leading = q.shape[:-4]
    if not canonical:
        q, k, v, bias, mask = checks.canonical(q, k, v, bias, mask)
    if bias.requires_grad and bias.shape[1] > 1 and bias.stride(1) == 0:
        bias = _SharedRows.apply(bias)
    out, lse, _ = _forward_op(q, k, v, bias, mask, scale, False)
    out = checks.split_leading(out, leading)
    return (out, checks.split_leading(lse, leading)) if return_lse else out


def _autocast_dtype(q: Tensor) -> torch.dtype | None:
    kind = q.device.type
    # Not torch.amp.is_autocast_available: torch 2.11 cannot trace it under fullgraph.
    if kind in ("cuda", "cpu", "xpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is not None:
        return checks.check_scale(scale)
    return q.shape[-1] ** -0.5 if q.shape[-1] else 1.0


class _Plan(NamedTuple):
    """What a call's metadata decides: why it takes the PyTorch path, or the problem its kernel solves and whether its operands
    can be read where they are."""

    reason: str | None
    shape: TriangleAttentionShape | None = None
    in_place: bool = False


_plans: dict[tuple, _Plan] = {}
_MAX_PLANS = 4096


def _plan(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> _Plan:
    """The plan of a call, remembered by metadata, so that checks and routing cost one look-up from the second call on.

    Raises:
        InvalidInput: the tensors do not fit together.
    """
    key = (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device,
        bias.shape, bias.stride(), bias.dtype, bias.device, None if mask is None else (mask.shape, mask.dtype, mask.device),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is not None:
        return plan
    _check_canonical(q, k, v, bias, mask)
    plan, lasting = _decide(q, k, v, bias, mask, q.device)
    if not lasting:
        return plan
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _decide(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, device: torch.device
) -> tuple[_Plan, bool]:
    """The plan of a checked call on a device (the tensors may be meta tensors), and whether it holds for the process's life."""
    reason = routing.fallback_reason(q, bias, device)
    if reason is not None:
        try:
            return _Plan(reason, routing.kernel_shape(q, bias, mask)), True
        except InvalidInput:
            return _Plan(reason), True  # nothing that any kernel could take
    shape = routing.kernel_shape(q, bias, mask)
    reason = routing.unsupported(shape, device)
    if reason is not None:
        return _Plan(reason, shape), False  # a template may be registered later
    return _Plan(None, shape, layout.in_place(q, k, v, bias)), True


def inspect_call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> tuple[str | None, TriangleAttentionShape | None]:
    """What `triangle_attention` would do with these tensors: why it would take the PyTorch path (None: a kernel takes the call),
    and the problem that a kernel solves or would solve, if any could. Takes autocast into account; copies and reads nothing.

    Raises:
        InvalidInput: the arguments do not fit together.
    """
    checks.check_types(q, k, v, bias, mask)
    cast_to = _autocast_dtype(q)
    checks.check(q, k, v, bias, mask, one_dtype=cast_to is None)
    dtypes = [x.dtype if cast_to is None or x.dtype == torch.float64 else cast_to for x in (q, k, v)]
    dtypes += [bias.dtype, None if mask is None else mask.dtype]
    shadows = (
        None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
        for x, dtype in zip((q, k, v, bias, mask), dtypes, strict=True)
    )
    q_, k_, v_, bias_, mask_ = checks.canonical(*shadows)
    plan, _ = _decide(q_, k_, v_, bias_, mask_, q.device)
    return plan.reason, plan.shape


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, need_residual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan(q, k, v, bias, mask)
    reason = plan.reason
    if reason is None:
        launch = routing.find_kernel(plan.shape, need_residual, q.device)
        if not isinstance(launch, str):
            operands = layout.prepare(q, k, v, bias, mask, plan.in_place)
            return _launch(launch, operands, q, scale, need_residual)
        reason = launch
    routing.warn_once(reason)
    return fallback.forward(q, k, v, bias, mask, scale, need_residual)


def _launch(
    launch: routing.Launch, operands: layout.Operands, q: Tensor, scale: float, need_residual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, heads, crop, dim = q.shape
    padded = (batch, rows, heads, crop, operands.q.shape[-1])
    out = layout.projection_layout_empty(padded, q.dtype, q.device)
    residual = layout.projection_layout_empty(padded, q.dtype, q.device) if need_residual else None
    lse = torch.empty((batch, rows, heads, crop), dtype=torch.float32, device=q.device)
    arguments = operands.arguments(out, residual, lse)
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            launch.function(*arguments, scale, launch.num_ctas)
    else:
        launch.function(*arguments, scale, launch.num_ctas)
    return layout.trim(out, dim), lse, q.new_empty(0) if residual is None else layout.trim(residual, dim)


def run_kernel(
    kernel: kernels.Kernel, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Launch one particular forward kernel: output and LSE, without autograd and without a PyTorch path.

    Args:
        kernel: a kernel of the family "triangle_attention/forward", with or without residual.
        Others as in `triangle_attention`, five-dimensional.

    Raises:
        InvalidInput: the tensors do not fit together, or are not what the kernel was compiled for.
        NoKernel: the tensors are not on a device that the kernel runs on.
    """
    checks.check_types(q, k, v, bias, mask)
    _check_canonical(q, k, v, bias, mask)
    spec, here = kernel.spec, routing.hardware(q.device)
    if here.arch != spec.arch:
        raise NoKernel(f"{spec} is built for {spec.arch}; {here.reason or f'the device is {here.arch}'}")
    reason = routing.fallback_reason(q, bias, q.device)
    if reason is not None:
        raise InvalidInput.of("q, k, v, bias", reason, "what the kernel was compiled for")
    shape = routing.kernel_shape(q, bias, mask)
    residual = bool(dict(spec.variant).get("residual", False))
    if KernelSpec.make(spec.template, shape, kernel.config, **dict(routing.FLAGS[residual])) != spec:
        raise InvalidInput.of("q, k, v, bias, mask", shape.key(), f"what the kernel was compiled for: {dict(spec.variant)}")
    operands = layout.prepare(q, k, v, bias, mask)
    return _launch(routing.Launch(kernel.function, here.sms), operands, q, _scale(q, scale), residual)[:2]


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, need_residual: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check_canonical(q, k, v, bias, mask)
    out = layout.projection_layout_empty(q.shape, q.dtype, q.device)
    residual = layout.projection_layout_empty(q.shape, q.dtype, q.device) if need_residual else q.new_empty(0)
    return out, torch.empty(q.shape[:-1], dtype=fallback.lse_dtype(q), device=q.device), residual


def _backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None,
    scale: float, output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_canonical(q, k, v, bias, mask)
    return fallback.backward(grad_out, grad_lse, q, k, v, bias, mask, scale, output_mask)


def _backward_fake(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None,
    scale: float, output_mask: list[bool],
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) if need else x.new_empty(0) for x, need in zip((q, k, v, bias), output_mask, strict=True))


def _check_canonical(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    if not checks.is_canonical(q, bias, mask):
        came = f"shapes {tuple(q.shape)}, {tuple(bias.shape)}, {None if mask is None else tuple(mask.shape)}"
        raise InvalidInput.of("q, bias, mask", came, "five axes each here; tpf_jit.triangle_attention takes the other ranks")
    checks.check(q, k, v, bias, mask)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, mask, scale, need_residual):
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, residual = _forward_op(q, k, v, bias, mask, scale, need_residual)
        ctx.save_for_backward(q, k, v, bias, mask)
        ctx.scale = scale
        ctx.mark_non_differentiable(residual)
        ctx.set_materialize_grads(False)
        return out, lse, residual

    @staticmethod
    def backward(ctx, grad_out, grad_lse, _):
        needed = ctx.needs_input_grad[:4]
        if grad_out is None and grad_lse is None:
            return (None,) * 7
        grads = _backward_op(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, list(needed))
        return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None, None


class _Backward(torch.autograd.Function):
    """Lets gradients be part of a graph (create_graph=True); only differentiating them raises."""

    @staticmethod
    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return _backward_op(*arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise NotDifferentiable(
            "triangle_attention cannot be differentiated twice: its gradients have no gradients of their own. "
            "Leave out create_graph=True where it is not needed, or use tpf_jit.templates.triangle_attention.reference"
        )


class _SharedRows(torch.autograd.Function):
    """Reads an expanded row axis as one row.

    The gradient goes back with stride 0 too, an I-th in each row, as PyTorch then sums it over the rows that the caller's expand
    made; nothing of size I * N * N exists.
    """

    @staticmethod
    def forward(ctx, bias):
        ctx.rows = bias.shape[1]
        return bias[:, :1]

    @staticmethod
    def backward(ctx, grad):
        return (grad / ctx.rows).expand(-1, ctx.rows, -1, -1, -1)


def _forward_autograd(q, k, v, bias, mask, scale, need_residual):
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or bias.requires_grad):
        return _Forward.apply(q, k, v, bias, mask, scale, need_residual)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, bias, mask, scale, need_residual)


def _backward_autograd(*arguments):
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return _Backward.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*arguments)


for _name, _implementation, _fake, _autograd in (
    ("triangle_attention_forward", _forward, _forward_fake, _forward_autograd),
    ("triangle_attention_backward", _backward, _backward_fake, _backward_autograd),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"tpf_jit::{_name}", _fake, lib=_LIBRARY)
