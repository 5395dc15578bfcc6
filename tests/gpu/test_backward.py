"""Training on a Hopper GPU: gradients against float64 through the public operator, their bits, and what PyTorch does around it.

The grid is that of the forward's test. Where a problem is large, dQ, dK and dV are compared on a sample of the rows, which are
independent of each other, and the bias's gradient, a sum over all of them, on a sample of the heads.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from test_forward import (
    BF16,
    DEVICE,
    FACTORS,
    REFERENCE_SCORES,
    Case,
    covering,
    inputs_of,
    leaves,
    poison,
    release_memory,  # noqa: F401 - an autouse fixture
    sampled_rows,
)
from torch.utils.checkpoint import checkpoint

import tpf_jit
from tpf_jit import kernels
from tpf_jit.errors import ColdKernelInCapture, FallbackWarning
from tpf_jit.ops import settings
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.inputs import FAMILIES, Inputs, make_inputs
from tpf_jit.templates.triangle_attention.workload import ForwardWorkload, relative_rms
from tpf_jit.templates.triangle_attention.workload_backward import (
    GRADIENT_FLOOR,
    dead_keys,
    dead_queries,
    gradient_bounds,
    gradient_error,
    gradient_floor,
)

pytestmark = pytest.mark.gpu



@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """The grid's kernels, compiled on all cores at once instead of one by one."""
    tpf_jit.warmup([case.shape() for case in covering()], training=True)


NAMES = ("dq", "dk", "dv", "dbias")
ROUNDED = {"bfloat16": 1.68e-3, "float16": 2.12e-4, "float32": 0.0}
BIAS_SCORES = 32 * REFERENCE_SCORES
"""Most float64 scores behind one case's reference of the bias's gradient."""


def bounds(case: Case) -> dict[str, float]:
    shape = case.shape()
    found = gradient_bounds(shape, case.family)
    if case.family != "normal" or case.crop < 256 or "random99" in case.mask or (case.rows == "one" and "rows" in case.mask):
        # Few roundings make up what is left, and need not average.
        found = {name: 1.3 * bound for name, bound in found.items()}
    if case.crop < 16:
        # With one key, dS is what is left of equal float32 numbers, and the floor of the error not far above it.
        found["dbias"] = math.hypot(found["dbias"], 1e-3)
    # Of few channels dQ is little more than a difference: the keys that count have nearly the same K.
    found["dq"] *= 1 + 0.25 / shape.head_dim
    few = 1 + 4 / math.sqrt(shape.batch * shape.heads * shape.crop**2)
    return {**found, "dbias": math.hypot(found["dbias"], ROUNDED[shape.bias_dtype] * few)}


