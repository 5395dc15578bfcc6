"""The plan of a call: what its metadata alone decides, remembered, so that it costs one look-up from the second call on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.ops import checks, routing
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import layout


class Plan(NamedTuple):
    """What a call's metadata decides: why it takes the PyTorch path, or the problem its kernel solves and whether its operands
    can be read where they are."""

    reason: str | None
    shape: TriangleAttentionShape | None = None
    in_place: bool = False


_plans: dict[tuple, Plan] = {}
_MAX_PLANS = 4096


def plan_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Plan:
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
    check_canonical(q, k, v, bias, mask)
    plan, lasting = _decide(q, k, v, bias, mask, q.device)
    if not lasting:
        return plan
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _decide(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, device: torch.device
) -> tuple[Plan, bool]:
    """The plan of a checked call on a device (the tensors may be meta tensors), and whether it holds for the process's life."""
    reason = routing.fallback_reason(q, bias, device)
    if reason is not None:
        try:
            return Plan(reason, routing.kernel_shape(q, bias, mask)), True
        except InvalidInput:
            return Plan(reason), True  # nothing that any kernel could take
    shape = routing.kernel_shape(q, bias, mask)
    reason = routing.unsupported(shape, device)
    if reason is not None:
        return Plan(reason, shape), False  # a template may be registered later
    return Plan(None, shape, layout.in_place(q, k, v, bias)), True


def inspect_call(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> tuple[str | None, TriangleAttentionShape | None]:
    """What `triangle_attention` would do with these tensors: why it would take the PyTorch path (None: a kernel takes the call),
    and the problem that a kernel solves or would solve, if any could. Takes autocast into account; copies and reads nothing.

    Raises:
        InvalidInput: the arguments do not fit together.
    """
    checks.check_types(q, k, v, bias, mask)
    cast_to = autocast_dtype(q)
    checks.check(q, k, v, bias, mask, one_dtype=cast_to is None)
    seen = shadows(q, k, v, bias, mask)
    plan, _ = _decide(*seen, q.device)
    return routing.besides(plan.reason, routing.unserved(seen[0], seen[3])), plan.shape


def shadows(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Checked tensors as meta tensors of canonical rank, with the dtypes that autocast gives them."""
    cast_to = autocast_dtype(q)
    dtypes = [x.dtype if cast_to is None or x.dtype == torch.float64 else cast_to for x in (q, k, v)]
    dtypes += [bias.dtype, None if mask is None else mask.dtype]
    return checks.canonical(
        *(
            None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
            for x, dtype in zip((q, k, v, bias, mask), dtypes, strict=True)
        )
    )


def check_canonical(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> None:
    """`checks.check` for the operators, which take five axes only."""
    if not checks.is_canonical(q, bias, mask):
        came = f"shapes {tuple(q.shape)}, {tuple(bias.shape)}, {None if mask is None else tuple(mask.shape)}"
        raise InvalidInput.of("q, bias, mask", came, "five axes each here; tpf_jit.triangle_attention takes the other ranks")
    checks.check(q, k, v, bias, mask)


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts on q's device; None where it is off."""
    kind = q.device.type
    # Not torch.amp.is_autocast_available: torch 2.11 cannot trace it under fullgraph.
    if kind in ("cuda", "cpu", "xpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None
