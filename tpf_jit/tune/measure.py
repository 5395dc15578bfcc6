"""From a compiled candidate to an outcome: load, check, time. Everything of a sweep that touches the device is behind here.

`Measurer` is the seam: a sweep hands it plain data (`Job`) and gets plain data (`Outcome`), so an implementation may live in
another process or on another machine. `WorkloadMeasurer` is the implementation: it takes its clock (`Timer`) and its way to
load a kernel as arguments, so tests drive the very same code with a deterministic clock and no GPU; `cuda_measurer` builds the
real one.

Method of the protocol `PROTOCOL`:
  - right before fast: no candidate is timed before `check.Checker` has passed it;
  - the GPU is heated before timing; inputs are rotated through more than twice the L2 cache (see `timing`);
  - a candidate whose first launches take more than `stop_ratio` times the best so far is dropped at once (status `slow`);
  - a candidate close to the incumbent is timed in alternation with it, so that drift of the clocks hits both;
  - finalists are timed in rounds of mirrored order; rounds in which the whole field ran slow are dropped;
  - launches of more than 5 ms are sampled fewer times, in proportion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tpf_jit.errors import MeasurementFailed, NoKernel
from tpf_jit.tune import timing
from tpf_jit.tune.check import Checker, configure
from tpf_jit.tune.timing import DeviceHung, Launch, Timer, steady_rounds

PROTOCOL = "events-rotated-cold-1"
"""Id of the method above; a change that moves the figures raises the number at its end."""

DETAIL_LIMIT = 2000
"""Characters kept of an error message."""


@dataclass(frozen=True)
class Job:
    """A compiled candidate: what is to be measured.

    `binary` is the path of the object, or its bytes where no cache could be written. `kind` is ``so`` or ``o``.
    """

    key: str
    config: Any
    binary: Path | bytes
    symbol: str
    kind: str = "so"


@dataclass
class Outcome:
    """What became of a job. `fatal`: the device takes no more work, the process must end."""

    status: str
    detail: str = ""
    samples_us: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """Device facts of the moment: ``clocks_before`` and ``clocks_after`` (MHz, W, degrees C), ``rotated_sets``, ``group``."""
    against_us: float | None = None
    """Median of the incumbent, timed in alternation, in us."""
    fatal: bool = False

    @property
    def median_us(self) -> float | None:
        """Median of the samples."""
        return timing.median(self.samples_us) if self.samples_us else None

    @property
    def relative(self) -> float | None:
        """Time over that of the incumbent measured beside it; below 1 is faster."""
        return self.median_us / self.against_us if self.samples_us and self.against_us else None


class Measurer(Protocol):
    """Measures the candidates of one problem on one device."""

    protocol: str
    """Id of the method, ending in its version number."""
    device: dict[str, Any]
    """Facts of the device, as `Device.facts()` gives them: at least ``name``."""

    def measure(self, job: Job, best_us: float | None = None, incumbent: Job | None = None) -> Outcome:
        """Check and time one candidate. Never raises for what the candidate does; KeyboardInterrupt passes through.

        `best_us` is the best time so far, `incumbent` the candidate it belongs to.
        """
        ...

    def verify(self, job: Job) -> Outcome:
        """Check one candidate without timing it."""
        ...

    def shootout(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        """Check finalists once more and time them interleaved; outcome by job key. One that fails does not stop the others."""
        ...

    def close(self) -> None:
        """Free what is held on the device."""
        ...


@dataclass(frozen=True)
class MeasureSettings:
    """How much to measure. The defaults are those `PROTOCOL` stands for; only tests and experiments change them."""

    samples: int = 24
    """Timed samples of a candidate, taken in blocks of `block`."""
    block: int = 6
    first_look: int = 3
    """Samples on which a hopeless candidate is stopped."""
    stop_ratio: float = 3.0
    near: float = 1.3
    """A candidate within this factor of the incumbent is timed in alternation with it."""
    rounds: int = 6
    """Rounds of the shoot-out; even, so that forward and mirrored order are equally frequent."""
    round_samples: int = 10
    hopeless: float = 1.1
    """Finalists that took this many times as long as the best in the first two rounds are spared the others."""
    heat_s: float = 0.3
    """Heating after the device was idle, in seconds; a tenth of it when it was not."""
    long_us: float = 5000.0
    """Launches that take longer are sampled fewer times, as if each took this; at least twice. They are many times the clock's
    and the launch's noise, and at 30 ms a shoot-out of eight would take 14 s."""
    slow_round: float = 1.05
    """A round whose whole field took this much longer than the best round's is dropped (at most half of the rounds are)."""


