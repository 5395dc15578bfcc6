"""The backward kernels as workloads: each is checked alone, on operands that float64 computed for it.

`StatsWorkload`, `KeyWorkload` and `QueryWorkload` launch kernels of the three families with the calling convention of
`layout_backward`; outputs are filled with NaN before a checked run. The statistics that the key and query sides read are those of
the float64 reference, rounded once to float32. In a call they come from the forward kernel, whose logits round as the backward's
do; here only the backward's are rounded, which is allowed for where logits are huge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import layout, layout_backward, reference
from tpf_jit.templates.triangle_attention.inputs import Inputs, make_inputs
from tpf_jit.templates.triangle_attention.workload import logit_rounding, relative_rms, sm_count

GRADIENT_BOUND = {"bfloat16": 2.45e-3, "float16": 3.25e-4}
"""Of dQ, dK and dV: their own rounding, and that of dS or P as an operand."""
PLANE_BOUND = 1e-5
"""Of the bias's gradient as kernels write it: float32 throughout, summed over the rows before any rounding (seen: 1.3e-6)."""
PEAKED = {"trained_like": 1.45}
"""Where rows are peaked, few dS make up dQ and nearly cancel in it, so their roundings weigh more (seen: 1.35)."""
TIES = 8.0
"""dK takes its large queries times dS of the few near ties that huge logits leave, in which the logits' rounding is seen most."""
GRADIENT_FLOOR = 1e-3
"""RMS below which a gradient's error counts in absolute terms: with one key, say, dS is what is left of equal float32 numbers."""
STATS_BOUNDS = {"lse2": 1e-6, "delta": 5e-6, "offset": 0.0}
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class BackwardInputs:
    """A call's tensors, and what the forward and the statistics kernel would have left of it.

    call: as models pass it, with `grad_out`. out, residual `(B, I, H, N, D)` in q's dtype; lse, lse_low `(B, I, H, N)` float32;
    stats `(B, I, H, 3, M)` float32, see `layout_backward`.
    """

    call: Inputs
    out: Tensor
    residual: Tensor
    lse: Tensor
    lse_low: Tensor
    stats: Tensor


def statistics(lse: Tensor, lse_low: Tensor, delta: Tensor) -> Tensor:
    """The three planes `(B, I, H, 3, M)` in float64, from LSE and its low part float32 and delta, each `(B, I, H, N)`."""
    *outer, crop = lse.shape
    stats = torch.zeros((*outer, 3, layout.round_up(crop, layout_backward.STATS_ALIGN)), dtype=torch.float64, device=lse.device)
    stats[..., 0, :] = math.inf
    high, low, empty = lse.double(), lse_low.double(), lse == -math.inf
    large = (high.abs() > layout_backward.SUBTRACT_LSE) & ~empty
    stats[..., 0, :crop] = (torch.where(large, low, high + low) * LOG2_E).masked_fill(empty, math.inf)
    stats[..., 1, :crop] = delta
    stats[..., 2, :crop] = torch.where(large, -high, 0.0)
    return stats


def gradient_floor(operand: Tensor, scale: float) -> float:
    """RMS below which the error of dQ or dK counts in absolute terms; `operand` is what multiplies dS in it, K or Q. What float32
    leaves of a dS that cancels grows with it."""
    return GRADIENT_FLOOR * max(1.0, scale * float(operand.double().square().mean().sqrt()))


def gradient_error(x: Tensor, ref: Tensor, dead: Tensor | None = None, floor: float = GRADIENT_FLOOR) -> float:
    """RMS error of a gradient, relative to the reference's RMS or to `floor`, whichever is larger.

    It is inf where a line (along the last axis) that `dead` marks is not exactly zero. Lines that are zero by cancellation alone,
    as under a softmax that is all but one-hot, need only be near zero.
    """
    if dead is not None and bool((x != 0).any(-1)[dead].any()):
        return math.inf
    return relative_rms(x, ref, floor=floor, exact_zeros=False)


