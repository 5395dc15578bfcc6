"""The float64 reference against PyTorch and finite differences; the inputs, and the workload that judges kernels with them."""

from __future__ import annotations

import math

import pytest
import torch
from emulation import EmulatedKernel
from torch.nn.functional import scaled_dot_product_attention

from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_attention import inputs as families
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.inputs import make_inputs
from tpf_jit.templates.triangle_attention.workload import ForwardWorkload, relative_rms

SMALL = TriangleAttentionShape(11, heads=2, head_dim=5, rows=4, batch=2, mask="bool")


def double(shape: TriangleAttentionShape, **options) -> families.Inputs:
    made = make_inputs(shape, with_grad_out=True, **options)
    return families.Inputs(*(x.double() if x is not None and x.is_floating_point() else x for x in vars(made).values()))


def differentiable(q, k, v, bias, mask, scale):
    """The formulas in autograd's own hands: what the written-out gradients must agree with."""
    score = scale * q @ k.mT + bias
    if mask is not None:
        score = score.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else score + mask
    return torch.softmax(score, -1) @ v, torch.logsumexp(score, -1)


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_forward_is_scaled_dot_product_attention(mask: str) -> None:
    shape = TriangleAttentionShape(11, heads=2, head_dim=5, rows=4, batch=2, mask=mask)
    x = double(shape, mask_pattern="soft" if mask == "additive" else "random10")
    out, lse = reference.attention(x.q, x.k, x.v, x.bias, x.mask, scale=0.3)
    added = x.bias if mask == "none" else x.bias + (torch.where(x.mask, 0.0, -math.inf) if mask == "bool" else x.mask)
    expected = scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=added.expand(2, 4, 2, 11, 11), scale=0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, differentiable(x.q, x.k, x.v, x.bias, x.mask, 0.3)[1])


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("bias_rows", [None, 1, 4], ids=["no_row_axis", "shared", "per_row"])
def test_backward_is_autograd_of_the_formulas(mask: str, bias_rows: int | None) -> None:
    shape = TriangleAttentionShape(11, heads=2, head_dim=5, rows=4, batch=2, mask=mask)
    x = double(shape)
    bias = x.bias[:, 0] if bias_rows is None else torch.randn(2, bias_rows, 2, 11, 11, dtype=torch.float64)
    grad_lse = torch.randn(x.q.shape[:-1], dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v, bias)]
    q, k, v, b = leaves
    out, lse = differentiable(q, k, v, b.unsqueeze(1) if bias_rows is None else b, x.mask, 0.7)
    expected = torch.autograd.grad([out, lse], leaves, [x.grad_out, grad_lse])
    found = reference.attention_backward(x.grad_out, x.q, x.k, x.v, bias, x.mask, scale=0.7, grad_lse=grad_lse)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


class ReferenceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, mask):
        ctx.save_for_backward(q, k, v, bias, mask)
        return reference.attention(q, k, v, bias, mask, scale=0.7)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        return *reference.attention_backward(grad_out, *ctx.saved_tensors, scale=0.7, grad_lse=grad_lse), None


@pytest.mark.parametrize("mask", ["none", "bool"])
def test_backward_agrees_with_finite_differences_of_the_forward(mask: str) -> None:
    x = double(TriangleAttentionShape(4, heads=1, head_dim=3, rows=2, mask=mask), seed=1)
    leaves = tuple(t.clone().requires_grad_() for t in (x.q, x.k, x.v, x.bias))
    assert torch.autograd.gradcheck(lambda *t: ReferenceFunction.apply(*t, x.mask), leaves)


def test_chunks_do_not_change_the_result(monkeypatch) -> None:
    x = double(SMALL)
    whole = reference.attention(x.q, x.k, x.v, x.bias, x.mask)
    gradients = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias, x.mask)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    for got, want in zip(reference.attention(x.q, x.k, x.v, x.bias, x.mask), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for got, want in zip(reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias, x.mask), gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_keys_are_zero(kind: str) -> None:
    shape = TriangleAttentionShape(11, heads=2, head_dim=5, rows=4, mask=kind)
    x = double(shape, mask_pattern="rows", mask_value=-math.inf)
    out, lse = reference.attention(x.q, x.k, x.v, x.bias, x.mask)
    assert bool((out[:, ::3] == 0).all()) and bool((lse[:, ::3] == -math.inf).all())
    assert bool((out[:, 1] != 0).any()) and bool(torch.isfinite(lse[:, 1]).all())
    dq, dk, dv, dbias = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias, x.mask)
    assert all(bool((grad[:, ::3] == 0).all()) for grad in (dq, dk, dv))
    assert bool(torch.isfinite(dbias).all()) and bool((dbias != 0).any())


