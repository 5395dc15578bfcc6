"""Accuracy of triangle attention and its gradients: every implementation against float64, and against itself.

A case is a crop, a head dim, a family of inputs and a seed. Output, dq, dk, dv and dbias of each implementation are compared with
float64 on the same inputs, computed on the device over all rows (dbias sums over them), and the call is repeated and compared bit
by bit: under the smallest workspace every other time and, where asked for, beside work on another stream.

Results go to a work file as they are measured (`accuracy_work`), so that a run may stop and go on: `AccuracySettings.budget_s`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from tpf_jit.bench import float64
from tpf_jit.bench.accuracy_record import compose, worst
from tpf_jit.bench.accuracy_work import WorkFile
from tpf_jit.bench.concurrent_load import concurrent_load
from tpf_jit.bench.environment import bench_device, record_head
from tpf_jit.bench.interleaved import reason_of
from tpf_jit.bench.peer_base import Inputs, Peer, differentiated
from tpf_jit.bench.peers import peers
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.tune import timing

MARGIN = 1.2
"""How much longer than before the next case may take before it no longer fits the budget."""
SAY_S = 10.0
"""Seconds between two words about progress."""


@dataclass(frozen=True)
class AccuracySettings:
    """What to judge, and how.

    Attributes:
        crops, head_dims, families, seeds: the grid; seeds from the first up to before the second.
        impls: names of the implementations; those that compute the operator and its gradients when None.
        heads, rows, dtype, bias_dtype, mask: of all problems, as in `TriangleAttentionShape`.
        repeats: calls that are compared bit by bit, the first included.
        load: repeats run beside work on another stream.
        budget_s: start no case that would not be done after so many seconds; None for no limit.
        retry: whether results that failed earlier are measured again.
    """

    crops: tuple[int, ...] = (384, 640, 768)
    head_dims: tuple[int, ...] = (16, 32)
    families: tuple[str, ...] = ("normal", "trained_like")
    seeds: tuple[int, int] = (0, 100)
    impls: list[str] | None = None
    heads: int = 4
    rows: int | None = None
    dtype: str = "bfloat16"
    bias_dtype: str | None = None
    mask: str = "none"
    repeats: int = 5
    load: bool = False
    budget_s: float | None = None
    retry: bool = False

    def shape(self, crop: int, head_dim: int) -> TriangleAttentionShape:
        """The problem of a crop and head dim."""
        options = {"heads": self.heads, "rows": self.rows, "dtype": self.dtype, "bias_dtype": self.bias_dtype, "mask": self.mask}
        return TriangleAttentionShape(crop=crop, head_dim=head_dim, **options)

    def cases(self) -> Iterator[tuple[int, int, str, int]]:
        """Crop, head dim, family and seed of every case; seed by seed, so that what is done early covers all problems."""
        for seed, family in product(range(*self.seeds), self.families):
            yield from ((crop, dim, family, seed) for crop, dim in product(self.crops, self.head_dims))

    def facts(self) -> dict[str, Any]:
        """What all results of a work file must have in common."""
        same = ("heads", "rows", "dtype", "bias_dtype", "mask", "repeats", "load")
        return {name: getattr(self, name) for name in same}


@dataclass(frozen=True)
class AccuracyOutcome:
    """A record of all results of the work file, and how many cases of the grid are done."""

    record: dict[str, Any]
    done: int
    cases: int


def accuracy_attention(
    settings: AccuracySettings | None = None,
    device: str | None = None,
    command: str = "",
    work: Any = None,
    resume: bool = False,
    say: Callable[[str], None] | None = None,
) -> AccuracyOutcome:
    """Judge every implementation on every case of the grid that the work file lacks.

    Args:
        settings: see `AccuracySettings`.
        device: torch device; the current CUDA device when left out. ``cpu`` judges the PyTorch paths, on small crops.
        command: command line for the record.
        work: path of the work file; results are kept in memory only when left out.
        resume: go on with a work file that is there.
        say: told about plans and progress, for people.

    Returns:
        An outcome whose record is of kind ``accuracy.attention``.

    Raises:
        MeasurementFailed: no CUDA device, nothing could be judged, or the device was lost (the work file keeps what was done).
        InvalidInput: an unknown implementation or family, a grid without cases, or a work file of something else.
    """
    settings = settings or AccuracySettings()
    _check(settings)
    chosen = peers(settings.impls) if settings.impls is not None else [peer for peer in peers() if peer.judged]
    gpu, timer = bench_device(device)
    head = record_head("accuracy.attention", command, gpu, {})
    versions = {name: version for name, version in head["versions"].items() if name != "peers"}
    same = {"device": head["device"]["name"], "versions": versions, "source_hash": head["source_hash"], **settings.facts()}
    kept = WorkFile(work, same, resume)
    absent = {peer.name: why for peer in chosen if (why := peer.absent()) is not None}
    present = [peer for peer in chosen if peer.name not in absent]
    kept.add_run({"command": command, "date": head["date"], "peers": {peer.name: peer.version() for peer in present}})
    done, cases = _Suite(settings, present, gpu, timer, kept).run(say or (lambda text: None))
    if not kept.results:
        reasons = "; ".join(f"{name}: {why}" for name, why in absent.items()) or "no case fits the budget, or no peer takes any"
        raise MeasurementFailed(f"nothing could be judged: {reasons}")
    head = record_head("accuracy.attention", command, gpu, {})
    return AccuracyOutcome(compose(head, settings, kept, absent, present), done, cases)


def _check(settings: AccuracySettings) -> None:
    from tpf_jit.templates.triangle_attention.inputs import FAMILIES

    for name in settings.families:
        if name not in FAMILIES:
            raise InvalidInput.of("families", repr(name), ", ".join(FAMILIES))
    if not list(settings.cases()):
        raise InvalidInput.of("seeds", f"{settings.seeds[0]}:{settings.seeds[1]}", "at least one seed, crop, head dim and family")
    if settings.repeats < 1:
        raise InvalidInput.of("repeats", settings.repeats, "at least one")


@dataclass
class _Suite:
    settings: AccuracySettings
    present: Sequence[Peer]
    device: Any
    timer: timing.Timer
    kept: WorkFile
    warm: set[tuple[str, int, int]] = field(default_factory=set)
    taken: dict[tuple[int, int], float] = field(default_factory=dict)
    started: float = field(default_factory=lambda: time.perf_counter())

    def run(self, say: Callable[[str], None]) -> tuple[int, int]:
        """Judge what is missing, as far as the budget goes; (cases that are done now, all cases)."""
        cases = [(case, self._missing(case)) for case in self.settings.cases()]
        todo = [(case, missing) for case, missing in cases if missing]
        finished = len(cases) - len(todo)
        plan = f"{len(todo)} of {len(cases)} cases to do"
        if self.device.type == "cuda":
            reference = sum(float64.estimate_s(self.settings.shape(*case[:2])) for case, _ in todo)
            plan += f"; float64 takes about {reference:.0f} s of an H200 for them"
        say(plan)
        said = -math.inf
        for number, (case, missing) in enumerate(todo):
            if not self._fits(case):
                left = self._left(todo[number:])
                say(f"the budget is spent: {finished} of {len(cases)} cases are done, about {left:.0f} s are left to do")
                break
            text = self._case(case, missing)
            finished += 1
            if time.perf_counter() - said >= SAY_S or number + 1 == len(todo):
                say(f"{text}; {finished} of {len(cases)}, about {self._left(todo[number + 1:]):.0f} s to go")
                said = time.perf_counter()
        return finished, len(cases)

    def _missing(self, case: tuple[int, int, str, int]) -> list[Peer]:
        shape = self.settings.shape(*case[:2])
        return [peer for peer in self.present if self._wanted((*case, peer.name)) and peer.unsupported(shape, "both") is None]

    def _wanted(self, key: Any) -> bool:
        result = self.kept.results.get(key)
        return result is None or self.settings.retry and "failed" in result

    def _expected(self, crop: int, head_dim: int) -> float:
        """Seconds of one case, from those of its problem or scaled from another's; 0 while nothing is known."""
        if (crop, head_dim) in self.taken:
            return self.taken[crop, head_dim]
        scaled = [seconds * (crop / other) ** 3 for (other, _), seconds in self.taken.items()]
        return max(scaled, default=0.0)

    def _left(self, todo: Sequence[tuple[Any, Any]]) -> float:
        return sum(self._expected(*case[:2]) for case, _ in todo)

    def _fits(self, case: Any) -> bool:
        if self.settings.budget_s is None:
            return True
        return time.perf_counter() - self.started + MARGIN * self._expected(*case[:2]) < self.settings.budget_s

    def _case(self, case: tuple[int, int, str, int], missing: Sequence[Peer]) -> str:
        """Judge the implementations that lack this case; a line about it."""
        crop, head_dim, family, seed = case
        inputs = self._inputs(crop, head_dim, family, seed)
        failed = {peer.name: why for peer in missing if (why := self._ready(peer, crop, head_dim, inputs)) is not None}
        self.timer.wait()
        start = time.perf_counter()
        yardstick = float64.Yardstick(float64.outputs(inputs), float64.without_keys(inputs))
        words = []
        for peer in missing:
            why = failed.get(peer.name)
            result: dict[str, Any] = {}
            if why is None:
                why, result = self._attempt(partial(self._measure, peer, inputs, yardstick))
            if why is not None:
                result = {"failed": why}
            self.kept.add((*case, peer.name), result)
            words.append(f"{peer.name} {'failed' if 'failed' in result else worst(result)}")
        seconds = time.perf_counter() - start
        known = self.taken.get((crop, head_dim), math.inf)
        self.taken[crop, head_dim] = min(known, seconds)
        return f"N={crop} D={head_dim} {family} seed {seed}: {', '.join(words)}; {seconds:.2f} s"

    def _ready(self, peer: Peer, crop: int, head_dim: int, inputs: Inputs) -> str | None:
        """Compile, load and call once what judges a problem for the first time, as that takes longer than a case."""
        if (peer.name, crop, head_dim) in self.warm:
            return None

        def warm_up() -> dict[str, Any]:
            facts = peer.ready(self.settings.shape(crop, head_dim), inputs, "both")
            self._call(peer, inputs)
            if facts:
                self.kept.add_run({"peers": {}, "facts": {peer.name: {f"N={crop} D={head_dim}": facts}}})
            return {}

        why, _ = self._attempt(warm_up)
        if why is None:
            self.warm.add((peer.name, crop, head_dim))
        return why

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> tuple[str | None, dict[str, Any]]:
        """(why it failed, what came out)."""
        try:
            return None, work()
        except Exception as error:
            why = reason_of(error, self.timer)
        # Only now, as the exception kept the tensors of the failed call alive.
        gc.collect()
        self.timer.release_memory()
        return why, {}

    def _measure(self, peer: Peer, inputs: Inputs, yardstick: float64.Yardstick) -> dict[str, Any]:
        import torch

        first = self._call(peer, inputs)
        errors = yardstick.errors(first)
        same = []
        for number in range(1, self.settings.repeats):
            with concurrent_load(self.device if self.settings.load else None):
                if number % 2:
                    with peer.perturbed():
                        again = self._call(peer, inputs)
                else:
                    again = self._call(peer, inputs)
                same.append(torch.stack([float64.same_bits(value, again[name]) for name, value in first.items()]))
        equal = torch.stack(same).all(0).tolist() if same else [True] * len(first)
        rel_rms = {name: value if math.isfinite(value) else None for name, (value, _) in errors.items()}
        max_abs = {name: value if math.isfinite(value) else None for name, (_, value) in errors.items()}
        return {"rel_rms": rel_rms, "max_abs": max_abs, "equal": dict(zip(first, equal, strict=True))}

    def _call(self, peer: Peer, inputs: Inputs) -> dict[str, Any]:
        import torch

        leaves = inputs.with_grad()
        out = peer.forward(leaves)
        gradients = torch.autograd.grad(out, differentiated(peer, leaves), inputs.grad)
        return dict(zip(float64.TENSORS, (out.detach(), *gradients), strict=False))

    def _inputs(self, crop: int, head_dim: int, family: str, seed: int) -> Inputs:
        from tpf_jit.templates.triangle_attention.inputs import make_inputs

        made = make_inputs(self.settings.shape(crop, head_dim), self.device, seed, family, with_grad_out=True)
        return Inputs(made.q, made.k, made.v, made.bias, made.mask, made.grad_out, head_dim**-0.5)
