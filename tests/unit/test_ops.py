"""The operator without a GPU: the kernel is a PyTorch emulation that checks its calling convention on every call."""

from __future__ import annotations

import math
import re
import warnings

import pytest
import torch
from emulation import EmulatedKernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tpf_jit.errors import ColdKernelInCapture, CompileFailed, FallbackWarning, InvalidInput, NotDifferentiable
from tpf_jit.ops import fallback, plans, routing
from tpf_jit.ops import triangle_attention as ops
from tpf_jit.ops.triangle_attention import triangle_attention
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.workload import relative_rms

BF16 = torch.bfloat16
BOUND = {torch.bfloat16: 2.6e-3, torch.float16: 3.5e-4}
"""Output of the emulated kernel, with room for small tensors."""
ROUNDED = {torch.bfloat16: 1.85e-3, torch.float16: 2.4e-4, torch.float32: 5e-6}


@pytest.fixture(autouse=True)
def fresh_plans():
    """What the machine passes for changes from test to test, and plans remember it."""
    plans._plans.clear()
    yield
    plans._plans.clear()


@pytest.fixture
def hopper(monkeypatch) -> None:
    """Lets this machine pass for one with a Hopper GPU and a template for every shape."""
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(routing, "unsupported", lambda shape, device: None)
    monkeypatch.setattr(routing, "_warned", set())


@pytest.fixture
def kernel(hopper, monkeypatch) -> EmulatedKernel:
    """The kernel such a machine has for every shape; `asked` lists the (shape, residual) it was looked up for."""
    emulated = EmulatedKernel()
    emulated.asked = []

    def find(family, shape, flags, device):
        if family not in (routing.FORWARD, routing.FORWARD_TRAINING):
            return "this test has no backward kernels"
        emulated.asked.append((shape, family == routing.FORWARD_TRAINING))
        return routing.Launch(emulated, 132)

    monkeypatch.setattr(routing, "find_kernel", find)
    return emulated


def projected(B=1, I=5, N=16, H=3, D=16, dtype=BF16) -> torch.Tensor:  # noqa: E741
    return torch.randn(B, I, N, H, D, dtype=dtype).transpose(2, 3)


def call_tensors(B=1, I=5, N=16, H=3, D=16, dtype=BF16, bias_dtype=None, seed=0) -> list[torch.Tensor]:  # noqa: E741
    torch.manual_seed(seed)
    qkv = [projected(B, I, N, H, D, dtype) for _ in range(3)]
    return [*qkv, torch.randn(B, 1, H, N, N, dtype=bias_dtype or dtype)]


def require_grad(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def check_against_reference(tensors, mask=None, scale=None, bound=None) -> torch.Tensor:
    q, k, v, bias = tensors
    out, lse = triangle_attention(q, k, v, bias, mask, scale, return_lse=True)
    five = [x.unsqueeze(0) if x.dim() == 4 and x is not bias else x for x in (q, k, v)]
    five_bias = bias if bias.dim() == 5 else bias.unsqueeze(0 if q.dim() == 4 else 1)
    five_mask = mask if mask is None or mask.dim() == 5 else mask.unsqueeze(0)
    ref_out, ref_lse = reference.attention(*five, five_bias, five_mask, scale)
    assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:-1]
    assert relative_rms(out, ref_out.view_as(out)) <= (bound or BOUND[q.dtype])
    assert relative_rms(lse, ref_lse.view_as(lse), floor=1.0) <= 1e-6
    return out


# Operands


def test_projection_layout_is_read_in_place(kernel) -> None:
    tensors = call_tensors()
    out = check_against_reference(tensors)
    for name, x in zip("qkv", tensors, strict=False):
        assert kernel.last[name].data_ptr() == x.data_ptr() and kernel.last[name].stride() == x.stride()
    assert kernel.last["bias"].data_ptr() == tensors[3].data_ptr()
    assert kernel.last["out"].data_ptr() == out.data_ptr()
    assert out.transpose(2, 3).is_contiguous()
    assert kernel.last["mask"] is None and kernel.last["residual"] is None
    assert kernel.asked == [(TriangleAttentionShape(16, heads=3, head_dim=16, rows=5), False)]


