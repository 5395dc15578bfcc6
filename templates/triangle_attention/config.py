"""The forward template's parameters, the rules between them, and its defaults. No torch, no compiler, no device.

`ForwardConfig` holds the launch choices, `TriangleAttentionForward` and `TriangleAttentionForwardTraining` are the registered
templates; the device code of both is in forward_sm90.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tpf_jit.templates.base import Resources, Template, Workload

SM_REGISTERS = 65536
SM_SHARED_BYTES = 233472  # per SM; every resident CTA also costs 1024 bytes of the system's
CTA_SHARED_BYTES = 232448
PRODUCER_REGISTERS = 24
MAX_REGISTERS = 240
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ForwardConfig:
    """Launch choices of the forward kernel."""

    tile_n: int = 128
    """Keys of one tile."""
    consumer_warpgroups: int = 3
    """Warpgroups that compute; each owns 64 queries, so tile_m = 64 * consumer_warpgroups."""
    rows_per_cta: int = 1
    """Rows that share every bias tile a CTA loads."""
    kv_stages: int = 3
    """K tiles, and V tiles, in flight."""
    bias_stages: int = 2
    """Bias tiles in flight."""
    q_stages: int = 2
    """Tasks whose queries are in shared memory: 2 loads the next task's during this one."""
    ctas_per_sm: int = 1
    """CTAs that share an SM."""
    crop: int = 0
    """0: one kernel serves every crop size. Otherwise the crop is a compile-time constant."""

    @property
    def tile_m(self) -> int:
        """Queries of one CTA."""
        return 64 * self.consumer_warpgroups


