"""The backward kernels of the triangle multiplicative update as PyTorch functions, with their conventions and roundings.

Operands of products are bf16: z and x as they are, folded weights, dh, dp and dg before they are multiplied by weights, and for
the gradients of weights, and in front_gradients for all, their products with the reciprocal deviations. Sums are float32, results
are rounded once. For a float64 z everything is float64 and nothing is rounded, so that the algebra can be checked alone.
`gradients` is the whole backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpf_jit.templates.triangle_multiplication import layout, layout_backward
from tpf_jit.templates.triangle_multiplication.config_finish import ROWS
from tpf_jit.templates.triangle_multiplication.config_gradients import CHANNELS, LAUNCH_ROWS
from tpf_jit.templates.triangle_multiplication.layout import Weights


def back_backward(z, z_stats, x, x_stats, dout, p_out, g_out, out_terms, dx, dzn, num_ctas) -> None:
    _check(z, (z_stats, x_stats), out_terms, (x, dx, p_out, g_out, dzn))
    rounded, crop = _rounding(z), z.shape[1]
    dh, dg, pairs = _back(z, z_stats, x, x_stats, dout, p_out, g_out, out_terms)
    found = _through_norm(rounded(dh) @ rounded(p_out), pairs, x_stats)
    dx.zero_()
    dx[..., :crop] = found.permute(0, 3, 1, 2)
    dzn.copy_(rounded(dg) @ rounded(g_out))


def back_weights(z, z_stats, x, x_stats, dout, p_out, g_out, out_terms, planes, sums, splits, num_ctas) -> None:
    _check(z, (z_stats, x_stats), out_terms, (x, p_out, g_out))
    dh, dg, pairs = _back(z, z_stats, x, x_stats, dout, p_out, g_out, out_terms)
    _sum_pairs(z.dtype, planes, sums, splits, ((dh, pairs, x_stats), (dg, _rounding(z)(z), z_stats)))


def front_backward(z, z_stats, mask, dfactors, dzn, p_in, g_in, in_terms, dz, num_ctas) -> None:
    _check(z, (z_stats,), in_terms, (dfactors, dzn, p_in, g_in, dz))
    rounded = _rounding(z)
    dp, dg = _front(z, z_stats, mask, dfactors, p_in, g_in, in_terms)
    whole = rounded(dzn) + rounded(dp) @ rounded(p_in) + rounded(dg) @ rounded(g_in)
    dz.copy_(_through_norm(whole, rounded(z), z_stats))


def front_weights(z, z_stats, mask, dfactors, p_in, g_in, in_terms, planes, sums, splits, num_ctas) -> None:
    _check(z, (z_stats,), in_terms, (dfactors, p_in, g_in))
    dp, dg = _front(z, z_stats, mask, dfactors, p_in, g_in, in_terms)
    wide = _rounding(z)(z)
    _sum_pairs(z.dtype, planes, sums, splits, ((dp, wide, z_stats), (dg, wide, z_stats)))


def front_gradients(z, z_stats, mask, dfactors, dzn, p_in, g_in, in_terms, dz, planes, sums, splits, num_ctas) -> None:
    """A launch after the other, each for some rows of the weights; between them dz holds t, rounded."""
    _check(z, (z_stats,), in_terms, (dfactors, dzn, p_in, g_in, dz))
    assert z.shape[-1] == CHANNELS and p_in.shape[0] % LAUNCH_ROWS == 0
    assert planes.is_contiguous() and sums.is_contiguous()
    rounded, rstd, t = _rounding(z), z_stats[..., 1:], dzn
    wide, starts = rounded(z), range(0, p_in.shape[0], LAUNCH_ROWS)
    for start in starts:
        own = slice(start, start + LAUNCH_ROWS)
        given = dfactors.flatten(1, 2)[:, None, own]
        dp, dg = _front(z, z_stats, mask, given, p_in[own], g_in[own], in_terms[own])
        mine = planes[:, own].clone(), sums[:, own].clone()
        _sum_pairs(z.dtype, *mine, splits, ((dp, wide, z_stats), (dg, wide, z_stats)))
        planes[:, own], sums[:, own] = mine
        whole = rounded(dp * rstd) @ rounded(p_in[own]) + rounded(dg * rstd) @ rounded(g_in[own])
        whole = rounded(t) + whole / rstd
        t = dz.copy_(_through_norm(whole, wide, z_stats) if start == starts[-1] else whole)


def finish(
    p_in, g_in, p_out, g_out, norm_in_w, norm_in_b, norm_out_w, norm_out_b, front_planes, front_sums, back_planes, back_sums,
    d_p_in, d_g_in, d_p_out, d_g_out, d_norm_in_w, d_norm_in_b, d_norm_out_w, d_norm_out_b,
    d_p_in_bias, d_g_in_bias, d_p_out_bias, d_g_out_bias, inner, outer, num_ctas,
) -> None:  # fmt: skip
    channels, hidden = p_out.shape
    matrices, norms = (p_in, g_in, p_out, g_out), (norm_in_w, norm_in_b, norm_out_w, norm_out_b)
    of_matrices, of_norms = (d_p_in, d_g_in, d_p_out, d_g_out), (d_norm_in_w, d_norm_in_b, d_norm_out_w, d_norm_out_b)
    of_biases = (d_p_in_bias, d_g_in_bias, d_p_out_bias, d_g_out_bias)
    given = [x for x in of_biases if x is not None]
    assert p_in.dtype in (torch.float32, torch.bfloat16) and len(given) in (0, 4) and num_ctas >= 1
    assert all(x.dtype == p_in.dtype for x in (*matrices, *of_matrices, *given))
    assert norm_in_w.dtype in (torch.float32, p_in.dtype) and inner.dtype == outer.dtype == torch.float32
    assert all(x.dtype == norm_in_w.dtype for x in (*norms, *of_norms))
    assert all(x.shape == grad.shape for x, grad in zip((*matrices, *norms), (*of_matrices, *of_norms), strict=True))
    planes = (front_planes, front_sums, back_planes, back_sums)
    assert all(x.is_contiguous() for x in (*matrices, *norms, *of_matrices, *of_norms, *given, *planes, inner, outer))
    assert front_planes.shape == (front_sums.shape[0], 2 * hidden, 2 * channels) and front_sums.shape[1:] == (2 * hidden, 2)
    assert back_planes.shape == (back_sums.shape[0], channels, hidden + channels) and back_sums.shape[1:] == (channels, 2)
    assert inner.shape == ((4 * hidden + channels) // ROWS, 2, channels) and outer.shape == (channels // ROWS, 2, hidden)
    # Biases give only the dtype and shape of their gradients.
    names = [f"{name}_{kind}" for kind in ("weight", "bias") for name in ("p_in", "g_in", "p_out", "g_out")]
    weights = dict(zip(names, (*matrices, *of_biases), strict=True))
    keys = ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias")
    grads = layout_backward.finish(Weights(**weights, **dict(zip(keys, norms, strict=True))), *planes, [True] * 12)
    for name, target in (*zip(weights, (*of_matrices, *of_biases), strict=True), *zip(keys, of_norms, strict=True)):
        if target is not None:
            target.copy_(getattr(grads, name))


def gradients(
    grad_out: Tensor, z: Tensor, direction: str, mask: Tensor | None, weights: Weights, kept: tuple[Tensor, Tensor], eps: float,
    splits: int = 1, needed: tuple[bool, ...] = (True,) * 12,
) -> tuple[Tensor, Weights]:  # fmt: skip
    """dz and the gradients of the weights; `kept` are factors `(B, 2, D, N, P)` and x `(B, D, N, P)` as the forward left them."""
    factors, x = kept
    hidden, wide = weights.hidden, _rounding(z)
    z_stats, x_stats = (layout.stats_empty(z) for _ in range(2))
    z_stats.copy_(layout.statistics(wide(z), eps))
    x_stats.copy_(layout.statistics(_pairs(x, z), eps))
    folded, keep = layout.fold(weights, z.dtype), None if mask is None else layout.mask_buffer(mask, z)
    back = (z, z_stats, x, x_stats, grad_out, folded.p_out, folded.g_out, folded.out_terms)
    dx, dzn, dz = torch.empty_like(x), layout_backward.pair_empty(z), layout_backward.pair_empty(z)
    back_planes = layout_backward.back_planes_empty(z, hidden, splits)
    front_planes = layout_backward.front_planes_empty(z, hidden, splits)
    back_backward(*back, dx, dzn, 1)
    back_weights(*back, *back_planes, splits, 1)
    dfactors = factor_gradients(dx, factors, direction)
    front = (folded.p_in, folded.g_in, folded.in_terms)
    front_backward(z, z_stats, keep, dfactors, dzn, *front, dz, 1)
    front_weights(z, z_stats, keep, dfactors, *front, *front_planes, splits, 1)
    return dz, layout_backward.finish(weights, *front_planes, *back_planes, needed)


def factor_gradients(dx: Tensor, factors: Tensor, direction: str) -> Tensor:
    """What the product kernels make of dx and the factors, with something finite in the padding."""
    crop = dx.shape[2]
    wide = _rounding(dx)
    a, b, d = wide(factors[:, 0, ..., :crop]), wide(factors[:, 1, ..., :crop]), wide(dx[..., :crop])
    found = torch.full_like(factors, 1e30)
    pair = (d @ b, d.mT @ a) if direction == "outgoing" else (b @ d.mT, a @ d)
    found[..., :crop] = torch.stack(pair, 1)
    return found


def _rounding(z: Tensor):
    """Rounds to z's dtype, and gives what sums are made of."""
    return lambda x: x.to(z.dtype).to(torch.promote_types(z.dtype, torch.float32))


