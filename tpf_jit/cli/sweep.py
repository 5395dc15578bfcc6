"""`tpf-jit sweep`: many problems, all their directions, on all the GPUs there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, cell, print_json, print_table, say
from tpf_jit.cli._shapes import Batch, BiasDtype, Channels, Dtype, HeadDim, Heads, Hidden, Mask, Op, Rows, Targets, WeightDtype

if TYPE_CHECKING:
    from tpf_jit.tune.cells import Plan
    from tpf_jit.tune.summary import CellReport, Summary


def sweep(
    targets: Targets,
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
            "--direction", help="Only this direction of those that --plan lists; may be given several times. All if left out."
        ),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", help="Part i of n only, such as 3/16; others take the rest. All if left out.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", help="Sweep on a Ray cluster: its address, auto, or local. Needs tpf_jit[ray]. This machine if left out."
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="GPUs to use, such as 0,2, as CUDA_VISIBLE_DEVICES names them; all if left out.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=0, help="New configurations per problem and direction, at most; no limit if left out."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds of search, all together; no limit if left out.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", help="Tune this template only; all that serve if left out.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage", help="postgresql://... by which machines with equal targets search each cell together; none if left out."
        ),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed to compile or launch.")] = False,
    isolate: Annotated[bool, typer.Option(help="Measure in child processes: a hang or crash costs one trial only.")] = True,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Compile processes of a machine; with --ray, of a GPU. By the number of cores if left out."
        ),
    ] = None,
    db: Annotated[Path | None, typer.Option("--db", help="Database to write; the user database if left out.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be tuned, and measure nothing.")] = False,
    json: Json = False,
) -> None:
    """Tune many problems in all their directions, and show the winners. Goes on where an earlier run stopped."""
    from tpf_jit.errors import InvalidInput, NoKernel
    from tpf_jit.tune import TuneOptions, cells
    from tpf_jit.tune.many import Limits

    if ray is not None and gpus is not None:
        raise InvalidInput.of("--gpus", repr(gpus), "nothing together with --ray, which takes every GPU of the cluster")
    shapes = _shapes.shapes(
        targets, op, heads=heads, head_dim=head_dim, rows=rows, bias_dtype=bias_dtype, channels=channels, hidden=hidden,
        weight_dtype=weight_dtype, batch=batch, dtype=dtype, mask=mask,
    )  # fmt: skip
    planned = cells.plan(shapes, direction or None, template)
    if not planned.cells:
        raise NoKernel("; ".join(reason for _, reason in planned.refused))
    chosen = planned.cells if shard is None else tuple(cells.shard(planned.cells, shard))
    planned = cells.Plan(chosen, planned.refused)
    if plan:
        _show_plan(planned, json)
        return
    if not json and planned.refused:
        say(f"{len(planned.refused)} left out, for example: {planned.refused[0][1]}")
    options = TuneOptions(template=template, workers=jobs, retry_failed=retry_failed, storage=storage, isolate=isolate)
    limits = Limits(budget, trials)
    ended: list[CellReport] = []

    def on_cell(report: CellReport) -> None:
        ended.append(report)
        say(f"[{len({each.cell for each in ended})}/{len(chosen)}] {report.line()}")

    if ray is not None:
        from tpf_jit.tune.ray_cluster import sweep_ray

        summary = sweep_ray(chosen, ray, db, options, limits, on_cell)
    else:
        from tpf_jit.tune.node import sweep_node

        named = None if gpus is None else [name.strip() for name in gpus.split(",") if name.strip()]
        summary = sweep_node(chosen, db, options, limits, named, on_cell)
    _show(summary, planned, json)
    if summary.interrupted:
        say("interrupted; the same command goes on from here")
        raise typer.Exit(130)
    if any(report.state == "failed" for report in summary.cells):
        raise typer.Exit(1)


def _show_plan(plan: Plan, json: bool) -> None:
    if json:
        print_json({"cells": [each.key for each in plan.cells], "refused": [list(pair) for pair in plan.refused]})
        return
    rows = [(number, each.key, "") for number, each in enumerate(plan.cells, 1)]
    rows += [(None, key, reason) for key, reason in plan.refused]
    print_table("planned", ("", "problem and direction", "left out because"), rows)


def _show(summary: Summary, plan: Plan, json: bool) -> None:
    if json:
        print_json({**summary.to_dict(), "refused": [list(pair) for pair in plan.refused]})
        return
    columns = ("problem and direction", "state", "us", "configuration", "grade", "tried", "new", "detail")
    print_table("sweep", columns, [_row(report) for report in summary.cells], summary.text())


def _row(report: CellReport) -> tuple[Any, ...]:
    tried = sum(report.counts.values())
    return (
        *(report.cell, report.state, report.us, cell(report.config), report.grade),
        *(tried, report.new_trials, report.detail[:60]),
    )
