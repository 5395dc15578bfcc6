"""The backward kernels in PyTorch: each checks every promise of its calling convention, then computes as the GPU's do.

Probabilities are rebuilt from the statistics in float32, dS and P are rounded to the operand dtype before the products, and the
gradient of the bias is summed over the rows of each slab without a rounding. Outputs are filled with NaN first, so what a kernel
does not write, or a caller takes from elsewhere, is seen.
"""

from __future__ import annotations

import math

import torch
from emulation import LOG2E, EmulatedKernel, check_bias_and_mask, check_operand

from tpf_jit.ops import routing

SUBTRACT = 4096.0


class EmulatedBackward:
    """All kernels of a training step: `forward`, `stats`, `key` and `query`, callable like the loaded ones.

    `calls` lists the names in order, `asked` the (family, shape, flags) that were looked up, `last` the arguments of each
    kernel's last call, by name; `missing` names families that cannot be had.
    """

    def __init__(self, slabs: int = 2) -> None:
        self.forward = EmulatedKernel()
        self.slabs = slabs
        self.calls: list[str] = []
        self.asked: list[tuple] = []
        self.last: dict[str, dict] = {}
        self.missing: set[str] = set()
        self.turns: list[tuple[int, int]] = []

    def find(self, family, shape, flags, device):
        """Stands in for `routing.find_kernel`."""
        self.asked.append((family, shape, dict(flags)))
        if family in self.missing:
            return f"no kernel of {family}"
        kernels = {
            routing.FORWARD: self.forward,
            routing.FORWARD_TRAINING: self.forward,
            routing.BACKWARD_STATS: self.stats,
            routing.BACKWARD_KEY: self.key,
            routing.BACKWARD_QUERY: self.query,
        }
        slabs = min(self.slabs, shape.rows) if family == routing.BACKWARD_QUERY else 1
        return routing.Launch(kernels[family], 132, slabs)

    def stats(self, out, residual, dout, lse, lse_low, stats, num_ctas) -> None:
        self._enter("stats", out=out, residual=residual, dout=dout, lse=lse, lse_low=lse_low, stats=stats, num_ctas=num_ctas)
        batch, rows, heads, crop, dim = out.shape
        assert out.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and 8 <= dim <= 128
        assert (residual is None) == (lse_low is None)
        for x in (out, dout) if residual is None else (out, residual, dout):
            check_operand(x, out)
        for x in (lse,) if lse_low is None else (lse, lse_low):
            assert x.shape == (batch, rows, heads, crop) and x.dtype == torch.float32 and x.is_contiguous()
        check_stats(stats, out)
        assert stats.is_contiguous() and type(num_ctas) is int
        with torch.autocast("cpu", enabled=False):
            stats.zero_()
            exact = out.float() if residual is None else out.float() + residual.float()
            low = torch.zeros_like(lse) if lse_low is None else lse_low
            empty = lse == -math.inf
            large = (lse.abs() > SUBTRACT) & ~empty
            stats[..., 0, :] = math.inf
            stats[..., 0, :crop] = (torch.where(large, low, lse + low) * LOG2E).masked_fill(empty, math.inf)
            stats[..., 1, :crop] = (dout.float() * exact).sum(-1)
            stats[..., 2, :crop] = torch.where(large, -lse, 0.0)

    def key(self, q, k, v, bias, mask, dout, stats, dk, dv, scale, num_ctas) -> None:
        self._enter("key", q=q, k=k, v=v, bias=bias, mask=mask, dout=dout, stats=stats, dk=dk, dv=dv, scale=scale)
        check_inputs(q, k, v, bias, mask, dout, stats, scale, num_ctas)
        for x in (dk, dv):
            check_operand(x, q)
            x.fill_(math.nan)
        with torch.autocast("cpu", enabled=False):
            prob, dscore = score_gradient(q, k, v, bias, mask, dout, stats, scale)
            dv.copy_(prob.to(q.dtype).float().mT @ dout.float())
            dk.copy_(scale * (dscore.to(q.dtype).float().mT @ q.float()))

    def query(self, q, k, v, bias, mask, dout, stats, dq, dbias, scale, slabs, num_ctas) -> None:
        self._enter("query", q=q, k=k, v=v, bias=bias, mask=mask, dout=dout, stats=stats, dq=dq, dbias=dbias, slabs=slabs)
        check_inputs(q, k, v, bias, mask, dout, stats, scale, num_ctas)
        batch, rows, heads, crop, _ = q.shape
        self.turns.append((batch, heads))
        check_operand(dq, q)
        dq.fill_(math.nan)
        assert type(slabs) is int and 1 <= slabs <= rows
        with torch.autocast("cpu", enabled=False):
            _, dscore = score_gradient(q, k, v, bias, mask, dout, stats, scale)
            dq.copy_(scale * (dscore.to(q.dtype).float() @ k.float()))
            if dbias is None:
                return
            assert dbias.shape == (slabs, batch, heads, crop, -(-crop // 4) * 4)
            assert dbias.dtype == torch.float32 and dbias.is_contiguous() and dbias.data_ptr() % 16 == 0
            dbias.fill_(math.nan)
            for slab in range(slabs):
                total = torch.zeros_like(dbias[slab, ..., :crop])
                for row in range(slab, rows, slabs):
                    total += dscore[:, row]
                dbias[slab, ..., :crop] = total

    def _enter(self, name: str, **arguments) -> None:
        self.calls.append(name)
        self.last[name] = arguments


def score_gradient(q, k, v, bias, mask, dout, stats, scale) -> tuple[torch.Tensor, torch.Tensor]:
    crop = q.shape[3]
    score = torch.matmul(q.float(), k.float().mT) * scale + bias.float()[:, None]
    if mask is not None:
        score = score + mask[:, :, None, None, :crop]
    lse2, delta, offset = (stats[..., plane, :crop, None] for plane in range(3))
    prob = torch.exp2((score + offset) * LOG2E - lse2)
    # An excluded key of an empty row: -inf - inf is still no probability at all.
    return prob, prob * (torch.matmul(dout.float(), v.float().mT) - delta)


def check_inputs(q, k, v, bias, mask, dout, stats, scale, num_ctas) -> None:
    assert q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and 8 <= q.shape[-1] <= 128
    for x in (q, k, v, dout):
        check_operand(x, q)
    check_bias_and_mask(q, bias, mask)
    check_stats(stats, q)
    assert type(scale) is float and type(num_ctas) is int and num_ctas >= 1


def check_stats(stats, q) -> None:
    batch, rows, heads, crop, _ = q.shape
    padded = -(-crop // 256) * 256
    assert stats.shape == (batch, rows, heads, 3, padded) and stats.dtype == torch.float32
    # A slice along the heads keeps the strides of the whole.
    assert stats.stride()[3:] == (padded, 1) and stats.stride(2) == 3 * padded and stats.data_ptr() % 16 == 0
