"""`tpf-jit accuracy`: judge every implementation against float64; the result is a record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, print_json, print_table, say
from tpf_jit.cli._shapes import words
from tpf_jit.cli.bench import Out, command_line, keep
from tpf_jit.errors import InvalidInput
from tpf_jit.record_tables import faults

Device = Annotated[
    str | None,
    typer.Option("--device", help="A torch device; cpu judges the PyTorch path. The current CUDA device if left out."),
]


def accuracy(
    crops: Annotated[str, typer.Option("--crops", help="Crops with commas.")] = "384,640,768",
    head_dim: Annotated[str, typer.Option("--head-dim", help="Channels per head; several with commas.")] = "16,32",
    seeds: Annotated[str, typer.Option("--seeds", help="How many seeds, or a:b for those from a up to before b.")] = "100",
    families: Annotated[
        str, typer.Option("--families", help="Of inputs: normal, trained_like, extreme, adversarial; several with commas.")
    ] = "normal,trained_like",
    impls: Annotated[
        str | None,
        typer.Option("--impls", help="Implementations with commas; all that are installed and have gradients if left out."),
    ] = None,
    heads: Annotated[int, typer.Option("--heads", help="Attention heads.")] = 4,
    rows: Annotated[int | None, typer.Option("--rows", help="Rows that share one pair bias; the crop if left out.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float16.")] = "bfloat16",
    bias_dtype: Annotated[
        str | None, typer.Option("--bias-dtype", help="bfloat16, float16 or float32; that of --dtype if left out.")
    ] = None,
    mask: Annotated[str, typer.Option("--mask", help="none, bool or additive.")] = "none",
    repeats: Annotated[int, typer.Option("--repeats", help="Calls that are compared bit by bit.")] = 5,
    load: Annotated[bool, typer.Option("--load", help="Repeat beside work on another stream.")] = False,
    work: Annotated[
        Path | None, typer.Option("--work", help="File that keeps results as they are measured; none if left out.")
    ] = None,
    resume: Annotated[bool, typer.Option("--continue", help="Go on with the work file.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="With --continue: also what failed.")] = False,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", help="Start no case that would end after so many seconds; no limit if left out.")
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Write a record even while cases are missing.")] = False,
    device: Device = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Judge triangle attention and its gradients against float64, and repeated calls against each other.

    The grid is every crop with every head dim, family and seed. A run that is to stop and go on needs a work file: with
    --budget-s it ends in time, and with --continue it takes up what is missing. The record has all that the work file has.
    """
    from tpf_jit.bench import AccuracySettings, accuracy_attention

    if work is None and (resume or budget_s is not None):
        raise InvalidInput(f"{'--continue' if resume else '--budget-s'} needs --work FILE, which keeps results for the next run")
    settings = AccuracySettings(
        crops=tuple(_shapes.integers(crops, "--crops")),
        head_dims=tuple(_shapes.integers(head_dim, "--head-dim")),
        families=tuple(words(families, "--families")),
        seeds=seed_range(seeds),
        impls=words(impls) if impls else None,
        heads=heads,
        rows=rows,
        dtype=dtype,
        bias_dtype=bias_dtype,
        mask=mask,
        repeats=repeats,
        load=load,
        budget_s=budget_s,
        retry=retry,
    )
    outcome = accuracy_attention(settings, device, command_line(), work, resume, None if json else say)
    complete = outcome.done == outcome.cases
    if json:
        print_json(outcome.record)
    else:
        _table(outcome.record)
    if not complete:
        going_on = "; run it again with --continue" if work is not None else ""
        say(f"{outcome.done} of {outcome.cases} cases are done{going_on}")
    if out is not None and (complete or partial):
        keep(outcome.record, out)
    elif out is not None:
        say("no record is written before all cases are done; --partial writes it now")


def seed_range(text: str) -> tuple[int, int]:
    """`"3"` or `"a:b"` as first seed and the one after the last; InvalidInput names the option otherwise."""
    first, colon, last = text.rpartition(":")
    if not last.isdecimal() or colon and not first.isdecimal():
        raise InvalidInput.of("--seeds", repr(text), "a number of seeds, or a:b")
    return int(first or 0), int(last)


def _table(record: dict[str, Any]) -> None:
    columns = ("problem", "family", "implementation", "tensor", "cases", "mean", "largest", "max abs", "same bits")
    rows = []
    for row in record["rows"]:
        same = "yes" if row["bitwise_equal"] else f"no, in {row['cases'] - row['bitwise_cases']}"
        mean = faults([row]) or row["rel_rms_mean"]
        problem = f"N={row['N']} D={row['D']}"
        rows.append(
            (problem, row["family"], row["impl"], row["tensor"], row["cases"], mean, row["rel_rms_max"], row["max_abs"], same)
        )
    absent = "; ".join(f"{impl}: {why}" for impl, why in record["absent_peers"].items())
    title = f"relative RMS error against float64 on {record['device']['name']}"
    print_table(title, columns, rows, f"not judged: {absent}" if absent else "")
