"""The float64 reference of the triangle multiplicative update against autograd, its inputs, and the workloads of its stages."""

from __future__ import annotations

import math
from functools import partial

import multiplication_emulation as emulation
import pytest
import torch
from torch.nn.functional import layer_norm, linear

from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_multiplication import inputs as families
from tpf_jit.templates.triangle_multiplication import layout, reference
from tpf_jit.templates.triangle_multiplication.inputs import Inputs, make_inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights
from tpf_jit.templates.triangle_multiplication.workload import (
    BackWorkload,
    FoldWorkload,
    FrontWorkload,
    OperatorWorkload,
    ProductWorkload,
)

Shape = TriangleMultiplicationShape
DIRECTIONS = ("outgoing", "incoming")


def double(shape: Shape, **options) -> Inputs:
    made = make_inputs(shape, with_grad_out=True, **options)
    weights = Weights(*(None if x is None else x.double() for x in made.weights))
    return Inputs(made.z.double(), made.mask, weights, made.grad_out.double())


def differentiable(z, direction, mask, w: Weights, eps):
    """The update in autograd's own hands, written as models write it."""
    zn = layer_norm(z, z.shape[-1:], w.norm_in_weight, w.norm_in_bias, eps)
    both = linear(zn, w.p_in_weight, w.p_in_bias) * linear(zn, w.g_in_weight, w.g_in_bias).sigmoid()
    both = both if mask is None else both * mask.unsqueeze(-1)
    a, b = both.chunk(2, -1)
    x = torch.einsum("bikd,bjkd->bijd" if direction == "outgoing" else "bkid,bkjd->bijd", a, b)
    update = linear(layer_norm(x, x.shape[-1:], w.norm_out_weight, w.norm_out_bias, eps), w.p_out_weight, w.p_out_bias)
    return update * linear(zn, w.g_out_weight, w.g_out_bias).sigmoid()


CASES = [(direction, mask, biases) for direction in DIRECTIONS for mask in ("none", "bool", "float") for biases in (False, True)]


@pytest.mark.parametrize(("direction", "mask", "biases"), CASES)
def test_reference_is_autograd_of_the_formulas(direction: str, mask: str, biases: bool) -> None:
    shape = Shape(7, 32, 64, direction, 2, mask=mask)
    x = double(shape, projection_biases=biases, mask_pattern="soft" if mask == "float" else "random50")
    leaves = [t.clone().requires_grad_() for t in (x.z, *x.weights) if t is not None]
    rest = iter(leaves[1:])
    weights = Weights(*(None if w is None else next(rest) for w in x.weights))
    out = differentiable(leaves[0], direction, x.mask, weights, 1e-3)
    torch.testing.assert_close(reference.multiplication(x.z, direction, x.mask, x.weights, 1e-3), out.detach())
    expected = torch.autograd.grad(out, leaves, x.grad_out)
    dz, grads = reference.multiplication_backward(x.grad_out, x.z, direction, x.mask, x.weights, 1e-3)
    assert [grad is None for grad in grads] == [w is None for w in x.weights]
    for got, want in zip([dz, *(grad for grad in grads if grad is not None)], expected, strict=True):
        torch.testing.assert_close(got, want)


def test_norms_without_weights_are_plain() -> None:
    x = double(Shape(5, 32))
    bare = x.weights._replace(norm_in_weight=None, norm_in_bias=None, norm_out_weight=None, norm_out_bias=None)
    ones, zeros = torch.ones(32), torch.zeros(32)
    full = bare._replace(norm_in_weight=ones, norm_in_bias=zeros, norm_out_weight=ones, norm_out_bias=zeros)
    arguments = (x.z, "outgoing", None)
    assert torch.equal(reference.multiplication(*arguments, bare), reference.multiplication(*arguments, full))
    dz, grads = reference.multiplication_backward(x.grad_out, *arguments, bare)
    torch.testing.assert_close(dz, reference.multiplication_backward(x.grad_out, *arguments, full)[0])
    assert grads.norm_in_weight is None and grads.p_in_weight is not None


