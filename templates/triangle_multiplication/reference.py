"""The triangle multiplicative update by its formulas, forward and backward, as the yardstick of every other implementation.

    zn = LN(z)      p, g = zn p_in^T, zn g_in^T     [a; b] = mask * sigmoid(g) * p
    x_ij = sum_k a_ik b_jk (outgoing)   or   sum_k a_ki b_kj (incoming)          for every channel
    h = LN(x) p_out^T                   s = sigmoid(zn g_out^T)                  out = [residual +] s * h

    dh = dO s          ds = dO h s (1 - s)        dx through LN from dh p_out
    da = dx b          db = dx^T a                (outgoing; incoming: da = b dx^T, db = a dx, as matrices)
    dp = dab mask sigmoid(g)                      dg = dab mask p sigmoid'(g)
    dz through LN from dp p_in + dg g_in + ds g_out, and every weight's gradient from its product

Plain PyTorch on any device, in float64 unless asked otherwise, rows or channels at a time; written for trust, not for speed, and
independent of the library's own PyTorch path. Weights are read as they are: rounding them is the business of whoever does it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tpf_jit.templates.triangle_multiplication.layout import Weights

CHUNK_BYTES = 512 * 2**20
"""Most bytes of any one tensor made from a chunk of rows or channels (at least one)."""


def multiplication(
    z: Tensor,
    direction: str,
    mask: Tensor | None,
    weights: Weights,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The update of z, `(B, N, N, C)` in `dtype`.

    Args:
        z: `(B, N, N, C)`, any dtype.
        direction: `"outgoing"` or `"incoming"`.
        mask: None, or `(B or 1, N or 1, N or 1)`, boolean or anything that multiplies.
        weights: see `layout.Weights`, any dtypes.
        eps: of both LayerNorms.
        residual: None, or like z: added to the update.
        dtype: in which everything is computed.
    """
    weights = _cast(weights, dtype)
    x = contract(factors(z, mask, weights, eps, dtype), direction)
    return back(z, x, weights, eps, residual, dtype)


