"""The backward stages of the triangle multiplicative update: their algebra in float64, and their workloads on emulations."""

from __future__ import annotations

import math

import multiplication_backward_emulation as emulation
import multiplication_emulation as forward
import pytest
import torch
from torch import Tensor

from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_attention.workload import relative_rms
from tpf_jit.templates.triangle_multiplication import layout, layout_backward, reference
from tpf_jit.templates.triangle_multiplication.config_gradients import LAUNCH_ROWS
from tpf_jit.templates.triangle_multiplication.inputs import FAMILIES, Inputs, make_inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights
from tpf_jit.templates.triangle_multiplication.workload import OperatorWorkload
from tpf_jit.templates.triangle_multiplication.workload_backward import (
    BackBackwardWorkload,
    BackWeightsWorkload,
    FrontBackwardWorkload,
    FrontWeightsWorkload,
)
from tpf_jit.templates.triangle_multiplication.workload_finish import FinishWorkload
from tpf_jit.templates.triangle_multiplication.workload_gradients import FrontGradientsWorkload

Shape = TriangleMultiplicationShape
KINDS = {
    "back_backward": BackBackwardWorkload, "back_weights": BackWeightsWorkload,
    "front_backward": FrontBackwardWorkload, "front_weights": FrontWeightsWorkload, "front_gradients": FrontGradientsWorkload,
}  # fmt: skip
SUMMED = ["back_weights", "front_weights", "front_gradients"]
EPS = 1e-5


def served(name: str, crop: int, channels: int, hidden: int, *rest, **fields) -> TriangleMultiplicationShape:
    """That problem, or for front_gradients one that it takes: from 64 hidden on in two launches, below in one."""
    if name == "front_gradients":
        channels, hidden = 128, 128 if hidden >= 64 else 64
    return Shape(crop, channels, hidden, *rest, **fields)


# The algebra


def padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, layout.padded(x.shape[-1]) - x.shape[-1]))


def exact_case(shape: Shape, biases: bool, **replaced: Tensor | None) -> Inputs:
    """A call in float64; zeros in the norms' weights, where they hide nothing in the folded form."""
    made = make_inputs(shape, "cpu", 5, "trained_like", "random50", biases, with_grad_out=True)
    weights = Weights(*(None if x is None else x.double() for x in made.weights))
    weights.norm_in_weight[3], weights.norm_out_weight[:2] = 0.0, 0.0
    return Inputs(made.z.double(), made.mask, weights._replace(**replaced), made.grad_out.double())


def check_algebra(call: Inputs, direction: str, splits: int = 1) -> None:
    arguments = (call.z, direction, call.mask, call.weights)
    factors = reference.factors(call.z, call.mask, call.weights, EPS)
    kept = padded(factors), padded(reference.contract(factors, direction))
    dz, grads = emulation.gradients(call.grad_out, *arguments, kept, EPS, splits)
    expected_dz, expected = reference.multiplication_backward(call.grad_out, *arguments, EPS)
    torch.testing.assert_close(dz, expected_dz)
    for name, got, want in zip(Weights._fields, grads, expected, strict=True):
        assert (got is None) == (want is None), name
        if got is not None:
            torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize(("mask", "biases", "splits"), [("none", True, 1), ("float", False, 3), ("bool", True, 7)])
def test_folded_stages_are_the_backward(direction: str, mask: str, biases: bool, splits: int) -> None:
    check_algebra(exact_case(Shape(7, 32, 64, direction, 2, mask=mask), biases), direction, splits)


@pytest.mark.parametrize("absent", [("norm_in_weight",), ("norm_in_bias", "norm_out_weight"), ("norm_out_bias",),
                                    ("norm_in_weight", "norm_in_bias", "norm_out_weight", "norm_out_bias"),
                                    ("p_in_bias", "g_out_bias"), ("g_in_bias", "p_out_bias", "norm_in_bias")])  # fmt: skip
def test_weights_may_be_absent(absent: tuple[str, ...]) -> None:
    check_algebra(exact_case(Shape(5, 64, 32, batch=2, mask="bool"), True, **dict.fromkeys(absent)), "outgoing", 2)


