"""Triangle multiplicative update, front backward, for sm_90a: from the gradients of the factors and of LN(z) to that of z.

    p, s = value and sigmoid of the gate, from z;    dp = keep * d * s,    dg = dp * p * (1 - s)
    t = dzn + dp p_weight + dg g_weight;             dz = rstd * (t - mean(t) - zhat * mean(t zhat))

Layouts:
    z, dzn, dz              (B, N, N, C)            bfloat16; dzn is what the output's gate leaves, times the LayerNorm's weight
    z_stats                 (B, N, N, 2)            float32: mean, reciprocal deviation
    mask                    (B, N, N)               float32 or absent
    d                       (B, 2, D, N, P)         bfloat16
    p_weight, g_weight      (2 D, C)                bfloat16, folded with the LayerNorm's weight
    terms                   (2 D, 4)                float32: row sum and bias of p_weight, of g_weight

A tile is 64 pairs (i, k) of one i. z is multiplied as it lies; mean and bias enter the products as 16 columns more (see
`pieces_sm90.MORE`), rstd after them. Both products of a step of tile_h rows of the weights read the same weights in shared
memory, once along C and once across. Weights stay on the SM where they fit, else they come from L2 for every tile. The result
goes out where dzn came in. With two sets of accumulators, the projections of a step run while the gates before it are
differentiated.

Warp roles: of warpgroup 0, one warp for each of the W consumer warpgroups fetches its tiles, and one more the weights. Each
consumer warpgroup has tiles of its own, and where the weights stay none waits for another.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from tpf_jit.templates.common.fragments import DTYPES, rows_view
from tpf_jit.templates.common.mma import start_product
from tpf_jit.templates.common.rings import drain_ring, release_stage, wait_stage
from tpf_jit.templates.common.tiles import read_operand, read_tile, store_in_place, transposed_view, two_columns, write_tile
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
from tpf_jit.templates.triangle_multiplication.launch_sm90 import COL_MAJOR, MN_MAJOR, REGISTERS, ROW_MAJOR, ROWS, SHARED
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    LOG2_E,
    MORE,
    consumer_place,
    decode,
    fetch_statistics,
    fill_more,
    follow,
    load_stage,
    more_of_pairs,
    norm_gradients,
    operand_a,
    operand_b,
    pair_of_thread,
    prefetch,
    rounds,
    sigmoids,
    start_rings,
    tile_of_turn,
    tiles_by,
)

READ_COLUMNS = 32  # channels of z read at a time
UNROLLED = 8  # steps, at most


class TriangleMultiplicationFrontBackwardSm90:
    """The front's backward kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.rows, self.has_mask = variant["channels"], 2 * variant["hidden"], variant["mask"]
        self.tile_h, self.warpgroups = config.tile_h, config.consumer_warpgroups
        self.stages, self.pair_stages, self.w_stages = config.stages, config.pair_stages, config.weight_stages
        self.resident = self.w_stages >= self.rows // self.tile_h
        self.in_registers = config.operand_registers == 1  # z, as the operand of its products
        self.sets, self.steps = config.sets, self.rows // self.tile_h
        self.unrolled = max(n for n in range(1, UNROLLED + 1) if self.steps % n == 0)
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        c, h, tiles = self.channels, self.tile_h, self.pair_stages * self.warpgroups
        self.project = launch.warpgroup_mma(self.dtype, 2 * h, REGISTERS if self.in_registers else SHARED)
        self.project_more = launch.warpgroup_mma(self.dtype, 2 * h, REGISTERS)
        # Of these two only the fragments are used.
        self.read_d, self.read = (launch.warpgroup_mma(self.dtype, columns) for columns in (h, READ_COLUMNS))
        self.spread = launch.warpgroup_mma(self.dtype, c, REGISTERS, b_major=MN_MAJOR)
        self.z_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, h, c), self.dtype, tiles)
        self.t_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, c), tiles)
        # A step's weights are the rows of the values, then those of the gates; bulk copies fill both halves.
        self.chunk = launch.chunk_of(c)
        self.chunks = c // self.chunk
        self.w_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, 2 * h, c), self.dtype, self.w_stages)
        self.wt_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, c, 2 * h), self.dtype, self.w_stages)
        halves = 2 * self.chunks * self.w_stages
        self.half_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, h, self.chunk), self.dtype, halves)
        self.more_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, 2 * h, MORE), self.dtype, self.steps)
        self.d_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (h, ROWS), self.stages * self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_in: cute.struct.MemRange[Int64, 2 * self.pair_stages * self.warpgroups]
            bar_d: cute.struct.MemRange[Int64, 2 * self.stages * self.warpgroups]
            bar_w: cute.struct.MemRange[Int64, 2 * self.w_stages]
            z: smem_area(self.dtype, self.z_layout)
            t: smem_area(self.dtype, self.t_layout)
            w: smem_area(self.dtype, self.w_layout)
            more: smem_area(self.dtype, self.more_layout)
            d: smem_area(self.dtype, self.d_layout)

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mStats: cute.Tensor, mMask: cute.Tensor | None, mD: cute.Tensor, mDzn: cute.Tensor,
        mP: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor, mDz: cute.Tensor, num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        z, dzn, dz = (launch.of_pairs(t) for t in (mZ, mDzn, mDz))
        pairs, weights = (ROWS, self.channels), (self.tile_h, self.chunk)
        loads = (
            launch.tma_load(z, self.z_layout, pairs), launch.tma_load(dzn, self.t_layout, pairs),
            launch.tma_load(mP, self.half_layout, weights), launch.tma_load(mG, self.half_layout, weights),
            launch.tma_load(launch.of_factors(mD), self.d_layout, (self.tile_h, ROWS)),
        )
        stores = launch.tma_store(dz, self.t_layout, pairs)
        sizes = launch.tiles_of(mZ, ROWS)
        ctas = cutlass.min(cute.ceil_div(sizes[2], self.warpgroups), num_ctas)
        self.kernel(loads, stores, (mStats, mMask), mTerms, sizes).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, per_pair, mTerms, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sZ, sT, sD = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.t, self.t_layout), smem_tensor(sm.d, self.d_layout)
        sW, sWt = smem_tensor(sm.w, self.w_layout), smem_tensor(sm.w, self.wt_layout)
        sHalves, sMore = smem_tensor(sm.w, self.half_layout), smem_tensor(sm.more, self.more_layout)
        for place in cutlass.range_constexpr(2):
            fill_more(sMore, mTerms, 2 * place, self.threads, 0, place, 2)
        cute.arch.fence_view_async_shared()

        pair_bytes = tile_bytes(self.z_layout, self.dtype) + tile_bytes(self.t_layout, self.dtype)
        bytes_each = pair_bytes, tile_bytes(self.d_layout, self.dtype)
        ring, d_ring = start_rings(warp_idx, self.warpgroups, (sm.bar_in, self.pair_stages), (sm.bar_d, self.stages))
        pipe_w = tma_ring(sm.bar_w, self.w_stages, tile_bytes(self.w_layout, self.dtype), 4 * self.warpgroups, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx < self.warpgroups:
                self.load(ring, d_ring, loads, (sZ, sT, sD), sizes, warp_idx, bytes_each)
            elif warp_idx == self.warpgroups:
                self.load_weights(pipe_w, loads, sHalves, sizes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.differentiate((ring, d_ring, pipe_w), (sZ, sT, sW, sWt, sMore, sD), per_pair, stores, sizes)

    # ---- device: producers --------------------------------------------------------------------------------------
    @cute.jit
    def load(self, ring, d_ring, loads, smem, sizes, wg: Int32, bytes_each: cutlass.Constexpr):
        """The tiles of one warpgroup."""
        sZ, sT, sD = smem
        crop, blocks, tiles = sizes
        all_channels = (None, 0, None, None)
        pairs = (
            tiles_by(loads[0], sZ, (ROWS, self.channels), all_channels),
            tiles_by(loads[1], sT, (ROWS, self.channels), all_channels),
        )
        step = (tiles_by(loads[4], sD, (self.tile_h, ROWS), (None, None, None, None)),)
        state, d_state = producer_state(self.pair_stages), producer_state(self.stages)
        for n in cutlass.range(rounds(tiles, self.warpgroups, 0), unroll=1):
            # A tile beyond the last is the last again, and not stored.
            block, i, batch = decode(cutlass.min(tile_of_turn(n, self.warpgroups, wg), tiles - 1), crop, blocks)
            state = load_stage(ring, state, pairs, (block, i, batch), wg, self.pair_stages, bytes_each[0])
            for rows in cutlass.range(self.rows // self.tile_h, unroll=1):
                d_state = load_stage(d_ring, d_state, step, (rows, block, i, batch), wg, self.stages, bytes_each[1])
        drain_ring(ring, wg, state, self.pair_stages)
        drain_ring(d_ring, wg, d_state, self.stages)

    @cute.jit
    def load_weights(self, pipe_w, loads, sHalves, sizes):
        """Once where they stay, else for every tile."""
        (tma_p, gP), (tma_g, gG) = loads[2:4]
        crop, blocks, tiles = sizes
        tPs, tPg = partition(tma_p, sHalves, gP, (self.tile_h, self.chunk), (None, None))
        tGs, tGg = partition(tma_g, sHalves, gG, (self.tile_h, self.chunk), (None, None))
        w_state = producer_state(self.w_stages)
        for _ in cutlass.range(1 if self.resident else rounds(tiles, self.warpgroups, 0), unroll=1):
            for rows in cutlass.range(self.steps, unroll=1):
                pipe_w.producer_acquire(w_state)
                bar = pipe_w.producer_get_barrier(w_state)
                for c in cutlass.range_constexpr(self.chunks):
                    place = 2 * (w_state.index * self.chunks + c)
                    cute.copy(tma_p, tPg[None, rows, c], tPs[None, place], tma_bar_ptr=bar)
                    cute.copy(tma_g, tGg[None, rows, c], tGs[None, place + 1], tma_bar_ptr=bar)
                w_state.advance()
        if const_expr(not self.resident):
            pipe_w.producer_tail(w_state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def differentiate(self, pipes, smem, per_pair, stores, sizes):
        ring, d_ring, pipe_w = pipes
        sZ, sT, sW, sWt, sMore, sD = smem
        crop, blocks, tiles = sizes
        wg, tidx = consumer_place()
        project, spread, (tma, gDz) = self.project, self.spread, stores
        tZ = None
        if const_expr(not self.in_registers):
            tZ = operand_a(project, sZ)
        layouts = [cute.make_layout(spread.partition_shape_A((ROWS, width))) for width in (self.channels, MORE)]
        weights = [operand_b(project, t) for t in (sW, sMore)]
        across = operand_b(spread, sWt)
        shape, row = project.partition_shape_C((ROWS, 2 * self.tile_h)), spread.partition_shape_C((ROWS, self.channels))
        accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.sets)]
        acc_t = cute.make_rmem_tensor(row, Float32)
        a = [cute.make_rmem_tensor(spread.partition_shape_A((ROWS, 2 * self.tile_h)), self.dtype) for _ in range(self.sets)]
        d_shape = self.read_d.partition_shape_C((ROWS, self.tile_h))
        state, d_state, w_state, done = (
            consumer_state(n) for n in (self.pair_stages, self.stages, self.w_stages, self.w_stages)
        )
        # (mean, rstd, factor) of this thread's two pairs, fetched a tile ahead.
        of_pair, ahead_pair = (cute.make_rmem_tensor((3, 2), Float32) for _ in range(2))
        tile, step = cute.arch.block_idx()[0] * self.warpgroups + wg, cute.arch.grid_dim()[0] * self.warpgroups
        self.fetch(ahead_pair, per_pair, tile, sizes, tidx)
        for _ in cutlass.range(rounds(tiles, self.warpgroups, 0), unroll=1):
            block, i, batch = decode(cutlass.min(tile, tiles - 1), crop, blocks)
            place = wg * self.pair_stages + state.index
            of_pair.store(ahead_pair.load())
            acc_t.fill(0.0)
            if const_expr(self.resident):
                w_state = consumer_state(self.w_stages)
            frag = more_of_pairs(of_pair, self.dtype, tidx)
            more = cute.make_tensor(frag.iterator, layouts[1])
            wait_stage(ring, place, state.phase)
            z = None
            if const_expr(self.in_registers):
                frag = read_operand(sZ[None, None, place], self.read, tidx, self.channels, READ_COLUMNS, False)
                z = cute.make_tensor(frag.iterator, layouts[0])
            else:
                z = tZ[None, None, None, place]
            for run in cutlass.range(self.steps // self.unrolled, unroll=1):
                places = []  # of the steps' weights
                if const_expr(self.sets == 2):
                    places.append(w_state.index)
                    self.start(pipe_w, w_state, accs[0], (z, more), weights, run * self.unrolled)
                    w_state.advance()
                for b in cutlass.range_constexpr(self.unrolled):
                    last = b + 1 == self.unrolled
                    if const_expr(self.sets == 1 or not last):
                        ahead = b + self.sets - 1
                        places.append(w_state.index)
                        self.start(pipe_w, w_state, accs[ahead % self.sets], (z, more), weights, run * self.unrolled + ahead)
                        w_state.advance()
                    d_place = wg * self.stages + d_state.index
                    wait_stage(d_ring, d_place, d_state.phase)
                    d = read_tile(transposed_view(sD[None, None, d_place]), self.read_d, tidx, d_shape, True)
                    release_stage(d_ring, d_place)
                    d_state.advance()
                    # What may be under way: the sums of the step before, and the products of the next.
                    sums = 1 if b > 0 else 0
                    warpgroup.wait_group(0 if self.sets == 1 else sums + (0 if last else 1))
                    if const_expr(b >= self.sets and not self.resident):
                        pipe_w.consumer_release(done)
                        done.advance()
                    self.gates(accs[b % self.sets], a[b % self.sets], d, of_pair)
                    start_product(spread, acc_t, a[b % self.sets], across[None, None, None, places[b]], True)
                warpgroup.wait_group(0)
                if const_expr(not self.resident):
                    for _ in cutlass.range_constexpr(min(self.sets, self.unrolled)):
                        pipe_w.consumer_release(done)
                        done.advance()
            self.fetch(ahead_pair, per_pair, tile + step, sizes, tidx)
            self.finish(acc_t, sZ[None, None, place], sT[None, None, place], of_pair, tidx)
            target = cute.local_tile(gDz, (ROWS, self.channels), (block, 0, i, batch))
            store_in_place(tidx, wg, sT, place, tma, target, tile < tiles)
            release_stage(ring, place)
            state.advance()
            tile += step

    @cute.jit
    def fetch(self, found, per_pair, tile: Int32, sizes, tidx: Int32):
        """(mean, rstd, factor) of this thread's two pairs of a tile; not before those of the tile before are in use, as a thread
        waits for all that it has asked for."""
        mStats, mMask = per_pair
        crop, blocks, tiles = sizes
        block, i, batch = decode(cutlass.min(tile, tiles - 1), crop, blocks)
        fetch_statistics(found, mStats, (block, i, batch), crop, tidx)
        for r in cutlass.range_constexpr(2):
            k = block * ROWS + pair_of_thread(r, tidx)
            factor = Float32(0.0)
            if k < crop:
                factor = Float32(1.0)
                if const_expr(self.has_mask):
                    factor = mMask[batch, i, k]
            found[2, r] = factor

    @cute.jit
    def start(self, pipe_w, w_state, acc, operands, weights, step):
        """Issue the projections of a step, once its weights are there."""
        z, more = operands
        project, project_more, stage = self.project, self.project_more, w_state.index
        pipe_w.consumer_wait(w_state)
        warpgroup.fence()
        project_more.set(warpgroup.Field.ACCUMULATE, False)
        cute.gemm(project_more, acc, more[None, None, 0], weights[1][None, None, 0, step], acc)
        project.set(warpgroup.Field.ACCUMULATE, True)
        for k in cutlass.range_constexpr(self.channels // 16):
            cute.gemm(project, acc, z[None, None, k], weights[0][None, None, k, stage], acc)
        warpgroup.commit_group()

    @cute.jit
    def gates(self, acc, a, d, of_pair):
        """From values, the first half of acc's columns, and gates, the second, the gradients of both as an operand, whose
        registers are in an accumulator's order. acc stays: written in place, ptxas would serialise the products (C7511)."""
        values, half = rows_view(acc), self.tile_h // 8
        for j in cutlass.range_constexpr(half):
            for r in cutlass.range_constexpr(2):
                incoming, rstd, factor = two_columns(d, r, j), of_pair[1, r], of_pair[2, r]
                d_value, d_gate, s = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
                for c in cutlass.range_constexpr(2):
                    s[c] = values[r, 2 * half + 2 * j + c] * (rstd * -LOG2_E)
                sigmoids(s)
                for c in cutlass.range_constexpr(2):
                    n, grad = 2 * j + c, incoming[c] * s[c]
                    if const_expr(self.has_mask):
                        # A select, not a product: what the gradient of a masked pair holds must not matter. What that of an
                        # absent one holds stays in its own row, which is not stored.
                        grad = Float32(0.0) if factor == 0.0 else grad * factor
                    both = grad * (values[r, n] * rstd)
                    d_value[c], d_gate[c] = grad, both - both * s[c]
                for group, two in ((j, d_value), (half + j, d_gate)):
                    cute.make_tensor(a.iterator + (2 * r + 4 * group), cute.make_layout(2)).store(two.load().to(self.dtype))

    @cute.jit
    def finish(self, acc_t, z_tile: cute.Tensor, t_tile: cute.Tensor, of_pair, tidx: Int32):
        """t and z of a tile to dz, written where dzn lies."""
        shape = acc_t.shape
        t = rows_view(acc_t)
        given = read_tile(t_tile, self.spread, tidx, shape, False)
        for r in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(self.channels // 8):
                two = two_columns(given, r, j)
                t[r, 2 * j], t[r, 2 * j + 1] = t[r, 2 * j] + two[0], t[r, 2 * j + 1] + two[1]
        norm_gradients(acc_t, read_tile(z_tile, self.spread, tidx, shape, False), of_pair, self.channels)
        write_tile(acc_t, t_tile, self.spread, tidx, False)


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    return launch.compiled(
        TriangleMultiplicationFrontBackwardSm90(variant, config, registers), problem.pairs(), problem.stats(), problem.mask(),
        problem.factors(), problem.pairs(), *problem.weights(2 * problem.hidden, problem.channels), problem.pairs(),
        options=options,
    )