def register_split(config: ForwardConfig) -> tuple[int, int]:
    """(producer, consumer) registers a thread, as setmaxnreg hands them out of the CTA's pool; multiples of 8."""
    warpgroups = config.consumer_warpgroups + 1
    entry = min(SM_REGISTERS // (128 * warpgroups * config.ctas_per_sm) // 8 * 8, 248)
    consumer = (entry * warpgroups - PRODUCER_REGISTERS) // config.consumer_warpgroups // 8 * 8
    return PRODUCER_REGISTERS, min(MAX_REGISTERS, consumer)


def registers_needed(tile_hdim: int, config: ForwardConfig, residual: bool = False) -> int:
    """Registers a consumer thread keeps live: scores (tile_n/2), probabilities (tile_n/4, twice with a residual), outputs (D/2 a
    row), and what ptxas needs beside them: 32, 6 a row, more where the epilogue's tile is wide (fitted; it spills beyond)."""
    live = config.tile_n // 2 + config.tile_n // 4 * (2 if residual else 1) + config.rows_per_cta * tile_hdim // 2
    return live + 32 + 6 * config.rows_per_cta + max(0, tile_hdim - 32) * 3 // 8


def shared_bytes(shape: Any, config: ForwardConfig) -> int:
    """Dynamic shared memory of one CTA in bytes: tiles, mask, barriers, alignment."""
    element, bias_element = ELEMENT_BYTES[shape.dtype], ELEMENT_BYTES[shape.bias_dtype]
    q = config.q_stages * config.rows_per_cta * config.tile_m * shape.tile_hdim * element
    kv = 2 * config.kv_stages * config.tile_n * shape.tile_hdim * element
    bias = config.bias_stages * config.tile_m * config.tile_n * bias_element
    out = config.tile_m * shape.tile_hdim * element
    mask = config.kv_stages * -(-config.tile_n // 32) * 128 if shape.has_mask else 16
    barriers = 16 * (config.q_stages + 2 * config.kv_stages + config.bias_stages)
    return 1024 + -(-(mask + barriers) // 1024) * 1024 + q + kv + bias + out


class TriangleAttentionForward(Template):
    """softmax(scale * Q K^T + bias + mask) V for sm_90a: see forward_sm90.py for the algorithm."""

    name = "triangle_attention_forward_sm90"
    op = "triangle_attention"
    direction = "forward"
    arch = "sm_90a"
    residual: ClassVar[bool] = False
    """Whether the kernel also writes what rounding took from the output and from the LSE."""
    Config = ForwardConfig

    def supports(self, shape: Any) -> tuple[bool, str]:
        if shape.dtype not in ("bfloat16", "float16"):
            return False, f"the kernel takes bfloat16 and float16, not {shape.dtype}"
        if shape.bias_dtype not in (shape.dtype, "float32"):
            return False, f"a {shape.bias_dtype} pair bias with {shape.dtype} queries is not compiled; it can be cast to float32"
        return True, "triangle attention forward on tensor cores (wgmma, TMA)"

    def variant(self, shape: Any) -> dict[str, Any]:
        return {
            "dtype": shape.dtype,
            "bias_dtype": shape.bias_dtype,
            "tile_hdim": shape.tile_hdim,
            "mask": shape.has_mask,
            "residual": self.residual,
        }

    def check(self, shape: Any, config: ForwardConfig) -> str | None:
        for name, allowed in (
            ("tile_n", range(32, 257, 16)), ("consumer_warpgroups", range(1, 5)), ("rows_per_cta", (1, 2, 4)),
            ("kv_stages", range(2, 9)), ("bias_stages", range(1, 5)), ("q_stages", (1, 2)), ("ctas_per_sm", (1, 2)),
        ):
            if getattr(config, name) not in allowed:
                return f"{name}={getattr(config, name)} is outside {allowed}"
        if config.crop not in (0, shape.crop):
            return f"the kernel is compiled for crop {config.crop}, the problem has {shape.crop}"
        available = register_split(config)[1]
        needed = registers_needed(shape.tile_hdim, config, self.residual)
        if needed > available:
            return f"needs about {needed} registers a thread, {available} are available"
        limit = min(CTA_SHARED_BYTES, SM_SHARED_BYTES // config.ctas_per_sm - 1024)
        if shared_bytes(shape, config) > limit:
            return f"needs {shared_bytes(shape, config)} bytes of shared memory, {limit} are available"
        return None

    def space(self, shape: Any) -> list[ForwardConfig]:
        found = []
        for ctas in (1, 2):
            for warpgroups in (1, 2, 3, 4):
                # Whole 64-query warpgroups beyond the crop would only wait.
                if 64 * (warpgroups - 1) >= shape.crop:
                    continue
                for tile_n in (64, 96, 128, 160, 192):
                    if tile_n > 64 and tile_n - 64 >= shape.crop:
                        continue
                    for rows in (1, 2, 4):  # 3 rows spill: their unrolled loop needs more addresses
                        if rows > shape.rows:
                            continue
                        config = self._fitted(shape, ForwardConfig(tile_n, warpgroups, rows, ctas_per_sm=ctas))
                        if config is not None:
                            found.append(config)
        return found

    def _fitted(self, shape: Any, config: ForwardConfig) -> ForwardConfig | None:
        """The configuration with as many stages as fit: more than these gained nothing (H200, N = 768, D = 32: 5 K/V
        stages 1.117 ms, 3 stages 1.120; 3 bias stages 1.135, 2 stages 1.120)."""
        values = {**vars(config)}
        for kv, bias, q in ((3, 2, 2), (2, 2, 2), (3, 2, 1), (2, 2, 1), (2, 1, 1)):
            candidate = ForwardConfig(**{**values, "kv_stages": kv, "bias_stages": bias, "q_stages": q})
            if self.check(shape, candidate) is None:
                return candidate
        return None

    def default(self, shape: Any) -> ForwardConfig:
        """Near the best measured on an H200 at crops 384 and 768; always legal."""
        best = {16: (128, 3, 2), 32: (128, 3, 1), 64: (96, 3, 1), 96: (96, 2, 1), 128: (64, 2, 1)}
        if self.residual:
            best = {16: (96, 3, 1), 32: (96, 3, 1), 64: (96, 2, 1), 96: (64, 2, 1), 128: (64, 2, 1)}
        tile_n, warpgroups, rows = best[shape.tile_hdim]
        warpgroups = min(warpgroups, -(-shape.crop // 64))
        for keys in (tile_n, 64, 32):
            if keys > 64 and keys - 64 >= shape.crop:
                continue
            config = self._fitted(shape, ForwardConfig(keys, warpgroups, min(rows, shape.rows)))
            if config is not None:
                return config
        raise AssertionError(f"no default for {shape}")  # unreachable: tests cover every variant

    def resources(self, shape: Any, config: ForwardConfig) -> Resources:
        return Resources(
            threads=128 * (config.consumer_warpgroups + 1),
            smem_bytes=shared_bytes(shape, config),
            registers_per_consumer=register_split(config)[1],
            ctas_per_sm=config.ctas_per_sm,
        )

    def build(self, variant: Mapping[str, Any], config: ForwardConfig, options: str) -> Any:
        from tpf_jit.templates.triangle_attention import forward_sm90

        return forward_sm90.build(variant, config, register_split(config), options)

    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_jit.templates.triangle_attention.workload import ForwardWorkload

        return ForwardWorkload(shape, device, seed, family, residual=self.residual)


class TriangleAttentionForwardTraining(TriangleAttentionForward):
    """The forward of a training step: keeps its roundings for the backward, and rounds P to two 16-bit numbers in place of one.

    A family of its own, as the second half of P takes registers: other configurations are legal and win.
    """

    name = "triangle_attention_forward_training_sm90"
    direction = "forward_training"
    residual = True
