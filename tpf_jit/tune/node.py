"""One measuring process for each GPU of this machine, all on one list of cells and one database.

The processes share the work by leases in the database (see `many`); this one only starts them, passes Ctrl-C on once, and
replaces those that are lost: a kernel that takes the device down ends its process, is remembered as a failure, and the next
process goes on after it. They end with this process, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpf_jit import child, errors
from tpf_jit.errors import MeasurementFailed, TpfError
from tpf_jit.tune.cells import Cell
from tpf_jit.tune.many import Limits, Place, sweep_many
from tpf_jit.tune.session import Session, TuneOptions, workers
from tpf_jit.tune.summary import FINISHED, CellReport, Summary, united

PATIENCE = 2
"""A process that is lost this many times in a row without a new row is not replaced again."""

_log = logging.getLogger("tpf_jit")


@dataclass(frozen=True)
class _Task:
    """What a measuring process is told."""

    cells: tuple[Cell, ...]
    store: str
    options: TuneOptions
    limits: Limits
    place: Place


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them; creates no CUDA context."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if named is None else [name.strip() for name in named.split(",") if name.strip()]
    count = torch.cuda.device_count()
    return [str(index) for index in range(count)] if names is None else names[:count]


def sweep_node(
    cells: Sequence[Cell],
    store: Any = None,
    options: TuneOptions | None = None,
    limits: Limits | None = None,
    gpus: Sequence[str] | None = None,
    on_cell: Callable[[CellReport], None] | None = None,
) -> Summary:
    """Tune cells on the GPUs of this machine, a process each; go on where an earlier or a killed run stopped.

    Args:
        cells: what to tune (`cells.plan`).
        store: path of the tuning database; the user's when left out. On a local disk: several processes write to it.
        options: see `TuneOptions`; must be picklable. `workers` are those of all processes together.
        limits: when to stop.
        gpus: as ``CUDA_VISIBLE_DEVICES`` names them; all that are visible when left out.
        on_cell: told about every cell when it ends in one of the processes.

    Returns:
        What became of every cell. Ctrl-C ends the sweep cleanly: `Summary.interrupted`.

    Raises:
        NoKernel: there are no kernels for these GPUs.
        MeasurementFailed: there is no GPU, or on every one the processes were lost again and again without measuring anything.
            A single GPU of several is given up with a warning, and the others do its part.
        DatabaseError: the database cannot be read or written.
    """
    from tpf_jit.tuning_db.reader import user_database_path

    options, limits = options or TuneOptions(), limits or Limits()
    gpus = list(gpus) if gpus is not None else visible_gpus()
    if not gpus:
        Session(None, options)  # says what is missing
    begin = time.monotonic()
    if not cells:
        return united([], [], 0.0)
    share = max(1, workers(options) // len(gpus))
    path = os.fspath(user_database_path(store))
    task = _Task(tuple(cells), path, replace(options, workers=share), limits, Place(0, len(gpus)))
    crew = _Crew(task, gpus, begin, on_cell)
    crew.run()
    summary = united(
        [cell.key for cell in cells], crew.parts, time.monotonic() - begin, interrupted=crew.interrupted, restarts=crew.restarts
    )
    if crew.failure is not None and not summary.interrupted and summary.unfinished:
        raise crew.failure
    return summary


class _Crew:
    """The processes, watched from one thread."""

    def __init__(self, task: _Task, gpus: Sequence[str], begin: float, on_cell: Callable[[CellReport], None] | None) -> None:
        self.parts: list[Summary] = []
        self.interrupted = False
        self.restarts = 0
        self._task = task
        self._gpus = gpus
        self._begin = begin
        self._on_cell = on_cell
        self._events: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._running: dict[int, subprocess.Popen] = {}
        self._strikes = dict.fromkeys(range(len(gpus)), 0)
        self._failures: dict[int, TpfError] = {}
        self._productive: set[int] = set()
        self._finished: set[int] = set()
        self._told: set[str] = set()

    @property
    def failure(self) -> TpfError | None:
        """Why the work could not be done; None when a process came to the end of the list, where it does what others left."""
        return None if self._finished else next(iter(self._failures.values()), None)

    def run(self) -> None:
        try:
            with _interrupts_as(lambda: self._events.put((0, {"interrupt": True}))):
                for number in range(len(self._gpus)):
                    self._start(number)
                while self._running:
                    self._handle(*self._events.get())
        finally:
            for process in self._running.values():
                process.kill()
                process.wait()

    def _interrupt(self) -> None:
        self.interrupted = True
        for process in self._running.values():
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGINT)

    def _handle(self, number: int, event: dict[str, Any]) -> None:
        if "cell" in event:
            report = CellReport(**event["cell"])
            # Processes look at each other's cells in the end, mostly to find them finished.
            news = report.new_trials or report.state not in FINISHED or report.cell not in self._told
            self.parts.append(Summary((report,)))
            self._told.add(report.cell)
            if news and self._on_cell is not None:
                self._on_cell(report)
        elif "interrupt" in event:
            self._interrupt()
        elif "summary" in event:
            # Its cells have been reported one by one.
            self.parts.append(replace(Summary.from_dict(event["summary"]), cells=()))
            self._finished.add(number)
        elif "trial" in event:
            self._productive.add(number)
        elif "error" in event:
            failure = self._failures[number] = getattr(errors, event["kind"], MeasurementFailed)(event["error"])
            if not isinstance(failure, MeasurementFailed):
                self._strikes[number] = PATIENCE
        else:
            code = self._running.pop(number).wait()
            self._ended(number, code)

    def _ended(self, number: int, code: int) -> None:
        if number in self._finished or self.interrupted:
            return
        # Its own trials only: those of the other GPUs say nothing about this one.
        progress = number in self._productive and self._strikes[number] < PATIENCE
        self._productive.discard(number)
        self._strikes[number] = 0 if progress else self._strikes[number] + 1
        if self._strikes[number] < PATIENCE:
            self.restarts += 1
            self._failures.pop(number, None)
            self._start(number)
            return
        message = (
            f"the process that measures on GPU {self._gpus[number]} ended with code {code}, twice without measuring "
            "anything; its message is on stderr. The same command goes on from what is there."
        )
        failure = self._failures.setdefault(number, MeasurementFailed(message))
        _log.warning("GPU %s is given up: %s", self._gpus[number], failure)

    def _start(self, number: int) -> None:
        limits = self._task.limits
        if limits.budget_s is not None:
            limits = replace(limits, budget_s=limits.budget_s - (time.monotonic() - self._begin))
        task = replace(self._task, limits=limits, place=Place(number, len(self._gpus)))
        process = subprocess.Popen(
            child.command("tpf_jit.tune.node", "_measure", os.getpid()),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self._gpus[number]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes from us, once
        )
        self._running[number] = process
        threading.Thread(target=_listen, args=(number, process, pickle.dumps(task), self._events), daemon=True).start()


@contextlib.contextmanager
def _interrupts_as(tell: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `tell`, so that it cannot fall between two steps of what runs here; the second is the usual one."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield
        return

    def handler(*_: Any) -> None:
        signal.signal(signal.SIGINT, usual)
        tell()

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _listen(number: int, process: subprocess.Popen, task: bytes, events: Any) -> None:
    with contextlib.suppress(OSError):
        process.stdin.write(task)
        process.stdin.close()
    for line in process.stdout:
        with contextlib.suppress(ValueError):  # the last line of a killed process
            events.put((number, json.loads(line)))
    events.put((number, {}))


def _measure(parent: str) -> None:
    """Main function of a measuring process: a task on stdin, events as JSON lines on what was stdout."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel or a library prints must not mix with the events
    child.die_with(int(parent))

    def say(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    try:
        task: _Task = pickle.load(sys.stdin.buffer)
        with _open(task.store, lambda trial: say({"trial": trial})) as store:
            summary = sweep_many(
                task.cells,
                store,
                task.options,
                task.limits,
                place=task.place,
                on_cell=lambda report: say({"cell": report.__dict__}),
                progress=False,
            )
        say({"summary": summary.to_dict()})
    except TpfError as error:
        say({"error": str(error), "kind": type(error).__name__})
        os._exit(1)  # a lost device can make an orderly end wait for ever
    except KeyboardInterrupt:
        os._exit(130)


def _open(path: str, told: Callable[[str], None]) -> Any:
    """The tuning database, which tells the id of every trial that this process adds."""
    from tpf_jit.tuning_db.store import TuningStore

    class Telling(TuningStore):
        def put_trial(self, row: Any) -> str:
            identity = super().put_trial(row)
            told(identity)
            return identity

    return Telling(path)
