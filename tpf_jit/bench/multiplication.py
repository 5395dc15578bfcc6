"""Bench of the triangle multiplicative update: every installed implementation on the same tensors, in the same run.

How implementations are timed, and what the passes are: `interleaved`. Each is first compared with float64 over all elements: the
output, and for the backward the gradients of z and of every weight. One that returns z + update is compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tpf_jit.bench.interleaved import WRONG, Problem, RoundSettings, check_passes, measure_all, relative_rms
from tpf_jit.bench.multiplication_peers import MultiplicationInputs, UnderAutocast, multiplication_peers
from tpf_jit.bench.peer_base import Peer
from tpf_jit.errors import InvalidInput

WEIGHTS_WRONG = 0.1
"""`WRONG` for gradients of weights: sums over all pairs, which cancel. Stock PyTorch's, of 16-bit addends, are 4e-2 off."""
_PAIRS = ("out", "dz")


def bench_multiplication(
    shapes: Sequence[Any],
    passes: Sequence[str] = ("forward",),
    settings: RoundSettings | None = None,
    device: str | None = None,
    command: str = "",
    say: Callable[[str], None] | None = None,
    autocast: bool = False,
) -> dict[str, Any]:
    """Measure every implementation on every problem and pass.

    Args:
        shapes: `TriangleMultiplicationShape`s.
        passes: of `interleaved.PASSES`.
        settings: see `RoundSettings`.
        device: torch device; the current CUDA device when left out. ``cpu`` times with the wall clock.
        command: command line for the record.
        say: told about every finished row, for people.
        autocast: whether z is float32 and calls are made under bf16 autocast, as in Boltz-2 and Protenix; of bf16 problems.

    Returns:
        A record of kind ``bench.trimul``. `rel_rms` of a row has `out`, and with gradients `dz` and `dweights`, the mean over the
        weights.

    Raises:
        MeasurementFailed: no CUDA device, or nothing could be measured.
        InvalidInput: an unknown pass or implementation; autocast of a problem that is not bf16.
    """
    settings = settings or RoundSettings()
    check_passes(passes)
    names = settings.impls
    chosen = multiplication_peers(names) if names is not None else [peer for peer in multiplication_peers() if peer.timed]

    problem, method = _Problem, {}
    if autocast:
        for shape in shapes:
            if shape.dtype != "bfloat16":
                raise InvalidInput.of("autocast", f"True for {shape.dtype} activations", "True for bfloat16 ones")
        chosen, problem = [UnderAutocast(peer) for peer in chosen], _AutocastProblem
        method = {"autocast": "bfloat16"}

    def make(*of: Any) -> _Problem:
        return problem(*of, settings)

    measured = measure_all(make, shapes, passes, chosen, device, say)
    return measured.record("bench.trimul", command, settings, checked="against float64, all elements", **method)


def problem_fields(shape: Any) -> dict[str, Any]:
    """Fields of a row that say which problem it is."""
    return {
        "B": shape.batch,
        "N": shape.crop,
        "C": shape.channels,
        "hidden": shape.hidden,
        "direction": shape.direction,
        "dtype": shape.dtype,
        "weight_dtype": shape.weight_dtype,
        "mask": shape.mask,
    }


def make_call(shape: Any, device: Any, seed: int, family: str = "normal") -> MultiplicationInputs:
    """Tensors of one call of a family, see `templates.triangle_multiplication.inputs`; a pure function of the arguments."""
    from tpf_jit.templates.triangle_multiplication.inputs import make_inputs
    from tpf_jit.templates.triangle_multiplication.workload import EPS

    made = make_inputs(shape, device, seed, family, with_grad_out=True)
    return MultiplicationInputs(made.z, made.mask, made.weights, made.grad_out, shape.direction, EPS)


def reference_of(inputs: MultiplicationInputs, gradients: bool) -> dict[str, Any]:
    """`out`, and with `gradients` those of `inputs.leaves()` by `inputs.names()`, of the update alone, in float64."""
    from tpf_jit.templates.triangle_multiplication import reference

    arguments = (inputs.z, inputs.direction, inputs.mask, inputs.weights, inputs.eps)
    found = {"out": reference.multiplication(*arguments)}
    if gradients:
        dz, of_weights = reference.multiplication_backward(inputs.grad, *arguments)
        values = (dz, *(grad for grad in of_weights if grad is not None))
        found |= dict(zip(inputs.names(), values, strict=True))
    return found


def expected(peer: Peer, inputs: MultiplicationInputs, reference: dict[str, Any]) -> dict[str, Any]:
    """What a peer must come close to: the reference, or that of z + update."""
    if not peer.residual:
        return reference
    added = {"out": inputs.z, "dz": inputs.grad}
    return {name: value + added[name] if name in added else value for name, value in reference.items()}


class _Problem(Problem):
    """One problem and pass on one device."""

    _reference: dict[str, Any] | None = None

    def _fields(self) -> dict[str, Any]:
        return problem_fields(self._shape)

    def _leaves(self, peer: Peer, inputs: MultiplicationInputs) -> tuple[Any, ...]:
        return inputs.leaves()

    def _errors(self, peer: Peer, inputs: MultiplicationInputs) -> dict[str, float]:
        import torch

        if self._reference is None:
            self._reference = reference_of(inputs, gradients=self._pass != "forward")
        if self._pass == "forward":
            found = {"out": self._forward(peer, inputs)}
        else:
            leaves = inputs.with_grad()
            out = peer.forward(leaves)
            gradients = torch.autograd.grad(out, leaves.leaves(), inputs.grad)
            found = {"out": out.detach(), **dict(zip(inputs.names(), gradients, strict=True))}
        right = expected(peer, inputs, self._reference)
        return {name: relative_rms(value, right[name]) for name, value in found.items()}

    def _limit(self, name: str) -> float:
        return WRONG if name in _PAIRS else WEIGHTS_WRONG

    def _summary(self, errors: dict[str, float]) -> dict[str, float]:
        of_weights = [value for name, value in errors.items() if name not in _PAIRS]
        shown = {name: errors[name] for name in _PAIRS if name in errors}
        return shown | ({"dweights": sum(of_weights) / len(of_weights)} if of_weights else {})

    def _forget(self) -> None:
        self._reference = None

    def _inputs(self, number: int) -> MultiplicationInputs:
        return make_call(self._shape, self._device, self._settings.seed + number)

    def _set_bytes(self, inputs: MultiplicationInputs) -> int:
        tensors = (inputs.z,) if self._pass == "forward" else (inputs.z, inputs.grad)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class _AutocastProblem(_Problem):
    """The same with a z that bf16 does not hold."""

    def _fields(self) -> dict[str, Any]:
        return {**super()._fields(), "z_dtype": "float32"}

    def _inputs(self, number: int) -> MultiplicationInputs:
        made = super()._inputs(number)
        return replace(made, z=made.z.float() * 1.001)
