"""Triangle multiplicative update, weight gradients, for sm_90a: of the front's two projections, or of the back's.

    front   value p, gate g from z;     dp = keep * d * s,      dg = dp * p * (1 - s)       d: gradient of the factors
    back    value h from x, g from z;   dh = d * s,             dg = dh * h * (1 - s)       d: gradient of the output
            s = sigmoid(g)
    planes[split, r] = (sum of d_value[r] * xhat over the split's pairs, sum of d_gate[r] * zhat);  sums[split, r] = of both

Layouts (R rows of the projections: 2 D in the front, C in the back; V columns of the value's weights: C in the front, D in the
back):
    z                       (B, N, N, C)            bfloat16
    x                       (B, D, N, P)            bfloat16, columns from N on zero; the back only
    z_stats, x_stats        (B, N, N, 2)            float32: mean, reciprocal deviation
    mask                    (B, N, N)               float32 or absent; the front only
    d                       (B, 2, D, N, P) in the front, (B, N, N, C) in the back      bfloat16
    value weights (R, V), gate weights (R, C)       bfloat16, folded with the LayerNorm's weight
    terms                   (R, 4)                  float32: row sum and bias of the value, of the gate
    planes                  (splits, R, V + C)      float32
    sums                    (splits, R, 2)          float32

A LayerNorm is linear but for each pair's mean and deviation, so z and x are multiplied as they lie. Mean and bias enter as 16
columns more (see `pieces_sm90.MORE`), rstd after the product. For the sums rstd goes into the 16-bit operand; the same columns
give what the mean takes from them, with the operand as it was rounded, and the sums of both gradients.

A CTA has 64 * W rows, in one or two parts of the columns, and a share of the tiles of pairs; it keeps its weights and its sums on
the SM. Products are computed with rows as the M of the MMA, so that the results of the first are an operand of the second where
they are. Where a step is two tiles, the products of one run while the other's gates are differentiated.

Warp roles: of warpgroup 0, warp 0 issues TMA and warp 1 fetches what belongs to the pairs; the W others multiply.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.mma import start_product
from tpf_jit.templates.common.tiles import transposed_view
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
from tpf_jit.templates.triangle_multiplication.gradients_sm90 import (
    READ_COLUMNS,
    differentiate_rows,
    fetch_pairs,
    start_fetched,
    store_rows,
)
from tpf_jit.templates.triangle_multiplication.launch_sm90 import COL_MAJOR, MN_MAJOR, REGISTERS, ROW_MAJOR, ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    MORE,
    consumer_place,
    decode,
    fill_more,
    follow,
    operand_a,
    operand_b,
    pair_of_thread,
    prefetch,
    sums_of_more,
)


class TriangleMultiplicationWeightsSm90:
    """The weight gradients' kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, parts: int, registers: tuple[int, int]):
        self.dtype, self.front = DTYPES[variant["dtype"]], variant["side"] == "front"
        self.channels, self.hidden = variant["channels"], variant["hidden"]
        self.has_mask = self.front and variant["mask"]
        self.rows = 2 * self.hidden if self.front else self.channels
        self.values = self.channels if self.front else self.hidden
        self.parts = parts
        self.tile_v, self.tile_c = self.values // parts, self.channels // parts
        self.tile_n, self.tiles = config.tile_n, config.tiles
        self.warpgroups, self.stages = config.consumer_warpgroups, config.stages
        self.norms = 1 if self.front else 2  # z's alone, or then x's
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        n = self.tile_n
        self.project_z = launch.warpgroup_mma(self.dtype, n)
        self.sum_z, self.sum_more = (
            launch.warpgroup_mma(self.dtype, columns, REGISTERS, b_major=MN_MAJOR) for columns in (self.tile_c, MORE)
        )
        self.read = launch.warpgroup_mma(self.dtype, READ_COLUMNS)  # only its fragment is used
        tiles, owned = self.stages * self.tiles * self.parts, self.warpgroups * self.parts
        self.z_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, n, self.tile_c), self.dtype, tiles)
        self.zt_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, self.tile_c, n), self.dtype, tiles)
        self.g_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, n, self.tile_c), self.dtype, owned)
        self.v_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, n, self.tile_v), self.dtype, owned)
        if self.front:
            self.project_x, self.sum_x = self.project_z, self.sum_z
            self.d_shape = (ROWS, n)
        else:
            self.project_x = launch.warpgroup_mma(self.dtype, n, b_major=MN_MAJOR)
            self.sum_x = launch.warpgroup_mma(self.dtype, self.tile_v, REGISTERS)
            self.x_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, n, self.tile_v), self.dtype, tiles)
            self.xt_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, self.tile_v, n), self.dtype, tiles)
            self.d_shape = (n, ROWS)
        self.d_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, self.d_shape, self.stages * self.tiles * self.warpgroups)
        self.more_w_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, n, MORE), self.dtype, self.warpgroups)
        more_tiles = self.stages * self.tiles * self.norms
        self.more_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, n, MORE), self.dtype, more_tiles)
        self.more_t_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, MORE, n), self.dtype, more_tiles)

    def _storage(self):
        x_area = smem_area(self.dtype, self.x_layout) if not self.front else cute.struct.MemRange[Int64, 1]

        @cute.struct
        class Storage:
            bar: cute.struct.MemRange[Int64, 2 * self.stages]
            bar_w: cute.struct.MemRange[Int64, 2]
            bar_pairs: cute.struct.MemRange[Int64, 2 * self.stages]
            pairs: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.tile_n * self.tiles * self.stages], 128]
            g: smem_area(self.dtype, self.g_layout)
            v: smem_area(self.dtype, self.v_layout)
            z: smem_area(self.dtype, self.z_layout)
            d: smem_area(self.dtype, self.d_layout)
            more: smem_area(self.dtype, self.more_layout)
            more_v: smem_area(self.dtype, self.more_w_layout)
            more_g: smem_area(self.dtype, self.more_w_layout)
            x: x_area

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def launch(self, mZ, mX, per_pair, mD, weights, results, splits: Int32, stream: cuda.CUstream):
        mV, mG, mTerms = weights
        mPlanes, mSums = results
        self._setup()
        d = launch.of_factors(mD) if const_expr(self.front) else launch.of_pairs(mD)
        loads = (
            launch.tma_load(launch.of_pairs(mZ), self.z_layout, (self.tile_n, self.tile_c)),
            launch.tma_load(d, self.d_layout, self.d_shape),
            launch.tma_load(mV, self.v_layout, (ROWS, self.tile_v)),
            launch.tma_load(mG, self.g_layout, (ROWS, self.tile_c)),
        )
        if const_expr(not self.front):
            loads = (*loads, launch.tma_load(launch.of_channels(mX), self.x_layout, (self.tile_n, self.tile_v)))
        units = self.parts * (-(-self.rows // (ROWS * self.warpgroups)))
        sizes = launch.tiles_of(mZ, self.tiles * self.tile_n)
        self.kernel(loads, per_pair, mTerms, mPlanes, mSums, (*sizes, splits)).launch(
            grid=(units * splits, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, per_pair, mTerms, mPlanes, mSums, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, loads)
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sG, sV = smem_tensor(sm.g, self.g_layout), smem_tensor(sm.v, self.v_layout)
        sZ, sZt, sD = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.z, self.zt_layout), smem_tensor(sm.d, self.d_layout)
        sX, sXt = sZ, sZt
        if const_expr(not self.front):
            sX, sXt = smem_tensor(sm.x, self.x_layout), smem_tensor(sm.x, self.xt_layout)
        sPairs = sm.pairs.get_tensor(cute.make_layout((2, self.tiles * self.tile_n, self.stages)))
        sMore, sMoreT = smem_tensor(sm.more, self.more_layout), smem_tensor(sm.more, self.more_t_layout)
        sMoreV, sMoreG = smem_tensor(sm.more_v, self.more_w_layout), smem_tensor(sm.more_g, self.more_w_layout)
        units = self.parts * (-(-self.rows // (ROWS * self.warpgroups)))
        unit, split = cute.arch.block_idx()[0] % units, cute.arch.block_idx()[0] // units
        where = (unit // self.parts, unit % self.parts, split)
        start = where[0] * self.warpgroups * ROWS
        fill_more(sMoreV, mTerms, 0, self.threads, start)
        fill_more(sMoreG, mTerms, 2, self.threads, start)
        cute.arch.fence_view_async_shared()
        fetched = sm.bar_pairs.data_ptr()
        warps = 4 * self.warpgroups
        start_fetched(warp_idx, fetched, self.stages, warps)
        stage_bytes = self.parts * tile_bytes(self.z_layout, self.dtype) + self.warpgroups * tile_bytes(self.d_layout, self.dtype)
        if const_expr(not self.front):
            stage_bytes = stage_bytes + self.parts * tile_bytes(self.x_layout, self.dtype)
        stage_bytes = self.tiles * stage_bytes
        weight_bytes = tile_bytes(self.g_layout, self.dtype) + tile_bytes(self.v_layout, self.dtype)
        pipe_w = tma_ring(sm.bar_w, 1, self.warpgroups * self.parts * weight_bytes, warps)
        pipe = tma_ring(sm.bar, self.stages, stage_bytes, warps, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipe, pipe_w, loads, (sZ, sD, sV, sG, sX), where, sizes)
            elif warp_idx == 1:
                fetch_pairs(fetched, per_pair, sPairs, sMore, split, sizes, self.tile_n)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            tiles = (sG, sV, sZ, sZt, sX, sXt, sD, sPairs, sMore, sMoreT, sMoreV, sMoreG)
            self.accumulate(pipe, pipe_w, fetched, tiles, (mPlanes, mSums), where, sizes)

    # ---- device: producers --------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipe, pipe_w, loads, smem, where, sizes):
        (tma_z, gZ), (tma_d, gD), (tma_v, gV), (tma_g, gG) = loads[:4]
        sZ, sD, sV, sG, sX = smem
        m, _, split = where
        crop, blocks, tiles, splits = sizes
        tZs, tZg = partition(tma_z, sZ, gZ, (self.tile_n, self.tile_c), (None, None, None, None))
        tDs, tDg = partition(tma_d, sD, gD, self.d_shape, (None, None, None, None))
        tVs, tVg = partition(tma_v, sV, gV, (ROWS, self.tile_v), (None, None))
        tGs, tGg = partition(tma_g, sG, gG, (ROWS, self.tile_c), (None, None))
        tma_x, tXs, tXg = None, None, None
        if const_expr(not self.front):
            tma_x = loads[4][0]
            tXs, tXg = partition(tma_x, sX, loads[4][1], (self.tile_n, self.tile_v), (None, None, None, None))
        w_state, state = producer_state(1), producer_state(self.stages)
        pipe_w.producer_acquire(w_state)
        bar = pipe_w.producer_get_barrier(w_state)
        for w in cutlass.range_constexpr(self.warpgroups):
            for part in cutlass.range_constexpr(self.parts):
                cute.copy(tma_v, tVg[None, m * self.warpgroups + w, part], tVs[None, w * self.parts + part], tma_bar_ptr=bar)
                cute.copy(tma_g, tGg[None, m * self.warpgroups + w, part], tGs[None, w * self.parts + part], tma_bar_ptr=bar)
        for tile in cutlass.range(split, tiles, splits, unroll=1):
            block, i, batch = decode(tile, crop, blocks)
            pipe.producer_acquire(state)
            bar = pipe.producer_get_barrier(state)
            for t in cutlass.range_constexpr(self.tiles):
                at = self.tiles * state.index + t
                for part in cutlass.range_constexpr(self.parts):
                    place = at * self.parts + part
                    cute.copy(tma_z, tZg[None, self.tiles * block + t, part, i, batch], tZs[None, place], tma_bar_ptr=bar)
                    if const_expr(not self.front):
                        cute.copy(tma_x, tXg[None, self.tiles * block + t, part, i, batch], tXs[None, place], tma_bar_ptr=bar)
                for w in cutlass.range_constexpr(self.warpgroups):
                    rows, place = m * self.warpgroups + w, at * self.warpgroups + w
                    if const_expr(self.front):
                        cute.copy(tma_d, tDg[None, rows, self.tiles * block + t, i, batch], tDs[None, place], tma_bar_ptr=bar)
                    else:
                        cute.copy(tma_d, tDg[None, self.tiles * block + t, rows, i, batch], tDs[None, place], tma_bar_ptr=bar)
            state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe.producer_tail(state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def accumulate(self, pipe, pipe_w, fetched, tiles, outputs, where, sizes):
        sG, sV, sZ, sZt, sX, sXt, sD, sPairs, sMore, sMoreT, sMoreV, sMoreG = tiles
        mPlanes, mSums = outputs
        m, part, split = where
        crop, blocks, count, splits = sizes
        wg, tidx = consumer_place()
        tG, tV = operand_a(self.project_z, sG), operand_a(self.project_x, sV)
        tZ, tX = operand_b(self.project_z, sZ), operand_b(self.project_x, sX)
        tZt, tXt = operand_b(self.sum_z, sZt), operand_b(self.sum_x, sXt)
        tMore, tMoreT = operand_b(self.project_z, sMore), operand_b(self.sum_more, sMoreT)
        tMoreV, tMoreG = (operand_a(self.project_z, t) for t in (sMoreV, sMoreG))
        shape = self.project_z.partition_shape_C((ROWS, self.tile_n))
        accs = [[cute.make_rmem_tensor(shape, Float32) for _ in range(2)] for _ in range(self.tiles)]
        sum_v = cute.make_rmem_tensor(self.sum_x.partition_shape_C((ROWS, self.tile_v)), Float32)
        sum_g = cute.make_rmem_tensor(self.sum_z.partition_shape_C((ROWS, self.tile_c)), Float32)
        more_shape = self.sum_more.partition_shape_C((ROWS, MORE))
        more_v, more_g = (cute.make_rmem_tensor(more_shape, Float32) for _ in range(2))
        for acc in (sum_v, sum_g, more_v, more_g):
            acc.fill(0.0)
        operand = self.sum_z.partition_shape_A((ROWS, self.tile_n))
        first = (m * self.warpgroups + wg) * ROWS + pair_of_thread(0, tidx)
        pipe_w.consumer_wait(consumer_state(1))
        state = consumer_state(self.stages)
        for _ in cutlass.range(split, count, splits, unroll=1):
            cute.arch.mbarrier_wait(fetched + state.index, state.phase)
            pipe.consumer_wait(state)
            for t in cutlass.range_constexpr(self.tiles):
                at, (acc_v, acc_g) = self.tiles * state.index + t, accs[t]
                warpgroup.fence()
                self.project_z.set(warpgroup.Field.ACCUMULATE, False)
                for acc, rows, norm in ((acc_v, tMoreV, self.norms - 1), (acc_g, tMoreG, 0)):
                    more = tMore[None, None, 0, at * self.norms + norm]
                    cute.gemm(self.project_z, acc, rows[None, None, 0, wg], more, acc)
                for mma in (self.project_x, self.project_z):
                    mma.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(self.parts):
                    a, b = wg * self.parts + k, at * self.parts + k
                    for step in cutlass.range_constexpr(self.tile_v // 16):
                        cute.gemm(self.project_x, acc_v, tV[None, None, step, a], tX[None, None, step, b], acc_v)
                    for step in cutlass.range_constexpr(self.tile_c // 16):
                        cute.gemm(self.project_z, acc_g, tG[None, None, step, a], tZ[None, None, step, b], acc_g)
                warpgroup.commit_group()
            for t in cutlass.range_constexpr(self.tiles):
                at, (acc_v, acc_g) = self.tiles * state.index + t, accs[t]
                tile = sD[None, None, at * self.warpgroups + wg]
                if const_expr(not self.front):
                    tile = transposed_view(tile)
                # Behind what is waited for: the products of the tiles that follow, or the sums of the one before.
                warpgroup.wait_group(self.tiles - 1 if t == 0 else 4)
                pairs = cute.local_tile(sPairs[None, None, state.index], (2, self.tile_n), (0, t))
                a_v, a_g = (cute.make_rmem_tensor(operand, self.dtype) for _ in range(2))
                differentiate_rows(accs[t], (a_v, a_g), tile, pairs, self.read, tidx, not self.front, self.has_mask)
                start_product(self.sum_x, sum_v, a_v, tXt[None, None, None, at * self.parts + part], True)
                start_product(self.sum_z, sum_g, a_g, tZt[None, None, None, at * self.parts + part], True)
                start_product(self.sum_more, more_v, a_v, tMoreT[None, None, None, (at + 1) * self.norms - 1], True)
                start_product(self.sum_more, more_g, a_g, tMoreT[None, None, None, at * self.norms], True)
            warpgroup.wait_group(0)
            cute.arch.mbarrier_arrive(fetched + (self.stages + state.index))
            release_after_reads(pipe, state)
            state.advance()
        self.store((sum_v, sum_g), (more_v, more_g), mPlanes, mSums, (first, part, split), tidx)

    @cute.jit
    def store(self, sums, more, mPlanes, mSums, where, tidx: Int32):
        """Take the means out of the sums; both to this split's plane."""
        first, part, split = where
        v, g = (rows_view(acc) for acc in sums)
        of_v, of_g = (sums_of_more(acc, tidx) for acc in more)
        for r in cutlass.range_constexpr(2):
            row = first + 8 * r
            if row < self.rows:
                line = mPlanes[split, row, None]
                store_rows(v, of_v[0, r], line, r, part * self.tile_v, tidx)
                store_rows(g, of_g[0, r], line, r, self.values + part * self.tile_c, tidx)
                if (tidx % 4 == 0) & (part == 0):
                    mSums[split, row, 0], mSums[split, row, 1] = of_v[1, r], of_g[1, r]


class FrontWeights(TriangleMultiplicationWeightsSm90):
    """Of the front's projections."""

    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mZStats: cute.Tensor, mMask: cute.Tensor | None, mD: cute.Tensor,
        mV: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor, mPlanes: cute.Tensor, mSums: cute.Tensor,
        splits: Int32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self.launch(mZ, None, (mZStats, None, mMask), mD, (mV, mG, mTerms), (mPlanes, mSums), splits, stream)


class BackWeights(TriangleMultiplicationWeightsSm90):
    """Of the back's projections."""

    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mZStats: cute.Tensor, mX: cute.Tensor, mXStats: cute.Tensor, mD: cute.Tensor,
        mV: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor, mPlanes: cute.Tensor, mSums: cute.Tensor,
        splits: Int32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self.launch(mZ, mX, (mZStats, mXStats, None), mD, (mV, mG, mTerms), (mPlanes, mSums), splits, stream)


def build(variant: dict, config, parts: int, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem, front = launch.SymbolicProblem(variant), variant["side"] == "front"
    rows, values = (2 * problem.hidden, problem.channels) if front else (problem.channels, problem.hidden)
    kernel = (FrontWeights if front else BackWeights)(variant, config, parts, registers)
    if front:
        pairs = (problem.pairs(), problem.stats(), problem.mask(), problem.factors())
    else:
        pairs = (problem.pairs(), problem.stats(), problem.channel_major(), problem.stats(), problem.pairs())
    return launch.compiled(kernel, *pairs, *problem.weights(rows, values), *problem.sums(rows, values), Int32(1), options=options)
