"""The PyTorch path: right against float64, inside its memory budget, exact where masks leave nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tpf_jit
from tpf_jit.ops import fallback
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.inputs import FAMILIES, Inputs, make_inputs
from tpf_jit.templates.triangle_attention.workload import relative_rms

ALL = [True, True, True, True]
# Rounding once to the dtype, and room for float32 sums and for the few elements of small tensors.
BOUND = {torch.bfloat16: 1.85e-3, torch.float16: 2.4e-4, torch.float32: 3e-6, torch.float64: 1e-13}


def cast(x: Inputs, dtype: torch.dtype, bias_dtype: torch.dtype) -> Inputs:
    return Inputs(x.q.to(dtype), x.k.to(dtype), x.v.to(dtype), x.bias.to(bias_dtype), x.mask, x.grad_out.to(dtype))


def small(dtype: torch.dtype = torch.float64, crop: int = 9, batch: int = 1) -> Inputs:
    shape = TriangleAttentionShape(crop, heads=2, head_dim=8, rows=6, batch=batch)
    return cast(make_inputs(shape, with_grad_out=True), dtype, dtype)


def run(x: Inputs, scale: float = 0.3, grad_lse: torch.Tensor | None = None) -> tuple[dict, dict]:
    """Everything the path computes, and the same in float64."""
    out, lse, residual, lse_low = fallback.forward(x.q, x.k, x.v, x.bias, x.mask, scale, True)
    grads = fallback.backward(x.grad_out, grad_lse, x.q, x.k, x.v, x.bias, x.mask, scale, ALL)
    ref_out, ref_lse = reference.attention(x.q, x.k, x.v, x.bias, x.mask, scale)
    ref_grads = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias, x.mask, scale, grad_lse)
    names = ("dq", "dk", "dv", "dbias")
    low = (lse.double() + lse_low.double()).masked_fill(lse == -math.inf, -math.inf) - ref_lse
    assert float(low[ref_lse != -math.inf].abs().max()) <= 1e-5 * max(1.0, float(x.q.abs().max()) ** 2), "LSE and its low part"
    found = {"out": out, "lse": lse, "exact": out.double() + residual.double(), **dict(zip(names, grads, strict=True))}
    return found, {"out": ref_out, "lse": ref_lse, "exact": ref_out, **dict(zip(names, ref_grads, strict=True))}


@pytest.mark.parametrize("dtype", list(BOUND), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("fp32_bias", [False, True])
def test_errors_are_those_of_one_rounding(dtype: torch.dtype, mask: str, fp32_bias: bool) -> None:
    shape = TriangleAttentionShape(37, heads=3, head_dim=24, rows=9, batch=2, mask=mask)
    bias_dtype = torch.float32 if fp32_bias else dtype
    found, ref = run(cast(make_inputs(shape, with_grad_out=True, mask_pattern="random10"), dtype, bias_dtype))
    for name, bound in {name: BOUND[dtype] for name in ("out", "dq", "dk", "dv")}.items():
        assert relative_rms(found[name], ref[name]) <= bound, name
    assert relative_rms(found["dbias"], ref["dbias"]) <= BOUND[bias_dtype]
    exact = 1e-13 if dtype == torch.float64 else 1e-6
    assert relative_rms(found["lse"], ref["lse"]) <= exact
    assert relative_rms(found["exact"], ref["exact"]) <= max(10 * exact if dtype != torch.float64 else exact, BOUND[dtype] ** 2)
    assert found["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    shape = TriangleAttentionShape(130, heads=3, head_dim=32, rows=4, mask="bool")
    found, ref = run(make_inputs(shape, family=family, with_grad_out=True), scale=32**-0.5)
    assert all(bool(torch.isfinite(found[name]).all()) for name in ("out", "dq", "dk", "dv", "dbias"))
    assert relative_rms(found["out"], ref["out"]) <= BOUND[torch.bfloat16]
    if family != "extreme":  # its one-hot rows make dS a difference of equal numbers, which float32 cannot hold
        for name in ("dq", "dk", "dv", "dbias"):
            assert relative_rms(found[name], ref[name]) <= BOUND[torch.bfloat16], name


BUDGETS = {"rows": 3 * 3 * 37 * 37 * 4, "heads": 2 * 37 * 37 * 4, "queries": 5 * 37 * 4, "one_query": 1}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
def test_chunks_do_not_change_the_result(budget: int, monkeypatch) -> None:
    shape = TriangleAttentionShape(37, heads=3, head_dim=8, rows=7, batch=2, mask="bool")
    x = cast(make_inputs(shape, with_grad_out=True), torch.float64, torch.float64)
    monkeypatch.setattr(fallback, "CPU_SCORE_BUDGET_BYTES", 2 * budget)  # in float64, so twice the bytes
    found, ref = run(x, grad_lse=torch.randn(x.q.shape[:-1], dtype=torch.float64))
    for name in ref:
        assert relative_rms(found[name], ref[name]) <= 1e-13, name


class LargestTensor(TorchDispatchMode):
    """Most bytes of any tensor that an operation returns, other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


