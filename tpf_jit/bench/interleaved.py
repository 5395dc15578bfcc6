"""Timing implementations in turns: what the benches of all operations share.

Implementations take turns in rounds of mirrored order, inputs rotate through more than twice the L2 cache, the GPU is heated
first, and the figure is the median of all samples. One is timed only after its results agree with float64.

Passes: ``forward`` without autograd; ``backward`` the gradients with the graph at hand; ``both`` a forward that keeps what the
backward needs, and the backward.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tpf_jit.bench.environment import bench_device, record_head
from tpf_jit.bench.peer_base import Peer
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.tune import timing

PASSES = ("forward", "backward", "both")
WRONG = 2e-2
"""Relative RMS error against float64 above which an implementation is left out as wrong: an order above what rounding costs."""


@dataclass(frozen=True)
class RoundSettings:
    """How to measure.

    Attributes:
        impls: names of the implementations; when None all but the ablations.
        rounds: rounds of the interleaving, even.
        samples: samples a round.
        heat_s: seconds of load before the first sample.
        seed: of the inputs.
        replay: capture every call in a CUDA graph, and time replays; what cannot be captured has no figures.

    Raises:
        InvalidInput: no round, or no sample.
    """

    impls: list[str] | None = None
    rounds: int = 10
    samples: int = 20
    heat_s: float = 0.3
    seed: int = 0
    replay: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "samples"):
            if getattr(self, name) < 1:
                raise InvalidInput.of(name, getattr(self, name), "at least one")


@dataclass(frozen=True)
class Measured:
    """What came out of a bench: its device and clock, who was there, who has no figures and why, and the rows of a record."""

    device: Any
    timer: timing.Timer
    present: list[Peer]
    absent: dict[str, str]
    rows: list[dict[str, Any]]

    def record(self, kind: str, command: str, settings: RoundSettings, **method: Any) -> dict[str, Any]:
        """The record; `method` says what is particular to the operation."""
        record = record_head(kind, command, self.device, {peer.name: peer.version() for peer in self.present})
        record["method"] = {
            "timer": self.timer.name,
            "statistic": "median",
            "repeats": settings.rounds * settings.samples,
            "l2": "rotated inputs",
            "interleaved": True,
            "peak_mib": "above the inputs",
            **({"calls": "replayed from a CUDA graph each"} if settings.replay else {}),
            **method,
        }
        return {**record, "absent_peers": self.absent, "rows": self.rows}


def check_passes(passes: Iterable[str]) -> None:
    """Raises InvalidInput for one that is not of `PASSES`."""
    for name in passes:
        if name not in PASSES:
            raise InvalidInput.of("passes", repr(name), ", ".join(PASSES))


def measure_all(
    make: Callable[[Any, str, Any, timing.Timer], Problem],
    shapes: Sequence[Any],
    passes: Sequence[str],
    chosen: Sequence[Peer],
    device: str | None,
    say: Callable[[str], None] | None,
) -> Measured:
    """Measure the chosen implementations on every shape and pass.

    Args:
        make: a `Problem` from a shape, a pass, the torch device and its clock.
        shapes, passes: of the problems.
        chosen: the implementations.
        device: torch device; the current CUDA device when left out.
        say: told about every finished problem, for people.

    Raises:
        MeasurementFailed: no CUDA device, or nothing could be measured.
    """
    gpu, timer = bench_device(device)
    absent = {peer.name: why for peer in chosen if (why := peer.absent()) is not None}
    present = [peer for peer in chosen if peer.name not in absent]
    unmeasured: dict[str, dict[str, list[str]]] = {}
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for name in passes:
            found, failed = make(shape, name, gpu, timer).measure(present)
            rows += found
            for impl, why in failed.items():
                unmeasured.setdefault(impl, {}).setdefault(why, []).append(f"{shape.key().partition('/')[2]} {name}")
            if say is not None:
                times = ", ".join(f"{row['impl']} {row['ms']:.3f} ms" for row in found)
                say(f"{shape.key()} {name}: {times or 'nothing measured'}")
    for impl, reasons in unmeasured.items():
        absent[impl] = "; ".join(f"{why} ({', '.join(where)})" for why, where in reasons.items())
    if not rows:
        raise MeasurementFailed("nothing could be measured: " + "; ".join(f"{impl}: {why}" for impl, why in absent.items()))
    return Measured(gpu, timer, present, absent, rows)


def reason_of(error: Exception, timer: timing.Timer) -> str:
    """The reason for a record. An implementation's failure is not the bench's, but a lost device ends it: MeasurementFailed."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if not timer.alive():
        raise MeasurementFailed(f"the device takes no more work after {text}") from error
    return text


