"""Tuning: measure a problem's configurations on this GPU and keep the evidence.

    result = tpf_jit.tune(tpf_jit.TriangleAttentionShape(crop=384))
    print(result)

One cell (operation, direction, shape; on the device model of this GPU):

    session.py   what the cells of a run share: device, database, compile workers; options
    sweep.py     one cell: candidates in order, compiled ahead, checked, measured, shot out
    order.py     what to try next: a neighbour's ranking, an analytic order, Optuna above a few hundred
    build.py     compiled candidates, from the cache or from worker processes
    check.py     right before fast: the verdict a configuration needs before it is timed
    measure.py   from a compiled candidate to an outcome; the seam between a sweep and the device
    isolated.py  the measurer in a child process, replaced when a kernel hangs or crashes
    timing.py    clocks: launches to microseconds
    ledger.py    rows and leases of the cell in the tuning database
    report.py    progress, result, table

Many cells (`tpf-jit sweep`):

    shared_study.py one cell that several machines search together, by way of a database server
    cells.py        which cells, in which order; shards; shares of the time there is
    many.py         the cells of one process on one GPU, compiled ahead across cells
    node.py         one measuring process for each GPU of this machine
    ray_cluster.py  one measuring actor for each GPU of a Ray cluster
    summary.py      what became of every cell, and of the GPUs' time

Stored winners (`tpf-jit db stale --recompile`, `db verify --re-measure`):

    recheck.py      the same device code? the same time?

Nothing that runs in production imports this package. See `tune` for the contract.
"""

from __future__ import annotations

from typing import Any

from tpf_jit.tune.report import Result
from tpf_jit.tune.session import Session, TuneOptions

__all__ = ["Result", "TuneOptions", "tune"]


def tune(
    shape: Any,
    direction: str = "forward",
    budget_s: float | None = None,
    max_trials: int | None = None,
    store: Any = None,
    progress: bool = True,
    device: int | None = None,
    options: TuneOptions | None = None,
) -> Result:
    """Measure configurations for a problem on this GPU, and record every outcome in the tuning database.

    Whatever was tried before with the same kernel, device model and protocol is not tried again, so an interrupted sweep goes
    on where it stopped, and a finished one returns at once. Ctrl-C ends it cleanly with what is there.

    Args:
        shape: the problem, e.g. `TriangleAttentionShape(crop=384)`.
        direction: one for which the shape's operation has templates (`tpf_jit.tune.cells.tunable_directions`).
        budget_s: wall time of the search in seconds; the shoot-out of the best comes on top.
        max_trials: configurations this call may add.
        store: tuning database, open (`TuningStore`) or its path; the user's when left out.
        progress: show a progress bar if stderr is a terminal.
        device: CUDA device index; the current one when left out.
        options: see `TuneOptions`.

    Returns:
        The winner as the database derives it, and all rows of the cell.

    Raises:
        NoKernel: no template computes this problem on this GPU.
        MeasurementFailed: there is no GPU, or it was lost on the way (recorded; the same call in a new process goes on).
        DatabaseError: the database cannot be read or written.
    """
    session = Session(store, options, device)
    # Before the database is made: there may be nothing to tune.
    session.templates(shape, direction)
    with session:
        return session.tune(shape, direction, budget_s, max_trials, progress)