def copies(x: torch.Tensor, seen: torch.Tensor) -> bool:
    return x.data_ptr() != seen.data_ptr()


LAYOUTS = {
    # name: (how q, k, v are made from projection-layout ones, whether they must be copied)
    "contiguous": (lambda x: x.contiguous(), False),
    "rows_innermost": (lambda x: x.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4), False),
    "sliced_rows": (lambda x: torch.cat([x, x], 1)[:, : x.shape[1]], False),
    "packed_qkv": (lambda x: torch.cat([x, x, x], -1)[..., : x.shape[-1]], False),
    "strided_head_dim": (lambda x: torch.stack([x, x], -1)[..., 0], True),
    "odd_row_pitch": (lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]], True),
    "unaligned_base": (lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), True),
    "expanded_batch": (lambda x: x[:, :1].expand_as(x), True),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_layouts_of_q_k_v(kernel, name: str, batch: int) -> None:
    arrange, copied = LAYOUTS[name]
    *qkv, bias = call_tensors(B=batch)
    tensors = [*map(arrange, qkv), bias]
    out = check_against_reference(tensors)
    assert out.transpose(2, 3).is_contiguous(), "the output's layout does not follow the operands'"
    assert [copies(x, kernel.last[key]) for key, x in zip("qkv", tensors, strict=False)] == [copied] * 3


@pytest.mark.parametrize("size", [{"I": 1}, {"H": 1}, {"N": 1}, {"I": 1, "H": 1, "N": 1, "B": 1, "D": 8}], ids=str)
def test_axes_of_size_one_may_have_any_stride(kernel, size: dict) -> None:
    *qkv, bias = call_tensors(**size)
    odd = [x.as_strided(x.shape, [3 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]) for x in qkv]
    check_against_reference([*odd, bias])
    assert not any(copies(x, kernel.last[key]) for key, x in zip("qkv", odd, strict=False))


@pytest.mark.parametrize("dim", [1, 5, 8, 12, 24, 40, 127, 128])
def test_head_dims(kernel, dim: int) -> None:
    out = check_against_reference(call_tensors(D=dim, N=9))
    assert kernel.last["q"].shape[-1] == -(-dim // 8) * 8
    assert out.transpose(2, 3).is_contiguous()
    assert kernel.asked[-1][0].head_dim == dim


def test_a_bias_of_the_other_16_bit_type_is_read_as_float32(kernel) -> None:
    q, k, v, bias = call_tensors(bias_dtype=torch.float16)
    check_against_reference([q, k, v, bias])
    assert kernel.last["bias"].dtype == torch.float32 and kernel.asked[-1][0].bias_dtype == "float32"


BIASES = {
    # name: (bias from (B, H, N, N) values, whether it must be laid out anew when N is a multiple of 8)
    "row_axis": (lambda b: b.unsqueeze(1), False),
    "no_row_axis": (lambda b: b, False),
    "heads_innermost": (lambda b: b.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).unsqueeze(1), True),
    "heads_innermost_transposed": (lambda b: b.permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1).unsqueeze(1), True),
    "expanded_rows": (lambda b: b.unsqueeze(1).expand(-1, 5, -1, -1, -1), False),
    "sliced": (lambda b: torch.nn.functional.pad(b, (0, 8))[..., : b.shape[-1]].unsqueeze(1), False),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("crop", [16, 7])
