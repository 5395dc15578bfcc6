"""Registers -> shared memory -> TMA store of one warpgroup's 64-row tile (sm_90a)."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warp


@cute.jit
def store_tile(frag, tiled_mma, tidx, wg, s_tiles, tma, g_tiles):
    """Store the 16-bit fragment of a 64 x D accumulator through buffer wg of s_tiles to the global tile g_tiles.

    tidx: thread in the warpgroup; g_tiles: (64, D) coordinate tile of the TMA tensor. The copy is clipped at the tensor's
    edges. Waits only for the reads of this warpgroup's store before, so the caller must wait before it exits.
    """
    leader = cute.arch.make_warp_uniform(tidx // 32) == 0
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), frag.element_type), tiled_mma)
    if leader:
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # the store before has left the buffer
    warpgroup_sync(wg)
    cute.copy(tiled, tiled.retile(frag), tiled.get_slice(tidx).partition_D(s_tiles[None, None, wg]))
    cute.arch.fence_view_async_shared()
    warpgroup_sync(wg)
    if leader:
        src, dst = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s_tiles, 0, 2), cute.group_modes(g_tiles, 0, 2)
        )
        cute.copy(tma, src[None, wg], dst)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def warpgroup_sync(wg: Int32):
    """Barrier of one consumer warpgroup: ids 1, 2, ... by warpgroup."""
    cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)
