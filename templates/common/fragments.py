"""Views of MMA fragments and register-level helpers (sm_90a).

Fragment facts used here (wgmma m64nNk16 and mma.sync m16n8k16 share them): in a 64-row accumulator, thread t of a
warpgroup holds rows 16*(t/32) + (t%32)/4 + 8*r and columns 8*j + 2*(t%4) + c, in register order c, r, j. A 16-bit
A operand of the next GEMM has the same register order, so probabilities never leave registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}


def rows_view(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, N/8), 1, 1) seen as (2 rows, N/4 columns) of this thread."""
    (c, r, n), _, _ = acc.layout.shape
    (sc, sr, sn), _, _ = acc.layout.stride
    return cute.make_tensor(acc.iterator, cute.make_layout((r, (c, n)), stride=(sr, (sc, sn))))


def stacked(registers: cute.Tensor, index: int, shape) -> cute.Tensor:
    """Accumulator `index` of a stack of equal accumulators kept in one flat register tensor."""
    return cute.make_tensor(registers.iterator + index * cute.size(shape), cute.make_layout(shape))


@dsl_user_op
def mma_m16n8k16(a, b, c, dtype, *, loc=None, ip=None):
    """Warp-level m16n8k16 product with float32 accumulation: returns the 4 new accumulators of this lane.

    a: 4 and b: 2 packed 16-bit pairs (Int32), c: 4 Float32, dtype: element type of a and b.
    """
    ty = "bf16" if dtype is BFloat16 else "f16"
    f32 = Float32.mlir_type
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)] + [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    packed = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * 4),
        operands,
        f"mma.sync.aligned.m16n8k16.row.col.f32.{ty}.{ty}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, "
        "{$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(f32, packed, [i], loc=loc, ip=ip)) for i in range(4)]


@cute.jit
def scaled_identity(fragment: cute.Tensor, value: Float32, lane: Int32, dtype: cutlass.Constexpr):
    """Fill an m16n8k16 A fragment (8 elements) with value * I; the value is rounded to dtype."""
    row, col = lane // 4, 2 * (lane % 4)
    zero = Float32(0.0)
    for c in cutlass.range_constexpr(2):
        on = value if row == col + c else zero
        fragment[c] = on.to(dtype)          # rows 0-7, columns 0-7
        fragment[2 + c] = zero.to(dtype)    # rows 8-15, columns 0-7
        fragment[4 + c] = zero.to(dtype)    # rows 0-7, columns 8-15
        fragment[6 + c] = on.to(dtype)      # rows 8-15, columns 8-15


def ones_pair(dtype) -> int:
    """Two packed 16-bit ones."""
    return 0x3F803F80 if const_expr(dtype is BFloat16) else 0x3C003C00