@pytest.mark.parametrize("bias_dtype", [BF16, torch.float32])
def test_layouts_of_the_bias(kernel, name: str, crop: int, bias_dtype) -> None:
    arrange, copied = BIASES[name]
    q, k, v, bias = call_tensors(B=2, N=crop, bias_dtype=bias_dtype)
    arranged = arrange(bias[:, 0])
    check_against_reference([q, k, v, arranged])
    if crop % 8 == 0:
        assert copies(arranged, kernel.last["bias"]) == copied
    assert kernel.last["bias"].dtype == bias_dtype


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("crop", [16, 7])
def test_a_bias_that_differs_by_row(kernel, batch: int, crop: int) -> None:
    q, k, v, _ = call_tensors(B=batch, N=crop)
    mask = torch.rand(batch, 5, 1, 1, crop) > 0.3
    out = check_against_reference([q, k, v, torch.randn(batch, 5, 3, crop, crop, dtype=BF16)], mask)
    assert kernel.last["q"].shape == (batch * 5, 1, 3, crop, 16)
    assert kernel.last["out"].data_ptr() == out.data_ptr() and not copies(q, kernel.last["q"])
    assert (kernel.asked[-1][0].batch, kernel.asked[-1][0].rows) == (batch * 5, 1)
    check_against_reference([q, k, v, torch.randn(1, 5, 3, crop, crop, dtype=BF16)])


def test_a_bias_that_all_batch_elements_share(kernel) -> None:
    q, k, v, bias = call_tensors(B=2)
    mask = torch.rand(2, 5, 1, 1, 16) > 0.3
    for shared in (bias[:1], bias[:1].expand(2, -1, -1, -1, -1)):
        check_against_reference([q, k, v, shared], mask)
        assert kernel.last["q"].shape == (1, 10, 3, 16, 16)
        assert not copies(q, kernel.last["q"]) and not copies(bias, kernel.last["bias"])


MASK_SIZES = [(2, 5, 1, 1, 16), (1, 5, 1, 1, 16), (2, 1, 1, 1, 16), (1, 1, 1, 1, 16), (2, 5, 1, 1, 1), (5, 1, 1, 16), (16,)]


@pytest.mark.parametrize("size", MASK_SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, BF16], ids=str)
def test_masks_broadcast(kernel, size: tuple[int, ...], dtype) -> None:
    q, k, v, bias = call_tensors(B=2)
    mask = torch.rand(size) > 0.3 if dtype == torch.bool else torch.randn(size).to(dtype)
    out = triangle_attention(q, k, v, bias, mask)
    full = mask.expand(2, 5, 1, 1, 16)
    assert relative_rms(out, reference.attention(q, k, v, bias, full)[0]) <= BOUND[BF16]
    assert torch.equal(out, triangle_attention(q, k, v, bias, full)), "stride-0 axes read the same"
    assert torch.equal(out, triangle_attention(q, k, v, bias, full.expand(2, 5, 3, 16, 16))), "also those of heads and queries"


