"""Triangle multiplicative update, back, for sm_90a: both LayerNorms, output projection, gate and residual in one pass.

    out = [residual +] sigmoid(LN(z) g_weight^T + g_bias) * (LN(x) p_weight^T + p_bias)

Layouts:
    z, residual, out        (B, N, N, C)        bfloat16; residual may be absent or z, and out may be z
    x                       (B, D, N, P)        bfloat16, channel-major, P >= N a multiple of 8
    norm weights, biases    (C,) for z, (D,) for x      float32
    p_weight (C, D), g_weight (C, C)            bfloat16; their biases (C,) float32 or absent
    stats                   (B, N, N, 2)        float32: mean and reciprocal deviation of every pair of x; or absent

A tile is 64 pairs (i, j) of one i; a CTA takes W tiles at once, one for each of its W consumer warpgroups, which use the same
weights. x lies in shared memory as it comes, pairs contiguous, and is read by wgmma transposed.

Warp roles as in the front: warpgroup 0 issues TMA, warpgroup 1 normalises the tiles of z and x where they lie, the W others
multiply, gate and store.
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
from tpf_jit.templates.common.norm import keep_statistics, normalise_pair
from tpf_jit.templates.common.tma import (
    checked_storage,
    consumer_state,
    one_stage,
    partition,
    producer_state,
    release_after_reads,
    smem_area,
    smem_tensor,
    tile_bytes,
    tma_ring,
)

LOG2_E = math.log2(math.e)
ROWS = 64  # pairs of one tile: the M of wgmma


class TriangleMultiplicationBackSm90:
    """The back kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.hidden = variant["channels"], variant["hidden"]
        self.has_bias, self.has_residual, self.has_stats = variant["bias"], variant["residual"], variant["stats"]
        self.tile_c, self.tile_k, self.warpgroups = config.tile_c, config.tile_k, config.consumer_warpgroups
        self.stages, self.w_stages = config.stages, config.weight_stages
        self.producer_registers, self.norm_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 2)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        row_major, col_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        c, k, tiles = self.tile_c, self.tile_k, self.stages * self.warpgroups
        self.mma_g, self.mma_x = (
            sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, major, OperandMajorMode.K, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, c),
            )
            for major in (OperandMajorMode.K, OperandMajorMode.MN)
        )
        self.z_layout = sm90.make_smem_layout_a(row_major, (ROWS, c, self.channels), self.dtype, tiles)
        self.x_layout = sm90.make_smem_layout_a(col_major, (ROWS, c, self.hidden), self.dtype, tiles)
        self.w_layout = sm90.make_smem_layout_b(row_major, (ROWS, c, k), self.dtype, self.w_stages)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, row_major, (ROWS, c), self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_in: cute.struct.MemRange[Int64, 2 * self.stages]
            bar_w: cute.struct.MemRange[Int64, 2 * self.w_stages]
            bar_norm: cute.struct.MemRange[Int64, self.stages]
            norm_z: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.channels], 128]
            norm_x: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.hidden], 128]
            bias: cute.struct.Align[cute.struct.MemRange[Float32, 2 * self.channels], 128]
            z: smem_area(self.dtype, self.z_layout)
            x: smem_area(self.dtype, self.x_layout)
            w: smem_area(self.dtype, self.w_layout)
            o: smem_area(self.dtype, self.o_layout)

        return checked_storage(Storage, cutlass.memory.get_smem_capacity_in_bytes("sm_90"))

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mX: cute.Tensor, mNormZW: cute.Tensor, mNormZB: cute.Tensor, mNormXW: cute.Tensor, mNormXB: cute.Tensor,
        mP: cute.Tensor, mPBias: cute.Tensor | None, mG: cute.Tensor, mGBias: cute.Tensor | None,
        mResidual: cute.Tensor | None, mOut: cute.Tensor, mStats: cute.Tensor | None, eps: Float32, num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self._setup()
        load, store, atom = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp(), cpasync.make_tiled_tma_atom
        # (B, i, j, C) seen as (j, C, i, B), and (B, D, i, P) as (P, D, i, B).
        z, out = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (mZ, mOut))
        x = cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[3, 1, 2, 0]))
        weights = (self.tile_c, self.tile_k)
        loads = (
            atom(load, z, one_stage(self.z_layout), (ROWS, self.channels)),
            atom(load, x, one_stage(self.x_layout), (ROWS, self.hidden)),
            atom(load, mP, one_stage(self.w_layout), weights), atom(load, mG, one_stage(self.w_layout), weights),
        )
        stores = atom(store, out, one_stage(self.o_layout), (ROWS, self.tile_c))
        batch, crop = mZ.shape[0], mZ.shape[1]
        blocks = cute.ceil_div(crop, ROWS)
        tiles = blocks * crop * batch
        tasks = cute.ceil_div(tiles, self.warpgroups)
        vectors = (mNormZW, mNormZB, mNormXW, mNormXB, mPBias, mGBias)
        self.kernel(loads, stores, vectors, mResidual, mStats, eps, crop, blocks, tiles, tasks).launch(
            grid=(cutlass.min(tasks, num_ctas), 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(
        self, loads, stores, vectors, mResidual, mStats, eps: Float32, crop: Int32, blocks: Int32, tiles: Int32, tasks: Int32,
    ):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom, _ in (*loads, stores):
                cpasync.prefetch_descriptor(atom)
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        sZ, sX = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.x, self.x_layout)
        sW, sO = smem_tensor(sm.w, self.w_layout), smem_tensor(sm.o, self.o_layout)
        sNormZ = sm.norm_z.get_tensor(cute.make_layout((self.channels, 2)))
        sNormX = sm.norm_x.get_tensor(cute.make_layout((self.hidden, 2)))
        sBias = sm.bias.get_tensor(cute.make_layout((self.channels, 2)))
        for i in cutlass.range(cute.arch.thread_idx()[0], self.channels, self.threads, unroll=1):
            sNormZ[i, 0], sNormZ[i, 1] = vectors[0][i], vectors[1][i]
            if const_expr(self.has_bias):
                sBias[i, 0], sBias[i, 1] = vectors[4][i], vectors[5][i]
        for i in cutlass.range(cute.arch.thread_idx()[0], self.hidden, self.threads, unroll=1):
            sNormX[i, 0], sNormX[i, 1] = vectors[2][i], vectors[3][i]

        normed, warps = sm.bar_norm.data_ptr(), 4 * self.warpgroups
        if warp_idx == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(normed + i, 4)  # every warp of the warpgroup that normalises
        pair_bytes = tile_bytes(self.z_layout, self.dtype) + tile_bytes(self.x_layout, self.dtype)
        pipe = tma_ring(sm.bar_in, self.stages, self.warpgroups * pair_bytes, warps)
        pipe_w = tma_ring(sm.bar_w, self.w_stages, tile_bytes(self.w_layout, self.dtype), warps, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        sizes = (crop, blocks, tiles, tasks)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(pipe, pipe_w, loads, (sZ, sX, sW), sizes)
        elif warp_idx < 8:
            cute.arch.setmaxregister_decrease(self.norm_registers)
            self.normalise(pipe, normed, (sZ, sX, sNormZ, sNormX), mStats, eps, sizes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.project(pipe, pipe_w, normed, (sZ, sX, sW, sO, sBias), stores, mResidual, sizes)

    @cute.jit
    def decode(self, tile: Int32, crop: Int32, blocks: Int32):
        """tile -> (block of j, i, batch)."""
        rest, block = tile // blocks, tile % blocks
        return block, rest % crop, rest // crop

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
                block, i, batch = self.decode(cutlass.min(task * self.warpgroups + w, tiles - 1), crop, blocks)
                cute.copy(tma_z, tZg[None, block, i, batch], tZs[None, state.index * self.warpgroups + w], tma_bar_ptr=bar)
                cute.copy(tma_x, tXg[None, block, i, batch], tXs[None, state.index * self.warpgroups + w], tma_bar_ptr=bar)
            state.advance()
            for c in cutlass.range(self.channels // self.tile_c, unroll=1):
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
        pipe_w.producer_tail(w_state)

    # ---- device: LayerNorms -------------------------------------------------------------------------------------
    @cute.jit
    def normalise(self, pipe, normed, smem, mStats, eps: Float32, sizes):
        """LN of the pairs of a stage in place, float32 inside: of z along its rows, of x across its columns."""
        sZ, sX, sNormZ, sNormX = smem
        crop, blocks, tiles, tasks = sizes
        tidx = cute.arch.thread_idx()[0] - 128
        lanes = min(8, 1 << (self.channels // 8).bit_length() - 1)
        lane, local = tidx % lanes, tidx // lanes
        pairs_a_pass = 128 // lanes
        state = consumer_state(self.stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            pipe.consumer_wait(state)
            for w in cutlass.range_constexpr(self.warpgroups):
                stage = state.index * self.warpgroups + w
                for step in cutlass.range(ROWS // pairs_a_pass, unroll=1):
                    row = sZ[step * pairs_a_pass + local, None, stage]
                    normalise_pair(row, sNormZ, eps, lane, self.channels, lanes, self.dtype)
                pair, mean, inverse = self.normalise_columns(sX[None, None, stage], sNormX, eps, tidx)
                if const_expr(self.has_stats):
                    block, i, batch = self.decode(cutlass.min(task * self.warpgroups + w, tiles - 1), crop, blocks)
                    for e in cutlass.range_constexpr(2):
                        j = block * ROWS + pair + e
                        if (tidx % 32 < 8) & (j < crop):
                            keep_statistics(mStats, (batch, i, j), mean[e], inverse[e])
            # Written by ordinary stores, read by wgmma.
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if tidx % 32 == 0:
                cute.arch.mbarrier_arrive(normed + state.index)
            state.advance()

    @cute.jit
    def normalise_columns(self, x: cute.Tensor, sNorm: cute.Tensor, eps: Float32, tidx: Int32):
        """LN of 64 pairs along D. x: (64, D), pairs contiguous. A warp has 16 pairs: a thread two of them and a quarter of the
        channels (a warp reads 0, 2, 4, 6 or 1, 3, 5, 7 of eight at a time, whose swizzled places lie in different banks). Returns
        the first of the two, their means and their reciprocal deviations."""
        pair = (tidx // 32) * 16 + 2 * (tidx % 8)
        first = 2 * ((tidx % 32) // 8)
        sums = cute.make_rmem_tensor(2, Float32)
        sums.fill(0.0)
        for d in cutlass.range(0, self.hidden, 8, unroll=2):
            for odd in cutlass.range_constexpr(2):
                sums.store(sums.load() + self.two(x, pair, d + first + odd).load())
        mean = cute.make_rmem_tensor(2, Float32)
        for e in cutlass.range_constexpr(2):
            mean[e] = self.over_channels(sums[e]) * (1.0 / self.hidden)
        sums.fill(0.0)
        for d in cutlass.range(0, self.hidden, 8, unroll=2):
            for odd in cutlass.range_constexpr(2):
                centred = self.two(x, pair, d + first + odd).load() - mean.load()
                sums.store(sums.load() + centred * centred)
        inverse = cute.make_rmem_tensor(2, Float32)
        for e in cutlass.range_constexpr(2):
            inverse[e] = cute.math.rsqrt(self.over_channels(sums[e]) * (1.0 / self.hidden) + eps, fastmath=True)
        for d in cutlass.range(0, self.hidden, 8, unroll=2):
            for odd in cutlass.range_constexpr(2):
                channel = d + first + odd
                centred = self.two(x, pair, channel).load() - mean.load()
                rounded = cute.make_rmem_tensor(2, self.dtype)
                rounded.store((centred * inverse.load() * sNorm[channel, 0] + sNorm[channel, 1]).to(self.dtype))
                cute.autovec_copy(rounded, cute.local_tile(x[None, channel], (2,), (pair // 2,)))
        return pair, mean, inverse

    @cute.jit
    def two(self, x: cute.Tensor, pair: Int32, channel: Int32) -> cute.Tensor:
        """One channel of two neighbouring pairs, float32."""
        raw, wide = cute.make_rmem_tensor(2, self.dtype), cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.local_tile(x[None, channel], (2,), (pair // 2,)), raw)
        wide.store(raw.load().to(Float32))
        return wide

    @cute.jit
    def over_channels(self, value: Float32) -> Float32:
        """Sum over the four threads that share a pair: lanes 8 apart."""
        value += cute.arch.shuffle_sync_bfly(value, 8)
        return value + cute.arch.shuffle_sync_bfly(value, 16)

    # ---- device: projection and gate ----------------------------------------------------------------------------
    @cute.jit
    def project(self, pipe, pipe_w, normed, smem, stores, mResidual, sizes):
        sZ, sX, sW, sO, sBias = smem
        crop, blocks, tiles, tasks = sizes
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - 2)
        tidx = cute.arch.thread_idx()[0] - 128 * (wg + 2)
        mma_g, mma_x, (tma, gO) = self.mma_g, self.mma_x, stores
        tZ = mma_g.make_fragment_A(mma_g.get_slice(0).partition_A(sZ))
        tX = mma_x.make_fragment_A(mma_x.get_slice(0).partition_A(sX))
        tW = mma_g.make_fragment_B(mma_g.get_slice(0).partition_B(sW))
        shape = mma_g.partition_shape_C((ROWS, self.tile_c))
        acc_g, acc_x = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        state, w_state = consumer_state(self.stages), consumer_state(self.w_stages)
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            tile = task * self.warpgroups + wg
            block, i, batch = self.decode(cutlass.min(tile, tiles - 1), crop, blocks)
            place = state.index * self.warpgroups + wg
            cute.arch.mbarrier_wait(normed + state.index, state.phase)
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
                        warpgroup.wait_group(0)
                        pipe_w.consumer_release(w_state)
                        w_state.advance()
                self.gate(acc_x, acc_g, sBias, c, tidx)
                if const_expr(self.has_residual):
                    self.add_residual(acc_x, mResidual, (batch, i, block), c, crop, tidx)
                if tile < tiles:
                    rounded = cute.make_rmem_tensor(shape, self.dtype)
                    rounded.store(acc_x.load().to(self.dtype))
                    target = cute.local_tile(gO, (ROWS, self.tile_c), (block, c, i, batch))
                    store_tile(rounded, mma_g, tidx, wg, sO, tma, target)
            release_after_reads(pipe, state)
            state.advance()
        if cute.arch.make_warp_uniform(tidx // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def gate(self, acc_x, acc_g, sBias: cute.Tensor, c: Int32, tidx: Int32):
        """acc_x becomes sigmoid(acc_g + bias) * (acc_x + bias)."""
        x, g = rows_view(acc_x), rows_view(acc_g)
        for n in cutlass.range_constexpr(self.tile_c // 4):
            channel = c * self.tile_c + 8 * (n // 2) + 2 * (tidx % 4) + n % 2
            for r in cutlass.range_constexpr(2):
                if const_expr(self.has_bias):
                    x[r, n], g[r, n] = x[r, n] + sBias[channel, 0], g[r, n] + sBias[channel, 1]
                odds = cute.math.exp2(g[r, n] * -LOG2_E, fastmath=True)
                x[r, n] = x[r, n] * cute.arch.rcp_approx(1.0 + odds)

    @cute.jit
    def add_residual(self, acc, mResidual, where, c: Int32, crop: Int32, tidx: Int32):
        """acc += residual, read where the thread's own results go."""
        batch, i, block = where
        values = rows_view(acc)
        for r in cutlass.range_constexpr(2):
            j = block * ROWS + (tidx // 32) * 16 + (tidx % 32) // 4 + 8 * r
            if j < crop:
                line = mResidual[batch, i, j, None]
                for n in cutlass.range_constexpr(self.tile_c // 8):
                    raw = cute.make_rmem_tensor(2, self.dtype)
                    channel = c * self.tile_c + 8 * n + 2 * (tidx % 4)
                    cute.autovec_copy(cute.make_tensor((line.iterator + channel).align(4), cute.make_layout(2)), raw)
                    values[r, 2 * n] = values[r, 2 * n] + raw[0].to(Float32)
                    values[r, 2 * n + 1] = values[r, 2 * n + 1] + raw[1].to(Float32)


def build(variant: dict, config, registers: tuple[int, int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    dtype, channels, hidden = DTYPES[variant["dtype"]], variant["channels"], variant["hidden"]
    batch, crop, padded = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)

    def tensor(shape):
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=16)

    def vector(size: int):
        return cute.runtime.make_fake_tensor(Float32, (size,), (1,), assumed_align=4)

    def weight(rows: int, columns: int):
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), (columns, 1), assumed_align=16)

    def pairs():
        return tensor((batch, crop, crop, channels))

    def stats():
        if not variant["stats"]:
            return None
        strides = (*(cute.sym_int64(divisibility=2) for _ in range(3)), 1)
        return cute.runtime.make_fake_tensor(Float32, (batch, crop, crop, 2), strides, assumed_align=8)

    bias = (lambda: vector(channels)) if variant["bias"] else (lambda: None)
    kernel = TriangleMultiplicationBackSm90(variant, config, registers)
    return cute.compile(
        kernel, pairs(), tensor((batch, hidden, crop, padded)),
        vector(channels), vector(channels), vector(hidden), vector(hidden),
        weight(channels, hidden), bias(), weight(channels, channels), bias(), pairs() if variant["residual"] else None, pairs(),
        stats(),
        Float32(1e-5), Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
    )
