"""Rings of TMA stages, one for each consumer warpgroup, so that warpgroups need not keep step with each other (sm_90a).

A ring is a pair of pointers, to mbarriers for full and for empty stages, of all warpgroups: stage `state.index` of warpgroup wg
of rings of n stages is number wg * n + state.index. States are `tma.producer_state` and `tma.consumer_state`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32


def ring_of(bars, stages: int):
    """The ring over 2 * stages mbarriers, the stages of all warpgroups counted."""
    return bars, bars + stages


@cute.jit
def initialise_ring(ring, stages: cutlass.Constexpr, consumer_warps: cutlass.Constexpr = 4):
    """By one thread, before the fence and the barrier that make barriers known. consumer_warps: those that give a stage back."""
    full, empty = ring
    for i in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_init(full + i, 1)
        cute.arch.mbarrier_init(empty + i, consumer_warps)


@cute.jit
def acquire_stage(ring, number: Int32, phase: Int32, stage_bytes: cutlass.Constexpr):
    """Producer warp: wait until the stage is free; returns the barrier for its copies."""
    full, empty = ring
    cute.arch.mbarrier_wait(empty + number, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full + number, stage_bytes)
    return full + number


@cute.jit
def wait_stage(ring, number: Int32, phase: Int32):
    """Consumer: wait until the stage is full."""
    cute.arch.mbarrier_wait(ring[0] + number, phase)


@cute.jit
def release_stage(ring, number: Int32):
    """Consumer warp: give the stage back, after ordinary reads too (see `tma.release_after_reads`)."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    if cute.arch.thread_idx()[0] % 32 == 0:
        cute.arch.mbarrier_arrive(ring[1] + number)


@cute.jit
def drain_ring(ring, wg: Int32, state, stages: cutlass.Constexpr):
    """Producer warp, at its end: wait until all stages are free, as no CTA may exit while a consumer can still arrive."""
    for _ in cutlass.range_constexpr(stages):
        cute.arch.mbarrier_wait(ring[1] + (wg * stages + state.index), state.phase)
        state.advance()