@pytest.mark.parametrize("crop", [1, 255, 256, 257])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_the_mask_buffer_is_padded(kernel, crop: int, kind: str) -> None:
    tensors = call_tensors(I=2, N=crop, H=1, D=8)
    mask = torch.rand(1, 2, 1, 1, crop) > 0.3
    check_against_reference(tensors, mask if kind == "bool" else torch.where(mask, 0.0, -1e9))
    assert kernel.last["mask"].shape == (1, 2, -(-crop // 256) * 256)


def test_rows_without_keys_are_exactly_zero(kernel) -> None:
    q, k, v, bias = call_tensors()
    mask = torch.ones(1, 5, 1, 1, 16, dtype=torch.bool)
    mask[:, 2] = False
    for given in (mask, torch.where(mask, 0.0, -math.inf)):
        out, lse = triangle_attention(q, k, v, bias, given, return_lse=True)
        assert bool((out[:, 2] == 0).all()) and bool((lse[:, 2] == -math.inf).all())
        assert bool((out[:, [0, 1, 3, 4]] != 0).any(-1).all())


# Ranks, scale, residual


def test_other_ranks(kernel) -> None:
    q, k, v, bias = call_tensors(B=6)
    mask = torch.rand(6, 5, 1, 1, 16) > 0.3
    expected, expected_lse = triangle_attention(q, k, v, bias, mask, return_lse=True)
    four = triangle_attention(q[0], k[0], v[0], bias[0], mask[0])
    assert four.dim() == 4 and torch.equal(four, triangle_attention(q[:1], k[:1], v[:1], bias[:1], mask[:1])[0])
    for one in (bias[:1], bias[0, 0]):
        assert torch.equal(four, triangle_attention(q[0], k[0], v[0], one, mask[:1])), "with a leading 1, and without row axis"
    six, lse = triangle_attention(*(x.unflatten(0, (2, 3)) for x in (q, k, v, bias, mask)), return_lse=True)
    assert six.shape == (2, 3, 5, 3, 16, 16) and torch.equal(six.flatten(0, 1), expected)
    assert torch.equal(lse.flatten(0, 1), expected_lse)
    assert not copies(q, kernel.last["q"])
    template = triangle_attention(q[:1, None], k[:1, None], v[:1, None], bias[:1, None], mask[:1, None])
    assert torch.equal(template[0], four[None])


def test_several_leading_axes_share_what_has_size_one_there(kernel) -> None:
    q, k, v, bias = (x.unflatten(0, (2, 3)) for x in call_tensors(B=6))
    mask = torch.rand(1, 3, 5, 1, 1, 16) > 0.3
    out = triangle_attention(q, k, v, bias[:, :1], mask)
    full = triangle_attention(q, k, v, bias[:, :1].expand_as(bias).contiguous(), mask.expand(2, 3, 5, 1, 1, 16).contiguous())
    assert torch.equal(out, full)


@pytest.mark.parametrize("scale", [None, 0, 0.0, -1.25, 2])
def test_any_finite_scale(kernel, scale) -> None:
    check_against_reference(call_tensors(), scale=scale)
    assert kernel.last["scale"] == (16**-0.5 if scale is None else scale)


def test_residual_recovers_what_rounding_took(kernel) -> None:
    for dim in (16, 12):
        q, k, v, bias = call_tensors(D=dim)
        out, _, residual, _ = torch.ops.tpf_jit.triangle_attention_forward(q, k, v, bias, None, 0.25, True)
        assert residual.shape == out.shape and residual.stride() == out.stride()
        ref = reference.attention(q, k, v, bias, scale=0.25)[0]
        # What is left is the rounding of the probabilities as an operand.
        assert relative_rms(out.double() + residual.double(), ref) < 0.75 * relative_rms(out, ref)
    assert kernel.asked[-1][1] is True


# Gradients


@pytest.mark.parametrize("path", ["kernel", "fallback"])
@pytest.mark.parametrize("bias_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("arrange", ["row_axis", "no_row_axis", "heads_innermost", "heads_innermost_transposed"])
def test_gradients(path: str, bias_dtype, arrange: str, request) -> None:
    if path == "kernel":
        request.getfixturevalue("kernel")
    *qkv, bias = call_tensors(B=2, N=13, bias_dtype=bias_dtype)
    tensors = require_grad([*qkv, BIASES[arrange][0](bias[:, 0])])
    mask = torch.rand(2, 5, 1, 1, 13) > 0.3
    grad_out = torch.randn(2, 5, 3, 13, 1, dtype=BF16).expand(-1, -1, -1, -1, 16)
    triangle_attention(*tensors, mask).backward(grad_out)
    q, k, v, b = (x.detach() for x in tensors)
    ref = reference.attention_backward(grad_out, q, k, v, b, mask)
    for x, want in zip(tensors, ref, strict=True):
        assert x.grad.dtype == x.dtype and x.grad.stride() == x.stride()
        assert relative_rms(x.grad, want) <= ROUNDED[x.dtype]


@pytest.mark.parametrize("frozen", [(0, 1, 2), (3,), (0, 2, 3), (1, 2, 3)], ids=str)
def test_only_needed_gradients_are_computed(kernel, frozen: tuple[int, ...], monkeypatch) -> None:
    tensors = require_grad(call_tensors())
    for position in frozen:
        tensors[position].requires_grad_(False)
    asked = []
    original = fallback.backward
    monkeypatch.setattr(fallback, "backward", lambda *arguments: asked.append(arguments[-1]) or original(*arguments))
    triangle_attention(*tensors).sum().backward()
    assert asked == [[position not in frozen for position in range(4)]]
    assert [x.grad is None for x in tensors] == [position in frozen for position in range(4)]


def test_gradient_through_the_lse(kernel) -> None:
    tensors = require_grad(call_tensors())
    out, lse = triangle_attention(*tensors, return_lse=True)
    weights = torch.randn_like(lse)
    (lse * weights).sum().backward()
    ref = reference.attention_backward(torch.zeros_like(out), *(x.detach() for x in tensors), grad_lse=weights)
    for x, want in zip(tensors, ref, strict=True):
        assert relative_rms(x.grad, want) <= ROUNDED[BF16]


@pytest.mark.parametrize("bias_dtype", [torch.float32, BF16])
def test_gradient_of_an_expanded_row_axis_stays_small(kernel, bias_dtype) -> None:
    *qkv, bias = call_tensors(bias_dtype=bias_dtype)
    bias.requires_grad_()
    seen = []
    expanded = bias.expand(-1, 5, -1, -1, -1)
    expanded.register_hook(lambda grad: seen.append(grad.stride(1)))
    triangle_attention(*qkv, expanded).sum().backward()
    assert seen == [0], "no gradient of size I * H * N * N exists"
    ref = reference.attention_backward(torch.ones_like(qkv[0]), *qkv, bias.detach())[3]
    assert relative_rms(bias.grad, ref) <= 2 * ROUNDED[bias_dtype]


def test_gradient_of_a_bias_that_differs_by_row(kernel) -> None:
    *qkv, _ = call_tensors()
    bias = torch.randn(1, 5, 3, 16, 16, dtype=BF16, requires_grad=True)
    triangle_attention(*qkv, bias).sum().backward()
    ref = reference.attention_backward(torch.ones_like(qkv[0]), *qkv, bias.detach())[3]
    assert bias.grad.shape == bias.shape and relative_rms(bias.grad, ref) <= ROUNDED[BF16]


def test_the_path_is_differentiable_in_float64() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 1, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(1, 1, 1, 4, 4, dtype=torch.float64, requires_grad=True))
    mask = torch.tensor([True, True, False, True]).view(1, 1, 1, 1, 4)
    assert torch.autograd.gradcheck(lambda *t: triangle_attention(*t, mask, return_lse=True), leaves)


def test_double_backward_says_so(kernel) -> None:
    tensors = require_grad(call_tensors())
    (grad,) = torch.autograd.grad(triangle_attention(*tensors).sum(), tensors[:1], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(NotDifferentiable, match="differentiated twice") as error:
        grad.sum().backward()
    (advice,) = re.findall("`(.*)`", str(error.value))
    found: dict = {}
    exec(advice, found)
    assert callable(found["reference"].attention)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kernel, reentrant: bool) -> None:
    plain, stored = require_grad(call_tensors()), require_grad(call_tensors())
    triangle_attention(*plain).sum().backward()
    checkpoint(triangle_attention, *stored, use_reentrant=reentrant).sum().backward()
    assert kernel.calls == 3
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, stored, strict=True))


