"""Which configuration comes next: analytic order, borrowed rankings, Optuna."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from tune_fakes import H200, ToyConfig, ToyShape, ToyTemplate

from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import order
from tpf_jit.tuning_db import TrialRow, device_model

MODEL = device_model(H200)
CONFIGS = ToyTemplate().configs


def first_neighbour(shape, direction: str, device: str, rows) -> order.Neighbour | None:
    return next(iter(order.around(shape, direction, device, rows)), None)


def trial(config, us, shape=None, device=H200, status="ok"):
    cell = f"{(shape or ToyShape()).key()}/forward"
    return TrialRow(
        template="toy_forward", cell=cell, config=config_to_dict(config), device=dict(device), samples_us=[us], status=status,
        date="2026-12-01T00:00:00Z",
    )  # fmt: skip


def drain(source, tell=lambda config: 1.0):
    taken = []
    while (config := source.ask()) is not None:
        taken.append(config)
        source.tell(config, tell(config))
    return taken


def test_without_a_cost_model_closeness_to_the_default_decides():
    template = ToyTemplate()
    ordered = order.analytic_order(template, ToyShape(), template.configs)
    assert ordered[0] == template.default(ToyShape()) == ToyConfig(16, 1)
    assert sorted(ordered, key=str) == sorted(template.configs, key=str)
    assert set(ordered[1:3]) == {ToyConfig(16, 2), ToyConfig(32, 1)}
    assert ordered[-1] == ToyConfig(128, 4)


def test_a_template_s_cost_model_decides():
    template = ToyTemplate()
    template.cost = lambda shape, config: -config.tile
    ordered = order.analytic_order(template, ToyShape(), template.configs)
    assert [config.tile for config in ordered] == [16, *[128] * 4, *[64] * 4, *[32] * 4, *[16] * 3]


def test_the_nearest_cell_lends_its_ranking():
    far = [trial(config, 10.0 + i, ToyShape(1024)) for i, config in enumerate(CONFIGS)]
    near = [trial(config, 10.0 - i / 10, ToyShape(96)) for i, config in enumerate(CONFIGS)]
    found = first_neighbour(ToyShape(64), "forward", MODEL, far + near)
    assert found.cell == "toy/N96/I8/forward"
    assert found.ranking == tuple(order.config_json(config) for config in reversed(CONFIGS))
    assert order.plan(CONFIGS, list(CONFIGS), found) == list(reversed(CONFIGS))


def test_rankings_of_near_cells_take_turns_and_the_nearest_begins():
    def rows(crop, *numbers):
        return [trial(CONFIGS[number], 1.0 + place, ToyShape(crop)) for place, number in enumerate(numbers)]

    crops = {80: (3, 7, 1), 96: (5, 3, 9), 128: (11, 5, 0), 144: (2, 4, 6), 160: (8, 10, 12)}
    given = [row for crop, numbers in crops.items() for row in rows(crop, *numbers)] + rows(4096, 15)
    found = order.around(ToyShape(64), "forward", MODEL, given)
    assert [each.cell for each in found] == [f"toy/N{crop}/I8/forward" for crop in (80, 96, 128, 144)]
    assert found[0] == first_neighbour(ToyShape(64), "forward", MODEL, given)
    planned = order.plan(CONFIGS, list(CONFIGS), *found)
    assert planned[:9] == [CONFIGS[number] for number in (3, 5, 11, 2, 7, 4, 1, 9, 0)]
    assert sorted(planned, key=str) == sorted(CONFIGS, key=str)


def test_what_the_neighbour_does_not_know_follows_and_what_is_illegal_here_is_left_out():
    known = [CONFIGS[5], ToyConfig(256, 9), CONFIGS[3]]
    found = first_neighbour(ToyShape(64), "forward", MODEL, [trial(config, i + 1.0) for i, config in enumerate(known)])
    planned = order.plan(CONFIGS, list(CONFIGS), found)
    assert planned[:2] == [CONFIGS[5], CONFIGS[3]]
    assert sorted(planned, key=str) == sorted(CONFIGS, key=str)


def test_stopped_candidates_rank_behind_finished_ones_and_failures_do_not_rank():
    rows = [trial(CONFIGS[0], 5.0, status="slow"), trial(CONFIGS[1], 9.0), trial(CONFIGS[2], 1.0, status="wrong")]
    found = first_neighbour(ToyShape(64), "forward", MODEL, rows)
    assert found.ranking == (order.config_json(CONFIGS[1]), order.config_json(CONFIGS[0]))


def test_a_far_neighbour_is_mixed_with_the_analytic_order():
    rows = [trial(config, 10.0 - i / 10, ToyShape(4096)) for i, config in enumerate(CONFIGS)]
    found = first_neighbour(ToyShape(64), "forward", MODEL, rows)
    assert found.distance >= order.FAR
    planned = order.plan(CONFIGS, list(CONFIGS), found)
    assert planned[:4] == [CONFIGS[-1], CONFIGS[0], CONFIGS[-2], CONFIGS[1]]
    assert sorted(planned, key=str) == sorted(CONFIGS, key=str)


def test_a_thin_neighbour_yields_to_a_full_one():
    thin = [trial(CONFIGS[0], 1.0, ToyShape(72))]
    full = [trial(config, 10.0, ToyShape(96)) for config in CONFIGS]
    assert first_neighbour(ToyShape(64), "forward", MODEL, thin + full).cell == "toy/N96/I8/forward"
    assert first_neighbour(ToyShape(64), "forward", MODEL, thin).cell == "toy/N72/I8/forward"


def test_siblings_before_strangers():
    shape = TriangleAttentionShape(crop=384)
    h200 = {**H200, "name": "NVIDIA H200"}
    h100 = {**H200, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 << 30}
    stranger = {**H200, "name": "NVIDIA A100-SXM4-80GB", "compute_capability": [8, 0], "sms": 108}

    def rows(device, shape):
        return [trial(config, 10.0, shape, device) for config in CONFIGS]

    def nearest(*groups):
        return first_neighbour(shape, "forward", device_model(h200), [row for group in groups for row in group])

    assert nearest(rows(h100, shape), rows(stranger, shape)).device == device_model(h100)
    assert nearest(rows(h100, shape)).distance < order.FAR <= nearest(rows(stranger, shape)).distance
    other_crop = TriangleAttentionShape(crop=400)
    assert nearest(rows(h100, shape), rows(h200, other_crop)).device == device_model(h200)
    other_code = TriangleAttentionShape(crop=384, head_dim=64, bias_dtype="float32")
    assert nearest(rows(h100, shape), rows(h200, other_code)).device == device_model(h100)


def test_other_directions_and_unreadable_cells_lend_nothing():
    row = dataclasses.replace(trial(CONFIGS[0], 1.0), cell="toy/N64/I8/backward")
    alien = dataclasses.replace(trial(CONFIGS[0], 1.0), cell="other/thing/forward")
    assert first_neighbour(ToyShape(64), "forward", MODEL, [row, alien]) is None


def test_enumeration_gives_each_configuration_once():
    source = order.EnumeratedSource(CONFIGS)
    source.tell(CONFIGS[3], 5.0)
    assert drain(source) == [config for config in CONFIGS if config != CONFIGS[3]]


@dataclass(frozen=True)
class Wide:
    a: int
    b: int
    c: str
    d: bool


WIDE = [
    Wide(a, b, c, d)
    for a in (16, 32, 64, 128, 192, 256) for b in range(10) for c in ("x", "y", "z") for d in (False, True)
    if a * (b + 1) <= 1500 and not (c == "z" and d)
]  # fmt: skip


def landscape(config):
    return 100 + abs(config.a - 128) / 16 + 3 * abs(config.b - 6) + {"x": 4, "y": 0, "z": 8}[config.c] + 5 * config.d


def test_small_spaces_are_enumerated_and_large_ones_searched():
    assert isinstance(order.make_source(WIDE, len(WIDE)), order.EnumeratedSource)
    assert isinstance(order.make_source(WIDE, len(WIDE) - 1), order.OptunaSource)


def test_optuna_finds_the_best_without_repeats_or_illegal_configurations():
    source = order.OptunaSource(WIDE, seed=1, starters=16, patience=40)
    taken = drain(source, landscape)
    assert len(set(taken)) == len(taken) and set(taken) <= set(WIDE)
    assert len(taken) < len(WIDE) / 2
    best = min(map(landscape, WIDE))
    assert min(map(landscape, taken)) <= 1.01 * best
    # The first ones of the order do not hold it: the search does.
    assert min(map(landscape, WIDE[:16])) > 1.1 * best


def test_optuna_s_illegal_and_repeated_asks_never_leave_the_source():
    few = [config for config in WIDE if config.b < 6 and not config.d]
    source = order.OptunaSource(few, seed=2, starters=4, patience=10_000)
    states = source._optuna.trial.TrialState
    taken = drain(source, landscape)
    assert sorted(taken, key=str) == sorted(few, key=str)
    dropped = source._study.get_trials(deepcopy=False, states=(states.PRUNED, states.FAIL))
    assert dropped, "nothing was dropped, so this test shows nothing"


def test_optuna_asks_several_before_it_is_told():
    source = order.OptunaSource(WIDE, seed=3, starters=4)
    batch = [source.ask() for _ in range(12)]
    assert len(set(batch)) == 12
    for config in reversed(batch):
        source.tell(config, landscape(config))
    assert source.ask() not in batch


def test_optuna_learns_from_the_database_s_rows():
    source = order.OptunaSource(WIDE, seed=4, starters=0, patience=400)
    known = WIDE[::2]
    for config in known:
        source.tell(config, landscape(config) if config.c != "x" else None)
    source.tell(Wide(1, 2, "gone", True), 1.0)
    asked = [source.ask() for _ in range(10)]
    assert not set(asked) & set(known)
    mean = sum(map(landscape, asked)) / len(asked)
    rest = [config for config in WIDE if config not in known]
    assert mean < sum(map(landscape, rest)) / len(rest)


def test_failed_configurations_count_towards_patience():
    source = order.OptunaSource(WIDE, seed=5, starters=4, patience=8)
    assert len(drain(source, lambda config: None)) == 8


def test_without_optuna_the_first_of_the_order_are_tried(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "optuna", None)
    source = order.make_source(WIDE, 50)
    assert drain(source) == WIDE[:50]
    assert "optuna is not installed" in caplog.text


def test_optuna_s_verbosity_is_left_as_it_was():
    import optuna

    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        order.OptunaSource(WIDE)
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (ToyShape(64), ToyShape(64), 0.0),
        (ToyShape(64), ToyShape(131, 8), pytest.approx(1.0, abs=0.05)),
        (ToyShape(64), SimpleNamespace(crop=64), float("inf")),
        (TriangleAttentionShape(crop=384), TriangleAttentionShape(crop=768), pytest.approx(1.0)),
        (TriangleAttentionShape(crop=384), TriangleAttentionShape(crop=384, mask="bool"), 1.0),
    ],
)
def test_distances(a, b, expected):
    assert order.shape_distance(a, b) == expected
