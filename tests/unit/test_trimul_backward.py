"""The backward of the triangle multiplicative update on kernels: routing, order, what is saved, skipped and left alone.

Kernels are emulations with their calling conventions (`multiplication_emulation`); numbers of real ones are for tests/gpu.
"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from multiplication_emulation import EmulatedKernels, NoPlans
from test_trimul_ops import ALL, BF16, DIRECTIONS, LAYOUTS, call, gradients, leaves, peak_of, run
from torch.utils.checkpoint import checkpoint

from tpf_jit.errors import ColdKernelInCapture, FallbackWarning, NotDifferentiable
from tpf_jit.ops import multiplication_backward, multiplication_launch, multiplication_plans, multiplication_routing, routing
from tpf_jit.ops import multiplication_fallback as fallback
from tpf_jit.ops import triangle_multiplication as ops
from tpf_jit.ops.multiplication_launch import Keep, Saved
from tpf_jit.ops.triangle_multiplication import triangle_multiplication
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_attention.workload import relative_rms
from tpf_jit.templates.triangle_multiplication import layout, layout_backward, reference
from tpf_jit.templates.triangle_multiplication.inputs import Inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights

# Roundings of folded weights, factors, x and their gradients, in small tensors that average few of them.
OUT, GRADIENT = 8e-3, 1.6e-2
FRONT = ["fold", "front", "product_nt", "back"]
BACK = ["back_weights", "back_backward", "product_nn", "product_tn", "front_weights", "front_backward", "finish"]
TOGETHER = [*BACK[:4], "front_gradients", "finish"]
"""At 128 channels and a hidden width in steps of 64; nearly all calls here have less."""


def too_wide(shape) -> str | None:
    return None if max(shape.channels, shape.hidden) <= 256 else "the widths are above 256"


@pytest.fixture
def machine(monkeypatch) -> EmulatedKernels:
    """A machine with a Hopper GPU and all kernels."""
    emulated = EmulatedKernels()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "find_kernel", emulated.find)
    monkeypatch.setattr(multiplication_routing, "backward_unsupported", too_wide)
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.setattr(multiplication_routing, "folds_in_front", lambda shape: False)  # see test_trimul_small.py
    monkeypatch.setattr(multiplication_plans, "_plans", NoPlans())
    return emulated


@pytest.fixture
def kernels(machine, monkeypatch) -> EmulatedKernels:
    """The same, where the PyTorch path is an error."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(fallback, name, lambda *arguments: pytest.fail("the PyTorch path was taken"))
    return machine


def ran(kernels: EmulatedKernels) -> list[str]:
    names = [family.partition("/")[2] for family in kernels.ran]
    kernels.ran.clear()
    return names


def step(x: Inputs, direction="outgoing", grad_out=None, **options) -> dict[str, torch.Tensor]:
    """All gradients of a call's fresh leaves."""
    x = leaves(x)
    run(x, direction, **options).backward(x.grad_out if grad_out is None else grad_out)
    return gradients(x)


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Right


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("crop", "channels", "hidden", "mask", "biases"),
    [(17, 32, 64, "none", False), (16, 64, 32, "bool", True), (9, 32, 32, "float", True), (1, 32, 32, "bool", False)],
)
def test_gradients(kernels, direction, recompute, crop, channels, hidden, mask, biases) -> None:
    x = leaves(call(crop, channels, hidden, direction, batch=2, mask=mask, biases=biases))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        out = run(x, direction, recompute=recompute)
        contraction = f"product_{layout.CONTRACTIONS[direction]}"
        assert ran(kernels) == ["fold", "front", contraction, "back"]
        out.backward(x.grad_out)
    again = ["front", contraction] if recompute else []
    products = ["product_nn", "product_tn"] if direction == "outgoing" else ["product_nt", "product_nn"]
    assert ran(kernels) == again + BACK[:2] + products + BACK[4:]
    with torch.no_grad():
        want = reference.multiplication(x.z, direction, x.mask, x.weights)
        dz, grads = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, x.weights)
    assert relative_rms(out.detach(), want) < OUT
    for name, grad in gradients(x).items():
        operand = x.z if name == "z" else getattr(x.weights, name)
        assert grad.dtype == operand.dtype and grad.shape == operand.shape and grad.stride() == operand.stride()
        allowed = GRADIENT if crop > 1 else 6e-2
        assert relative_rms(grad, dz if name == "z" else getattr(grads, name)) < allowed, name


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("keep", [Keep(True, True, True), Keep(True, False, True), Keep(False, False, True)], ids=str)
@pytest.mark.parametrize("case", ["plain", "mask", "one_bias", "bare_norms"])
def test_the_algebra_is_exact(kernels, direction: str, keep: Keep, case: str) -> None:
    """In float64 nothing is rounded but the mask and the norms' weights, which are float32 as they come."""
    x = call(11, 32, 64, direction, 2, torch.float64, mask="float" if case == "mask" else "none", biases=case == "one_bias")
    weights = x.weights
    if case == "one_bias":
        weights = weights._replace(g_in_bias=None, p_out_bias=None)
    if case == "bare_norms":
        weights = weights._replace(norm_in_weight=None, norm_out_weight=None, norm_out_bias=None)
    shape = TriangleMultiplicationShape(11, 32, 64, direction, 2, mask="float" if case == "mask" else "none")
    found = multiplication_launch.find(shape, x.z, weights, None, True)
    out, saved = multiplication_launch.forward(found, x.z, x.mask, weights, None, 1e-5, keep)
    assert relative_rms(out, reference.multiplication(x.z, direction, x.mask, weights)) < 1e-12
    assert [t is not None for t in saved] == [*keep, *(keep.stats,) * 3]
    take = multiplication_backward.steps(weights, ALL)
    found = multiplication_backward.find(shape, x.z, take, (keep.x, keep.factors))
    dz, *grads = multiplication_backward.backward(found, x.grad_out, x.z, x.mask, weights, saved, 1e-5, ALL)
    ref, refs = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, weights)
    assert relative_rms(dz, ref) < 1e-12
    for name, grad, want in zip(Weights._fields, grads, refs, strict=True):
        # Gradients of float32 weights are rounded to it.
        assert grad is None if want is None else relative_rms(grad, want) < 1e-6, name


