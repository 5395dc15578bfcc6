"""The backward's three templates: parameters, the rules between them, defaults. No torch, no compiler, no device.

stats -> key (dK, dV) and query (dQ, dbias), each its own family ("triangle_attention/backward_stats" and so on), compiled and
tuned by itself. The device code is in backward_{stats,key,query}_sm90.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tpf_jit.templates.base import Resources, Template, Workload
from tpf_jit.templates.triangle_attention.config import (
    CTA_SHARED_BYTES,
    ELEMENT_BYTES,
    SM_SHARED_BYTES,
    register_split,
)

MOST_SLABS = 16


@dataclass(frozen=True)
class StatsConfig:
    """Launch choices of the statistics kernel."""

    threads: int = 256
    """Threads of one CTA."""


@dataclass(frozen=True)
class KeyConfig:
    """Launch choices of the key-side kernel."""

    tile_m: int = 64
    """Queries of one tile."""
    consumer_warpgroups: int = 3
    """Warpgroups that compute; each owns 64 keys."""
    stages: int = 2
    """Query tiles (Q, dO, bias, statistics) in flight."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


@dataclass(frozen=True)
class QueryConfig:
    """Launch choices of the query-side kernel."""

    tile_n: int = 64
    """Keys of one tile."""
    consumer_warpgroups: int = 2
    """Warpgroups that compute; each owns 64 queries."""
    rows_per_cta: int = 4
    """Rows whose bias gradients are summed in registers before they join the plane in memory."""
    kv_stages: int = 3
    """K tiles, and V tiles, in flight."""
    bias_stages: int = 2
    """Bias tiles in flight."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class BackwardTemplate(Template):
    """What the two gradient templates share."""

    op = "triangle_attention"
    arch = "sm_90a"
    CHOICES: Mapping[str, tuple[int, ...]] = {}

    def supports(self, shape: Any) -> tuple[bool, str]:
        if shape.dtype not in ("bfloat16", "float16"):
            return False, f"the kernel takes bfloat16 and float16, not {shape.dtype}"
        if shape.bias_dtype not in (shape.dtype, "float32"):
            return False, f"a {shape.bias_dtype} pair bias with {shape.dtype} queries is not compiled; it can be cast to float32"
        return True, "triangle attention backward on tensor cores (wgmma, TMA)"

    def variant(self, shape: Any) -> dict[str, Any]:
        return {
            "dtype": shape.dtype,
            "bias_dtype": shape.bias_dtype,
            "tile_hdim": shape.tile_hdim,
            "mask": shape.has_mask,
        }

    def registers_needed(self, shape: Any, config: Any) -> int:
        raise NotImplementedError

    def shared_bytes(self, shape: Any, config: Any) -> int:
        raise NotImplementedError

    def check(self, shape: Any, config: Any) -> str | None:
        for field in fields(config):
            if getattr(config, field.name) not in self.CHOICES[field.name]:
                return f"{field.name}={getattr(config, field.name)} is not one of {self.CHOICES[field.name]}"
        needed, available = self.registers_needed(shape, config), register_split(config)[1]
        if needed > available:
            return f"needs about {needed} registers a thread, {available} are available"
        limit = min(CTA_SHARED_BYTES, SM_SHARED_BYTES // config.ctas_per_sm - 1024)
        if self.shared_bytes(shape, config) > limit:
            return f"needs {self.shared_bytes(shape, config)} bytes of shared memory, {limit} are available"
        return None

    def resources(self, shape: Any, config: Any) -> Resources:
        return Resources(
            threads=128 * (config.consumer_warpgroups + 1),
            smem_bytes=self.shared_bytes(shape, config),
            registers_per_consumer=register_split(config)[1],
            ctas_per_sm=config.ctas_per_sm,
        )


class TriangleAttentionBackwardStats(Template):
    """LSE in base 2 and delta of every query: see backward_stats_sm90.py."""

    name = "triangle_attention_backward_stats_sm90"
    op = "triangle_attention"
    direction = "backward_stats"
    arch = "sm_90a"
    Config = StatsConfig

    def supports(self, shape: Any) -> tuple[bool, str]:
        if shape.dtype not in ("bfloat16", "float16"):
            return False, f"the kernel takes bfloat16 and float16, not {shape.dtype}"
        return True, "row statistics of the backward"

    def variant(self, shape: Any, *, residual: bool = True) -> dict[str, Any]:
        return {"dtype": shape.dtype, "tile_hdim": shape.tile_hdim, "residual": bool(residual)}

    def check(self, shape: Any, config: StatsConfig) -> str | None:
        # A block of queries, threads / lanes, must divide the 256 to which rows are padded.
        return None if config.threads in (128, 256) else f"threads={config.threads} is not one of (128, 256)"

    def space(self, shape: Any) -> list[StatsConfig]:
        return [StatsConfig(128), StatsConfig(256)]

    def default(self, shape: Any) -> StatsConfig:
        return StatsConfig()

    def resources(self, shape: Any, config: StatsConfig) -> Resources:
        return Resources(threads=config.threads, smem_bytes=0, registers_per_consumer=64, ctas_per_sm=1024 // config.threads)

    def build(self, variant: Mapping[str, Any], config: StatsConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_attention import backward_stats_sm90

        return backward_stats_sm90.build(variant, config, options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_attention.workload_backward import StatsWorkload

        return StatsWorkload(shape, device, seed, family)


class TriangleAttentionBackwardKey(BackwardTemplate):
    """dK and dV: see backward_key_sm90.py."""

    name = "triangle_attention_backward_key_sm90"
    direction = "backward_key"
    Config = KeyConfig
    CHOICES = {
        "tile_m": (32, 48, 64, 80, 96, 128),
        "consumer_warpgroups": (1, 2, 3, 4),
        "stages": (2, 3, 4),
        "ctas_per_sm": (1, 2),
    }

    def registers_needed(self, shape: Any, config: KeyConfig) -> int:
        """S, dP (tile_m/2 each), P and dS as operands (tile_m/4 each), dK and dV (D/2 each), and 12 that ptxas cannot do
        without (fitted: it overlays the operands with the accumulators)."""
        return config.tile_m * 3 // 2 + shape.tile_hdim + 12

    def shared_bytes(self, shape: Any, config: KeyConfig) -> int:
        element, bias_element = ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[shape.bias_dtype]
        keys = 64 * config.consumer_warpgroups
        fixed = 3 * keys * shape.tile_hdim * element  # K, V, and the outgoing dK or dV
        tile = 2 * config.tile_m * shape.tile_hdim * element + config.tile_m * keys * bias_element
        statistics = config.stages * -(-config.tile_m * 12 // 128) * 128 + 16 * (1 + 2 * config.stages)
        return 1024 + -(-statistics // 1024) * 1024 + fixed + config.stages * tile

    def space(self, shape: Any) -> list[KeyConfig]:
        found = []
        for ctas in self.CHOICES["ctas_per_sm"]:
            for warpgroups in self.CHOICES["consumer_warpgroups"]:
                if 64 * (warpgroups - 1) >= shape.crop:
                    continue
                for tile_m in self.CHOICES["tile_m"]:
                    if tile_m > 32 and tile_m - 32 >= shape.crop:
                        continue
                    found += [
                        config
                        for stages in (2, 3)
                        if self.check(shape, config := KeyConfig(tile_m, warpgroups, stages, ctas)) is None
                    ]
        return found

    def default(self, shape: Any) -> KeyConfig:
        """Best of a few measured on an H200 at D = 32; always legal."""
        for tile_m, warpgroups, stages in ((64, 3, 3), (64, 3, 2), (64, 2, 2), (32, 2, 2), (32, 1, 2)):
            config = KeyConfig(tile_m, min(warpgroups, -(-shape.crop // 64)), stages)
            if self.check(shape, config) is None:
                return config
        raise AssertionError(f"no default for {shape}")  # unreachable: tests cover every variant

    def build(self, variant: Mapping[str, Any], config: KeyConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_attention import backward_key_sm90

        return backward_key_sm90.build(variant, config, register_split(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_attention.workload_backward import KeyWorkload

        return KeyWorkload(shape, device, seed, family)


class TriangleAttentionBackwardQuery(BackwardTemplate):
    """dQ and the pair bias gradient: see backward_query_sm90.py."""

    name = "triangle_attention_backward_query_sm90"
    direction = "backward_query"
    Config = QueryConfig
    CHOICES = {
        "tile_n": (32, 48, 64, 96, 128),
        "consumer_warpgroups": (1, 2, 3),
        "rows_per_cta": (1, 2, 4, 8),
        "kv_stages": (2, 3, 4),
        "bias_stages": (1, 2),
        "ctas_per_sm": (1, 2),
    }

    def variant(self, shape: Any, *, dbias: bool = True) -> dict[str, Any]:
        return {**super().variant(shape), "dbias": bool(dbias)}

    def registers_needed(self, shape: Any, config: QueryConfig) -> int:
        """S, dP and the bias gradient (tile_n/2 each), dS as operand (tile_n/4), dQ (D/2 a row), and 16 + 10 a row for the
        rest (fitted to ptxas; 4 rows of 64 keys spill 120 bytes and are still the fastest measured)."""
        return config.tile_n * 7 // 4 + config.rows_per_cta * (shape.tile_hdim // 2 + 10) + 16

    def shared_bytes(self, shape: Any, config: QueryConfig) -> int:
        element, bias_element = ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[shape.bias_dtype]
        queries = 64 * config.consumer_warpgroups
        q = config.rows_per_cta * queries * (2 * shape.tile_hdim * element + 12)
        kv = 2 * config.kv_stages * config.tile_n * shape.tile_hdim * element
        bias = queries * config.tile_n * (config.bias_stages * bias_element + 4)
        mask = config.kv_stages * -(-config.tile_n // 32) * 128 if shape.has_mask else 16
        barriers = 16 * (1 + 2 * config.kv_stages + config.bias_stages)
        return 2048 + -(-(mask + barriers) // 1024) * 1024 + q + kv + bias + queries * shape.tile_hdim * element

    def space(self, shape: Any) -> list[QueryConfig]:
        found = []
        for ctas in self.CHOICES["ctas_per_sm"]:
            for warpgroups in self.CHOICES["consumer_warpgroups"]:
                if 64 * (warpgroups - 1) >= shape.crop:
                    continue
                for tile_n in self.CHOICES["tile_n"]:
                    if tile_n > 32 and tile_n - 32 >= shape.crop:
                        continue
                    for rows in self.CHOICES["rows_per_cta"]:
                        if rows > shape.rows:
                            continue
                        config = self._fitted(shape, QueryConfig(tile_n, warpgroups, rows, ctas_per_sm=ctas))
                        if config is not None:
                            found.append(config)
        return found

    def _fitted(self, shape: Any, config: QueryConfig) -> QueryConfig | None:
        """The configuration with as many stages as fit."""
        for kv, bias in ((3, 2), (2, 2), (2, 1)):
            candidate = replace(config, kv_stages=kv, bias_stages=bias)
            if self.check(shape, candidate) is None:
                return candidate
        return None

    def default(self, shape: Any) -> QueryConfig:
        """Best of a few measured on an H200 at D = 32; always legal."""
        for tile_n, warpgroups, rows in ((64, 2, 4), (64, 2, 2), (48, 2, 2), (32, 2, 2), (64, 2, 1), (32, 2, 1), (32, 1, 1)):
            if rows > shape.rows:
                continue
            config = self._fitted(shape, QueryConfig(tile_n, min(warpgroups, -(-shape.crop // 64)), rows))
            if config is not None:
                return config
        raise AssertionError(f"no default for {shape}")  # unreachable: tests cover every variant

    def slabs(self, shape: Any, config: QueryConfig, num_ctas: int) -> int:
        """Planes over which the rows are dealt out: as many as keep `num_ctas` SMs evenly busy, the fewest of equals.

        A pure function of its arguments: the order in which the bias gradient is summed depends on it.
        """
        blocks = shape.batch * shape.heads * -(-shape.crop // (64 * config.consumer_warpgroups))
        groups = -(-shape.rows // config.rows_per_cta)

        def rounds(slabs: int) -> int:
            return -(-blocks * slabs // (num_ctas * config.ctas_per_sm)) * -(-groups // slabs)

        return min(range(1, min(groups, MOST_SLABS) + 1), key=lambda slabs: (rounds(slabs), slabs))

    def build(self, variant: Mapping[str, Any], config: QueryConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_attention import backward_query_sm90

        return backward_query_sm90.build(variant, config, register_split(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_attention.workload_backward import QueryWorkload

        return QueryWorkload(shape, device, seed, family)
