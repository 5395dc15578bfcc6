"""From a caller's tensors to the operands that triangle-attention kernels read, with as few copies as possible.

The calling convention, in one place (kernels, operator, workloads and tests all rely on it):

    fn(q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas)

    q, k, v, out, residual   (B, I, H, N, D) 16-bit, unit stride on D, other strides positive multiples of 8 elements,
                             16-byte aligned base, D a multiple of 8; residual may be None
    bias                     (B, H, N, N) in q's dtype or float32, unit last stride, other strides positive multiples of 16 bytes,
                             16-byte aligned base
    mask                     None, or float32 (B, I, M) contiguous, added to the scores in natural-log units: 0 keeps a key, -inf
                             excludes it; M is N rounded up to 256 and the keys from N on are -inf
    lse                      float32 (B, I, H, N) contiguous, natural log, -inf where no key is left
    lse_low                  None without a residual; else like lse: what rounding took from it, so that lse + lse_low is exact
                             also where float32 keeps only -1e9 of -1e9 + ln N; 0 where no key is left

q, k and v are read where they are when they comply, as transposed views of the projection layout (B, I, N, H, D) do; otherwise
each is copied once. The bias is laid out anew at most once a call. Nothing here reads a value on the host. What the backward's
kernels take is in `layout_backward`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tpf_jit.shape import fold

OPERAND_ALIGN = 8
"""q, k, v and outputs: strides and head dim are multiples of this many 16-bit elements (16 bytes, the unit of TMA)."""
ALIGN_BYTES = 16
MASK_ALIGN = 256
"""The mask buffer holds whole tiles of keys, whatever the tile."""


class Operands(NamedTuple):
    """The inputs of a forward kernel in its own layout, and the outer sizes (B, I) in which it sees the call."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None
    outer: tuple[int, int]

    def arguments(
        self, out: Tensor, residual: Tensor | None, lse: Tensor, lse_low: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """All tensor arguments of the kernel; outputs of the call's own outer sizes are viewed in the kernel's."""
        outputs = (out, residual, lse, lse_low)
        if out.shape[:2] != self.outer:
            outputs = tuple(None if x is None else refold(x, self.outer) for x in outputs)
        return self.q, self.k, self.v, self.bias, self.mask, *outputs


def refold(x: Tensor, outer: tuple[int, int]) -> Tensor:
    """x with other outer sizes (B, I); a view where its strides allow."""
    return x.reshape(*outer, *x.shape[2:])


def trim(x: Tensor, dim: int) -> Tensor:
    """The first `dim` head dims of a padded output, again over contiguous projection-layout storage; x itself if it fits."""
    return x if x.shape[-1] == dim else x.transpose(2, 3)[..., :dim].contiguous().transpose(2, 3)


def projection_layout_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised `(B, I, H, N, D)` tensor over contiguous `(B, I, N, H, D)` storage."""
    _, rows, heads, crop, dim = shape
    step = heads * dim
    return torch.empty_strided(shape, (rows * crop * step, crop * step, dim, step, 1), dtype=dtype, device=device)


def in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> bool:
    """Whether a call's q, k, v and shared bias can all be read where they are, given 16-byte aligned pointers.

    A function of shapes, strides and dtypes, so callers may remember it and pass it to `prepare`.
    """
    batch, rows, _, _, dim = q.shape
    if dim % OPERAND_ALIGN or bias.dtype != bias_kernel_dtype(q.dtype, bias.dtype):
        return False
    if bias.shape[:2] != (batch, 1) or outer_sizes(batch, rows, bias) != (batch, rows):
        return False
    aligns = (OPERAND_ALIGN, OPERAND_ALIGN, OPERAND_ALIGN, ALIGN_BYTES // bias.element_size())
    return all(
        x.stride(-1) == 1 and legal_strides(x.shape, x.stride(), align) == x.stride()
        for x, align in zip((q, k, v, bias), aligns, strict=True)
    )


def prepare(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, ready: bool = False) -> Operands:
    """Operands for a call of canonical rank.

    Args:
        q, k, v: `(B, I, H, N, D)` bf16 or fp16, any strides, D <= 128.
        bias: `(B or 1, I or 1, H, N, N)`, bf16, fp16 or fp32, any strides.
        mask: None, boolean (True keeps) or additive, `(B or 1, I or 1, 1, 1, N or 1)`, any strides.
        ready: what `in_place` said, if the caller knows it; saves time only.

    A bias that differs from row to row makes every row a batch element of its own; one that all batch elements share makes all of
    them rows of one. Both are views of q, k and v in the usual layouts.
    """
    batch, rows, _, crop, _ = q.shape
    if ready and not (q.data_ptr() | k.data_ptr() | v.data_ptr() | bias.data_ptr()) % ALIGN_BYTES:
        buffer = None if mask is None else mask_buffer(mask, batch, rows, crop)
        return Operands(q, k, v, bias.select(1, 0), buffer, (batch, rows))
    outer = outer_sizes(batch, rows, bias)
    if outer == (batch, rows):
        bias = bias.select(1, 0)
    else:
        q, k, v = (refold(x, outer) for x in (q, k, v))
        if outer[0] == 1:
            bias = bias[:1, 0]
        else:
            bias = bias.expand(batch, rows, *bias.shape[2:]).flatten(0, 1)
    buffer = None if mask is None else mask_buffer(mask, batch, rows, crop).view(*outer, -1)
    laid_out = kernel_bias(bias, bias_kernel_dtype(q.dtype, bias.dtype))
    return Operands(kernel_operand(q), kernel_operand(k), kernel_operand(v), laid_out, buffer, outer)


def outer_sizes(batch: int, rows: int, bias: Tensor) -> tuple[int, int]:
    """The outer sizes (B, I) in which a kernel sees a call, by how its bias `(B or 1, I or 1, H, N, N)` is shared."""
    shape, strides = bias.shape, bias.stride()
    return fold(batch, rows, shape[1] > 1 and strides[1] != 0, shape[0] == 1 or strides[0] == 0)


def kernel_operand(x: Tensor) -> Tensor:
    """q, k or v as kernels read it: itself, itself with harmless strides on size-1 axes, or a copy padded to whole 16 bytes."""
    dim = x.shape[-1]
    strides = x.stride()
    if dim % OPERAND_ALIGN == 0 and strides[-1] == 1 and x.data_ptr() % ALIGN_BYTES == 0:
        legal = legal_strides(x.shape, strides, OPERAND_ALIGN)
        if legal == strides:
            return x
        if legal is not None:
            return x.as_strided(x.shape, legal)
    stored = x.transpose(2, 3)
    if dim % OPERAND_ALIGN:
        stored = pad(stored, (0, -dim % OPERAND_ALIGN)).contiguous()
    else:
        stored = torch.empty(stored.shape, dtype=x.dtype, device=x.device).copy_(stored)
    return stored.transpose(2, 3)


def bias_kernel_dtype(dtype: torch.dtype, bias_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels for q of `dtype` read a bias: its own, except that the other 16-bit type goes to float32."""
    return bias_dtype if bias_dtype == dtype else torch.float32


def kernel_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A `(B, H, N, N)` bias as kernels read it: itself where TMA can, else one copy of `dtype` with rows padded to 8 elements."""
    strides = bias.stride()
    if bias.dtype == dtype and strides[-1] == 1 and bias.data_ptr() % ALIGN_BYTES == 0:
        legal = legal_strides(bias.shape, strides, ALIGN_BYTES // bias.element_size())
        if legal == strides:
            return bias
        if legal is not None:
            return bias.as_strided(bias.shape, legal)
    *outer, crop = bias.shape
    room = torch.empty((*outer, round_up(crop, OPERAND_ALIGN)), dtype=dtype, device=bias.device)
    return room.narrow(-1, 0, crop).copy_(bias)


def mask_buffer(mask: Tensor, batch: int, rows: int, crop: int) -> Tensor:
    """The additive float32 `(B, I, M)` buffer of a key mask `(B or 1, I or 1, 1, 1, N or 1)`; one launch, or two when N < M."""
    keys = mask.select(3, 0).select(2, 0)
    room = torch.empty((batch, rows, round_up(crop, MASK_ALIGN)), dtype=torch.float32, device=mask.device)
    inside = room
    if room.shape[-1] != crop:
        room.fill_(-math.inf)
        inside = room.narrow(-1, 0, crop)
    if mask.dtype == torch.bool:
        # log(True) = 0 and log(False) = -inf: the whole conversion in one launch.
        torch.log(keys.expand_as(inside), out=inside)
    else:
        inside.copy_(keys)
    return room


@lru_cache(maxsize=4096)
def legal_strides(shape: tuple[int, ...], strides: tuple[int, ...], align: int) -> tuple[int, ...] | None:
    """The strides themselves when every outer one is a positive multiple of `align` elements; otherwise, where only size-1 axes
    are to blame, strides that put such an axis outside all others; otherwise None."""
    if all(step > 0 and step % align == 0 for step in strides[:-1]):
        return strides
    extent = align
    for size, step in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1:
            if step <= 0 or step % align:
                return None
            extent = max(extent, size * step)
    extent = max(extent, round_up(shape[-1], align))
    outer = (step if size > 1 else extent for size, step in zip(shape[:-1], strides[:-1], strict=True))
    return *outer, strides[-1]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not less than value."""
    return -(-value // multiple) * multiple
