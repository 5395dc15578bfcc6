"""Triangle multiplicative update, centre, for sm_90a: a float32 z to bf16, less the mean of each pair over its channels.

    out = bf16(z - mean(z))

A LayerNorm takes the mean out anyway; without it, rounding z costs what rounding LN(z) would.

Layouts:
    z       (B, N, N, C)        float32, unit stride along C
    out     (B, N, N, C)        bfloat16, contiguous

A warp has ROWS pairs under way.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from tpf_jit.templates.triangle_multiplication.fold_sm90 import WARPS, columns_of, read_columns, write_columns
from tpf_jit.templates.triangle_multiplication.launch_sm90 import SymbolicProblem, compiled, strided
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import decode, follow

ROWS = 4


class TriangleMultiplicationCentreSm90:
    """The centre kernel of one variant."""

    def __init__(self, variant: dict):
        self.channels = variant["channels"]
        self.ctas_per_sm = 4 if self.channels <= 256 else 2  # by registers

    @cute.jit
    def __call__(self, mZ: cute.Tensor, mOut: cute.Tensor, num_ctas: Int32, stream: cuda.CUstream):
        crop = mZ.shape[1]
        pairs = mZ.shape[0] * crop * crop
        ctas = cutlass.min(cute.ceil_div(pairs, WARPS * ROWS), self.ctas_per_sm * num_ctas)
        self.kernel(mZ, mOut, crop, pairs).launch(
            grid=(ctas, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True, min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=0,
        )

    @cute.kernel
    def kernel(self, mZ: cute.Tensor, mOut: cute.Tensor, crop: Int32, pairs: Int32):
        warp = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        follow()
        for first in cutlass.range(warp * ROWS, pairs, cute.arch.grid_dim()[0] * WARPS * ROWS, unroll=1):
            places = [decode(cutlass.min(first + r, pairs - 1), crop, crop) for r in range(ROWS)]
            found = [read_columns(mZ[batch, i, j, None]) for j, i, batch in places]
            for r in cutlass.range_constexpr(ROWS):
                values, (j, i, batch) = found[r], places[r]
                total = Float32(0.0)
                for e in cutlass.range_constexpr(cute.size(values)):
                    total += values[e]
                mean = cute.arch.warp_reduction_sum(total) * (1.0 / self.channels)
                rounded = cute.make_rmem_tensor(columns_of(self.channels), BFloat16)
                rounded.store((values.load() - mean).to(BFloat16))
                if first + r < pairs:
                    write_columns(rounded, mOut[batch, i, j, None])


def build(variant: dict, options: str):
    """Compile the kernel of a variant against symbolic sizes; returns the DSL's compiled function."""
    problem = SymbolicProblem({"dtype": "bfloat16", "hidden": variant["channels"], **variant})
    z = strided(Float32, (problem.batch, problem.crop, problem.crop, problem.channels), 4)
    return compiled(TriangleMultiplicationCentreSm90(variant), z, problem.pairs(), options=options)
