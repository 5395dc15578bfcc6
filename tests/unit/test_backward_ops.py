"""Training without a GPU: the four kernels are PyTorch emulations that check their calling conventions on every call."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from backward_emulation import EmulatedBackward
from torch.utils.checkpoint import checkpoint

import tpf_jit
from tpf_jit.errors import ColdKernelInCapture, FallbackWarning, InvalidInput, NotDifferentiable
from tpf_jit.ops import fallback, launch, plans, routing, settings
from tpf_jit.ops import triangle_attention as ops
from tpf_jit.ops.triangle_attention import triangle_attention
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import layout_backward, reference
from tpf_jit.templates.triangle_attention.inputs import FAMILIES, Inputs, make_inputs
from tpf_jit.templates.triangle_attention.workload_backward import dead_keys, dead_queries, gradient_bounds, gradient_error

BF16 = torch.bfloat16
ROUNDED = {BF16: 1.66e-3, torch.float16: 2.08e-4, torch.float32: 0.0}
NAMES = ("dq", "dk", "dv", "dbias")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def hopper(monkeypatch) -> None:
    """Lets this machine pass for one with a Hopper GPU; what it passes for changes, and plans remember it."""
    plans._plans.clear()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "unsupported", lambda shape, device: None)
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.delenv(settings.WORKSPACE_VARIABLE, raising=False)
    yield
    plans._plans.clear()


@pytest.fixture
def kernels(monkeypatch) -> EmulatedBackward:
    """The kernels of such a machine; the PyTorch path is an error unless a test asks for it."""
    emulated = EmulatedBackward()
    monkeypatch.setattr(routing, "find_kernel", emulated.find)
    monkeypatch.setattr(fallback, "backward", lambda *arguments: pytest.fail("the backward was recomputed"))
    return emulated


def leaves(x: Inputs) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.bias)]


def small(family: str = "normal", seed: int = 0, pattern: str | None = None, value: float | None = None, **fields) -> Inputs:
    shape = TriangleAttentionShape(**{"crop": 21, "heads": 3, "head_dim": 16, "rows": 5, **fields})
    return make_inputs(shape, seed=seed, family=family, mask_pattern=pattern, mask_value=value, with_grad_out=True)


def step(tensors, mask=None, grad_out=None, **options) -> list[torch.Tensor | None]:
    out = triangle_attention(*tensors, mask, **options)
    out.backward(torch.ones_like(out) if grad_out is None else grad_out)
    return [x.grad for x in tensors]


def bounds(q: torch.Tensor, bias: torch.Tensor, family: str = "normal") -> dict[str, float]:
    """Those of the kernels, with what an output that is compensated but for P's rounding adds to few rows."""
    batch, rows, heads, crop, dim = q.shape
    shape = TriangleAttentionShape(crop, heads, dim, rows, batch, str(q.dtype)[6:])
    found = {name: 1.1 * bound for name, bound in gradient_bounds(shape, family).items()}
    plane = 8e-4 if q.dtype == BF16 else 1e-4
    return {**found, "dbias": math.hypot(found["dbias"], plane, ROUNDED[bias.dtype] * (1 + 4 / math.sqrt(bias.numel())))}


def check(tensors, grads, mask=None, grad_out=None, family="normal", grad_lse=None, scale=None, slack=1.0) -> None:
    q, k, v, bias = (x.detach() for x in tensors)
    grad_out = torch.ones_like(q) if grad_out is None else grad_out
    ref = reference.attention_backward(grad_out, q, k, v, bias, mask, scale, grad_lse)
    allowed = bounds(q, bias, family)
    dead = {"dq": dead_queries(mask, q), "dk": dead_keys(mask, q), "dv": dead_keys(mask, q)}
    for name, x, grad, want in zip(NAMES, tensors, grads, ref, strict=True):
        if grad is None:
            assert not x.requires_grad
            continue
        assert grad.dtype == x.dtype and grad.shape == x.shape
        error = gradient_error(grad, want, dead.get(name))
        assert error <= slack * allowed[name], (name, error, allowed[name])


