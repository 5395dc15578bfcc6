"""Pieces that the kernels of the triangle multiplicative update share (sm_90a): tiles, constants of gates, stores, residual.

A tile is some pairs (i, j) of one i; tiles of an i follow each other.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from tpf_jit.templates.common.epilogue import warpgroup_sync
from tpf_jit.templates.common.fragments import rows_view
from tpf_jit.templates.common.tiles import write_tile

LOG2_E = math.log2(math.e)


@cute.jit
def decode(tile: Int32, crop: Int32, blocks: Int32):
    """tile -> (block of j, i, batch)."""
    rest, block = tile // blocks, tile % blocks
    return block, rest % crop, rest // crop


@cute.jit
def rounds(tiles: Int32, warpgroups: cutlass.Constexpr, wg: Int32):
    """Tiles of warpgroup wg of this CTA where CTAs and their warpgroups take turns."""
    each = cute.arch.grid_dim()[0] * warpgroups
    return (tiles - cute.arch.block_idx()[0] * warpgroups - wg + each - 1) // each


@cute.jit
def fetch_terms(sTerms: cute.Tensor, mTerms: cute.Tensor, threads: cutlass.Constexpr):
    """sTerms (4, rows) from mTerms (rows, 4), by all threads; the gate's constant, the last, for use in base 2."""
    for i in cutlass.range(cute.arch.thread_idx()[0], cute.size(sTerms), threads, unroll=1):
        sTerms[i % 4, i // 4] = mTerms[i // 4, i % 4] * (Float32(-LOG2_E) if i % 4 == 3 else Float32(1.0))


@cute.jit
def store_block(values, s_tiles: cute.Tensor, place, others: cutlass.Constexpr, tiled_mma, tma, target, wg, tidx: Int32,
                transposed: cutlass.Constexpr):  # fmt: skip
    """Round a warpgroup's accumulator into buffer `place`, and store that to the coordinate tile `target`, which clips it.

    others: stores to other buffers that may still be on their way. transposed: whether buffers have the accumulator's columns as
    rows. Waits only until `place` is free, so the caller must wait before it exits.
    """
    leader = cute.arch.make_warp_uniform(tidx // 32) == 0
    if leader:
        cute.arch.cp_async_bulk_wait_group(others, read=True)
    warpgroup_sync(wg)
    tile = s_tiles[None, None, place]
    if cutlass.const_expr(transposed):
        tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
    write_tile(values, tile, tiled_mma, tidx, transposed)
    cute.arch.fence_view_async_shared()
    warpgroup_sync(wg)
    if leader:
        source, destination = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s_tiles, 0, 2), cute.group_modes(target, 0, 2)
        )
        cute.copy(tma, source[None, place], destination)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_residual(acc, mResidual: cute.Tensor, where, channel: Int32, crop: Int32, tidx: Int32):
    """acc += residual, read where the thread's own results go: `channel` and on, of pairs first and first + 8; where: (batch, i,
    first)."""
    batch, i, first = where
    values = rows_view(acc)
    for r in cutlass.range_constexpr(2):
        if first + 8 * r < crop:
            line = mResidual[batch, i, first + 8 * r, None]
            for n in cutlass.range_constexpr(cute.size(acc) // 4):
                raw = cute.make_rmem_tensor(2, mResidual.element_type)
                at = channel + 8 * n + 2 * (tidx % 4)
                cute.autovec_copy(cute.make_tensor((line.iterator + at).align(4), cute.make_layout(2)), raw)
                values[r, 2 * n] = values[r, 2 * n] + raw[0].to(Float32)
                values[r, 2 * n + 1] = values[r, 2 * n + 1] + raw[1].to(Float32)