def gradient_bounds(shape: TriangleAttentionShape, family: str) -> dict[str, float]:
    """Largest accepted errors of dQ, dK, dV and the bias's gradient in float32, by the family of inputs.

    Beside the floors: a factor where rows are peaked, what float32's rounding of the largest logits does to P, and a statistical
    allowance for few elements, whose roundings do not average.
    """
    logits = logit_rounding(shape, family)
    lines = shape.batch * shape.rows * shape.heads * shape.crop
    few, few_planes = (1.0 + 4.0 / math.sqrt(n) for n in (lines * shape.head_dim, shape.batch * shape.heads * shape.crop**2))
    rounding = GRADIENT_BOUND[shape.dtype] * PEAKED.get(family, 1.0)
    return {
        "dq": math.hypot(rounding, logits) * few,
        "dk": math.hypot(rounding, logits * (TIES if family == "extreme" else 1.0)) * few,
        "dv": math.hypot(rounding, logits) * few,
        "dbias": math.hypot(PLANE_BOUND, logits) * few_planes,
    }


def dead_queries(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """`(B, I, H, N)`: queries without any key, whose gradients are exactly zero."""
    keys = dead_keys(mask, q)
    return None if keys is None else keys.all(-1, keepdim=True).expand_as(keys)


def dead_keys(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """`(B, I, H, N)`: excluded keys, whose gradients are exactly zero."""
    if mask is None:
        return None
    excluded = ~mask if mask.dtype == torch.bool else mask == -math.inf
    return excluded[..., 0, :].expand(q.shape[:-1])


class _BackwardWorkload:
    """Implements `templates.base.Workload` as far as the three families agree.

    Args:
        shape, device, seed, family, mask_pattern, num_ctas: as `workload.ForwardWorkload`.
    """

    def __init__(
        self,
        shape: TriangleAttentionShape,
        device: torch.device | str,
        seed: int = 0,
        family: str = "normal",
        mask_pattern: str | None = None,
        num_ctas: int | None = None,
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.seed = seed
        self.family = family
        self.mask_pattern = mask_pattern
        self.num_ctas = sm_count(self.device) if num_ctas is None else num_ctas
        self.scale = shape.head_dim**-0.5
        self.lines = shape.batch * shape.rows * shape.heads * shape.crop

    def make_inputs(self, seed: int) -> BackwardInputs:
        """A fresh set of inputs; a pure function of both seeds."""
        call = make_inputs(self.shape, self.device, self.seed + seed, self.family, self.mask_pattern, with_grad_out=True)
        exact, lse64 = reference.attention(call.q, call.k, call.v, call.bias, call.mask, self.scale)
        out, residual = torch.empty_like(call.q), torch.empty_like(call.q)
        out.copy_(exact)
        residual.copy_(exact - out)
        lse = lse64.float()
        low = (lse64 - lse).masked_fill(lse == -math.inf, 0.0).float()
        delta = torch.einsum("...d,...d->...", exact, call.grad_out.double())
        return BackwardInputs(call, out, residual, lse, low, statistics(lse, low, delta).float())

    def prepare(self, kernel_fn: Callable[..., object], inputs: BackwardInputs) -> Callable[[], None]:
        """A callable that launches the kernel once; layouts and outputs are made here, so it allocates nothing."""
        return self._bind(kernel_fn, inputs)[0]

    def run(self, kernel_fn: Callable[..., object], inputs: BackwardInputs) -> dict[str, Tensor]:
        """One launch into outputs filled with NaN; name -> tensor."""
        launch, outputs = self._bind(kernel_fn, inputs)
        for x in outputs.values():
            x.fill_(math.nan)
        launch()
        return self._results(outputs)

    def _results(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: layout.trim(x, self.shape.head_dim) for name, x in outputs.items()}

    def _bind(self, kernel_fn: Callable[..., object], inputs: BackwardInputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        raise NotImplementedError

    def _launcher(self, kernel_fn: Callable[..., object], *arguments: object) -> Callable[[], None]:
        def launch() -> None:
            kernel_fn(*arguments)

        return launch

    def _operands(self, inputs: BackwardInputs) -> tuple[layout.Operands, Tensor]:
        """The forward's operands, and dO laid out alike."""
        call = inputs.call
        return layout.prepare(call.q, call.k, call.v, call.bias, call.mask), layout.kernel_operand(call.grad_out)

    def _output(self, operands: layout.Operands) -> Tensor:
        return layout.projection_layout_empty(operands.q.shape, operands.q.dtype, self.device)

    def _gradients(self, inputs: BackwardInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        call = inputs.call
        return reference.attention_backward(call.grad_out, call.q, call.k, call.v, call.bias, call.mask, self.scale)

    def _bounds(self, *names: str) -> dict[str, float]:
        found = gradient_bounds(self.shape, self.family)
        return {name: found[name] for name in names}

    def _operand_bytes(self, operands: int) -> int:
        """Bytes of so many operands like q, the bias, the mask and the statistics."""
        shape = self.shape
        bias = shape.batch * shape.heads * shape.crop**2 * getattr(torch, shape.bias_dtype).itemsize
        mask = shape.batch * shape.rows * shape.crop * 4 if shape.has_mask else 0
        return self.lines * shape.head_dim * getattr(torch, shape.dtype).itemsize * operands + self.lines * 12 + bias + mask


class StatsWorkload(_BackwardWorkload):
    """Kernels of "triangle_attention/backward_stats".

    Attributes:
        residual: whether the kernel compensates the output's rounding; True, as in the template's usual variant.
    """

    residual = True

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch."""
        extra = 1 if self.residual else 0
        size = self.lines * self.shape.head_dim * getattr(torch, self.shape.dtype).itemsize
        return size * (2 + extra) + self.lines * (4 * (1 + extra) + 12)

    def reference(self, inputs: BackwardInputs) -> dict[str, Tensor]:
        """`stats` in float64, of the rounded operands."""
        kept = self.residual
        exact = inputs.out.double() + inputs.residual.double() if kept else inputs.out.double()
        delta = torch.einsum("...d,...d->...", exact, inputs.call.grad_out.double())
        return {"stats": statistics(inputs.lse, inputs.lse_low if kept else torch.zeros_like(inputs.lse), delta)}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS of each plane; what covers no query must be exact."""
        x, want = out["stats"], ref["stats"]
        if not torch.equal(x[..., self.shape.crop :].double(), want[..., self.shape.crop :]):
            return dict.fromkeys(STATS_BOUNDS, math.inf)
        x, want = x[..., : self.shape.crop], want[..., : self.shape.crop]
        return {
            "lse2": relative_rms(x[..., 0, :], want[..., 0, :], floor=1.0),
            "delta": relative_rms(x[..., 1, :], want[..., 1, :]),
            "offset": relative_rms(x[..., 2, :], want[..., 2, :]),
        }

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        return {name: bound * (1.0 + 4.0 / math.sqrt(self.lines)) for name, bound in STATS_BOUNDS.items()}

    def _results(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return outputs

    def _bind(self, kernel_fn: Callable[..., object], inputs: BackwardInputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        out, dout = layout.kernel_operand(inputs.out), layout.kernel_operand(inputs.call.grad_out)
        residual = layout.kernel_operand(inputs.residual) if self.residual else None
        stats = layout_backward.stats_empty(out)
        low = inputs.lse_low if self.residual else None
        return self._launcher(kernel_fn, out, residual, dout, inputs.lse, low, stats, self.num_ctas), {"stats": stats}


class KeyWorkload(_BackwardWorkload):
    """Kernels of "triangle_attention/backward_key"."""

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch."""
        return self._operand_bytes(6)

    def reference(self, inputs: BackwardInputs) -> dict[str, Tensor]:
        """`dk` and `dv` in float64, which keys are excluded (`dead`), and the `floor` of dK's error."""
        _, dk, dv, _ = self._gradients(inputs)
        floor = gradient_floor(inputs.call.q, self.scale)
        return {"dk": dk, "dv": dv, "dead": dead_keys(inputs.call.mask, inputs.call.q), "floor": floor}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS of `dk` and `dv`; those of excluded keys must be exactly zero."""
        floors = {"dk": ref["floor"], "dv": GRADIENT_FLOOR}
        return {name: gradient_error(out[name], ref[name], ref["dead"], floor) for name, floor in floors.items()}

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        return self._bounds("dk", "dv")

    def _bind(self, kernel_fn: Callable[..., object], inputs: BackwardInputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        operands, dout = self._operands(inputs)
        dk, dv = self._output(operands), self._output(operands)
        arguments = (*operands[:5], dout, inputs.stats, dk, dv, self.scale, self.num_ctas)
        return self._launcher(kernel_fn, *arguments), {"dk": dk, "dv": dv}


class QueryWorkload(_BackwardWorkload):
    """Kernels of "triangle_attention/backward_query".

    Attributes:
        dbias: whether the kernel computes the bias's gradient; True, as in the template's usual variant.
        template: says how many slabs a configuration takes; `TriangleAttentionBackwardQuery` unless given.
        slabs: into how many planes it sums that; what the template says for its default configuration, until `configure`.
    """

    dbias = True

    def __init__(self, *arguments: Any, template: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.template = template
        self.slabs = 1
        self.configure(None)

    def configure(self, config: Any) -> None:
        """Take the slabs that the template gives a configuration (None: its default)."""
        from tpf_jit.templates.triangle_attention.backward import TriangleAttentionBackwardQuery

        template = self.template or TriangleAttentionBackwardQuery()
        self.slabs = template.slabs(self.shape, config or template.default(self.shape), self.num_ctas)

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch."""
        shape = self.shape
        plane = shape.batch * shape.heads * shape.crop * layout.round_up(shape.crop, layout_backward.PLANE_ALIGN) * 4
        return self._operand_bytes(5) + (self.slabs * plane if self.dbias else 0)

    def reference(self, inputs: BackwardInputs) -> dict[str, Tensor]:
        """`dq` and `dbias` `(B, H, N, N)` in float64, which queries have no key (`dead`), and the `floor` of dQ's error."""
        dq, _, _, dbias = self._gradients(inputs)
        dead, floor = dead_queries(inputs.call.mask, inputs.call.q), gradient_floor(inputs.call.k, self.scale)
        return {"dq": dq, "dbias": dbias.squeeze(1), "dead": dead, "floor": floor}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS of `dq`, which must be exactly zero for queries without a key, and of the sum of the slabs."""
        found = {"dq": gradient_error(out["dq"], ref["dq"], ref["dead"], ref["floor"])}
        if "dbias" in out:
            found["dbias"] = gradient_error(out["dbias"], ref["dbias"])
        return found

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        return self._bounds("dq", "dbias") if self.dbias else self._bounds("dq")

    def _results(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {"dq": layout.trim(outputs["dq"], self.shape.head_dim)}
        if self.dbias:
            found["dbias"] = layout_backward.sum_planes(outputs["dbias"])
        return found

    def _bind(self, kernel_fn: Callable[..., object], inputs: BackwardInputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        operands, dout = self._operands(inputs)
        outputs = {"dq": self._output(operands)}
        if self.dbias:
            shape = self.shape
            outputs["dbias"] = layout_backward.planes_empty(self.slabs, shape.batch, shape.heads, shape.crop, self.device)
        written = (outputs["dq"], outputs.get("dbias"))
        arguments = (*operands[:5], dout, inputs.stats, *written, self.scale, self.slabs, self.num_ctas)
        return self._launcher(kernel_fn, *arguments), outputs
