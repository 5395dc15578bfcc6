"""The triangle multiplicative update in plain PyTorch: any device, any dtype, bounded memory, forward and backward.

The formulas and names are those of `templates.triangle_multiplication.reference`. Everything is computed in float32 (float64 for
float64 z); a float32 product follows PyTorch's own TF32 setting. Beside operands and results only this exists at full size:

    forward      x, the contraction, (B, D, N, N), or (D, N, N) where it is not to be kept
    backward     x of one batch element where it was not kept, its gradient, and the gradient of LN(z) in float32

x and its gradient are stored as `layout.contraction_dtype` says: for bf16 activations in bf16, the one rounding inside the
update. The factors a and b exist for some channels at a time, their gradients too, and everything else for some rows of one batch
element; both runs are as long as a budget allows. They are rebuilt from z in every pass that needs them. Every sum has a fixed
order, so equal calls give equal bits. Nothing here reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tpf_jit.ops.multiplication_launch import Keep, Saved
from tpf_jit.templates.triangle_multiplication import layout
from tpf_jit.templates.triangle_multiplication.layout import Weights, contraction_dtype, factors_empty, padded

BUDGET_BYTES = 256 * 2**20
"""Most bytes of what is rebuilt, for some channels and for some rows each, that live at once on an accelerator."""
CPU_BUDGET_BYTES = 16 * 2**20
"""The same on a CPU, where smaller chunks stay in the caches and are faster."""

_FACTOR_WEIGHTS = {"p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias"}


class Rule(NamedTuple):
    """What a call computes beside its tensors: direction, eps of both norms, and the dtype of activations and of the update."""

    direction: str
    eps: float
    dtype: torch.dtype


def forward(
    z: Tensor, mask: Tensor | None, weights: Weights, residual: Tensor | None, rule: Rule, keep: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The update, and the contraction.

    Args:
        z: `(B, N, N, C)`, any floating dtype, any strides.
        mask: None or `(B or 1, N or 1, N or 1)`; multiplies both factors.
        weights: any floating dtypes.
        residual: None, or like z: added to the update before it is rounded.
        rule: see there.
        keep: whether to return the contraction.
        out: where to write the update; may be z or residual, as each of their rows is read before it is written.

    Returns:
        the update `(B, N, N, C)`, of `result_dtype`, and x `(B, D, N, N)` or an empty tensor.
    """
    call = _Call(z, mask, weights, rule)
    batch, crop, _, _ = z.shape
    if out is None:
        out = torch.empty(z.shape, dtype=result_dtype(rule.dtype, residual), device=z.device)
    x = contraction_empty(batch if keep else min(batch, 1), weights.hidden, crop, call.stored, z.device)
    with torch.autocast(z.device.type, enabled=False):
        for b in range(batch):
            part = x[b if keep else 0]
            call.contract(b, part)
            for rows in call.rows(z.shape[-1] * 4 + weights.hidden * 3):
                update = call.update(b, rows, part)
                out[b, rows] = update if residual is None else residual[b, rows] + update
                del update
    return out, x if keep else x.new_empty(0)


def saved_for_kernels(
    z: Tensor, mask: Tensor | None, weights: Weights, x: Tensor, rule: Rule, keep: Keep
) -> Saved:
    """What kernels would have left for their own backward, from the contraction, where one of the forward's cannot be had."""
    call = _Call(z, mask, weights, rule)
    z_stats, x_stats = (layout.stats_empty(z) for _ in range(2))
    factors = factors_empty(z, weights.hidden).zero_() if keep.factors else None
    folded = layout.folded_empty(weights, z.dtype)
    with torch.autocast(z.device.type, enabled=False):
        layout.fold_into(weights, *folded)
        for b in range(z.shape[0]):
            for rows in call.rows(3 * max(z.shape[-1], weights.hidden)):
                z_stats[b, rows] = layout.statistics(z[b, rows].to(call.wide), rule.eps)
                x_stats[b, rows] = layout.statistics(_pairs(x[b], rows, call.wide), rule.eps)
            for part in call.channels(planes=3) if keep.factors else ():
                factors[b, :, part, :, : z.shape[1]] = call.factors(b, part)
    padded_x = torch.nn.functional.pad(x, (0, padded(x.shape[-1]) - x.shape[-1])) if keep.x else None
    return Saved(padded_x, factors, z_stats, x_stats, *folded)


