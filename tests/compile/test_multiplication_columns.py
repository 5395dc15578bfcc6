"""The columns that carry means and biases through the multiplication's products (`pieces_sm90.MORE`), computed with PyTorch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from tpf_jit.templates.triangle_multiplication.pieces_sm90 import MORE, OF_ROW, PARTS


def three_parts(x: torch.Tensor) -> torch.Tensor:
    """(..., 3) bfloat16 whose sum is x, largest first, as the kernels split a float32."""
    parts = []
    for _ in range(3):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1].float()
    return torch.stack(parts, -1)


@pytest.mark.parametrize("mean_size, deviation_size", [(1.0, 1.0), (300.0, 1.0), (1e-3, 1e-2), (3e4, 30.0), (0.0, 3e-3)])
def test_columns_hold_mean_and_bias_to_the_last_bit(mean_size: float, deviation_size: float) -> None:
    """Sums of the columns' products are those of the float32 numbers, to float32's rounding: far below what bf16 costs."""
    generator = torch.Generator().manual_seed(0)
    mean, u, bias = (size * torch.randn(4096, generator=generator) for size in (mean_size, 3.0, 0.7))
    deviation = deviation_size * (0.1 + torch.rand(4096, generator=generator))
    assert len(PARTS) == len(OF_ROW) == 6 and MORE == 16
    found = torch.zeros(4096, dtype=torch.float64)
    for given, of_row in ((mean, -u), (deviation, bias)):
        left, right = three_parts(given).double(), three_parts(of_row).double()
        found += sum(left[:, i] * right[:, j] for i, j in zip(PARTS, OF_ROW, strict=True))
    want = deviation.double() * bias.double() - mean.double() * u.double()
    scale = (deviation * bias).abs().double() + (mean * u).abs().double()
    assert float(((found - want).abs() / scale).max()) < 2.0**-22


def test_fewer_parts_would_not_do() -> None:
    """What the columns are for: with a mean of many deviations, bf16's own rounding of it would be as large as the result."""
    mean = torch.tensor([300.0 * 1.234567])
    one, three = three_parts(mean)[..., :1].float().sum(-1), three_parts(mean).float().sum(-1)
    assert abs(one - mean) > 0.3 and abs(three - mean) < 1e-4
