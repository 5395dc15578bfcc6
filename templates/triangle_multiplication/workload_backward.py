"""The backward kernels of the triangle multiplicative update as workloads: each alone, on operands that float64 computed for it.

One workload for each family of `layout_backward`. Statistics are those of the rounded z and x in float64, rounded once to
float32; x, dfactors and dzn are rounded as the stages before would leave them. References come from the formulas of the update
with norms and projections as they were given, not from folded weights, so an error in the folding is seen too. Outputs are
filled with NaN before a checked run, and what pads dfactors with a huge number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from tpf_jit.templates import registry
from tpf_jit.templates.triangle_attention.workload import relative_rms
from tpf_jit.templates.triangle_multiplication import layout, layout_backward, reference
from tpf_jit.templates.triangle_multiplication.inputs import Inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights
from tpf_jit.templates.triangle_multiplication.workload import EPS, _StageWorkload, exact_statistics

PADDING = 1e30
"""In dfactors' columns from N on: kernels may read it, but it may reach nothing."""


class GradientRoundings(NamedTuple):
    """As `workload.Roundings`, by output: how many independent roundings to bf16 each may carry.

    Folded weights are rounded before every projection, the gradients of values and gates before every product, dzn, dx and dz
    when they are stored. Sums over pairs are of the gradients as they were rounded. Gates carry the roundings of both
    projections, which grow where gates are steep.
    """

    dx: float
    dzn: float
    dz: float
    value: float
    gate: float
    value_sums: float
    gate_sums: float


_USUAL = GradientRoundings(5.0, 8.5, 5.0, 3.1, 4.0, 1.8, 3.9)
ROUNDINGS = {"normal": _USUAL, "small": _USUAL, "trained_like": GradientRoundings(6.5, 17.0, 17.0, 5.4, 23.0, 2.3, 48.0)}
"""By family, half as many again as the most seen in tests/unit/multiplication_backward_emulation.py, which rounds just so."""


class BackInputs(NamedTuple):
    """What the back kernels read: a call with `grad_out`, statistics `(B, N, N, 2)` of z and x, x `(B, D, N, P)`."""

    call: Inputs
    z_stats: Tensor
    x: Tensor
    x_stats: Tensor


class FrontInputs(NamedTuple):
    """What the front kernels read: a call, statistics of z, dfactors `(B, 2, D, N, P)`, and dzn `(B, N, N, C)`."""

    call: Inputs
    z_stats: Tensor
    dfactors: Tensor
    dzn: Tensor


class _Through(NamedTuple):
    """Some pairs on their way back through value and gate, all in one dtype: gradients of the projections' results, and the
    normalised pairs that value and gate were projected from, with their reciprocal deviations."""

    dvalue: Tensor
    dgate: Tensor
    value_hat: Tensor
    value_rstd: Tensor
    gate_hat: Tensor


