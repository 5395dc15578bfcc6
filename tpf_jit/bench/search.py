"""How good is a search that stops early? Every configuration is measured once, then searches are replayed from those times.

1. Every configuration of every template of a cell is measured, by the sweep itself (`tune.many`), into a database of its own.
2. Without a GPU: the order in which a sweep would try them (`tune.sweep.ordered_space` and `tune.order.make_source`, which it
   calls too), for each state of knowledge in `KNOWLEDGE`; what it has found after a share of all trials, and when it comes within
   `WITHIN` of the fastest.

Times are the medians of the screening, of all configurations by one protocol in one run; the shoot-out's figures, which only the
best have, are not used. The fastest of many medians is low by chance, and the search's find is held against it: noise counts
against the search. A configuration that failed costs a trial like any other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpf_jit.bench import attention, multiplication
from tpf_jit.bench.environment import record_head
from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.templates.base import canonical_json
from tpf_jit.tune import TuneOptions, order, sweep
from tpf_jit.tune.cells import Cell
from tpf_jit.tune.many import Limits, sweep_many
from tpf_jit.tune.measure import PROTOCOL, MeasureSettings
from tpf_jit.tune.session import supporting, workers

WITHIN = 0.02
"""Relative distance from the fastest configuration at which a search has arrived."""

KNOWLEDGE = {
    "analytic": "nothing measured",
    "neighbour": "the other problems of this run",
    "shipped": "the shipped tables less the problem itself",
}
"""What a replayed search knows beforehand. One that orders no template's trials is not replayed."""

SEED = 0
"""Of Optuna's sampler, where spaces are so large that it is asked and `TuneOptions.seed` is left out."""


@dataclass(frozen=True)
class SearchSettings:
    """What to measure and replay.

    Attributes:
        share: of all configurations of a cell, those that the search may try; above 0, at most 1.
        budget_s: seconds of search for all cells together; cells that are not whole then are left out. No limit when left out.
        db: database of this bench, which goes on from what is there; a temporary one when left out. Never the user's.
        options: of the sweep; `enumerate_limit` counts in the replay only.

    Raises:
        InvalidInput: `share` is out of range, or `db` is the user's database.
    """

    share: float = 0.15
    budget_s: float | None = None
    db: str | os.PathLike[str] | None = None
    options: TuneOptions = field(default_factory=TuneOptions)

    def __post_init__(self) -> None:
        from tpf_jit.tuning_db.reader import user_database_path

        if not 0 < self.share <= 1:
            raise InvalidInput.of("share", self.share, "above 0, at most 1")
        if self.db is not None and user_database_path(self.db).resolve() == user_database_path().resolve():
            raise InvalidInput.of("db", str(self.db), "a file other than the user's tuning database")


@dataclass(frozen=True)
class Space:
    """All configurations of one template for one cell, measured.

    `rows` are the search rows by canonical JSON of the configuration, in the template's order.
    """

    cell: Cell
    template: Any
    rows: Mapping[str, Any]

    def us(self, text: str) -> float | None:
        """Median of a configuration in us; of one that was stopped early that of its first samples; None of one that failed."""
        row = self.rows[text]
        return row.median_us if row.status in ("ok", "slow") else None


