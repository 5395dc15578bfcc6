"""LayerNorm of rows in shared memory, in place (sm_90a)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

VECTOR = 8  # channels of one 16-byte access


@cute.jit
def normalise_pair(
    row: cute.Tensor, norm: cute.Tensor, eps: Float32, lane: Int32,
    channels: cutlass.Constexpr, lanes: cutlass.Constexpr, dtype: cutlass.Constexpr,
):
    """LN of one row by `lanes` neighbouring threads, float32 inside: mean, then the variance about it, as PyTorch takes them.

    row: (channels,) 16-bit in shared memory; norm: (channels, 2) float32, weight and bias.
    """
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
    inverse = cute.math.rsqrt(variance + eps, fastmath=True)
    parts = cute.logical_divide(norm, (cute.make_layout(VECTOR), None))
    for c in cutlass.range_constexpr(chunks):
        chunk = lane + lanes * c
        if chunk * VECTOR < channels:
            scale, shift = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
            cute.autovec_copy(parts[(None, chunk), 0], scale)
            cute.autovec_copy(parts[(None, chunk), 1], shift)
            rounded = cute.make_rmem_tensor(VECTOR, dtype)
            rounded.store((values[None, c].load() * inverse * scale.load() + shift.load()).to(dtype))
            cute.autovec_copy(rounded, pieces[None, chunk])
