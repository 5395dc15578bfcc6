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
from cutlass import Float32, Int32, const_expr

from tpf_jit.templates.triangle_multiplication.launch_sm90 import SymbolicProblem, compiled
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import follow

WARPS = 8  # of one CTA
VECTOR = 4  # columns of one access


class TriangleMultiplicationFoldSm90:
    """The fold kernel of one variant."""

    def __init__(self, variant: dict):
        self.channels, self.hidden = variant["channels"], variant["hidden"]

    @cute.jit
    def __call__(
        self,
        mP: cute.Tensor, mG: cute.Tensor, mPOut: cute.Tensor, mGOut: cute.Tensor,
        mInW: cute.Tensor, mInB: cute.Tensor, mOutW: cute.Tensor, mOutB: cute.Tensor,
        mPBias: cute.Tensor | None, mGBias: cute.Tensor | None, mPOutBias: cute.Tensor | None, mGOutBias: cute.Tensor | None,
        fP: cute.Tensor, fG: cute.Tensor, fPOut: cute.Tensor, fGOut: cute.Tensor, mIn: cute.Tensor, mOut: cute.Tensor,
        num_ctas: Int32, stream: cuda.CUstream,
    ):
        matrices, folded, biases = (mP, mG, mPOut, mGOut), (fP, fG, fPOut, fGOut), (mPBias, mGBias, mPOutBias, mGOutBias)
        parts = parts_of(matrices, folded, (mInW, mInB), (mOutW, mOutB), biases, mIn, mOut)
        rows = 4 * self.hidden + 2 * self.channels
        self.kernel(parts).launch(grid=(-(-rows // WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, parts):
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        follow()
        fold_row(parts, row)


def parts_of(matrices, folded, norm_in, norm_out, biases, in_terms, out_terms):
    """Of p_in, g_in, p_out and g_out: (matrix, folded matrix, (norm's weight, its bias), bias or None, terms, first of its two
    columns of them)."""
    norms, terms = (norm_in, norm_in, norm_out, norm_in), (in_terms, in_terms, out_terms, out_terms)
    return tuple(zip(matrices, folded, norms, biases, terms, (0, 2, 0, 2), strict=True))


@cute.jit
def fold_row(parts, row: Int32):
    """One row of the four matrices, see `parts_of`, by one warp; nothing if there is no such row."""
    first = 0
    for matrix, folded, norm, shift, terms, column in parts:
        own, count, width = row - first, matrix.shape[0], matrix.shape[1]
        if (own >= 0) & (own < count):
            values = read_columns(matrix[own, None])
            scale, move = (read_columns(x) for x in norm)
            rounded = cute.make_rmem_tensor(columns_of(width), folded.element_type)
            total, constant = scale_and_sum(values, scale, move, rounded)
            total, constant = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_sum(constant)
            write_columns(rounded, folded[own, None])
            if cute.arch.thread_idx()[0] % 32 == 0:
                if const_expr(shift is not None):
                    constant += shift[own]
                terms[own, column], terms[own, column + 1] = total, constant
        first = first + count


def columns_of(width: int) -> int:
    """How many of a row's columns a lane has room for."""
    return -(-width // (32 * VECTOR)) * VECTOR


@cute.jit
def read_columns(line: cute.Tensor):
    """This lane's columns of a row: VECTOR of every 32 times as many; zeros where there are none."""
    vectors, width = cute.logical_divide(line, cute.make_layout(VECTOR)), cute.size(line)
    values = cute.make_rmem_tensor(columns_of(width), line.element_type)
    for step in cutlass.range_constexpr(cute.size(values) // VECTOR):
        place, part = cute.arch.thread_idx()[0] % 32 + 32 * step, cute.local_tile(values, (VECTOR,), (step,))
        if const_expr(32 * VECTOR * (step + 1) <= width):
            cute.autovec_copy(vectors[None, place], part)
        else:
            part.fill(0)
            if place < width // VECTOR:
                cute.autovec_copy(vectors[None, place], part)
    return values


@cute.jit
def write_columns(values: cute.Tensor, line: cute.Tensor):
    """Likewise."""
    vectors, width = cute.logical_divide(line, cute.make_layout(VECTOR)), cute.size(line)
    for step in cutlass.range_constexpr(cute.size(values) // VECTOR):
        place = cute.arch.thread_idx()[0] % 32 + 32 * step
        if place < width // VECTOR:
            cute.autovec_copy(cute.local_tile(values, (VECTOR,), (step,)), vectors[None, place])


@cute.jit
def scale_and_sum(values: cute.Tensor, scale: cute.Tensor, move: cute.Tensor, rounded: cute.Tensor):
    """rounded: values times scale. Returns this lane's sums of what was rounded, and of values times move."""
    total, constant = Float32(0.0), Float32(0.0)
    rounded.store((values.load().to(Float32) * scale.load()).to(rounded.element_type))
    for e in cutlass.range_constexpr(cute.size(values)):
        total += rounded[e].to(Float32)
        constant += values[e].to(Float32) * move[e]
    return total, constant


def build(variant: dict, options: str):
    """Compile the kernel of a variant; returns the DSL's compiled function."""
    problem = SymbolicProblem({"dtype": "bfloat16", **variant})
    # A caller's weights may lie anywhere, as parts of one flat buffer do.
    operands = problem.folding(variant["weight_dtype"], variant["bias"], aligned=False)
    return compiled(TriangleMultiplicationFoldSm90(variant), *operands, options=options)
