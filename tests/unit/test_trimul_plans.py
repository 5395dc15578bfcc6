"""Plans of triangle multiplications: what is remembered of a call, what makes it void, and what a remembered call costs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from multiplication_emulation import EmulatedKernels
from test_trimul_ops import BF16, WRONG, Launches, call, gradients, leaves, run
from torch.utils._python_dispatch import TorchDispatchMode

from tpf_jit import kernels as registry_of_kernels
from tpf_jit.errors import FallbackWarning, InvalidInput
from tpf_jit.ops import multiplication_plans, multiplication_routing, routing
from tpf_jit.ops import triangle_multiplication as ops
from tpf_jit.ops.triangle_multiplication import triangle_multiplication
from tpf_jit.templates.triangle_multiplication.inputs import Inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights

HOPPER = routing.Hardware("sm_90a", "", 132)


@pytest.fixture
def kernels(monkeypatch) -> EmulatedKernels:
    """A machine with a Hopper GPU and all kernels, and no plans yet."""
    emulated = EmulatedKernels()
    monkeypatch.setattr(routing, "hardware", lambda device: HOPPER)
    monkeypatch.setattr(routing, "find_kernel", emulated.find)
    monkeypatch.setattr(multiplication_routing, "backward_unsupported", lambda shape: None)
    monkeypatch.setattr(routing, "_warned", set())
    monkeypatch.setattr(multiplication_routing, "folds_in_front", lambda shape: False)  # see test_trimul_small.py
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    return emulated


def asked(kernels: EmulatedKernels, make: Callable) -> int:
    """How many kernels were looked up."""
    kernels.asked.clear()
    make()
    return len(kernels.asked)


def step(x: Inputs, **options) -> dict[str, torch.Tensor]:
    x = leaves(x)
    out = run(x, **options)
    out.backward(x.grad_out.to(out.dtype))
    return gradients(x) | {"out": out.detach()}


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What is remembered


@pytest.mark.parametrize("options", [{}, {"residual": True}, {"recompute": True}], ids=str)
def test_the_second_call_looks_nothing_up_and_gives_the_same(kernels, options: dict) -> None:
    x = call(batch=2, mask="bool", biases=True)
    options = options | ({"residual": x.z} if "residual" in options else {})
    operator, _ = ops._forward_op(x.z, x.mask, *x.weights, options.get("residual"), "outgoing", 1e-5, BF16, False)
    assert asked(kernels, lambda: run(x, **options)) == 4 and asked(kernels, lambda: run(x, **options)) == 0
    assert torch.equal(run(x, **options), operator)
    first = step(x, **options)
    assert asked(kernels, lambda: step(x, **options)) == 0
    assert equal(step(x, **options), first) and torch.equal(first["out"], operator)
    with Launches():  # a mode that watches sends both passes through the operators
        assert asked(kernels, lambda: equal(step(x, **options), first) or pytest.fail("other gradients")) > 4


def test_in_place(kernels) -> None:
    x = call()
    want = run(x, residual=x.z)
    for _ in range(2):
        z = x.z.clone()
        version = z._version
        with torch.no_grad():
            assert triangle_multiplication(z, "outgoing", None, *x.weights, residual=z, inplace=True) is z
        assert torch.equal(z, want) and z._version > version
    with pytest.raises(InvalidInput, match="gradients are wanted"):
        triangle_multiplication(x.z.clone(), "outgoing", None, *leaves(x).weights, residual=x.z, inplace=True)
    with pytest.raises(InvalidInput, match="all its own"), torch.no_grad():
        triangle_multiplication(x.z[:, :1].expand_as(x.z), "outgoing", None, *x.weights, residual=x.z, inplace=True)


def test_other_ranks_and_layouts_share_a_plan(kernels) -> None:
    x = call(batch=2, mask="bool")
    want = run(x)
    kernels.asked.clear()
    assert torch.equal(triangle_multiplication(x.z[None], "outgoing", x.mask[None], *x.weights)[0], want)
    assert torch.equal(run(Inputs(x.z.transpose(1, 2).contiguous().transpose(1, 2), x.mask, x.weights, None)), want)
    strided = x.weights._replace(p_out_weight=x.weights.p_out_weight.T.contiguous().T)
    assert torch.equal(run(Inputs(x.z, x.mask, strided, None)), want)
    assert torch.equal(run(x, eps=1e-5), want) and not torch.equal(run(x, eps=1.0), want)
    assert kernels.asked == []


# What makes it void


def with_weight(name: str, change: Callable) -> Callable:
    return lambda x: Inputs(x.z, x.mask, x.weights._replace(**{name: change(getattr(x.weights, name))}), x.grad_out)


OTHER = {
    "crop": lambda x: call(8, mask="bool"),
    "batch": lambda x: call(batch=2, mask="bool"),
    "widths": lambda x: call(hidden=32, mask="bool"),
    "mask_absent": lambda x: Inputs(x.z, None, x.weights, x.grad_out),
    "mask_of_numbers": lambda x: Inputs(x.z, x.mask.float(), x.weights, x.grad_out),
    "mask_broadcast": lambda x: Inputs(x.z, x.mask[:, :1], x.weights, x.grad_out),
    "matrix_dtype": with_weight("g_out_weight", lambda w: w.to(BF16)),
    "norm_absent": with_weight("norm_in_bias", lambda w: None),
    "bias": with_weight("g_in_bias", lambda w: torch.zeros(128)),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_metadata_is_another_plan(kernels, name: str) -> None:
    x = call(mask="bool")
    run(x)
    other = OTHER[name](x)
    want, _ = ops._forward_op(other.z, other.mask, *other.weights, None, "outgoing", 1e-5, BF16, False)
    assert asked(kernels, lambda: run(other)) == 4 and asked(kernels, lambda: run(other)) == 0
    assert torch.equal(run(other), want) and asked(kernels, lambda: run(x)) == 0


def test_other_options_are_another_plan(kernels) -> None:
    x = call()
    run(x)
    assert asked(kernels, lambda: run(x, "incoming")) == 4
    assert asked(kernels, lambda: run(x, residual=x.z)) == 4
    with torch.no_grad():
        assert asked(kernels, lambda: run(leaves(x))) == 0, "no gradients, as before"
    assert asked(kernels, lambda: run(leaves(x))) > 4
    frozen = leaves(x)
    frozen.z.requires_grad_(False)
    assert asked(kernels, lambda: run(frozen)) > 4 and asked(kernels, lambda: run(frozen, recompute=True)) > 4
    assert asked(kernels, lambda: run(frozen)) == 0
    run(frozen).backward(x.grad_out)
    assert frozen.z.grad is None and frozen.weights.p_in_weight.grad is not None


def test_autocast_is_another_plan(kernels) -> None:
    x = call()
    run(x)
    with torch.autocast("cpu", dtype=torch.float16), pytest.warns(FallbackWarning, match="autocast computes in float16"):
        assert run(x).dtype == torch.float16
    with torch.autocast("cpu", dtype=BF16):
        assert asked(kernels, lambda: run(x)) == 4 and run(x).dtype == BF16
    assert asked(kernels, lambda: run(x)) == 0


@pytest.mark.parametrize("drop", [registry_of_kernels.reload_choices, registry_of_kernels.forget], ids=lambda drop: drop.__name__)
def test_new_choices_are_asked_for(kernels, drop: Callable) -> None:
    """As after tuning, or when another database is used: also by a backward whose forward ran before."""
    x = leaves(call())
    run(x).backward(x.grad_out)
    out = run(x)
    assert kernels.asked and asked(kernels, lambda: out.backward(x.grad_out)) == 0
    out = run(x)
    drop()
    backward = asked(kernels, lambda: out.backward(x.grad_out))
    assert backward >= 6 and asked(kernels, lambda: run(x)) == 4 + backward


def test_choices_of_the_database_reach_a_planned_call(monkeypatch) -> None:
    """From the dispatcher to the launch, without stand-ins in between but the functions themselves."""
    monkeypatch.setattr(routing, "hardware", lambda device: HOPPER)
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    launched = []
    monkeypatch.setattr(registry_of_kernels, "function_of", lambda spec, store=None: lambda *arguments: launched.append(spec))
    registry_of_kernels.forget()
    x = call(130)
    run(x)
    before = launched[:]
    assert [spec.template.split("_")[2] for spec in before] == ["fold", "front", "product", "back"]
    resolve = registry_of_kernels._resolve

    def another(name, shape, flags, dispatcher):
        kernel = resolve(name, shape, flags, dispatcher)
        if not name.endswith("/front"):
            return kernel
        template = kernel.template
        config = next(config for config in template.space(shape) if config != kernel.config)
        return registry_of_kernels.get_kernel(template.name, shape, flags, config)

    monkeypatch.setattr(registry_of_kernels, "_resolve", another)
    launched.clear()
    run(x)
    assert launched == before, "nobody said that choices changed"
    registry_of_kernels.reload_choices()
    launched.clear()
    run(x)
    assert [a == b for a, b in zip(launched, before, strict=True)] == [True, False, True, True]
    registry_of_kernels.forget()


def test_a_refusal_is_not_remembered(kernels) -> None:
    x = call()
    kernels.missing = {multiplication_routing.BACK}
    with pytest.warns(FallbackWarning, match="no kernel of"):
        run(x)
    kernels.missing = set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(kernels, lambda: run(x)) == 4 and asked(kernels, lambda: run(x)) == 0


def test_without_kernels_nothing_is_remembered(monkeypatch) -> None:
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    step(call())
    assert multiplication_plans._plans == {}


def test_plans_are_bounded(kernels, monkeypatch) -> None:
    monkeypatch.setattr(multiplication_plans, "_MAX_PLANS", 3)
    for crop in range(1, 9):
        run(call(crop))
    assert 1 <= len(multiplication_plans._plans) <= 3


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named_beside_a_plan(kernels, case: str) -> None:
    argument, changes = WRONG[case]
    x = call()
    named = {"z": x.z, "direction": "outgoing", **x.weights._asdict()}
    triangle_multiplication(**named)
    with pytest.raises(InvalidInput, match=f"^{argument}: got .+; allowed: .+"):
        triangle_multiplication(**{**named, **{name: change(x) for name, change in changes.items()}})


# Who must see the operators


def test_modes_and_transforms_see_the_operators(kernels) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    x, names = call(), []
    run(x)
    with Seen():
        run(x)
    assert ops._forward_op in names
    traced = make_fx(lambda z: triangle_multiplication(z, "outgoing", None, *x.weights))(x.z)
    assert ops._forward_op in {node.target for node in traced.graph.nodes}
    with FakeTensorMode() as mode:
        weights = Weights(*(None if w is None else mode.from_tensor(w) for w in x.weights))
        z = mode.from_tensor(x.z)
        assert type(triangle_multiplication(z, "outgoing", None, *weights)) is type(z)
    kernels.ran.clear()
    assert type(triangle_multiplication(z, "outgoing", None, *weights)) is type(z) and kernels.ran == [], "outside the mode too"


@pytest.mark.parametrize("backward", [False, True])
def test_torch_compile_traces_the_operators_beside_a_plan(kernels, backward: bool) -> None:
    x = call(mask="bool")
    make = step if backward else lambda x: {"out": run(x)}
    want = make(x)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = leaves(x) if backward else x
    out = compiled(given)
    found = {"out": out.detach()}
    if backward:
        out.backward(x.grad_out)
        found = gradients(given) | found
    assert equal(found, want)


def test_a_default_device_costs_no_plan(kernels) -> None:
    x = call()
    run(x)
    with torch.device("cpu"):
        assert asked(kernels, lambda: run(x)) == 0
    with torch.overrides.BaseTorchFunctionMode():
        assert asked(kernels, lambda: run(x)) == 4


def test_lazy_tensors_go_through_the_operators(kernels) -> None:
    """Memory of a negated view holds the opposite; a plan would hand it to kernels as it is."""
    x = call()
    run(x)
    opposite = -x.weights.p_out_weight
    lazy = Inputs(x.z, x.mask, x.weights._replace(p_out_weight=torch._neg_view(opposite)), x.grad_out)
    assert lazy.weights.p_out_weight.is_neg()
    assert torch.equal(run(lazy), run(x)) and asked(kernels, lambda: run(lazy)) == 4
    held = leaves(x)
    out = run(held)
    grads = torch.autograd.grad(out, [held.z], torch._neg_view(-x.grad_out.to(out.dtype)), retain_graph=True)
    assert torch.equal(grads[0], torch.autograd.grad(out, [held.z], x.grad_out.to(out.dtype))[0])


def test_plans_of_kernels_before_are_dropped(kernels) -> None:
    for _ in range(3):
        run(call())
        registry_of_kernels.reload_choices()
    run(call())
    assert len(multiplication_plans._plans) == 1


def test_double_backward_beside_a_plan(kernels) -> None:
    x = leaves(call())
    run(x).backward(x.grad_out)
    (grad,) = torch.autograd.grad(run(x).sum(), [x.z], create_graph=True)
    assert grad.requires_grad


# What a remembered call costs


def best_us(make: Callable, calls: int = 40, rounds: int = 15) -> float:
    """Microseconds of a call, the least of several rounds, as other work on the machine only adds."""
    seen = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            make()
        seen.append((time.perf_counter() - started) / calls * 1e6)
    return min(seen)


def test_python_of_a_planned_call_is_quick(kernels, monkeypatch) -> None:
    """With kernels that do nothing 30 us forward and 170 us a step where this was written; the forward operator took 50."""
    nothing = routing.Launch(lambda *arguments: None, 132)
    monkeypatch.setattr(routing, "find_kernel", lambda *arguments: nothing)
    x = call(8, 32, 32, mask="float")
    forward = best_us(lambda: run(x))
    operator = best_us(partial(ops._forward_op, x.z, x.mask, *x.weights, None, "outgoing", 1e-5, BF16, False))
    assert forward < 0.8 * operator and forward < 400
    trained = leaves(x)
    operands = [trained.z, *(w for w in trained.weights if w is not None)]
    both = best_us(lambda: torch.autograd.grad(run(trained), operands, x.grad_out))
    assert both < 2000
