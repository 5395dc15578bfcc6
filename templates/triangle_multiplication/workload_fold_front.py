"""The launch that folds the weights and makes the factors, as a workload: see `workload`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tpf_jit.templates.triangle_multiplication import layout
from tpf_jit.templates.triangle_multiplication.inputs import Inputs
from tpf_jit.templates.triangle_multiplication.workload import EPS, FoldWorkload, FrontWorkload


class FoldFrontWorkload(FrontWorkload):
    """Inputs: those of `FrontWorkload`. Outputs: those of `FoldWorkload` and those of `FrontWorkload`."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._folding = FoldWorkload(*arguments, **options)

    @property
    def bytes_per_set(self) -> int:
        """Bytes of what both read and write."""
        return super().bytes_per_set + self._folding.bytes_per_set

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        """All outputs in float64."""
        return super().reference(inputs) | self._folding.reference(inputs.weights)

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """As for both."""
        return super().errors(out, ref) | self._folding.errors(out, ref)

    def bounds(self) -> dict[str, float]:
        """Likewise."""
        return super().bounds() | self._folding.bounds()

    def _bind(self, kernel_fn: Callable[..., object], inputs: Inputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        folded = layout.folded_parts(inputs.weights, *layout.folded_empty(inputs.weights, inputs.z.dtype))
        operands = layout.prepare(inputs.z, inputs.mask, folded)
        factors, stats = layout.factors_empty(operands.z, self.shape.hidden), layout.stats_empty(operands.z)
        arguments = (*operands.fold_front(inputs.weights, factors, stats), EPS, self.num_ctas)
        return lambda: kernel_fn(*arguments), {"factors": factors, "stats": stats, **folded._asdict()}
