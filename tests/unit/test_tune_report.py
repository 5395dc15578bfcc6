"""What a sweep says."""

from __future__ import annotations

import dataclasses
import io
import json
import sys

import pytest
from tune_fakes import ToyConfig, ToyShape, ToyTimer, install, options

from tpf_jit.tune import tune
from tpf_jit.tune.report import Progress, sorted_rows


@pytest.fixture
def result(private_state, monkeypatch):
    monkeypatch.setattr(ToyTimer, "dead", False)
    configs = (ToyConfig(16), ToyConfig(64, 3), ToyConfig(64, 3, "skip"), ToyConfig(64, 3, "uncompilable"), ToyConfig(64, 40))
    return tune(ToyShape(), options=options(install(configs), ToyTimer()))


def test_the_table_shows_winner_times_and_failures(result):
    lines = result.table().splitlines()
    assert "100.00" in lines[1] and "tile=64" in lines[1] and lines[1].endswith("*")
    assert "150.00" in lines[2] and "tile=16" in lines[2] and not lines[2].endswith("*")
    text = "\n".join(lines[3:])
    assert "1 compile_error" in text and "ptxas says no" in text
    assert "1 wrong" in text and "1 slow" in text
    assert len(result.table(limit=1).splitlines()) == len(lines) - 1


def test_the_summary_compares_with_the_default(result):
    assert "Best 100.0 us (final)" in result.summary()
    assert "the default takes 1.50 times as long" in result.summary()
    assert "5 new" in result.summary() and "waiting for compiles" not in result.summary()
    assert "24 s of it waiting for compiles" in dataclasses.replace(result, idle_s=24.2).summary()


def test_programs_get_json(result):
    document = json.loads(json.dumps(result.to_dict()))
    assert document["best"]["config"]["tile"] == 64 and document["best"]["us"] == pytest.approx(100.0)
    assert document["counts"] == {"ok": 2, "wrong": 1, "compile_error": 1, "slow": 1}
    assert document["stopped"] == "complete" and document["new_trials"] == 5


def test_final_rows_come_before_search_rows(result):
    rows = sorted_rows(result.trials)
    assert [row.grade for row in rows] == ["final", "final"]
    assert [row.config["tile"] for row in rows] == [64, 16]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("sweep of toy", 10) as bar:
        bar.update(4, "best 12.5 us")
    assert "sweep of toy" in terminal.getvalue() and "4/10" in terminal.getvalue() and "best 12.5 us" in terminal.getvalue()


@pytest.mark.parametrize(("stream", "enabled"), [(io.StringIO, True), (Terminal, False)])
def test_progress_is_quiet_elsewhere_and_when_not_wanted(monkeypatch, stream, enabled):
    stderr = stream()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress("sweep of toy", 10, enabled) as bar:
        bar.update(4, "best 12.5 us")
    assert stderr.getvalue() == ""