def test_no_graph_without_need(kernel) -> None:
    tensors = call_tensors()
    assert not triangle_attention(*tensors).requires_grad
    with torch.no_grad():
        assert not triangle_attention(*require_grad(tensors)).requires_grad
    with torch.inference_mode():
        assert torch.equal(triangle_attention(*tensors), triangle_attention(*call_tensors()))


# Autocast


def test_autocast_casts_q_k_v_and_leaves_the_bias(kernel) -> None:
    tensors = require_grad(call_tensors(dtype=torch.float32))
    with torch.autocast("cpu", dtype=BF16):
        out = triangle_attention(*tensors)
    assert out.dtype == BF16 and kernel.last["q"].dtype == BF16 and kernel.last["bias"].dtype == torch.float32
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in tensors)
    q, k, v = (x.detach().to(BF16) for x in tensors[:3])
    ref = reference.attention_backward(torch.ones_like(q), q, k, v, tensors[3].detach())
    assert relative_rms(tensors[3].grad, ref[3]) <= ROUNDED[torch.float32]


def test_autocast_unites_mixed_dtypes(kernel) -> None:
    q, k, v, bias = call_tensors()
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(triangle_attention(q.float(), k, v.float(), bias), triangle_attention(q, k, v, bias))
    with pytest.raises(InvalidInput, match="^k"):
        triangle_attention(q.float(), k, v.float(), bias)


