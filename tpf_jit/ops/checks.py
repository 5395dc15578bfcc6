"""What a triangle-attention call may look like: argument checks and the canonical rank, from metadata only.

Nothing here allocates or reads values, and everything can be traced by torch.compile.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch import bool as torch_bool

from tpf_jit.errors import InvalidInput

CANONICAL_RANK = 5


def check_switches(**given: object) -> None:
    """Raise InvalidInput unless all are True or False: "no" would be as good as True."""
    for name, value in given.items():
        if type(value) is not bool:
            raise InvalidInput.of(name, repr(value) if isinstance(value, (str, int)) else type(value).__name__, "True or False")


def check_types(q: object, k: object, v: object, bias: object, mask: object) -> None:
    """Raise InvalidInput unless all are tensors; the mask may be None."""
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias), ("mask", mask)):
        if not isinstance(x, Tensor) and not (x is None and name == "mask"):
            raise InvalidInput.of(name, type(x).__name__, "a torch.Tensor" + (" or None" if name == "mask" else ""))


def check(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, one_dtype: bool = True) -> None:
    """Raise InvalidInput, naming the argument, what came and what is allowed, unless the tensors fit together.

    q, k, v: `(*, I, H, N, D)` of one floating dtype. bias: floating, `(*, I or 1, H, N, N)`, or without its row axis
    `(*, H, N, N)`, leading sizes 1 or q's. mask: boolean or floating, broadcastable to `(*, I, 1, 1, N)`. All on one device.
    With `one_dtype` off, k and v may be of another floating dtype than q, as autocast will unite them.
    """
    shape = q.shape
    if len(shape) < 4:
        raise InvalidInput.of("q", _size(q), "(B, I, H, N, D), or (I, H, N, D) for one batch element")
    if not q.dtype.is_floating_point:
        raise InvalidInput.of("q", f"dtype {q.dtype}", "a floating-point dtype")
    for name, x in (("k", k), ("v", v)):
        alike = x.dtype == q.dtype if one_dtype else x.dtype.is_floating_point
        if x.shape != shape or x.device != q.device or not alike:
            raise InvalidInput.of(
                name, f"{_size(x)} {x.dtype} on {x.device}", f"q's, {_size(q)} {q.dtype} on {q.device}"
            )
    if not bias.dtype.is_floating_point or bias.device != q.device:
        raise InvalidInput.of("bias", f"dtype {bias.dtype} on {bias.device}", f"a floating-point dtype on {q.device}")
    if not _bias_fits(bias.shape, shape):
        *_, rows, heads, crop, _ = shape
        allowed = f"(B or 1, 1 or {rows}, {heads}, {crop}, {crop}) or (B or 1, {heads}, {crop}, {crop}) for q of {_size(q)}"
        raise InvalidInput.of("bias", _size(bias), allowed)
    if mask is None:
        return
    if mask.dtype != torch_bool and not mask.dtype.is_floating_point or mask.device != q.device:
        allowed = f"bool (True keeps a key) or a floating-point dtype (added to the scores), on {q.device}"
        raise InvalidInput.of("mask", f"dtype {mask.dtype} on {mask.device}", allowed)
    if not _mask_fits(mask, shape):
        allowed = f"broadcastable to {(*shape[:-3], 1, 1, shape[-2])}: one value a key, the same for all heads and queries"
        raise InvalidInput.of("mask", _size(mask), allowed)


def check_scale(scale: object) -> float:
    """The scale as a float.

    Raises:
        InvalidInput: for anything but a finite number; tensors are refused, as reading one would wait for the GPU.
    """
    if isinstance(scale, Tensor) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        allowed = "a finite Python number, or None for head_dim ** -0.5"
        raise InvalidInput.of("scale", f"{type(scale).__name__} {scale!r}", allowed)
    return float(scale)


def scale_of(q: Tensor, scale: object) -> float:
    """The scale of a call: the caller's, checked as by `check_scale`, or `head_dim ** -0.5` for None."""
    if scale is not None:
        return check_scale(scale)
    return q.shape[-1] ** -0.5 if q.shape[-1] else 1.0


