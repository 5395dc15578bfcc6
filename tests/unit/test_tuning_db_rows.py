"""Trials as plain data: content hashes, normal forms, device models, refusals."""

from __future__ import annotations

import dataclasses
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tuning_samples import H100, H200, shape, trial

from tpf_jit.errors import InvalidInput
from tpf_jit.tuning_db.rows import (
    TrialRow,
    cell_family,
    cell_key,
    config_order,
    device_model,
    normal_date,
    split_cell,
)


def test_id_depends_on_content_and_on_nothing_else() -> None:
    row = trial()
    shuffled = dict(random.Random(1).sample(list(row.device.items()), len(row.device)))
    assert trial(device=shuffled).id == row.id
    assert trial(config={"crop": 0, "stages": 2, "tile_n": 128}).id == row.id
    assert TrialRow.from_dict(row.to_dict()).id == row.id
    others = [
        trial(us=100.1),
        trial(status="wrong", samples_us=row.samples_us),
        trial(date="2026-12-01T10:20:31Z"),
        trial(session="t"),
        trial(grade="final"),
        trial(config={"tile_n": 64, "stages": 2, "crop": 0}),
        trial(device={**row.device, "power_w": 412.6}),
        trial(errors={"out": 2.0e-3, "lse": 4e-7}),
    ]
    assert len({other.id for other in others} | {row.id}) == len(others) + 1


def test_id_is_the_same_in_another_process() -> None:
    unit = Path(__file__).parent
    path = [str(unit), str(unit.parents[1])]
    code = f"import sys; sys.path[:0] = {path}; from tuning_samples import trial; print(trial().id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == trial().id


def test_fields_at_their_default_do_not_enter_the_hash() -> None:
    """So a later version can add a field without changing the id of a stored row."""
    assert "detail" not in trial().to_dict()
    assert "grade" not in trial().to_dict()
    assert trial(grade="final").to_dict()["grade"] == "final"


def test_numbers_are_brought_to_one_form() -> None:
    row = trial(samples_us=[3, 1.00004, 2.000049], errors={"out": float("nan"), "lse": math.inf})
    assert row.samples_us == [3.0, 1.0, 2.0]
    assert (row.median_us, row.p10_us, row.p90_us) == (2.0, 1.0, 3.0)
    assert row.errors == {"out": math.inf, "lse": math.inf}
    assert row.to_dict()["errors"] == {"out": "inf", "lse": "inf"}
    assert TrialRow.from_dict(row.to_dict()) == row
    assert trial(median_us=42).median_us == 42.0
    assert trial(device={**trial().device, "compute_capability": (9, 0)}).device["compute_capability"] == [9, 0]


def test_percentiles_are_of_the_samples() -> None:
    samples = list(range(1, 102))
    random.Random(0).shuffle(samples)
    row = trial(samples_us=samples)
    assert (row.median_us, row.p10_us, row.p90_us) == (51.0, 11.0, 91.0)


def test_dates_have_one_spelling() -> None:
    assert normal_date("2026-12-01T11:20:30.750+01:00") == "2026-12-01T10:20:30Z"
    assert trial(date="2026-12-01T10:20:30+00:00").id == trial().id
    for bad in ("2026-12-01T10:20:30", "yesterday", ""):
        with pytest.raises(InvalidInput, match="date"):
            normal_date(bad)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"status": "great"}, "status"),
        ({"grade": "best"}, "grade"),
        ({"template": ""}, "template"),
        ({"cell": "no cell"}, "cell"),
        ({"samples_us": [1.0, float("nan")]}, "samples_us"),
        ({"samples_us": [-1.0]}, "samples_us"),
        ({"median_us": "fast"}, "median_us"),
        ({"samples_us": [], "median_us": None}, "median_us"),
        ({"config": {"tile_n": float("inf")}}, "config"),
        ({"config": [1, 2]}, "config"),
        ({"errors": {"out": "small"}}, "errors"),
        ({"device": {"sms": 132}}, "device"),
        ({"session": 3}, "session"),
    ],
)
def test_bad_rows_are_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        trial(**fields)


def test_failures_need_neither_times_nor_a_device() -> None:
    row = trial(status="compile_error", device={}, detail="ptxas: too many registers")
    assert row.median_us is None
    assert row.device_model == ""


def test_rows_of_a_newer_version_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown field 'colour'"):
        TrialRow.from_dict({**trial().to_dict(), "colour": "red"})
    with pytest.raises(InvalidInput, match="without 'cell'"):
        TrialRow.from_dict({"template": "t", "config": {}, "status": "ok", "date": "2026-12-01T10:20:30Z"})


def test_cells() -> None:
    cell = cell_key(shape(crop=384), "backward")
    assert cell == "triangle_attention/B1/I384/H4/N384/D32/bfloat16/bias-bfloat16/mask-none/backward"
    assert split_cell(cell) == ("triangle_attention", shape(crop=384).key(), "backward")
    assert cell_family(cell) == "triangle_attention/backward"


def test_device_models_share_what_is_equal_and_nothing_more() -> None:
    def model(**facts):
        return device_model({**H200.facts(), **facts})

    assert model() == device_model(H200) == "NVIDIA H200/132sm/144g"
    assert model(driver="575.1", memory_bytes=H200.memory_bytes + (300 << 20)) == model()
    different = [
        model(name="NVIDIA H200 NVL"),
        model(sms=114),
        model(memory_bytes=96 << 30),
        model(memory_bytes=94 << 30, sms=114),
        model(sms=None),
        device_model(H100),
    ]
    assert len({*different, model()}) == len(different) + 1
    # 80, 94 and 96 GB boards as drivers report them: 79.2, 93.1 and 95.1 GiB.
    memory = [model(memory_bytes=int(gib * 2**30)) for gib in (79.2, 93.1, 139.8)]
    assert [text.rsplit("/")[-1] for text in memory] == ["80g", "96g", "144g"]
    assert device_model({}) == ""


def test_canonical_order_is_numeric_by_field() -> None:
    configs = [{"a": 128, "b": "x"}, {"a": 64, "b": "y"}, {"a": 64, "b": "x"}, {"a": 8, "c": True}]
    assert sorted(configs, key=config_order) == [configs[3], configs[2], configs[1], configs[0]]


def test_a_kernel_that_took_no_time_is_no_measurement() -> None:
    with pytest.raises(InvalidInput, match="^median_us: .*> 0"):
        dataclasses.replace(trial(), samples_us=[0.0, 0.0], median_us=None, p10_us=None, p90_us=None)