# What is right


@pytest.mark.parametrize("dtypes", ["bfloat16 bfloat16", "bfloat16 float32", "float16 float16", "float16 float32"])
@pytest.mark.parametrize("mask", ["none", "bool random50", "bool random99", "bool rows", "additive rows", "additive soft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients(kernels, dtypes: str, mask: str, family: str) -> None:
    dtype, bias_dtype = dtypes.split()
    kind, _, pattern = mask.partition(" ")
    x = small(family, dtype=dtype, bias_dtype=bias_dtype, mask=kind, pattern=pattern or None, crop=70, batch=2)
    tensors = leaves(x)
    grads = step(tensors, x.mask, x.grad_out)
    assert kernels.calls == ["stats", "key", "query"] and kernels.forward.calls == 1
    # With one key in a hundred, the few of 70 that are left do not average their roundings.
    check(tensors, grads, x.mask, x.grad_out, family, slack=1.3 if mask == "bool random99" else 1.0)
    assert kernels.forward.last["residual"] is not None and kernels.forward.last["lse_low"] is not None
    assert kernels.last["query"]["dbias"].dtype == torch.float32


@pytest.mark.parametrize("dim", [1, 5, 8, 12, 24, 40, 127, 128])
def test_head_dims(kernels, dim: int) -> None:
    x = small(head_dim=dim, mask="bool")
    tensors = leaves(x)
    grads = step(tensors, x.mask, x.grad_out)
    check(tensors, grads, x.mask, x.grad_out)
    assert kernels.last["key"]["dk"].shape[-1] == -(-dim // 8) * 8
    assert all(grad.stride() == t.stride() for grad, t in zip(grads, tensors, strict=True))


@pytest.mark.parametrize("crop", [1, 2, 8, 255, 256, 257])
def test_crops(kernels, crop: int) -> None:
    x = small(crop=crop, rows=2, heads=1, head_dim=8, mask="bool")
    tensors = leaves(x)
    check(tensors, step(tensors, x.mask, x.grad_out), x.mask, x.grad_out)


def test_gradients_are_written_where_they_are_returned(kernels) -> None:
    tensors = leaves(small())
    grads = torch.autograd.grad(triangle_attention(*tensors).sum(), tensors)
    assert kernels.last["query"]["dq"].data_ptr() == grads[0].data_ptr()
    assert [kernels.last["key"][name].data_ptr() for name in ("dk", "dv")] == [grad.data_ptr() for grad in grads[1:3]]
    assert all(grad.stride() == x.stride() for grad, x in zip(grads, tensors, strict=True))
    assert [kernels.last["key"][name].data_ptr() for name in "qkv"] == [x.data_ptr() for x in tensors[:3]]


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "rows_innermost": lambda x: x.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4),
    "sliced_rows": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "packed_qkv": lambda x: torch.cat([x, x, x], -1)[..., : x.shape[-1]],
    "strided_head_dim": lambda x: torch.stack([x, x], -1)[..., 0],
    "head_dim_outside": lambda x: x.permute(4, 0, 1, 2, 3).contiguous().permute(1, 2, 3, 4, 0),
    "odd_row_pitch": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
    "unaligned_base": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "expanded_batch": lambda x: x[:, :1].expand_as(x),
}
BIASES = {
    "row_axis": lambda b: b,
    "no_row_axis": lambda b: b[:, 0],
    "heads_innermost": lambda b: b.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3),
    "heads_innermost_transposed": lambda b: b.permute(0, 1, 4, 3, 2).contiguous().permute(0, 1, 4, 3, 2),
    "sliced": lambda b: torch.nn.functional.pad(b, (0, 8))[..., : b.shape[-1]],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("per_row", [False, True])
def test_layouts_of_q_k_v(kernels, name: str, batch: int, per_row: bool) -> None:
    x = small(batch=batch, mask="bool")
    bias = torch.randn(batch, 5, 3, 21, 21, dtype=BF16) if per_row else x.bias
    tensors = [LAYOUTS[name](t).detach().requires_grad_() for t in (x.q, x.k, x.v)] + [bias.requires_grad_()]
    grads = torch.autograd.grad(triangle_attention(*tensors, x.mask), tensors, x.grad_out)
    check(tensors, grads, x.mask, x.grad_out)
    assert all(grad.stride() == torch.empty_like(t).stride() for grad, t in zip(grads, tensors, strict=True))


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
def test_layouts_of_the_bias(kernels, name: str, bias_dtype: str) -> None:
    x = small(bias_dtype=bias_dtype, batch=2)
    tensors = [*leaves(x)[:3], BIASES[name](x.bias).detach().requires_grad_()]
    grads = torch.autograd.grad(triangle_attention(*tensors), tensors, x.grad_out)
    check(tensors, grads, grad_out=x.grad_out)
    if name != "sliced":
        assert grads[3].stride() == tensors[3].stride()


def test_the_bias_of_the_other_16_bit_type(kernels) -> None:
    x = small()
    tensors = [*leaves(x)[:3], x.bias.half().requires_grad_()]
    check(tensors, step(tensors, grad_out=x.grad_out), grad_out=x.grad_out)


def test_an_fp32_bias_gradient_is_never_rounded_to_16_bits(kernels) -> None:
    kernels.slabs = 1
    x = small(bias_dtype="float32")
    grad = step(leaves(x), grad_out=x.grad_out)[3]
    assert torch.equal(grad[:, 0], kernels.last["query"]["dbias"][0, ..., :21])
    assert not torch.equal(grad, grad.bfloat16().float())


GRADS = {
    "expanded_head_dim": lambda g: g[..., :1].expand_as(g),
    "expanded_everything": lambda g: g[:1, :1, :1, :1, :1].expand_as(g),
    "expanded_rows": lambda g: g[:, :1].expand_as(g),
    "contiguous": lambda g: g.contiguous(),
    "strided": lambda g: torch.stack([g, g], -1)[..., 0],
    "unaligned": lambda g: torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape),
}


