"""Triangle multiplications of small crops: one launch folds the weights and makes the factors.

Kernels are emulations with their calling conventions (`multiplication_emulation`); numbers of real ones are for tests/gpu.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from multiplication_emulation import EmulatedKernels
from test_trimul_ops import BF16, call, distance, gradients, leaves, run

from tpf_jit import api
from tpf_jit import kernels as kernels_of
from tpf_jit.ops import multiplication_backward, multiplication_plans, multiplication_routing, routing
from tpf_jit.ops.triangle_multiplication import triangle_multiplication
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_multiplication import reference
from tpf_jit.templates.triangle_multiplication.layout import Weights

TOGETHER = multiplication_routing.FOLD_FRONT
FRONT_ROWS = "triangle_multiplication_front_rows_sm90"


@pytest.fixture
def kernels(monkeypatch) -> EmulatedKernels:
    """A machine with a Hopper GPU and all kernels, no plans yet, where a warning is an error."""
    emulated = EmulatedKernels()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "find_kernel", emulated.find)
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield emulated


def looked_up(kernels: EmulatedKernels) -> list[str]:
    return [family for family, _ in kernels.asked]


def names(crop: int, channels: int = 128, hidden: int = 128, batch: int = 1) -> tuple[str, ...]:
    shape = TriangleMultiplicationShape(crop, channels, hidden, batch=batch)
    return tuple(family.partition("/")[2] for family in multiplication_routing.families(shape))


def test_which_calls_take_three_launches() -> None:
    assert names(1) == names(128) == names(64, 96, 160) == names(64, batch=4) == ("fold_front", "product_nt", "back")
    four = ("fold", "front", "product_nt", "back")
    assert names(129) == names(64, batch=5) == four, "no longer few pairs"
    assert names(64, 256, 256) == four, "weights that do not fit on an SM"


def test_larger_calls_pay_nothing_for_it(monkeypatch) -> None:
    """Every call without a plan asks, so the answer must come before spaces of configurations are made."""
    template = registry.get("triangle_multiplication_fold_front_sm90")
    monkeypatch.setattr(type(template), "space", lambda *_: pytest.fail("a space was made"))
    assert not multiplication_routing.folds_in_front(TriangleMultiplicationShape(129))


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("weights", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("crop, mask, biases", [(9, "bool", False), (16, "none", True), (1, "float", False)])
def test_three_launches_compute_what_four_do(kernels, monkeypatch, direction, weights, crop, mask, biases) -> None:
    x = call(crop, direction=direction, batch=2, mask=mask, biases=biases, weights=weights)
    found = run(x, direction)
    assert kernels.asked == [
        (TOGETHER, {"bias": biases}), (multiplication_routing.contraction(direction), {}),
        (multiplication_routing.BACK, {"residual": False, "stats": False}),
    ]  # fmt: skip
    assert distance(found, reference.multiplication(x.z, direction, x.mask, x.weights)) < 8e-3
    monkeypatch.setattr(multiplication_routing, "folds_in_front", lambda shape: False)
    monkeypatch.setattr(multiplication_plans, "_plans", {})
    assert torch.equal(run(x, direction), found) and looked_up(kernels)[3:5] == [
        multiplication_routing.FOLD, multiplication_routing.FRONT,
    ]  # fmt: skip


def test_the_kernel_sees_the_dtype_in_which_weights_are_passed(kernels, monkeypatch) -> None:
    shapes, usual = {}, kernels.find
    monkeypatch.setattr(
        routing, "find_kernel", lambda family, shape, *rest: shapes.update({family: shape}) or usual(family, shape, *rest)
    )
    x = call()
    mixed = x.weights._replace(p_in_weight=x.weights.p_in_weight.to(BF16))
    found = triangle_multiplication(x.z, "outgoing", None, *mixed)
    assert shapes[TOGETHER].weight_dtype == "float32"
    assert distance(found, reference.multiplication(x.z, "outgoing", None, mixed)) < 8e-3


def test_weights_that_lie_anywhere_are_copied(kernels) -> None:
    """The emulation refuses what is not on a boundary."""
    x = call(biases=True)
    want = run(x)

    def shifted(w: torch.Tensor) -> torch.Tensor:
        return torch.empty(w.numel() + 1)[1:].view(w.shape).copy_(w)

    moved = Weights(*map(shifted, x.weights))
    assert all(w.data_ptr() % 16 for w in moved)
    assert torch.equal(triangle_multiplication(x.z, "outgoing", None, *moved), want)


def test_without_that_kernel_the_two_it_stands_for_run(kernels) -> None:
    x = call()
    want = run(x)
    multiplication_plans._plans.clear()
    kernels.asked.clear()
    kernels.missing = {TOGETHER}
    assert torch.equal(run(x), want)
    product, back = multiplication_routing.contraction("outgoing"), multiplication_routing.BACK
    assert looked_up(kernels) == [TOGETHER, multiplication_routing.FOLD, FRONT_ROWS, product, back]
    kernels.ran.clear()
    x = leaves(x)
    run(x, recompute=True).backward(x.grad_out)
    assert kernels.ran.count(FRONT_ROWS) == 2, "one template makes the factors, and makes them again"
    kernels.missing = {TOGETHER, FRONT_ROWS}
    multiplication_plans._plans.clear()
    with pytest.raises(UserWarning, match=f"no kernel of {FRONT_ROWS}"):
        run(x)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_training_step(kernels, recompute: bool) -> None:
    """Factors that are made again come from the template whose arithmetic that kernel has, from the saved folded weights."""
    x, other = leaves(call(mask="bool", batch=2)), leaves(call(mask="bool", batch=2))
    run(x, recompute=recompute).backward(x.grad_out)
    assert looked_up(kernels)[0] == TOGETHER and (FRONT_ROWS in looked_up(kernels)) == recompute
    assert kernels.ran.count(TOGETHER) == 1 and kernels.ran.count(FRONT_ROWS) == recompute
    kernels.asked.clear()
    run(other, recompute=not recompute).backward(other.grad_out)
    again = gradients(other)
    assert all(torch.equal(grad, again[name]) for name, grad in gradients(x).items())
    count = len(kernels.asked)
    run(leaves(x), recompute=recompute).backward(x.grad_out)
    assert len(kernels.asked) == count, "a plan"


@pytest.mark.parametrize("crop", [64, 384])
def test_what_a_step_that_makes_factors_again_needs_is_prepared(crop: int) -> None:
    shape = TriangleMultiplicationShape(crop)
    take = multiplication_backward.Steps(True, True, True, None)
    needed = {family for family, _, runs in multiplication_backward.variants(shape, take, (False, False)) if runs}
    prepared = {kernel.spec.template for kernel in api._of_training(shape)}
    assert {kernels_of.get_kernel(family, shape).spec.template for family in needed} <= prepared


def test_torch_compile_with_crops_on_both_sides(kernels) -> None:
    def update(z, *weights):
        return triangle_multiplication(z, "outgoing", None, *weights)

    compiled = torch.compile(update, dynamic=True, backend="eager")
    for crop in (120, 128, 129, 140):
        x = call(crop)
        kernels.asked.clear()
        found = compiled(x.z, *x.weights)
        assert (looked_up(kernels)[0] == TOGETHER) == (crop <= 128)
        assert torch.equal(found, run(x))


def test_its_template_makes_the_factors_again() -> None:
    """Both names are of templates that compute the same, with the same space of configurations."""
    shape = TriangleMultiplicationShape(100)
    one, other = registry.get(FRONT_ROWS), registry.get("triangle_multiplication_fold_front_sm90")
    assert multiplication_routing.front_again(shape) == one.name and one.family == multiplication_routing.FRONT
    assert other.space(shape) == one.space(shape) and other.default(shape) in other.space(shape)
    assert multiplication_routing.front_again(TriangleMultiplicationShape(200)) == multiplication_routing.FRONT
