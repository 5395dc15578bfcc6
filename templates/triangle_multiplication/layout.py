"""From a caller's tensors to what the kernels of the triangle multiplicative update read and leave for each other.

Four stages make a forward pass. N is the crop, C the channels of z, D the hidden width, P is N rounded up to 8. The projection
of LN(z) = (z - mean) * rstd * w + b by W is

    rstd * (z W'^T - mean * u) + b'            W' = W * w,   u = row sums of W',   b' = bias + W b

so kernels multiply z and x as they lie in memory by folded weights W', and apply statistics and `terms` to the results or as
columns more in the products (`pieces_sm90.MORE`).

    centre(z, out, num_ctas)                    out = z - mean of z over its channels, for a float32 z
    fold(p_in, g_in, p_out, g_out, norm_in_w, norm_in_b, norm_out_w, norm_out_b, p_in_bias, g_in_bias, p_out_bias, g_out_bias,
         f_p_in, f_g_in, f_p_out, f_g_out, in_terms, out_terms, num_ctas)
        W', u and b' of p_in and g_in behind norm_in, p_out behind norm_out, g_out behind norm_in
    front(z, mask, p_in, g_in, in_terms, factors, z_stats, eps, num_ctas)
        factors[b, s, d, i, k] = mask * sigmoid(proj_g(z)) * proj_p(z)
    fold_front(z, mask, p_in, ..., out_terms as for fold, factors, z_stats, eps, num_ctas)
        what fold and front do, in one launch, for small crops
    product_nt(left, right, out, num_ctas)      out[b, d, i, j] = sum_k left[b, d, i, k] * right[b, d, j, k]
    product_tn(left, right, out, num_ctas)      out[b, d, i, j] = sum_k left[b, d, k, i] * right[b, d, k, j]
    product_nn(left, right, out, num_ctas)      out[b, d, i, j] = sum_k left[b, d, i, k] * right[b, d, k, j]
        the contraction: outgoing nt(a, b, x), incoming tn(a, b, x); its gradients: outgoing da = nn(dx, b), db = tn(dx, a),
        incoming da = nt(b, dx), db = nn(a, dx)
    back(z, z_stats, x, p_out, g_out, out_terms, residual, out, x_stats, eps, num_ctas)
        out = [residual +] sigmoid(proj_g(z)) * proj_p(x)

    z, residual, out         (B, N, N, C) 16-bit of one dtype, unit stride on C, other strides positive multiples of 8 elements,
                             16-byte aligned base. residual may be None, and may be z. out may be z where one CTA reads each tile
                             (`parts` of back's configuration is 1): it reads an element only in the task that writes it
                             centre reads float32 of such strides and base; its out, which is z to all others, is contiguous
    mask                     None, or float32 (B, N, N) contiguous
    factors                  (B, 2, D, N, P) contiguous, z's dtype: a is factors[:, 0], b is factors[:, 1], channel-major, so that
                             the contraction is B * D matrix products. Columns from N on are zero: front writes them
    left, right, out         (B, D, N, P), unit stride along P, other strides multiples of 8: x, dx, or a half of factors
    x                        (B, D, N, P) contiguous, bfloat16 for bf16 z, else float32 (sums over N leave fp16's range). What
                             columns from N on hold is never used
    z_stats, x_stats         float32 (B, N, N, 2) contiguous: mean and rstd = rsqrt(variance + eps) of every pair's z and x. front
                             writes z_stats, which back reads; back writes x_stats where that is not None
    p_in, g_in (2 D, C), p_out (C, D), g_out (C, C)    contiguous. As fold reads them: float32 or bfloat16, all alike; folded, as
                             all others do: z's dtype
    norm_*, *_bias           float32 (C,), (D,), (2 D,), never None; but for the four biases, which may be None together
    in_terms, out_terms      float32 (2 D, 4) and (C, 4): of every row u and b' of p, then u and b' of g

What folding writes lies on 16-byte boundaries; what it reads may lie anywhere, as parts of a flat buffer do, but for fold_front's
matrices and norms, which do lie on such boundaries. P makes every row of factors and x a whole number of 16 bytes, the unit of
TMA. Weights of other dtypes are converted once a call; they are small. Nothing here reads a value on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPERAND_ALIGN = 8
"""Strides of 16-bit operands are multiples of this many elements: 16 bytes."""
ALIGN_BYTES = 16
MATRICES_AND_NORMS = 8
"""The first of `fold_operands`: four matrices, weight and bias of two norms."""
CONTRACTIONS = {"outgoing": "nt", "incoming": "tn"}
"""The product that is the contraction of a direction."""


class Weights(NamedTuple):
    """The weights of one update in the caller's order and layout (cuEquivariance's names).

    norm_in_*: `(C,)`. p_in_weight, g_in_weight: `(2 D, C)`, the rows of a, then those of b; their biases `(2 D,)`.
    norm_out_*: `(D,)`. p_out_weight: `(C, D)`, g_out_weight: `(C, C)`; their biases `(C,)`. A norm without weight or bias has
    ones or zeros there.
    """

    norm_in_weight: Tensor | None
    norm_in_bias: Tensor | None
    p_in_weight: Tensor
    p_in_bias: Tensor | None
    g_in_weight: Tensor
    g_in_bias: Tensor | None
    norm_out_weight: Tensor | None
    norm_out_bias: Tensor | None
    p_out_weight: Tensor
    p_out_bias: Tensor | None
    g_out_weight: Tensor
    g_out_bias: Tensor | None

    @property
    def hidden(self) -> int:
        """D."""
        return self.p_out_weight.shape[1]


class Folded(NamedTuple):
    """The projections with the norms' weights and biases in them, see the module's text."""

    p_in: Tensor
    g_in: Tensor
    in_terms: Tensor
    p_out: Tensor
    g_out: Tensor
    out_terms: Tensor


class Operands(NamedTuple):
    """A call's inputs as front and back kernels read them."""

    z: Tensor
    mask: Tensor | None
    folded: Folded

    def front(self, factors: Tensor, z_stats: Tensor) -> tuple[Tensor | None, ...]:
        """Tensor arguments of a front kernel."""
        return self.z, self.mask, *self.folded[:3], factors, z_stats

    def fold_front(self, weights: Weights, factors: Tensor, z_stats: Tensor) -> tuple[Tensor | None, ...]:
        """Tensor arguments of a kernel that folds `weights` as well, whose matrices and norms it reads 16 bytes at a time."""
        folding = fold_operands(weights, self.folded)
        read = [x if x.data_ptr() % ALIGN_BYTES == 0 else x.clone() for x in folding[:MATRICES_AND_NORMS]]
        return self.z, self.mask, *read, *folding[MATRICES_AND_NORMS:], factors, z_stats

    def back(
        self, z_stats: Tensor, x: Tensor, residual: Tensor | None, out: Tensor, x_stats: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Tensor arguments of a back kernel."""
        return self.z, z_stats, x, *self.folded[3:], residual, out, x_stats


def prepare(z: Tensor, mask: Tensor | None, folded: Folded) -> Operands:
    """Operands for a call of canonical rank: z `(B, N, N, C)` 16-bit of any strides, mask None or `(B or 1, N or 1, N or 1)`."""
    return Operands(pair_operand(z), mask_buffer(mask, z), folded)


def fold_operands(weights: Weights, folded: Folded) -> tuple[Tensor | None, ...]:
    """Tensor arguments of a fold kernel: weights, uniform, and where the folded ones go.

    Weights of most models need no work: float32 or bfloat16 matrices of one dtype, float32 norms, biases everywhere or nowhere.
    Other matrices become float32, absent norms ones and zeros, and biases that are absent beside others zeros.
    """
    w = weights
    dtype, biased, device = matrix_dtype(w), has_biases(w), w.p_out_weight.device

    def vector(x: Tensor | None, width: int, fill: float) -> Tensor:
        if x is None:
            return torch.full((width,), fill, dtype=torch.float32, device=device)
        return _as(x, torch.float32)

    def bias(x: Tensor | None, width: int) -> Tensor | None:
        return vector(x, width, 0.0) if biased else None

    channels, hidden = w.p_out_weight.shape
    matrices = (w.p_in_weight, w.g_in_weight, w.p_out_weight, w.g_out_weight)
    return (
        *[_as(x, dtype) for x in matrices],
        vector(w.norm_in_weight, channels, 1.0), vector(w.norm_in_bias, channels, 0.0),
        vector(w.norm_out_weight, hidden, 1.0), vector(w.norm_out_bias, hidden, 0.0),
        bias(w.p_in_bias, 2 * hidden), bias(w.g_in_bias, 2 * hidden), bias(w.p_out_bias, channels), bias(w.g_out_bias, channels),
        folded.p_in, folded.g_in, folded.p_out, folded.g_out, folded.in_terms, folded.out_terms,
    )  # fmt: skip


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, in a dtype."""
    return (x if x.dtype == dtype else x.to(dtype)).contiguous()


def matrix_dtype(weights: Weights) -> torch.dtype:
    """In which a fold kernel reads the matrices: their own dtype where it is one and kernels take it, else float32."""
    w = weights
    halved = all([x.dtype == torch.bfloat16 for x in (w.p_in_weight, w.g_in_weight, w.p_out_weight, w.g_out_weight)])
    return torch.bfloat16 if halved else torch.float32


def has_biases(weights: Weights) -> bool:
    """Whether any projection has a bias."""
    w = weights
    return not (w.p_in_bias is w.g_in_bias is w.p_out_bias is w.g_out_bias is None)


def fold(weights: Weights, dtype: torch.dtype) -> Folded:
    """What a fold kernel computes, in PyTorch: products and sums in float32, matrices rounded once to `dtype`.

    Args:
        weights: as the caller gave them: any dtypes, norms and biases may be None.
        dtype: z's. With float64 nothing is rounded, which is what tests of the algebra want.
    """
    return fold_into(weights, *folded_empty(weights, dtype))


def fold_into(weights: Weights, matrices: Tensor, terms: Tensor) -> Folded:
    """`fold` into the tensors of `folded_empty`."""
    w, folded = weights, folded_parts(weights, matrices, terms)
    norm_in, norm_out = (
        tuple(None if x is None else x.to(terms.dtype) for x in norm)
        for norm in ((w.norm_in_weight, w.norm_in_bias), (w.norm_out_weight, w.norm_out_bias))
    )
    _fold_one(w.p_in_weight, w.p_in_bias, norm_in, folded.p_in, folded.in_terms[:, :2])
    _fold_one(w.g_in_weight, w.g_in_bias, norm_in, folded.g_in, folded.in_terms[:, 2:])
    _fold_one(w.p_out_weight, w.p_out_bias, norm_out, folded.p_out, folded.out_terms[:, :2])
    _fold_one(w.g_out_weight, w.g_out_bias, norm_in, folded.g_out, folded.out_terms[:, 2:])
    return folded


def _fold_one(
    matrix: Tensor, bias: Tensor | None, norm: tuple[Tensor | None, Tensor | None], folded: Tensor, terms: Tensor
) -> None:
    """Fill a folded matrix and its two columns of terms."""
    matrix, (scale, shift) = matrix.to(terms.dtype), norm
    if scale is None:
        folded.copy_(matrix)
    else:
        torch.mul(matrix, scale, out=folded)  # in float32, rounded as it is stored
    # Of the rounded matrix: what kernels subtract must be what their products hold of the mean.
    torch.sum(folded, -1, dtype=terms.dtype, out=terms[:, 0])
    if shift is None:
        terms[:, 1] = 0.0 if bias is None else bias
    elif bias is None:
        torch.mv(matrix, shift, out=terms[:, 1])
    else:
        torch.addmv(bias.to(terms.dtype), matrix, shift, out=terms[:, 1])


def folded_empty(weights: Weights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised memory of folded weights for a z of `dtype`: `(5 D + C, C)` of matrices, `(2 D + C, 4)` of terms."""
    channels, hidden = weights.p_out_weight.shape
    device = weights.p_out_weight.device
    matrices = torch.empty((5 * hidden + channels, channels), dtype=dtype, device=device)
    return matrices, torch.empty((2 * hidden + channels, 4), dtype=_wide(dtype), device=device)


def folded_parts(weights: Weights, matrices: Tensor, terms: Tensor) -> Folded:
    """Views of the parts of `folded_empty`."""
    channels, hidden = weights.p_out_weight.shape
    p_in, g_in, g_out, p_out = matrices.split_with_sizes((2 * hidden, 2 * hidden, channels, hidden))
    in_terms, out_terms = terms.split_with_sizes((2 * hidden, channels))
    if hidden != channels:
        p_out = p_out.view(channels, hidden)
    return Folded(p_in, g_in, in_terms, p_out, g_out, out_terms)


def pair_operand(x: Tensor) -> Tensor:
    """z or a residual as kernels read it: itself where its layout complies, else one contiguous copy."""
    return x if complies(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def complies(x: Tensor) -> bool:
    """Whether kernels can read or write a pair tensor where it is."""
    *outer, last = x.stride()
    plain = last == 1 and all([step > 0 and step % OPERAND_ALIGN == 0 for step in outer])
    return plain and x.data_ptr() % ALIGN_BYTES == 0


def mask_buffer(mask: Tensor | None, z: Tensor) -> Tensor | None:
    """The float32 `(B, N, N)` buffer of a mask that broadcasts to it; itself where it is one."""
    if mask is None:
        return None
    if mask.dtype != torch.float32:
        mask = mask.to(torch.float32)
    size = z.shape[:-1]
    return (mask if mask.shape == size else mask.expand(size)).contiguous()


def stats_empty(z: Tensor) -> Tensor:
    """Uninitialised `(B, N, N, 2)` statistics of the pairs of a z, or of its x."""
    return torch.empty((*z.shape[:-1], 2), dtype=_wide(z.dtype), device=z.device)


def statistics(pairs: Tensor, eps: float) -> Tensor:
    """Mean and reciprocal deviation along the last axis, `(..., 2)` in the dtype of `pairs`."""
    mean = pairs.mean(-1, keepdim=True)
    return torch.cat([mean, ((pairs - mean).square().mean(-1, keepdim=True) + eps).rsqrt()], -1)


def factors_empty(z: Tensor, hidden: int) -> Tensor:
    """Uninitialised `(B, 2, D, N, P)` factors for a z."""
    batch, crop, _, _ = z.shape
    return torch.empty((batch, 2, hidden, crop, padded(crop)), dtype=z.dtype, device=z.device)


def contraction_empty(z: Tensor, hidden: int) -> Tensor:
    """Uninitialised `(B, D, N, P)` contraction for a z."""
    batch, crop, _, _ = z.shape
    return torch.empty((batch, hidden, crop, padded(crop)), dtype=contraction_dtype(z.dtype), device=z.device)


def contraction_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which a contraction of activations of `dtype` is kept: their own, except that fp16 goes to float32, as sums over N
    products leave its range."""
    return torch.float32 if dtype == torch.float16 else dtype


def padded(crop: int) -> int:
    """P: the crop rounded up to whole 16 bytes of 16-bit elements."""
    return -(-crop // OPERAND_ALIGN) * OPERAND_ALIGN


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which statistics and terms are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32
