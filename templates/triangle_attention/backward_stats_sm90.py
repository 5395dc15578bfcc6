"""Triangle attention backward, row statistics, for sm_90a: what the two gradient kernels need to know of every query.

Layouts:
    out, residual, dout     (B, I, H, N, D)        16-bit; residual = 16-bit rounding error of out, or absent
    lse, lse_low            (B, I, H, N)           float32; lse_low = what rounding lost of the LSE, or absent
    stats                   (B, I, H, 3, Nstat)    float32, Nstat = N rounded up to 256, every element written

    plane 0   (LSE + low) * log2 e;  where |LSE| > 4096: low * log2 e;  +inf where there is no query or the row has no key
    plane 1   delta = sum_d dout * (out + residual), the row term of the softmax gradient
    plane 2   0;  where |LSE| > 4096: -LSE

so that P = exp2((x + plane 2) * log2 e - plane 0) for a natural-log logit x, exactly 0 where P must not be. The split keeps
rows whose logits are all huge (additive masks of -1e9) a proper softmax: (x - LSE) is exact there, LSE * log2 e is not.

One warp handles 32 / lanes queries at a time, `lanes` = D / 8 threads (a power of two) a query, 16 bytes of each tensor a
thread. The sum runs over the 8 elements of a thread and then over the lanes in a fixed tree.
Source: the output residual is TurboPairFormer's (arXiv 2610.05854).
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from tpf_jit.templates.common.tma import SymbolicOperands

LOG2_E = math.log2(math.e)
SUBTRACT_FIRST = 4096.0  # as in the forward: above, the rounding of LSE * log2 e would show in P
VECTOR = 8


class TriangleAttentionBackwardStatsSm90:
    """The statistics kernel of one (variant, config)."""

    def __init__(self, variant: dict, config):
        self.has_residual = variant["residual"]
        self.threads = config.threads
        # D / 8 rounded up to a power of two, so that a query's lanes are a shuffle group.
        self.lanes = 1 << max(0, (variant["tile_hdim"] // VECTOR - 1).bit_length())
        self.queries = self.threads // self.lanes

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor, mR: cute.Tensor | None, mdO: cute.Tensor, mLSE: cute.Tensor, mLow: cute.Tensor | None,
        mStats: cute.Tensor, num_ctas: Int32, stream: cuda.CUstream,
    ):
        batch, rows, heads, padded = mO.shape[0], mO.shape[1], mO.shape[2], mStats.shape[4]
        blocks = padded // self.queries
        tasks = blocks * heads * rows * batch
        self.kernel(mO, mR, mdO, mLSE, mLow, mStats, blocks, tasks).launch(
            grid=(cutlass.min(tasks, num_ctas * (2048 // self.threads)), 1, 1), block=(self.threads, 1, 1), stream=stream,
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mR: cute.Tensor | None, mdO: cute.Tensor, mLSE: cute.Tensor, mLow: cute.Tensor | None,
        mStats: cute.Tensor, blocks: Int32, tasks: Int32,
    ):
        tidx = cute.arch.thread_idx()[0]
        lane, local = tidx % self.lanes, tidx // self.lanes
        rows, heads, crop, dim = mO.shape[1], mO.shape[2], mO.shape[3], mO.shape[4]
        for task in cutlass.range(cute.arch.block_idx()[0], tasks, cute.arch.grid_dim()[0], unroll=1):
            # Heads fastest: in the projection layout the heads of a query lie side by side.
            rest, head = task // heads, task % heads
            rest, block = rest // blocks, rest % blocks
            batch, row, query = rest // rows, rest % rows, block * self.queries + local
            delta = Float32(0.0)
            if query < crop:
                if lane * VECTOR < dim:
                    at = (batch, row, head, query)
                    o, do = self.load(mO, at, lane), self.load(mdO, at, lane)
                    if const_expr(self.has_residual):
                        r = self.load(mR, at, lane)
                        for i in cutlass.range_constexpr(VECTOR):
                            delta += do[i] * (o[i] + r[i])
                    else:
                        for i in cutlass.range_constexpr(VECTOR):
                            delta += do[i] * o[i]
            delta = cute.arch.warp_reduction_sum(delta, threads_in_group=self.lanes)
            if lane == 0:
                lse2, shift = Float32.inf, Float32(0.0)
                if query < crop:
                    lse, low = mLSE[batch, row, head, query], Float32(0.0)
                    if const_expr(self.has_residual):
                        low = mLow[batch, row, head, query]
                    huge = cute.arch.fmax(lse, -lse) > SUBTRACT_FIRST
                    shift = -lse if huge else shift
                    lse2 = low * LOG2_E if huge else (lse + low) * LOG2_E
                    if lse == -Float32.inf:
                        lse2, shift = Float32.inf, Float32(0.0)
                mStats[batch, row, head, 0, query] = lse2
                mStats[batch, row, head, 1, query] = delta
                mStats[batch, row, head, 2, query] = shift

    @cute.jit
    def load(self, t: cute.Tensor, at, lane: Int32):
        """16 bytes of one query as 8 float32 registers."""
        batch, row, head, query = at
        line = t[batch, row, head, query, None]
        source = cute.make_tensor((line.iterator + Int64(lane) * VECTOR).align(16), cute.make_layout(VECTOR))
        raw = cute.make_rmem_tensor(VECTOR, t.element_type)
        cute.autovec_copy(source, raw)
        wide = cute.make_rmem_tensor(VECTOR, Float32)
        wide.store(raw.load().to(Float32))
        return wide


def build(variant: dict, config, options: str):
    """Compile the kernel of (variant, config) against symbolic shapes; returns the DSL's compiled function."""
    x = SymbolicOperands({**variant, "bias_dtype": "float32", "mask": False})
    residual, low = (x.wide(), x.lse()) if variant["residual"] else (None, None)
    kernel = TriangleAttentionBackwardStatsSm90(variant, config)
    return cute.compile(
        kernel, x.wide(), residual, x.wide(), x.lse(), low, x.stats(), Int32(1), x.stream(), options=options
    )
