"""What sweeps of many cells need of the toy: directions, shapes of several kernels, options that travel to other processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tune_fakes import H200, SETTINGS, InlinePool, ToyBackend, ToyConfig, ToyShape, ToyTemplate, ToyTimer

from tpf_jit.compiler import compile_kernel
from tpf_jit.templates import registry
from tpf_jit.templates.base import canonical_json
from tpf_jit.tune import TuneOptions, ledger
from tpf_jit.tune.cells import Cell
from tpf_jit.tune.measure import WorkloadMeasurer
from tpf_jit.tune.order import config_json
from tpf_jit.tuning_db import TuningStore

CONFIGS = tuple(ToyConfig(tile, stages) for tile in (16, 32, 64, 128) for stages in (1, 2, 3))
CROPS = (64, 128, 192, 256)
SHAPES = [ToyShape(crop, rows) for rows in (8, 16) for crop in CROPS]


class ToyMany(ToyTemplate):
    """Kernels that serve all crops, and are others for other rows."""

    name = "toy_many_forward"

    def __init__(self, configs: tuple[ToyConfig, ...] | None = None) -> None:
        super().__init__(configs or CONFIGS)

    def variant(self, shape: Any, **flags: Any) -> dict[str, Any]:
        return {"rows": shape.rows}


class ToyManyBackward(ToyMany):
    name = "toy_many_backward"
    direction = "backward"

    def supports(self, shape: Any) -> tuple[bool, str]:
        return (True, "") if shape.rows == 8 else (False, "rows other than 8")


def private_registry(monkeypatch: Any) -> None:
    """A registry with the toy for one test, which leaves the others' as it was."""
    registry.templates()  # what is found on the first look-up must not be found in the copy only
    monkeypatch.setattr(registry, "_templates", dict(registry._templates))
    register()


def register(configs: tuple[ToyConfig, ...] | None = None) -> None:
    """Make the registry of this process know the toy, and nothing else of its operation."""
    for name in [template.name for template in registry.templates(op="toy")]:
        registry._templates.pop(name)  # of other tests
    registry.register(ToyMany(configs), replace=True)
    registry.register(ToyManyBackward(configs), replace=True)
    registry.register_backend(ToyBackend, replace=True)


def cells(shapes: list[ToyShape] | None = None) -> list[Cell]:
    return [Cell(shape, "forward") for shape in shapes or SHAPES]


class SlowTimer(ToyTimer):
    """A sample takes a moment; at a given cell and time the process is killed, once for each name in `killed`."""

    def __init__(self, sample_s: float = 0.0, die: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.sample_s, self.die = sample_s, die

    def sample(self, launches: Any, count: int, group: int = 1, flush: bool = False) -> list[float]:
        time.sleep(self.sample_s)
        found = super().sample(launches, count, group, flush)
        if self.die and self.calls > 40:
            try:
                Path(self.die).touch(exist_ok=False)
            except FileExistsError:
                return found
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def measurer(
    template: Any, shape: Any, sample_s: float = 0.0, die: str = "", configs: Any = None, noise: float = 0.001
) -> WorkloadMeasurer:
    timer = SlowTimer(sample_s, die, noise=noise)
    return WorkloadMeasurer(template, shape, timer, ToyBackend().load, "toy", dict(H200), SETTINGS, {"seed": 7})


def travelling(sample_s: float = 0.0, die: str = "", configs: Any = None, noise: float = 0.001, **more: Any) -> TuneOptions:
    """Options that can be pickled; the process that unpickles them registers the toy (see `Registering`)."""
    make = Registering(sample_s, die, configs, noise)
    return TuneOptions(make_measurer=make, make_pool=InlinePool, seed=7, workers=2, **more)


class Registering(partial):
    """`measurer` with its arguments; unpickling it registers the toy, as an entry point would."""

    def __new__(cls, sample_s: float, die: str, configs: Any, noise: float) -> Registering:
        register(configs)
        return super().__new__(cls, measurer, sample_s=sample_s, die=die, configs=configs, noise=noise)

    def __reduce__(self) -> Any:
        return Registering, tuple(self.keywords[name] for name in ("sample_s", "die", "configs", "noise"))


class ThreadPool:
    """Compile workers that are threads and mostly sleep. Remembers which kernels it was asked for, as (rows, config) pairs."""

    def __init__(self, workers: int = 4, compile_s: float = 0.0) -> None:
        self.submitted: list[tuple[int, str]] = []
        self._compile_s = compile_s
        self._executor = ThreadPoolExecutor(workers)

    def submit(self, spec: Any) -> Future:
        self.submitted.append((dict(spec.variant)["rows"], canonical_json(dict(spec.config))))
        return self._executor.submit(self._compile, spec)

    def _compile(self, spec: Any) -> Any:
        time.sleep(self._compile_s)  # not in the backend: compiles of one process take turns
        return compile_kernel(spec)

    def close(self, wait: bool = True) -> None:
        self._executor.shutdown(wait=True, cancel_futures=not wait)


def search_rows(path: Any = None) -> list[Any]:
    with TuningStore(path) as store:
        return [row for row in store.trials() if row.grade == "search"]


def assert_all_tried_once(planned: Any, path: Any = None, configs: Any = CONFIGS) -> None:
    """Every configuration of every cell has exactly one search row; every cell is won by the best; the database is sound."""
    expected = Counter((cell.key, config_json(config)) for cell in planned for config in configs)
    assert Counter((row.cell, canonical_json(row.config)) for row in search_rows(path)) == expected
    with TuningStore(path) as store:
        assert store.verify() == []
        # What a killed process leaves behind between a row and the end of its lease binds nobody.
        assert not [lease for lease in store.leases() if ledger._alive(lease["owner"])]
        for cell in planned:
            best = store.best(cell.key, H200)
            assert (best.config["tile"], best.config["stages"], best.grade) == (64, 3, "final")
