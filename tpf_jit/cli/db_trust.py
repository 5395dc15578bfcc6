"""`tpf-jit db stale`, `db prune`, `db diff` and the timing part of `db verify`: how far the stored winners can be trusted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tpf_jit.cli._output import Json, cell, number, print_json, print_table, say

Database = Annotated[
    Path | None, typer.Option("--db", help="Database file; the user database (TPF_JIT_DB, else the data folder) if left out.")
]
Device = Annotated[str | None, typer.Option("--device", help="Only device models that contain this text, such as H200.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Compile processes; one per CPU if left out.")]


def stale(
    device: Device = None,
    shipped: Annotated[bool, typer.Option(help="Include the tables that install with the package.")] = True,
    recompile: Annotated[
        bool, typer.Option("--recompile", help="Compile the stale winners; equal device code makes them current.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Show current winners as well.")] = False,
    jobs: Jobs = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Winners measured with other sources or another compiler than today's, and what serves meanwhile. Exit code 1 if any."""
    found = of_device(_survey(db, shipped), device, _model)
    verdicts = []
    if recompile and any(each.changes for each in found):
        verdicts = _recompile(found, db, shipped, jobs)
        found = of_device(_survey(db, shipped), device, _model)
    old = [each for each in found if each.changes]
    shown = found if every else old
    if json:
        rows = [{**asdict(each), "current": not each.changes} for each in shown]
        print_json({"stale": len(old), "winners": len(found), "rows": rows, "recompiled": [asdict(each) for each in verdicts]})
    else:
        if verdicts:
            table = [(v.outcome, v.winner.cell, v.winner.device_name, cell(v.winner.config), v.detail) for v in verdicts]
            print_table("recompiled", ("", "problem", "device", "configuration", "detail"), table)
        columns = ("problem", "device", "us", "measured", "changed since", "stale rows", "serves meanwhile", "layer")
        print_table("stale winners", columns, [_standing(each) for each in shown], "" if shown else _none_stale(len(found)))
        if old and not recompile:
            print("to mend it: tpf-jit db stale --recompile (the code may be the same), else tpf-jit tune")
    if old:
        raise typer.Exit(1)


def _standing(each: Any) -> tuple[Any, ...]:
    w = each.winner
    changed = "; ".join(each.changes) or "nothing"
    return (w.cell, w.device_name, w.us, w.date[:10], changed, f"{each.stale_rows} of {each.rows}", each.serves, each.layer)


def _none_stale(count: int) -> str:
    return f"all {count} winners are current" if count else "nothing is tuned yet: tpf-jit tune TARGET"


def of_device(rows: Iterable[Any], device: str | None, model: Callable[[Any], str]) -> list[Any]:
    """The rows whose device model has `--device` in its name, all if that is None; model: of a row.

    Raises:
        InvalidInput: no row's has it, and a mistyped one would pass for one without news; the message names those there are.
    """
    from tpf_jit.errors import InvalidInput

    rows = list(rows)
    found = [row for row in rows if device is None or device.lower() in model(row).lower()]
    if found or device is None:
        return found
    there = sorted({model(row) for row in rows} - {""})
    known = f"a part of one of these device models: {', '.join(there)}"
    raise InvalidInput.of("--device", repr(device), known if there else "nothing, as nothing is tuned yet: tpf-jit tune TARGET")


def _model(each: Any) -> str:
    return each.winner.device


def _survey(db: Path | None, shipped: bool) -> list[Any]:
    from tpf_jit import standing
    from tpf_jit.tuning_db import contents, reader, user_database_path

    user = db or user_database_path()
    layers = [reader.read_shipped()] if shipped else []
    trials = contents.shipped() if shipped else {}
    if db is not None or user.exists():
        trials = {**trials, **contents.read(user).trials}
        layers.insert(0, reader.read_layer(user))
    return standing.survey(layers, trials, (db, shipped))


def _recompile(found: list[Any], db: Path | None, shipped: bool, jobs: int | None) -> list[Any]:
    """Compile the stale winners and those kept behind them."""
    from tpf_jit.standing import Presents
    from tpf_jit.tune import recheck
    from tpf_jit.tuning_db import TuningStore, reader, user_database_path

    wanted = {(each.layer, each.winner.cell, each.winner.device) for each in found if each.changes}
    layers = [reader.read_layer(db or user_database_path()), *([reader.read_shipped()] if shipped else [])]
    winners = [
        winner
        for layer in layers
        for (name, model), entry in layer.winners.items()
        if (layer.name, name, model) in wanted
        for winner in entry
    ]
    say(f"compiling {len(winners)} configurations")
    with TuningStore(db) as store, _builder(store, jobs) as builder:
        return list(recheck.confirm(winners, store, builder, Presents()))


