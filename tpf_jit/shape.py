"""The problem a kernel solves, as plain data: `TriangleAttentionShape`, `TriangleMultiplicationShape` and the model presets.

A leaf module of the standard library only: no torch, no device, no environment. Everything that chooses, names, stores or
compares kernels (resolver, cache, tuning database, CLI) speaks in these objects and in their keys.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from typing import Any, ClassVar

from tpf_jit.errors import InvalidInput

KERNEL_DTYPES = ("bfloat16", "float16")
BIAS_DTYPES = ("bfloat16", "float16", "float32")
MASK_KINDS = ("none", "bool", "additive")
TILE_HDIMS = (16, 32, 64, 96, 128)
MAX_SIZE = 2**31 - 1
"""Kernels count in 32 bits."""
MAX_HEAD_DIM = TILE_HDIMS[-1]

DIRECTIONS = ("outgoing", "incoming")
WEIGHT_DTYPES = ("float32", "bfloat16")
MULTIPLICATION_MASK_KINDS = ("none", "bool", "float")
WIDTH_STEP = 32
MAX_WIDTH = 512

_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_KEY = re.compile(
    r"triangle_attention/B(?P<batch>\d+)/I(?P<rows>\d+)/H(?P<heads>\d+)/N(?P<crop>\d+)/D(?P<head_dim>\d+)"
    r"/(?P<dtype>\w+)/bias-(?P<bias_dtype>\w+)/mask-(?P<mask>\w+)"
)
_MULTIPLICATION_KEY = re.compile(
    r"triangle_multiplication/B(?P<batch>\d+)/N(?P<crop>\d+)/C(?P<channels>\d+)/D(?P<hidden>\d+)/(?P<direction>\w+)"
    r"/(?P<dtype>\w+)/weight-(?P<weight_dtype>\w+)/mask-(?P<mask>\w+)"
)


def dtype_name(dtype: object) -> str:
    """The plain name of a dtype: `torch.bfloat16`, `"bf16"` and `"bfloat16"` all give `"bfloat16"`."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)


class _Problem:
    """What problems of all operations have in common; subclasses are frozen dataclasses with a `crop` and a pattern of keys."""

    _key: ClassVar[re.Pattern[str]]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def has_mask(self) -> bool:
        """Whether a mask is given; kernels read masks of all kinds from the same fp32 buffer."""
        return self.mask != "none"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-friendly values, in declaration order."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        """Inverse of `to_dict`; missing fields take their defaults.

        Raises:
            InvalidInput: for an unknown field, a missing crop, or a value that the constructor refuses.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(names))
        if unknown:
            raise InvalidInput.of("shape", f"unknown field {unknown[0]!r}", ", ".join(names))
        if "crop" not in values:
            raise InvalidInput.of("crop", "nothing", "an integer >= 1")
        return cls(**values)

    @classmethod
    def parse(cls, key: str) -> Any:
        """Inverse of `key`.

        Raises:
            InvalidInput: when the text is not such a key, or names an invalid shape.
        """
        match = cls._key.fullmatch(key)
        if match is None:
            raise InvalidInput.of("key", repr(key), f"a key like {cls(crop=384).key()!r}")
        values: dict[str, Any] = match.groupdict()
        # Longer than any size, and than what Python turns into a number.
        return cls(**{name: int(text[:20]) if text.isdecimal() else text for name, text in values.items()})


