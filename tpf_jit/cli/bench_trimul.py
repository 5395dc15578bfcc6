"""`tpf-jit bench trimul`: the triangle multiplicative update beside other implementations; the result is a record."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, cell, print_table, say
from tpf_jit.cli._shapes import Batch, Channels, Dtype, Hidden, WeightDtype, words
from tpf_jit.cli.bench import Crops, Device, Impls, Out, Passes, Rounds, Samples, command_line, finish
from tpf_jit.errors import InvalidInput

Direction = Annotated[
    str | None,
    typer.Option("--direction", help="outgoing, incoming, or both with a comma; for crops outgoing if left out."),
]
PairMask = Annotated[str | None, typer.Option("--mask", help="none, bool or float; for crops none if left out.")]
Replay = Annotated[bool, typer.Option("--replay", help="Time CUDA graphs of the calls; small crops are bound by launches else.")]

Autocast = Annotated[bool, typer.Option("--autocast", help="A float32 z under bf16 autocast, as Boltz-2 and Protenix call it.")]


def trimul(
    crops: Crops = "384,768,1024",
    channels: Channels = None,
    hidden: Hidden = None,
    direction: Direction = None,
    batch: Batch = None,
    dtype: Dtype = None,
    weight_dtype: WeightDtype = None,
    mask: PairMask = None,
    passes: Passes = "forward",
    impls: Impls = None,
    rounds: Rounds = 10,
    samples: Samples = 20,
    replay: Replay = False,
    autocast: Autocast = False,
    device: Device = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time the triangle multiplicative update: tpf_jit, stock PyTorch, and every other library that is installed, interleaved."""
    from tpf_jit.bench import RoundSettings, bench_multiplication

    shapes = _shapes.shapes(
        [crops], "triangle_multiplication", {"direction": "outgoing"}, channels=channels, hidden=hidden, direction=direction,
        batch=batch, dtype=dtype, weight_dtype=weight_dtype, mask=mask, argument="--crops",
    )  # fmt: skip
    if replay and device == "cpu":
        raise InvalidInput("--replay times CUDA graphs and needs a CUDA device; with --device cpu leave it out")
    settings = RoundSettings(words(impls) if impls else None, rounds, samples, replay=replay)
    names, telling = words(passes, "--passes"), None if json else say
    record = bench_multiplication(shapes, names, settings, device, command_line(), telling, autocast)
    finish(record, out, json, _table)


def _table(record: dict[str, Any]) -> None:
    columns = ("problem", "pass", "implementation", "ms", "p10", "p90", "peak MiB", *_ERRORS, "configuration")
    rows = []
    for row in record["rows"]:
        problem = " ".join(f"{name}={row[name]}" for name in ("B", "N", "C", "hidden")) + f" {row['direction']}"
        errors = (row["rel_rms"].get(name) for name in _ERRORS)
        times = (row["ms"], row["ms_p10"], row["ms_p90"])
        rows.append((problem, row["pass"], row["impl"], *times, row.get("peak_mib"), *errors, _configuration(row)))
    absent = "; ".join(f"{impl}: {why}" for impl, why in record["absent_peers"].items())
    title = f"triangle multiplicative update on {record['device']['name']}"
    if "autocast" in record["method"]:
        title += f", z in float32 under {record['method']['autocast']} autocast"
    print_table(title, columns, rows, f"not measured: {absent}" if absent else "")


_ERRORS = ("out", "dz", "dweights")
"""Columns of errors: relative RMS against float64, of the weights the mean."""


def _configuration(row: dict[str, Any]) -> str:
    config = row.get("config") or {}
    parts = (f"{name} {cell(value)}" for name, value in config.items())
    return ": ".join(filter(None, (row.get("config_from"), "; ".join(parts))))
