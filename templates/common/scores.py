"""From Q K^T to logits in registers: bias, key mask, ragged edge. Used alike by forward and backward, so both round alike."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from tpf_jit.templates.common.fragments import rows_view, widen_bf16


@cute.jit
def add_bias(acc_S: cute.Tensor, s_bias: cute.Tensor, tiled_mma, scale: Float32, tidx: Int32, transposed: cutlass.Constexpr):
    """acc_S = acc_S * scale + bias, one FMA an element, the bias tile read in the accumulator's own layout.

    s_bias: (queries, keys) in shared memory; transposed: acc_S holds keys x queries.
    """
    dtype = s_bias.element_type
    tile = cute.make_tensor(s_bias.iterator, cute.select(s_bias.layout, mode=[1, 0])) if const_expr(transposed) else s_bias
    frag = cute.make_rmem_tensor(acc_S.shape, dtype)
    if const_expr(dtype.width == 16):
        tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), dtype), tiled_mma)
        cute.copy(tiled, tiled.get_slice(tidx).partition_S(tile), tiled.retile(frag))
    else:
        cute.autovec_copy(tiled_mma.get_slice(tidx).partition_C(tile), frag)
    if const_expr(dtype is BFloat16):
        wide = widen_bf16(frag)
        acc_S.store(acc_S.load() * scale + cute.make_tensor(wide.iterator, acc_S.layout).load())
    else:
        acc_S.store(acc_S.load() * scale + frag.load().to(Float32))


@cute.jit
def apply_key_mask(acc_S: cute.Tensor, s_mask: cute.Tensor, tidx: Int32):
    """Add the key mask of this tile (columns of acc_S); a tile without masked keys costs one vote."""
    keys = cute.size(s_mask)
    dirty = Float32(0.0)
    for i in cutlass.range_constexpr((keys + 31) // 32):
        column = tidx % 32 + 32 * i
        if column < keys:
            dirty = cute.arch.fmax(dirty, -s_mask[column])
            dirty = cute.arch.fmax(dirty, s_mask[column])
    if cute.arch.vote_any_sync(dirty > 0.0):
        scores = rows_view(acc_S)
        for n in cutlass.range_constexpr(keys // 4):
            value = s_mask[8 * (n // 2) + 2 * (tidx % 4) + n % 2]
            for r in cutlass.range_constexpr(2):
                # A select, not a sum: NaN in the K of an excluded key must not reach the output.
                scores[r, n] = -Float32.inf if value == -Float32.inf else scores[r, n] + value


@cute.jit
def mask_tail(acc_S: cute.Tensor, keys_left: Int32, tidx: Int32):
    """Exclude the columns at and beyond keys_left: TMA filled them with zeros."""
    scores = rows_view(acc_S)
    for n in cutlass.range_constexpr(cute.size(acc_S) // 2):
        outside = 8 * (n // 2) + 2 * (tidx % 4) + n % 2 >= keys_left
        for r in cutlass.range_constexpr(2):
            scores[r, n] = -Float32.inf if outside else scores[r, n]
