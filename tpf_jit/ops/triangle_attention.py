"""Triangle attention as a PyTorch operator: autograd, autocast, torch.compile and CUDA graphs.

    triangle_attention(...)                        the function users call: any rank, autocast, expanded biases
      -> torch.ops.tpf_jit.triangle_attention_forward      (B, I, H, N, D) only; kernel or PyTorch path
      -> torch.ops.tpf_jit.triangle_attention_backward     from what the forward saved, by kernels; or recomputed in chunks

The operators are registered with `torch.library.Library` and an autograd kernel of their own, as `torch.library.custom_op` costs
5 us more a call without gradients and 21 us more with them (`register_autograd` 2 and 17; one core, PyTorch 2.13).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpf_jit.errors import NotDifferentiable
from tpf_jit.ops import checks, fallback, launch, plans, routing, settings
from tpf_jit.templates.triangle_attention import layout

_LIBRARY = torch.library.Library("tpf_jit", "DEF")
_LIBRARY.define(
    "triangle_attention_forward(Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, float scale, bool need_residual,"
    " bool compensate=True, int? workspace_mib=None) -> (Tensor out, Tensor lse, Tensor residual, Tensor lse_low)"
)
_LIBRARY.define(
    "triangle_attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask,"
    " Tensor? out, Tensor? residual, Tensor? lse, Tensor? lse_low, float scale, bool[4] output_mask, int? workspace_mib=None)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
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
    workspace_mib: int | None = None,
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
            Gets no gradient, also where a floating one requires it: what is to be learned belongs in the bias.
        scale: any finite number; `D ** -0.5` when None.
        return_lse: whether to also return the log-sum-exp.
        workspace_mib: the most MiB of float32 that the backward kernels may take for the bias's gradient while it is summed up;
            `TPF_JIT_WORKSPACE_MIB`, or 256, when None. At least one head is always taken. Gradients do not depend on it.

    Returns:
        The output, shaped and typed like q, as a view of `(B, I, N, H, D)` storage; with `return_lse` also the natural-log LSE
        `(B, I, H, N)` fp32. A query whose keys are all excluded (boolean, or additive -inf) gives zeros and LSE -inf.

        Under autocast q, k and v are cast to its dtype; the bias keeps its own, so that an fp32 bias and its gradient are never
        rounded.

        In training on a kernel, the output's rounding is saved too, for gradients without it (see `residual_compensation`).

    Raises:
        InvalidInput: the arguments do not fit together; nothing has been allocated or launched.
        ColdKernelInCapture: in CUDA-graph capture with a kernel that is not loaded yet (`warmup` loads it).
    """
    checks.check_types(q, k, v, bias, mask)
    workspace_mib = settings.check_workspace(workspace_mib)
    checks.check_switches(return_lse=return_lse)
    cast_to = plans.autocast_dtype(q)
    canonical = checks.is_canonical(q, bias, mask)
    if cast_to is not None or not canonical:
        # The operator checks too, and remembers what it has checked; here only where tensors are changed before they reach it.
        checks.check(q, k, v, bias, mask, one_dtype=cast_to is None)
    scale = checks.scale_of(q, scale)
    if cast_to is not None:
        q, k, v = (x if x.dtype == torch.float64 else x.to(cast_to) for x in (q, k, v))
    leading = q.shape[:-4]
    if not canonical:
        q, k, v, bias, mask = checks.canonical(q, k, v, bias, mask)
    if bias.requires_grad and (launch.is_expanded(bias, 0) or launch.is_expanded(bias, 1)):
        bias = _Shared.apply(bias)
    # What the operator saves is decided below torch.compile's tracing, the setting is read inside it, where a change is noticed.
    out, lse, _, _ = _forward_op(q, k, v, bias, mask, scale, False, settings.compensate, workspace_mib)
    out = checks.split_leading(out, leading)
    return (out, checks.split_leading(lse, leading)) if return_lse else out


def _forward(q, k, v, bias, mask, scale, need_residual, compensate=True, workspace_mib=None):
    """The forward operator: output, LSE, and with `need_residual` what rounding took from each (else empty).

    `compensate` and `workspace_mib` are for the backward that autograd may run.
    """
    plan = plans.plan_of(q, k, v, bias, mask)
    reason = plan.reason
    if reason is None:
        family = routing.FORWARD_TRAINING if need_residual else routing.FORWARD
        found = routing.find_kernel(family, plan.shape, (), q.device)
        if not isinstance(found, str):
            operands = layout.prepare(q, k, v, bias, mask, plan.in_place)
            return launch.forward(found, operands, q, scale, need_residual)
        reason = found
    routing.warn_once(reason)
    return fallback.forward(q, k, v, bias, mask, scale, need_residual)


