"""What a triangle-multiplication call may look like: argument checks and the canonical rank, from metadata only.

Nothing here allocates or reads values, and everything can be traced by torch.compile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.ops.checks import check_switches
from tpf_jit.shape import DIRECTIONS
from tpf_jit.templates.triangle_multiplication.layout import Weights

REQUIRED = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight")
CANONICAL_RANK = 4


def check_types(z: object, mask: object, weights: Weights, residual: object) -> None:
    """Raise InvalidInput unless all are tensors; the mask, the residual, norms and biases may be None."""
    names = ("z", "mask", *Weights._fields, "residual")
    for name, x in zip(names, (z, mask, *weights, residual), strict=True):
        required = name == "z" or name in REQUIRED
        if not isinstance(x, Tensor) and (required or x is not None):
            raise InvalidInput.of(name, type(x).__name__, "a torch.Tensor" + ("" if required else " or None"))


def check_direction(direction: object) -> None:
    """Raise InvalidInput unless it is one of the two."""
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        came = repr(direction) if isinstance(direction, str) else type(direction).__name__
        raise InvalidInput.of("direction", came, ", ".join(map(repr, DIRECTIONS)))


def check_options(direction: object, **switches: object) -> None:
    """Raise InvalidInput unless the direction is one of the two, and all others are True or False."""
    check_direction(direction)
    check_switches(**switches)


def check_eps(eps: object) -> float:
    """The eps as a float.

    Raises:
        InvalidInput: for anything but a finite positive number; tensors are refused, as reading one would wait for the GPU.
    """
    if isinstance(eps, (Tensor, bool)) or not isinstance(eps, (int, float)) or not 0 < eps < math.inf:
        raise InvalidInput.of("eps", f"{type(eps).__name__} {eps!r}", "a finite Python number above 0")
    return float(eps)


def check(z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None) -> None:
    """Raise InvalidInput, naming the argument, what came and what is allowed, unless the tensors fit together.

    z and mask as `check_pair` has them. weights: floating, see `layout.Weights`; the hidden width D is that of `p_out_weight`.
    residual: floating, of z's shape. All on one device.
    """
    check_pair(z, mask)
    _check_weights(z, weights)
    if residual is None:
        return
    if residual.shape != z.shape or residual.device != z.device or not residual.dtype.is_floating_point:
        came = f"{_size(residual)} {residual.dtype} on {residual.device}"
        raise InvalidInput.of("residual", came, f"z's {_size(z)} in a floating-point dtype on {z.device}")
    if residual.dtype.itemsize == 1:  # PyTorch adds nothing to them
        raise InvalidInput.of("residual", f"dtype {residual.dtype}", "a floating-point dtype of 16 bits or more")


def check_canonical(z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, rule: tuple) -> None:
    """All checks for the operators, which take one rank only; `rule` begins with the direction and eps."""
    if not is_canonical(z, mask):
        came = f"shapes {tuple(z.shape)}, {None if mask is None else tuple(mask.shape)}"
        raise InvalidInput.of("z, mask", came, "four and three axes here; tpf_jit.triangle_multiplication takes the other ranks")
    check_direction(rule[0])
    check_eps(rule[1])
    check(z, mask, weights, residual)


def check_pair(z: Tensor, mask: Tensor | None) -> None:
    """The same for z, floating, `(*, N, N, C)`, and the mask, boolean, integer or floating, broadcastable to `(*, N, N)`."""
    if z.dim() < 3 or z.shape[-3] != z.shape[-2] or z.shape[-1] == 0:
        raise InvalidInput.of("z", _size(z), "(B, N, N, C), or (N, N, C), with C >= 1")
    if not z.dtype.is_floating_point:
        raise InvalidInput.of("z", f"dtype {z.dtype}", "a floating-point dtype")
    if mask is not None:
        if mask.dtype.is_complex or mask.device != z.device:
            raise InvalidInput.of("mask", f"dtype {mask.dtype} on {mask.device}", f"a bool, integer or float mask on {z.device}")
        if not _broadcasts(mask.shape, z.shape[:-1]):
            raise InvalidInput.of("mask", _size(mask), f"broadcastable to {tuple(z.shape[:-1])}: one value a pair")


def _check_weights(z: Tensor, weights: Weights) -> None:
    channels = z.shape[-1]
    if weights.p_out_weight.dim() != 2 or weights.p_out_weight.shape[0] != channels or weights.p_out_weight.shape[1] == 0:
        raise InvalidInput.of("p_out_weight", _size(weights.p_out_weight), f"({channels}, D) for z of {_size(z)}")
    hidden = weights.hidden
    sizes = Weights(
        (channels,), (channels,), (2 * hidden, channels), (2 * hidden,), (2 * hidden, channels), (2 * hidden,),
        (hidden,), (hidden,), (channels, hidden), (channels,), (channels, channels), (channels,),
    )  # fmt: skip
    for name, x, size in zip(Weights._fields, weights, sizes, strict=True):
        if x is None:
            continue
        if tuple(x.shape) != size:
            raise InvalidInput.of(name, _size(x), f"{size} for C = {channels} and D = {hidden} (that of p_out_weight)")
        if x.device != z.device or not x.dtype.is_floating_point:
            raise InvalidInput.of(name, f"{x.dtype} on {x.device}", f"a floating-point dtype on {z.device}")


def check_in_place(z: Tensor, result: torch.dtype, wanted: bool) -> None:
    """Raise InvalidInput unless z can be overwritten with a result of a dtype, and no gradients are wanted."""
    if wanted:
        raise InvalidInput.of("inplace", "True where gradients are wanted", "True under torch.no_grad() or inference_mode()")
    if result != z.dtype:
        raise InvalidInput.of("inplace", f"True for z of {z.dtype} and a result of {result}", f"a result of z's dtype, {z.dtype}")
    axes = [(size, step) for size, step in zip(z.shape, z.stride(), strict=True) if size != 1]
    extent, given = 1, f"True for z of {_size(z)}, strides {z.stride()}"
    for size, step in sorted(axes, key=lambda axis: axis[1]):
        if step < extent:
            raise InvalidInput.of("inplace", given, "a z whose elements are all its own, with no axis inside another's step")
        extent += (size - 1) * step
    leading = [axis for axis in zip(z.shape[:-3], z.stride()[:-3], strict=True) if axis[0] != 1]
    if any(step != size * inner for (_, step), (size, inner) in zip(leading, leading[1:], strict=False)):
        raise InvalidInput.of("inplace", given, "leading axes that are one axis in memory")


def canonical(z: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Checked tensors in the operator's ranks: z `(B, N, N, C)`, mask `(B or 1, N or 1, N or 1)`; views where strides allow."""
    leading = z.shape[:-3]
    if mask is not None:
        while mask.dim() > z.dim() - 1:
            mask = mask.squeeze(0)
        mask = mask[(None,) * (z.dim() - 1 - mask.dim())]
        if len(leading) > 1 and mask.shape[:-2] != leading:
            mask = mask.expand(*leading, *mask.shape[-2:]) if any(size != 1 for size in mask.shape[:-2]) else mask
        mask = _one_leading(mask, 2)
    return _one_leading(z, 3), mask


def split_leading(x: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Undoes what `canonical` did to z's leading axes, for a result."""
    if len(leading) == 1:
        return x
    return x.squeeze(0) if not leading else x.unflatten(0, leading)


def is_canonical(z: Tensor, mask: Tensor | None) -> bool:
    """Whether a call can go to the operator as it is."""
    return z.dim() == CANONICAL_RANK and (mask is None or mask.dim() == CANONICAL_RANK - 1)


def merge_pair(x: Tensor) -> Tensor:
    """A residual like z in the operator's rank."""
    return _one_leading(x, 3)


def _one_leading(x: Tensor, trailing: int) -> Tensor:
    extra = x.dim() - trailing
    if extra == 1:
        return x
    return x.unsqueeze(0) if extra == 0 else x.flatten(0, extra - 1)


def _broadcasts(own: tuple[int, ...], want: tuple[int, ...]) -> bool:
    while len(own) > len(want) and own[0] == 1:
        own = own[1:]
    if len(own) > len(want):
        return False
    # Spelled out, as torch.compile does not trace `size in (1, full)` for symbolic sizes.
    for size, full in zip(own, want[len(want) - len(own) :], strict=True):
        if size != 1 and size != full:
            return False
    return True


def _size(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"