@pytest.mark.parametrize("name", GRADS)
@pytest.mark.parametrize("batch, per_row", [(1, False), (2, True)])
def test_any_gradient_of_the_output(kernels, name: str, batch: int, per_row: bool) -> None:
    x = small(batch=batch)
    bias = torch.randn(batch, 5, 3, 21, 21, dtype=BF16) if per_row else x.bias
    tensors, given = [*leaves(x)[:3], bias.requires_grad_()], GRADS[name](x.grad_out)
    # Where all channels of a gradient are equal, their roundings do not average.
    check(tensors, step(tensors, grad_out=given), grad_out=given, slack=1.2 if name.startswith("expanded") else 1.0)
    if name == "contiguous":
        assert kernels.last["stats"]["dout"].data_ptr() == given.data_ptr(), "legal strides are read in place"
    assert kernels.last["stats"]["dout"] is kernels.last["key"]["dout"], "copied at most once"


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_gradient_through_the_lse(kernels, both: bool, mask: str) -> None:
    x = small(mask=mask)
    tensors = leaves(x)
    out, lse = triangle_attention(*tensors, x.mask, return_lse=True)
    weights = torch.randn_like(lse)
    loss = (lse * weights).sum()
    (loss + (out * x.grad_out).sum() if both else loss).backward()
    assert kernels.calls == ["stats", "key", "query"]
    check(tensors, [t.grad for t in tensors], x.mask, x.grad_out if both else torch.zeros_like(x.q), grad_lse=weights)


def test_an_unused_lse_costs_nothing(kernels, monkeypatch) -> None:
    monkeypatch.setattr(layout_backward, "subtract_from_delta", lambda *arguments: pytest.fail("there is no such gradient"))
    triangle_attention(*leaves(small()), return_lse=True)[0].sum().backward()
    assert kernels.calls == ["stats", "key", "query"]


