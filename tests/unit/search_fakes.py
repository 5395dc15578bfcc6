"""Toy cells that are measured whole, for the replay of searches over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from many_fakes import ToyMany, private_registry
from tune_fakes import H200, SETTINGS, InlinePool, ToyBackend, ToyConfig, ToyShape, ToyTimer

from tpf_jit.bench import SearchSettings, bench_search
from tpf_jit.bench import search as bench
from tpf_jit.templates import registry
from tpf_jit.tune import TuneOptions
from tpf_jit.tune.cells import Cell
from tpf_jit.tune.measure import WorkloadMeasurer
from tpf_jit.tuning_db import TuningStore, reader
from tpf_jit.tuning_db.rows import device_model

MODEL = device_model(H200)
CONFIGS = tuple(ToyConfig(tile, stages) for tile in (16, 32, 64, 128) for stages in (1, 2, 3))

LARGE = tuple(ToyConfig(tile, stages) for tile in range(8, 136, 8) for stages in range(1, 7))
"""More than Optuna's search tries before it gives up."""


class Costed(ToyMany):
    """Its cost model prefers large tiles, so that behind the default, (16, 1), come (128, 3), (128, 2), (128, 1), (64, 3) ..."""

    def cost(self, shape: Any, config: Any) -> float:
        return -10 * config.tile - config.stages


class Second(ToyMany):
    """Another template of the same direction."""

    name = "toy_second_forward"


def install_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy with a cost model, on a device that works; no shipped tables."""
    monkeypatch.setattr(ToyTimer, "dead", False)
    monkeypatch.setattr(ToyBackend, "version", "1")
    monkeypatch.setattr(ToyBackend, "compile_s", 0.0)
    monkeypatch.setattr(reader, "shipped_files", list)
    private_registry(monkeypatch)
    use(Costed(CONFIGS))


def use(*templates: Any) -> None:
    """Make these the toy's templates."""
    for template in registry.templates(op="toy"):
        registry._templates.pop(template.name)
    for template in templates:
        registry.register(template, replace=True)


def plan(*crops: int, direction: str = "forward") -> tuple[Cell, ...]:
    return tuple(Cell(ToyShape(crop), direction) for crop in crops)


def options(timer: ToyTimer | None = None, **more: Any) -> TuneOptions:
    def make_measurer(template: Any, shape: Any) -> WorkloadMeasurer:
        return WorkloadMeasurer(template, shape, timer or ToyTimer(), ToyBackend().load, "toy", dict(H200), SETTINGS, {"seed": 7})

    return TuneOptions(make_measurer=make_measurer, make_pool=InlinePool, seed=7, workers=2, **more)


def measured(planned: Any, db: Path, share: float = 0.25, **more: Any) -> dict[str, Any]:
    settings = SearchSettings(share, db=db, options=options(**more))
    return bench_search(planned, settings, "cpu", "tpf-jit bench search --crops 64")


def by_knowledge(record: dict[str, Any], crop: int = 64) -> dict[str, dict[str, Any]]:
    return {row["knowledge"]: row for row in record["rows"] if row["crop"] == crop}


def search_rows(db: Path, cell: Cell) -> list[Any]:
    with TuningStore(db) as store:
        return [row for row in store.trials(cell=cell.key) if row.grade == "search"]


def space(db: Path, cell: Cell, template: Any) -> bench.Space:
    with TuningStore(db) as store:
        found, missing = bench._spaces(cell, store, MODEL, options())
    assert missing == 0
    return next(each for each in found if each.template is template)
