"""Inputs, launch and float64 reference: what the tuner measures and checks this template with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Rounding to the output's dtype is the only error that counts: no element is off by more than the unit roundoff, and over
# many elements the RMS is 0.43 of it (measured: bf16 1.69e-3, fp16 2.1e-4).
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
_MANY = 4096


class Inputs(NamedTuple):
    """x, out `(rows, cols)` and bias `(cols,)`."""

    x: torch.Tensor
    bias: torch.Tensor
    out: torch.Tensor
    scale: float


class ScaledBiasWorkload:
    """See `tpf_jit.templates.base.Workload`."""

    def __init__(self, shape: Any, device: Any, seed: int, family: str):
        if family not in ("normal", "wide"):
            raise ValueError(f"input family must be normal or wide, got {family!r}")
        self.shape, self.device, self.seed, self.spread = shape, torch.device(device), seed, 1.0 if family == "normal" else 1e3
        self.dtype = getattr(torch, shape.dtype)
        self.bytes_per_set = (2 * shape.rows + 1) * shape.cols * self.dtype.itemsize

    def make_inputs(self, seed: int) -> Inputs:
        generator = torch.Generator(device="cpu").manual_seed(1_000_003 * self.seed + seed)
        rows, cols = self.shape.rows, self.shape.cols
        x, bias = (self.spread * torch.randn(*size, generator=generator) for size in ((rows, cols), (cols,)))
        x, bias = (t.to(self.device, self.dtype) for t in (x, bias))
        return Inputs(x, bias, torch.full_like(x, float("nan")), 0.75)

    def prepare(self, kernel_fn: Callable[..., Any], inputs: Inputs) -> Callable[[], None]:
        x, bias, out, scale = inputs
        return lambda: kernel_fn(x, bias, out, scale)

    def run(self, kernel_fn: Callable[..., Any], inputs: Inputs) -> dict[str, torch.Tensor]:
        inputs.out.fill_(float("nan"))
        kernel_fn(*inputs)
        return {"out": inputs.out}

    def reference(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        return {"out": inputs.scale * inputs.x.double() + inputs.bias.double()}

    def errors(self, out: dict[str, torch.Tensor], ref: dict[str, torch.Tensor]) -> dict[str, float]:
        error = (out["out"].double() - ref["out"]).norm() / ref["out"].norm().clamp_min(1e-300)
        return {"out": error.item() if torch.isfinite(error) else float("inf")}

    def bounds(self) -> dict[str, float]:
        roundoff = _ROUNDOFF[self.shape.dtype]
        return {"out": 0.54 * roundoff if self.shape.rows * self.shape.cols >= _MANY else roundoff}
