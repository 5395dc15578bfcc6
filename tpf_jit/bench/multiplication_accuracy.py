"""Accuracy of the triangle multiplicative update and its gradients: every implementation against float64, and against itself.

A case is a problem, a family of inputs and a seed. The output and the gradients of z and of every weight are compared with
float64 over all elements, and the call is repeated and compared bit by bit. One that returns z + update is compared with that.
"""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from tpf_jit.bench.accuracy_record import judged, worst
from tpf_jit.bench.environment import bench_device, record_head
from tpf_jit.bench.float64 import Yardstick, same_bits
from tpf_jit.bench.interleaved import reason_of
from tpf_jit.bench.multiplication import expected, make_call, problem_fields, reference_of
from tpf_jit.bench.multiplication_peers import MultiplicationInputs, multiplication_peers
from tpf_jit.bench.peer_base import Peer
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.tune import timing


@dataclass(frozen=True)
class MultiplicationAccuracySettings:
    """What to judge, and how.

    Attributes:
        shapes, families, seeds: the grid; seeds from the first up to before the second.
        impls: names of the implementations; those that are judged when None.
        repeats: calls that are compared bit by bit, the first included.
    """

    shapes: tuple[TriangleMultiplicationShape, ...]
    families: tuple[str, ...] = ("normal", "trained_like")
    seeds: tuple[int, int] = (0, 3)
    impls: list[str] | None = None
    repeats: int = 5

    def cases(self) -> Iterator[tuple[TriangleMultiplicationShape, str, int]]:
        """Problem, family and seed of every case."""
        yield from product(self.shapes, self.families, range(*self.seeds))


