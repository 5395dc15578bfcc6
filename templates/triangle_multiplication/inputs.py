"""Seeded inputs of the triangle multiplicative update: one generator for tests, the accuracy suite, the tuner and benchmarks.

Families:

    normal         z, dO ~ N(0, 1); projections ~ N(0, 1 / fan-in); norms near one and zero
    trained_like   z with four outlier channels (x8) and a band of +6 along the diagonal; weights with a few large rows (x4);
                   norms far from one; biases of gates, where there are any, that hold them open or shut
    small          z ~ 1e-3 N(0, 1), where the LayerNorms' eps counts, and for bf16 dO in the range of 1e-6

Mask patterns (what is masked; a float mask holds 0 there, and 1 elsewhere):

    prefix         the product of one token mask with itself: the last 30 % of the tokens are padding (whole rows and columns)
    random10, random50    each pair with that probability in percent
    soft           float only: values ~ U(0, 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_multiplication.layout import Weights

FAMILIES = ("normal", "trained_like", "small")
MASK_PATTERNS = ("prefix", "random10", "random50", "soft")
_USUAL_PATTERN = {"normal": "random10", "trained_like": "prefix", "small": "random50"}


@dataclass(frozen=True)
class Inputs:
    """One call's tensors: z, grad_out `(B, N, N, C)` contiguous, mask None or `(B, N, N)`, boolean or float32, weights."""

    z: Tensor
    mask: Tensor | None
    weights: Weights
    grad_out: Tensor | None


def make_inputs(
    shape: TriangleMultiplicationShape,
    device: torch.device | str = "cpu",
    seed: int = 0,
    family: str = "normal",
    mask_pattern: str | None = None,
    projection_biases: bool = False,
    with_grad_out: bool = False,
) -> Inputs:
    """Inputs of a family; a pure function of the arguments and of the kind of device.

    Args:
        shape: the problem; its mask kind says whether there is a mask and of which kind.
        device: where the tensors live and are generated.
        seed: any integer.
        family: see the module's text.
        mask_pattern: see the module's text; by default each family has its own.
        projection_biases: whether the four projections have biases, which models leave out.
        with_grad_out: whether to generate the output's gradient too.

    Raises:
        InvalidInput: for an unknown family or pattern.
    """
    if family not in FAMILIES:
        raise InvalidInput.of("family", repr(family), ", ".join(FAMILIES))
    make = _Maker(shape, torch.device(device), seed, family)
    dtype = getattr(torch, shape.dtype)
    z = make.z()
    weights = make.weights(projection_biases)
    grad_out = make.normal(*z.shape) if with_grad_out else None
    if grad_out is not None and family == "small" and shape.dtype == "bfloat16":
        grad_out *= 1e-6
    return Inputs(
        z.to(dtype),
        make.mask(mask_pattern or _USUAL_PATTERN[family]) if shape.has_mask else None,
        weights,
        None if grad_out is None else grad_out.to(dtype),
    )


class _Maker:
    """Draws the parts, float32, from one generator."""

    def __init__(self, shape: TriangleMultiplicationShape, device: torch.device, seed: int, family: str) -> None:
        self.shape, self.device, self.family = shape, device, family
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self.generator, device=self.device)

    def z(self) -> Tensor:
        shape = self.shape
        z = self.normal(shape.batch, shape.crop, shape.crop, shape.channels)
        if self.family == "small":
            return z.mul_(1e-3)
        if self.family == "trained_like":
            z[..., torch.randperm(shape.channels, generator=self.generator, device=self.device)[:4]] *= 8.0
            at = torch.arange(shape.crop, device=self.device)
            z += 6.0 * ((at[:, None] - at).abs() <= min(4, shape.crop // 8)).unsqueeze(-1)
        return z

    def matrix(self, rows: int, columns: int) -> Tensor:
        weight = self.normal(rows, columns) * columns**-0.5
        if self.family == "trained_like":
            weight[:: max(1, rows // 4)] *= 4.0
        return weight

    def norm(self, width: int) -> tuple[Tensor, Tensor]:
        spread = 0.5 if self.family == "trained_like" else 0.1
        return 1.0 + spread * self.normal(width), spread * self.normal(width)

    def bias(self, width: int, present: bool, gate: bool) -> Tensor | None:
        if not present:
            return None
        return self.normal(width) * (2.0 if gate and self.family == "trained_like" else 0.3)

    def weights(self, biases: bool) -> Weights:
        channels, hidden = self.shape.channels, self.shape.hidden
        made = Weights(
            *self.norm(channels),
            self.matrix(2 * hidden, channels), self.bias(2 * hidden, biases, False),
            self.matrix(2 * hidden, channels), self.bias(2 * hidden, biases, True),
            *self.norm(hidden),
            self.matrix(channels, hidden), self.bias(channels, biases, False),
            self.matrix(channels, channels), self.bias(channels, biases, True),
        )  # fmt: skip
        dtype = getattr(torch, self.shape.weight_dtype)
        return Weights(*(None if x is None else x.to(dtype) for x in made))

    def mask(self, pattern: str) -> Tensor:
        """`(B, N, N)` boolean or float32, as the shape says."""
        shape = self.shape
        if pattern not in MASK_PATTERNS or pattern == "soft" and shape.mask == "bool":
            raise InvalidInput.of("mask_pattern", f"{pattern!r} for a mask of kind {shape.mask!r}", ", ".join(MASK_PATTERNS))
        size = (shape.batch, shape.crop, shape.crop)
        if pattern == "soft":
            return self.uniform(*size)
        if pattern == "prefix":
            token = torch.arange(shape.crop, device=self.device) < max(1, round(0.7 * shape.crop))
            keep = (token[:, None] & token).expand(size).contiguous()
        else:
            keep = self.uniform(*size) >= {"random10": 0.1, "random50": 0.5}[pattern]
        return keep if shape.mask == "bool" else keep.float()
