"""Triangle attention forward for sm_90a: O = softmax(scale * Q K^T + bias + mask) V, with LSE and output residual.

Layouts (all 5-d tensors are read and written through TMA, any strides that are multiples of 16 bytes):
    q, k, v, out, residual   (B, I, H, N, D)   16-bit, D contiguous
    bias                     (B, H, N, N)      16-bit or float32, shared by all I rows
    mask                     (B, I, Npad)      float32, added to the scores (natural log units), -inf excludes a key
    lse                      (B, I, H, N)      float32, natural logarithm
    lse_low                  (B, I, H, N)      float32, with the residual: what rounding lost of the LSE (rows full of additive
                                               masks of -1e9 have LSE -1e9 + ln N, of which float32 keeps -1e9)

One task is (b, h, 64 * W queries, R rows): a CTA keeps R rows of queries in shared memory and walks the keys in tiles
of tile_n; every bias tile it loads serves all R rows. Persistent grid, static round-robin over the tasks.

Warp roles: warpgroup 0 is the producer (one warp issues TMA, its registers are given away); each of the W consumer
warpgroups owns 64 queries. A consumer step, for one key tile of one row:
    1. score   S = Q K^T (wgmma, both operands in shared memory), then S * scale + bias in float32.
    2. softmax base 2 with a floating offset: m is the maximum of the tile, or of the row less 8 log2 units if that is
               more. The largest P of every tile is then exactly 1 and the next ones have long mantissas, which cuts
               the error that rounding P to 16 bits brings (N = 768: output error 1.94e-3 against 2.06e-3 with the
               running maximum, and 2.27e-3 with an offset that is raised lazily). P stays in registers; the row sum is
               taken over the float32 P, which keeps the LSE exact to float32.
    3. value   O += P V (wgmma, A from registers), left in flight during the next step's score GEMM.

With the residual (training), P enters the product as the sum of two 16-bit numbers, so that O + residual is right to float32's
roundings; else delta = sum dO * (O + residual), and with it every dS of the row, would keep the error of P's rounding. Output
error: that of its own rounding alone.

Sources: online softmax (Milakov & Gimelshein 2018; FlashAttention-2/3); output residual from TurboPairFormer (arXiv 2610.05854).
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from tpf_jit.templates.common.epilogue import store_tile
from tpf_jit.templates.common.fragments import DTYPES, rows_view, stacked, widen_bf16
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
LN_2 = math.log(2.0)
OFFSET_DROP = 8.0 * LN_2  # how far m may float below the row maximum; O and the sum stay within 2^8 of their usual size
SUBTRACT_FIRST = 4096.0  # above, the rounding of m * log2 e would change P by more than 2^-12 of itself
Q_ROWS = 64         # queries of one consumer warpgroup: the M of wgmma


class TriangleAttentionForwardSm90:
    """The kernel of one (variant, config): see templates/triangle_attention/config.py for the parameters."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.bias_dtype = DTYPES[variant["bias_dtype"]]
        self.tile_hdim = variant["tile_hdim"]
        self.has_mask, self.has_residual = variant["mask"], variant["residual"]
        self.tile_n, self.warpgroups, self.rows = config.tile_n, config.consumer_warpgroups, config.rows_per_cta
        self.kv_stages, self.bias_stages, self.q_stages = config.kv_stages, config.bias_stages, config.q_stages
        self.ctas_per_sm, self.crop = config.ctas_per_sm, config.crop
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)
        self.task_queries = Q_ROWS * self.warpgroups
        self.q_tiles_per_stage = self.rows * self.warpgroups

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        n, d = self.tile_n, self.tile_hdim
        self.tiled_mma_qk = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.K, Float32,
            atom_layout_mnk=(1, 1, 1), tiler_mn=(Q_ROWS, n),
        )
        self.tiled_mma_pv = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32,
            atom_layout_mnk=(1, 1, 1), tiler_mn=(Q_ROWS, d), a_source=warpgroup.OperandSource.RMEM,
        )
        self.q_layout = sm90.make_smem_layout_a(row_major, (Q_ROWS, n, d), self.dtype, self.q_stages * self.q_tiles_per_stage)
        self.k_layout = sm90.make_smem_layout_b(row_major, (Q_ROWS, n, d), self.dtype, self.kv_stages)
        # V is loaded as (keys, D) rows and read by the MMA through its transposed view: the bytes are the same.
        self.v_layout = sm90.make_smem_layout_b(row_major, (Q_ROWS, n, d), self.dtype, self.kv_stages)
        self.vt_layout = sm90.make_smem_layout_b(col_major, (Q_ROWS, d, n), self.dtype, self.kv_stages)
        self.b_layout = sm90.make_smem_layout_epi(self.bias_dtype, row_major, (Q_ROWS, n), self.bias_stages * self.warpgroups)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (Q_ROWS, d), self.warpgroups)

    def _storage(self):
        mask_floats = self.kv_stages * stage_floats(self.tile_n) if self.has_mask else 4

        @cute.struct
        class Storage:
            bar_q: cute.struct.MemRange[Int64, 2 * self.q_stages]
            bar_k: cute.struct.MemRange[Int64, 2 * self.kv_stages]
            bar_v: cute.struct.MemRange[Int64, 2 * self.kv_stages]
            bar_b: cute.struct.MemRange[Int64, 2 * self.bias_stages]
            mask: cute.struct.Align[cute.struct.MemRange[Float32, mask_floats], 128]
            q: smem_area(self.dtype, self.q_layout)
            k: smem_area(self.dtype, self.k_layout)
            v: smem_area(self.dtype, self.vt_layout)
            b: smem_area(self.bias_dtype, self.b_layout)
            o: smem_area(self.dtype, self.o_layout)

        capacity = cutlass.memory.get_smem_capacity_in_bytes("sm_90") // self.ctas_per_sm
        return checked_storage(Storage, capacity)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor, mK: cute.Tensor, mV: cute.Tensor,  # (B, I, H, N, D)
        mBias: cute.Tensor,  # (B, H, N, N)
        mMask: cute.Tensor | None,  # (B, I, Npad) float32
        mO: cute.Tensor,  # (B, I, H, N, D)
        mR: cute.Tensor | None,  # (B, I, H, N, D)
        mLSE: cute.Tensor,  # (B, I, H, N) float32
        mLow: cute.Tensor | None,  # (B, I, H, N) float32
        scale: Float32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self._setup()
        q, k, v, o = (matrix_first(t) for t in (mQ, mK, mV, mO))
        bias = bias_matrix_first(mBias)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_q, gQ = cpasync.make_tiled_tma_atom(load, q, one_stage(self.q_layout), (Q_ROWS, self.tile_hdim))
        tma_k, gK = cpasync.make_tiled_tma_atom(load, k, one_stage(self.k_layout), (self.tile_n, self.tile_hdim))
        tma_v, gV = cpasync.make_tiled_tma_atom(load, v, one_stage(self.v_layout), (self.tile_n, self.tile_hdim))
        tma_b, gB = cpasync.make_tiled_tma_atom(load, bias, one_stage(self.b_layout), (Q_ROWS, self.tile_n))
        tma_o, gO = cpasync.make_tiled_tma_atom(store, o, one_stage(self.o_layout), (Q_ROWS, self.tile_hdim))
        tma_r, gR = None, None
        if const_expr(self.has_residual):
            tma_r, gR = cpasync.make_tiled_tma_atom(store, matrix_first(mR), one_stage(self.o_layout), (Q_ROWS, self.tile_hdim))
        tma_m, gM = None, None
        if const_expr(self.has_mask):
            m_layout = cute.make_layout((1, self.tile_n), stride=(self.tile_n, 1))
            tma_m, gM = cpasync.make_tiled_tma_atom(load, mask_matrix_first(mMask), m_layout, (1, self.tile_n))

        batch, rows, heads, crop = mQ.shape[0], mQ.shape[1], mQ.shape[2], mQ.shape[3]
        q_blocks = cute.ceil_div(crop, self.task_queries)
        row_groups = cute.ceil_div(rows, self.rows)
        tasks = q_blocks * heads * row_groups * batch
        grid = cutlass.min(tasks, num_ctas * self.ctas_per_sm)
        self.kernel(
            tma_q, gQ, tma_k, gK, tma_v, gV, tma_b, gB, tma_m, gM, tma_o, gO, tma_r, gR, mLSE, mLow,
            scale, crop, heads, rows, q_blocks, row_groups, tasks,
        ).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.ctas_per_sm, preferred_smem_carveout=100,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom, gQ: cute.Tensor, tma_k: cute.CopyAtom, gK: cute.Tensor,
        tma_v: cute.CopyAtom, gV: cute.Tensor, tma_b: cute.CopyAtom, gB: cute.Tensor,
        tma_m: cute.CopyAtom | None, gM: cute.Tensor | None,
        tma_o: cute.CopyAtom, gO: cute.Tensor, tma_r: cute.CopyAtom | None, gR: cute.Tensor | None,
        mLSE: cute.Tensor, mLow: cute.Tensor | None, scale: Float32, crop: Int32, heads: Int32, rows: Int32,
        q_blocks: Int32, row_groups: Int32, tasks: Int32,
    ):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in (tma_q, tma_k, tma_v, tma_b, tma_m, tma_o, tma_r):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)

        Storage = self._storage()
        sm = cutlass.memory.SmemAllocator().allocate(Storage)
        sQ, sK, sV = smem_tensor(sm.q, self.q_layout), smem_tensor(sm.k, self.k_layout), smem_tensor(sm.v, self.v_layout)
        sVt, sB, sO = smem_tensor(sm.v, self.vt_layout), smem_tensor(sm.b, self.b_layout), smem_tensor(sm.o, self.o_layout)
        sM = None
        if const_expr(self.has_mask):
            m_stages = cute.make_layout((1, self.tile_n, self.kv_stages), stride=(self.tile_n, 1, stage_floats(self.tile_n)))
            sM = sm.mask.get_tensor(m_stages)

        warps = 4 * self.warpgroups
        kv_bytes = tile_bytes(self.k_layout, self.dtype)
        pipe_q = tma_ring(sm.bar_q, self.q_stages, tile_bytes(self.q_layout, self.dtype) * self.q_tiles_per_stage, warps)
        pipe_k = tma_ring(sm.bar_k, self.kv_stages, kv_bytes + (4 * self.tile_n if self.has_mask else 0), warps)
        pipe_v = tma_ring(sm.bar_v, self.kv_stages, kv_bytes, warps)
        bias_bytes = tile_bytes(self.b_layout, self.bias_dtype) * self.warpgroups
        pipe_b = tma_ring(sm.bar_b, self.bias_stages, bias_bytes, warps, last=True)

        key_tiles = cute.ceil_div(crop, self.tile_n)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(
                    pipe_q, pipe_k, pipe_v, pipe_b, tma_q, gQ, sQ, tma_k, gK, sK, tma_v, gV, sV, tma_b, gB, sB,
                    tma_m, gM, sM, heads, q_blocks, row_groups, tasks, key_tiles,
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.mma(
                pipe_q, pipe_k, pipe_v, pipe_b, sQ, sK, sVt, sB, sM, sO, tma_o, gO, tma_r, gR, mLSE, mLow,
                scale, crop, heads, rows, q_blocks, row_groups, tasks, key_tiles,
            )

    @cute.jit
    def decode(self, task: Int32, heads: Int32, q_blocks: Int32, row_groups: Int32):
        """task -> (query block, head, row group, batch). Queries fastest, so that the K and V of the rows in flight
        and the whole bias stay in L2."""
        rest, q_block = task // q_blocks, task % q_blocks
        rest, head = rest // heads, rest % heads
        return q_block, head, rest % row_groups, rest // row_groups

    # ---- device: producer ---------------------------------------------------------------------------------------
    @cute.jit
    def load(
        self, pipe_q, pipe_k, pipe_v, pipe_b, tma_q, gQ, sQ, tma_k, gK, sK, tma_v, gV, sV, tma_b, gB, sB,
        tma_m, gM, sM, heads, q_blocks, row_groups, tasks, key_tiles,
    ):
        # Sources by (tile index, head, row, batch).
        keys, rest = (self.tile_n, self.tile_hdim), (None, 0, None, None, None)
        tQsQ, tQgQ = partition(tma_q, sQ, gQ, (Q_ROWS, self.tile_hdim), rest)
        tKsK, tKgK = partition(tma_k, sK, gK, keys, rest)
        tVsV, tVgV = partition(tma_v, sV, gV, keys, rest)
        tBsB, tBgB = partition(tma_b, sB, gB, (Q_ROWS, self.tile_n), (None, None, None, None))
        tMsM, tMgM = None, None
        if const_expr(self.has_mask):
            tMsM, tMgM = partition(tma_m, sM, gM, (1, self.tile_n), (0, None, None, None))

        q_state, b_state = producer_state(self.q_stages), producer_state(self.bias_stages)
        k_state, v_state = producer_state(self.kv_stages), producer_state(self.kv_stages)
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for task in cutlass.range(cta, tasks, ctas, unroll=1):
            q_block, head, row_group, batch = self.decode(task, heads, q_blocks, row_groups)
            row0 = row_group * self.rows
            pipe_q.producer_acquire(q_state)
            for r in cutlass.range_constexpr(self.rows):
                for w in cutlass.range_constexpr(self.warpgroups):
                    cute.copy(
                        tma_q, tQgQ[None, q_block * self.warpgroups + w, head, row0 + r, batch],
                        tQsQ[None, q_state.index * self.q_tiles_per_stage + r * self.warpgroups + w],
                        tma_bar_ptr=pipe_q.producer_get_barrier(q_state),
                    )
            q_state.advance()
            for j in cutlass.range(key_tiles, unroll=1):
                pipe_b.producer_acquire(b_state)
                for w in cutlass.range_constexpr(self.warpgroups):
                    cute.copy(
                        tma_b, tBgB[None, q_block * self.warpgroups + w, j, head, batch],
                        tBsB[None, b_state.index * self.warpgroups + w], tma_bar_ptr=pipe_b.producer_get_barrier(b_state),
                    )
                b_state.advance()
                for r in cutlass.range_constexpr(self.rows):
                    pipe_k.producer_acquire(k_state)
                    cute.copy(tma_k, tKgK[None, j, head, row0 + r, batch], tKsK[None, k_state.index],
                              tma_bar_ptr=pipe_k.producer_get_barrier(k_state))
                    if const_expr(self.has_mask):
                        cute.copy(tma_m, tMgM[None, j, row0 + r, batch], tMsM[None, k_state.index],
                                  tma_bar_ptr=pipe_k.producer_get_barrier(k_state))
                    k_state.advance()
                    pipe_v.producer_acquire(v_state)
                    cute.copy(tma_v, tVgV[None, j, head, row0 + r, batch], tVsV[None, v_state.index],
                              tma_bar_ptr=pipe_v.producer_get_barrier(v_state))
                    v_state.advance()
        # No CTA may exit while a consumer can still arrive on its barriers.
        pipe_q.producer_tail(q_state)
        pipe_b.producer_tail(b_state)
        pipe_k.producer_tail(k_state)
        pipe_v.producer_tail(v_state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def mma(
        self, pipe_q, pipe_k, pipe_v, pipe_b, sQ, sK, sVt, sB, sM, sO, tma_o, gO, tma_r, gR, mLSE, mLow,
        scale, crop, heads, rows, q_blocks, row_groups, tasks, key_tiles,
    ):
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 1)
        tidx = cute.arch.thread_idx()[0] - 128 * (wg + 1)
        mma_qk, mma_pv = self.tiled_mma_qk, self.tiled_mma_pv
        tSrQ = mma_qk.make_fragment_A(mma_qk.get_slice(0).partition_A(sQ))
        tSrK = mma_qk.make_fragment_B(mma_qk.get_slice(0).partition_B(sK))
        tOrV = mma_pv.make_fragment_B(mma_pv.get_slice(0).partition_B(sVt))
        acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((Q_ROWS, self.tile_n)), Float32)
        o_shape = mma_pv.partition_shape_C((Q_ROWS, self.tile_hdim))
        all_O = cute.make_rmem_tensor(self.rows * cute.size(o_shape), Float32)
        tOrP, tOrP_low = (mma_pv.make_fragment_A(mma_pv.partition_shape_A((Q_ROWS, self.tile_n))) for _ in range(2))
        row_top = cute.make_rmem_tensor(2 * self.rows, Float32)   # largest score so far, natural log units
        row_max = cute.make_rmem_tensor(2 * self.rows, Float32)   # offset m of P
        row_sum = cute.make_rmem_tensor(2 * self.rows, Float32)   # of this thread's columns only

        q_state, b_state = consumer_state(self.q_stages), consumer_state(self.bias_stages)
        k_state, v_state, v_done = (consumer_state(self.kv_stages) for _ in range(3))
        cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        for task in cutlass.range(cta, tasks, ctas, unroll=1):
            q_block, head, row_group, batch = self.decode(task, heads, q_blocks, row_groups)
            all_O.fill(0.0)
            row_sum.fill(0.0)
            row_top.fill(-Float32.inf)
            row_max.fill(-Float32.inf)
            pipe_q.consumer_wait(q_state)
            q_tile = q_state.index * self.q_tiles_per_stage + wg
            for j in cutlass.range(key_tiles, unroll=1):
                pipe_b.consumer_wait(b_state)
                for r in cutlass.range_constexpr(self.rows):
                    acc_O = stacked(all_O, r, o_shape)
                    sB_tile = sB[None, None, b_state.index * self.warpgroups + wg]
                    # 1. score
                    pipe_k.consumer_wait(k_state)
                    start_product(mma_qk, acc_S, tSrQ[None, None, None, q_tile + r * self.warpgroups],
                                  tSrK[None, None, None, k_state.index], False)
                    warpgroup.wait_group(0)  # also ends the P V of the step before
                    if const_expr(r > 0):
                        pipe_v.consumer_release(v_done)
                        v_done.advance()
                    else:
                        if j > 0:
                            pipe_v.consumer_release(v_done)
                            v_done.advance()
                    add_bias(acc_S, sB_tile, mma_qk, scale, tidx, False)
                    if const_expr(self.has_mask):
                        apply_key_mask(acc_S, sM[0, None, k_state.index], tidx)
                    if const_expr(self.crop == 0 or self.crop % self.tile_n != 0):
                        if (j + 1) * self.tile_n > crop:
                            mask_tail(acc_S, crop - j * self.tile_n, tidx)
                    if const_expr(r == self.rows - 1):
                        release_after_reads(pipe_b, b_state)
                    if const_expr(self.has_mask):
                        release_after_reads(pipe_k, k_state)
                    else:
                        pipe_k.consumer_release(k_state)
                    k_state.advance()
                    # 2. softmax
                    self.softmax_step(acc_S, acc_O, row_top, row_max, row_sum, r)
                    tOrP.store(cute.make_tensor(acc_S.iterator, tOrP.layout).load().to(self.dtype))
                    if const_expr(self.has_residual):
                        self.subtract_rounded(acc_S, tOrP)
                        tOrP_low.store(cute.make_tensor(acc_S.iterator, tOrP.layout).load().to(self.dtype))
                    # 3. value
                    pipe_v.consumer_wait(v_state)
                    start_product(mma_pv, acc_O, tOrP, tOrV[None, None, None, v_state.index], True)
                    if const_expr(self.has_residual):
                        start_product(mma_pv, acc_O, tOrP_low, tOrV[None, None, None, v_state.index], True)
                    v_state.advance()
                b_state.advance()
            pipe_q.consumer_release(q_state)
            q_state.advance()
            warpgroup.wait_group(0)
            pipe_v.consumer_release(v_done)
            v_done.advance()
            for r in cutlass.range_constexpr(self.rows):
                self.epilogue(
                    stacked(all_O, r, o_shape), row_max, row_sum, r, tidx, wg, sO, tma_o, gO, tma_r, gR, mLSE, mLow,
                    (q_block, head, row_group * self.rows + r, batch), crop, rows,
                )
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def softmax_step(self, acc_S, acc_O, row_top, row_max, row_sum, r: cutlass.Constexpr):
        """acc_S becomes P = exp(S - m) in float32, with the floating offset m = max(tile maximum, row maximum - drop)."""
        scores, outs = rows_view(acc_S), rows_view(acc_O)
        factor, offset = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for i in cutlass.range_constexpr(2):
            # Two chains a row halve the latency of the maximum.
            even, odd = scores[i, 0], scores[i, 1]
            for n in cutlass.range_constexpr(2, self.tile_n // 4, 2):
                even, odd = cute.arch.fmax(even, scores[i, n]), cute.arch.fmax(odd, scores[i, n + 1])
            tile_top = cute.arch.warp_reduction_max(cute.arch.fmax(even, odd), threads_in_group=4)
            old, top = row_max[2 * r + i], cute.arch.fmax(row_top[2 * r + i], tile_top)
            new = cute.arch.fmax(tile_top, top - OFFSET_DROP)
            # -inf: no key so far; the output and the sum are zero and any finite factor keeps them so.
            empty = new == -Float32.inf
            factor[i] = Float32(1.0) if empty else cute.math.exp2((old - new) * LOG2_E, fastmath=True)
            offset[i] = Float32(0.0) if empty else new
            row_top[2 * r + i], row_max[2 * r + i] = top, new
            for n in cutlass.range_constexpr(self.tile_hdim // 4):
                outs[i, n] *= factor[i]
        # P = exp2(S * log2 e - m * log2 e) is one FMA, off by the rounding of m * log2 e: a common factor of the row, but up to
        # 2^64 for a row of additive masks of -1e9. There m is subtracted first.
        largest = cute.arch.fmax(cute.arch.fmax(offset[0], -offset[0]), cute.arch.fmax(offset[1], -offset[1]))
        if cute.arch.vote_any_sync(largest > SUBTRACT_FIRST):
            for i in cutlass.range_constexpr(2):
                for n in cutlass.range_constexpr(self.tile_n // 4):
                    scores[i, n] -= offset[i]
                offset[i] = Float32(0.0)
        for i in cutlass.range_constexpr(2):
            scaled = offset[i] * LOG2_E
            for n in cutlass.range_constexpr(self.tile_n // 4):
                scores[i, n] = cute.math.exp2(scores[i, n] * LOG2_E - scaled, fastmath=True)
            even, odd = scores[i, 0], scores[i, 1]
            for n in cutlass.range_constexpr(2, self.tile_n // 4, 2):
                even, odd = even + scores[i, n], odd + scores[i, n + 1]
            row_sum[2 * r + i] = row_sum[2 * r + i] * factor[i] + (even + odd)

    @cute.jit
    def subtract_rounded(self, acc_P, rounded):
        """acc_P becomes what rounding took from P; both fragments have the same register order."""
        flat = cute.make_tensor(acc_P.iterator, cute.make_layout(cute.size(acc_P)))
        if const_expr(self.dtype is BFloat16):
            flat.store(flat.load() - widen_bf16(rounded).load())
        else:
            kept = cute.make_tensor(rounded.iterator, cute.make_layout(cute.size(rounded)))
            flat.store(flat.load() - kept.load().to(Float32))

    # ---- device: epilogue ---------------------------------------------------------------------------------------
    @cute.jit
    def epilogue(
        self, acc_O, row_max, row_sum, r: cutlass.Constexpr, tidx, wg, sO, tma_o, gO, tma_r, gR, mLSE, mLow,
        coord, crop, rows,
    ):
        q_block, head, row, batch = coord
        outs = rows_view(acc_O)
        query0 = (q_block * self.warpgroups + wg) * Q_ROWS + (tidx // 32) * 16 + (tidx % 32) // 4
        for i in cutlass.range_constexpr(2):
            total, m = cute.arch.warp_reduction_sum(row_sum[2 * r + i], threads_in_group=4), row_max[2 * r + i]
            empty = total == 0.0  # no key left: zeros and LSE -inf
            norm = Float32(0.0) if empty else cute.math.rcp(total)
            log_sum = cute.math.log2(total) * LN_2
            lse = -Float32.inf if empty else m + log_sum
            low = Float32(0.0) if empty else (m - lse) + log_sum
            if tidx % 4 == 0:
                if query0 + 8 * i < crop:
                    if row < rows:
                        mLSE[batch, row, head, query0 + 8 * i] = lse
                        if const_expr(self.has_residual):
                            mLow[batch, row, head, query0 + 8 * i] = low
            for n in cutlass.range_constexpr(self.tile_hdim // 4):
                outs[i, n] *= norm
        rounded = cute.make_rmem_tensor(acc_O.shape, self.dtype)
        rounded.store(acc_O.load().to(self.dtype))
        tile = ((Q_ROWS, self.tile_hdim), (q_block * self.warpgroups + wg, 0, head, row, batch))
        store_tile(rounded, self.tiled_mma_pv, tidx, wg, sO, tma_o, cute.local_tile(gO, *tile))
        if const_expr(self.has_residual):
            acc_O.store(acc_O.load() - rounded.load().to(Float32))
            rounded.store(acc_O.load().to(self.dtype))
            store_tile(rounded, self.tiled_mma_pv, tidx, wg, sO, tma_r, cute.local_tile(gR, *tile))


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic shapes; returns the DSL's compiled function."""
    x = SymbolicOperands(variant, config.crop)
    kernel = TriangleAttentionForwardSm90(variant, config, registers)
    residual, low = (x.wide(), x.lse()) if variant["residual"] else (None, None)
    return cute.compile(
        kernel, x.wide(), x.wide(), x.wide(), x.bias(), x.mask(), x.wide(), residual, x.lse(), low,
        Float32(1.0), Int32(1), x.stream(), options=options,
    )
