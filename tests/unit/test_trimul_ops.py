"""The triangle multiplicative update as an operator: right against float64, inside its memory budget, in all PyTorch's modes."""

from __future__ import annotations

import ctypes
import math
import re
import types
import warnings
import weakref
from functools import partial

import multiplication_emulation
import pytest
import torch
from multiplication_emulation import EmulatedKernels, NoPlans
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tpf_jit
from tpf_jit.errors import FallbackWarning, InvalidInput, NotDifferentiable
from tpf_jit.ops import multiplication_fallback as fallback
from tpf_jit.ops import multiplication_plans, multiplication_routing, routing
from tpf_jit.ops import triangle_multiplication as ops
from tpf_jit.ops.multiplication_fallback import Rule
from tpf_jit.ops.triangle_multiplication import triangle_multiplication
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_attention.workload import relative_rms
from tpf_jit.templates.triangle_multiplication import reference
from tpf_jit.templates.triangle_multiplication.inputs import FAMILIES, Inputs, make_inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights

BF16 = torch.bfloat16
DIRECTIONS = ("outgoing", "incoming")
# One rounding of the result and, for bf16, one of x and of its gradient; room for the few elements of small tensors.
OUT = {torch.bfloat16: 2.6e-3, torch.float16: 2.4e-4, torch.float32: 3e-6, torch.float64: 1e-13}
GRADIENT = {torch.bfloat16: 4.5e-3, torch.float16: 3e-4, torch.float32: 5e-6, torch.float64: 1e-12}
ALL = [True] * 13


def call(
    crop=9, channels=32, hidden=64, direction="outgoing", batch=1, dtype=BF16, weights=torch.float32, mask="none", biases=False,
    family="normal",
) -> Inputs:  # fmt: skip
    """A call's tensors, z and its gradient rounded to bf16 in any dtype."""
    shape = TriangleMultiplicationShape(crop, channels, hidden, direction, batch, mask=mask)
    x = make_inputs(shape, projection_biases=biases, with_grad_out=True, family=family)
    cast = Weights(*(None if w is None else w.to(weights) for w in x.weights))
    return Inputs(x.z.to(dtype), x.mask, cast, x.grad_out.to(dtype))


def leaves(x: Inputs) -> Inputs:
    weights = Weights(*(None if w is None else w.detach().clone().requires_grad_() for w in x.weights))
    return Inputs(x.z.detach().clone().requires_grad_(), x.mask, weights, x.grad_out)


def run(x: Inputs, direction="outgoing", **options) -> torch.Tensor:
    return triangle_multiplication(x.z, direction, x.mask, *x.weights, **options)


def gradients(x: Inputs) -> dict[str, torch.Tensor]:
    return {"z": x.z.grad} | {name: w.grad for name, w in x.weights._asdict().items() if w is not None}


def check(x: Inputs, direction: str, bounds: tuple[float, float], **options) -> None:
    """Output and all gradients of a call against float64."""
    x = leaves(x)
    out = run(x, direction, **options)
    assert out.shape == x.z.shape and out.is_contiguous()
    with torch.no_grad():
        ref = reference.multiplication(x.z, direction, x.mask, x.weights)
        dz, dweights = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, x.weights)
    assert relative_rms(out.detach(), ref) <= bounds[0]
    out.backward(x.grad_out.to(out.dtype))
    for name, want in ({"z": dz} | dweights._asdict()).items():
        operand = x.z if name == "z" else getattr(x.weights, name)
        if operand is None:
            continue
        assert operand.grad.dtype == operand.dtype and operand.grad.stride() == operand.stride()
        assert relative_rms(operand.grad, want) <= bounds[1], name


# Right


@pytest.mark.parametrize("dtype", list(OUT), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("mask", "biases"), [("none", False), ("bool", True), ("float", False)])
@pytest.mark.parametrize("recompute", [False, True])
def test_errors_are_those_of_few_roundings(dtype, direction: str, mask: str, biases: bool, recompute: bool) -> None:
    weights = dtype if dtype in (torch.float64, torch.bfloat16) and biases else torch.float32
    if dtype == torch.float64:
        weights = torch.float64
    x = call(17, direction=direction, batch=2, dtype=dtype, weights=weights, mask=mask, biases=biases)
    check(x, direction, (OUT[dtype], GRADIENT[dtype]), recompute=recompute)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    x = call(33, mask="float", family=family)
    check(x, "incoming", (2.6e-3, 1.5e-2 if family == "trained_like" else 4.5e-3))