class WorkloadMeasurer:
    """The measurer: checks and times kernels in this process.

    Args:
        template: template of the candidates.
        shape: the problem.
        timer: the device's clock.
        load: `load(binary, symbol, kind)` -> callable kernel (`tpf_jit.loader.load`).
        device: torch device (or its name) for inputs.
        facts: device facts for the rows.
        settings: how much to measure.
        options: `seed` (of the inputs; fresh if left out), `clocks` (() -> dict), `lock` (file locked while timing),
            `memory_bytes` (device memory free for rotated inputs).
    """

    protocol = PROTOCOL

    def __init__(
        self,
        template: Any,
        shape: Any,
        timer: Timer,
        load: Callable[..., Any],
        device: Any = "cpu",
        facts: dict[str, Any] | None = None,
        settings: MeasureSettings | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        options = dict(options or {})
        self.device = facts or {"name": str(device)}
        self._template = template
        self._shape = shape
        self._torch_device = device
        self._timer = timer
        self._load = load
        self._settings = settings or MeasureSettings()
        self._checker = Checker(template, shape, device, seed=options.pop("seed", None), wait=timer.wait)
        self._clocks = options.pop("clocks", dict)
        self._lock: Path | None = options.pop("lock", None)
        self._memory: int | None = options.pop("memory_bytes", None)
        if options:
            raise MeasurementFailed(f"unknown measuring options: {', '.join(sorted(options))}")
        self._workload: Any = None
        self._sets: list[Any] = []
        self._flush = False
        self._group = 0
        self._share = 1.0  # of the samples that settings ask for
        self._wanted = 1
        self._busy = -1e9
        self._loaded: dict[str, Any] = {}
        self.announce: Callable[[str], None] = lambda key: None
        """Told the key of a job before it is run: should it take the process down, the watcher knows which one did."""

    def alive(self) -> bool:
        """Whether the device takes work from this process."""
        return self._timer.alive()

    def measure(self, job: Job, best_us: float | None = None, incumbent: Job | None = None) -> Outcome:
        checked = self.verify(job)
        if checked.status != "ok":
            return checked
        try:
            outcome = self._time(job, best_us, incumbent)
        except Exception as error:
            outcome = self._failure(job, error)
        outcome.errors = checked.errors
        outcome.detail = outcome.detail or checked.detail
        return outcome

    def verify(self, job: Job) -> Outcome:
        self.announce(job.key)
        try:
            verdict = self._checker.verdict(self._function(job), job.config)
        except Exception as error:
            return self._failure(job, error)
        return Outcome(verdict.status, verdict.detail, errors=verdict.errors)

    def shootout(self, jobs: Sequence[Job]) -> dict[str, Outcome]:
        settings = self._settings
        outcomes: dict[str, Outcome] = {}
        for job in jobs:
            outcomes[job.key] = self.verify(job)
            if outcomes[job.key].fatal:
                return {job.key: outcomes[job.key]}
        rounds: dict[str, list[list[float]]] = {job.key: [] for job in jobs}
        with timing.exclusive(self._lock):
            before = self._clocks()
            field = list(jobs)
            for number in range(settings.rounds):
                if number == 2:  # one forward, one mirrored
                    sound = {key: sum(taken, []) for key, taken in rounds.items() if outcomes[key].status == "ok"}
                    hopeful = timing.contenders(sound, settings.hopeless)
                    field = [job for job in field if job.key in hopeful]
                for job in field if number % 2 == 0 else reversed(field):
                    if outcomes[job.key].status != "ok":
                        continue
                    self.announce(job.key)
                    try:
                        launches = self._prepare(job)
                        self._heat(launches)
                        rounds[job.key].append(self._sample(launches, settings.round_samples))
                    except Exception as error:
                        outcomes[job.key] = self._failure(job, error)
                        if outcomes[job.key].fatal:
                            return {job.key: outcomes[job.key]}
            state = self._state(before)
        fair = [rounds[key] for key, outcome in outcomes.items() if outcome.status == "ok"]
        steady = steady_rounds([taken for taken in fair if len(taken) == settings.rounds], settings.slow_round)
        for key, outcome in outcomes.items():
            if outcome.status == "ok":
                kept = [number for number in steady if number < len(rounds[key])] or range(len(rounds[key]))
                outcome.samples_us = [value for number in kept for value in rounds[key][number]]
                outcome.state = dict(state)
                left = "" if len(rounds[key]) == settings.rounds else ", then left out as far behind"
                outcome.detail += f"; shoot-out of {len(jobs)}, {len(kept)} of {len(rounds[key])} rounds kept{left}"
        return outcomes

    def close(self) -> None:
        self._loaded.clear()
        self._sets.clear()
        self._checker.close()
        if self._timer.alive():
            self._timer.release_memory()

    def _time(self, job: Job, best_us: float | None, incumbent: Job | None) -> Outcome:
        settings = self._settings
        with timing.exclusive(self._lock):
            launches = self._prepare(job)
            before = self._clocks()
            self._heat(launches)
            look = self._sample(launches, settings.first_look)
            first_us = timing.median(look)
            if best_us is not None and first_us > settings.stop_ratio * best_us:
                detail = f"stopped after {len(look)} samples: more than {settings.stop_ratio:g} times the best, {best_us:.1f} us"
                return Outcome("slow", detail, look, state=self._state(before))
            rival: list[Launch] = []
            if incumbent is not None and best_us is not None and first_us <= settings.near * best_us:
                rival = self._rival(incumbent)
            mine: list[float] = []
            theirs: list[float] = []
            for number in range(max(1, settings.samples // settings.block)):
                turns = [(launches, mine), (rival, theirs)] if rival else [(launches, mine)]
                for turn, taken in turns if number % 2 == 0 else reversed(turns):
                    taken += self._sample(turn, settings.block)
            against = timing.median(theirs) if theirs else None
            return Outcome("ok", "", mine, state=self._state(before), against_us=against)

    def _rival(self, incumbent: Job) -> list[Launch]:
        """The incumbent's launches; empty where memory holds only one candidate at a time."""
        try:
            launches = self._bind(self._function(incumbent))
            self._heat(launches)
            return launches
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            self._timer.release_memory()
            return []

    def _heat(self, launches: Sequence[Launch]) -> None:
        """Full heat after an idle second (candidates come when their compile is done), else a tenth of it."""
        idle = time.monotonic() - self._busy > 1.0
        timing.heat(self._timer, launches, self._settings.heat_s if idle else self._settings.heat_s / 10)
        self._busy = time.monotonic()

    def _sample(self, launches: Sequence[Launch], count: int) -> list[float]:
        if not self._group:
            one = timing.median(self._timer.sample(launches, 3, 1, self._flush))
            self._group = timing.group_size(one, len(launches), self._flush)
            self._share = min(1.0, self._settings.long_us / one) if one > 0 else 1.0
        samples = self._timer.sample(launches, max(2, round(count * self._share)), self._group, self._flush)
        self._busy = time.monotonic()
        return samples

    def _function(self, job: Job) -> Any:
        if job.key not in self._loaded:
            try:
                loaded = self._load(job.binary, job.symbol, job.kind)
            except NoKernel:
                if isinstance(job.binary, bytes):
                    raise
                # A cache on a file system mounted noexec, or an entry pruned since it was compiled.
                loaded = self._load(job.binary.read_bytes(), job.symbol, job.kind)
            self._loaded[job.key] = loaded
        return self._loaded[job.key]

    def _bind(self, function: Any) -> list[Launch]:
        return [self._workload.prepare(function, inputs) for inputs in self._sets]

    def _prepare(self, job: Job) -> list[Launch]:
        """Launches over all rotated sets; fewer sets where memory runs out."""
        function = self._function(job)
        if self._workload is None:
            self._workload = self._template.workload(self._shape, self._torch_device, self._checker.seed)
            copies, self._flush = timing.rotation(self._timer.cold_bytes, self._workload.bytes_per_set)
            if self._memory:
                # Inputs and their laid-out copies for two candidates at a time.
                copies = max(1, min(copies, self._memory // (4 * max(1, self._workload.bytes_per_set))))
                self._flush = copies * self._workload.bytes_per_set <= self._timer.cold_bytes or copies < 2
            self._wanted = copies
        configure(self._workload, job.config)
        while True:
            try:
                while len(self._sets) < self._wanted:
                    self._sets.append(self._workload.make_inputs(self._checker.seed + 1 + len(self._sets)))
                launches = self._bind(function)
                launches[0]()
                self._timer.wait()
                return launches
            except Exception as error:
                if not _is_out_of_memory(error) or self._wanted <= 1:
                    raise
            self._wanted = max(1, min(self._wanted, len(self._sets) or 1) // 2)
            self._flush = True
            del self._sets[self._wanted :]
            self._timer.release_memory()

    def _state(self, before: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"rotated_sets": len(self._sets), "group": self._group, "flushed": self._flush}
        after = self._clocks()
        if before or after:
            state |= {"clocks_before": before, "clocks_after": after}
        return state

    def _failure(self, job: Job, error: Exception) -> Outcome:
        self._loaded.pop(job.key, None)
        text = f"{type(error).__name__}: {error}".strip()[:DETAIL_LIMIT]
        if isinstance(error, DeviceHung):
            return Outcome("launch_error", text, fatal=True)
        if _is_out_of_memory(error):
            self._timer.release_memory()
            return Outcome("launch_error", f"out of device memory: {text}"[:DETAIL_LIMIT])
        return Outcome("launch_error", text, fatal=not self._timer.alive())


def cuda_measurer(
    template: Any, shape: Any, device: Any, index: int, lock_folder: Path | None = None, seed: int | None = None
) -> WorkloadMeasurer:
    """The real measurer, for CUDA device `index` with facts `device` (a `tpf_jit.device.Device`).

    `lock_folder` holds the file that keeps two tuners from timing the same GPU at once.
    """
    import torch

    from tpf_jit import compiler
    from tpf_jit import device as device_module

    timer = timing.CudaTimer(index, device.l2_bytes)
    torch.cuda.set_device(index)
    free_bytes, _ = torch.cuda.mem_get_info(index)
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", index)
    options = {
        "clocks": lambda: device_module.clocks(index),
        "lock": lock_folder / f"gpu-{uuid}.lock" if lock_folder is not None else None,
        "memory_bytes": free_bytes,
        "seed": seed,
    }
    load = compiler.backend(template.backend).load
    return WorkloadMeasurer(template, shape, timer, load, f"cuda:{index}", device_facts(device), options=options)


def device_facts(device: Any) -> dict[str, Any]:
    """Facts of a `Device` as rows keep them."""
    if hasattr(device, "facts"):
        return dict(device.facts())
    names = ("name", "compute_capability", "sms", "l2_bytes", "memory_bytes", "driver")
    return {name: getattr(device, name) for name in names if getattr(device, name, None) is not None}


def _is_out_of_memory(error: Exception) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()