def test_the_incoming_update_is_that_of_transposed_factors() -> None:
    """sum_k a_ki b_kj: the outgoing product of both factors transposed."""
    ab = torch.randn(2, 2, 3, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(reference.contract(ab, "incoming"), reference.contract(ab.mT, "outgoing"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_chunks_do_not_change_the_result(direction: str, monkeypatch) -> None:
    x = double(Shape(7, 32, 64, direction, 2, mask="float"))
    arguments = (x.z, direction, x.mask, x.weights)
    whole = reference.multiplication(*arguments), *reference.multiplication_backward(x.grad_out, *arguments)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)
    chunked = reference.multiplication(*arguments), *reference.multiplication_backward(x.grad_out, *arguments)
    torch.testing.assert_close(chunked[:2], whole[:2], rtol=1e-12, atol=1e-12)
    for got, want in zip(chunked[2], whole[2], strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_residual_is_added() -> None:
    x = double(Shape(5, 32))
    plain = reference.multiplication(x.z, "outgoing", None, x.weights)
    torch.testing.assert_close(reference.multiplication(x.z, "outgoing", None, x.weights, residual=x.z), plain + x.z)


# Inputs


@pytest.mark.parametrize("family", families.FAMILIES)
def test_inputs_are_a_function_of_the_seed(family: str) -> None:
    shape = Shape(12, 32, mask="bool")
    first, again, other = (make_inputs(shape, seed=seed, family=family, with_grad_out=True) for seed in (3, 3, 4))
    for x, y in ((first.z, again.z), (first.mask, again.mask), (first.grad_out, again.grad_out)):
        assert torch.equal(x, y)
    assert all(torch.equal(x, y) for x, y in zip(first.weights, again.weights, strict=True) if x is not None)
    assert not torch.equal(first.z, other.z) and not torch.equal(first.weights.p_in_weight, other.weights.p_in_weight)


def test_families_are_what_they_claim() -> None:
    shape = Shape(40, 64)
    trained = make_inputs(shape, family="trained_like")
    spread = trained.z.float()[:, :20, 30:].std(dim=(0, 1, 2))
    assert int((spread > 6).sum()) == 4
    at = torch.arange(40)
    assert float(trained.z[:, at, at].float().mean()) > 5
    small = make_inputs(shape, family="small", with_grad_out=True)
    assert 5e-7 < float(small.z.float().square().mean()) < 2e-6, "the variance is below eps"
    assert float(small.grad_out.float().abs().max()) < 1e-5
    assert make_inputs(shape).weights.p_in_bias is None
    with_biases = make_inputs(shape, projection_biases=True).weights
    assert [x.dtype for x in with_biases] == [torch.float32] * 12
    assert make_inputs(Shape(8, 32, weight_dtype="bfloat16")).weights.norm_in_weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("pattern", "low", "high"), [("random10", 0.05, 0.15), ("random50", 0.45, 0.55), ("prefix", 0.5, 0.52)])
def test_mask_patterns_exclude_the_stated_share(pattern: str, low: float, high: float) -> None:
    keep = make_inputs(Shape(60, 32, mask="bool"), mask_pattern=pattern).mask
    assert keep.shape == (1, 60, 60) and low < 1 - float(keep.float().mean()) < high
    assert torch.equal(make_inputs(Shape(60, 32, mask="float"), mask_pattern=pattern).mask, keep.float())


def test_unknown_families_and_patterns_are_refused() -> None:
    with pytest.raises(InvalidInput, match="^family"):
        make_inputs(Shape(8, 32), family="adversarial")
    with pytest.raises(InvalidInput, match="^mask_pattern"):
        make_inputs(Shape(8, 32, mask="bool"), mask_pattern="soft")


# Layout


def test_operands_are_read_in_place_where_they_comply() -> None:
    x = make_inputs(Shape(6, 32, mask="float", weight_dtype="bfloat16"), projection_biases=True)
    folded = layout.fold(x.weights, torch.bfloat16)
    operands = layout.prepare(x.z, x.mask, folded)
    assert operands.z is x.z and operands.mask.data_ptr() == x.mask.data_ptr()
    transposed = layout.prepare(x.z.transpose(1, 2), None, folded)
    assert transposed.z.data_ptr() == x.z.data_ptr() and transposed.mask is None


def test_weights_are_folded_where_they_are() -> None:
    made = make_inputs(Shape(6, 32, 64), projection_biases=True).weights
    order = ("p_in_weight", "g_in_weight", "p_out_weight", "g_out_weight", "norm_in_weight", "norm_in_bias", "norm_out_weight",
             "norm_out_bias", "p_in_bias", "g_in_bias", "p_out_bias", "g_out_bias")  # fmt: skip
    for weights in (made, made._replace(p_in_bias=None, g_in_bias=None, p_out_bias=None, g_out_bias=None)):
        buffers = layout.folded_empty(weights, torch.bfloat16)
        folded = layout.folded_parts(weights, *buffers)
        operands = layout.fold_operands(weights, folded)
        assert all(x is getattr(weights, name) for x, name in zip(operands[:12], order, strict=True))
        filled = (folded.p_in, folded.g_in, folded.p_out, folded.g_out, folded.in_terms, folded.out_terms)
        assert all(x is y for x, y in zip(operands[12:], filled, strict=True))
        assert sum(x.numel() for x in filled) == sum(x.numel() for x in buffers), "all of the memory, and nothing twice"
        assert len({x.data_ptr() for x in filled}) == 6 and all(x.data_ptr() % 16 == 0 and x.is_contiguous() for x in filled)


def test_what_is_filled_in_is_float32_whatever_the_default_dtype() -> None:
    made = make_inputs(Shape(6, 32, 64), projection_biases=True).weights
    weights = made._replace(norm_in_weight=None, norm_in_bias=None, norm_out_weight=None, norm_out_bias=None, g_in_bias=None)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        vectors = layout.fold_operands(weights, layout.fold(weights, torch.bfloat16))[4:12]
    finally:
        torch.set_default_dtype(default)
    assert all(x.dtype == torch.float32 for x in vectors)


@pytest.mark.parametrize(
    "arrange",
    [lambda z: z.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1), lambda z: torch.cat([z, z[..., :1]], -1)[..., :-1],
     lambda z: torch.cat([z.flatten()[:1], z.flatten()])[1:].view(z.shape), lambda z: z[:, :1].expand_as(z)],
    ids=["channels_outside", "odd_pitch", "unaligned_base", "expanded"],
)  # fmt: skip
def test_other_layouts_are_copied_once(arrange) -> None:
    z = arrange(make_inputs(Shape(6, 32)).z)
    operand = layout.pair_operand(z)
    assert torch.equal(operand, z) and operand.is_contiguous() and operand.data_ptr() != z.data_ptr()


@pytest.mark.parametrize("size", [(1, 6, 6), (1, 6, 1), (1, 1, 1), (2, 1, 6)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.int64])
def test_masks_of_all_kinds_become_one_buffer(size: tuple, dtype: torch.dtype) -> None:
    z, mask = torch.empty(2, 6, 6, 32), (torch.rand(size) > 0.5).to(dtype)
    buffer = layout.mask_buffer(mask, z)
    assert buffer.dtype == torch.float32 and buffer.is_contiguous() and torch.equal(buffer, mask.float().expand(2, 6, 6))


def test_rows_of_factors_are_whole_16_bytes() -> None:
    assert [layout.padded(crop) for crop in (1, 8, 9, 384)] == [8, 8, 16, 384]
    z = torch.empty(2, 9, 9, 32, dtype=torch.float16)
    assert layout.factors_empty(z, 64).shape == (2, 2, 64, 9, 16)
    x = layout.contraction_empty(z, 64)
    assert x.shape == (2, 64, 9, 16) and x.dtype == torch.float32, "sums leave the range of fp16"


# Workloads


def stages(shape: Shape, **options) -> list[tuple]:
    contraction = getattr(emulation, f"product_{layout.CONTRACTIONS[shape.direction]}")
    return [
        (FoldWorkload(shape, "cpu", **options), emulation.fold),
        (FrontWorkload(shape, "cpu", **options), emulation.front),
        (ProductWorkload(shape, "cpu", **options), contraction),
        (ProductWorkload(shape, "cpu", product="nn", **options), emulation.product_nn),
        (BackWorkload(shape, "cpu", **options), emulation.back),
        (BackWorkload(shape, "cpu", with_residual=True, with_stats=True, **options), emulation.back),
        (OperatorWorkload(shape, "cpu", **options), emulation.operator),
        (OperatorWorkload(shape, "cpu", training=False, **options), emulation.operator),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize(("direction", "mask", "biases"), [("outgoing", "none", True), ("incoming", "float", False)])
def test_right_kernels_are_inside_the_bounds(dtype: str, family: str, direction: str, mask: str, biases: bool) -> None:
    shape = Shape(30, 64, 96, direction, dtype=dtype, mask=mask)
    for workload, kernel in stages(shape, family=family, projection_biases=biases):
        assert isinstance(workload, Workload) and workload.bytes_per_set > 0
        data = workload.make_inputs(1)
        out = workload.run(kernel, data)
        errors, bounds = workload.errors(out, workload.reference(data)), workload.bounds()
        assert errors.keys() == bounds.keys()
        assert all(errors[name] <= bounds[name] for name in bounds), (type(workload).__name__, errors, bounds)
        workload.prepare(kernel, data)()


BREAKS = {
    "skips_an_element": lambda x: x[..., 1, 1].fill_(math.nan),
    "scales": lambda x: x.mul_(1.02),
    "misses_a_row": lambda x: x[:, -1].zero_(),
    "swaps": lambda x: x.copy_(x.flip(1).clone()),
}


OUTPUTS = {emulation.fold: range(12, 18), emulation.front: (5, 6), emulation.back: (7, 8)}
"""Which arguments a kernel writes; the third where it is not here."""


@pytest.mark.parametrize("how", BREAKS)
def test_wrong_kernels_are_not(how: str) -> None:
    """Each output by itself."""
    shape = Shape(18, 32, 64, "incoming", mask="bool")
    for workload, kernel in stages(shape, projection_biases=True)[:6]:
        for output in OUTPUTS.get(kernel, (2,)):

            def broken(*arguments, kernel=kernel, output=output) -> None:
                kernel(*arguments)
                written = arguments[output]
                BREAKS[how](written if written.dim() > 2 else written.unsqueeze(0))

            if kernel is emulation.back and output == 8 and not workload.with_stats:
                continue
            data = workload.make_inputs(0)
            errors, bounds = workload.errors(workload.run(broken, data), workload.reference(data)), workload.bounds()
            assert any(errors[name] > bounds[name] for name in bounds), (type(workload).__name__, output)


def test_a_wrong_direction_is_noticed() -> None:
    shape = Shape(18, 32, direction="outgoing")
    workload = ProductWorkload(shape, "cpu")
    data = workload.make_inputs(0)
    assert workload.errors(workload.run(emulation.product_tn, data), workload.reference(data))["out"] > 0.5
    whole = OperatorWorkload(shape, "cpu")
    data = whole.make_inputs(0)
    wrong = whole.run(lambda z, direction, mask, **named: emulation.operator(z, "incoming", mask, **named), data)
    assert whole.errors(wrong, whole.reference(data))["out"] > 0.1


def test_padding_must_be_zero() -> None:
    workload = FrontWorkload(Shape(9, 32), "cpu")
    data = workload.make_inputs(0)

    def careless(*arguments) -> None:
        emulation.front(*arguments)
        arguments[5][..., 9:] = 1e-3

    errors = workload.errors(workload.run(careless, data), workload.reference(data))
    assert errors["factors"] == math.inf and errors["stats"] <= workload.bounds()["stats"]


def test_a_kernel_that_writes_nothing_never_passes() -> None:
    for workload, _ in stages(Shape(9, 32))[:6]:
        data = workload.make_inputs(0)
        errors = workload.errors(workload.run(lambda *arguments: None, data), workload.reference(data))
        assert set(errors.values()) == {math.inf}


def test_a_lost_gradient_is_noticed() -> None:
    workload = OperatorWorkload(Shape(9, 32), "cpu")
    data = workload.make_inputs(0)
    found = workload.run(emulation.operator, data)
    del found["dg_in_weight"]
    assert workload.errors(found, workload.reference(data))["dg_in_weight"] == math.inf


def test_the_stages_make_the_whole() -> None:
    """Fold, front, contraction and back in a row are the operator, as `layout` says."""
    shape = Shape(11, 32, 64, "incoming", 2, mask="bool")
    x = make_inputs(shape, projection_biases=True)
    folded = layout.folded_parts(x.weights, *layout.folded_empty(x.weights, x.z.dtype))
    emulation.fold(*layout.fold_operands(x.weights, folded), 1)
    operands = layout.prepare(x.z, x.mask, folded)
    factors, contraction = layout.factors_empty(x.z, 64), layout.contraction_empty(x.z, 64)
    out, z_stats = torch.empty_like(x.z), layout.stats_empty(x.z)
    emulation.front(*operands.front(factors, z_stats), 1e-5, 1)
    emulation.product_tn(factors[:, 0], factors[:, 1], contraction, 1)
    emulation.back(*operands.back(z_stats, contraction, None, out, None), 1e-5, 1)
    workload = OperatorWorkload(shape, "cpu", training=False, projection_biases=True)
    assert workload.errors({"out": out}, workload.reference(x))["out"] <= workload.bounds()["out"]


def test_the_operator_workload_judges_the_library_and_its_options() -> None:
    from tpf_jit.ops.triangle_multiplication import triangle_multiplication

    workload = OperatorWorkload(Shape(13, 32, 64, "outgoing", 2, mask="bool"), "cpu")
    data = workload.make_inputs(0)
    ref, bounds = workload.reference(data), workload.bounds()
    for call in (triangle_multiplication, partial(triangle_multiplication, recompute=True)):
        errors = workload.errors(workload.run(call, data), ref)
        assert errors.keys() == bounds.keys() and all(errors[name] <= 0.75 * bounds[name] for name in bounds)
