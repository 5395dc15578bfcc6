"""Clocks: what turns "launch this" into microseconds on a device. Shared by the tuner and the benches.

A `Timer` is the one place that knows the device. `CudaTimer` is the real one, `WallTimer` times CPU code, and tests bring a
deterministic one. Nothing here knows what is being launched.

How `CudaTimer` measures, and why:
  - event pairs on the current stream around each sample, several samples enqueued behind a short delay kernel, so that the
    host is ahead of the device and launch overhead is not counted (a starved stream times the host);
  - a sample of a kernel shorter than ~100 us is a group of launches (an event pair costs 1-2 us itself);
  - cold L2: launches walk over copies of the inputs that together exceed twice the cache, and where copies that large are
    not sensible (tiny problems) a buffer of that size is overwritten before each sample, outside the event pair;
  - waiting is polling with a deadline: a kernel that hangs is reported instead of blocking the process for good.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Launch = Callable[[], Any]

GROUP_TARGET_US = 100.0
"""A sample lasts at least about this long; shorter kernels are grouped."""
MAX_GROUP = 64


class DeviceHung(RuntimeError):
    """The device did not finish in time. The context cannot be used any more: only ending the process frees it."""


class Timer(Protocol):
    """Times launches on one device; every figure in microseconds."""

    name: str
    """What records call this timer, e.g. ``cuda events``."""
    cold_bytes: int
    """Rotated data must exceed this for a launch to find nothing of its inputs in the cache; 0 = no cache to speak of."""

    def sample(self, launches: Sequence[Launch], count: int, group: int = 1, flush: bool = False) -> list[float]:
        """`count` samples; each is the mean of `group` launches taken in turn from `launches`. `flush`: cold cache first."""
        ...

    def wait(self) -> None:
        """Until the device is idle. Raises what went wrong on it, or DeviceHung."""
        ...

    def alive(self) -> bool:
        """Whether the device still takes work after an error (a CUDA context with a sticky error does not)."""
        ...

    def release_memory(self) -> None:
        """Give cached device memory back."""
        ...


class CudaTimer:
    """Times work on a CUDA device with events (see the module docstring).

    Args:
        index: CUDA device index.
        l2_bytes: size of its L2 cache in bytes.
        hang_s: seconds a batch of launches may take before it counts as hung.
    """

    name = "cuda events"

    def __init__(self, index: int, l2_bytes: int, hang_s: float = 60.0) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", index)
        self._hang_s = hang_s
        self._flush_buffer: Any = None
        self.cold_bytes = 2 * l2_bytes
        self._turn = 0
        self._host_us = 20.0

    def sample(self, launches: Sequence[Launch], count: int, group: int = 1, flush: bool = False) -> list[float]:
        torch = self._torch
        samples: list[float] = []
        with torch.cuda.device(self._device):
            if flush and self._flush_buffer is None:
                self._flush_buffer = torch.empty(max(self.cold_bytes, 1 << 20), dtype=torch.uint8, device=self._device)
            while len(samples) < count:
                # The launch queue holds about 1,000 entries: a longer batch would make the host wait inside it.
                batch = min(count - len(samples), max(1, 128 // group))
                pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(batch)]
                # Long enough to enqueue the batch, by the last batch's host time; ~2,000 cycles are a microsecond.
                torch.cuda._sleep(int(2000 * min(10_000.0, 50.0 + 1.2 * self._host_us * batch)))
                enqueue = time.perf_counter()
                for start, end in pairs:
                    if flush:
                        self._flush_buffer.zero_()
                    start.record()
                    for _ in range(group):
                        launches[self._turn % len(launches)]()
                        self._turn += 1
                    end.record()
                self._host_us = 1e6 * (time.perf_counter() - enqueue) / batch
                self._wait_for(pairs[-1][1])
                samples += [1000.0 * start.elapsed_time(end) / group for start, end in pairs]
        return samples

    def wait(self) -> None:
        with self._torch.cuda.device(self._device):
            event = self._torch.cuda.Event()
            event.record()
            self._wait_for(event)

    def alive(self) -> bool:
        try:
            self.wait()
            return int(self._torch.ones(1, device=self._device).item()) == 1
        except Exception:
            return False

    def release_memory(self) -> None:
        self._flush_buffer = None
        self._torch.cuda.empty_cache()

    def _wait_for(self, event: Any) -> None:
        deadline = time.monotonic() + self._hang_s
        while not event.query():
            if time.monotonic() > deadline:
                raise DeviceHung(f"no result from the GPU within {self._hang_s:g} s")
            time.sleep(20e-6)


class WallTimer:
    """Times CPU code with the process's monotonic clock. `launches` must have finished when they return."""

    name = "perf_counter"
    cold_bytes = 0

    def __init__(self) -> None:
        self._turn = 0

    def sample(self, launches: Sequence[Launch], count: int, group: int = 1, flush: bool = False) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            for _ in range(group):
                launches[self._turn % len(launches)]()
                self._turn += 1
            samples.append(1e6 * (time.perf_counter() - start) / group)
        return samples

    def wait(self) -> None:
        pass

    def alive(self) -> bool:
        return True

    def release_memory(self) -> None:
        pass


