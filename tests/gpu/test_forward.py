"""The forward on a Hopper GPU against float64, through the public operator.

The grid is the product of everything the operator takes, which is far too large; `covering` picks few cases in which every pair
of values meets. Where a problem is large, the reference is computed for a sample of its rows: rows are independent of each other.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tpf_jit
from tpf_jit import kernels
from tpf_jit.errors import ColdKernelInCapture, FallbackWarning
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.inputs import Inputs, make_inputs
from tpf_jit.templates.triangle_attention.workload import ROUNDING, ForwardWorkload, relative_rms

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BF16 = torch.bfloat16
REFERENCE_SCORES = 2**28
"""Most float64 scores of one case's reference."""
MOST_ELEMENTS = 2**29
"""Of one operand in the grid; `test_past_two_to_the_31_elements` goes beyond."""

FACTORS = {
    "crop": (1, 7, 16, 100, 128, 129, 255, 353, 384, 601, 768, 1024, 2048),
    "head_dim": (8, 16, 24, 32, 40, 64, 96, 128),
    "heads": (1, 3, 4, 8),
    "rows": ("one", "crop", "crop+3"),
    "batch": (1, 2),
    "mask": (
        "none", "bool random10", "bool random99", "bool prefix", "bool rows",
        "additive random50", "additive rows", "additive soft",
    ),  # fmt: skip
    "family": ("normal", "normal", "trained_like", "extreme", "adversarial"),
    "dtypes": ("bfloat16 bfloat16", "bfloat16 float32", "float16 float16", "float16 float32"),
    "bias": ("contiguous", "heads_innermost", "heads_innermost_transposed"),
}


class Case(NamedTuple):
    crop: int
    head_dim: int
    heads: int
    rows: str
    batch: int
    mask: str
    family: str
    dtypes: str
    bias: str

    def shape(self) -> TriangleAttentionShape:
        dtype, bias_dtype = self.dtypes.split()
        rows = {"one": 1, "crop": self.crop, "crop+3": self.crop + 3}[self.rows]
        return TriangleAttentionShape(
            self.crop, self.heads, self.head_dim, rows, self.batch, dtype, bias_dtype, self.mask.partition(" ")[0]
        )

    def fits(self) -> bool:
        shape = self.shape()
        return shape.batch * shape.rows * shape.heads * shape.crop * shape.head_dim <= MOST_ELEMENTS

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "_") for value in self)


def pairs(case: Case) -> set[tuple]:
    return {((i, case[i]), (j, case[j])) for i, j in itertools.combinations(range(len(case)), 2)}


def covering(seed: int = 0) -> list[Case]:
    """Cases that hold every pair of values which fits into memory; greedy, and the same on every machine."""
    choice = random.Random(seed)
    values = list(FACTORS.values())
    missing = set()
    for i, j in itertools.combinations(range(len(values)), 2):
        missing |= {((i, a), (j, b)) for a in values[i] for b in values[j]}
    cases = []
    while missing:
        wanted = min(missing, key=repr)
        best, gain = None, -1
        for _ in range(60):
            picked = [choice.choice(options) for options in values]
            for position, value in wanted:
                picked[position] = value
            case = Case(*picked)
            covered = len(pairs(case) & missing) if case.fits() else -1
            if covered > gain:
                best, gain = case, covered
        if best is None:
            missing.discard(wanted)  # this pair does not fit, whatever the rest
            continue
        cases.append(best)
        missing -= pairs(best)
    return sorted(cases, key=lambda case: (case.crop, str(case)))


def inputs_of(case: Case, seed: int = 0, with_grad_out: bool = False) -> Inputs:
    pattern = case.mask.partition(" ")[2] or None
    made = make_inputs(case.shape(), DEVICE, seed, case.family, pattern, with_grad_out=with_grad_out)
    if case.bias == "contiguous":
        return made
    order, back = ((0, 1, 3, 4, 2), (0, 1, 4, 2, 3)) if case.bias == "heads_innermost" else ((0, 1, 4, 3, 2), (0, 1, 4, 3, 2))
    bias = made.bias.permute(order).contiguous().permute(back)
    return Inputs(made.q, made.k, made.v, bias, made.mask, made.grad_out)


