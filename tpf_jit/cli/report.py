"""`tpf-jit db report`: the tuning database as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpf_jit.cli._output import say
from tpf_jit.cli.db_trust import of_device


def report(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path("tpf_jit_report.html"),
    sources: Annotated[
        list[Path] | None,
        typer.Option("--db", help="Database or exported .jsonl file, repeatable; the user database if left out."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Only device models that contain this text, like H200.")] = None,
    shipped: Annotated[bool, typer.Option(help="Include the tables that install with the package.")] = True,
    studies: Annotated[
        Path | None,
        typer.Option("--studies", metavar="FILE", help="Write the rows as Optuna studies, too, for optuna-dashboard."),
    ] = None,
) -> None:
    """Write one HTML page that works offline: winners, speed, parameters, roofline, history, staleness."""
    from tpf_jit.errors import DatabaseError
    from tpf_jit.tune.html_report import write_report
    from tpf_jit.tuning_db import contents, user_database_path

    trials, names = {}, []
    if sources is None:
        user = user_database_path()
        sources = [user] if user.exists() else []
    for path in sources:
        trials.update(contents.read(path).trials)
        names.append(str(path))
    if shipped:
        trials.update(contents.shipped())
        names.append("the shipped tables")
    rows = of_device(trials.values(), device, lambda row: row.device_model)
    try:
        count = write_report(out, rows, names)
    except OSError as error:
        raise DatabaseError(f"{out} cannot be written: {error.strerror}") from error
    say(f"written: {out}, {count} problems from {len(rows)} rows of {' and '.join(names) or 'nothing'}")
    if studies is not None:
        from tpf_jit.tune.study import write_studies

        say(f"written: {studies}, {write_studies(studies, rows)} studies; to look at them: optuna-dashboard {studies}")