def test_a_row_full_of_large_negatives_is_the_uniform_softmax_of_the_models() -> None:
    x = double(TriangleAttentionShape(11, heads=2, head_dim=5, rows=4))
    mask = torch.zeros(1, 4, 1, 1, 11)
    mask[:, 0] = -1e9
    out, lse = reference.attention(x.q, x.k, x.v, x.bias, mask)
    torch.testing.assert_close(out[:, 0], x.v[:, 0].mean(-2, keepdim=True).expand_as(out[:, 0]))
    torch.testing.assert_close(lse[:, 0], torch.full_like(lse[:, 0], -1e9 + math.log(11)))
    without, _ = reference.attention(x.q, x.k, x.v, x.bias)
    torch.testing.assert_close(out[:, 1:], without[:, 1:], rtol=0, atol=0)


def test_a_small_additive_mask_is_not_rounded() -> None:
    x = double(TriangleAttentionShape(11, heads=2, head_dim=5, rows=4))
    mask = torch.randn(1, 4, 1, 1, 11, dtype=torch.float64)
    out, _ = reference.attention(x.q, x.k, x.v, x.bias, mask, scale=0.7)
    torch.testing.assert_close(out, differentiable(x.q, x.k, x.v, x.bias, mask, 0.7)[0], rtol=1e-13, atol=1e-13)


def test_excluded_keys_do_not_spread_their_nans() -> None:
    x = double(TriangleAttentionShape(11, heads=2, head_dim=5, rows=4))
    mask = torch.ones(1, 4, 1, 1, 11, dtype=torch.bool)
    mask[..., 3] = False
    x.k[..., 3, :] = math.nan
    assert bool(torch.isfinite(reference.attention(x.q, x.k, x.v, x.bias, mask)[0]).all())


# Inputs


@pytest.mark.parametrize("family", families.FAMILIES)
def test_inputs_are_a_function_of_the_seed(family: str) -> None:
    first, again, other = (make_inputs(SMALL, seed=seed, family=family, with_grad_out=True) for seed in (3, 3, 4))
    for name in vars(first):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert not torch.equal(first.v, other.v)
    assert first.q.transpose(2, 3).is_contiguous() and first.grad_out.transpose(2, 3).is_contiguous()


def test_families_are_what_they_claim() -> None:
    shape = TriangleAttentionShape(320, heads=3, head_dim=32, rows=2)
    extreme = make_inputs(shape, family="extreme", with_grad_out=True)
    logits = (extreme.q.double() @ extreme.k.double().mT) * 32**-0.5
    assert 0.8e4 < float(logits.abs().max()) < 3e4
    assert bool((extreme.q == 0).all(-1).any()), "queries whose logits are all equal"
    assert float(extreme.bias.float().max()) > 9e3, "a dominating key"
    assert 0 < float(extreme.grad_out[:, 1].float().abs().max()) < 2.0**-120
    steps = make_inputs(shape, family="adversarial").bias.float().diff(dim=-1)
    assert float(steps.max()) > 100 and float(steps.min()) < -100
    trained = make_inputs(shape, family="trained_like")
    spread = trained.q.float().std(dim=(0, 1, 2, 3))
    assert int((spread > 6).sum()) == 4 and float(trained.bias.float().std()) > 3.5


@pytest.mark.parametrize(("pattern", "low", "high"), [("random10", 0.07, 0.13), ("random50", 0.45, 0.55), ("random99", 0.97, 1.0),
                                                      ("prefix", 0.2, 0.4), ("rows", 0.3, 0.5)])
def test_mask_patterns_exclude_the_stated_share(pattern: str, low: float, high: float) -> None:
    shape = TriangleAttentionShape(200, rows=60, mask="bool")
    keep = make_inputs(shape, mask_pattern=pattern).mask
    assert low < 1 - float(keep.float().mean()) < high
    added = make_inputs(TriangleAttentionShape(200, rows=60, mask="additive"), mask_pattern=pattern).mask
    assert torch.equal(added, torch.where(keep, 0.0, -1e9))