@pytest.mark.parametrize("size", [(1, 32, 32), (2, 1, 1), (5, 7, 3), (4, 512, 32), (3, 32, 512)], ids=str)
def test_any_size(size: tuple[int, int, int]) -> None:
    """Kernels are meant for widths of 32 to 512 in steps of 32; the PyTorch path takes all."""
    crop, channels, hidden = size
    torch.manual_seed(0)
    z, grad_out = (torch.randn(2, crop, crop, channels, dtype=torch.float64) for _ in range(2))
    sizes = ((channels,), (channels,), (2 * hidden, channels), None, (2 * hidden, channels), None,
             (hidden,), (hidden,), (channels, hidden), None, (channels, channels), None)  # fmt: skip
    weights = Weights(*(None if size is None else torch.randn(size, dtype=torch.float64) for size in sizes))
    check(Inputs(z, None, weights, grad_out), "outgoing", (1e-11, 1e-8))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradcheck(direction: str, recompute: bool) -> None:
    torch.manual_seed(1)
    z, residual = (torch.randn(1, 3, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sizes = ((3,), (3,), (4, 3), (4,), (4, 3), (4,), (2,), (2,), (3, 2), (3,), (3, 3), (3,))
    weights = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    mask = torch.rand(1, 3, 3) > 0.2

    def update(z, residual, *weights):
        return triangle_multiplication(z, direction, mask, *weights, eps=1e-2, residual=residual, recompute=recompute)

    assert torch.autograd.gradcheck(update, (z, residual, *weights))


def test_norms_without_weights() -> None:
    x = call(dtype=torch.float64, weights=torch.float64)
    absent = dict.fromkeys(("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias"))
    check(Inputs(x.z, None, x.weights._replace(**absent), x.grad_out), "outgoing", (1e-13, 1e-12))


def test_a_masked_pair_reaches_nothing_through_the_contraction() -> None:
    x = call(9, mask="float", dtype=torch.float32)
    x.mask[:, :, 4] = 0
    x.mask[:, 4] = 0
    other = x.z.clone()
    other[:, 4] += 1.0
    keep = torch.arange(9) != 4
    assert torch.equal(run(x)[:, keep], run(Inputs(other, x.mask, x.weights, None))[:, keep])


MASKS = [(2, 9, 9), (1, 1, 2, 9, 9), (1, 9, 9), (9, 9), (2, 1, 9), (2, 9, 1), (9,), (1,), ()]


@pytest.mark.parametrize("size", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, BF16, torch.int64], ids=str)
def test_masks_broadcast(size: tuple, dtype) -> None:
    x = call(batch=2)
    mask = (torch.rand(size) > 0.4).to(dtype) if dtype != torch.float32 else torch.rand(size)
    full = mask.reshape(mask.shape[-3:]).expand(2, 9, 9)
    out = triangle_multiplication(x.z, "incoming", mask, *x.weights)
    assert torch.equal(out, triangle_multiplication(x.z, "incoming", full.contiguous(), *x.weights))
    assert relative_rms(out, reference.multiplication(x.z, "incoming", full, x.weights)) <= OUT[BF16]


# Chunks and memory


@pytest.mark.parametrize("budget", [1, 4000, 15_000])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_chunks_do_not_change_the_result(budget: int, direction: str, monkeypatch) -> None:
    x = call(6, hidden=32, dtype=torch.float64, weights=torch.float64, mask="float", biases=True)
    monkeypatch.setattr(fallback, "CPU_BUDGET_BYTES", budget)
    for recompute in (False, True):
        check(x, direction, (1e-13, 1e-12), recompute=recompute)


class LiveBytes(TorchDispatchMode):
    """Most bytes that were alive at once in tensors made under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, list[weakref.ref]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)}
        for x in result if isinstance(result, (tuple, list)) else (result,):
            storage = x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None
            if storage is not None and (storage not in given or storage in self._made):
                self._made.setdefault(storage, []).append(weakref.ref(x))
        live = {key: alive for key, made in self._made.items() if (alive := [r for r in made if r() is not None])}
        self._made = live
        self.peak = max(self.peak, sum(made[0]().untyped_storage().nbytes() for made in live.values()))
        return result


def peak_of(make) -> int:
    with LiveBytes() as seen:
        make()
    return seen.peak


def test_live_bytes_counts_what_it_claims() -> None:
    given = torch.ones(4000)

    def twice() -> None:
        x = torch.zeros(1000)
        del x
        y, z = torch.zeros(1000), torch.zeros(500)
        y.view(10, 100).add_(z.sum()).add_(given[:100])

    assert 6000 <= peak_of(twice) <= 6100


def test_memory_of_the_forward(monkeypatch) -> None:
    """x and the output, and what two budgets allow: one for channels, one for rows inside them."""
    x = call(96, 64, 64)
    budget = 96 * 96 * 64 * 4 // 4
    monkeypatch.setattr(fallback, "CPU_BUDGET_BYTES", budget)
    pair, weights = x.z.numel() * 2, 3 * sum(w.numel() * 4 for w in x.weights if w is not None)
    arguments = (x.z, None, x.weights, x.z, Rule("outgoing", 1e-5, BF16), False)
    assert 2 * pair <= peak_of(lambda: fallback.forward(*arguments)) <= 2 * pair + 2 * budget + weights
    assert pair <= peak_of(lambda: fallback.forward(*arguments, out=x.z)) <= pair + 2 * budget + weights, "in place"


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_the_backward(recompute: bool, monkeypatch) -> None:
    """dz, the gradient of x (which takes the place of x where that is recomputed), that of LN(z) in float32, and two budgets."""
    x = call(96, 64, 64)
    rule = Rule("outgoing", 1e-5, BF16)
    budget = 96 * 96 * 64 * 4 // 4
    monkeypatch.setattr(fallback, "CPU_BUDGET_BYTES", budget)
    _, kept = fallback.forward(x.z, None, x.weights, None, rule, True)
    pair, weights = x.z.numel() * 2, 8 * sum(w.numel() * 4 for w in x.weights if w is not None)
    arguments = (x.grad_out, x.z, None, x.weights, None if recompute else kept, rule, ALL)
    assert 4 * pair <= peak_of(lambda: fallback.backward(*arguments)) <= 4 * pair + 2 * budget + weights


def test_what_is_saved_for_the_backward() -> None:
    for dtype, stored in ((BF16, BF16), (torch.float16, torch.float32), (torch.float64, torch.float64)):
        for recompute in (False, True):
            x, saved = leaves(call(dtype=dtype, mask="bool")), []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                run(x, recompute=recompute)
            given = {t.data_ptr() for t in (x.z, x.mask, *x.weights) if t is not None}
            extra = [t for t in saved if t.data_ptr() not in given]
            assert [(t.shape, t.dtype) for t in extra] == ([] if recompute else [((1, 64, 9, 9), stored)])


@pytest.mark.parametrize("index", range(13))
def test_only_needed_gradients_are_computed(index: int) -> None:
    x = call(biases=True, mask="bool")
    rule = Rule("incoming", 1e-5, BF16)
    everything = fallback.backward(x.grad_out, x.z, x.mask, x.weights, None, rule, ALL)
    for needed in ([i == index for i in range(13)], [i != index for i in range(13)]):
        found = fallback.backward(x.grad_out, x.z, x.mask, x.weights, None, rule, needed)
        for need, got, want in zip(needed, found, everything, strict=True):
            assert torch.equal(got, want) if need else got.numel() == 0


def test_frozen_inputs_get_no_gradient() -> None:
    x = leaves(call())
    x.z.requires_grad_(False)
    x.weights.p_in_weight.requires_grad_(False)
    run(x).sum().backward()
    missing = {name for name, grad in gradients(x).items() if grad is None}
    assert missing == {"z", "p_in_weight"}


def test_gradients_of_every_parameter_are_there() -> None:
    x = leaves(call(biases=True))
    run(x).backward(x.grad_out)
    assert all(bool(grad.any()) and bool(torch.isfinite(grad).all()) for grad in gradients(x).values())


def test_equal_calls_give_equal_bits() -> None:
    first, again = leaves(call(33, mask="bool")), leaves(call(33, mask="bool"))
    a, b = run(first), run(again, recompute=True)
    a.backward(first.grad_out)
    b.backward(again.grad_out)
    assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(gradients(first).values(), gradients(again).values(), strict=True))


# Ranks and layouts


@pytest.mark.parametrize("masked", [False, True])
def test_other_ranks(masked: bool) -> None:
    x = call(batch=6, mask="bool" if masked else "none")
    expected = run(x)
    mask = x.mask[0] if masked else None
    single = triangle_multiplication(x.z[0], "outgoing", mask, *x.weights)
    if masked:
        assert torch.equal(single, triangle_multiplication(x.z[0], "outgoing", x.mask[:1], *x.weights)), "with a leading 1"
    assert single.shape == (9, 9, 32) and torch.equal(single, expected[0])
    six = x.z.unflatten(0, (2, 3))
    several = triangle_multiplication(six, "outgoing", x.mask.unflatten(0, (2, 3)) if masked else None, *x.weights, residual=six)
    assert torch.equal(several, run(x, residual=x.z).unflatten(0, (2, 3)))
    if masked:
        part = triangle_multiplication(six, "outgoing", x.mask[:3].unsqueeze(0), *x.weights)
        full = x.mask[:3].unsqueeze(0).expand(2, 3, 9, 9).contiguous()
        assert torch.equal(part, triangle_multiplication(six, "outgoing", full, *x.weights))


LAYOUTS = {
    "transposed": lambda z: z.transpose(1, 2).contiguous().transpose(1, 2),
    "channels_outside": lambda z: z.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "sliced": lambda z: torch.cat([z, z], 1)[:, : z.shape[1]],
    "expanded": lambda z: z[:, :1].expand_as(z),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_z(name: str) -> None:
    x = call(batch=2)
    arranged = LAYOUTS[name](x.z)
    plain, strided = leaves(Inputs(arranged.contiguous(), None, x.weights, None)), leaves(x)
    z = LAYOUTS[name](strided.z)
    out = triangle_multiplication(z, "incoming", None, *strided.weights)
    assert out.is_contiguous() and torch.equal(out, run(plain, "incoming"))
    out.backward(x.grad_out)
    run(plain, "incoming").backward(x.grad_out)
    assert torch.equal(strided.weights.g_in_weight.grad, plain.weights.g_in_weight.grad)
    assert strided.z.grad.shape == x.z.shape


def test_strided_weights() -> None:
    x = leaves(call(hidden=32))
    weights = x.weights._replace(p_out_weight=x.weights.p_out_weight.detach().T.clone().requires_grad_())
    out = triangle_multiplication(x.z, "outgoing", None, *weights._replace(p_out_weight=weights.p_out_weight.T))
    assert torch.equal(out, run(x))
    out.sum().backward()
    run(x).sum().backward()
    torch.testing.assert_close(weights.p_out_weight.grad.T, x.weights.p_out_weight.grad)


# Residual and in place


def test_the_residual_is_added_before_the_rounding() -> None:
    x = call()
    fused = run(x, residual=x.z)
    ref = reference.multiplication(x.z, "outgoing", None, x.weights, residual=x.z)
    assert fused.dtype == BF16 and relative_rms(fused, ref) < relative_rms(run(x) + x.z, ref)
    assert run(x, residual=x.z.float()).dtype == torch.float32


def test_gradients_of_a_residual() -> None:
    x = leaves(call())
    residual = torch.randn(x.z.shape, requires_grad=True)
    run(x, residual=residual).backward(x.grad_out.float())
    assert torch.equal(residual.grad, x.grad_out.float())
    plain, both = leaves(call()), leaves(call())
    run(plain).backward(x.grad_out)
    run(both, residual=both.z).backward(x.grad_out)
    torch.testing.assert_close(both.z.grad, plain.z.grad + x.grad_out, rtol=1e-2, atol=1e-2)
    assert torch.equal(both.weights.p_in_weight.grad, plain.weights.p_in_weight.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("budget", [1, 2**24])
def test_in_place(mode, rank: int, budget: int, monkeypatch) -> None:
    monkeypatch.setattr(fallback, "CPU_BUDGET_BYTES", budget)
    x = call(batch=1 if rank == 3 else 2)
    z = x.z.squeeze(0) if rank == 3 else x.z if rank == 4 else x.z.unflatten(0, (2, 1))
    for added in (False, True):
        expected = triangle_multiplication(z, "incoming", None, *x.weights, residual=z if added else None)
        with mode():
            own = z.clone()
            result = triangle_multiplication(own, "incoming", None, *x.weights, residual=own if added else None, inplace=True)
        assert result is own and torch.equal(result, expected)


def test_in_place_on_a_strided_z() -> None:
    x = call(batch=2)
    room = torch.zeros(2, 18, 9, 32, dtype=BF16)
    room[:, ::2] = x.z
    with torch.no_grad():
        triangle_multiplication(room[:, ::2], "outgoing", None, *x.weights, inplace=True)
    assert torch.equal(room[:, ::2], run(x)) and not bool(room[:, 1::2].any())


def test_in_place_is_noticed_by_autograd() -> None:
    """A tensor saved for some other backward must not change unnoticed."""
    x = call()
    z = x.z.clone()
    factor = torch.ones_like(z, requires_grad=True)
    product = (factor * z).sum()
    with torch.no_grad():
        run(Inputs(z, None, x.weights, None), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def in_place_cases() -> dict:
    x = leaves(call(batch=2))
    plain = call(batch=2)
    return {
        "gradients of z": (x.z, x.weights, torch.enable_grad()),
        "gradients of weights": (plain.z, x.weights, torch.enable_grad()),
        "expanded": (plain.z[:, :1].expand_as(plain.z), plain.weights, torch.no_grad()),
        "dtype": (plain.z.float(), plain.weights, torch.autocast("cpu", dtype=BF16)),
        "overlapping": (torch.randn(3000).to(BF16).as_strided(plain.z.shape, (64, 288, 32, 1)), plain.weights, torch.no_grad()),
        "an axis of one between": (torch.stack([plain.z] * 4, 1)[:, None, :3], plain.weights, torch.no_grad()),
        "leading axes": (torch.stack([plain.z, plain.z], 2).permute(2, 0, 1, 3, 4)[:, :, :], plain.weights, torch.no_grad()),
    }


@pytest.mark.parametrize("case", in_place_cases())
def test_in_place_where_it_cannot_be(case: str) -> None:
    z, weights, mode = in_place_cases()[case]
    before = z.detach().clone()
    with mode, pytest.raises(InvalidInput, match="^inplace: got True .+; allowed: .+"):
        triangle_multiplication(z, "outgoing", None, *weights, inplace=True)
    assert torch.equal(before, z)


# Autograd's and autocast's modes


def test_autocast_rounds_the_result_and_nothing_before_the_norms() -> None:
    x = leaves(call(17, dtype=torch.float32, mask="float"))
    x.z.data += 1e-4 * torch.randn_like(x.z)
    with torch.autocast("cpu", dtype=BF16):
        out = run(x)
        kept = run(x, residual=x.z)
    assert out.dtype == BF16 and kept.dtype == torch.float32
    with torch.no_grad():
        ref = reference.multiplication(x.z, "outgoing", x.mask, x.weights)
        dz, _ = reference.multiplication_backward(x.grad_out, x.z, "outgoing", x.mask, x.weights)
    assert relative_rms(out.detach(), ref) <= OUT[BF16]
    out.backward(x.grad_out.to(BF16))
    assert all(grad.dtype == torch.float32 for grad in gradients(x).values())
    assert relative_rms(x.z.grad, dz) <= GRADIENT[BF16]


def test_float64_stays_under_autocast() -> None:
    x = call(dtype=torch.float64, weights=torch.float64)
    with torch.autocast("cpu", dtype=BF16):
        out = run(x)
    assert out.dtype == torch.float64 and relative_rms(out, reference.multiplication(x.z, "outgoing", None, x.weights)) < 1e-13


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_checkpointing(reentrant: bool, recompute: bool) -> None:
    plain, stored = leaves(call()), leaves(call())
    run(plain).backward(plain.grad_out)
    step = partial(triangle_multiplication, recompute=recompute)
    checkpoint(step, stored.z, "outgoing", None, *stored.weights, use_reentrant=reentrant).backward(plain.grad_out)
    assert all(torch.equal(x, y) for x, y in zip(gradients(plain).values(), gradients(stored).values(), strict=True))


def test_no_graph_without_need() -> None:
    x = leaves(call())
    assert run(x).requires_grad and not run(call()).requires_grad
    with torch.no_grad():
        assert not run(x).requires_grad


def test_double_backward_says_so() -> None:
    x = leaves(call())
    (grad,) = torch.autograd.grad(run(x).sum(), [x.z], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(NotDifferentiable, match="differentiated twice") as error:
        grad.sum().backward()
    (advice,) = re.findall("`(.*)`", str(error.value))
    found: dict = {}
    exec(advice, found)
    assert callable(found["reference"].multiplication)


@pytest.mark.parametrize("transform", ["func", "dual"])
def test_forward_mode_is_refused_not_dropped(transform: str) -> None:
    x = call(dtype=torch.float32)
    with pytest.raises(RuntimeError, match="jvp|setup_context"):
        if transform == "func":
            torch.func.jvp(lambda z: triangle_multiplication(z, "outgoing", None, *x.weights), (x.z,), (x.z,))
        else:
            with torch.autograd.forward_ad.dual_level():
                z = torch.autograd.forward_ad.make_dual(x.z, x.z)
                triangle_multiplication(z, "outgoing", None, *x.weights)


# torch.library and torch.compile


@pytest.mark.parametrize("case", ["plain", "keep", "recompute", "residual", "masked_fp16"])
def test_opcheck_of_the_forward(case: str) -> None:
    dtype = torch.float16 if case == "masked_fp16" else BF16
    x = leaves(call(6, batch=2, dtype=dtype, mask="float" if case == "masked_fp16" else "none", biases=case == "keep"))
    residual = torch.randn(x.z.shape, requires_grad=True) if case == "residual" else None
    options = ("incoming", 1e-5, dtype, case == "keep", case == "recompute")
    torch.library.opcheck(ops._forward_op, (x.z, x.mask, *x.weights, residual, *options))


@pytest.mark.parametrize("kept", [False, True])
def test_opcheck_of_the_backward(kept: bool) -> None:
    x = call(6, mask="bool", biases=True)
    kept_x = ops._forward_op(x.z, x.mask, *x.weights, None, "outgoing", 1e-5, BF16, True)[1][0] if kept else None
    needed = [True, True, False] * 4 + [True]
    torch.library.opcheck(ops._backward_op, (x.grad_out, x.z, x.mask, *x.weights, kept_x, "outgoing", 1e-5, BF16, needed))


def test_opcheck_of_the_forward_in_place() -> None:
    x = call(6, mask="bool")
    torch.library.opcheck(ops._inplace_op, (x.z.clone(), x.mask, *x.weights, None, "outgoing", 1e-5, BF16))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic: bool) -> None:
    def step(z, mask, weights, grad_out):
        with torch.autocast("cpu", dtype=BF16):
            out = triangle_multiplication(z[0], "incoming", mask, *weights, recompute=True)
        return (out.float() * grad_out[0].float()).sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for crop in (8, 9):
        plain, traced = (leaves(call(crop, dtype=torch.float32, mask="bool")) for _ in range(2))
        step(plain.z, plain.mask[0], plain.weights, plain.grad_out).backward()
        compiled(traced.z, traced.mask[0], traced.weights, traced.grad_out).backward()
        assert all(torch.equal(x, y) for x, y in zip(gradients(plain).values(), gradients(traced).values(), strict=True))


def test_compiles_whole_in_place() -> None:
    def step(z, weights):
        z = z * 1.5
        triangle_multiplication(z, "outgoing", None, *weights, residual=z, inplace=True)
        return z + 1

    torch._dynamo.reset()
    x = call()
    with torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x.z, x.weights), step(x.z, x.weights))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_fake_tensors_have_the_real_layout(dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = call(dtype=dtype, batch=2)
    strided = x.z.transpose(1, 2)
    for keep in (False, True):
        real = ops._forward_op(strided, None, *x.weights, None, "outgoing", 1e-5, dtype, keep)
        grads = ops._backward_op(x.grad_out, strided, None, *x.weights, None, "outgoing", 1e-5, dtype, ALL[:12] + [False])
        with FakeTensorMode() as mode:
            z, grad_out = mode.from_tensor(strided), mode.from_tensor(x.grad_out)
            weights = [None if w is None else mode.from_tensor(w) for w in x.weights]
            fake = ops._forward_op(z, None, *weights, None, "outgoing", 1e-5, dtype, keep)
            fake_grads = ops._backward_op(grad_out, z, None, *weights, None, "outgoing", 1e-5, dtype, ALL[:12] + [False])
        for a, b in zip((real[0], *real[1], *grads), (fake[0], *fake[1], *fake_grads), strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_meta_tensors() -> None:
    x = call()
    weights = [None if w is None else w.to("meta") for w in x.weights]
    assert triangle_multiplication(x.z.to("meta"), "outgoing", None, *weights).device.type == "meta"


# Wrong input


WRONG = {
    "z_rank": ("z", {"z": lambda x: x.z[0, 0]}),
    "z_not_square": ("z", {"z": lambda x: x.z[:, :8]}),
    "z_integer": ("z", {"z": lambda x: x.z.int()}),
    "z_list": ("z", {"z": lambda x: [1.0]}),
    "direction": ("direction", {"direction": lambda x: "in"}),
    "direction_type": ("direction", {"direction": lambda x: x.z}),
    "mask_size": ("mask", {"mask": lambda x: torch.ones(9, 8)}),
    "mask_rank": ("mask", {"mask": lambda x: torch.ones(2, 1, 9, 9)}),
    "mask_complex": ("mask", {"mask": lambda x: torch.ones(9, 9, dtype=torch.complex64)}),
    "mask_device": ("mask", {"mask": lambda x: torch.ones(9, 9, device="meta")}),
    "norm_in": ("norm_in_weight", {"norm_in_weight": lambda x: torch.ones(64)}),
    "norm_out": ("norm_out_bias", {"norm_out_bias": lambda x: torch.ones(32)}),
    "p_in_missing": ("p_in_weight", {"p_in_weight": lambda x: None}),
    "p_in_half": ("p_in_weight", {"p_in_weight": lambda x: x.weights.p_in_weight[:64]}),
    "g_in_transposed": ("g_in_weight", {"g_in_weight": lambda x: x.weights.g_in_weight.T}),
    "g_in_bias": ("g_in_bias", {"g_in_bias": lambda x: torch.zeros(64)}),
    "p_out_transposed": ("p_out_weight", {"p_out_weight": lambda x: x.weights.p_out_weight.T}),
    "g_out_integer": ("g_out_weight", {"g_out_weight": lambda x: x.weights.g_out_weight.int()}),
    "g_out_device": ("g_out_weight", {"g_out_weight": lambda x: x.weights.g_out_weight.to("meta")}),
    "residual_size": ("residual", {"residual": lambda x: x.z[..., :16]}),
    "residual_8_bits": ("residual", {"residual": lambda x: x.z.to(torch.float8_e4m3fn)}),
    "eps_zero": ("eps", {"eps": lambda x: 0.0}),
    "eps_nan": ("eps", {"eps": lambda x: math.nan}),
    "eps_tensor": ("eps", {"eps": lambda x: torch.tensor(1e-5)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(case: str) -> None:
    argument, changes = WRONG[case]
    x = call()
    named = {"z": x.z, "direction": "outgoing", **x.weights._asdict()}
    with pytest.raises(InvalidInput, match=f"^{argument}: got .+; allowed: .+"):
        triangle_multiplication(**{**named, **{name: change(x) for name, change in changes.items()}})


def test_wrong_input_of_the_operator_itself() -> None:
    x = call()
    with pytest.raises(InvalidInput, match="four and three axes"):
        ops._forward_op(x.z[0], None, *x.weights, None, "outgoing", 1e-5, BF16, False)
    with pytest.raises(InvalidInput, match="^direction"):
        ops._forward_op(x.z, None, *x.weights, None, "sideways", 1e-5, BF16, False)
    with pytest.raises(InvalidInput, match="^inplace"):
        ops._inplace_op(x.z, None, *leaves(x).weights, None, "outgoing", 1e-5, BF16)


# Routing


def test_the_names_are_cuequivariances() -> None:
    """`cuequivariance_torch.triangle_multiplicative_update` takes the same arguments in this order."""
    x = call(biases=True, mask="bool")
    named = run(x)
    assert torch.equal(named, triangle_multiplication(x.z, direction="outgoing", mask=x.mask, **x.weights._asdict(), eps=1e-5))
    assert Weights._fields == (
        "norm_in_weight", "norm_in_bias", "p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias", "norm_out_weight",
        "norm_out_bias", "p_out_weight", "p_out_bias", "g_out_weight", "g_out_bias",
    )  # fmt: skip


def test_one_warning_that_names_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(routing, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            x = leaves(call())
            run(x).sum().backward()
    text = "triangle_multiplication takes the PyTorch path: the tensors are on cpu, and kernels run on Hopper GPUs"
    assert [(w.category, str(w.message)) for w in caught] == [(FallbackWarning, text)]


@pytest.fixture
def kernels(monkeypatch) -> EmulatedKernels:
    emulated = EmulatedKernels()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "find_kernel", emulated.find)
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.setattr(multiplication_routing, "folds_in_front", lambda shape: False)  # see test_trimul_small.py
    monkeypatch.setattr(multiplication_plans, "_plans", NoPlans())
    return emulated


def distance(x: torch.Tensor, ref: torch.Tensor) -> float:
    return float((x.double() - ref.double()).norm() / ref.double().norm())


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("crop, mask, biases", [(9, "bool", False), (16, "none", True), (1, "float", False)])
def test_kernels_compute_what_pytorch_does(kernels, monkeypatch, direction, crop, mask, biases) -> None:
    shape = TriangleMultiplicationShape(crop, 32, 64, direction, batch=2, mask=mask)
    x = make_inputs(shape, projection_biases=biases, with_grad_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = triangle_multiplication(x.z, direction, x.mask, *x.weights)
    assert [family for family, _ in kernels.asked] == list(multiplication_routing.families(shape))
    assert [flags for _, flags in kernels.asked] == [{"bias": biases}, {}, {}, {"residual": False, "stats": False}]
    want = reference.multiplication(x.z, direction, x.mask, x.weights, 1e-5)
    assert found.dtype == BF16 and found.is_contiguous() and distance(found, want) < 8e-3
    # Where only the forward has kernels, training keeps the contraction for a backward in PyTorch; its pitch is the kernels'.
    monkeypatch.setattr(multiplication_routing, "backward_unsupported", lambda shape: "only the forward has kernels")
    leaf, weights = x.z.clone().requires_grad_(), [None if w is None else w.clone().requires_grad_() for w in x.weights]
    triangle_multiplication(leaf, direction, x.mask, *weights).backward(x.grad_out)
    dz, grads = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, x.weights, 1e-5)
    assert distance(leaf.grad, dz) < 2e-2
    for name, weight, grad in zip(x.weights._fields, weights, grads, strict=True):
        assert weight is None or distance(weight.grad, grad) < 3e-2, name


def test_kernels_write_in_place_and_add_a_residual(kernels) -> None:
    x = make_inputs(TriangleMultiplicationShape(9, 32, 64))
    other = torch.randn_like(x.z)
    apart = triangle_multiplication(x.z, "outgoing", x.mask, *x.weights, residual=other)
    assert torch.equal(apart, triangle_multiplication(x.z.transpose(1, 2).contiguous().transpose(1, 2), "outgoing", x.mask,
                                                      *x.weights, residual=other))
    assert kernels.asked[3][1]["residual"]
    for make in (lambda: x.z.clone(), lambda: torch.cat([x.z, x.z], -1)[..., ::2].copy_(x.z)):
        want = triangle_multiplication(x.z, "outgoing", x.mask, *x.weights, residual=x.z)
        z = make()
        assert triangle_multiplication(z, "outgoing", x.mask, *x.weights, residual=z, inplace=True) is z
        assert torch.equal(z, want)


@pytest.mark.parametrize("readers", [1, 2])
def test_ctas_that_share_a_tile_do_not_write_over_it(kernels, monkeypatch, readers: int) -> None:
    """Here the first of two parts is done before the second begins, as may be where CTAs of one tile drift apart."""

    def back(*arguments) -> None:
        z, out = arguments[0], arguments[7]
        half, found = z.shape[-1] // 2, torch.empty_like(out)
        for columns in (slice(0, half), slice(half, None)):
            multiplication_emulation.back(*arguments[:7], found, *arguments[8:])
            out[..., columns] = found[..., columns]

    x = call()
    want = run(Inputs(x.z, None, x.weights, None))
    usual, z = kernels.find, x.z.clone()
    monkeypatch.setattr(
        routing, "find_kernel",
        lambda family, *rest: routing.Launch(back, 132, readers=readers) if family.endswith("/back") else usual(family, *rest),
    )  # fmt: skip
    with torch.no_grad():
        run(Inputs(z, None, x.weights, None), inplace=True)
    assert torch.equal(z, want) == (readers == 2)  # with 1 it is told what is not so


@pytest.mark.parametrize("channels, readers", [(128, 1), (256, 2)])
def test_a_launch_says_how_many_ctas_read_a_tile(monkeypatch, channels: int, readers: int) -> None:
    template = registry.get("triangle_multiplication_back_rows_sm90")
    shape = TriangleMultiplicationShape(384, channels, channels)
    found = types.SimpleNamespace(function=print, template=template, config=template.default(shape))
    monkeypatch.setattr(routing.kernels, "get_kernel", lambda *asked: found)
    assert routing.find_kernel(multiplication_routing.BACK, shape, (), torch.device("cpu")).readers == readers


def test_autograd_notices_what_a_kernel_writes_in_place(kernels, monkeypatch) -> None:
    """The launch itself is invisible to PyTorch: this back kernel writes as one does, through memory."""

    def back(*arguments) -> None:
        out = arguments[7]
        found = torch.empty_like(out)
        multiplication_emulation.back(*arguments[:7], found, *arguments[8:])
        ctypes.memmove(out.data_ptr(), found.data_ptr(), out.numel() * out.element_size())

    x = call()
    z, factor = x.z.clone(), torch.ones_like(x.z, requires_grad=True)
    product = (factor * z).sum()
    usual = kernels.find
    monkeypatch.setattr(
        routing, "find_kernel",
        lambda family, *rest: routing.Launch(back, 132) if family.endswith("/back") else usual(family, *rest),
    )  # fmt: skip
    with torch.no_grad():
        run(Inputs(z, None, x.weights, None), inplace=True)
    assert not torch.equal(z, x.z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 2, 1, 1, 3), (1, 1, 6), (2, 3, 1)])
def test_leading_axes_of_one_do_not_hide_a_copy(sizes: tuple[int, ...]) -> None:
    x = call(batch=6)
    want = run(x)
    z = x.z.clone().view(*sizes, *x.z.shape[1:])
    with torch.no_grad():
        assert triangle_multiplication(z, "outgoing", None, *x.weights, inplace=True) is z
    assert torch.equal(z.flatten(0, -4), want)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("what", ["mask", "residual of another owner", "weight"])
def test_operands_in_the_memory_of_z(request, monkeypatch, what: str, with_kernels: bool) -> None:
    if with_kernels:
        request.getfixturevalue("kernels")
    monkeypatch.setattr(fallback, "CPU_BUDGET_BYTES", 1)
    x = call(batch=2, crop=17)
    z = x.z.float() if what == "mask" and not with_kernels else x.z.clone()
    make = {
        "mask": lambda z: {"mask": z[:1, ..., 0]},
        "residual of another owner": lambda z: {"residual": torch.from_dlpack(z).transpose(1, 2)},
        "weight": lambda z: {"norm_in_weight": z[0, 0, 0]},
    }[what]
    want = triangle_multiplication(z, "outgoing", **{**x.weights._asdict(), **make(z.clone())})
    assert triangle_multiplication(z, "outgoing", inplace=True, **{**x.weights._asdict(), **make(z)}) is z
    assert torch.equal(z, want)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_residual_that_is_another_view_of_z(request, monkeypatch, with_kernels: bool) -> None:
    if with_kernels:
        request.getfixturevalue("kernels")
    monkeypatch.setattr(fallback, "CPU_BUDGET_BYTES", 1)
    x = call(crop=17)
    want = triangle_multiplication(x.z, "outgoing", None, *x.weights, residual=x.z.transpose(1, 2))
    z = x.z.clone()
    triangle_multiplication(z, "outgoing", None, *x.weights, residual=z.transpose(1, 2), inplace=True)
    assert torch.equal(z, want)


def test_one_projection_bias_alone(kernels) -> None:
    x = make_inputs(TriangleMultiplicationShape(9, 32, 64), projection_biases=True)
    for absent in (("g_in_bias", "p_out_bias"), ("p_in_bias", "g_in_bias", "p_out_bias"), ("p_out_bias", "g_out_bias")):
        kernels.asked.clear()
        weights = x.weights._replace(**dict.fromkeys(absent))
        found = triangle_multiplication(x.z, "outgoing", x.mask, *weights)
        assert kernels.asked[0] == (multiplication_routing.FOLD, {"bias": True})
        assert distance(found, reference.multiplication(x.z, "outgoing", x.mask, weights, 1e-5)) < 8e-3


class Launches(TorchDispatchMode):
    """What a call does on the device beside its kernels: operations other than allocations and views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inside = {ops._forward_op: ops._forward, ops._inplace_op: ops._inplace}.get(func)
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        # What is declared a view may copy, as `to` and `contiguous` do.
        views = func.is_view and storages(result) <= storages(args)
        allocates = func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_strided)
        if not (views or allocates or isinstance(result, int)):  # a number is worked out on the host
            self.seen.append(str(func.overloadpacket))
        return result


