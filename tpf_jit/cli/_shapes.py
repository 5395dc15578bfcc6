"""How a command names problems: crops with options, shape keys, model presets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpf_jit.errors import InvalidInput

if TYPE_CHECKING:
    from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...",
        help="Crops (384, or 384,640,768), a model preset (openfold3, boltz2, protenix, chai1, or a .json file), or shape keys.",
    ),
]
Op = Annotated[
    str | None,
    typer.Option(
        "--op",
        help="triangle_attention or triangle_multiplication: what crops are, and which problems of a preset to take. "
        "Left out, crops are attention, and presets are taken whole.",
    ),
]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads, for crops; 4 if left out.")]
HeadDim = Annotated[str | None, typer.Option("--head-dim", help="Channels per head, for crops; several with commas.")]
Rows = Annotated[int | None, typer.Option("--rows", help="Rows that share one pair bias, for crops; the crop if left out.")]
Batch = Annotated[int, typer.Option("--batch", help="Batch, for crops.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16 or float16, for crops.")]
BiasDtype = Annotated[str | None, typer.Option("--bias-dtype", help="bfloat16, float16 or float32; --dtype if left out.")]
Channels = Annotated[str | None, typer.Option("--channels", help="Channels of the pair tensor, for crops; several with commas.")]
Hidden = Annotated[int | None, typer.Option("--hidden", help="Hidden width, for crops; the channels if left out.")]
WeightDtype = Annotated[str | None, typer.Option("--weight-dtype", help="float32 or bfloat16, for crops.")]
Mask = Annotated[
    str, typer.Option("--mask", help="none, bool or additive, for crops; of multiplications none, bool or float.")
]

_WIDTHS = {"triangle_attention": ("head_dim", "32"), "triangle_multiplication": ("channels", "128")}
"""The field of which a command line may give several, and what it is if left out."""


def integers(text: str, argument: str) -> list[int]:
    """`"384,640"` as numbers; InvalidInput names the option otherwise."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidInput.of(argument, repr(text), "numbers separated by commas")
    return [int(part[:20]) for part in parts]  # longer than any size there is


def shapes(
    targets: list[str], op: str | None = None, directions: Sequence[str] | None = None, **options: Any
) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """The problems that a command line names, in order, without repeats.

    Args:
        targets: crops, keys and presets.
        op: see `Op`.
        directions: of multiplications by crop: outgoing, incoming; both if None.
        options: fields of the problems by crop, None where not given; `head_dim` and `channels` as text.
    """
    from tpf_jit.shape import SHAPES, is_key, parse_key, preset

    if op is not None and op not in SHAPES:
        raise InvalidInput.of("--op", repr(op), ", ".join(SHAPES))
    given = {name: value for name, value in options.items() if value is not None}
    found: list[Any] = []
    for target in targets:
        if target[:1].isdecimal():
            found += _of_crops(op or "triangle_attention", integers(target, "TARGET"), directions, given)
        else:
            named = [parse_key(target)] if is_key(target) else preset(target)
            found += [shape for shape in named if op in (None, shape.op)]
    if not found:
        raise InvalidInput.of("TARGET", repr(" ".join(targets)), f"problems of {op}")
    return list(dict.fromkeys(found))


def _of_crops(
    op: str, crops: list[int], directions: Sequence[str] | None, given: dict[str, Any]
) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """Every width, of multiplications every direction, every crop."""
    from tpf_jit.shape import DIRECTIONS, SHAPES

    known = {field.name for field in fields(SHAPES[op])}
    for name, value in given.items():
        if name not in known:
            raise InvalidInput.of(f"--{name.replace('_', '-')}", repr(value), f"nothing, as crops are {op} (see --op)")
    name, usual = _WIDTHS[op]
    widths = integers(given.get(name, usual), f"--{name.replace('_', '-')}")
    ways = [{"direction": way} for way in directions or DIRECTIONS] if "direction" in known else [{}]
    return [SHAPES[op](**{**given, **way, name: width, "crop": crop}) for width in widths for way in ways for crop in crops]


def short(shape: TriangleAttentionShape | TriangleMultiplicationShape) -> str:
    """A shape in a table cell: only what differs from the ordinary is named."""
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[shape.dtype]
    if shape.op == "triangle_multiplication":
        parts = [f"N={shape.crop}", f"C={shape.channels}", shape.direction, dtype]
        if shape.hidden != shape.channels:
            parts.insert(2, f"D={shape.hidden}")
        if shape.weight_dtype != "float32":
            parts.append(f"weights {shape.weight_dtype}")
    else:
        parts = [f"N={shape.crop}", f"H={shape.heads}", f"D={shape.head_dim}", dtype]
        if shape.rows != shape.crop:
            parts.insert(1, f"I={shape.rows}")
        if shape.bias_dtype != shape.dtype:
            parts.append(f"bias {shape.bias_dtype}")
    if shape.batch != 1:
        parts.insert(0, f"B={shape.batch}")
    if shape.mask != "none":
        parts.append(f"{shape.mask} mask")
    return " ".join(parts)
