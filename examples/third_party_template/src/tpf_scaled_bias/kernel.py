"""Device code: out = scale * x + bias.

x, out `(R, C)`, unit stride along C, row stride a multiple of the vector; bias `(C,)`; arithmetic in float32. One thread owns
`vector` neighbouring columns: it loads their bias once and walks `rows` rows.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}


class ScaledBias:
    def __init__(self, threads: int, vector: int, rows: int):
        self.threads, self.vector, self.rows = threads, vector, rows

    @cute.jit
    def __call__(self, mX: cute.Tensor, mBias: cute.Tensor, mOut: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        row_blocks = cute.ceil_div(cute.size(mX, mode=[0]), self.rows)
        column_blocks = cute.ceil_div(cute.size(mX, mode=[1]), self.threads * self.vector)
        # Rows on the x axis: only that one may exceed 65535 blocks.
        self.kernel(mX, mBias, mOut, scale).launch(
            grid=(row_blocks, column_blocks, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mBias: cute.Tensor, mOut: cute.Tensor, scale: Float32):
        thread, _, _ = cute.arch.thread_idx()
        row_block, column_block, _ = cute.arch.block_idx()
        column = column_block * self.threads + thread  # in units of vectors
        if column * self.vector < mX.shape[1]:
            rX = cute.make_rmem_tensor((1, self.vector), mX.element_type)
            rBias = cute.make_rmem_tensor(self.vector, mBias.element_type)
            cute.autovec_copy(cute.local_tile(mBias, (self.vector,), (column,)), rBias)
            bias = cute.make_tensor(rBias.iterator, rX.layout)
            for i in cutlass.range_constexpr(self.rows):
                row = row_block * self.rows + i
                if row < mX.shape[0]:
                    cute.autovec_copy(cute.local_tile(mX, (1, self.vector), (row, column)), rX)
                    value = rX.load().to(Float32) * scale + bias.load().to(Float32)
                    rX.store(value.to(mX.element_type))
                    cute.autovec_copy(rX, cute.local_tile(mOut, (1, self.vector), (row, column)))


def compile_scaled_bias(dtype: str, threads: int, vector: int, rows: int, options: str):
    """The compiled function (x, bias, out, scale), launched on torch's current stream."""
    element, fake = DTYPES[dtype], cute.runtime.make_fake_tensor
    n_rows, n_cols = cute.sym_int(), cute.sym_int(divisibility=vector)
    align = vector * element.width // 8

    def matrix():
        return fake(element, (n_rows, n_cols), (cute.sym_int64(divisibility=vector), 1), assumed_align=align)

    bias = fake(element, (n_cols,), (1,), assumed_align=align)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(ScaledBias(threads, vector, rows), matrix(), bias, matrix(), Float32(0.0), stream, options=options)
