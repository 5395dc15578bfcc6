"""TriangleMultiplicationShape: validation, keys, construction from tensors; and who else understands its keys."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

import tpf_jit
from tpf_jit import api
from tpf_jit.cli import _shapes
from tpf_jit.errors import InvalidInput
from tpf_jit.ops import routing
from tpf_jit.shape import SHAPES, TriangleAttentionShape, TriangleMultiplicationShape, is_key, parse_key, preset
from tpf_jit.templates import registry
from tpf_jit.templates.base import ProblemShape
from tpf_jit.tune import cells

KEY = "triangle_multiplication/B1/N384/C128/D128/outgoing/bfloat16/weight-float32/mask-none"


def test_defaults_are_filled_in() -> None:
    shape = TriangleMultiplicationShape(384)
    assert (shape.channels, shape.hidden, shape.direction, shape.batch) == (128, 128, "outgoing", 1)
    assert (shape.dtype, shape.weight_dtype, shape.mask, shape.has_mask) == ("bfloat16", "float32", "none", False)
    assert TriangleMultiplicationShape(8, channels=64).hidden == 64
    assert TriangleMultiplicationShape(8, mask="float").has_mask
    assert isinstance(shape, ProblemShape) and tpf_jit.TriangleMultiplicationShape is TriangleMultiplicationShape


def test_spellings_of_one_dtype_make_one_shape() -> None:
    spellings = ("bf16", "bfloat16", torch.bfloat16)
    assert len({TriangleMultiplicationShape(8, dtype=name, weight_dtype=name) for name in spellings}) == 1


@pytest.mark.parametrize(
    ("fields", "argument", "came"),
    [
        ({"crop": 0}, "crop", "0"),
        ({"crop": True}, "crop", "True"),
        ({"crop": 8, "batch": 0}, "batch", "0"),
        ({"crop": 8, "channels": 16}, "channels", "16"),
        ({"crop": 8, "channels": 130}, "channels", "130"),
        ({"crop": 8, "channels": 544}, "channels", "544"),
        ({"crop": 8, "hidden": 48}, "hidden", "48"),
        ({"crop": 8, "hidden": "64"}, "hidden", "'64'"),
        ({"crop": 8, "direction": "out"}, "direction", "out"),
        ({"crop": 8, "dtype": "float32"}, "dtype", "float32"),
        ({"crop": 8, "weight_dtype": "float16"}, "weight_dtype", "float16"),
        ({"crop": 8, "mask": "additive"}, "mask", "additive"),
    ],
)
def test_errors_name_argument_value_and_choices(fields: dict, argument: str, came: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{argument}: got .*{came}.*; allowed: .+"):
        TriangleMultiplicationShape(**fields)


@pytest.mark.parametrize("width", range(32, 513, 32))
def test_all_widths_in_steps_of_32(width: int) -> None:
    shape = TriangleMultiplicationShape(8, channels=width, hidden=544 - width)
    assert (shape.channels, shape.hidden) == (width, 544 - width)


SHAPES_OF_ALL_KINDS = [
    TriangleMultiplicationShape(384),
    TriangleMultiplicationShape(1, 32, 512, "incoming", 3, "float16", "bfloat16", "bool"),
    TriangleMultiplicationShape(2051, channels=256, mask="float"),
]


@pytest.mark.parametrize("shape", SHAPES_OF_ALL_KINDS, ids=lambda shape: shape.key())
def test_round_trips(shape: TriangleMultiplicationShape) -> None:
    assert TriangleMultiplicationShape.parse(shape.key()) == shape == parse_key(shape.key())
    assert TriangleMultiplicationShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert pickle.loads(pickle.dumps(shape)) == shape


def test_the_key_is_stable() -> None:
    """It names rows of the tuning database."""
    assert TriangleMultiplicationShape(384).key() == KEY
    other = TriangleMultiplicationShape(7, 64, 32, "incoming", 2, "float16", "bfloat16", "bool")
    assert other.key() == "triangle_multiplication/B2/N7/C64/D32/incoming/float16/weight-bfloat16/mask-bool"


@pytest.mark.parametrize("key", [KEY + "/", KEY.replace("C128", "C130"), KEY.replace("outgoing", "sideways"), KEY[5:], ""])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidInput):
        parse_key(key)
    with pytest.raises(InvalidInput):
        TriangleMultiplicationShape.parse(key)


def test_keys_of_both_operations_are_told_apart() -> None:
    assert set(SHAPES) == {"triangle_attention", "triangle_multiplication"}
    attention = TriangleAttentionShape(384)
    assert parse_key(attention.key()) == attention and is_key(attention.key()) and is_key(KEY)
    assert not is_key("openfold3") and not is_key("models/openfold3.json") and not is_key("triangle_multiplication")
    with pytest.raises(InvalidInput, match="^key"):
        TriangleAttentionShape.parse(KEY)


def test_from_tensors() -> None:
    z, weight = torch.empty(2, 3, 7, 7, 64, dtype=torch.float16, device="meta"), torch.empty(192, 64, device="meta")
    shape = TriangleMultiplicationShape.from_tensors(z, weight, torch.empty(7, 7, device="meta"), "incoming")
    assert shape == TriangleMultiplicationShape(7, 64, 96, "incoming", 6, "float16", "float32", "float")
    boolean = torch.empty(7, 7, dtype=torch.bool, device="meta")
    assert TriangleMultiplicationShape.from_tensors(z[0, 0], weight, boolean).mask == "bool"
    assert TriangleMultiplicationShape.from_tensors(z[0, 0], weight).batch == 1


@pytest.mark.parametrize(
    ("z", "weight", "argument"),
    [((7, 64), (128, 64), "z"), ((1, 7, 8, 64), (128, 64), "z"), ((7, 7, 64), (128, 32), "p_in_weight"),
     ((7, 7, 64), (127, 64), "p_in_weight"), ((7, 7, 64), (128,), "p_in_weight"), ((7, 7, 40), (80, 40), "channels")],
)  # fmt: skip
def test_from_tensors_names_what_is_wrong(z: tuple, weight: tuple, argument: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{argument}"):
        TriangleMultiplicationShape.from_tensors(torch.empty(z, dtype=torch.bfloat16), torch.empty(weight))


# Presets, command line, API


def test_presets_may_hold_both_operations(tmp_path) -> None:
    file = tmp_path / "model.json"
    entries = [
        {"crops": [8, 9], "heads": 2},
        {"op": "triangle_multiplication", "crops": [8, 9], "channels": 64, "direction": "incoming", "note": "template"},
        {"op": "triangle_multiplication", "crop": 8, "channels": 64, "direction": "incoming"},
    ]
    file.write_text(json.dumps({"shapes": entries}))
    attention = [TriangleAttentionShape(crop, heads=2) for crop in (8, 9)]
    multiplication = [TriangleMultiplicationShape(crop, 64, direction="incoming") for crop in (8, 9)]
    both = {**entries[1], "directions": ["incoming", "outgoing"]}
    del both["direction"]
    assert preset(file) == attention + multiplication
    assert api._shapes(file) == (attention + multiplication, False)
    assert _shapes.shapes([str(file), KEY]) == [*attention, *multiplication, TriangleMultiplicationShape(384)]
    assert _shapes.shapes([str(file)], "triangle_multiplication") == multiplication
    file.write_text(json.dumps({"shapes": [both]}))
    assert preset(file) == multiplication + [TriangleMultiplicationShape(crop, 64) for crop in (8, 9)]


WRONG = [
    {"op": "layer_norm", "crop": 8},
    {"op": "triangle_multiplication", "crop": 8, "heads": 4},
    {"crop": 8, "directions": ["outgoing"]},
]


@pytest.mark.parametrize("entry", WRONG)
def test_wrong_preset_entries_are_named(tmp_path, entry: dict) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"shapes": [entry]}))
    with pytest.raises(InvalidInput, match="op: got 'layer_norm'|unknown field '(heads|direction)'"):
        preset(file)


def test_the_api_takes_its_keys() -> None:
    assert api._shapes(KEY) == ([TriangleMultiplicationShape(384)], True)
    assert api._shapes([KEY, TriangleAttentionShape(8)])[0] == [TriangleMultiplicationShape(384), TriangleAttentionShape(8)]


def test_table_cells() -> None:
    assert _shapes.short(TriangleMultiplicationShape(384)) == "N=384 C=128 outgoing bf16"
    other = TriangleMultiplicationShape(7, 64, 32, "incoming", 2, "float16", "bfloat16", "bool")
    assert _shapes.short(other) == "B=2 N=7 C=64 D=32 incoming fp16 weights bfloat16 bool mask"
    assert _shapes.short(TriangleAttentionShape(384)) == "N=384 H=4 D=32 bf16"


def test_a_shape_is_explained(monkeypatch) -> None:
    shape = TriangleMultiplicationShape(384)
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware(None, "there is no Hopper GPU", 0))
    assert tpf_jit.is_supported(shape) == (False, "there is no Hopper GPU")
    found = tpf_jit.explain(shape)
    assert (found.path, found.reason, found.shape) == ("fallback", "there is no Hopper GPU", KEY)


def test_problems_that_a_kernel_does_not_tell_apart_are_measured_once() -> None:
    shape = TriangleMultiplicationShape(384, direction="incoming", weight_dtype="bfloat16", mask="bool")
    front, back, fold = (registry.get(f"triangle_multiplication_{name}_sm90") for name in ("front", "back", "fold"))
    assert front.measured_as(shape) == TriangleMultiplicationShape(384, mask="float")
    assert back.measured_as(shape) == TriangleMultiplicationShape(384)
    assert fold.measured_as(shape) == TriangleMultiplicationShape(384, weight_dtype="bfloat16")
    # A third party's kernel may see more.
    kept = shape.measured_as({"direction": "incoming", "mask": "bool", "weight_dtype": "bfloat16"})
    assert kept == shape and shape.measured_as({"mask": "none"}).mask == "none"


def test_a_plan_has_each_measurement_once_and_names_what_has_no_choice() -> None:
    both = [TriangleMultiplicationShape(64, direction=direction) for direction in ("outgoing", "incoming")]
    planned = cells.plan(both)
    assert len({cell.key for cell in planned.cells}) == len(planned.cells) == 10 and not planned.refused
    assert all(cell.direction not in ("fold", "finish") and cell.shape.direction == "outgoing" for cell in planned.cells)
    refused = cells.plan(both, ["fold", "finish"])
    assert not refused.cells and all("one configuration" in reason for _, reason in refused.refused)
    found = [each for _, each in cells.inference_cells(both)]
    assert found == ["fold_front", "product_nt", "back", "product_tn"]