@pytest.mark.parametrize("scale", [0.0, -0.7, 2])
def test_any_scale(kernels, scale) -> None:
    x = small()
    tensors = leaves(x)
    grads = step(tensors, grad_out=x.grad_out, scale=scale)
    check(tensors, grads, grad_out=x.grad_out, scale=scale)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_keys_have_exactly_zero_gradients(kernels, kind: str) -> None:
    x = small(mask=kind, pattern="rows", value=-math.inf)
    tensors = leaves(x)
    grads = step(tensors, x.mask, x.grad_out)
    for grad in grads[:3]:
        assert bool((grad[:, ::3] == 0).all()) and bool((grad[:, 1] != 0).any())
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    everything = torch.zeros(1, 5, 1, 1, 21, dtype=torch.bool)
    tensors = leaves(x)
    assert all(bool((grad == 0).all()) for grad in step(tensors, everything, x.grad_out))


@pytest.mark.parametrize("compensated", [True, False])
def test_rows_full_of_large_negatives_stay_a_softmax(kernels, compensated: bool) -> None:
    """float32 holds -1e9 + ln N as -1e9, so probabilities rebuilt from the LSE alone would be N times too large."""
    x = small(mask="additive", pattern="rows", value=-1e9)
    tensors = leaves(x)
    with tpf_jit.residual_compensation(compensated):
        grads = step(tensors, x.mask, x.grad_out)
    assert bool((x.mask[:, 0] == -1e9).all()) and bool((grads[2][:, 0] != 0).all())
    check(tensors, grads, x.mask, x.grad_out)
    q, k, v, bias = (t[:, :1] for t in (x.q, x.k, x.v, x.bias))
    want = reference.attention_backward(x.grad_out[:, :1], q, k, v, bias, x.mask[:, :1])
    for name, grad, ref in zip(NAMES[:3], grads, want, strict=False):
        assert gradient_error(grad[:, :1], ref) <= 4e-3, name


# What the bias is


@pytest.mark.parametrize("batch", [1, 2])
def test_a_bias_that_differs_by_row(kernels, batch: int) -> None:
    x = small(batch=batch, mask="bool")
    tensors = [*leaves(x)[:3], torch.randn(batch, 5, 3, 21, 21, dtype=BF16, requires_grad=True)]
    check(tensors, step(tensors, x.mask, x.grad_out), x.mask, x.grad_out)
    assert kernels.last["query"]["q"].shape[:2] == (batch * 5, 1) and kernels.last["query"]["slabs"] == 1


def test_a_bias_that_all_batch_elements_share(kernels) -> None:
    x = small(batch=2, mask="bool")
    tensors = [*leaves(x)[:3], x.bias[:1].detach().requires_grad_()]
    check(tensors, step(tensors, x.mask, x.grad_out), x.mask, x.grad_out)
    assert kernels.last["query"]["q"].shape[:2] == (1, 10)


@pytest.mark.parametrize("sizes", [(1, 5), (2, 1), (2, 5)], ids=str)
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
def test_an_expanded_bias(kernels, sizes: tuple[int, int], bias_dtype: str) -> None:
    x = small(batch=2, bias_dtype=bias_dtype)
    bias = x.bias[: 1 if sizes[0] == 2 else 2].detach().requires_grad_()
    expanded = bias.expand(2, sizes[1], -1, -1, -1)
    seen = []
    expanded.register_hook(lambda grad: seen.append(grad.stride()[:2]))
    triangle_attention(x.q, x.k, x.v, expanded).backward(x.grad_out)
    ref = reference.attention_backward(x.grad_out, x.q, x.k, x.v, bias.detach())[3]
    assert gradient_error(bias.grad, ref) <= 2 * bounds(x.q, bias)["dbias"]
    assert seen[0][1] == 0 or sizes[1] == 1, "no gradient of size I * H * N * N exists"
    assert seen[0][0] == 0 or sizes[0] == 1


