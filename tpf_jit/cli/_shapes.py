"""How a command names problems: crops with options, shape keys, model presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape

Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="TARGET...",
        help="Crops (384, or 384,640,768), a model preset (openfold3, boltz2, protenix, chai1, or a .json file), or shape keys.",
    ),
]
Heads = Annotated[int, typer.Option("--heads", help="Attention heads, for crops.")]
HeadDim = Annotated[str, typer.Option("--head-dim", help="Channels per head, for crops; several with commas.")]
Rows = Annotated[int | None, typer.Option("--rows", help="Rows that share one pair bias, for crops; the crop if left out.")]
Batch = Annotated[int, typer.Option("--batch", help="Batch, for crops.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16 or float16, for crops.")]
BiasDtype = Annotated[str | None, typer.Option("--bias-dtype", help="bfloat16, float16 or float32; --dtype if left out.")]
Mask = Annotated[str, typer.Option("--mask", help="none, bool or additive, for crops.")]


def integers(text: str, argument: str) -> list[int]:
    """`"384,640"` as numbers; InvalidInput names the option otherwise."""
    from tpf_jit.errors import InvalidInput

    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise InvalidInput.of(argument, repr(text), "numbers separated by commas")
    return [int(part[:20]) for part in parts]  # longer than any size there is


def shapes(
    targets: list[str], head_dim: str = "32", **options: Any
) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """The problems that a command line names, in order, without repeats."""
    from tpf_jit.shape import TriangleAttentionShape, is_key, parse_key, preset

    found: list[Any] = []
    dims = integers(head_dim, "--head-dim")
    for target in targets:
        if target[:1].isdecimal():
            crops = integers(target, "TARGET")
            found += [TriangleAttentionShape(crop=crop, head_dim=dim, **options) for dim in dims for crop in crops]
        elif is_key(target):
            found.append(parse_key(target))
        else:
            found += preset(target)
    return list(dict.fromkeys(found))


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
