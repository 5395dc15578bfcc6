"""The stages of the triangle multiplicative update as PyTorch functions with the kernels' calling conventions and roundings.

Folded weights are rounded to 16 bits, z and x are multiplied as they are, everything else is float32, and what a stage leaves is
rounded once. For a float64 z nothing is rounded. `operator` is the whole update as any implementation on tensor cores may compute
it, differentiable: every operand of a product is rounded, zn and LN(x) too, and gradients on the way back just so.
"""

from __future__ import annotations

import multiplication_backward_emulation
import torch
from multiplication_backward_emulation import projected
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from tpf_jit.ops import routing
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_multiplication import layout
from tpf_jit.templates.triangle_multiplication.layout import Weights, contraction_dtype, padded


def check_operands(z: Tensor, matrices: tuple[Tensor, ...], terms: Tensor, *stats: Tensor | None) -> None:
    assert z.dtype in (torch.bfloat16, torch.float16, torch.float64) and z.stride(-1) == 1 and z.data_ptr() % 16 == 0
    assert all(step > 0 and step % 8 == 0 for step in z.stride()[:-1])
    assert all(x.dtype == z.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in matrices)
    assert terms.dtype == wide(z).dtype and terms.is_contiguous() and terms.shape == (matrices[0].shape[0], 4)
    for x in stats:
        assert x is None or x.shape == (*z.shape[:3], 2) and x.dtype == terms.dtype and x.is_contiguous()


def wide(x: Tensor | None) -> Tensor | None:
    """In the dtype of sums; float64 stays, for tests of the algebra without roundings."""
    return x if x is None or x.dtype == torch.float64 else x.float()


def fold(
    p_in, g_in, p_out, g_out, norm_in_w, norm_in_b, norm_out_w, norm_out_b, p_in_bias, g_in_bias, p_out_bias, g_out_bias,
    f_p_in, f_g_in, f_p_out, f_g_out, in_terms, out_terms, num_ctas,
) -> None:  # fmt: skip
    vectors = (norm_in_w, norm_in_b, norm_out_w, norm_out_b, p_in_bias, g_in_bias, p_out_bias, g_out_bias)
    given = (*vectors[:4], *(x for x in vectors[4:] if x is not None))
    assert p_in.dtype in (torch.float32, torch.bfloat16) and len(given) in (4, 8) and num_ctas >= 1
    assert all(x.dtype == p_in.dtype for x in (g_in, p_out, g_out)) and all(x.dtype == torch.float32 for x in given)
    filled = (f_p_in, f_g_in, f_p_out, f_g_out, in_terms, out_terms)
    assert all(x.is_contiguous() for x in (p_in, g_in, p_out, g_out, *given, *filled))
    assert all(x.data_ptr() % 16 == 0 for x in filled)
    for matrix, folded, (scale, shift), bias, terms in (
        (p_in, f_p_in, vectors[:2], p_in_bias, in_terms[:, :2]), (g_in, f_g_in, vectors[:2], g_in_bias, in_terms[:, 2:]),
        (p_out, f_p_out, vectors[2:4], p_out_bias, out_terms[:, :2]), (g_out, f_g_out, vectors[:2], g_out_bias, out_terms[:, 2:]),
    ):  # fmt: skip
        assert matrix.shape == folded.shape and terms.shape == (matrix.shape[0], 2)
        matrix = matrix.to(terms.dtype)
        folded.copy_(matrix * scale)
        terms[:, 0] = folded.to(terms.dtype).sum(-1)
        terms[:, 1] = matrix @ shift.to(terms.dtype) + (0.0 if bias is None else bias)


def front(z, mask, p_in, g_in, in_terms, factors, z_stats, eps, num_ctas) -> None:
    check_operands(z, (p_in, g_in), in_terms, z_stats)
    assert factors.dtype == z.dtype and z_stats is not None and num_ctas >= 1
    batch, _, hidden, crop, pitch = factors.shape
    assert pitch == padded(crop) and factors.is_contiguous() and p_in.shape == g_in.shape == (2 * hidden, z.shape[-1])
    z_stats.copy_(layout.statistics(wide(z), eps))
    both = projected(wide(z), z_stats, p_in, in_terms[:, :2]) * projected(wide(z), z_stats, g_in, in_terms[:, 2:]).sigmoid()
    if mask is not None:
        check_mask(mask, z)
        both = both * mask.unsqueeze(-1)
    factors.zero_()
    factors[..., :crop] = both.permute(0, 3, 1, 2).unflatten(1, (2, hidden))


