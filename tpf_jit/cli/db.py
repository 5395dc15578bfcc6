"""`tpf-jit db`: look into the tuning database, move rows between machines, check it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpf_jit.cli._output import Json, cell, print_json, print_table, say

if TYPE_CHECKING:
    from tpf_jit.tuning_db import TrialRow, TuningStore

app = typer.Typer(no_args_is_help=True, help="List, show, export, import, merge and verify the tuning database.")

Database = Annotated[
    Path | None, typer.Option("--db", help="Database file; the user database (TPF_JIT_DB, else the data folder) if left out.")
]
Device = Annotated[str | None, typer.Option("--device", help="Only device models that contain this text, such as H200.")]
File = Annotated[Path, typer.Argument(metavar="FILE")]


def _open(path: Path | None, must_exist: bool = True) -> TuningStore:
    from tpf_jit.tuning_db import TuningStore

    return TuningStore(_existing(path) if must_exist else path)


def _existing(path: Path | None) -> Path:
    from tpf_jit.errors import DatabaseError
    from tpf_jit.tuning_db import user_database_path

    file = path or user_database_path()
    if not file.is_file():
        raise DatabaseError(f"{file} does not exist; `tpf-jit tune TARGET` makes it, `tpf-jit db import FILE` fills it")
    return file


@app.command("list")
def list_(
    device: Device = None,
    shipped: Annotated[bool, typer.Option(help="Include the tables that install with the package.")] = True,
    db: Database = None,
    json: Json = False,
) -> None:
    """Every tuned problem: its winner, the time, and the layer it comes from."""
    rows = [
        (layer.name, entry[0])
        for layer in _layers(db, shipped)
        for entry in layer.winners.values()
        if device is None or device.lower() in entry[0].device.lower()
    ]
    rows.sort(key=lambda row: (row[1].device, row[1].cell, row[0]))
    if json:
        print_json([{"layer": layer, **asdict(winner)} for layer, winner in rows])
        return
    columns = ("problem", "device", "us", "configuration", "grade", "date", "layer")
    table = [(w.cell, w.device_name, w.us, cell(w.config), w.grade, w.date[:10], layer) for layer, w in rows]
    print_table("tuned problems", columns, table, "" if rows else "nothing is tuned yet: tpf-jit tune TARGET")


def _layers(db: Path | None, shipped: bool) -> list[Any]:
    from tpf_jit.tuning_db import reader

    user = db or reader.user_database_path()
    layers = [reader.read_layer(user)] if user.is_file() else []
    return layers + ([reader.read_shipped()] if shipped else [])


@app.command()
def show(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="A problem as `db list` names it, or a part of it.")],
    device: Device = None,
    status: Annotated[str | None, typer.Option("--status", help="Only this status (ok, wrong, compile_error, ...).")] = None,
    limit: Annotated[int, typer.Option("--limit", help="At most this many rows.")] = 50,
    db: Database = None,
    json: Json = False,
) -> None:
    """The trials of a problem, fastest first, with their errors against FP64 and what became of them."""
    with _open(db) as store:
        names = [name for name in store.cells() if problem in name]
        trials = [trial for name in names for trial in store.trials(cell=name, status=status)]
    if device:
        trials = [trial for trial in trials if device.lower() in trial.device_model.lower()]
    trials.sort(key=lambda trial: (trial.cell, trial.median_us is None, trial.median_us or 0.0))
    shown = trials[:limit]
    if json:
        print_json([{"id": trial.id, **trial.to_dict()} for trial in shown])
        return
    columns = ("problem", "status", "us", "p10", "p90", "configuration", "worst error", "grade", "date", "detail")
    note = f"{len(trials) - len(shown)} more rows; --limit shows them" if len(shown) < len(trials) else ""
    print_table("trials", columns, [_trial(trial) for trial in shown], note or ("" if trials else "no such trials"))


def _trial(trial: TrialRow) -> tuple[Any, ...]:
    worst = max(trial.errors.values(), default=None)
    times = (trial.median_us, trial.p10_us, trial.p90_us)
    return (trial.cell, trial.status, *times, cell(trial.config), worst, trial.grade, trial.date[:10], trial.detail[:60])


@app.command()
def export(file: File, db: Database = None) -> None:
    """Write all rows as sorted JSON lines: text to review, to keep in git, to merge."""
    with _open(db) as store:
        store.export(file)
    say(f"written: {file}")


@app.command("import")
def import_(file: File, db: Database = None) -> None:
    """Add the rows of an exported file; rows that are there already are left alone."""
    with _open(db, must_exist=False) as store:
        _report(store.import_(file))


@app.command()
def merge(file: File, db: Database = None) -> None:
    """Add the rows of another database file; merging is a union, so order and repetition do not matter."""
    with _open(db, must_exist=False) as store:
        _report(store.merge(file))


def _report(result: Any) -> None:
    say(f"added: {cell(result) or 'nothing'}")


@app.command()
def verify(db: Database = None, json: Json = False) -> None:
    """Check the file, the schema, and every row against the hash of its content. Exit code 1 where something is wrong."""
    from tpf_jit.tuning_db.audit import audit_file

    # Not through a store, which would set a damaged file aside and find its replacement sound.
    problems = audit_file(_existing(db))
    if json:
        print_json({"problems": problems})
    else:
        for problem in problems:
            print(problem)
        print("the database is sound" if not problems else f"{len(problems)} problems")
    if problems:
        raise typer.Exit(1)
