"""Triangle attention backward, query side, for sm_90a: dQ of every row and the pair bias gradient.

    P = exp(scale * Q K^T + bias + mask - LSE),  dP = dO V^T,  dS = P * (dP - delta)
    dQ = scale * dS K,  dbias = sum over rows of dS

Layouts (5-d tensors through TMA with the caller's strides):
    q, k, v, dout, dq       (B, I, H, N, D)         16-bit
    bias                    (B, H, N, N)            16-bit or float32
    mask                    (B, I, Npad)            float32, natural log units
    stats                   (B, I, H, 3, Nstat)     float32, see backward_stats_sm90.py
    dbias                   (slabs, B, H, N, Nb)    float32, Nb >= N a multiple of 4; summed over the slabs by the caller

One task is (b, h, 64 * W queries, slab): a CTA keeps its queries and takes the rows of its slab in order, R at a time. For
every key tile the dS of R rows are summed in registers, and the sum joins the slab's float32 plane by a TMA reduce-add. Each
element of a plane belongs to one CTA, which waits for its adds of one row group before it starts those of the next: the order
of the sum is fixed, there are no atomics whose order could vary, and no N^3 gradient exists.

Warp roles as in the forward.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from tpf_jit.templates.common.epilogue import store_tile, warpgroup_sync
from tpf_jit.templates.common.fragments import DTYPES, rows_view, stacked
from tpf_jit.templates.common.mma import start_product
from tpf_jit.templates.common.scores import add_bias, apply_key_mask, mask_tail
from tpf_jit.templates.common.tma import (
    SymbolicOperands,
    bias_matrix_first,
    checked_storage,
    consumer_state,
    mask_matrix_first,
    matrix_first,
    one_stage,
    partition,
    producer_state,
    release_after_reads,
    smem_area,
    smem_tensor,
    stage_floats,
    tile_bytes,
    tma_ring,
)

LOG2_E = math.log2(math.e)
Q_ROWS = 64  # queries of one consumer warpgroup: the M of wgmma
STATS_TILE = (3, Q_ROWS)


class TriangleAttentionBackwardQuerySm90:
    """The query-side kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype, self.bias_dtype = DTYPES[variant["dtype"]], DTYPES[variant["bias_dtype"]]
        self.tile_hdim, self.has_mask, self.has_dbias = variant["tile_hdim"], variant["mask"], variant["dbias"]
        self.tile_n, self.warpgroups, self.rows = config.tile_n, config.consumer_warpgroups, config.rows_per_cta
        self.kv_stages, self.bias_stages, self.ctas_per_sm = config.kv_stages, config.bias_stages, config.ctas_per_sm
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)
        self.task_queries = Q_ROWS * self.warpgroups
        self.q_tiles = self.rows * self.warpgroups

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        n, d, w = self.tile_n, self.tile_hdim, self.warpgroups
        self.mma_score = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            atom_layout_mnk=(1, 1, 1), tiler_mn=(Q_ROWS, n),
        )
        self.mma_dq = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            atom_layout_mnk=(1, 1, 1), tiler_mn=(Q_ROWS, d), a_source=warpgroup.OperandSource.RMEM,
        )
        self.q_layout = sm90.make_smem_layout_a(row_major, (Q_ROWS, n, d), self.dtype, self.q_tiles)
        self.k_layout = sm90.make_smem_layout_b(row_major, (Q_ROWS, n, d), self.dtype, self.kv_stages)
        self.kt_layout = sm90.make_smem_layout_b(col_major, (Q_ROWS, d, n), self.dtype, self.kv_stages)
        self.b_layout = sm90.make_smem_layout_epi(self.bias_dtype, row_major, (Q_ROWS, n), self.bias_stages * w)
        self.db_layout = sm90.make_smem_layout_epi(Float32, row_major, (Q_ROWS, n), w)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (Q_ROWS, d), w)

    def _storage(self):
        mask_floats = self.kv_stages * stage_floats(self.tile_n) if self.has_mask else 4
        db_floats = cute.cosize(self.db_layout) if self.has_dbias else 256

        @cute.struct
        class Storage:
            bar_q: cute.struct.MemRange[Int64, 2]
            bar_k: cute.struct.MemRange[Int64, 2 * self.kv_stages]
            bar_v: cute.struct.MemRange[Int64, 2 * self.kv_stages]
            bar_b: cute.struct.MemRange[Int64, 2 * self.bias_stages]
            mask: cute.struct.Align[cute.struct.MemRange[Float32, mask_floats], 128]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, STATS_TILE[0] * Q_ROWS * self.q_tiles], 128]
            q: smem_area(self.dtype, self.q_layout)
            do: smem_area(self.dtype, self.q_layout)
            k: smem_area(self.dtype, self.k_layout)
            v: smem_area(self.dtype, self.k_layout)
            b: smem_area(self.bias_dtype, self.b_layout)
            db: cute.struct.Align[cute.struct.MemRange[Float32, db_floats], 1024]
            o: smem_area(self.dtype, self.o_layout)

        return checked_storage(Storage, cutlass.memory.get_smem_capacity_in_bytes("sm_90") // self.ctas_per_sm)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mBias: cute.Tensor, mMask: cute.Tensor | None,
        mdO: cute.Tensor, mStats: cute.Tensor, mdQ: cute.Tensor, mdBias: cute.Tensor | None,
        scale: Float32, slabs: Int32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        reduce = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        atom = cpasync.make_tiled_tma_atom
        queries, keys = (Q_ROWS, self.tile_hdim), (self.tile_n, self.tile_hdim)
        k_one = one_stage(sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (Q_ROWS, *keys), self.dtype, self.kv_stages))
        loads = (
            atom(load, matrix_first(mQ), one_stage(self.q_layout), queries),
            atom(load, matrix_first(mdO), one_stage(self.q_layout), queries),
            atom(load, matrix_first(mK), k_one, keys), atom(load, matrix_first(mV), k_one, keys),
            atom(load, bias_matrix_first(mBias), one_stage(self.b_layout), (Q_ROWS, self.tile_n)),
            atom(load, matrix_first(mStats), cute.make_layout(STATS_TILE, stride=(Q_ROWS, 1)), STATS_TILE),
        )
        if const_expr(self.has_mask):
            m_layout = cute.make_layout((1, self.tile_n), stride=(self.tile_n, 1))
            loads = (*loads, atom(load, mask_matrix_first(mMask), m_layout, (1, self.tile_n)))
        stores = (atom(store, matrix_first(mdQ), one_stage(self.o_layout), queries),)
        if const_expr(self.has_dbias):
            plane, tile = matrix_first(mdBias), (Q_ROWS, self.tile_n)
            stores = (*stores, *(atom(op, plane, one_stage(self.db_layout), tile) for op in (store, reduce)))
        batch, rows, heads, crop = mQ.shape[0], mQ.shape[1], mQ.shape[2], mQ.shape[3]
        q_blocks = cute.ceil_div(crop, self.task_queries)
        groups = cute.ceil_div(rows, self.rows)
        tasks = q_blocks * heads * slabs * batch
        self.kernel(loads, stores, scale, crop, heads, rows, q_blocks, groups, slabs, tasks).launch(
            grid=(cutlass.min(tasks, num_ctas * self.ctas_per_sm), 1, 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.ctas_per_sm, preferred_smem_carveout=100,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self, loads, stores, scale: Float32, crop: Int32, heads: Int32, rows: Int32,
        q_blocks: Int32, groups: Int32, slabs: Int32, tasks: Int32,
    ):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in (*loads, *stores):
                cpasync.prefetch_descriptor(atom)
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        sQ, sdO = smem_tensor(sm.q, self.q_layout), smem_tensor(sm.do, self.q_layout)
        sK, sV, sKt = smem_tensor(sm.k, self.k_layout), smem_tensor(sm.v, self.k_layout), smem_tensor(sm.k, self.kt_layout)
        sB, sO = smem_tensor(sm.b, self.b_layout), smem_tensor(sm.o, self.o_layout)
        sM, sdB = None, None
        if const_expr(self.has_mask):
            m_stages = cute.make_layout((1, self.tile_n, self.kv_stages), stride=(self.tile_n, 1, stage_floats(self.tile_n)))
            sM = sm.mask.get_tensor(m_stages)
        if const_expr(self.has_dbias):
            sdB = smem_tensor(sm.db, self.db_layout)

        sStats = sm.stats.get_tensor(cute.make_layout((*STATS_TILE, self.q_tiles), stride=(Q_ROWS, 1, STATS_TILE[0] * Q_ROWS)))

        warps, kv_bytes = 4 * self.warpgroups, tile_bytes(self.k_layout, self.dtype)
        query_bytes = 2 * tile_bytes(self.q_layout, self.dtype) + 4 * STATS_TILE[0] * Q_ROWS
        pipe_q = tma_ring(sm.bar_q, 1, self.q_tiles * query_bytes, warps)
        pipe_k = tma_ring(sm.bar_k, self.kv_stages, kv_bytes + (4 * self.tile_n if self.has_mask else 0), warps)
        pipe_v = tma_ring(sm.bar_v, self.kv_stages, kv_bytes, warps)
        bias_bytes = self.warpgroups * tile_bytes(self.b_layout, self.bias_dtype)
        pipe_b = tma_ring(sm.bar_b, self.bias_stages, bias_bytes, warps, last=True)
        pipes, sizes = (pipe_q, pipe_k, pipe_v, pipe_b), (crop, heads, rows, q_blocks, groups, slabs, tasks)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipes, loads, (sQ, sdO, sK, sV, sB, sStats, sM), sizes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.mma(pipes, stores, (sQ, sdO, sK, sV, sKt, sB, sStats, sM, sdB, sO), scale, sizes)

    @cute.jit
    def decode(self, task: Int32, heads: Int32, q_blocks: Int32, slabs: Int32):
        """task -> (query block, head, slab, batch); queries fastest, so that K and V of the rows in flight stay in L2."""
        rest, q_block = task // q_blocks, task % q_blocks
        rest, head = rest // heads, rest % heads
        return q_block, head, rest % slabs, rest // slabs

    # ---- device: producer ---------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipes, loads, tiles, sizes):
        pipe_q, pipe_k, pipe_v, pipe_b = pipes
        crop, heads, rows, q_blocks, groups, slabs, tasks = sizes
        (tma_q, gQ), (tma_do, gdO), (tma_k, gK), (tma_v, gV), (tma_b, gB), (tma_s, gS) = loads[:6]
        sQ, sdO, sK, sV, sB, sStats, sM = tiles
        queries, keys, rest = (Q_ROWS, self.tile_hdim), (self.tile_n, self.tile_hdim), (None, 0, None, None, None)
        tQs, tQg = partition(tma_q, sQ, gQ, queries, rest)
        tOs, tOg = partition(tma_do, sdO, gdO, queries, rest)
        tKs, tKg = partition(tma_k, sK, gK, keys, rest)
        tVs, tVg = partition(tma_v, sV, gV, keys, rest)
        tBs, tBg = partition(tma_b, sB, gB, (Q_ROWS, self.tile_n), (None, None, None, None))
        tSs, tSg = partition(tma_s, sStats, gS, STATS_TILE, (0, None, None, None, None))
        tma_m, tMs, tMg = None, None, None
        if const_expr(self.has_mask):
            tma_m = loads[6][0]
            tMs, tMg = partition(tma_m, sM, loads[6][1], (1, self.tile_n), (0, None, None, None))
        q_state, b_state = producer_state(1), producer_state(self.bias_stages)
        k_state, v_state = producer_state(self.kv_stages), producer_state(self.kv_stages)
        key_tiles = cute.ceil_div(crop, self.tile_n)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            q_block, head, slab, batch = self.decode(task, heads, q_blocks, slabs)
            for group in cutlass.range(slab, groups, slabs, unroll=1):
                row0 = group * self.rows
                pipe_q.producer_acquire(q_state)
                bar = pipe_q.producer_get_barrier(q_state)
                for r in cutlass.range_constexpr(self.rows):
                    for w in cutlass.range_constexpr(self.warpgroups):
                        source, tile = (None, q_block * self.warpgroups + w, head, row0 + r, batch), r * self.warpgroups + w
                        cute.copy(tma_q, tQg[source], tQs[None, tile], tma_bar_ptr=bar)
                        cute.copy(tma_do, tOg[source], tOs[None, tile], tma_bar_ptr=bar)
                        cute.copy(tma_s, tSg[source], tSs[None, tile], tma_bar_ptr=bar)
                q_state.advance()
                for j in cutlass.range(key_tiles, unroll=1):
                    pipe_b.producer_acquire(b_state)
                    bar = pipe_b.producer_get_barrier(b_state)
                    for w in cutlass.range_constexpr(self.warpgroups):
                        cute.copy(tma_b, tBg[None, q_block * self.warpgroups + w, j, head, batch],
                                  tBs[None, b_state.index * self.warpgroups + w], tma_bar_ptr=bar)
                    b_state.advance()
                    for r in cutlass.range_constexpr(self.rows):
                        pipe_k.producer_acquire(k_state)
                        bar = pipe_k.producer_get_barrier(k_state)
                        cute.copy(tma_k, tKg[None, j, head, row0 + r, batch], tKs[None, k_state.index], tma_bar_ptr=bar)
                        if const_expr(self.has_mask):
                            cute.copy(tma_m, tMg[None, j, row0 + r, batch], tMs[None, k_state.index], tma_bar_ptr=bar)
                        k_state.advance()
                        pipe_v.producer_acquire(v_state)
                        cute.copy(tma_v, tVg[None, j, head, row0 + r, batch], tVs[None, v_state.index],
                                  tma_bar_ptr=pipe_v.producer_get_barrier(v_state))
                        v_state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe_q.producer_tail(q_state)
        pipe_b.producer_tail(b_state)
        pipe_k.producer_tail(k_state)
        pipe_v.producer_tail(v_state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def mma(self, pipes, stores, tiles, scale, sizes):
        pipe_q, pipe_k, pipe_v, pipe_b = pipes
        crop, heads, rows, q_blocks, groups, slabs, tasks = sizes
        sQ, sdO, sK, sV, sKt, sB, sStats, sM, sdB, sO = tiles
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        tidx = cute.arch.thread_idx()[0] - 128 * (wg + 1)
        score, to_dq = self.mma_score, self.mma_dq
        tSrQ, tSrdO = (score.make_fragment_A(score.get_slice(0).partition_A(t)) for t in (sQ, sdO))
        tSrK, tSrV = (score.make_fragment_B(score.get_slice(0).partition_B(t)) for t in (sK, sV))
        tGrK = to_dq.make_fragment_B(to_dq.get_slice(0).partition_B(sKt))
        s_shape = score.partition_shape_C((Q_ROWS, self.tile_n))
        acc_S, acc_dP, acc_dB = (cute.make_rmem_tensor(s_shape, Float32) for _ in range(3))
        dq_shape = to_dq.partition_shape_C((Q_ROWS, self.tile_hdim))
        all_dQ = cute.make_rmem_tensor(self.rows * cute.size(dq_shape), Float32)
        rdS = to_dq.make_fragment_A(to_dq.partition_shape_A((Q_ROWS, self.tile_n)))

        q_state, b_state = consumer_state(1), consumer_state(self.bias_stages)
        k_state, v_state, k_done = (consumer_state(self.kv_stages) for _ in range(3))
        key_tiles = cute.ceil_div(crop, self.tile_n)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            q_block, head, slab, batch = self.decode(task, heads, q_blocks, slabs)
            q_tile = q_block * self.warpgroups + wg
            for group in cutlass.range(slab, groups, slabs, unroll=1):
                row0 = group * self.rows
                all_dQ.fill(0.0)
                pipe_q.consumer_wait(q_state)
                for j in cutlass.range(key_tiles, unroll=1):
                    pipe_b.consumer_wait(b_state)
                    for r in cutlass.range_constexpr(self.rows):
                        # S = Q K^T and dP = dO V^T
                        pipe_k.consumer_wait(k_state)
                        a_tile = r * self.warpgroups + wg
                        q, k = tSrQ[None, None, None, a_tile], tSrK[None, None, None, k_state.index]
                        start_product(score, acc_S, q, k, False)
                        pipe_v.consumer_wait(v_state)
                        do, v = tSrdO[None, None, None, a_tile], tSrV[None, None, None, v_state.index]
                        start_product(score, acc_dP, do, v, False)
                        warpgroup.wait_group(1)  # also ends the dQ product of the step before
                        if const_expr(r > 0):
                            pipe_k.consumer_release(k_done)
                            k_done.advance()
                        else:
                            if j > 0:
                                pipe_k.consumer_release(k_done)
                                k_done.advance()
                        add_bias(acc_S, sB[None, None, b_state.index * self.warpgroups + wg], score, scale, tidx, False)
                        if const_expr(r == self.rows - 1):
                            release_after_reads(pipe_b, b_state)
                        if const_expr(self.has_mask):
                            apply_key_mask(acc_S, sM[0, None, k_state.index], tidx)
                            cute.arch.fence_view_async_shared()  # the mask is read; its stage goes back with K, a step later
                        if (j + 1) * self.tile_n > crop:
                            mask_tail(acc_S, crop - j * self.tile_n, tidx)
                        k_state.advance()
                        s_stats = sStats[None, None, a_tile]
                        self.exponentiate(acc_S, s_stats, row0 + r < rows, tidx)
                        warpgroup.wait_group(0)
                        pipe_v.consumer_release(v_state)
                        v_state.advance()
                        self.score_gradient(acc_S, acc_dP, acc_dB, s_stats, tidx, r)
                        rdS.store(cute.make_tensor(acc_dP.iterator, rdS.layout).load().to(self.dtype))
                        # dQ += dS K, in flight during the next step
                        k_rows = tGrK[None, None, None, self.before(k_state)]
                        start_product(to_dq, stacked(all_dQ, r, dq_shape), rdS, k_rows, True)
                    b_state.advance()
                    if const_expr(self.has_dbias):
                        self.store_dbias(acc_dB, stores, sdB, (q_tile, j, head, batch, slab), group == slab, wg, tidx)
                release_after_reads(pipe_q, q_state)
                q_state.advance()
                warpgroup.wait_group(0)
                pipe_k.consumer_release(k_done)
                k_done.advance()
                for r in cutlass.range_constexpr(self.rows):
                    acc_dQ = stacked(all_dQ, r, dq_shape)
                    acc_dQ.store(acc_dQ.load() * scale)
                    rounded = cute.make_rmem_tensor(acc_dQ.shape, self.dtype)
                    rounded.store(acc_dQ.load().to(self.dtype))
                    tma, g = stores[0]
                    g_tile = cute.local_tile(g, (Q_ROWS, self.tile_hdim), (q_tile, 0, head, row0 + r, batch))
                    store_tile(rounded, to_dq, tidx, wg, sO, tma, g_tile)
                if const_expr(self.has_dbias):
                    # The adds of this group are complete before those of the next begin: the order of the sum is fixed.
                    if cute.arch.make_warp_uniform(tidx // 32) == 0:
                        cute.arch.cp_async_bulk_wait_group(0)
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0)

    def before(self, state) -> Int32:
        """Stage index just before a pipeline state."""
        return (state.index + (self.kv_stages - 1)) % self.kv_stages

    @cute.jit
    def exponentiate(self, acc_S, s_stats, row_exists, tidx: Int32):
        """acc_S becomes P against the saved LSE, which is subtracted first where it is huge; 0 for a row that does not exist."""
        scores = rows_view(acc_S)
        first = (tidx // 32) * 16 + (tidx % 32) // 4
        shift = [s_stats[2, first + 8 * i] for i in range(2)]
        if cute.arch.vote_any_sync((shift[0] != 0.0) | (shift[1] != 0.0)):
            for i in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tile_n // 4):
                    scores[i, n] += shift[i]
        for i in cutlass.range_constexpr(2):
            lse2 = s_stats[0, first + 8 * i] if row_exists else Float32.inf
            for n in cutlass.range_constexpr(self.tile_n // 4):
                scores[i, n] = cute.math.exp2(scores[i, n] * LOG2_E - lse2, fastmath=True)

    @cute.jit
    def score_gradient(self, acc_P, acc_dP, acc_dB, s_stats, tidx: Int32, r: cutlass.Constexpr):
        """acc_dP becomes dS = P * (dP - delta); acc_dB sums it over the rows of this group."""
        p, dp, db = rows_view(acc_P), rows_view(acc_dP), rows_view(acc_dB)
        for i in cutlass.range_constexpr(2):
            delta = s_stats[1, (tidx // 32) * 16 + (tidx % 32) // 4 + 8 * i]
            for n in cutlass.range_constexpr(self.tile_n // 4):
                ds = p[i, n] * (dp[i, n] - delta)
                dp[i, n] = ds
                if const_expr(self.has_dbias):
                    db[i, n] = ds if const_expr(r == 0) else db[i, n] + ds

    @cute.jit
    def store_dbias(self, acc_dB, stores, sdB, coord, first, wg: Int32, tidx: Int32):
        """Add the tile to the slab's plane; the first row group of a slab writes it."""
        (tma_store, g_store), (tma_add, g_add) = stores[1], stores[2]
        leader = cute.arch.make_warp_uniform(tidx // 32) == 0
        if leader:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the tile before has left the buffer
        warpgroup_sync(wg)
        cute.autovec_copy(acc_dB, self.mma_score.get_slice(tidx).partition_C(sdB[None, None, wg]))
        cute.arch.fence_view_async_shared()
        warpgroup_sync(wg)
        if leader:
            shape = (Q_ROWS, self.tile_n)
            source, to_store = partition(tma_store, sdB, g_store, shape, coord)
            _, to_add = partition(tma_add, sdB, g_add, shape, coord)
            if first:
                cute.copy(tma_store, source[None, wg], to_store)
            else:
                cute.copy(tma_add, source[None, wg], to_add)
            cute.arch.cp_async_bulk_commit_group()


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic shapes; returns the DSL's compiled function."""
    x = SymbolicOperands(variant)
    kernel = TriangleAttentionBackwardQuerySm90(variant, config, registers)
    plane = None
    if variant["dbias"]:
        plane = x.tensor(Float32, (cute.sym_int(), x.batch, x.heads, x.crop, cute.sym_int(divisibility=4)), 4)
    return cute.compile(
        kernel, x.wide(), x.wide(), x.wide(), x.bias(), x.mask(), x.wide(), x.stats(), x.wide(), plane,
        Float32(1.0), Int32(1), Int32(1), x.stream(), options=options,
    )