def factors(z: Tensor, mask: Tensor | None, weights: Weights, eps: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """a and b, channel-major: `(B, 2, D, N, N)` in `dtype`."""
    weights = _cast(weights, dtype)
    batch, crop, _, _ = z.shape
    found = torch.empty((batch, 2 * weights.hidden, crop, crop), dtype=dtype, device=z.device)
    for b, rows in _row_chunks(z, weights, dtype):
        zn, _, _ = _norm(z[b, rows].to(dtype), weights.norm_in_weight, weights.norm_in_bias, eps)
        value, gate = _projections(zn, weights)
        found[b, :, rows] = (value * gate * _rows_of(mask, b, rows, dtype)).permute(2, 0, 1)
    return found.unflatten(1, (2, weights.hidden))


def contract(ab: Tensor, direction: str) -> Tensor:
    """x `(B, D, N, N)` from the factors `(B, 2, D, N, N)`."""
    a, b = ab[:, 0], ab[:, 1]
    return a @ b.mT if direction == "outgoing" else a.mT @ b


def back(
    z: Tensor, x: Tensor, weights: Weights, eps: float, residual: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The update `(B, N, N, C)` from z and the contraction x `(B, D, N, N)`."""
    weights = _cast(weights, dtype)
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    for b, rows in _row_chunks(z, weights, dtype):
        zn, _, _ = _norm(z[b, rows].to(dtype), weights.norm_in_weight, weights.norm_in_bias, eps)
        y, _, _ = _norm(_pairs_of(x, b, rows, dtype), weights.norm_out_weight, weights.norm_out_bias, eps)
        update = _linear(y, weights.p_out_weight, weights.p_out_bias)
        update = update * torch.sigmoid(_linear(zn, weights.g_out_weight, weights.g_out_bias))
        out[b, rows] = update if residual is None else update + residual[b, rows].to(dtype)
    return out


def multiplication_backward(
    grad_out: Tensor,
    z: Tensor,
    direction: str,
    mask: Tensor | None,
    weights: Weights,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Weights]:
    """dz like z and the gradients of the weights in their order (None where a weight is None), all in `dtype`.

    A residual's gradient is `grad_out` itself.
    """
    given, weights = weights, _cast(weights, dtype)
    sums = {name: torch.zeros_like(x) for name, x in weights._asdict().items() if x is not None}
    ab = factors(z, mask, weights, eps, dtype)
    x = contract(ab, direction)
    dx = torch.empty_like(x)
    dzn = torch.empty(z.shape, dtype=dtype, device=z.device)
    for b, rows in _row_chunks(z, weights, dtype):
        zn, _, _ = _norm(z[b, rows].to(dtype), weights.norm_in_weight, weights.norm_in_bias, eps)
        y, xhat, rstd = _norm(_pairs_of(x, b, rows, dtype), weights.norm_out_weight, weights.norm_out_bias, eps)
        value = _linear(y, weights.p_out_weight, weights.p_out_bias)
        gate = torch.sigmoid(_linear(zn, weights.g_out_weight, weights.g_out_bias))
        grad = grad_out[b, rows].to(dtype)
        dvalue, dgate = grad * gate, grad * value * gate * (1 - gate)
        _add_linear(sums, "p_out", dvalue, y)
        _add_linear(sums, "g_out", dgate, zn)
        dzn[b, rows] = dgate @ weights.g_out_weight
        dy = dvalue @ weights.p_out_weight
        _add_norm(sums, "norm_out", dy, xhat)
        dx[b, :, rows] = _norm_backward(dy, xhat, rstd, weights.norm_out_weight).permute(2, 0, 1)
    a, b_ = ab[:, 0], ab[:, 1]
    da, db = (dx @ b_, dx.mT @ a) if direction == "outgoing" else (b_ @ dx.mT, a @ dx)
    dab = torch.cat([da, db], 1)
    dz = torch.empty_like(dzn)
    for b, rows in _row_chunks(z, weights, dtype):
        zn, zhat, rstd = _norm(z[b, rows].to(dtype), weights.norm_in_weight, weights.norm_in_bias, eps)
        value, gate = _projections(zn, weights)
        grad = _pairs_of(dab, b, rows, dtype) * _rows_of(mask, b, rows, dtype)
        dvalue, dgate = grad * gate, grad * value * gate * (1 - gate)
        _add_linear(sums, "p_in", dvalue, zn)
        _add_linear(sums, "g_in", dgate, zn)
        whole = dzn[b, rows] + dvalue @ weights.p_in_weight + dgate @ weights.g_in_weight
        _add_norm(sums, "norm_in", whole, zhat)
        dz[b, rows] = _norm_backward(whole, zhat, rstd, weights.norm_in_weight)
    return dz, Weights(*(sums.get(name) for name in given._fields))


def _cast(weights: Weights, dtype: torch.dtype) -> Weights:
    return Weights(*(None if x is None else x.to(dtype) for x in weights))


def _row_chunks(z: Tensor, weights: Weights, dtype: torch.dtype) -> Iterator[tuple[int, slice]]:
    batch, crop, _, channels = z.shape
    each = max(1, CHUNK_BYTES // max(1, crop * max(channels, 2 * weights.hidden) * dtype.itemsize))
    for b in range(batch):
        for i in range(0, crop, each):
            yield b, slice(i, i + each)


def _rows_of(mask: Tensor | None, batch: int, rows: slice, dtype: torch.dtype) -> Tensor | float:
    """A chunk of the mask that multiplies (rows, N, width)."""
    if mask is None:
        return 1.0
    own = mask[batch if mask.shape[0] > 1 else 0, rows if mask.shape[1] > 1 else slice(0, 1)]
    return own.to(dtype).unsqueeze(-1)


def _pairs_of(x: Tensor, batch: int, rows: slice, dtype: torch.dtype) -> Tensor:
    """(rows, N, width) of a channel-major tensor."""
    return x[batch, :, rows].permute(1, 2, 0).to(dtype)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last axis, and what its backward needs: the normalised x and the reciprocal deviation."""
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    xhat = centred * rstd
    y = xhat if weight is None else xhat * weight
    return (y if bias is None else y + bias), xhat, rstd


def _norm_backward(dy: Tensor, xhat: Tensor, rstd: Tensor, weight: Tensor | None) -> Tensor:
    scaled = dy if weight is None else dy * weight
    return rstd * (scaled - scaled.mean(-1, keepdim=True) - xhat * (scaled * xhat).mean(-1, keepdim=True))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight.mT
    return y if bias is None else y + bias


def _projections(zn: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    value = _linear(zn, weights.p_in_weight, weights.p_in_bias)
    return value, torch.sigmoid(_linear(zn, weights.g_in_weight, weights.g_in_bias))


def _add_linear(sums: dict[str, Tensor], name: str, dy: Tensor, x: Tensor) -> None:
    sums[f"{name}_weight"] += dy.flatten(0, 1).mT @ x.flatten(0, 1)
    if f"{name}_bias" in sums:
        sums[f"{name}_bias"] += dy.sum((0, 1))


def _add_norm(sums: dict[str, Tensor], name: str, dy: Tensor, xhat: Tensor) -> None:
    if f"{name}_weight" in sums:
        sums[f"{name}_weight"] += (dy * xhat).sum((0, 1))
    if f"{name}_bias" in sums:
        sums[f"{name}_bias"] += dy.sum((0, 1))
