"""Fragments of 16-bit tiles in shared memory, in the layout of an accumulator (sm_90a)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from tpf_jit.templates.common.epilogue import warpgroup_sync
from tpf_jit.templates.common.fragments import widen_bf16


@cute.jit
def transposed_view(tile: cute.Tensor) -> cute.Tensor:
    """(rows, columns) seen as (columns, rows)."""
    return cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))


@cute.jit
def read_tile(tile: cute.Tensor, tiled_mma, tidx: Int32, shape: cutlass.Constexpr, transposed: cutlass.Constexpr) -> cute.Tensor:
    """The warpgroup's fragment of a tile, as it is, of an accumulator's `shape`.

    tile: (rows, columns) as the accumulator has them; transposed: whether rows are the contiguous axis.
    """
    dtype = tile.element_type
    frag = cute.make_rmem_tensor(shape, dtype)
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), dtype), tiled_mma)
    cute.copy(tiled, tiled.get_slice(tidx).partition_S(tile), tiled.retile(frag))
    return frag


@cute.jit
def two_columns(frag: cute.Tensor, row: cutlass.Constexpr, group: cutlass.Constexpr) -> cute.Tensor:
    """Float32 of a 16-bit fragment ((2, 2, N/8), 1, 1): both neighbouring columns of a row of this thread, in a group of 8."""
    (_, step_row, step_group), _, _ = frag.layout.stride
    return widen_bf16(cute.make_tensor(frag.iterator + (row * step_row + group * step_group), cute.make_layout(2)))


@cute.jit
def write_tile(values: cute.Tensor, tile: cute.Tensor, tiled_mma, tidx: Int32, transposed: cutlass.Constexpr):
    """Round the warpgroup's float32 fragment into a tile, axes as in `read_tile`."""
    dtype = tile.element_type
    frag = cute.make_rmem_tensor(values.shape, dtype)
    frag.store(values.load().to(dtype))
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), dtype), tiled_mma)
    cute.copy(tiled, tiled.retile(frag), tiled.get_slice(tidx).partition_D(tile))


@cute.jit
def store_in_place(tidx, wg, tiles: cute.Tensor, place, tma, target: cute.Tensor, wanted, wait: cutlass.Constexpr = True):
    """TMA store of tile `place`, which the warpgroup has just written, if `wanted`; warp 0 returns when the tile has been read,
    the others at once: it may be written again after the next barrier of the warpgroup, or once warp 0 has given it back.

    tidx: thread in the warpgroup; target: the coordinate tile of the TMA tensor, clipped at its edges.
    """
    cute.arch.fence_view_async_shared()
    warpgroup_sync(wg)
    if (cute.arch.make_warp_uniform(tidx // 32) == 0) & wanted:
        source, destination = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2), cute.group_modes(target, 0, 2)
        )
        cute.copy(tma, source[None, place], destination)
        cute.arch.cp_async_bulk_commit_group()
        if const_expr(wait):  # for this one and those before
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def read_operand(tile: cute.Tensor, tiled_mma, tidx: Int32, width: cutlass.Constexpr, columns: cutlass.Constexpr,
                 transposed: cutlass.Constexpr) -> cute.Tensor:  # fmt: skip
    """The warpgroup's fragment of a (64, width) tile in the order of an A operand, flat; `columns` at a time, which is the N of
    tiled_mma. Of element e, row and column are those of an accumulator's."""
    frag = cute.make_rmem_tensor(width // 2, tile.element_type)
    tiled = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), tile.element_type), tiled_mma
    )
    shape = tiled_mma.partition_shape_C((64, columns))
    for n in cutlass.range_constexpr(width // columns):
        part = cute.make_tensor(frag.iterator + n * (columns // 2), cute.make_layout(shape))
        source = cute.local_tile(tile, (64, columns), (0, n))
        cute.copy(tiled, tiled.get_slice(tidx).partition_S(source), tiled.retile(part))
    return frag


@cute.jit
def pair_of_operand(frag: cute.Tensor, row: cutlass.Constexpr, group: cutlass.Constexpr) -> cute.Tensor:
    """Float32 of both neighbouring columns in a group of 8 of a row of this thread, of `read_operand`'s fragment."""
    return widen_bf16(cute.make_tensor(frag.iterator + (2 * row + 4 * group), cute.make_layout(2)))