def step(x: Inputs, **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients of one training step on fresh leaves; taking the PyTorch path anywhere is an error."""
    tensors = leaves(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        out = tpf_jit.triangle_attention(*tensors, x.mask, **options)
        return out.detach(), list(torch.autograd.grad(out, tensors, x.grad_out))


def gradients(x: Inputs, **options) -> list[torch.Tensor]:
    return step(x, **options)[1]


def errors_of(x: Inputs, grads: list[torch.Tensor], rows: torch.Tensor, heads: int) -> dict[str, float]:
    """By gradient, against float64: of some rows, and of the bias for the first heads."""
    q, k, v, grad_out = (t[:, rows] for t in (x.q, x.k, x.v, x.grad_out))
    mask = None if x.mask is None else x.mask[:, rows]
    ref = reference.attention_backward(grad_out, q, k, v, x.bias, mask)[:3]
    dead = dead_queries(mask, q), dead_keys(mask, q), dead_keys(mask, q)
    scale = x.q.shape[-1] ** -0.5
    floors = gradient_floor(x.k, scale), gradient_floor(x.q, scale), GRADIENT_FLOOR
    found = {
        name: gradient_error(grad[:, rows], want, zero, floor)
        for name, grad, want, zero, floor in zip(NAMES, grads, ref, dead, floors, strict=False)
    }
    del ref
    some = [t[:, :, :heads] for t in (x.grad_out, x.q, x.k, x.v, x.bias)]
    found["dbias"] = gradient_error(grads[3][:, :, :heads], reference.attention_backward(*some, x.mask)[3])
    return found


EVIDENCE: list[dict] = []
"""What `check` saw, for the record that `pytest --record FOLDER` keeps (tests/gpu/conftest.py)."""


def evidence_rows(case: Case, errors: dict, allowed: dict, equal: bool, repeats: int) -> list[dict]:
    shape = case.shape()
    problem = {"B": shape.batch, "I": shape.rows, "N": shape.crop, "H": shape.heads, "D": shape.head_dim}
    described = {"dtype": shape.dtype, "bias_dtype": shape.bias_dtype, "mask": case.mask, "family": case.family}
    return [
        {"op": shape.op, "pass": "backward", "impl": "tpf_jit", "tensor": name, **problem, **described}
        | {"rel_rms_max": error if math.isfinite(error) else None, "bound": allowed[name]}
        | {"bitwise_repeats": repeats, "bitwise_equal": equal}
        for name, error in errors.items()
    ]


def check(case: Case, x: Inputs, repeats: int = 2) -> None:
    """A training step on inputs of a case: takes kernels, is right, keeps layouts and dtypes, and repeats bit for bit, whatever
    the workspace."""
    shape = case.shape()
    poison(x.q)
    out, grads = step(x)
    for grad, tensor in zip(grads, (x.q, x.k, x.v, x.bias), strict=True):
        assert grad.dtype == tensor.dtype and grad.stride() == tensor.stride()
        assert bool(torch.isfinite(grad).all())
    again = (gradients(x, workspace_mib=budget) for budget in [1, None, 16, 512][: repeats - 1])
    equal = all(torch.equal(a, b) for other in again for a, b in zip(grads, other, strict=True))
    heads = max(1, min(shape.heads, BIAS_SCORES // (shape.batch * shape.rows * shape.crop**2)))
    rows = sampled_rows(shape).to(DEVICE)
    errors, allowed = errors_of(x, grads, rows, heads), bounds(case)
    mask = None if x.mask is None else x.mask[:, rows]
    errors["out"] = relative_rms(out[:, rows], reference.attention(x.q[:, rows], x.k[:, rows], x.v[:, rows], x.bias, mask)[0])
    allowed["out"] = ForwardWorkload(shape, DEVICE).bounds()["out"]
    EVIDENCE.extend(evidence_rows(case, errors, allowed, equal, repeats))
    assert all(errors[name] <= allowed[name] for name in errors), (errors, allowed)
    assert equal


USUAL = Case(384, 32, 4, "crop", 1, "none", "normal", "bfloat16 bfloat16", "contiguous")


@pytest.mark.parametrize("case", covering(), ids=str)
def test_grid(case: Case) -> None:
    check(case, inputs_of(case, with_grad_out=True))


@pytest.mark.parametrize("crop", FACTORS["crop"])
def test_every_crop_at_the_usual_shape(crop: int) -> None:
    case = USUAL._replace(crop=crop)
    check(case, inputs_of(case, seed=1, with_grad_out=True))


@pytest.mark.parametrize("head_dim", [1, 5, 17, 31, 33, 100, 127])
def test_head_dims_that_are_padded(head_dim: int) -> None:
    case = Case(129, head_dim, 3, "crop+3", 1, "bool random10", "normal", "bfloat16 float32", "contiguous")
    check(case, inputs_of(case, with_grad_out=True))


ACCEPTED = {"out": 2.01e-3, "dq": 2.40e-3, "dk": 2.36e-3, "dv": 2.36e-3}


@pytest.mark.parametrize("bias_dtype, dbias", [("bfloat16", 1.71e-3), ("float32", 5e-4)])
def test_accuracy_at_256(bias_dtype: str, dbias: float) -> None:
    x = make_inputs(TriangleAttentionShape(256, bias_dtype=bias_dtype), DEVICE, with_grad_out=True)
    errors = errors_of(x, gradients(x), torch.arange(256, device=DEVICE), 4)
    out = step(x)[0]
    errors["out"] = relative_rms(out, reference.attention(x.q, x.k, x.v, x.bias)[0])
    allowed = ACCEPTED | {"dbias": dbias}
    assert all(errors[name] <= allowed[name] for name in allowed), (errors, allowed)


def test_compensation_makes_the_bias_gradient_more_exact() -> None:
    x = make_inputs(TriangleAttentionShape(384, rows=64, bias_dtype="float32"), DEVICE, with_grad_out=True)
    want = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias)[3]
    with_it = gradient_error(gradients(x)[3], want)
    with tpf_jit.residual_compensation(False):
        without = gradient_error(gradients(x)[3], want)
    assert with_it < 0.05 * without, (with_it, without)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_keys_have_exactly_zero_gradients(kind: str) -> None:
    shape = TriangleAttentionShape(201, rows=31, mask=kind)
    x = make_inputs(shape, DEVICE, mask_pattern="rows", mask_value=-math.inf, with_grad_out=True)
    poison(x.q)
    grads = gradients(x)
    assert all(bool((grad[:, ::3] == 0).all()) for grad in grads[:3])
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    everything = Inputs(x.q, x.k, x.v, x.bias, torch.zeros_like(x.mask, dtype=torch.bool), x.grad_out)
    assert all(bool((grad == 0).all()) for grad in gradients(everything))


def test_rows_full_of_large_negatives_stay_a_softmax() -> None:
    shape = TriangleAttentionShape(201, rows=31, mask="additive", bias_dtype="float32")
    x = make_inputs(shape, DEVICE, mask_pattern="rows", mask_value=-1e9, with_grad_out=True)
    full = (x.mask == -1e9).all(-1).flatten()
    assert bool(full.any())
    rows = full.nonzero().flatten()
    errors = errors_of(x, gradients(x), rows, 4)
    allowed = gradient_bounds(shape, "normal")
    # All rows have the same, equal probabilities, so P's roundings do not average.
    assert all(errors[name] <= 1.3 * allowed[name] for name in ("dq", "dk", "dv")), errors
    assert errors["dbias"] <= 2 * allowed["dbias"]


@pytest.mark.parametrize("needed", range(1, 16), ids=lambda bits: f"{bits:04b}")
def test_frozen_operands(needed: int) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=20, mask="bool"), DEVICE, with_grad_out=True)
    tensors = leaves(x)
    wanted = [position for position in range(4) if needed >> position & 1]
    for position, tensor in enumerate(tensors):
        tensor.requires_grad_(position in wanted)
    tpf_jit.triangle_attention(*tensors, x.mask).backward(x.grad_out)
    ref = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias, x.mask)
    allowed = bounds(USUAL._replace(crop=129, mask="bool random10"))
    for position, tensor in enumerate(tensors):
        assert (tensor.grad is not None) == (position in wanted)
        if position in wanted:
            assert gradient_error(tensor.grad, ref[position]) <= allowed[NAMES[position]]


def test_gradient_through_the_lse() -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=20, mask="bool", bias_dtype="float32"), DEVICE, with_grad_out=True)
    for both in (False, True):
        tensors = leaves(x)
        out, lse = tpf_jit.triangle_attention(*tensors, x.mask, return_lse=True)
        weights = torch.randn_like(lse)
        loss = (lse * weights).sum()
        (loss + (out.float() * x.grad_out.float()).sum() if both else loss).backward()
        grad_out = x.grad_out if both else torch.zeros_like(x.grad_out)
        ref = reference.attention_backward(grad_out, x.q, x.k, x.v, x.bias, x.mask, grad_lse=weights)
        allowed = bounds(USUAL._replace(crop=129, mask="bool random10", dtypes="bfloat16 float32"))
        for name, tensor, want in zip(NAMES, tensors, ref, strict=True):
            assert gradient_error(tensor.grad, want) <= allowed[name], (name, both)


# Layouts


@pytest.mark.parametrize("arrange", ["contiguous", "sliced", "packed", "strided_head_dim", "unaligned", "expanded"])
def test_layouts_give_the_same_bits(arrange: str) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=20), DEVICE, with_grad_out=True)
    arranged = {
        "contiguous": lambda t: t.contiguous(),
        "sliced": lambda t: torch.cat([t, t], 1)[:, :20],
        "packed": lambda t: torch.cat([t, t, t], -1)[..., :32],
        "strided_head_dim": lambda t: torch.stack([t, t], -1)[..., 0],
        "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
        "expanded": lambda t: t[:, :1].expand_as(t),
    }[arrange]
    odd = Inputs(*map(arranged, (x.q, x.k, x.v)), x.bias, None, arranged(x.grad_out))
    plain = Inputs(
        *(t.transpose(2, 3).contiguous().transpose(2, 3) for t in (odd.q, odd.k, odd.v)), x.bias, None,
        odd.grad_out.transpose(2, 3).contiguous().transpose(2, 3),
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(gradients(odd), gradients(plain), strict=True))


@pytest.mark.parametrize("sizes", [(1, 9), (2, 9), (1, 1)], ids=str)
@pytest.mark.parametrize("bias_dtype", [BF16, torch.float32])
def test_biases_of_every_sharing(sizes: tuple[int, int], bias_dtype: torch.dtype) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, batch=max(2, sizes[0]), mask="bool"), DEVICE, with_grad_out=True)
    if sizes == (1, 9):
        x = Inputs(*(t[:1] for t in (x.q, x.k, x.v, x.bias, x.mask, x.grad_out)))
    bias = torch.randn(*sizes, 4, 129, 129, device=DEVICE, dtype=bias_dtype)
    x = Inputs(x.q, x.k, x.v, bias, x.mask, x.grad_out)
    ref = reference.attention_backward(x.grad_out, x.q, x.k, x.v, bias, x.mask)
    dtypes = f"bfloat16 {str(bias_dtype)[6:]}"
    allowed = bounds(USUAL._replace(crop=129, mask="bool random10", dtypes=dtypes))
    for name, grad, want in zip(NAMES, gradients(x), ref, strict=True):
        assert gradient_error(grad, want) <= allowed[name], name


def test_an_expanded_bias() -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, batch=2), DEVICE, with_grad_out=True)
    shared = x.bias.detach().requires_grad_()
    tpf_jit.triangle_attention(x.q, x.k, x.v, shared.expand(2, 9, 4, 129, 129)).backward(x.grad_out)
    want = reference.attention_backward(x.grad_out, x.q, x.k, x.v, x.bias)[3]
    assert gradient_error(shared.grad, want) <= 2 * bounds(USUAL._replace(crop=129))["dbias"]


# Bits, streams, memory


@pytest.mark.parametrize("case", [
    USUAL,
    USUAL._replace(crop=640, head_dim=16, rows="one"),
    USUAL._replace(crop=353, rows="crop+3", mask="bool rows", family="trained_like", dtypes="bfloat16 float32"),
    USUAL._replace(crop=129, head_dim=64, batch=2, mask="additive random50", dtypes="float16 float16"),
], ids=str)  # fmt: skip
def test_five_repeats_under_load_and_with_any_budget(case: Case) -> None:
    x = inputs_of(case, with_grad_out=True)
    alone = gradients(x)
    load = torch.randn(4096, 4096, device=DEVICE)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(100):
            load = load @ load / 4096
    busy = [gradients(x, workspace_mib=budget) for budget in (1, 2, 17, 256, None)]
    assert all(torch.equal(a, b) for grads in busy for a, b in zip(grads, alone, strict=True))
    torch.cuda.current_stream().wait_stream(other)
    check(case, x, repeats=5)


def test_the_budget_bounds_the_workspace(monkeypatch) -> None:
    x = make_inputs(TriangleAttentionShape(1024, heads=8, rows=64), DEVICE, with_grad_out=True)
    peaks = {}
    for budget in (512, 8):
        monkeypatch.setenv(settings.WORKSPACE_VARIABLE, str(budget))
        gradients(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(x)
        torch.cuda.synchronize()
        peaks[budget] = torch.cuda.max_memory_allocated() - before
    # One head of one slab is 4 MiB; at most MOST_SLABS of them are taken at once.
    assert peaks[8] <= peaks[512]
    kept = 7 * x.q.numel() * 2 + 2 * x.bias.numel() * 2 + x.q.numel() // 32 * 4 * 6
    assert peaks[8] <= kept + 64 * 2**20 + 16 * 2**20, (peaks, kept)


def test_memory_of_a_training_step() -> None:
    x = make_inputs(TriangleAttentionShape(768), DEVICE, with_grad_out=True)
    gradients(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients(x)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 3.1 * 2**30


def test_a_side_stream_is_respected() -> None:
    """The output's gradient appears late on a side stream; a kernel on any other stream would read it too early."""
    x = make_inputs(TriangleAttentionShape(384, rows=100), DEVICE, with_grad_out=True)
    want = gradients(x)
    tensors, grad_out = leaves(x), torch.zeros_like(x.grad_out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        out = tpf_jit.triangle_attention(*tensors)
        torch.cuda._sleep(20_000_000)
        grad_out.copy_(x.grad_out)
        grads = torch.autograd.grad(out, tensors, grad_out)
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


# What PyTorch does around it


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, mask="bool"), DEVICE, with_grad_out=True)
    want, stored = gradients(x), leaves(x)
    checkpoint(tpf_jit.triangle_attention, *stored, x.mask, use_reentrant=reentrant).backward(x.grad_out)
    assert all(torch.equal(a, b.grad) for a, b in zip(want, stored, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_training_step(dynamic: bool) -> None:
    def loss(q, k, v, bias, mask):
        gated = tpf_jit.triangle_attention(q, k, v, bias, mask).transpose(-2, -3).flatten(-2) * 1.5
        return gated.float().square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    for crop in (64, 129):
        x = make_inputs(TriangleAttentionShape(crop, rows=9, mask="bool"), DEVICE)
        plain, traced = leaves(x), leaves(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            loss(*plain, x.mask).backward()
            compiled(*traced, x.mask).backward()
        for a, b in zip(plain, traced, strict=True):
            assert relative_rms(b.grad, a.grad, exact_zeros=False) <= 5e-3 and a.grad.stride() == b.grad.stride()


@pytest.mark.parametrize("case", ["plain", "mask", "padded_head_dim", "frozen_bias"])
def test_opcheck(case: str) -> None:
    shape = TriangleAttentionShape(
        24, heads=2, rows=3, head_dim=12 if case == "padded_head_dim" else 16, mask="bool" if case == "mask" else "none"
    )
    x = make_inputs(shape, DEVICE, with_grad_out=True)
    needed = [True, True, case != "mask", case != "frozen_bias"]
    op = torch.ops.tpf_jit
    out, lse, residual, low = op.triangle_attention_forward(x.q, x.k, x.v, x.bias, x.mask, 0.3, True)
    saved = (out, residual, lse, low)
    arguments = (x.grad_out, None, x.q, x.k, x.v, x.bias, x.mask, *saved, 0.3, needed)
    torch.library.opcheck(op.triangle_attention_backward.default, arguments)


@pytest.mark.parametrize("mask", ["none", "bool"])
def test_a_cuda_graph_replays_a_training_step(mask: str) -> None:
    shape = TriangleAttentionShape(129, rows=9, mask=mask)
    kernels.forget()
    tpf_jit.warmup(shape, training=True)
    x, fresh = (make_inputs(shape, DEVICE, seed=seed, with_grad_out=True) for seed in (0, 1))
    tensors = leaves(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(tpf_jit.triangle_attention(*tensors, x.mask), tensors, x.grad_out)
    with torch.no_grad():
        for tensor, name in zip(tensors, ("q", "k", "v", "bias"), strict=True):
            tensor.copy_(getattr(fresh, name))
        x.grad_out.copy_(fresh.grad_out)
        if x.mask is not None:
            x.mask.copy_(fresh.mask)
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(grads, gradients(fresh), strict=True))


def test_capturing_with_a_cold_backward_raises_and_leaves_the_stream_usable() -> None:
    x = make_inputs(TriangleAttentionShape(100, rows=9), DEVICE, with_grad_out=True)
    want = gradients(x)
    kernels.forget()
    tpf_jit.warmup(TriangleAttentionShape(100, rows=9), residual=True)
    tensors, scratch = leaves(x), torch.zeros(8, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scratch.add_(1)
        out = tpf_jit.triangle_attention(*tensors)
        with pytest.raises(ColdKernelInCapture, match="warmup"):
            torch.autograd.grad(out, tensors, x.grad_out)
        scratch.add_(1)
    graph.replay()
    assert bool((scratch == 2).all()), "the capture went on as if nothing had happened"
    assert all(torch.equal(a, b) for a, b in zip(gradients(x), want, strict=True))


# Each kernel alone


@pytest.mark.parametrize("family", ["normal", "trained_like"])
@pytest.mark.parametrize("fields", [
    {"crop": 768, "rows": 24, "heads": 2}, {"crop": 353, "rows": 20, "mask": "bool"}, {"crop": 129, "head_dim": 16, "rows": 7},
    {"crop": 201, "head_dim": 24, "rows": 31, "batch": 2, "mask": "additive", "bias_dtype": "float32"}, {"crop": 1, "rows": 3},
    {"crop": 640, "head_dim": 64, "rows": 5, "mask": "bool"}, {"crop": 600, "rows": 3, "dtype": "float16"},
], ids=str)  # fmt: skip
def test_the_tile_kernel_in_every_configuration(fields: dict, family: str) -> None:
    template, shape = registry.get("triangle_attention_backward_tile_sm90"), TriangleAttentionShape(**fields)
    workload = template.workload(shape, DEVICE, family=family)
    data = workload.make_inputs(0)
    want, allowed = workload.reference(data), workload.bounds()
    if shape.crop == 1:
        # Of one key dS is exactly zero, and what is left of equal float32 numbers is measured against the floor.
        allowed["dbias"] = 1e-3
    for config in template.space(shape):
        function = kernels.get_kernel(template.name, shape, (), config).function
        workload.configure(config)
        found = workload.run(function, data)
        errors = workload.errors(found, want)
        assert all(errors[name] <= allowed[name] for name in allowed), (config, errors, allowed)
        for _ in range(3):
            again = workload.run(function, data)
            assert all(torch.equal(found[name], again[name]) for name in found), config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", ["backward_stats", "backward_key", "backward_query"])
@pytest.mark.parametrize("fields", [
    {"crop": 353, "rows": 20}, {"crop": 203, "rows": 5, "mask": "bool", "bias_dtype": "float32"},
    {"crop": 129, "rows": 7, "head_dim": 24, "dtype": "float16", "mask": "additive"},
], ids=str)  # fmt: skip
def test_each_kernel_on_exact_operands(direction: str, family: str, fields: dict) -> None:
    shape = TriangleAttentionShape(**fields)
    kernel = kernels.get_kernel(f"triangle_attention/{direction}", shape)
    workload = kernel.template.workload(shape, DEVICE, family=family)
    if hasattr(workload, "configure"):
        workload.configure(kernel.config)
    data = workload.make_inputs(0)
    found = workload.run(kernel.function, data)
    errors, allowed = workload.errors(found, workload.reference(data)), workload.bounds()
    assert all(errors[name] <= allowed[name] for name in allowed), (errors, allowed)
    again = workload.run(kernel.function, data)
    assert all(torch.equal(found[name], again[name]) for name in found)