def poison(q: torch.Tensor) -> None:
    """Leave NaNs in the memory that the allocator hands out next, so that an element nobody writes is seen."""
    torch.full_like(q, math.nan)
    torch.full(q.shape[:-1], math.nan, device=q.device)


def sampled_rows(shape: TriangleAttentionShape) -> torch.Tensor:
    count = max(2, REFERENCE_SCORES // (shape.batch * shape.heads * shape.crop**2))
    if count >= shape.rows:
        return torch.arange(shape.rows)
    inner = torch.randperm(shape.rows - 2, generator=torch.Generator().manual_seed(0))[: count - 2] + 1
    return torch.cat([torch.tensor([0, shape.rows - 1]), inner]).sort().values


def check(case: Case, x: Inputs) -> torch.Tensor:
    """The public operator on inputs of a case: takes the kernel, is right on the sampled rows, and repeats bit for bit."""
    shape = case.shape()
    assert tpf_jit.is_supported(x.q, x.k, x.v, x.bias, x.mask)[0]
    poison(x.q)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        out, lse = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask, return_lse=True)
    rows = sampled_rows(shape).to(DEVICE)
    mask = None if x.mask is None else x.mask[:, rows]
    ref_out, ref_lse = reference.attention(x.q[:, rows], x.k[:, rows], x.v[:, rows], x.bias, mask)
    bounds = ForwardWorkload(shape, DEVICE).bounds()
    errors = {"out": relative_rms(out[:, rows], ref_out), "lse": relative_rms(lse[:, rows], ref_lse, floor=1.0)}
    equal = torch.equal(out, tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask))
    EVIDENCE.extend(evidence_rows(case, errors, bounds, equal))
    assert all(errors[name] <= bounds[name] for name in errors), (errors, bounds)
    assert not bool(out.isnan().any())
    assert equal
    return out


EVIDENCE: list[dict] = []
"""What `check` saw, for the record that `pytest --record FOLDER` keeps (tests/gpu/conftest.py)."""


def evidence_rows(case: Case, errors: dict, bounds: dict, equal: bool) -> list[dict]:
    shape = case.shape()
    problem = {"B": shape.batch, "I": shape.rows, "N": shape.crop, "H": shape.heads, "D": shape.head_dim}
    described = {"dtype": shape.dtype, "bias_dtype": shape.bias_dtype, "mask": case.mask, "family": case.family}
    return [
        {"op": shape.op, "pass": "forward", "impl": "tpf_jit", "tensor": name, **problem, **described}
        | {"rel_rms_max": error if math.isfinite(error) else None, "bound": bounds[name]}
        | {"bitwise_repeats": 2, "bitwise_equal": equal}
        for name, error in errors.items()
    ]


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead():
    """The grid's kernels, compiled on all cores at once instead of one by one."""
    tpf_jit.compile([case.shape() for case in covering()])


@pytest.fixture(autouse=True)
def release_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("case", covering(), ids=str)
def test_grid(case: Case) -> None:
    out = check(case, inputs_of(case))
    assert out.transpose(2, 3).is_contiguous()


@pytest.mark.parametrize("crop", FACTORS["crop"])
def test_every_crop_at_the_usual_shape(crop: int) -> None:
    case = Case(crop, 32, 4, "crop", 1, "none", "normal", "bfloat16 bfloat16", "contiguous")
    check(case, inputs_of(case, seed=1))


@pytest.mark.parametrize("head_dim", [1, 5, 17, 31, 33, 100, 127])
def test_head_dims_that_are_padded(head_dim: int) -> None:
    case = Case(129, head_dim, 3, "crop+3", 1, "bool random10", "normal", "bfloat16 float32", "contiguous")
    check(case, inputs_of(case))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.5])
