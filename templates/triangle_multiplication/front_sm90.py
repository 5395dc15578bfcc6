"""Triangle multiplicative update, front, for sm_90a: LayerNorm, projections, gates and mask in one pass, written channel-major.

    zn = LN(z);  factors[s, d, i, k] = mask_ik * sigmoid(zn_ik g_weight^T + g_bias) * (zn_ik p_weight^T + p_bias)

Layouts:
    z                       (B, N, N, C)        bfloat16
    mask                    (B, N, N)           float32, contiguous, or absent
    p_weight, g_weight      (2 D, C)            bfloat16, rows of a before those of b, folded with the LayerNorm's weight
    terms                   (2 D, 4)            float32: row sum and bias of p_weight, of g_weight (see fold_sm90.py)
    factors                 (B, 2, D, N, P)     bfloat16, P = N rounded up to 8; columns from N on become zero
    stats                   (B, N, N, 2)        float32, written: mean and reciprocal deviation of every pair of z

A tile is tile_n pairs (i, k) of one i. A CTA takes W tiles at once, one for each of its W consumer warpgroups, which all use
the same weights: they stay on the SM where they fit, else they come from L2 for every tile. Both products are computed
transposed, channels as the rows of the MMA and pairs as its columns, so that what is stored is contiguous along k. The LayerNorm
is linear but for each pair's mean and deviation: z is multiplied as it is, and both enter after the products.

Warp roles: warpgroup 0 is the producer (one warp issues TMA); warpgroup 1 takes the statistics of the tiles of z; the W others
multiply, gate and store. The three work on different tiles at a time, and one warpgroup's gates overlap another's products.

Source: LayerNorm, projections and gates as in AlphaFold 2 (Jumper et al. 2021, supplement, algorithms 11 and 12).
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tpf_jit.templates.common.epilogue import store_tile
from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.norm import VECTOR, keep_statistics, pair_statistics
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
from tpf_jit.templates.triangle_multiplication.launch_sm90 import ROW_MAJOR, ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    LOG2_E,
    consumer_place,
    decode,
    fetch_terms,
    follow,
    operand_a,
    operand_b,
    prefetch,
    wait_for_stores,
)


class TriangleMultiplicationFrontSm90:
    """The front kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.hidden = variant["channels"], variant["hidden"]
        self.has_mask = variant["mask"]
        self.tile_n, self.warpgroups, self.tile_k = config.tile_n, config.consumer_warpgroups, config.tile_k
        self.z_stages, self.w_stages = config.z_stages, config.weight_stages
        self.producer_registers, self.norm_registers, self.consumer_registers = registers
        self.resident = self.w_stages >= 2 * self.hidden // ROWS * (self.channels // self.tile_k)
        self.threads = 128 * (self.warpgroups + 2)
        self.lanes = min(8, 1 << (self.channels // VECTOR).bit_length() - 1)  # threads that share one pair

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        n, k = self.tile_n, self.tile_k
        self.mma = launch.warpgroup_mma(self.dtype, n)
        self.z_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, n, self.channels), self.dtype, self.z_stages * self.warpgroups)
        self.w_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, n, k), self.dtype, self.w_stages)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, n), self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_z: cute.struct.MemRange[Int64, 2 * self.z_stages]
            bar_w: cute.struct.MemRange[Int64, 2 * self.w_stages]
            bar_norm: cute.struct.MemRange[Int64, self.z_stages]
            pairs: cute.struct.Align[cute.struct.MemRange[Float32, 4 * self.z_stages * self.warpgroups * self.tile_n], 128]
            terms: cute.struct.Align[cute.struct.MemRange[Float32, 8 * self.hidden], 128]
            z: smem_area(self.dtype, self.z_layout)
            p: smem_area(self.dtype, self.w_layout)
            g: smem_area(self.dtype, self.w_layout)
            o: smem_area(self.dtype, self.o_layout)

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mMask: cute.Tensor | None, mP: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor,
        mFactors: cute.Tensor, mStats: cute.Tensor, eps: Float32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        weights = (ROWS, self.tile_k)
        loads = (
            launch.tma_load(launch.of_pairs(mZ), self.z_layout, (self.tile_n, self.channels)),
            launch.tma_load(mP, self.w_layout, weights), launch.tma_load(mG, self.w_layout, weights),
        )
        stores = launch.tma_store(launch.of_factors(mFactors), self.o_layout, (ROWS, self.tile_n))
        sizes = launch.tiles_of(mZ, self.tile_n)
        tasks = cute.ceil_div(sizes[2], self.warpgroups)
        self.kernel(loads, stores, (mMask, mStats), mTerms, eps, (*sizes, tasks)).launch(
            grid=(cutlass.min(tasks, num_ctas), 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, per_pair, mTerms, eps: Float32, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sZ, sO = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.o, self.o_layout)
        sP, sG = smem_tensor(sm.p, self.w_layout), smem_tensor(sm.g, self.w_layout)
        sPairs = sm.pairs.get_tensor(cute.make_layout((4, self.tile_n, self.z_stages * self.warpgroups)))
        sTerms = sm.terms.get_tensor(cute.make_layout((4, 2 * self.hidden)))
        fetch_terms(sTerms, mTerms, self.threads)

        normed, warps = sm.bar_norm.data_ptr(), 4 * self.warpgroups
        if warp_idx == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.z_stages):
                    cute.arch.mbarrier_init(normed + i, 128)  # every thread that takes statistics
        pipe_z = tma_ring(sm.bar_z, self.z_stages, self.warpgroups * tile_bytes(self.z_layout, self.dtype), warps)
        pipe_w = tma_ring(sm.bar_w, self.w_stages, 2 * tile_bytes(self.w_layout, self.dtype), warps, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipe_z, pipe_w, loads, (sZ, sP, sG), sizes)
        elif warp_idx < 8:
            cute.arch.setmaxregister_decrease(self.norm_registers)
            self.statistics(pipe_z, normed, sZ, sPairs, per_pair, eps, sizes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.project(pipe_z, pipe_w, normed, (sZ, sP, sG, sPairs, sO, sTerms), stores, sizes)

    # ---- device: producer ---------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipe_z, pipe_w, loads, smem, sizes):
        (tma_z, gZ), (tma_p, gP), (tma_g, gG) = loads
        sZ, sP, sG = smem
        crop, blocks, tiles, tasks = sizes
        tZs, tZg = partition(tma_z, sZ, gZ, (self.tile_n, self.channels), (None, 0, None, None))
        tPs, tPg = partition(tma_p, sP, gP, (ROWS, self.tile_k), (None, None))
        tGs, tGg = partition(tma_g, sG, gG, (ROWS, self.tile_k), (None, None))
        z_state, w_state = producer_state(self.z_stages), producer_state(self.w_stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            pipe_z.producer_acquire(z_state)
            bar = pipe_z.producer_get_barrier(z_state)
            for w in cutlass.range_constexpr(self.warpgroups):
                block, i, batch = decode(cutlass.min(task * self.warpgroups + w, tiles - 1), crop, blocks)
                cute.copy(tma_z, tZg[None, block, i, batch], tZs[None, z_state.index * self.warpgroups + w], tma_bar_ptr=bar)
            z_state.advance()
            again = 2 * self.hidden // ROWS
            if const_expr(self.resident):
                again = cutlass.select_(task == cute.arch.block_idx()[0], Int32(again), Int32(0))
            for rows in cutlass.range(again, unroll=1):
                for k in cutlass.range_constexpr(self.channels // self.tile_k):
                    pipe_w.producer_acquire(w_state)
                    bar = pipe_w.producer_get_barrier(w_state)
                    cute.copy(tma_p, tPg[None, rows, k], tPs[None, w_state.index], tma_bar_ptr=bar)
                    cute.copy(tma_g, tGg[None, rows, k], tGs[None, w_state.index], tma_bar_ptr=bar)
                    w_state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe_z.producer_tail(z_state)
        if const_expr(not self.resident):
            pipe_w.producer_tail(w_state)

    # ---- device: statistics -------------------------------------------------------------------------------------
    @cute.jit
    def statistics(self, pipe_z, normed, sZ, sPairs, per_pair, eps: Float32, sizes):
        """Of every pair of a stage: mean, reciprocal deviation, the factor its results are multiplied by, and the deviation's for
        a gate in base 2."""
        mMask, mStats = per_pair
        crop, blocks, tiles, tasks = sizes
        tidx = cute.arch.thread_idx()[0] - 128
        lane, local = tidx % self.lanes, tidx // self.lanes
        pairs_a_pass = 128 // self.lanes
        state = consumer_state(self.z_stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            pipe_z.consumer_wait(state)
            for w in cutlass.range_constexpr(self.warpgroups):
                stage = state.index * self.warpgroups + w
                block, i, batch = decode(cutlass.min(task * self.warpgroups + w, tiles - 1), crop, blocks)
                for step in cutlass.range(self.tile_n // pairs_a_pass, unroll=2 if self.channels <= 256 else 1):
                    n = step * pairs_a_pass + local
                    k = block * self.tile_n + n
                    mean, rstd = pair_statistics(sZ[n, None, stage], eps, lane, self.channels, self.lanes, self.dtype)
                    if lane == 0:
                        four = cute.make_rmem_tensor(4, Float32)
                        four[0], four[1], four[2], four[3] = mean, rstd, Float32(0.0), rstd * -LOG2_E
                        if k < crop:
                            four[2] = Float32(1.0)
                            if const_expr(self.has_mask):
                                four[2] = mMask[batch, i, k]
                            keep_statistics(mStats, (batch, i, k), mean, rstd)
                        cute.autovec_copy(four, sPairs[None, n, stage])
            # z was read by ordinary loads, and is next written by bulk copies (see `tma.release_after_reads`).
            cute.arch.fence_view_async_shared()
            # Every thread arrives, as racecheck does not see that a barrier of the warp orders what other lanes wrote.
            cute.arch.mbarrier_arrive(normed + state.index)
            state.advance()

    # ---- device: projections and gates --------------------------------------------------------------------------
    @cute.jit
    def project(self, pipe_z, pipe_w, normed, smem, stores, sizes):
        sZ, sP, sG, sPairs, sO, sTerms = smem
        crop, blocks, tiles, tasks = sizes
        wg, tidx = consumer_place(2)
        mma, (tma, gF) = self.mma, stores
        tP, tG, tZ = operand_a(mma, sP), operand_a(mma, sG), operand_b(mma, sZ)
        shape = mma.partition_shape_C((ROWS, self.tile_n))
        acc_p, acc_g = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        z_state, w_state, done = consumer_state(self.z_stages), consumer_state(self.w_stages), consumer_state(self.w_stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            block, i, batch = decode(cutlass.min(task * self.warpgroups + wg, tiles - 1), crop, blocks)
            tile = z_state.index * self.warpgroups + wg
            if const_expr(self.resident):
                w_state = consumer_state(self.w_stages)
            pipe_z.consumer_wait(z_state)
            for rows in cutlass.range(2 * self.hidden // ROWS, unroll=1):
                for k in cutlass.range_constexpr(self.channels // self.tile_k):
                    pipe_w.consumer_wait(w_state)
                    warpgroup.fence()
                    for step in cutlass.range_constexpr(self.tile_k // 16):
                        mma.set(warpgroup.Field.ACCUMULATE, k + step > 0)
                        z = tZ[None, None, k * (self.tile_k // 16) + step, tile]
                        cute.gemm(mma, acc_p, tP[None, None, step, w_state.index], z, acc_p)
                        cute.gemm(mma, acc_g, tG[None, None, step, w_state.index], z, acc_g)
                    warpgroup.commit_group()
                    w_state.advance()
                    if const_expr(k > 0 and not self.resident):  # one step stays in flight
                        warpgroup.wait_group(1)
                        pipe_w.consumer_release(done)
                        done.advance()
                warpgroup.wait_group(0)
                if const_expr(not self.resident):
                    pipe_w.consumer_release(done)
                    done.advance()
                cute.arch.mbarrier_wait(normed + z_state.index, z_state.phase)
                if const_expr(self.has_mask):
                    self.gate(acc_p, acc_g, sPairs[None, None, tile], sTerms, rows, tidx, True)
                elif (block + 1) * self.tile_n <= crop:
                    self.gate(acc_p, acc_g, sPairs[None, None, tile], sTerms, rows, tidx, False)
                else:
                    self.gate(acc_p, acc_g, sPairs[None, None, tile], sTerms, rows, tidx, True)
                rounded = cute.make_rmem_tensor(shape, self.dtype)
                rounded.store(acc_p.load().to(self.dtype))
                target = cute.local_tile(gF, (ROWS, self.tile_n), (rows, block, i, batch))
                store_tile(rounded, mma, tidx, wg, sO, tma, target)
            release_after_reads(pipe_z, z_state)
            z_state.advance()
        wait_for_stores(tidx)

    @cute.jit
    def gate(self, acc_p, acc_g, pairs: cute.Tensor, sTerms: cute.Tensor, rows: Int32, tidx: Int32, factors: cutlass.Constexpr):
        """acc_p becomes value times sigmoid of gate, and where there are `factors`, times the pair's."""
        p, g = rows_view(acc_p), rows_view(acc_g)
        terms = cute.make_rmem_tensor((4, 2), Float32)
        for r in cutlass.range_constexpr(2):
            cute.autovec_copy(sTerms[None, rows * ROWS + (tidx // 32) * 16 + (tidx % 32) // 4 + 8 * r], terms[None, r])
        for n in cutlass.range_constexpr(self.tile_n // 4):
            of_pair = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(pairs[None, 8 * (n // 2) + 2 * (tidx % 4) + n % 2], of_pair)
            mean, rstd, factor, rstd_gate = of_pair[0], of_pair[1], of_pair[2], of_pair[3]
            for r in cutlass.range_constexpr(2):
                value = (p[r, n] - mean * terms[0, r]) * rstd + terms[1, r]
                odds = cute.math.exp2((g[r, n] - mean * terms[2, r]) * rstd_gate + terms[3, r], fastmath=True)
                value = value * cute.arch.rcp_approx(1.0 + odds)
                if const_expr(self.has_mask):
                    value = value * factor
                if const_expr(factors):
                    # A select, not a product: what a masked or absent pair holds must not matter.
                    value = Float32(0.0) if factor == 0.0 else value
                p[r, n] = value


def build(variant: dict, config, registers: tuple[int, int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    return launch.compiled(
        TriangleMultiplicationFrontSm90(variant, config, registers), problem.pairs(), problem.mask(),
        *problem.weights(2 * problem.hidden, problem.channels), problem.factors(), problem.stats(), Float32(1e-5),
        options=options,
    )