def test_unknown_families_and_patterns_are_refused() -> None:
    with pytest.raises(InvalidInput, match="^family"):
        make_inputs(SMALL, family="gaussian")
    with pytest.raises(InvalidInput, match="^mask_pattern"):
        make_inputs(SMALL, mask_pattern="soft")


# Workload


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_a_right_kernel_is_inside_the_bounds(dtype: str, family: str, mask: str) -> None:
    shape = TriangleAttentionShape(130, heads=3, head_dim=12, rows=7, dtype=dtype, mask=mask)
    workload = ForwardWorkload(shape, "cpu", family=family, residual=True)
    assert isinstance(workload, Workload)
    data = workload.make_inputs(1)
    out = workload.run(EmulatedKernel(), data)
    errors, bounds = workload.errors(out, workload.reference(data)), workload.bounds()
    assert errors.keys() == bounds.keys() == {"out", "lse", "compensated", "lse_exact"}
    assert all(errors[name] <= bounds[name] for name in bounds), (errors, bounds)
    assert out["out"].shape == data.q.shape and out["lse"].shape == data.q.shape[:-1]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda last: last["out"][..., -1, :].fill_(math.nan),
        lambda last: last["out"][0, 2].zero_(),
        lambda last: last["out"].mul_(1.01),
        lambda last: last["lse"][0, 0, 0, 0].fill_(math.inf),
        lambda last: last["residual"].neg_(),
    ],
    ids=["skips_a_query", "skips_a_row", "scales", "breaks_the_lse", "wrong_residual"],
)
def test_a_wrong_kernel_is_not(break_it) -> None:
    workload = ForwardWorkload(TriangleAttentionShape(33, rows=7), "cpu", residual=True)
    data = workload.make_inputs(0)

    def broken(*arguments) -> None:
        kernel = EmulatedKernel()
        kernel(*arguments)
        break_it(kernel.last)

    errors, bounds = workload.errors(workload.run(broken, data), workload.reference(data)), workload.bounds()
    assert any(errors[name] > bounds[name] for name in bounds)


def test_a_kernel_that_writes_nothing_never_passes() -> None:
    workload = ForwardWorkload(TriangleAttentionShape(9, rows=2), "cpu")
    data = workload.make_inputs(0)
    errors = workload.errors(workload.run(lambda *arguments: None, data), workload.reference(data))
    assert set(errors.values()) == {math.inf}


def test_prepare_launches_once_a_call_on_the_same_tensors() -> None:
    workload = ForwardWorkload(TriangleAttentionShape(9, rows=2, mask="bool"), "cpu")
    kernel = EmulatedKernel()
    launch = workload.prepare(kernel, workload.make_inputs(0))
    assert kernel.calls == 0
    launch()
    first = kernel.last
    launch()
    assert kernel.calls == 2 and all(kernel.last[name] is first[name] for name in first)


def test_bytes_per_set_counts_what_a_launch_touches() -> None:
    shape = TriangleAttentionShape(16, heads=2, head_dim=8, rows=3, bias_dtype="float32", mask="bool")
    lines = 3 * 2 * 16
    assert ForwardWorkload(shape, "cpu").bytes_per_set == 4 * lines * 8 * 2 + lines * 4 + 2 * 16 * 16 * 4 + 3 * 16 * 4


def test_relative_rms() -> None:
    ref = torch.randn(3, 4, 5, dtype=torch.float64)
    assert relative_rms(ref, ref) == 0.0
    assert relative_rms(1.01 * ref, ref) == pytest.approx(0.01)
    assert relative_rms(torch.full_like(ref, math.nan), ref) == math.inf
    assert relative_rms(ref.clone().index_fill_(0, torch.tensor([1]), math.inf), ref) == math.inf
    zero = ref.clone()
    zero[1, 2] = 0
    assert relative_rms(zero + 1e-30, zero) == math.inf, "what is exactly zero must be exactly zero"
    infinite = ref.clone()
    infinite[0] = -math.inf
    assert relative_rms(infinite, infinite) == 0.0
    assert relative_rms(ref, infinite) == math.inf and relative_rms(-infinite, infinite) == math.inf
    assert relative_rms(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0


def test_relative_rms_of_slabs(monkeypatch) -> None:
    ref = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    x = ref + 0.1 * torch.randn_like(ref)
    whole = relative_rms(x, ref)
    monkeypatch.setattr("tpf_jit.templates.triangle_attention.workload.SLAB_ELEMENTS", 20)
    assert relative_rms(x, ref) == pytest.approx(whole)