def planes_of(shape: Shape, splits: int) -> tuple[Tensor, ...]:
    z = torch.empty(1, 4, 4, shape.channels)
    front = layout_backward.front_planes_empty(z, shape.hidden, splits)
    made = (*front, *layout_backward.back_planes_empty(z, shape.hidden, splits))
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(x.shape, generator=generator) for x in made)


def test_gradients_have_the_form_of_their_weights() -> None:
    """Dtype, shape and memory of their own; each is the rounded float32 result, whatever else is wanted."""
    shape = Shape(4, 32, 64)
    weights = make_inputs(shape, projection_biases=True).weights
    planes = planes_of(shape, 3)
    before = [x.clone() for x in planes]
    whole = layout_backward.finish(weights, *planes, [True] * 12)
    assert all(torch.equal(x, y) for x, y in zip(planes, before, strict=True)), "the planes stay as they are"
    assert len({x.untyped_storage().data_ptr() for x in whole}) == 12
    half = Weights(*(x.bfloat16() if i % 2 else x for i, x in enumerate(weights)))
    for i, (w, got) in enumerate(zip(half, layout_backward.finish(half, *planes, [True] * 12), strict=True)):
        assert got.dtype == w.dtype and got.shape == w.shape
        alone = layout_backward.finish(half, *planes, [i == j for j in range(12)])
        assert torch.equal(alone[i], got) and sum(x is not None for x in alone) == 1
    rounded = Weights(*(x.float() for x in half))
    exact = layout_backward.finish(rounded, *planes, [True] * 12)
    for w, got, want in zip(half, layout_backward.finish(half, *planes, [True] * 12), exact, strict=True):
        assert torch.equal(got, want.to(w.dtype))


@pytest.mark.parametrize(("front", "prefixes"), [(True, ("p_out", "g_out", "norm_out")), (False, ("p_in", "g_in"))])
def test_a_side_of_which_nothing_is_needed_may_be_absent(front: bool, prefixes: tuple[str, ...]) -> None:
    shape = Shape(4, 64, 32)
    weights = make_inputs(shape, projection_biases=True).weights
    planes = planes_of(shape, 2)
    needed = [name.startswith(prefixes) for name in Weights._fields]
    expected = layout_backward.finish(weights, *planes, needed)
    rest = (None, None, *planes[2:]) if front else (*planes[:2], None, None)
    for got, want, need in zip(layout_backward.finish(weights, *rest, needed), expected, needed, strict=True):
        assert (got is not None) == (want is not None) == need
        assert not need or torch.equal(got, want)


