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

FOLD = "triangle_multiplication/fold"
FOLD_FRONT = "triangle_multiplication/fold_front"
FOLDING = FOLD, FOLD_FRONT
"""Families that read weights as a caller has them."""
FRONT = "triangle_multiplication/front"
FRONT_ROWS = "triangle_multiplication_front_rows_sm90"
"""The template of FRONT whose arithmetic FOLD_FRONT has."""
BACK = "triangle_multiplication/back"
FRONT_BACKWARD = "triangle_multiplication/front_backward"
BACK_BACKWARD = "triangle_multiplication/back_backward"
FINISH = "triangle_multiplication/finish"
CENTRE = "triangle_multiplication/centre"
"""Makes of a float32 z what the others take. Where it cannot be had, PyTorch does."""

_GRADIENT_PRODUCTS = {"outgoing": ("nn", "tn"), "incoming": ("nt", "nn")}


def contraction(direction: str) -> str:
    """The family that contracts edges of a direction."""
    return f"triangle_multiplication/product_{layout.CONTRACTIONS[direction]}"


def families(shape: TriangleMultiplicationShape, together: bool = True) -> tuple[str, ...]:
    """The families, or templates, of the kernels of one update, in the order of their launches. together: whether FOLD_FRONT may
    be one."""
    if not folds_in_front(shape):
        first = FOLD, FRONT
    else:
        first = (FOLD_FRONT,) if together else (FOLD, FRONT_ROWS)
    return *first, contraction(shape.direction), BACK


def folds_in_front(shape: TriangleMultiplicationShape) -> bool:
    """Whether one family, FOLD_FRONT, does what FOLD and FRONT do: where pairs are few, and launches count."""
    return _refusal(shape, "fold and front", (FOLD_FRONT,)) is None


def front_again(shape: TriangleMultiplicationShape) -> str:
    """The family, or template, that makes the factors again from folded weights, bit for bit as the forward did."""
    return FRONT_ROWS if folds_in_front(shape) else FRONT


def factor_products(direction: str) -> tuple[str, str]:
    """The families that give the gradients of a and of b: nn(dx, b) and tn(dx, a), or incoming nt(b, dx) and nn(a, dx)."""
    left, right = _GRADIENT_PRODUCTS[direction]
    return f"triangle_multiplication/product_{left}", f"triangle_multiplication/product_{right}"


def backward_families(shape: TriangleMultiplicationShape) -> tuple[str, ...]:
    """The families of the kernels that backwards need, in the order of their launches. Not among them are FINISH, which ends one,
    as PyTorch does its part as well, and what `front_gradients_together` tells of."""
    products = factor_products(shape.direction)
    return BACK_BACKWARD, routing.BACK_WEIGHTS, *products, FRONT_BACKWARD, routing.FRONT_WEIGHTS


def front_gradients_together(shape: TriangleMultiplicationShape) -> bool:
    """Whether one family, `routing.FRONT_GRADIENTS`, does what FRONT_BACKWARD and `routing.FRONT_WEIGHTS` do, where both are
    wanted: on an H200 at C = D = 128 in 0.85 of their time."""
    return _refusal(shape, "front gradients", (routing.FRONT_GRADIENTS,)) is None


def fold_flags(bias: bool) -> tuple:
    """Flags of a kernel that folds weights, as `kernels.get_kernel` takes them; front and products have none."""
    return (("bias", bias),)


def finish_flags(bias: bool, norm_dtype: str) -> tuple:
    """Flags of a finish kernel, likewise."""
    return ("bias", bias), ("norm_dtype", norm_dtype)


def back_flags(residual: bool, stats: bool = False) -> tuple:
    """Flags of a back kernel."""
    return ("residual", residual), ("stats", stats)


def centre_variants(z: Tensor) -> tuple[tuple[str, tuple], ...]:
    """(family, flags) of what makes z ready for all others; none where it is."""
    return ((CENTRE, ()),) if z.dtype == torch.float32 else ()


def usual_variants(shape: TriangleMultiplicationShape, stats: bool = False) -> tuple[tuple[str, tuple], ...]:
    """(family, flags) of what models run forward: no projection biases, with and without a residual. `stats`: in training."""
    flags = dict.fromkeys(FOLDING, fold_flags(False))
    *firsts, back = families(shape)
    return *((family, flags.get(family, ())) for family in firsts), *(
        (back, back_flags(residual, stats)) for residual in (False, True)
    )


