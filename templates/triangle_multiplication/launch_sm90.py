"""What the kernels of the triangle multiplicative update share on the host (sm_90a): MMAs, operands as TMA wants them, how many
tiles there are, and symbolic operands to compile against."""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import get_smem_capacity_in_bytes
from cutlass.tensor_utils import LayoutEnum

from tpf_jit.templates.common.fragments import DTYPES
from tpf_jit.templates.common.tma import checked_storage, one_stage

ROWS = 64  # the M of wgmma
ROW_MAJOR, COL_MAJOR = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SHARED, REGISTERS = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


# ---- MMAs and operands ----------------------------------------------------------------------------------------------
def warpgroup_mma(dtype, columns: int, source=SHARED, a_major=K_MAJOR, b_major=K_MAJOR):
    """Product of one warpgroup: ROWS by columns results in float32; source: where its A operand is."""
    return sm90.make_trivial_tiled_mma(
        dtype, dtype, a_major, b_major, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(ROWS, columns), a_source=source
    )


def chunk_of(columns: int) -> int:
    """Columns of one bulk copy where copies fill parts of a stage's rows: as many as the layout's swizzle spans."""
    return 64 if columns % 64 == 0 else 32


def of_pairs(t: cute.Tensor) -> cute.Tensor:
    """(B, i, j, C) seen as (j, C, i, B); any (B, X, rows, columns) as (rows, columns, X, B)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def of_channels(t: cute.Tensor) -> cute.Tensor:
    """(B, D, i, P) seen as (P, D, i, B)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 1, 2, 0]))


def of_factors(t: cute.Tensor) -> cute.Tensor:
    """(B, 2, D, i, P) seen as (2 D, P, i, B): a and b lie behind each other."""
    layout = cute.make_layout(
        (2 * t.shape[2], t.shape[4], t.shape[3], t.shape[0]), stride=(t.stride[2], 1, t.stride[3], t.stride[0])
    )
    return cute.make_tensor(t.iterator, layout)


def tma_load(t: cute.Tensor, layout, tile):
    """(atom, coordinate tensor) that fills a stage of a shared-memory layout with a tile of t."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), t, one_stage(layout), tile)


def tma_store(t: cute.Tensor, layout, tile):
    """(atom, coordinate tensor) that stores a stage of a shared-memory layout as a tile of t."""
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), t, one_stage(layout), tile)


def fitting(storage):
    """The struct of a CTA's shared memory, or an error while tracing."""
    return checked_storage(storage, get_smem_capacity_in_bytes("sm_90"))


def tiles_of(mZ: cute.Tensor, pairs: int):
    """(crop, tiles of one i, all tiles) of so many pairs each; mZ: (B, N, N, C)."""
    batch, crop = mZ.shape[0], mZ.shape[1]
    blocks = cute.ceil_div(crop, pairs)
    return crop, blocks, blocks * crop * batch


# ---- symbolic operands ----------------------------------------------------------------------------------------------
def dense(dtype, *shape, align: int = 16) -> cute.Tensor:
    """Fake tensor without gaps; only the first size may be a symbol."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=align)


def strided(dtype, shape, step: int) -> cute.Tensor:
    """Fake tensor with unit last stride, the others multiples of `step` elements; its base is aligned to as many bytes."""
    strides = (*(cute.sym_int64(divisibility=step) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=step * dtype.width // 8)


class SymbolicProblem:
    """Operands of a variant for `compiled`. B, N, P and the number of splits are symbols, which the generated call checks for
    equality."""

    def __init__(self, variant: dict):
        self.dtype, self.channels, self.hidden = DTYPES[variant["dtype"]], variant["channels"], variant["hidden"]
        self.masked = variant.get("mask", False)
        self.batch, self.crop, self.splits, self.padded = (cute.sym_int(divisibility=step) for step in (1, 1, 1, 8))

    def pairs(self) -> cute.Tensor:
        """(B, N, N, C)."""
        return strided(self.dtype, (self.batch, self.crop, self.crop, self.channels), 8)

    def stats(self) -> cute.Tensor:
        """(B, N, N, 2) float32."""
        return strided(Float32, (self.batch, self.crop, self.crop, 2), 2)

    def mask(self) -> cute.Tensor | None:
        """(B, N, N) float32, or None."""
        return strided(Float32, (self.batch, self.crop, self.crop), 1) if self.masked else None

    def channel_major(self) -> cute.Tensor:
        """(B, D, N, P)."""
        return strided(self.dtype, (self.batch, self.hidden, self.crop, self.padded), 8)

    def factors(self) -> cute.Tensor:
        """(B, 2, D, N, P)."""
        return strided(self.dtype, (self.batch, 2, self.hidden, self.crop, self.padded), 8)

    def weights(self, rows: int, values: int) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Value weights (rows, values), gate weights (rows, C), and terms (rows, 4) float32."""
        return dense(self.dtype, rows, values), dense(self.dtype, rows, self.channels), dense(Float32, rows, 4)

    def folding(self, weight_dtype: str, biased: bool, aligned: bool) -> tuple[cute.Tensor | None, ...]:
        """What a kernel that folds weights reads and writes, in the order of `layout.fold_operands`. aligned: matrices and norms
        to 16 bytes, else to an element."""
        c, d = self.channels, self.hidden
        shapes, kind = ((2 * d, c), (2 * d, c), (c, d), (c, c)), DTYPES[weight_dtype]
        matrices = (dense(kind, *shape, align=16 if aligned else kind.width // 8) for shape in shapes)
        norms = (dense(Float32, size, align=16 if aligned else 4) for size in (c, c, d, d))
        biases = (dense(Float32, rows, align=4) if biased else None for rows, _ in shapes)
        folded = (dense(self.dtype, *shape) for shape in shapes)
        return *matrices, *norms, *biases, *folded, dense(Float32, 2 * d, 4), dense(Float32, c, 4)

    def sums(self, rows: int, values: int) -> tuple[cute.Tensor, cute.Tensor]:
        """Planes (splits, rows, values + C) and sums (splits, rows, 2), float32."""
        return dense(Float32, self.splits, rows, values + self.channels), dense(Float32, self.splits, rows, 2)


def compiled(kernel, *operands, options: str):
    """The DSL's compiled function of a kernel whose arguments end with the number of CTAs and the stream."""
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, *operands, Int32(1), stream, options=options)
