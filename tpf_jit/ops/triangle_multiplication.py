"""The triangle multiplicative update as a PyTorch operator: autograd, autocast, torch.compile, in place.

    triangle_multiplication(...)                   the function users call: any rank, autocast
      -> torch.ops.tpf_jit.triangle_multiplication_forward     (B, N, N, C) only
      -> torch.ops.tpf_jit.triangle_multiplication_backward    from what the forward saved: kernels, or PyTorch in chunks
      -> torch.ops.tpf_jit.triangle_multiplication_            the forward over z, without gradients

On a Hopper GPU and with bf16 activations, or float32 ones under bf16 autocast, the forward is four kernels, or three
(`multiplication_launch`), and the backward up to seven more (`multiplication_backward`); every other call takes the PyTorch path
of `multiplication_fallback`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput, NotDifferentiable
from tpf_jit.ops import multiplication_backward, multiplication_launch, multiplication_plans, multiplication_routing, routing
from tpf_jit.ops import multiplication_checks as checks
from tpf_jit.ops import multiplication_fallback as fallback
from tpf_jit.ops.multiplication_fallback import Rule
from tpf_jit.ops.multiplication_launch import Keep, Saved
from tpf_jit.ops.multiplication_plans import Plan
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_multiplication.layout import (
    Weights,
    contraction_dtype,
    contraction_empty,
    factors_empty,
    folded_empty,
    stats_empty,
)

_WEIGHTS = ", ".join(f"Tensor{'' if name in checks.REQUIRED else '?'} {name}" for name in Weights._fields)
_RULE = "str direction, float eps, ScalarType dtype"
_COUNT = len(Weights._fields)
_BACKWARD = "the backward of triangle_multiplication"

_LIBRARY = torch.library.Library("tpf_jit", "FRAGMENT")
_LIBRARY.define(
    f"triangle_multiplication_forward(Tensor z, Tensor? mask, {_WEIGHTS}, Tensor? residual, {_RULE}, bool keep,"
    f" bool recompute=False, bool[{_COUNT + 1}]? needed=None) -> (Tensor out, Tensor[] saved)"
)
_LIBRARY.define(
    f"triangle_multiplication_backward(Tensor grad_out, Tensor z, Tensor? mask, {_WEIGHTS}, Tensor? x, {_RULE},"
    f" bool[{_COUNT + 1}] output_mask, Tensor? factors=None, Tensor? z_stats=None, Tensor? x_stats=None,"
    " Tensor? matrices=None, Tensor? terms=None) -> Tensor[]"
)
_LIBRARY.define(f"triangle_multiplication_(Tensor(a!) z, Tensor? mask, {_WEIGHTS}, Tensor? residual, {_RULE}) -> ()")
_forward_op = torch.ops.tpf_jit.triangle_multiplication_forward.default
_backward_op = torch.ops.tpf_jit.triangle_multiplication_backward.default
_inplace_op = torch.ops.tpf_jit.triangle_multiplication_.default


def triangle_multiplication(
    z: Tensor,
    direction: str = "outgoing",
    mask: Tensor | None = None,
    norm_in_weight: Tensor | None = None,
    norm_in_bias: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    p_in_bias: Tensor | None = None,
    g_in_weight: Tensor | None = None,
    g_in_bias: Tensor | None = None,
    norm_out_weight: Tensor | None = None,
    norm_out_bias: Tensor | None = None,
    p_out_weight: Tensor | None = None,
    p_out_bias: Tensor | None = None,
    g_out_weight: Tensor | None = None,
    g_out_bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    recompute: bool = False,
    inplace: bool = False,
) -> Tensor:
    """The triangle multiplicative update of a pair tensor, with cuEquivariance's names, order and layouts of the weights.

        zn = LN(z);  [a; b] = mask * sigmoid(zn g_in^T) * (zn p_in^T);  x_ij = sum_k a_ik b_jk, or sum_k a_ki b_kj if incoming
        result = [residual +] sigmoid(zn g_out^T) * (LN(x) p_out^T)

    Differentiable once, in z, residual and all weights. Equal calls give equal bits, also of gradients.

    Args:
        z: `(B, N, N, C)`; without a batch axis `(N, N, C)`, or with several. Any strides, any floating dtype.
        direction: `"outgoing"` or `"incoming"`.
        mask: None, or broadcastable to `(B, N, N)`; boolean (True keeps) or numbers, which multiply. Has no gradient.
        norm_in_weight, norm_in_bias: `(C,)`; ones and zeros when None.
        p_in_weight, g_in_weight: `(2 D, C)`, the rows that make a, then those that make b. Required.
        norm_out_weight, norm_out_bias: `(D,)`; ones and zeros when None.
        p_out_weight: `(C, D)`. Required; sets D.
        g_out_weight: `(C, C)`. Required.
        p_in_bias, g_in_bias: None or `(2 D,)`.
        p_out_bias, g_out_bias: None or `(C,)`.
        eps: of both LayerNorms.
        residual: None, or like z (it may be z): added before the update is rounded; by kernels after, where it is not bf16.
        recompute: save less for the backward: the factors a and b and the contraction x are computed anew there.
        inplace: write the result over z, and return z; for inference. With `residual=z` this is `z += update`.

    Returns:
        The update, contiguous, shaped like z. Its dtype is autocast's where autocast is on and z's otherwise; with a residual,
        what PyTorch promotes both to. Under bf16 autocast kernels round a float32 z once its pairs' means are taken out, which
        costs what rounding LN(z) before its bias would.

        For the backward these are saved: z, mask and the weights, and unless `recompute` x, `(B, D, N, N)` in the dtype of the
        activations (float32 where that is fp16). Where it runs on kernels also the weights as these read them, mean and deviation
        of every pair of z and x, and unless `recompute` a and b, each like x; rows of these and of x are then rounded up to 8
        elements.

    Raises:
        InvalidInput: the arguments do not fit together, or `inplace` where gradients are wanted; nothing has been allocated.
    """
    weights = Weights(
        norm_in_weight, norm_in_bias, p_in_weight, p_in_bias, g_in_weight, g_in_bias,
        norm_out_weight, norm_out_bias, p_out_weight, p_out_bias, g_out_weight, g_out_bias,
    )  # fmt: skip
    key = multiplication_plans.key_of(z, mask, weights, residual, direction, recompute, inplace)
    plan = multiplication_plans.known(key)
    if plan is not None and type(eps) is float and 0.0 < eps < math.inf:
        return _planned(plan, z, mask, weights, residual, Rule(direction, eps, plan.dtype), inplace)
    checks.check_types(z, mask, weights, residual)
    checks.check_options(direction, recompute=recompute, inplace=inplace)
    eps = checks.check_eps(eps)
    given, leading = z, z.shape[:-3]
    checks.check(z, mask, weights, residual)
    rule = Rule(direction, eps, multiplication_routing.activation_dtype(z))
    if inplace:
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (z, *weights, residual))
        checks.check_in_place(z, fallback.result_dtype(rule.dtype, residual), wanted)
    if not checks.is_canonical(z, mask):
        z, mask = checks.canonical(z, mask)
        residual = z if residual is given else None if residual is None else checks.merge_pair(residual)
        key = multiplication_plans.key_of(z, mask, weights, residual, direction, recompute, inplace)
        plan = multiplication_plans.known(key)
    if plan is None and key is not None:
        plan = multiplication_plans.make(key, z, mask, weights, residual, rule)
    if plan is not None:
        out = _planned(plan, z, mask, weights, residual, rule, inplace)
    elif inplace:
        _inplace_op(z, mask, *weights, residual, *rule)
    else:
        out, _ = _forward_op(z, mask, *weights, residual, *rule, False, recompute)
    return given if inplace else checks.split_leading(out, leading)


def _planned(
    plan: Plan, z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, rule: Rule, inplace: bool
) -> Tensor:
    """A call of canonical rank on the kernels of its plan: what the operators do, without the dispatcher."""
    if plan.needed is not None:
        (out,) = _Forward.apply(plan, z, mask, *weights, residual, *rule, *_options(False, not plan.keep.x))
        return out
    with torch._C._AutoDispatchBelowAutograd():
        if inplace:
            multiplication_launch.write_over(plan.forward, z, mask, weights, residual, rule.eps)
            return z
        return multiplication_launch.forward(plan.forward, z, mask, weights, residual, rule.eps)[0]


def _split(arguments: tuple) -> tuple[Weights, Tensor | None, Rule, tuple]:
    """What follows z and mask in the operators: weights, residual or x, rule, and the rest."""
    return Weights(*arguments[:_COUNT]), arguments[_COUNT], Rule(*arguments[_COUNT + 1 : _COUNT + 4]), arguments[_COUNT + 4 :]


def _options(keep: bool, recompute: bool = False, needed: list[bool] | None = None) -> tuple[bool, bool, list[bool] | None]:
    """The forward operator's last arguments: whether to return x; whether the backward makes the factors anew, and x unless it
    is returned; and, where it is to run on kernels, of which of z and the weights it gives the gradients."""
    return keep, recompute, needed


def _kept(weights: Weights, options: tuple) -> Keep:
    """What a forward leaves."""
    keep, recompute, needed = _options(*options)
    if needed is None:
        return Keep(keep)
    return Keep(keep, not recompute and multiplication_backward.steps(weights, needed).through, True)


def _find(
    z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, rule: Rule, options: tuple = (False,)
) -> multiplication_launch.Kernels | None:
    """The kernels of a call, or None after a warning that says why it takes the PyTorch path. Those of its backward, where it
    is to have some, are found too, so that nothing has been launched when one of them cannot be loaded."""
    reason, shape = multiplication_routing.decide(z, mask, weights.p_in_weight, rule.direction, rule.dtype)
    if reason is None:
        keep, needed = _kept(weights, options), _options(*options)[2]
        found = multiplication_launch.find(shape, z, weights, residual, keep.stats)
        if not isinstance(found, str):
            if needed is not None:
                _find_backward(shape, z, weights, needed, (keep.x, keep.factors))
            return found
        reason = found
    routing.warn_once(reason, "triangle_multiplication")
    return None


def _find_backward(
    shape: TriangleMultiplicationShape, z: Tensor, weights: Weights, needed: list[bool], saved: tuple[bool, bool]
) -> multiplication_backward.Kernels | None:
    """The kernels of a backward, or None after a warning; `saved` says whether x and the factors are there."""
    take = multiplication_backward.steps(weights, needed)
    found = multiplication_backward.find(shape, z, take, saved)
    if not isinstance(found, str):
        return found
    routing.warn_once(found, _BACKWARD)
    return None


def _forward(z, mask, *arguments):
    """The forward operator: the update, and what is kept of `Saved` in its order; `_options` has the rest."""
    weights, residual, rule, options = _split(arguments)
    checks.check_canonical(z, mask, weights, residual, rule)
    found, keep = _find(z, mask, weights, residual, rule, options), _kept(weights, options)
    if found is not None:
        out, saved = multiplication_launch.forward(found, z, mask, weights, residual, rule.eps, keep)
    else:
        out, x = fallback.forward(z, mask, weights, residual, rule, keep.x or keep.stats)
        saved = Saved(x if keep.x else None)
        if keep.stats:
            saved = fallback.saved_for_kernels(multiplication_launch.kernel_input(z), mask, weights, x, rule, keep)
    return out, [x for x in saved if x is not None]


def _forward_fake(z, mask, *arguments):
    weights, residual, rule, options = _split(arguments)
    checks.check_canonical(z, mask, weights, residual, rule)
    keep = _kept(weights, options)
    batch, crop, _, _ = z.shape
    out = torch.empty(z.shape, dtype=fallback.result_dtype(rule.dtype, residual), device=z.device)
    if keep.stats:
        z = torch.empty(z.shape, dtype=rule.dtype, device=z.device)  # as kernels take it
        saved = [contraction_empty(z, weights.hidden)] if keep.x else []
        saved += [factors_empty(z, weights.hidden)] if keep.factors else []
        return out, [*saved, stats_empty(z), stats_empty(z), *folded_empty(weights, z.dtype)]
    stored = z.dtype if z.dtype == torch.float64 else contraction_dtype(rule.dtype)
    return out, [fallback.contraction_empty(batch, weights.hidden, crop, stored, z.device)] if keep.x else []


def _inplace(z, mask, *arguments):
    """The forward over z."""
    weights, residual, rule, _ = _split(arguments)
    checks.check_canonical(z, mask, weights, residual, rule)
    checks.check_in_place(z, fallback.result_dtype(rule.dtype, residual), False)
    found = _find(z, mask, weights, residual, rule)
    if found is None:
        fallback.forward(z, *multiplication_launch.all_apart(z, mask, weights, residual), rule, False, out=z)
        return
    multiplication_launch.write_over(found, z, mask, weights, residual, rule.eps)


def _inplace_fake(z, mask, *arguments):
    weights, residual, rule, _ = _split(arguments)
    checks.check_canonical(z, mask, weights, residual, rule)
    checks.check_in_place(z, fallback.result_dtype(rule.dtype, residual), False)


def _backward(grad_out, z, mask, *arguments):
    """The backward operator: gradients of z and of the weights; those that `output_mask` leaves out come back empty.

    With what a forward leaves for kernels (statistics, folded weights) they run; without, or where one is missing, PyTorch does.
    """
    weights, x, rule, (output_mask, *more) = _split(arguments)
    saved = Saved(x, *more)
    reason, shape = multiplication_routing.decide(z, mask, weights.p_in_weight, rule.direction, rule.dtype)
    if reason is None and all(t is not None for t in (saved.z_stats, saved.x_stats, saved.matrices, saved.terms)):
        there = (x is not None, saved.factors is not None)
        found = _find_backward(shape, z, weights, output_mask, there)
        if found is not None:
            grads = multiplication_backward.backward(found, grad_out, z, mask, weights, saved, rule.eps, output_mask)
            return [z.new_empty(0) if grad is None else grad for grad in grads]  # an operator's results share no memory
    elif reason is None:
        reason = multiplication_routing.backward_unsupported(shape)
        if reason is not None:
            routing.warn_once(reason, _BACKWARD)
    return fallback.backward(grad_out, z, mask, weights, None if x is None else x[..., : z.shape[1]], rule, output_mask)


def _backward_fake(grad_out, z, mask, *arguments):
    weights, _, _, (output_mask, *_) = _split(arguments)
    operands = zip((z, *weights), output_mask, strict=True)
    return [torch.empty_like(x) if need and x is not None else z.new_empty(0) for x, need in operands]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, z, mask, *arguments):
        """`plan` is that of a plain call; without one the operators serve."""
        weights, residual, rule, options = _split(arguments)
        keep, recompute, _ = _options(*options)
        _, need_z, _, *others = ctx.needs_input_grad
        needed = [need_z, *others[:_COUNT]]
        if plan is not None:
            with torch._C._AutoDispatchBelowAutograd():
                out, saved = multiplication_launch.forward(plan.forward, z, mask, weights, residual, rule.eps, plan.keep)
        else:
            # From what torch.compile may assume of symbolic sizes too; that a kernel cannot be had shows only when it runs.
            reason = multiplication_routing.backward_reason(z, weights.p_in_weight, rule.direction, rule.dtype)
            options = (keep or any(needed) and not recompute, recompute, needed if any(needed) and reason is None else None)
            with torch._C._AutoDispatchBelowAutograd():
                out, left = _forward_op(z, mask, *weights, residual, *rule, *options)
            saved = _named(left, _kept(weights, options))
        ctx.plan, ctx.rule, ctx.residual_dtype = plan, rule, None if residual is None else residual.dtype
        if any(needed):
            ctx.save_for_backward(z, mask, *weights, *(saved._replace(x=None) if recompute else saved))
        ctx.set_materialize_grads(False)
        if not keep:
            return (out,)
        x = saved.x[..., : z.shape[1]]
        ctx.mark_non_differentiable(x)
        return out, x

    @staticmethod
    def backward(ctx, grad_out, *_):
        count = len(ctx.needs_input_grad)
        if grad_out is None:
            return (None,) * count
        _, need_z, _, *others = ctx.needs_input_grad
        needed = [need_z, *others[:_COUNT]]
        grads = [None] * (_COUNT + 1)
        if any(needed):
            saved = ctx.saved_tensors
            if multiplication_plans.holds_for_backward(ctx.plan, needed, grad_out, saved):
                z, mask, *rest = saved
                weights, left = Weights(*rest[:_COUNT]), Saved(*rest[_COUNT:])
                with torch._C._AutoDispatchBelowAutograd():
                    found = multiplication_backward.backward(
                        ctx.plan.backward, grad_out, z, mask, weights, left, ctx.rule.eps, needed
                    )
            else:
                given, more = saved[: _COUNT + 3], saved[_COUNT + 3 :]  # z, mask, weights, x; what else kernels left
                found = _backward_op(grad_out, *given, *ctx.rule, needed, *more)
            grads = [grad if need else None for grad, need in zip(found, needed, strict=True)]
        of_residual = grad_out.to(ctx.residual_dtype) if others[_COUNT] else None
        return None, grads[0], None, *grads[1:], of_residual, *(None,) * (count - _COUNT - 4)


def _named(left: list[Tensor], keep: Keep) -> Saved:
    """What a forward left, by name."""
    rest = iter(left)
    return Saved(*(next(rest) if there else None for there in (keep.x, keep.factors, *(keep.stats,) * 4)))


class _Backward(torch.autograd.Function):
    """Lets gradients be part of a graph (create_graph=True); only differentiating them raises."""

    @staticmethod
    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(_backward_op(*arguments))

    @staticmethod
    def backward(ctx, *grads):
        raise NotDifferentiable(
            "triangle_multiplication cannot be differentiated twice: its gradients have no gradients of their own. "
            "Leave out create_graph=True where it is not needed, or use the plain PyTorch of "
            "`from tpf_jit.templates.triangle_multiplication import reference`"
        )


def _wanted(arguments: tuple) -> bool:
    """Whether autograd must see a call. Tangents (torch.func.jvp, forward_ad) count: autograd functions refuse them, plain calls
    would drop them."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


def _forward_autograd(z, mask, *arguments):
    if _wanted((z, *arguments)):
        out, *saved = _Forward.apply(None, z, mask, *arguments)
        return out, saved
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(z, mask, *arguments)


def _backward_autograd(*arguments):
    if _wanted(arguments):
        return list(_Backward.apply(*arguments))
    with torch._C._AutoDispatchBelowAutograd():
        return _backward_op(*arguments)


def _inplace_autograd(z, mask, *arguments):
    if _wanted((z, *arguments)):
        raise InvalidInput.of("inplace", "True where gradients are wanted", "True under torch.no_grad() or inference_mode()")
    with torch._C._AutoDispatchBelowAutograd():
        _inplace_op(z, mask, *arguments)


for _name, _implementation, _fake, _autograd in (
    ("triangle_multiplication_forward", _forward, _forward_fake, _forward_autograd),
    ("triangle_multiplication_backward", _backward, _backward_fake, _backward_autograd),
    ("triangle_multiplication_", _inplace, _inplace_fake, _inplace_autograd),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _autograd, "Autograd")
    torch.library.register_fake(f"tpf_jit::{_name}", _fake, lib=_LIBRARY)