def test_no_tensor_exceeds_the_budget(monkeypatch) -> None:
    """At N = 256 a row of one head has 256 KiB of fp32 scores; with 128 KiB allowed even that is cut, and everything else that
    exists is as large as an operand or as the bias."""
    shape = TriangleAttentionShape(256, heads=1, head_dim=8, rows=6)
    x = make_inputs(shape, with_grad_out=True)
    budget = 128 * 1024
    monkeypatch.setattr(fallback, "CPU_SCORE_BUDGET_BYTES", budget)
    with LargestTensor() as seen:
        fallback.forward(x.q, x.k, x.v, x.bias, None, 0.3, False)
    assert seen.bytes <= budget
    with LargestTensor() as seen:
        fallback.backward(x.grad_out, None, x.q, x.k, x.v, x.bias, None, 0.3, [True, True, True, False])
    assert seen.bytes <= budget
    with LargestTensor() as seen:
        fallback.backward(x.grad_out, None, x.q, x.k, x.v, x.bias, None, 0.3, ALL)
    assert seen.bytes <= max(budget, x.bias.numel() * 4)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_keys_give_exact_zeros(kind: str) -> None:
    shape = TriangleAttentionShape(19, heads=2, head_dim=8, rows=6, mask=kind)
    x = make_inputs(shape, with_grad_out=True, mask_pattern="rows", mask_value=-math.inf)
    found, ref = run(x, grad_lse=torch.ones(x.q.shape[:-1]))
    for name in ("out", "dq", "dk", "dv"):
        assert bool((found[name][:, ::3] == 0).all()), name
    assert bool((found["lse"][:, ::3] == -math.inf).all())
    for name in ref:
        assert relative_rms(found[name], ref[name]) <= BOUND[torch.bfloat16], name


def test_a_row_of_large_negatives_stays_a_softmax() -> None:
    shape = TriangleAttentionShape(19, heads=2, head_dim=8, rows=6, mask="additive")
    found, ref = run(make_inputs(shape, with_grad_out=True, mask_pattern="rows", mask_value=-1e9))
    assert bool((found["out"][:, 0] != 0).all())
    for name in ref:
        assert relative_rms(found[name], ref[name]) <= BOUND[torch.bfloat16], name


@pytest.mark.parametrize("scale", [0.0, -1.5, 3.0])
def test_any_scale(scale: float) -> None:
    x = small(torch.float32, crop=19)
    found, ref = run(x, scale=scale)
    for name in ref:
        assert relative_rms(found[name], ref[name]) <= 5e-6, name


@pytest.mark.parametrize("bias_size", [(2, 6), (1, 6), (1, 1), (2, 1)], ids=str)
def test_bias_of_every_sharing(bias_size: tuple[int, int]) -> None:
    x = small(batch=2)
    bias = torch.randn(*bias_size, 2, 9, 9, dtype=torch.float64)
    found, ref = run(Inputs(x.q, x.k, x.v, bias, None, x.grad_out))
    assert found["dbias"].shape == bias.shape
    for name in ref:
        assert relative_rms(found[name], ref[name]) <= 1e-13, name


