"""The stages of the triangle multiplicative update as PyTorch functions with the kernels' calling conventions and roundings.

Operands of products are rounded to 16 bits, sums are float32, and what a stage leaves is rounded once. `operator` is the whole
update as three such kernels would compute it, differentiable, with the same roundings of gradients on the way back.
"""

from __future__ import annotations

import multiplication_backward_emulation
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tpf_jit.ops import routing
from tpf_jit.templates.triangle_multiplication import layout_backward
from tpf_jit.templates.triangle_multiplication.layout import Weights, contraction_dtype, padded


def check_operands(z: Tensor, *vectors: Tensor | None) -> None:
    assert z.dtype in (torch.bfloat16, torch.float16, torch.float64) and z.stride(-1) == 1 and z.data_ptr() % 16 == 0
    assert all(step > 0 and step % 8 == 0 for step in z.stride()[:-1])
    assert all(x is None or x.dtype == torch.float32 and x.is_contiguous() and x.dim() == 1 for x in vectors)


def wide(x: Tensor | None) -> Tensor | None:
    """In the dtype of sums; float64 stays, for tests of the algebra without roundings."""
    return x if x is None or x.dtype == torch.float64 else x.float()


def front(z, mask, norm_weight, norm_bias, p_weight, p_bias, g_weight, g_bias, factors, stats, eps, num_ctas) -> None:
    check_operands(z, norm_weight, norm_bias, p_bias, g_bias)
    assert p_weight.dtype == g_weight.dtype == factors.dtype == z.dtype and num_ctas >= 1
    batch, _, hidden, crop, pitch = factors.shape
    assert pitch == padded(crop) and factors.is_contiguous() and p_weight.shape == (2 * hidden, z.shape[-1])
    zn = _normed(wide(z), norm_weight, norm_bias, eps, z.dtype)
    both = _linear(zn, p_weight, p_bias) * _linear(zn, g_weight, g_bias).sigmoid()
    if mask is not None:
        check_mask(mask, z)
        both = both * mask.unsqueeze(-1)
    factors.zero_()
    factors[..., :crop] = both.permute(0, 3, 1, 2).unflatten(1, (2, hidden))
    _leave_stats(stats, wide(z), eps)


def product_nt(left, right, out, num_ctas) -> None:
    _store(out, left, right, wide(left) @ wide(right).mT)


def product_tn(left, right, out, num_ctas) -> None:
    _store(out, left, right, wide(left).mT @ wide(right))


def product_nn(left, right, out, num_ctas) -> None:
    crop = left.shape[2]
    _store(out, left, right, wide(left)[..., :crop] @ wide(right))


def _store(out: Tensor, left: Tensor, right: Tensor, found: Tensor) -> None:
    batch, hidden, crop, pitch = out.shape
    assert pitch == padded(crop) and left.shape == right.shape == out.shape and left.dtype == right.dtype
    for x in (left, right, out):
        assert x.stride(3) == 1 and all(step % 8 == 0 for step in x.stride()[:3]) and x.data_ptr() % 16 == 0
    out[..., :crop] = found[..., :crop, :crop]
    out[..., crop:] = 0


def back(
    z, x, norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias, p_weight, p_bias, g_weight, g_bias, residual, out, stats,
    eps, num_ctas,
) -> None:  # fmt: skip
    check_operands(z, norm_in_weight, norm_in_bias, norm_out_weight, norm_out_bias, p_bias, g_bias)
    assert x.dtype == contraction_dtype(z.dtype) and out.dtype == p_weight.dtype == g_weight.dtype == z.dtype
    zn = _normed(wide(z), norm_in_weight, norm_in_bias, eps, z.dtype)
    pairs = _pairs(x)
    y = _normed(pairs, norm_out_weight, norm_out_bias, eps, z.dtype)
    update = _linear(y, p_weight, p_bias) * _linear(zn, g_weight, g_bias).sigmoid()
    _leave_stats(stats, pairs, eps)
    out.copy_(update if residual is None else wide(residual) + update)


def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return wide(layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps).to(dtype))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _pairs(x: Tensor) -> Tensor:
    """(B, N, N, width) of a channel-major (B, width, N, P)."""
    return wide(x[..., : x.shape[2]].permute(0, 2, 3, 1))


def _leave_stats(stats: Tensor | None, pairs: Tensor, eps: float) -> None:
    if stats is not None:
        assert stats.shape == (*pairs.shape[:3], 2) and stats.dtype == pairs.dtype and stats.is_contiguous()
        stats.copy_(layout_backward.statistics(pairs, eps))


def check_mask(mask: Tensor | None, z: Tensor) -> None:
    assert mask is None or mask.dtype == torch.float32 and mask.is_contiguous() and mask.shape == z.shape[:-1]


class EmulatedKernels:
    """Stands in for `routing.find_kernel` on a machine with a Hopper GPU.

    `asked` lists the (family, flags) that were looked up, `ran` the families as they ran, `missing` families that cannot
    be had; `splits` are those of the kernels that sum weights' gradients.
    """

    def __init__(self, splits: int = 3) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.ran: list[str] = []
        self.missing: set[str] = set()
        self.splits = splits

    def find(self, family, shape, flags, device):
        self.asked.append((family, dict(flags)))
        if family in self.missing:
            return f"no kernel of {family}"
        name = family.partition("/")[2]
        emulated = globals().get(name) or getattr(multiplication_backward_emulation, name)

        def function(*arguments) -> None:
            self.ran.append(family)
            emulated(*arguments)

        is_sum = family in (routing.FRONT_WEIGHTS, routing.BACK_WEIGHTS)
        return routing.Launch(function, 132, splits=self.splits if is_sum else 1)


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
