"""Replayed searches of real templates, as a record, and as a command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from search_fakes import (
    MODEL,
    install_toy,
    measured,
    options,
    plan,
)
from tune_fakes import H200

from tpf_jit import records
from tpf_jit.bench import SearchSettings, bench_search
from tpf_jit.bench import search as bench
from tpf_jit.cli.app import run
from tpf_jit.compiler import KernelSpec
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import cells
from tpf_jit.tune.cells import Cell
from tpf_jit.tune.measure import PROTOCOL
from tpf_jit.tuning_db import TuningStore, reader
from tpf_jit.tuning_db.rows import TrialRow


@pytest.fixture(autouse=True)
def toy(private_state, monkeypatch):
    install_toy(monkeypatch)


def attention_rows(cell: Cell, template: Any, fast: int = 20) -> list[TrialRow]:
    """Rows of a cell in which the configuration number `fast` of the template's space is the best."""
    found = []
    for number, config in enumerate(template.space(cell.shape)):
        found.append(
            TrialRow(
                template=template.name,
                cell=cell.key,
                config=config_to_dict(config),
                kernel_key=KernelSpec.make(template, cell.shape, config).key,
                source_hash=template.source_hash(),
                device=dict(H200),
                protocol=PROTOCOL,
                samples_us=[100.0 + 10 * abs(number - fast)] * 3,
                errors={"out": 1e-3},
                status="ok",
                date="2026-12-01T10:20:30Z",
            )
        )
    return found


def test_real_templates_and_their_problem_fields(tmp_path):
    shapes = [TriangleAttentionShape(crop=crop) for crop in (384, 768)]
    planned = cells.plan(shapes, ["backward_query"]).cells
    with TuningStore(tmp_path / "search.db") as store:
        for cell in planned:
            for template in registry.templates("triangle_attention", "backward_query"):
                store.put_trials(attention_rows(cell, template, 20 if "query" in template.name else 999))
        rows, absent = bench.replay(planned, store, MODEL)
    assert absent == {} and len(rows) == 4
    first = rows[0]
    assert list(first)[:10] == ["op", "pass", "B", "I", "N", "H", "D", "dtype", "bias_dtype", "mask"]
    assert first.items() >= {"pass": "backward_query", "N": 384, "D": 32, "knowledge": "analytic", "best_us": 100.0}.items()
    assert first["trials"] == -(-15 * first["configurations"] // 100)
    assert rows[1]["knowledge"] == "neighbour" and rows[1]["trials_to_2pct"] <= 2


def test_a_record_through_check_and_table(tmp_path):
    record = measured(plan(64, 128), tmp_path / "search.db")
    record["absent_cells"] = {"toy/N256/I8/forward": "no time"}
    folder = tmp_path / "records"
    folder.mkdir()
    path = records.write(record, folder)
    assert json.loads(path.read_text(encoding="utf-8")) == record
    (verdict,) = records.check(folder)
    assert (verdict.state, verdict.record.kind) == ("current", "sweep")
    text = records.table("sweep", folder)
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    header = ["crop", "share", "trials", "best, us"]
    assert lines[0] == [*header, *(f"{name}, found / best (trials to 2 %)" for name in ("analytic", "neighbour"))]
    searches = ["1.200 (5)", "1.000 (1)"]
    assert lines[2:] == [["64", "0.250", "3", "100", *searches], ["128", "0.250", "3", "200", *searches]]
    assert "configurations = 12" in text and "Not measured: toy/N256/I8/forward (no time)." in " ".join(text.split())
    # A newer record of the same cells supersedes it, whatever its neighbours were called.
    newer = {**record, "date": "2099-01-01T00:00:00Z", "rows": [{**row, "order": "another"} for row in record["rows"]]}
    name = records.write(newer, folder).stem
    assert records.table("sweep", folder).count("**sweep**") == 1 and name in records.table("sweep", folder)


def test_the_command(tmp_path, monkeypatch, capsys):
    record = measured(plan(64, 128), tmp_path / "search.db")
    called: list[tuple[Any, ...]] = []

    def fake(*arguments: Any) -> dict[str, Any]:
        called.append(arguments)
        return record

    monkeypatch.setattr(bench, "bench_search", fake)
    words = ["bench", "search", "--crops", "384,640", "--head-dim", "32", "--direction", "forward", "--direction", "backward_key"]
    more = ["--share", "0.2", "--budget", "60", "--db", str(tmp_path / "x.db"), "--out", str(tmp_path), "--jobs", "3"]
    assert run([*words, *more]) == 0
    planned, settings, device, command, _ = called[0]
    assert [(cell.shape.crop, cell.direction) for cell in planned] == [
        (crop, name) for name in ("forward", "backward_key") for crop in (384, 640)
    ]
    assert (settings.share, settings.budget_s, settings.db, device) == (0.2, 60.0, tmp_path / "x.db", None)
    assert settings.options.isolate and settings.options.workers == 3 and command.startswith("tpf-jit")
    out, error = capsys.readouterr()
    assert "missed" in out and "within 2 %" in out and "1.2000" in out and "2 of 4 searches" in out and "written: " in error
    assert len(records.list_records(tmp_path, "sweep")) == 1

    record = {**record, "absent_cells": {"toy/N256/I8/forward": "no time"}}
    assert run(words) == 1
    assert "Left out: toy/N256/I8/forward: no time" in capsys.readouterr().out
    assert run([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(record))


def test_the_command_refuses_what_makes_no_sense(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    target = ["bench", "search", "--crops", "384", "--direction", "forward", "--db", str(tmp_path / "x.db")]
    for words, text in (
        (["--share", "2"], "share"),
        (["--db", str(reader.user_database_path())], "user's tuning database"),
        (["--device", "cpu"], "a CUDA device"),
        (["--direction", "sideways"], "sideways"),
        ([], "sees none"),
    ):
        assert run([*target, *words]) == 1
        assert text in capsys.readouterr().err
    assert not (tmp_path / "x.db").exists()


def test_settings_are_not_changed_by_measuring(tmp_path):
    settings = SearchSettings(db=tmp_path / "search.db", options=options())
    kept = replace(settings)
    bench_search(plan(64), settings, "cpu", "x")
    assert settings == kept and settings.options.enumerate_limit == 300
