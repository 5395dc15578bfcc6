"""Small pieces every warp-specialised TMA kernel here is made of: operand views, rings, partitions, symbolic operands."""

import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from tpf_jit.templates.common.fragments import DTYPES


def matrix_first(t: cute.Tensor) -> cute.Tensor:
    """(B, I, H, N, D) seen as (N, D, H, I, B): matrix modes first, as TMA tiles want them. Works for any 5-d tensor."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 4, 2, 1, 0]))


def bias_matrix_first(t: cute.Tensor) -> cute.Tensor:
    """(B, H, N, N) seen as (queries, keys, H, B)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def mask_matrix_first(t: cute.Tensor) -> cute.Tensor:
    """(B, I, Npad) seen as (1, Npad, I, B)."""
    return cute.make_tensor(t.iterator, cute.prepend(cute.select(t.layout, mode=[2, 1, 0]), cute.make_layout(1, stride=0)))


def one_stage(layout):
    """A staged shared-memory layout without its stage mode."""
    return cute.slice_(layout, (None, None, 0))


def tile_bytes(layout, dtype) -> int:
    """Bytes of one stage."""
    return cute.size_in_bytes(dtype, cute.select(layout, mode=[0, 1]))


def stage_floats(count: int) -> int:
    """Float32 elements from one stage of a small unswizzled tile to the next: tensor copies write at multiples of 128 bytes."""
    return -(-count // 32) * 32


def smem_area(dtype, layout):
    """Field of a shared-memory struct that holds the layout."""
    return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], 1024]


def smem_tensor(field, layout) -> cute.Tensor:
    """Tensor over a struct field; the swizzle lives in the pointer, as wgmma wants it."""
    return field.get_tensor(layout.outer, swizzle=layout.inner)


def checked_storage(storage, capacity: int):
    """The struct, or an error while tracing: an oversized CTA would otherwise fail only at launch."""
    if storage.size_in_bytes() > capacity:
        raise ValueError(f"shared memory: {storage.size_in_bytes()} bytes a CTA, {capacity} available")
    return storage


def tma_ring(bars, stages: int, tx_count: int, consumer_warps: int, last: bool = False):
    """mbarrier ring from one TMA thread to consumer warps (one arrival each); the last one made synchronises the CTA."""
    return pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumer_warps),
        tx_count=tx_count,
        barrier_storage=bars.data_ptr(),
        defer_sync=not last,
    )


def producer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int):
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


@cute.jit
def release_after_reads(pipe, state):
    """Give a stage back that this warp read with ordinary loads (ldmatrix, LDS).

    Such reads and the TMA write that follows belong to different proxies, so the mbarrier alone does not order them: without
    the fence a load still under way got bytes of the next tile (H200, two CTAs an SM: in 1e-5 of the steps).
    """
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()  # one lane arrives for all
    pipe.consumer_release(state)


def partition(tma, smem: cute.Tensor, gmem: cute.Tensor, shape, coord):
    """(destination by stage, source by the coordinates left None) of a TMA load of tiles of `shape`; no cluster."""
    tiles = cute.local_tile(gmem, shape, coord)
    return cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2))


class SymbolicOperands:
    """Fake tensors of one problem for `cute.compile`: sizes are symbols that the generated call checks for equality."""

    def __init__(self, variant: dict, crop: int = 0):
        self.dtype, self.bias_dtype = DTYPES[variant["dtype"]], DTYPES[variant["bias_dtype"]]
        self.masked = variant["mask"]
        self.batch, self.rows, self.heads = (cute.sym_int() for _ in range(3))
        self.crop, self.dim = crop or cute.sym_int(), cute.sym_int(divisibility=8)

    def tensor(self, dtype, shape, step: int):
        """Unit last stride, the others multiples of `step` elements and 64 bits wide; base aligned to as many bytes."""
        strides = (*(cute.sym_int64(divisibility=step) for _ in shape[1:]), 1)
        return cute.runtime.make_fake_tensor(dtype, shape, strides, assumed_align=min(16, step * dtype.width // 8))

    def wide(self):
        """(B, I, H, N, D), 16 bits."""
        return self.tensor(self.dtype, (self.batch, self.rows, self.heads, self.crop, self.dim), 8)

    def bias(self):
        """(B, H, N, N)."""
        return self.tensor(self.bias_dtype, (self.batch, self.heads, self.crop, self.crop), 128 // self.bias_dtype.width)

    def mask(self):
        """(B, I, Npad) float32, or None."""
        return self.tensor(Float32, (self.batch, self.rows, cute.sym_int(divisibility=256)), 256) if self.masked else None

    def lse(self):
        """(B, I, H, N) float32."""
        return self.tensor(Float32, (self.batch, self.rows, self.heads, self.crop), 1)

    def stats(self):
        """(B, I, H, 3, Nstat) float32."""
        return self.tensor(Float32, (self.batch, self.rows, self.heads, 3, cute.sym_int(divisibility=256)), 4)

    @staticmethod
    def stream():
        return cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
