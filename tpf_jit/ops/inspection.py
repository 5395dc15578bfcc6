"""What is asked about before it runs, a call of either operator or a shape: which it is, and whether kernels take it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.ops import multiplication_routing, plans, routing
from tpf_jit.shape import TriangleMultiplicationShape, is_shape
from tpf_jit.templates.triangle_multiplication.layout import Weights

TAKEN = "a compiled kernel takes it"


def check_kind(q: Any, k: Any, v: Any, bias: Any, mask: Any, p_in_weight: Any, others: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless these are a shape alone or tensors of a call, of which some may still be missing or wrong."""
    attention, update = any(x is not None for x in (k, v, bias)), p_in_weight is not None
    unknown = others.keys() - _OTHERS if update else others.keys()
    if unknown:
        raise InvalidInput.of(sorted(unknown)[0], "an argument", "the arguments of the operators")
    if isinstance(q, Tensor) and (attention or update):
        return
    if not is_shape(q) or attention or update or mask is not None:
        allowed = "a shape alone, the tensors q, k, v, bias and perhaps mask, or z with p_in_weight and perhaps mask"
        raise InvalidInput.of("q", f"{type(q).__name__} alone" if isinstance(q, Tensor) else type(q).__name__, allowed)


_OTHERS = frozenset(Weights._fields) | {"direction", "eps", "residual", "recompute", "inplace"}
"""Arguments of `triangle_multiplication` that need not be known to route it, but for the direction."""


def inspect(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, p_in_weight: Any, others: Mapping[str, Any], device: torch.device | None
) -> tuple[str | None, Any]:
    """Why what `check_kind` lets pass takes the PyTorch path (None: a kernel takes it), and its shape, if it has one that kernels
    are meant for; shapes on a device.

    Raises:
        InvalidInput: tensors that do not fit together.
    """
    if p_in_weight is not None and k is None and v is None and bias is None:
        return multiplication_routing.inspect_call(q, mask, p_in_weight, others.get("direction", "outgoing"))
    if isinstance(q, Tensor):
        return plans.inspect_call(q, k, v, bias, mask)
    return routing.besides(routing.hardware(device).reason or None, _refusal(q)), q


def _refusal(shape: Any) -> str | None:
    """Why no registered template serves a shape, on any device; None if one does."""
    if isinstance(shape, TriangleMultiplicationShape):
        return multiplication_routing.unsupported(shape)
    return routing.unsupported(shape, None)


def taken(q: Any) -> str:
    """Why a call or shape is on kernels, with what happens on the way there."""
    if isinstance(q, Tensor) and q.dtype == torch.float32:
        return f"{TAKEN}, from float32 rounded as autocast wants"
    return TAKEN