@dataclass(frozen=True)
class TriangleAttentionShape(_Problem):
    """One triangle-attention problem: q, k, v `(batch, rows, heads, crop, head_dim)`, bias `(batch, heads, crop, crop)`.

    Args:
        crop: N, the number of queries, which equals the number of keys; >= 1.
        heads: H, >= 1.
        head_dim: D, 1..128 elements.
        rows: I, the outer index that shares one pair bias, >= 1; the crop when left out.
        batch: B, >= 1.
        dtype: of q, k, v and the output: `"bfloat16"` or `"float16"` (a torch dtype or `"bf16"` will do).
        bias_dtype: of the pair bias: `"bfloat16"`, `"float16"` or `"float32"`; `dtype` when left out.
        mask: the key mask: `"none"`, `"bool"` (True keeps a key) or `"additive"` (added to the scores).

    Raises:
        InvalidInput: naming the argument, what came, and what is allowed.
    """

    op: ClassVar[str] = "triangle_attention"
    _key: ClassVar[re.Pattern[str]] = _KEY

    crop: int
    heads: int = 4
    head_dim: int = 32
    rows: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"
    bias_dtype: str | None = None
    mask: str = "none"

    def __post_init__(self) -> None:
        self._set("rows", self.crop if self.rows is None else self.rows)
        for name in ("crop", "heads", "rows", "batch"):
            self._set(name, _positive_int(name, getattr(self, name)))
        head_dim = _positive_int("head_dim", self.head_dim)
        if head_dim > MAX_HEAD_DIM:
            raise InvalidInput.of("head_dim", head_dim, f"1 to {MAX_HEAD_DIM}")
        self._set("head_dim", head_dim)
        self._set("dtype", _choice("dtype", dtype_name(self.dtype), KERNEL_DTYPES))
        bias_dtype = self.dtype if self.bias_dtype is None else dtype_name(self.bias_dtype)
        self._set("bias_dtype", _choice("bias_dtype", bias_dtype, BIAS_DTYPES))
        self._set("mask", _choice("mask", "none" if self.mask is None else self.mask, MASK_KINDS))

    @property
    def tile_hdim(self) -> int:
        """The kernel's padded head dim: the smallest of 16, 32, 64, 96, 128 that holds `head_dim`."""
        return next(tile for tile in TILE_HDIMS if tile >= self.head_dim)

    def key(self) -> str:
        """The shape's one textual name, e.g. `triangle_attention/B1/I384/H4/N384/D32/bfloat16/bias-bfloat16/mask-none`."""
        return (
            f"{self.op}/B{self.batch}/I{self.rows}/H{self.heads}/N{self.crop}/D{self.head_dim}"
            f"/{self.dtype}/bias-{self.bias_dtype}/mask-{self.mask}"
        )

    @classmethod
    def from_tensors(cls, q: Any, k: Any, v: Any, bias: Any, mask: Any = None) -> TriangleAttentionShape:
        """The shape of a call's tensors, from metadata only (sizes, strides and dtypes; values are never read).

        q, k, v are `(*, I, H, N, D)` with any number of leading dims (none means batch 1), which multiply into the batch;
        batch and rows are then folded by how the bias is shared, see `fold`. A bias of the other 16-bit dtype counts as float32,
        to which it is converted.

        Raises:
            InvalidInput: when the tensors cannot be such a problem, or its dtype or head dim is none that kernels serve.
        """
        if len(q.shape) < 4:
            raise InvalidInput.of("q", f"shape {tuple(q.shape)}", "(B, I, H, N, D), or (I, H, N, D)")
        for name, other in (("k", k), ("v", v)):
            if tuple(other.shape) != tuple(q.shape):
                raise InvalidInput.of(name, f"shape {tuple(other.shape)}", f"q's, {tuple(q.shape)}")
        *leading, rows, heads, crop, head_dim = q.shape
        batch = math.prod(leading)
        has_row_axis = len(bias.shape) >= len(q.shape)
        per_row = has_row_axis and bias.shape[-4] > 1 and bias.stride(-4) != 0
        outer = range(len(bias.shape) - (4 if has_row_axis else 3))
        batch, rows = fold(batch, rows, per_row, all(bias.shape[axis] == 1 or bias.stride(axis) == 0 for axis in outer))
        kind = "none" if mask is None else "bool" if dtype_name(mask.dtype) == "bool" else "additive"
        dtype, bias_dtype = dtype_name(q.dtype), dtype_name(bias.dtype)
        if bias_dtype != dtype and bias_dtype in KERNEL_DTYPES:
            bias_dtype = "float32"
        return cls(
            crop=crop,
            heads=heads,
            head_dim=head_dim,
            rows=rows,
            batch=batch,
            dtype=dtype,
            bias_dtype=bias_dtype,
            mask=kind,
        )