def storages(tensors) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)}


def launches_of(monkeypatch, z, weights, **options) -> tuple[list[str], list[str]]:
    """The families of the kernels of a call, in order, and what else it launches."""
    ran = []

    def find(family, *rest):
        return routing.Launch(lambda *arguments: ran.append(family.partition("/")[2]), 132)

    monkeypatch.setattr(routing, "find_kernel", find)
    with Launches() as seen, torch.no_grad():
        triangle_multiplication(z, "outgoing", None, *weights, **options)
    return ran, seen.seen


def test_a_forward_is_four_launches(kernels, monkeypatch) -> None:
    """With the weights of models, float32 or bf16, and float32 norms there is no copy, no conversion, nothing else."""
    x = call()
    halved = Weights(*(w if w is None or w.dim() == 1 else w.to(BF16) for w in x.weights))
    four = ["fold", "front", "product_nt", "back"]
    for weights in (x.weights, halved):
        for options in ({}, {"residual": x.z}, {"residual": x.z, "inplace": True}):
            assert launches_of(monkeypatch, x.z.clone(), weights, **options) == (four, [])
    ran, others = launches_of(monkeypatch, x.z, x.weights._replace(norm_in_bias=None, g_in_weight=halved.g_in_weight))
    assert ran == four and others == ["aten.to", "aten.full"], "and the mode sees what there is"


