"""A kernel template from outside tpf_jit: out = scale * x + bias, with bias broadcast over rows.

Small, but complete: everything tpf_jit does with its own templates (compile, cache, load, tune, check against float64) works
with this one. Nothing heavy is imported here; the device code in `kernel` is imported by `build`, the torch code in
`workload` by `workload`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, ClassVar

from tpf_jit.templates.base import Resources, Scalar, Template, Workload

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SMS_WORTH_FILLING = 132


@dataclass(frozen=True)
class ScaledBiasShape:
    """The problem: x and out `(rows, cols)`, bias `(cols,)`, all of one dtype."""

    op: ClassVar[str] = "scaled_bias"

    rows: int
    cols: int
    dtype: str = "bfloat16"

    def key(self) -> str:
        """Name of the problem, e.g. ``scaled_bias/R4096/C1024/bfloat16``."""
        return f"{self.op}/R{self.rows}/C{self.cols}/{self.dtype}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly fields."""
        return asdict(self)


@dataclass(frozen=True)
class ScaledBiasConfig:
    """Launch choices: threads of a CTA, bytes one thread moves at a time, rows a CTA walks with one load of the bias."""

    threads: int = 128
    vector_bytes: int = 16
    rows_per_cta: int = 4


class ScaledBiasForward(Template):
    """out = scale * x + bias for any Hopper GPU; kernel(x, bias, out, scale)."""

    name = "scaled_bias_forward"
    op = "scaled_bias"
    Config = ScaledBiasConfig

    def supports(self, shape: ScaledBiasShape) -> tuple[bool, str]:
        if shape.dtype not in _BYTES:
            return False, f"dtype {shape.dtype} is not one of {', '.join(_BYTES)}"
        if shape.rows < 1 or shape.cols < 1:
            return False, "empty problems need no kernel"
        if shape.cols * _BYTES[shape.dtype] % 8:
            return False, f"a row of {shape.cols} {shape.dtype} is not a multiple of 8 bytes"
        return True, ""

    def variant(self, shape: ScaledBiasShape, **flags: Scalar) -> dict[str, Scalar]:
        if flags:
            raise TypeError(f"{self.name} has no flags, got {', '.join(flags)}")
        return {"dtype": shape.dtype}  # rows and cols are run-time values: one kernel serves all sizes

    def check(self, shape: ScaledBiasShape, config: ScaledBiasConfig) -> str | None:
        if config.threads not in (64, 128, 256):
            return f"threads must be 64, 128 or 256, is {config.threads}"
        if config.vector_bytes not in (8, 16):
            return f"vector_bytes must be 8 or 16, is {config.vector_bytes}"
        if not 1 <= config.rows_per_cta <= 16:
            return f"rows_per_cta must be 1 to 16, is {config.rows_per_cta}"
        if shape.cols * _BYTES[shape.dtype] % config.vector_bytes:
            return f"a row of {shape.cols} {shape.dtype} is not a multiple of {config.vector_bytes} bytes"
        return None

    def space(self, shape: ScaledBiasShape) -> list[ScaledBiasConfig]:
        every = (ScaledBiasConfig(*choice) for choice in product((64, 128, 256), (8, 16), (1, 2, 4, 8)))
        return [config for config in every if self.check(shape, config) is None]

    def default(self, shape: ScaledBiasShape) -> ScaledBiasConfig:
        vector = 16 if shape.cols * _BYTES[shape.dtype] % 16 == 0 else 8
        rows = next((rows for rows in (8, 4, 2) if shape.rows // rows >= 2 * _SMS_WORTH_FILLING), 1)
        return ScaledBiasConfig(threads=128, vector_bytes=vector, rows_per_cta=rows)

    def resources(self, shape: ScaledBiasShape, config: ScaledBiasConfig) -> Resources:
        registers = 24 + 2 * config.vector_bytes  # x and bias in float32, and addresses
        return Resources(config.threads, 0, registers, min(32, 65536 // (registers * config.threads), 2048 // config.threads))

    def build(self, variant: Mapping[str, Scalar], config: ScaledBiasConfig, options: str) -> Any:
        from tpf_scaled_bias.kernel import compile_scaled_bias

        vector = config.vector_bytes // _BYTES[variant["dtype"]]
        return compile_scaled_bias(variant["dtype"], config.threads, vector, config.rows_per_cta, options)

    def workload(self, shape: ScaledBiasShape, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        from tpf_scaled_bias.workload import ScaledBiasWorkload

        return ScaledBiasWorkload(shape, device, seed, family)