def test_equal_calls_give_equal_bits(kernels) -> None:
    x = call(17, batch=2, mask="bool")
    first = step(x)
    assert equal(first, step(x)) and equal(first, step(x, recompute=True))
    x = leaves(x)
    out = run(x)
    with torch.autocast("cpu", dtype=BF16):
        out.backward(x.grad_out)
    assert equal(first, gradients(x)), "autocast casts nothing inside a backward"


def test_autocast_is_left_only_where_it_is_on(kernels, monkeypatch) -> None:
    entered = []
    usual = torch.autocast.__enter__
    x = leaves(call(17))
    found, saved = kernels_and_saved(x)
    monkeypatch.setattr(torch.autocast, "__enter__", lambda self: entered.append(self._enabled) or usual(self))

    def backward(needed: list[bool]) -> list:
        with torch.no_grad():
            return multiplication_backward.backward(found, x.grad_out, x.z, x.mask, x.weights, saved, 1e-5, needed)

    everything = backward([True] * 13)
    assert entered == []
    with torch.autocast("cpu", dtype=BF16):
        again = backward([True] * 13)
    assert entered == [True, False]
    pairs = list(zip(everything, again, strict=True))
    assert any(one is None for one, _ in pairs), "weights that are not there have no gradient, not an empty one"
    assert all(one is other is None or torch.equal(one, other) for one, other in pairs)


def kernels_and_saved(x: Inputs) -> tuple[multiplication_backward.Kernels, Saved]:
    """The kernels of a backward of everything, and what a forward leaves for it."""
    shape = multiplication_routing.kernel_shape(x.z, x.mask, x.weights.p_in_weight, "outgoing", BF16)
    forward = multiplication_launch.find(shape, x.z, x.weights, None, True)
    with torch.no_grad():
        _, saved = multiplication_launch.forward(forward, x.z, x.mask, x.weights, None, 1e-5, Keep(True, True, True))
    take = multiplication_backward.steps(x.weights, [True] * 13)
    return multiplication_backward.find(shape, x.z, take, (True, True)), saved


def test_gradients_that_are_not_wanted_are_empty_for_the_operator_alone(kernels) -> None:
    x = call(17)
    _, saved = kernels_and_saved(x)
    needed = [True] + [False] * 12
    take = multiplication_backward.steps(x.weights, needed)
    shape = multiplication_routing.kernel_shape(x.z, x.mask, x.weights.p_in_weight, "outgoing", BF16)
    found = multiplication_backward.find(shape, x.z, take, (True, True))
    with torch.no_grad():
        plain = multiplication_backward.backward(found, x.grad_out, x.z, x.mask, x.weights, saved, 1e-5, needed)
        grads = ops._backward_op(x.grad_out, x.z, x.mask, *x.weights, saved.x, "outgoing", 1e-5, BF16, needed, *saved[1:])
    assert torch.equal(plain[0], grads[0]) and plain[1:] == [None] * 12
    assert all(grad.numel() == 0 and grad.dtype == x.z.dtype for grad in grads[1:])