def test_fallback_computes_in_float32_under_autocast() -> None:
    tensors = call_tensors(dtype=torch.float64)
    with torch.autocast("cpu", dtype=BF16):
        out = triangle_attention(*tensors)
    assert out.dtype == torch.float64 and relative_rms(out, reference.attention(*tensors)[0]) < 1e-13


# torch.library and torch.compile


@pytest.mark.parametrize("path", ["kernel", "fallback"])
@pytest.mark.parametrize("case", ["plain", "mask_and_residual", "heads_innermost", "padded_head_dim", "fp32_bias"])
def test_opcheck(path: str, case: str, request) -> None:
    if path == "kernel":
        request.getfixturevalue("kernel")
    q, k, v, bias = call_tensors(I=3, N=8, H=2, D=12 if case == "padded_head_dim" else 8,
                                 bias_dtype=torch.float32 if case == "fp32_bias" else None)
    if case == "heads_innermost":
        bias = BIASES["heads_innermost"][0](bias[:, 0])
    mask = torch.rand(1, 3, 1, 1, 8) > 0.3 if case == "mask_and_residual" else None
    tensors = require_grad([q, k, v, bias])
    torch.library.opcheck(ops._forward_op, (*tensors, mask, 0.3, case == "mask_and_residual"))
    needed = [True, False, True, True]
    incoming, saved = (torch.randn_like(q), torch.randn(q.shape[:-1])), (None,) * 4
    torch.library.opcheck(ops._backward_op, (*incoming, q, k, v, bias, mask, *saved, 0.3, needed))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(kernel, dynamic: bool) -> None:
    def step(q, k, v, bias, mask):
        out, lse = triangle_attention(q, k, v, bias, mask, return_lse=True)
        gated = out.transpose(-2, -3).flatten(-2) * 1.5
        return gated.float().sum() + lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for crop, masked in ((8, False), (9, True), (24, True)):
        plain, traced = (require_grad(call_tensors(I=3, N=crop, H=2, D=8)) for _ in range(2))
        mask = torch.rand(1, 3, 1, 1, crop) > 0.3 if masked else None
        step(*plain, mask).backward()
        compiled(*traced, mask).backward()
        for x, y in zip(plain, traced, strict=True):
            assert torch.equal(x.grad, y.grad) and x.grad.stride() == y.grad.stride()


def test_compiles_whole_with_other_ranks_autocast_and_expanded_bias(kernel) -> None:
    def step(q, k, v, bias):
        with torch.autocast("cpu", dtype=BF16):
            return triangle_attention(q[0], k[0], v[0], bias.expand(-1, 3, -1, -1, -1)[0], scale=0.5).float()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    plain, traced = (require_grad(call_tensors(I=3, N=8, H=2, D=8, dtype=torch.float32)) for _ in range(2))
    step(*plain).sum().backward()
    compiled(*traced).sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(plain, traced, strict=True))


def test_fake_tensors_have_the_real_layout(kernel) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = call_tensors(D=12)
    real = torch.ops.tpf_jit.triangle_attention_forward(*tensors, None, 0.3, True)
    with FakeTensorMode() as mode:
        fake = torch.ops.tpf_jit.triangle_attention_forward(*map(mode.from_tensor, tensors), None, 0.3, True)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


def test_meta_tensors(kernel) -> None:
    out = triangle_attention(*(x.to("meta") for x in call_tensors()))
    assert out.device.type == "meta" and out.transpose(2, 3).is_contiguous() and kernel.calls == 0


# Wrong input


def wrong(**changes):
    q, k, v, bias = call_tensors(B=2)
    return {"q": q, "k": k, "v": v, "bias": bias, **{name: change(q, bias) for name, change in changes.items()}}


