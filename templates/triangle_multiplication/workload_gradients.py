"""The kernels for all of the triangle multiplicative update's front gradients as a workload: see workload_backward.py."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tpf_jit.templates.triangle_multiplication import layout_backward
from tpf_jit.templates.triangle_multiplication.config_gradients import LAUNCH_ROWS
from tpf_jit.templates.triangle_multiplication.workload_backward import (
    ROUNDINGS,
    FrontBackwardWorkload,
    FrontInputs,
    FrontWeightsWorkload,
)

BETWEEN_LAUNCHES = 0.8
"""As `workload_backward.ROUNDINGS`, of dz for every launch but the last."""


class FrontGradientsWorkload(FrontWeightsWorkload):
    """Kernels of "triangle_multiplication/front_gradients". Outputs: those of front_backward and of front_weights."""

    own_template = "triangle_multiplication_front_gradients_sm90"

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one call; weights are small."""
        return super().bytes_per_set + 2 * self._element() * self._pairs() * self.shape.channels

    def reference(self, inputs: FrontInputs) -> dict[str, Tensor]:
        """In float64."""
        return {**super().reference(inputs), **FrontBackwardWorkload.reference(self, inputs)}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS errors."""
        planes = {name: x for name, x in ref.items() if name != "dz"}
        return {**FrontBackwardWorkload.errors(self, out, ref), **super().errors(out, planes)}

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors: front_backward's and front_weights', and of dz what rounding between launches adds."""
        allowed = ROUNDINGS[self.family].dz + BETWEEN_LAUNCHES * (2 * self.shape.hidden // LAUNCH_ROWS - 1)
        return {**super().bounds(), "dz": self._bound(allowed, self._pairs() * self.shape.channels)}

    def _sizes(self) -> dict[str, int]:
        return {**FrontBackwardWorkload._sizes(self), **super()._sizes()}

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        return {"dz": outputs[0], **super()._results(*outputs[1:])}

    def _bind(self, kernel_fn: Callable[..., object], inputs: FrontInputs) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        operands, splits = self._operands(inputs, inputs.dzn), self.splits
        planes = layout_backward.front_planes_empty(inputs.call.z, self.shape.hidden, splits)
        outputs = layout_backward.pair_empty(inputs.call.z), *planes
        return lambda: kernel_fn(*operands, *outputs, splits, self.num_ctas), outputs