# Front backward and front weights in one


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("hidden", "mask", "biases"), [(64, "none", True), (128, "bool", False), (192, "float", False)])
def test_one_kernel_for_all_gradients_of_the_front(kernels, direction, recompute, hidden, mask, biases) -> None:
    x = leaves(call(9, 128, hidden, direction, batch=2, mask=mask, biases=biases))
    run(x, direction, recompute=recompute).backward(x.grad_out)
    contraction = f"product_{layout.CONTRACTIONS[direction]}"
    again = ["front", contraction] if recompute else []
    products = ["product_nn", "product_tn"] if direction == "outgoing" else ["product_nt", "product_nn"]
    assert ran(kernels) == ["fold", "front", contraction, "back", *again, *TOGETHER[:2], *products, *TOGETHER[4:]]
    with torch.no_grad():
        dz, grads = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, x.weights)
    for name, grad in gradients(x).items():
        assert relative_rms(grad, dz if name == "z" else getattr(grads, name)) < GRADIENT, name


@pytest.mark.parametrize(("channels", "hidden"), [(64, 64), (96, 128), (160, 128), (128, 96), (128, 32)])
def test_other_widths_take_two_kernels(kernels, channels: int, hidden: int) -> None:
    step(call(9, channels, hidden))
    assert ran(kernels) == FRONT + BACK


def test_one_kernel_runs_only_where_both_are_wanted(kernels) -> None:
    """z alone, weights of the front alone; with either and the weights of the back nothing changes."""
    x = call(9, 128, 64, mask="bool")
    everything = step(x)
    assert ran(kernels) == FRONT + TOGETHER
    front, back = ({f"{name}_weight" for name in names} for names in (("p_in", "g_in", "norm_in"), ("p_out", "norm_out")))
    passes = ["back_backward", "product_nn", "product_tn"]
    for wanted, expected in (
        ({"z"}, [*passes, "front_backward"]), (front - {"norm_in_weight"}, [*passes, "front_weights"]),
        ({"z"} | back, ["back_weights", *passes, "front_backward"]), (front, ["back_weights", *passes, "front_weights"]),
        ({"z", "g_in_weight"}, [*passes, "front_gradients"]), (back, ["back_weights"]),
    ):  # fmt: skip
        kernels.asked.clear()
        tensors = {"z": x.z} | x.weights._asdict()
        tensors = {name: t.clone().requires_grad_() if name in wanted else t for name, t in tensors.items()}
        triangle_multiplication(tensors["z"], "outgoing", x.mask, *list(tensors.values())[1:]).backward(x.grad_out)
        assert ran(kernels) == FRONT + expected, wanted
        asked = {family.partition("/")[2] for family, _ in kernels.asked}
        assert asked & {"front_backward", "front_weights", "front_gradients"} <= set(expected), "not even compiled"
        for name in wanted:
            # What one of the two computes is what the one computes, but for the roundings of t.
            assert relative_rms(tensors[name].grad, everything[name].double()) < (1e-2 if name == "z" else 1e-5), (wanted, name)


def test_one_kernel_is_exact(kernels) -> None:
    """In float64, from what a forward saved or did not."""
    x = call(7, 128, 128, "incoming", 2, torch.float64, mask="float")
    shape = TriangleMultiplicationShape(7, 128, 128, "incoming", 2, mask="float")
    found = multiplication_launch.find(shape, x.z, x.weights, None, True)
    for keep in (Keep(True, True, True), Keep(False, False, True)):
        _, saved = multiplication_launch.forward(found, x.z, x.mask, x.weights, None, 1e-5, keep)
        take = multiplication_backward.steps(x.weights, ALL)
        loaded = multiplication_backward.find(shape, x.z, take, (keep.x, keep.factors))
        assert loaded.front_gradients is not None and loaded.front_gradients.splits == kernels.splits
        assert loaded.front_backward is None and loaded.front_weights is None
        dz, *grads = multiplication_backward.backward(loaded, x.grad_out, x.z, x.mask, x.weights, saved, 1e-5, ALL)
        ref, refs = reference.multiplication_backward(x.grad_out, x.z, "incoming", x.mask, x.weights)
        assert relative_rms(dz, ref) < 1e-12
        for name, grad, want in zip(Weights._fields, grads, refs, strict=True):
            assert grad is None if want is None else relative_rms(grad, want) < 1e-6, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_z_for_one_kernel(kernels, name: str) -> None:
    """Before the end dz holds parts of t: a dz that the kernel cannot write is copied from one that it can."""
    x = call(9, 128, 64, batch=2)
    z = LAYOUTS[name](x.z).detach().requires_grad_()
    plain = step(Inputs(z.detach().contiguous(), None, x.weights, x.grad_out))
    weights = leaves(x).weights
    triangle_multiplication(z, "outgoing", None, *weights).backward(x.grad_out)
    assert ran(kernels) == (FRONT + TOGETHER) * 2
    assert torch.equal(z.grad, plain["z"])
    assert all(torch.equal(w.grad, plain[key]) for key, w in weights._asdict().items() if w is not None)