WEIGHTS = {
    "mixed": (lambda w: w._replace(p_in_weight=w.p_in_weight.to(BF16)), "float32"),
    "mixed_back": (lambda w: w._replace(g_out_weight=w.g_out_weight.to(BF16)), "float32"),
    "double": (lambda w: w._replace(p_out_weight=w.p_out_weight.double()), "float32"),
    "all_bf16": (lambda w: Weights(*(x if x is None else x.to(BF16) for x in w)), "bfloat16"),
    "bf16_matrices": (lambda w: Weights(*(x if x is None or x.dim() == 1 else x.to(BF16) for x in w)), "bfloat16"),
    "bare_norms": (lambda w: w._replace(norm_in_weight=None, norm_out_bias=None), "float32"),
    "strided": (lambda w: w._replace(p_out_weight=w.p_out_weight.T.contiguous().T), "float32"),
    "unaligned": (lambda w: w._replace(g_in_weight=torch.cat([torch.zeros(1), w.g_in_weight.flatten()])[1:].view(128, 32)),
                  "float32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_of_all_kinds_reach_the_fold_kernel_alike(kernels, monkeypatch, case: str) -> None:
    change, dtype = WEIGHTS[case]
    shapes, usual = {}, kernels.find

    def find(family, shape, *rest):
        shapes[family] = shape
        return usual(family, shape, *rest)

    monkeypatch.setattr(routing, "find_kernel", find)
    x = call()
    weights = change(x.weights)
    found = triangle_multiplication(x.z, "outgoing", None, *weights)
    assert shapes[multiplication_routing.FOLD].weight_dtype == dtype
    assert distance(found, reference.multiplication(x.z, "outgoing", None, weights, 1e-5)) < 8e-3


def test_what_kernels_do_not_take_says_why(kernels) -> None:
    x = call()
    with pytest.warns(FallbackWarning, match="the kernel takes bfloat16, not float16"):
        run(call(dtype=torch.float16))
    with pytest.warns(FallbackWarning, match="z is float32 and autocast is off"):
        run(call(dtype=torch.float32))
    with pytest.warns(FallbackWarning, match="autocast computes in float16"), torch.autocast("cpu", dtype=torch.float16):
        triangle_multiplication(x.z.float(), "outgoing", None, *x.weights)
    assert kernels.asked == []
    kernels.missing = {multiplication_routing.BACK}
    with pytest.warns(FallbackWarning, match="no kernel of triangle_multiplication/back"):
        found = triangle_multiplication(x.z, "outgoing", None, *x.weights)
    assert distance(found, reference.multiplication(x.z, "outgoing", None, x.weights, 1e-5)) < 8e-3


def test_is_supported_and_explain(monkeypatch) -> None:
    x = call(130, mask="bool")
    z, weight = x.z, x.weights.p_in_weight
    assert tpf_jit.is_supported(z, mask=x.mask, p_in_weight=weight)[1].startswith("the tensors are on cpu")
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    assert tpf_jit.is_supported(z, mask=x.mask, p_in_weight=weight)[0]
    found = tpf_jit.explain(z, mask=x.mask, p_in_weight=weight)
    key = "triangle_multiplication/B1/N130/C32/D64/outgoing/bfloat16/weight-float32/mask-bool"
    assert (found.path, found.shape) == ("kernel", key) and "product_nt" in found.template
    names = ("fold", "front_rows", "product_nt", "back")
    sources = [part.partition(" ")[2] for part in found.forward.split(", ")]
    assert sources[0] == "(the only one)" and set(sources[1:]) <= {"(tuned)", "(nearest)", "(sibling)", "(default)"}
    pairs = list(zip(names, sources, strict=True))
    assert found.forward == ", ".join(f"triangle_multiplication_{name}_sm90 {source}" for name, source in pairs)
    assert f"  forward    {', '.join(f'{name}_sm90 {source}' for name, source in pairs)}\n" in str(found)
    assert "autocast is off" in tpf_jit.explain(z.float(), p_in_weight=weight).reason
    with torch.autocast("cpu", dtype=BF16):
        assert tpf_jit.explain(z.float(), p_in_weight=weight).shape.endswith("bfloat16/weight-float32/mask-none")
    named = x.weights._asdict() | {"direction": "incoming", "eps": 1e-5}
    assert tpf_jit.is_supported(z, mask=x.mask, **named)[0] and "/incoming/" in tpf_jit.explain(z, mask=x.mask, **named).shape
    with pytest.raises(InvalidInput, match="^weight: got"):
        tpf_jit.explain(z, p_in_weight=weight, weight=weight)
    supported, reason = tpf_jit.is_supported(z, mask=torch.ones(8, 8), p_in_weight=weight)
    assert not supported and reason.startswith("mask")
    with pytest.raises(InvalidInput, match="^p_in_weight"):
        tpf_jit.explain(z, p_in_weight=weight.T)


def test_empty_calls_work_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in ((0, 9, 9, 32), (1, 0, 0, 32)):
            x = leaves(call())
            z = torch.randn(size, dtype=BF16, requires_grad=True)
            out = triangle_multiplication(z, "outgoing", None, *x.weights)
            out.sum().backward()
            assert out.shape == size and z.grad.shape == size and not bool(x.weights.p_in_weight.grad.any())


def test_nans_reach_what_depends_on_them() -> None:
    x = call(9)
    x.z[0, 2, 3, 0] = math.nan
    broken = run(x).isnan().any(-1)[0]
    expected = torch.zeros(9, 9, dtype=torch.bool)
    expected[2], expected[:, 2] = True, True
    assert torch.equal(broken, expected), "outgoing: a_23 and b_23 are in all x_2j and x_i2"