@pytest.mark.parametrize("mask_size", [(1, 1, 1, 1, 9), (2, 1, 1, 1, 9), (1, 6, 1, 1, 9), (2, 6, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_broadcast_masks(mask_size: tuple[int, ...], kind: str) -> None:
    x = small(batch=2)
    mask = torch.rand(mask_size) > 0.3 if kind == "bool" else torch.randn(mask_size)
    found, ref = run(Inputs(x.q, x.k, x.v, x.bias, mask, x.grad_out))
    for name in ref:
        assert relative_rms(found[name], ref[name]) <= 1e-13, name


@pytest.mark.parametrize("needed", [[i == j for j in range(4)] for i in range(4)] + [[True, False, True, False]], ids=str)
def test_only_needed_gradients_are_computed(needed: list[bool]) -> None:
    x = small(torch.bfloat16)
    everything = fallback.backward(x.grad_out, None, x.q, x.k, x.v, x.bias, None, 0.3, ALL)
    some = fallback.backward(x.grad_out, None, x.q, x.k, x.v, x.bias, None, 0.3, needed)
    for need, got, want in zip(needed, some, everything, strict=True):
        assert torch.equal(got, want) if need else got.numel() == 0


def test_gradients_keep_the_layout_of_their_operands() -> None:
    x = small(torch.bfloat16)
    bias = torch.randn(1, 1, 9, 9, 2).permute(0, 1, 4, 3, 2)
    dq, dk, dv, dbias = fallback.backward(x.grad_out, None, x.q, x.k, x.v, bias, None, 0.3, ALL)
    assert dq.stride() == x.q.stride() and dk.stride() == x.k.stride() and dv.stride() == x.v.stride()
    assert dbias.stride() == bias.stride() and dbias.dtype == bias.dtype
    out, _, residual, lse_low = fallback.forward(x.q, x.k, x.v, bias, None, 0.3, True)
    assert out.transpose(2, 3).is_contiguous() and residual.transpose(2, 3).is_contiguous()
    assert lse_low.shape == x.q.shape[:-1]


def test_gradient_of_the_lse_alone() -> None:
    x = small()
    grad_lse = torch.randn(x.q.shape[:-1], dtype=torch.float64)
    found = fallback.backward(None, grad_lse, x.q, x.k, x.v, x.bias, None, 0.3, ALL)
    ref = reference.attention_backward(torch.zeros_like(x.q), x.q, x.k, x.v, x.bias, None, 0.3, grad_lse)
    for got, want in zip(found, ref, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [(1, 0, 2, 9, 8), (0, 3, 2, 9, 8), (1, 3, 2, 0, 8), (1, 3, 2, 9, 0), (1, 3, 0, 9, 8)], ids=str)
def test_empty_problems(size: tuple[int, ...]) -> None:
    q = torch.randn(size)
    bias = torch.randn(size[0], 1, size[2], size[3], size[3])
    out, lse, *_ = fallback.forward(q, q, q, bias, None, 1.0, False)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    grads = fallback.backward(torch.randn(size), torch.ones(size[:-1]), q, q, q, bias, None, 1.0, ALL)
    assert [grad.shape for grad in grads] == [q.shape, q.shape, q.shape, bias.shape]
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)


def test_nans_reach_what_depends_on_them_and_no_more() -> None:
    x = small(torch.bfloat16)
    x.q[0, 1, 0, 2, 3] = math.nan
    x.k[0, 4, 1, 5, 0] = math.nan
    out, lse, *_ = fallback.forward(x.q, x.k, x.v, x.bias, None, 0.3, False)
    broken = torch.zeros(1, 6, 2, 9, dtype=torch.bool)
    broken[0, 1, 0, 2] = broken[0, 4, 1] = True
    assert torch.equal(lse.isnan(), broken) and torch.equal(out.isnan().any(-1), broken)


def test_equal_calls_give_equal_bits() -> None:
    x = make_inputs(TriangleAttentionShape(37, heads=2, head_dim=8, rows=6, mask="bool"), with_grad_out=True)
    first, _ = run(x)
    again, _ = run(x)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_nans_of_excluded_keys_do_not_spread(kind: str) -> None:
    q, k, v = (torch.randn(1, 2, 1, 9, 8) for _ in range(3))
    bias, keep = torch.randn(1, 1, 1, 9, 9), torch.ones(1, 2, 1, 1, 9, dtype=torch.bool)
    keep[..., 4] = False
    mask = keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    want = tpf_jit.triangle_attention(q, k, v, bias, mask)
    k[..., 4, :], bias[..., 4] = math.nan, math.inf
    assert torch.equal(tpf_jit.triangle_attention(q, k, v, bias, mask), want)
