"""The replay of searches over a space that is measured whole: what it says, and that a real sweep does what it says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from many_fakes import ToyManyBackward
from search_fakes import (
    CONFIGS,
    LARGE,
    MODEL,
    Costed,
    Second,
    by_knowledge,
    install_toy,
    measured,
    options,
    plan,
    search_rows,
    space,
    use,
)
from tune_fakes import H200, ToyConfig, ToyTimer, toy_us

from tpf_jit import records
from tpf_jit.bench import SearchSettings, bench_search
from tpf_jit.bench import search as bench
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.templates import registry
from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import tune
from tpf_jit.tune.cells import Cell
from tpf_jit.tune.order import STARTERS
from tpf_jit.tuning_db import TuningStore, reader


@pytest.fixture(autouse=True)
def toy(private_state, monkeypatch):
    install_toy(monkeypatch)


# what it says


def test_known_costs_give_known_figures(tmp_path):
    record = measured(plan(64, 128), tmp_path / "search.db")
    assert record["absent_cells"] == {} and record["kind"] == "sweep"
    found = by_knowledge(record)
    # Three trials: (16, 1), (128, 3), (128, 2). The best is (64, 3), at 100 us; (128, 3) takes 1.2 times as long.
    expected = {"op": "toy", "pass": "forward", "crop": 64, "rows": 8, "knowledge": "analytic", "order": "analytic"}
    assert found["analytic"].items() >= expected.items()
    figures = {name: found["analytic"][name] for name in ("configurations", "failed", "share", "trials")}
    assert figures == {"configurations": 12, "failed": 0, "share": 0.25, "trials": 3}
    assert (found["analytic"]["found_us"], found["analytic"]["best_us"]) == (120.0, 100.0)
    assert (found["analytic"]["ratio"], found["analytic"]["trials_to_2pct"]) == (1.2, 5)
    assert not bench.reached(found["analytic"])
    # The landscapes of the crops are alike, so the other crop knows the best.
    assert (found["neighbour"]["ratio"], found["neighbour"]["trials_to_2pct"]) == (1.0, 1)
    assert "N128" in found["neighbour"]["order"] and bench.reached(found["neighbour"])
    assert set(found) == {"analytic", "neighbour"}


def test_neighbours_are_whole_cells_of_this_run_and_direction(tmp_path):
    use(Costed(CONFIGS), ToyManyBackward(CONFIGS))
    db = tmp_path / "search.db"
    measured(plan(256), db)
    alone = measured((*plan(64), *plan(64, 128, direction="backward")), db)
    found = {(row["pass"], row["crop"], row["knowledge"]) for row in alone["rows"]}
    backward = {("backward", crop, knowledge) for crop in (64, 128) for knowledge in ("analytic", "neighbour")}
    assert found == {("forward", 64, "analytic"), *backward}


def test_a_cell_that_is_not_whole_is_left_out_and_is_nobodys_neighbour(tmp_path):
    db = tmp_path / "search.db"
    first, second = plan(64, 128)
    measured([first], db)
    tune(second.shape, max_trials=5, store=db, options=options(), progress=False)
    with TuningStore(db) as store:
        rows, absent = bench.replay([first, second], store, MODEL, SearchSettings(options=options()))
    assert [(row["crop"], row["knowledge"]) for row in rows] == [(64, "analytic")]
    assert absent == {second.key: "7 of 12 configurations are not measured"}


def test_other_protocols_and_kernels_do_not_count(tmp_path, monkeypatch):
    db = tmp_path / "search.db"
    (cell,) = plan(64)
    measured([cell], db)
    monkeypatch.setattr(Costed, "source_hash", lambda self: "6" * 64)
    with TuningStore(db) as store:
        rows, absent = bench.replay([cell], store, MODEL, SearchSettings(options=options()))
    assert rows == [] and absent == {cell.key: "12 of 12 configurations are not measured"}


def test_the_shootout_helps_nobody(tmp_path):
    db = tmp_path / "search.db"
    (cell,) = plan(64)
    before = measured([cell], db)["rows"]
    with TuningStore(db) as store:
        final = next(row for row in store.trials() if row.grade == "final")
        quick = {"samples_us": [1.0, 1.0, 1.0], "median_us": None, "p10_us": None, "p90_us": None}
        store.put_trial(replace(final, **quick, date="2099-01-01T00:00:00Z"))
        assert store.best(cell.key, H200).us < 100
        rows, _ = bench.replay([cell], store, MODEL, SearchSettings(0.25, options=options()))
    assert rows == before


def test_failures_cost_trials_and_slow_ones_have_a_time(tmp_path):
    bad = [ToyConfig(256, stages, trick) for stages, trick in ((9, "uncompilable"), (8, "skip"), (7, "unlaunchable"))]
    slow = ToyConfig(1, 13)
    use(Costed((ToyConfig(1, 1, "race"), *bad, *CONFIGS, slow)))
    db = tmp_path / "search.db"
    record = measured(plan(64), db, share=4 / 17)
    statuses = Counter(row.status for row in search_rows(db, plan(64)[0]))
    assert statuses == {"ok": 12, "slow": 1, "nondeterministic": 1, "compile_error": 1, "wrong": 1, "launch_error": 1}
    (row,) = record["rows"]
    # The default and the three that the cost model prefers all fail.
    assert (row["configurations"], row["failed"], row["trials"]) == (17, 4, 4)
    assert row["found_us"] is None and row["ratio"] is None and not bench.reached(row)
    assert row["trials_to_2pct"] == 4 + 4 and row["best_us"] == 100.0
    tried, _ = bench.search(space(db, plan(64)[0], registry.get(Costed.name)), MODEL, (), options())
    assert dict(tried)[canonical_json(config_to_dict(slow))] == pytest.approx(toy_us(slow, 64))
    assert records.validate(record) == []


def test_nothing_works(tmp_path):
    use(Costed(tuple(ToyConfig(16, stages, "skip") for stages in (1, 2))))
    with pytest.raises(MeasurementFailed, match="every configuration failed"):
        measured(plan(64), tmp_path / "search.db")


def test_ties_count_from_the_first_of_them(tmp_path):
    """Equal device code has one time; whichever of the twins comes first has found it."""
    use(Costed((*CONFIGS, ToyConfig(64, 3, twin=1), ToyConfig(64, 3, twin=2))))
    (row,) = measured(plan(64), tmp_path / "search.db", share=5 / 14)["rows"]
    assert (row["trials"], row["trials_to_2pct"], row["ratio"]) == (5, 5, 1.0)


def test_two_percent_is_two_percent():
    rows = {str(us): TimedRow(us) for us in (100.0, 102.0, 102.1, 150.0)}
    spaces = [bench.Space(plan(64)[0], None, rows)]
    found = bench._found(spaces, [150.0, 102.1, 102.0, 100.0], 0.5)
    assert (found["trials"], found["ratio"], found["trials_to_2pct"], bench.reached(found)) == (2, 1.021, 3, False)
    assert bench.reached(bench._found(spaces, [150.0, 102.0, 102.1, 100.0], 0.5))
    # A search that ends early, as Optuna's does, has tried no more than that.
    found = bench._found(spaces, [150.0], 1.0)
    assert (found["trials"], found["ratio"], found["trials_to_2pct"]) == (1, 1.5, None)


class TimedRow:
    status = "ok"

    def __init__(self, us: float) -> None:
        self.median_us = us


def test_the_share_is_rounded_up_but_not_by_a_rounding_error():
    rows = {str(number): TimedRow(100.0 + number) for number in range(100)}
    spaces = [bench.Space(plan(64)[0], None, rows)]
    times = [row.median_us for row in rows.values()]
    assert [bench._found(spaces, times, share)["trials"] for share in (0.07, 0.071, 0.15, 1.0)] == [7, 8, 15, 100]


# a real sweep does what it says


def limited(cell: Cell, db: Path, trials: int, **more: Any) -> list[str]:
    """Configurations that a sweep tries, in order, when it may try so many."""
    tune(cell.shape, cell.direction, max_trials=trials, store=db, options=options(**more), progress=False)
    return [canonical_json(row.config) for row in search_rows(db, cell)]


@pytest.mark.parametrize("knowledge", ["analytic", "neighbour", "shipped"])
@pytest.mark.parametrize("limit", [300, 50], ids=["enumerated", "optuna"])
def test_a_limited_sweep_tries_what_the_replay_says(tmp_path, monkeypatch, knowledge, limit):
    if limit == 50:
        pytest.importorskip("optuna")
        # Without ties: a sweep's scores are relative to the incumbent, whose last bits would decide them.
        monkeypatch.setattr("tune_fakes.toy_us", lambda config, crop: toy_us(config, crop) * (1 + 1e-3 * config.stages))
        use(Costed(LARGE))
    trials = STARTERS + 15 if limit == 50 else 4
    whole, fresh = tmp_path / "whole.db", tmp_path / "fresh.db"
    cell, *others = plan(64, 128, 4096)
    template = registry.get(Costed.name)
    measured([cell, *others], whole)
    with TuningStore(whole) as store:
        if knowledge == "shipped":
            # The tables may have the very cell; a sweep does not take its own rows for a neighbour's.
            store.export(tmp_path / "shipped.jsonl")
            monkeypatch.setattr(reader, "shipped_files", lambda: [tmp_path / "shipped.jsonl"])
        rows = [row for row in store.trials() if row.cell != cell.key]
    if knowledge == "neighbour":
        with TuningStore(fresh) as store:
            store.put_trials(rows)
    known = () if knowledge == "analytic" else rows
    replayed, origin = bench.search(space(whole, cell, template), MODEL, known, options(enumerate_limit=limit))
    assert (origin == "analytic") == (knowledge == "analytic")
    tried = limited(cell, fresh, trials, enumerate_limit=limit)
    # Optuna's search may end before, when nothing gets better; then both do.
    assert tried == [text for text, _ in replayed[:trials]]
    assert len(set(tried)) == len(tried) and (len(tried) > STARTERS if limit == 50 else len(tried) == trials)
    # The record says of the whole what the rows of the limited sweep say.
    with TuningStore(whole) as store:
        settings = SearchSettings(trials / len(template.configs), options=options(enumerate_limit=limit))
        found, _ = bench.replay([cell, *others], store, MODEL, settings)
    row = by_knowledge({"rows": found})[knowledge]
    assert row["trials"] == len(tried) and row["order"] == origin and cell.key not in origin
    assert row["found_us"] == pytest.approx(min(row.median_us for row in search_rows(fresh, cell) if row.status == "ok"))


def test_templates_take_turns_as_a_limit_for_each_does(tmp_path):
    second = Second((ToyConfig(64, 3), ToyConfig(32, 1)))
    use(Costed(CONFIGS), second)
    (cell,) = plan(64)
    (row,) = measured([cell], tmp_path / "whole.db", share=4 / 14)["rows"]
    assert (row["configurations"], row["trials"], row["trials_to_2pct"], row["order"]) == (14, 4, 2, "analytic; analytic")
    limited(cell, tmp_path / "fresh.db", 2)
    with TuningStore(tmp_path / "fresh.db") as store:
        tried = Counter(each.template for each in store.trials() if each.grade == "search")
        times = [each.median_us for each in store.trials() if each.grade == "search"]
    assert tried == {Costed.name: 2, Second.name: 2}
    assert row["found_us"] == pytest.approx(min(times))


# the run


class Stopped(ToyTimer):
    """Ctrl-C after so many samples."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def sample(self, launches: Any, count: int, group: int = 1, flush: bool = False) -> list[float]:
        if self.calls > self.after:
            raise KeyboardInterrupt
        return super().sample(launches, count, group, flush)


