"""Triangle attention backward, key side, for sm_90a: dK and dV of every row, one pass over the queries.

    P = exp(scale * Q K^T + bias + mask - LSE),  dP = dO V^T,  dS = P * (dP - delta)
    dV = P^T dO,  dK = scale * dS^T Q

Layouts (5-d tensors through TMA with the caller's strides):
    q, k, v, dout, dk, dv   (B, I, H, N, D)        16-bit
    bias                    (B, H, N, N)           16-bit or float32
    mask                    (B, I, Npad)           float32, natural log units
    stats                   (B, I, H, 3, Nstat)    float32, Nstat >= N rounded up to tile_m, see backward_stats_sm90.py

One task is (b, i, h, 64 * W keys). Everything is computed transposed, keys as the rows of the MMA: S^T = K Q^T and
dP^T = V dO^T give P^T and dS^T in registers in exactly the layout in which they are the A operands of dV += P^T dO and
dK += dS^T Q. The logits are rounded as in the forward: product in float32, one FMA with scale and bias, then the mask.

Warp roles as in the forward: warpgroup 0 issues TMA, W consumer warpgroups own 64 keys each.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from tpf_jit.templates.common.epilogue import store_tile
from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.mma import start_product
from tpf_jit.templates.common.scores import add_bias, apply_key_mask
from tpf_jit.templates.common.tma import (
    SymbolicOperands,
    bias_matrix_first,
    checked_storage,
    consumer_state,
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
STAT_PLANES = 3
KEY_ROWS = 64  # keys of one consumer warpgroup: the M of wgmma


class TriangleAttentionBackwardKeySm90:
    """The key-side kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype, self.bias_dtype = DTYPES[variant["dtype"]], DTYPES[variant["bias_dtype"]]
        self.tile_hdim, self.has_mask = variant["tile_hdim"], variant["mask"]
        self.tile_m, self.warpgroups, self.stages = config.tile_m, config.consumer_warpgroups, config.stages
        self.ctas_per_sm = config.ctas_per_sm
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)
        self.task_keys = KEY_ROWS * self.warpgroups

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        m, d, w = self.tile_m, self.tile_hdim, self.warpgroups
        self.mma_score = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            atom_layout_mnk=(1, 1, 1), tiler_mn=(KEY_ROWS, m),
        )
        self.mma_grad = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            atom_layout_mnk=(1, 1, 1), tiler_mn=(KEY_ROWS, d), a_source=warpgroup.OperandSource.RMEM,
        )
        self.kv_layout = sm90.make_smem_layout_a(row_major, (KEY_ROWS, m, d), self.dtype, w)
        self.q_layout = sm90.make_smem_layout_b(row_major, (KEY_ROWS, m, d), self.dtype, self.stages)
        self.qt_layout = sm90.make_smem_layout_b(col_major, (KEY_ROWS, d, m), self.dtype, self.stages)
        self.b_layout = sm90.make_smem_layout_epi(self.bias_dtype, row_major, (m, KEY_ROWS), self.stages * w)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (KEY_ROWS, d), w)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_kv: cute.struct.MemRange[Int64, 2]
            bar_q: cute.struct.MemRange[Int64, 2 * self.stages]
            bar_do: cute.struct.MemRange[Int64, 2 * self.stages]
            stats: cute.struct.Align[cute.struct.MemRange[Float32, stage_floats(STAT_PLANES * self.tile_m) * self.stages], 128]
            k: smem_area(self.dtype, self.kv_layout)
            v: smem_area(self.dtype, self.kv_layout)
            q: smem_area(self.dtype, self.q_layout)
            do: smem_area(self.dtype, self.q_layout)
            b: smem_area(self.bias_dtype, self.b_layout)
            o: smem_area(self.dtype, self.o_layout)

        capacity = cutlass.memory.get_smem_capacity_in_bytes("sm_90") // self.ctas_per_sm
        return checked_storage(Storage, capacity)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor, mBias: cute.Tensor, mMask: cute.Tensor | None,
        mdO: cute.Tensor, mStats: cute.Tensor, mdK: cute.Tensor, mdV: cute.Tensor,
        scale: Float32, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        keys, queries = (KEY_ROWS, self.tile_hdim), (self.tile_m, self.tile_hdim)
        atom, stats_tile = cpasync.make_tiled_tma_atom, (STAT_PLANES, self.tile_m)
        loads = (
            atom(load, matrix_first(mK), one_stage(self.kv_layout), keys),
            atom(load, matrix_first(mV), one_stage(self.kv_layout), keys),
            atom(load, matrix_first(mQ), one_stage(self.q_layout), queries),
            atom(load, matrix_first(mdO), one_stage(self.q_layout), queries),
            atom(load, bias_matrix_first(mBias), one_stage(self.b_layout), (self.tile_m, KEY_ROWS)),
            atom(load, matrix_first(mStats), cute.make_layout(stats_tile, stride=(self.tile_m, 1)), stats_tile),
        )
        stores = tuple(atom(store, matrix_first(t), one_stage(self.o_layout), keys) for t in (mdK, mdV))
        batch, rows, heads, crop = mQ.shape[0], mQ.shape[1], mQ.shape[2], mQ.shape[3]
        key_blocks = cute.ceil_div(crop, self.task_keys)
        tasks = key_blocks * heads * rows * batch
        self.kernel(loads, stores, mMask, scale, crop, heads, rows, key_blocks, tasks).launch(
            grid=(cutlass.min(tasks, num_ctas * self.ctas_per_sm), 1, 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.ctas_per_sm, preferred_smem_carveout=100,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self, loads, stores, mMask, scale: Float32, crop: Int32, heads: Int32, rows: Int32, key_blocks: Int32, tasks: Int32,
    ):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in (*loads, *stores):
                cpasync.prefetch_descriptor(atom)
        Storage = self._storage()
        sm = cutlass.memory.SmemAllocator().allocate(Storage)
        sK, sV = smem_tensor(sm.k, self.kv_layout), smem_tensor(sm.v, self.kv_layout)
        sQ, sdO, sB = smem_tensor(sm.q, self.q_layout), smem_tensor(sm.do, self.q_layout), smem_tensor(sm.b, self.b_layout)
        sQt, sdOt, sO = smem_tensor(sm.q, self.qt_layout), smem_tensor(sm.do, self.qt_layout), smem_tensor(sm.o, self.o_layout)
        stats_layout = cute.make_layout(
            (STAT_PLANES, self.tile_m, self.stages), stride=(self.tile_m, 1, stage_floats(STAT_PLANES * self.tile_m))
        )
        sStats = sm.stats.get_tensor(stats_layout)

        warps, q_bytes = 4 * self.warpgroups, tile_bytes(self.q_layout, self.dtype)
        pipe_kv = tma_ring(sm.bar_kv, 1, 2 * self.warpgroups * tile_bytes(self.kv_layout, self.dtype), warps)
        # Q, bias and statistics arrive together, dO (needed later in a step) alone.
        bias_bytes = self.warpgroups * tile_bytes(self.b_layout, self.bias_dtype)
        pipe_q = tma_ring(sm.bar_q, self.stages, q_bytes + bias_bytes + 4 * STAT_PLANES * self.tile_m, warps)
        pipe_do = tma_ring(sm.bar_do, self.stages, q_bytes, warps, last=True)
        query_tiles = cute.ceil_div(crop, self.tile_m)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                tiles = (sK, sV, sQ, sdO, sB, sStats)
                self.load(pipe_kv, pipe_q, pipe_do, loads, tiles, heads, rows, key_blocks, tasks, query_tiles)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.mma(
                pipe_kv, pipe_q, pipe_do, stores, (sK, sV, sQ, sdO, sQt, sdOt, sB, sStats, sO), mMask,
                scale, crop, heads, rows, key_blocks, tasks, query_tiles,
            )

    @cute.jit
    def decode(self, task: Int32, heads: Int32, rows: Int32, key_blocks: Int32):
        """task -> (key block, head, row, batch); key blocks fastest, so that Q and dO of the rows in flight stay in L2."""
        rest, key_block = task // key_blocks, task % key_blocks
        rest, head = rest // heads, rest % heads
        return key_block, head, rest % rows, rest // rows

    # ---- device: producer ---------------------------------------------------------------------------------------
    @cute.jit
    def load(self, pipe_kv, pipe_q, pipe_do, loads, tiles, heads, rows, key_blocks, tasks, query_tiles):
        (tma_k, gK), (tma_v, gV), (tma_q, gQ), (tma_do, gdO), (tma_b, gB), (tma_s, gS) = loads
        sK, sV, sQ, sdO, sB, sStats = tiles
        keys, queries, rest = (KEY_ROWS, self.tile_hdim), (self.tile_m, self.tile_hdim), (None, 0, None, None, None)
        tKs, tKg = partition(tma_k, sK, gK, keys, rest)
        tVs, tVg = partition(tma_v, sV, gV, keys, rest)
        tQs, tQg = partition(tma_q, sQ, gQ, queries, rest)
        tOs, tOg = partition(tma_do, sdO, gdO, queries, rest)
        tBs, tBg = partition(tma_b, sB, gB, (self.tile_m, KEY_ROWS), (None, None, None, None))
        tSs, tSg = partition(tma_s, sStats, gS, (STAT_PLANES, self.tile_m), (0, None, None, None, None))
        kv_state, state = producer_state(1), producer_state(self.stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            key_block, head, row, batch = self.decode(task, heads, rows, key_blocks)
            pipe_kv.producer_acquire(kv_state)
            bar = pipe_kv.producer_get_barrier(kv_state)
            for w in cutlass.range_constexpr(self.warpgroups):
                block = key_block * self.warpgroups + w
                cute.copy(tma_k, tKg[None, block, head, row, batch], tKs[None, w], tma_bar_ptr=bar)
                cute.copy(tma_v, tVg[None, block, head, row, batch], tVs[None, w], tma_bar_ptr=bar)
            kv_state.advance()
            for j in cutlass.range(query_tiles, unroll=1):
                pipe_q.producer_acquire(state)
                bar = pipe_q.producer_get_barrier(state)
                cute.copy(tma_q, tQg[None, j, head, row, batch], tQs[None, state.index], tma_bar_ptr=bar)
                for w in cutlass.range_constexpr(self.warpgroups):
                    cute.copy(tma_b, tBg[None, j, key_block * self.warpgroups + w, head, batch],
                              tBs[None, state.index * self.warpgroups + w], tma_bar_ptr=bar)
                cute.copy(tma_s, tSg[None, j, head, row, batch], tSs[None, state.index], tma_bar_ptr=bar)
                pipe_do.producer_acquire(state)
                bar = pipe_do.producer_get_barrier(state)
                cute.copy(tma_do, tOg[None, j, head, row, batch], tOs[None, state.index], tma_bar_ptr=bar)
                state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe_kv.producer_tail(kv_state)
        pipe_q.producer_tail(state.clone())
        pipe_do.producer_tail(state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def mma(
        self, pipe_kv, pipe_q, pipe_do, stores, tiles, mMask, scale, crop, heads, rows, key_blocks, tasks, query_tiles,
    ):
        sK, sV, sQ, sdO, sQt, sdOt, sB, sStats, sO = tiles
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        tidx = cute.arch.thread_idx()[0] - 128 * (wg + 1)
        score, grad = self.mma_score, self.mma_grad
        tSrK, tSrV = (score.make_fragment_A(score.get_slice(0).partition_A(t)) for t in (sK, sV))
        tSrQ, tSrdO = (score.make_fragment_B(score.get_slice(0).partition_B(t)) for t in (sQ, sdO))
        tGrQ, tGrdO = (grad.make_fragment_B(grad.get_slice(0).partition_B(t)) for t in (sQt, sdOt))
        s_shape, d_shape = score.partition_shape_C((KEY_ROWS, self.tile_m)), grad.partition_shape_C((KEY_ROWS, self.tile_hdim))
        acc_S, acc_dP, acc_dK, acc_dV = (cute.make_rmem_tensor(shape, Float32) for shape in (s_shape, s_shape, d_shape, d_shape))
        rP, rdS = (grad.make_fragment_A(grad.partition_shape_A((KEY_ROWS, self.tile_m))) for _ in range(2))
        key_mask = cute.make_rmem_tensor(2, Float32)
        key_mask.fill(0.0)

        kv_state, state = consumer_state(1), consumer_state(self.stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            key_block, head, row, batch = self.decode(task, heads, rows, key_blocks)
            if const_expr(self.has_mask):
                key0 = (key_block * self.warpgroups + wg) * KEY_ROWS + (tidx // 32) * 16 + (tidx % 32) // 4
                for i in cutlass.range_constexpr(2):
                    key_mask[i] = -Float32.inf
                    if key0 + 8 * i < crop:
                        key_mask[i] = mMask[batch, row, key0 + 8 * i]
            acc_dK.fill(0.0)
            acc_dV.fill(0.0)
            pipe_kv.consumer_wait(kv_state)
            for _ in cutlass.range(query_tiles, unroll=1):
                # S^T = K Q^T and dP^T = V dO^T
                pipe_q.consumer_wait(state)
                start_product(score, acc_S, tSrK[None, None, None, wg], tSrQ[None, None, None, state.index], False)
                pipe_do.consumer_wait(state)
                start_product(score, acc_dP, tSrV[None, None, None, wg], tSrdO[None, None, None, state.index], False)
                warpgroup.wait_group(1)
                add_bias(acc_S, sB[None, None, state.index * self.warpgroups + wg], score, scale, tidx, True)
                self.probabilities(acc_S, sStats[0, None, state.index], sStats[2, None, state.index], key_mask, tidx)
                rP.store(cute.make_tensor(acc_S.iterator, rP.layout).load().to(self.dtype))
                warpgroup.wait_group(0)
                # dV += P^T dO
                start_product(grad, acc_dV, rP, tGrdO[None, None, None, state.index], True)
                self.score_gradient(acc_S, acc_dP, sStats[1, None, state.index], tidx)
                rdS.store(cute.make_tensor(acc_dP.iterator, rdS.layout).load().to(self.dtype))
                # dK += dS^T Q
                start_product(grad, acc_dK, rdS, tGrQ[None, None, None, state.index], True)
                warpgroup.wait_group(0)
                pipe_do.consumer_release(state)
                release_after_reads(pipe_q, state)
                state.advance()
            pipe_kv.consumer_release(kv_state)
            kv_state.advance()
            acc_dK.store(acc_dK.load() * scale)
            for grad_acc, (tma, g) in ((acc_dK, stores[0]), (acc_dV, stores[1])):
                rounded = cute.make_rmem_tensor(grad_acc.shape, self.dtype)
                rounded.store(grad_acc.load().to(self.dtype))
                g_tile = cute.local_tile(
                    g, (KEY_ROWS, self.tile_hdim), (key_block * self.warpgroups + wg, 0, head, row, batch)
                )
                store_tile(rounded, grad, tidx, wg, sO, tma, g_tile)
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def probabilities(self, acc_S, s_lse2, s_shift, key_mask, tidx: Int32):
        """acc_S (keys x queries), logits as the forward rounds them, becomes P^T against the saved LSE."""
        scores = rows_view(acc_S)
        if const_expr(self.has_mask):
            for i in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tile_m // 4):
                    # A select, not a sum: NaN in an excluded key must not spread.
                    scores[i, n] = -Float32.inf if key_mask[i] == -Float32.inf else scores[i, n] + key_mask[i]
        apply_key_mask(acc_S, s_shift, tidx)  # subtracts the LSE first where it is huge; usually one vote
        for n in cutlass.range_constexpr(self.tile_m // 4):
            lse2 = s_lse2[8 * (n // 2) + 2 * (tidx % 4) + n % 2]
            for i in cutlass.range_constexpr(2):
                scores[i, n] = cute.math.exp2(scores[i, n] * LOG2_E - lse2, fastmath=True)

    @cute.jit
    def score_gradient(self, acc_P, acc_dP, sDelta, tidx: Int32):
        """acc_dP becomes dS^T = P^T * (dP^T - delta)."""
        p, dp = rows_view(acc_P), rows_view(acc_dP)
        for n in cutlass.range_constexpr(self.tile_m // 4):
            delta = sDelta[8 * (n // 2) + 2 * (tidx % 4) + n % 2]
            for i in cutlass.range_constexpr(2):
                dp[i, n] = p[i, n] * (dp[i, n] - delta)


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic shapes; returns the DSL's compiled function."""
    x = SymbolicOperands(variant)
    kernel = TriangleAttentionBackwardKeySm90(variant, config, registers)
    return cute.compile(
        kernel, x.wide(), x.wide(), x.wide(), x.bias(), x.mask(), x.wide(), x.stats(), x.wide(), x.wide(),
        Float32(1.0), Int32(1), x.stream(), options=options,
    )
