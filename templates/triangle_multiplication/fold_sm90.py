"""Triangle multiplicative update, fold, for sm_90a: the LayerNorms' weights and biases into the projections, in one small launch.

    W' = bf16(W * norm_weight),    u = row sums of W',    b' = bias + W norm_bias       for each of p_in, g_in, p_out, g_out

so that a projection of LN(z) is rstd * (z . W' - mean * u) + b'. What is subtracted is the sum of the rounded W', as that is what
the products hold of the mean.

Layouts:
    p_in, g_in (2 D, C), p_out (C, D), g_out (C, C)     float32 or bfloat16, contiguous
    norm_in (C,), norm_out (D,), weights and biases     float32
    biases (2 D,), (2 D,), (C,), (C,)                   float32 or absent, all four
    folded matrices                                     bfloat16, contiguous
    in_terms (2 D, 4), out_terms (C, 4)                 float32: u and b' of p, u and b' of g

A warp folds one row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from tpf_jit.templates.common.fragments import DTYPES
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import follow

WARPS = 8  # of one CTA
VECTOR = 4  # columns of one access


class TriangleMultiplicationFoldSm90:
    """The fold kernel of one variant."""

    def __init__(self, variant: dict):
        self.dtype = DTYPES[variant["weight_dtype"]]
        self.channels, self.hidden, self.has_bias = variant["channels"], variant["hidden"], variant["bias"]

    @cute.jit
    def __call__(
        self,
        mP: cute.Tensor, mG: cute.Tensor, mPOut: cute.Tensor, mGOut: cute.Tensor,
        mInW: cute.Tensor, mInB: cute.Tensor, mOutW: cute.Tensor, mOutB: cute.Tensor,
        mPBias: cute.Tensor | None, mGBias: cute.Tensor | None, mPOutBias: cute.Tensor | None, mGOutBias: cute.Tensor | None,
        fP: cute.Tensor, fG: cute.Tensor, fPOut: cute.Tensor, fGOut: cute.Tensor, mIn: cute.Tensor, mOut: cute.Tensor,
        num_ctas: Int32, stream: cuda.CUstream,
    ):
        norm_in, norm_out = (mInW, mInB), (mOutW, mOutB)
        # matrix, folded matrix, norm, bias, terms, first of its two columns of them
        parts = (
            (mP, fP, norm_in, mPBias, mIn, 0), (mG, fG, norm_in, mGBias, mIn, 2),
            (mPOut, fPOut, norm_out, mPOutBias, mOut, 0), (mGOut, fGOut, norm_in, mGOutBias, mOut, 2),
        )
        rows = 4 * self.hidden + 2 * self.channels
        self.kernel(parts).launch(grid=(-(-rows // WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, parts):
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        follow()
        first = 0
        for part in parts:
            count = part[0].shape[0]
            if (row >= first) & (row < first + count):
                self.fold(part, row - first)
            first = first + count

    @cute.jit
    def fold(self, part, row: Int32):
        """One row of one matrix."""
        matrix, folded, (weight, bias), shift, terms, column = part
        width = matrix.shape[1]
        lane = cute.arch.thread_idx()[0] % 32
        source, target = (cute.logical_divide(t[row, None], cute.make_layout(VECTOR)) for t in (matrix, folded))
        scales, shifts = (cute.logical_divide(t, cute.make_layout(VECTOR)) for t in (weight, bias))
        total, constant = Float32(0.0), Float32(0.0)
        for step in cutlass.range_constexpr(-(-width // (32 * VECTOR))):
            place = lane + 32 * step
            if place < width // VECTOR:
                raw, rounded = cute.make_rmem_tensor(VECTOR, self.dtype), cute.make_rmem_tensor(VECTOR, BFloat16)
                scale, move = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
                cute.autovec_copy(source[None, place], raw)
                cute.autovec_copy(scales[None, place], scale)
                cute.autovec_copy(shifts[None, place], move)
                values = cute.make_rmem_tensor(VECTOR, Float32)
                values.store(raw.load().to(Float32))
                rounded.store((values.load() * scale.load()).to(BFloat16))
                cute.autovec_copy(rounded, target[None, place])
                for e in cutlass.range_constexpr(VECTOR):
                    total += rounded[e].to(Float32)
                    constant += values[e] * move[e]
        total, constant = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_sum(constant)
        if lane == 0:
            if const_expr(self.has_bias):
                constant += shift[row]
            terms[row, column], terms[row, column + 1] = total, constant


def build(variant: dict, options: str):
    """Compile the kernel of a variant; returns the DSL's compiled function."""
    kind, channels, hidden = DTYPES[variant["weight_dtype"]], variant["channels"], variant["hidden"]

    def matrix(dtype, rows: int, columns: int, align: int = 16):
        return cute.runtime.make_fake_tensor(dtype, (rows, columns), (columns, 1), assumed_align=align)

    def vector(size: int):
        return cute.runtime.make_fake_tensor(Float32, (size,), (1,), assumed_align=4)

    shapes = ((2 * hidden, channels), (2 * hidden, channels), (channels, hidden), (channels, channels))
    biases = [vector(rows) if variant["bias"] else None for rows, _ in shapes]
    return cute.compile(
        # A caller's weights may lie anywhere, as parts of one flat buffer do.
        TriangleMultiplicationFoldSm90(variant), *(matrix(kind, *shape, kind.width // 8) for shape in shapes),
        vector(channels), vector(channels), vector(hidden), vector(hidden), *biases,
        *(matrix(BFloat16, *shape) for shape in shapes), matrix(Float32, 2 * hidden, 4), matrix(Float32, channels, 4),
        Int32(1), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=options,
    )
