"""Triangle multiplicative update, back, for sm_90a, with operands in registers. Computes what back_sm90.py does, with the same
calling convention; for weights that fit on an SM, or on two.

A warpgroup takes a tile of 64 pairs (i, j) of one i, of z and of x, into registers, as the operands of all its products, and
gives the shared memory back at once: see front_rows_sm90.py, whose order of work this is, and where parts of the weights and
shared tiles are explained. Shared tiles of x and of z come and go one after the other, so that one is fetched while the other
is read.

Warp roles: of warpgroup 0, one warp for each of the W consumer warpgroups fetches its tiles, or the first all that are shared;
one more fetches the weights, once.
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
from tpf_jit.templates.triangle_multiplication.launch_sm90 import COL_MAJOR, REGISTERS, ROW_MAJOR, ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import (
    MORE,
    add_residual,
    consumer_place,
    ctas_of,
    decode,
    fetch_statistics,
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
    tiles_by,
    turn_of_cta,
    wait_for_stores,
)

READ_COLUMNS = 32  # channels read at a time


class TriangleMultiplicationBackRowsSm90:
    """The back kernel of one (variant, config)."""

    def __init__(self, variant: dict, config, registers: tuple[int, int]):
        self.dtype = DTYPES[variant["dtype"]]
        self.channels, self.hidden = variant["channels"], variant["hidden"]
        self.has_residual, self.has_stats = variant["residual"], variant["stats"]
        self.tile_c, self.warpgroups = config.tile_c, config.consumer_warpgroups
        self.stages, self.out_stages, self.sets = config.stages, config.out_stages, config.sets
        self.shared, self.parts, self.own = config.shared, config.parts, self.channels // config.parts
        self.blocks = self.own // self.tile_c
        self.producer_registers, self.consumer_registers = registers
        self.threads = 128 * (self.warpgroups + 1)

    # ---- layouts, MMAs, shared memory ---------------------------------------------------------------------------
    def _setup(self):
        """Called in the host and in the device region: layouts and MMAs are values of the region that makes them."""
        c, tiles = self.tile_c, self.shared or self.stages * self.warpgroups
        self.mma = launch.warpgroup_mma(self.dtype, c, REGISTERS)
        self.mma_read = launch.warpgroup_mma(self.dtype, READ_COLUMNS)  # only its fragment is used
        self.z_layout = sm90.make_smem_layout_a(ROW_MAJOR, (ROWS, c, self.channels), self.dtype, tiles)
        self.x_layout = sm90.make_smem_layout_a(COL_MAJOR, (ROWS, c, self.hidden), self.dtype, tiles)
        self.p_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, self.hidden), self.dtype, self.blocks)
        self.g_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, self.channels), self.dtype, self.blocks)
        self.more_layout = sm90.make_smem_layout_b(ROW_MAJOR, (ROWS, c, MORE), self.dtype, self.blocks)
        self.o_layout = sm90.make_smem_layout_epi(self.dtype, ROW_MAJOR, (ROWS, c), self.out_stages * self.warpgroups)

    def _storage(self):
        @cute.struct
        class Storage:
            bar_in: cute.struct.MemRange[Int64, 2 * self.stages * self.warpgroups]
            bar_w: cute.struct.MemRange[Int64, 2]
            z: smem_area(self.dtype, self.z_layout)
            x: smem_area(self.dtype, self.x_layout)
            p: smem_area(self.dtype, self.p_layout)
            g: smem_area(self.dtype, self.g_layout)
            more_p: smem_area(self.dtype, self.more_layout)
            more_g: smem_area(self.dtype, self.more_layout)
            o: smem_area(self.dtype, self.o_layout)
            bar_z: cute.struct.MemRange[Int64, 2 * self.stages * self.warpgroups]  # where warpgroups take turns

        return launch.fitting(Storage)

    # ---- host launch --------------------------------------------------------------------------------------------
    @cute.jit
    def __call__(
        self,
        mZ: cute.Tensor, mZStats: cute.Tensor, mX: cute.Tensor, mP: cute.Tensor, mG: cute.Tensor, mTerms: cute.Tensor,
        mResidual: cute.Tensor | None, mOut: cute.Tensor, mXStats: cute.Tensor | None, eps: Float32, num_ctas: Int32,
        stream: cuda.CUstream,
    ):
        self._setup()
        loads = (
            launch.tma_load(launch.of_pairs(mZ), self.z_layout, (ROWS, self.channels)),
            launch.tma_load(launch.of_channels(mX), self.x_layout, (ROWS, self.hidden)),
            launch.tma_load(mP, self.p_layout, (self.tile_c, self.hidden)),
            launch.tma_load(mG, self.g_layout, (self.tile_c, self.channels)),
        )
        stores = launch.tma_store(launch.of_pairs(mOut), self.o_layout, (ROWS, self.tile_c))
        sizes = launch.tiles_of(mZ, ROWS)
        ctas = ctas_of(sizes[2], num_ctas, self.warpgroups, self.parts)
        self.kernel(loads, stores, (mZStats, mXStats), mTerms, mResidual, eps, sizes).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )

    # ---- device: set-up and warp roles --------------------------------------------------------------------------
    @cute.kernel
    def kernel(self, loads, stores, stats, mTerms, mResidual, eps: Float32, sizes):
        self._setup()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        prefetch(warp_idx, (*loads, stores))
        sm = cutlass.memory.SmemAllocator().allocate(self._storage())
        follow()
        sZ, sX, sO = smem_tensor(sm.z, self.z_layout), smem_tensor(sm.x, self.x_layout), smem_tensor(sm.o, self.o_layout)
        sP, sG = smem_tensor(sm.p, self.p_layout), smem_tensor(sm.g, self.g_layout)
        sMoreP, sMoreG = smem_tensor(sm.more_p, self.more_layout), smem_tensor(sm.more_g, self.more_layout)
        first = part_of_cta(self.parts) * self.own
        fill_more(sMoreP, mTerms, 0, self.threads, first)
        fill_more(sMoreG, mTerms, 2, self.threads, first)
        cute.arch.fence_view_async_shared()

        areas = (sm.bar_in, sm.bar_z) if self.shared else (sm.bar_in,)
        rings = start_rings(warp_idx, self.warpgroups, *((bars, self.stages) for bars in areas))
        weight_bytes = self.blocks * (tile_bytes(self.p_layout, self.dtype) + tile_bytes(self.g_layout, self.dtype))
        pipe_w = tma_ring(sm.bar_w, 1, weight_bytes, 4 * self.warpgroups, last=True)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp_idx < (1 if self.shared else self.warpgroups):
                self.load(rings, loads, (sZ, sX), sizes, warp_idx)
            elif warp_idx == self.warpgroups:
                self.load_weights(pipe_w, loads, sP, sG)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.project(rings, pipe_w, (sZ, sX, sP, sG, sMoreP, sMoreG, sO), stats, stores, mResidual, eps, sizes)

    # ---- device: producers --------------------------------------------------------------------------------------
    @cute.jit
    def load(self, rings, loads, smem, sizes, wg: Int32):
        """The tiles of one warpgroup, or all that are shared."""
        (sZ, sX), all_channels = smem, (None, 0, None, None)
        of_z = tiles_by(loads[0], sZ, (ROWS, self.channels), all_channels)
        of_x = tiles_by(loads[1], sX, (ROWS, self.hidden), all_channels)
        z_bytes, x_bytes = tile_bytes(self.z_layout, self.dtype), tile_bytes(self.x_layout, self.dtype)
        if const_expr(self.shared):
            operands = (rings[0], of_x, x_bytes), (rings[1], of_z, z_bytes)
            load_shared_tiles(operands, sizes, self.warpgroups, self.shared, self.parts)
        else:
            load_tiles(rings[0], (of_z, of_x), sizes, wg, self.warpgroups, self.stages, z_bytes + x_bytes, self.parts)

    @cute.jit
    def load_weights(self, pipe_w, loads, sP, sG):
        (tma_p, gP), (tma_g, gG) = loads[2:4]
        tPs, tPg = partition(tma_p, sP, gP, (self.tile_c, self.hidden), (None, 0))
        tGs, tGg = partition(tma_g, sG, gG, (self.tile_c, self.channels), (None, 0))
        state = producer_state(1)
        pipe_w.producer_acquire(state)
        bar, first = pipe_w.producer_get_barrier(state), part_of_cta(self.parts) * self.blocks
        for c in cutlass.range(self.blocks, unroll=1):
            cute.copy(tma_p, tPg[None, first + c], tPs[None, c], tma_bar_ptr=bar)
            cute.copy(tma_g, tGg[None, first + c], tGs[None, c], tma_bar_ptr=bar)

    # ---- device: projection and gate ----------------------------------------------------------------------------
    @cute.jit
    def project(self, rings, pipe_w, smem, stats, stores, mResidual, eps: Float32, sizes):
        sZ, sX, sP, sG, sMoreP, sMoreG, sO = smem
        mZStats, mXStats = stats
        crop, blocks, tiles = sizes
        wg, tidx = consumer_place()
        mma, (tma, gO) = self.mma, stores
        weights = [operand_b(mma, t) for t in (sP, sG, sMoreP, sMoreG)]
        shape = mma.partition_shape_C((ROWS, self.tile_c))
        accs = [[cute.make_rmem_tensor(shape, Float32) for _ in range(2)] for _ in range(self.sets)]
        layouts = [cute.make_layout(mma.partition_shape_A((ROWS, width))) for width in (self.hidden, self.channels, MORE)]
        state = consumer_state(self.stages)
        pipe_w.consumer_wait(consumer_state(1))
        # ((mean, rstd), this thread's 2 pairs) of z, fetched a tile ahead
        of_z, ahead_z = (cute.make_rmem_tensor((2, 2), Float32) for _ in range(2))
        turn, ctas = turn_of_cta(self.parts)
        tile, step, part = turn * self.warpgroups + wg, ctas * self.warpgroups, part_of_cta(self.parts)
        block, i, batch = decode(cutlass.min(tile, tiles - 1), crop, blocks)
        fetch_statistics(ahead_z, mZStats, (block, i, batch), crop, tidx)
        for _ in cutlass.range(rounds(tiles, self.warpgroups, wg, self.parts), unroll=1):
            place, first = wg * self.stages + state.index, block * ROWS + pair_of_thread(0, tidx)
            of_z.store(ahead_z.load())
            buffer = shared_buffer(state.phase, wg, self.warpgroups, self.shared) if const_expr(self.shared) else place
            wait_stage(rings[0], place, state.phase)
            x = read_operand(sX[None, None, buffer], self.mma_read, tidx, self.hidden, READ_COLUMNS, True)
            if const_expr(self.shared):
                release_stage(rings[0], place)
                wait_stage(rings[1], place, state.phase)
            z = read_operand(sZ[None, None, buffer], self.mma_read, tidx, self.channels, READ_COLUMNS, False)
            release_stage(rings[-1], place)
            state.advance()
            of_x = operand_statistics(x, eps, self.hidden)
            if const_expr(self.has_stats):
                for r in cutlass.range_constexpr(2):
                    if (tidx % 4 == 0) & (first + 8 * r < crop) & (part == 0):
                        keep_statistics(mXStats, (batch, i, first + 8 * r), of_x[0, r], of_x[1, r])
            more = [more_of_pairs(of_pair, self.dtype, tidx) for of_pair in (of_x, of_z)]
            frags = ((x, layouts[0]), (z, layouts[1]), (more[0], layouts[2]), (more[1], layouts[2]))
            operands = [cute.make_tensor(t.iterator, layout) for t, layout in frags]
            for c in cutlass.range_constexpr(self.sets - 1):
                self.start(mma, accs[c], operands, weights, c)
            for c in cutlass.range_constexpr(self.blocks):
                ahead = c + self.sets - 1
                if const_expr(ahead < self.blocks):
                    self.start(mma, accs[ahead % self.sets], operands, weights, ahead)
                warpgroup.wait_group(min(self.sets, self.blocks - c) - 1)
                if const_expr(c == 0):  # not before the last ones are in use: a thread waits for all that it has asked for
                    tile += step
                    next_block, next_i, next_batch = decode(cutlass.min(tile, tiles - 1), crop, blocks)
                    fetch_statistics(ahead_z, mZStats, (next_block, next_i, next_batch), crop, tidx)
                acc, acc_g = accs[c % self.sets]
                self.gate(acc, acc_g, of_x, of_z)
                if const_expr(self.has_residual):
                    add_residual(acc, mResidual, (batch, i, first), Int32(part * self.own + c * self.tile_c), crop, tidx)
                rounded = cute.make_rmem_tensor(shape, self.dtype)
                rounded.store(acc.load().to(self.dtype))
                target = cute.local_tile(gO, (ROWS, self.tile_c), (block, part * self.blocks + c, i, batch))
                out = wg * self.out_stages + c % self.out_stages
                store_rounded(rounded, sO, out, self.out_stages, mma, tma, target, wg, tidx, False)
            block, i, batch = next_block, next_i, next_batch
        wait_for_stores(tidx)

    @cute.jit
    def start(self, mma, accs, operands, weights, c: cutlass.Constexpr):
        """Issue the products of block c of the weights' rows."""
        warpgroup.fence()
        for t in cutlass.range_constexpr(2):
            project_with_more(mma, accs[t], (operands[t], operands[2 + t]), (weights[t], weights[2 + t]), c)
        warpgroup.commit_group()

    @cute.jit
    def gate(self, acc_x, acc_g, of_x, of_z):
        """acc_x becomes value times sigmoid of gate."""
        x, g = rows_view(acc_x), rows_view(acc_g)
        for n in cutlass.range_constexpr(0, self.tile_c // 4, 4):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(4):
                    x[r, n + c] = x[r, n + c] * quick_sigmoid(g[r, n + c] * (of_z[1, r] * 0.5), of_x[1, r] * 0.5)


def build(variant: dict, config, registers: tuple[int, int], options: str):
    """Compile the kernel of (variant, config) against symbolic sizes; returns the DSL's compiled function."""
    problem = launch.SymbolicProblem(variant)
    return launch.compiled(
        TriangleMultiplicationBackRowsSm90(variant, config, registers), problem.pairs(), problem.stats(), problem.channel_major(),
        *problem.weights(problem.channels, problem.hidden), problem.pairs() if variant["residual"] else None, problem.pairs(),
        problem.stats() if variant["stats"] else None, Float32(1e-5), options=options,
    )