def test_any_scale(scale: float) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=40), DEVICE)
    out = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, scale=scale)
    # At scale 0 all rows have the same probabilities, so their rounding errors do not average.
    assert relative_rms(out, reference.attention(x.q, x.k, x.v, x.bias, scale=scale)[0]) <= (2.1e-3 if scale else 2.4e-3)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_rows_without_keys_are_exactly_zero(kind: str) -> None:
    shape = TriangleAttentionShape(201, rows=31, mask=kind)
    x = make_inputs(shape, DEVICE, mask_pattern="rows", mask_value=-math.inf)
    poison(x.q)
    out, lse = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask, return_lse=True)
    assert bool((out[:, ::3] == 0).all()) and bool((lse[:, ::3] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, 1]).all())


def test_nans_reach_what_depends_on_them_and_no_more() -> None:
    x = make_inputs(TriangleAttentionShape(201, rows=7), DEVICE)
    x.q[0, 1, 0, 2, 3] = math.nan
    x.k[0, 4, 1, 5, 0] = math.nan
    x.bias[0, 0, 3, 150, 10] = math.nan
    out, lse = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, return_lse=True)
    broken = torch.zeros(1, 7, 4, 201, dtype=torch.bool, device=DEVICE)
    broken[0, 1, 0, 2] = broken[0, 4, 1] = broken[0, :, 3, 150] = True
    assert torch.equal(lse.isnan(), broken) and torch.equal(out.isnan().any(-1), broken)


def test_residual() -> None:
    workload = ForwardWorkload(TriangleAttentionShape(353, rows=50, mask="bool"), DEVICE, residual=True)
    x = workload.make_inputs(0)
    kernel = tpf_jit.compile(workload.shape, residual=True)
    errors, bounds = workload.errors(workload.run(kernel.function, x), workload.reference(x)), workload.bounds()
    assert all(errors[name] <= bounds[name] for name in bounds), (errors, bounds)
    assert errors["out"] <= 1.05 * ROUNDING["bfloat16"], "of the output's own rounding alone"
    out, _, residual, _ = torch.ops.tpf_jit.triangle_attention_forward(x.q, x.k, x.v, x.bias, x.mask, 32**-0.5, True)
    assert relative_rms(out, workload.reference(x)["out"]) == errors["out"] and residual.stride() == out.stride()


# Layouts


@pytest.mark.parametrize("arrange", ["contiguous", "sliced", "packed", "strided_head_dim", "unaligned", "expanded"])
def test_layouts_of_q_k_v_give_the_same_bits(arrange: str) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=20), DEVICE)
    arranged = {
        "contiguous": lambda t: t.contiguous(),
        "sliced": lambda t: torch.cat([t, t], 1)[:, :20],
        "packed": lambda t: torch.cat([t, t, t], -1)[..., :32],
        "strided_head_dim": lambda t: torch.stack([t, t], -1)[..., 0],
        "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
        "expanded": lambda t: t[:, :1].expand_as(t),
    }[arrange]
    q, k, v = map(arranged, (x.q, x.k, x.v))
    plain = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    assert torch.equal(tpf_jit.triangle_attention(q, k, v, x.bias), tpf_jit.triangle_attention(*plain, x.bias))


def test_views_are_read_without_a_copy() -> None:
    """Peak memory of a call is its output, its LSE and nothing of an operand's size."""
    x = make_inputs(TriangleAttentionShape(512), DEVICE)
    tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= out.numel() * 2 + out.numel() // 32 * 4 + 2**20


@pytest.mark.parametrize("batch", [1, 2])
def test_a_bias_that_differs_by_row(batch: int) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, batch=batch, mask="bool"), DEVICE)
    bias = torch.randn(batch, 9, 4, 129, 129, device=DEVICE, dtype=BF16)
    out = tpf_jit.triangle_attention(x.q, x.k, x.v, bias, x.mask)
    assert relative_rms(out, reference.attention(x.q, x.k, x.v, bias, x.mask)[0]) <= 2.1e-3


def test_shared_and_expanded_biases() -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, batch=2), DEVICE)
    shared = x.bias[:1]
    want = tpf_jit.triangle_attention(x.q, x.k, x.v, shared.repeat(2, 1, 1, 1, 1))
    assert relative_rms(tpf_jit.triangle_attention(x.q, x.k, x.v, shared), want) <= 2.1e-3
    expanded = x.bias.expand(2, 9, 4, 129, 129)
    assert torch.equal(tpf_jit.triangle_attention(x.q, x.k, x.v, expanded), tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias))