def bench_search(
    cells: Sequence[Cell],
    settings: SearchSettings | None = None,
    device: str | None = None,
    command: str = "",
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure all configurations of `cells` (`tune.cells.plan`), and replay searches over them.

    Args:
        cells: what to measure. Those of one direction are each other's neighbours.
        settings: see `SearchSettings`.
        device: CUDA device; the current one when left out.
        command: command line for the record.
        say: told about every finished cell, for people.

    Returns:
        A record of kind ``sweep``. `absent_cells` says why cells are left out. Times are in us; `ratio` is the time found within
        `trials` over the best of all, None if none of them worked; `trials_to_2pct` is None if the search ends before.

    Raises:
        MeasurementFailed: there is no GPU, it was lost, or no cell is whole.
        NoKernel: there are no kernels for this GPU.
        DatabaseError: the database cannot be read or written.
        InvalidInput: `device` is no CUDA device.
        KeyboardInterrupt: the user stopped it; with `SearchSettings.db` the same call goes on from there.
    """
    import torch

    from tpf_jit.tuning_db.store import TuningStore

    settings = settings or SearchSettings()
    try:
        place = torch.device(device or "cuda")
    except RuntimeError:
        place = None
    if place is None or (place.type != "cuda" and settings.options.make_measurer is None):
        raise InvalidInput.of("--device", repr(device), "a CUDA device: searches are measured on a GPU")
    everything = replace(settings.options, enumerate_limit=sys.maxsize)
    with _database(settings.db) as path:
        told = None if say is None else lambda report: say(report.line())
        summary = sweep_many(cells, path, everything, Limits(settings.budget_s), place.index, on_cell=told)
        if summary.interrupted:
            raise KeyboardInterrupt
        if place.type == "cuda" and place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        record = record_head("sweep", command, place, {})
        with TuningStore(path) as store:
            # One GPU measured, so there is one model.
            model = next((report.device for report in summary.cells if report.device), "")
            rows, absent = replay(cells, store, model, settings)
    if not rows:
        why = "; ".join(f"{cell}: {reason}" for cell, reason in absent.items())
        raise MeasurementFailed(f"no cell was measured whole ({why}); with `db` the same call goes on from what is there")
    record["method"] = {
        "timer": "cuda events",
        "statistic": "median",
        "samples": MeasureSettings().samples,
        "protocol": PROTOCOL,
        "times": "screening of all configurations",
        "search": "replayed in the sweep's order",
        **KNOWLEDGE,
    }
    return {**record, "absent_cells": absent, "rows": rows}


def replay(
    cells: Sequence[Cell], store: Any, model: str, settings: SearchSettings | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(rows of the record, why cells are left out) from the rows of a database. Needs no GPU.

    Args:
        cells: what was measured.
        store: the database, open.
        model: device model (`tuning_db.device_model`) that measured.
        settings: see `SearchSettings`.
    """
    settings = settings or SearchSettings()
    whole: dict[Cell, list[Space]] = {}
    absent: dict[str, str] = {}
    for cell in cells:
        spaces, missing = _spaces(cell, store, model, settings.options)
        total = missing + sum(len(space.rows) for space in spaces)
        if missing:
            absent[cell.key] = f"{missing} of {total} configurations are not measured"
        elif not any(row.status == "ok" for space in spaces for row in space.rows.values()):
            absent[cell.key] = "every configuration failed"
        else:
            whole[cell] = spaces
    templates = {space.template.name: space.template for spaces in whole.values() for space in spaces}
    here = {name: _comparable(store.trials(device=model, template=name)) for name in templates}
    shipped = {name: list(sweep.shipped_rows(template).values()) for name, template in templates.items()}
    rows: list[dict[str, Any]] = []
    for cell, spaces in whole.items():
        others = {other.key for other in whole if other != cell}
        known = {
            "analytic": dict.fromkeys(templates, ()),
            "neighbour": {name: [row for row in found if row.cell in others] for name, found in here.items()},
            "shipped": {name: [row for row in found if row.cell != cell.key] for name, found in shipped.items()},
        }
        for knowledge, by_template in known.items():
            searched = [search(space, model, by_template[space.template.name], settings.options) for space in spaces]
            origins = [origin for _, origin in searched]
            if knowledge == "analytic" or any(origin != "analytic" for origin in origins):
                asked = {"knowledge": knowledge, "order": "; ".join(origins)}
                found = _found(spaces, _turns([times for times, _ in searched]), settings.share)
                rows.append({"op": cell.shape.op, "pass": cell.direction, **_problem(cell.shape), **asked, **found})
    return rows, absent


def search(
    space: Space, model: str, known: Sequence[Any], options: TuneOptions | None = None
) -> tuple[list[tuple[str, float | None]], str]:
    """((configuration, time in us or None) in the order in which a sweep tries them, where that order came from).

    Args:
        space: what is to be searched.
        model: device model.
        known: trial rows that the sweep would find in its databases, none of them of this cell.
        options: of the sweep. As there, so many candidates are asked for ahead of the results.
    """
    options = options or TuneOptions()
    shape, template = space.cell.shape, space.template
    ordered, origin = sweep.ordered_space(template, shape, space.cell.direction, model, known)
    source = order.make_source(ordered, options.enumerate_limit, SEED if options.seed is None else options.seed)
    in_flight = 2 * workers(options)
    waiting: deque[Any] = deque()
    tried = []
    with contextlib.closing(source):
        while True:
            while len(waiting) < in_flight and (config := source.ask()) is not None:
                waiting.append(config)
            if not waiting:
                return tried, origin
            config = waiting.popleft()
            text = order.config_json(config)
            tried.append((text, space.us(text)))
            source.tell(config, space.us(text) if space.rows[text].status == "ok" else None)


def reached(row: Mapping[str, Any]) -> bool:
    """Whether the search of a row came within `WITHIN` of the best in its trials."""
    return row["ratio"] is not None and row["ratio"] <= 1 + WITHIN


@contextlib.contextmanager
def _database(path: str | os.PathLike[str] | None) -> Iterator[Path]:
    if path is not None:
        yield Path(path).expanduser()
        return
    with tempfile.TemporaryDirectory(prefix="tpf_jit_search_") as folder:
        yield Path(folder) / "search.db"


def _comparable(rows: Iterable[Any]) -> list[Any]:
    return [row for row in rows if row.protocol == PROTOCOL]


def _spaces(cell: Cell, store: Any, model: str, options: TuneOptions) -> tuple[list[Space], int]:
    """(spaces of the cell's templates, configurations without a row of the present kernel)."""
    spaces, missing = [], 0
    for template in supporting(cell.shape, cell.direction, None, options.template):
        rows = _comparable(store.trials(cell=cell.key, device=model, template=template.name))
        # Oldest first, so that of several the newest stays.
        newest = {(row.kernel_key, canonical_json(row.config)): row for row in rows if row.grade == "search"}
        found = {}
        for config in template.space(cell.shape):
            text = order.config_json(config)
            row = newest.get((KernelSpec.make(template, cell.shape, config).key, text))
            if row is None:
                missing += 1
            else:
                found[text] = row
        spaces.append(Space(cell, template, found))
    return spaces, missing


def _turns(searches: Iterable[list[tuple[str, float | None]]]) -> list[float | None]:
    """Times of one cell's searches, a template each, in turns: the first rounds are what `max_trials` of as many tries."""
    return [trial[1] for turn in itertools.zip_longest(*searches) for trial in turn if trial is not None]


def _found(spaces: Sequence[Space], tried: Sequence[float | None], share: float) -> dict[str, Any]:
    """What a search finds that meets these times in this order."""
    everything = [space.us(text) for space in spaces for text in space.rows]
    best = min(us for us in everything if us is not None)
    # Rounded first: 0.07 * 100 is above 7.
    trials = min(len(tried), math.ceil(round(share * len(everything), 9)))
    found = min((us for us in tried[:trials] if us is not None), default=None)
    near = (number for number, us in enumerate(tried, 1) if us is not None and us <= best * (1 + WITHIN))
    return {
        "configurations": len(everything),
        "failed": sum(us is None for us in everything),
        "share": share,
        "trials": trials,
        "found_us": None if found is None else round(found, 3),
        "best_us": round(best, 3),
        "ratio": None if found is None else round(found / best, 6),
        "trials_to_2pct": next(near, None),
    }


def _problem(shape: Any) -> dict[str, Any]:
    fields = {"triangle_attention": attention.problem_fields, "triangle_multiplication": multiplication.problem_fields}
    return fields[shape.op](shape) if shape.op in fields else {k: v for k, v in shape.to_dict().items() if k != "op"}
