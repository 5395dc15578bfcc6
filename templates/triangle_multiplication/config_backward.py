"""The templates of the triangle multiplicative update's backward: parameters, rules, defaults. No torch, no compiler.

back_backward -> products -> front_backward for the data, back_weights and front_weights beside them, see layout_backward.py. The
device code is in {weights,back_backward,front_backward}_sm90.py; the products are the forward's templates.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_attention.config import register_split
from tpf_jit.templates.triangle_multiplication.config import _MultiplicationTemplate

MOST_CHANNELS = 256
"""Of z and x: a row of gradients stays in registers."""
PART_COLUMNS = 128
"""Columns of weights whose gradients one CTA keeps in registers, of either projection."""
MOST_SPLITS = 256


class _Backward(_MultiplicationTemplate):
    """What the backward's own templates share."""

    def supports(self, shape: Any) -> tuple[bool, str]:
        supported, reason = super().supports(shape)
        if supported and max(shape.channels, shape.hidden) > MOST_CHANNELS:
            return False, f"the kernel takes up to {MOST_CHANNELS} channels, not {shape.channels} and {shape.hidden} hidden"
        return supported, reason

    def registers(self, config: Any) -> tuple[int, int]:
        return register_split(config)


@dataclass(frozen=True)
class WeightsConfig:
    """Launch choices of the weight gradients' kernels."""

    tile_n: int = 64
    """Pairs of one tile."""
    tiles: int = 1
    """Tiles of one step; of two, the products of one overlap the gates of the other."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply; each owns 64 rows of the weights."""
    stages: int = 3
    """Steps in flight."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class _Weights(_Backward):
    """Gradients of the weights of one side: see weights_sm90.py."""

    Config = WeightsConfig

    def variant(self, shape: Any) -> dict[str, Any]:
        side = self.direction.removesuffix("_weights")
        found = {"dtype": shape.dtype, "side": side, "channels": shape.channels, "hidden": shape.hidden}
        return {**found, "mask": shape.has_mask} if side == "front" else found

    def rows(self, shape: Any) -> int:
        """Rows of the side's weights."""
        return 2 * shape.hidden if self.direction == "front_weights" else shape.channels

    def values(self, shape: Any) -> int:
        """Columns of the value's weights."""
        return shape.channels if self.direction == "front_weights" else shape.hidden

    def parts(self, shape: Any) -> int:
        """Parts into which the columns of both weights are cut."""
        return -(-max(shape.channels, self.values(shape)) // PART_COLUMNS)

    def splits(self, shape: Any, config: WeightsConfig, num_ctas: int) -> int:
        """Shares of the pairs, each with a plane of sums of its own: as many as fill the SMs.

        A pure function of its arguments: the order in which gradients are summed depends on it.
        """
        units = self.parts(shape) * -(-self.rows(shape) // (64 * config.consumer_warpgroups))
        tiles = shape.batch * shape.crop * -(-shape.crop // (config.tiles * config.tile_n))
        return max(1, min(tiles, num_ctas // units, MOST_SPLITS))

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_n": (16, 32, 48, 64), "tiles": (1, 2), "consumer_warpgroups": (1, 2), "stages": range(2, 9),
            "ctas_per_sm": (1,),
        }  # fmt: skip

    def registers_needed(self, shape: Any, config: WeightsConfig) -> int:
        """Sums of both weights, value and gate of a step's tiles, and 48 for the rest."""
        return (self.values(shape) + shape.channels) // self.parts(shape) // 2 + config.tiles * config.tile_n + 48

    def shared_bytes(self, shape: Any, config: WeightsConfig) -> int:
        values = self.values(shape)
        weights = 128 * config.consumer_warpgroups * (values + shape.channels + 32)
        norms = 2 if self.direction == "back_weights" else 1
        tile = 2 * config.tile_n * (shape.channels + (values if norms == 2 else 0)) + (8 + 32 * norms) * config.tile_n
        return 5 * 1024 + weights + config.tiles * config.stages * (tile + 128 * config.tile_n * config.consumer_warpgroups)

    def space(self, shape: Any) -> list[WeightsConfig]:
        found = []
        for warpgroups in (2, 1):
            if warpgroups > 1 and self.rows(shape) <= 64 or warpgroups == 1 and found:  # one takes 1.6 times as long
                continue
            for tile_n, tiles in ((64, 1), (48, 1), (32, 1), (32, 2)):
                if tile_n * tiles > 32 and (tile_n - 16) * tiles >= shape.crop:
                    continue
                fitting = (WeightsConfig(tile_n, tiles, warpgroups, stages) for stages in (6, 4, 3, 2))
                found += [config for config in fitting if self.check(shape, config) is None][:2]
        return found

    def default(self, shape: Any) -> WeightsConfig:
        """Two warpgroups, one tile of 64 pairs a step, the deepest stages; always legal."""
        return max(self.space(shape), key=lambda c: (c.consumer_warpgroups, c.tile_n, -c.tiles, c.stages))

    def build(self, variant: Mapping[str, Any], config: WeightsConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import weights_sm90

        values = variant["channels"] if variant["side"] == "front" else variant["hidden"]
        parts = -(-max(variant["channels"], values) // PART_COLUMNS)
        return weights_sm90.build(variant, config, parts, self.registers(config), options)


class TriangleMultiplicationFrontWeights(_Weights):
    """Gradients of the front's weights: see weights_sm90.py."""

    name = "triangle_multiplication_front_weights_sm90"
    direction = "front_weights"

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_backward import FrontWeightsWorkload

        return FrontWeightsWorkload(shape, device, seed, family)


class TriangleMultiplicationBackWeights(_Weights):
    """Gradients of the back's weights: see weights_sm90.py."""

    name = "triangle_multiplication_back_weights_sm90"
    direction = "back_weights"

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_backward import BackWeightsWorkload

        return BackWeightsWorkload(shape, device, seed, family)


@dataclass(frozen=True)
class FrontBackwardConfig:
    """Launch choices of the front's backward kernel."""

    tile_h: int = 64
    """Rows of the weights of one step."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply; each has tiles of 64 pairs of its own."""
    stages: int = 3
    """Tiles of the gradients of the factors in flight, for each warpgroup."""
    weight_stages: int = 3
    """Steps of weights in flight; where that is all there are, they stay."""
    pair_stages: int = 1
    """Tiles of z in shared memory, for each warpgroup."""
    operand_registers: int = 0
    """Whether (1) z is in registers as the operand of its products, which then read less shared memory."""
    sets: int = 1
    """Steps whose projections are under way or being differentiated."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class TriangleMultiplicationFrontBackward(_Backward):
    """Gradient of z: see front_backward_sm90.py."""

    name = "triangle_multiplication_front_backward_sm90"
    direction = "front_backward"
    Config = FrontBackwardConfig

    def variant(self, shape: Any) -> dict[str, Any]:
        return {"dtype": shape.dtype, "channels": shape.channels, "hidden": shape.hidden, "mask": shape.has_mask}

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_h": (32, 64), "consumer_warpgroups": (1, 2, 3), "stages": range(2, 9),
            "weight_stages": range(1, 33), "pair_stages": (1, 2), "operand_registers": (0, 1),
            "sets": (1, 2), "ctas_per_sm": (1,),
        }  # fmt: skip

    def registers_needed(self, shape: Any, config: FrontBackwardConfig) -> int:
        """The row of gradients, values and gates, both as operands, perhaps z (C/4), and 40 for the rest."""
        steps = config.sets * config.tile_h * 3 // 2
        return shape.channels // 2 + steps + config.operand_registers * shape.channels // 4 + 40

    def shared_bytes(self, shape: Any, config: FrontBackwardConfig) -> int:
        pairs = config.pair_stages * config.consumer_warpgroups * 256 * shape.channels
        weights = config.weight_stages * config.tile_h * 4 * shape.channels
        return 2560 + 128 * shape.hidden + pairs + weights + config.stages * config.tile_h * 128 * config.consumer_warpgroups

    def indivisible(self, shape: Any, config: FrontBackwardConfig) -> str | None:
        if 2 * shape.hidden % config.tile_h:
            return f"tile_h={config.tile_h} does not divide the {2 * shape.hidden} rows of the weights"
        if config.weight_stages < min(2 * config.sets, 2 * shape.hidden // config.tile_h):
            # A step's weights come back when its successor's (of two sets, the one's after that) products are done.
            return f"{config.sets} sets of accumulators hold more than weight_stages={config.weight_stages} steps of weights"
        return None

    def space(self, shape: Any) -> list[FrontBackwardConfig]:
        found = []
        for warpgroups in (3, 2, 1):
            if warpgroups == 1 and found:  # 1.3 to 1.7 times as long
                break
            for tile_h in (32, 64):
                steps = 2 * shape.hidden // tile_h
                for pair_stages in (1, 2):
                    # All weights on the SM; else as many as fit.
                    for weights in (steps, *(n for n in (4, 3, 2) if n < steps)):
                        fitting = (FrontBackwardConfig(tile_h, warpgroups, n, weights, pair_stages) for n in (4, 3, 2))
                        legal = [config for config in fitting if self.check(shape, config) is None]
                        if legal and legal[0] not in found:
                            found.append(legal[0])
                            for registers, sets in ((1, 1), (1, 2)):
                                again = replace(legal[0], operand_registers=registers, sets=sets)
                                found += [again] if self.check(shape, again) is None else []
                            if weights != steps:
                                break
        return found

    def default(self, shape: Any) -> FrontBackwardConfig:
        """Two warpgroups, all weights on the SM where they fit, z in registers, two steps under way; always legal."""

        def rank(c: FrontBackwardConfig) -> tuple:
            resident = c.weight_stages * c.tile_h >= 2 * shape.hidden
            sources = c.operand_registers, c.sets
            return -abs(c.consumer_warpgroups - 2), resident, *sources, c.pair_stages, c.tile_h, c.weight_stages, c.stages

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: FrontBackwardConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import front_backward_sm90

        return front_backward_sm90.build(variant, config, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_backward import FrontBackwardWorkload

        return FrontBackwardWorkload(shape, device, seed, family)


@dataclass(frozen=True)
class BackBackwardConfig:
    """Launch choices of the back's backward kernel."""

    tile_c: int = 32
    """Rows of the weights of one step."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply; each has tiles of 64 pairs of its own."""
    stages: int = 3
    """Tiles of the gradients of the output in flight, for each warpgroup."""
    weight_stages: int = 3
    """Steps of weights in flight; where that is all there are, they stay."""
    pair_stages: int = 1
    """Tiles of z and x in shared memory, for each warpgroup."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class TriangleMultiplicationBackBackward(_Backward):
    """Gradients of the contraction and, through the gate, of LN(z): see back_backward_sm90.py."""

    name = "triangle_multiplication_back_backward_sm90"
    direction = "back_backward"
    Config = BackBackwardConfig

    def variant(self, shape: Any) -> dict[str, Any]:
        return {"dtype": shape.dtype, "channels": shape.channels, "hidden": shape.hidden}

    @staticmethod
    def passes(channels: int, hidden: int) -> int:
        """Passes over the weights: one where the gradients of x and z fit into registers together."""
        return 1 if channels + hidden <= 2 * PART_COLUMNS else 2

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_c": (16, 32, 64), "consumer_warpgroups": (1, 2), "stages": range(2, 9), "weight_stages": range(1, 33),
            "pair_stages": (1, 2), "ctas_per_sm": (1,),
        }  # fmt: skip

    def registers_needed(self, shape: Any, config: BackBackwardConfig) -> int:
        """The rows of gradients, value and gate with their operands, and 48 for the rest."""
        together = self.passes(shape.channels, shape.hidden) == 1
        columns = shape.channels + shape.hidden if together else max(shape.channels, shape.hidden)
        return columns // 2 + config.tile_c + 48

    def shared_bytes(self, shape: Any, config: BackBackwardConfig) -> int:
        width, warpgroups = shape.channels + shape.hidden, config.consumer_warpgroups
        pairs = config.pair_stages * warpgroups * 128 * width
        waiting = warpgroups * 128 * shape.hidden if self.passes(shape.channels, shape.hidden) > 1 else 0
        weights = config.weight_stages * config.tile_c * 2 * width
        steps = config.stages * config.tile_c * 128 * warpgroups
        return 3072 + 64 * shape.channels + pairs + waiting + weights + steps

    def space(self, shape: Any) -> list[BackBackwardConfig]:
        found = []
        for warpgroups in (2, 1):
            if warpgroups == 1 and found:  # 1.3 to 1.9 times as long
                break
            for tile_c in (32, 64, 16):
                if shape.channels % tile_c:
                    continue
                steps = shape.channels // tile_c
                for pair_stages in (1, 2):
                    # All weights on the SM; else as many as fit.
                    for weights in (steps, *(n for n in (4, 3, 2) if n < steps)):
                        fitting = (BackBackwardConfig(tile_c, warpgroups, n, weights, pair_stages) for n in (4, 3, 2))
                        legal = [config for config in fitting if self.check(shape, config) is None]
                        if legal and legal[0] not in found:
                            found.append(legal[0])
                            if weights != steps:
                                break
        return found

    def indivisible(self, shape: Any, config: BackBackwardConfig) -> str | None:
        if shape.channels % config.tile_c:
            return f"tile_c={config.tile_c} does not divide the {shape.channels} channels"
        return None

    def default(self, shape: Any) -> BackBackwardConfig:
        """Two warpgroups, all weights on the SM where they fit, else two sets of tiles, the largest steps; always legal."""

        def rank(c: BackBackwardConfig) -> tuple:
            resident = c.weight_stages * c.tile_c >= shape.channels
            return c.consumer_warpgroups, resident, c.pair_stages, min(c.tile_c, 32), c.weight_stages, c.stages

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: BackBackwardConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import back_backward_sm90

        passes = self.passes(variant["channels"], variant["hidden"])
        return back_backward_sm90.build(variant, config, passes, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_backward import BackBackwardWorkload

        return BackBackwardWorkload(shape, device, seed, family)
