"""The triangle multiplicative update as workloads: what the tuner, the tests and the benchmarks run and check.

One workload for each stage of `layout` (`FoldWorkload`, `FrontWorkload`, `ProductWorkload`, `BackWorkload`), and
`OperatorWorkload` for the whole: any callable with the arguments of `tpf_jit.triangle_multiplication`, forward and backward.
References of front and back come from the weights as they were given, so an error in the folding is seen too. Outputs of stages
are filled with NaN before a checked run, so an element that a kernel leaves out cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
TERMS_BOUND = 1e-6
"""Of folded terms, float32 sums of C or D numbers."""


class Roundings(NamedTuple):
    """How many independent roundings to the dtype, each as large as the result, a tensor may carry: its squared error is that of
    so many. Front and back kernels round folded weights and what they leave. Of the whole update any implementation may be
    judged: zn, LN(x) and the weights are rounded as operands of every projection, and a, b, x and their gradients when they are
    stored, as are the gradients of values and gates. Where gates are steep, as in trained models, their errors grow."""

    front: float
    back: float
    out: float
    gradients: float


_USUAL = Roundings(3.3, 3.5, 12.0, 15.0)
ROUNDINGS = {"normal": _USUAL, "small": _USUAL, "trained_like": Roundings(3.8, 4.2, 20.0, 240.0)}
"""By family, half as many again as the most seen in emulations that round just so (tests/unit/multiplication_emulation.py)."""


class _StageWorkload:
    """What the stages share. Implements `templates.base.Workload`.

    Args:
        shape: the problem.
        device: where tensors live; kernels need a CUDA device, emulations run anywhere.
        seed: added to the seed of every set, so that two workloads differ.
        family, mask_pattern, projection_biases: of inputs, see `inputs`.
        num_ctas: the grid; the device's number of SMs by default (1 on a CPU).
    """

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
        """One launch into outputs filled with NaN; without the columns that pad them to P, except where they must be zero."""
        launch, found = self._bind(kernel_fn, inputs)
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

    def _bind(self, kernel_fn: Callable[..., object], inputs: Any) -> tuple[Callable[[], None], dict[str, Tensor]]:
        raise NotImplementedError


def exact_statistics(pairs: Tensor) -> Tensor:
    """The float32 statistics of `(B, N, N, width)`, exact before their rounding; a batch element at a time."""
    return torch.stack([layout.statistics(x.double(), EPS).float() for x in pairs])


class FoldWorkload(_StageWorkload):
    """LayerNorms into projections. Inputs: weights. Outputs: `p_in`, `g_in`, `p_out`, `g_out`, `in_terms`, `out_terms`.

    What is subtracted from projections is the sum of the rounded matrices, so that is what those terms are compared with.
    """

    @property
    def bytes_per_set(self) -> int:
        """Bytes of the weights, read and folded."""
        c, d = self.shape.channels, self.shape.hidden
        return (getattr(torch, self.shape.weight_dtype).itemsize + self._element()) * c * (5 * d + c)

    def make_inputs(self, seed: int) -> Weights:
        """Weights of a call; a pure function of both seeds."""
        shape = replace(self.shape, crop=1, batch=1, mask="none")  # z, which is drawn with them, is not used
        return make_inputs(shape, self.device, self.seed + seed, self.family, None, self.projection_biases).weights

    def reference(self, inputs: Weights) -> dict[str, Tensor]:
        """The outputs in float64, with sums of matrices that are not rounded."""
        return layout.fold(inputs, torch.float64)._asdict()

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """Relative RMS errors; of terms the largest of their columns'."""
        found = {name: relative_rms(out[name], ref[name]) for name in ("p_in", "g_in", "p_out", "g_out")}
        for name, matrices in (("in_terms", ("p_in", "g_in")), ("out_terms", ("p_out", "g_out"))):
            sums = [out[matrix].double().sum(-1) for matrix in matrices]
            wanted = torch.stack([sums[0], ref[name][:, 1], sums[1], ref[name][:, 3]])
            found[name] = max(relative_rms(*column, exact_zeros=False) for column in zip(out[name].T, wanted, strict=True))
        return found

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors: one rounding of the matrices, none of the terms."""
        c, d = self.shape.channels, self.shape.hidden
        sizes = {"p_in": 2 * d * c, "g_in": 2 * d * c, "p_out": c * d, "g_out": c * c}
        return {name: self._bound(1.5, size) for name, size in sizes.items()} | dict.fromkeys(
            ("in_terms", "out_terms"), TERMS_BOUND
        )

    def _bind(self, kernel_fn: Callable[..., object], inputs: Weights) -> tuple[Callable[[], None], dict[str, Tensor]]:
        folded = layout.folded_parts(inputs, *layout.folded_empty(inputs, getattr(torch, self.shape.dtype)))
        arguments = (*layout.fold_operands(inputs, folded), self.num_ctas)
        return lambda: kernel_fn(*arguments), folded._asdict()


class FrontWorkload(_StageWorkload):
    """Input projections, gates and mask, channel-major. Outputs `factors` `(B, 2, D, N, P)`, whose padding must be zero, and
    `stats` `(B, N, N, 2)`, mean and reciprocal deviation of every pair of z."""

    @property
    def bytes_per_set(self) -> int:
        """Bytes of z, the mask, the factors and the statistics; weights are shared by all tasks and small."""
        small = self._pairs() * (12 if self.shape.has_mask else 8)
        return self._element() * (self._pairs() * self.shape.channels + 2 * self._padded_pairs() * self.shape.hidden) + small

    def make_inputs(self, seed: int) -> Inputs:
        """A fresh set of inputs; a pure function of both seeds."""
        return self.make_call(seed)

    def reference(self, inputs: Inputs) -> dict[str, Tensor]:
        """`factors`, with zeros in the padding, and `stats` in float64."""
        found = reference.factors(inputs.z, inputs.mask, inputs.weights, EPS)
        padding = layout.padded(self.shape.crop) - self.shape.crop
        return {"factors": torch.nn.functional.pad(found, (0, padding)), "stats": _statistics(inputs.z)}

    def errors(self, out: dict[str, Tensor], ref: dict[str, Tensor]) -> dict[str, float]:
        """As for every stage; the padding is judged by itself."""
        crop = self.shape.crop
        padding = bool((out["factors"][..., crop:] != 0).any())
        # A line of zeros along k is one of a masked row: those must be exact, and a view along D would hide them.
        factors = math.inf if padding else relative_rms(out["factors"][..., :crop], ref["factors"][..., :crop])
        return {"factors": factors, "stats": relative_rms(out["stats"], ref["stats"])}

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        return {"factors": self._bound(self._roundings().front, 2 * self._pairs() * self.shape.hidden), "stats": STATS_BOUND}

    def _bind(self, kernel_fn: Callable[..., object], inputs: Inputs) -> tuple[Callable[[], None], dict[str, Tensor]]:
        operands = layout.prepare(inputs.z, inputs.mask, layout.fold(inputs.weights, inputs.z.dtype))
        factors, stats = layout.factors_empty(operands.z, self.shape.hidden), layout.stats_empty(operands.z)
        arguments = (*operands.front(factors, stats), EPS, self.num_ctas)
        return lambda: kernel_fn(*arguments), {"factors": factors, "stats": stats}


class ProductWorkload(_StageWorkload):
    """The batched products over channels. Inputs are factors as a front kernel leaves them; output `out` `(B, D, N, N)`.

    Args:
        product: "nt", "tn" or "nn", see `layout`; by default the contraction of the shape's direction.
        The rest as for every stage.
    """

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

    def _bind(self, kernel_fn: Callable[..., object], inputs: Tensor) -> tuple[Callable[[], None], dict[str, Tensor]]:
        batch, _, hidden, crop, pitch = inputs.shape
        dtype = layout.contraction_dtype(inputs.dtype)
        output = torch.empty((batch, hidden, crop, pitch), dtype=dtype, device=inputs.device)
        return lambda: kernel_fn(inputs[:, 0], inputs[:, 1], output, self.num_ctas), {"out": output}


class BackWorkload(_StageWorkload):
    """Output projection, output gate, residual (z itself, if asked for). Inputs `(call, z_stats, x)`; output `out`, and in
    training `stats` `(B, N, N, 2)`, mean and reciprocal deviation of every pair of x.

    Args:
        with_residual, with_stats: whether there is that operand, that output.
        The rest as for every stage.
    """

    def __init__(self, *arguments: Any, with_residual: bool = False, with_stats: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.with_residual = with_residual
        self.with_stats = with_stats

    @property
    def bytes_per_set(self) -> int:
        """Bytes of z, its statistics, x and out."""
        kept = layout.contraction_dtype(getattr(torch, self.shape.dtype)).itemsize
        each = 2 * self._element() * self.shape.channels + 8
        return each * self._pairs() + kept * self._padded_pairs() * self.shape.hidden

    def make_inputs(self, seed: int) -> tuple[Inputs, Tensor, Tensor]:
        """A call, the statistics of its z, and its contraction `(B, D, N, P)`, rounded as it is kept; a pure function of both
        seeds."""
        call = self.make_call(seed)
        ab = reference.factors(call.z, call.mask, call.weights, EPS, torch.float32)
        made = layout.contraction_empty(call.z, self.shape.hidden).zero_()
        made[..., : self.shape.crop] = reference.contract(ab, self.shape.direction)
        return call, exact_statistics(call.z), made

    def reference(self, inputs: tuple[Inputs, Tensor, Tensor]) -> dict[str, Tensor]:
        """`out`, and in training `stats`, in float64."""
        call, _, x = inputs
        x = x[..., : self.shape.crop]
        found = {"out": reference.back(call.z, x, call.weights, EPS, call.z if self.with_residual else None)}
        return found | ({"stats": _statistics(x.permute(0, 2, 3, 1))} if self.with_stats else {})

    def bounds(self) -> dict[str, float]:
        """Largest accepted errors."""
        found = {"out": self._bound(self._roundings().back, self._pairs() * self.shape.channels)}
        return found | ({"stats": STATS_BOUND} if self.with_stats else {})

    def _bind(
        self, kernel_fn: Callable[..., object], inputs: tuple[Inputs, Tensor, Tensor]
    ) -> tuple[Callable[[], None], dict[str, Tensor]]:
        call, z_stats, x = inputs
        operands = layout.prepare(call.z, None, layout.fold(call.weights, call.z.dtype))
        out = torch.empty(call.z.shape, dtype=call.z.dtype, device=call.z.device)
        stats = layout.stats_empty(call.z) if self.with_stats else None
        residual = operands.z if self.with_residual else None
        arguments = (*operands.back(z_stats, x, residual, out, stats), EPS, self.num_ctas)
        return lambda: kernel_fn(*arguments), {"out": out} | ({} if stats is None else {"stats": stats})


class OperatorWorkload(_StageWorkload):
    """The whole update, and in training its gradients.

    `kernel_fn` has the signature of `tpf_jit.triangle_multiplication`; names of outputs are `out`, `dz`, and `d` with a weight's.

    Args:
        training: whether to also run the backward.
        The rest as for the stages.
    """

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


def _statistics(pairs: Tensor) -> Tensor:
    """Mean and reciprocal deviation of `(B, N, N, width)` in float64."""
    pairs = pairs.double()
    return torch.stack([pairs.mean(-1), (pairs.var(-1, correction=0) + EPS).rsqrt()], -1)


def _named(dz: Tensor, grads: Weights) -> dict[str, Tensor]:
    return {"dz": dz} | {f"d{name}": grad for name, grad in grads._asdict().items() if grad is not None}


def _weight_sizes(shape: TriangleMultiplicationShape, biases: bool) -> dict[str, int]:
    c, d = shape.channels, shape.hidden
    sizes = {
        "norm_in_weight": c, "norm_in_bias": c, "norm_out_weight": d, "norm_out_bias": d,
        "p_in_weight": 2 * d * c, "g_in_weight": 2 * d * c, "p_out_weight": c * d, "g_out_weight": c * c,
    }  # fmt: skip
    return sizes | ({"p_in_bias": 2 * d, "g_in_bias": 2 * d, "p_out_bias": c, "g_out_bias": c} if biases else {})
