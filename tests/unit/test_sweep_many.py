"""Many cells: compiled ahead, shared between processes and databases, interrupted and killed. Real processes, real databases."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import many_fakes
import pytest
from many_fakes import CONFIGS, CROPS, SHAPES, ThreadPool, assert_all_tried_once, cells, search_rows, travelling
from tune_fakes import H200, InlinePool, ToyBackend, ToyConfig, ToyShape, ToyTimer

from tpf_jit.errors import DatabaseError, MeasurementFailed
from tpf_jit.templates.base import canonical_json
from tpf_jit.tune import many
from tpf_jit.tune.cells import plan
from tpf_jit.tune.many import Limits, Place, sweep_many
from tpf_jit.tune.node import sweep_node
from tpf_jit.tuning_db import TuningStore

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def toy(private_state, monkeypatch):
    monkeypatch.setattr(ToyTimer, "dead", False)
    monkeypatch.setattr(ToyBackend, "compile_s", 0.0)
    many_fakes.private_registry(monkeypatch)


def start(code: str, *arguments: object) -> subprocess.Popen:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "Traceback" not in error and "Warning" not in error, error
    return out


def wait_for_rows(count: int) -> int:
    end = time.monotonic() + 60
    while (found := len(search_rows())) < count and time.monotonic() < end:
        time.sleep(0.005)
    return found


class TestAhead:
    def test_a_kernel_that_serves_several_cells_is_compiled_once(self):
        pool = ThreadPool()
        summary = sweep_many(cells(), options=replace(travelling(), make_pool=lambda: pool))
        assert len(pool.submitted) == len(set(pool.submitted)) == 2 * len(CONFIGS) == summary.compiled
        assert_all_tried_once(cells())

    def test_what_does_not_compile_is_tried_once_and_is_a_row_of_every_cell(self):
        configs = (ToyConfig(64, 3), ToyConfig(32, 2, "uncompilable"))
        many_fakes.register(configs)
        pool = ThreadPool()
        planned = cells([ToyShape(crop, 8) for crop in CROPS])
        sweep_many(planned, options=replace(travelling(configs=configs), make_pool=lambda: pool))
        assert len(pool.submitted) == 2
        assert sum(row.status == "compile_error" for row in search_rows()) == len(CROPS)

    def test_workers_compile_for_the_next_cells_while_the_gpu_measures(self):
        pool = ThreadPool(workers=6, compile_s=0.3)
        planned = cells([ToyShape(64, rows) for rows in (8, 16, 24)])
        done: list[int] = []
        options = replace(travelling(sample_s=0.006), make_pool=lambda: pool, workers=6)
        summary = sweep_many(planned, options=options, on_cell=lambda report: done.append(len(pool.submitted)))
        assert done[0] >= 2 * len(CONFIGS), "when the first cell ended, the kernels of the next had not all been begun"
        first, *others = summary.cells
        assert first.idle_s > 0.2
        # Without compiling ahead each would wait for its first candidate: 0.3 s at least.
        assert all(report.idle_s < 0.25 for report in others)
        assert 0 < summary.idle_share < 1

    def test_nothing_is_compiled_ahead_for_what_is_measured_already(self, tmp_path):
        sweep_many(cells(), options=travelling())
        pool = ThreadPool()
        options = replace(travelling(), make_pool=lambda: pool)
        extra = ToyShape(64, 32)
        summary = sweep_many(cells([*SHAPES, extra]), options=options)
        assert {rows for rows, _ in pool.submitted} == {32} and len(pool.submitted) == len(CONFIGS)
        assert summary.new_trials == len(CONFIGS)

    def test_an_interrupted_cell_leaves_compiles_that_later_cells_still_get(self):
        """What a budget calls off before it has begun is compiled when another cell asks for it."""
        pool = ThreadPool(workers=1)
        shapes = cells([ToyShape(crop, 8) for crop in CROPS[:2]])
        options = replace(travelling(sample_s=0.002), make_pool=lambda: pool)
        with many.Runner(options=options, progress=False) as runner:
            assert runner.run(shapes[0], budget_s=0.0, following=shapes[1:]).state == "budget"
            assert runner.run(shapes[1]).state == "complete"
            assert runner.run(shapes[0]).state == "complete"
        assert_all_tried_once(shapes)


class TestLimits:
    def test_trials_are_a_limit_for_each_cell_and_what_is_left_comes_later(self):
        summary = sweep_many(cells(), options=travelling(), limits=Limits(max_trials=5))
        assert {report.state for report in summary.cells} == {"trials"}
        assert {report.new_trials for report in summary.cells} == {5}
        assert len(summary.unfinished) == len(SHAPES)
        assert sweep_many(cells(), options=travelling()).unfinished == []
        assert_all_tried_once(cells())

    def test_the_budget_is_for_all_cells(self):
        begin = time.monotonic()
        summary = sweep_many(cells(), options=travelling(sample_s=0.005), limits=Limits(budget_s=0.4))
        assert time.monotonic() - begin < 8  # eight shoot-outs come on top
        assert "budget" in {report.state for report in summary.cells} and summary.unfinished

    def test_a_cell_that_cannot_be_tuned_does_not_stop_the_others(self):
        planned = cells([ToyShape(64, 8), ToyShape(8192, 8), ToyShape(128, 8)])
        summary = sweep_many(planned, options=travelling())
        assert [report.state for report in summary.cells] == ["complete", "failed", "complete"]
        assert "crop above 4096" in summary.cells[1].detail


SHARD = """
import sys
import many_fakes as fakes
from tpf_jit.tune.cells import plan, shard
from tpf_jit.tune.many import sweep_many
number, path = int(sys.argv[1]), sys.argv[2]
fakes.register()
planned = plan(fakes.SHAPES).cells
# Beside its own part, every process has a view of the first cell, with a clock of its own.
mine = [planned[0], *shard(planned, f"{number}/8")]
sweep_many(list(dict.fromkeys(mine)), path, fakes.travelling(noise=0.002 * number), progress=False)
"""


def test_eight_shards_merged_in_any_order_give_the_same_winners(tmp_path):
    processes = [start(SHARD, number, tmp_path / f"{number}.db") for number in range(1, 9)]
    for process in processes:
        finish(process)
    planned = plan(SHAPES).cells
    contents, winners = set(), set()
    for seed in range(6):
        order = list(range(1, 9))
        random.Random(seed).shuffle(order)
        with TuningStore(tmp_path / f"merged{seed}.db") as store:
            for number in (*order, order[0]):  # the first one twice
                store.merge(tmp_path / f"{number}.db")
            assert store.verify() == []
            store.export(tmp_path / "all.jsonl")
            winners.add(canonical_json({cell.key: store.best(cell.key, H200).trial_id for cell in planned}))
        contents.add((tmp_path / "all.jsonl").read_bytes())
    assert len(contents) == len(winners) == 1
    rows = search_rows(tmp_path / "merged0.db")
    # The first cell eight times, every other one once: nothing lost, nothing doubled.
    assert len(rows) == len(CONFIGS) * (8 + len(planned) - 1) == len({row.id for row in rows})
    apart = [len(search_rows(tmp_path / f"{number}.db")) for number in range(1, 9)]
    assert sum(apart) == len(rows) and len(json.loads(next(iter(winners)))) == len(planned)


SWEEP = """
import many_fakes as fakes
from tpf_jit.tune.many import sweep_many
fakes.register()
sweep_many(fakes.cells(), None, fakes.travelling(sample_s=0.001), progress=False)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_in_the_middle_of_many_cells_and_resumed(seed):
    chance = random.Random(seed)
    known = 0
    for _ in range(3):
        process = start(SWEEP)
        wait_for_rows(known + chance.randint(8, 20))
        time.sleep(chance.uniform(0.0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the sweep ended before it could be killed"
        before, known = known, len(search_rows())
        assert known > before
    summary = sweep_many(cells(), options=travelling())
    assert summary.new_trials == len(SHAPES) * len(CONFIGS) - known
    assert_all_tried_once(cells())


PLACED = """
import sys
import many_fakes as fakes
from tpf_jit.tune.many import Place, sweep_many
fakes.register()
summary = sweep_many(fakes.cells(), None, fakes.travelling(sample_s=0.001), place=Place(int(sys.argv[1]), 3), progress=False)
print(summary.new_trials, *[report.us is not None for report in summary.cells])
"""


def test_processes_on_one_database_share_the_cells():
    outputs = [finish(process).split() for process in [start(PLACED, number) for number in range(3)]]
    assert sum(int(new) for new, *_ in outputs) == len(SHAPES) * len(CONFIGS)
    assert all(int(new) > 0 for new, *_ in outputs), "one of them had nothing to do"
    assert all(set(won) == {"True"} for _, *won in outputs), "they do not all see all winners"
    assert_all_tried_once(cells())


def test_a_cell_in_work_elsewhere_is_helped_with_at_the_end(private_state):
    """The lease of a living process only moves a cell to the end of the list."""
    planned = cells(SHAPES[:3])
    with TuningStore() as store:
        assert store.claim(planned[0].key, canonical_json({"work": "cell"}), "another machine", 60)
        order: list[str] = []
        sweep_many(planned, store, travelling(), place=Place(0, 2), on_cell=lambda report: order.append(report.cell))
        assert order == [planned[1].key, planned[2].key, planned[0].key]
        store.release(planned[0].key, canonical_json({"work": "cell"}), "another machine")
    assert_all_tried_once(planned)


class TestNode:
    def test_a_process_for_each_gpu_and_one_of_them_is_killed(self, tmp_path):
        told: list[str] = []
        options = travelling(sample_s=0.001, die=str(tmp_path / "killed"))
        summary = sweep_node(cells(), None, options, gpus=["0", "1"], on_cell=lambda report: told.append(report.cell))
        assert (tmp_path / "killed").exists() and summary.restarts == 1
        assert summary.unfinished == [] and {*told} == {cell.key for cell in cells()}
        assert 0 < summary.idle_share < 1 and summary.gpu_s > 0
        assert_all_tried_once(cells())

    def test_a_kernel_that_takes_the_device_down_costs_a_process_not_the_sweep(self):
        configs = (ToyConfig(16), ToyConfig(16, trick="deadly"), ToyConfig(64, 3))
        many_fakes.register(configs)
        planned = cells([ToyShape(64, 8), ToyShape(128, 8)])
        summary = sweep_node(planned, None, travelling(configs=configs), gpus=["0"])
        assert summary.restarts == 2  # once in each cell
        assert_all_tried_once(planned, configs=configs)
        assert [row.status for row in search_rows() if row.config["trick"] == "deadly"] == ["launch_error"] * 2

    def test_a_process_that_never_measures_anything_is_given_up(self):
        with pytest.raises(MeasurementFailed, match="GPU 0 ended with code -9, twice without measuring"):
            sweep_node(cells(), None, replace(travelling(), make_pool=killer), gpus=["0"])
        assert search_rows() == []

    def test_a_recovered_failure_does_not_spoil_a_run_that_its_limits_end(self, tmp_path):
        options = replace(travelling(), make_pool=partial(failing_once, str(tmp_path / "failed")))
        summary = sweep_node(cells(), None, options, Limits(max_trials=4), gpus=["0"])
        assert summary.restarts == 1 and {report.state for report in summary.cells} == {"trials"}
        assert summary.new_trials == 4 * len(SHAPES) == len(search_rows())

    @pytest.mark.parametrize("limits", [Limits(), Limits(max_trials=11)], ids=["all", "limited"])
    def test_a_gpu_that_measures_nothing_is_given_up_while_another_works(self, caplog, limits):
        summary = sweep_node(cells(), None, replace(travelling(0.002), make_pool=failing_on_gpu_0), limits, gpus=["0", "1"])
        assert summary.restarts == 1, "rows of the other GPU are not its progress"
        assert summary.new_trials == len(SHAPES) * (limits.max_trials or len(CONFIGS)) == len(search_rows())
        assert "GPU 0 is given up: no clock here" in caplog.text

    def test_an_error_of_ours_comes_back_as_itself(self):
        with pytest.raises(DatabaseError, match="nobody"):
            sweep_node(cells(), None, replace(travelling(), make_pool=refusing), gpus=["0"])

    @pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
    def test_interrupted_from_outside_and_resumed(self, signal_number):
        process = start(NODE)
        known = wait_for_rows(15)
        process.send_signal(signal_number)
        out, error = process.communicate(timeout=60)
        if signal_number == signal.SIGINT:
            assert process.returncode == 0, error
            assert json.loads(out)["interrupted"]
        quiet = len(search_rows())
        time.sleep(0.3)
        assert known <= quiet == len(search_rows()) < len(SHAPES) * len(CONFIGS), "its processes go on without it"
        summary = sweep_node(cells(), None, travelling(), gpus=["0", "1"])
        assert summary.unfinished == [] and summary.new_trials == len(SHAPES) * len(CONFIGS) - quiet
        assert_all_tried_once(cells())


def killer():
    os.kill(os.getpid(), signal.SIGKILL)


def refusing():
    raise DatabaseError("nobody writes here")


def failing_once(path: str):
    if not os.path.exists(path):
        Path(path).touch()
        raise MeasurementFailed("the device was lost")
    return InlinePool()


def failing_on_gpu_0():
    if os.environ["CUDA_VISIBLE_DEVICES"] == "0":
        raise MeasurementFailed("no clock here")
    return InlinePool()


NODE = """
import json
import many_fakes as fakes
from tpf_jit.tune.node import sweep_node
fakes.register()
print(json.dumps(sweep_node(fakes.cells(), None, fakes.travelling(sample_s=0.002), gpus=["0", "1"]).to_dict()))
"""
