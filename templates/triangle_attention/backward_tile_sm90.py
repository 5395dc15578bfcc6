"""Triangle attention backward, query side by tiles, for sm_90a: dQ and the pair bias gradient without traffic for the latter.

    P = exp(scale * Q K^T + bias + mask - LSE),  dP = dO V^T,  dS = P * (dP - delta)
    dQ = scale * dS K,  dbias = sum over rows of dS

Layouts as in backward_query_sm90.py, whose calling convention this kernel shares:
    q, k, v, dout, dq       (B, I, H, N, D)         16-bit
    bias                    (B, H, N, N)            16-bit or float32
    mask                    (B, I, Npad)            float32, natural log units
    stats                   (B, I, H, 3, Nstat)     float32, see backward_stats_sm90.py
    dbias                   (slabs, B, H, N, Nb)    float32, Nb >= N a multiple of 4; summed over the slabs by the caller

One task is (b, h, 64 * W queries, slab), done by a cluster of CTAs of which each keeps one tile of tile_n keys, so that the
cluster covers all keys. Bias tile and bias gradient stay where they are, in shared memory and in registers, while the CTA walks
the rows of its slab; the gradient leaves once, at the end. Every CTA has a part of dQ only: it sends the queries of each other
CTA of the cluster to that CTA's shared memory (bulk copies, DSMEM), where they are added in the order of the ranks. No atomics
anywhere.

Warp roles: warpgroup 0 is the producer (one warp issues TMA); each of the W consumer warpgroups owns 64 queries. A consumer
step, for one row: S is there since the step before; logits and P, meanwhile dP = dO V^T; dS; dQ = dS K and at once S of the next
row; send dQ; add up what the cluster sent of the row before.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from tpf_jit.templates.common.epilogue import warpgroup_sync
from tpf_jit.templates.common.fragments import DTYPES, rows_view
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
BUFFERS = 2  # rows of dQ on their way through the cluster


class TriangleAttentionBackwardTileSm90:
    """The kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype, self.bias_dtype = DTYPES[variant["dtype"]], DTYPES[variant["bias_dtype"]]
        self.tile_hdim, self.has_mask, self.has_dbias = variant["tile_hdim"], variant["mask"], variant["dbias"]
        self.tile_n, self.warpgroups, self.cluster = config.tile_n, config.consumer_warpgroups, config.cluster
        self.stages, self.ctas_per_sm = config.stages, config.ctas_per_sm
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)
        self.task_queries = Q_ROWS * self.warpgroups
        self.slice_rows = -(-Q_ROWS // self.cluster)  # queries of a warpgroup whose dQ one CTA adds up
        self.slice_floats = self.slice_rows * self.tile_hdim

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
        self.q_layout = sm90.make_smem_layout_a(row_major, (Q_ROWS, n, d), self.dtype, self.stages * w)
        self.k_layout = sm90.make_smem_layout_b(row_major, (Q_ROWS, n, d), self.dtype, self.stages)
        self.kt_layout = sm90.make_smem_layout_b(col_major, (Q_ROWS, d, n), self.dtype, self.stages)
        self.b_layout = sm90.make_smem_layout_epi(self.bias_dtype, row_major, (Q_ROWS, n), w)

    def _storage(self):
        mask_floats = self.stages * stage_floats(self.tile_n) if self.has_mask else 4
        sent = BUFFERS * self.warpgroups

        @cute.struct
        class Storage:
            bar_in: cute.struct.MemRange[Int64, 2 * self.stages]
            bar_b: cute.struct.MemRange[Int64, 2]
            bar_full: cute.struct.MemRange[Int64, sent]
            bar_empty: cute.struct.MemRange[Int64, sent]
            mask: cute.struct.Align[cute.struct.MemRange[Float32, mask_floats], 128]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, 3 * Q_ROWS * self.stages * self.warpgroups], 128]
            send: cute.struct.Align[cute.struct.MemRange[Float32, sent * Q_ROWS * self.tile_hdim], 128]
            receive: cute.struct.Align[cute.struct.MemRange[Float32, sent * self.cluster * self.slice_floats], 128]
            q: smem_area(self.dtype, self.q_layout)
            do: smem_area(self.dtype, self.q_layout)
            k: smem_area(self.dtype, self.k_layout)
            v: smem_area(self.dtype, self.k_layout)
            b: smem_area(self.bias_dtype, self.b_layout)

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
        load, atom = cpasync.CopyBulkTensorTileG2SOp(), cpasync.make_tiled_tma_atom
        queries, keys = (Q_ROWS, self.tile_hdim), (self.tile_n, self.tile_hdim)
        k_one = one_stage(self.k_layout)
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
        batch, rows, heads, crop = mQ.shape[0], mQ.shape[1], mQ.shape[2], mQ.shape[3]
        q_blocks = cute.ceil_div(crop, self.task_queries)
        tasks = q_blocks * heads * slabs * batch
        self.kernel(loads, mdQ, mdBias, scale, crop, heads, rows, q_blocks, slabs).launch(
            grid=(tasks * self.cluster, 1, 1), block=(self.threads, 1, 1), cluster=(self.cluster, 1, 1), stream=stream,
            min_blocks_per_mp=self.ctas_per_sm, preferred_smem_carveout=100,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self, loads, mdQ, mdBias, scale: Float32, crop: Int32, heads: Int32, rows: Int32, q_blocks: Int32, slabs: Int32,
    ):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in loads:
                cpasync.prefetch_descriptor(atom)
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        sQ, sdO = smem_tensor(sm.q, self.q_layout), smem_tensor(sm.do, self.q_layout)
        sK, sV, sKt = smem_tensor(sm.k, self.k_layout), smem_tensor(sm.v, self.k_layout), smem_tensor(sm.k, self.kt_layout)
        sB, sM = smem_tensor(sm.b, self.b_layout), None
        if const_expr(self.has_mask):
            m_stages = cute.make_layout((1, self.tile_n, self.stages), stride=(self.tile_n, 1, stage_floats(self.tile_n)))
            sM = sm.mask.get_tensor(m_stages)
        stats_layout = cute.make_layout(
            (*STATS_TILE, self.stages * self.warpgroups), stride=(Q_ROWS, 1, STATS_TILE[0] * Q_ROWS)
        )
        sStats = sm.stats.get_tensor(stats_layout)

        warps, kv_bytes = 4 * self.warpgroups, tile_bytes(self.k_layout, self.dtype)
        query_bytes = 2 * tile_bytes(self.q_layout, self.dtype) + 4 * STATS_TILE[0] * Q_ROWS
        row_bytes = self.warpgroups * query_bytes + 2 * kv_bytes + (4 * self.tile_n if self.has_mask else 0)
        full, empty = sm.bar_full.data_ptr(), sm.bar_empty.data_ptr()
        if warp_idx == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(BUFFERS * self.warpgroups):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * self.cluster)  # every warp of every CTA that reads
        pipe = tma_ring(sm.bar_in, self.stages, row_bytes, warps)
        pipe_b = tma_ring(sm.bar_b, 1, self.warpgroups * tile_bytes(self.b_layout, self.bias_dtype), warps, last=True)
        cute.arch.mbarrier_init_fence()
        # Barriers of all CTAs are made before any is reached from outside.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        rank, task = cute.arch.block_idx_in_cluster(), cute.arch.block_idx()[0] // self.cluster
        rest, q_block = task // q_blocks, task % q_blocks
        rest, head = rest // heads, rest % heads
        slab, batch = rest % slabs, rest // slabs
        where = (q_block, head, slab, batch, rank)
        row_count = cute.ceil_div(rows - slab, slabs)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipe, pipe_b, loads, (sQ, sdO, sK, sV, sB, sStats, sM), where, row_count, slabs)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            exchange = (full, empty, sm.send.data_ptr(), sm.receive.data_ptr())
            tiles = (sQ, sdO, sK, sV, sKt, sB, sStats, sM)
            self.mma(pipe, pipe_b, tiles, exchange, mdQ, mdBias, scale, crop, where, row_count, slabs)
        # No CTA may exit while another can still write to its memory or arrive on its barriers.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    # ---- device: producer ---------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipe, pipe_b, loads, tiles, where, row_count, slabs):
        q_block, head, slab, batch, rank = where
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
        b_state, state = producer_state(1), producer_state(self.stages)
        pipe_b.producer_acquire(b_state)
        for w in cutlass.range_constexpr(self.warpgroups):
            cute.copy(tma_b, tBg[None, q_block * self.warpgroups + w, rank, head, batch], tBs[None, w],
                      tma_bar_ptr=pipe_b.producer_get_barrier(b_state))
        # One row more than there are: consumers start every next row before they finish one.
        for i in cutlass.range(row_count + 1, unroll=1):
            row = slab + cutlass.min(i, row_count - 1) * slabs
            pipe.producer_acquire(state)
            bar = pipe.producer_get_barrier(state)
            for w in cutlass.range_constexpr(self.warpgroups):
                source, tile = (None, q_block * self.warpgroups + w, head, row, batch), state.index * self.warpgroups + w
                cute.copy(tma_q, tQg[source], tQs[None, tile], tma_bar_ptr=bar)
                cute.copy(tma_do, tOg[source], tOs[None, tile], tma_bar_ptr=bar)
                cute.copy(tma_s, tSg[source], tSs[None, tile], tma_bar_ptr=bar)
            cute.copy(tma_k, tKg[None, rank, head, row, batch], tKs[None, state.index], tma_bar_ptr=bar)
            cute.copy(tma_v, tVg[None, rank, head, row, batch], tVs[None, state.index], tma_bar_ptr=bar)
            if const_expr(self.has_mask):
                cute.copy(tma_m, tMg[None, rank, row, batch], tMs[None, state.index], tma_bar_ptr=bar)
            state.advance()
        pipe.producer_tail(state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def mma(self, pipe, pipe_b, tiles, exchange, mdQ, mdBias, scale, crop, where, row_count, slabs):
        q_block, head, slab, batch, rank = where
        sQ, sdO, sK, sV, sKt, sB, sStats, sM = tiles
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        tidx = cute.arch.thread_idx()[0] - 128 * (wg + 1)
        q_tile = q_block * self.warpgroups + wg
        score, to_dq = self.mma_score, self.mma_dq
        tSrQ, tSrdO = (score.make_fragment_A(score.get_slice(0).partition_A(t)) for t in (sQ, sdO))
        tSrK, tSrV = (score.make_fragment_B(score.get_slice(0).partition_B(t)) for t in (sK, sV))
        tGrK = to_dq.make_fragment_B(to_dq.get_slice(0).partition_B(sKt))
        s_shape = score.partition_shape_C((Q_ROWS, self.tile_n))
        acc_S, acc_dP, acc_dB = (cute.make_rmem_tensor(s_shape, Float32) for _ in range(3))
        acc_dQ = cute.make_rmem_tensor(to_dq.partition_shape_C((Q_ROWS, self.tile_hdim)), Float32)
        rdS = to_dq.make_fragment_A(to_dq.partition_shape_A((Q_ROWS, self.tile_n)))
        acc_dB.fill(0.0)

        state, ahead = consumer_state(self.stages), consumer_state(self.stages)
        keys_left = crop - rank * self.tile_n
        pipe_b.consumer_wait(consumer_state(1))
        pipe.consumer_wait(ahead)
        q_tiles = self.warpgroups
        start_product(score, acc_S, tSrQ[None, None, None, wg], tSrK[None, None, None, 0], False)
        ahead.advance()
        warpgroup.wait_group(0)
        for i in cutlass.range(row_count, unroll=1):
            tile = state.index * q_tiles + wg
            s_stats = sStats[None, None, tile]
            add_bias(acc_S, sB[None, None, wg], score, scale, tidx, False)
            # Only now, as the bias needs registers.
            start_product(score, acc_dP, tSrdO[None, None, None, tile], tSrV[None, None, None, state.index], False)
            if const_expr(self.has_mask):
                apply_key_mask(acc_S, sM[0, None, state.index], tidx)
            if keys_left < self.tile_n:
                mask_tail(acc_S, keys_left, tidx)
            self.exponentiate(acc_S, s_stats, tidx)
            warpgroup.wait_group(0)
            self.score_gradient(acc_S, acc_dP, acc_dB, s_stats, tidx)
            rdS.store(cute.make_tensor(acc_dP.iterator, rdS.layout).load().to(self.dtype))
            start_product(to_dq, acc_dQ, rdS, tGrK[None, None, None, state.index], False)
            pipe.consumer_wait(ahead)
            ahead_q = tSrQ[None, None, None, ahead.index * q_tiles + wg]
            start_product(score, acc_S, ahead_q, tSrK[None, None, None, ahead.index], False)
            ahead.advance()
            warpgroup.wait_group(1)
            release_after_reads(pipe, state)
            state.advance()
            self.send(acc_dQ, exchange, i, wg, rank, tidx)
            if i > 0:
                row = slab + (i - 1) * slabs
                self.add_up(exchange, i - 1, mdQ, scale, crop, (batch, row, head), q_tile, wg, rank, tidx)
            warpgroup.wait_group(0)
        pipe.consumer_release(state)
        last = row_count - 1
        self.add_up(exchange, last, mdQ, scale, crop, (batch, slab + last * slabs, head), q_tile, wg, rank, tidx)
        if const_expr(self.has_dbias):
            self.store_dbias(acc_dB, mdBias, (slab, batch, head), q_tile, rank, crop, tidx)

    @cute.jit
    def exponentiate(self, acc_S, s_stats, tidx: Int32):
        """acc_S becomes P against the saved LSE, which is subtracted first where it is huge; 0 where there is no query."""
        scores = rows_view(acc_S)
        first = (tidx // 32) * 16 + (tidx % 32) // 4
        shift = [s_stats[2, first + 8 * i] for i in range(2)]
        if cute.arch.vote_any_sync((shift[0] != 0.0) | (shift[1] != 0.0)):
            for i in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tile_n // 4):
                    scores[i, n] += shift[i]
        for i in cutlass.range_constexpr(2):
            lse2 = s_stats[0, first + 8 * i]
            for n in cutlass.range_constexpr(self.tile_n // 4):
                scores[i, n] = cute.math.exp2(scores[i, n] * LOG2_E - lse2, fastmath=True)

    @cute.jit
    def score_gradient(self, acc_P, acc_dP, acc_dB, s_stats, tidx: Int32):
        """acc_dP becomes dS = P * (dP - delta); acc_dB sums it over the rows."""
        p, dp, db = rows_view(acc_P), rows_view(acc_dP), rows_view(acc_dB)
        for i in cutlass.range_constexpr(2):
            delta = s_stats[1, (tidx // 32) * 16 + (tidx % 32) // 4 + 8 * i]
            for n in cutlass.range_constexpr(self.tile_n // 4):
                ds = p[i, n] * (dp[i, n] - delta)
                dp[i, n] = ds
                if const_expr(self.has_dbias):
                    db[i, n] = db[i, n] + ds

    # ---- device: dQ through the cluster -------------------------------------------------------------------------
    def swizzled(self, row: Int32, group: Int32) -> Int32:
        """Where a query's group of 8 channels lies: rows would else all begin in the same bank."""
        groups = self.tile_hdim // 8
        return group ^ ((row // 2) % 2) if groups == 2 else group ^ (row % groups)

    @cute.jit
    def send(self, acc_dQ, exchange, i: Int32, wg: Int32, rank: Int32, tidx: Int32):
        """Send this CTA's part of dQ of its row number i to the CTAs of the cluster, each its slice of the queries."""
        full, empty, sent, received = exchange
        buffer = (i % BUFFERS) * self.warpgroups + wg
        if i >= BUFFERS:
            # All CTAs have added up what this buffer held two rows ago, so it has left here and there is room there.
            cute.arch.mbarrier_wait(empty + buffer, (i // BUFFERS - 1) % 2)
        base = sent + buffer * (Q_ROWS * self.tile_hdim)
        parts, first = rows_view(acc_dQ), (tidx // 32) * 16 + (tidx % 32) // 4
        for r in cutlass.range_constexpr(2):
            row = first + 8 * r
            for g in cutlass.range_constexpr(self.tile_hdim // 8):
                offset = row * self.tile_hdim + 8 * self.swizzled(row, g) + 2 * (tidx % 4)
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = parts[r, 2 * g], parts[r, 2 * g + 1]
                cute.autovec_copy(pair, cute.make_tensor((base + offset).align(8), cute.make_layout(2)))
        cute.arch.fence_view_async_shared()
        warpgroup_sync(wg)
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            lane = tidx % 32
            if lane == 0:
                own = cutlass.min(self.slice_rows, Q_ROWS - rank * self.slice_rows) * (4 * self.tile_hdim)
                cute.arch.mbarrier_arrive_and_expect_tx(full + buffer, own * (self.cluster - 1))
            # Its own part stays: memcheck calls a copy through the cluster's window into the same CTA out of bounds.
            if (lane < self.cluster) & (lane != rank):
                theirs = cutlass.min(self.slice_rows, Q_ROWS - lane * self.slice_rows) * (4 * self.tile_hdim)
                target = received + (buffer * self.cluster + rank) * self.slice_floats
                copy_to_cta(target, base + lane * self.slice_floats, full + buffer, lane, theirs)

    @cute.jit
    def add_up(self, exchange, i: Int32, mdQ, scale, crop, coord, q_tile, wg: Int32, rank: Int32, tidx: Int32):
        """dQ of this CTA's queries of row number i: the parts in the order of the ranks, scaled, rounded, stored."""
        full, empty, sent, received = exchange
        batch, row, head = coord
        buffer = (i % BUFFERS) * self.warpgroups + wg
        cute.arch.mbarrier_wait(full + buffer, (i // BUFFERS) % 2)
        # Floats from the start of what is sent: those of this CTA's own part, and those of what came.
        own = buffer * (Q_ROWS * self.tile_hdim) + rank * self.slice_floats
        came = (received.toint() - sent.toint()) // 4 + buffer * (self.cluster * self.slice_floats)
        for t in cutlass.range_constexpr(-(-self.slice_floats // 256)):
            at = 2 * (tidx + 128 * t)
            in_slice, channel = at // self.tile_hdim, at % self.tile_hdim
            query = rank * self.slice_rows + in_slice
            if (in_slice < self.slice_rows) & (query < Q_ROWS):
                total = cute.make_rmem_tensor(2, Float32)
                total.fill(0.0)
                for c in cutlass.range_constexpr(self.cluster):
                    part = cute.make_rmem_tensor(2, Float32)
                    offset = came + c * self.slice_floats
                    if c == rank:
                        offset = own
                    source = cute.make_tensor((sent + (offset + at)).align(8), cute.make_layout(2))
                    cute.autovec_copy(source, part)
                    total.store(total.load() + part.load())
                total.store(total.load() * scale)
                rounded = cute.make_rmem_tensor(2, self.dtype)
                rounded.store(total.load().to(self.dtype))
                position = q_tile * Q_ROWS + query
                channel = 8 * self.swizzled(query, channel // 8) + channel % 8
                if (position < crop) & (channel < mdQ.shape[4]):
                    line = mdQ[batch, row, head, position, None]
                    cute.autovec_copy(rounded, cute.make_tensor((line.iterator + channel).align(4), cute.make_layout(2)))
        # Read by ordinary loads, next written by bulk copies: see release_after_reads.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if tidx % 32 < self.cluster:
            arrive_at_cta(empty + buffer, tidx % 32)

    @cute.jit
    def store_dbias(self, acc_dB, mdBias, coord, q_tile, rank, crop, tidx: Int32):
        """The sums over this slab's rows, to the slab's plane."""
        slab, batch, head = coord
        sums = rows_view(acc_dB)
        for i in cutlass.range_constexpr(2):
            query = q_tile * Q_ROWS + (tidx // 32) * 16 + (tidx % 32) // 4 + 8 * i
            if query < crop:
                line = mdBias[slab, batch, head, query, None]
                for n in cutlass.range_constexpr(self.tile_n // 8):
                    key = rank * self.tile_n + 8 * n + 2 * (tidx % 4)
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair[0], pair[1] = sums[i, 2 * n], sums[i, 2 * n + 1]
                    if key < mdBias.shape[4]:
                        cute.autovec_copy(pair, cute.make_tensor((line.iterator + key).align(8), cute.make_layout(2)))


@cute.jit
def copy_to_cta(target, source, barrier, cta: Int32, size: Int32):
    """Bulk copy of `size` bytes of shared memory to the same-named place of another CTA, counted by that CTA's barrier."""
    cute.arch.inline_ptx(
        "{{ .reg .b32 there, bar; mapa.shared::cluster.u32 there, {$r0}, {$r3}; mapa.shared::cluster.u32 bar, {$r2}, {$r3}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [{$r1}], {$r4}, [bar]; }}",
        read_only_args=[target.toint(), source.toint(), barrier.toint(), cta, size],
    )


@cute.jit
def arrive_at_cta(barrier, cta: Int32):
    """Arrive at the same-named barrier of another CTA, after everything this thread did."""
    cute.arch.inline_ptx(
        "{{ .reg .b32 bar; mapa.shared::cluster.u32 bar, {$r0}, {$r1}; "
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [bar]; }}",
        read_only_args=[barrier.toint(), cta],
    )


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic shapes; returns the DSL's compiled function."""
    x = SymbolicOperands(variant)
    kernel = TriangleAttentionBackwardTileSm90(variant, config, registers)
    plane = None
    if variant["dbias"]:
        plane = x.tensor(Float32, (cute.sym_int(), x.batch, x.heads, x.crop, cute.sym_int(divisibility=4)), 4)
    return cute.compile(
        kernel, x.wide(), x.wide(), x.wide(), x.bias(), x.mask(), x.wide(), x.stats(), x.wide(), plane,
        Float32(1.0), Int32(1), Int32(1), x.stream(), options=options,
    )
