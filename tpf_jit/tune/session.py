"""What the cells of one run share: the device, the open database, the compile workers.

A `Session` tunes cells one after the other with one compile pool, so that candidates of later cells can be compiled while the
GPU measures the present one (`ahead`), and a kernel that serves several cells is compiled once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import InvalidInput, MeasurementFailed, NoKernel
from tpf_jit.kernels import check_operation
from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import measure, order, sweep
from tpf_jit.tune.build import Builder
from tpf_jit.tune.isolated import Isolation
from tpf_jit.tune.ledger import Ledger
from tpf_jit.tune.report import Progress, Result


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
        lease_s: seconds after which other processes may take over a candidate this one does not report on; an hour at most
            (`tuning_db.store.LONGEST_LEASE_S`).
        storage: URL of a PostgreSQL (or MySQL) database, through which machines with tuning databases of their own search one
            cell together (`shared_study`).
        objects: object cache to use (`tpf_jit.cache.ObjectStore`).
        make_pool: makes the compile pool; `tpf_jit.pool.CompilePool` when left out.
        make_measurer: `(template, shape) -> Measurer`, in place of the CUDA one.
        isolate: measure in a child process, so that a kernel which hangs or crashes costs one trial only; else in this one. The
            figures are the same (tests/gpu/test_isolated.py).

    Raises:
        InvalidInput: `lease_s` is out of range.
    """

    template: Any = None
    workers: int | None = None
    enumerate_limit: int = 300
    finalists: int = 8
    retry_failed: bool = False
    seed: int | None = None
    lease_s: float = 120.0
    storage: str | None = None
    objects: Any = None
    make_pool: Callable[[], Any] | None = None
    make_measurer: Callable[[Any, Any], Any] | None = None
    isolate: bool = True

    def __post_init__(self) -> None:
        from tpf_jit.tuning_db.store import LONGEST_LEASE_S

        if not 0 < self.lease_s <= LONGEST_LEASE_S:
            # Other processes would take a longer one for one from before the clock was set back, and drop it.
            raise InvalidInput.of("lease_s", self.lease_s, f"more than 0, at most {LONGEST_LEASE_S:g} s")


