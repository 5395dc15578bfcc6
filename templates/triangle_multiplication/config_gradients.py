"""The template of the triangle multiplicative update's backward that does the work of front_backward and front_weights in one. No
torch, no compiler.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_multiplication.config_backward import MOST_SPLITS, _Backward

CHANNELS = 128
"""Of z: each of two warpgroups has half of them."""
LAUNCH_ROWS = 128
"""Rows of the projections' weights of one launch, whose gradients stay in registers."""


@dataclass(frozen=True)
class FrontGradientsConfig:
    """Launch choices of the kernel for the front's gradients."""

    stages: int = 2
    """Tiles of pairs in flight."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply; each has 64 rows of the weights, and half of z's channels."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class TriangleMultiplicationFrontGradients(_Backward):
    """Gradients of z and of the front's weights: see front_gradients_sm90.py."""

    name = "triangle_multiplication_front_gradients_sm90"
    direction = "front_gradients"
    Config = FrontGradientsConfig
    optional = True
    """Where it does not serve, other directions do its work."""

    def variant(self, shape: Any) -> dict[str, Any]:
        return {"dtype": shape.dtype, "channels": shape.channels, "hidden": shape.hidden, "mask": shape.has_mask}

    def supports(self, shape: Any) -> tuple[bool, str]:
        supported, reason = super().supports(shape)
        if supported and (shape.channels != CHANNELS or 2 * shape.hidden % LAUNCH_ROWS):
            return False, (
                f"the kernel takes {CHANNELS} channels and a hidden width in steps of {LAUNCH_ROWS // 2}, "
                f"not {shape.channels} and {shape.hidden}"
            )
        return supported, reason

    def splits(self, shape: Any, config: FrontGradientsConfig, num_ctas: int) -> int:
        """Shares of the pairs, each with a plane of sums of its own: one for every SM.

        A pure function of its arguments: the order in which gradients are summed depends on it.
        """
        return max(1, min(shape.batch * shape.crop * -(-shape.crop // 64), num_ctas, MOST_SPLITS))

    def choices(self) -> Mapping[str, Container[int]]:
        return {"stages": (2,), "consumer_warpgroups": (2,), "ctas_per_sm": (1,)}

    def registers_needed(self, shape: Any, config: FrontGradientsConfig) -> int:
        """Sums of both weights, values and gates of 64 pairs, and 40 for the rest."""
        return CHANNELS + 64 + 40

    def shared_bytes(self, shape: Any, config: FrontGradientsConfig) -> int:
        weights, tiles = 4 * LAUNCH_ROWS * (CHANNELS + 16), 128 * (2 * CHANNELS + LAUNCH_ROWS + 16) * config.stages
        return weights + tiles + 256 * LAUNCH_ROWS + 12 * 1024

    def space(self, shape: Any) -> list[FrontGradientsConfig]:
        return [FrontGradientsConfig()]

    def default(self, shape: Any) -> FrontGradientsConfig:
        """The one there is; always legal."""
        return FrontGradientsConfig()

    def build(self, variant: Mapping[str, Any], config: FrontGradientsConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import front_gradients_sm90

        return front_gradients_sm90.build(variant, config, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_gradients import FrontGradientsWorkload

        return FrontGradientsWorkload(shape, device, seed, family)
