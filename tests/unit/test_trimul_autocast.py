"""A float32 z under bf16 autocast, as Boltz-2 and Protenix have it, on kernels: centred and rounded, the rest in float32."""

from __future__ import annotations

import warnings

import pytest
import torch
from multiplication_emulation import EmulatedKernels
from test_trimul_ops import ALL, BF16, DIRECTIONS, call, gradients, leaves, peak_of, run
from torch.nn.functional import layer_norm, linear

import tpf_jit
from tpf_jit.errors import FallbackWarning, InvalidInput
from tpf_jit.ops import multiplication_backward, multiplication_launch, multiplication_plans, multiplication_routing, routing
from tpf_jit.ops import multiplication_fallback as fallback
from tpf_jit.ops import triangle_multiplication as ops
from tpf_jit.ops.multiplication_launch import Keep
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_attention.workload import relative_rms
from tpf_jit.templates.triangle_multiplication import reference
from tpf_jit.templates.triangle_multiplication.inputs import Inputs

FLOAT32 = torch.float32
OUT, GRADIENT = 8e-3, 1.6e-2  # as of z that comes in bf16, see test_trimul_backward.py


@pytest.fixture(autouse=True)
def kernels(monkeypatch) -> EmulatedKernels:
    """A machine with a Hopper GPU and all kernels, where the PyTorch path is an error, and so is its warning."""
    emulated = EmulatedKernels()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "find_kernel", emulated.find)
    monkeypatch.setattr(multiplication_routing, "backward_unsupported", lambda shape: None)
    monkeypatch.setattr(multiplication_routing, "folds_in_front", lambda shape: False)
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    for name in ("forward", "backward"):
        monkeypatch.setattr(fallback, name, lambda *arguments: pytest.fail("the PyTorch path was taken"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield emulated


def wide_call(crop: int = 17, offset: float = 0.0, **options) -> Inputs:
    """A call with a z that bf16 does not hold, each pair `offset` away from zero."""
    torch.manual_seed(0)
    x = call(crop, dtype=FLOAT32, **options)
    return Inputs(x.z + 1e-3 * torch.randn_like(x.z) + offset, x.mask, x.weights, x.grad_out)


def autocast(x: Inputs, direction: str = "outgoing", **options) -> torch.Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return run(x, direction, **options)


def stock(x: Inputs) -> torch.Tensor:
    """The outgoing update as models write it, under autocast: LayerNorms in float32, their results rounded for projections."""
    w = x.weights
    with torch.autocast("cpu", dtype=BF16):
        zn = layer_norm(x.z, x.z.shape[-1:], w.norm_in_weight, w.norm_in_bias)
        a, b = (torch.sigmoid(linear(zn, w.g_in_weight)) * linear(zn, w.p_in_weight)).chunk(2, -1)
        y = torch.einsum("...ikd,...jkd->...ijd", a, b)
        y = layer_norm(y.float(), y.shape[-1:], w.norm_out_weight, w.norm_out_bias)
        return torch.sigmoid(linear(zn, w.g_out_weight)) * linear(y, w.p_out_weight)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("offset", [0.0, 300.0])
@pytest.mark.parametrize("recompute", [False, True])
def test_output_and_gradients(kernels, direction: str, offset: float, recompute: bool) -> None:
    """Rounded as it is, a z 300 away from zero would be off by more than its deviation."""
    x = leaves(wide_call(offset=offset, direction=direction, batch=2, mask="bool", biases=True))
    out = autocast(x, direction, recompute=recompute)
    out.backward(x.grad_out.to(BF16))
    assert out.dtype == BF16 and "triangle_multiplication/front" in kernels.ran and routing.BACK_WEIGHTS in kernels.ran
    with torch.no_grad():
        dz, grads = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, x.weights)
        want = reference.multiplication(x.z, direction, x.mask, x.weights)
    assert relative_rms(out.detach(), want) < OUT
    for name, grad in gradients(x).items():
        assert grad.dtype == FLOAT32 and relative_rms(grad, dz if name == "z" else getattr(grads, name)) < GRADIENT, name


def test_errors_are_below_those_of_the_models_own() -> None:
    for family in ("normal", "trained_like"):
        x = wide_call(33, family=family)
        ref = reference.multiplication(x.z, "outgoing", None, x.weights)
        assert relative_rms(autocast(x), ref) < relative_rms(stock(x), ref), family


def test_a_bias_that_takes_channels_means_out_costs_accuracy() -> None:
    """What is rounded is what the norm's bias is added to: where that cancels most of it, errors grow with what is cancelled."""
    x = wide_call(33)
    generator = torch.Generator().manual_seed(1)
    offsets = 3.0 * torch.randn(x.z.shape[-1], generator=generator)
    z = x.z + offsets
    weights = x.weights._replace(norm_in_bias=-0.9 * x.weights.norm_in_weight * (offsets - offsets.mean()) / z.std(-1).mean())
    x = Inputs(z, None, weights, x.grad_out)
    assert OUT < relative_rms(autocast(x), reference.multiplication(x.z, "outgoing", None, weights)) < 4 * OUT


def test_a_small_deviation_keeps_its_eps() -> None:
    """The mean alone is taken out: a z that deviates as little as eps is not made larger."""
    x = wide_call()
    x = Inputs(1e-3 * x.z, x.mask, x.weights, x.grad_out)
    ref = reference.multiplication(x.z, "outgoing", None, x.weights)
    assert relative_rms(autocast(x), ref) < OUT


@pytest.mark.parametrize("layout", ["transposed", "sliced", "leading_axes"])
def test_any_layout(layout: str) -> None:
    x = wide_call(batch=2)
    z = {
        "transposed": lambda: x.z.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda: torch.nn.functional.pad(x.z, (0, 3))[..., :-3],
        "leading_axes": lambda: x.z[:, None],
    }[layout]()
    z = z.detach().requires_grad_()
    plain = leaves(x)
    autocast(plain).backward(x.grad_out.to(BF16))
    out = autocast(Inputs(z, None, plain.weights, None))
    out.backward(x.grad_out.to(BF16).view(out.shape))
    assert torch.equal(out.view(x.z.shape), autocast(plain)) and torch.equal(z.grad.view(x.z.shape), plain.z.grad)


@pytest.mark.parametrize("turned", ["plain", "transposed", "channels_first"])
def test_a_residual_of_any_layout_gives_a_contiguous_result(turned: str) -> None:
    x = wide_call(9)
    residual = torch.randn(x.z.shape)
    order = {"plain": (0, 1, 2, 3), "transposed": (0, 2, 1, 3), "channels_first": (0, 3, 1, 2)}[turned]
    back = [order.index(axis) for axis in range(4)]
    turned_residual = residual.permute(order).contiguous().permute(back)
    with torch.no_grad():
        found, want = autocast(x, residual=turned_residual), autocast(x, residual=residual)
    assert found.is_contiguous() and torch.equal(found, want)
    arguments = (x.z, x.mask, *x.weights, turned_residual, "outgoing", 1e-5, BF16, False, False, None)
    torch.library.opcheck(ops._forward_op, arguments)


def test_equal_values_give_equal_bits_in_any_layout_of_z() -> None:
    """Hooks may give a backward what was saved in another layout than the forward had."""
    x = leaves(wide_call(offset=1e5))
    turned = x.z.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1).requires_grad_()
    autocast(x).backward(x.grad_out.to(BF16))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        out = autocast(Inputs(turned, None, x.weights, None))
    out.backward(x.grad_out.to(BF16))
    assert torch.equal(turned.grad, x.z.grad)


