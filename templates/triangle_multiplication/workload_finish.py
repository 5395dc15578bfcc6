"""The kernels that end the triangle multiplicative update's backward as a workload: gradients of weights from planes of sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit.templates.triangle_multiplication import layout_backward
from tpf_jit.templates.triangle_multiplication.config_backward import (
    TriangleMultiplicationBackWeights,
    TriangleMultiplicationFrontWeights,
)
from tpf_jit.templates.triangle_multiplication.config_gradients import TriangleMultiplicationFrontGradients
from tpf_jit.templates.triangle_multiplication.inputs import make_inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights
from tpf_jit.templates.triangle_multiplication.workload import _StageWorkload

FINISH_BOUND = 2e-6
"""Of gradients in float32: sums over splits and rows of float32 numbers."""
_NORMS = ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")


class FinishInputs(NamedTuple):
    """What the kernels read: weights of one dtype, norms perhaps of another; planes and sums as `layout_backward` has them."""

    weights: Weights
    front_planes: Tensor
    front_sums: Tensor
    back_planes: Tensor
    back_sums: Tensor


class FinishWorkload(_StageWorkload):
    """Sums over splits into gradients of weights, which are the outputs, by name, those of absent biases left out.

    Planes and sums are random: in their smallest ones lies as much as in the others, so one that is left out or read twice is
    seen.

    Args:
        splits: of front and back planes; by default those of the kernels that sum, by their defaults for the grid.
        norm_dtype: of the norms; by default that of the matrices.
        The rest as for the stages of the forward.
    """

    def __init__(self, *arguments, splits: tuple[int, int] | None = None, norm_dtype: str = "", **options) -> None:
        super().__init__(*arguments, **options)
        self.norm_dtype = norm_dtype or self.shape.weight_dtype
        self.splits = self._usual_splits() if splits is None else splits

    def _usual_splits(self) -> tuple[int, int]:
        # Weights wider than those kernels take have no planes of their own; any number will do.
        shape = replace(self.shape, channels=min(self.shape.channels, 256), hidden=min(self.shape.hidden, 256))
        together = TriangleMultiplicationFrontGradients()
        front_template = together if together.supports(shape)[0] else TriangleMultiplicationFrontWeights()
        templates = front_template, TriangleMultiplicationBackWeights()
        front, back = (template.splits(shape, template.default(shape), self.num_ctas) for template in templates)
        return front, back

    @property
    def bytes_per_set(self) -> int:
        """Bytes of planes and sums, of the weights, and of their gradients."""
        c, d = self.shape.channels, self.shape.hidden
        front, back = self.splits
        matrices = 2 * getattr(torch, self.shape.weight_dtype).itemsize * c * (5 * d + c)
        return 8 * front * 2 * d * (c + 1) + 4 * back * c * (c + d + 2) + matrices

    def make_inputs(self, seed: int) -> FinishInputs:
        """Weights of a call and random planes; a pure function of both seeds."""
        shape = replace(self.shape, crop=1, batch=1, mask="none")  # z, which is drawn with them, is not used
        weights = make_inputs(shape, self.device, self.seed + seed, self.family, None, self.projection_biases).weights
        norms = {name: getattr(weights, name).to(getattr(torch, self.norm_dtype)) for name in _NORMS}
        generator = torch.Generator(self.device).manual_seed(self.seed + seed + 1)
        c, d = self.shape.channels, self.shape.hidden
        front, back = self.splits
        sizes = (front, 2 * d, 2 * c), (front, 2 * d, 2), (back, c, d + c), (back, c, 2)
        planes = (torch.randn(size, generator=generator, device=self.device) for size in sizes)
        return FinishInputs(weights._replace(**norms), *planes)

    def reference(self, inputs: FinishInputs) -> dict[str, Tensor]:
        """The gradients in float64."""
        c, d = self.shape.channels, self.shape.hidden
        w = Weights(*(None if x is None else x.double() for x in inputs.weights))
        front, front_sums, back, back_sums = (x.double().sum(0) for x in inputs[1:])
        planes = {"p_in": front[:, :c], "g_in": front[:, c:], "p_out": back[:, :d], "g_out": back[:, d:]}
        sums = dict(zip(planes, (*front_sums.unbind(-1), *back_sums.unbind(-1)), strict=True))
        found = {}
        for norm, behind in (("norm_in", ("p_in", "g_in", "g_out")), ("norm_out", ("p_out",))):
            scale, shift = getattr(w, f"{norm}_weight"), getattr(w, f"{norm}_bias")
            matrices = [getattr(w, f"{name}_weight") for name in behind]
            pairs = list(zip(behind, matrices, strict=True))
            found[f"{norm}_weight"] = sum((matrix * planes[name]).sum(0) for name, matrix in pairs)
            found[f"{norm}_bias"] = sum(matrix.T @ sums[name] for name, matrix in pairs)
            for name in behind:
                found[f"{name}_weight"] = planes[name] * scale + sums[name].outer(shift)
                if getattr(w, f"{name}_bias") is not None:
                    found[f"{name}_bias"] = sums[name]
        return found

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors: one rounding of gradients in bfloat16, none of the others."""
        c, d, float32 = self.shape.channels, self.shape.hidden, self.shape.weight_dtype == "float32"
        matrices = {"p_in_weight": 2 * d * c, "g_in_weight": 2 * d * c, "p_out_weight": c * d, "g_out_weight": c * c}
        biases = {"p_in_bias": 2 * d, "g_in_bias": 2 * d, "p_out_bias": c, "g_out_bias": c}
        found = matrices | (biases if self.projection_biases else {})
        found = {name: FINISH_BOUND if float32 else self._bound(1.5, size) for name, size in found.items()}
        float32 = self.norm_dtype == "float32"
        return found | {name: FINISH_BOUND if float32 else self._bound(1.5, min(c, d)) for name in _NORMS}

    def _bind(self, kernel_fn: Callable[..., object], inputs: FinishInputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        grads, arguments = layout_backward.finish_operands(*inputs)
        outputs = {name: x for name, x in grads._asdict().items() if x is not None}
        return lambda: kernel_fn(*arguments, self.num_ctas), outputs