def backward(
    grad_out: Tensor, z: Tensor, mask: Tensor | None, weights: Weights, x: Tensor | None, rule: Rule, needed: list[bool]
) -> list[Tensor]:
    """Gradients of z and of the weights in their order; those that `needed` leaves out, or of absent weights, come back empty.

    `x` is the contraction if the forward kept it, else None. The other arguments are those of `forward`, `grad_out` is like the
    update. Sums over pairs are kept in float32 (float64) and rounded once. Results have the dtype and, where its strides are
    dense, the layout of their operand.
    """
    call = _Call(z, mask, weights, rule)
    wanted = {name: w for name, w, need in zip(weights._fields, weights, needed[1:], strict=True) if need and w is not None}
    sums = _Sums({name: torch.zeros_like(w, dtype=call.wide) for name, w in wanted.items()})
    dz = torch.empty_like(z) if needed[0] else z.new_empty(0)
    through_norm = needed[0] or bool(wanted.keys() & {"norm_in_weight", "norm_in_bias"})
    through_factors = through_norm or bool(wanted.keys() & _FACTOR_WEIGHTS)
    size = (weights.hidden, *z.shape[1:3])
    kept = x
    own = torch.empty(size, dtype=call.stored, device=z.device) if kept is None else None
    dx = own if kept is None or not through_factors else torch.empty(size, dtype=call.stored, device=z.device)
    dzn = torch.empty(z.shape[1:], dtype=call.wide, device=z.device) if through_norm else None
    with torch.autocast(z.device.type, enabled=False):
        for b in range(z.shape[0]):
            if kept is None:
                call.contract(b, own)
            _back_gradient(call, b, grad_out, own if kept is None else kept[b], dx if through_factors else None, dzn, sums)
            if through_factors:
                _factor_gradient(call, b, dx, dzn, sums)
            if through_norm:
                for rows in call.rows(z.shape[-1] * 5):
                    _norm_gradient(call, z[b, rows], dzn[rows], dz[b, rows] if needed[0] else None, sums)
    return [dz, *(sums[name].to(wanted[name].dtype) if name in wanted else z.new_empty(0) for name in weights._fields)]


