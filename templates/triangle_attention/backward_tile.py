"""The backward's second algorithm for dQ and the pair bias gradient: parameters, the rules between them, defaults.

Serves the family "triangle_attention/backward_query" beside `TriangleAttentionBackwardQuery`, with the same calling convention;
the tuner measures both. The device code is in backward_tile_sm90.py. No torch, no compiler, no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_attention.backward import MOST_SLABS, BackwardTemplate
from tpf_jit.templates.triangle_attention.config import ELEMENT_BYTES, register_split

LARGEST_CLUSTER = 8  # what every Hopper GPU can schedule
HEAD_DIMS = (16, 32, 64)


@dataclass(frozen=True)
class TileConfig:
    """Launch choices of the tile kernel."""

    tile_n: int = 96
    """Keys of one CTA."""
    consumer_warpgroups: int = 2
    """Warpgroups that compute; each owns 64 queries."""
    cluster: int = 8
    """CTAs of one cluster, which together hold all keys."""
    stages: int = 3
    """Rows (Q, dO, statistics, K, V, mask) in flight."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""


class TriangleAttentionBackwardTile(BackwardTemplate):
    """dQ and the pair bias gradient, the latter in registers: see backward_tile_sm90.py."""

    name = "triangle_attention_backward_tile_sm90"
    direction = "backward_query"
    Config = TileConfig
    CHOICES = {
        "tile_n": (48, 64, 80, 96),
        "consumer_warpgroups": (1, 2, 3),
        "cluster": tuple(range(1, LARGEST_CLUSTER + 1)),
        "stages": (2, 3, 4),
        "ctas_per_sm": (1, 2),
    }

    def supports(self, shape: Any) -> tuple[bool, str]:
        able, reason = super().supports(shape)
        if not able:
            return able, reason
        if shape.tile_hdim not in HEAD_DIMS:
            return False, f"head dims above {max(HEAD_DIMS)} leave no shared memory for the exchange of dQ"
        most = LARGEST_CLUSTER * max(self.CHOICES["tile_n"])
        if shape.crop > most:
            return False, f"a cluster covers at most {most} keys, and there are {shape.crop}"
        if not self.space(shape):
            return False, "no configuration covers the keys within the shared memory"
        return True, "triangle attention backward, bias gradient in registers (wgmma, TMA, clusters)"

    def variant(self, shape: Any, *, dbias: bool = True) -> dict[str, Any]:
        return {**super().variant(shape), "dbias": bool(dbias)}

    def registers_needed(self, shape: Any, config: TileConfig) -> int:
        """S, dP and the bias gradient (tile_n/2 each), dS as operand (tile_n/4), dQ (D/2), and 48 for the rest."""
        return config.tile_n * 7 // 4 + shape.tile_hdim // 2 + 48

    def shared_bytes(self, shape: Any, config: TileConfig) -> int:
        element, bias_element = ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[shape.bias_dtype]
        queries, dim = 64 * config.consumer_warpgroups, shape.tile_hdim
        mask = -(-config.tile_n // 32) * 128 if shape.has_mask else 0
        row = queries * (2 * dim * element + 12) + 2 * config.tile_n * dim * element + mask
        slice_rows = -(-64 // config.cluster)
        exchange = 2 * config.consumer_warpgroups * 4 * dim * (64 + config.cluster * slice_rows)
        return 3072 + config.stages * row + queries * config.tile_n * bias_element + exchange

    def check(self, shape: Any, config: TileConfig) -> str | None:
        reason = super().check(shape, config)
        if reason is None and config.cluster * config.tile_n < shape.crop:
            return f"{config.cluster} CTAs of {config.tile_n} keys do not cover {shape.crop}"
        return reason

    def space(self, shape: Any) -> list[TileConfig]:
        found = []
        for ctas in self.CHOICES["ctas_per_sm"]:
            for warpgroups in self.CHOICES["consumer_warpgroups"]:
                if 64 * (warpgroups - 1) >= shape.crop:
                    continue
                for tile_n in self.CHOICES["tile_n"]:
                    cluster = -(-shape.crop // tile_n)
                    for stages in (4, 3, 2):
                        config = TileConfig(tile_n, warpgroups, cluster, stages, ctas)
                        if self.check(shape, config) is None:
                            found.append(config)
                            break
        return found

    def default(self, shape: Any) -> TileConfig:
        """The widest tiles; always legal where the template supports the shape."""
        return max(self.space(shape), key=lambda config: (config.tile_n, config.consumer_warpgroups, -config.ctas_per_sm))

    def slabs(self, shape: Any, config: TileConfig, num_ctas: int) -> int:
        """Planes over which the rows are dealt out: as many as keep the clusters evenly busy, the fewest of equals.

        A pure function of its arguments: the order in which the bias gradient is summed depends on it.
        """
        tasks = shape.batch * shape.heads * -(-shape.crop // (64 * config.consumer_warpgroups))
        places = max(1, num_ctas * config.ctas_per_sm // config.cluster)

        def rounds(slabs: int) -> int:
            return -(-tasks * slabs // places) * -(-shape.rows // slabs)

        return min(range(1, min(shape.rows, MOST_SLABS) + 1), key=lambda slabs: (rounds(slabs), slabs))

    def build(self, variant: Mapping[str, Any], config: TileConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_attention import backward_tile_sm90

        return backward_tile_sm90.build(variant, config, register_split(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_attention.workload_backward import QueryWorkload

        return QueryWorkload(shape, device, seed, family, template=self)