def prune(
    yes: Annotated[bool, typer.Option("--yes", help="Drop the rows; without it they are only listed.")] = False,
    keep: Annotated[Path | None, typer.Option("--keep", help="Write the rows to this file (JSON lines) before they go.")] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Drop rows that decide nothing any more: superseded, or of sources that are gone. Lists them; --yes drops them.

    Winners, what stands behind them, and everything known about the sources of today stay.
    """
    from tpf_jit.standing import Presents
    from tpf_jit.tuning_db import TuningStore, contents, user_database_path
    from tpf_jit.tuning_db import prune as planning

    path = db or user_database_path()
    presents = Presents()
    content = contents.sound(path)
    going = planning.plan(contents.all_evidence(content), presents)
    if keep is not None and going:
        _write(keep, {identity: content.trials[identity] for identity in going})
    if yes and going:
        with TuningStore(path) as store:
            going = store.prune(presents)
    if json:
        print_json({"dropped": yes, "rows": len(content.trials), "going": going})
        return
    counts = Counter((content.trials[i].cell, content.trials[i].device_model, reason) for i, reason in going.items())
    rows = [(name, model, reason, count) for (name, model, reason), count in sorted(counts.items())]
    print_table("rows that may go" if not yes else "rows dropped", ("problem", "device", "why", "rows"), rows, "" if rows else
                "every row is still of use")  # fmt: skip
    if rows:
        verb = "dropped" if yes else "would go; nothing was changed, --yes drops them"
        print(f"{len(going)} of {len(content.trials)} rows {verb}")


def _write(path: Path, trials: dict[str, Any]) -> None:
    from tpf_jit.tuning_db import merge

    merge.write_lines(existing_folder(path), merge.Content(trials))
    say(f"kept in {path}: {len(trials)} rows")


def existing_folder(path: Path) -> Path:
    """The path, whose folder must exist: a command that writes a file makes no folders by the way.

    Raises:
        InvalidInput: when it does not.
    """
    from tpf_jit.errors import InvalidInput

    if not path.absolute().parent.is_dir():
        remedy = f"a file in a folder that exists (mkdir -p {path.parent})"
        raise InvalidInput.of("FILE", f"{path}, whose folder does not exist", remedy)
    return path


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A database, or an exported .jsonl file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    device: Device = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, help="Times within this share of each other are equal.")
    ] = 0.02,
    every: Annotated[bool, typer.Option("--all", help="Show equal problems as well.")] = False,
    json: Json = False,
) -> None:
    """Where two databases or exported files disagree: other winners, other times, problems one lacks. Exit code 1 if anywhere."""
    from tpf_jit.tuning_db import compare, contents

    sides = [contents.all_evidence(contents.read(path)) for path in (first, second)]
    found = of_device(compare.compare(*sides, tolerance), device, lambda each: each.device)
    unequal = [each for each in found if each.kind != compare.SAME]
    shown = found if every else unequal
    if json:
        print_json([{**asdict(each), "ratio": each.ratio} for each in shown])
    else:
        columns = ("problem", "device", "difference", "us in A", "us in B", "B / A", "configuration in A", "in B")
        rows = [(d.cell, d.device, d.kind, *_sides(d)) for d in shown]
        print_table(f"A: {first}, B: {second}", columns, rows, "" if rows else f"{len(found)} problems, no difference")
        if rows:
            print(", ".join(f"{count} {kind}" for kind, count in sorted(Counter(each.kind for each in found).items())))
    if unequal:
        raise typer.Exit(1)


def _sides(d: Any) -> tuple[Any, ...]:
    times = tuple(side.us if side else None for side in (d.first, d.second))
    same = d.first is not None and d.second is not None and d.first.config == d.second.config
    configs = tuple(cell(side.config) if side else None for side in (d.first, d.second))
    return (*times, d.ratio, configs[0], "the same" if same else configs[1])


def remeasure(count: int, tolerance: float, index: int | None, db: Path | None, json: bool) -> int:
    """Time a sample of the winners of this GPU and print how they compare; returns how many drifted or failed."""
    from tpf_jit.tune import recheck
    from tpf_jit.tuning_db import TuningStore, load_winners, reader, user_database_path

    with device_measurer(index) as (model, make):
        paths = [db or user_database_path(), *reader.shipped_files()]
        winners = [entry[0] for (_, _, where), entry in load_winners(paths).items() if where == model]
        with TuningStore(db) as store, _builder(store, None) as builder:
            chosen = recheck.sample(winners, count)
            found = list(recheck.remeasure(chosen, builder, make, tolerance))
    bad = [each for each in found if each.outcome != recheck.STEADY]
    if json:
        print_json({"remeasured": [{**asdict(each), "drift": each.drift} for each in found], "drifted": len(bad)})
    else:
        drifts = [None if each.drift is None else f"{100 * each.drift:+.1f} %" for each in found]
        rows = [(v.outcome, v.winner.cell, v.winner.us, v.us, d, v.detail) for v, d in zip(found, drifts, strict=True)]
        note = "" if rows else f"no winner was measured on {model}"
        print_table("measured again", ("", "problem", "stored us", "us now", "drift", "detail"), rows, note)
        if rows:
            print(f"{len(bad)} of {len(rows)} differ by more than {number(100 * tolerance)} %" if bad else "all are steady")
    return len(bad)


@contextlib.contextmanager
def device_measurer(index: int | None) -> Iterator[tuple[str, Any]]:
    """(device model, `(template, shape) -> Measurer`) of this machine's GPU; every measurer works in one child process.

    Raises:
        MeasurementFailed: there is no GPU.
    """
    from tpf_jit.errors import MeasurementFailed
    from tpf_jit.tune import measure
    from tpf_jit.tune.isolated import Isolation
    from tpf_jit.tuning_db import user_database_path

    from tpf_jit.device import current_device  # isort: skip

    gpu = current_device(index)
    if gpu is None or gpu.arch is None:
        raise MeasurementFailed(f"measuring again needs the GPU that was measured; here is {gpu.name if gpu else 'none'}")
    with Isolation() as isolation:
        folder = user_database_path().parent
        yield (
            gpu.model,
            lambda template, shape: isolation.measurer(measure.cuda_measurer, template, shape, gpu, index or 0, folder),
        )


@contextlib.contextmanager
def _builder(store: Any, jobs: int | None) -> Iterator[Any]:
    from tpf_jit.cache import ObjectStore
    from tpf_jit.pool import CompilePool
    from tpf_jit.tune.build import Builder

    with Builder(ObjectStore(), store, lambda: CompilePool(jobs)) as builder:
        yield builder