class Session:
    """One run on one GPU. A context manager: entering it opens the database, leaving it ends the compile workers.

    Args:
        store: tuning database, open (`TuningStore`) or its path; the user's when left out.
        options: see `TuneOptions`.
        device: CUDA device index; the current one when left out.

    Attributes:
        store: the open database.
        measuring_s: seconds spent in the measurer so far: checking and timing.

    Raises:
        NoKernel: there are no kernels for this GPU.
        MeasurementFailed: there is no GPU.
    """

    def __init__(self, store: Any = None, options: TuneOptions | None = None, device: int | None = None) -> None:
        self.options = options or TuneOptions()
        self.store: Any = store
        self.measuring_s = 0.0
        self._gpu, self._index = (None, 0) if self.options.make_measurer else _gpu(device)
        self._model: str | None = self._gpu.model if self._gpu is not None else None
        self._stack = contextlib.ExitStack()
        self._builder: Builder | None = None
        self._storage: Any = None
        self._isolation = Isolation()

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            if self.store is None or isinstance(self.store, (str, os.PathLike)):
                from tpf_jit.tuning_db.store import TuningStore

                self.store = stack.enter_context(TuningStore(self.store))
            self._builder = stack.enter_context(_builder(self.store, self.options))
            stack.enter_context(self._isolation)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def compiled(self) -> int:
        """Kernels compiled so far: those that were in no cache."""
        return self._builder.compiled if self._builder is not None else 0

    def templates(self, shape: Any, direction: str) -> list[Any]:
        """Templates that can be tuned for a problem. Raises NoKernel, with the reasons, when there are none."""
        return supporting(shape, direction, self._gpu, self.options.template)

    def ahead(self, cells: Iterable[tuple[Any, str]], max_trials: int | None = None) -> None:
        """Compile for these (shape, direction) whenever the workers have nothing to do for the cell being tuned.

        Args:
            cells: in the order in which they will be tuned; replaces what an earlier call said.
            max_trials: configurations a cell may add.
        """
        self._builder.ahead(self._wanted(list(cells), max_trials))

    def tune(
        self,
        shape: Any,
        direction: str,
        budget_s: float | None = None,
        max_trials: int | None = None,
        progress: bool = True,
    ) -> Result:
        """Tune one cell; arguments and errors as for `tpf_jit.tune.tune`."""
        start = time.monotonic()
        results: list[Result] = []
        templates = self.templates(shape, direction)
        shape = templates[0].measured_as(shape)
        for template in templates:
            left_s = None if budget_s is None else max(0.0, budget_s - (time.monotonic() - start))
            limits = sweep.Limits(left_s, max_trials, self.options.finalists, self._depth)
            make = self.options.make_measurer or self._cuda_measurer
            with contextlib.closing(_Metered(make(template, shape), self)) as measurer:
                results.append(self._run(template, shape, direction, measurer, limits, progress))
            if results[-1].interrupted:
                break
        return _merged(results, time.monotonic() - start)

    @property
    def _depth(self) -> int:
        """Candidates compiled ahead of the measurement."""
        return 2 * workers(self.options)

    def _run(
        self, template: Any, shape: Any, direction: str, measurer: Any, limits: sweep.Limits, progress: bool
    ) -> Result:
        start = time.monotonic()
        cell = f"{shape.key()}/{direction}"
        options = self.options
        ledger = Ledger(self.store, cell, template, measurer, _versions(template), options.lease_s, options.retry_failed)
        self._model = ledger.model
        rows = sweep.neighbour_rows(self.store, template, cell)
        ordered, origin = sweep.ordered_space(template, shape, direction, ledger.model, rows)
        source = self._source(template, shape, ledger, ordered)
        with Progress(f"{template.name} {shape.key()}", source.total, progress) as bar:
            run = sweep.Sweep(ledger, template, shape, source, self._builder, measurer, limits, bar)
            run.run()
        ledger.refresh()
        return Result(
            shape=shape,
            direction=direction,
            cell=cell,
            device=ledger.model,
            best=self.store.best(cell, ledger.model),
            trials=list(ledger.rows),
            session=ledger.session,
            stopped=run.stopped,
            elapsed_s=time.monotonic() - start,
            idle_s=run.idle_s,
            order=origin,
            default_config=config_to_dict(template.default(shape)),
        )

    def _source(self, template: Any, shape: Any, ledger: Ledger, ordered: list[Any]) -> order.Source:
        limit, seed = self.options.enumerate_limit, self.options.seed
        if self.options.storage is None:
            return order.make_source(ordered, limit, seed)
        from tpf_jit.tune import shared_study

        if self._storage is None:
            self._storage = shared_study.open_storage(self.options.storage)
        name = f"tpf_jit/{ledger.cell}/{template.name}/{template.source_hash()[:16]}/{ledger.model}/{ledger.protocol}"
        # Neighbours differ between the machines' databases, and the order must not.
        common = order.analytic_order(template, shape, template.space(shape))
        starters = None if len(common) <= limit else order.STARTERS
        return shared_study.SharedSource(self._storage, name, common, starters, 5 * self.options.lease_s, seed)

    def _wanted(self, cells: Sequence[tuple[Any, str]], max_trials: int | None) -> Iterator[KernelSpec]:
        """Kernels of later cells that have no row yet, cell by cell; looked up when their turn comes."""
        for shape, direction in cells:
            try:
                templates = self.templates(shape, direction)
            except NoKernel:
                continue
            shape = templates[0].measured_as(shape)
            for template in templates:
                cell = f"{shape.key()}/{direction}"
                configs = list(template.space(shape))
                if max_trials is not None or len(configs) > self.options.enumerate_limit:
                    # Not all will be wanted, so the order matters; beyond its first, the search decides.
                    known_rows = sweep.neighbour_rows(self.store, template, cell)
                    configs, _ = sweep.ordered_space(template, shape, direction, self._model or "", known_rows)
                    configs = configs[: order.STARTERS]
                rows = self.store.trials(cell=cell, device=self._model, template=template.name)
                known = {(row.kernel_key, canonical_json(row.config)) for row in rows}
                specs = [(config, KernelSpec.make(template, shape, config)) for config in configs]
                missing = [spec for config, spec in specs if (spec.key, order.config_json(config)) not in known]
                yield from missing[:max_trials]

    def _cuda_measurer(self, template: Any, shape: Any) -> Any:
        arguments = (shape, self._gpu, self._index, Path(self.store.path).parent, self.options.seed)
        if self.options.isolate:
            return self._isolation.measurer(measure.cuda_measurer, template, *arguments)
        return measure.cuda_measurer(template, *arguments)


class _Metered:
    """A measurer whose time the session counts."""

    def __init__(self, measurer: Any, session: Session) -> None:
        self._measurer, self._session = measurer, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._measurer, name)

    def measure(self, *arguments: Any, **options: Any) -> Any:
        with self._metered():
            return self._measurer.measure(*arguments, **options)

    def verify(self, *arguments: Any, **options: Any) -> Any:
        with self._metered():
            return self._measurer.verify(*arguments, **options)

    def shootout(self, *arguments: Any, **options: Any) -> Any:
        with self._metered():
            return self._measurer.shootout(*arguments, **options)

    @contextlib.contextmanager
    def _metered(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._session.measuring_s += time.monotonic() - start


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


def supporting(shape: Any, direction: str, gpu: Any = None, chosen: Any = None) -> list[Any]:
    """Templates that can be tuned for a problem.

    Args:
        shape: the problem.
        direction: as for `tune`.
        gpu: the `Device` they must be for; any when left out.
        chosen: this template only (name or instance).

    Raises:
        InvalidInput: the chosen template is of another operation.
        NoKernel: with the reasons, when there are none.
    """
    from tpf_jit.templates import registry

    if isinstance(chosen, str):
        chosen = registry.get(chosen)
    if chosen is not None:
        check_operation(chosen, shape.op)
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


def workers(options: TuneOptions) -> int:
    """Compile processes of a run."""
    return max(1, options.workers or len(os.sched_getaffinity(0)) - 1)


def _builder(store: Any, options: TuneOptions) -> Builder:
    objects = options.objects
    if objects is None:
        from tpf_jit.cache import ObjectStore

        objects = ObjectStore()

    def make_pool() -> Any:
        from tpf_jit.pool import CompilePool

        return CompilePool(workers(options))

    return Builder(objects, store, options.make_pool or make_pool, 2 * workers(options))


def _versions(template: Any) -> dict[str, str]:
    from tpf_jit import __version__
    from tpf_jit.compiler import toolchain

    versions = {**toolchain(template.backend), "tpf_jit": __version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["torch"] = importlib.metadata.version("torch")
    return versions
