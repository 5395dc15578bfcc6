"""Device pieces that the kernels of the triangle multiplicative update share (sm_90a): set-up, tiles and their loads, columns
MORE, gates, stores, residual.

A tile is some pairs (i, j) of one i; tiles of an i follow each other.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from tpf_jit.templates.common.epilogue import warpgroup_sync
from tpf_jit.templates.common.fragments import rows_view
from tpf_jit.templates.common.norm import norm_gradient, read_statistics
from tpf_jit.templates.common.rings import acquire_stage, drain_ring, initialise_ring, ring_of
from tpf_jit.templates.common.tiles import two_columns
from tpf_jit.templates.common.tma import partition, producer_state

LOG2_E = math.log2(math.e)
MORE = 16
"""Columns of one step of wgmma beyond z's or x's own, by which products take their LayerNorm's mean out and put the bias in:

    z . W - mean * u + bias / rstd        u, bias: `terms` of the weights' row

so that rstd times a product is a projection. Mean, deviation, u and bias are sums of three bf16 parts each, largest first; six
of nine products of such parts are above float32's last bit. Columns 0 to 5 hold parts PARTS of the pair's mean and OF_ROW of -u,
columns 8 to 13 the same of deviation and bias."""
PARTS, OF_ROW = (0, 0, 1, 0, 1, 2), (0, 1, 0, 2, 1, 0)


@cute.jit
def follow():
    """By all threads, before a kernel's first access to global memory: wait until the kernel before it is done, and let the next
    one start its CTAs (programmatic dependent launch; launches say `use_pdl`). In this order, so that when a kernel may go on,
    those before its predecessor are done too."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def prefetch(warp_idx: Int32, copies):
    """Descriptors of TMA copies, (atom, coordinate tensor) each, by the first warp."""
    if warp_idx == 0:
        for atom, _ in copies:
            cpasync.prefetch_descriptor(atom)


@cute.jit
def start_rings(warp_idx: Int32, warpgroups: cutlass.Constexpr, *areas):
    """A ring of all warpgroups (see `rings`) for each (struct field of mbarriers, stages of one warpgroup). Wants a fence and a
    barrier."""
    found = [ring_of(bars.data_ptr(), warpgroups * stages) for bars, stages in areas]
    if warp_idx == 0:
        with cute.arch.elect_one():
            for ring, (_, stages) in zip(found, areas, strict=True):
                initialise_ring(ring, warpgroups * stages)
    return found


def consumer_place(first: int = 1):
    """(warpgroup, thread in it) of a consumer; first: warpgroups before the consumers'."""
    wg = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4 - first)
    return wg, cute.arch.thread_idx()[0] - 128 * (wg + first)


def operand_a(tiled_mma, tiles: cute.Tensor) -> cute.Tensor:
    """Tiles in shared memory as A operands: (.., .., step of 16, stage)."""
    return tiled_mma.make_fragment_A(tiled_mma.get_slice(0).partition_A(tiles))


def operand_b(tiled_mma, tiles: cute.Tensor) -> cute.Tensor:
    """Tiles in shared memory as B operands, likewise."""
    return tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(tiles))


@cute.jit
def decode(tile: Int32, crop: Int32, blocks: Int32):
    """tile -> (block of j, i, batch)."""
    rest, block = tile // blocks, tile % blocks
    return block, rest % crop, rest // crop


@cute.jit
def fetch_statistics(found: cute.Tensor, mStats: cute.Tensor, where, crop: Int32, tidx: Int32):
    """found[0 and 1, r]: mean and rstd of this thread's two pairs of the tile of 64 at where: (block, i, batch). Wanted a tile
    ahead: a kernel that waits for them takes 10 % longer."""
    block, i, batch = where
    for r in cutlass.range_constexpr(2):
        two = read_statistics(mStats, (batch, i, block * 64 + pair_of_thread(r, tidx)), crop)
        found[0, r], found[1, r] = two[0], two[1]


