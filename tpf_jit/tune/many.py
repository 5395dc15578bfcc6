"""Many cells on one GPU, in one process, with one pool of compile workers.

While the GPU measures the candidates of a cell, workers without anything to do for it compile those of the following cells; a
kernel that serves several cells is compiled once. Several processes, one on each GPU of a machine, may sweep one list of cells
on one database: each takes cells that nobody works on, and at the end they help each other with what is left (leases keep them
off each other's candidates). Nothing is kept outside the database, so a sweep may be killed at any point: the same call goes on
from the rows that are there.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpf_jit.errors import DatabaseError, MeasurementFailed, TpfError
from tpf_jit.templates.base import canonical_json
from tpf_jit.tune import ledger
from tpf_jit.tune.cells import Cell, share_s
from tpf_jit.tune.session import Session, TuneOptions
from tpf_jit.tune.summary import CellReport, Summary

CELL_LEASE_S = 3600.0
"""A cell's lease only spreads processes over cells, so it need not be renewed: whoever is late helps instead of waiting."""
AHEAD = 16
"""Cells looked at for candidates to compile ahead."""

_log = logging.getLogger("tpf_jit")

OnCell = Callable[[CellReport], None]


@dataclass(frozen=True)
class Limits:
    """When to stop.

    Attributes:
        budget_s: wall time of the search in seconds, all cells together; shoot-outs come on top.
        max_trials: configurations a cell may add.
    """

    budget_s: float | None = None
    max_trials: int | None = None


@dataclass(frozen=True)
class Place:
    """Which of several processes on one database this one is: number `number` (from 0) of `count`."""

    number: int = 0
    count: int = 1


class Runner:
    """Tunes cells one after the other and keeps count. A context manager, as the `Session` it holds.

    Args:
        store, options, device: as for `Session`.
        max_trials: configurations a cell may add.
        progress: show a progress bar if stderr is a terminal.
    """

    def __init__(
        self,
        store: Any = None,
        options: TuneOptions | None = None,
        device: int | None = None,
        max_trials: int | None = None,
        progress: bool = True,
    ) -> None:
        self.session = Session(store, options, device)
        self._max_trials = max_trials
        self._progress = progress
        self._begin = time.monotonic()

    def __enter__(self) -> Runner:
        self.session.__enter__()
        self._begin = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.__exit__(*exc)

    def run(self, cell: Cell, budget_s: float | None = None, following: Sequence[Cell] = ()) -> CellReport:
        """Tune one cell; the workers may compile ahead for the cells `following`.

        Raises MeasurementFailed when this process can measure no more, DatabaseError when nothing can be kept. Whatever else is
        wrong with the cell is in the report.
        """
        self.session.ahead(((each.shape, each.direction) for each in following[:AHEAD]), self._max_trials)
        try:
            result = self.session.tune(cell.shape, cell.direction, budget_s, self._max_trials, self._progress)
        except (MeasurementFailed, DatabaseError):
            raise
        except TpfError as error:
            _log.warning("%s: %s", cell.key, error)
            return CellReport(cell.key, "failed", detail=str(error))
        return CellReport.of(result)

    def summary(self, reports: Sequence[CellReport], interrupted: bool = False) -> Summary:
        """What was done since this runner was entered."""
        here_s = round(time.monotonic() - self._begin, 3)
        measuring_s = round(self.session.measuring_s, 3)
        return Summary(tuple(reports), here_s, here_s, measuring_s, self.session.compiled, interrupted)


def sweep_many(
    cells: Sequence[Cell],
    store: Any = None,
    options: TuneOptions | None = None,
    limits: Limits | None = None,
    device: int | None = None,
    place: Place | None = None,
    on_cell: OnCell | None = None,
    progress: bool = True,
) -> Summary:
    """Tune cells on one GPU, in order; go on where an earlier or a killed run stopped.

    Args:
        cells: what to tune (`cells.plan`).
        store, options, device: as for `tpf_jit.tune.tune`.
        limits: when to stop.
        place: of this process among those that sweep the same cells on the same database.
        on_cell: told about every cell when it ends.
        progress: show a progress bar if stderr is a terminal.

    Returns:
        What became of every cell. Ctrl-C ends the sweep cleanly: `Summary.interrupted`.

    Raises:
        NoKernel: there are no kernels for this GPU.
        MeasurementFailed: there is no GPU, or it was lost (recorded; the same call in a new process goes on).
        DatabaseError: the database cannot be read or written.
    """
    limits, place = limits or Limits(), place or Place()
    begin = time.monotonic()
    reports: dict[str, CellReport] = {}
    interrupted = False
    with Runner(store, options, device, limits.max_trials, progress) as runner:
        walk = _walk(cells, runner.session.store, place)
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(walk):
            interrupted = True  # unless we come to the end: Ctrl-C may also fall between two cells
            for cell, following in walk:
                left_s = None if limits.budget_s is None else limits.budget_s - (time.monotonic() - begin)
                if left_s is not None and left_s <= 0:
                    interrupted = False
                    break
                report = runner.run(cell, share_s(left_s, 1 + len(following), place.count), following)
                reports[cell.key] = report
                if on_cell is not None:
                    on_cell(report)
                if report.state == "interrupted":
                    break
            else:
                interrupted = False
        return runner.summary([reports.get(cell.key) or CellReport(cell.key, "left") for cell in cells], interrupted)


def _walk(cells: Sequence[Cell], store: Any, place: Place) -> Iterator[tuple[Cell, list[Cell]]]:
    """(next cell, those after it) for this process: first the cells nobody works on, then those that others had begun.

    Processes begin at different points of the list, so that each compiles kernels of its own.
    """
    owner = ledger.owner(secrets.token_hex(4))
    first = place.number * len(cells) // place.count
    waiting = deque([*cells[first:], *cells[:first]])
    others: list[Cell] = []
    while waiting:
        cell = waiting.popleft()
        with _claimed(store, cell, owner, place) as mine:
            if mine:
                yield cell, list(waiting)
            else:
                others.append(cell)
    # Finished by now, abandoned, or in work: then some of its candidates are still to be had.
    while others:
        cell = others.pop(0)
        yield cell, list(others)


@contextlib.contextmanager
def _claimed(store: Any, cell: Cell, owner: str, place: Place) -> Iterator[bool]:
    """Whether this process has the cell to itself, so that others begin elsewhere."""
    if place.count == 1:
        yield True
        return
    work = canonical_json({"work": "cell"})
    if not ledger.claim(store, cell.key, work, owner, CELL_LEASE_S):
        yield False
        return
    try:
        yield True
    finally:
        store.release(cell.key, work, owner)
