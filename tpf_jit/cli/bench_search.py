"""`tpf-jit bench search`: how near to the best a search comes that may try a share of all configurations; a record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, print_table, say
from tpf_jit.cli._shapes import Batch, BiasDtype, Channels, Dtype, HeadDim, Heads, Hidden, Mask, Op, Rows, WeightDtype
from tpf_jit.cli.bench import Crops, Out, command_line, finish


def search(
    crops: Crops = "384,640,768",
    op: Op = None,
    heads: Heads = None,
    head_dim: HeadDim = None,
    rows: Rows = None,
    bias_dtype: BiasDtype = None,
    channels: Channels = None,
    hidden: Hidden = None,
    weight_dtype: WeightDtype = None,
    batch: Batch = None,
    dtype: Dtype = None,
    mask: Mask = None,
    direction: Annotated[
        list[str] | None,
        typer.Option(
            "--direction", help="Only this direction (sweep --plan lists them); may be given several times. All if left out."
        ),
    ] = None,
    share: Annotated[float, typer.Option("--share", help="Share of all configurations that the search may try.")] = 0.15,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds of measuring, all together; no limit if left out.")
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option("--db", help="Database of this bench, from which a repeated command goes on; a temporary one if left out."),
    ] = None,
    isolate: Annotated[bool, typer.Option(help="Measure in child processes: a hang or crash costs one trial only.")] = True,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Compile processes; by the number of cores if left out.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="A CUDA device; the current one if left out.")] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Measure all configurations, then replay how near to the best the search comes with a share of the trials."""
    from tpf_jit.bench import SearchSettings, bench_search
    from tpf_jit.errors import NoKernel
    from tpf_jit.tune import TuneOptions, cells

    settings = SearchSettings(share, budget, db, TuneOptions(workers=jobs, isolate=isolate))
    shapes = _shapes.shapes(
        [crops], op, heads=heads, head_dim=head_dim, rows=rows, bias_dtype=bias_dtype, channels=channels, hidden=hidden,
        weight_dtype=weight_dtype, batch=batch, dtype=dtype, mask=mask, argument="--crops",
    )  # fmt: skip
    planned = cells.plan(shapes, direction or None)
    if not planned.cells:
        raise NoKernel("; ".join(dict.fromkeys(reason for _, reason in planned.refused)) or "there is nothing to choose")
    record = bench_search(planned.cells, settings, device, command_line(), None if json else say)
    finish(record, out, json, _table)
    if record["absent_cells"]:
        raise typer.Exit(1)


def _table(record: dict[str, Any]) -> None:
    from tpf_jit.bench.search import WITHIN, reached

    columns = ("problem", "pass", "knowledge", "configurations", "trials", "found us", "best us", "ratio", "to 2 %", "verdict")
    problems = [_problem(row) for row in record["rows"]]
    same = {name: value for name, value in problems[0].items() if all(each.get(name) == value for each in problems)}
    lines = []
    for row, fields in zip(record["rows"], problems, strict=True):
        problem = _equations({name: value for name, value in fields.items() if name not in same})
        times = (f"{row[name]:.2f}" if row[name] is not None else None for name in ("found_us", "best_us"))
        ratio = None if row["ratio"] is None else f"{row['ratio']:.4f}"
        counts = (row["configurations"], row["trials"])
        verdict = f"within {100 * WITHIN:g} %" if reached(row) else "missed"
        lines.append((problem, row["pass"], row["knowledge"], *counts, *times, ratio, row["trials_to_2pct"], verdict))
    met = sum(map(reached, record["rows"]))
    share = 100 * record["rows"][0]["share"]
    note = f"{met} of {len(lines)} searches come within {100 * WITHIN:g} % of the best in {share:g} % of the trials."
    left = "; ".join(f"{cell}: {why}" for cell, why in record["absent_cells"].items())
    note += f" Left out: {left}. With --db the same command goes on from what was measured." if left else ""
    print_table(f"search on {record['device']['name']}: {_equations(same)}", columns, lines, note)


def _problem(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row that say which problem it is."""
    names = list(row)
    return {name: row[name] for name in names[names.index("pass") + 1 : names.index("knowledge")]}


def _equations(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())
