"""Triangle multiplicative update, fold and front in one launch, for sm_90a: for crops whose few tiles leave a launch no time.

Computes what fold_sm90.py and then front_rows_sm90.py do, from a caller's weights; operands as there, but that matrices and norms
lie on 16-byte boundaries. Every CTA folds all rows of p_in and g_in into its own shared memory. What kernels after it read, the
folded matrices and their terms, comes from as many CTAs again (the second row of the grid), which find SMs that have no tiles.

Warp roles: as in front_rows_sm90.py, but that consumers fold before they project, while their first tiles are on their way.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tpf_jit.templates.common.tma import smem_tensor
from tpf_jit.templates.triangle_multiplication import launch_sm90 as launch
from tpf_jit.templates.triangle_multiplication.fold_sm90 import (
    VECTOR,
    columns_of,
    fold_row,
    parts_of,
    read_columns,
    scale_and_sum,
    write_columns,
)
from tpf_jit.templates.triangle_multiplication.front_rows_sm90 import TriangleMultiplicationFrontRowsSm90
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import MORE, OF_ROW, follow, prefetch, start_rings, three_parts


class TriangleMultiplicationFoldFrontSm90(TriangleMultiplicationFrontRowsSm90):
    """The kernel of one (variant, config)."""

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mMask: cute.Tensor | None,
        mP: cute.Tensor, mG: cute.Tensor, mPOut: cute.Tensor, mGOut: cute.Tensor,
        mInW: cute.Tensor, mInB: cute.Tensor, mOutW: cute.Tensor, mOutB: cute.Tensor,
        mPBias: cute.Tensor | None, mGBias: cute.Tensor | None, mPOutBias: cute.Tensor | None, mGOutBias: cute.Tensor | None,
        fP: cute.Tensor, fG: cute.Tensor, fPOut: cute.Tensor, fGOut: cute.Tensor, mIn: cute.Tensor, mOut: cute.Tensor,
        mFactors: cute.Tensor, mStats: cute.Tensor, eps: Float32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        load_z, stores, sizes, ctas = self.tiles(mZ, mFactors, num_ctas)
        matrices, folded, biases = (mP, mG, mPOut, mGOut), (fP, fG, fPOut, fGOut), (mPBias, mGBias, mPOutBias, mGOutBias)
        parts = parts_of(matrices, folded, (mInW, mInB), (mOutW, mOutB), biases, mIn, mOut)
        self.kernel(load_z, stores, (mMask, mStats), parts, eps, sizes).launch(
            grid=(ctas, 2, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, load_z, stores, per_pair, parts, eps: Float32, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cute.arch.block_idx()[1] == 1:
            follow()
            self.fold_for_others(parts, warp_idx)
        else:
            prefetch(warp_idx, (load_z, stores))
            sm = cutlass.memory.SmemAllocator().allocate(self._storage())
            follow()
            sZ, sW, sO = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.w, self.w_layout), smem_tensor(sm.o, self.o_layout)
            sMore = smem_tensor(sm.more, self.more_layout)
            (ring,) = start_rings(warp_idx, self.warpgroups, (sm.bar_z, self.z_stages))
            cute.arch.mbarrier_init_fence()
            cute.arch.barrier()
            if warp_idx < 4:
                cute.arch.setmaxregister_decrease(self.producer_registers)
                if warp_idx < self.warpgroups:
                    self.load(ring, load_z, sZ, sizes, warp_idx)
            else:
                cute.arch.setmaxregister_increase(self.consumer_registers)
                for half in cutlass.range_constexpr(2):
                    self.fold(parts[half], half * self.tile_h, sW, sMore, warp_idx - 4)
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=1 + self.warpgroups, number_of_threads=128 * self.warpgroups)
                self.project(ring, None, (sZ, sW, sMore, sO), per_pair, stores, eps, sizes)

    # ---- device: folding ----------------------------------------------------------------------------------------
    @cute.jit
    def fold_for_others(self, parts, warp: Int32):
        """All rows, to memory: one after the other on different SMs."""
        ctas, count = cute.arch.grid_dim()[0], 2 * self.rows + 2 * self.channels
        for row in cutlass.range(cute.arch.block_idx()[0] + ctas * warp, count, ctas * (self.threads // 32), unroll=1):
            fold_row(parts, row)

    @cute.jit
    def fold(self, part, offset: cutlass.Constexpr, sW: cute.Tensor, sMore: cute.Tensor, warp: Int32):
        """All rows of one matrix, by the consumers' warps, several at a time each. offset: of its rows in a block of weights."""
        matrix, _, norm, shift, _, _ = part
        h, each, lane = self.tile_h, columns_of(self.channels), cute.arch.thread_idx()[0] % 32
        many = 8 if each == VECTOR else 4  # divides the rows
        scale, move = (read_columns(x) for x in norm)
        for start in cutlass.range(many * warp, self.rows, many * 4 * self.warpgroups, unroll=1):
            read = [read_columns(matrix[start + m, None]) for m in range(many)]
            sums = cute.make_rmem_tensor((many, 2), Float32)
            for m in cutlass.range_constexpr(many):
                rounded = cute.make_rmem_tensor(each, self.dtype)
                sums[m, 0], sums[m, 1] = scale_and_sum(read[m], scale, move, rounded)
                row = start + m
                write_columns(rounded, sW[offset + row % h, None, row // h])
            term = sums_over_lanes(sums)
            lanes = 32 // (2 * many)
            row, is_bias = start + lane // lanes % many, lane // (lanes * many)
            if const_expr(shift is not None):
                term += Float32(0.0) if is_bias == 0 else shift[row]
            if lane % lanes == 0:
                numbers = three_parts(-term if is_bias == 0 else term, self.dtype)
                columns = cute.make_rmem_tensor(MORE // 2, self.dtype)
                for k in cutlass.range_constexpr(MORE // 2):
                    columns[k] = numbers[OF_ROW[k]] if k < len(OF_ROW) else self.dtype(0.0)
                line = cute.logical_divide(sMore[offset + row % h, None, row // h], cute.make_layout(MORE // 2))
                cute.autovec_copy(columns, line[None, is_bias])


@cute.jit
def sums_over_lanes(values: cute.Tensor) -> Float32:
    """Of as many values of every lane as a power of two at most 32, n, each summed over the warp: lane l gets that of value
    l // (32 / n). The order of the sums is that of `warp_reduction_sum`."""
    lane, found = cute.arch.thread_idx()[0] % 32, [values[i] for i in range(cute.size(values))]
    for offset in (16, 8, 4, 2, 1):
        half = len(found) // 2
        if const_expr(half == 0):
            found = [found[0] + cute.arch.shuffle_sync_bfly(found[0], offset=offset)]
        else:
            kept = [found[half + i] if lane & offset != 0 else found[i] for i in range(half)]
            given = [found[i] if lane & offset != 0 else found[half + i] for i in range(half)]
            found = [mine + cute.arch.shuffle_sync_bfly(other, offset=offset) for mine, other in zip(kept, given, strict=True)]
    return found[0]


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    folding = problem.folding(variant["weight_dtype"], variant["bias"], aligned=True)
    return launch.compiled(
        TriangleMultiplicationFoldFrontSm90(variant, config, registers), problem.pairs(), problem.mask(), *folding,
        problem.factors(), problem.stats(), Float32(1e-5), options=options,
    )
