"""`tpf-jit bench`: measure beside other implementations; the result is a record."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, cell, print_json, print_table, say
from tpf_jit.cli._shapes import Batch, BiasDtype, Dtype, HeadDim, Heads, Mask, Rows, words

app = typer.Typer(no_args_is_help=True, help="Measure beside other implementations, and what a call costs.")

Crops = Annotated[
    str,
    typer.Option(
        "--crops",
        help="Crops with commas, a model preset, or a shape key. Options of problems describe crops, and take of a preset or key "
        "only the problems that are so.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="A torch device; cpu times the PyTorch path, no figure to quote. The current CUDA device if left out.",
    ),
]
Passes = Annotated[str, typer.Option("--passes", help="forward, backward, both; several with commas.")]
Impls = Annotated[str | None, typer.Option("--impls", help="Implementations with commas; all that are installed if left out.")]
Rounds = Annotated[int, typer.Option("--rounds", help="Rounds in which the implementations take turns.")]
Samples = Annotated[int, typer.Option("--samples", help="Samples of each a round.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="Keep the record in this folder, such as tuning_db/records; it is only shown if left out."),
]


@app.command()
def attention(
    crops: Crops = "384,768",
    heads: Heads = None,
    head_dim: HeadDim = None,
    rows: Rows = None,
    batch: Batch = None,
    dtype: Dtype = None,
    bias_dtype: BiasDtype = None,
    mask: Mask = None,
    passes: Passes = "forward",
    impls: Impls = None,
    layout: Annotated[str, typer.Option("--layout", help="model (views, as projections leave them) or contiguous.")] = "model",
    rounds: Rounds = 10,
    samples: Samples = 20,
    device: Device = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time triangle attention: tpf_jit, stock PyTorch, and every other library that is installed, interleaved."""
    from tpf_jit.bench import BenchSettings, bench_attention

    shapes = _shapes.shapes(
        [crops], "triangle_attention", heads=heads, head_dim=head_dim, rows=rows, batch=batch, dtype=dtype,
        bias_dtype=bias_dtype, mask=mask, argument="--crops",
    )  # fmt: skip
    settings = BenchSettings(
        impls=words(impls) if impls else None, layout=layout, rounds=rounds, samples=samples
    )
    record = bench_attention(shapes, words(passes, "--passes"), settings, device, command_line(), None if json else say)
    finish(record, out, json, _attention_table)


def _attention_table(record: dict[str, Any]) -> None:
    columns = ("problem", "pass", "implementation", "ms", "p10", "p90", "peak MiB", "error", "configuration")
    rows = []
    for row in record["rows"]:
        problem = " ".join(f"{name}={row[name]}" for name in ("B", "I", "N", "H", "D"))
        worst = max((row.get("rel_rms") or {}).values(), default=None)
        config = ": ".join(filter(None, (row.get("config_from"), cell(row.get("config")))))
        times = (row["ms"], row["ms_p10"], row["ms_p90"])
        rows.append((problem, row["pass"], row["impl"], *times, row.get("peak_mib"), worst, config))
    absent = "; ".join(f"{impl}: {why}" for impl, why in record["absent_peers"].items())
    print_table(f"triangle attention on {record['device']['name']}", columns, rows, f"not measured: {absent}" if absent else "")


@app.command()
def latency(
    crop: Annotated[int, typer.Option("--crop", help="Crop of the first result.")] = 384,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Channels per head.")] = 32,
    repeats: Annotated[int, typer.Option("--repeats", help="Fresh processes, and hundreds of calls.")] = 5,
    cold: Annotated[bool, typer.Option(help="Also start with an empty cache, which compiles.")] = True,
    device: Device = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time what a call costs the host, and the way from import to the first result in a new process."""
    from tpf_jit.bench import bench_latency
    from tpf_jit.shape import TriangleAttentionShape

    record = bench_latency(TriangleAttentionShape(crop=crop, head_dim=head_dim), repeats, cold, device, command_line())
    finish(record, out, json, _latency_table)


def _latency_table(record: dict[str, Any]) -> None:
    calls = [row for row in record["rows"] if row["what"] == "call overhead"]
    columns = ("host time of one call", "us", "p10", "p90")
    print_table("", columns, [(row["impl"], row["us"], row["us_p10"], row["us_p90"]) for row in calls])
    first = [row for row in record["rows"] if row["what"] == "first result"]
    names = [name for name in first[0] if name.endswith("_s") or name == "compiler_imported"] if first else []
    rows = [(name.removesuffix("_s").replace("_", " "), *(row[name] for row in first)) for name in names]
    print_table("a new process, seconds", ("step", *(f"{row['cache']} cache" for row in first)), rows)


def command_line() -> str:
    """The command line of this process, for a record; of a folder outside the working directory only its last parts."""
    words = [os.path.join(*Path(word).parts[-2:]) if os.path.isabs(word) else word for word in sys.argv[1:]]
    return shlex.join(["tpf-jit", *words])


def finish(record: dict[str, Any], out: Path | None, as_json: bool, show: Any) -> None:
    """Print a record, by `show` or as JSON, and keep it where asked to."""
    if as_json:
        print_json(record)
    else:
        show(record)
    if out is not None:
        keep(record, out)


def keep(record: dict[str, Any], folder: Path) -> None:
    """Write a record into a folder and say where it is."""
    from tpf_jit import records

    say(f"written: {records.write(record, folder)}")
