"""Tuning: measure a problem's configurations on this GPU and keep the evidence.

    result = tpf_jit.tune(tpf_jit.TriangleAttentionShape(crop=384))
    print(result)

    sweep.py     one cell: candidates in order, compiled ahead, checked, measured, shot out
    order.py     what to try next: a neighbour's ranking, an analytic order, Optuna above a few hundred
    build.py     compiled candidates, from the cache or from worker processes
    check.py     right before fast: the verdict a configuration needs before it is timed
    measure.py   from a compiled candidate to an outcome; the seam between a sweep and the device
    timing.py    clocks: launches to microseconds
    ledger.py    rows and leases of the cell in the tuning database
    report.py    progress, result, table

Nothing that runs in production imports this package. See `tune` for the contract.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf_jit.errors import MeasurementFailed, NoKernel
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import measure, order, sweep
from tpf_jit.tune.build import Builder
from tpf_jit.tune.ledger import Ledger
from tpf_jit.tune.report import Progress, Result

__all__ = ["Result", "TuneOptions", "tune"]


@dataclass(frozen=True)
class TuneOptions:
    """What a sweep rarely needs to be told.

    Attributes:
        template: tune this template (name or instance) instead of all that support the problem.
        workers: compile processes; one less than the cores when left out.
        enumerate_limit: spaces up to this size are measured whole, larger ones searched by Optuna.
        finalists: configurations in the shoot-out.
        retry_failed: try again what failed to compile or to launch earlier.
        seed: of inputs and of Optuna's sampler; fresh when left out.
        lease_s: seconds after which other processes may take over a candidate this one does not report on.
        objects: object cache to use (`tpf_jit.cache.ObjectStore`).
        make_pool: makes the compile pool; `tpf_jit.pool.CompilePool` when left out.
        make_measurer: `(template, shape) -> Measurer`, in place of the CUDA one.
    """

    template: Any = None
    workers: int | None = None
    enumerate_limit: int = 300
    finalists: int = 8
    retry_failed: bool = False
    seed: int | None = None
    lease_s: float = 120.0
    objects: Any = None
    make_pool: Callable[[], Any] | None = None
    make_measurer: Callable[[Any, Any], Any] | None = None


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
        direction: ``forward``, ``forward_training``, ``backward_stats``, ``backward_key`` or ``backward_query``.
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
    options = options or TuneOptions()
    start = time.monotonic()
    gpu, index = (None, 0) if options.make_measurer else _gpu(device)
    templates = _templates(shape, direction, gpu, options)
    with contextlib.ExitStack() as stack:
        if store is None or isinstance(store, (str, os.PathLike)):
            from tpf_jit.tuning_db.store import TuningStore

            store = stack.enter_context(TuningStore(store))
        builder = stack.enter_context(_builder(store, options))
        results = []
        for template in templates:
            left_s = None if budget_s is None else max(0.0, budget_s - (time.monotonic() - start))
            make = options.make_measurer or _cuda_measurer(gpu, index, store, options.seed)
            measurer = stack.enter_context(contextlib.closing(make(template, shape)))
            limits = sweep.Limits(left_s, max_trials, options.finalists, 2 * _workers(options))
            results.append(_run(template, shape, direction, (store, builder, measurer), limits, options, progress))
            if results[-1].interrupted:
                break
    return _merged(results, time.monotonic() - start)


def _run(
    template: Any,
    shape: Any,
    direction: str,
    tools: tuple[Any, Builder, Any],
    limits: sweep.Limits,
    options: TuneOptions,
    progress: bool,
) -> Result:
    store, builder, measurer = tools
    start = time.monotonic()
    cell = f"{shape.key()}/{direction}"
    ledger = Ledger(store, cell, template, measurer, _versions(template), options.lease_s, options.retry_failed)
    rows = sweep.neighbour_rows(store, template, cell)
    ordered, origin = sweep.ordered_space(template, shape, direction, ledger.model, rows)
    source = order.make_source(ordered, options.enumerate_limit, options.seed)
    with Progress(f"{template.name} {shape.key()}", source.total, progress) as bar:
        run = sweep.Sweep(ledger, template, shape, source, builder, measurer, limits, bar)
        run.run()
    ledger.refresh()
    return Result(
        shape=shape,
        direction=direction,
        cell=cell,
        device=ledger.model,
        best=store.best(cell, ledger.model),
        trials=list(ledger.rows),
        session=ledger.session,
        stopped=run.stopped,
        elapsed_s=time.monotonic() - start,
        idle_s=run.idle_s,
        order=origin,
        default_config=config_to_dict(template.default(shape)),
    )


def _merged(results: list[Result], elapsed_s: float) -> Result:
    """One result of several templates' sweeps: the last one's view of the winner covers all of them."""
    last = results[-1]
    if len(results) == 1:
        return last
    return dataclasses.replace(
        last,
        trials=[row for result in results for row in result.trials],
        elapsed_s=elapsed_s,
        idle_s=sum(result.idle_s for result in results),
        order="; ".join(result.order for result in results),
    )


def _gpu(device: int | None) -> tuple[Any, int]:
    from tpf_jit.device import current_device

    gpu = current_device(device)
    if gpu is None:
        raise MeasurementFailed(
            "tuning times kernels on a GPU, and this process sees none. Run it on a machine with an H100 or H200 "
            "(`tpf-jit doctor` says what is missing), or bring results measured elsewhere with `tpf-jit db import FILE`; "
            "compiling needs no GPU (`tpf-jit compile`)."
        )
    if gpu.arch is None:
        raise NoKernel(
            f"there are no kernels for {gpu.name} (compute capability {'.'.join(map(str, gpu.compute_capability))}); "
            "they need a Hopper GPU (9.0). Calls on this GPU take the PyTorch path, which has nothing to tune."
        )
    if device is None:
        import torch

        device = torch.cuda.current_device()
    return gpu, device


def _templates(shape: Any, direction: str, gpu: Any, options: TuneOptions) -> list[Any]:
    from tpf_jit.templates import registry

    chosen = options.template
    if isinstance(chosen, str):
        chosen = registry.get(chosen)
    if chosen is not None:
        candidates = [chosen]
    else:
        candidates = registry.templates(op=shape.op, direction=direction, arch=gpu.arch if gpu is not None else None)
    reasons = []
    supported = []
    for template in candidates:
        able, reason = template.supports(shape)
        if able and template.space(shape):
            supported.append(template)
        else:
            reasons.append(f"{template.name}: {reason or 'no legal configuration'}")
    if not supported:
        why = "; ".join(reasons) or f"no template is registered for {shape.op}/{direction}"
        raise NoKernel(f"nothing to tune for {shape.key()} ({direction}): {why}")
    return supported


def _builder(store: Any, options: TuneOptions) -> Builder:
    objects = options.objects
    if objects is None:
        from tpf_jit.cache import ObjectStore

        objects = ObjectStore()

    def make_pool() -> Any:
        from tpf_jit.pool import CompilePool

        return CompilePool(_workers(options))

    return Builder(objects, store, options.make_pool or make_pool)


def _workers(options: TuneOptions) -> int:
    return max(1, options.workers or len(os.sched_getaffinity(0)) - 1)


def _cuda_measurer(gpu: Any, index: int, store: Any, seed: int | None) -> Callable[[Any, Any], Any]:
    def make(template: Any, shape: Any) -> Any:
        return measure.cuda_measurer(template, shape, gpu, index, Path(store.path).parent, seed)

    return make


def _versions(template: Any) -> dict[str, str]:
    from tpf_jit import __version__
    from tpf_jit.compiler import toolchain

    versions = {**toolchain(template.backend), "tpf_jit": __version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions
