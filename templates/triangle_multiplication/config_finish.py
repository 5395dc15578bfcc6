"""The template that ends the triangle multiplicative update's backward: from sums over shares of the pairs to gradients of the
weights. No torch, no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpf_jit.templates.base import Resources, Workload
from tpf_jit.templates.triangle_multiplication.config import _MultiplicationTemplate

ROWS = 2
"""Rows of a matrix that one CTA sums, and whose part of the norms' gradients it leaves; divides every width."""


@dataclass(frozen=True)
class FinishConfig:
    """The finish kernels have nothing to choose."""


class TriangleMultiplicationFinish(_MultiplicationTemplate):
    """Sums over shares of the pairs into gradients of the weights: see finish_sm90.py."""

    name = "triangle_multiplication_finish_sm90"
    direction = "finish"
    Config = FinishConfig

    def variant(self, shape: Any, *, bias: bool = False, norm_dtype: str = "") -> dict[str, Any]:
        """Norms have the matrices' dtype unless another is named."""
        found = {"weight_dtype": shape.weight_dtype, "channels": shape.channels, "hidden": shape.hidden}
        return {**found, "bias": bool(bias), "norm_dtype": norm_dtype or shape.weight_dtype}

    def check(self, shape: Any, config: FinishConfig) -> str | None:
        return None

    def resources(self, shape: Any, config: FinishConfig) -> Resources:
        return Resources(threads=256, smem_bytes=9 * 1024, registers_per_consumer=72, ctas_per_sm=3)

    def space(self, shape: Any) -> list[FinishConfig]:
        return [FinishConfig()]

    def default(self, shape: Any) -> FinishConfig:
        return FinishConfig()

    def build(self, variant: Mapping[str, Any], config: FinishConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import finish_sm90

        return finish_sm90.build(variant, ROWS, options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_finish import FinishWorkload

        return FinishWorkload(shape, device, seed, family)