def test_finishing_is_exact_to_float32() -> None:
    shape = Shape(4, 64, 32)
    weights = make_inputs(shape, projection_biases=True, family="trained_like").weights
    planes = planes_of(shape, 5)
    found = layout_backward.finish(weights, *planes, [True] * 12)
    double = Weights(*(x.double() for x in weights))
    exact = layout_backward.finish(double, *(x.double() for x in planes), [True] * 12)
    for name, got, want in zip(Weights._fields, found, exact, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-6, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding(dtype: torch.dtype) -> None:
    """Matrices are rounded once, u is that of the rounded matrix, b' knows nothing of the rounding; all contiguous."""
    made = make_inputs(Shape(4, 64, 32), projection_biases=True, family="trained_like").weights
    weights = Weights(*(x.to(dtype) for x in made))
    w, folded = Weights(*(x.double() for x in weights)), layout.fold(weights, torch.bfloat16)
    assert all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in folded)
    assert [tuple(x.shape) for x in folded] == [(64, 64), (64, 64), (64, 4), (64, 32), (64, 64), (64, 4)]
    rows = (
        (folded.p_in, w.p_in_weight, w.p_in_bias, folded.in_terms[:, :2], w.norm_in_weight, w.norm_in_bias),
        (folded.g_in, w.g_in_weight, w.g_in_bias, folded.in_terms[:, 2:], w.norm_in_weight, w.norm_in_bias),
        (folded.p_out, w.p_out_weight, w.p_out_bias, folded.out_terms[:, :2], w.norm_out_weight, w.norm_out_bias),
        (folded.g_out, w.g_out_weight, w.g_out_bias, folded.out_terms[:, 2:], w.norm_in_weight, w.norm_in_bias),
    )
    for matrix, given, bias, terms, scale, shift in rows:
        assert matrix.dtype == torch.bfloat16 and terms.dtype == torch.float32
        assert torch.equal(matrix, (given * scale).float().bfloat16())
        torch.testing.assert_close(terms[:, 0].double(), matrix.double().sum(-1), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(terms[:, 1].double(), bias + given @ shift, rtol=1e-6, atol=1e-5)


# Workloads


def judge(workload, kernel, seed: int = 1) -> tuple[dict[str, float], dict[str, float]]:
    data = workload.make_inputs(seed)
    errors, bounds = workload.errors(workload.run(kernel, data), workload.reference(data)), workload.bounds()
    assert errors.keys() == bounds.keys()
    return errors, bounds


class Fixed:
    """A template of which only the splits matter."""

    @staticmethod
    def default(shape) -> int:
        return 2

    @staticmethod
    def splits(shape, config: int, num_ctas: int) -> int:
        return config * num_ctas


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("direction", "mask", "biases"), [("outgoing", "none", True), ("incoming", "float", False)])
@pytest.mark.parametrize(("crop", "channels", "hidden"), [(30, 64, 96), (41, 128, 32)])
def test_right_kernels_are_inside_the_bounds(name, family, direction, mask, biases, crop, channels, hidden) -> None:
    shape = served(name, crop, channels, hidden, direction, mask=mask)
    workload = KINDS[name](shape, "cpu", family=family, projection_biases=biases, template=Fixed() if name in SUMMED else None)
    assert isinstance(workload, Workload) and workload.bytes_per_set > 0
    errors, bounds = judge(workload, getattr(emulation, name))
    assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)
    workload.prepare(getattr(emulation, name), workload.make_inputs(0))()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("crop", [1, 2, 9])
def test_small_crops_and_several_elements(name: str, crop: int) -> None:
    errors, bounds = judge(KINDS[name](served(name, crop, 32, 64, "incoming", 2, mask="bool"), "cpu"), getattr(emulation, name))
    assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)