def is_canonical(q: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    """Whether a call can go to the operator as it is: q, bias and mask five-dimensional."""
    return q.dim() == CANONICAL_RANK and bias.dim() == CANONICAL_RANK and (mask is None or _plain_mask(mask))


def canonical(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Checked tensors as five-dimensional ones: q, k, v `(B, I, H, N, D)`, bias `(B or 1, I or 1, H, N, N)`, mask
    `(B or 1, I or 1, 1, 1, N or 1)`. Views, unless several leading axes cannot be merged without a copy."""
    leading = q.shape[:-4]
    return (
        merge_leading(q, leading),
        merge_leading(k, leading),
        merge_leading(v, leading),
        merge_leading(_with_rank(bias, q.dim(), row_axis=bias.dim() == q.dim() - 1 or bias.dim() == 3), leading),
        None if mask is None else merge_leading(_with_rank(_one_value_a_key(mask), q.dim(), row_axis=False), leading),
    )


def merge_leading(x: Tensor, leading: tuple[int, ...]) -> Tensor:
    """x, whose axes before the last four are `leading` or 1 each, with exactly one axis there."""
    extra = x.dim() - 4
    if extra == 1:
        return x
    if extra == 0:
        return x.unsqueeze(0)
    own = x.shape[:extra]
    if any(size != 1 for size in own) and own != leading:
        x = x.expand(*leading, *x.shape[extra:])
    return x.flatten(0, extra - 1)


def split_leading(x: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Inverse of `merge_leading` for a result."""
    if len(leading) == 1:
        return x
    return x.squeeze(0) if not leading else x.unflatten(0, leading)


def _bias_fits(bias: tuple[int, ...], q: tuple[int, ...]) -> bool:
    *outer, heads, crop, _ = q
    if len(bias) < 3 or bias[-3] != heads or bias[-2] != crop or bias[-1] != crop:
        return False
    own = _drop_ones(bias[:-3], len(outer))
    if len(own) == len(outer) - 1:
        own = (*own, 1)
    # Not `not own`: torch.compile cannot trace that of a tuple of symbolic sizes.
    return len(own) == 0 or len(own) == len(outer) and _broadcasts(own, outer)


def _mask_fits(mask: Tensor, q: tuple[int, ...]) -> bool:
    want = (*q[:-3], 1, 1, q[-2])
    own = _drop_ones(_one_value_a_key(mask).shape, len(want))
    return len(own) <= len(want) and _broadcasts(own, want[len(want) - len(own) :])


def _drop_ones(sizes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    while len(sizes) > rank and sizes[0] == 1:
        sizes = sizes[1:]
    return sizes


def _broadcasts(own: tuple[int, ...], want: tuple[int, ...]) -> bool:
    # Spelled out, as torch.compile does not trace `size in (1, full)` for symbolic sizes.
    for size, full in zip(own, want, strict=True):
        if size != 1 and size != full:
            return False
    return True


def _plain_mask(mask: Tensor) -> bool:
    return mask.dim() == CANONICAL_RANK and mask.shape[2] == 1 and mask.shape[3] == 1


def _one_value_a_key(mask: Tensor) -> Tensor:
    """The mask without head and query axes that only repeat it (stride 0), as an expanded mask has them."""
    for axis in (-2, -3):
        if mask.dim() >= -axis and mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _with_rank(x: Tensor, rank: int, row_axis: bool) -> Tensor:
    """x with a row axis of size 1 put in if asked, and leading size-1 axes added or dropped until it has the rank."""
    if row_axis:
        x = x.unsqueeze(-4)
    while x.dim() > rank:
        x = x.squeeze(0)
    return x if x.dim() == rank else x[(None,) * (rank - x.dim())]


def _size(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}"
