"""Triangle attention in plain PyTorch for whatever no kernel serves: any device, any dtype, bounded memory.

    S = scale * q k^T + bias + mask,  P = softmax(S),  out = P v,  lse = logsumexp(S)

Scores exist for one chunk at a time: whole rows i while they fit the budget, then heads, then runs of queries. The backward
rebuilds each chunk's probabilities from q, k and the bias, so nothing of size N^3 is ever stored.

Everything is computed in float32 (float64 if any operand is float64) and rounded once, to the operand's dtype. Products of fp16
and bf16 operands are exact in float32; a float32 product follows PyTorch's own TF32 setting. A key whose score is -inf has
weight zero, and a query without any other key gives zeros, LSE -inf and zero gradients. Nothing here reads a value on the host,
so calls can be captured into CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

SCORE_BUDGET_BYTES = 256 * 2**20
"""Most bytes of scores and their gradients that live at once on an accelerator."""
CPU_SCORE_BUDGET_BYTES = 16 * 2**20
"""The same on a CPU, where smaller chunks stay in the caches and are faster."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float, need_residual: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, and what rounding took from each.

    Args:
        q, k, v: `(B, I, H, N, D)`, one floating dtype, any strides.
        bias: `(B or 1, I or 1, H, N, N)`, any floating dtype.
        mask: None, boolean (True keeps a key) or additive, `(B or 1, I or 1, 1, 1, N or 1)`.
        scale: multiplies the scores before the bias is added.
        need_residual: whether to also return the roundings.

    Returns:
        out `(B, I, H, N, D)` in q's dtype, a transposed view of `(B, I, N, H, D)` storage;
        lse `(B, I, H, N)` float32 (float64 for float64 q), natural logarithm;
        residual like out and lse_low like lse, or empty tensors. lse + lse_low is exact also where lse is -1e9 for -1e9 + ln N.
    """
    batch, rows, heads, crop, _ = q.shape
    compute = _compute_dtype(q, bias)
    out = projection_layout_empty(q)
    lse = torch.empty((batch, rows, heads, crop), dtype=lse_dtype(q), device=q.device)
    residual = projection_layout_empty(q) if need_residual else q.new_empty(0)
    lse_low = torch.empty_like(lse) if need_residual else lse.new_empty(0)
    with torch.autocast(q.device.type, enabled=False):
        for part in _chunks(q, compute, live_tensors=1):
            score = _scores(part, q, k, bias, mask, scale, compute)
            top = score.amax(-1, keepdim=True)
            top.masked_fill_(top == -math.inf, 0.0)
            score.sub_(top).exp_()
            total = score.sum(-1, keepdim=True)
            exact = torch.matmul(score, v[part.kv].to(compute)).div_(total.masked_fill(total == 0, 1.0))
            out[part.q] = exact
            total.log_()
            lse[part.q] = (total + top).squeeze(-1)
            if need_residual:
                residual[part.q] = exact.sub_(out[part.q])
                lse_low[part.q] = _lost(top, total).squeeze(-1)
    return out, lse, residual, lse_low


def backward(
    grad_out: Tensor | None, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None,
    scale: float, output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias, by recomputation; those that `output_mask` leaves out come back empty.

    Arguments are those of `forward`, with the gradients of its first two results (None: not used). Sums over queries and over
    rows are kept in float32 (float64) and rounded once. Results have the dtype and, where its strides are dense, the layout of
    their operand.
    """
    compute = _compute_dtype(q, bias)
    need_q, need_k, need_v, need_bias = output_mask
    grads = [torch.empty_like(x) if need else x.new_empty(0) for x, need in zip((q, k, v, bias), output_mask, strict=True)]
    if grad_out is None and grad_lse is None:
        return tuple(x.zero_() for x in grads)
    dq, dk, dv, dbias = grads
    # A bias of its own for every row gets its gradient without a sum; a shared one is summed over rows before any rounding.
    direct = bias.shape[:2] == q.shape[:2]
    bias_sum = torch.zeros_like(bias, dtype=compute) if need_bias and not direct else None
    dk_sum = dv_sum = None
    with torch.autocast(q.device.type, enabled=False):
        for part in _chunks(q, compute, live_tensors=2):
            prob = _probabilities(part, q, k, bias, mask, scale, compute)
            grad = None if grad_out is None else grad_out[part.q].to(compute)
            if need_v:
                dv_sum = _accumulate(part, dv, dv_sum, None if grad is None else torch.matmul(prob.mT, grad))
            if not (need_q or need_k or need_bias):
                continue
            dscore = _score_gradient(part, prob, v, grad, grad_lse)
            if need_q:
                dq[part.q] = torch.matmul(dscore, k[part.kv].to(compute)).mul_(scale)
            if need_k:
                dk_sum = _accumulate(part, dk, dk_sum, torch.matmul(dscore.mT, q[part.q].to(compute)).mul_(scale))
            if need_bias:
                _add_bias_gradient(part, dbias, bias_sum, dscore)
        if bias_sum is not None:
            dbias.copy_(bias_sum)
    return dq, dk, dv, dbias


