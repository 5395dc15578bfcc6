"""The verbs about kernels: compile, explain, tune, and the demo."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from tpf_jit.cli import _shapes
from tpf_jit.cli._output import Json, cell, print_json, print_table, say
from tpf_jit.cli._shapes import Batch, BiasDtype, Channels, Dtype, HeadDim, Heads, Hidden, Mask, Op, Rows, Targets, WeightDtype

WATCH_S = 0.2
"""Seconds between two looks at how far a compile is."""
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Compile processes; by the number of cores if left out.")]


def compile_kernels(
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
    arch: Annotated[str | None, typer.Option("--arch", help="Target, such as sm_90a; this GPU's if left out.")] = None,
    template: Annotated[
        str | None, typer.Option("--template", help="This template; the dispatcher's choice if left out.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="A configuration, name=value,name=value; the dispatcher's choice if left out.")
    ] = None,
    residual: Annotated[bool, typer.Option("--residual", help="The forward of training, which keeps its roundings.")] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Also what a training step runs: its forward, and the backward's kernels.")
    ] = False,
    jobs: Jobs = None,
    json: Json = False,
) -> None:
    """Compile the kernels of the targets into the object cache, with or without a GPU, and show their resources."""
    import tpf_jit
    from tpf_jit import api
    from tpf_jit.errors import TpfError
    from tpf_jit.kernels import default_store

    shapes = _shapes.shapes(
        targets, op, heads=heads, head_dim=head_dim, rows=rows, bias_dtype=bias_dtype, channels=channels, hidden=hidden,
        weight_dtype=weight_dtype, batch=batch, dtype=dtype, mask=mask,
    )  # fmt: skip
    how = (arch, template, _config(config), residual)
    with _progress({kernel.spec for kernel in api.chosen_kernels(shapes, *how, training)}, quiet=json):
        compiled = tpf_jit.compile(shapes, *how, jobs, training)
    if training:
        _say_what_pytorch_trains(shapes)
    # Several problems usually share one kernel.
    serves: dict[Any, list[Any]] = {}
    for kernel in compiled:
        serves.setdefault(kernel.spec, []).append(kernel)
    if json:
        print_json([_kernel_json(kernels) for kernels in serves.values()])
    else:
        columns = ("kernel", "configuration", "from", "registers", "shared", "spilled", "wgmma", "TMA", "serves")
        print_table("compiled kernels", columns, [_kernel_row(kernels) for kernels in serves.values()])
    if not all(default_store().keeps(spec) for spec in serves):
        raise TpfError("kernels were compiled but could not be kept; the warnings above say why")


@contextmanager
def _progress(specs: Iterable[Any], quiet: bool) -> Iterator[None]:
    """Around a compile: say how many of these kernels the object cache lacks, and count them on a terminal.

    A quiet one says nothing but, as every other, what is kept when the user stops it.
    """
    from tpf_jit.kernels import default_store

    store = default_store()
    missing = [spec for spec in specs if store.get(spec) is None]
    if missing and not quiet:
        say(f"compiling {len(missing)} kernel{'s' if len(missing) > 1 else ''}")
    try:
        with _bar(store, missing) if missing and not quiet and _on_terminal() else nullcontext():
            yield
    except KeyboardInterrupt:
        if not missing:
            raise
        # After the bar's last line.
        kept = sum(store.get(spec) is not None for spec in missing)
        say(f"interrupted; {kept} of {len(missing)} kernels are kept, the same command goes on from there")
        raise typer.Exit(130) from None


@contextmanager
def _bar(store: Any, missing: list[Any]) -> Iterator[None]:
    """A bar that follows how many of these kernels have come into the cache."""
    from tpf_jit.tune.report import Progress

    with Progress("compiled", len(missing)) as bar:
        ended = threading.Event()
        watch = threading.Thread(target=_watch, args=(store, missing, bar, ended), daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join()


def _on_terminal() -> bool:
    return sys.stderr.isatty()


def _watch(store: Any, missing: list[Any], bar: Any, ended: threading.Event) -> None:
    """Tell the bar how many kernels have come into the cache, until the compile has ended, and then once more."""
    from tpf_jit.errors import TpfError

    total, last = len(missing), False
    while not last:
        last = ended.wait(WATCH_S)
        try:
            missing = [spec for spec in missing if store.get(spec) is None]
        except (OSError, TpfError):
            return  # the compile itself meets the same, and raises it
        bar.update(total - len(missing), "")


def _say_what_pytorch_trains(shapes: list[Any]) -> None:
    """A line for every reason for which shapes have no kernels of the backward."""
    from tpf_jit.ops.multiplication_routing import backward_unsupported

    reasons: dict[str, list[str]] = {}
    for shape in shapes:
        reason = backward_unsupported(shape) if shape.op == "triangle_multiplication" else None
        if reason is not None:
            reasons.setdefault(reason, []).append(_shapes.short(shape))
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(f"the backward takes the PyTorch path for {names[0]}{more}: {reason}")


def _kernel_json(kernels: list[Any]) -> dict[str, Any]:
    first = kernels[0]
    return {
        "key": first.spec.key,
        "template": first.spec.template,
        "arch": first.spec.arch,
        "variant": dict(first.spec.variant),
        "config": dict(first.spec.config),
        "resources": first.resources,
        "serves": [{"shape": kernel.shape.key(), "config_from": kernel.config_from, "note": kernel.note} for kernel in kernels],
    }


def _kernel_row(kernels: list[Any]) -> tuple[Any, ...]:
    first = kernels[0]
    facts = first.resources
    loads = None if facts.get("utmaldg") is None else f"{facts['utmaldg']}+{facts.get('utmastg', 0)}"
    sources = ", ".join(dict.fromkeys(kernel.config_from for kernel in kernels))
    numbers = (facts.get("registers"), facts.get("smem_bytes"), facts.get("spill_bytes"), facts.get("hgmma"), loads)
    shapes = "\n".join(_shapes.short(kernel.shape) for kernel in kernels)
    return (f"{first.spec.template}\n{cell(dict(first.spec.variant))}", cell(dict(first.spec.config)), sources, *numbers, shapes)


def _config(text: str | None) -> dict[str, Any] | None:
    from tpf_jit.errors import InvalidInput

    if text is None:
        return None
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise InvalidInput.of("--config", repr(part), "name=value,name=value")
        words: dict[str, Any] = {"true": True, "false": False}
        number = value.lstrip("-")
        values[name] = int(value) if number.isdecimal() else words.get(value.lower(), value)
    return values


def explain(
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
    json: Json = False,
) -> None:
    """Which path and kernel a call of these shapes gets, and why. Compiles nothing."""
    import tpf_jit

    shapes = _shapes.shapes(
        targets, op, heads=heads, head_dim=head_dim, rows=rows, bias_dtype=bias_dtype, channels=channels, hidden=hidden,
        weight_dtype=weight_dtype, batch=batch, dtype=dtype, mask=mask,
    )  # fmt: skip
    found = [tpf_jit.explain(shape) for shape in shapes]
    if json:
        print_json([explanation.to_dict() for explanation in found])
    else:
        print("\n\n".join(str(explanation) for explanation in found))


def tune(
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
        str | None,
        typer.Option("--direction", help="One of those that sweep --plan lists; all that inference runs if left out."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=0, help="Seconds of search per problem and direction; no limit if left out.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=0, help="New configurations per problem and direction, at most; no limit if left out."),
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", help="Tune this template only; all that serve if left out.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed to compile or launch.")] = False,
    device: Annotated[int | None, typer.Option("--device", min=0, help="CUDA device index; the current one if left out.")] = None,
    isolate: Annotated[bool, typer.Option(help="Measure in a child process: a hang or crash costs one trial only.")] = True,
    jobs: Jobs = None,
    db: Annotated[Path | None, typer.Option("--db", help="Database to write; the user database if left out.")] = None,
    json: Json = False,
) -> None:
    """Measure configurations on this GPU and keep the evidence. Goes on where an earlier run stopped."""
    import tpf_jit
    from tpf_jit.tune import TuneOptions
    from tpf_jit.tune.cells import inference_cells

    shapes = _shapes.shapes(
        targets, op, heads=heads, head_dim=head_dim, rows=rows, bias_dtype=bias_dtype, channels=channels, hidden=hidden,
        weight_dtype=weight_dtype, batch=batch, dtype=dtype, mask=mask,
    )  # fmt: skip
    options = TuneOptions(template=template, workers=jobs, retry_failed=retry_failed, isolate=isolate)
    wanted = inference_cells(shapes, direction)
    results = []
    for number, (shape, each) in enumerate(wanted, 1):
        if len(wanted) > 1 and not json:
            say(f"[{number}/{len(wanted)}] {shape.key()}/{each}")
        result = tpf_jit.tune(shape, each, budget, trials, store=db, device=device, options=options)
        results.append(result)
        if not json:
            print(f"{result}\n")
        if result.interrupted:
            break
    if json:
        print_json([result.to_dict() for result in results])
    if results and results[-1].interrupted:
        say("interrupted; the same command goes on from here")
        raise typer.Exit(130)


def demo(
    crop: Annotated[int, typer.Option("--crop", min=1, help="Crop of the call that is tuned and compared on a GPU.")] = 384,
    budget: Annotated[float, typer.Option("--budget", min=0, help="Seconds of tuning on a GPU.")] = 60.0,
    json: Json = False,
) -> None:
    """Show what tpf_jit does on this machine: tune and compare on a Hopper GPU, else compile for one and check the CPU path."""
    from tpf_jit import demo as job

    parts = []
    for part in job.run(crop, budget, say):
        parts.append(part)
        if not json:
            print_table(part.title, part.columns, part.rows, part.note)
    if json:
        print_json([part.to_dict() for part in parts])
    failed = [part.title for part in parts if not part.passed]
    if failed:
        say(f"Error: not as it should be: {', '.join(failed)}")
        raise typer.Exit(1)