def rotation(cold_bytes: int, bytes_per_set: int, most: int = 32) -> tuple[int, bool]:
    """(copies of the inputs to rotate, whether the cache must be flushed as well).

    Copies total more than `cold_bytes`, at least two; a problem so small that `most` copies do not suffice is flushed.
    """
    copies = max(2, min(most, cold_bytes // max(1, bytes_per_set) + 1))
    return copies, copies * bytes_per_set <= cold_bytes


def group_size(one_launch_us: float, copies: int, flush: bool) -> int:
    """Launches a sample needs to last about `GROUP_TARGET_US`: a power of two, so near-equal kernels get equal groups.

    With a flushed cache a copy may be used once a sample, as it is warm the second time.
    """
    limit = min(MAX_GROUP, copies) if flush else MAX_GROUP
    group = 1
    while group * 2 <= limit and group * one_launch_us < GROUP_TARGET_US:
        group *= 2
    return group


def heat(timer: Timer, launches: Sequence[Launch], seconds: float) -> None:
    """Keep the device busy for `seconds`, as a cool GPU runs at other clocks than one under load."""
    end = time.monotonic() + seconds
    while True:
        timer.sample(launches, 8)
        if time.monotonic() >= end:
            return


def quantile(values: Sequence[float], q: float) -> float:
    """Quantile by linear interpolation; `values` is not empty."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    """Median; `values` is not empty."""
    return quantile(values, 0.5)


def contenders(samples: Mapping[str, Sequence[float]], hopeless: float) -> set[str]:
    """Those whose median is within `hopeless` times the best; `samples`: in us."""
    medians = {key: median(taken) for key, taken in samples.items() if taken}
    return {key for key, us in medians.items() if us <= hopeless * min(medians.values())}


def steady_rounds(rounds: Sequence[Sequence[Sequence[float]]], slow: float) -> list[int]:
    """Numbers of the rounds to keep: those in which the whole field took less than `slow` times the best round's total.

    Dropping a round for all alike favours nobody. At least half of the rounds stay: then they are not outliers.

    Args:
        rounds: by finalist, by round, the samples in us.
        slow: factor.
    """
    if not rounds:
        return []
    totals = [sum(median(taken[number]) for taken in rounds) for number in range(len(rounds[0]))]
    order = sorted(range(len(totals)), key=totals.__getitem__)
    kept = [number for number in order if totals[number] <= slow * totals[order[0]]]
    return sorted(kept if 2 * len(kept) >= len(order) else order[: (len(order) + 1) // 2])


@contextlib.contextmanager
def exclusive(path: Path | None) -> Iterator[bool]:
    """Hold an OS lock on a file while timing, so that two tuners never time one GPU at once. Yields whether it is held.

    The system drops the lock when the process dies. Where the file cannot be made (read-only folder) timing goes on without.
    """
    import fcntl

    descriptor = None
    if path is not None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            if descriptor is not None:
                os.close(descriptor)
                descriptor = None
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)