@pytest.mark.parametrize("recompute, gradients_of, allowed", [(False, True, 5.2), (True, True, 7.2), (False, False, 4.2)])
def test_memory(monkeypatch, recompute: bool, gradients_of: bool, allowed: float) -> None:
    """In bf16 pair tensors, a float32 result or dz being two: centred z, dzn and both factors' gradients, or dz; with recompute
    the factors too. Forward centred z, factors, x and update, or the sum."""
    shape = TriangleMultiplicationShape(96, 64)
    x = wide_call(96, channels=64, hidden=64)
    pair, keep = x.z.numel() * 2, Keep(True, True, True)
    monkeypatch.setattr(routing, "find_kernel", lambda family, *rest: routing.Launch(lambda *arguments: None, 132))

    def forward(keep: Keep, residual: torch.Tensor | None):
        found = multiplication_launch.find(shape, x.z, x.weights, residual, keep.stats)
        return multiplication_launch.forward(found, x.z, None, x.weights, residual, 1e-5, keep)

    if not gradients_of:
        peak = peak_of(lambda: forward(Keep(), x.z))
    else:
        _, saved = forward(keep, None)
        saved = saved._replace(x=None, factors=None) if recompute else saved
        take = multiplication_backward.steps(x.weights, ALL)
        found = multiplication_backward.find(shape, x.z, take, (saved.x is not None,) * 2)
        arguments = (found, x.grad_out.to(BF16), x.z, None, x.weights, saved, 1e-5, ALL)
        peak = peak_of(lambda: multiplication_backward.backward(*arguments))
    assert allowed - 1.0 < peak / pair < allowed


@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_residuals(dtype: torch.dtype) -> None:
    """One in float32 is added to the rounded update, and the sum stays float32; one in bf16 is the kernel's."""
    x = leaves(wide_call())
    residual = torch.randn(x.z.shape, dtype=FLOAT32).to(dtype).requires_grad_()
    update, out = autocast(x).detach(), autocast(x, residual=residual)
    assert out.dtype == dtype
    if dtype == FLOAT32:
        assert torch.equal(out.detach(), residual.detach() + update)
    grad_out = torch.randn(out.shape, dtype=dtype)
    out.backward(grad_out)
    assert torch.equal(residual.grad, grad_out) and x.z.grad.dtype == FLOAT32


