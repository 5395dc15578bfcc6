"""Triangle multiplicative update, front, for sm_90a, with pairs as the rows of the MMA. Computes what front_sm90.py does, with
the same calling convention; for weights that fit on an SM, or on up to eight.

A warpgroup takes a tile of 64 pairs (i, k) of one i into registers, as the operand of all its products, and gives the shared
memory back at once. So products read nothing but weights from shared memory, whose bandwidth they would else exceed, statistics
of the LayerNorm come from the same registers, and warpgroups need nothing of each other. Results are transposed on their way to
shared memory.

Where the weights are in parts, CTAs beside each other have one each, take the same tiles, and compute rows of their own; the
first keeps the statistics. Where they leave no room for a tile of every warpgroup, warpgroups share one or two buffers, which
are free as soon as a tile is in registers.

With two sets of accumulators, the products of one block of tile_h rows of the weights run while the gates of the one before are
computed; with one, other warpgroups' do.

Warp roles: of warpgroup 0, one warp for each of the W consumer warpgroups fetches its tiles, or the first all that are shared;
the first fetches the weights, once.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.norm import keep_statistics, operand_statistics
from tpf_jit.templates.common.rings import release_stage, wait_stage
from tpf_jit.templates.common.tiles import read_operand
from tpf_jit.templates.common.tma import (
    consumer_state,
    partition,
    producer_state,
    smem_area,
    smem_tensor,
    tile_bytes,
    tma_ring,
)
from tpf_jit.templates.triangle_multiplication import launch_sm90 as launch
from tpf_jit.templates.triangle_multiplication.launch_sm90 import REGISTERS, ROW_MAJOR, ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    MORE,
    consumer_place,
    ctas_of,
    decode,
    fill_more,
    follow,
    load_shared_tiles,
    load_tiles,
    more_of_pairs,
    operand_b,
    pair_of_thread,
    part_of_cta,
    prefetch,
    project_with_more,
    quick_sigmoid,
    rounds,
    shared_buffer,
    start_rings,
    store_rounded,
    tile_of_turn,
    tiles_by,
    wait_for_stores,
)

READ_COLUMNS = 32  # channels of z read at a time


class TriangleMultiplicationFrontRowsSm90:
    """The front kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.rows, self.has_mask = variant["channels"], 2 * variant["hidden"], variant["mask"]
        self.tile_h, self.warpgroups = config.tile_h, config.consumer_warpgroups
        self.z_stages, self.out_stages, self.sets = config.z_stages, config.out_stages, config.sets
        self.parts, self.own, self.piece = config.parts, self.rows // config.parts, config.piece
        self.shared = config.shared
        self.blocks = self.own // self.tile_h
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        h = self.tile_h
        self.mma = launch.warpgroup_mma(self.dtype, 2 * h, REGISTERS)
        # Of these two only the fragment is used.
        self.mma_read, self.mma_stored = (launch.warpgroup_mma(self.dtype, columns) for columns in (READ_COLUMNS, self.piece))
        self.z_layout = sm90.make_smem_layout_a(
            ROW_MAJOR, (ROWS, h, self.channels), self.dtype, self.shared or self.z_stages * self.warpgroups
        )
        # A block of weights is the rows of the values, then those of the gates; bulk copies fill both halves.
        self.chunk = launch.chunk_of(self.channels)
        self.chunks = self.channels // self.chunk
        self.w_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, 2 * h, self.channels), self.dtype, self.blocks)
        self.half_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, h, self.chunk), self.dtype, 2 * self.chunks * self.blocks)
        self.more_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, 2 * h, MORE), self.dtype, self.blocks)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (self.piece, ROWS), self.out_stages * self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_z: cute.struct.MemRange[Int64, 2 * self.z_stages * self.warpgroups]
            bar_w: cute.struct.MemRange[Int64, 2]
            z: smem_area(self.dtype, self.z_layout)
            w: smem_area(self.dtype, self.w_layout)
            more: smem_area(self.dtype, self.more_layout)
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
        load_z, stores, sizes, ctas = self.tiles(mZ, mFactors, num_ctas)
        loads = load_z, *(launch.tma_load(w, self.half_layout, (self.tile_h, self.chunk)) for w in (mP, mG))
        self.kernel(loads, stores, (mMask, mStats), mTerms, eps, sizes).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )

    @cute.jit
    def tiles(self, mZ: cute.Tensor, mFactors: cute.Tensor, num_ctas: Int32):
        """How tiles of z are loaded and those of the factors stored, what there is of them, and the grid."""
        load_z = launch.tma_load(launch.of_pairs(mZ), self.z_layout, (ROWS, self.channels))
        stores = launch.tma_store(launch.of_factors(mFactors), self.o_layout, (self.piece, ROWS))
        sizes = launch.tiles_of(mZ, ROWS)
        return load_z, stores, sizes, ctas_of(sizes[2], num_ctas, self.warpgroups, self.parts)

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, per_pair, mTerms, eps: Float32, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sZ, sO = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.o, self.o_layout)
        sW, sHalves = smem_tensor(sm.w, self.w_layout), smem_tensor(sm.w, self.half_layout)
        sMore = smem_tensor(sm.more, self.more_layout)
        for part in cutlass.range_constexpr(2):
            fill_more(sMore, mTerms, 2 * part, self.threads, part_of_cta(self.parts) * self.own, part, 2)
        cute.arch.fence_view_async_shared()

        (ring,) = start_rings(warp_idx, self.warpgroups, (sm.bar_z, self.z_stages))
        weight_bytes = self.blocks * tile_bytes(self.w_layout, self.dtype)
        pipe_w = tma_ring(sm.bar_w, 1, weight_bytes, 4 * self.warpgroups, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx == 0:
                self.load_weights(pipe_w, loads, sHalves)
            if warp_idx < (1 if self.shared else self.warpgroups):
                self.load(ring, loads[0], sZ, sizes, warp_idx)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.project(ring, pipe_w, (sZ, sW, sMore, sO), per_pair, stores, eps, sizes)

    # ---- device: producers --------------------------------------------------------------------------------------
    @cute.jit
    def load(self, ring, load_z, sZ, sizes, wg: Int32):
        """The tiles of one warpgroup, or all that are shared."""
        of_z = tiles_by(load_z, sZ, (ROWS, self.channels), (None, 0, None, None))
        bytes_of_z = tile_bytes(self.z_layout, self.dtype)
        if const_expr(self.shared):
            load_shared_tiles(((ring, of_z, bytes_of_z),), sizes, self.warpgroups, self.shared, self.parts)
        else:
            load_tiles(ring, (of_z,), sizes, wg, self.warpgroups, self.z_stages, bytes_of_z, self.parts)

    @cute.jit
    def load_weights(self, pipe_w, loads, sHalves):
        state = producer_state(1)
        pipe_w.producer_acquire(state)
        bar, first = pipe_w.producer_get_barrier(state), part_of_cta(self.parts) * self.blocks
        for part in cutlass.range_constexpr(2):
            tma, gW = loads[1 + part]
            tWs, tWg = partition(tma, sHalves, gW, (self.tile_h, self.chunk), (None, None))
            for block in cutlass.range(self.blocks, unroll=1):
                for c in cutlass.range_constexpr(self.chunks):
                    place = (block * self.chunks + c) * 2 + part
                    cute.copy(tma, tWg[None, first + block, c], tWs[None, place], tma_bar_ptr=bar)

    # ---- device: projections and gates --------------------------------------------------------------------------
    @cute.jit
    def project(self, ring, pipe_w, smem, per_pair, stores, eps: Float32, sizes):
        """pipe_w: of the weights' arrival; None where they are there."""
        sZ, sW, sMore, sO = smem
        mMask, mStats = per_pair
        crop, blocks, tiles = sizes
        wg, tidx = consumer_place()
        mma = self.mma
        weights = [operand_b(mma, t) for t in (sW, sMore)]
        shape = mma.partition_shape_C((ROWS, 2 * self.tile_h))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.sets)]
        operand, more_shape = (cute.make_layout(mma.partition_shape_A((ROWS, k))) for k in (self.channels, MORE))
        state = consumer_state(self.z_stages)
        if const_expr(pipe_w is not None):
            pipe_w.consumer_wait(consumer_state(1))
        for n in cutlass.range(rounds(tiles, self.warpgroups, wg, self.parts), unroll=1):
            block, i, batch = decode(tile_of_turn(n, self.warpgroups, wg, self.parts), crop, blocks)
            place = wg * self.z_stages + state.index
            wait_stage(ring, place, state.phase)
            buffer = shared_buffer(state.phase, wg, self.warpgroups, self.shared) if const_expr(self.shared) else place
            frag = read_operand(sZ[None, None, buffer], self.mma_read, tidx, self.channels, READ_COLUMNS, False)
            release_stage(ring, place)
            state.advance()
            of_pair = self.pairs(frag, mMask, mStats, (batch, i, block), eps, crop, tidx)
            more = more_of_pairs(of_pair, self.dtype, tidx)
            z = cute.make_tensor(frag.iterator, operand), cute.make_tensor(more.iterator, more_shape)
            for b in cutlass.range_constexpr(self.sets - 1):
                self.start(mma, accs[b], z, weights, b)
            for b in cutlass.range_constexpr(self.blocks):
                ahead = b + self.sets - 1
                if const_expr(ahead < self.blocks):
                    self.start(mma, accs[ahead % self.sets], z, weights, ahead)
                warpgroup.wait_group(min(self.sets, self.blocks - b) - 1)
                whole = (block + 1) * ROWS <= crop
                self.finish(accs[b % self.sets], of_pair, whole, sO, stores, (b, block, i, batch), wg, tidx)
        wait_for_stores(tidx)

    @cute.jit
    def start(self, mma, acc, z, weights, b: cutlass.Constexpr):
        """Issue the products of block b of the weights' rows."""
        warpgroup.fence()
        project_with_more(mma, acc, z, weights, b)
        warpgroup.commit_group()

    @cute.jit
    def pairs(self, frag, mMask, mStats, where, eps: Float32, crop: Int32, tidx: Int32):
        """((mean, rstd, factor), this thread's 2 pairs); the first two also to memory."""
        batch, i, block = where
        stats = operand_statistics(frag, eps, self.channels)
        of_pair = cute.make_rmem_tensor((3, 2), Float32)
        for r in cutlass.range_constexpr(2):
            k = block * ROWS + pair_of_thread(r, tidx)
            of_pair[0, r], of_pair[1, r], of_pair[2, r] = stats[0, r], stats[1, r], Float32(0.0)
            if k < crop:
                of_pair[2, r] = Float32(1.0)
                if const_expr(self.has_mask):
                    of_pair[2, r] = mMask[batch, i, k]
                if (tidx % 4 == 0) & (part_of_cta(self.parts) == 0):
                    keep_statistics(mStats, (batch, i, k), stats[0, r], stats[1, r])
        return of_pair

    @cute.jit
    def finish(self, acc, of_pair, whole, sO, stores, where, wg, tidx: Int32):
        """Values, the first half of acc's columns, times sigmoid of gates, the second, times the pair's factor: rounded, and
        stored transposed. acc stays (written in place, ptxas would serialise the products, C7511). whole: all pairs are there."""
        b, block, i, batch = where
        tma, gF = stores
        shape, pieces = self.mma_stored.partition_shape_C((ROWS, self.piece)), self.tile_h // self.piece
        for piece in cutlass.range_constexpr(pieces):
            values = cute.make_rmem_tensor(shape, Float32)
            self.gate(rows_view(acc), rows_view(values), piece * (self.piece // 4), of_pair)
            if const_expr(not self.has_mask):
                if not whole:
                    for r in cutlass.range_constexpr(2):
                        for n in cutlass.range_constexpr(self.piece // 4):
                            v = rows_view(values)
                            v[r, n] = Float32(0.0) if of_pair[2, r] == 0.0 else v[r, n]
            rounded = cute.make_rmem_tensor(shape, self.dtype)
            rounded.store(values.load().to(self.dtype))
            row = part_of_cta(self.parts) * (self.own // self.piece) + b * pieces + piece
            target = cute.local_tile(gF, (self.piece, ROWS), (row, block, i, batch))
            buffer = wg * self.out_stages + (b * pieces + piece) % self.out_stages
            store_rounded(rounded, sO, buffer, self.out_stages, self.mma_stored, tma, target, wg, tidx, True)

    @cute.jit
    def gate(self, acc, values, start: cutlass.Constexpr, of_pair):
        """From columns `start` of a thread's on; acc, values: `rows_view`s."""
        for n in cutlass.range_constexpr(0, self.piece // 4, 4):
            for r in cutlass.range_constexpr(2):
                half, factor = of_pair[1, r] * 0.5, of_pair[2, r]
                for c in cutlass.range_constexpr(4):
                    value = acc[r, start + n + c] * quick_sigmoid(acc[r, self.tile_h // 4 + start + n + c] * half, half)
                    if const_expr(self.has_mask):
                        # A select, not a product: what a masked or absent pair holds must not matter.
                        value = Float32(0.0) if factor == 0.0 else value * factor
                    values[r, n + c] = value


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    return launch.compiled(
        TriangleMultiplicationFrontRowsSm90(variant, config, registers), problem.pairs(), problem.mask(),
        *problem.weights(2 * problem.hidden, problem.channels), problem.factors(), problem.stats(), Float32(1e-5),
        options=options,
    )
