"""From a caller's tensors to what the kernels of the triangle multiplicative update read and leave for each other.

Three stages make a forward pass. N is the crop, C the channels of z, D the hidden width, P is N rounded up to 8.

    front(z, mask, norm_weight, norm_bias, p_weight, p_bias, g_weight, g_bias, factors, eps, num_ctas)
        zn = LN(z);  factors[b, s, d, i, k] = mask * sigmoid(zn g_weight^T + g_bias) * (zn p_weight^T + p_bias)
    product_nt(left, right, out, num_ctas)      out[b, d, i, j] = sum_k left[b, d, i, k] * right[b, d, j, k]
    product_tn(left, right, out, num_ctas)      out[b, d, i, j] = sum_k left[b, d, k, i] * right[b, d, k, j]
    product_nn(left, right, out, num_ctas)      out[b, d, i, j] = sum_k left[b, d, i, k] * right[b, d, k, j]
        the contraction: outgoing nt(a, b, x), incoming tn(a, b, x); its gradients: outgoing da = nn(dx, b), db = tn(dx, a),
        incoming da = nt(b, dx), db = nn(a, dx)
    back(z, x, norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias, p_weight, p_bias, g_weight, g_bias, residual, out,
         eps, num_ctas)
        out = [residual +] sigmoid(LN(z) g_weight^T + g_bias) * (LN(x) p_weight^T + p_bias)

    z, residual, out         (B, N, N, C) 16-bit of one dtype, unit stride on C, other strides positive multiples of 8 elements,
                             16-byte aligned base. residual may be None, and may be z. out may be z: back reads an element of z
                             and residual only in the task that writes it
    mask                     None, or float32 (B, N, N) contiguous
    factors                  (B, 2, D, N, P) contiguous, z's dtype: a is factors[:, 0], b is factors[:, 1], channel-major, so that
                             the contraction is B * D matrix products. Columns from N on are zero: front writes them
    left, right, out         (B, D, N, P), unit stride along P, other strides multiples of 8: x, dx, or a half of factors
    x                        (B, D, N, P) contiguous, bfloat16 for bf16 z, else float32 (sums over N leave fp16's range). What
                             columns from N on hold is never used
    norm_*                   float32 (C,) for z, (D,) for x; never None
    p_weight, g_weight       z's dtype, contiguous: front (2 D, C), rows of a first; back (C, D) and (C, C)
    p_bias, g_bias           None, or float32 (2 D,) for front, (C,) for back

P makes every row of factors and x a whole number of 16 bytes, the unit of TMA. Weights of another dtype are converted once a
call; they are small. Nothing here reads a value on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPERAND_ALIGN = 8
"""Strides of 16-bit operands are multiples of this many elements: 16 bytes."""
ALIGN_BYTES = 16
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


class Operands(NamedTuple):
    """A call's inputs as the kernels read them."""

    z: Tensor
    mask: Tensor | None
    weights: Weights

    def front(self, factors: Tensor) -> tuple[Tensor | None, ...]:
        """Tensor arguments of a front kernel."""
        w = self.weights
        norm = (w.norm_in_weight, w.norm_in_bias)
        return self.z, self.mask, *norm, w.p_in_weight, w.p_in_bias, w.g_in_weight, w.g_in_bias, factors

    def back(self, x: Tensor, residual: Tensor | None, out: Tensor) -> tuple[Tensor | None, ...]:
        """Tensor arguments of a back kernel."""
        w = self.weights
        norms = (w.norm_in_weight, w.norm_in_bias, w.norm_out_weight, w.norm_out_bias)
        return self.z, x, *norms, w.p_out_weight, w.p_out_bias, w.g_out_weight, w.g_out_bias, residual, out


def prepare(z: Tensor, mask: Tensor | None, weights: Weights) -> Operands:
    """Operands for a call of canonical rank: z `(B, N, N, C)` 16-bit of any strides, mask None or `(B or 1, N or 1, N or 1)`."""
    channels, hidden, device = z.shape[-1], weights.hidden, z.device

    def vector(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(torch.float32).contiguous()

    def matrix(x: Tensor) -> Tensor:
        return x.to(z.dtype).contiguous()

    def affine(weight: Tensor | None, bias: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
        weight = torch.ones(width, device=device) if weight is None else weight
        return vector(weight), vector(torch.zeros(width, device=device) if bias is None else bias)

    w = weights
    laid_out = Weights(
        *affine(w.norm_in_weight, w.norm_in_bias, channels),
        matrix(w.p_in_weight), vector(w.p_in_bias), matrix(w.g_in_weight), vector(w.g_in_bias),
        *affine(w.norm_out_weight, w.norm_out_bias, hidden),
        matrix(w.p_out_weight), vector(w.p_out_bias), matrix(w.g_out_weight), vector(w.g_out_bias),
    )  # fmt: skip
    return Operands(pair_operand(z), mask_buffer(mask, z), laid_out)


def pair_operand(x: Tensor) -> Tensor:
    """z or a residual as kernels read it: itself where its layout complies, else one contiguous copy."""
    return x if complies(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


def complies(x: Tensor) -> bool:
    """Whether kernels can read or write a pair tensor where it is."""
    plain = x.stride(-1) == 1 and all(step > 0 and step % OPERAND_ALIGN == 0 for step in x.stride()[:-1])
    return plain and x.data_ptr() % ALIGN_BYTES == 0


def mask_buffer(mask: Tensor | None, z: Tensor) -> Tensor | None:
    """The float32 `(B, N, N)` buffer of a mask that broadcasts to it; itself where it is one."""
    return None if mask is None else mask.to(torch.float32).expand(z.shape[:-1]).contiguous()


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