def users_trials() -> list[Any]:
    """The user's database lists compiled objects, which any run shares; measured rows it must not get."""
    with TuningStore() as store:
        return store.trials()


def test_a_run_that_was_stopped_goes_on_in_its_own_database(tmp_path):
    db, planned = tmp_path / "search.db", plan(64, 128)
    with pytest.raises(KeyboardInterrupt):
        measured(planned, db, timer=Stopped(150))
    before = {row.id for cell in planned for row in search_rows(db, cell)}
    assert 0 < len(before) < 24
    record = measured(planned, db)
    after = [row for cell in planned for row in search_rows(db, cell)]
    assert before < {row.id for row in after}
    assert Counter((row.cell, canonical_json(row.config)) for row in after).most_common(1)[0][1] == 1 and len(after) == 24
    assert record["rows"] == measured(planned, tmp_path / "another.db")["rows"]
    count = len(after)
    assert measured(planned, db)["rows"] == record["rows"] and sum(len(search_rows(db, cell)) for cell in planned) == count
    assert users_trials() == []


def test_without_a_database_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    record = bench_search(plan(64), SearchSettings(options=options()), "cpu", "tpf-jit bench search")
    assert len(record["rows"]) == 1
    assert not list(tmp_path.glob("tpf_jit_search_*")) and users_trials() == []


def test_no_time_is_no_record(tmp_path):
    with pytest.raises(MeasurementFailed, match="12 of 12 configurations are not measured"):
        bench_search(plan(64), SearchSettings(budget_s=0.0, db=tmp_path / "search.db", options=options()), "cpu", "x")


def test_large_spaces_are_measured_whole(tmp_path):
    """Optuna is for the replay; what it is held against is everything."""
    pytest.importorskip("optuna")
    # The default is the best, so that the search soon gives up.
    use(Costed(tuple(dict.fromkeys((ToyConfig(64, 3), *LARGE)))))
    (cell,) = plan(64)
    (row,) = measured([cell], tmp_path / "search.db", share=1.0, enumerate_limit=50)["rows"]
    assert row["configurations"] == len(search_rows(tmp_path / "search.db", cell)) == len(LARGE) > row["trials"]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_out_of_range(share):
    with pytest.raises(InvalidInput, match="share"):
        SearchSettings(share)


def test_the_users_database_is_refused(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(reader.user_database_path().parent)
    for path in (reader.user_database_path(), tmp_path / "link" / reader.user_database_path().name):
        with pytest.raises(InvalidInput, match="user's tuning database"):
            SearchSettings(db=path)
