"""The stages of the triangle multiplicative update as PyTorch functions with the kernels' calling conventions and roundings.

Operands of products are rounded to 16 bits, sums are float32, and what a stage leaves is rounded once. `operator` is the whole
update as three such kernels would compute it, differentiable, with the same roundings of gradients on the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tpf_jit.templates.triangle_multiplication.layout import Weights, contraction_dtype, padded


def check_operands(z: Tensor, *vectors: Tensor | None) -> None:
    assert z.dtype in (torch.bfloat16, torch.float16) and z.stride(-1) == 1 and z.data_ptr() % 16 == 0
    assert all(step > 0 and step % 8 == 0 for step in z.stride()[:-1])
    assert all(x is None or x.dtype == torch.float32 and x.is_contiguous() and x.dim() == 1 for x in vectors)


def front(z, mask, norm_weight, norm_bias, p_weight, p_bias, g_weight, g_bias, factors, eps, num_ctas) -> None:
    check_operands(z, norm_weight, norm_bias, p_bias, g_bias)
    assert p_weight.dtype == g_weight.dtype == factors.dtype == z.dtype and num_ctas >= 1
    batch, _, hidden, crop, pitch = factors.shape
    assert pitch == padded(crop) and factors.is_contiguous() and p_weight.shape == (2 * hidden, z.shape[-1])
    zn = layer_norm(z.float(), z.shape[-1:], norm_weight, norm_bias, eps).to(z.dtype).float()
    both = linear(zn, p_weight.float(), p_bias) * linear(zn, g_weight.float(), g_bias).sigmoid()
    if mask is not None:
        assert mask.dtype == torch.float32 and mask.is_contiguous() and mask.shape == z.shape[:-1]
        both = both * mask.unsqueeze(-1)
    factors.zero_()
    factors[..., :crop] = both.permute(0, 3, 1, 2).unflatten(1, (2, hidden))


def product_nt(left, right, out, num_ctas) -> None:
    _store(out, left, right, left.float() @ right.float().mT)


def product_tn(left, right, out, num_ctas) -> None:
    _store(out, left, right, left.float().mT @ right.float())


def product_nn(left, right, out, num_ctas) -> None:
    crop = left.shape[2]
    _store(out, left, right, left[..., :crop].float() @ right.float())


def _store(out: Tensor, left: Tensor, right: Tensor, found: Tensor) -> None:
    batch, hidden, crop, pitch = out.shape
    assert pitch == padded(crop) and left.shape == right.shape == out.shape and left.dtype == right.dtype
    for x in (left, right, out):
        assert x.stride(3) == 1 and all(step % 8 == 0 for step in x.stride()[:3]) and x.data_ptr() % 16 == 0
    out[..., :crop] = found[..., :crop, :crop]


def back(
    z, x, norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias, p_weight, p_bias, g_weight, g_bias, residual, out, eps,
    num_ctas,
) -> None:  # fmt: skip
    check_operands(z, norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias, p_bias, g_bias)
    assert x.dtype == contraction_dtype(z.dtype) and out.dtype == p_weight.dtype == g_weight.dtype == z.dtype
    zn = layer_norm(z.float(), z.shape[-1:], norm_in_weight, norm_in_bias, eps).to(z.dtype).float()
    pairs = x[..., : z.shape[1]].permute(0, 2, 3, 1).float()
    y = layer_norm(pairs, pairs.shape[-1:], norm_out_weight, norm_out_bias, eps).to(z.dtype).float()
    update = linear(y, p_weight.float(), p_bias) * linear(zn, g_weight.float(), g_bias).sigmoid()
    out.copy_(update if residual is None else residual.float() + update)


class _Rounded(torch.autograd.Function):
    """Rounds to a dtype, and the gradient too."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).float(), None


def operator(z: Tensor, direction: str, mask: Tensor | None, *, eps: float, **named: Tensor | None) -> Tensor:
    """The update of a 16-bit z as kernels would compute it."""
    w, dtype, stored = Weights(**named), z.dtype, contraction_dtype(z.dtype)

    def operand(x: Tensor) -> Tensor:
        return x.float().to(dtype).float() if not x.requires_grad else _Once.apply(x.float(), dtype)

    def affine(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float()

    def projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Gradient.apply(linear(x, operand(weight), affine(bias)), dtype)

    zn = _Once.apply(layer_norm(z.float(), z.shape[-1:], affine(w.norm_in_weight), affine(w.norm_in_bias), eps), dtype)
    both = projected(zn, w.p_in_weight, w.p_in_bias) * projected(zn, w.g_in_weight, w.g_in_bias).sigmoid()
    both = both if mask is None else both * mask.unsqueeze(-1)
    a, b = _Rounded.apply(both, dtype).chunk(2, -1)
    formula = "bikd,bjkd->bijd" if direction == "outgoing" else "bkid,bkjd->bijd"
    x = _Rounded.apply(torch.einsum(formula, a, b), stored)
    y = _Once.apply(layer_norm(x, x.shape[-1:], affine(w.norm_out_weight), affine(w.norm_out_bias), eps), dtype)
    return (projected(y, w.p_out_weight, w.p_out_bias) * projected(zn, w.g_out_weight, w.g_out_bias).sigmoid()).to(dtype)


class _Once(torch.autograd.Function):
    """Rounds to a dtype on the way in only."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).float()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gradient(torch.autograd.Function):
    """Rounds the gradient only: dvalue and dgate are operands of two products each."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).float(), None