def activation_dtype(z: Tensor) -> torch.dtype:
    """The dtype of a call's activations and result: autocast's where it is on, else z's; float64 stays."""
    cast_to = plans.autocast_dtype(z)
    return z.dtype if cast_to is None or z.dtype == torch.float64 else cast_to


def takes(z: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels for activations of a dtype take z: of that dtype, or float32 that autocast has them round to bfloat16."""
    return z.dtype == dtype or z.dtype == torch.float32 and dtype == torch.bfloat16


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
    here, refused, shape = _decide(z, mask, p_in_weight, direction, dtype)
    return here or refused, shape


def _decide(
    z: Tensor, mask: Tensor | None, p_in_weight: Tensor, direction: str, dtype: torch.dtype
) -> tuple[str | None, str | None, TriangleMultiplicationShape | None]:
    """What stands against kernels for a call here, what would on any device (each None: nothing does), and the problem."""
    if z.numel() == 0:
        return routing.EMPTY, None, None
    here = routing.hardware(z.device).reason or None
    try:
        shape = kernel_shape(z, mask, p_in_weight, direction, dtype)
    except InvalidInput as error:
        single = "z is float32 and autocast is off; kernels take bfloat16, or float32 under bfloat16 autocast"
        return here, single if dtype == torch.float32 else str(error), None
    if not takes(z, dtype):
        return here, f"z is {dtype_name(z.dtype)}, and autocast computes in {dtype_name(dtype)}", shape
    return here, unsupported(shape), shape


def unsupported(shape: TriangleMultiplicationShape) -> str | None:
    """Why the registered templates do not serve the shape on a device that runs kernels; None if they do."""
    return _refusal(shape, "forward", families(shape))


def backward_unsupported(shape: TriangleMultiplicationShape) -> str | None:
    """The same for the backward, whose kernels need those of the forward."""
    return unsupported(shape) or _refusal(shape, "backward", backward_families(shape))


def backward_reason(z: Tensor, p_in_weight: Tensor, direction: str, dtype: torch.dtype) -> str | None:
    """Why the backward of a checked call takes the PyTorch path, or None if kernels take it and the forward saves for them.

    It asks nothing of batch and crop but that they are not 0, so that torch.compile may trace it with symbolic ones.
    """
    here = routing.hardware(z.device)
    if here.arch is None:
        return here.reason
    if not takes(z, dtype):
        return f"z is not {dtype_name(dtype)}"
    if z.numel() == 0:
        return routing.EMPTY
    channels, hidden = int(z.shape[-1]), int(p_in_weight.shape[0]) // 2
    try:
        # Templates refuse dtypes and widths only; the one that refuses crops has others beside it.
        shape = _shape(1, channels, hidden, direction, 1, dtype_name(dtype), dtype_name(p_in_weight.dtype), "none")
    except InvalidInput as error:
        return str(error)
    return backward_unsupported(shape)


def _refusal(shape: TriangleMultiplicationShape, what: str, wanted: tuple[str, ...]) -> str | None:
    if (shape, what) in _served:
        return None
    for family in wanted:
        op, _, direction = family.partition("/")
        served = [template.supports(shape) for template in registry.templates(op, direction)]
        if not any(able for able, _ in served):
            return "; ".join(reason for _, reason in served) or f"no template of {family} is registered"
    if len(_served) >= 4096:
        _served.clear()
    _served.add((shape, what))
    return None


_served: set[tuple[TriangleMultiplicationShape, str]] = set()
"""Shapes that templates are known to serve, remembered so that a call need not ask them. A refusal is not remembered, as a
template may be registered later."""


def inspect_call(
    z: Tensor, mask: Tensor | None, p_in_weight: Tensor, direction: str = "outgoing"
) -> tuple[str | None, TriangleMultiplicationShape | None]:
    """What `decide` says of a call by the tensors that matter for it, of any rank, under autocast as it is, and beside the device
    what else stands against it.

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
    here, refused, shape = _decide(z, mask, p_in_weight, direction, activation_dtype(z))
    return routing.besides(here, refused), shape