def contraction_empty(batch: int, hidden: int, crop: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised x `(B, D, N, N)`, with the pitch that kernels give its rows."""
    return torch.empty((batch, hidden, crop, padded(crop)), dtype=dtype, device=device)[..., :crop]


def result_dtype(dtype: torch.dtype, residual: Tensor | None) -> torch.dtype:
    """The dtype of an update of `dtype` with a residual: the one to which PyTorch promotes both."""
    return dtype if residual is None else torch.promote_types(dtype, residual.dtype)


class _Call:
    """One call's tensors with the weights in the dtype of computation, and how it is cut."""

    def __init__(self, z: Tensor, mask: Tensor | None, weights: Weights, rule: Rule) -> None:
        self.z, self.mask, self.rule = z, mask, rule
        self.wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        self.stored = torch.float64 if z.dtype == torch.float64 else contraction_dtype(rule.dtype)
        w = Weights(*(None if x is None else x.to(self.wide) for x in weights))
        self.hidden = w.hidden
        self.norm_in, self.norm_out = (w.norm_in_weight, w.norm_in_bias), (w.norm_out_weight, w.norm_out_bias)
        self.p_in, self.g_in = (w.p_in_weight, w.p_in_bias), (w.g_in_weight, w.g_in_bias)
        self.p_out, self.g_out = (w.p_out_weight, w.p_out_bias), (w.g_out_weight, w.g_out_bias)
        self.budget = CPU_BUDGET_BYTES if z.device.type == "cpu" else BUDGET_BYTES

    def rows(self, width: int) -> Iterator[slice]:
        """Cut the rows so that `width` numbers a pair stay inside the budget."""
        crop = self.z.shape[1]
        each = max(1, self.budget // max(1, crop * width * self.wide.itemsize))
        return (slice(i, min(i + each, crop)) for i in range(0, crop, each))

    def channels(self, planes: int) -> Iterator[slice]:
        """Cut the hidden channels so that `planes` planes (N, N) a channel stay inside the budget."""
        crop = self.z.shape[1]
        each = max(1, self.budget // max(1, planes * crop * crop * self.wide.itemsize))
        return (slice(d, min(d + each, self.hidden)) for d in range(0, self.hidden, each))

    def norm_z(self, b: int, rows: slice) -> Tensor:
        """LN(z) of some rows, (rows, N, C)."""
        return layer_norm(self.z[b, rows].to(self.wide), self.z.shape[-1:], *self.norm_in, self.rule.eps)

    def mask_rows(self, b: int, rows: slice) -> Tensor | None:
        """The mask of some rows as it multiplies (rows, N, width)."""
        mask = self.mask
        if mask is None:
            return None
        own = mask[b if mask.shape[0] > 1 else 0, rows if mask.shape[1] > 1 else slice(0, 1)]
        return own.to(self.wide).unsqueeze(-1)

    def projections(self, part: slice) -> list[list[Tensor | None]]:
        """Weight and bias of value and gate for some channels of both factors, rows of a first."""
        pairs = (self.p_in, self.g_in)
        return [[None if x is None else self.of_both(x, part).flatten(0, 1) for x in pair] for pair in pairs]

    def of_both(self, x: Tensor, part: slice) -> Tensor:
        """(2, channels, ...): a view of what belongs to some channels of both factors."""
        return x.unflatten(0, (2, self.hidden))[:, part]

    def factors(self, b: int, part: slice) -> Tensor:
        """a and b for some channels, (2, channels, N, N)."""
        value, gate = self.projections(part)
        width, crop = value[0].shape[0], self.z.shape[1]
        found = torch.empty((width, crop, crop), dtype=self.wide, device=self.z.device)
        for rows in self.rows(2 * self.z.shape[-1] + 3 * width):
            zn = self.norm_z(b, rows)
            both = linear(zn, *value).mul_(linear(zn, *gate).sigmoid_())
            mask = self.mask_rows(b, rows)
            found[:, rows] = (both if mask is None else both.mul_(mask)).permute(2, 0, 1)
            del zn, both  # before the next chunk's are made
        return found.unflatten(0, (2, -1))

    def contract(self, b: int, x: Tensor) -> None:
        """Fill x (D, N, N) with the contraction of one batch element."""
        for part in self.channels(planes=3):
            left, right = self.factors(b, part)
            x[part] = torch.bmm(left, right.mT) if self.rule.direction == "outgoing" else torch.bmm(left.mT, right)
            del left, right

    def update(self, b: int, rows: slice, x: Tensor) -> Tensor:
        """The update of some rows, (rows, N, C), from x (D, N, N)."""
        y = layer_norm(_pairs(x, rows, self.wide), (self.hidden,), *self.norm_out, self.rule.eps)
        return linear(y, *self.p_out).mul_(linear(self.norm_z(b, rows), *self.g_out).sigmoid_())


class _Sums(dict):
    """Gradients of the weights that are wanted, by name, as they add up."""

    def add(self, name: str, make: Callable[[], Tensor], where: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        if name in self:
            where(self[name]).add_(make())

    def add_norm(self, name: str, grad: Tensor, xhat: Tensor) -> None:
        self.add(f"{name}_weight", lambda: (grad * xhat).sum((0, 1)))
        self.add(f"{name}_bias", lambda: grad.sum((0, 1)))

    def add_linear(self, name: str, grad: Tensor, x: Tensor) -> None:
        self.add(f"{name}_weight", lambda: grad.flatten(0, 1).mT @ x.flatten(0, 1))
        self.add(f"{name}_bias", lambda: grad.sum((0, 1)))


def _back_gradient(
    call: _Call, b: int, grad_out: Tensor, x: Tensor, dx: Tensor | None, dzn: Tensor | None, sums: _Sums
) -> None:
    """Back through gate, output projection and norm of one batch element: starts dzn, fills dx (which may be x)."""
    for rows in call.rows(7 * call.z.shape[-1] + 5 * call.hidden):
        zn = call.norm_z(b, rows)
        gate = linear(zn, *call.g_out).sigmoid_()
        xhat, rstd = _normalised(_pairs(x, rows, call.wide), call.rule.eps)
        y = _affine(xhat, *call.norm_out)
        grad = grad_out[b, rows].to(call.wide)
        dvalue = grad * gate
        dgate = _gate_gradient(linear(y, *call.p_out).mul_(grad), gate)
        sums.add_linear("p_out", dvalue, y)
        sums.add_linear("g_out", dgate, zn)
        if dzn is not None:
            torch.matmul(dgate, call.g_out[0], out=dzn[rows])
        dy = dvalue @ call.p_out[0]
        sums.add_norm("norm_out", dy, xhat)
        if dx is not None:
            dx[:, rows] = _norm_backward(dy, xhat, rstd, call.norm_out[0]).permute(2, 0, 1)
        del zn, gate, xhat, rstd, y, grad, dvalue, dgate, dy  # before the next chunk's are made


def _factor_gradient(call: _Call, b: int, dx: Tensor, dzn: Tensor | None, sums: _Sums) -> None:
    """Back through contraction, mask, gates and input projections of one batch element: adds to dzn."""
    for part in call.channels(planes=5):
        left, right = call.factors(b, part)
        grads = _contraction_gradient(call.rule.direction, dx[part].to(call.wide), left, right)
        del left, right
        value, gate = call.projections(part)
        for rows in call.rows(2 * call.z.shape[-1] + 5 * grads.shape[0]):
            zn = call.norm_z(b, rows)
            opened = linear(zn, *gate).sigmoid_()
            grad = _pairs(grads, rows, call.wide)
            mask = call.mask_rows(b, rows)
            grad = grad if mask is None else grad.mul_(mask)
            dvalue = grad * opened
            dgate = _gate_gradient(linear(zn, *value).mul_(grad), opened)
            _add_some(sums, call, "p_in", part, dvalue, zn)
            _add_some(sums, call, "g_in", part, dgate, zn)
            if dzn is not None:
                dzn[rows].add_(dvalue @ value[0]).add_(dgate @ gate[0])
            del zn, opened, grad, dvalue, dgate  # before the next chunk's are made
        del grads


def _norm_gradient(call: _Call, z: Tensor, dzn: Tensor, dz: Tensor | None, sums: _Sums) -> None:
    """Back through the norm of some rows of z, into dz."""
    zhat, rstd = _normalised(z.to(call.wide), call.rule.eps)
    sums.add_norm("norm_in", dzn, zhat)
    if dz is not None:
        dz.copy_(_norm_backward(dzn, zhat, rstd, call.norm_in[0]))


def _add_some(sums: _Sums, call: _Call, name: str, part: slice, grad: Tensor, zn: Tensor) -> None:
    """Gradients of the rows of a projection that belong to some channels of both factors."""

    def own(x: Tensor) -> Tensor:
        return call.of_both(x, part)

    sums.add(f"{name}_weight", lambda: (grad.flatten(0, 1).mT @ zn.flatten(0, 1)).unflatten(0, (2, -1)), own)
    sums.add(f"{name}_bias", lambda: grad.sum((0, 1)).unflatten(0, (2, -1)), own)


def _contraction_gradient(direction: str, dx: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Gradients of a and b, (2 * channels, N, N), rows of a first."""
    channels, crop, _ = dx.shape
    grads = torch.empty((2 * channels, crop, crop), dtype=dx.dtype, device=dx.device)
    if direction == "outgoing":
        torch.bmm(dx, right, out=grads[:channels])
        torch.bmm(dx.mT, left, out=grads[channels:])
    else:
        torch.bmm(right, dx.mT, out=grads[:channels])
        torch.bmm(left, dx, out=grads[channels:])
    return grads


def _gate_gradient(grad: Tensor, gate: Tensor) -> Tensor:
    """grad * gate * (1 - gate), in place of both."""
    grad.mul_(gate)
    return grad.mul_(gate.neg_().add_(1.0))


def _pairs(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """(rows, N, width) of a channel-major (width, N, N), contiguous."""
    view = x[:, rows].permute(1, 2, 0)
    return torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view)


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x without its mean and spread along the last axis, and the reciprocal spread."""
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt_()
    return centred.mul_(rstd), rstd


def _affine(xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = xhat if weight is None else xhat * weight
    return y if bias is None else y + bias


def _norm_backward(grad: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    """Gradient of a LayerNorm's input; grad is left as it is."""
    grad = grad.clone() if weight is None else grad * weight
    along = (grad * xhat).mean(-1, keepdim=True)
    return grad.sub_(grad.mean(-1, keepdim=True)).sub_(xhat * along).mul_(rstd)
