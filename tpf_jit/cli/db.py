"""`tpf-jit db`: look into the tuning database, move rows between machines, check it.

Commands that only read open the file read-only: a damaged one is reported and left as it is.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpf_jit.cli import db_trust, report
from tpf_jit.cli._output import Json, cell, print_json, print_table, say

if TYPE_CHECKING:
    from tpf_jit.tuning_db import TrialRow, TuningStore

app = typer.Typer(no_args_is_help=True, help="List, show, compare, move, check and prune the tuning database.")

Database, Device = db_trust.Database, db_trust.Device
File = Annotated[Path, typer.Argument(metavar="FILE")]


def _open(path: Path | None) -> TuningStore:
    from tpf_jit.tuning_db import TuningStore

    return TuningStore(path)


def _existing(path: Path | None) -> Path:
    from tpf_jit.errors import DatabaseError
    from tpf_jit.tuning_db.reader import folder_problem, user_database_path

    file = path or user_database_path()
    if wrong := folder_problem(file):
        raise DatabaseError(f"{file} {wrong}")
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
    winners = [(layer.name, entry[0]) for layer in _layers(db, shipped) for entry in layer.winners.values()]
    rows = db_trust.of_device(winners, device, lambda row: row[1].device)
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
    layers = [reader.read_layer(_existing(user))] if db is not None or user.exists() else []
    return layers + ([reader.read_shipped()] if shipped else [])


@app.command()
def show(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="A problem as `db list` names it, or a part of it.")],
    device: Device = None,
    status: Annotated[str | None, typer.Option("--status", help="Only this status (ok, wrong, compile_error, ...).")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="At most this many rows.")] = 50,
    shipped: Annotated[bool, typer.Option(help="Include the tables that install with the package.")] = True,
    db: Database = None,
    json: Json = False,
) -> None:
    """The trials of a problem, fastest first, with their errors against FP64 and what became of them."""
    from tpf_jit.errors import DatabaseError, InvalidInput

    trials = [(layer, trial) for layer, rows in _contents(db, shipped) for trial in rows if problem in trial.cell]
    if not trials:
        # With nothing to show, a missing database is the news.
        _existing(db)
        raise DatabaseError(f"no problem has {problem!r} in its name; `tpf-jit db list` shows those that there are")
    trials = db_trust.of_device(trials, device, lambda row: row[1].device_model)
    there = sorted({trial.status for _, trial in trials})
    if status not in (None, *there):
        raise InvalidInput.of("--status", repr(status), f"{', '.join(there)}, as the trials of {problem!r} are")
    trials = [pair for pair in trials if status in (None, pair[1].status)]
    trials.sort(key=lambda pair: (pair[1].cell, pair[1].median_us is None, pair[1].median_us or 0.0))
    shown = trials[:limit]
    if json:
        print_json([{"id": trial.id, "layer": layer, **trial.to_dict()} for layer, trial in shown])
        return
    columns = ("problem", "status", "us", "p10", "p90", "configuration", "worst error", "grade", "date", "layer", "detail")
    note = f"{len(trials) - len(shown)} more rows; --limit shows them" if len(shown) < len(trials) else ""
    print_table("trials", columns, [_trial(*pair) for pair in shown], note)


def _contents(db: Path | None, shipped: bool) -> list[tuple[str, list[TrialRow]]]:
    """The trials of the user's database and of the shipped tables; a trial that both have counts for the first."""
    from tpf_jit.tuning_db import contents, user_database_path

    user = db or user_database_path()
    own = contents.read(user).trials if db is not None or user.exists() else {}
    others = {name: row for name, row in contents.shipped().items() if name not in own} if shipped else {}
    return [(str(user), list(own.values())), ("shipped tables", list(others.values()))]


def _trial(layer: str, trial: TrialRow) -> tuple[Any, ...]:
    worst = max(trial.errors.values(), default=None)
    times = (trial.median_us, trial.p10_us, trial.p90_us)
    detail = shorten(trial.detail, 120, placeholder=" ...")
    return (trial.cell, trial.status, *times, cell(trial.config), worst, trial.grade, trial.date[:10], layer, detail)


@app.command()
def export(file: File, db: Database = None) -> None:
    """Write all rows as sorted JSON lines: text to review, to keep in git, to merge."""
    from tpf_jit.tuning_db import contents
    from tpf_jit.tuning_db.merge import write_lines

    content = contents.sound(_existing(db))
    count = write_lines(db_trust.existing_folder(file), content)
    say(f"written: {file}, {count} trials" + ("" if count else "; this database has none, and the tables that ship stay out"))


@app.command("import")
def import_(file: File, db: Database = None) -> None:
    """Add the rows of an exported file; rows that are there already are left alone."""
    with _open(db) as store:
        _report(store.import_(file))


@app.command()
def merge(file: File, db: Database = None) -> None:
    """Add the rows of another database file; merging is a union, so order and repetition do not matter."""
    with _open(db) as store:
        _report(store.merge(file))


def _report(result: Any) -> None:
    say(f"added: {cell(result) or 'nothing'}")


@app.command()
def verify(
    re_measure: Annotated[
        int | None, typer.Option("--re-measure", min=0, metavar="N", help="Time N of this GPU's winners again, too.")
    ] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="Drift of a time that counts as wrong.")] = 0.05,
    device: Annotated[int | None, typer.Option("--device", min=0, help="CUDA device index, to measure on.")] = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Check the file, the schema, and every row against the hash of its content. Exit code 1 where something is wrong."""
    from tpf_jit.tuning_db.audit import audit_file

    # Not through a store, which would set a damaged file aside and find its replacement sound.
    problems = audit_file(_existing(db))
    if json and (problems or re_measure is None):
        print_json({"problems": problems})
    elif not json:
        for problem in problems:
            print(problem)
        print("the database is sound" if not problems else f"{len(problems)} problems")
    if problems or (re_measure is not None and db_trust.remeasure(re_measure, tolerance, device, db, json)):
        raise typer.Exit(1)


app.command()(db_trust.stale)
app.command()(db_trust.prune)
app.command()(db_trust.diff)
app.command()(report.report)
