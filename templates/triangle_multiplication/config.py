"""The templates of the triangle multiplicative update: parameters, the rules between them, defaults. No torch, no compiler.

front -> product -> back, see layout.py. The device code is in {front,product,back}_sm90.py; the backward's templates are in
config_backward.py.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpf_jit.templates.base import Resources, Template, Workload
from tpf_jit.templates.triangle_attention.config import CTA_SHARED_BYTES, register_split

SM_REGISTERS = 65536
PRODUCER_REGISTERS = 24
STATISTICS_REGISTERS = 96


@dataclass(frozen=True)
class FrontConfig:
    """Launch choices of the front kernel."""

    tile_n: int = 96
    """Pairs of one tile; every consumer warpgroup has a tile of its own."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply and gate."""
    tile_k: int = 64
    """Channels of z of one stage of weights."""
    z_stages: int = 2
    """Sets of tiles of z in shared memory."""
    weight_stages: int = 3
    """Stages of weights in flight."""


class _MultiplicationTemplate(Template):
    """What the templates of the operation share."""

    op = "triangle_multiplication"
    arch = "sm_90a"

    def supports(self, shape: Any) -> tuple[bool, str]:
        if shape.dtype != "bfloat16":
            # Sums over the crop leave float16's range, and x in float32 would need kernels of its own.
            return False, f"the kernel takes bfloat16, not {shape.dtype}"
        return True, "triangle multiplicative update on tensor cores (wgmma, TMA)"

    def choices(self) -> Mapping[str, Container[int]]:
        """The values that each field of a configuration may have."""
        raise NotImplementedError

    def indivisible(self, shape: Any, config: Any) -> str | None:
        """What of the problem a tile does not divide."""
        return None

    def registers(self, config: Any) -> tuple[int, ...]:
        """Registers a thread of each role, the consumers' last."""
        return statistics_split(config.consumer_warpgroups)

    def registers_needed(self, shape: Any, config: Any) -> int:
        """Of a consumer's thread."""
        raise NotImplementedError

    def shared_bytes(self, shape: Any, config: Any) -> int:
        """Of one CTA."""
        raise NotImplementedError

    def check(self, shape: Any, config: Any) -> str | None:
        for name, allowed in self.choices().items():
            if getattr(config, name) not in allowed:
                return f"{name}={getattr(config, name)} is outside {allowed}"
        reason = self.indivisible(shape, config)
        if reason is not None:
            return reason
        needed, available = self.registers_needed(shape, config), self.registers(config)[-1]
        if needed > available:
            return f"needs about {needed} registers a thread, {available} are available"
        if self.shared_bytes(shape, config) > CTA_SHARED_BYTES:
            return f"needs {self.shared_bytes(shape, config)} bytes of shared memory, {CTA_SHARED_BYTES} are available"
        return None

    def resources(self, shape: Any, config: Any) -> Resources:
        registers = self.registers(config)
        return Resources(
            threads=128 * (config.consumer_warpgroups + len(registers) - 1),
            smem_bytes=self.shared_bytes(shape, config),
            registers_per_consumer=registers[-1],
            ctas_per_sm=1,
        )


