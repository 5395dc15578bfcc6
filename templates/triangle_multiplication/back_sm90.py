"""Triangle multiplicative update, back, for sm_90a: LayerNorm of x, output projection, gate and residual in one pass.

    out = [residual +] sigmoid(LN(z) g_weight^T + g_bias) * (LN(x) p_weight^T + p_bias)

Layouts:
    z, residual, out        (B, N, N, C)        bfloat16; residual may be absent or z, and out may be z
    z_stats, x_stats        (B, N, N, 2)        float32: mean and reciprocal deviation of a pair; x_stats is written, or absent
    x                       (B, D, N, P)        bfloat16, channel-major, P >= N a multiple of 8
    p_weight (C, D), g_weight (C, C)            bfloat16, folded with the weights of the LayerNorms (see fold_sm90.py)
    terms                   (C, 4)              float32: row sum and bias of p_weight, of g_weight

A tile is 64 pairs (i, j) of one i; a CTA takes W tiles at once, one for each of its W consumer warpgroups, which use the same
weights: they stay on the SM where they fit, else they come from L2 for every tile. x lies in shared memory as it comes, pairs
contiguous, and is read by wgmma transposed. A LayerNorm is linear but for each pair's mean and deviation: z and x are multiplied
as they are, and both enter after the products.

Warp roles: warpgroup 0 issues TMA, the W others multiply, take the statistics of x while they wait, gate and store.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tpf_jit.templates.common.epilogue import store_tile
from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.norm import keep_statistics, read_statistics
from tpf_jit.templates.common.tiles import read_tile, two_columns
from tpf_jit.templates.common.tma import (
    consumer_state,
    partition,
    producer_state,
    release_after_reads,
    smem_area,
    smem_tensor,
    tile_bytes,
    tma_ring,
)
from tpf_jit.templates.triangle_multiplication import launch_sm90 as launch
from tpf_jit.templates.triangle_multiplication.launch_sm90 import COL_MAJOR, MN_MAJOR, ROW_MAJOR, ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    LOG2_E,
    add_residual,
    consumer_place,
    decode,
    fetch_terms,
    follow,
    operand_a,
    operand_b,
    pair_of_thread,
    prefetch,
    wait_for_stores,
)

STATS_COLUMNS = 32  # channels of x whose statistics are taken at a time


class TriangleMultiplicationBackSm90:
    """The back kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.hidden = variant["channels"], variant["hidden"]
        self.has_residual, self.has_stats = variant["residual"], variant["stats"]
        self.tile_c, self.tile_k, self.warpgroups = config.tile_c, config.tile_k, config.consumer_warpgroups
        self.stages, self.w_stages = config.stages, config.weight_stages
        self.producer_registers, self.consumer_registers = registers
        self.steps = self.channels // self.tile_c * ((self.channels + self.hidden) // self.tile_k)
        self.resident = self.w_stages >= self.steps
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        c, k, tiles = self.tile_c, self.tile_k, self.stages * self.warpgroups
        self.mma_g, self.mma_x = launch.warpgroup_mma(self.dtype, c), launch.warpgroup_mma(self.dtype, c, a_major=MN_MAJOR)
        # Only its fragment is used: x in the layout of an accumulator.
        self.mma_stats = launch.warpgroup_mma(self.dtype, STATS_COLUMNS)
        self.z_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, c, self.channels), self.dtype, tiles)
        self.x_layout = sm90.make_smem_layout_a(COL_MAJOR, (ROWS, c, self.hidden), self.dtype, tiles)
        self.w_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, k), self.dtype, self.w_stages)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, c), self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_in: cute.struct.MemRange[Int64, 2 * self.stages]
            bar_w: cute.struct.MemRange[Int64, 2 * self.w_stages]
            terms: cute.struct.Align[cute.struct.MemRange[Float32, 4 * self.channels], 128]
            z: smem_area(self.dtype, self.z_layout)
            x: smem_area(self.dtype, self.x_layout)
            w: smem_area(self.dtype, self.w_layout)
            o: smem_area(self.dtype, self.o_layout)

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mZStats: cute.Tensor, mX: cute.Tensor, mP: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor,
        mResidual: cute.Tensor | None, mOut: cute.Tensor, mXStats: cute.Tensor | None, eps: Float32, num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self._setup()
        weights = (self.tile_c, self.tile_k)
        loads = (
            launch.tma_load(launch.of_pairs(mZ), self.z_layout, (ROWS, self.channels)),
            launch.tma_load(launch.of_channels(mX), self.x_layout, (ROWS, self.hidden)),
            launch.tma_load(mP, self.w_layout, weights), launch.tma_load(mG, self.w_layout, weights),
        )
        stores = launch.tma_store(launch.of_pairs(mOut), self.o_layout, (ROWS, self.tile_c))
        sizes = launch.tiles_of(mZ, ROWS)
        tasks = cute.ceil_div(sizes[2], self.warpgroups)
        self.kernel(loads, stores, (mZStats, mXStats), mTerms, mResidual, eps, (*sizes, tasks)).launch(
            grid=(cutlass.min(tasks, num_ctas), 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, stats, mTerms, mResidual, eps: Float32, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sZ, sX = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.x, self.x_layout)
        sW, sO = smem_tensor(sm.w, self.w_layout), smem_tensor(sm.o, self.o_layout)
        sTerms = sm.terms.get_tensor(cute.make_layout((4, self.channels)))
        fetch_terms(sTerms, mTerms, self.threads)

        warps = 4 * self.warpgroups
        pair_bytes = tile_bytes(self.z_layout, self.dtype) + tile_bytes(self.x_layout, self.dtype)
        pipe = tma_ring(sm.bar_in, self.stages, self.warpgroups * pair_bytes, warps)
        pipe_w = tma_ring(sm.bar_w, self.w_stages, tile_bytes(self.w_layout, self.dtype), warps, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipe, pipe_w, loads, (sZ, sX, sW), sizes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.project(pipe, pipe_w, (sZ, sX, sW, sO, sTerms), stats, stores, mResidual, eps, sizes)

    # ---- device: producer ---------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipe, pipe_w, loads, smem, sizes):
        (tma_z, gZ), (tma_x, gX), (tma_p, gP), (tma_g, gG) = loads
        sZ, sX, sW = smem
        crop, blocks, tiles, tasks = sizes
        tZs, tZg = partition(tma_z, sZ, gZ, (ROWS, self.channels), (None, 0, None, None))
        tXs, tXg = partition(tma_x, sX, gX, (ROWS, self.hidden), (None, 0, None, None))
        tPs, tPg = partition(tma_p, sW, gP, (self.tile_c, self.tile_k), (None, None))
        tGs, tGg = partition(tma_g, sW, gG, (self.tile_c, self.tile_k), (None, None))
        state, w_state = producer_state(self.stages), producer_state(self.w_stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            pipe.producer_acquire(state)
            bar = pipe.producer_get_barrier(state)
            for w in cutlass.range_constexpr(self.warpgroups):
                # A tile beyond the last is the last again, and not stored.
                block, i, batch = decode(cutlass.min(task * self.warpgroups + w, tiles - 1), crop, blocks)
                cute.copy(tma_z, tZg[None, block, i, batch], tZs[None, state.index * self.warpgroups + w], tma_bar_ptr=bar)
                cute.copy(tma_x, tXg[None, block, i, batch], tXs[None, state.index * self.warpgroups + w], tma_bar_ptr=bar)
            state.advance()
            again = self.channels // self.tile_c
            if const_expr(self.resident):
                again = cutlass.select_(task == cute.arch.block_idx()[0], Int32(again), Int32(0))
            for c in cutlass.range(again, unroll=1):
                for k in cutlass.range_constexpr(self.channels // self.tile_k):
                    pipe_w.producer_acquire(w_state)
                    cute.copy(tma_g, tGg[None, c, k], tGs[None, w_state.index], tma_bar_ptr=pipe_w.producer_get_barrier(w_state))
                    w_state.advance()
                for k in cutlass.range_constexpr(self.hidden // self.tile_k):
                    pipe_w.producer_acquire(w_state)
                    cute.copy(tma_p, tPg[None, c, k], tPs[None, w_state.index], tma_bar_ptr=pipe_w.producer_get_barrier(w_state))
                    w_state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe.producer_tail(state)
        if const_expr(not self.resident):
            pipe_w.producer_tail(w_state)

    # ---- device: projection and gate ----------------------------------------------------------------------------
    @cute.jit
    def project(self, pipe, pipe_w, smem, stats, stores, mResidual, eps: Float32, sizes):
        sZ, sX, sW, sO, sTerms = smem
        mZStats, mXStats = stats
        crop, blocks, tiles, tasks = sizes
        wg, tidx = consumer_place()
        mma_g, mma_x, (tma, gO) = self.mma_g, self.mma_x, stores
        tZ, tX, tW = operand_a(mma_g, sZ), operand_a(mma_x, sX), operand_b(mma_g, sW)
        shape = mma_g.partition_shape_C((ROWS, self.tile_c))
        acc_g, acc_x = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        state, w_state, done = consumer_state(self.stages), consumer_state(self.w_stages), consumer_state(self.w_stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            tile = task * self.warpgroups + wg
            block, i, batch = decode(cutlass.min(tile, tiles - 1), crop, blocks)
            place = state.index * self.warpgroups + wg
            # Of this thread's two pairs: mean and rstd of z, of x.
            of_pair = cute.make_rmem_tensor((2, 4), Float32)
            first = block * ROWS + pair_of_thread(0, tidx)
            for r in cutlass.range_constexpr(2):
                two = read_statistics(mZStats, (batch, i, first + 8 * r), crop)
                of_pair[r, 0], of_pair[r, 1] = two[0], two[1]
            if const_expr(self.resident):
                w_state = consumer_state(self.w_stages)
            pipe.consumer_wait(state)
            self.statistics(sX[None, None, place], of_pair, eps, tidx)
            if const_expr(self.has_stats):
                for r in cutlass.range_constexpr(2):
                    if (tidx % 4 == 0) & (first + 8 * r < crop):
                        keep_statistics(mXStats, (batch, i, first + 8 * r), of_pair[r, 2], of_pair[r, 3])
            for c in cutlass.range(self.channels // self.tile_c, unroll=1):
                for mma, acc, a, width in ((mma_g, acc_g, tZ, self.channels), (mma_x, acc_x, tX, self.hidden)):
                    for k in cutlass.range_constexpr(width // self.tile_k):
                        pipe_w.consumer_wait(w_state)
                        warpgroup.fence()
                        for step in cutlass.range_constexpr(self.tile_k // 16):
                            mma.set(warpgroup.Field.ACCUMULATE, k + step > 0)
                            part = a[None, None, k * (self.tile_k // 16) + step, place]
                            cute.gemm(mma, acc, part, tW[None, None, step, w_state.index], acc)
                        warpgroup.commit_group()
                        w_state.advance()
                        if const_expr((k > 0 or mma is mma_x) and not self.resident):  # one step stays in flight
                            warpgroup.wait_group(1)
                            pipe_w.consumer_release(done)
                            done.advance()
                warpgroup.wait_group(0)
                if const_expr(not self.resident):
                    pipe_w.consumer_release(done)
                    done.advance()
                self.gate(acc_x, acc_g, sTerms, of_pair, c, tidx)
                if const_expr(self.has_residual):
                    add_residual(acc_x, mResidual, (batch, i, first), c * self.tile_c, crop, tidx)
                if tile < tiles:
                    rounded = cute.make_rmem_tensor(shape, self.dtype)
                    rounded.store(acc_x.load().to(self.dtype))
                    target = cute.local_tile(gO, (ROWS, self.tile_c), (block, c, i, batch))
                    store_tile(rounded, mma_g, tidx, wg, sO, tma, target)
            release_after_reads(pipe, state)
            state.advance()
        wait_for_stores(tidx)

    @cute.jit
    def statistics(self, x_tile: cute.Tensor, of_pair, eps: Float32, tidx: Int32):
        """Mean and reciprocal deviation of x of this thread's two pairs, whose channels it shares with three neighbours: first
        the mean, then the variance about it, as PyTorch takes them."""
        mean, sums = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        mean.fill(0.0)
        for centred in cutlass.range_constexpr(2):
            sums.fill(0.0)
            for n in cutlass.range(self.hidden // STATS_COLUMNS, unroll=4):
                part = cute.local_tile(x_tile, (ROWS, STATS_COLUMNS), (0, n))
                frag = read_tile(part, self.mma_stats, tidx, self.mma_stats.partition_shape_C((ROWS, STATS_COLUMNS)), True)
                for r in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(STATS_COLUMNS // 8):
                        two = two_columns(frag, r, j)
                        for e in cutlass.range_constexpr(2):
                            apart = two[e] - mean[r]
                            sums[r] = sums[r] + (apart * apart if const_expr(centred == 1) else apart)
            for r in cutlass.range_constexpr(2):
                sums[r] = cute.arch.warp_reduction_sum(sums[r], threads_in_group=4) * (1.0 / self.hidden)
                if const_expr(centred == 0):
                    mean[r] = sums[r]
        for r in cutlass.range_constexpr(2):
            of_pair[r, 2], of_pair[r, 3] = mean[r], cute.math.rsqrt(sums[r] + eps, fastmath=True)

    @cute.jit
    def gate(self, acc_x, acc_g, sTerms: cute.Tensor, of_pair, c: Int32, tidx: Int32):
        """acc_x becomes value times sigmoid of gate."""
        x, g = rows_view(acc_x), rows_view(acc_g)
        for n in cutlass.range_constexpr(self.tile_c // 4):
            terms = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(sTerms[None, c * self.tile_c + 8 * (n // 2) + 2 * (tidx % 4) + n % 2], terms)
            for r in cutlass.range_constexpr(2):
                value = (x[r, n] - of_pair[r, 2] * terms[0]) * of_pair[r, 3] + terms[1]
                gate = (g[r, n] - of_pair[r, 0] * terms[2]) * (of_pair[r, 1] * -LOG2_E) + terms[3]
                odds = cute.math.exp2(gate, fastmath=True)
                x[r, n] = value * cute.arch.rcp_approx(1.0 + odds)


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    return launch.compiled(
        TriangleMultiplicationBackSm90(variant, config, registers), problem.pairs(), problem.stats(), problem.channel_major(),
        *problem.weights(problem.channels, problem.hidden), problem.pairs() if variant["residual"] else None, problem.pairs(),
        problem.stats() if variant["stats"] else None, Float32(1e-5), options=options,
    )
