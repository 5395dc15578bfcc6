"""Float64 on the GPU: output and all gradients of a whole problem in one pass over the rows, and errors against them.

The yardstick of the accuracy suite. The formulas are those of `templates.triangle_attention.reference` (tests hold this one to
it), arranged for speed: each score matrix is computed once and used for the output and for every gradient, in place where that
saves a pass over memory. The pair bias's gradient is a sum over all rows, so no sample of rows will do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tpf_jit.bench.peer_base import Inputs

CHUNK_BYTES = 2 * 2**30
"""Bytes of scores of one chunk of rows (at least one row); three such tensors exist at a time."""
TENSORS = ("out", "dq", "dk", "dv", "dbias")

# What an H200 does in float64: its tensor cores' rate (halved, as the inner dimension is a head dim), its memory's, the number of
# passes over a chunk's scores below, and the instructions of two exponentials over their rate.
_FLOPS, _BYTES_S, _PASSES, _EXP_S = 30e12, 4.0e12, 18, 80 / 1.5e13


def estimate_s(shape: Any) -> float:
    """Seconds that `outputs` takes on an H200, for plans; the device's own times replace it once there are any."""
    scores = shape.batch * shape.rows * shape.heads * shape.crop**2
    return scores * (12 * shape.head_dim / _FLOPS + 8 * _PASSES / _BYTES_S + _EXP_S)


def outputs(inputs: Inputs) -> dict[str, Any]:
    """`out`, `dq`, `dk`, `dv` `(B, I, H, N, D)` and `dbias` `(B, 1, H, N, N)`, all float64 and contiguous.

    The bias must be shared by all rows; masks follow the rules of the reference.
    """
    import torch

    q, k, v, bias, mask = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask
    batch, rows, heads, crop, _ = q.shape
    found = {name: torch.empty(q.shape, dtype=torch.float64, device=q.device) for name in ("out", "dq", "dk", "dv")}
    found["dbias"] = torch.zeros((batch, 1, heads, crop, crop), dtype=torch.float64, device=q.device)
    each = max(1, CHUNK_BYTES // max(1, heads * crop * crop * 8))
    for b in range(batch):
        bias64 = bias[b if bias.shape[0] > 1 else 0].double()
        for start in range(0, rows, each):
            at = (b, slice(start, min(rows, start + each)))
            keys = None if mask is None else mask[b if mask.shape[0] > 1 else 0, at[1] if mask.shape[1] > 1 else slice(0, 1)]
            part = Inputs(*(x[at].double().contiguous() for x in (q, k, v)), bias64, keys, inputs.grad[at].double(), inputs.scale)
            for name, value in _chunk(part).items():
                if name == "dbias":
                    found[name][b] += value
                else:
                    found[name][at] = value
    return found


def _chunk(part: Inputs) -> dict[str, Any]:
    """The same of some rows `(R, H, N, D)`; `dbias` `(1, H, N, N)` summed over them."""
    import torch

    q, k, v = part.q * part.scale, part.k, part.v
    score = torch.matmul(q, k.mT).add_(part.bias)
    empty = None
    if part.mask is not None:
        score = _masked(score, part.mask)
        empty = (score == -math.inf).all(-1, keepdim=True)
        score.masked_fill_(empty, 0.0)
    prob = torch.softmax(score, -1)
    del score
    if empty is not None:
        prob.masked_fill_(empty, 0.0)
    grad = part.grad.contiguous()
    found = {"out": torch.matmul(prob, v), "dv": torch.matmul(prob.mT, grad)}
    delta = (grad * found["out"]).sum(-1, keepdim=True)
    dscore = torch.matmul(grad, v.mT).sub_(delta).mul_(prob)
    del prob
    # q carries the scale already.
    found |= {"dq": torch.matmul(dscore, k).mul_(part.scale), "dk": torch.matmul(dscore.mT, q)}
    found["dbias"] = dscore.sum(0, keepdim=True)
    return found


def _masked(score: Any, keys: Any) -> Any:
    import torch

    from tpf_jit.templates.triangle_attention.reference import SWALLOWED

    if keys.dtype == torch.bool:
        return score.masked_fill_(~keys, -math.inf)
    # What a large additive mask does to a score in float32 is part of its meaning; everything else is exact.
    swallowed = (score.float() + keys.float()).double()
    return torch.where(keys.abs() > SWALLOWED, swallowed, score.add_(keys.double()))


def without_keys(inputs: Inputs) -> dict[str, Any]:
    """Tensor -> where its lines along the last axis are zero because of the mask, whatever the other inputs are.

    Those of `out` and `dq` in rows without any key, of `dk` and `dv` at keys that their row excludes, and of `dbias` where no row
    has a key; bool, they broadcast to `(B, I, H, N, 1)` (`dbias`: `(B, 1, H, N, 1)`). Empty without a mask. A key is excluded by
    False or -inf; a large finite number only makes its probability small.
    """
    import torch

    if inputs.mask is None:
        return {}
    excluded = ~inputs.mask if inputs.mask.dtype == torch.bool else inputs.mask == -math.inf
    empty, keys = excluded.all(-1, keepdim=True), excluded.mT
    return {"out": empty, "dq": empty, "dk": keys, "dv": keys, "dbias": empty.all(1, keepdim=True)}


class Yardstick:
    """Compares tensors with a float64 reference without waiting for the device until all are compared.

    Args:
        reference: as `outputs` gives it.
        zero: as `without_keys` gives it: lines in which nothing but zero is right. Lines that are zero in the reference for
            another reason, such as underflow or terms that happen to cancel, may be as far off as all others.
    """

    def __init__(self, reference: dict[str, Any], zero: Mapping[str, Any] | None = None) -> None:
        import torch

        self._reference = reference
        self._norms = {name: torch.linalg.vector_norm(ref) for name, ref in reference.items()}
        self._zero = {name: lines for name, lines in (zero or {}).items() if bool(lines.any())}

    def errors(self, found: dict[str, Any]) -> dict[str, tuple[float, float]]:
        """Tensor -> (relative RMS, largest absolute error).

        Both are inf for one that holds a NaN or infinity. Only the first is for one that is finite but not exactly zero in a line
        where it must be, or anywhere if the whole reference is zero.
        """
        import torch

        results = []
        for name, value in found.items():
            difference = value - self._reference[name]
            parts = [torch.linalg.vector_norm(difference), self._norms[name], difference.abs().max()]
            lines = self._zero.get(name)
            wrong = torch.zeros_like(parts[0]) if lines is None else ((value != 0) & lines).any().double()
            results.append(torch.stack([*parts, wrong]))
        return {name: _verdict(*numbers) for name, numbers in zip(found, torch.stack(results).tolist(), strict=True)}


def _verdict(error: float, norm: float, largest: float, wrong: float) -> tuple[float, float]:
    if not math.isfinite(error):
        return math.inf, math.inf
    if wrong or (norm == 0 and error != 0):
        return math.inf, largest
    return error / norm if norm else 0.0, largest


def same_bits(a: Any, b: Any) -> Any:
    """Whether two tensors hold the same bits: signs of zeros count, and a NaN equals itself."""
    import torch

    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.view(integer) == b.view(integer)).all()
