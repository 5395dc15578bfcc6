"""Triangle attention by its formulas, forward and backward, as the yardstick of every other implementation.

    S[b,i,h,q,k] = scale * Q[b,i,h,q,:] . K[b,i,h,k,:] + bias[b,h,q,k] + mask[b,i,k]
    P = softmax_k(S)     O = P V     L = logsumexp_k(S)
    dP = dO V^T          dS = P * (dP - sum_k P * dP + dL)
    dV = P^T dO          dK = scale * dS^T Q          dQ = scale * dS K          dbias[b,h,q,k] = sum_i dS[b,i,h,q,k]

Plain PyTorch on any device, in float64 unless asked otherwise, a few rows at a time; written for trust, not for speed, and
independent of the library's own PyTorch path.

A boolean mask excludes keys: weight exactly 0, even where a score is NaN. A row without keys has O = 0, L = -inf, no gradients.
An additive mask is added in float32 where it is so large that float32 addition swallows the score (a row full of -1e9 is then a
uniform softmax, as in the models): that rounding is part of its meaning. Everywhere else the sum is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 512 * 2**20
"""Most bytes of scores in one chunk of rows (at least one row)."""
SWALLOWED = 1.0e6
"""Additive mask values beyond this magnitude are added in float32."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output `(B, I, H, N, D)` and natural-log LSE `(B, I, H, N)`, both in `dtype`.

    Args:
        q, k, v: `(B, I, H, N, D)`, any dtype.
        bias: `(B or 1, I or 1, H, N, N)` or `(B or 1, H, N, N)`, any dtype.
        mask: None, boolean (True keeps a key) or additive, `(B or 1, I or 1, 1, 1, N or 1)`.
        scale: `D ** -0.5` when None.
        dtype: in which everything is computed.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias = _with_row_axis(bias)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
    for where in _row_chunks(q, dtype):
        score = _scores(where, q, k, bias, mask, scale, dtype)
        out[where] = _softmax(score) @ v[where].to(dtype)
        lse[where] = torch.logsumexp(score, -1)
    return out, lse


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    grad_lse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dQ, dK, dV like q and dbias like the bias, all in `dtype`, for `grad_out` like the output and `grad_lse` like the LSE."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    bias_shape, bias = bias.shape, _with_row_axis(bias)
    dq, dk, dv = (torch.empty(q.shape, dtype=dtype, device=q.device) for _ in range(3))
    dbias = torch.zeros(bias.shape, dtype=dtype, device=q.device)
    for where in _row_chunks(q, dtype):
        prob = _softmax(_scores(where, q, k, bias, mask, scale, dtype))
        grad = grad_out[where].to(dtype)
        dv[where] = prob.mT @ grad
        dprob = grad @ v[where].to(dtype).mT
        dscore = dprob - (prob * dprob).sum(-1, keepdim=True)
        if grad_lse is not None:
            dscore += grad_lse[where].to(dtype).unsqueeze(-1)
        dscore *= prob
        dq[where] = scale * (dscore @ k[where].to(dtype))
        dk[where] = scale * (dscore.mT @ q[where].to(dtype))
        dbias[_broadcast(where, dbias)] += dscore if bias.shape[1] > 1 else dscore.sum(0, keepdim=True)
    return dq, dk, dv, dbias.view(bias_shape)


def _row_chunks(q: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, slice]]:
    batch, rows, heads, crop, _ = q.shape
    each = max(1, CHUNK_BYTES // max(1, heads * crop * crop * dtype.itemsize))
    for b in range(batch):
        for i in range(0, rows, each):
            yield b, slice(i, i + each)


def _scores(
    where: tuple[int, slice], q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype
) -> Tensor:
    score = scale * (q[where].to(dtype) @ k[where].to(dtype).mT) + bias[_broadcast(where, bias)].to(dtype)
    if mask is None:
        return score
    keys = mask[_broadcast(where, mask)]
    if keys.dtype == torch.bool:
        return score.masked_fill(~keys, -math.inf)
    swallowed = (score.float() + keys.float()).to(dtype)
    return torch.where(keys.abs() > SWALLOWED, swallowed, score + keys.to(dtype))


def _softmax(score: Tensor) -> Tensor:
    """Softmax over keys in which a row of -inf is zero rather than NaN."""
    empty = (score == -math.inf).all(-1, keepdim=True)
    return torch.softmax(score.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)


def _broadcast(where: tuple[int, slice], x: Tensor) -> tuple[int, slice]:
    batch, rows = where
    return (batch if x.shape[0] > 1 else 0), (rows if x.shape[1] > 1 else slice(0, 1))


def _with_row_axis(bias: Tensor) -> Tensor:
    return bias if bias.dim() == 5 else bias.unsqueeze(1)
