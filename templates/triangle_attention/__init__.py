"""Triangle attention: templates, operand layout, float64 reference and workloads.

Import-light: the registry reads `TEMPLATES` without torch and without the compiler. The modules `layout`, `reference`, `inputs`
and `workload` need torch.
"""

from tpf_jit.templates.triangle_attention.backward import (
    TriangleAttentionBackwardKey,
    TriangleAttentionBackwardQuery,
    TriangleAttentionBackwardStats,
)
from tpf_jit.templates.triangle_attention.backward_tile import TriangleAttentionBackwardTile
from tpf_jit.templates.triangle_attention.config import TriangleAttentionForward, TriangleAttentionForwardTraining

TEMPLATES = (
    TriangleAttentionForward,
    TriangleAttentionForwardTraining,
    TriangleAttentionBackwardStats,
    TriangleAttentionBackwardKey,
    TriangleAttentionBackwardQuery,
    TriangleAttentionBackwardTile,
)