@dataclass(frozen=True)
class TriangleMultiplicationShape(_Problem):
    """One triangle multiplicative update of a pair tensor z `(batch, crop, crop, channels)`, through `hidden` channels.

    Args:
        crop: N, >= 1.
        channels: C, the width of z and of the result: 32 to 512 in steps of 32.
        hidden: D, the width of the two factors: 32 to 512 in steps of 32; `channels` when left out.
        direction: `"outgoing"`, sum_k a_ik b_jk, or `"incoming"`, sum_k a_ki b_kj.
        batch: B, >= 1.
        dtype: of the activations: `"bfloat16"` or `"float16"` (a torch dtype or `"bf16"` will do).
        weight_dtype: of weights and biases: `"float32"` or `"bfloat16"`.
        mask: of the factors: `"none"`, `"bool"` (True keeps) or `"float"` (multiplies).

    Raises:
        InvalidInput: naming the argument, what came, and what is allowed.
    """

    op: ClassVar[str] = "triangle_multiplication"
    _key: ClassVar[re.Pattern[str]] = _MULTIPLICATION_KEY

    crop: int
    channels: int = 128
    hidden: int | None = None
    direction: str = "outgoing"
    batch: int = 1
    dtype: str = "bfloat16"
    weight_dtype: str = "float32"
    mask: str = "none"

    def __post_init__(self) -> None:
        self._set("hidden", self.channels if self.hidden is None else self.hidden)
        for name in ("crop", "channels", "hidden", "batch"):
            self._set(name, _positive_int(name, getattr(self, name)))
        for name in ("channels", "hidden"):
            width = getattr(self, name)
            if width % WIDTH_STEP or width > MAX_WIDTH:
                raise InvalidInput.of(name, width, f"{WIDTH_STEP} to {MAX_WIDTH} in steps of {WIDTH_STEP}")
        self._set("direction", _choice("direction", self.direction, DIRECTIONS))
        self._set("dtype", _choice("dtype", dtype_name(self.dtype), KERNEL_DTYPES))
        self._set("weight_dtype", _choice("weight_dtype", dtype_name(self.weight_dtype), WEIGHT_DTYPES))
        self._set("mask", _choice("mask", "none" if self.mask is None else self.mask, MULTIPLICATION_MASK_KINDS))

    def measured_as(self, variant: Mapping[str, Any]) -> TriangleMultiplicationShape:
        """The problem under whose name a kernel of `variant` is measured: hardly any sees the direction, how the weights come, or
        what kind of mask there is, and some not even whether."""
        masked = variant.get("mask") not in (None, False, "none")
        return replace(
            self,
            direction=self.direction if "direction" in variant else "outgoing",
            weight_dtype=self.weight_dtype if "weight_dtype" in variant else "float32",
            mask="none" if not masked else self.mask if isinstance(variant["mask"], str) else "float",
        )

    def key(self) -> str:
        """The shape's one textual name, e.g.
        `triangle_multiplication/B1/N384/C128/D128/outgoing/bfloat16/weight-float32/mask-none`."""
        return (
            f"{self.op}/B{self.batch}/N{self.crop}/C{self.channels}/D{self.hidden}/{self.direction}"
            f"/{self.dtype}/weight-{self.weight_dtype}/mask-{self.mask}"
        )

    @classmethod
    def from_tensors(
        cls, z: Any, p_in_weight: Any, mask: Any = None, direction: str = "outgoing"
    ) -> TriangleMultiplicationShape:
        """The shape of a call's tensors, from metadata only.

        Args:
            z: `(*, N, N, C)`; leading dims multiply into the batch.
            p_in_weight: `(2 D, C)`, which sets the hidden width and stands for the dtype of all weights.
            mask: None, boolean, or anything that multiplies.
            direction: as in the constructor.

        Raises:
            InvalidInput: when the tensors cannot be such a problem, or its dtypes or widths are none that kernels serve.
        """
        if len(z.shape) < 3 or z.shape[-3] != z.shape[-2]:
            raise InvalidInput.of("z", f"shape {tuple(z.shape)}", "(B, N, N, C), or (N, N, C)")
        *leading, crop, _, channels = z.shape
        size = tuple(p_in_weight.shape)
        if len(size) != 2 or size[0] % 2 or size[1] != channels:
            raise InvalidInput.of("p_in_weight", f"shape {size}", f"(2 D, {channels}) for z of shape {tuple(z.shape)}")
        return cls(
            crop=crop,
            channels=channels,
            hidden=size[0] // 2,
            direction=direction,
            batch=math.prod(leading),
            dtype=dtype_name(z.dtype),
            weight_dtype=dtype_name(p_in_weight.dtype),
            mask="none" if mask is None else "bool" if dtype_name(mask.dtype) == "bool" else "float",
        )


SHAPES = {cls.op: cls for cls in (TriangleAttentionShape, TriangleMultiplicationShape)}
"""The class of an operation's problems, by the operation's name."""