def _forward_fake(q, k, v, bias, mask, scale, need_residual, compensate=True, workspace_mib=None):
    plans.check_canonical(q, k, v, bias, mask)
    out, residual = (layout.projection_layout_empty(q.shape, q.dtype, q.device) for _ in range(2))
    lse, lse_low = (torch.empty(q.shape[:-1], dtype=fallback.lse_dtype(q), device=q.device) for _ in range(2))
    return (out, lse, residual, lse_low) if need_residual else (out, lse, q.new_empty(0), lse.new_empty(0))


def _backward(
    grad_out, grad_lse, q, k, v, bias, mask, out, residual, lse, lse_low, scale, output_mask, workspace_mib=None
):
    """The backward operator: gradients of q, k, v and bias; those that `output_mask` leaves out come back empty.

    `out` and `lse`, perhaps with what rounding took from them, are what the forward left for the kernels; without them, or
    where a kernel is missing, everything is computed anew in PyTorch.
    """
    plan = plans.plan_of(q, k, v, bias, mask)
    if plan.reason is None and out is not None and lse is not None and (grad_out is not None or grad_lse is not None):
        reason = launch.repeats(q, bias) if output_mask[3] else None
        if reason is None:
            found = launch.find_backward(plan.shape, residual is not None, output_mask, q.device)
            if not isinstance(found, str):
                grads = _backward_fake(
                    grad_out, grad_lse, q, k, v, bias, mask, out, residual, lse, lse_low, scale, output_mask, workspace_mib
                )
                launch.backward(
                    found,
                    layout.prepare(q, k, v, bias, mask, plan.in_place),
                    launch.Saved(out, residual, lse, lse_low),
                    (grad_out, grad_lse),
                    scale,
                    [x if need else None for x, need in zip(grads, output_mask, strict=True)],
                    settings.workspace_bytes(workspace_mib),
                )
                return grads
            reason = found
        routing.warn_once(reason, "the backward of triangle_attention")
    return fallback.backward(grad_out, grad_lse, q, k, v, bias, mask, scale, output_mask)


def _backward_fake(
    grad_out, grad_lse, q, k, v, bias, mask, out, residual, lse, lse_low, scale, output_mask, workspace_mib=None
):
    return tuple(torch.empty_like(x) if need else x.new_empty(0) for x, need in zip((q, k, v, bias), output_mask, strict=True))


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, mask, scale, need_residual, compensate, workspace_mib):
        # From what torch.compile may assume of symbolic sizes too; what else may stand in a kernel's way shows only when it runs.
        by_kernel = routing.fallback_reason(q, bias, q.device) is None
        additive = mask is not None and mask.dtype != torch.bool
        keep = need_residual or by_kernel and (compensate or additive)
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, residual, lse_low = _forward_op(q, k, v, bias, mask, scale, keep)
        saved = (None,) * 4
        if by_kernel:
            saved = (out, residual, lse, lse_low) if keep else (out, None, lse, None)
        ctx.save_for_backward(q, k, v, bias, mask, *saved)
        ctx.scale, ctx.workspace_mib = scale, workspace_mib
        ctx.mark_non_differentiable(residual, lse_low)
        ctx.set_materialize_grads(False)
        return out, lse, residual, lse_low

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *_):
        needed = ctx.needs_input_grad[:4]
        if grad_out is None and grad_lse is None:
            return (None,) * 9
        grads = _backward_op(grad_out, grad_lse, *ctx.saved_tensors, ctx.scale, list(needed), ctx.workspace_mib)
        return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *(None,) * 5


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
            "Leave out create_graph=True where it is not needed, or use the plain PyTorch of "
            "`from tpf_jit.templates.triangle_attention import reference`"
        )


class _Shared(torch.autograd.Function):
    """Reads a bias with an expanded batch or row axis as one with a single element there.

    The gradient goes back with stride 0 too, its n-th part in each of n places, as PyTorch then sums it over those that the
    caller's expand made; nothing of size I * N * N exists.
    """

    @staticmethod
    def forward(ctx, bias):
        ctx.sizes = bias.shape
        return launch.unexpanded(bias)

    @staticmethod
    def backward(ctx, grad):
        return (grad / (ctx.sizes.numel() // grad.numel())).expand(ctx.sizes)


def _forward_mode() -> bool:
    """Whether tangents may be about (torch.func.jvp, forward_ad): autograd functions refuse them, plain calls would drop them."""
    return torch.autograd.forward_ad._current_level >= 0


def _forward_autograd(q, k, v, bias, mask, scale, need_residual, compensate=True, workspace_mib=None):
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or bias.requires_grad)
    if wanted or _forward_mode():
        return _Forward.apply(q, k, v, bias, mask, scale, need_residual, compensate, workspace_mib)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, k, v, bias, mask, scale, need_residual)


def _backward_autograd(*arguments):
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
    if wanted or _forward_mode():
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