def statistics_split(warpgroups: int) -> tuple[int, int, int]:
    """(producer, statistics, consumer) registers a thread, as setmaxnreg hands them out of the CTA's pool; multiples of 8."""
    entry = min(SM_REGISTERS // (128 * (warpgroups + 2)) // 8 * 8, 248)
    statistics = min(STATISTICS_REGISTERS, entry)
    left = entry * (warpgroups + 2) - PRODUCER_REGISTERS - statistics
    return PRODUCER_REGISTERS, statistics, min(240, left // warpgroups // 8 * 8)


@dataclass(frozen=True)
class FoldConfig:
    """The fold kernel has nothing to choose."""


class TriangleMultiplicationFold(_MultiplicationTemplate):
    """LayerNorms into projections: see fold_sm90.py."""

    name = "triangle_multiplication_fold_sm90"
    direction = "fold"
    Config = FoldConfig

    def variant(self, shape: Any, *, bias: bool = False) -> dict[str, Any]:
        found = {"weight_dtype": shape.weight_dtype, "channels": shape.channels, "hidden": shape.hidden}
        return {**found, "bias": bool(bias)}

    def check(self, shape: Any, config: FoldConfig) -> str | None:
        return None

    def resources(self, shape: Any, config: FoldConfig) -> Resources:
        return Resources(threads=256, smem_bytes=0, registers_per_consumer=64, ctas_per_sm=4)

    def space(self, shape: Any) -> list[FoldConfig]:
        return [FoldConfig()]

    def default(self, shape: Any) -> FoldConfig:
        return FoldConfig()

    def build(self, variant: Mapping[str, Any], config: FoldConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import fold_sm90

        return fold_sm90.build(variant, options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload import FoldWorkload

        return FoldWorkload(shape, device, seed, family)


class TriangleMultiplicationFront(_MultiplicationTemplate):
    """LayerNorm, projections, gates, mask: see front_sm90.py."""

    name = "triangle_multiplication_front_sm90"
    direction = "front"
    Config = FrontConfig

    def variant(self, shape: Any) -> dict[str, Any]:
        return {"dtype": shape.dtype, "channels": shape.channels, "hidden": shape.hidden, "mask": shape.has_mask}

    def registers_needed(self, shape: Any, config: FrontConfig) -> int:
        """Values and gates (tile_n/2 each), and 40 for the rest."""
        return config.tile_n + 40

    def shared_bytes(self, shape: Any, config: FrontConfig) -> int:
        z = config.z_stages * config.consumer_warpgroups * config.tile_n * (2 * shape.channels + 16)
        weights = 4 * 64 * config.tile_k * config.weight_stages
        return 3072 + z + weights + 128 * config.tile_n * config.consumer_warpgroups + 32 * shape.hidden

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_n": (32, 64, 96, 128), "consumer_warpgroups": (1, 2, 3), "tile_k": range(16, 129, 16), "z_stages": (1, 2),
            "weight_stages": range(2, 9),
        }  # fmt: skip

    def indivisible(self, shape: Any, config: FrontConfig) -> str | None:
        if shape.channels % config.tile_k:
            return f"tile_k={config.tile_k} does not divide the {shape.channels} channels"
        return None

    def space(self, shape: Any) -> list[FrontConfig]:
        found = []
        # One warpgroup took 1.5 to 2 times as long on an H200 at crops from 384 on; it is for those with few tiles.
        sizes = [(w, n) for w in (2, 3) for n in (64, 96, 128)] + [(1, 64), (2, 32)]
        for warpgroups, tile_n in sizes:
            if tile_n - 32 < shape.crop:
                for tile_k in self._steps(shape):
                    for z, weights in ((2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2)):
                        config = FrontConfig(tile_n, warpgroups, tile_k, z, weights)
                        if self.check(shape, config) is None:
                            found.append(config)
                            break
        return found

    @staticmethod
    def _steps(shape: Any) -> list[int]:
        """The largest two divisors of the channels that are whole products and at most 128."""
        return [k for k in range(128, 15, -16) if shape.channels % k == 0][:2]

    def default(self, shape: Any) -> FrontConfig:
        """Two warpgroups, tiles of 64 pairs, weights in the deepest stages: the fastest on an H200 at C = D = 128; always
        legal."""

        def rank(c: FrontConfig) -> tuple:
            return c.consumer_warpgroups == 2, c.z_stages, -abs(c.tile_n - 64), c.tile_k, c.weight_stages

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: FrontConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import front_sm90

        return front_sm90.build(variant, config, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload import FrontWorkload

        return FrontWorkload(shape, device, seed, family)


@dataclass(frozen=True)
class BackConfig:
    """Launch choices of the back kernel."""

    tile_c: int = 128
    """Channels of one block of results."""
    tile_k: int = 64
    """Depth of one stage of weights."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply and gate; each has a tile of 64 pairs of its own."""
    stages: int = 2
    """Sets of tiles of z and x in shared memory."""
    weight_stages: int = 3
    """Stages of weights in flight."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class TriangleMultiplicationBack(_MultiplicationTemplate):
    """LayerNorms, output projection, gate, residual: see back_sm90.py."""

    name = "triangle_multiplication_back_sm90"
    direction = "back"
    Config = BackConfig

    def variant(self, shape: Any, *, residual: bool = False, stats: bool = False) -> dict[str, Any]:
        found = {"dtype": shape.dtype, "channels": shape.channels, "hidden": shape.hidden}
        return {**found, "residual": bool(residual), "stats": bool(stats)}

    def registers(self, config: Any) -> tuple[int, int]:
        return register_split(config)

    def registers_needed(self, shape: Any, config: BackConfig) -> int:
        """Values and gates (tile_c/2 each), and 48 for the rest."""
        return config.tile_c + 48

    def shared_bytes(self, shape: Any, config: BackConfig) -> int:
        pairs = config.stages * config.consumer_warpgroups * 128 * (shape.channels + shape.hidden)
        weights = 2 * config.tile_c * config.tile_k * config.weight_stages
        return 4096 + pairs + weights + 128 * config.tile_c * config.consumer_warpgroups + 16 * shape.channels

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_c": range(16, 129, 16), "tile_k": range(16, 129, 16), "consumer_warpgroups": (1, 2, 3), "stages": (1, 2),
            "weight_stages": range(2, 9), "ctas_per_sm": (1,),
        }  # fmt: skip

    def indivisible(self, shape: Any, config: BackConfig) -> str | None:
        if shape.channels % config.tile_c:
            return f"tile_c={config.tile_c} does not divide the {shape.channels} channels"
        if shape.channels % config.tile_k or shape.hidden % config.tile_k:
            return f"tile_k={config.tile_k} does not divide both {shape.channels} and {shape.hidden}"
        return None

    def space(self, shape: Any) -> list[BackConfig]:
        blocks = [c for c in range(128, 15, -16) if shape.channels % c == 0][:2]
        steps = [k for k in range(128, 15, -16) if shape.channels % k == 0 and shape.hidden % k == 0][:2]
        found = []
        for warpgroups in (2, 3, 1):
            if warpgroups == 1 and found:  # 1.3 to 2 times as long
                break
            for tile_c in blocks:
                for tile_k in steps:
                    for stages, weights in ((2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2)):
                        config = BackConfig(tile_c, tile_k, warpgroups, stages, weights)
                        if self.check(shape, config) is None:
                            found.append(config)
                            break
        return found

    def default(self, shape: Any) -> BackConfig:
        """Two warpgroups, blocks of 64 channels, weights in the deepest stages: the fastest on an H200 at C = D = 128; always
        legal."""

        def rank(c: BackConfig) -> tuple:
            return c.consumer_warpgroups == 2, c.stages, -abs(c.tile_c - 64), c.tile_k, c.weight_stages

        return max(self.space(shape), key=rank)

    def build(self, variant: Mapping[str, Any], config: BackConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import back_sm90

        return back_sm90.build(variant, config, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload import BackWorkload

        return BackWorkload(shape, device, seed, family)


@dataclass(frozen=True)
class ProductConfig:
    """Launch choices of the product kernels."""

    tile_n: int = 256
    """Columns of one task."""
    consumer_warpgroups: int = 2
    """Warpgroups that multiply; each owns 64 rows."""
    tile_k: int = 64
    """Depth of one stage."""
    stages: int = 4
    """Stages in flight."""
    cluster: int = 1
    """CTAs that share the columns' operand, with tasks below each other."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class _Product(_MultiplicationTemplate):
    """One matrix product a channel: see product_sm90.py."""

    Config = ProductConfig

    def variant(self, shape: Any) -> dict[str, Any]:
        return {"dtype": shape.dtype, "product": self.direction.removeprefix("product_")}

    def choices(self) -> Mapping[str, Container[int]]:
        return {
            "tile_n": (128, 192, 256), "consumer_warpgroups": (1, 2, 3), "tile_k": (32, 64, 128), "stages": range(2, 9),
            "cluster": (1, 2), "ctas_per_sm": (1,),
        }  # fmt: skip

    def registers(self, config: ProductConfig) -> tuple[int, int]:
        return register_split(config)

    def indivisible(self, shape: Any, config: ProductConfig) -> str | None:
        if config.cluster > 1 and (config.tile_k > 64 or config.tile_n // config.cluster % 64):
            # A CTA's share of the stage must be a whole part of it, as shared memory is swizzled.
            return f"tile_n={config.tile_n} by tile_k={config.tile_k} is not cut into shares for {config.cluster} CTAs"
        return None

    def registers_needed(self, shape: Any, config: ProductConfig) -> int:
        """Sums (tile_n/2), and 40 for the rest."""
        return config.tile_n // 2 + 40

    def shared_bytes(self, shape: Any, config: ProductConfig) -> int:
        stage = 2 * config.tile_k * (64 * config.consumer_warpgroups + config.tile_n)
        return 2048 + config.stages * stage + config.consumer_warpgroups * 16384

    def space(self, shape: Any) -> list[ProductConfig]:
        # At tile_n = 64, ptxas serialises the products; what is not here was 10 % to 60 % slower at every crop on an H200.
        tiles = ((2, 128, 64), (2, 192, 64), (2, 256, 64), (3, 128, 64), (3, 192, 64), (2, 128, 128), (1, 128, 64))
        found = []
        for warpgroups, tile_n, tile_k in tiles:
            if tile_n > 128 and tile_n - 64 >= shape.crop:
                continue
            for stages in (6, 5, 4, 3, 2):
                config = ProductConfig(tile_n, warpgroups, tile_k, stages)
                if self.check(shape, config) is None:
                    pair = replace(config, cluster=2)
                    # Of two blocks of rows a cluster has work for both CTAs.
                    useful = shape.crop > 64 * warpgroups and self.check(shape, pair) is None
                    found += [config, pair] if useful else [config]
                    break
        return found

    def default(self, shape: Any) -> ProductConfig:
        """128 by 128, from a crop of 512 on 128 by 256 in clusters: on an H200 within a few percent of the fastest; legal."""
        return ProductConfig(128, stages=6) if shape.crop < 512 else ProductConfig(cluster=2)

    def build(self, variant: Mapping[str, Any], config: ProductConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_multiplication import product_sm90

        return product_sm90.build(variant, config, self.registers(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_multiplication.workload import ProductWorkload

        return ProductWorkload(shape, device, seed, family, product=self.direction.removeprefix("product_"))


class TriangleMultiplicationProductNT(_Product):
    """out[i, j] = sum_k left[i, k] right[j, k]: the outgoing contraction; incoming, the gradient of a."""

    name = "triangle_multiplication_product_nt_sm90"
    direction = "product_nt"


class TriangleMultiplicationProductTN(_Product):
    """out[i, j] = sum_k left[k, i] right[k, j]: the incoming contraction; outgoing, the gradient of b."""

    name = "triangle_multiplication_product_tn_sm90"
    direction = "product_tn"


class TriangleMultiplicationProductNN(_Product):
    """out[i, j] = sum_k left[i, k] right[k, j]: outgoing, the gradient of a; incoming, that of b."""

    name = "triangle_multiplication_product_nn_sm90"
    direction = "product_nn"
