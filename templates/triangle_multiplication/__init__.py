"""Triangle multiplicative update: templates, operand layout, float64 reference, inputs and workloads.

Import-light: the registry reads `TEMPLATES` without torch and without the compiler. `layout`, `reference`, `inputs` and
`workload` need torch, as do `workload_fold_front`, and the backward's `layout_backward`, `workload_backward`,
`workload_gradients`, `workload_finish` and `workload_centre`.
"""

from tpf_jit.templates.triangle_multiplication.config import (
    TriangleMultiplicationBack,
    TriangleMultiplicationFold,
    TriangleMultiplicationFront,
    TriangleMultiplicationProductNN,
    TriangleMultiplicationProductNT,
    TriangleMultiplicationProductTN,
)
from tpf_jit.templates.triangle_multiplication.config_backward import (
    TriangleMultiplicationBackBackward,
    TriangleMultiplicationBackWeights,
    TriangleMultiplicationFrontBackward,
    TriangleMultiplicationFrontWeights,
)
from tpf_jit.templates.triangle_multiplication.config_centre import TriangleMultiplicationCentre
from tpf_jit.templates.triangle_multiplication.config_finish import TriangleMultiplicationFinish
from tpf_jit.templates.triangle_multiplication.config_gradients import TriangleMultiplicationFrontGradients
from tpf_jit.templates.triangle_multiplication.config_rows import (
    TriangleMultiplicationBackRows,
    TriangleMultiplicationFoldFront,
    TriangleMultiplicationFrontRows,
)

TEMPLATES = (
    TriangleMultiplicationFoldFront,
    TriangleMultiplicationFold,
    TriangleMultiplicationFrontRows,
    TriangleMultiplicationFront,
    TriangleMultiplicationProductNT,
    TriangleMultiplicationProductTN,
    TriangleMultiplicationProductNN,
    TriangleMultiplicationBackRows,
    TriangleMultiplicationBack,
    TriangleMultiplicationBackBackward,
    TriangleMultiplicationBackWeights,
    TriangleMultiplicationFrontBackward,
    TriangleMultiplicationFrontWeights,
    TriangleMultiplicationFrontGradients,
    TriangleMultiplicationFinish,
    TriangleMultiplicationCentre,
)
"""Of one family, the first that serves a problem is chosen where nothing is tuned."""