def fold_front(z, mask, *arguments) -> None:
    *folding, factors, z_stats, eps, num_ctas = arguments
    assert all(x.data_ptr() % 16 == 0 for x in folding[:8])
    fold(*folding, num_ctas)
    p_in, g_in, _, _, in_terms, _ = folding[12:]
    front(z, mask, p_in, g_in, in_terms, factors, z_stats, eps, num_ctas)


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


def back(z, z_stats, x, p_out, g_out, out_terms, residual, out, x_stats, eps, num_ctas) -> None:
    check_operands(z, (p_out, g_out), out_terms, z_stats, x_stats)
    assert x.dtype == contraction_dtype(z.dtype) and x.is_contiguous() and out.dtype == z.dtype and num_ctas >= 1
    pairs = wide(x[..., : x.shape[2]].permute(0, 2, 3, 1))
    stats = layout.statistics(pairs, eps)
    value = projected(pairs, stats, p_out, out_terms[:, :2])
    update = value * projected(wide(z), z_stats, g_out, out_terms[:, 2:]).sigmoid()
    if x_stats is not None:
        x_stats.copy_(stats)
    out.copy_(update if residual is None else wide(residual) + update)


def check_mask(mask: Tensor | None, z: Tensor) -> None:
    assert mask is None or mask.dtype == torch.float32 and mask.is_contiguous() and mask.shape == z.shape[:-1]


class NoPlans(dict):
    """Stands in for `multiplication_plans._plans` where what the machine passes for changes from call to call."""

    def __setitem__(self, key, plan) -> None:
        pass


def centre(z: Tensor, out: Tensor, num_ctas: int) -> None:
    assert z.dtype == torch.float32 and layout.complies(z) and out.is_contiguous()
    torch.sub(z, z.mean(-1, keepdim=True), out=out)


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
        name = family.partition("/")[2] or registry.get(family).direction
        emulated = globals().get(name) or getattr(multiplication_backward_emulation, name)

        def function(*arguments) -> None:
            self.ran.append(family)
            # Kernels do not see autocast. Not by its context manager, whose uses tests count.
            was = torch.is_autocast_enabled("cpu")
            torch.set_autocast_enabled("cpu", False)
            try:
                emulated(*arguments)
            finally:
                torch.set_autocast_enabled("cpu", was)

        is_sum = family in (routing.FRONT_WEIGHTS, routing.BACK_WEIGHTS, routing.FRONT_GRADIENTS)
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
    """The update of a 16-bit z with all roundings that an implementation may have."""
    w, dtype, stored = Weights(**named), z.dtype, contraction_dtype(z.dtype)

    def operand(x: Tensor) -> Tensor:
        return x.float().to(dtype).float() if not x.requires_grad else _Once.apply(x.float(), dtype)

    def affine(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float()

    def linear_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Gradient.apply(linear(x, operand(weight), affine(bias)), dtype)

    zn = _Once.apply(layer_norm(z.float(), z.shape[-1:], affine(w.norm_in_weight), affine(w.norm_in_bias), eps), dtype)
    both = linear_of(zn, w.p_in_weight, w.p_in_bias) * linear_of(zn, w.g_in_weight, w.g_in_bias).sigmoid()
    both = both if mask is None else both * mask.unsqueeze(-1)
    a, b = _Rounded.apply(both, dtype).chunk(2, -1)
    formula = "bikd,bjkd->bijd" if direction == "outgoing" else "bkid,bkjd->bijd"
    x = _Rounded.apply(torch.einsum(formula, a, b), stored)
    y = _Once.apply(layer_norm(x, x.shape[-1:], affine(w.norm_out_weight), affine(w.norm_out_bias), eps), dtype)
    return (linear_of(y, w.p_out_weight, w.p_out_bias) * linear_of(zn, w.g_out_weight, w.g_out_bias).sigmoid()).to(dtype)


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
