"""`tpf-jit accuracy-trimul`: judge the triangle multiplicative update against float64; the result is a record."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, print_table, say
from tpf_jit.cli._shapes import Channels, Dtype, Hidden, WeightDtype, words
from tpf_jit.cli.accuracy import Device, seed_range
from tpf_jit.cli.bench import Crops, Impls, Out, command_line, finish
from tpf_jit.cli.bench_trimul import PairMask
from tpf_jit.record_tables import faults


def accuracy_trimul(
    crops: Crops = "256,384",
    channels: Channels = None,
    hidden: Hidden = None,
    direction: Annotated[
        str | None, typer.Option("--direction", help="outgoing, incoming, or both with a comma; both if left out.")
    ] = None,
    dtype: Dtype = None,
    weight_dtype: WeightDtype = None,
    mask: PairMask = None,
    families: Annotated[
        str, typer.Option("--families", help="Of inputs: normal, trained_like, small; several with commas.")
    ] = "normal,trained_like",
    seeds: Annotated[str, typer.Option("--seeds", help="How many seeds, or a:b for those from a up to before b.")] = "3",
    impls: Impls = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Calls that are compared bit by bit.")] = 5,
    device: Device = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Judge the triangle multiplicative update and all its gradients against float64, and repeated calls against each other."""
    from tpf_jit.bench import MultiplicationAccuracySettings, accuracy_multiplication

    shapes = _shapes.shapes(
        [crops], "triangle_multiplication", channels=channels, hidden=hidden, direction=direction, dtype=dtype,
        weight_dtype=weight_dtype, mask=mask, argument="--crops",
    )  # fmt: skip
    settings = MultiplicationAccuracySettings(
        shapes=tuple(shapes),
        families=tuple(words(families, "--families")),
        seeds=seed_range(seeds),
        impls=words(impls) if impls else None,
        repeats=repeats,
    )
    record = accuracy_multiplication(settings, device, command_line(), None if json else say)
    finish(record, out, json, _table)


def _table(record: dict[str, Any]) -> None:
    columns = ("problem", "family", "implementation", "tensor", "cases", "mean", "largest", "max abs", "same bits")
    rows = []
    for row in record["rows"]:
        problem = f"N={row['N']} C={row['C']} hidden={row['hidden']} {row['direction']}"
        same = "yes" if row["bitwise_equal"] else f"no, in {row['cases'] - row['bitwise_cases']}"
        mean = faults([row]) or row["rel_rms_mean"]
        what = (problem, row["family"], row["impl"], row["tensor"], row["cases"])
        rows.append((*what, mean, row["rel_rms_max"], row["max_abs"], same))
    absent = "; ".join(f"{impl}: {why}" for impl, why in record["absent_peers"].items())
    title = f"relative RMS error against float64 on {record['device']['name']}"
    print_table(title, columns, rows, f"not judged: {absent}" if absent else "")
