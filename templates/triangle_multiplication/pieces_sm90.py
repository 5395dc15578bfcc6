"""Pieces that the kernels of the triangle multiplicative update share (sm_90a): tiles, constants of gates, stores, residual.

A tile is some pairs (i, j) of one i; tiles of an i follow each other.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp

from tpf_jit.templates.common.epilogue import warpgroup_sync
from tpf_jit.templates.common.fragments import rows_view
from tpf_jit.templates.common.tiles import write_tile

LOG2_E = math.log2(math.e)
MORE = 16
"""Columns of one step of wgmma beyond z's or x's own, by which products take their LayerNorm's mean out and put the bias in:

    z . W - mean * u + bias / rstd        u, bias: `terms` of the weights' row

so that rstd times a product is a projection. Mean, deviation, u and bias are sums of three bf16 parts each, largest first; six
of nine products of such parts are above float32's last bit. Columns 0 to 5 hold parts PARTS of the pair's mean and OF_ROW of -u,
columns 8 to 13 the same of deviation and bias."""
PARTS, OF_ROW = (0, 0, 1, 0, 1, 2), (0, 1, 0, 2, 1, 0)


@cute.jit
def follow():
    """By all threads, before a kernel's first access to global memory: wait until the kernel before it is done, and let the next
    one start its CTAs (programmatic dependent launch; launches say `use_pdl`). In this order, so that when a kernel may go on,
    those before its predecessor are done too."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


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
def three_parts(x: Float32, dtype: cutlass.Constexpr) -> cute.Tensor:
    """x as the sum of three 16-bit numbers, largest first."""
    parts = cute.make_rmem_tensor(3, dtype)
    for i in cutlass.range_constexpr(3):
        parts[i] = x.to(dtype)
        x = x - parts[i].to(Float32)
    return parts


@cute.jit
def fill_more(tiles: cute.Tensor, mTerms: cute.Tensor, first: cutlass.Constexpr, threads: cutlass.Constexpr, start=0):
    """The weights' side of columns MORE, by all threads. tiles: (rows of a block, MORE, blocks) in shared memory, of rows from
    `start` on; mTerms: (rows, 4) float32, [first] being u and [first + 1] the bias. Wants a fence for asynchronous reads, and a
    barrier."""
    rows, blocks, dtype = cute.size(tiles, mode=[0]), cute.size(tiles, mode=[2]), tiles.element_type
    for i in cutlass.range(cute.arch.thread_idx()[0], 2 * rows * blocks, threads, unroll=2):
        row, half = i // 2, i % 2
        term = Float32(0.0)
        if start + row < mTerms.shape[0]:
            term = mTerms[start + row, first + half] * (Float32(-1.0) if half == 0 else Float32(1.0))
        parts = three_parts(term, dtype)
        for k in cutlass.range_constexpr(MORE // 2):
            value = dtype(0.0)
            if cutlass.const_expr(k < len(OF_ROW)):
                value = parts[OF_ROW[k]]
            tiles[row % rows, half * (MORE // 2) + k, row // rows] = value


@cute.jit
def deviation(rstd: Float32) -> Float32:
    """1 / rstd; 0 for an absent pair, whose rstd is 0."""
    return Float32(0.0) if rstd == 0.0 else cute.arch.rcp_approx(rstd)


@cute.jit
def more_of_pairs(of_pair: cute.Tensor, dtype: cutlass.Constexpr, tidx: Int32) -> cute.Tensor:
    """The pairs' side of columns MORE, in the order of an A operand. of_pair[0 and 1, r]: mean and rstd of this thread's two
    rows, 0 for an absent pair."""
    frag = cute.make_rmem_tensor(MORE // 2, dtype)
    lane = tidx % 4  # has columns 2 * lane, 2 * lane + 1 and those 8 further on
    for r in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            parts = three_parts(of_pair[0, r] if half == 0 else deviation(of_pair[1, r]), dtype)
            for c in cutlass.range_constexpr(2):
                value = dtype(0.0)
                for k in cutlass.range_constexpr(len(PARTS) // 2):
                    if lane == k:
                        value = parts[PARTS[2 * k + c]]
                frag[2 * r + 4 * half + c] = value
    return frag


@cute.jit
def put_more(line: cute.Tensor, mean: Float32, rstd: Float32):
    """The pairs' side of one pair: line (MORE,) in shared memory. Wants a fence for asynchronous reads."""
    for half in cutlass.range_constexpr(2):
        parts = three_parts(mean if half == 0 else deviation(rstd), line.element_type)
        for k in cutlass.range_constexpr(MORE // 2):
            value = line.element_type(0.0)
            if cutlass.const_expr(k < len(PARTS)):
                value = parts[PARTS[k]]
            line[half * (MORE // 2) + k] = value


@cute.jit
def sums_of_more(acc: cute.Tensor, tidx: Int32) -> cute.Tensor:
    """From the products (64, MORE) of rows of an operand with the pairs' side: ((sum of operand * mean, of operand * deviation),
    this thread's 2 rows)."""
    values, lane = rows_view(acc), tidx % 4
    found = cute.make_rmem_tensor((2, 2), Float32)
    for r in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            own = Float32(0.0)
            for part in cutlass.range_constexpr(3):
                column = PARTS.index(part)  # that which holds this part first
                if lane == column // 2:
                    own = values[r, 2 * half + column % 2]
            found[half, r] = cute.arch.warp_reduction_sum(own, threads_in_group=4)
    return found


@cute.jit
def store_rounded(frag, s_tiles: cute.Tensor, place, buffers: cutlass.Constexpr, tiled_mma, tma, target, wg, tidx: Int32,
                  transposed: cutlass.Constexpr):  # fmt: skip
    """Store a warpgroup's 16-bit fragment through buffer `place` to the coordinate tile `target`, which clips it.

    Buffers, at least two, take turns. That of the next store is free once this returns, so that one barrier a store is enough;
    the caller waits for all stores before it exits. transposed: whether buffers have the accumulator's columns as rows.
    """
    tile = s_tiles[None, None, place]
    if cutlass.const_expr(transposed):
        tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), frag.element_type), tiled_mma)
    cute.copy(tiled, tiled.retile(frag), tiled.get_slice(tidx).partition_D(tile))
    cute.arch.fence_view_async_shared()
    leader = cute.arch.make_warp_uniform(tidx // 32) == 0
    if leader:
        cute.arch.cp_async_bulk_wait_group(buffers - 2, read=True)
    warpgroup_sync(wg)
    if leader:
        source, destination = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s_tiles, 0, 2), cute.group_modes(target, 0, 2)
        )
        cute.copy(tma, source[None, place], destination)
        cute.arch.cp_async_bulk_commit_group()


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
