"""Device pieces of the kernels that sum gradients of weights (sm_90a): rows of the weights are the M of their products, and pairs
the columns of what becomes an operand of the sums.

Of a tile's pairs shared memory holds, in rings with barriers `fetched` (full, then empty ones), the columns MORE of their norms,
and two numbers each, or three: the value's rstd; the gate's or, where both are z's, the pair's factor in a mask; z's mean.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tpf_jit.templates.common.fragments import rows_view
from tpf_jit.templates.common.norm import read_statistics
from tpf_jit.templates.common.tiles import read_tile, two_columns
from tpf_jit.templates.common.tma import producer_state
from tpf_jit.templates.triangle_multiplication.launch_sm90 import ROWS
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import LOG2_E, decode, put_more, sigmoids

READ_COLUMNS = 16  # pairs whose gradients are read at a time


@cute.jit
def start_fetched(warp_idx: Int32, fetched, stages: cutlass.Constexpr, consumer_warps: cutlass.Constexpr):
    """The barriers `fetched`. Wants a fence and a barrier. Every thread arrives, as racecheck sees no order between lanes."""
    if warp_idx == 0:
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(fetched + i, 32)
                cute.arch.mbarrier_init(fetched + (stages + i), 32 * consumer_warps)


@cute.jit
def fetch_pairs(fetched, per_pair, sPairs: cute.Tensor, sMore: cute.Tensor, split: Int32, sizes, tile_n: cutlass.Constexpr):
    """By one warp, for the tiles of a split. per_pair: statistics of z, of x or None, and the mask or None; sPairs (numbers,
    pairs of a step, stages); sMore (tile_n, MORE, tiles of all stages), x's behind z's. Without a pair, numbers are 0."""
    mZStats, mXStats, mMask = per_pair
    crop, blocks, tiles, splits = sizes
    numbers, pairs, stages = sPairs.shape
    norms = 1 if const_expr(mXStats is None) else 2
    lane = cute.arch.thread_idx()[0] % 32
    state = producer_state(stages)
    for tile in cutlass.range(split, tiles, splits, unroll=1):
        block, i, batch = decode(tile, crop, blocks)
        found = []  # on their way while the stage is waited for
        for step in cutlass.range_constexpr(-(-pairs // 32)):
            k = block * pairs + lane + 32 * step
            of_z = read_statistics(mZStats, (batch, i, k), crop)
            of_x, factor = of_z, Float32(0.0)
            if const_expr(norms == 2):
                of_x = read_statistics(mXStats, (batch, i, k), crop)
            elif const_expr(mMask is not None):
                if k < crop:
                    factor = mMask[batch, i, k]
            found.append((of_z, of_x, factor))
        cute.arch.mbarrier_wait(fetched + (stages + state.index), state.phase)
        for step in cutlass.range_constexpr(-(-pairs // 32)):
            n = lane + 32 * step
            of_z, of_x, factor = found[step]
            if n < pairs:
                at = norms * (pairs // tile_n * state.index + n // tile_n)
                put_more(sMore[n % tile_n, None, at], of_z[0], of_z[1])
                if const_expr(norms == 2):
                    put_more(sMore[n % tile_n, None, at + 1], of_x[0], of_x[1])
                two = cute.make_rmem_tensor(2, Float32)
                two[0], two[1] = of_x[1], of_z[1] if const_expr(norms == 2) else factor
                line = sPairs[None, n, state.index]
                cute.autovec_copy(two, cute.make_tensor(line.iterator.align(8), cute.make_layout(2)))
                if const_expr(numbers > 2):
                    line[2] = of_z[0]
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(fetched + state.index)
        state.advance()


@cute.jit
def differentiate_rows(accs, frags, tile: cute.Tensor, pairs: cute.Tensor, read_mma, tidx: Int32,
                       of_x: cutlass.Constexpr, has_mask: cutlass.Constexpr):  # fmt: skip
    """From values and gates, accs, their gradients, each times the rstd of its LayerNorm, rounded into frags. tile: the incoming
    ones (64, pairs); pairs: this tile's numbers; of_x: whether values are projected from x (pairs are rows of tile)."""
    v, g = (rows_view(acc) for acc in accs)
    dtype, shape = tile.element_type, read_mma.partition_shape_C((ROWS, READ_COLUMNS))
    for j in cutlass.range_constexpr(cute.size(accs[0]) // 4):
        if const_expr(j % (READ_COLUMNS // 8) == 0):
            cute.arch.sync_warp()  # else loads of later columns move up, and registers spill
            columns = cute.local_tile(tile, (ROWS, READ_COLUMNS), (0, j * 8 // READ_COLUMNS))
            d = read_tile(columns, read_mma, tidx, shape, of_x)
        of_pair = cute.make_rmem_tensor((2, 2), Float32)
        for c in cutlass.range_constexpr(2):
            line = pairs[None, 8 * j + 2 * (tidx % 4) + c]
            cute.autovec_copy(cute.make_tensor(line.iterator.align(8), cute.make_layout(2)), of_pair[None, c])
        incoming = [two_columns(d, r, j % (READ_COLUMNS // 8)) for r in range(2)]
        d_value, d_gate = (cute.make_rmem_tensor((2, 2), Float32) for _ in range(2))
        for c in cutlass.range_constexpr(2):
            n, rstd_v = 2 * j + c, of_pair[0, c]
            rstd_g, s = of_pair[1, c] if const_expr(of_x) else rstd_v, cute.make_rmem_tensor(2, Float32)
            for r in cutlass.range_constexpr(2):
                s[r] = g[r, n] * (rstd_g * -LOG2_E)
            sigmoids(s)
            for r in cutlass.range_constexpr(2):
                grad = incoming[r][c]
                if const_expr(has_mask):
                    # A select, not a product: what the gradient of a masked pair holds must not matter. That of an absent one is
                    # finite, and times an rstd of 0.
                    grad = Float32(0.0) if of_pair[1, c] == 0.0 else grad * of_pair[1, c]
                own = grad * s[r]
                both = own * (v[r, n] * rstd_v)
                d_value[c, r], d_gate[c, r] = own * rstd_v, (both - both * s[r]) * rstd_g
        for frag, four in zip(frags, (d_value, d_gate), strict=True):
            rounded = cute.make_tensor(frag.iterator + 4 * j, cute.make_layout(4))
            rounded.store(cute.make_tensor(four.iterator, cute.make_layout(4)).load().to(dtype))


@cute.jit
def store_rows(sums: cute.Tensor, mean: cute.Tensor, line: cute.Tensor, r: cutlass.Constexpr, column, tidx: Int32):
    """Sums of one of this thread's rows, with their mean taken out, to a row of a plane from a column on; sums: a `rows_view`."""
    for n in cutlass.range_constexpr(cute.size(sums, mode=[1]) // 2):
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = sums[r, 2 * n] - mean, sums[r, 2 * n + 1] - mean
        at = column + 8 * n + 2 * (tidx % 4)
        cute.autovec_copy(pair, cute.make_tensor((line.iterator + at).align(8), cute.make_layout(2)))
