"""The triangle multiplicative update on a Hopper GPU: stages and operator against float64, their bits, in place, in graphs."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

import tpf_jit
from tpf_jit import kernels
from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import ColdKernelInCapture, FallbackWarning
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_multiplication import layout
from tpf_jit.templates.triangle_multiplication.inputs import FAMILIES
from tpf_jit.templates.triangle_multiplication.workload import (
    BackWorkload,
    FoldWorkload,
    FrontWorkload,
    OperatorWorkload,
    ProductWorkload,
)
from tpf_jit.templates.triangle_multiplication.workload_backward import (
    BackBackwardWorkload,
    BackWeightsWorkload,
    FrontBackwardWorkload,
    FrontWeightsWorkload,
)
from tpf_jit.templates.triangle_multiplication.workload_centre import CentreWorkload
from tpf_jit.templates.triangle_multiplication.workload_finish import FinishWorkload
from tpf_jit.templates.triangle_multiplication.workload_fold_front import FoldFrontWorkload
from tpf_jit.templates.triangle_multiplication.workload_gradients import FrontGradientsWorkload

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SHAPES = [
    dict(crop=128), dict(crop=100, mask="bool"), dict(crop=65, channels=64, direction="incoming", batch=2, mask="bool"),
    dict(crop=33, channels=96, hidden=160), dict(crop=200, channels=256, direction="incoming"), dict(crop=7, channels=32),
    dict(crop=1), dict(crop=130, hidden=256, mask="float"), dict(crop=40, channels=512, hidden=512), dict(crop=769),
    dict(crop=66, hidden=64, direction="incoming", batch=2, mask="bool"), dict(crop=90, hidden=192),
    dict(crop=140, channels=192, hidden=192, mask="bool"),
]  # fmt: skip
shapes = pytest.mark.parametrize("fields", SHAPES, ids=lambda fields: "-".join(map(str, fields.values())))


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """The usual kernels, compiled on all cores at once instead of one by one."""
    tpf_jit.compile([TriangleMultiplicationShape(**fields) for fields in SHAPES], training=True)


def agree(workload, function) -> None:
    data = workload.make_inputs(0)
    found = {name: x.clone() for name, x in workload.run(function, data).items()}
    errors, allowed = workload.errors(found, workload.reference(data)), workload.bounds()
    assert all(errors[name] <= allowed[name] for name in allowed), (errors, allowed)
    for _ in range(3):
        again = workload.run(function, data)
        assert all(torch.equal(x, again[name]) for name, x in found.items())


@shapes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", [False, True], ids=["plain", "biases"])
def test_stages(fields: dict, family: str, more: bool) -> None:
    shape = TriangleMultiplicationShape(**fields)
    options = dict(family=family, projection_biases=more)
    back_flags = (("residual", more), ("stats", more))
    for workload, direction, flags in (
        (FoldWorkload(shape, DEVICE, **options), "fold", (("bias", more),)),
        (FrontWorkload(shape, DEVICE, **options), "front", ()),
        (FoldFrontWorkload(shape, DEVICE, **options), "fold_front", (("bias", more),)),
        *((ProductWorkload(shape, DEVICE, product=name, **options), f"product_{name}", ()) for name in ("nt", "tn", "nn")),
        (BackWorkload(shape, DEVICE, with_residual=more, with_stats=more, **options), "back", back_flags),
    ):
        if direction != "fold_front" or served(direction, shape):
            agree(workload, kernels.get_kernel(f"{shape.op}/{direction}", shape, flags).function)


@pytest.mark.parametrize("channels, hidden", [(128, 128), (96, 160), (32, 64), (512, 512)])
@pytest.mark.parametrize("biases", [False, True])
def test_folding_bf16_weights(channels: int, hidden: int, biases: bool) -> None:
    shape = TriangleMultiplicationShape(8, channels, hidden, weight_dtype="bfloat16")
    workload = FoldWorkload(shape, DEVICE, family="trained_like", projection_biases=biases)
    agree(workload, kernels.get_kernel(f"{shape.op}/fold", shape, (("bias", biases),)).function)


BACKWARD = {
    "back_backward": BackBackwardWorkload, "back_weights": BackWeightsWorkload, "front_backward": FrontBackwardWorkload,
    "front_weights": FrontWeightsWorkload, "front_gradients": FrontGradientsWorkload,
}  # fmt: skip


def served(direction: str, shape: TriangleMultiplicationShape) -> bool:
    return any(template.supports(shape)[0] for template in registry.templates(shape.op, direction))


@shapes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", BACKWARD)
def test_backward_stages(fields: dict, family: str, direction: str) -> None:
    shape = TriangleMultiplicationShape(**fields)
    if not served(direction, shape):
        pytest.skip("no kernel takes these widths")
    kernel = kernels.get_kernel(f"{shape.op}/{direction}", shape)
    workload = BACKWARD[direction](shape, DEVICE, family=family, projection_biases=family == "normal")
    workload.configure(kernel.config)
    agree(workload, kernel.function)


@shapes
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
def test_finishing(fields: dict, family: str, biases: bool) -> None:
    shape = TriangleMultiplicationShape(**fields)
    workload = FinishWorkload(shape, DEVICE, family=family, projection_biases=biases)
    agree(workload, finish_of(shape, biases))


def finish_of(shape: TriangleMultiplicationShape, biases: bool, norm_dtype: str = "float32"):
    return kernels.get_kernel(f"{shape.op}/finish", shape, (("bias", biases), ("norm_dtype", norm_dtype))).function


@pytest.mark.parametrize("channels, hidden", [(128, 128), (96, 160), (32, 64), (256, 256), (512, 512)])
@pytest.mark.parametrize("splits", [(1, 1), (2, 7), (33, 8), (66, 132), (256, 31)], ids=str)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")], ids="-".join)
def test_finishing_any_number_of_splits(channels: int, hidden: int, splits: tuple, dtypes: tuple) -> None:
    """And any dtypes, with biases."""
    matrices, norms = dtypes
    shape = TriangleMultiplicationShape(8, channels, hidden, weight_dtype=matrices)
    workload = FinishWorkload(shape, DEVICE, projection_biases=True, splits=splits, norm_dtype=norms)
    agree(workload, finish_of(shape, True, norms))


def test_finishing_weights_and_gradients_that_lie_anywhere() -> None:
    """Weights may be parts of a flat buffer: their kernel reads them an element at a time."""
    shape = TriangleMultiplicationShape(8, 96, 160, weight_dtype="bfloat16")
    workload = FinishWorkload(shape, DEVICE, projection_biases=True, splits=(66, 9))
    function = finish_of(shape, True, "bfloat16")
    data = workload.make_inputs(0)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)

    moved = data._replace(weights=type(data.weights)(*map(shifted, data.weights)))
    found, again = workload.run(function, data), workload.run(function, moved)
    assert all(torch.equal(x, again[name]) for name, x in found.items())


def test_pytorch_and_the_kernel_finish_alike() -> None:
    """In a whole step: PyTorch finishes where one weight is frozen, and differs by roundings."""
    x = OperatorWorkload(TriangleMultiplicationShape(130, mask="bool"), DEVICE).make_inputs(0)
    found = []
    for frozen in (None, "norm_out_bias"):
        leaves = {name: w.clone().requires_grad_(name != frozen) for name, w in x.weights._asdict().items() if w is not None}
        out = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, **leaves)
        wanted = [w for name, w in leaves.items() if name != "norm_out_bias"]
        found.append(torch.autograd.grad(out, wanted, x.grad_out))
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-6


PRODUCTS = ("product_nt", "product_tn", "product_nn")
FORWARD = ("fold", "fold_front", "front", "front_rows", *PRODUCTS, "back", "back_rows")


@pytest.mark.parametrize("channels", [64, 128, 256])
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD, "finish"])
def test_every_configuration(name: str, channels: int) -> None:
    template = registry.get(f"triangle_multiplication_{name}_sm90")
    # Several tiles for every CTA.
    few = dict(crop=120, batch=5) if name == "fold_front" else dict(crop=300)
    shape = TriangleMultiplicationShape(**few, channels=channels, mask="bool")
    if not template.supports(shape)[0]:
        pytest.skip(template.supports(shape)[1])
    workload = template.workload(shape, DEVICE)
    for config in template.space(shape):
        if hasattr(workload, "configure"):
            workload.configure(config)
        agree(workload, kernels.get_kernel(template.name, shape, (), config).function)


@pytest.mark.parametrize(
    "fields",
    [dict(), dict(channels=96, hidden=160, mask="bool"), dict(channels=256, hidden=64, batch=3), dict(weight_dtype="bfloat16")],
    ids=str,
)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize(
    "launch", [dict(), dict(tile_h=16, consumer_warpgroups=4), dict(tile_h=16, consumer_warpgroups=1, sets=2)], ids=str
)
def test_folding_in_front_gives_the_bits_of_two_launches(fields: dict, biases: bool, launch: dict) -> None:
    shape = TriangleMultiplicationShape(**{"crop": 70, **fields})
    template = registry.get("triangle_multiplication_fold_front_sm90")
    config = dataclasses.replace(template.default(shape), **launch)
    if template.check(shape, config) is not None:
        pytest.skip(template.check(shape, config))
    workload = FoldFrontWorkload(shape, DEVICE, projection_biases=biases)
    x = workload.make_inputs(0)
    flags = (("bias", biases),)
    found = workload.run(kernels.function_of(KernelSpec.make(template, shape, config, bias=biases)), x)
    fold = kernels.get_kernel(f"{shape.op}/fold", shape, flags).function
    folded = FoldWorkload(shape, DEVICE, projection_biases=biases).run(fold, x.weights)
    assert all(torch.equal(found[name], part) for name, part in folded.items())
    operands = layout.prepare(x.z, x.mask, layout.Folded(**folded))
    factors, stats = torch.full_like(found["factors"], torch.nan), torch.full_like(found["stats"], torch.nan)
    rows = kernels.get_kernel("triangle_multiplication_front_rows_sm90", shape)
    rows.function(*operands.front(factors, stats), 1e-5, workload.num_ctas)
    assert torch.equal(factors, found["factors"]) and torch.equal(stats, found["stats"])


@pytest.mark.parametrize("weight_stages, sets", [(2, 1), (4, 2)])
def test_weights_that_come_again(weight_stages: int, sets: int) -> None:
    """The fewest stages of weights that two sets of accumulators, or one, can do with; many steps, several tiles a CTA."""
    template = registry.get("triangle_multiplication_front_backward_sm90")
    shape = TriangleMultiplicationShape(300, hidden=256, mask="bool")
    found = (c for c in template.space(shape) if c.operand_registers == 1 and c.tile_h == 32)
    config = dataclasses.replace(next(found), weight_stages=weight_stages, sets=sets, pair_stages=1, stages=2)
    assert template.check(shape, config) is None
    agree(template.workload(shape, DEVICE), kernels.get_kernel(template.name, shape, (), config).function)


@shapes
def test_operator(fields: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        if max(fields.get("channels", 128), fields.get("hidden", 128)) > 256:  # PyTorch does the backward, and says so
            warnings.filterwarnings("ignore", "the backward of", FallbackWarning)
        agree(OperatorWorkload(TriangleMultiplicationShape(**fields), DEVICE), tpf_jit.triangle_multiplication)


@pytest.mark.parametrize("family", FAMILIES)
@shapes
def test_centring(fields: dict, family: str) -> None:
    shape = TriangleMultiplicationShape(**fields)
    agree(CentreWorkload(shape, DEVICE, family=family), kernels.get_kernel("triangle_multiplication/centre", shape).function)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("fields", [dict(crop=100, mask="bool"), dict(crop=200, channels=64, direction="incoming")], ids=str)
def test_a_float32_z_under_autocast(fields: dict, residual: bool, offset: float) -> None:
    """On kernels, without a warning, with the errors of a bf16 z, however far from zero its pairs are; bits repeat."""
    workload = OperatorWorkload(TriangleMultiplicationShape(**fields), DEVICE)
    made = workload.make_inputs(0)
    data = dataclasses.replace(made, z=made.z.float() * 1.001 + offset)

    def update(z, *arguments, **named):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = tpf_jit.triangle_multiplication(z, *arguments, **named, residual=z.detach() if residual else None)
        assert out.dtype == (torch.float32 if residual else torch.bfloat16)
        return out - z.detach() if residual else out

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        found = workload.run(update, data)
        again = workload.run(update, data)
    errors, allowed = workload.errors(found, workload.reference(data)), workload.bounds()
    assert all(errors[name] <= allowed[name] for name in allowed), (errors, allowed)
    assert found["dz"].dtype == torch.float32 and all(torch.equal(x, again[name]) for name, x in found.items())


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
@pytest.mark.parametrize("crop", [100, 130])
def test_recomputing_gives_the_same_bits(crop: int, direction: str) -> None:
    shape = TriangleMultiplicationShape(crop, mask="bool", direction=direction)
    x = OperatorWorkload(shape, DEVICE).make_inputs(0)
    found = []
    for recompute in (False, True):
        z = x.z.clone().requires_grad_()
        weights = [None if w is None else w.clone().requires_grad_() for w in x.weights]
        out = tpf_jit.triangle_multiplication(z, direction, x.mask, *weights, recompute=recompute)
        found.append(torch.autograd.grad(out, [z, *(w for w in weights if w is not None)], x.grad_out))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_small_crops_take_three_launches_wherever_weights_lie() -> None:
    shape = TriangleMultiplicationShape(128, mask="float")
    x = OperatorWorkload(shape, DEVICE).make_inputs(0)

    def launches(weights) -> tuple[torch.Tensor, list[str]]:
        out = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *weights)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            again = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *weights)
            torch.cuda.synchronize()
        assert torch.equal(out, again)
        return out, [event.name for event in seen.events() if event.device_type == torch.profiler.DeviceType.CUDA]

    out, found = launches(x.weights)
    assert len(found) == 3, found
    moved = [None if w is None else torch.empty(w.numel() + 1, device=DEVICE)[1:].view(w.shape).copy_(w) for w in x.weights]
    again, found = launches(moved)
    assert torch.equal(out, again) and len(found) == 3 + 8, found


def test_a_cuda_graph_replays_a_training_step() -> None:
    workload = OperatorWorkload(TriangleMultiplicationShape(64), DEVICE)
    x, fresh = workload.make_inputs(0), workload.make_inputs(1)
    z = x.z.clone().requires_grad_()
    weights = [None if w is None else w.clone().requires_grad_() for w in x.weights]
    leaves = [z, *(w for w in weights if w is not None)]

    def step() -> tuple[torch.Tensor, ...]:
        out = tpf_jit.triangle_multiplication(z, "outgoing", None, *weights)
        return out, *torch.autograd.grad(out, leaves, x.grad_out)

    tpf_jit.warmup(workload.shape, training=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        z.copy_(fresh.z)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.parametrize("crop", [100, 300])
def test_in_place_and_residual(crop: int) -> None:
    """At 300 every CTA has several tasks, whose loads run ahead of the stores of those before."""
    x = OperatorWorkload(TriangleMultiplicationShape(crop), DEVICE, training=False).make_inputs(0)
    want = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights, residual=x.z)
    z, version = x.z.clone(), x.z._version
    assert tpf_jit.triangle_multiplication(z, "outgoing", x.mask, *x.weights, residual=z, inplace=True) is z
    assert torch.equal(z, want) and z._version > version


def test_in_place_where_ctas_share_tiles() -> None:
    """At 256 channels two CTAs read each tile; the noise keeps them from starting together."""
    noise, side = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE), torch.cuda.Stream()
    x = OperatorWorkload(TriangleMultiplicationShape(400, 256, 256), DEVICE, training=False).make_inputs(0)
    want = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights, residual=x.z)
    for _ in range(10):
        z = x.z.clone()
        with torch.cuda.stream(side):
            for _ in range(4):
                noise.add_(1)
        assert tpf_jit.triangle_multiplication(z, "outgoing", x.mask, *x.weights, residual=z, inplace=True) is z
        assert torch.equal(z, want)


def test_hundreds_of_launches_agree() -> None:
    """Short rings, where a missing fence shows, while a second stream keeps the memory busy."""
    noise, side = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE), torch.cuda.Stream()
    shape = TriangleMultiplicationShape(256, mask="bool")
    tight = {"front": {"z_stages": 1, "weight_stages": 2}, "back": {"stages": 1, "weight_stages": 2}}
    tight |= {"front_rows": {"z_stages": 1}, "back_rows": {"stages": 1}, **{name: {"stages": 2} for name in BACKWARD}}
    clusters = [(name, {"stages": 2, "cluster": cluster}) for name in PRODUCTS for cluster in (1, 2)]
    for name, fields in [*tight.items(), *clusters]:
        template = registry.get(f"triangle_multiplication_{name}_sm90")
        config = dataclasses.replace(template.default(shape), **fields)
        function = kernels.get_kernel(template.name, shape, (), config).function
        workload = template.workload(shape, DEVICE)
        data = workload.make_inputs(0)
        first = {key: x.clone() for key, x in workload.run(function, data).items()}
        for _ in range(120):
            with torch.cuda.stream(side):
                noise.add_(1)
            again = workload.run(function, data)
            assert all(torch.equal(x, again[key]) for key, x in first.items()), name


def test_a_cuda_graph_replays_the_call() -> None:
    workload = OperatorWorkload(TriangleMultiplicationShape(64), DEVICE, training=False)
    x, fresh = workload.make_inputs(0), workload.make_inputs(1)
    tpf_jit.warmup(workload.shape)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights)
        added = tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights, residual=x.z)
    x.z.copy_(fresh.z)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(out, tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights))
        assert torch.equal(added, tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights, residual=x.z))


def test_capturing_with_a_cold_kernel_raises_and_leaves_the_stream_usable() -> None:
    x = OperatorWorkload(TriangleMultiplicationShape(40), DEVICE, training=False).make_inputs(0)
    kernels.forget()
    scratch, graph = torch.zeros(8, device=DEVICE), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        scratch.add_(1)
        with pytest.raises(ColdKernelInCapture, match="warmup"):
            tpf_jit.triangle_multiplication(x.z, "outgoing", x.mask, *x.weights)
        scratch.add_(1)
    graph.replay()
    assert bool((scratch == 2).all())
