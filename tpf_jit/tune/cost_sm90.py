"""What the cost models need to know of an H100 or H200 on SXM, in clocks of an SM. Source, but for the traffic: NVIDIA's CUDA
programming guide, compute capability 9.0, and the H100's architecture white paper."""

SMS = 132
MMA_FLOP = 4096.0
"""Dense 16-bit FLOP a clock and SM."""
MUFU = 16.0
"""Exponentials or reciprocals a clock and SM."""
SHARED_BYTES = 128.0
"""Bytes a clock that an SM reads from its shared memory."""
L2_BYTES = 64.0
"""Bytes a clock that an SM reads from the L2."""
MEMORY_BYTES = 20.0
"""Bytes a clock and SM to or from memory: 4.8 TB/s of an H200, among 132 SMs at 1.83 GHz."""
WARPGROUP = 64
"""Rows of a matrix instruction, which a warpgroup owns: queries, keys, pairs or channels."""
