"""Kernels that do their worst, and a measurer of the toy device that runs them; imported by the measuring child as well."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tune_fakes import H200, SETTINGS, ToyBackend, ToyConfig, ToyKernel, ToyTimer

from tpf_jit.tune.measure import WorkloadMeasurer

FAULTS = {
    "ecc": "CUDA error: uncorrectable ECC error encountered",
    "reset": "CUDA error: CUDA-capable device(s) is/are busy or unavailable (the driver was reset)",
    "corrupt": "CUDA error: an illegal memory access was encountered",
    "oom": "CUDA out of memory. Tried to allocate 80.00 GiB",
}
"""What a kernel raises, by trick; all but the last leave the device dead for the process."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often.

    folder: every start of a process and every fault leaves a file here. once: tricks that work the second time.
    """

    folder: str
    once: tuple[str, ...] = ()

    def note(self, name: str) -> int:
        """How often that happened before."""
        path = Path(self.folder) / name
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return len(path.read_text().split()) - 1

    def pids(self, name: str) -> list[int]:
        path = Path(self.folder) / name
        return [int(text) for text in path.read_text().split()] if path.exists() else []


class FaultyKernel(ToyKernel):
    def __init__(self, config: ToyConfig, faults: Faults) -> None:
        super().__init__(config)
        self.faults = faults

    def __call__(self, x: Any, out: Any) -> None:
        trick = self.config.trick
        if trick in ("hang", "segfault", "killed", "exit", *FAULTS):
            before = self.faults.note(trick)
            if not (before and trick in self.faults.once):
                self._fail(trick)
        super().__call__(x, out)

    def _fail(self, trick: str) -> None:
        if trick == "hang":
            time.sleep(600)
        elif trick == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif trick == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trick == "exit":
            os._exit(3)
        ToyTimer.dead = trick != "oom"
        raise RuntimeError(FAULTS[trick])


class LateTimer(ToyTimer):
    """Kernels marked "late" behave until they are timed in a shoot-out, for which more samples in a row are asked for."""

    def sample(self, launches: Any, count: int, group: int = 1, flush: bool = False) -> list[float]:
        config = launches[0].kernel.config
        if config.trick == "late" and self.timed.total() > 60:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().sample(launches, count, group, flush)


def faulty(template: Any, shape: Any, faults: Faults) -> WorkloadMeasurer:
    """A measurer of the toy device whose kernels may take the process down."""
    faults.note("started")

    def load(source: Any, symbol: str, kind: str) -> FaultyKernel:
        data = source if isinstance(source, bytes) else source.read_bytes()
        return FaultyKernel(ToyConfig(**json.loads(data)), faults)

    return WorkloadMeasurer(template, shape, LateTimer(), load, "toy", dict(H200), SETTINGS, {"seed": 7})


def gone(template: Any, shape: Any, faults: Faults) -> WorkloadMeasurer:
    """As `faulty`, on a device that takes no work once a kernel of this folder hung."""
    measurer = faulty(template, shape, faults)
    ToyTimer.dead = bool(faults.pids("hang"))
    return measurer


def plain(template: Any, shape: Any, faults: Faults) -> WorkloadMeasurer:
    """The toy device as it is."""
    return WorkloadMeasurer(template, shape, ToyTimer(), ToyBackend().load, "toy", dict(H200), SETTINGS, {"seed": 7})


def killed_once(template: Any, shape: Any, faults: Faults) -> WorkloadMeasurer:
    """As `faulty`, but the first process is killed while it gets ready."""
    if not faults.note("starting"):
        os.kill(os.getpid(), signal.SIGKILL)
    return faulty(template, shape, faults)


def chatty(template: Any, shape: Any, faults: Faults) -> WorkloadMeasurer:
    """As `faulty`, printing as it goes."""
    print("making", flush=True)
    measurer = faulty(template, shape, faults)
    measurer._clocks = lambda: print("timing", flush=True) or {}
    return measurer


def cuda(template: Any, shape: Any, gpu: Any, index: int, folder: Path, seed: int | None) -> WorkloadMeasurer:
    """The toy device in place of `measure.cuda_measurer`; leaves a note beside the database."""
    return faulty(template, shape, Faults(str(folder)))


def broken(template: Any, shape: Any, faults: Faults) -> WorkloadMeasurer:
    """A device that cannot be opened."""
    raise RuntimeError("CUDA driver initialization failed")