class Problem:
    """One problem and pass on one device; what differs between operations is at the end.

    Args:
        shape: the problem.
        name: the pass.
        device: torch device.
        timer: its clock.
        settings: how to measure.
    """

    def __init__(self, shape: Any, name: str, device: Any, timer: timing.Timer, settings: Any) -> None:
        self._shape = shape
        self._pass = name
        self._device = device
        self._timer = timer
        self._settings = settings
        self._sets: list[Any] = []

    def measure(self, present: Sequence[Peer]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """(rows, why others have none)."""
        failed: dict[str, str] = {}
        facts: dict[str, dict[str, Any]] = {}
        first = self._inputs(0)
        self._sets = [first]
        for peer in present:
            why = peer.unsupported(self._shape, self._pass)
            if why is None:
                why, facts[peer.name] = self._admit(peer, first)
            if why is not None:
                failed[peer.name] = why
        self._forget()
        running = [peer for peer in present if peer.name not in failed]
        copies, flush = timing.rotation(self._timer.cold_bytes, self._set_bytes(first))
        self._sets += [self._inputs(number) for number in range(1, copies)]
        samples: dict[str, list[float]] = {peer.name: [] for peer in running}
        group: dict[str, int] = {}
        for number in range(self._settings.rounds):
            for peer in running if number % 2 == 0 else reversed(running):
                if peer.name in failed:
                    continue
                launches: list[Callable[[], Any]] = []
                try:
                    launches = self._replays(peer) if self._settings.replay else self._launches(peer)
                    timing.heat(self._timer, launches, self._settings.heat_s / (1 if number == 0 else 10))
                    if peer.name not in group:
                        one = timing.median(self._timer.sample(launches, 3, 1, flush))
                        group[peer.name] = timing.group_size(one, len(launches), flush)
                    samples[peer.name] += self._timer.sample(launches, self._settings.samples, group[peer.name], flush)
                except Exception as error:
                    failed[peer.name] = reason_of(error, self._timer)
                launches.clear()
                if peer.name in failed:
                    self._recover()
        self._sets.clear()
        rows = [self._row(peer.name, samples[peer.name], facts[peer.name]) for peer in running if peer.name not in failed]
        return rows, failed

    def _row(self, impl: str, samples: list[float], facts: dict[str, Any]) -> dict[str, Any]:
        return {
            "op": self._shape.op,
            "pass": self._pass,
            "impl": impl,
            **self._fields(),
            "ms": round(timing.median(samples) / 1e3, 5),
            "ms_p10": round(timing.quantile(samples, 0.1) / 1e3, 5),
            "ms_p90": round(timing.quantile(samples, 0.9) / 1e3, 5),
            **facts,
        }

    def _admit(self, peer: Peer, inputs: Any) -> tuple[str | None, dict[str, Any]]:
        """Load, check and weigh one implementation: (why it is left out, fields of its row)."""
        try:
            facts = dict(peer.ready(self._shape, inputs, self._pass))
            errors = self._errors(peer, inputs)
            wrong = {name: value for name, value in errors.items() if not value <= self._limit(name)}
            if wrong:
                return "wrong: " + ", ".join(f"{name} is off by {value:.2g}" for name, value in wrong.items()), {}
            facts["rel_rms"] = {name: float(f"{value:.4g}") for name, value in self._summary(errors).items()}
            peak = self._peak_mib(peer, inputs)
            return None, facts if peak is None else {**facts, "peak_mib": peak}
        except Exception as error:
            why = reason_of(error, self._timer)
        # Only now, as the exception kept the tensors of the failed call alive.
        self._recover()
        return why, {}

    def _recover(self) -> None:
        gc.collect()
        self._timer.release_memory()

    def _launches(self, peer: Peer) -> list[Callable[[], Any]]:
        if self._pass == "forward":
            return [lambda one=one: self._forward(peer, one) for one in self._sets]
        if self._pass == "both":
            return [lambda one=one: self._both(peer, one) for one in (one.with_grad() for one in self._sets)]
        import torch

        launches = []
        # Two graphs suffice: what they hold beside the inputs is larger than the cache, and for unfused peers huge.
        for one in (one.with_grad() for one in self._sets[:2]):
            out, leaves = peer.forward(one), self._leaves(peer, one)
            launches.append(
                lambda one=one, out=out, leaves=leaves: torch.autograd.grad(out, leaves, one.grad, retain_graph=True)
            )
        return launches

    def _replays(self, peer: Peer) -> list[Callable[[], Any]]:
        """The same, each as the replay of a graph; a backward runs on the stream of its forward, so both are on one aside."""
        import torch

        device = torch.device(self._device)
        if device.type != "cuda":
            raise MeasurementFailed("replays need a CUDA device; leave --replay out")
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            launches = self._launches(peer)
            for launch in launches:
                launch()
        torch.cuda.current_stream(device).wait_stream(side)
        graphs = []
        for launch in launches:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                launch()
            graphs.append(graph)
        # The call stays with its graph, which reads what the call holds.
        return [lambda graph=graph, launch=launch: graph.replay() for graph, launch in zip(graphs, launches, strict=True)]

    def _forward(self, peer: Peer, inputs: Any) -> Any:
        import torch

        with torch.no_grad():
            return peer.forward(inputs)

    def _both(self, peer: Peer, inputs: Any) -> Any:
        import torch

        return torch.autograd.grad(peer.forward(inputs), self._leaves(peer, inputs), inputs.grad)

    def _peak_mib(self, peer: Peer, inputs: Any) -> float | None:
        import torch

        if torch.device(self._device).type != "cuda":
            return None
        gc.collect()
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = self._forward(peer, inputs) if self._pass == "forward" else self._both(peer, inputs.with_grad())
        self._timer.wait()
        del result
        return round((torch.cuda.max_memory_allocated(self._device) - before) / 2**20, 1)

    def _fields(self) -> dict[str, Any]:
        """Fields of a row that say which problem it is."""
        raise NotImplementedError

    def _leaves(self, peer: Peer, inputs: Any) -> tuple[Any, ...]:
        """The tensors whose gradients are taken."""
        raise NotImplementedError

    def _errors(self, peer: Peer, inputs: Any) -> dict[str, float]:
        """Relative RMS errors against float64, by tensor."""
        raise NotImplementedError

    def _limit(self, name: str) -> float:
        """Largest error of a tensor that is not yet wrong."""
        return WRONG

    def _summary(self, errors: dict[str, float]) -> dict[str, float]:
        """Those of them that a row has."""
        return errors

    def _forget(self) -> None:
        """Called when all implementations are checked and none is timed yet: what only the checks needed can go."""

    def _inputs(self, number: int) -> Any:
        """The tensors of a call: one set of those that rotate. They have `grad`, and `with_grad()` for leaves of their own."""
        raise NotImplementedError

    def _set_bytes(self, inputs: Any) -> int:
        """Bytes of a set that a pass reads."""
        raise NotImplementedError


def relative_rms(value: Any, reference: Any) -> float:
    """||value - reference|| / ||reference|| in float64; inf where it is not finite."""
    difference = float((value.double() - reference).norm())
    norm = float(reference.norm())
    found = difference / norm if norm else (0.0 if difference == 0 else float("inf"))
    return found if found == found else float("inf")
