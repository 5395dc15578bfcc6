"""Triangle multiplicative update, front backward and weight gradients in one, for sm_90a: a launch for 128 rows of projections.

    p, s = value and sigmoid of the gate, from z;   dp = keep * d * s,   dg = dp * p * (1 - s)
    planes[split, r] = (sum of dp[r] * zhat over the split's pairs, sum of dg[r] * zhat);   sums[split, r] = of both
    t = dzn, or the t of the launch before, + dp p_weight + dg g_weight, over this launch's rows;
    dz = t, or after the last rows rstd * (t - mean(t) - zhat * mean(t zhat))

Layouts as in layout_backward.py, for C = 128; between launches t is rounded. `first` counts blocks of 128 rows.

front_backward and weights each compute all gates; here they are computed once. Rows are the M of the projections, as in
weights_sm90.py, so that the gradients are the operand of the sums where they are. For t they go through shared memory: pairs are
the M of that product, and each warpgroup has half of the channels. z is multiplied as it lies; gradients carry rstd, which t gets
rid of again by the pair's deviation.

Warp roles: of warpgroup 0, warp 0 issues TMA and warp 1 fetches what belongs to the pairs; the two others multiply.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.mma import start_product
from tpf_jit.templates.common.tiles import read_tile, store_in_place, transposed_view, two_columns, write_tile
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
from tpf_jit.templates.triangle_multiplication.config_gradients import CHANNELS, LAUNCH_ROWS
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
    deviation,
    fill_more,
    follow,
    operand_a,
    operand_b,
    pair_of_thread,
    prefetch,
    shares_of_more,
)

WARPGROUPS = LAUNCH_ROWS // ROWS
HALF = CHANNELS // WARPGROUPS  # channels of t that a warpgroup computes; pairs of a tile are ROWS, too


class TriangleMultiplicationFrontGradientsSm90:
    """The kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype, self.has_mask = DTYPES[variant["dtype"]], variant["mask"]
        self.rows, self.stages = 2 * variant["hidden"], config.stages
        self.launches = self.rows // LAUNCH_ROWS
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (WARPGROUPS + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        self.project = launch.warpgroup_mma(self.dtype, ROWS)
        self.sum, self.sum_more = (
            launch.warpgroup_mma(self.dtype, columns, REGISTERS, b_major=MN_MAJOR) for columns in (CHANNELS, MORE)
        )
        self.spread = launch.warpgroup_mma(self.dtype, HALF, a_major=MN_MAJOR, b_major=MN_MAJOR)
        self.read = launch.warpgroup_mma(self.dtype, READ_COLUMNS)  # of this, only the fragment is used
        self.w_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, ROWS, CHANNELS), self.dtype, WARPGROUPS)
        self.wt_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, HALF, ROWS), self.dtype, 2 * WARPGROUPS)
        self.z_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, ROWS, CHANNELS), self.dtype, self.stages)
        self.zt_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, CHANNELS, ROWS), self.dtype, self.stages)
        self.d_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, ROWS), self.stages * WARPGROUPS)
        self.t_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, HALF), self.stages * WARPGROUPS)
        self.a_layout = sm90.make_smem_layout_a(COL_MAJOR, (ROWS, HALF, ROWS), self.dtype, 2 * WARPGROUPS)
        self.more_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, ROWS, MORE), self.dtype, self.stages)
        self.more_t_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, MORE, ROWS), self.dtype, self.stages)
        self.more_w_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, ROWS, MORE), self.dtype, WARPGROUPS)

    def _storage(self):
        @cute.struct
        class Storage:
            bar: cute.struct.MemRange[Int64, 2 * self.stages]
            bar_w: cute.struct.MemRange[Int64, 2]
            bar_pairs: cute.struct.MemRange[Int64, 2 * self.stages]
            pairs: cute.struct.Align[cute.struct.MemRange[Float32, 4 * ROWS * self.stages], 128]
            totals: cute.struct.Align[cute.struct.MemRange[Float32, 8 * 128 * WARPGROUPS], 128]
            means: cute.struct.Align[cute.struct.MemRange[Float32, 2 * ROWS * WARPGROUPS], 128]
            p: smem_area(self.dtype, self.w_layout)
            g: smem_area(self.dtype, self.w_layout)
            z: smem_area(self.dtype, self.z_layout)
            d: smem_area(self.dtype, self.d_layout)
            t: smem_area(self.dtype, self.t_layout)
            a: smem_area(self.dtype, self.a_layout)
            more: smem_area(self.dtype, self.more_layout)
            more_p: smem_area(self.dtype, self.more_w_layout)
            more_g: smem_area(self.dtype, self.more_w_layout)

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mStats: cute.Tensor, mMask: cute.Tensor | None, mD: cute.Tensor, mDzn: cute.Tensor,
        mP: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor, mDz: cute.Tensor, mPlanes: cute.Tensor, mSums: cute.Tensor,
        splits: Int32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        z, dzn, dz = (launch.of_pairs(t) for t in (mZ, mDzn, mDz))
        half, weights = (ROWS, HALF), (ROWS, CHANNELS)
        loads = (
            launch.tma_load(z, self.z_layout, (ROWS, CHANNELS)),
            launch.tma_load(launch.of_factors(mD), self.d_layout, (ROWS, ROWS)),
            launch.tma_load(mP, self.w_layout, weights), launch.tma_load(mG, self.w_layout, weights),
        )
        stores = launch.tma_store(dz, self.t_layout, half)
        # Made before the first launch: tracing it, `_setup` makes the layouts those of the device region.
        given = [launch.tma_load(dz if first > 0 else dzn, self.t_layout, half) for first in range(self.launches)]
        sizes = (*launch.tiles_of(mZ, ROWS), splits)
        for first in cutlass.range_constexpr(self.launches):
            self.kernel((*loads, given[first]), stores, (mStats, None, mMask), mTerms, (mPlanes, mSums), first, sizes).launch(
                grid=(splits, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
            )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, per_pair, mTerms, results, first: cutlass.Constexpr, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sP, sG = smem_tensor(sm.p, self.w_layout), smem_tensor(sm.g, self.w_layout)
        sPt, sGt = smem_tensor(sm.p, self.wt_layout), smem_tensor(sm.g, self.wt_layout)
        sZ, sZt, sD = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.z, self.zt_layout), smem_tensor(sm.d, self.d_layout)
        sT, sA = smem_tensor(sm.t, self.t_layout), smem_tensor(sm.a, self.a_layout)
        sMore, sMoreT = smem_tensor(sm.more, self.more_layout), smem_tensor(sm.more, self.more_t_layout)
        sMoreP, sMoreG = smem_tensor(sm.more_p, self.more_w_layout), smem_tensor(sm.more_g, self.more_w_layout)
        sPairs = sm.pairs.get_tensor(cute.make_layout((4, ROWS, self.stages)))
        # Of every consumer thread, for values and gates: its share of what the columns MORE sum up. Registers are too few.
        sTotals = sm.totals.get_tensor(cute.make_layout((4, 128 * WARPGROUPS, 2)))
        sMeans = sm.means.get_tensor(cute.make_layout((2, ROWS, WARPGROUPS)))
        fill_more(sMoreP, mTerms, 0, self.threads, first * LAUNCH_ROWS)
        fill_more(sMoreG, mTerms, 2, self.threads, first * LAUNCH_ROWS)
        cute.arch.fence_view_async_shared()
        fetched, warps = sm.bar_pairs.data_ptr(), 4 * WARPGROUPS
        start_fetched(warp_idx, fetched, self.stages, warps)
        stage_bytes = tile_bytes(self.z_layout, self.dtype)
        stage_bytes = stage_bytes + WARPGROUPS * (tile_bytes(self.d_layout, self.dtype) + tile_bytes(self.t_layout, self.dtype))
        pipe_w = tma_ring(sm.bar_w, 1, 2 * WARPGROUPS * tile_bytes(self.w_layout, self.dtype), warps)
        pipe = tma_ring(sm.bar, self.stages, stage_bytes, warps, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipe, pipe_w, loads, (sZ, sD, sT, sP, sG), first, sizes)
            elif warp_idx == 1:
                fetch_pairs(fetched, per_pair, sPairs, sMore, cute.arch.block_idx()[0], sizes, ROWS)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            tiles = (sP, sG, sPt, sGt, sZ, sZt, sD, sT, sA, sMore, sMoreT, sMoreP, sMoreG, sPairs, sTotals, sMeans)
            self.differentiate(pipe, pipe_w, fetched, tiles, stores, results, first, sizes)

    # ---- device: producers --------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipe, pipe_w, loads, smem, first: cutlass.Constexpr, sizes):
        (tma_z, gZ), (tma_d, gD), (tma_p, gP), (tma_g, gG), (tma_t, gT) = loads
        sZ, sD, sT, sP, sG = smem
        crop, blocks, tiles, splits = sizes
        tZs, tZg = partition(tma_z, sZ, gZ, (ROWS, CHANNELS), (None, 0, None, None))
        tDs, tDg = partition(tma_d, sD, gD, (ROWS, ROWS), (None, None, None, None))
        tTs, tTg = partition(tma_t, sT, gT, (ROWS, HALF), (None, None, None, None))
        tPs, tPg = partition(tma_p, sP, gP, (ROWS, CHANNELS), (None, 0))
        tGs, tGg = partition(tma_g, sG, gG, (ROWS, CHANNELS), (None, 0))
        w_state, state = producer_state(1), producer_state(self.stages)
        pipe_w.producer_acquire(w_state)
        bar = pipe_w.producer_get_barrier(w_state)
        for w in cutlass.range_constexpr(WARPGROUPS):
            cute.copy(tma_p, tPg[None, first * WARPGROUPS + w], tPs[None, w], tma_bar_ptr=bar)
            cute.copy(tma_g, tGg[None, first * WARPGROUPS + w], tGs[None, w], tma_bar_ptr=bar)
        for tile in cutlass.range(cute.arch.block_idx()[0], tiles, splits, unroll=1):
            block, i, batch = decode(tile, crop, blocks)
            pipe.producer_acquire(state)
            bar = pipe.producer_get_barrier(state)
            cute.copy(tma_z, tZg[None, block, i, batch], tZs[None, state.index], tma_bar_ptr=bar)
            for w in cutlass.range_constexpr(WARPGROUPS):
                place = state.index * WARPGROUPS + w
                cute.copy(tma_d, tDg[None, first * WARPGROUPS + w, block, i, batch], tDs[None, place], tma_bar_ptr=bar)
                cute.copy(tma_t, tTg[None, block, w, i, batch], tTs[None, place], tma_bar_ptr=bar)
            state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe.producer_tail(state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def differentiate(self, pipe, pipe_w, fetched, tiles, stores, results, first: cutlass.Constexpr, sizes):
        sP, sG, sPt, sGt, sZ, sZt, sD, sT, sA, sMore, sMoreT, sMoreP, sMoreG, sPairs, sTotals, sMeans = tiles
        crop, blocks, count, splits = sizes
        split = cute.arch.block_idx()[0]
        wg, tidx = consumer_place()
        project, summed, spread, (tma, gOut) = self.project, self.sum, self.spread, stores
        rows = [operand_a(project, t) for t in (sP, sG, sMoreP, sMoreG)]
        tZ, tMore = (operand_b(project, t) for t in (sZ, sMore))
        tZt, tMoreT, tA = operand_b(summed, sZt), operand_b(self.sum_more, sMoreT), operand_a(spread, sA)
        across = [operand_b(spread, t) for t in (sPt, sGt)]
        shape, t_shape = project.partition_shape_C((ROWS, ROWS)), spread.partition_shape_C((ROWS, HALF))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        acc_t = cute.make_rmem_tensor(t_shape, Float32)
        sums = [cute.make_rmem_tensor(summed.partition_shape_C((ROWS, CHANNELS)), Float32) for _ in range(2)]
        more = [cute.make_rmem_tensor(self.sum_more.partition_shape_C((ROWS, MORE)), Float32) for _ in range(2)]
        for acc in sums:
            acc.fill(0.0)
        own = 128 * wg + tidx
        nothing = cute.make_rmem_tensor(4, Float32)
        nothing.fill(0.0)
        for source in cutlass.range_constexpr(2):
            cute.autovec_copy(nothing, sTotals[None, own, source])
        operand = cute.make_layout(summed.partition_shape_A((ROWS, ROWS)))
        pipe_w.consumer_wait(consumer_state(1))
        state = consumer_state(self.stages)
        for tile in cutlass.range(split, count, splits, unroll=1):
            cute.arch.mbarrier_wait(fetched + state.index, state.phase)
            pipe.consumer_wait(state)
            warpgroup.fence()
            for source in cutlass.range_constexpr(2):
                project.set(warpgroup.Field.ACCUMULATE, False)
                of_rows, of_pairs = rows[2 + source][None, None, 0, wg], tMore[None, None, 0, state.index]
                cute.gemm(project, accs[source], of_rows, of_pairs, accs[source])
                project.set(warpgroup.Field.ACCUMULATE, True)
                for step in cutlass.range_constexpr(CHANNELS // 16):
                    a, b = rows[source][None, None, step, wg], tZ[None, None, step, state.index]
                    cute.gemm(project, accs[source], a, b, accs[source])
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            frags = [cute.make_rmem_tensor(shape, self.dtype) for _ in range(2)]
            incoming, pairs = sD[None, None, state.index * WARPGROUPS + wg], sPairs[None, None, state.index]
            differentiate_rows(accs, frags, incoming, pairs, self.read, tidx, False, self.has_mask)
            # Both have read what they wrote of the tile before.
            both_sync(3)
            for source in cutlass.range_constexpr(2):
                target = transposed_view(sA[None, None, source * WARPGROUPS + wg])
                store_fragment(frags[source], target, project, tidx)
            cute.arch.fence_view_async_shared()
            for source in cutlass.range_constexpr(2):
                a = cute.make_tensor(frags[source].iterator, operand)
                start_product(summed, sums[source], a, tZt[None, None, None, state.index], True)
                for step in cutlass.range_constexpr(ROWS // 16):
                    self.sum_more.set(warpgroup.Field.ACCUMULATE, step > 0)
                    b = tMoreT[None, None, step, state.index]
                    cute.gemm(self.sum_more, more[source], a[None, None, step], b, more[source])
                warpgroup.commit_group()
            both_sync(4)
            warpgroup.fence()
            for source in cutlass.range_constexpr(2):
                for w in cutlass.range_constexpr(WARPGROUPS):
                    for step in cutlass.range_constexpr(ROWS // 16):
                        spread.set(warpgroup.Field.ACCUMULATE, source + w + step > 0)
                        b = across[source][None, None, step, w * WARPGROUPS + wg]
                        cute.gemm(spread, acc_t, tA[None, None, step, source * WARPGROUPS + w], b, acc_t)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            # (mean, rstd) of this thread's two pairs: only now, as registers are scarce before.
            of_pair = cute.make_rmem_tensor((2, 2), Float32)
            for r in cutlass.range_constexpr(2):
                line = pairs[None, pair_of_thread(r, tidx)]
                of_pair[0, r], of_pair[1, r] = line[2], line[0]
            cute.arch.mbarrier_arrive(fetched + (self.stages + state.index))
            for source in cutlass.range_constexpr(2):
                total, share = cute.make_rmem_tensor(4, Float32), shares_of_more(more[source], tidx)
                cute.autovec_copy(sTotals[None, own, source], total)
                for n in cutlass.range_constexpr(4):
                    total[n] = total[n] + share[n]
                cute.autovec_copy(total, sTotals[None, own, source])
            block, i, batch = decode(tile, crop, blocks)
            place = state.index * WARPGROUPS + wg
            z_half = cute.local_tile(sZ[None, None, state.index], (ROWS, HALF), (0, wg))
            self.finish(acc_t, sT[None, None, place], z_half, of_pair, sMeans, wg, tidx, first == self.launches - 1)
            target = cute.local_tile(gOut, (ROWS, HALF), (block, wg, i, batch))
            store_in_place(tidx, wg, sT, place, tma, target, True)
            release_after_reads(pipe, state)
            state.advance()
        self.store_sums(sums, sTotals[None, own, None], results, first * LAUNCH_ROWS + wg * ROWS, split, tidx)

    @cute.jit
    def finish(self, acc_t, t_tile: cute.Tensor, z_tile: cute.Tensor, of_pair, sMeans, wg, tidx: Int32, last: cutlass.Constexpr):
        """t of this launch's rows to t or dz, written where t came in; half of the channels of 64 pairs."""
        t = rows_view(acc_t)
        given = read_tile(t_tile, self.spread, tidx, acc_t.shape, False)
        totals = cute.make_rmem_tensor((2, 2), Float32)
        for r in cutlass.range_constexpr(2):
            scale = deviation(of_pair[1, r])
            for j in cutlass.range_constexpr(HALF // 8):
                two = two_columns(given, r, j)
                for c in cutlass.range_constexpr(2):
                    t[r, 2 * j + c] = t[r, 2 * j + c] * scale + two[c]
        if const_expr(last):
            z = read_tile(z_tile, self.spread, tidx, acc_t.shape, False)
            totals.fill(0.0)
            for r in cutlass.range_constexpr(2):
                for j in cutlass.range_constexpr(HALF // 8):
                    two = two_columns(z, r, j)
                    for c in cutlass.range_constexpr(2):
                        totals[0, r] += t[r, 2 * j + c]
                        totals[1, r] += t[r, 2 * j + c] * ((two[c] - of_pair[0, r]) * of_pair[1, r])
                pair = pair_of_thread(r, tidx)
                for n in cutlass.range_constexpr(2):
                    totals[n, r] = cute.arch.warp_reduction_sum(totals[n, r], threads_in_group=4)
                    if tidx % 4 == 0:
                        sMeans[n, pair, wg] = totals[n, r]
            both_sync(5)
            for r in cutlass.range_constexpr(2):
                pair = pair_of_thread(r, tidx)
                mean, product = ((sMeans[n, pair, 0] + sMeans[n, pair, 1]) * (1.0 / CHANNELS) for n in range(2))
                for j in cutlass.range_constexpr(HALF // 8):
                    two = two_columns(z, r, j)
                    for c in cutlass.range_constexpr(2):
                        hat = (two[c] - of_pair[0, r]) * of_pair[1, r]
                        t[r, 2 * j + c] = (t[r, 2 * j + c] - mean - hat * product) * of_pair[1, r]
        write_tile(acc_t, t_tile, self.spread, tidx, False)

    @cute.jit
    def store_sums(self, sums, totals, results, row: Int32, split: Int32, tidx: Int32):
        """Take the means out of the sums; both to this split's plane."""
        mPlanes, mSums = results
        parts = [rows_view(acc) for acc in sums]
        of_sums = [cute.make_rmem_tensor((2, 2), Float32) for _ in range(2)]
        for source in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(4):
                of_sums[source][n] = cute.arch.warp_reduction_sum(totals[n, source], threads_in_group=4)
        for r in cutlass.range_constexpr(2):
            own = row + pair_of_thread(r, tidx)
            line = mPlanes[split, own, None]
            for source in cutlass.range_constexpr(2):
                store_rows(parts[source], of_sums[source][0, r], line, r, source * CHANNELS, tidx)
            if tidx % 4 == 0:
                mSums[split, own, 0], mSums[split, own, 1] = of_sums[0][1, r], of_sums[1][1, r]


@cute.jit
def both_sync(number: cutlass.Constexpr):
    """Barrier of the two consumer warpgroups."""
    cute.arch.barrier(barrier_id=number, number_of_threads=128 * WARPGROUPS)


@cute.jit
def store_fragment(frag, tile: cute.Tensor, tiled_mma, tidx: Int32):
    """A 16-bit fragment of an accumulator to a tile with its axes."""
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), frag.element_type), tiled_mma)
    cute.copy(tiled, tiled.retile(frag), tiled.get_slice(tidx).partition_D(tile))


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    rows = 2 * problem.hidden
    return launch.compiled(
        TriangleMultiplicationFrontGradientsSm90(variant, config, registers), problem.pairs(), problem.stats(), problem.mask(),
        problem.factors(), problem.pairs(), *problem.weights(rows, CHANNELS), problem.pairs(), *problem.sums(rows, CHANNELS),
        Int32(1), options=options,
    )
