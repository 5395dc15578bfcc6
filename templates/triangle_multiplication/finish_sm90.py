"""Triangle multiplicative update, end of the backward, for sm_90a: gradients of all weights from sums over shares of the pairs.

    G, S = planes and sums over the splits, float32, of each of p_in, g_in, p_out, g_out, behind a norm with weight w and bias b
    gradient of the matrix = G * w + S b^T,   of its bias = S
    gradients of the norm: column sums of W * G, and W^T S, over the matrices behind it: norm_in p_in, g_in, g_out; norm_out p_out

Layouts:
    p_in, g_in (2 D, C), p_out (C, D), g_out (C, C)     float32 or bfloat16, contiguous; their gradients alike
    norm_in (C,), norm_out (D,), weights and biases     float32, or the matrices' dtype; their gradients alike
    front_planes (splits, 2 D, 2 C)                     float32: p_in in columns [0, C), g_in behind them
    back_planes (splits, C, D + C)                      float32: p_out in columns [0, D), g_out behind them
    front_sums (splits, 2 D, 2), back_sums (splits, C, 2)      float32: of value and gate
    gradients of biases (2 D,), (2 D,), (C,), (C,)      in the matrices' dtype, or absent, all four
    inner ((4 D + C) / rows, 2, C), outer (C / rows, 2, D)     float32: parts of the norms' gradients, between the two launches

The first launch is bound by memory. A CTA sums a few rows of 128 columns; each of its warps takes every eighth split, a vector of
four columns a lane, several splits in flight; their sums are added in the order of the warps. It leaves what its rows add to the
norms' gradients, and the second launch adds that up, again a warp every so many rows, then the warps in order. So the order of
every sum depends on the number of splits only.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from tpf_jit.templates.common.fragments import DTYPES
from tpf_jit.templates.triangle_multiplication.launch_sm90 import compiled, dense
from tpf_jit.templates.triangle_multiplication.pieces_sm90 import follow

WARPS = 8  # of a CTA of the first launch
VECTOR = 4  # columns of one access
COLUMNS = 32 * VECTOR  # of a CTA of the first launch
AHEAD = 4  # splits in flight, of every row
NORM_WARPS = 32  # of a CTA of the second launch, which has a column a lane


class TriangleMultiplicationFinishSm90:
    """The finish kernels of one variant."""

    def __init__(self, variant: dict, rows: int):
        self.dtype, self.norm_dtype = DTYPES[variant["weight_dtype"]], DTYPES[variant["norm_dtype"]]
        self.rows, self.has_bias = rows, variant["bias"]

    @cute.jit
    def __call__(
        self,
        mP: cute.Tensor, mG: cute.Tensor, mPOut: cute.Tensor, mGOut: cute.Tensor,
        mInW: cute.Tensor, mInB: cute.Tensor, mOutW: cute.Tensor, mOutB: cute.Tensor,
        mFront: cute.Tensor, mFrontSums: cute.Tensor, mBack: cute.Tensor, mBackSums: cute.Tensor,
        dP: cute.Tensor, dG: cute.Tensor, dPOut: cute.Tensor, dGOut: cute.Tensor,
        dInW: cute.Tensor, dInB: cute.Tensor, dOutW: cute.Tensor, dOutB: cute.Tensor,
        dPBias: cute.Tensor | None, dGBias: cute.Tensor | None, dPOutBias: cute.Tensor | None, dGOutBias: cute.Tensor | None,
        mInner: cute.Tensor, mOuter: cute.Tensor,
        num_ctas: Int32, stream: cuda.CUstream,
    ):
        channels, hidden = mPOut.shape
        norm_in, norm_out, front, back = (mInW, mInB), (mOutW, mOutB), (mFront, mFrontSums), (mBack, mBackSums)
        # matrix, gradient, its bias's, planes and sums, first column there, column of the sums, norm, parts, first row of them
        parts = (
            (mP, dP, dPBias, front, 0, 0, norm_in, mInner, 0),
            (mG, dG, dGBias, front, channels, 1, norm_in, mInner, 2 * hidden // self.rows),
            (mPOut, dPOut, dPOutBias, back, 0, 0, norm_out, mOuter, 0),
            (mGOut, dGOut, dGOutBias, back, hidden, 1, norm_in, mInner, 4 * hidden // self.rows),
        )
        ctas = 0
        for part in parts:
            ctas += self.ctas(part)
        # Left to itself, ptxas takes 40 registers for the sake of occupancy, and waits for every load.
        self.sum_kernel(parts).launch(
            grid=(ctas, 1, 1), block=(32 * WARPS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True,
        )
        sides = (mInner, dInW, dInB), (mOuter, dOutW, dOutB)
        grid = ((channels + hidden) // 16, 1, 1)
        self.norms_kernel(sides).launch(grid=grid, block=(32 * NORM_WARPS, 1, 1), stream=stream, use_pdl=True)

    def ctas(self, part) -> int:
        """CTAs of one matrix."""
        rows, columns = part[0].shape
        return rows // self.rows * -(-columns // COLUMNS)

    @cute.kernel
    def sum_kernel(self, parts):
        block = cute.arch.block_idx()[0]
        # One vector for every row of every warp, and a sum.
        memory = cutlass.memory.SmemAllocator()
        follow()
        totals = memory.allocate_tensor(Float32, cute.make_layout((COLUMNS, self.rows, WARPS)), byte_alignment=16)
        sums = memory.allocate_tensor(Float32, cute.make_layout((self.rows, WARPS)), byte_alignment=16)
        first = 0
        for part in parts:
            count = self.ctas(part)
            if (block >= first) & (block < first + count):
                self.sum(part, block - first, totals, sums)
            first = first + count

    @cute.jit
    def sum(self, part, index: Int32, totals: cute.Tensor, sums: cute.Tensor):
        """Some rows and columns of one matrix."""
        matrix, grad, bias_grad, (planes, plane_sums), start, kind, (weight, bias), left, place = part
        width = matrix.shape[1]
        strips = -(-width // COLUMNS)
        strip, block = index % strips, index // strips
        row = block * self.rows
        thread = cute.arch.thread_idx()[0]
        lane, warp = thread % 32, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # What the end needs is asked for first.
        column = strip * COLUMNS + thread
        owns = (thread < COLUMNS) & (column < width)
        scale, shift = Float32(0.0), Float32(0.0)
        own = cute.make_rmem_tensor(self.rows, Float32)
        own.fill(0.0)
        if owns:
            scale, shift = weight[column].to(Float32), bias[column].to(Float32)
            for r in cutlass.range_constexpr(self.rows):
                own[r] = matrix[row + r, column].to(Float32)

        total, total_sum = cute.make_rmem_tensor((VECTOR, self.rows), Float32), cute.make_rmem_tensor(self.rows, Float32)
        total.fill(0.0)
        total_sum.fill(0.0)
        # Lanes beyond the last column read it again.
        vector = strip * 32 + lane
        vector = vector if vector < width // VECTOR else width // VECTOR - 1
        splits = planes.shape[0]
        for split in cutlass.range(warp, splits, WARPS * AHEAD, unroll=1):
            values = cute.make_rmem_tensor((VECTOR, self.rows, AHEAD), Float32)
            added = cute.make_rmem_tensor((self.rows, AHEAD), Float32)
            for i in cutlass.range_constexpr(AHEAD):
                # Beyond the last split, it is read again and left out.
                at = split + WARPS * i
                at = at if at < splits else splits - 1
                for r in cutlass.range_constexpr(self.rows):
                    source = cute.logical_divide(planes[at, row + r, None], cute.make_layout(VECTOR))
                    cute.autovec_copy(source[None, start // VECTOR + vector], values[None, r, i])
                    added[r, i] = plane_sums[at, row + r, kind]
            for i in cutlass.range_constexpr(AHEAD):
                there = split + WARPS * i < splits
                for r in cutlass.range_constexpr(self.rows):
                    for e in cutlass.range_constexpr(VECTOR):
                        total[e, r] += values[e, r, i] if there else Float32(0.0)
                    total_sum[r] += added[r, i] if there else Float32(0.0)

        for r in cutlass.range_constexpr(self.rows):
            target = cute.logical_divide(totals[None, r, warp], cute.make_layout(VECTOR))
            cute.autovec_copy(total[None, r], target[None, lane])
            if lane == 0:
                sums[r, warp] = total_sum[r]
        cute.arch.sync_threads()
        if owns:
            norm_weight, norm_bias = Float32(0.0), Float32(0.0)
            for r in cutlass.range_constexpr(self.rows):
                whole, own_sum = totals[thread, r, 0], sums[r, 0]
                for i in cutlass.range_constexpr(1, WARPS):
                    whole += totals[thread, r, i]
                    own_sum += sums[r, i]
                grad[row + r, column] = (whole * scale + own_sum * shift).to(self.dtype)
                norm_weight += own[r] * whole
                norm_bias += own[r] * own_sum
                if const_expr(self.has_bias):
                    if column == 0:
                        bias_grad[row + r] = own_sum.to(self.dtype)
            left[place + block, 0, column], left[place + block, 1, column] = norm_weight, norm_bias

    @cute.kernel
    def norms_kernel(self, sides):
        block = cute.arch.block_idx()[0]
        memory = cutlass.memory.SmemAllocator()
        follow()
        totals = memory.allocate_tensor(Float32, cute.make_layout((32, NORM_WARPS)), byte_alignment=16)
        first = 0
        for side in sides:
            count = 2 * side[1].shape[0] // 32
            if (block >= first) & (block < first + count):
                self.add(side, block - first, totals)
            first = first + count

    @cute.jit
    def add(self, side, index: Int32, totals: cute.Tensor):
        """32 columns of a norm's weight or bias."""
        left, weight_grad, bias_grad = side
        count, _, width = left.shape
        lane, warp = cute.arch.thread_idx()[0] % 32, cute.arch.make_warp_uniform(cute.arch.warp_idx())
        kind, column = index // (width // 32), index % (width // 32) * 32 + lane
        steps = -(-count // NORM_WARPS)
        found = cute.make_rmem_tensor(steps, Float32)
        found.fill(0.0)
        for i in cutlass.range_constexpr(steps):
            at = warp + NORM_WARPS * i
            if const_expr(NORM_WARPS * (i + 1) <= count):
                found[i] = left[at, kind, column]
            elif at < count:
                found[i] = left[at, kind, column]
        total = found[0]
        for i in cutlass.range_constexpr(1, steps):
            total += found[i]
        totals[lane, warp] = total
        cute.arch.sync_threads()
        if warp == 0:
            whole = totals[lane, 0]
            for i in cutlass.range_constexpr(1, NORM_WARPS):
                whole += totals[lane, i]
            if kind == 0:
                weight_grad[column] = whole.to(self.norm_dtype)
            else:
                bias_grad[column] = whole.to(self.norm_dtype)


def build(variant: dict, rows: int, options: str):
    """Compile the kernels of a variant, for CTAs of so many rows; returns the DSL's compiled function."""
    kind, norm_kind = DTYPES[variant["weight_dtype"]], DTYPES[variant["norm_dtype"]]
    channels, hidden = variant["channels"], variant["hidden"]

    shapes = ((2 * hidden, channels), (2 * hidden, channels), (channels, hidden), (channels, channels))
    norms = (channels, channels, hidden, hidden)
    # A caller's weights may lie anywhere, as parts of one flat buffer do.
    matrices, gradients = ([dense(kind, *shape, align=kind.width // 8) for shape in shapes] for _ in range(2))
    vectors, vector_gradients = ([dense(norm_kind, size, align=norm_kind.width // 8) for size in norms] for _ in range(2))
    biases = [dense(kind, size, align=kind.width // 8) if variant["bias"] else None for size, _ in shapes]
    sums = []
    for size, columns in ((2 * hidden, 2 * channels), (channels, hidden + channels)):
        splits = cute.sym_int()
        sums += [dense(Float32, splits, size, columns), dense(Float32, splits, size, 2)]
    return compiled(
        TriangleMultiplicationFinishSm90(variant, rows), *matrices, *vectors, *sums, *gradients, *vector_gradients, *biases,
        dense(Float32, (4 * hidden + channels) // rows, 2, channels), dense(Float32, channels // rows, 2, hidden),
        options=options,
    )
