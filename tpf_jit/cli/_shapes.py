"""How a command names problems: crops with options, shape keys, model presets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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
        help="Crops (384, or 384,640,768), a model preset (openfold3, boltz2, protenix, chai1, or a .json file), or shape keys. "
        "Options of problems describe crops, and take of presets and keys only the problems that are so.",
    ),
]
Op = Annotated[
    str | None,
    typer.Option(
        "--op",
        help="triangle_attention or triangle_multiplication: what crops are, and which problems of a preset to take. "
        "If left out, crops are attention, and presets are taken whole.",
    ),
]
Heads = Annotated[int | None, typer.Option("--heads", help="Attention heads; for crops 4 if left out.")]
HeadDim = Annotated[
    str | None, typer.Option("--head-dim", help="Channels per head, several with commas; for crops 32 if left out.")
]
Rows = Annotated[
    int | None, typer.Option("--rows", help="Rows that share one pair bias; for crops as many as the crop if left out.")
]
Batch = Annotated[int | None, typer.Option("--batch", help="Batch; for crops 1 if left out.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float16; for crops bfloat16 if left out.")]
BiasDtype = Annotated[
    str | None, typer.Option("--bias-dtype", help="bfloat16, float16 or float32; for crops that of --dtype if left out.")
]
Channels = Annotated[
    str | None,
    typer.Option("--channels", help="Channels of the pair tensor, several with commas; for crops 128 if left out."),
]
Hidden = Annotated[int | None, typer.Option("--hidden", help="Hidden width; for crops the channels if left out.")]
WeightDtype = Annotated[str | None, typer.Option("--weight-dtype", help="float32 or bfloat16; for crops float32 if left out.")]
Mask = Annotated[
    str | None,
    typer.Option("--mask", help="none, bool or additive, of multiplications none, bool or float; for crops none if left out."),
]

_SEVERAL = {"head_dim": "32", "channels": "128", "direction": "outgoing,incoming"}
"""The fields of which a command line may give several, and what they are for crops if left out."""


def integers(text: str, argument: str) -> list[int]:
    """`"384,640"` as numbers; InvalidInput names the option otherwise."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidInput.of(argument, repr(text), "numbers separated by commas")
    return [int(part[:20]) for part in parts]  # longer than any size there is


def words(text: str, argument: str = "") -> list[str]:
    """`"a, b"` as names; with an argument, InvalidInput names it where there are none."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if argument and not found:
        raise InvalidInput.of(argument, repr(text), "names separated by commas")
    return found


def shapes(
    targets: list[str], op: str | None = None, usual: Mapping[str, str] | None = None, argument: str = "TARGET", **options: Any
) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """The problems that a command line names, in order, without repeats.

    Args:
        targets: crops, keys and presets.
        op: see `Op`.
        usual: what `head_dim`, `channels` and `direction` (of multiplications) of crops are where they are not given, if other
            than 32, 128 and both.
        argument: what the command line calls targets, for errors.
        options: fields of the problems, None where not given; those three as text. They make the problems of crops, and of
            presets and keys they keep those that have these values.

    Raises:
        InvalidInput: naming the option or target: no such problem, or none in this target.
    """
    from tpf_jit.shape import SHAPES, is_key, parse_key, preset

    if op is not None and op not in SHAPES:
        raise InvalidInput.of("--op", repr(op), ", ".join(SHAPES))
    given = {name: _values(name, value) for name, value in options.items() if value is not None}
    found: list[Any] = []
    for target in targets:
        if not target.strip(" ,"):
            raise InvalidInput.of(argument, repr(target), "crops with commas, a model preset, or a shape key")
        if target[:1].isdecimal():
            left_out = {name: _values(name, text) for name, text in {**_SEVERAL, **(usual or {})}.items()}
            found += _of_crops(op or "triangle_attention", integers(target, argument), given, left_out)
        else:
            named = [parse_key(target)] if is_key(target) else preset(target)
            found += _with_values(target, [shape for shape in named if op in (None, shape.op)], given)
    if not found:
        raise InvalidInput.of(argument, repr(" ".join(targets)), f"problems of {op}")
    return list(dict.fromkeys(found))


def _values(name: str, value: Any) -> list[Any]:
    """What an option asks for, as problems have it."""
    from tpf_jit.shape import dtype_name

    if name == "direction":
        return words(value, _option(name))
    if name in _SEVERAL:
        return integers(value, _option(name))
    return [dtype_name(value) if name.endswith("dtype") else value]


def _of_crops(
    op: str, crops: list[int], given: Mapping[str, list[Any]], left_out: Mapping[str, list[Any]]
) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """Every width, of multiplications every direction, every crop."""
    from tpf_jit.shape import SHAPES

    known = {field.name for field in fields(SHAPES[op])}
    for name, values in given.items():
        if name not in known:
            raise InvalidInput.of(_option(name), _text(values), f"nothing, as crops are {op} (see --op)")
    one = {name: values[0] for name, values in given.items() if name not in _SEVERAL}
    several = {name: given.get(name, values) for name, values in left_out.items() if name in known}
    ways = [dict(zip(several, values, strict=True)) for values in itertools.product(*several.values())]
    return [SHAPES[op](**one, **way, crop=crop) for way in ways for crop in crops]


def _with_values(
    target: str, named: list[TriangleAttentionShape | TriangleMultiplicationShape], given: Mapping[str, list[Any]]
) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """The problems of a preset or key that have the values that options ask for; each value must be there."""
    where = target
    for name, values in given.items() if named else ():
        there = list(dict.fromkeys(getattr(shape, name) for shape in named if hasattr(shape, name)))
        absent = [value for value in values if value not in there]
        if absent:
            ops = " and ".join(dict.fromkeys(shape.op for shape in named))
            allowed = f"{_text(there)}, as {where} has" if there else f"nothing, as {where} has {ops} only"
            raise InvalidInput.of(_option(name), _text(absent), allowed)
        named = [shape for shape in named if getattr(shape, name, None) in values]
        where += f"{' with' if where == target else ''} {_option(name)} {','.join(map(str, values))}"
    return named


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(values: list[Any]) -> str:
    return ", ".join(repr(value) if isinstance(value, str) else str(value) for value in values)


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
