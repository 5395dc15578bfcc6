"""Triangle multiplicative update: templates, operand layout, float64 reference, inputs and workloads.

Import-light: the registry reads `TEMPLATES` without torch and without the compiler. `layout`, `reference`, `inputs` and
`workload` need torch.
"""

from tpf_jit.templates.triangle_multiplication.config import (
    TriangleMultiplicationBack,
    TriangleMultiplicationFront,
    TriangleMultiplicationProductNN,
    TriangleMultiplicationProductNT,
    TriangleMultiplicationProductTN,
)

TEMPLATES = (
    TriangleMultiplicationFront,
    TriangleMultiplicationProductNT,
    TriangleMultiplicationProductTN,
    TriangleMultiplicationProductNN,
    TriangleMultiplicationBack,
)
