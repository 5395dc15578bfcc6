"""A forward kernel in PyTorch: checks every promise of the calling convention, then computes as the GPU kernels do.

Online softmax over tiles of keys, probabilities rounded to the operand dtype (with a residual: to two numbers of it) before the
second product, fp32 sums.
Stands in for compiled kernels in tests that need no GPU.
"""

from __future__ import annotations

import math

import torch

LOG2E = math.log2(math.e)
TILE_N = 64


class EmulatedKernel:
    """Callable like a loaded forward kernel; remembers its last arguments and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: dict[str, object] = {}

    def __call__(self, q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas) -> None:
        self.calls += 1
        self.last = dict(q=q, k=k, v=v, bias=bias, mask=mask, out=out, residual=residual, lse=lse)
        self.last.update(lse_low=lse_low, scale=scale, num_ctas=num_ctas)
        check_convention(q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas)
        with torch.autocast(q.device.type, enabled=False):
            self._compute(q, k, v, bias, mask, out, residual, lse, lse_low, scale)

    def _compute(self, q, k, v, bias, mask, out, residual, lse, lse_low, scale) -> None:
        crop = q.shape[3]
        q32, k32, v32, bias32 = q.float(), k.float(), v.float(), bias.float()
        top = torch.full(q.shape[:-1], -math.inf)
        total = torch.zeros(q.shape[:-1])
        acc = torch.zeros(q.shape)
        for start in range(0, crop, TILE_N):
            keys = slice(start, min(start + TILE_N, crop))
            score = torch.matmul(q32, k32[..., keys, :].mT) * scale + bias32[:, None, :, :, keys]
            if mask is not None:
                score = score + mask[:, :, None, None, keys]
            new_top = torch.maximum(top, score.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)
            correction = torch.exp2((top - safe) * LOG2E)
            prob = torch.exp2((score - safe[..., None]) * LOG2E)
            total = total * correction + prob.sum(-1)
            operand = prob.to(q.dtype).float()
            if residual is not None:  # training takes P as two numbers
                operand += (prob - operand).to(q.dtype).float()
            acc = acc * correction[..., None] + torch.matmul(operand, v32[..., keys, :])
            top = new_top
        exact = acc / total.masked_fill(total == 0, 1.0)[..., None]
        out.copy_(exact)
        if residual is not None:
            residual.copy_(exact - out.float())
        safe, log_total = top.masked_fill(top == -math.inf, 0.0), total.log()
        lse.copy_(safe + log_total)
        if lse_low is not None:
            # What the sum lost, exactly, whichever summand is the larger.
            seen = lse - safe
            lse_low.copy_(((safe - (lse - seen)) + (log_total - seen)).masked_fill_(total == 0, 0.0))


def check_convention(q, k, v, bias, mask, out, residual, lse, lse_low, scale, num_ctas) -> None:
    batch, rows, heads, crop, dim = q.shape
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert dim % 8 == 0 and 8 <= dim <= 128
    for x in (q, k, v, out) if residual is None else (q, k, v, out, residual):
        check_operand(x, q)
    check_bias_and_mask(q, bias, mask)
    assert (lse_low is None) == (residual is None)
    for x in (lse,) if lse_low is None else (lse, lse_low):
        assert x.shape == (batch, rows, heads, crop) and x.dtype == torch.float32 and x.is_contiguous()
    assert type(scale) is float and type(num_ctas) is int and num_ctas >= 1


def check_operand(x, q) -> None:
    """Shaped and typed like q, strides and base as TMA wants them."""
    assert x.shape == q.shape and x.dtype == q.dtype
    assert x.stride(-1) == 1
    assert all(step > 0 and step % 8 == 0 for step in x.stride()[:-1]), x.stride()
    assert x.data_ptr() % 16 == 0


def check_bias_and_mask(q, bias, mask) -> None:
    batch, rows, heads, crop, _ = q.shape
    assert bias.shape == (batch, heads, crop, crop)
    assert bias.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert bias.stride(-1) == 1
    assert all(step > 0 and step * bias.element_size() % 16 == 0 for step in bias.stride()[:-1]), bias.stride()
    assert bias.data_ptr() % 16 == 0
    if mask is not None:
        padded = -(-crop // 256) * 256
        assert mask.shape == (batch, rows, padded) and mask.dtype == torch.float32 and mask.is_contiguous()
        assert bool((mask[..., crop:] == -math.inf).all())
