"""Kernel or PyTorch for a triangle multiplication: the decision, from metadata only."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.ops import multiplication_checks as checks
from tpf_jit.ops import plans, routing
from tpf_jit.shape import TriangleMultiplicationShape, dtype_name
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_multiplication import layout

FRONT = "triangle_multiplication/front"
BACK = "triangle_multiplication/back"


def contraction(direction: str) -> str:
    """The family that contracts edges of a direction."""
    return f"triangle_multiplication/product_{layout.CONTRACTIONS[direction]}"


def families(shape: TriangleMultiplicationShape) -> tuple[str, str, str]:
    """The families of the kernels of one update, in the order of their launches."""
    return FRONT, contraction(shape.direction), BACK


def usual_variants(shape: TriangleMultiplicationShape) -> tuple[tuple[str, tuple], ...]:
    """(family, flags) of what models run: no projection biases, with and without a residual."""
    none = ("bias", False)
    backs = tuple((BACK, (none, ("residual", residual))) for residual in (False, True))
    return (FRONT, (none,)), (contraction(shape.direction), ()), *backs


def activation_dtype(z: Tensor) -> torch.dtype:
    """The dtype of a call's activations and result: autocast's where it is on, else z's; float64 stays."""
    cast_to = plans.autocast_dtype(z)
    return z.dtype if cast_to is None or z.dtype == torch.float64 else cast_to


def kernel_shape(
    z: Tensor, mask: Tensor | None, p_in_weight: Tensor, direction: str, dtype: torch.dtype
) -> TriangleMultiplicationShape:
    """The problem as a kernel sees it, for activations of a dtype.

    Raises:
        InvalidInput: where its dtypes or widths are none that kernels are meant for.
    """
    *_, crop, channels = z.shape
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "float"
    hidden, batch = p_in_weight.shape[0] // 2, z.shape[:-3].numel()
    return _shape(crop, channels, hidden, direction, batch, dtype_name(dtype), dtype_name(p_in_weight.dtype), kind)


@lru_cache(maxsize=4096)
def _shape(*fields) -> TriangleMultiplicationShape:
    return TriangleMultiplicationShape(*fields)


def decide(
    z: Tensor, mask: Tensor | None, p_in_weight: Tensor, direction: str, dtype: torch.dtype
) -> tuple[str | None, TriangleMultiplicationShape | None]:
    """Why a checked call takes the PyTorch path (None: kernels take it), and the problem that they solve or would solve."""
    if z.numel() == 0:
        return routing.EMPTY, None
    here = routing.hardware(z.device)
    try:
        shape = kernel_shape(z, mask, p_in_weight, direction, dtype)
    except InvalidInput as error:
        return here.reason or str(error), None
    if z.dtype != dtype:
        return here.reason or f"z is {dtype_name(z.dtype)}, and autocast computes in {dtype_name(dtype)}", shape
    return here.reason or unsupported(shape), shape


def unsupported(shape: TriangleMultiplicationShape) -> str | None:
    """Why the registered templates do not serve the shape on a device that runs kernels; None if they do."""
    if shape in _served:
        return None
    for family in families(shape):
        op, _, direction = family.partition("/")
        served = [template.supports(shape) for template in registry.templates(op, direction)]
        if not any(able for able, _ in served):
            return "; ".join(reason for _, reason in served) or f"no template of {family} is registered"
    if len(_served) >= 4096:
        _served.clear()
    _served.add(shape)
    return None


_served: set[TriangleMultiplicationShape] = set()
"""Shapes that templates are known to serve, remembered so that a call need not ask them. A refusal is not remembered, as a
template may be registered later."""


def inspect_call(
    z: Tensor, mask: Tensor | None, p_in_weight: Tensor, direction: str = "outgoing"
) -> tuple[str | None, TriangleMultiplicationShape | None]:
    """What `decide` says of a call by the tensors that matter for it, of any rank, under autocast as it is.

    Raises:
        InvalidInput: they do not fit together.
    """
    for name, x in (("z", z), ("mask", mask), ("p_in_weight", p_in_weight)):
        if not isinstance(x, Tensor) and (x is not None or name != "mask"):
            raise InvalidInput.of(name, type(x).__name__, "a torch.Tensor" + (" or None" if name == "mask" else ""))
    checks.check_direction(direction)
    checks.check_pair(z, mask)
    size = tuple(p_in_weight.shape)
    if len(size) != 2 or size[0] % 2 or size[1] != z.shape[-1]:
        raise InvalidInput.of("p_in_weight", f"shape {size}", f"(2 D, {z.shape[-1]}) for z of shape {tuple(z.shape)}")
    return decide(z, mask, p_in_weight, direction, activation_dtype(z))
