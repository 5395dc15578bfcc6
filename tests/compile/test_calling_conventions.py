"""Compiled kernels accept exactly the operands their calling convention promises, strides and alignment included.

The generated argument checks run without a GPU: tensors here only claim to lie on one, so an accepted call ends where the
driver is missed, and a refused one in a ValueError before.
"""

from __future__ import annotations

import math

import pytest
from test_compiler import FakeCuda, _kept

from tpf_jit.compiler import KernelSpec, compile_kernel
from tpf_jit.loader import load
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape
from tpf_jit.templates import registry

BITS = {"bfloat16": (FakeCuda.BFLOAT16, 16), "float32": (FakeCuda.FLOAT, 32)}
B, ROWS, H = 2, 3, 4


def tensor(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, address: int = 1 << 32) -> object:
    import tvm_ffi

    if strides is None:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    made = FakeCuda(shape, strides, *BITS[dtype], address)
    _kept.append(made)
    return tvm_ffi.from_dlpack(made)


class Operands:
    """Operands of one problem as `layout.prepare` makes them, in the projection layout (B, I, N, H, D)."""

    def __init__(self, crop: int, dim: int, bias_dtype: str) -> None:
        self.crop, self.dim, self.bias_dtype = crop, dim, bias_dtype

    def wide(self, address: int = 1 << 32, odd: bool = False) -> object:
        n, d = self.crop, self.dim
        head = d + 1 if odd else d
        strides = (ROWS * n * H * d, n * H * d, head, H * d, 1)
        return tensor((B, ROWS, H, n, d), "bfloat16", strides, address)

    def bias(self) -> object:
        row = -(-self.crop // 8) * 8
        strides = (H * self.crop * row, self.crop * row, row, 1)
        return tensor((B, H, self.crop, self.crop), self.bias_dtype, strides)

    def mask(self) -> object:
        return tensor((B, ROWS, -(-self.crop // 256) * 256), "float32")

    def lse(self) -> object:
        return tensor((B, ROWS, H, self.crop), "float32")

    def stats(self) -> object:
        return tensor((B, ROWS, H, 3, -(-self.crop // 256) * 256), "float32")

    def planes(self, slabs: int = 5) -> object:
        return tensor((slabs, B, H, self.crop, -(-self.crop // 4) * 4), "float32")


def accepted(function, *arguments: object) -> bool:
    """Whether the argument checks pass; the launch itself cannot succeed here."""
    try:
        function(*arguments)
    except (ValueError, TypeError):
        return False
    except RuntimeError:
        return True
    pytest.skip("there is a driver here: the call would launch on made-up addresses")


def function_of(name: str, shape: TriangleAttentionShape, **flags: bool):
    import torch

    if torch.cuda.is_available():
        pytest.skip("a kernel given made-up addresses must not run")
    template = registry.get(name)
    made = compile_kernel(KernelSpec.make(template, shape, template.default(shape), **flags))
    return load(made.data, made.spec.symbol, made.kind)


CASES = [(201, 24, "bfloat16", "bool"), (7, 8, "float32", "none"), (384, 32, "bfloat16", "none")]


@pytest.mark.parametrize("crop, dim, bias_dtype, mask", CASES)
@pytest.mark.parametrize("residual", [False, True], ids=["inference", "training"])
def test_forward(crop: int, dim: int, bias_dtype: str, mask: str, residual: bool) -> None:
    shape, x = TriangleAttentionShape(crop, H, dim, ROWS, B, bias_dtype=bias_dtype, mask=mask), Operands(crop, dim, bias_dtype)
    forward = function_of(f"triangle_attention_forward_{'training_' if residual else ''}sm90", shape)
    training = (x.wide(), x.lse(), x.lse()) if residual else (None, x.lse(), None)
    rest = (x.bias(), x.mask() if mask != "none" else None, x.wide(), *training)
    assert accepted(forward, x.wide(), x.wide(), x.wide(), *rest, 0.2, 132)
    assert not accepted(forward, x.wide(address=(1 << 32) + 2), x.wide(), x.wide(), *rest, 0.2, 132), "a misaligned query"
    assert not accepted(forward, x.wide(odd=True), x.wide(), x.wide(), *rest, 0.2, 132), "a stride TMA cannot take"
    other = Operands(crop + 1, dim, bias_dtype)
    assert not accepted(forward, x.wide(), other.wide(), x.wide(), *rest, 0.2, 132), "keys of another crop"


@pytest.mark.parametrize("crop, dim, bias_dtype, mask", CASES)
def test_backward(crop: int, dim: int, bias_dtype: str, mask: str) -> None:
    shape, x = TriangleAttentionShape(crop, H, dim, ROWS, B, bias_dtype=bias_dtype, mask=mask), Operands(crop, dim, bias_dtype)
    inputs = (x.wide(), x.wide(), x.wide(), x.bias(), x.mask() if mask != "none" else None, x.wide())

    stats = function_of("triangle_attention_backward_stats_sm90", shape, residual=True)
    assert accepted(stats, x.wide(), x.wide(), x.wide(), x.lse(), x.lse(), x.stats(), 132)
    plain = function_of("triangle_attention_backward_stats_sm90", shape, residual=False)
    assert accepted(plain, x.wide(), None, x.wide(), x.lse(), None, x.stats(), 132)

    key = function_of("triangle_attention_backward_key_sm90", shape)
    assert accepted(key, *inputs, x.stats(), x.wide(), x.wide(), 0.2, 132)
    assert not accepted(key, *inputs, x.lse(), x.wide(), x.wide(), 0.2, 132), "statistics of the wrong rank"

    query = function_of("triangle_attention_backward_query_sm90", shape)
    assert accepted(query, *inputs, x.stats(), x.wide(), x.planes(), 0.2, 5, 132)
    frozen = function_of("triangle_attention_backward_query_sm90", shape, dbias=False)
    assert accepted(frozen, *inputs, x.stats(), x.wide(), None, 0.2, 1, 132)


@pytest.mark.parametrize("channels, hidden, dtype, biases", [(128, 128, "float32", False), (96, 160, "bfloat16", True)])
def test_finish(channels: int, hidden: int, dtype: str, biases: bool) -> None:
    """As `layout_backward.finish_operands` passes them: any number of splits, weights anywhere, planes on 16 bytes."""
    shape = TriangleMultiplicationShape(64, channels, hidden, weight_dtype=dtype)
    finish = function_of("triangle_multiplication_finish_sm90", shape, bias=biases, norm_dtype="float32")
    c, d, odd = channels, hidden, (1 << 32) + BITS[dtype][1] // 8

    def weights() -> list[object]:
        matrices = [tensor(size, dtype, address=odd) for size in ((2 * d, c), (2 * d, c), (c, d), (c, c))]
        return matrices + [tensor((size,), "float32", address=(1 << 32) + 4) for size in (c, c, d, d)]

    def planes(front: int, back: int, sums: int | None = None, address: int = 1 << 32) -> list[object]:
        made = [tensor((front, 2 * d, 2 * c), "float32", address=address), tensor((sums or front, 2 * d, 2), "float32")]
        return made + [tensor((back, c, d + c), "float32"), tensor((back, c, 2), "float32")]

    of_biases = [tensor((size,), dtype, address=odd) if biases else None for size in (2 * d, 2 * d, c, c)]
    rest = (*weights(), *of_biases, tensor(((4 * d + c) // 2, 2, c), "float32"), tensor((c // 2, 2, d), "float32"), 132)
    assert accepted(finish, *weights(), *planes(66, 132), *rest)
    assert accepted(finish, *weights(), *planes(1, 7), *rest)
    assert not accepted(finish, *weights(), *planes(66, 132, sums=65), *rest), "sums of other splits"
    assert not accepted(finish, *weights(), *planes(66, 132, address=(1 << 32) + 4), *rest), "misaligned planes"
