"""Issuing wgmma products (sm_90a)."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup


@cute.jit
def start_product(tiled_mma, acc, a, b, accumulate: cutlass.Constexpr):
    """Issue acc (+)= a b as one group of its own; `warpgroup.wait_group` says when acc may be read and a, b be overwritten.

    The fence orders what was written to the registers of acc and a before it.
    """
    tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    cute.gemm(tiled_mma, acc, a, b, acc)
    warpgroup.commit_group()