WRONG = {
    "q_rank": ("q", {"q": lambda q, b: q[0, 0]}),
    "q_integer": ("q", {name: lambda q, b: q.int() for name in "qkv"}),
    "k_crop": ("k", {"k": lambda q, b: q[..., :15, :]}),
    "k_dtype": ("k", {"k": lambda q, b: q.half()}),
    "v_head_dim": ("v", {"v": lambda q, b: q[..., :8]}),
    "v_device": ("v", {"v": lambda q, b: q.to("meta")}),
    "bias_crop": ("bias", {"bias": lambda q, b: b[..., :15]}),
    "bias_heads": ("bias", {"bias": lambda q, b: b[:, :, :2]}),
    "bias_rows": ("bias", {"bias": lambda q, b: b.expand(2, 3, 3, 16, 16)}),
    "bias_rank": ("bias", {"bias": lambda q, b: b[0, 0, 0]}),
    "bias_batch": ("bias", {"bias": lambda q, b: torch.cat([b, b])}),
    "bias_integer": ("bias", {"bias": lambda q, b: b.int()}),
    "bias_device": ("bias", {"bias": lambda q, b: b.to("meta")}),
    "mask_integer": ("mask", {"mask": lambda q, b: torch.ones(2, 5, 1, 1, 16, dtype=torch.int32)}),
    "mask_rows_and_keys": ("mask", {"mask": lambda q, b: torch.ones(2, 5, 16)}),
    "mask_crop": ("mask", {"mask": lambda q, b: torch.ones(2, 5, 1, 1, 15)}),
    "mask_per_query": ("mask", {"mask": lambda q, b: torch.ones(2, 5, 1, 16, 16)}),
    "mask_rank": ("mask", {"mask": lambda q, b: torch.ones(2, 2, 5, 1, 1, 16)}),
    "mask_device": ("mask", {"mask": lambda q, b: torch.ones(2, 5, 1, 1, 16, device="meta")}),
    "scale_nan": ("scale", {"scale": lambda q, b: math.nan}),
    "scale_infinite": ("scale", {"scale": lambda q, b: -math.inf}),
    "scale_tensor": ("scale", {"scale": lambda q, b: torch.tensor(0.3)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named(kernel, case: str) -> None:
    argument, changes = WRONG[case]
    with pytest.raises(InvalidInput, match=f"^{argument}: got .+; allowed: .+"):
        triangle_attention(**wrong(**changes))
    assert kernel.calls == 0


def test_wrong_input_of_the_operator_itself(kernel) -> None:
    q, k, v, bias = call_tensors()
    with pytest.raises(InvalidInput, match="five axes"):
        torch.ops.tpf_jit.triangle_attention_forward(q[0], k[0], v[0], bias[0], None, 1.0, False)
    with pytest.raises(InvalidInput, match="^bias"):
        torch.ops.tpf_jit.triangle_attention_forward(q, k, v, bias[..., :7], None, 1.0, False)


class Operations(TorchDispatchMode):
    """Names of all operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["k_crop", "bias_heads", "mask_crop", "scale_nan"])
@pytest.mark.parametrize("autocast", [False, True])
def test_wrong_input_allocates_and_casts_nothing(kernel, case: str, autocast: bool) -> None:
    arguments = wrong(**WRONG[case][1])
    with Operations() as seen, torch.autocast("cpu", dtype=torch.float16, enabled=autocast), pytest.raises(InvalidInput):
        triangle_attention(**arguments)
    assert seen.names <= {"tpf_jit::triangle_attention_forward"}


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask"])
def test_what_is_no_tensor_is_named(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name}: got list; allowed: a torch.Tensor"):
        triangle_attention(**{**wrong(), name: [1.0]})


# Routing


REASONS = {
    "fp32": ("float32", lambda t: [x.float() for x in t]),
    "fp64": ("float64", lambda t: [x.double() for x in t]),
    "fp64_bias": ("bias is float64", lambda t: [*t[:3], t[3].double()]),
    "large_head_dim": ("head dim is 136", lambda t: call_tensors(D=136)),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_kernels_do_not_take_goes_to_pytorch(kernel, case: str) -> None:
    reason, change = REASONS[case]
    tensors = change(call_tensors())
    with pytest.warns(FallbackWarning, match=reason):
        out = triangle_attention(*tensors)
    assert kernel.calls == 0
    assert relative_rms(out, reference.attention(*tensors)[0]) <= ROUNDED.get(tensors[0].dtype, 1e-13)


def test_one_warning_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(routing, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for crop in (8, 9, 8):
            triangle_attention(*call_tensors(N=crop))
    assert [str(w.message) for w in caught] == [
        "triangle_attention takes the PyTorch path: the tensors are on cpu, and kernels run on Hopper GPUs"
    ]


def test_empty_calls_work_without_a_warning(kernel) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in ({"I": 0}, {"N": 0}, {"B": 0}):
            tensors = require_grad(call_tensors(**size))
            out = triangle_attention(*tensors)
            out.sum().backward()
            assert out.shape == tensors[0].shape and tensors[3].grad.shape == tensors[3].shape
            assert bool((tensors[3].grad == 0).all())


def test_a_kernel_that_cannot_be_built_does_not_stop_training(hopper, monkeypatch) -> None:
    class Broken:
        @property
        def function(self):
            raise CompileFailed("ptxas: out of registers\nlong log")

    monkeypatch.setattr(routing.kernels, "get_kernel", lambda *arguments: Broken())
    tensors = call_tensors()
    with pytest.warns(FallbackWarning, match=r"no kernel could be had \(CompileFailed: ptxas: out of registers\)"):
        out = triangle_attention(*tensors)
    assert relative_rms(out, reference.attention(*tensors)[0]) <= ROUNDED[BF16]


def test_a_cold_kernel_in_capture_raises_before_anything_happens(kernel, monkeypatch) -> None:
    def cold(*arguments):
        raise ColdKernelInCapture("call tpf_jit.warmup first")

    monkeypatch.setattr(routing, "find_kernel", cold)
    monkeypatch.setattr(ops.layout, "prepare", lambda *arguments: pytest.fail("operands were prepared"))
    with pytest.raises(ColdKernelInCapture, match="warmup"):
        triangle_attention(*call_tensors())


def test_an_unsupported_shape_is_asked_about_again(kernel, monkeypatch) -> None:
    """A template may be registered between two calls, so that answer is not remembered."""
    monkeypatch.setattr(routing, "unsupported", lambda shape, device: "no template of triangle_attention forward is registered")
    with pytest.warns(FallbackWarning, match="no template"):
        triangle_attention(*call_tensors())
    monkeypatch.setattr(routing, "unsupported", lambda shape, device: None)
    triangle_attention(*call_tensors())
    assert kernel.calls == 1


def test_routing_does_not_depend_on_values(kernel) -> None:
    tensors = call_tensors()
    tensors[0].fill_(math.nan)
    assert bool(triangle_attention(*tensors).isnan().all())
    assert kernel.calls == 1


def test_plans_are_bounded(kernel, monkeypatch) -> None:
    monkeypatch.setattr(plans, "_MAX_PLANS", 3)
    for crop in range(1, 9):
        triangle_attention(*call_tensors(N=crop, I=1, H=1, D=8))
    assert len(plans._plans) <= 3


def test_equal_calls_give_equal_bits(kernel) -> None:
    tensors = call_tensors(N=37)
    assert torch.equal(triangle_attention(*tensors), triangle_attention(*tensors))


@pytest.mark.parametrize("transform", ["func", "dual"])
def test_forward_mode_is_refused_not_dropped(transform: str) -> None:
    q, k, v = (torch.randn(1, 3, 2, 9, 8) for _ in range(3))
    bias = torch.randn(1, 1, 2, 9, 9)
    with pytest.raises(RuntimeError, match="jvp|setup_context"):
        if transform == "func":
            torch.func.jvp(lambda x: triangle_attention(x, k, v, bias), (q,), (q,))
        else:
            with torch.autograd.forward_ad.dual_level():
                triangle_attention(torch.autograd.forward_ad.make_dual(q, q), k, v, bias)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_calls_take_another_batch_size(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(triangle_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (2, 3):
        q, k, v = (torch.randn(batch, 6, 3, 10, 8) for _ in range(3))
        bias = torch.randn(batch, 3, 10, 10)
        assert torch.equal(compiled(q, k, v, bias), triangle_attention(q, k, v, bias))