def test_without_that_one_kernel_the_two_do(machine) -> None:
    machine.missing = {routing.FRONT_GRADIENTS}
    x = leaves(call(9, 128, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        run(x).backward(x.grad_out)
    assert ran(machine) == FRONT + BACK
    check_gradients(x)


# Only what is needed


BEHIND = {"norm_in_weight", "norm_in_bias", "p_in_weight", "p_in_bias", "g_in_weight", "g_in_bias"}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("index", range(13))
def test_only_what_is_needed_is_computed(kernels, index: int, recompute: bool) -> None:
    x = call(biases=True, mask="bool")
    everything = step(x)
    name = ("z", *Weights._fields)[index]
    wanted = [x.z, *x.weights][index].clone().requires_grad_()
    tensors = [x.z, *x.weights]
    tensors[index] = wanted
    kernels.ran.clear()
    kernels.asked.clear()
    out = triangle_multiplication(tensors[0], "outgoing", x.mask, *tensors[1:], recompute=recompute)
    out.backward(x.grad_out)
    expected = {
        "back_weights": name not in {"z", *BEHIND} or name.startswith("norm_in"),
        "front_weights": name in BEHIND,
        "front_backward": name == "z",
        "finish": False,
    } | dict.fromkeys(("back_backward", "product_nn", "product_tn"), name == "z" or name in BEHIND)
    again = ["front", "product_nt"] if recompute else []
    assert ran(kernels) == FRONT + again + [kernel for kernel in BACK if expected[kernel]]
    skipped = {kernel for kernel, runs in expected.items() if not runs}
    assert not skipped & {family.partition("/")[2] for family, _ in kernels.asked}, "not even compiled"
    assert torch.equal(wanted.grad, everything[name])


def test_a_frozen_module(kernels) -> None:
    x = call()
    z = x.z.clone().requires_grad_()
    run(Inputs(z, None, x.weights, None)).backward(x.grad_out)
    assert ran(kernels) == [*FRONT, "back_backward", "product_nn", "product_tn", "front_backward"]
    assert torch.equal(z.grad, step(x)["z"])


def saved_by(make) -> list[torch.Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        make()
    return saved


def test_what_is_saved(kernels) -> None:
    factors, contraction, stats = (1, 2, 64, 9, 16), (1, 64, 9, 16), (1, 9, 9, 2)
    small = [stats, stats, (5 * 64 + 32, 32), (2 * 64 + 32, 4)]
    x = leaves(call(mask="bool"))
    given = {t.data_ptr() for t in (x.z, x.mask, *x.weights) if t is not None}

    def extra(**options) -> list[tuple]:
        return [tuple(t.shape) for t in saved_by(lambda: run(x, **options)) if t.data_ptr() not in given]

    assert extra() == [contraction, factors, *small]
    assert extra(recompute=True) == small
    for weight in x.weights:
        if weight is not None:
            weight.requires_grad_(False)
    x.z.requires_grad_(False)
    x.weights.g_out_weight.requires_grad_()
    assert extra() == [contraction, *small], "no gradient passes the contraction"
    x.weights.g_out_weight.requires_grad_(False)
    residual = torch.zeros_like(x.z, requires_grad=True)
    assert saved_by(lambda: run(x, residual=residual)) == []


@pytest.mark.parametrize("channels", [64, 128])
def test_memory(machine, monkeypatch, channels: int) -> None:
    """dx or dz, dzn and the gradients of both factors: four pair tensors beside what is saved."""
    nothing = lambda family, *rest: routing.Launch(lambda *arguments: None, 132)  # noqa: E731
    monkeypatch.setattr(routing, "find_kernel", nothing)
    x = call(96, channels, channels)
    shape, take = TriangleMultiplicationShape(96, channels), multiplication_backward.steps(x.weights, ALL)
    keep = Keep(True, True, True)
    _, saved = multiplication_launch.forward(
        multiplication_launch.find(shape, x.z, x.weights, None, True), x.z, None, x.weights, None, 1e-5, keep
    )
    pair, small = x.z.numel() * 2, 16 * sum(w.numel() * 4 for w in x.weights if w is not None)
    for kept, pairs in ((saved, 4), (saved._replace(x=None, factors=None), 6)):
        found = multiplication_backward.find(shape, x.z, take, (kept.x is not None,) * 2)
        assert (found.front_gradients is not None) == (channels == 128)
        arguments = (found, x.grad_out, x.z, None, x.weights, kept, 1e-5, ALL)
        peak = peak_of(lambda arguments=arguments: multiplication_backward.backward(*arguments))
        assert pairs * pair <= peak <= pairs * pair + small


# What is given is left alone, and may have any layout


@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_can_be_used_twice(kernels, recompute: bool) -> None:
    x, saved = leaves(call(mask="float", batch=2)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = run(x, recompute=recompute)
    before = [t.detach().clone() for t in saved]
    operands = [x.z, *(w for w in x.weights if w is not None)]
    first = torch.autograd.grad(out, operands, x.grad_out, retain_graph=True)
    second = torch.autograd.grad(out, operands, x.grad_out)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(saved, before, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_z(kernels, name: str) -> None:
    x = call(batch=2)
    z = LAYOUTS[name](x.z).detach().requires_grad_()
    plain = step(Inputs(z.detach().contiguous(), None, x.weights, x.grad_out), "incoming")
    weights = leaves(x).weights
    triangle_multiplication(z, "incoming", None, *weights).backward(x.grad_out)
    assert z.grad.shape == z.shape and torch.equal(z.grad, plain["z"])
    assert all(torch.equal(w.grad, plain[key]) for key, w in weights._asdict().items() if w is not None)


GRAD_OUTS = {
    "expanded": lambda x: torch.ones((), dtype=BF16).expand_as(x),
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels_outside": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "shifted": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("name", GRAD_OUTS)
def test_layouts_of_the_incoming_gradient(kernels, name: str) -> None:
    x = call()
    given = GRAD_OUTS[name](x.grad_out)
    assert equal(step(x, grad_out=given), step(x, grad_out=given.contiguous()))


def test_saved_tensors_may_travel(kernels) -> None:
    """Hooks that offload keep values and shapes, not strides or padding in memory."""
    x = call(mask="bool")
    expected, other = step(x), leaves(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True) if t.dtype != BF16 else t.clone(),
                                                  lambda t: torch.from_numpy(t) if not isinstance(t, torch.Tensor) else t):
        out = run(other)
    out.backward(x.grad_out)
    assert equal(gradients(other), expected)


def test_a_residual_gets_the_incoming_gradient(kernels) -> None:
    x = leaves(call())
    residual = torch.randn_like(x.z).requires_grad_()
    run(x, residual=residual).backward(x.grad_out)
    assert torch.equal(residual.grad, x.grad_out) and equal(gradients(x), step(x))
    both = leaves(call())
    run(both, residual=both.z).backward(both.grad_out)
    torch.testing.assert_close(both.z.grad, x.z.grad + x.grad_out)
    frozen = call()
    kernels.ran.clear()
    residual.grad = None
    run(frozen, residual=residual).backward(frozen.grad_out)
    assert torch.equal(residual.grad, frozen.grad_out) and ran(kernels) == FRONT


def test_double_backward_says_so(kernels) -> None:
    x = leaves(call())
    (grad,) = torch.autograd.grad(run(x).sum(), [x.z], create_graph=True)
    with pytest.raises(NotDifferentiable, match="differentiated twice"):
        grad.sum().backward()


# PyTorch's modes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kernels, reentrant: bool) -> None:
    plain, stored = call(), leaves(call())
    out = checkpoint(partial(triangle_multiplication), stored.z, "outgoing", None, *stored.weights, use_reentrant=reentrant)
    out.backward(plain.grad_out)
    assert ran(kernels) == FRONT * 2 + BACK and equal(gradients(stored), step(plain))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_whole(kernels, dynamic: bool, recompute: bool) -> None:
    def call_of(z, mask, weights, grad_out):
        return (triangle_multiplication(z, "incoming", mask, *weights, recompute=recompute).float() * grad_out.float()).sum()

    torch._dynamo.reset()
    compiled = torch.compile(call_of, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for crop in (8, 9):
        plain, traced = (leaves(call(crop, mask="bool")) for _ in range(2))
        call_of(plain.z, plain.mask, plain.weights, plain.grad_out).backward()
        eager = ran(kernels)
        compiled(traced.z, traced.mask, traced.weights, traced.grad_out).backward()
        assert equal(gradients(plain), gradients(traced)) and ran(kernels) == eager


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_opcheck(machine, keep: bool, recompute: bool) -> None:
    x = leaves(call(6, batch=2, mask="float", biases=True))
    torch.library.opcheck(ops._forward_op, (x.z, x.mask, *x.weights, None, "incoming", 1e-5, BF16, keep, recompute))
    x = call(6, batch=2, mask="float", biases=True)
    rule = ("incoming", 1e-5, BF16)
    torch.library.opcheck(ops._forward_op, (x.z, x.mask, *x.weights, None, *rule, keep, recompute, ALL))
    _, left = ops._forward_op(x.z, x.mask, *x.weights, None, *rule, keep, recompute, ALL)
    saved = ops._named(left, ops._kept(x.weights, (keep, recompute, ALL)))
    needed = [True, True, False] * 4 + [True]
    torch.library.opcheck(ops._backward_op, (x.grad_out, x.z, x.mask, *x.weights, saved.x, *rule, needed, *saved[1:]))


# Where a kernel is missing


@pytest.mark.parametrize("family", ["back_backward", "front_weights"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_missing_kernel_of_the_backward(machine, family: str, recompute: bool) -> None:
    machine.missing = {f"triangle_multiplication/{family}"}
    x = leaves(call(mask="bool"))
    with pytest.warns(FallbackWarning, match=f"the backward of .+ PyTorch path: no kernel of .+/{family}"):
        out = run(x, recompute=recompute)
    out.backward(x.grad_out)
    assert ran(machine) == FRONT
    check_gradients(x)


def test_without_a_kernel_that_finishes_pytorch_does(kernels) -> None:
    x = call(mask="bool")
    expected = step(x)
    assert ran(kernels) == FRONT + BACK
    kernels.missing = {multiplication_routing.FINISH}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert equal(step(x, recompute=True), expected), "another call, so its kernels are looked for again"
    assert ran(kernels) == [*FRONT, "front", "product_nt", *BACK[:-1]]


KINDS_OF_WEIGHTS = {
    "usual": ({}, True), "bfloat16_matrices": (dict.fromkeys(["p_in", "g_in", "p_out", "g_out"], BF16), True),
    "one_bfloat16_matrix": ({"g_in": BF16}, False), "all_bfloat16": (dict.fromkeys(Weights._fields, BF16), True),
    "one_bfloat16_norm": ({"norm_in_weight": BF16}, False), "bfloat16_norms": ({"norm_in": BF16, "norm_out": BF16}, False),
    "one_float64_matrix": ({"p_out": torch.float64}, False),
    "no_norm": ({"norm_out_weight": None}, False), "a_norms_bias": ({"norm_in_bias": None}, False),
    "some_biases": ({"g_out_bias": None}, False), "another_bias": ({"g_out_bias": BF16}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS_OF_WEIGHTS)
def test_which_weights_a_kernel_finishes(kernels, name: str) -> None:
    changes, served = KINDS_OF_WEIGHTS[name]
    x = call(biases=name != "no_norm")

    def changed(field: str, w: torch.Tensor | None) -> torch.Tensor | None:
        known = {key: to for key, to in changes.items() if field == key or field in (f"{key}_weight", f"{key}_bias")}
        to = next(iter(known.values()), torch.float32)
        return None if w is None or to is None else w.to(to)

    x = leaves(Inputs(x.z, None, Weights(*map(changed, Weights._fields, x.weights)), x.grad_out))
    assert layout_backward.kernel_finishes(x.weights, [True] * 12) == served
    run(x).backward(x.grad_out)
    assert ran(kernels) == FRONT + (BACK if served else BACK[:-1])
    if served:
        norms = "bfloat16" if name == "all_bfloat16" else "float32"
        assert kernels.asked[-1] == (multiplication_routing.FINISH, {"bias": True, "norm_dtype": norms})
    with torch.no_grad():
        _, grads = reference.multiplication_backward(x.grad_out, x.z, "outgoing", x.mask, x.weights)
    for field, w in x.weights._asdict().items():
        assert w is None or w.grad.dtype == w.dtype and relative_rms(w.grad, getattr(grads, field)) < GRADIENT


@pytest.mark.parametrize("index", range(12))
def test_a_frozen_weight_is_finished_by_pytorch(index: int) -> None:
    weights, needed = call(biases=True).weights, [True] * 13
    assert multiplication_backward.steps(weights, [False, *needed[1:]]).finish == (("bias", True), ("norm_dtype", "float32"))
    needed[1 + index] = False
    assert multiplication_backward.steps(weights, needed).finish is None
    bare, needed = call().weights, [True] * 13
    needed[1 + index] = False
    found = multiplication_backward.steps(bare, needed).finish
    assert found == ((("bias", False), ("norm_dtype", "float32")) if bare[index] is None else None)


def test_what_a_training_step_is_prepared_for() -> None:
    """Norms of bf16 matrices are bf16 in some models and float32 in others."""
    finish = {}
    for dtype in ("float32", "bfloat16"):
        found = multiplication_backward.all_variants(TriangleMultiplicationShape(64, 64, weight_dtype=dtype))
        assert len(set(found)) == len(found) and [family for family, _ in found[:7]][-1] == multiplication_routing.FINISH
        finish[dtype] = [dict(flags) for family, flags in found if family == multiplication_routing.FINISH]
    narrow, wide = ({"bias": False, "norm_dtype": dtype} for dtype in ("bfloat16", "float32"))
    assert finish == {"float32": [wide], "bfloat16": [narrow, wide]}
    shape = TriangleMultiplicationShape(64)
    both = [family.partition("/")[2] for family, _ in multiplication_backward.all_variants(shape)]
    assert both == ["back_backward", "back_weights", "product_nn", "product_tn", *TOGETHER[4:]]
    any_step = {family.partition("/")[2] or family for family, _ in multiplication_backward.all_variants(shape, partial=True)}
    again = multiplication_routing.front_again(shape)
    assert any_step == {*both, "front_backward", "front_weights", again}, "frozen weights, no gradient of z, factors made again"


def test_gradients_of_transposed_weights(kernels) -> None:
    x = call()
    expected = step(x)
    w = x.weights.p_in_weight.t().contiguous().t().requires_grad_()
    other = leaves(x)
    other = Inputs(other.z, None, other.weights._replace(p_in_weight=w), None)
    kernels.ran.clear()
    run(other).backward(x.grad_out)
    assert ran(kernels) == FRONT + BACK
    assert w.grad.stride() == w.stride() and torch.equal(w.grad, expected["p_in_weight"])


@pytest.mark.parametrize("family", ["fold", "front", "back"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_a_missing_kernel_of_the_forward(machine, family: str, recompute: bool, traced: bool) -> None:
    """PyTorch then leaves what the kernels of the backward read, as what is saved was decided from metadata."""
    machine.missing = {f"triangle_multiplication/{family}"}
    x = leaves(call(10, mask="bool", batch=2))
    torch._dynamo.reset()
    update = torch.compile(run, fullgraph=True, backend="aot_eager") if traced else run
    with pytest.warns(FallbackWarning, match=f"^triangle_multiplication takes the PyTorch path: no kernel of .+/{family}"):
        out = update(x, recompute=recompute)
        out.backward(x.grad_out)
    assert ran(machine) == ([] if recompute and family == "front" else ["front", "product_nt"] * recompute + BACK)
    check_gradients(x)


def check_gradients(x: Inputs) -> None:
    with torch.no_grad():
        dz, grads = reference.multiplication_backward(x.grad_out, x.z, "outgoing", x.mask, x.weights)
    for name, grad in gradients(x).items():
        assert relative_rms(grad, dz if name == "z" else getattr(grads, name)) < GRADIENT, name


def test_what_kernels_do_not_take(machine) -> None:
    """Too wide, another dtype: as before there were kernels for the backward, and one warning where the forward had some."""
    wide = leaves(call(4, 32, 288))
    with pytest.warns(FallbackWarning, match="the backward of .+ PyTorch path: the widths are above 256") as caught:
        saved = saved_by(lambda: run(wide).backward(wide.grad_out))
    assert [str(w.message).partition(" takes")[0] for w in caught] == ["the backward of triangle_multiplication"]
    assert [t.shape for t in saved if t.dim() == 4] == [wide.z.shape, (1, 288, 4, 4)] and ran(machine) == FRONT
    check_gradients(wide)
    for dtype in (torch.float16, torch.float32):
        x = leaves(call(dtype=dtype))
        with pytest.warns(FallbackWarning, match="^triangle_multiplication takes"):
            run(x).backward(x.grad_out)
    x = leaves(call(dtype=torch.float32))
    with pytest.warns(FallbackWarning, match="autocast computes in float16"), torch.autocast("cpu", dtype=torch.float16):
        out = run(x)
    out.backward(x.grad_out.to(torch.float16))
    assert ran(machine) == [] and x.z.grad.dtype == torch.float32


def test_a_cold_kernel_of_the_backward_stops_the_forward_in_a_capture(kernels, monkeypatch) -> None:
    def find(family, *rest):
        if family == routing.FRONT_WEIGHTS:
            raise ColdKernelInCapture("cold")
        return usual(family, *rest)

    usual = kernels.find
    monkeypatch.setattr(routing, "find_kernel", find)
    with pytest.raises(ColdKernelInCapture):
        run(leaves(call()))
    assert kernels.ran == []
    z = call().z.requires_grad_()
    run(Inputs(z, None, call().weights, None))


def test_empty_calls(kernels, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = torch.randn(0, 9, 9, 32, dtype=BF16, requires_grad=True)
        triangle_multiplication(z, "outgoing", None, *call().weights).sum().backward()
    assert z.grad.shape == z.shape


# Routing


class FakeTemplate:
    """A template of some family that serves what is at most 256 wide."""

    name, arch = "fake", "sm_90a"

    def __init__(self, family: str) -> None:
        self.op, _, self.direction = family.partition("/")

    def supports(self, shape):
        return shape.channels <= 256, f"{self.direction} takes up to 256 channels"

    def splits(self, shape, config, num_ctas):
        return config + num_ctas


def test_templates_decide_which_backward_kernels_take(monkeypatch) -> None:
    shape = TriangleMultiplicationShape(200)
    there = {family: FakeTemplate(family) for family in multiplication_routing.backward_families(shape)}
    there |= {family: FakeTemplate(family) for family in multiplication_routing.families(shape)}
    monkeypatch.setattr(registry, "templates", lambda op, direction: [t for t in [there.get(f"{op}/{direction}")] if t])
    monkeypatch.setattr(multiplication_routing, "_served", set())
    missing = there.pop(routing.FRONT_WEIGHTS)
    refused = "no template of triangle_multiplication/front_weights is registered"
    assert multiplication_routing.backward_unsupported(shape) == refused and multiplication_routing.unsupported(shape) is None
    there[routing.FRONT_WEIGHTS] = missing
    assert multiplication_routing.backward_unsupported(shape) is None
    wide = TriangleMultiplicationShape(200, 512)
    assert multiplication_routing.backward_unsupported(wide) == "fold takes up to 256 channels"
    assert not multiplication_routing.front_gradients_together(shape), "no template of that family"
    there[routing.FRONT_GRADIENTS] = FakeTemplate(routing.FRONT_GRADIENTS)
    assert multiplication_routing.front_gradients_together(shape) and not multiplication_routing.front_gradients_together(wide)


def test_products_of_the_factors_gradients() -> None:
    for direction in DIRECTIONS:
        families = multiplication_routing.factor_products(direction)
        assert [f.rpartition("_")[2] for f in families] == (["nn", "tn"] if direction == "outgoing" else ["nt", "nn"])


@pytest.mark.parametrize("family", [routing.FRONT_WEIGHTS, routing.BACK_WEIGHTS, routing.FRONT_GRADIENTS,
                                    multiplication_routing.FRONT_BACKWARD])  # fmt: skip
def test_weight_kernels_get_their_splits(monkeypatch, family: str) -> None:
    class Found:
        config, function, template = 5, staticmethod(print), FakeTemplate(family)

    monkeypatch.setattr(routing.kernels, "get_kernel", lambda *arguments: Found())
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    launch = routing.find_kernel(family, TriangleMultiplicationShape(64), (), torch.device("cpu"))
    assert (launch.num_ctas, launch.slabs, launch.splits) == (132, 1, 1 if family.endswith("backward") else 137)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("channels", [32, 128])
def test_gradients_of_weights_do_not_depend_on_the_splits(kernels, channels: int, splits: int) -> None:
    x = call(17, channels)
    expected = step(x)
    kernels.splits = splits
    for name, grad in step(x).items():
        assert relative_rms(grad, expected[name].double()) < 1e-5, name


def test_saved_names() -> None:
    left = [torch.zeros(i) for i in (1, 2, 3, 4, 5)]
    assert [None if t is None else t.numel() for t in ops._named(left, Keep(True, False, True))] == [1, None, 2, 3, 4, 5]
    assert ops._named([], Keep()) == Saved()
