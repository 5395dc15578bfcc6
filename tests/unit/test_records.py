"""Records: the format, what is current, and tables that never quote what is stale."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tuning_samples import SOURCE, FakeRegistry, FakeTemplate

from tpf_jit import records
from tpf_jit.errors import DatabaseError, InvalidInput

REGISTRY = FakeRegistry(FakeTemplate(), FakeTemplate("other", source="6" * 64))


def row(impl: str = "tpf_jit", ms: float = 0.9, **fields: Any) -> dict[str, Any]:
    values = {
        "op": "triangle_attention",
        "pass": "forward",
        "impl": impl,
        "B": 1,
        "I": 768,
        "N": 768,
        "H": 4,
        "D": 32,
        "dtype": "bfloat16",
        "bias_dtype": "bfloat16",
        "mask": "none",
        "ms": ms,
        "ms_p10": ms * 0.99,
        "ms_p90": ms * 1.01,
    }
    return {**values, **fields}


def bench(**fields: Any) -> dict[str, Any]:
    values = {
        "kind": "bench.attention",
        "date": "2026-12-01T10:20:30Z",
        "command": "tpf-jit bench attention --crops 384,768",
        "device": {"name": "NVIDIA H200", "sms": 132, "sm_clock_mhz": 1980, "driver": "580.159.04", "power_w": 194},
        "versions": {"tpf_jit": "0.1.0", "torch": "2.13.0", "python": "3.12.3", "cuda": "13.0", "peers": {"fa4": None}},
        "method": {"timer": "cuda events", "statistic": "median", "repeats": 200, "interleaved": True},
        "source_hash": {"fake_forward": SOURCE},
        "absent_peers": {"cuequivariance": "not installed"},
        "rows": [
            row(config={"tile_n": 128}, config_from="tuned", rel_rms={"out": 1.9e-3}),
            row("torch", 12.34, peak_mib=4608.0),
            row("tpf_jit", 0.164, I=384, N=384, config={"tile_n": 64}, config_from="nearest"),
        ],
    }
    return {**values, **fields}


def accuracy(**fields: Any) -> dict[str, Any]:
    rows = [
        {"tensor": "out", "impl": "tpf_jit", "family": "normal", "cases": 100, "rel_rms_max": 2.05e-3, "bitwise_equal": True},
        {"tensor": "lse", "impl": "tpf_jit", "family": "normal", "cases": 100, "rel_rms_max": 4.0e-7, "bitwise_equal": True},
    ]
    return bench(**{"kind": "accuracy.attention", "rows": rows, "command": "tpf-jit accuracy attention", **fields})


# writing


def test_write_and_read_back(tmp_path: Path) -> None:
    path = records.write(bench(), tmp_path / "records")
    assert path.name == "bench.attention-20261201T102030Z-nvidia-h200.json"
    record = records.read(path)
    assert (record.content, record.problems) == (bench(), ())
    assert (record.kind, record.date, record.device) == ("bench.attention", "2026-12-01T10:20:30Z", "NVIDIA H200")
    lines = path.read_text().splitlines()
    assert sum('"impl"' in line for line in lines) == 3, "one row a line"


def test_records_are_never_overwritten(tmp_path: Path) -> None:
    paths = [records.write(bench(command=f"tpf-jit bench {number}"), tmp_path) for number in range(3)]
    first = paths[0].stem
    assert [path.stem for path in paths] == [first, f"{first}-2", f"{first}-3"]
    assert [records.read(path).content["command"] for path in paths] == [f"tpf-jit bench {number}" for number in range(3)]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="cannot be written.*choose another folder"):
        records.write(bench(), tmp_path / "file")


def test_the_folder_of_the_tree() -> None:
    folder = records.records_folder()
    assert folder.name == "records"
    assert folder.parent.name == "tuning_db"


# the format


def test_valid_records() -> None:
    assert records.validate(bench()) == []
    assert records.validate(accuracy()) == []
    assert records.validate({name: value for name, value in bench().items() if name != "absent_peers"}) == []


def changed(path: str, value: Any) -> dict[str, Any]:
    record = copy.deepcopy(bench())
    *parents, last = path.split(".")
    target: Any = record
    for name in parents:
        target = target[int(name)] if name.isdigit() else target[name]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("kind", "bench.coffee", "kind is 'bench.coffee'"),
        ("kind", ..., "kind is missing"),
        ("date", "2026-12-01 10:20", "date is"),
        ("date", "2026-12-01T11:20:30+01:00", "must be UTC"),
        ("command", " ", "command is empty"),
        ("command", 3, "command must be a string"),
        ("device", "H200", "device must be an object"),
        ("device.name", ..., "device has no name"),
        ("versions.torch", ..., "versions has no torch"),
        ("method", {}, "method is empty"),
        ("source_hash", {}, "source_hash is empty"),
        ("source_hash.fake_forward", "abc", "no sha256"),
        ("absent_peers", {"fa4": ""}, "reason for every name"),
        ("rows", [], "rows is empty"),
        ("rows", {}, "rows must be a list"),
        ("rows.0.impl", ..., r"rows\[0\] has no impl"),
        ("rows.1.ms", ..., r"rows\[1\]: ms must be a time"),
        ("rows.1.ms", -1.0, r"rows\[1\]: ms must be a time"),
        ("rows.1.ms", "fast", r"rows\[1\]: ms must be a time"),
        ("rows.1.ms_p90", 1.0, r"outside ms_p10\.\.ms_p90"),
        ("rows.2.rel_rms", {"out": float("nan")}, r"record\.rows\[2\]\.rel_rms\.out is nan"),
        ("method.when", Path("x"), r"record\.method\.when is a \w*Path"),
    ],
)
def test_what_breaks_the_format_is_named(tmp_path: Path, path: str, value: Any, found: str) -> None:
    record = changed(path, value)
    with pytest.raises(InvalidInput, match=found):
        records.write(record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_everything_wrong_is_listed_at_once() -> None:
    problems = records.validate(bench(kind="x", command="", method={}))
    assert len(problems) == 3
    assert records.validate([1]) == ["a record is a JSON object, not list"]


# finding


def test_list_and_show(tmp_path: Path) -> None:
    later = records.write(bench(date="2026-12-02T00:00:00Z"), tmp_path)
    first = records.write(accuracy(), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "notes.txt").write_text("no record")
    found = records.list_records(tmp_path)
    assert {record.path.name for record in found} == {"broken.json", "list.json", first.name, later.name}
    assert [record.path for record in found if not record.problems] == [first, later]
    assert [record.path for record in records.list_records(tmp_path, kind="bench")] == [later]
    assert [record.path for record in records.list_records(tmp_path, kind="accuracy.attention")] == [first]
    assert records.list_records(tmp_path / "none") == []
    for name in (first.name, first.stem, "accuracy", str(first)):
        assert records.show(name, tmp_path).path == first
    with pytest.raises(InvalidInput, match="no records match"):
        records.show("latency", tmp_path)
    with pytest.raises(InvalidInput, match="2 records match"):
        records.show("attention", tmp_path)


# current or stale


def states(folder: Path) -> dict[str, tuple[str, str]]:
    return {verdict.record.name: (verdict.state, verdict.detail) for verdict in records.check(folder, REGISTRY)}


def test_check(tmp_path: Path) -> None:
    current = records.write(bench(), tmp_path)
    family = records.write(bench(source_hash={"triangle_attention_forward": "6" * 64}), tmp_path)
    stale = records.write(bench(source_hash={"fake_forward": SOURCE, "other": "7" * 64}), tmp_path)
    gone = records.write(bench(source_hash={"retired": SOURCE}), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "wrong.json").write_text(json.dumps(bench(rows=[])))
    found = states(tmp_path)
    assert found[current.stem] == found[family.stem] == ("current", "")
    assert found[stale.stem] == ("stale", "the sources of other have changed since")
    assert found[gone.stem] == ("stale", "there is no template retired any more")
    assert found["broken"][0] == found["wrong"][0] == "invalid"
    assert "rows is empty" in found["wrong"][1]


def test_editing_a_template_makes_its_records_stale(tmp_path: Path) -> None:
    records.write(bench(), tmp_path)
    for source, state in ((SOURCE, "current"), ("9" * 64, "stale")):
        (verdict,) = records.check(tmp_path, FakeRegistry(FakeTemplate(source=source)))
        assert verdict.state == state


def test_a_record_rests_on_what_its_rows_are_about(tmp_path: Path) -> None:
    backward, other = FakeTemplate("fake_backward"), FakeTemplate("other_forward")
    backward.direction, other.op = "backward_key", "triangle_multiplication"
    measured = {"fake_forward": SOURCE, "fake_backward": "7" * 64, "other_forward": "7" * 64}
    forward = records.write(bench(source_hash=measured), tmp_path)
    both = records.write(bench(source_hash=measured, rows=[row(), row(**{"pass": "backward"})]), tmp_path)
    everything = records.write(bench(source_hash=measured, rows=[row(), row(op="triangle_multiplication")]), tmp_path)
    registry = FakeRegistry(FakeTemplate(), backward, other)
    found = {verdict.record.name: verdict.detail for verdict in records.check(tmp_path, registry)}
    assert found[forward.stem] == ""
    assert found[both.stem] == "the sources of fake_backward have changed since"
    assert found[everything.stem] == "the sources of other_forward have changed since"


def test_source_hashes_are_what_check_compares(tmp_path: Path) -> None:
    hashes = records.source_hashes(REGISTRY)
    assert hashes == {"fake_forward": SOURCE, "other": "6" * 64}
    records.write(bench(source_hash=hashes), tmp_path)
    assert [verdict.state for verdict in records.check(tmp_path, REGISTRY)] == ["current"]


def test_the_real_templates_can_be_checked(tmp_path: Path) -> None:
    records.write(bench(source_hash=records.source_hashes()), tmp_path)
    assert [verdict.state for verdict in records.check(tmp_path)] == ["current"]


def test_the_records_of_this_tree_are_valid() -> None:
    assert [record.path.name for record in records.list_records() if record.problems] == []


# tables


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]


def test_a_table_sets_implementations_side_by_side(tmp_path: Path) -> None:
    path = records.write(bench(), tmp_path)
    table = records.table(folder=tmp_path, registry=REGISTRY)
    header, rule, *lines = cells(table)
    assert header == ["I", "N", "tpf_jit, ms", "torch, ms"]
    assert rule == ["---:"] * 4
    assert lines == [["768", "768", "0.900", "12.3"], ["384", "384", "0.164", ""]]
    caption = " ".join(table.partition("\n\n")[0].split())
    for part in ("NVIDIA H200", "1980 MHz", "580.159.04", "2026-12-01", "PyTorch 2.13.0", "H = 4", "D = 32", "dtype = bfloat16",
                 "timer cuda events", path.stem):
        assert part in caption
    assert "Not measured: cuequivariance (not installed)." in table


def test_passes_get_a_column_of_their_own(tmp_path: Path) -> None:
    records.write(bench(rows=[row(), row(**{"pass": "backward"}, ms=2.5), row("torch", 30.0)]), tmp_path)
    header, _, *lines = cells(records.table(folder=tmp_path, registry=REGISTRY))
    assert header == ["pass", "tpf_jit, ms", "torch, ms"]
    assert lines == [["forward", "0.900", "30.0"], ["backward", "2.50", ""]]


def test_other_records_are_listed_row_by_row(tmp_path: Path) -> None:
    records.write(accuracy(), tmp_path)
    header, _, *lines = cells(records.table(folder=tmp_path, registry=REGISTRY))
    assert header == ["tensor", "impl", "rel_rms_max"]
    assert lines == [["out", "tpf_jit", "2.05e-03"], ["lse", "tpf_jit", "4.00e-07"]]
    assert "cases = 100" in records.table(folder=tmp_path, registry=REGISTRY)


def test_stale_and_invalid_records_are_never_quoted(tmp_path: Path) -> None:
    records.write(bench(source_hash={"fake_forward": "8" * 64}, rows=[row(ms=0.123)]), tmp_path)
    (tmp_path / "wrong.json").write_text(json.dumps(bench(command="", rows=[row(ms=0.456)])))
    assert records.table(folder=tmp_path, registry=REGISTRY) == ""
    records.write(bench(rows=[row(ms=0.789)]), tmp_path)
    table = records.table(folder=tmp_path, registry=REGISTRY)
    assert "0.789" in table
    assert "0.123" not in table and "0.456" not in table


def test_a_newer_record_supersedes_an_older_one_that_it_covers(tmp_path: Path) -> None:
    records.write(bench(rows=[row(ms=0.5), row("torch", 9.0)]), tmp_path)
    records.write(bench(rows=[row(ms=0.6, N=1024)]), tmp_path)
    records.write(bench(date="2026-12-05T00:00:00Z", rows=[row(ms=0.4), row("torch", 8.0), row("fa4", 3.0)]), tmp_path)
    records.write(bench(device={"name": "NVIDIA H100 PCIe"}, rows=[row(ms=0.7)]), tmp_path)
    table = records.table(folder=tmp_path, registry=REGISTRY)
    assert "0.500" not in table, "the later run measured all of it"
    assert all(text in table for text in ("0.600", "0.400", "0.700"))
    assert table.count("**bench.attention**") == 3


def test_tables_can_be_narrowed_and_come_in_a_fixed_order(tmp_path: Path) -> None:
    records.write(accuracy(), tmp_path)
    records.write(bench(), tmp_path)
    table = records.table(folder=tmp_path, registry=REGISTRY)
    assert table.index("**bench.attention**") < table.index("**accuracy.attention**")
    assert "bench" not in records.table("accuracy", tmp_path, REGISTRY).replace("bench attention", "")
    assert records.table("latency", tmp_path, REGISTRY) == ""
    assert table == records.table(folder=tmp_path, registry=REGISTRY)


def test_text_in_tables_cannot_break_them(tmp_path: Path) -> None:
    rows = [{"tensor": "a|b", "detail": "two\nlines", "value": None}, {"tensor": "c", "detail": "x", "value": [1, 2]}]
    records.write(accuracy(rows=rows), tmp_path)
    table = records.table(folder=tmp_path, registry=REGISTRY)
    assert r"| a\|b | two lines |  |" in table
    assert "| c | x | 1 2 |" in table


def test_cases_with_bounds_are_summed_up_by_the_closest(tmp_path: Path) -> None:
    case = {"pass": "forward", "impl": "tpf_jit", "tensor": "out", "dtype": "bfloat16", "bound": 2e-3, "bitwise_equal": True}
    rows = [case | {"N": n, "rel_rms_max": error} for n, error in ((7, 1.5e-3), (384, 1.9e-3))]
    rows += [case | {"tensor": "lse", "N": 7, "rel_rms_max": None, "bitwise_equal": False}]
    records.write(accuracy(kind="correctness.attention", rows=rows), tmp_path)
    header, _, *lines = cells(records.table(folder=tmp_path, registry=REGISTRY))
    assert header[4:] == ["cases", "within bounds", "closest to its bound", "that bound", "same bits"]
    assert lines == [
        ["tpf_jit", "forward", "out", "bfloat16", "2", "2", "1.90e-03", "2.00e-03", "2"],
        ["tpf_jit", "forward", "lse", "bfloat16", "1", "0", "not finite", "2.00e-03", "0"],
    ]
