"""LayerNorm of rows: statistics, and the gradient from them (sm_90a)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tpf_jit.templates.common.tiles import pair_of_operand

VECTOR = 8  # channels of one 16-byte access


@cute.jit
def pair_statistics(
    row: cute.Tensor, eps: Float32, lane: Int32,
    channels: cutlass.Constexpr, lanes: cutlass.Constexpr, dtype: cutlass.Constexpr,
):
    """Mean and reciprocal deviation of one row by `lanes` neighbouring threads, float32 inside: the mean, then the variance about
    it, as PyTorch takes them. row: (channels,) 16-bit in shared memory."""
    chunks = -(-channels // (VECTOR * lanes))
    values = cute.make_rmem_tensor((VECTOR, chunks), Float32)
    values.fill(0.0)
    pieces = cute.logical_divide(row, cute.make_layout(VECTOR))
    total = Float32(0.0)
    for c in cutlass.range_constexpr(chunks):
        if (lane + lanes * c) * VECTOR < channels:
            raw = cute.make_rmem_tensor(VECTOR, dtype)
            cute.autovec_copy(pieces[None, lane + lanes * c], raw)
            values[None, c].store(raw.load().to(Float32))
        for e in cutlass.range_constexpr(VECTOR):
            total += values[e, c]
    mean = cute.arch.warp_reduction_sum(total, threads_in_group=lanes) * (1.0 / channels)
    squares = Float32(0.0)
    for c in cutlass.range_constexpr(chunks):
        if (lane + lanes * c) * VECTOR < channels:
            for e in cutlass.range_constexpr(VECTOR):
                values[e, c] = values[e, c] - mean
                squares += values[e, c] * values[e, c]
    variance = cute.arch.warp_reduction_sum(squares, threads_in_group=lanes) * (1.0 / channels)
    return mean, cute.math.rsqrt(variance + eps, fastmath=True)


@cute.jit
def keep_statistics(mStats: cute.Tensor, where, mean: Float32, inverse: Float32):
    """mStats[(batch, i, j)] = mean, reciprocal deviation; mStats: (B, N, N, 2) float32."""
    pair = cute.make_rmem_tensor(2, Float32)
    pair[0], pair[1] = mean, inverse
    batch, i, j = where
    line = mStats[batch, i, j, None]
    cute.autovec_copy(pair, cute.make_tensor(line.iterator.align(8), cute.make_layout(2)))


@cute.jit
def read_statistics(mStats: cute.Tensor, where, crop: Int32) -> cute.Tensor:
    """Mean and reciprocal deviation that `keep_statistics` left, (2,) float32; zeros where there is no pair."""
    batch, i, j = where
    pair = cute.make_rmem_tensor(2, Float32)
    pair.fill(0.0)
    if j < crop:
        line = mStats[batch, i, j, None]
        cute.autovec_copy(cute.make_tensor(line.iterator.align(8), cute.make_layout(2)), pair)
    return pair


@cute.jit
def norm_gradient(t: cute.Tensor, x: cute.Tensor, mean: Float32, rstd: Float32, width: cutlass.Constexpr):
    """t becomes the gradient of one row's x from that of its LayerNorm's result (times the weight), t:
    rstd * (t - mean(t) - xhat * mean(t xhat)). t, x: a thread's float32 elements of a row that four neighbouring lanes share."""
    total, product = Float32(0.0), Float32(0.0)
    for n in cutlass.range_constexpr(cute.size(t)):
        x[n] = (x[n] - mean) * rstd
        total += t[n]
        product += t[n] * x[n]
    total = cute.arch.warp_reduction_sum(total, threads_in_group=4) * (1.0 / width)
    product = cute.arch.warp_reduction_sum(product, threads_in_group=4) * (1.0 / width)
    for n in cutlass.range_constexpr(cute.size(t)):
        t[n] = (t[n] - total - x[n] * product) * rstd


@cute.jit
def operand_statistics(frag: cute.Tensor, eps: Float32, width: cutlass.Constexpr) -> cute.Tensor:
    """((mean, reciprocal deviation), 2 rows) of the rows of `tiles.read_operand`'s fragment: first the mean, then the variance
    about it, as PyTorch takes them."""
    found = cute.make_rmem_tensor((2, 2), Float32)
    for r in cutlass.range_constexpr(2):
        total, squares = Float32(0.0), Float32(0.0)
        for j in cutlass.range_constexpr(width // 8):
            two = pair_of_operand(frag, r, j)
            total += two[0] + two[1]
        mean = cute.arch.warp_reduction_sum(total, threads_in_group=4) * (1.0 / width)
        for j in cutlass.range_constexpr(width // 8):
            two = pair_of_operand(frag, r, j)
            for e in cutlass.range_constexpr(2):
                difference = two[e] - mean
                squares = difference * difference + squares
        variance = cute.arch.warp_reduction_sum(squares, threads_in_group=4) * (1.0 / width)
        found[0, r], found[1, r] = mean, cute.math.rsqrt(variance + eps, fastmath=True)
    return found
