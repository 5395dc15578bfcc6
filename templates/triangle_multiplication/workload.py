"""The triangle multiplicative update as workloads: what the tuner, the tests and the benchmarks run and check.

One workload for each stage of `layout` (`FrontWorkload`, `ProductWorkload`, `BackWorkload`), and `OperatorWorkload` for the
whole: any callable with the arguments of `tpf_jit.triangle_multiplication`, forward and backward. Outputs of stages are filled
with NaN before a checked run, so an element that a kernel leaves out cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_attention.workload import ROUNDING, relative_rms, sm_count
from tpf_jit.templates.triangle_multiplication import layout, reference
from tpf_jit.templates.triangle_multiplication.inputs import Inputs, make_inputs
from tpf_jit.templates.triangle_multiplication.layout import Weights

EPS = 1e-5
SUM_BOUND = 1e-5
"""Of what stays in float32 from operands to result: sums over C, D or N products."""
STATS_BOUND = 5e-6
"""Of mean and reciprocal deviation, float32 from z or x on."""


class Roundings(NamedTuple):
    """How many independent roundings to the dtype, each as large as the result, a tensor may carry: its squared error is that of
    so many. zn, LN(x) and the weights are rounded as operands of every projection, and a, b, x and their gradients when they are
    stored, as are the gradients of values and gates; where gates are steep, as in trained models, their errors grow."""

    stage: float
    out: float
    gradients: float


_USUAL = Roundings(4.5, 12.0, 15.0)
ROUNDINGS = {"normal": _USUAL, "small": _USUAL, "trained_like": Roundings(6.5, 20.0, 240.0)}
"""By family, from emulations of kernels that round just so (tests/unit/multiplication_emulation.py)."""


class _StageWorkload:
    """What the stages share. Implements `templates.base.Workload`.

    Args:
        shape: the problem.
        device: where tensors live; kernels need a CUDA device, emulations run anywhere.
        seed: added to the seed of every set, so that two workloads differ.
        family, mask_pattern, projection_biases: of inputs, see `inputs`.
        num_ctas: the grid; the device's number of SMs by default (1 on a CPU).
    """

    output = ""

    def __init__(
        self,
        shape: TriangleMultiplicationShape,
        device: torch.device | str,
        seed: int = 0,
        family: str = "normal",
        mask_pattern: str | None = None,
        projection_biases: bool = False,
        num_ctas: int | None = None,
    ) -> None:
        self.shape = shape
        self.device = torch.device(device)
        self.seed = seed
        self.family = family
        self.mask_pattern = mask_pattern
        self.projection_biases = projection_biases
        self.num_ctas = sm_count(self.device) if num_ctas is None else num_ctas

    def make_call(self, seed: int, with_grad_out: bool = False) -> Inputs:
        """One call's tensors; a pure function of both seeds."""
        options = (self.family, self.mask_pattern, self.projection_biases, with_grad_out)
        return make_inputs(self.shape, self.device, self.seed + seed, *options)

    def prepare(self, kernel_fn: Callable[..., object], inputs: Any) -> Callable[[], None]:
        """A callable that launches the kernel once; layouts and outputs are made here, so it allocates nothing."""
        launch, _ = self._bind(kernel_fn, inputs)
        return launch

    def run(self, kernel_fn: Callable[..., object], inputs: Any) -> dict[str, Tensor]:
        """One launch into an output filled with NaN; without the columns that pad it to P, except where they must be zero."""
        launch, output = self._bind(kernel_fn, inputs)
        found = {self.output: output} if isinstance(output, Tensor) else output
        for x in found.values():
            x.fill_(math.nan)
        launch()
        return found

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS error by output name; inf for a NaN, or for anything but zero where the reference is zero."""
        return {name: relative_rms(out[name], ref[name]) for name in ref}

    def _bound(self, roundings: float, elements: int) -> float:
        """A bound for so many roundings, with a statistical allowance for outputs of few elements."""
        return math.hypot(ROUNDING[self.shape.dtype] * math.sqrt(roundings), SUM_BOUND) * (1.0 + 4.0 / math.sqrt(elements))

    def _roundings(self) -> Roundings:
        return ROUNDINGS[self.family]

    def _pairs(self) -> int:
        return self.shape.batch * self.shape.crop**2

    def _padded_pairs(self) -> int:
        return self.shape.batch * self.shape.crop * layout.padded(self.shape.crop)

    def _element(self) -> int:
        return getattr(torch, self.shape.dtype).itemsize

    def _bind(self, kernel_fn: Callable[..., object], inputs: Any) -> tuple[Callable[[], None], Tensor | dict[str, Tensor]]:
        raise NotImplementedError


class _NormWorkload(_StageWorkload):
    """What front and back share: in training, a second output `stats` `(B, N, N, 2)`, of the LayerNorm of z or of x.

    Args:
        with_stats: whether there is that output.
        The rest as for every stage.
    """

    def __init__(self, *arguments: Any, with_stats: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.with_stats = with_stats

    def _stats_empty(self, z: Tensor) -> Tensor | None:
        return torch.empty((*z.shape[:3], 2), dtype=torch.float32, device=z.device) if self.with_stats else None

    def _outputs(self, output: Tensor, stats: Tensor | None) -> dict[str, Tensor]:
        return {self.output: output} if stats is None else {self.output: output, "stats": stats}

    def _with_stats(self, ref: dict[str, Tensor], pairs: Tensor) -> dict[str, Tensor]:
        """References, and mean and reciprocal deviation of every one of the `pairs` in float64 where they are asked for."""
        if self.with_stats:
            pairs = pairs.double()
            ref["stats"] = torch.stack([pairs.mean(-1), (pairs.var(-1, correction=0) + EPS).rsqrt()], -1)
        return ref

    def _with_bounds(self, bounds: dict[str, float]) -> dict[str, float]:
        return {**bounds, "stats": STATS_BOUND} if self.with_stats else bounds


class FrontWorkload(_NormWorkload):
    """LayerNorm, projections, gates and mask, channel-major. Output `factors` `(B, 2, D, N, P)`, whose padding must be zero."""

    output = "factors"

    @property
    def bytes_per_set(self) -> int:
        """Bytes of z, the mask and the factors; weights are shared by all tasks and small."""
        mask = 4 * self._pairs() if self.shape.has_mask else 0
        return self._element() * (self._pairs() * self.shape.channels + 2 * self._padded_pairs() * self.shape.hidden) + mask

    def make_inputs(self, seed: int) -> Inputs:
        """A fresh set of inputs; a pure function of both seeds."""
        return self.make_call(seed)

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        """`factors` in float64, with zeros in the padding."""
        found = reference.factors(inputs.z, inputs.mask, inputs.weights, EPS)
        padding = layout.padded(self.shape.crop) - self.shape.crop
        return self._with_stats({"factors": torch.nn.functional.pad(found, (0, padding))}, inputs.z)

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """As for every stage; the padding is judged by itself."""
        crop = self.shape.crop
        if bool((out["factors"][..., crop:] != 0).any()):
            return {"factors": math.inf}
        # A line of zeros along k is one of a masked row: those must be exact, and a view along D would hide them.
        found = {"factors": relative_rms(out["factors"][..., :crop], ref["factors"][..., :crop])}
        return {**found, "stats": relative_rms(out["stats"], ref["stats"])} if self.with_stats else found

    def bounds(self) -> dict[str, float]:
        """Largest accepted error."""
        return self._with_bounds({"factors": self._bound(self._roundings().stage, 2 * self._pairs() * self.shape.hidden)})

    def _bind(self, kernel_fn: Callable[..., object], inputs: Inputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        operands = layout.prepare(inputs.z, inputs.mask, inputs.weights)
        output, stats = layout.factors_empty(operands.z, self.shape.hidden), self._stats_empty(operands.z)
        arguments = (*operands.front(output), stats, EPS, self.num_ctas)
        return lambda: kernel_fn(*arguments), self._outputs(output, stats)


class ProductWorkload(_StageWorkload):
    """The batched products over channels. Inputs are factors as a front kernel leaves them; output `out` `(B, D, N, N)`.

    Args:
        product: "nt", "tn" or "nn", see `layout`; by default the contraction of the shape's direction.
        The rest as for every stage.
    """

    output = "out"

    def __init__(self, *arguments: Any, product: str | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.product = product or layout.CONTRACTIONS[self.shape.direction]

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the factors and of the product."""
        kept = layout.contraction_dtype(getattr(torch, self.shape.dtype)).itemsize
        return self._padded_pairs() * self.shape.hidden * (2 * self._element() + kept)

    def make_inputs(self, seed: int) -> Tensor:
        """Rounded factors `(B, 2, D, N, P)` of a call; a pure function of both seeds."""
        call = self.make_call(seed)
        made = layout.factors_empty(call.z, self.shape.hidden).zero_()
        made[..., : self.shape.crop] = reference.factors(call.z, call.mask, call.weights, EPS, torch.float32)
        return made

    def run(self, kernel_fn: Callable[..., object], inputs: Tensor) -> dict[str, Tensor]:
        """As for every stage, without the padding."""
        return {name: x[..., : self.shape.crop] for name, x in super().run(kernel_fn, inputs).items()}

    def reference(self, inputs: Tensor) -> dict[str, Tensor]:
        """`out` in float64."""
        left, right = inputs[..., : self.shape.crop].double().unbind(1)
        return {"out": (left.mT if self.product == "tn" else left) @ (right.mT if self.product == "nt" else right)}

    def bounds(self) -> dict[str, float]:
        """Largest accepted error: one rounding (of values that crowd the lower end of a binade, perhaps), none in float32."""
        roundings = 0.0 if self.shape.dtype == "float16" else 1.5
        return {"out": self._bound(roundings, self._pairs() * self.shape.hidden)}

    def _bind(self, kernel_fn: Callable[..., object], inputs: Tensor) -> tuple[Callable[[], None], Tensor]:
        batch, _, hidden, crop, pitch = inputs.shape
        dtype = layout.contraction_dtype(inputs.dtype)
        output = torch.empty((batch, hidden, crop, pitch), dtype=dtype, device=inputs.device)
        return lambda: kernel_fn(inputs[:, 0], inputs[:, 1], output, self.num_ctas), output