def is_key(text: str) -> bool:
    """Whether a text is meant as a shape's key: it begins with the name of an operation and a slash."""
    op, slash, _ = text.partition("/")
    return bool(slash) and op in SHAPES


def is_shape(item: Any) -> bool:
    """Whether something is a problem of any operation, another package's too."""
    return hasattr(item, "op") and hasattr(item, "key")


def parse_key(key: str) -> TriangleAttentionShape | TriangleMultiplicationShape:
    """The shape of any operation from its key.

    Raises:
        InvalidInput: when the text is no such key, or names an invalid shape.
    """
    if not is_key(key):
        raise InvalidInput.of("key", repr(key), "a key that begins with " + ", ".join(f"{op}/" for op in SHAPES))
    return SHAPES[key.partition("/")[0]].parse(key)


def fold(batch: int, rows: int, per_row: bool, shared: bool) -> tuple[int, int]:
    """Batch and rows as kernels, which share one bias among the rows of a batch element, see them.

    Args:
        batch, rows: of the call.
        per_row: whether the bias differs from row to row; every row is then a batch element of its own.
        shared: whether one bias serves all batch elements; they are then rows of one.
    """
    if per_row and rows > 1:
        return batch * rows, 1
    if shared and batch > 1:
        return 1, batch * rows
    return batch, rows


def preset_names() -> list[str]:
    """The presets that ship with the package, sorted."""
    folder = resources.files("tpf_jit") / "presets"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def preset(name: str | os.PathLike[str]) -> list[TriangleAttentionShape | TriangleMultiplicationShape]:
    """The shapes of a model: `"openfold3"`, `"boltz2"`, `"protenix"`, `"chai1"`, or the path of a file in the same format.

    The file is JSON: `{"shapes": [entry, ...]}`, an entry being the fields of a shape, where `"crops": [384, 640]` in place of
    `"crop"` stands for one shape a crop, `"op": "triangle_multiplication"` makes it one of that operation (without an op it is
    triangle attention), there `"directions": ["outgoing", "incoming"]` in place of `"direction"` for one a direction, and
    `"note"` is free text. Duplicates are dropped, order is kept.

    Raises:
        InvalidInput: for an unknown name, a file that cannot be read, or an entry that is no shape.
    """
    try:
        text = os.fspath(name)
    except TypeError as error:
        raise InvalidInput.of("preset", type(name).__name__, ", ".join(preset_names()) + ", or a path") from error
    if text in preset_names():
        content = (resources.files("tpf_jit") / "presets" / f"{text}.json").read_text(encoding="utf-8")
    elif text.endswith(".json") or os.sep in text:
        try:
            with open(text, encoding="utf-8") as file:
                content = file.read()
        except OSError as error:
            raise InvalidInput.of("preset", f"{text!r}, which cannot be read ({error.strerror})", "a readable file") from error
    else:
        raise InvalidInput.of("preset", repr(text), ", ".join(preset_names()) + ", or the path of a .json file")
    try:
        content = json.loads(content)
        entries = content.get("shapes") if isinstance(content, dict) else None
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("it has no list of entries under shapes")
        return list(dict.fromkeys(shape for entry in entries for shape in _expand(entry)))
    except InvalidInput as error:
        raise InvalidInput(f"preset {text!r}: {error}") from error
    except ValueError as error:
        allowed = '{"shapes": [{"crop": 384, ...}, ...]}'
        raise InvalidInput.of("preset", f"{text!r}, which is malformed ({error})", allowed) from error


def _expand(entry: dict[str, Any]) -> list[Any]:
    for name in {"crops", "directions"} & entry.keys():
        if not isinstance(entry[name], list):
            raise InvalidInput.of(name, repr(entry[name]), "a list")
    values = {name: value for name, value in entry.items() if name not in ("note", "crops", "directions", "op")}
    cls = SHAPES[_choice("op", entry.get("op", TriangleAttentionShape.op), tuple(SHAPES))]
    ways = [{"direction": way} for way in entry["directions"]] if "directions" in entry else [{}]
    return [cls.from_dict({**values, **way, "crop": crop}) for way in ways for crop in entry.get("crops", [entry.get("crop")])]


def _positive_int(name: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= MAX_SIZE:
        came = repr(value) if number <= MAX_SIZE else f"an integer of {number.bit_length()} bits"
        raise InvalidInput.of(name, came, f"an integer from 1 to {MAX_SIZE}")
    return number


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidInput.of(name, repr(value), ", ".join(allowed))
    return value