class _BackwardWorkload(_StageWorkload):
    """What the four families share.

    Args:
        template: says how many splits a configuration takes; the family's own unless given.
        The rest as for the stages of the forward.

    Attributes:
        splits: into how many planes a kernel sums; what the template says for its default configuration, until `configure`.
    """

    own_template = ""
    """The name of that of a family that sums into planes."""

    def __init__(self, *arguments: Any, template: Any = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.template = template
        if template is None and self.own_template:
            self.template = registry.get(self.own_template)
        self.splits = 1
        self.configure(None)

    def configure(self, config: Any) -> None:
        """Take the splits that the template gives a configuration (None: its default)."""
        if self.template is not None:
            config = self.template.default(self.shape) if config is None else config
            self.splits = self.template.splits(self.shape, config, self.num_ctas)

    def run(self, kernel_fn: Callable[..., object], inputs: Any) -> dict[str, Tensor]:
        """One launch into outputs filled with NaN; name -> tensor."""
        launch, outputs = self._bind(kernel_fn, inputs)
        for x in outputs:
            x.fill_(math.nan)
        launch()
        return self._results(*outputs)

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        allowed = ROUNDINGS[self.family]
        return {name: self._bound(getattr(allowed, name), size) for name, size in self._sizes().items()}

    def _sizes(self) -> dict[str, int]:
        """Elements of every output."""
        raise NotImplementedError

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        """By name, from what `_bind` returns."""
        raise NotImplementedError

    def _plane_results(self, planes: Tensor, sums: Tensor, columns: int) -> dict[str, Tensor]:
        """Planes and sums over the splits, value and gate apart."""
        planes, sums = planes.sum(0), sums.sum(0)
        names = ("value", "gate", "value_sums", "gate_sums")
        return dict(zip(names, (planes[:, :columns], planes[:, columns:], *sums.unbind(-1)), strict=True))

    def _planes_of(self, parts: Iterator[_Through]) -> dict[str, Tensor]:
        """The references of `_plane_results`."""
        found = dict.fromkeys(self._sizes(), 0.0)
        for part in parts:
            for name, grad, hat in (("value", part.dvalue, part.value_hat), ("gate", part.dgate, part.gate_hat)):
                found[name] = found[name] + grad.flatten(0, 1).T @ hat.flatten(0, 1)
                found[f"{name}_sums"] = found[f"{name}_sums"] + grad.sum((0, 1))
        return found

    def _plane_bytes(self, rows: int, columns: int) -> int:
        return 4 * self.splits * rows * (columns + 2)


class _BackGradientWorkload(_BackwardWorkload):
    """The two families that go back through output gate and output projection."""

    def make_inputs(self, seed: int) -> BackInputs:
        """A fresh set of inputs; a pure function of both seeds."""
        call = self.make_call(seed, with_grad_out=True)
        x = _forward(call, self.shape.direction)[1]
        return BackInputs(call, exact_statistics(call.z), x, exact_statistics(_channels_last(x, self.shape.crop)))

    def _operands(self, inputs: BackInputs) -> tuple[Tensor, ...]:
        call = inputs.call
        folded = layout.fold(call.weights, call.z.dtype)
        z, dout = layout.pair_operand(call.z), layout.pair_operand(call.grad_out)
        return z, inputs.z_stats, inputs.x, inputs.x_stats, dout, folded.p_out, folded.g_out, folded.out_terms

    def _operand_bytes(self) -> int:
        """Of z, dout, x and both statistics."""
        pairs, shape = self._pairs(), self.shape
        return self._element() * (2 * pairs * shape.channels + self._padded_pairs() * shape.hidden) + 16 * pairs


class BackBackwardWorkload(_BackGradientWorkload):
    """Kernels of "triangle_multiplication/back_backward". Outputs `dx` `(B, D, N, P)`, whose padding must be zero, and `dzn`."""

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch; weights are small."""
        outputs = self._pairs() * self.shape.channels + self._padded_pairs() * self.shape.hidden
        return self._operand_bytes() + self._element() * outputs

    def reference(self, inputs: BackInputs) -> dict[str, Tensor]:
        """`dx` without its padding and `dzn`, in float64."""
        dx, dzn = _back_gradient(inputs.call, inputs.x, torch.float64)
        return {"dx": dx, "dzn": dzn}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS errors; the padding is judged by itself."""
        crop, dx = self.shape.crop, out["dx"]
        padding = bool((dx[..., crop:] != 0).any())
        error = math.inf if padding else relative_rms(dx[..., :crop], ref["dx"], exact_zeros=False)
        return {"dx": error, "dzn": relative_rms(out["dzn"], ref["dzn"], exact_zeros=False)}

    def _sizes(self) -> dict[str, int]:
        return {"dx": self._pairs() * self.shape.hidden, "dzn": self._pairs() * self.shape.channels}

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        return dict(zip(("dx", "dzn"), outputs, strict=True))

    def _bind(self, kernel_fn: Callable[..., object], inputs: BackInputs) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        operands = self._operands(inputs)
        outputs = torch.empty_like(inputs.x), layout_backward.pair_empty(inputs.call.z)
        return lambda: kernel_fn(*operands, *outputs, self.num_ctas), outputs


class BackWeightsWorkload(_BackGradientWorkload):
    """Kernels of "triangle_multiplication/back_weights". Outputs: planes and sums over the splits, value and gate apart."""

    own_template = "triangle_multiplication_back_weights_sm90"

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch."""
        return self._operand_bytes() + self._plane_bytes(self.shape.channels, self.shape.hidden + self.shape.channels)

    def reference(self, inputs: BackInputs) -> dict[str, Tensor]:
        """`value` `(C, D)`, `gate` `(C, C)`, `value_sums` and `gate_sums` `(C,)` in float64."""
        return self._planes_of(part for _, _, part in _through_back(inputs.call, inputs.x, torch.float64))

    def _sizes(self) -> dict[str, int]:
        c, d = self.shape.channels, self.shape.hidden
        return {"value": c * d, "gate": c * c, "value_sums": c, "gate_sums": c}

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        return self._plane_results(*outputs, self.shape.hidden)

    def _bind(self, kernel_fn: Callable[..., object], inputs: BackInputs) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        operands, splits = self._operands(inputs), self.splits
        outputs = layout_backward.back_planes_empty(inputs.call.z, self.shape.hidden, splits)
        return lambda: kernel_fn(*operands, *outputs, splits, self.num_ctas), outputs


class _FrontGradientWorkload(_BackwardWorkload):
    """The two families that go back through mask, input gates and input projections."""

    def make_inputs(self, seed: int) -> FrontInputs:
        """A fresh set of inputs; a pure function of both seeds."""
        call, crop = self.make_call(seed, with_grad_out=True), self.shape.crop
        factors, x = _forward(call, self.shape.direction)
        dx, dzn = (t.to(call.z.dtype).float() for t in _back_gradient(call, x, torch.float32))
        a, b = (t[..., :crop].float() for t in factors.unbind(1))
        made = torch.full_like(factors, PADDING)
        pair = (dx @ b, dx.mT @ a) if self.shape.direction == "outgoing" else (b @ dx.mT, a @ dx)
        made[..., :crop] = torch.stack(pair, 1)
        return FrontInputs(call, exact_statistics(call.z), made, dzn.to(call.z.dtype))

    def _operands(self, inputs: FrontInputs, *between: Tensor) -> tuple[Tensor | None, ...]:
        """Up to the terms; `between` follows dfactors."""
        call = inputs.call
        folded = layout.fold(call.weights, call.z.dtype)
        z, mask = layout.pair_operand(call.z), layout.mask_buffer(call.mask, call.z)
        return z, inputs.z_stats, mask, inputs.dfactors, *between, folded.p_in, folded.g_in, folded.in_terms

    def _operand_bytes(self) -> int:
        """Of z, dfactors, mask and statistics."""
        pairs, shape = self._pairs(), self.shape
        small = 12 * pairs if shape.has_mask else 8 * pairs
        return self._element() * (pairs * shape.channels + 2 * self._padded_pairs() * shape.hidden) + small


class FrontBackwardWorkload(_FrontGradientWorkload):
    """Kernels of "triangle_multiplication/front_backward". Output `dz` `(B, N, N, C)`."""

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch; weights are small."""
        return self._operand_bytes() + 2 * self._element() * self._pairs() * self.shape.channels

    def reference(self, inputs: FrontInputs) -> dict[str, Tensor]:
        """`dz` in float64."""
        call, w = inputs.call, _cast(inputs.call.weights, torch.float64)
        dz = torch.empty(call.z.shape, dtype=torch.float64, device=call.z.device)
        for b, rows, part in _through_front(call, inputs.dfactors, torch.float64):
            grad = _scaled(part.dvalue @ w.p_in_weight + part.dgate @ w.g_in_weight, w.norm_in_weight)
            dz[b, rows] = _through_norm(grad + inputs.dzn[b, rows], part.value_hat, part.value_rstd)
        return {"dz": dz}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS error."""
        return {"dz": relative_rms(out["dz"], ref["dz"], exact_zeros=False)}

    def _sizes(self) -> dict[str, int]:
        return {"dz": self._pairs() * self.shape.channels}

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        return {"dz": outputs[0]}

    def _bind(self, kernel_fn: Callable[..., object], inputs: FrontInputs) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        operands = self._operands(inputs, inputs.dzn)
        outputs = (layout_backward.pair_empty(inputs.call.z),)
        return lambda: kernel_fn(*operands, *outputs, self.num_ctas), outputs


class FrontWeightsWorkload(_FrontGradientWorkload):
    """Kernels of "triangle_multiplication/front_weights". Outputs: planes and sums over the splits, value and gate apart."""

    own_template = "triangle_multiplication_front_weights_sm90"

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the operands and outputs of one launch."""
        return self._operand_bytes() + self._plane_bytes(2 * self.shape.hidden, 2 * self.shape.channels)

    def reference(self, inputs: FrontInputs) -> dict[str, Tensor]:
        """`value` and `gate` `(2 D, C)`, `value_sums` and `gate_sums` `(2 D,)` in float64."""
        return self._planes_of(part for _, _, part in _through_front(inputs.call, inputs.dfactors, torch.float64))

    def _sizes(self) -> dict[str, int]:
        rows = 2 * self.shape.hidden
        return {"value": rows * self.shape.channels, "gate": rows * self.shape.channels, "value_sums": rows, "gate_sums": rows}

    def _results(self, *outputs: Tensor) -> dict[str, Tensor]:
        return self._plane_results(*outputs, self.shape.channels)

    def _bind(self, kernel_fn: Callable[..., object], inputs: FrontInputs) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        operands, splits = self._operands(inputs), self.splits
        outputs = layout_backward.front_planes_empty(inputs.call.z, self.shape.hidden, splits)
        return lambda: kernel_fn(*operands, *outputs, splits, self.num_ctas), outputs


def _forward(call: Inputs, direction: str) -> tuple[Tensor, Tensor]:
    """Factors `(B, 2, D, N, P)` and x `(B, D, N, P)` as the forward would leave them, padded with zeros."""
    hidden, crop = call.weights.hidden, call.z.shape[1]
    exact = reference.factors(call.z, call.mask, call.weights, EPS, torch.float32)
    factors, x = layout.factors_empty(call.z, hidden).zero_(), layout.contraction_empty(call.z, hidden).zero_()
    factors[..., :crop] = exact
    x[..., :crop] = reference.contract(factors[..., :crop].float(), direction)
    return factors, x


def _back_gradient(call: Inputs, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`dx` `(B, D, N, N)` and `dzn` `(B, N, N, C)` in `dtype`."""
    w = _cast(call.weights, dtype)
    dx = torch.empty(x[..., : call.z.shape[1]].shape, dtype=dtype, device=x.device)
    dzn = torch.empty(call.z.shape, dtype=dtype, device=x.device)
    for b, rows, part in _through_back(call, x, dtype):
        dzn[b, rows] = _scaled(part.dgate @ w.g_out_weight, w.norm_in_weight)
        dy = _scaled(part.dvalue @ w.p_out_weight, w.norm_out_weight)
        dx[b, :, rows] = _through_norm(dy, part.value_hat, part.value_rstd).permute(2, 0, 1)
    return dx, dzn


def _through_back(call: Inputs, x: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, slice, _Through]]:
    """Batch element, rows, and these rows' way back through output gate and output projection."""
    w = _cast(call.weights, dtype)
    for b, rows in _row_chunks(call.z, max(call.z.shape[-1], w.hidden), dtype):
        zhat, _ = _normalised(call.z[b, rows].to(dtype))
        xhat, rstd = _normalised(_channels_last(x[b, :, rows].unsqueeze(0), call.z.shape[1])[0].to(dtype))
        value = linear(_affine(xhat, w.norm_out_weight, w.norm_out_bias), w.p_out_weight, w.p_out_bias)
        gate = linear(_affine(zhat, w.norm_in_weight, w.norm_in_bias), w.g_out_weight, w.g_out_bias).sigmoid()
        grad = call.grad_out[b, rows].to(dtype)
        yield b, rows, _Through(grad * gate, grad * value * gate * (1 - gate), xhat, rstd, zhat)


def _through_front(call: Inputs, dfactors: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, slice, _Through]]:
    """Batch element, rows, and these rows' way back through mask, input gates and input projections."""
    w = _cast(call.weights, dtype)
    for b, rows in _row_chunks(call.z, max(call.z.shape[-1], 2 * w.hidden), dtype):
        zhat, rstd = _normalised(call.z[b, rows].to(dtype))
        zn = _affine(zhat, w.norm_in_weight, w.norm_in_bias)
        value, gate = linear(zn, w.p_in_weight, w.p_in_bias), linear(zn, w.g_in_weight, w.g_in_bias).sigmoid()
        grad = _channels_last(dfactors[b].flatten(0, 1)[:, rows].unsqueeze(0), call.z.shape[1])[0].to(dtype)
        grad = grad if call.mask is None else grad * call.mask[b, rows].to(dtype).unsqueeze(-1)
        yield b, rows, _Through(grad * gate, grad * value * gate * (1 - gate), zhat, rstd, zhat)


def _row_chunks(z: Tensor, width: int, dtype: torch.dtype) -> Iterator[tuple[int, slice]]:
    batch, crop, _, _ = z.shape
    each = max(1, reference.CHUNK_BYTES // (crop * width * dtype.itemsize))
    return ((b, slice(i, i + each)) for b in range(batch) for i in range(0, crop, each))


def _channels_last(x: Tensor, crop: int) -> Tensor:
    """(B, N, N, width) of a channel-major (B, width, N, P)."""
    return x[..., :crop].permute(0, 2, 3, 1)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, rstd = layout.statistics(x, EPS).split(1, -1)
    return (x - mean) * rstd, rstd


def _affine(hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _scaled(hat, weight) + (0.0 if bias is None else bias)


def _scaled(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _through_norm(grad: Tensor, hat: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of what was normalised, from that of the normalised."""
    return rstd * (grad - grad.mean(-1, keepdim=True) - hat * (grad * hat).mean(-1, keepdim=True))


def _cast(weights: Weights, dtype: torch.dtype) -> Weights:
    return Weights(*(None if x is None else x.to(dtype) for x in weights))
