"""The forward pass as a workload: what the tuner, the tests and the benchmarks run and check.

A `ForwardWorkload` makes seeded inputs, launches any kernel that follows the calling convention of `layout`, and compares what
came out with float64. Outputs are filled with NaN before a checked run, so an element that a kernel leaves out cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import layout, reference
from tpf_jit.templates.triangle_attention.inputs import KEY_BLOCK, LOG2_STEPS, Inputs, make_inputs

ROUNDING = {"bfloat16": 1.66e-3, "float16": 2.08e-4}
"""Relative RMS error of rounding a tensor to the dtype."""
OUT_BOUND = {"bfloat16": 2.1e-3, "float16": 2.95e-4}
"""Of the output: its own rounding, and that of P as an operand of the second product."""
COMPENSATED_BOUND = 5e-5
"""Of output + residual: no 16-bit rounding is left in it."""
LSE_BOUND = 2e-5
"""Of the LSE, relative to its RMS or to 1, whichever is larger: float32 throughout, or a row sum of rounded probabilities."""
EXACT_LSE_BOUND = 5e-6
"""Of LSE + its low part, absolute, or relative where the LSE is above 1; absolute again where the mask swallows the logits."""

SLAB_ELEMENTS = 2**27


class ForwardWorkload:
    """Implements `templates.base.Workload` for triangle-attention forward kernels.

    Args:
        shape: the problem.
        device: where tensors live; kernels need a CUDA device, emulations run anywhere.
        seed: added to the seed of every set, so that two workloads differ.
        family: of inputs, see `inputs`.
        mask_pattern: see `inputs`; the family's own by default.
        residual: whether the kernel also writes what rounding took from the output and from the LSE.
        num_ctas: the grid; the device's number of SMs by default (1 on a CPU).
    """

    def __init__(
        self,
        shape: TriangleAttentionShape,
        device: torch.device | str,
        seed: int = 0,
        family: str = "normal",
        mask_pattern: str | None = None,
        residual: bool = False,
        num_ctas: int | None = None,
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.seed = seed
        self.family = family
        self.mask_pattern = mask_pattern
        self.residual = residual
        self.num_ctas = sm_count(self.device) if num_ctas is None else num_ctas
        self.scale = shape.head_dim**-0.5

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch."""
        shape = self.shape
        element = getattr(torch, shape.dtype).itemsize
        lines = shape.batch * shape.rows * shape.heads * shape.crop
        bias = shape.batch * shape.heads * shape.crop**2 * getattr(torch, shape.bias_dtype).itemsize
        mask = shape.batch * shape.rows * shape.crop * 4 if shape.has_mask else 0
        extra = 1 if self.residual else 0
        return lines * shape.head_dim * element * (4 + extra) + lines * 4 * (1 + extra) + bias + mask

    def make_inputs(self, seed: int) -> Inputs:
        """A fresh set of inputs; a pure function of both seeds."""
        return make_inputs(self.shape, self.device, self.seed + seed, self.family, self.mask_pattern)

    def prepare(self, kernel_fn: Callable[..., object], inputs: Inputs) -> Callable[[], None]:
        """A callable that launches the kernel once; layouts and outputs are made here, so it allocates nothing."""
        launch, _ = self._bind(kernel_fn, inputs)
        return launch

    def run(self, kernel_fn: Callable[..., object], inputs: Inputs) -> dict[str, Tensor]:
        """One launch into outputs filled with NaN: `out`, `lse` and, if asked for, `residual` and `lse_low`."""
        launch, outputs = self._bind(kernel_fn, inputs)
        for x in outputs.values():
            x.fill_(math.nan)
        launch()
        return {name: x if name.startswith("lse") else layout.trim(x, self.shape.head_dim) for name, x in outputs.items()}

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        """`out` and `lse` in float64."""
        out, lse = reference.attention(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, self.scale)
        return {"out": out, "lse": lse}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS of `out` and `lse`; with a residual also of out + residual as `compensated` and of lse + lse_low as
        `lse_exact` (see `exact_lse_error`)."""
        found = {"out": relative_rms(out["out"], ref["out"]), "lse": relative_rms(out["lse"], ref["lse"], floor=1.0)}
        if "residual" in out:
            found["compensated"] = relative_rms(out["out"].double() + out["residual"].double(), ref["out"])
            found["lse_exact"] = exact_lse_error(out["lse"], out["lse_low"], ref["lse"])
        return found

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors. Outputs of few elements, whose roundings do not average, get a statistical allowance."""
        shape = self.shape
        lines = shape.batch * shape.rows * shape.heads * shape.crop
        allowance = 1.0 + 4.0 / math.sqrt(lines * shape.head_dim)
        found = {"out": OUT_BOUND[shape.dtype] * allowance, "lse": LSE_BOUND * (1.0 + 4.0 / math.sqrt(lines))}
        if self.residual:
            found["compensated"] = math.hypot(COMPENSATED_BOUND, logit_rounding(shape, self.family)) * allowance
            found["lse_exact"] = EXACT_LSE_BOUND * (1.0 + 4.0 / math.sqrt(lines))
        return found

    def _bind(self, kernel_fn: Callable[..., object], inputs: Inputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        operands = layout.prepare(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask)
        size = (*inputs.q.shape[:-1], operands.q.shape[-1])
        out = layout.projection_layout_empty(size, inputs.q.dtype, self.device)
        residual = layout.projection_layout_empty(size, inputs.q.dtype, self.device) if self.residual else None
        lse = torch.empty(size[:-1], dtype=torch.float32, device=self.device)
        lse_low = torch.empty_like(lse) if self.residual else None
        arguments = (*operands.arguments(out, residual, lse, lse_low), self.scale, self.num_ctas)

        def launch() -> None:
            kernel_fn(*arguments)

        outputs = {"out": out, "lse": lse, "residual": residual, "lse_low": lse_low}
        return launch, {name: x for name, x in outputs.items() if x is not None}


def logit_rounding(shape: TriangleAttentionShape, family: str) -> float:
    """Relative error of P by float32's rounding of the largest logits of a family."""
    largest = {"extreme": 4e4, "adversarial": max(LOG2_STEPS) * math.log(2.0) * shape.crop / KEY_BLOCK}.get(family, 0.0)
    return largest * 2.0**-23


def exact_lse_error(lse: Tensor, low: Tensor, ref: Tensor) -> float:
    """RMS error of lse + low, each line's relative to its LSE where that is above 1.

    Except that LSEs beyond `reference.SWALLOWED` count in absolute terms: only the mask makes such, and what is left of their
    logits is exact in float32. It is inf where a sum is not finite, other than as the reference, or the low part of an infinite
    LSE is not zero.
    """
    infinite = ref.isinf()
    total = lse.double() + low.double()
    if not torch.equal(lse[infinite].double(), ref[infinite]) or bool(low[infinite].any()):
        return math.inf
    size = ref.abs().clamp(min=1.0)
    error = (total - ref) / size.masked_fill(size > reference.SWALLOWED, 1.0)
    error = float(error.masked_fill(infinite, 0.0).square().mean().sqrt())
    return error if math.isfinite(error) else math.inf


def relative_rms(x: Tensor, ref: Tensor, floor: float = 0.0, exact_zeros: bool = True) -> float:
    """||x - ref|| / ||ref|| over all elements, in float64; inf unless x is beyond doubt.

    With a `floor`, the error is relative to that RMS where ref's own is smaller.

    It is inf where x holds a NaN or an infinity that ref lacks, where ref is infinite and x is not the same, and, unless
    `exact_zeros` is off, where x is not exactly zero in a line (along the last axis) that is exactly zero in ref. Infinite
    elements that agree are left out of the norms. Where ref has no norm, an x that equals it gives 0.
    """
    error = norm = 0.0
    for part, ref_part in _slabs(x, ref):
        squares = _squares(part.double(), ref_part.double(), exact_zeros)
        if squares is None:
            return math.inf
        error, norm = error + squares[0], norm + squares[1]
    norm = max(norm, floor * floor * ref.numel())
    return math.sqrt(error / norm) if norm else 0.0 if error == 0 else math.inf


def _squares(x: Tensor, ref: Tensor, exact_zeros: bool) -> tuple[float, float] | None:
    """Sums of squares of error and reference, or None if x is wrong whatever the norms."""
    infinite = ref.isinf()
    if not torch.equal(x[infinite], ref[infinite]):
        return None
    zero_lines = (ref == 0).all(-1, keepdim=True) & exact_zeros
    x, ref = x.masked_fill(infinite, 0.0), ref.masked_fill(infinite, 0.0)
    if not bool(torch.isfinite(x).all()) or bool(((x != 0) & zero_lines).any()):
        return None
    return float((x - ref).square().sum()), float(ref.square().sum())


def _slabs(x: Tensor, ref: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of slices along the first two axes, small enough for float64 copies of them."""
    if x.dim() < 3 or x.numel() <= SLAB_ELEMENTS:
        yield x, ref
        return
    each = max(1, SLAB_ELEMENTS // max(1, x[0, :1].numel()))
    for b in range(x.shape[0]):
        yield from zip(x[b].split(each), ref[b].split(each), strict=True)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for others."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
