"""TriangleAttentionShape: validation, keys, construction from tensors; the model presets."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from tpf_jit.errors import InvalidInput, TpfError
from tpf_jit.shape import TriangleAttentionShape, dtype_name, preset, preset_names


def test_defaults_are_filled_in() -> None:
    shape = TriangleAttentionShape(384)
    assert (shape.rows, shape.heads, shape.head_dim, shape.batch) == (384, 4, 32, 1)
    assert (shape.dtype, shape.bias_dtype, shape.mask) == ("bfloat16", "bfloat16", "none")
    assert not shape.has_mask
    assert TriangleAttentionShape(384, dtype="float16").bias_dtype == "float16"


def test_spellings_of_one_dtype_make_one_shape() -> None:
    shapes = {TriangleAttentionShape(8, dtype=spelling, bias_dtype="fp32") for spelling in ("bf16", "bfloat16", torch.bfloat16)}
    assert len(shapes) == 1
    assert dtype_name(torch.float32) == "float32"


@pytest.mark.parametrize(
    ("fields", "argument", "came"),
    [
        ({"crop": 0}, "crop", "0"),
        ({"crop": -3}, "crop", "-3"),
        ({"crop": 8.0}, "crop", "8.0"),
        ({"crop": True}, "crop", "True"),
        ({"crop": 8, "heads": 0}, "heads", "0"),
        ({"crop": 8, "rows": 0}, "rows", "0"),
        ({"crop": 8, "batch": "2"}, "batch", "'2'"),
        ({"crop": 8, "head_dim": 129}, "head_dim", "129"),
        ({"crop": 8, "dtype": "float32"}, "dtype", "float32"),
        ({"crop": 8, "bias_dtype": "float64"}, "bias_dtype", "float64"),
        ({"crop": 8, "mask": "prefix"}, "mask", "prefix"),
    ],
)
def test_errors_name_argument_value_and_choices(fields: dict, argument: str, came: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{argument}: got .*{came}.*; allowed: .+") as caught:
        TriangleAttentionShape(**fields)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TpfError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(("head_dim", "tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (40, 64), (72, 96), (97, 128), (128, 128)])
def test_tile_hdim(head_dim: int, tile: int) -> None:
    assert TriangleAttentionShape(8, head_dim=head_dim).tile_hdim == tile


SHAPES = [
    TriangleAttentionShape(384),
    TriangleAttentionShape(1, heads=1, head_dim=1, rows=5, batch=2, dtype="float16", bias_dtype="float32", mask="bool"),
    TriangleAttentionShape(2048, heads=8, head_dim=128, rows=2051, mask="additive"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key())
def test_round_trips(shape: TriangleAttentionShape) -> None:
    assert TriangleAttentionShape.parse(shape.key()) == shape
    assert TriangleAttentionShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    assert pickle.loads(pickle.dumps(shape)) == shape


def test_the_key_is_the_documented_one() -> None:
    assert TriangleAttentionShape(384).key() == "triangle_attention/B1/I384/H4/N384/D32/bfloat16/bias-bfloat16/mask-none"


BAD_KEYS = ["", "triangle_attention/B1", SHAPES[0].key() + "/forward", SHAPES[0].key().replace("N384", "N0")]


@pytest.mark.parametrize("text", BAD_KEYS)
def test_parse_refuses_other_text(text: str) -> None:
    with pytest.raises(InvalidInput):
        TriangleAttentionShape.parse(text)


def test_from_dict_refuses_unknown_and_missing_fields() -> None:
    with pytest.raises(InvalidInput, match="'tokens'"):
        TriangleAttentionShape.from_dict({"crop": 8, "tokens": 3})
    with pytest.raises(InvalidInput, match="^crop"):
        TriangleAttentionShape.from_dict({"heads": 4})


def tensors(*leading: int, heads: int = 3, crop: int = 7, dim: int = 24) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(*leading, crop, heads, dim, dtype=torch.bfloat16).transpose(-2, -3) for _ in range(3))


def test_from_tensors_reads_metadata() -> None:
    q, k, v = tensors(2, 5)
    shape = TriangleAttentionShape.from_tensors(q, k, v, torch.empty(2, 1, 3, 7, 7), torch.ones(2, 5, 1, 1, 7, dtype=torch.bool))
    expected = TriangleAttentionShape(7, heads=3, head_dim=24, rows=5, batch=2, bias_dtype="float32", mask="bool")
    assert shape == expected
    assert TriangleAttentionShape.from_tensors(q, k, v, torch.empty(2, 3, 7, 7), torch.empty(2, 1, 1, 1, 7)).mask == "additive"


def test_from_tensors_of_other_ranks() -> None:
    q, k, v = tensors(5)
    assert TriangleAttentionShape.from_tensors(q, k, v, torch.empty(1, 3, 7, 7)).batch == 1
    q, k, v = tensors(2, 3, 5)
    shape = TriangleAttentionShape.from_tensors(q, k, v, torch.empty(2, 3, 1, 3, 7, 7))
    assert (shape.batch, shape.rows) == (6, 5)


def test_from_tensors_folds_a_bias_that_differs_by_row() -> None:
    q, k, v = tensors(2, 5)
    per_row = TriangleAttentionShape.from_tensors(q, k, v, torch.empty(2, 5, 3, 7, 7))
    assert (per_row.batch, per_row.rows) == (10, 1)
    expanded = TriangleAttentionShape.from_tensors(q, k, v, torch.empty(2, 1, 3, 7, 7).expand(2, 5, 3, 7, 7))
    assert (expanded.batch, expanded.rows) == (2, 5)


def test_from_tensors_folds_a_bias_that_all_batch_elements_share() -> None:
    q, k, v = tensors(2, 5)
    for bias in (torch.empty(1, 1, 3, 7, 7), torch.empty(3, 7, 7), torch.empty(1, 3, 7, 7).expand(2, 3, 7, 7)):
        shared = TriangleAttentionShape.from_tensors(q, k, v, bias)
        assert (shared.batch, shared.rows) == (1, 10)
    q, k, v = tensors(2, 3, 5)
    mixed = TriangleAttentionShape.from_tensors(q, k, v, torch.empty(2, 1, 1, 3, 7, 7))
    assert (mixed.batch, mixed.rows) == (6, 5)


def test_from_tensors_refuses_what_is_no_problem() -> None:
    q, k, v = tensors(2, 5)
    bias = torch.empty(2, 1, 3, 7, 7)
    with pytest.raises(InvalidInput, match="^q"):
        TriangleAttentionShape.from_tensors(q[0, 0], k, v, bias)
    with pytest.raises(InvalidInput, match="^v"):
        TriangleAttentionShape.from_tensors(q, k, v[:, :2], bias)
    with pytest.raises(InvalidInput, match="^dtype"):
        TriangleAttentionShape.from_tensors(q.float(), k, v, bias)


def test_presets_are_those_of_the_models() -> None:
    assert preset_names() == ["boltz2", "chai1", "openfold3", "protenix"]
    attention = {
        name: [shape for shape in preset(name) if isinstance(shape, TriangleAttentionShape)] for name in preset_names()
    }
    assert {384, 640, 768} <= {shape.crop for shape in attention["openfold3"]}
    assert {shape.head_dim for shape in attention["openfold3"]} == {16, 32}
    assert {shape.bias_dtype for shape in attention["protenix"]} == {"float32"}
    assert {(shape.heads, shape.head_dim) for shape in attention["chai1"]} == {(4, 64)}
    assert all(shape.mask == "bool" for shape in attention["boltz2"])
    for name in preset_names():
        assert len(set(preset(name))) == len(preset(name)) > 0


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"shapes": []}', "no list of entries under shapes"), ("{}", "no list of entries"), ("[]", "no list of entries"),
        ('{"shapes": [3]}', "no list of entries"), ("x", "malformed"), ("", "malformed"),
        ('{"shapes": [{"crop": 0}]}', "crop: got 0"), ('{"shapes": [{"heads": 4}]}', "crop: got None"),
        ('{"shapes": [{"crops": 384}]}', "crops: got 384; allowed: a list"),
        ('{"shapes": [{"crop": 8, "op": "triangle_multiplication", "directions": "outgoing"}]}', "directions: got 'outgoing'"),
    ],
)  # fmt: skip
def test_malformed_presets_are_named(tmp_path, content: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=f"mine.json.+{said}"):
        preset(path)


@pytest.mark.parametrize("name", [None, 3])
def test_a_preset_is_a_name_or_a_path(name: object) -> None:
    with pytest.raises(InvalidInput, match="^preset: got .+; allowed: boltz2"):
        preset(name)


def test_preset_from_a_file(tmp_path) -> None:
    path = tmp_path / "mine.json"
    entries = [{"crops": [64, 128], "note": "trunk", "head_dim": 16}, {"crop": 64, "head_dim": 16}]
    path.write_text(json.dumps({"shapes": entries}), encoding="utf-8")
    assert preset(path) == [TriangleAttentionShape(64, head_dim=16), TriangleAttentionShape(128, head_dim=16)]
    assert preset(str(path)) == preset(path)


def test_unknown_presets_list_the_known_ones(tmp_path) -> None:
    with pytest.raises(InvalidInput, match="openfold3"):
        preset("alphafold9")
    with pytest.raises(InvalidInput, match="cannot be read"):
        preset(tmp_path / "absent.json")


@pytest.mark.parametrize("size", [2**31, 10**25, 10**400])
def test_sizes_beyond_what_kernels_count(size: int) -> None:
    with pytest.raises(InvalidInput, match="^crop: .*2147483647"):
        TriangleAttentionShape(size)
    with pytest.raises(InvalidInput, match="2147483647"):
        TriangleAttentionShape.parse(TriangleAttentionShape(384).key().replace("N384", f"N{size}"))
