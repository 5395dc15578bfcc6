"""Triangle multiplicative update, products, for sm_90a: one N x N x N matrix product for every channel.

    nt   out[b, d, i, j] = sum_k left[b, d, i, k] * right[b, d, j, k]
    tn   out[b, d, i, j] = sum_k left[b, d, k, i] * right[b, d, k, j]
    nn   out[b, d, i, j] = sum_k left[b, d, i, k] * right[b, d, k, j]

Layouts:
    left, right, out    (B, D, N, P)    bfloat16, unit stride along P. Where columns are summed or become columns of out, those
                                        from N on must be zero in one operand and finite in the other

A task is 64 * W by tile_n results of one channel; each of W consumer warpgroups owns 64 rows. Tasks of a channel follow each
other, so that the channels in flight stay in L2. CTAs of a cluster have tasks below each other, and each fetches its share of the
columns' operand for all. Operands whose rows are summed are read transposed, as wgmma can for 16-bit operands in shared memory.
The sum over k has a fixed order: no split.

Warp roles: of warpgroup 0, one warp fetches; the W others multiply.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from tpf_jit.templates.common.fragments import DTYPES
from tpf_jit.templates.common.rings import acquire_stage, drain_ring, initialise_ring, ring_of, wait_stage
from tpf_jit.templates.common.tma import (
    consumer_state,
    one_stage,
    partition,
    producer_state,
    smem_area,
    smem_tensor,
    tile_bytes,
)
from tpf_jit.templates.triangle_multiplication import launch_sm90 as launch
from tpf_jit.templates.triangle_multiplication.launch_sm90 import COL_MAJOR, K_MAJOR, MN_MAJOR, ROW_MAJOR, ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    consumer_place,
    follow,
    operand_a,
    operand_b,
    prefetch,
    store_rounded,
    wait_for_stores,
)

STORED = 64  # rows and columns stored at a time
BUFFERS = 2  # for results on their way out, of each warpgroup


class TriangleMultiplicationProductSm90:
    """The product kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        # Whether the sum runs along the rows of left, and along the rows of right.
        self.left_rows, self.right_rows = {"nt": (False, False), "tn": (True, True), "nn": (False, True)}[variant["product"]]
        self.tile_n, self.tile_k, self.warpgroups = config.tile_n, config.tile_k, config.consumer_warpgroups
        self.stages = config.stages
        self.cluster = config.cluster
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        a_major, b_major = (MN_MAJOR if rows else K_MAJOR for rows in (self.left_rows, self.right_rows))
        a_order, b_order = (COL_MAJOR if rows else ROW_MAJOR for rows in (self.left_rows, self.right_rows))
        n, k, c = self.tile_n, self.tile_k, self.cluster
        self.mma, self.mma_stored = (
            launch.warpgroup_mma(self.dtype, columns, a_major=a_major, b_major=b_major) for columns in (n, STORED)
        )
        self.a_layout = sm90.make_smem_layout_a(a_order, (ROWS, n, k), self.dtype, self.stages * self.warpgroups)
        self.b_layout = sm90.make_smem_layout_b(b_order, (ROWS, n, k), self.dtype, self.stages)
        self.share_layout = sm90.make_smem_layout_b(b_order, (ROWS, n // c, k), self.dtype, self.stages * c)
        self.x_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, STORED), BUFFERS * self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar: cute.struct.MemRange[Int64, 2 * self.stages]
            a: smem_area(self.dtype, self.a_layout)
            b: smem_area(self.dtype, self.b_layout)
            x: smem_area(self.dtype, self.x_layout)

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(self, mLeft: cute.Tensor, mRight: cute.Tensor, mOut: cute.Tensor, num_ctas: Int32, stream: cuda.CUstream):
        self._setup()
        batch, hidden, crop = mOut.shape[0], mOut.shape[1], mOut.shape[2]
        # The operand's axis of the result, the summed axis, channel, batch.
        a, b = (
            cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 2, 1, 0] if rows else [2, 3, 1, 0]))
            for t, rows in ((mLeft, self.left_rows), (mRight, self.right_rows))
        )
        b_copy = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else cpasync.CopyBulkTensorTileG2SOp()
        b_share = (self.tile_n // self.cluster, self.tile_k)
        loads = (
            launch.tma_load(a, self.a_layout, (ROWS, self.tile_k)),
            cpasync.make_tiled_tma_atom(b_copy, b, one_stage(self.share_layout), b_share),
        )
        stores = launch.tma_store(launch.of_pairs(mOut), self.x_layout, (ROWS, STORED))
        m_blocks, n_blocks = cute.ceil_div(crop, ROWS * self.warpgroups * self.cluster), cute.ceil_div(crop, self.tile_n)
        tasks = m_blocks * n_blocks * hidden * batch
        ctas = self.cluster * cutlass.max(1, cutlass.min(tasks, num_ctas // self.cluster))
        self.kernel(loads, stores, hidden, m_blocks, n_blocks, cute.ceil_div(crop, self.tile_k), tasks).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), cluster=(self.cluster, 1, 1), stream=stream, min_blocks_per_mp=1,
            use_pdl=True,
        )

    # ---- device -------------------------------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, hidden: Int32, m_blocks: Int32, n_blocks: Int32, k_tiles: Int32, tasks: Int32):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sA, sB, sX = smem_tensor(sm.a, self.a_layout), smem_tensor(sm.b, self.b_layout), smem_tensor(sm.x, self.x_layout)
        ring = ring_of(sm.bar.data_ptr(), self.stages)
        if warp_idx == 0:
            with cute.arch.elect_one():
                initialise_ring(ring, self.stages, 4 * self.warpgroups * self.cluster)
        cute.arch.mbarrier_init_fence()
        self.meet()
        rank, first = Int32(0), cute.arch.block_idx()[0]
        if const_expr(self.cluster > 1):
            rank, first = cute.arch.block_idx_in_cluster(), first // self.cluster
        sizes = (hidden, m_blocks, n_blocks, k_tiles)
        turns = (first, tasks, cute.arch.grid_dim()[0] // self.cluster)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load(ring, loads, sA, smem_tensor(sm.b, self.share_layout), sizes, turns, rank)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.multiply(ring, sA, sB, sX, stores, sizes, turns, rank)
        if const_expr(self.cluster > 1):
            # No CTA may exit while another can still write to its memory or arrive on its barriers.
            self.meet()

    @cute.jit
    def meet(self):
        """Barrier of the cluster."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

    @cute.jit
    def decode(self, task: Int32, rank: Int32, hidden: Int32, m_blocks: Int32, n_blocks: Int32):
        """task of this CTA -> (block of rows, block of columns, channel, batch)."""
        rest, m = task // m_blocks, task % m_blocks
        rest, n = rest // n_blocks, rest % n_blocks
        return m * self.cluster + rank, n, rest % hidden, rest // hidden

    @cute.jit
    def load(self, ring, loads, sA, sShares, sizes, turns, rank: Int32):
        (tma_a, gA), (tma_b, gB) = loads
        hidden, m_blocks, n_blocks, k_tiles = sizes
        first, tasks, step = turns
        tAs, tAg = partition(tma_a, sA, gA, (ROWS, self.tile_k), (None, None, None, None))
        tBs, tBg = partition(tma_b, sShares, gB, (self.tile_n // self.cluster, self.tile_k), (None, None, None, None))
        stage_bytes = self.warpgroups * tile_bytes(self.a_layout, self.dtype) + tile_bytes(self.b_layout, self.dtype)
        state = producer_state(self.stages)
        for task in cutlass.range(first, tasks, step, unroll=1):
            m, n, channel, batch = self.decode(task, rank, hidden, m_blocks, n_blocks)
            for k in cutlass.range(k_tiles, unroll=1):
                bar = acquire_stage(ring, state.index, state.phase, stage_bytes)
                for w in cutlass.range_constexpr(self.warpgroups):
                    source = (None, m * self.warpgroups + w, k, channel, batch)
                    cute.copy(tma_a, tAg[source], tAs[None, state.index * self.warpgroups + w], tma_bar_ptr=bar)
                source, target = (None, n * self.cluster + rank, k, channel, batch), state.index * self.cluster + rank
                if const_expr(self.cluster > 1):
                    every = Int16((1 << self.cluster) - 1)
                    cute.copy(tma_b, tBg[source], tBs[None, target], tma_bar_ptr=bar, mcast_mask=every)
                else:
                    cute.copy(tma_b, tBg[source], tBs[None, target], tma_bar_ptr=bar)
                state.advance()
        drain_ring(ring, Int32(0), state, self.stages)

    @cute.jit
    def multiply(self, ring, sA, sB, sX, stores, sizes, turns, rank: Int32):
        hidden, m_blocks, n_blocks, k_tiles = sizes
        first, tasks, step = turns
        wg, tidx = consumer_place()
        mma, (tma, gX) = self.mma, stores
        tA, tB = operand_a(mma, sA), operand_b(mma, sB)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tile_n)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        state, done, pieces = consumer_state(self.stages), consumer_state(self.stages), Int32(0)
        for task in cutlass.range(first, tasks, step, unroll=1):
            m, n, channel, batch = self.decode(task, rank, hidden, m_blocks, n_blocks)
            acc.fill(0.0)
            for k in cutlass.range(k_tiles, unroll=1):
                wait_stage(ring, state.index, state.phase)
                warpgroup.fence()
                for depth in cutlass.range_constexpr(self.tile_k // 16):
                    a = tA[None, None, depth, state.index * self.warpgroups + wg]
                    cute.gemm(mma, acc, a, tB[None, None, depth, state.index], acc)
                warpgroup.commit_group()
                state.advance()
                if k > 0:
                    warpgroup.wait_group(1)
                    self.release(ring, done.index, tidx)
                    done.advance()
            warpgroup.wait_group(0)
            self.release(ring, done.index, tidx)
            done.advance()
            self.store(acc, sX, tma, gX, (m * self.warpgroups + wg, n, channel, batch), wg, pieces, tidx)
            pieces += self.tile_n // STORED
        wait_for_stores(tidx)

    @cute.jit
    def release(self, ring, number: Int32, tidx: Int32):
        """Give back a stage that only wgmma has read, to all who fill it."""
        if const_expr(self.cluster > 1):
            if tidx % 32 < self.cluster:
                cute.arch.mbarrier_arrive(ring[1] + number, tidx % 32)
        elif tidx % 32 == 0:
            cute.arch.mbarrier_arrive(ring[1] + number)

    @cute.jit
    def store(self, acc, sX, tma, gX, where, wg, before: Int32, tidx: Int32):
        """Round and store a task's results; before: pieces this warpgroup has stored, as buffers take turns across tasks."""
        rows, n, channel, batch = where
        shape = self.mma_stored.partition_shape_C((ROWS, STORED))
        for piece in cutlass.range_constexpr(self.tile_n // STORED):
            rounded = cute.make_rmem_tensor(shape, self.dtype)
            values = cute.make_tensor(acc.iterator + piece * cute.size(shape), cute.make_layout(shape))
            rounded.store(values.load().to(self.dtype))
            target = cute.local_tile(gX, (ROWS, STORED), (rows, n * (self.tile_n // STORED) + piece, channel, batch))
            buffer = wg * BUFFERS + (before + piece) % BUFFERS
            store_rounded(rounded, sX, buffer, BUFFERS, self.mma_stored, tma, target, wg, tidx, False)


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    sizes = (cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8))
    operands = [launch.strided(DTYPES[variant["dtype"]], sizes, 8) for _ in range(3)]
    return launch.compiled(TriangleMultiplicationProductSm90(variant, config, registers), *operands, options=options)
