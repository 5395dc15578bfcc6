"""Seeded inputs of triangle attention: one generator for tests, the accuracy suite, the tuner and the benchmarks.

Families:

    normal         q, k, v, dO, bias ~ N(0, 1)
    trained_like   q, k with four outlier channels (x8); bias ~ N(0, 4 std) with +6 on a diagonal band
    extreme        logits up to about +-1e4; one dominating key; all logits equal. dO of every other row is in the denormal range
    adversarial    the row maximum grows along the keys, every 32 of them, by 5, 60 or 200 log2 units, or falls likewise (what
                   breaks tricks with the running maximum)

The cases of the last two take turns by blocks of 64 queries, by head and by seed.

Mask patterns (which keys are excluded, for boolean and additive masks alike):

    random10, random50, random99   each key of each row with that probability in percent
    prefix                         all keys from a per-row length on, between 40 and 100 % of N; 30 % on average
    rows                           every third row excludes all its keys, the rest as random10
    soft                           additive only: values ~ N(0, 2 std), nothing excluded
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleAttentionShape

FAMILIES = ("normal", "trained_like", "extreme", "adversarial")
MASK_PATTERNS = ("random10", "random50", "random99", "prefix", "rows", "soft")

QUERY_BLOCK = 64
KEY_BLOCK = 32
LOG2_STEPS = (5.0, 60.0, 200.0)
_USUAL_PATTERN = {"normal": "random10", "trained_like": "prefix", "extreme": "rows", "adversarial": "random50"}


@dataclass(frozen=True)
class Inputs:
    """One call's tensors as models pass them: q, k, v, grad_out `(B, I, H, N, D)` as views of `(B, I, N, H, D)` storage, bias
    `(B, 1, H, N, N)` contiguous, mask None or `(B, I, 1, 1, N)`, boolean or float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    mask: Tensor | None
    grad_out: Tensor | None


def make_inputs(
    shape: TriangleAttentionShape,
    device: torch.device | str = "cpu",
    seed: int = 0,
    family: str = "normal",
    mask_pattern: str | None = None,
    mask_value: float | None = None,
    with_grad_out: bool = False,
) -> Inputs:
    """Inputs of a family; a pure function of the arguments and of the kind of device.

    Args:
        shape: the problem; its mask kind says whether there is a mask and of which kind.
        device: where the tensors live and are generated.
        seed: any integer.
        family: see the module's text.
        mask_pattern: see the module's text; by default each family has its own.
        mask_value: what an additive mask holds for an excluded key. By default -1e9, as models have it; but -inf where a row may
            be excluded as a whole and its logits are large, as the outcome would hang on which of them float32 swallows first.
        with_grad_out: whether to generate the output's gradient too.

    Raises:
        InvalidInput: for an unknown family or pattern.
    """
    if family not in FAMILIES:
        raise InvalidInput.of("family", repr(family), ", ".join(FAMILIES))
    make = _Maker(shape, torch.device(device), seed)
    q, k, v = make.operand(), make.operand(), make.operand()
    bias = make.normal(shape.batch, 1, shape.heads, shape.crop, shape.crop)
    grad_out = make.operand() if with_grad_out else None
    if family == "trained_like":
        channels = torch.randperm(shape.head_dim, generator=make.generator, device=make.device)[:4]
        q[..., channels] *= 8.0
        k[..., channels] *= 8.0
        bias = bias.mul_(4.0).add_(make.diagonal_band(), alpha=6.0)
    elif family == "extreme":
        case = make.turns(3)
        q *= torch.where(case == 0, 3300.0, torch.where(case == 2, 0.0, 1.0)).unsqueeze(-1)
        bias.scatter_add_(-1, make.one_key_a_query(), torch.where(case == 1, 1e4, 0.0).expand(*bias.shape[:-1]).unsqueeze(-1))
        bias.masked_fill_((case == 2).unsqueeze(-1), 3.0)
        if grad_out is not None:
            grad_out[:, 1::2] *= 2.0**-128
    elif family == "adversarial":
        bias += make.staircase(make.turns(2 * len(LOG2_STEPS)))
    mask_pattern = mask_pattern or _USUAL_PATTERN[family]
    if mask_value is None:
        mask_value = -1e9 if family == "normal" or mask_pattern == "prefix" else -math.inf
    dtype = getattr(torch, shape.dtype)
    return Inputs(
        *(_projection_layout(x, dtype) for x in (q, k, v)),
        bias.to(getattr(torch, shape.bias_dtype)),
        make.mask(mask_pattern, mask_value) if shape.has_mask else None,
        None if grad_out is None else _projection_layout(grad_out, dtype),
    )


class _Maker:
    """Draws the parts, float32, from one generator."""

    def __init__(self, shape: TriangleAttentionShape, device: torch.device, seed: int) -> None:
        self.shape, self.device, self.seed = shape, device, seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, device=self.device)

    def operand(self) -> Tensor:
        shape = self.shape
        return self.normal(shape.batch, shape.rows, shape.heads, shape.crop, shape.head_dim)

    def positions(self) -> Tensor:
        return torch.arange(self.shape.crop, device=self.device)

    def diagonal_band(self) -> Tensor:
        """(N, N): 1 within four of the diagonal, else 0."""
        at = self.positions()
        return ((at[:, None] - at).abs() <= 4).float()

    def turns(self, cases: int) -> Tensor:
        """(H, N): which of the cases a head's query gets."""
        heads = torch.arange(self.shape.heads, device=self.device)[:, None]
        return (heads + self.positions() // QUERY_BLOCK + self.seed) % cases

    def one_key_a_query(self) -> Tensor:
        """(B, 1, H, N, 1): a random key's index."""
        shape = self.shape
        size = (shape.batch, 1, shape.heads, shape.crop, 1)
        return torch.randint(shape.crop, size, generator=self.generator, device=self.device)

    def staircase(self, case: Tensor) -> Tensor:
        """(H, N, N): what rises (first cases) or falls along the keys, in natural-log units."""
        steps = torch.tensor(LOG2_STEPS, device=self.device) * math.log(2.0)
        stair = (self.positions() // KEY_BLOCK).float()
        stair = torch.where((case < len(LOG2_STEPS)).unsqueeze(-1), stair, stair[-1] - stair)
        return steps[case % len(LOG2_STEPS)].unsqueeze(-1) * stair

    def mask(self, pattern: str, value: float) -> Tensor:
        """`(B, I, 1, 1, N)` boolean or float32, as the shape says."""
        shape = self.shape
        if pattern not in MASK_PATTERNS or pattern == "soft" and shape.mask == "bool":
            raise InvalidInput.of("mask_pattern", f"{pattern!r} for a mask of kind {shape.mask!r}", ", ".join(MASK_PATTERNS))
        size = (shape.batch, shape.rows, 1, 1, shape.crop)
        if pattern == "soft":
            return 2.0 * self.normal(*size)
        if pattern == "prefix":
            length = (0.4 + 0.6 * self.uniform(*size[:-1], 1)) * shape.crop
            keep = self.positions() < length
        else:
            excluded = {"random10": 0.1, "random50": 0.5, "random99": 0.99, "rows": 0.1}[pattern]
            keep = self.uniform(*size) >= excluded
            if pattern == "rows":
                keep[:, ::3] = False
        return keep if shape.mask == "bool" else torch.where(keep, 0.0, value)


def _projection_layout(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(2, 3).contiguous().transpose(2, 3)
