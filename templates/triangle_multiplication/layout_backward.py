"""What the backward kernels of the triangle multiplicative update read and write beyond the forward's operands.

N is the crop, C the channels of z, D the hidden width, P is N rounded up to 8. zhat and xhat are z (over C) and x (over D) less
their mean, times their reciprocal deviation rstd. Projections are those of `layout`, by folded weights: what the forward's fold
kernel left.

    back_backward(z, z_stats, x, x_stats, dout, p_out, g_out, out_terms, dx, dzn, num_ctas)
        h = proj_p(x), s = sigmoid(proj_g(z));   dh = dout * s,   dg = dout * h * s * (1 - s)
        dx = x_rstd * (t - mean_d(t) - xhat * mean_d(t * xhat)),   t = dh p_out;      dzn = dg g_out
    back_weights(z, z_stats, x, x_stats, dout, p_out, g_out, out_terms, planes, sums, splits, num_ctas)
        planes: sums over pairs of dh xhat in columns [0, D), of dg zhat in [D, D + C);   sums: of dh, of dg
    front_backward(z, z_stats, mask, dfactors, dzn, p_in, g_in, in_terms, dz, num_ctas)
        p = proj_p(z), s = sigmoid(proj_g(z));   dp = mask * dfactors * s,   dg = mask * dfactors * p * s * (1 - s)
        dz = z_rstd * (t - mean_c(t) - zhat * mean_c(t * zhat)),   t = dzn + dp p_in + dg g_in
    front_weights(z, z_stats, mask, dfactors, p_in, g_in, in_terms, planes, sums, splits, num_ctas)
        planes: sums over pairs of dp zhat in columns [0, C), of dg zhat in [C, 2 C);     sums: of dp, of dg
    front_gradients(z, z_stats, mask, dfactors, dzn, p_in, g_in, in_terms, dz, planes, sums, splits, num_ctas)
        what the two do, in one; before the end dz holds parts of t
    finish(p_in, g_in, p_out, g_out, norm_in_w, norm_in_b, norm_out_w, norm_out_b, front_planes, front_sums, back_planes,
           back_sums, their gradients in the order of the weights here, and of p_in_bias, g_in_bias, p_out_bias, g_out_bias,
           inner, outer, num_ctas)
        what the function `finish` returns, where every weight is in training

    z, mask, z_stats, x_stats, p_in, g_in, p_out, g_out, in_terms, out_terms      as in `layout`
    dout, x                    the same; x's columns from N on are zero (the product kernels leave them so)
    dx                         like x (`layout.contraction_empty`); columns from N on are zero: back_backward writes them
    dfactors                   like factors (`layout.factors_empty`), contiguous; columns from N on hold anything finite
    dzn, dz                    (B, N, N, C) contiguous, z's dtype; dzn is the gate's share of the gradient of zhat
    planes, sums               float32 contiguous: back (splits, C, D + C) and (splits, C, 2), front (splits, 2 D, 2 C) and
                               (splits, 2 D, 2). Each of the splits holds the sums over pairs of its own; all are written
    p_in, ... of finish        as the caller gave them: float32 or bfloat16, all matrices and biases alike, norms too, or
                               float32; gradients contiguous and like their weights, those of the biases None together
    inner, outer               float32 ((4 D + C) / ROWS, 2, C) and (C / ROWS, 2, D), for finish alone

Between them the product kernels make dfactors of dx and factors, see `layout`. From the planes, the function `finish` makes the
gradients of any weights as they were given, and a finish kernel those of most (`kernel_finishes`).
Nothing here reads a value on the host, and every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpf_jit.templates.triangle_multiplication.config_finish import ROWS
from tpf_jit.templates.triangle_multiplication.layout import Weights, has_biases


def pair_empty(z: Tensor) -> Tensor:
    """Uninitialised `(B, N, N, C)`, contiguous whatever z's strides: dzn or dz."""
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


def back_planes_empty(z: Tensor, hidden: int, splits: int) -> tuple[Tensor, Tensor]:
    """Uninitialised planes and sums of a back_weights kernel."""
    return _planes_empty(z, splits, z.shape[-1], hidden + z.shape[-1])


def front_planes_empty(z: Tensor, hidden: int, splits: int) -> tuple[Tensor, Tensor]:
    """Uninitialised planes and sums of a front_weights or front_gradients kernel."""
    return _planes_empty(z, splits, 2 * hidden, 2 * z.shape[-1])