class _Chunk:
    """One batch element, rows `i`, heads `h` and queries `n` as slices, and the indices they make."""

    __slots__ = ("batch", "rows", "heads", "queries", "last")

    def __init__(self, batch: int, rows: slice, heads: slice, queries: slice, last: bool) -> None:
        self.batch, self.rows, self.heads, self.queries, self.last = batch, rows, heads, queries, last

    @property
    def q(self) -> tuple:
        return self.batch, self.rows, self.heads, self.queries

    @property
    def kv(self) -> tuple:
        return self.batch, self.rows, self.heads

    def bias(self, bias: Tensor) -> tuple:
        return self._shared(bias)[:2] + (self.heads, self.queries)

    def mask(self, mask: Tensor) -> tuple:
        return self._shared(mask)

    def _shared(self, x: Tensor) -> tuple:
        return (self.batch if x.shape[0] > 1 else 0), (self.rows if x.shape[1] > 1 else slice(0, 1))


def _chunks(q: Tensor, compute: torch.dtype, live_tensors: int) -> Iterator[_Chunk]:
    """Cut the scores so that `live_tensors` of one chunk stay inside the budget."""
    batch, rows, heads, crop, _ = q.shape
    if not (batch and rows and heads and crop):
        return
    budget = CPU_SCORE_BUDGET_BYTES if q.device.type == "cpu" else SCORE_BUDGET_BYTES
    lines = max(1, budget // (live_tensors * crop * compute.itemsize))
    queries = min(crop, lines)
    heads_each = min(heads, max(1, lines // crop))
    rows_each = min(rows, max(1, lines // (crop * heads)))
    for b in range(batch):
        for i in range(0, rows, rows_each):
            for h in range(0, heads, heads_each):
                for n in range(0, crop, queries):
                    yield _Chunk(
                        b, slice(i, i + rows_each), slice(h, h + heads_each), slice(n, n + queries), n + queries >= crop
                    )


def _scores(
    part: _Chunk, q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float, compute: torch.dtype
) -> Tensor:
    score = torch.matmul(q[part.q].to(compute), k[part.kv].to(compute).mT)
    score.mul_(scale).add_(bias[part.bias(bias)])
    if mask is not None:
        keys = mask[part.mask(mask)]
        if keys.dtype == torch.bool:
            score.masked_fill_(keys.logical_not(), -math.inf)
        else:
            # As in the kernels, a NaN in the k or bias of an excluded key must not spread.
            score.add_(keys).masked_fill_(keys == -math.inf, -math.inf)
    return score


def _lost(top: Tensor, log_total: Tensor) -> Tensor:
    """What the rounding of top + log_total takes from it, exactly, whichever is larger; 0 where the sum is infinite."""
    whole = top + log_total
    seen = whole - top
    low = (top - (whole - seen)) + (log_total - seen)
    return low.masked_fill_(whole.isinf(), 0.0)


def _probabilities(
    part: _Chunk, q: Tensor, k: Tensor, bias: Tensor, mask: Tensor | None, scale: float, compute: torch.dtype
) -> Tensor:
    score = _scores(part, q, k, bias, mask, scale, compute)
    top = score.amax(-1, keepdim=True)
    top.masked_fill_(top == -math.inf, 0.0)
    score.sub_(top).exp_()
    total = score.sum(-1, keepdim=True)
    return score.div_(total.masked_fill_(total == 0, 1.0))


def _score_gradient(part: _Chunk, prob: Tensor, v: Tensor, grad: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """dS = P * (dO V^T - delta), delta = sum_d dO * O - dLSE, in place of dO V^T; O is rebuilt, so it carries no rounding."""
    if grad is None:
        return prob * grad_lse[part.q].unsqueeze(-1)
    value = v[part.kv].to(prob.dtype)
    delta = torch.matmul(prob, value).mul_(grad).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta.sub_(grad_lse[part.q].unsqueeze(-1))
    return torch.matmul(grad, value.mT).sub_(delta).mul_(prob)


def _accumulate(part: _Chunk, target: Tensor, total: Tensor | None, piece: Tensor | None) -> Tensor | None:
    """Sum the pieces of one group of rows and heads over its runs of queries, and store the sum once it is whole."""
    if piece is None:
        target[part.kv] = 0
        return None
    total = piece if total is None else total.add_(piece)
    if not part.last:
        return total
    target[part.kv] = total
    return None


def _add_bias_gradient(part: _Chunk, dbias: Tensor, bias_sum: Tensor | None, dscore: Tensor) -> None:
    if bias_sum is None:
        dbias[part.bias(dbias)] = dscore
        return
    if bias_sum.shape[1] == 1 and dscore.shape[0] > 1:
        dscore = dscore.sum(0, keepdim=True)
    bias_sum[part.bias(bias_sum)] += dscore


def _compute_dtype(q: Tensor, bias: Tensor) -> torch.dtype:
    return torch.float64 if torch.float64 in (q.dtype, bias.dtype) else torch.float32


def lse_dtype(q: Tensor) -> torch.dtype:
    """float32, except that float64 operands keep theirs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def projection_layout_empty(q: Tensor) -> Tensor:
    """Uninitialised `(B, I, H, N, D)` like q over contiguous `(B, I, N, H, D)` storage."""
    batch, rows, heads, crop, dim = q.shape
    strides = (rows * crop * heads * dim, crop * heads * dim, dim, heads * dim, 1)
    return torch.empty_strided(q.shape, strides, dtype=q.dtype, device=q.device)