def _check(z: Tensor, stats: tuple[Tensor, ...], terms: Tensor, others: tuple[Tensor, ...]) -> None:
    wide = torch.promote_types(z.dtype, torch.float32)
    assert layout.complies(z) or z.dtype == torch.float64
    assert all(x.dtype == wide and x.is_contiguous() and x.shape == (*z.shape[:3], 2) for x in stats)
    assert terms.dtype == wide and terms.is_contiguous() and terms.shape[1] == 4
    assert all(x.dtype == z.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in others)


def _pairs(x: Tensor, z: Tensor) -> Tensor:
    """(B, N, N, D) of a channel-major (B, D, N, P), in the dtype of sums."""
    return _rounding(z)(x[..., : z.shape[1]].permute(0, 2, 3, 1))


def projected(pairs: Tensor, stats: Tensor, matrix: Tensor, terms: Tensor) -> Tensor:
    """A projection of normalised pairs from folded weights."""
    mean, rstd = stats.split(1, -1)
    return rstd * (pairs @ matrix.to(pairs.dtype).T - mean * terms[:, 0]) + terms[:, 1]


def _back(z, z_stats, x, x_stats, dout, p_out, g_out, terms) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dg, and x as pairs."""
    wide, pairs = _rounding(z), _pairs(x, z)
    h = projected(pairs, x_stats, p_out, terms[:, :2])
    s = projected(wide(z), z_stats, g_out, terms[:, 2:]).sigmoid()
    return wide(dout) * s, wide(dout) * h * s * (1 - s), pairs


def _front(z, z_stats, mask, dfactors, p_in, g_in, terms) -> tuple[Tensor, Tensor]:
    """dp and dg."""
    p = projected(_rounding(z)(z), z_stats, p_in, terms[:, :2])
    s = projected(_rounding(z)(z), z_stats, g_in, terms[:, 2:]).sigmoid()
    grad = _pairs(dfactors.flatten(1, 2), z)
    if mask is not None:
        assert mask.dtype == torch.float32 and mask.is_contiguous()
        grad = grad * mask.unsqueeze(-1)
    return grad * s, grad * p * s * (1 - s)


def _through_norm(t: Tensor, pairs: Tensor, stats: Tensor) -> Tensor:
    mean, rstd = stats.split(1, -1)
    hat = (pairs - mean) * rstd
    return rstd * (t - t.mean(-1, keepdim=True) - hat * (t * hat).mean(-1, keepdim=True))


def _sum_pairs(dtype: torch.dtype, planes: Tensor, sums: Tensor, splits: int, parts: tuple[tuple[Tensor, ...], ...]) -> None:
    """Planes and sums of (gradient, pairs, stats) side by side, every split with pairs of its own."""
    assert planes.shape[0] == sums.shape[0] == splits and planes.is_contiguous() and sums.is_contiguous()
    for split in range(splits):
        columns = 0
        for i, part in enumerate(parts):
            grad, pairs, stats = (x.flatten(0, 2).tensor_split(splits)[split] for x in part)
            scaled = (grad * stats[:, 1:]).to(dtype).to(grad.dtype)
            # The mean is taken off with the same rounded factors: where it is large, that is what keeps the difference right.
            width = pairs.shape[1]
            planes[split, :, columns : columns + width] = scaled.T @ pairs - (scaled.T @ stats[:, :1])
            sums[split, :, i] = (scaled / stats[:, 1:]).sum(0)  # the kernels' sums are of the same rounded factors
            columns += width
