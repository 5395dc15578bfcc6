"""Second templates of the front and of the back of the triangle multiplicative update, with pairs as the rows of the MMA and
weights that stay on the SM: parameters, rules, defaults. No torch, no compiler. The tuner measures them beside the first ones.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_attention.config import CTA_SHARED_BYTES, register_split
from tpf_jit.templates.triangle_multiplication.config import TriangleMultiplicationBack, TriangleMultiplicationFront

MOST_HIDDEN = 384
"""Of a back with operands in registers: at 416 and more they spill, 40 to 364 bytes at 64 and 128 channels."""


class _Rows:
    """What both add to the templates whose work they do."""

    def supports(self, shape: Any) -> tuple[bool, str]:
        supported, reason = super().supports(shape)
        if supported and not self.space(shape):
            widths = f"{shape.channels} channels and {shape.hidden} hidden"
            return False, f"weights and tiles of {widths} do not fit on an SM, nor in parts on a few"
        return supported, reason

    def registers(self, config: Any) -> tuple[int, int]:
        return register_split(config)

    @staticmethod
    def unshareable(config: Any, stages: int) -> str | None:
        """Why warpgroups cannot share tiles as they would; stages: of each warpgroup's own."""
        if config.shared and (stages > 1 or config.shared > config.consumer_warpgroups):
            return f"{config.shared} tiles in turn are for as many warpgroups at least, which then have none of their own"
        return None


@dataclass(frozen=True)
class FrontRowsConfig:
    """Launch choices of the front kernel with pairs as rows."""

    tile_h: int = 32
    """Rows of the weights of one block."""
    consumer_warpgroups: int = 4
    """Warpgroups that multiply and gate; each has tiles of 64 pairs of its own."""
    z_stages: int = 1
    """Tiles of z in shared memory, for each warpgroup; the one that is multiplied is in registers."""
    out_stages: int = 2
    """Blocks of results on their way out, for each warpgroup."""
    sets: int = 1
    """Blocks whose products are under way or being gated."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""
    parts: int = 1
    """CTAs that share the weights' rows: each has some of them, and all tiles of z pass by all."""
    shared: int = 0
    """Tiles in shared memory, in which all warpgroups take turns; 0: each has its own."""

    @property
    def piece(self) -> int:
        """Rows of results stored at a time."""
        return min(self.tile_h, 32 if self.consumer_warpgroups < 4 else 16)


class TriangleMultiplicationFrontRows(_Rows, TriangleMultiplicationFront):
    """LayerNorm, projections, gates, mask: see front_rows_sm90.py."""

    name = "triangle_multiplication_front_rows_sm90"
    Config = FrontRowsConfig
    parts: Container[int] = (1, 2, 4, 8)
    shared: Container[int] = (0, 1, 2)

    def registers_needed(self, shape: Any, config: FrontRowsConfig) -> int:
        """z as an operand (C/4), values and gates of the blocks under way (tile_h/2 each), and 48 for the rest."""
        return shape.channels // 4 + config.sets * config.tile_h + 48

    def shared_bytes(self, shape: Any, config: FrontRowsConfig) -> int:
        weights, warpgroups = 8 * shape.hidden * (shape.channels + 16) // config.parts, config.consumer_warpgroups
        tiles = (config.shared or warpgroups * config.z_stages) * 128 * shape.channels
        return 2048 + weights + tiles + warpgroups * config.out_stages * 128 * config.piece

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_h": (16, 32, 64), "consumer_warpgroups": (1, 2, 3, 4), "z_stages": (1, 2), "out_stages": (2, 4),
            "sets": (1, 2), "ctas_per_sm": (1,), "parts": self.parts, "shared": self.shared,
        }  # fmt: skip

    def indivisible(self, shape: Any, config: FrontRowsConfig) -> str | None:
        if reason := self.unshareable(config, config.z_stages):
            return reason
        rows, whose = 2 * shape.hidden // config.parts, f"rows of each of {config.parts} parts of the weights"
        if 2 * shape.hidden % (config.parts * config.tile_h):
            return f"tile_h={config.tile_h} does not divide the {rows} {whose}"
        if rows // config.piece % config.out_stages:  # buffers take turns across tiles
            return f"the {rows} {whose} are no multiple of {config.out_stages} buffers"
        return None

    def space(self, shape: Any) -> list[FrontRowsConfig]:
        # The fewest parts that fit: at C = D = 256 eight took 1.4 times as long as four on an H200.
        fit = [parts for parts in self.parts if 8 * shape.hidden * shape.channels <= parts * CTA_SHARED_BYTES]
        return [
            config
            for warpgroups in (2, 3, 4)
            for tile_h in (32, 64)
            for z, shared in ((2, 0), (1, 0), (1, 2), (1, 1))
            for sets in (2, 1)
            for parts in fit[:1]
            if not shared or (parts > 1 and warpgroups > 2)
            if self.check(shape, config := FrontRowsConfig(tile_h, warpgroups, z, 2, sets, parts=parts, shared=shared)) is None
        ]

    def default(self, shape: Any) -> FrontRowsConfig:
        """As many warpgroups as fit, which was fastest on an H200, with the largest blocks, one under way, or two where the
        weights are in parts; always legal."""

        def rank(c: FrontRowsConfig) -> tuple:
            return -c.shared, c.consumer_warpgroups, c.sets if c.parts > 1 else -c.sets, c.tile_h, c.z_stages, c.out_stages

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: FrontRowsConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import front_rows_sm90

        return front_rows_sm90.build(variant, config, self.registers(config), options)


