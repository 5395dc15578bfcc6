"""Triangle multiplicative update, back backward, for sm_90a: from the gradient of the output to those of x and, in part, LN(z).

    h = value from x,  s = sigmoid of the gate from z;      dh = d * s,    dg = dh * h * (1 - s)       d: gradient of the output
    t = dh p_weight;    dx = rstd * (t - mean(t) - xhat * mean(t xhat));    dzn = dg g_weight

Layouts:
    z, d, dzn               (B, N, N, C)            bfloat16
    x, dx                   (B, D, N, P)            bfloat16, channel-major; columns of x from N on are zero, dx's become so
    z_stats, x_stats        (B, N, N, 2)            float32: mean, reciprocal deviation
    p_weight (C, D), g_weight (C, C)                bfloat16, folded with the weights of the LayerNorms
    terms                   (C, 4)                  float32: row sum and bias of p_weight, of g_weight

A tile is 64 pairs (i, j) of one i. z and x are multiplied as they lie and normalised in the results (see weights_sm90.py); both
products of a step of tile_c rows of the weights read the same weights in shared memory, once along their rows and once across.
dx goes out where x came in, dzn where z did. Warp roles and rings as in front_backward_sm90.py.

Where the gradients of a pair, C + D of them, do not fit into registers, x and then z each have a pass over the weights, and
dx waits in shared memory of its own until x is no longer needed.
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
from tpf_jit.templates.common.tiles import read_tile, store_in_place, two_columns, write_tile
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
from tpf_jit.templates.triangle_multiplication.launch_sm90 import COL_MAJOR, MN_MAJOR, REGISTERS, ROW_MAJOR, ROWS
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
    prefetch,
    rounds,
    sigmoids,
    start_rings,
    tile_of_turn,
    tiles_by,
)


class TriangleMultiplicationBackBackwardSm90:
    """The back's backward kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, passes: int, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.hidden, self.passes = variant["channels"], variant["hidden"], passes
        self.tile_c, self.warpgroups = config.tile_c, config.consumer_warpgroups
        self.stages, self.pair_stages, self.w_stages = config.stages, config.pair_stages, config.weight_stages
        self.blocks = self.channels // self.tile_c
        self.resident = self.w_stages >= self.blocks
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        c, tiles = self.tile_c, self.pair_stages * self.warpgroups
        self.project_x = launch.warpgroup_mma(self.dtype, c, a_major=MN_MAJOR)
        self.project_z = launch.warpgroup_mma(self.dtype, c)
        self.project_more = launch.warpgroup_mma(self.dtype, c, REGISTERS)
        self.spread_x, self.spread_z = (
            launch.warpgroup_mma(self.dtype, width, REGISTERS, b_major=MN_MAJOR) for width in (self.hidden, self.channels)
        )
        self.x_layout = sm90.make_smem_layout_a(COL_MAJOR, (ROWS, c, self.hidden), self.dtype, tiles)
        self.z_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, c, self.channels), self.dtype, tiles)
        self.o_layout = sm90.make_smem_layout_a(COL_MAJOR, (ROWS, c, self.hidden), self.dtype, self.warpgroups)
        self.p_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, self.hidden), self.dtype, self.w_stages)
        self.g_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, self.channels), self.dtype, self.w_stages)
        self.pt_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, self.hidden, c), self.dtype, self.w_stages)
        self.gt_layout = sm90.make_smem_layout_b(COL_MAJOR, (ROWS, self.channels, c), self.dtype, self.w_stages)
        self.more_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, MORE), self.dtype, self.blocks)
        self.d_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, c), self.stages * self.warpgroups)

    def _storage(self):
        waiting = smem_area(self.dtype, self.o_layout) if self.passes > 1 else cute.struct.MemRange[Int64, 1]

        @cute.struct
        class Storage:
            bar_in: cute.struct.MemRange[Int64, 2 * self.pair_stages * self.warpgroups]
            bar_d: cute.struct.MemRange[Int64, 2 * self.stages * self.warpgroups]
            bar_w: cute.struct.MemRange[Int64, 2 * self.w_stages]
            z: smem_area(self.dtype, self.z_layout)
            x: smem_area(self.dtype, self.x_layout)
            p: smem_area(self.dtype, self.p_layout)
            g: smem_area(self.dtype, self.g_layout)
            d: smem_area(self.dtype, self.d_layout)
            more_p: smem_area(self.dtype, self.more_layout)
            more_g: smem_area(self.dtype, self.more_layout)
            o: waiting

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mZStats: cute.Tensor, mX: cute.Tensor, mXStats: cute.Tensor, mD: cute.Tensor,
        mP: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor, mDx: cute.Tensor, mDzn: cute.Tensor,
        num_ctas: Int32, stream: cuda.CUstream,
    ):
        self._setup()
        z, d, dzn = (launch.of_pairs(t) for t in (mZ, mD, mDzn))
        x, dx = (launch.of_channels(t) for t in (mX, mDx))
        of_z, of_x = (ROWS, self.channels), (ROWS, self.hidden)
        loads = (
            launch.tma_load(z, self.z_layout, of_z), launch.tma_load(x, self.x_layout, of_x),
            launch.tma_load(mP, self.p_layout, (self.tile_c, self.hidden)),
            launch.tma_load(mG, self.g_layout, (self.tile_c, self.channels)),
            launch.tma_load(d, self.d_layout, (ROWS, self.tile_c)),
        )
        stores = launch.tma_store(dx, self.x_layout, of_x), launch.tma_store(dzn, self.z_layout, of_z)
        sizes = launch.tiles_of(mZ, ROWS)
        ctas = cutlass.min(cute.ceil_div(sizes[2], self.warpgroups), num_ctas)
        self.kernel(loads, stores, (mZStats, mXStats), mTerms, sizes).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, stats, mTerms, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, *stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sZ, sX, sD = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.x, self.x_layout), smem_tensor(sm.d, self.d_layout)
        sP, sG = smem_tensor(sm.p, self.p_layout), smem_tensor(sm.g, self.g_layout)
        sPt, sGt = smem_tensor(sm.p, self.pt_layout), smem_tensor(sm.g, self.gt_layout)
        sO = smem_tensor(sm.o, self.o_layout) if const_expr(self.passes > 1) else sX
        sMoreP, sMoreG = smem_tensor(sm.more_p, self.more_layout), smem_tensor(sm.more_g, self.more_layout)
        fill_more(sMoreP, mTerms, 0, self.threads)
        fill_more(sMoreG, mTerms, 2, self.threads)
        cute.arch.fence_view_async_shared()

        pair_bytes = tile_bytes(self.z_layout, self.dtype) + tile_bytes(self.x_layout, self.dtype)
        bytes_each = pair_bytes, tile_bytes(self.d_layout, self.dtype)
        ring, d_ring = start_rings(warp_idx, self.warpgroups, (sm.bar_in, self.pair_stages), (sm.bar_d, self.stages))
        step_bytes = tile_bytes(self.p_layout, self.dtype) + tile_bytes(self.g_layout, self.dtype)
        pipe_w = tma_ring(sm.bar_w, self.w_stages, step_bytes, 4 * self.warpgroups, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx < self.warpgroups:
                self.load(ring, d_ring, loads, (sZ, sX, sD), sizes, warp_idx, bytes_each)
            elif warp_idx == self.warpgroups:
                self.load_weights(pipe_w, loads, (sP, sG), sizes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.differentiate((ring, d_ring, pipe_w), (sZ, sX, sP, sG, sPt, sGt, sMoreP, sMoreG, sD, sO), stats, stores, sizes)

    # ---- device: producers --------------------------------------------------------------------------------------
    @cute.jit
    def load(self, ring, d_ring, loads, smem, sizes, wg: Int32, bytes_each: cutlass.Constexpr):
        """The tiles of one warpgroup."""
        sZ, sX, sD = smem
        crop, blocks, tiles = sizes
        all_channels = (None, 0, None, None)
        pairs = (
            tiles_by(loads[0], sZ, (ROWS, self.channels), all_channels),
            tiles_by(loads[1], sX, (ROWS, self.hidden), all_channels),
        )
        step = (tiles_by(loads[4], sD, (ROWS, self.tile_c), (None, None, None, None)),)
        state, d_state = producer_state(self.pair_stages), producer_state(self.stages)
        for n in cutlass.range(rounds(tiles, self.warpgroups, 0), unroll=1):
            # A tile beyond the last is the last again, and not stored.
            block, i, batch = decode(cutlass.min(tile_of_turn(n, self.warpgroups, wg), tiles - 1), crop, blocks)
            state = load_stage(ring, state, pairs, (block, i, batch), wg, self.pair_stages, bytes_each[0])
            for _ in cutlass.range_constexpr(self.passes):
                for c in cutlass.range(self.channels // self.tile_c, unroll=1):
                    d_state = load_stage(d_ring, d_state, step, (block, c, i, batch), wg, self.stages, bytes_each[1])
        drain_ring(ring, wg, state, self.pair_stages)
        drain_ring(d_ring, wg, d_state, self.stages)

    @cute.jit
    def load_weights(self, pipe_w, loads, smem, sizes):
        """Once where they stay, else for every pass over them."""
        (tma_p, gP), (tma_g, gG) = loads[2:4]
        sP, sG = smem
        crop, blocks, tiles = sizes
        tPs, tPg = partition(tma_p, sP, gP, (self.tile_c, self.hidden), (None, 0))
        tGs, tGg = partition(tma_g, sG, gG, (self.tile_c, self.channels), (None, 0))
        w_state = producer_state(self.w_stages)
        for _ in cutlass.range(1 if self.resident else rounds(tiles, self.warpgroups, 0) * self.passes, unroll=1):
            for c in cutlass.range(self.channels // self.tile_c, unroll=1):
                pipe_w.producer_acquire(w_state)
                bar = pipe_w.producer_get_barrier(w_state)
                cute.copy(tma_p, tPg[None, c], tPs[None, w_state.index], tma_bar_ptr=bar)
                cute.copy(tma_g, tGg[None, c], tGs[None, w_state.index], tma_bar_ptr=bar)
                w_state.advance()
        if const_expr(not self.resident):
            pipe_w.producer_tail(w_state)

    # ---- device: consumers --------------------------------------------------------------------------------------
    @cute.jit
    def differentiate(self, pipes, smem, stats, stores, sizes):
        ring, d_ring, pipe_w = pipes
        sZ, sX, sP, sG, sPt, sGt, sMoreP, sMoreG, sD, sO = smem
        (tma_dx, gDx), (tma_dzn, gDzn) = stores
        crop, blocks, tiles = sizes
        wg, tidx = consumer_place()
        tX, tZ = operand_a(self.project_x, sX), operand_a(self.project_z, sZ)
        tP, tG = operand_b(self.project_x, sP), operand_b(self.project_z, sG)
        tPt, tGt = operand_b(self.spread_x, sPt), operand_b(self.spread_z, sGt)
        tMoreP, tMoreG = (operand_b(self.project_more, t) for t in (sMoreP, sMoreG))
        fragments = (tX, tZ, tP, tG, tPt, tGt, tMoreP, tMoreG)
        state, d_state, w_state = (consumer_state(n) for n in (self.pair_stages, self.stages, self.w_stages))
        # (mean, rstd) of this thread's two pairs, fetched a tile ahead.
        of_z, of_x, ahead_z, ahead_x = (cute.make_rmem_tensor((2, 2), Float32) for _ in range(4))
        norms = (of_x, of_z)
        tile, step = cute.arch.block_idx()[0] * self.warpgroups + wg, cute.arch.grid_dim()[0] * self.warpgroups
        self.fetch((ahead_z, ahead_x), stats, tile, sizes, tidx)
        for _ in cutlass.range(rounds(tiles, self.warpgroups, 0), unroll=1):
            block, i, batch = decode(cutlass.min(tile, tiles - 1), crop, blocks)
            place = wg * self.pair_stages + state.index
            of_z.store(ahead_z.load())
            of_x.store(ahead_x.load())
            wait_stage(ring, place, state.phase)
            dx_tile = cute.local_tile(gDx, (ROWS, self.hidden), (block, 0, i, batch))
            dzn_tile = cute.local_tile(gDzn, (ROWS, self.channels), (block, 0, i, batch))
            where = (place, wg, tidx)
            # Each warp writes over its own 16 pairs of z and x, which only its own rows of the products read.
            if const_expr(self.passes == 1):
                acc_x, acc_z, d_state, w_state = self.walk(
                    (pipe_w, d_ring), d_state, w_state, fragments, sD, norms, where, True, True
                )
                self.fetch((ahead_z, ahead_x), stats, tile + step, sizes, tidx)
                self.normalise(acc_x, sX[None, None, place], sX[None, None, place], of_x, tidx)
                write_tile(acc_z, sZ[None, None, place], self.spread_z, tidx, False)
                store_in_place(tidx, wg, sX, place, tma_dx, dx_tile, tile < tiles, False)
            else:
                acc_x, _, d_state, w_state = self.walk(
                    (pipe_w, d_ring), d_state, w_state, fragments, sD, norms, where, True, False
                )
                self.normalise(acc_x, sX[None, None, place], sO[None, None, wg], of_x, tidx)
                store_in_place(tidx, wg, sO, wg, tma_dx, dx_tile, tile < tiles)
                _, acc_z, d_state, w_state = self.walk(
                    (pipe_w, d_ring), d_state, w_state, fragments, sD, norms, where, False, True
                )
                self.fetch((ahead_z, ahead_x), stats, tile + step, sizes, tidx)
                write_tile(acc_z, sZ[None, None, place], self.spread_z, tidx, False)
            store_in_place(tidx, wg, sZ, place, tma_dzn, dzn_tile, tile < tiles)
            release_stage(ring, place)
            state.advance()
            tile += step

    @cute.jit
    def fetch(self, found, stats, tile: Int32, sizes, tidx: Int32):
        """Statistics of z and x of this thread's pairs of a tile; not before those of the tile before are in use, as a thread
        waits for all that it has asked for."""
        crop, blocks, tiles = sizes
        where = decode(cutlass.min(tile, tiles - 1), crop, blocks)
        for own, given in zip(found, stats, strict=True):
            fetch_statistics(own, given, where, crop, tidx)

    @cute.jit
    def walk(
        self, pipes, d_state, w_state, fragments, sD, norms, where,
        want_x: cutlass.Constexpr, want_z: cutlass.Constexpr,
    ):
        """One pass over the weights: the gradients that are wanted, of x times its LayerNorm's weight and of LN(z) times its."""
        (pipe_w, d_ring), (tX, tZ, tP, tG, tPt, tGt, tMoreP, tMoreG) = pipes, fragments
        of_x, of_z = norms
        place, wg, tidx = where
        frags = [more_of_pairs(of_pair, self.dtype, tidx) for of_pair in norms]
        more = cute.make_layout(self.spread_z.partition_shape_A((ROWS, MORE)))
        more_x, more_z = (cute.make_tensor(frag.iterator, more) for frag in frags)
        if const_expr(self.resident):
            w_state = consumer_state(self.w_stages)
        self._setup()  # a second pass cannot use the MMAs that the loop of the first has set
        project_x, project_z, project_more = self.project_x, self.project_z, self.project_more
        spread_x, spread_z = self.spread_x, self.spread_z
        shape = project_z.partition_shape_C((ROWS, self.tile_c))
        acc_h, acc_g = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        acc_x = cute.make_rmem_tensor(spread_x.partition_shape_C((ROWS, self.hidden)), Float32)
        acc_z = cute.make_rmem_tensor(spread_z.partition_shape_C((ROWS, self.channels)), Float32)
        operand = spread_z.partition_shape_A((ROWS, self.tile_c))
        acc_x.fill(0.0)
        acc_z.fill(0.0)
        for mma in (project_x, project_z):
            mma.set(warpgroup.Field.ACCUMULATE, True)
        project_more.set(warpgroup.Field.ACCUMULATE, False)
        for c in cutlass.range(self.blocks, unroll=1):
            pipe_w.consumer_wait(w_state)
            stage = w_state.index
            warpgroup.fence()
            if const_expr(want_z):
                cute.gemm(project_more, acc_h, more_x[None, None, 0], tMoreP[None, None, 0, c], acc_h)
                for step in cutlass.range_constexpr(self.hidden // 16):
                    cute.gemm(project_x, acc_h, tX[None, None, step, place], tP[None, None, step, stage], acc_h)
            cute.gemm(project_more, acc_g, more_z[None, None, 0], tMoreG[None, None, 0, c], acc_g)
            for step in cutlass.range_constexpr(self.channels // 16):
                cute.gemm(project_z, acc_g, tZ[None, None, step, place], tG[None, None, step, stage], acc_g)
            warpgroup.commit_group()
            d_place = wg * self.stages + d_state.index
            wait_stage(d_ring, d_place, d_state.phase)
            d = read_tile(sD[None, None, d_place], project_z, tidx, shape, False)
            release_stage(d_ring, d_place)
            d_state.advance()
            warpgroup.wait_group(0)
            self.gates(acc_h, acc_g, d, of_x, of_z, want_z)
            if const_expr(want_x):
                a_h = cute.make_rmem_tensor(operand, self.dtype)
                a_h.store(cute.make_tensor(acc_h.iterator, a_h.layout).load().to(self.dtype))
                start_product(spread_x, acc_x, a_h, tPt[None, None, None, stage], True)
            if const_expr(want_z):
                a_g = cute.make_rmem_tensor(operand, self.dtype)
                a_g.store(cute.make_tensor(acc_g.iterator, a_g.layout).load().to(self.dtype))
                start_product(spread_z, acc_z, a_g, tGt[None, None, None, stage], True)
            warpgroup.wait_group(0)
            if const_expr(not self.resident):
                pipe_w.consumer_release(w_state)
            w_state.advance()
        return acc_x, acc_z, d_state, w_state

    @cute.jit
    def gates(self, acc_h, acc_g, d, of_x, of_z, want_gate: cutlass.Constexpr):
        """acc_h, acc_g become the gradients of value and gate."""
        h, g = rows_view(acc_h), rows_view(acc_g)
        for j in cutlass.range_constexpr(self.tile_c // 8):
            for r in cutlass.range_constexpr(2):
                incoming, s = two_columns(d, r, j), cute.make_rmem_tensor(2, Float32)
                for c in cutlass.range_constexpr(2):
                    s[c] = g[r, 2 * j + c] * (of_z[1, r] * -LOG2_E)
                sigmoids(s)
                for c in cutlass.range_constexpr(2):
                    n, grad = 2 * j + c, incoming[c] * s[c]
                    if const_expr(want_gate):
                        both = grad * (h[r, n] * of_x[1, r])
                        g[r, n] = both - both * s[c]
                    h[r, n] = grad

    @cute.jit
    def normalise(self, acc_x, x_tile: cute.Tensor, target: cute.Tensor, of_x, tidx: Int32):
        """acc_x and x of a tile to dx, written to `target`, which may be where x lies."""
        norm_gradients(acc_x, read_tile(x_tile, self.spread_x, tidx, acc_x.shape, True), of_x, self.hidden)
        write_tile(acc_x, target, self.spread_x, tidx, True)


def build(variant: dict, config, passes: int, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    return launch.compiled(
        TriangleMultiplicationBackBackwardSm90(variant, config, passes, registers), problem.pairs(), problem.stats(),
        problem.channel_major(), problem.stats(), problem.pairs(), *problem.weights(problem.channels, problem.hidden),
        problem.channel_major(), problem.pairs(), options=options,
    )
