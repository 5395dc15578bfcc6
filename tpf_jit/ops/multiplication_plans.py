"""The plan of a triangle multiplication that kernels take: what its metadata decides, remembered together with the kernels.

From the second call on a plain one (see `is_eager`) costs one look-up, its buffers and its launches: no checks, no routing, no
search for kernels, no way through PyTorch's dispatcher. A call without a plan takes the operators, which decide it anew: all that
the PyTorch path takes, that torch.compile traces, or that one of PyTorch's modes watches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.utils._device
from torch import Tensor

from tpf_jit import kernels
from tpf_jit.ops import multiplication_backward, multiplication_launch, multiplication_routing, plans
from tpf_jit.ops.multiplication_fallback import Rule
from tpf_jit.ops.multiplication_launch import NOTHING, Keep
from tpf_jit.templates.triangle_multiplication.layout import Weights


class Plan(NamedTuple):
    """What a call's metadata decides.

    generation: of the kernels (`kernels.generation`). dtype: of the activations. forward: its kernels. keep: what it leaves.
    needed, backward: of which of z and the weights its backward gives the gradients, and that one's kernels; None where no
    gradients are wanted.
    """

    generation: int
    dtype: torch.dtype
    forward: multiplication_launch.Kernels
    keep: Keep = NOTHING
    needed: list[bool] | None = None
    backward: multiplication_backward.Kernels | None = None


_plans: dict[tuple, Plan] = {}
_MAX_PLANS = 4096
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def is_eager() -> bool:
    """Whether nothing but autograd, autocast and a default device looks at what is called: no torch.compile, no other mode, no
    transform, no trace."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        and not _only_default_device()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def _only_default_device() -> bool:
    """Whether the modes are `torch.set_default_device`'s, which no allocation here heeds."""
    modes = torch.overrides._get_current_function_mode_stack()
    return all(type(mode) is torch.utils._device.DeviceContext for mode in modes)


def _is_lazy(x: Tensor) -> bool:
    """Whether memory does not hold what x says: PyTorch negates it, or has not made its zeros, when an operator asks."""
    return x.is_neg() or x._is_zerotensor()


def key_of(
    z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, direction: str, recompute: bool, inplace: bool
) -> tuple | None:
    """All that decides a call, whose arguments nobody need have checked; None for one that cannot have a plan."""
    tensors = (z, residual, mask, *weights)
    if not is_eager() or not _PLAIN.issuperset(map(type, tensors)) or z is None or type(direction) is not str:
        return None
    if type(recompute) is not bool or type(inplace) is not bool:
        return None
    if z.dim() != 4 or mask is not None and mask.dim() != 3 or any(x is not None and _is_lazy(x) for x in tensors):
        return None
    needed = None
    if torch.is_grad_enabled():
        needed = (*[x is not None and x.requires_grad for x in (z, residual, *weights)],)
        needed = needed if True in needed else None
    return (
        kernels.generation, needed, direction, recompute, z.stride() if inplace else None, plans.autocast_dtype(z),
        *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors],
    )  # fmt: skip


def known(key: tuple | None) -> Plan | None:
    """The plan that was made under a key."""
    return None if key is None else _plans.get(key)


def make(key: tuple, z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, rule: Rule) -> Plan | None:
    """The plan of a checked call under its key, remembered; None, and nothing remembered, unless kernels take all of it.

    Raises as `routing.find_kernel`; nothing has been launched then.
    """
    generation, needed, _, recompute, *_ = key
    reason, shape = multiplication_routing.decide(z, mask, weights.p_in_weight, rule.direction, rule.dtype)
    if reason is not None:
        return None
    keep, take = NOTHING, None
    if needed is not None:
        needed = [needed[0], *needed[2:]]
        reason = multiplication_routing.backward_reason(z, weights.p_in_weight, rule.direction, rule.dtype)
        if reason is not None or not any(needed):
            return None
        take = multiplication_backward.steps(weights, needed)
        keep = Keep(not recompute, not recompute and take.through, True)
    forward = multiplication_launch.find(shape, z, weights, residual, keep.stats)
    backward = None
    if take is not None and not isinstance(forward, str):
        backward = multiplication_backward.find(shape, z, take, (keep.x, keep.factors))
    if isinstance(forward, str) or isinstance(backward, str):
        return None
    if len(_plans) >= _MAX_PLANS or _plans and next(iter(_plans.values())).generation != generation:
        _plans.clear()  # plans of generations before would never be found again
    plan = _plans[key] = Plan(generation, rule.dtype, forward, keep, needed, backward)
    return plan


def holds_for_backward(plan: Plan | None, needed: list[bool], grad_out: Tensor, saved: tuple[Tensor | None, ...]) -> bool:
    """Whether a backward may take the kernels of its forward's plan, straight."""
    return (
        is_eager()
        and plan is not None
        and plan.generation == kernels.generation
        and plan.needed == needed
        and not torch.is_grad_enabled()
        and type(grad_out) is Tensor
        and not _is_lazy(grad_out)
        and _PLAIN.issuperset(map(type, saved))
    )