def test_z_as_its_own_residual() -> None:
    x = wide_call()
    with torch.no_grad():
        want = x.z + autocast(x)
        assert torch.equal(autocast(x, residual=x.z), want)
        z, address = x.z.clone(), x.z.data_ptr()
        found = autocast(Inputs(z, None, x.weights, None), residual=z, inplace=True)
    assert found is z and torch.equal(z, want) and x.z.data_ptr() == address
    with torch.no_grad(), pytest.raises(InvalidInput, match="^inplace"):
        autocast(x, inplace=True)  # the result would be bf16


def test_a_float32_residual_beside_bf16_activations() -> None:
    x = call(9)
    residual = torch.randn(x.z.shape)
    assert torch.equal(run(x, residual=residual), residual + run(x))


def test_the_second_call_is_planned_and_gives_the_same(kernels) -> None:
    def step() -> dict[str, torch.Tensor]:
        x = leaves(wide_call())
        out = autocast(x, residual=x.z)
        out.backward(x.grad_out)
        return gradients(x) | {"out": out.detach()}

    first = step()
    kernels.asked.clear()
    second = step()
    assert kernels.asked == [] and all(torch.equal(first[name], second[name]) for name in first)
    x = wide_call()
    autocast(x)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(FallbackWarning, match="autocast computes in float16"):
        run(x)


@pytest.mark.parametrize("residual", [False, True])
def test_torch_compile(residual: bool) -> None:
    def step(z, *weights):
        with torch.autocast("cpu", dtype=BF16):
            return ops.triangle_multiplication(z, "outgoing", None, *weights, residual=z if residual else None)

    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        x = leaves(wide_call())
        out = function(x.z, *x.weights)
        out.backward(x.grad_out.to(out.dtype))
        grads.append(gradients(x) | {"out": out.detach()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_opcheck() -> None:
    x = leaves(wide_call(9))
    for needed in (None, [True] * 13):
        options = ("outgoing", 1e-5, BF16, False, False, needed)
        torch.library.opcheck(ops._forward_op, (x.z, x.mask, *x.weights, x.z.detach().clone(), *options))


def test_what_kernels_leave_where_one_of_them_is_missing(kernels, monkeypatch) -> None:
    """The backward still runs on kernels, on statistics of the centred z."""
    monkeypatch.undo()
    kernels.missing = {multiplication_routing.BACK}
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "find_kernel", kernels.find)
    monkeypatch.setattr(multiplication_routing, "backward_unsupported", lambda shape: None)
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    x = leaves(wide_call(offset=300.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        out = autocast(x)
    out.backward(x.grad_out.to(BF16))
    assert routing.BACK_WEIGHTS in kernels.ran
    with torch.no_grad():
        dz, grads = reference.multiplication_backward(x.grad_out, x.z, "outgoing", x.mask, x.weights)
    for name, grad in gradients(x).items():
        assert relative_rms(grad, dz if name == "z" else getattr(grads, name)) < GRADIENT, name


def test_explain_and_is_supported_say_so() -> None:
    x = wide_call(130)
    weight = x.weights.p_in_weight
    assert "bfloat16 autocast" in tpf_jit.explain(x.z, p_in_weight=weight).reason
    with torch.autocast("cpu", dtype=BF16):
        assert "from float32" in tpf_jit.is_supported(x.z, p_in_weight=weight)[1]
        found = tpf_jit.explain(x.z, p_in_weight=weight)
    assert found.path == "kernel" and "from float32" in found.reason
    assert found.forward.startswith("triangle_multiplication_centre_sm90") and found.backward.count("centre") == 1
    assert "centre" not in tpf_jit.explain(x.z.to(BF16), p_in_weight=weight).forward
    assert found.shape.endswith("/bfloat16/weight-float32/mask-none")


@pytest.mark.parametrize("missing", [False, True])
def test_a_kernel_centres_where_there_is_one(kernels, missing: bool) -> None:
    """Once forward and once backward, of any z; PyTorch where it cannot be had. A bf16 z asks for none."""
    kernels.missing = {multiplication_routing.CENTRE} if missing else set()
    x = leaves(wide_call())
    out = autocast(x)
    out.backward(x.grad_out.to(BF16))
    assert kernels.ran.count(multiplication_routing.CENTRE) == (0 if missing else 2)
    kernels.ran.clear()
    with torch.no_grad():
        turned = Inputs(x.z.detach().permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), None, x.weights, None)
        assert torch.equal(autocast(turned), out)
    kernels.asked.clear()
    run(call(9))
    assert multiplication_routing.CENTRE not in [family for family, _ in kernels.asked]


def test_rounding_takes_no_more_than_one_tensor() -> None:
    narrow = multiplication_launch.kernel_input(torch.full((1, 2, 2, 32), 2.0**90))
    assert narrow.dtype == BF16 and narrow.is_contiguous() and not bool(narrow.any()), "what is equal in all channels is its mean"
    z = torch.randn(1, 2, 2, 32, dtype=BF16)
    assert multiplication_launch.kernel_input(z) is z