def accuracy_multiplication(
    settings: MultiplicationAccuracySettings,
    device: str | None = None,
    command: str = "",
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Judge every implementation on every case of the grid.

    Args:
        settings: see `MultiplicationAccuracySettings`.
        device: torch device; the current CUDA device when left out. ``cpu`` judges the PyTorch paths, on small crops.
        command: command line for the record.
        say: told about every finished case, for people.

    Returns:
        A record of kind ``accuracy.trimul``: a row for every problem, family, implementation and tensor.

    Raises:
        MeasurementFailed: no CUDA device, nothing could be judged, or the device was lost.
        InvalidInput: an unknown implementation or family, or a grid without cases.
    """
    _check(settings)
    names = settings.impls
    chosen = multiplication_peers(names) if names is not None else [peer for peer in multiplication_peers() if peer.judged]
    gpu, timer = bench_device(device)
    absent = {peer.name: why for peer in chosen if (why := peer.absent()) is not None}
    present = [peer for peer in chosen if peer.name not in absent]
    suite = _Suite(settings, gpu, timer)
    for shape, family, seed in settings.cases():
        text = suite.case(present, shape, family, seed)
        if say is not None:
            say(text)
    absent |= suite.reasons()
    rows = list(suite.rows())
    if not rows:
        raise MeasurementFailed("nothing could be judged: " + "; ".join(f"{impl}: {why}" for impl, why in absent.items()))
    record = record_head("accuracy.trimul", command, gpu, {peer.name: peer.version() for peer in present})
    record["method"] = {
        "reference": "float64 on the device, all elements",
        "statistic": "relative RMS per case, then mean and largest over the cases",
        "bitwise": f"{settings.repeats} calls",
        "cases": len(list(settings.cases())),
        "seeds": f"{settings.seeds[0]}..{settings.seeds[1] - 1}",
    }
    return {**record, "absent_peers": absent, "configurations": suite.configurations, "rows": rows}


def _check(settings: MultiplicationAccuracySettings) -> None:
    from tpf_jit.templates.triangle_multiplication.inputs import FAMILIES

    for name in settings.families:
        if name not in FAMILIES:
            raise InvalidInput.of("families", repr(name), ", ".join(FAMILIES))
    if not list(settings.cases()):
        raise InvalidInput.of("seeds", f"{settings.seeds[0]}:{settings.seeds[1]}", "at least one seed, problem and family")
    if settings.repeats < 1:
        raise InvalidInput.of("repeats", settings.repeats, "at least one")


@dataclass
class _Suite:
    settings: MultiplicationAccuracySettings
    device: Any
    timer: timing.Timer
    configurations: dict[str, dict[str, Any]] = field(default_factory=dict)
    _ready: set[tuple] = field(default_factory=set)
    _results: dict[tuple, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _failures: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)

    def case(self, present: Sequence[Peer], shape: TriangleMultiplicationShape, family: str, seed: int) -> str:
        """Judge all implementations on one case; a line about it."""
        inputs = make_call(shape, self.device, seed, family)
        reference = reference_of(inputs, gradients=True)
        words = []
        for peer in present:
            why = peer.unsupported(shape, "both")
            if why is None:
                why, result = self._attempt(peer, shape, inputs, reference)
            if why is None:
                self._results[shape, family, peer.name].append(result)
                words.append(f"{peer.name} {worst(result)}")
                continue
            counts = self._failures.setdefault(peer.name, {}).setdefault(why, {})
            where = shape.key().partition("/")[2]
            counts[where] = counts.get(where, 0) + 1
        return f"{shape.key()} {family} seed {seed}: {', '.join(words) or 'nothing judged'}"

    def reasons(self) -> dict[str, str]:
        """Why implementations lack cases."""
        return {
            impl: "; ".join(
                f"{why} ({'; '.join(f'{where}, {count} cases' for where, count in counts.items())})"
                for why, counts in by_reason.items()
            )
            for impl, by_reason in self._failures.items()
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows of the record."""
        for (shape, family, impl), results in self._results.items():
            for tensor in results[0]["rel_rms"]:
                one = judged(results, tensor, self.settings.repeats)
                yield {"op": shape.op, "family": family, **problem_fields(shape), "impl": impl, **one}

    def _attempt(
        self, peer: Peer, shape: Any, inputs: MultiplicationInputs, reference: dict[str, Any]
    ) -> tuple[str | None, dict[str, Any]]:
        """(why it failed, what came out)."""
        try:
            self._make_ready(peer, shape, inputs)
            return None, self._measure(peer, inputs, Yardstick(expected(peer, inputs, reference)))
        except Exception as error:
            why = reason_of(error, self.timer)
        # Only now, as the exception kept the tensors of the failed call alive.
        gc.collect()
        self.timer.release_memory()
        return why, {}

    def _make_ready(self, peer: Peer, shape: Any, inputs: MultiplicationInputs) -> None:
        if (peer.name, shape) not in self._ready:
            facts = peer.ready(shape, inputs, "both")
            self._ready.add((peer.name, shape))
            if facts:
                self.configurations.setdefault(peer.name, {})[shape.key()] = facts

    def _measure(self, peer: Peer, inputs: MultiplicationInputs, yardstick: Yardstick) -> dict[str, Any]:
        first = _call(peer, inputs)
        errors = yardstick.errors(first)
        equal = dict.fromkeys(first, True)
        for _ in range(1, self.settings.repeats):
            again = _call(peer, inputs)
            equal = {name: same and bool(same_bits(first[name], again[name])) for name, same in equal.items()}
        return {
            "rel_rms": {name: value if math.isfinite(value) else None for name, (value, _) in errors.items()},
            "max_abs": {name: value if math.isfinite(value) else None for name, (_, value) in errors.items()},
            "equal": equal,
        }


def _call(peer: Peer, inputs: MultiplicationInputs) -> dict[str, Any]:
    """`out`, and the gradients by `inputs.names()`."""
    import torch

    leaves = inputs.with_grad()
    out = peer.forward(leaves)
    gradients = torch.autograd.grad(out, leaves.leaves(), inputs.grad)
    # Contiguous, as bits are compared by views of another dtype.
    values = (out.detach(), *gradients)
    return {name: value.contiguous() for name, value in zip(("out", *inputs.names()), values, strict=True)}