def _planes_empty(z: Tensor, splits: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    dtype, device = _wide(z.dtype), z.device
    planes = torch.empty((splits, rows, columns), dtype=dtype, device=device)
    return planes, torch.empty((splits, rows, 2), dtype=dtype, device=device)


def finish(
    weights: Weights,
    front_planes: Tensor | None,
    front_sums: Tensor | None,
    back_planes: Tensor | None,
    back_sums: Tensor | None,
    needed: Sequence[bool],
) -> Weights:
    """The gradients of the weights, exact by linearity, from what the two weight kernels left.

    With G the planes and S the sums of a projection W behind a norm with weight w and bias b, in float32:

        dW = G * w + S b^T      dbias = S      dw = column sums of W * G      db = W^T S

    w and b of norm_in gather from p_in, g_in and g_out. Every gradient is rounded once and has memory of its own.

    Args:
        weights: as the caller gave them.
        front_planes, front_sums, back_planes, back_sums: see the module's text. They stay as they are. None for both of a side
            from which no gradient is needed, but not of both sides; those of norm_in come from both.
        needed: of every weight in their order, whether its gradient is wanted.

    Returns:
        gradients with the dtype and shape of their weights; None where a weight is None or not needed.
    """
    w, hidden, channels = weights, weights.hidden, weights.p_out_weight.shape[0]
    like = front_planes if back_planes is None else back_planes
    # The projections behind norm_in lie below each other: g_out, p_in, g_in. In `sums`, p_out comes before them. What a side
    # that is not there would fill is never read into a gradient.
    inner = like.new_empty((channels + 4 * hidden, channels))
    outer = like.new_empty((channels, hidden))
    sums = like.new_empty(2 * channels + 4 * hidden)
    if back_planes is not None:
        torch.sum(back_planes[..., :hidden], 0, out=outer)
        torch.sum(back_planes[..., hidden:], 0, out=inner[:channels])
        torch.sum(back_sums, 0, out=sums[: 2 * channels].unflatten(0, (2, -1)).T)
    if front_planes is not None:
        torch.sum(front_planes.unflatten(-1, (2, channels)), 0, out=inner[channels:].unflatten(0, (2, -1)).transpose(0, 1))
        torch.sum(front_sums, 0, out=sums[2 * channels :].unflatten(0, (2, -1)).T)
    outer_sums, inner_sums = sums[:channels], sums[channels:]
    found: dict[str, Tensor] = {}
    wanted = {name: x for name, x, need in zip(w._fields, w, needed, strict=True) if need and x is not None}
    if wanted.keys() & {"norm_in_weight", "norm_in_bias"}:
        stacked = torch.cat([w.g_out_weight, w.p_in_weight, w.g_in_weight]).to(inner.dtype)
        _norm_gradients(found, wanted, "norm_in", stacked, inner, inner_sums)
    _norm_gradients(found, wanted, "norm_out", w.p_out_weight, outer, outer_sums)
    _scale_columns(inner, w.norm_in_weight)
    _scale_columns(outer, w.norm_out_weight)
    sizes = (channels, 2 * hidden, 2 * hidden)
    names = ("p_out", "g_out", "p_in", "g_in")
    planes, sums_of = (outer, *inner.split(sizes)), (outer_sums, *inner_sums.split(sizes))
    for name, plane, own, shift in zip(names, planes, sums_of, (w.norm_out_bias, *[w.norm_in_bias] * 3), strict=True):
        if f"{name}_weight" in wanted:
            grad = found[f"{name}_weight"] = torch.empty_like(wanted[f"{name}_weight"])
            if shift is None:
                grad.copy_(plane)
            else:
                torch.addcmul(plane, own.unsqueeze(-1), shift, out=grad)  # in float32, rounded as it is stored
        if f"{name}_bias" in wanted:
            found[f"{name}_bias"] = torch.empty_like(wanted[f"{name}_bias"]).copy_(own)
    return Weights(*(found.get(name) for name in w._fields))


def kernel_finishes(weights: Weights, needed: Sequence[bool]) -> bool:
    """Whether a finish kernel does what `finish` would: every weight is in training, matrices are float32 or bfloat16, all alike,
    norms are there and all float32 or of that dtype, and projections have biases of that dtype, or none has one."""
    w = weights
    dtype, biases = w.p_in_weight.dtype, (w.p_in_bias, w.g_in_bias, w.p_out_bias, w.g_out_bias)
    norms = {None if x is None else x.dtype for x in (w.norm_in_weight, w.norm_in_bias, w.norm_out_weight, w.norm_out_bias)}
    return (
        dtype in (torch.float32, torch.bfloat16)
        and all(x.dtype == dtype for x in (w.g_in_weight, w.p_out_weight, w.g_out_weight))
        and (norms == {dtype} or norms == {torch.float32})
        and (not has_biases(w) or all(x is not None and x.dtype == dtype for x in biases))
        and all(need or x is None for x, need in zip(w, needed, strict=True))
    )


def finish_operands(weights: Weights, *planes: Tensor) -> tuple[Weights, tuple[Tensor | None, ...]]:
    """Gradients to be filled, contiguous, and the tensor arguments of a finish kernel that fills them.

    Args:
        weights: of a kind that `kernel_finishes` takes.
        planes: front_planes, front_sums, back_planes, back_sums.
    """
    w, device = weights, planes[0].device
    grads = Weights(*[None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device) for x in w])
    channels, hidden = w.p_out_weight.shape
    inner, outer = ((4 * hidden + channels) // ROWS, 2, channels), (channels // ROWS, 2, hidden)
    return grads, (
        *[x.contiguous() for x in _matrices_and_norms(w)], *planes, *_matrices_and_norms(grads),
        grads.p_in_bias, grads.g_in_bias, grads.p_out_bias, grads.g_out_bias,
        *[torch.empty(size, dtype=torch.float32, device=device) for size in (inner, outer)],
    )  # fmt: skip


def _matrices_and_norms(w: Weights) -> tuple[Tensor, ...]:
    matrices = w.p_in_weight, w.g_in_weight, w.p_out_weight, w.g_out_weight
    return *matrices, w.norm_in_weight, w.norm_in_bias, w.norm_out_weight, w.norm_out_bias


def _norm_gradients(
    found: dict[str, Tensor], wanted: dict[str, Tensor], name: str, matrix: Tensor, planes: Tensor, sums: Tensor
) -> None:
    """Gradients of a norm's weight and bias from the projections behind it."""
    if f"{name}_weight" in wanted:
        found[f"{name}_weight"] = (matrix * planes).sum(0).to(wanted[f"{name}_weight"].dtype)
    if f"{name}_bias" in wanted:
        found[f"{name}_bias"] = torch.mv(matrix.to(planes.dtype).T, sums).to(wanted[f"{name}_bias"].dtype)


def _scale_columns(planes: Tensor, scale: Tensor | None) -> None:
    if scale is not None:
        planes.mul_(scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