def test_chunks_do_not_change_the_references(monkeypatch) -> None:
    for name, kind in KINDS.items():
        workload = kind(served(name, 6, 32, 64, "incoming", 2, mask="float"), "cpu", mask_pattern="soft")
        data = workload.make_inputs(0)
        whole = workload.reference(data)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "CHUNK_BYTES", 1)
            again = workload.reference(data)
        for key, want in whole.items():
            torch.testing.assert_close(again[key], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", SUMMED)
def test_splits_come_from_the_template(name: str) -> None:
    workload = KINDS[name](served(name, 9, 32, 128), "cpu", template=Fixed(), num_ctas=3)
    assert workload.splits == 6
    before = workload.bytes_per_set
    workload.configure(5)
    assert workload.splits == 15 and workload.bytes_per_set > before
    seen = []

    def kernel(*arguments) -> None:
        seen.append((arguments[-4].shape[0], arguments[-3].shape[0], *arguments[-2:]))
        getattr(emulation, name)(*arguments)

    errors, bounds = judge(workload, kernel)
    assert seen == [(15, 15, 15, 3)] and all(errors[key] <= bounds[key] for key in bounds)


@pytest.mark.parametrize("kind", [KINDS[name] for name in SUMMED])
def test_splits_are_those_of_the_family_unless_a_template_is_given(kind) -> None:
    shape = Shape(96, 128)
    workload = kind(shape, "cpu", num_ctas=132)
    template = workload.template
    assert template.workload(shape, "cpu").template.name == template.name and isinstance(template.workload(shape, "cpu"), kind)
    assert workload.splits == template.splits(shape, template.default(shape), 132) > 1


def outputs(name: str, arguments: tuple) -> tuple[Tensor, ...]:
    ends = {"back_backward": (-3, -1), "front_backward": (-2, -1), "front_gradients": (-5, -2)}
    return arguments[slice(*ends.get(name, (-4, -2)))]


SPOILED = {
    "skips_an_element": lambda x: x[..., -1, 1].fill_(math.nan),
    "scales": lambda x: x.mul_(1.02),
    "misses_a_row": lambda x: x.select(-2, -1).zero_(),
    "swaps": lambda x: x.copy_(x.flip(-2).clone()),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("name", KINDS)
def test_spoiled_outputs_are_noticed(name: str, how: str) -> None:
    """Each output by itself."""
    workload = KINDS[name](served(name, 18, 32, 64, "incoming", mask="bool"), "cpu")
    for which in range({"front_backward": 1, "front_gradients": 3}.get(name, 2)):

        def broken(*arguments, which=which) -> None:
            getattr(emulation, name)(*arguments)
            SPOILED[how](outputs(name, arguments)[which])

        errors, bounds = judge(workload, broken)
        assert any(errors[key] > bounds[key] for key in bounds), (which, errors, bounds)


@pytest.mark.parametrize("name", KINDS)
def test_a_kernel_that_writes_nothing_never_passes(name: str) -> None:
    errors, _ = judge(KINDS[name](served(name, 9, 32, 128), "cpu"), lambda *arguments: None)
    assert set(errors.values()) == {math.inf}


def test_the_padding_of_dx_must_be_zero() -> None:
    def careless(*arguments) -> None:
        emulation.back_backward(*arguments)
        arguments[-3][..., 9:] = 1e-3

    errors, bounds = judge(BackBackwardWorkload(Shape(9, 32), "cpu"), careless)
    assert errors["dx"] == math.inf and errors["dzn"] <= bounds["dzn"]


def with_argument(index: int, change):
    """The emulated kernel, with one operand changed."""

    def broken(name: str):
        def kernel(*arguments) -> None:
            changed = list(arguments)
            changed[index] = change(changed[index])
            getattr(emulation, name)(*changed)

        return kernel

    return broken


def without_columns(*columns: int):
    def change(terms: Tensor) -> Tensor:
        terms = terms.clone()
        terms[:, columns] = 0.0
        return terms

    return change


def without_mean(stats: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(stats[..., 0]), stats[..., 1]], -1)


MISTAKES = {
    "no_mean_of_z": [("back_weights", 1, without_mean), ("front_weights", 1, without_mean), ("front_backward", 1, without_mean),
                     ("front_gradients", 1, without_mean)],
    "no_mean_of_x": [("back_backward", 3, without_mean), ("back_weights", 3, without_mean)],
    "no_row_sums": [("back_backward", 7, without_columns(0, 2)), ("back_weights", 7, without_columns(0, 2)),
                    ("front_backward", 7, without_columns(0, 2)), ("front_weights", 6, without_columns(0, 2)),
                    ("front_gradients", 7, without_columns(0, 2))],
    "no_biases": [("back_backward", 7, without_columns(1)), ("back_weights", 7, without_columns(3)),
                  ("front_backward", 7, without_columns(1)), ("front_weights", 6, without_columns(3)),
                  ("front_gradients", 7, without_columns(1))],
    "no_mask": [(name, 2, lambda mask: None) for name in ("front_backward", "front_weights", "front_gradients")],
    "no_dzn": [(name, 4, torch.zeros_like) for name in ("front_backward", "front_gradients")],
    "factors_swapped": [(name, 3, lambda x: x.flip(1)) for name in ("front_backward", "front_weights", "front_gradients")],
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake: str) -> None:
    for name, index, change in MISTAKES[mistake]:
        workload = KINDS[name](served(name, 24, 32, 64, "incoming", mask="bool"), "cpu", family="trained_like")
        errors, bounds = judge(workload, with_argument(index, change)(name))
        assert any(errors[key] > bounds[key] for key in bounds), (name, errors, bounds)


def test_a_norm_without_its_correction_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(emulation, "_through_norm", lambda t, pairs, stats: stats[..., 1:] * (t - t.mean(-1, keepdim=True)))
    for name in ("back_backward", "front_backward", "front_gradients"):
        errors, bounds = judge(KINDS[name](served(name, 18, 32, 64), "cpu"), getattr(emulation, name))
        key = next(iter(bounds))
        assert errors[key] > bounds[key], (name, errors, bounds)


def test_unrounded_row_sums_are_noticed(monkeypatch) -> None:
    """Where the mean is large, what is subtracted must be what the product of the rounded weights holds."""
    shape, fold = Shape(18, 64, 64), layout.fold

    def careless(weights: Weights, dtype: torch.dtype) -> layout.Folded:
        exact = fold(weights, torch.float64)
        return fold(weights, dtype)._replace(in_terms=exact.in_terms.float(), out_terms=exact.out_terms.float())

    workload = FrontBackwardWorkload(shape, "cpu")
    data = workload.make_inputs(0)
    z = data.call.z + 8.0
    far = data._replace(
        call=Inputs(z, None, data.call.weights, None), z_stats=layout.statistics(z.double(), EPS).float()
    )
    errors = workload.errors(workload.run(emulation.front_backward, far), workload.reference(far))
    assert errors["dz"] <= workload.bounds()["dz"], "and right kernels do not mind a large mean"
    monkeypatch.setattr(layout, "fold", careless)
    errors = workload.errors(workload.run(emulation.front_backward, far), workload.reference(far))
    assert errors["dz"] > workload.bounds()["dz"]


# Front backward and front weights in one


def alone_and_together(z: Tensor, hidden: int, mask: str, splits: int = 3) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """dz, planes and sums of front_backward and front_weights, and of front_gradients, for the operands of one workload."""
    shape = Shape(z.shape[1], 128, hidden, "incoming", z.shape[0], mask=mask)
    data = FrontBackwardWorkload(shape, "cpu", projection_biases=True, mask_pattern="soft" if mask == "float" else None)
    data = data.make_inputs(3)
    folded, wide = layout.fold(data.call.weights, z.dtype), torch.promote_types(z.dtype, torch.float32)
    stats, keep = layout.statistics(z.to(wide), EPS), layout.mask_buffer(data.call.mask, z)
    given = (z, stats, keep, data.dfactors.to(z.dtype))
    weights, dzn = (folded.p_in, folded.g_in, folded.in_terms), data.dzn.to(z.dtype)
    made = [(layout_backward.pair_empty(z), *layout_backward.front_planes_empty(z, hidden, splits)) for _ in range(2)]
    (dz, *planes), both = made
    emulation.front_backward(*given, dzn, *weights, dz, 1)
    emulation.front_weights(*given, *weights, *planes, splits, 1)
    emulation.front_gradients(*given, dzn, *weights, *both, splits, 1)
    return (dz, *planes), both


@pytest.mark.parametrize(("hidden", "mask"), [(64, "none"), (128, "float"), (192, "bool")])
def test_front_gradients_are_the_algebra_of_the_two(hidden: int, mask: str) -> None:
    """In float64, for one launch and for several."""
    z = make_inputs(Shape(9, 128, hidden, batch=2), "cpu", 2).z.double()
    for one, other in zip(*alone_and_together(z, hidden, mask), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("hidden", [64, 192])
def test_planes_of_front_gradients_are_rounded_as_those_of_front_weights(hidden: int) -> None:
    """Gradients are rounded times the reciprocal deviations in both; t holds them so too, and is rounded between launches."""
    z = make_inputs(Shape(9, 128, hidden, batch=2), "cpu", 2).z
    (dz, *planes), (both_dz, *both_planes) = alone_and_together(z, hidden, "bool")
    for one, other in zip(planes, both_planes, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
    assert not torch.equal(dz, both_dz) and relative_rms(both_dz, dz.double(), exact_zeros=False) < 1e-2


def only_rows(arguments: tuple, rows: slice) -> list:
    """The arguments of a kernel that has only these of two launches' rows; its planes are its own."""
    changed = list(arguments)
    changed[3] = arguments[3][:, rows].contiguous()
    whole = slice(rows.start * LAUNCH_ROWS, rows.stop * LAUNCH_ROWS)
    changed[5:8] = (x[whole].contiguous() for x in arguments[5:8])
    changed[9:11] = (x[:, whole].contiguous() for x in arguments[9:11])
    return changed


def last_rows_start_again(*arguments) -> None:
    """The second launch takes dzn, not what the first left in dz."""
    emulation.front_gradients(*arguments)
    emulation.front_gradients(*only_rows(arguments, slice(1, 2)))


def first_rows_are_all(*arguments) -> None:
    """Only the first launch; the planes are right."""
    emulation.front_gradients(*arguments)
    emulation.front_gradients(*only_rows(arguments, slice(0, 1)))


def every_launch_normalises(*arguments) -> None:
    emulation.front_gradients(*arguments)
    emulation.front_gradients(*only_rows(arguments, slice(0, 1)))
    changed = only_rows(arguments, slice(1, 2))
    changed[4] = arguments[8].clone()
    emulation.front_gradients(*changed)


def planes_of_the_first_rows_twice(*arguments) -> None:
    emulation.front_gradients(*arguments)
    for x in arguments[9:11]:
        x[:, LAUNCH_ROWS:] = x[:, :LAUNCH_ROWS]


def deviation_stays_in_t(*arguments) -> None:
    """The gradients carry rstd, and t is not rid of it."""
    emulation.front_gradients(*arguments)
    changed = list(arguments)
    changed[3] = arguments[3] * arguments[1][..., 1].unsqueeze(1).unsqueeze(1).to(arguments[3].dtype)
    changed[9:11] = (torch.empty_like(x) for x in arguments[9:11])
    emulation.front_gradients(*changed)


@pytest.mark.parametrize("broken", [last_rows_start_again, first_rows_are_all, every_launch_normalises,
                                    planes_of_the_first_rows_twice, deviation_stays_in_t])  # fmt: skip
def test_mistakes_between_launches_are_noticed(broken) -> None:
    shape = Shape(16, 128, 128, "incoming", mask="bool")
    workload = FrontGradientsWorkload(shape, "cpu")
    errors, bounds = judge(workload, emulation.front_gradients)
    assert all(errors[key] <= bounds[key] for key in bounds)
    errors, bounds = judge(workload, broken)
    wrong = {key for key in bounds if not errors[key] <= bounds[key]}
    assert wrong == ({"value", "gate", "value_sums", "gate_sums"} if "planes" in broken.__name__ else {"dz"})


@pytest.mark.parametrize("family", FAMILIES)
def test_many_launches_round_few_times(family: str) -> None:
    """The widest that the family takes: four launches, three roundings of t between them."""
    errors, bounds = judge(FrontGradientsWorkload(Shape(20, 128, 256), "cpu", family=family), emulation.front_gradients)
    assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)


def test_which_widths_front_gradients_takes() -> None:
    template = FrontGradientsWorkload(Shape(9), "cpu").template
    taken = [(c, d) for c in range(32, 289, 32) for d in range(32, 289, 32) if template.supports(Shape(9, c, d))[0]]
    assert taken == [(128, 64), (128, 128), (128, 192), (128, 256)]
    assert "steps of 64, not 128 and 96" in template.supports(Shape(9, 128, 96))[1]


# Gradients of weights from the planes


FINISH_CASES = [
    ((1, 1), "float32", "float32", False), ((3, 5), "float32", "float32", True), ((66, 132), "bfloat16", "float32", True),
    ((2, 7), "bfloat16", "bfloat16", False), ((40, 3), "bfloat16", "", True),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("splits", "dtype", "norms", "biases"), FINISH_CASES)
def test_finishing_is_inside_the_bounds(splits: tuple[int, int], dtype: str, norms: str, biases: bool, family: str) -> None:
    options = dict(family=family, projection_biases=biases, splits=splits, norm_dtype=norms)
    workload = FinishWorkload(Shape(64, 32, 96, weight_dtype=dtype), "cpu", **options)
    assert isinstance(workload, Workload)
    data = workload.make_inputs(1)
    assert data.weights.norm_in_weight.dtype == getattr(torch, norms or dtype)
    assert layout_backward.kernel_finishes(data.weights, [True] * 12)
    found = workload.run(emulation.finish, data)
    errors, bounds = workload.errors(found, workload.reference(data)), workload.bounds()
    assert errors.keys() == bounds.keys() and len(bounds) == (12 if biases else 8)
    assert all(errors[name] <= bounds[name] for name in bounds), (errors, bounds)
    matrices = [getattr(data.weights, f"{name}_weight") for name in ("p_in", "g_in", "p_out", "g_out")]
    assert workload.bytes_per_set == sum(x.nbytes for x in (*data[1:], *matrices, *matrices))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", ["a split", "a sum's split", "a row", "a norm's row", "rounded sums", "the shift"])
def test_wrong_finishing_is_seen(wrong: str, dtype: str) -> None:
    workload = FinishWorkload(Shape(64, 64, 32, weight_dtype=dtype), "cpu", projection_biases=True, splits=(66, 40))
    data = workload.make_inputs(1)

    def careless(*arguments) -> None:
        given = list(arguments)
        if wrong == "a split":
            given[8] = given[8][:-1]
            given[9] = given[9][:-1]
        if wrong == "a sum's split":
            given[11] = given[11].clone()
            given[11][-1] = 0
        if wrong == "rounded sums":
            given[8] = given[8].bfloat16().float()
        if wrong == "the shift":
            given[5] = torch.zeros_like(given[5])
        emulation.finish(*given)
        if wrong == "a row":
            given[12][3] = 0
        if wrong == "a norm's row":
            given[16] -= given[0][5].float() * given[8].sum(0)[5, :64]

    errors, bounds = workload.errors(workload.run(careless, data), workload.reference(data)), workload.bounds()
    assert any(errors[name] > bounds[name] for name in bounds)


def test_finish_workloads_take_the_splits_of_the_weight_kernels() -> None:
    assert FinishWorkload(Shape(384), "cpu", num_ctas=132).splits == (132, 132)
    assert FinishWorkload(Shape(384, 128, 96), "cpu", num_ctas=132).splits == (66, 132)
    assert FinishWorkload(Shape(1), "cpu", num_ctas=132).splits == (1, 1)
    assert FinishWorkload(Shape(384, 512, 512), "cpu", num_ctas=132).splits == FinishWorkload(
        Shape(384, 256, 256), "cpu", num_ctas=132
    ).splits


# The whole


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("direction", "mask", "biases"), [("outgoing", "none", True), ("incoming", "bool", False)])
def test_the_stages_in_a_row_are_inside_the_operators_bounds(family: str, direction: str, mask: str, biases: bool) -> None:
    shape = Shape(30, 64, 96, direction, mask=mask)
    workload = OperatorWorkload(shape, "cpu", family=family, projection_biases=biases)
    call = workload.make_inputs(1)
    operands = layout.prepare(call.z, call.mask, layout.fold(call.weights, call.z.dtype))
    z_stats = layout.stats_empty(call.z)
    factors, x, out = layout.factors_empty(call.z, 96), layout.contraction_empty(call.z, 96).zero_(), torch.empty_like(call.z)
    forward.front(*operands.front(factors, z_stats), EPS, 1)
    getattr(forward, f"product_{layout.CONTRACTIONS[direction]}")(factors[:, 0], factors[:, 1], x, 1)
    forward.back(*operands.back(z_stats, x, None, out, None), EPS, 1)
    dz, grads = emulation.gradients(call.grad_out, call.z, direction, call.mask, call.weights, (factors, x), EPS, 4)
    found = {"out": out, "dz": dz} | {f"d{name}": grad for name, grad in grads._asdict().items()}
    errors, bounds = workload.errors(found, workload.reference(call)), workload.bounds()
    assert errors.keys() == bounds.keys()
    assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)
