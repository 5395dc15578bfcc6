"""Planning a sweep of many cells: which, in which order, divided how; and the command line that shows it."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import many_fakes
import pytest
from many_fakes import SHAPES
from tune_fakes import ToyShape

from tpf_jit.cli.app import run
from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape, preset
from tpf_jit.templates import registry
from tpf_jit.tune import cells, node
from tpf_jit.tune.report import Result
from tpf_jit.tune.summary import CellReport, Summary, united

SHAPE = TriangleAttentionShape(crop=384)


@pytest.fixture
def toy(monkeypatch):
    many_fakes.private_registry(monkeypatch)


def test_what_others_do_the_work_of_is_left_out_silently() -> None:
    """front_gradients serves 128 channels, and front_backward and front_weights any."""
    shape = TriangleMultiplicationShape(384, 64)
    planned = cells.plan(shape)
    assert planned.refused == () and "front_backward" in {cell.direction for cell in planned.cells}
    ((key, reason),) = cells.plan(shape, ["front_gradients"]).refused
    assert key == f"{shape.key()}/front_gradients" and "128 channels" in reason


class TestPlan:
    def test_directions_are_those_of_the_registry(self):
        planned = cells.plan(SHAPE)
        assert [cell.direction for cell in planned.cells] == list(
            dict.fromkeys(template.direction for template in registry.templates("triangle_attention"))
        )
        assert planned.cells[0].key == f"{SHAPE.key()}/forward"

    def test_the_order_does_not_depend_on_how_the_cells_are_named(self, toy):
        expected = cells.plan(SHAPES)
        for seed in range(5):
            shuffled = SHAPES * 2
            random.Random(seed).shuffle(shuffled)
            assert cells.plan(shuffled) == expected
        assert len(set(expected.cells)) == len(expected.cells) == 12

    def test_cells_of_the_same_kernels_are_neighbours_by_ascending_crop(self, toy):
        keys = [cell.key for cell in cells.plan(SHAPES, ["forward"]).cells]
        assert keys == [f"toy/N{crop}/I{rows}/forward" for rows in (8, 16) for crop in (64, 128, 192, 256)]

    def test_what_cannot_be_tuned_is_named_with_its_reason(self, toy):
        planned = cells.plan([ToyShape(64, 8), ToyShape(64, 16)])
        assert [cell.key for cell in planned.cells] == ["toy/N64/I8/forward", "toy/N64/I16/forward", "toy/N64/I8/backward"]
        ((key, reason),) = planned.refused
        assert key == "toy/N64/I16/backward" and "rows other than 8" in reason

    def test_a_template_narrows_the_directions_to_its_own(self, toy):
        assert [cell.direction for cell in cells.plan(SHAPES[0], template="toy_many_backward").cells] == ["backward"]

    def test_problems_by_key_preset_shape_and_list(self):
        assert cells.shapes_of(SHAPE.key()) == [SHAPE] == cells.shapes_of(SHAPE) == cells.shapes_of([SHAPE])
        assert cells.shapes_of("boltz2") == preset("boltz2")

    @pytest.mark.parametrize("problem", [[], 384, [384], "no_such_preset", None])
    def test_what_names_no_problem(self, problem):
        with pytest.raises(InvalidInput):
            cells.plan(problem)

    def test_a_direction_that_does_not_exist(self):
        with pytest.raises(InvalidInput, match="direction: got 'sideways'; allowed: forward, "):
            cells.plan(SHAPE, ["forward", "sideways"])


class TestShards:
    @pytest.mark.parametrize("length", [0, 1, 7, 16, 103])
    @pytest.mark.parametrize("count", [1, 2, 8, 16])
    def test_shards_are_disjoint_cover_and_are_even(self, length, count):
        parts = [cells.shard(range(length), f"{number}/{count}") for number in range(1, count + 1)]
        assert [item for part in parts for item in part] == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

    @pytest.mark.parametrize("text", ["0/4", "5/4", "3", "a/b", "1/0", "-1/4", "1/2/3", "", "1.5/2", "/"])
    def test_bad_shards(self, text):
        with pytest.raises(InvalidInput, match="shard: got .* allowed: i/n with 1 <= i <= n, such as 3/16"):
            cells.shard([1, 2], text)


def test_shares_of_the_budget():
    assert cells.share_s(None, 5) is None
    assert cells.share_s(100.0, 4) == 25.0
    assert cells.share_s(100.0, 4, processes=2) == 50.0
    assert cells.share_s(100.0, 1, processes=8) == 100.0
    assert cells.share_s(-3.0, 4) == 0.0


class TestSummary:
    def test_what_several_processes_did_to_one_cell_is_one_report(self):
        partly = Summary((CellReport("a", "budget", us=5.0, counts={"ok": 3}, new_trials=3),), gpu_s=10.0, measuring_s=9.0)
        rest = Summary((CellReport("a", "complete", us=4.0, counts={"ok": 8}, new_trials=5),), gpu_s=10.0, measuring_s=7.0)
        for parts in ([partly, rest], [rest, partly]):
            whole = united(["a", "b"], parts, 10.0)
            assert [(each.cell, each.state, each.us, each.new_trials) for each in whole.cells] == [
                ("a", "complete", 4.0, 8),
                ("b", "left", None, 0),
            ]
            assert whole.idle_share == pytest.approx(0.2)
            assert [each.cell for each in whole.unfinished] == ["b"]

    @pytest.mark.parametrize("tried, said", [(0, "nothing was tried"), (1, "every configuration that was tried failed")])
    def test_a_cell_without_a_winner_says_why(self, tried, said):
        rows = [SimpleNamespace(grade="search", status="wrong", session="s")] * tried
        result = Result(ToyShape(64), "forward", "a", "toy", None, rows, "s", "interrupted", 1.0, 0.0, "analytic", {})
        assert CellReport.of(result).detail == said

    def test_it_travels_as_json(self):
        summary = Summary((CellReport("a", "complete", us=1.5, config={"tile": 64}),), 3.0, 3.0, 2.0, 7, restarts=1)
        assert Summary.from_dict(json.loads(json.dumps(summary.to_dict()))) == summary


class TestCommand:
    def test_the_plan_of_a_shard(self, capsys):
        found = []
        for number in (1, 2, 3):
            assert run(["sweep", "openfold3", "--direction", "forward", "--shard", f"{number}/3", "--plan", "--json"]) == 0
            found += json.loads(capsys.readouterr().out)["cells"]
        assert found == [cell.key for cell in cells.plan("openfold3", ["forward"]).cells]

    @pytest.mark.parametrize(
        "words, text",
        [
            (["--shard", "9/8"], "shard: got '9/8'"),
            (["--direction", "sideways"], "direction: got 'sideways'"),
            (["--ray", "local", "--gpus", "0"], "--gpus: got '0'"),
        ],
    )
    def test_mistakes_are_one_line(self, words, text, capsys):
        assert run(["sweep", "384", *words]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"Error: {text}") and error.count("\n") == 1

    def test_without_a_gpu(self, capsys, monkeypatch):
        monkeypatch.setattr(node, "visible_gpus", list)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert run(["sweep", "384"]) == 1
        assert "this process sees none" in capsys.readouterr().err

    @pytest.mark.parametrize("state, code", [("complete", 0), ("interrupted", 130), ("failed", 1)])
    def test_the_exit_code_and_the_table(self, state, code, capsys, monkeypatch):
        interrupted = state == "interrupted"

        def fake(chosen, db, options, limits, gpus, on_cell):
            assert gpus == ["0", "2"] and limits.budget_s == 60 and limits.max_trials == 5
            reports = [CellReport(each.key, state, us=12.5, config={"tile_m": 64}) for each in chosen]
            on_cell(reports[0])
            return Summary(tuple(reports), 2.0, 4.0, 3.0, interrupted=interrupted)

        monkeypatch.setattr(node, "sweep_node", fake)
        words = ["sweep", "384", "--gpus", "0,2", "--budget", "60", "--trials", "5"]
        assert run(words) == code
        out, error = capsys.readouterr()
        assert "tile_m=64" in out and "12.5" in out and "GPU idle 25 %" in out
        count = len(cells.tunable_directions("triangle_attention"))
        assert f"[1/{count}]" in error
        assert run([*words, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        assert document["idle_share"] == 0.25 and len(document["cells"]) == count