@cute.jit
def pair_of_thread(r: cutlass.Constexpr, tidx: Int32) -> Int32:
    """Of a tile of 64: the first or second of the rows that a thread has in an accumulator."""
    return (tidx // 32) * 16 + (tidx % 32) // 4 + 8 * r


def part_of_cta(parts: int) -> Int32 | int:
    """Which part of the weights' rows this CTA has, where CTAs beside each other have all parts of them and the same tiles."""
    return 0 if parts == 1 else cute.arch.block_idx()[0] % parts


def turn_of_cta(parts: int) -> tuple[Int32, Int32]:
    """(place of this CTA among those that have its part, how many these are)."""
    place, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    return (place, ctas) if parts == 1 else (place // parts, ctas // parts)


@cute.jit
def rounds(tiles: Int32, warpgroups: cutlass.Constexpr, wg: Int32, parts: cutlass.Constexpr = 1):
    """Tiles of warpgroup wg of this CTA where CTAs, with each part of the weights, and their warpgroups take turns."""
    place, ctas = turn_of_cta(parts)
    each = ctas * warpgroups
    return (tiles - place * warpgroups - wg + each - 1) // each


def tile_of_turn(n: Int32, warpgroups: int, wg: Int32, parts: int = 1) -> Int32:
    """The tile that warpgroup wg of this CTA takes in its n-th turn, of `rounds`."""
    place, ctas = turn_of_cta(parts)
    return (place + n * ctas) * warpgroups + wg


@cute.jit
def ctas_of(tiles: Int32, num_ctas: Int32, warpgroups: cutlass.Constexpr, parts: cutlass.Constexpr = 1):
    """The grid for so many tiles: at most num_ctas CTAs, as many with each part of the weights."""
    return parts * cutlass.min(cute.ceil_div(tiles, warpgroups), cutlass.max(num_ctas // parts, 1))


def tiles_by(load, smem: cute.Tensor, shape, coord):
    """(atom, destination by stage, source by the coordinates left None) of tiles of `shape`; load: (atom, coordinate tensor)."""
    tma, gmem = load
    return tma, *partition(tma, smem, gmem, shape, coord)


@cute.jit
def load_stage(ring, state, copies, where, wg: Int32, stages: cutlass.Constexpr, stage_bytes: cutlass.Constexpr):
    """By one warp: the next stage of one warpgroup, with the tiles at `where`; copies: `tiles_by` each. Returns the state of the
    stage after it."""
    place = wg * stages + state.index
    bar = acquire_stage(ring, place, state.phase, stage_bytes)
    for tma, target, source in copies:
        cute.copy(tma, source[(None, *where)], target[None, place], tma_bar_ptr=bar)
    state.advance()
    return state


@cute.jit
def load_tiles(ring, copies, sizes, wg: Int32, warpgroups: cutlass.Constexpr, stages: cutlass.Constexpr,
               stage_bytes: cutlass.Constexpr, parts: cutlass.Constexpr = 1):  # fmt: skip
    """By one warp: the tiles of one warpgroup. copies: `tiles_by` (block, i, batch) each; parts: as for `rounds`."""
    crop, blocks, tiles = sizes
    state = producer_state(stages)
    for n in cutlass.range(rounds(tiles, warpgroups, wg, parts), unroll=1):
        where = decode(tile_of_turn(n, warpgroups, wg, parts), crop, blocks)
        state = load_stage(ring, state, copies, where, wg, stages, stage_bytes)
    drain_ring(ring, wg, state, stages)


@cute.jit
def load_shared_tiles(loads, sizes, warpgroups: cutlass.Constexpr, buffers: cutlass.Constexpr, parts: cutlass.Constexpr = 1):
    """By one warp: the tiles of all warpgroups in the order of their turns, into one or two buffers that they share. loads: (ring
    with a stage for each warpgroup, `tiles_by` (block, i, batch), bytes of a tile) for each operand; a warpgroup's barriers are
    its own, as nobody may miss two phases of one."""
    crop, blocks, tiles = sizes
    for n in cutlass.range(rounds(tiles, warpgroups, 0, parts), unroll=1):
        for wg in cutlass.range_constexpr(warpgroups):
            tile = tile_of_turn(n, warpgroups, wg, parts)
            if tile < tiles:
                block, i, batch = decode(tile, crop, blocks)
                buffer = shared_buffer(n, wg, warpgroups, buffers)
                # Whoever had the buffer before: in this turn, or in the one before, which for the first is not waited for.
                before, turn = (wg - buffers) % warpgroups, n + (1 if wg < buffers else 0)
                for (full, empty), (tma, target, source), tile_bytes in loads:
                    cute.arch.mbarrier_wait(empty + before, turn % 2)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + wg, tile_bytes)
                    cute.copy(tma, source[None, block, i, batch], target[None, buffer], tma_bar_ptr=full + wg)


def shared_buffer(turn: Int32, wg: Int32 | int, warpgroups: int, buffers: int) -> Int32 | int:
    """Which of one or two buffers that warpgroups share has the tile of a turn; of the turn, odd or even is enough."""
    return 0 if buffers == 1 else (turn * warpgroups + wg) % buffers


@cute.jit
def fetch_terms(sTerms: cute.Tensor, mTerms: cute.Tensor, threads: cutlass.Constexpr):
    """sTerms (4, rows) from mTerms (rows, 4), by all threads; the gate's constant, the last, for use in base 2."""
    for i in cutlass.range(cute.arch.thread_idx()[0], cute.size(sTerms), threads, unroll=1):
        sTerms[i % 4, i // 4] = mTerms[i // 4, i % 4] * (Float32(-LOG2_E) if i % 4 == 3 else Float32(1.0))


@cute.jit
def three_parts(x: Float32, dtype: cutlass.Constexpr) -> cute.Tensor:
    """x as the sum of three 16-bit numbers, largest first."""
    parts = cute.make_rmem_tensor(3, dtype)
    for i in cutlass.range_constexpr(3):
        parts[i] = x.to(dtype)
        x = x - parts[i].to(Float32)
    return parts


@cute.jit
def fill_more(
    tiles: cute.Tensor, mTerms: cute.Tensor, first: cutlass.Constexpr, threads: cutlass.Constexpr, start=0,
    place: cutlass.Constexpr = 0, places: cutlass.Constexpr = 1,
):
    """The weights' side of columns MORE, by all threads. tiles: (rows of a block, MORE, blocks) in shared memory, of rows from
    `start` on, which are part `place` of `places` of a block; mTerms: (rows, 4) float32, [first] being u and [first + 1] the
    bias. Wants a fence for asynchronous reads, and a barrier."""
    rows, blocks, dtype = cute.size(tiles, mode=[0]) // places, cute.size(tiles, mode=[2]), tiles.element_type
    for i in cutlass.range(cute.arch.thread_idx()[0], 2 * rows * blocks, threads, unroll=2):
        row, half = i // 2, i % 2
        term = Float32(0.0)
        if start + row < mTerms.shape[0]:
            term = mTerms[start + row, first + half] * (Float32(-1.0) if half == 0 else Float32(1.0))
        parts = three_parts(term, dtype)
        for k in cutlass.range_constexpr(MORE // 2):
            value = dtype(0.0)
            if cutlass.const_expr(k < len(OF_ROW)):
                value = parts[OF_ROW[k]]
            tiles[place * rows + row % rows, half * (MORE // 2) + k, row // rows] = value


@cute.jit
def project_with_more(tiled_mma, acc, operand, weights, block: cutlass.Constexpr):
    """Issue acc = operand times a block of the weights, each (its fragment, that of columns MORE); fence and commit are the
    caller's."""
    tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
    cute.gemm(tiled_mma, acc, operand[1][None, None, 0], weights[1][None, None, 0, block], acc)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(cute.size(operand[0], mode=[2])):
        cute.gemm(tiled_mma, acc, operand[0][None, None, step], weights[0][None, None, step, block], acc)


@cute.jit
def deviation(rstd: Float32) -> Float32:
    """1 / rstd; 0 for an absent pair, whose rstd is 0."""
    return Float32(0.0) if rstd == 0.0 else cute.arch.rcp_approx(rstd)


@cute.jit
def more_of_pairs(of_pair: cute.Tensor, dtype: cutlass.Constexpr, tidx: Int32) -> cute.Tensor:
    """The pairs' side of columns MORE, in the order of an A operand. of_pair[0 and 1, r]: mean and rstd of this thread's two
    rows, 0 for an absent pair."""
    frag = cute.make_rmem_tensor(MORE // 2, dtype)
    lane = tidx % 4  # has columns 2 * lane, 2 * lane + 1 and those 8 further on
    for r in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            parts = three_parts(of_pair[0, r] if half == 0 else deviation(of_pair[1, r]), dtype)
            for c in cutlass.range_constexpr(2):
                value = dtype(0.0)
                for k in cutlass.range_constexpr(len(PARTS) // 2):
                    if lane == k:
                        value = parts[PARTS[2 * k + c]]
                frag[2 * r + 4 * half + c] = value
    return frag


@cute.jit
def put_more(line: cute.Tensor, mean: Float32, rstd: Float32):
    """The pairs' side of one pair: line (MORE,) in shared memory. Wants a fence for asynchronous reads."""
    for half in cutlass.range_constexpr(2):
        parts = three_parts(mean if half == 0 else deviation(rstd), line.element_type)
        for k in cutlass.range_constexpr(MORE // 2):
            value = line.element_type(0.0)
            if cutlass.const_expr(k < len(PARTS)):
                value = parts[PARTS[k]]
            line[half * (MORE // 2) + k] = value


@cute.jit
def sums_of_more(acc: cute.Tensor, tidx: Int32) -> cute.Tensor:
    """From the products (64, MORE) of rows of an operand with the pairs' side: ((sum of operand * mean, of operand * deviation),
    this thread's 2 rows)."""
    found = shares_of_more(acc, tidx)
    for n in cutlass.range_constexpr(4):
        found[n] = cute.arch.warp_reduction_sum(found[n], threads_in_group=4)
    return found


@cute.jit
def shares_of_more(acc: cute.Tensor, tidx: Int32) -> cute.Tensor:
    """What `sums_of_more` adds up over the four lanes of a row: this thread's."""
    values, lane = rows_view(acc), tidx % 4
    found = cute.make_rmem_tensor((2, 2), Float32)
    for r in cutlass.range_constexpr(2):
        for half in cutlass.range_constexpr(2):
            own = Float32(0.0)
            for part in cutlass.range_constexpr(3):
                column = PARTS.index(part)  # that which holds this part first
                if lane == column // 2:
                    own = values[r, 2 * half + column % 2]
            found[half, r] = own
    return found


@cute.jit
def sigmoids(x: cute.Tensor, scale: Float32 | float = 1.0):
    """x, two or four gates times -log2(e), become scale times their sigmoids, with one reciprocal for all: with one for each, the
    unit that takes powers and reciprocals is busy for as long as the tensor cores. A sigmoid is at least 2^-62, of four gates
    2^-31, so that no product overflows. One NaN makes all of them NaN; hence no masked pair's gates beside another pair's."""
    for i in cutlass.range_constexpr(cute.size(x)):
        x[i] = cute.math.exp2(cute.arch.fmin(x[i], 124.0 / cute.size(x), nan=True), fastmath=True)
    # With p = 1 + 2^x0 and q = 1 + 2^x1:  1 / q = p / (p q),  1 / p = q / (p q) = 1 / (p q) + 2^x1 / (p q).
    pairs = cute.size(x) // 2
    firsts, products = [1.0 + x[2 * i] for i in range(pairs)], []
    for i in cutlass.range_constexpr(pairs):
        products.append(firsts[i] * x[2 * i + 1] + firsts[i])
    whole = products[0] if pairs == 1 else products[0] * products[1]
    inverse = cute.arch.rcp_approx(whole) * scale
    for i in cutlass.range_constexpr(pairs):
        own = inverse if pairs == 1 else inverse * products[1 - i]
        x[2 * i], x[2 * i + 1] = own * x[2 * i + 1] + own, own * firsts[i]


@cute.jit
def quick_sigmoid(x: Float32, half: Float32) -> Float32:
    """2 half times the sigmoid of a gate, x being half the gate: half + half tanh(x). With the device's own tanh it is right to
    1e-4 of itself for gates above -8 (measured on an H200), a tenth of a factor's rounding; below, to 1e-2."""
    return cute.math.tanh(x, fastmath=True) * half + half


@cute.jit
def store_rounded(frag, s_tiles: cute.Tensor, place, buffers: cutlass.Constexpr, tiled_mma, tma, target, wg, tidx: Int32,
                  transposed: cutlass.Constexpr):  # fmt: skip
    """Store a warpgroup's 16-bit fragment through buffer `place` to the coordinate tile `target`, which clips it.

    Buffers, at least two, take turns. That of the next store is free once this returns, so that one barrier a store is enough;
    the caller waits for all stores before it exits. transposed: whether buffers have the accumulator's columns as rows.
    """
    tile = s_tiles[None, None, place]
    if cutlass.const_expr(transposed):
        tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
    tiled = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), frag.element_type), tiled_mma)
    cute.copy(tiled, tiled.retile(frag), tiled.get_slice(tidx).partition_D(tile))
    cute.arch.fence_view_async_shared()
    leader = cute.arch.make_warp_uniform(tidx // 32) == 0
    if leader:
        cute.arch.cp_async_bulk_wait_group(buffers - 2, read=True)
    warpgroup_sync(wg)
    if leader:
        source, destination = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), cute.group_modes(s_tiles, 0, 2), cute.group_modes(target, 0, 2)
        )
        cute.copy(tma, source[None, place], destination)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def wait_for_stores(tidx: Int32):
    """Consumer, at its end: wait until its stores have left shared memory, which goes with the CTA."""
    if cute.arch.make_warp_uniform(tidx // 32) == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def norm_gradients(acc, frag, of_pair: cute.Tensor, width: cutlass.Constexpr):
    """acc, the gradient of a LayerNorm's result (times its weight) of 64 pairs by `width` channels, becomes that of what was
    normalised: frag, 16 bit, with acc's layout. of_pair[0 and 1, r]: mean and rstd of this thread's two rows."""
    gradients = rows_view(acc)
    for r in cutlass.range_constexpr(2):
        row = cute.make_rmem_tensor(width // 4, Float32)
        for j in cutlass.range_constexpr(width // 8):
            two = two_columns(frag, r, j)
            row[2 * j], row[2 * j + 1] = two[0], two[1]
        norm_gradient(gradients[r, None], row, of_pair[0, r], of_pair[1, r], width)


@cute.jit
def add_residual(acc, mResidual: cute.Tensor, where, channel: Int32, crop: Int32, tidx: Int32):
    """acc += residual, read where the thread's own results go: `channel` and on, of pairs first and first + 8; where: (batch, i,
    first)."""
    batch, i, first = where
    values = rows_view(acc)
    for r in cutlass.range_constexpr(2):
        if first + 8 * r < crop:
            line = mResidual[batch, i, first + 8 * r, None]
            for n in cutlass.range_constexpr(cute.size(acc) // 4):
                raw = cute.make_rmem_tensor(2, mResidual.element_type)
                at = channel + 8 * n + 2 * (tidx % 4)
                cute.autovec_copy(cute.make_tensor((line.iterator + at).align(4), cute.make_layout(2)), raw)
                values[r, 2 * n] = values[r, 2 * n] + raw[0].to(Float32)
                values[r, 2 * n + 1] = values[r, 2 * n + 1] + raw[1].to(Float32)