def test_four_and_six_dimensions() -> None:
    x = make_inputs(TriangleAttentionShape(100, rows=9, batch=2, mask="bool"), DEVICE)
    want = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask)
    four = tpf_jit.triangle_attention(x.q[1], x.k[1], x.v[1], x.bias[1], x.mask[1])
    six = tpf_jit.triangle_attention(*(t[:, None] for t in (x.q, x.k, x.v, x.bias, x.mask)))
    assert torch.equal(four, want[1]) and torch.equal(six[:, 0], want)


def test_past_two_to_the_31_elements() -> None:
    shape = TriangleAttentionShape(2048, heads=4, head_dim=128, rows=2051)
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    size = (1, shape.rows, shape.crop, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, device=DEVICE, dtype=BF16).transpose(2, 3) for _ in range(3))
    assert q.numel() > 2**31
    bias = torch.randn(1, 1, 4, 2048, 2048, device=DEVICE, dtype=BF16)
    out, lse = tpf_jit.triangle_attention(q, k, v, bias, return_lse=True)
    for rows in (slice(0, 1), slice(1023, 1025), slice(2049, 2051)):
        ref_out, ref_lse = reference.attention(q[:, rows], k[:, rows], v[:, rows], bias)
        assert relative_rms(out[:, rows], ref_out) <= 2.1e-3 and relative_rms(lse[:, rows], ref_lse) <= 2e-5


# Streams, determinism, other paths


def test_bits_do_not_depend_on_what_else_runs() -> None:
    x = make_inputs(TriangleAttentionShape(384, rows=100, mask="bool"), DEVICE)
    alone = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask)
    load = torch.randn(4096, 4096, device=DEVICE)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(50):
            load = load @ load / 4096
    busy = [tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask) for _ in range(20)]
    assert all(torch.equal(alone, out) for out in busy)
    torch.cuda.current_stream().wait_stream(other)


def test_a_side_stream_is_respected() -> None:
    """Inputs appear late on a side stream; a kernel on any other stream would read them too early."""
    x = make_inputs(TriangleAttentionShape(384, rows=100), DEVICE)
    want = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
    q = torch.zeros_like(x.q)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        q.copy_(x.q)
        out = tpf_jit.triangle_attention(q, x.k, x.v, x.bias)
    side.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_take_the_pytorch_path(dtype: torch.dtype) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, mask="bool"), DEVICE)
    q, k, v, bias = (t.to(dtype) for t in (x.q, x.k, x.v, x.bias))
    supported, reason = tpf_jit.is_supported(q, k, v, bias, x.mask)
    assert not supported and str(dtype)[6:] in reason
    out = tpf_jit.triangle_attention(q, k, v, bias, x.mask)
    assert out.dtype == dtype
    assert relative_rms(out, reference.attention(q, k, v, bias, x.mask)[0]) <= (1e-13 if dtype == torch.float64 else 1e-5)


def test_the_pytorch_path_stays_in_its_budget() -> None:
    x = make_inputs(TriangleAttentionShape(1024, rows=256), DEVICE, with_grad_out=True)
    tensors = [t.float().requires_grad_() for t in (x.q, x.k, x.v, x.bias)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tpf_jit.triangle_attention(*tensors).backward(x.grad_out.float())
    used = torch.cuda.max_memory_allocated() - before
    # Output, its gradient, three gradients of operands, the bias's twice; scores; a chunk's operands.
    assert used <= 6 * tensors[0].numel() * 4 + 2 * tensors[3].numel() * 4 + 512 * 2**20


# Autograd and what PyTorch does around it


def leaves(x: Inputs) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.bias)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9, mask="bool"), DEVICE, with_grad_out=True)
    plain, stored = leaves(x), leaves(x)
    tpf_jit.triangle_attention(*plain, x.mask).backward(x.grad_out)
    checkpoint(tpf_jit.triangle_attention, *stored, x.mask, use_reentrant=reentrant).backward(x.grad_out)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, stored, strict=True))