class BackWorkload(_NormWorkload):
    """LayerNorm of x, output projection, output gate, residual (z itself, if asked for). Inputs `(call, x)`; output `out`."""

    output = "out"

    def __init__(self, *arguments: Any, with_residual: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.with_residual = with_residual

    @property
    def bytes_per_set(self) -> int:
        """Bytes of z, x and out."""
        kept = layout.contraction_dtype(getattr(torch, self.shape.dtype)).itemsize
        return 2 * self._element() * self._pairs() * self.shape.channels + kept * self._padded_pairs() * self.shape.hidden

    def make_inputs(self, seed: int) -> tuple[Inputs, Tensor]:
        """A call and its contraction `(B, D, N, P)`, rounded as it is kept; a pure function of both seeds."""
        call = self.make_call(seed)
        ab = reference.factors(call.z, call.mask, call.weights, EPS, torch.float32)
        made = layout.contraction_empty(call.z, self.shape.hidden).zero_()
        made[..., : self.shape.crop] = reference.contract(ab, self.shape.direction)
        return call, made

    def reference(self, inputs: tuple[Inputs, Tensor]) -> dict[str, Tensor]:
        """`out` in float64."""
        call, x = inputs
        residual = call.z if self.with_residual else None
        x = x[..., : self.shape.crop]
        return self._with_stats({"out": reference.back(call.z, x, call.weights, EPS, residual)}, x.permute(0, 2, 3, 1))

    def bounds(self) -> dict[str, float]:
        """Largest accepted error."""
        return self._with_bounds({"out": self._bound(self._roundings().stage, self._pairs() * self.shape.channels)})

    def _bind(
        self, kernel_fn: Callable[..., object], inputs: tuple[Inputs, Tensor]
    ) -> tuple[Callable[[], None], dict[str, Tensor]]:
        call, x = inputs
        operands = layout.prepare(call.z, None, call.weights)
        output = torch.empty(call.z.shape, dtype=call.z.dtype, device=call.z.device)
        stats = self._stats_empty(call.z)
        arguments = (*operands.back(x, operands.z if self.with_residual else None, output), stats, EPS, self.num_ctas)
        return lambda: kernel_fn(*arguments), self._outputs(output, stats)


class OperatorWorkload(_StageWorkload):
    """The whole update, and in training its gradients.

    `kernel_fn` has the signature of `tpf_jit.triangle_multiplication`; names of outputs are `out`, `dz`, and `d` with a weight's.

    Args:
        training: whether to also run the backward.
        The rest as for the stages.
    """

    output = "out"

    def __init__(self, *arguments: Any, training: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.training = training

    @property
    def bytes_per_set(self) -> int:
        """Bytes of z and out, and in training of both gradients."""
        return (4 if self.training else 2) * self._element() * self._pairs() * self.shape.channels

    def make_inputs(self, seed: int) -> Inputs:
        """A fresh set of inputs; a pure function of both seeds."""
        return self.make_call(seed, with_grad_out=self.training)

    def prepare(self, kernel_fn: Callable[..., Tensor], inputs: Inputs) -> Callable[[], None]:
        """One call, in training with its backward; it allocates what such a call allocates."""
        return lambda: self._call(kernel_fn, inputs)

    def run(self, kernel_fn: Callable[..., Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """`out`, and in training all gradients."""
        return self._call(kernel_fn, inputs)

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        """The same in float64."""
        arguments = (inputs.z, self.shape.direction, inputs.mask, inputs.weights, EPS)
        found = {"out": reference.multiplication(*arguments)}
        if self.training:
            dz, grads = reference.multiplication_backward(inputs.grad_out, *arguments)
            found |= _named(dz, grads)
        return found

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS error by output name; inf for a NaN, or for an output that is missing."""
        return {name: relative_rms(out[name], ref[name]) if name in out else math.inf for name in ref}

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        roundings = self._roundings()
        found = {"out": self._bound(roundings.out, self._pairs() * self.shape.channels)}
        if self.training:
            sizes = _weight_sizes(self.shape, self.projection_biases)
            found["dz"] = self._bound(roundings.gradients, self._pairs() * self.shape.channels)
            found |= {f"d{name}": self._bound(roundings.gradients, size) for name, size in sizes.items()}
        return found

    def _call(self, kernel_fn: Callable[..., Tensor], inputs: Inputs) -> dict[str, Tensor]:
        z, weights = inputs.z, inputs.weights
        if self.training:
            if inputs.grad_out is None:
                raise InvalidInput.of("inputs", "no grad_out", "inputs made by this workload with training on")
            z = z.detach().requires_grad_()
            weights = Weights(*(None if x is None else x.detach().requires_grad_() for x in weights))
        out = kernel_fn(z, self.shape.direction, inputs.mask, **weights._asdict(), eps=EPS)
        if not self.training:
            return {"out": out}
        out.backward(inputs.grad_out)
        return {"out": out.detach()} | _named(z.grad, Weights(*(None if x is None else x.grad for x in weights)))


def _named(dz: Tensor, grads: Weights) -> dict[str, Tensor]:
    return {"dz": dz} | {f"d{name}": grad for name, grad in grads._asdict().items() if grad is not None}


def _weight_sizes(shape: TriangleMultiplicationShape, biases: bool) -> dict[str, int]:
    c, d = shape.channels, shape.hidden
    sizes = {
        "norm_in_weight": c, "norm_in_bias": c, "norm_out_weight": d, "norm_out_bias": d,
        "p_in_weight": 2 * d * c, "g_in_weight": 2 * d * c, "p_out_weight": c * d, "g_out_weight": c * c,
    }  # fmt: skip
    return sizes | ({"p_in_bias": 2 * d, "g_in_bias": 2 * d, "p_out_bias": c, "g_out_bias": c} if biases else {})