SMALL_PAIRS = 128**2
"""Up to so many pairs of all batch elements fold and front are one launch: there the host takes longer than the device, and
launches are its work."""


class TriangleMultiplicationFoldFront(TriangleMultiplicationFrontRows):
    """What folds the weights and the front in one: see fold_front_sm90.py."""

    name = "triangle_multiplication_fold_front_sm90"
    direction = "fold_front"
    parts, shared = (1,), (0,)
    optional = True
    """Where it does not serve, fold and front do its work."""

    def supports(self, shape: Any) -> tuple[bool, str]:
        pairs = shape.batch * shape.crop**2
        if pairs > SMALL_PAIRS:  # first, as it costs nothing: calls without a plan ask
            return False, f"the kernel is for up to {SMALL_PAIRS} pairs, as of one crop of 128, not {pairs}"
        return super().supports(shape)

    def variant(self, shape: Any, *, bias: bool = False) -> dict[str, Any]:
        return {**super().variant(shape), "weight_dtype": shape.weight_dtype, "bias": bool(bias)}

    def default(self, shape: Any) -> FrontRowsConfig:
        """Two warpgroups, the largest blocks, two under way: the fastest on an H200 at crops of 64 and 128; always legal."""

        def rank(c: FrontRowsConfig) -> tuple:
            return c.consumer_warpgroups == 2, c.tile_h, c.sets, -c.z_stages

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: FrontRowsConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import fold_front_sm90

        return fold_front_sm90.build(variant, config, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload_fold_front import FoldFrontWorkload

        return FoldFrontWorkload(shape, device, seed, family)


@dataclass(frozen=True)
class BackRowsConfig:
    """Launch choices of the back kernel with operands in registers."""

    tile_c: int = 32
    """Channels of one block of results."""
    consumer_warpgroups: int = 3
    """Warpgroups that multiply and gate; each has tiles of 64 pairs of its own."""
    stages: int = 1
    """Tiles of z and x in shared memory, for each warpgroup; those that are multiplied are in registers."""
    out_stages: int = 2
    """Blocks of results on their way out, for each warpgroup."""
    sets: int = 1
    """Blocks whose products are under way or being gated."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""
    parts: int = 1
    """CTAs that share the weights' rows: each has some of them, and all tiles pass by all."""
    shared: int = 0
    """Tiles of z and of x in shared memory, in which all warpgroups take turns; 0: each has its own."""


class TriangleMultiplicationBackRows(_Rows, TriangleMultiplicationBack):
    """LayerNorm of x, output projection, gate, residual: see back_rows_sm90.py."""

    name = "triangle_multiplication_back_rows_sm90"
    Config = BackRowsConfig

    def registers_needed(self, shape: Any, config: BackRowsConfig) -> int:
        """z and x as operands (C/4 and D/4), values and gates of the blocks under way (tile_c/2 each), and 48 for the rest."""
        return (shape.channels + shape.hidden) // 4 + config.sets * config.tile_c + 48

    def shared_bytes(self, shape: Any, config: BackRowsConfig) -> int:
        width, warpgroups = shape.channels + shape.hidden, config.consumer_warpgroups
        tiles = (config.shared or warpgroups * config.stages) * 128 * width
        weights = (2 * width + 64) * shape.channels // config.parts
        return 3072 + weights + tiles + warpgroups * config.out_stages * 128 * config.tile_c

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_c": (16, 32, 64), "consumer_warpgroups": (1, 2, 3), "stages": (1, 2), "out_stages": (2, 4), "sets": (1, 2),
            "ctas_per_sm": (1,), "parts": (1, 2), "shared": (0, 1, 2),
        }  # fmt: skip

    def indivisible(self, shape: Any, config: BackRowsConfig) -> str | None:
        if reason := self.unshareable(config, config.stages):
            return reason
        if shape.hidden > MOST_HIDDEN:
            return f"the operand in registers is for a hidden width up to {MOST_HIDDEN}, not {shape.hidden}"
        if shape.channels % (config.parts * config.out_stages * config.tile_c):  # buffers take turns across tiles
            whose = f"the {shape.channels // config.parts} channels of each of {config.parts} parts"
            return f"{config.out_stages} blocks of tile_c={config.tile_c} do not divide {whose}"
        return None

    def space(self, shape: Any) -> list[BackRowsConfig]:
        found: list[BackRowsConfig] = []
        # Warpgroups take turns, and weights are in parts, only where there is no other way: all tiles pass by every part.
        for parts, shared in ((1, (0,)), (1, (2, 1)), (2, (2, 1))):
            found = found or [
                config
                for warpgroups, tile_c in ((2, 32), (2, 64), (3, 32), (3, 64))
                for stages in (2, 1)
                for tiles in shared
                for sets in (2, 1)
                if self.check(shape, config := BackRowsConfig(tile_c, warpgroups, stages, 2, sets, 1, parts, tiles)) is None
            ]
        return found

    def default(self, shape: Any) -> BackRowsConfig:
        """Two warpgroups with the largest blocks, one under way; three with small ones where operands are narrow. The fastest on
        an H200 at C = D = 128, and at 64; always legal."""
        wanted = 3 if shape.channels + shape.hidden <= 128 else 2

        def rank(c: BackRowsConfig) -> tuple:
            return c.consumer_warpgroups == wanted, c.tile_c if wanted == 2 else -c.tile_c, -c.sets, -c.stages, -c.shared

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: BackRowsConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import back_rows_sm90

        return back_rows_sm90.build(variant, config, self.registers(config), options)
