"""Views of MMA fragments and register-level helpers (sm_90a).

Fragment facts used here (wgmma m64nNk16): in a 64-row accumulator, thread t of a
warpgroup holds rows 16*(t/32) + (t%32)/4 + 8*r and columns 8*j + 2*(t%4) + c, in register order c, r, j. A 16-bit
A operand of the next GEMM has the same register order, so probabilities never leave registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Uint32

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, N/8), 1, 1) seen as (2 rows, N/4 columns) of this thread."""
    (c, r, n), _, _ = acc.layout.shape
    (sc, sr, sn), _, _ = acc.layout.stride
    return cute.make_tensor(acc.iterator, cute.make_layout((r, (c, n)), stride=(sr, (sc, sn))))


def stacked(registers: cute.Tensor, index: int, shape) -> cute.Tensor:
    """Accumulator `index` of a stack of equal accumulators kept in one flat register tensor."""
    return cute.make_tensor(registers.iterator + index * cute.size(shape), cute.make_layout(shape))


@cute.jit
def widen_bf16(fragment: cute.Tensor) -> cute.Tensor:
    """A bfloat16 register tensor as a flat float32 one: a shift or a mask an element (.to(Float32) takes 1.7)."""
    size = cute.size(fragment)
    pairs = cute.recast_tensor(cute.make_tensor(fragment.iterator, cute.make_layout(size)), Uint32)
    wide = cute.make_rmem_tensor(size, Uint32)
    for i in cutlass.range_constexpr(size // 2):
        wide[2 * i] = pairs[i] << Uint32(16)
        wide[2 * i + 1] = pairs[i] & Uint32(0xFFFF0000)
    return cute.recast_tensor(wide, Float32)
