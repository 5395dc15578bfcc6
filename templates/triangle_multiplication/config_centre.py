"""The template that makes a float32 z ready for the triangle multiplicative update's kernels. No torch, no compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpf_jit.templates.base import Resources, Workload
from tpf_jit.templates.triangle_multiplication.config import _MultiplicationTemplate


@dataclass(frozen=True)
class CentreConfig:
    """The centre kernel has nothing to choose."""


class TriangleMultiplicationCentre(_MultiplicationTemplate):
    """A float32 z, less its pairs' means, to bf16: see centre_sm90.py."""

    name = "triangle_multiplication_centre_sm90"
    direction = "centre"
    Config = CentreConfig

    def variant(self, shape: Any) -> dict[str, Any]:
        return {"channels": shape.channels}

    def check(self, shape: Any, config: CentreConfig) -> str | None:
        return None

    def resources(self, shape: Any, config: CentreConfig) -> Resources:
        few = shape.channels <= 256
        return Resources(threads=256, smem_bytes=0, registers_per_consumer=64 if few else 128, ctas_per_sm=4 if few else 2)

    def space(self, shape: Any) -> list[CentreConfig]:
        return [CentreConfig()]

    def default(self, shape: Any) -> CentreConfig:
        return CentreConfig()

    def build(self, variant: Mapping[str, Any], config: CentreConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import centre_sm90

        return centre_sm90.build(variant, options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_centre import CentreWorkload

        return CentreWorkload(shape, device, seed, family)