@pytest.mark.parametrize("case", ["expanded_rows", "expanded_batch", "shared_per_row"])
def test_what_the_bias_kernels_cannot_sum_is_recomputed(kernels, case: str, monkeypatch) -> None:
    x = small(batch=2)
    bias = {
        "expanded_rows": x.bias.expand(2, 5, 3, 21, 21),
        "expanded_batch": x.bias[:1].expand(2, 1, 3, 21, 21),
        "shared_per_row": torch.randn(1, 5, 3, 21, 21, dtype=BF16),
    }[case]
    monkeypatch.undo()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "unsupported", lambda shape, device: None)
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.setattr(routing, "find_kernel", kernels.find)
    saved = ops._forward_op(x.q, x.k, x.v, bias, None, 0.25, True)
    out, lse, residual, low = saved
    arguments = (x.grad_out, None, x.q, x.k, x.v, bias, None, out, residual, lse, low, 0.25)
    with pytest.warns(FallbackWarning, match="^the backward of triangle_attention takes the PyTorch path: .*bias"):
        grads = ops._backward_op(*arguments, [True] * 4)
    ref = reference.attention_backward(x.grad_out, x.q, x.k, x.v, bias, None, 0.25)
    assert grads[3].shape == bias.shape and gradient_error(grads[3], ref[3]) <= 1.85e-3
    assert kernels.calls == []
    frozen = ops._backward_op(*arguments, [True, True, True, False])
    assert kernels.calls == ["stats", "key", "query"], "a frozen bias may repeat itself"
    assert all(gradient_error(grad, want) <= 3e-3 for grad, want in zip(frozen[:3], ref, strict=False))


# What is computed


@pytest.mark.parametrize("needed", range(1, 16), ids=lambda bits: f"{bits:04b}")
def test_only_needed_gradients_are_computed(kernels, needed: int) -> None:
    x = small(mask="bool")
    need_q, need_k, need_v, need_bias = (bool(needed >> position & 1) for position in range(4))
    tensors = leaves(x)
    for t, need in zip(tensors, (need_q, need_k, need_v, need_bias), strict=True):
        t.requires_grad_(need)
    grads = step(tensors, x.mask, x.grad_out)
    assert [grad is not None for grad in grads] == [need_q, need_k, need_v, need_bias]
    check(tensors, grads, x.mask, x.grad_out)
    expected = ["stats"] + ["key"] * (need_k or need_v) + ["query"] * (need_q or need_bias)
    assert kernels.calls == expected
    assert [family.rpartition("_")[2] for family, *_ in kernels.asked[1:]] == expected
    if "query" in expected:
        assert (kernels.last["query"]["dbias"] is not None) == need_bias
        assert kernels.asked[-1][2] == {"dbias": need_bias}


def test_without_need_nothing_is_saved(kernels) -> None:
    x = small()
    with torch.no_grad():
        triangle_attention(*leaves(x))
    assert kernels.forward.last["residual"] is None
    triangle_attention(x.q, x.k, x.v, x.bias)
    assert kernels.forward.last["residual"] is None and kernels.asked[-1][2] == {}


def test_the_switch_of_the_compensation(kernels) -> None:
    x = small()
    plain, without = leaves(x), leaves(x)
    step(plain, grad_out=x.grad_out)
    assert kernels.asked[1][2] == {"residual": True}
    with tpf_jit.residual_compensation(False):
        out = triangle_attention(*without)
    assert settings.compensate
    assert kernels.forward.last["residual"] is None and kernels.forward.last["lse_low"] is None
    out.backward(x.grad_out)
    assert kernels.last["stats"]["residual"] is None and kernels.last["stats"]["lse_low"] is None
    assert kernels.asked[5][2] == {"residual": False}
    ref = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias)
    for b, want in zip(without, ref, strict=True):
        assert gradient_error(b.grad, want) <= 8e-3
    assert not torch.equal(plain[0].grad, without[0].grad)
    before = tpf_jit.residual_compensation(False)
    assert not settings.compensate
    before.__exit__(None, None, None)
    assert settings.compensate


def test_compensation_makes_gradients_more_exact(kernels) -> None:
    x = small(bias_dtype="float32", crop=64, rows=12, head_dim=32)
    ref = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias)
    errors = []
    for enabled in (True, False):
        tensors = leaves(x)
        with tpf_jit.residual_compensation(enabled):
            grads = step(tensors, grad_out=x.grad_out)
        errors.append(gradient_error(grads[3], ref[3]))
    assert errors[0] < 0.75 * errors[1]


