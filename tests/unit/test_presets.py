"""The model presets: what each cites, that kernels take all of it, and what the shipped tables answer for it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_samples import H200

import tpf_jit
from tpf_jit.nearest import SAME
from tpf_jit.ops.multiplication_routing import folds_in_front, front_gradients_together
from tpf_jit.resolve import Dispatcher
from tpf_jit.shape import DIRECTIONS, TriangleAttentionShape, TriangleMultiplicationShape, preset, preset_names
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_from_dict
from tpf_jit.tuning_db.reader import read_shipped
from tpf_jit.tuning_db.rows import split_cell

FOLDER = Path(tpf_jit.__file__).parent / "presets"
FORWARD = "triangle_attention_forward_sm90"
each_preset = pytest.mark.parametrize("name", preset_names())


def content(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def shapes(name: str) -> list[TriangleAttentionShape]:
    return [shape for shape in preset(name) if isinstance(shape, TriangleAttentionShape)]


def multiplications(name: str) -> list[TriangleMultiplicationShape]:
    return [shape for shape in preset(name) if isinstance(shape, TriangleMultiplicationShape)]


def noted(name: str, word: str, op: str = TriangleAttentionShape.op) -> set[int]:
    """Crops of the entries of an operation whose note has a word."""
    entries = [entry for entry in content(name)["shapes"] if entry.get("op", TriangleAttentionShape.op) == op]
    return {crop for entry in entries if word in entry["note"] for crop in entry["crops"]}


@each_preset
def test_a_preset_cites_the_files_it_is_taken_from(name: str) -> None:
    source = content(name)["source"]
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", source["repository"])
    assert re.fullmatch(r"[0-9a-f]{40}", source["commit"])
    assert source["files"] and all(path and not path.startswith("/") and said for path, said in source["files"].items())
    assert content(name)["model"] and content(name)["left_out"]
    assert all(re.match("training|inference", entry["note"]) for entry in content(name)["shapes"])


@each_preset
def test_a_copy_reads_like_the_original(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.json"
    copy.write_bytes((FOLDER / f"{name}.json").read_bytes())
    assert preset(copy) == preset(name)


@each_preset
def test_kernels_take_every_shape_in_every_direction(name: str) -> None:
    for shape in preset(name):
        templates = registry.templates(op=shape.op)
        directions = dict.fromkeys(template.direction for template in templates)
        if shape.op == TriangleMultiplicationShape.op and not front_gradients_together(shape):
            del directions["front_gradients"]  # front_backward and front_weights do that work
        if shape.op == TriangleMultiplicationShape.op and not folds_in_front(shape):
            del directions["fold_front"]  # fold and front do that work
        for direction in directions:
            served = [template for template in templates if template.direction == direction and template.supports(shape)[0]]
            assert served, f"{direction} of {shape.key()}"
            assert served[0].check(shape, served[0].default(shape)) is None


def test_training_crops_are_the_published_ones() -> None:
    assert noted("openfold3", "training") == {384, 640, 768}
    assert noted("boltz2", "training") == {256, 384, 512}
    assert noted("protenix", "training") == {256, 384, 640, 768}
    assert noted("chai1", "training") == set()
    assert noted("chai1", "inference") == {256, 384, 512, 768, 1024, 1536, 2048}


@each_preset
def test_multiplications_are_trained_at_the_crops_of_attention(name: str) -> None:
    assert noted(name, "training", TriangleMultiplicationShape.op) == noted(name, "training")
    assert noted(name, "inference", TriangleMultiplicationShape.op) <= noted(name, "inference")


@each_preset
def test_multiplications_come_in_both_directions(name: str) -> None:
    found = multiplications(name)
    assert found and {shape.direction for shape in found} == set(DIRECTIONS)
    assert {replace(shape, direction=way) for shape in found for way in DIRECTIONS} == set(found)


def test_widths_and_masks_of_multiplications() -> None:
    widths = {name: {(shape.channels, shape.hidden) for shape in multiplications(name)} for name in preset_names()}
    assert widths == {
        "openfold3": {(128, 128), (64, 64)},
        "boltz2": {(128, 128)},
        "protenix": {(128, 128), (64, 128), (256, 256), (64, 64)},
        "chai1": {(256, 256)},
    }
    found = [shape for name in preset_names() for shape in multiplications(name)]
    kinds = {(shape.batch, shape.dtype, shape.weight_dtype, shape.mask) for shape in found}
    assert kinds == {(1, "bfloat16", "float32", "float")}


def test_heads_masks_and_dtypes() -> None:
    assert {(shape.heads, shape.head_dim, shape.mask) for shape in shapes("openfold3")} == {(4, d, "additive") for d in (16, 32)}
    assert {(shape.heads, shape.head_dim, shape.mask) for shape in shapes("boltz2")} == {(4, 32, "bool")}
    assert {(shape.heads, shape.head_dim, shape.mask) for shape in shapes("protenix")} == {(h, 32, "bool") for h in (2, 4, 8)}
    assert {(shape.heads, shape.head_dim, shape.mask) for shape in shapes("chai1")} == {(4, 64, "bool")}
    for name in preset_names():
        assert {shape.dtype for shape in shapes(name)} == {"bfloat16"}
        assert {shape.bias_dtype for shape in shapes(name)} == {"float32" if name == "protenix" else "bfloat16"}


def test_protenix_chunks_rows_above_1024_tokens() -> None:
    rows = {shape.crop: shape.rows for shape in shapes("protenix")}
    assert rows[768] == 768 and rows[1024] == 1024 and rows[1536] == 512 and rows[2048] == 256


def traits(shape: TriangleAttentionShape) -> tuple:
    """What decides which code is compiled, but for the mask, across which records are borrowed."""
    return tuple(getattr(shape, name) for name in SAME if name != "has_mask")


def measured() -> list[tuple[TriangleAttentionShape, tuple]]:
    """The shipped problems of the H200's forward and their winners."""
    found = []
    for (cell, model), winners in read_shipped().winners.items():
        op, key, direction = split_cell(cell)
        if (op, direction, model) == (TriangleAttentionShape.op, "forward", H200.model):
            found.append((TriangleAttentionShape.parse(key), winners))
    return found


@each_preset
def test_a_default_is_taken_only_where_nothing_of_the_kind_was_measured(name: str) -> None:
    """Protenix hands a float32 bias to the kernel. As long as no such problem is in the shipped tables, its shapes have no
    neighbour at any crop, and the default is the right answer."""
    kinds = {traits(shape) for shape, _ in measured()}
    dispatcher = Dispatcher(False, device=H200)
    for shape in shapes(name):
        found = dispatcher.resolve(shape.op, "forward", shape)
        assert (found.source == "default") == (traits(shape) not in kinds), f"{shape.key()}: {found.note}"


def test_winners_of_a_16_bit_bias_rarely_fit_a_float32_one() -> None:
    """Why records are not borrowed across the bias dtype: its tile is twice as large, and winners use what memory there is."""
    template = registry.get(FORWARD)
    first = [(shape, winners[0]) for shape, winners in measured() if shape.bias_dtype == "bfloat16" and shape.head_dim >= 32]
    assert first
    refused = []
    for shape, winner in first:
        assert winner.template == FORWARD
        config = config_from_dict(template.Config, winner.config)
        assert template.check(shape, config) is None
        problem = template.check(replace(shape, bias_dtype="float32"), config)
        refused += [problem] if problem is not None else []
    assert all("shared memory" in problem for problem in refused)
    assert len(refused) >= len(first) / 2