def test_autocast() -> None:
    x = make_inputs(TriangleAttentionShape(129, rows=9), DEVICE)
    tensors = [t.detach().float().requires_grad_() for t in (x.q, x.k, x.v, x.bias)]
    with torch.autocast("cuda", dtype=BF16), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        out = tpf_jit.triangle_attention(*tensors)
    assert out.dtype == BF16 and torch.equal(out, tpf_jit.triangle_attention(*leaves(x)[:3], x.bias.float()))
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_training_step(dynamic: bool) -> None:
    def step(q, k, v, bias, mask):
        gated = tpf_jit.triangle_attention(q, k, v, bias, mask).transpose(-2, -3).flatten(-2) * 1.5
        return gated.float().square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for crop in (64, 129):
        x = make_inputs(TriangleAttentionShape(crop, rows=9, mask="bool"), DEVICE)
        plain, traced = leaves(x), leaves(x)
        step(*plain, x.mask).backward()
        compiled(*traced, x.mask).backward()
        for a, b in zip(plain, traced, strict=True):
            # Fused, dO is rounded once in place of three times.
            assert relative_rms(b.grad, a.grad) <= 4e-3 and a.grad.stride() == b.grad.stride()


@pytest.mark.parametrize("case", ["plain", "mask", "heads_innermost"])
def test_opcheck(case: str) -> None:
    x = make_inputs(TriangleAttentionShape(24, heads=2, rows=3, mask="bool" if case == "mask" else "none"), DEVICE)
    q, k, v, bias = leaves(x)
    if case == "heads_innermost":
        bias = bias.detach().permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3).requires_grad_()
    torch.library.opcheck(torch.ops.tpf_jit.triangle_attention_forward.default, (q, k, v, bias, x.mask, 0.3, case == "mask"))


def test_a_cuda_graph_replays_the_call() -> None:
    shape = TriangleAttentionShape(129, rows=9, mask="bool")
    tpf_jit.warmup(shape)
    x, fresh = (make_inputs(shape, DEVICE, seed=seed) for seed in (0, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias, x.mask)
    for name in ("q", "k", "v", "bias", "mask"):
        getattr(x, name).copy_(getattr(fresh, name))
    graph.replay()
    assert torch.equal(out, tpf_jit.triangle_attention(fresh.q, fresh.k, fresh.v, fresh.bias, fresh.mask))


def test_a_cuda_graph_replays_forward_and_backward() -> None:
    shape = TriangleAttentionShape(100, rows=9)
    x = make_inputs(shape, DEVICE, with_grad_out=True)
    tensors = leaves(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = torch.autograd.grad(tpf_jit.triangle_attention(*tensors), tensors, x.grad_out)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(tpf_jit.triangle_attention(*tensors), tensors, x.grad_out)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


def test_capturing_with_a_cold_kernel_raises_and_leaves_the_stream_usable() -> None:
    x = make_inputs(TriangleAttentionShape(100, rows=9), DEVICE)
    want = tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
    kernels.forget()
    graph = torch.cuda.CUDAGraph()
    scratch = torch.zeros(8, device=DEVICE)
    with torch.no_grad(), torch.cuda.graph(graph):
        scratch.add_(1)
        with pytest.raises(ColdKernelInCapture, match="warmup"):
            tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
        scratch.add_(1)
    graph.replay()
    assert bool((scratch == 2).all()), "the capture went on as if nothing had happened"
    assert torch.equal(tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias), want)


def test_explain_after_a_call() -> None:
    x = make_inputs(TriangleAttentionShape(100, rows=9), DEVICE)
    tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
    found = tpf_jit.explain(x.q, x.k, x.v, x.bias)
    assert found.path == "kernel" and found.state == "loaded"


def test_a_call_costs_the_host_little() -> None:
    """Time until the operator returns, without the GPU's: measured on tensors so small that the GPU never falls behind."""
    import time

    x = make_inputs(TriangleAttentionShape(64, rows=1), DEVICE)
    with torch.no_grad():
        best = math.inf
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                tpf_jit.triangle_attention(x.q, x.k, x.v, x.bias)
            best = min(best, (time.perf_counter() - start) / 50)
    assert best < 100e-6, f"{best * 1e6:.1f} us"