# The budget


def test_results_do_not_depend_on_the_budget(kernels, monkeypatch) -> None:
    x = small(crop=128, heads=3, rows=4, head_dim=8, batch=2)
    found, turns = [], []
    # Two slabs of 128 * 128 float32 are 0.125 MiB a head and batch element, six of which make 0.75 MiB.
    monkeypatch.setattr(settings, "workspace_bytes", lambda mib: mib * 2**16)
    for sixteenths in (1, 2, 3, 4, 6, 12, 256):
        kernels.turns.clear()
        found.append(step(leaves(x), grad_out=x.grad_out, workspace_mib=sixteenths))
        turns.append(list(kernels.turns))
    assert turns[0] == turns[1] == turns[2] == [(1, 1)] * 6, "at least one head is always taken"
    assert turns[3] == [(2, 1)] * 3 and turns[4] == [(2, 1)] * 3 and turns[5] == turns[6] == [(2, 3)]
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))


def test_turns_take_every_head_once_and_fit() -> None:
    for batch, heads, crop, slabs, budget in [(1, 4, 64, 3, 10**6), (5, 3, 33, 1, 10**4), (2, 8, 16, 2, 1), (7, 1, 8, 1, 700)]:
        seen = [(b, h) for bs, hs in layout_backward.turns(budget, slabs, batch, heads, crop)
                for b in range(batch)[bs] for h in range(heads)[hs]]  # fmt: skip
        assert sorted(seen) == [(b, h) for b in range(batch) for h in range(heads)]
        unit = slabs * crop * -(-crop // 4) * 4 * 4
        for bs, hs in layout_backward.turns(budget, slabs, batch, heads, crop):
            assert (bs.stop - bs.start) * (hs.stop - hs.start) <= max(1, budget // unit)


@pytest.mark.parametrize("slabs", [1, 2, 3, 5])
def test_slabs_are_summed_in_order(kernels, slabs: int) -> None:
    kernels.slabs = slabs
    x = small(bias_dtype="float32", rows=6)
    tensors = leaves(x)
    check(tensors, step(tensors, grad_out=x.grad_out), grad_out=x.grad_out)
    planes = torch.randn(slabs, 1, 2, 5, 8)
    total = planes[0, ..., :5].clone()
    for plane in planes[1:, ..., :5]:
        total += plane
    assert torch.equal(layout_backward.sum_planes(planes.clone()), total)


def test_the_budget_is_the_argument_or_the_environment(kernels, monkeypatch) -> None:
    assert settings.workspace_bytes(None) == 256 * 2**20 and settings.workspace_bytes(3) == 3 * 2**20
    monkeypatch.setenv(settings.WORKSPACE_VARIABLE, " 7 ")
    assert settings.workspace_bytes(None) == 7 * 2**20 and settings.workspace_bytes(3) == 3 * 2**20
    for wrong in ("0", "-1", "1.5", "much"):
        monkeypatch.setenv(settings.WORKSPACE_VARIABLE, wrong)
        with pytest.raises(InvalidInput, match="^TPF_JIT_WORKSPACE_MIB"):
            settings.workspace_bytes(None)
    for wrong in (0, -4, 2.5, True, "8"):
        with pytest.raises(InvalidInput, match="^workspace_mib"):
            triangle_attention(*leaves(small()), workspace_mib=wrong)
    assert kernels.forward.calls == 0


# What PyTorch does around it


def test_double_backward_says_so(kernels) -> None:
    tensors = leaves(small())
    (grad,) = torch.autograd.grad(triangle_attention(*tensors).float().square().sum(), tensors[:1], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(NotDifferentiable, match="differentiated twice"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kernels, reentrant: bool) -> None:
    x = small(mask="bool")
    plain, stored = leaves(x), leaves(x)
    step(plain, x.mask, x.grad_out)
    checkpoint(triangle_attention, *stored, x.mask, use_reentrant=reentrant).backward(x.grad_out)
    assert kernels.calls == ["stats", "key", "query"] * 2 and kernels.forward.calls == 3
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, stored, strict=True))


def test_autocast(kernels) -> None:
    x = small()
    tensors = [t.detach().float().requires_grad_() for t in (x.q, x.k, x.v, x.bias)]
    with torch.autocast("cpu", dtype=BF16):
        out = triangle_attention(*tensors)
    out.backward(x.grad_out)
    assert all(t.grad.dtype == torch.float32 for t in tensors)
    rounded = [x.q, x.k, x.v, x.bias.float()]
    ref = reference.attention_backward(x.grad_out, *rounded)
    allowed = bounds(x.q, x.bias.float())
    for name, t, want in zip(NAMES, tensors, ref, strict=True):
        assert gradient_error(t.grad, want) <= allowed[name], name


def test_a_graph_can_be_gone_through_twice(kernels) -> None:
    x = small()
    tensors = leaves(x)
    out = triangle_attention(*tensors)
    first = torch.autograd.grad(out, tensors, x.grad_out, retain_graph=True)
    again = torch.autograd.grad(out, tensors, x.grad_out)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


OPCHECKS = ["plain", "mask", "padded_head_dim", "fp32_bias", "per_row", "uncompensated", "no_bias_gradient"]


@pytest.mark.parametrize("case", OPCHECKS)
def test_opcheck(kernels, case: str) -> None:
    x = small(crop=8, heads=2, rows=3, head_dim=12 if case == "padded_head_dim" else 8, mask="bool" if case == "mask" else "none",
              bias_dtype="float32" if case == "fp32_bias" else None)  # fmt: skip
    bias = torch.randn(1, 3, 2, 8, 8, dtype=BF16) if case == "per_row" else x.bias
    tensors = [*leaves(x)[:3], bias.detach().requires_grad_(case != "no_bias_gradient")]
    torch.library.opcheck(ops._forward_op, (*tensors, x.mask, 0.3, False, case != "uncompensated", 1))
    out, lse, residual, low = ops._forward_op(x.q, x.k, x.v, bias, x.mask, 0.3, True)
    kept = (out, None, lse, None) if case == "uncompensated" else (out, residual, lse, low)
    needed = [True, case != "mask", True, case != "no_bias_gradient"]
    arguments = (x.grad_out, torch.randn_like(lse), x.q, x.k, x.v, bias, x.mask, *kept, 0.3, needed)
    torch.library.opcheck(ops._backward_op, arguments)
    torch.library.opcheck(ops._backward_op, (*arguments, 1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_training_step_compiles_whole(kernels, dynamic: bool) -> None:
    def loss(q, k, v, bias, mask):
        out, lse = triangle_attention(q, k, v, bias, mask, return_lse=True)
        gated = out.transpose(-2, -3).flatten(-2) * 1.5
        return gated.float().square().sum() + lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for crop, masked in ((8, False), (9, True), (24, True)):
        x = small(rows=3, crop=crop, heads=2, head_dim=8, mask="bool" if masked else "none", pattern="random10")
        plain, traced = leaves(x), leaves(x)
        loss(*plain, x.mask).backward()
        kernels.calls.clear()
        compiled(*traced, x.mask).backward()
        assert kernels.calls == ["stats", "key", "query"]
        assert kernels.last["stats"]["residual"] is not None
        for a, b in zip(plain, traced, strict=True):
            assert torch.equal(a.grad, b.grad) and a.grad.stride() == b.grad.stride()


def test_a_compiled_step_notices_the_switch(kernels) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: triangle_attention(*t).float().square().sum(), fullgraph=True, backend="aot_eager")
    x = small()
    for enabled in (True, False, True):
        with tpf_jit.residual_compensation(enabled):
            compiled(*leaves(x)).backward()
        assert (kernels.last["stats"]["residual"] is not None) == enabled


# Where kernels are missing


@pytest.mark.parametrize("missing", [routing.BACKWARD_STATS, routing.BACKWARD_KEY, routing.BACKWARD_QUERY])
def test_a_missing_backward_kernel_does_not_stop_training(kernels, missing: str, monkeypatch) -> None:
    kernels.missing = {missing}
    x = small(mask="bool")
    recomputed = []
    monkeypatch.undo()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "unsupported", lambda shape, device: None)
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.setattr(routing, "find_kernel", kernels.find)
    original = fallback.backward
    monkeypatch.setattr(fallback, "backward", lambda *arguments: recomputed.append(1) or original(*arguments))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tensors = leaves(x)
            check(tensors, step(tensors, x.mask, x.grad_out), x.mask, x.grad_out)
    assert [str(w.message) for w in caught if w.category is FallbackWarning] == [
        f"the backward of triangle_attention takes the PyTorch path: no kernel of {missing}"
    ]
    assert recomputed == [1, 1] and kernels.calls == [] and kernels.forward.calls == 2


def test_a_missing_forward_kernel_still_feeds_the_backward(kernels) -> None:
    kernels.missing = {routing.FORWARD_TRAINING}
    x = small(mask="additive", pattern="rows", value=-1e9)
    tensors = leaves(x)
    with pytest.warns(FallbackWarning, match="no kernel of"):
        grads = step(tensors, x.mask, x.grad_out)
    assert kernels.calls == ["stats", "key", "query"] and kernels.forward.calls == 0
    check(tensors, grads, x.mask, x.grad_out)


def test_a_cold_backward_kernel_in_capture_raises_before_anything_happens(kernels, monkeypatch) -> None:
    tensors = leaves(small())
    out = triangle_attention(*tensors)

    def cold(family, *arguments):
        if family == routing.BACKWARD_QUERY:
            raise ColdKernelInCapture("call tpf_jit.warmup first")
        return kernels.find(family, *arguments)

    monkeypatch.setattr(routing, "find_kernel", cold)
    with pytest.raises(ColdKernelInCapture, match="warmup"):
        out.sum().backward()
    assert kernels.calls == []


def test_registered_templates_give_the_launches(monkeypatch) -> None:
    """The look-up itself, with the registry's templates and nothing compiled."""
    monkeypatch.setattr(routing.kernels, "function_of", lambda spec, store=None: spec)
    shape = TriangleAttentionShape(100, rows=64, bias_dtype="float32", mask="bool")
    found = launch.find_backward(shape, True, [True, False, True, True], torch.device("cpu"))
    names = [f"triangle_attention_backward_{name}_sm90" for name in ("stats", "key", "query")]
    assert [x.function.template for x in found] == names
    assert found.query.slabs >= 1 and dict(found.query.function.variant)["dbias"] is True
    assert dict(found.stats.function.variant)["residual"] is True
    frozen = launch.find_backward(shape, False, [True, False, False, False], torch.device("cpu"))
    assert frozen.key is None and dict(frozen.query.function.variant)["dbias"] is False
    assert dict(frozen.stats.function.variant)["residual"] is False


def test_the_pytorch_path_saves_nothing_more(monkeypatch) -> None:
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware(None, "there is no GPU", 0))
    tensors = leaves(small())
    with pytest.warns(FallbackWarning, match="there is no GPU"):
        out = triangle_attention(*tensors)
    kept = [x for x in out.grad_fn.saved_tensors if x is not None]
    assert len(kept) == 4
    out.sum().backward()
    check(tensors, [x.grad for x in tensors])


def test_the_reference_is_differentiable_in_float64() -> None:
    """gradcheck of the formulas that everything here is compared with, also through the LSE."""
    torch.manual_seed(0)

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, bias):
            ctx.save_for_backward(q, k, v, bias)
            return reference.attention(q, k, v, bias, MASK)

        @staticmethod
        def backward(ctx, grad_out, grad_lse):
            return reference.attention_backward(grad_out, *ctx.saved_tensors, MASK, grad_lse=grad_lse)

    tensors = [torch.randn(1, 2, 1, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    tensors.append(torch.randn(1, 1, 1, 4, 4, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(Reference.apply, tensors)


MASK = torch.tensor([True, True, False, True]).view(1, 1, 1, 1, 4)
