"""The sweep as a whole, on a toy operation with a deterministic clock: what wins, what is recorded, what a restart does."""

from __future__ import annotations

import itertools
import os

import pytest
from tune_fakes import (
    H200,
    InlinePool,
    ToyBackend,
    ToyConfig,
    ToyShape,
    ToyTemplate,
    ToyTimer,
    install,
    options,
    toy_us,
)

from tpf_jit.errors import InvalidInput, MeasurementFailed, NoKernel
from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import TuneOptions, check, tune
from tpf_jit.tune.measure import WorkloadMeasurer
from tpf_jit.tuning_db import TuningStore
from tpf_jit.tuning_db.store import LONGEST_LEASE_S

SHAPE = ToyShape()


@pytest.fixture(autouse=True)
def toy(private_state, monkeypatch):
    """A working device and toolchain; every test has its own database and cache."""
    monkeypatch.setattr(ToyTimer, "dead", False)
    monkeypatch.setattr(ToyBackend, "version", "1")
    monkeypatch.setattr(ToyBackend, "compile_s", 0.0)


def rows(grade: str = "search") -> list:
    with TuningStore() as store:
        assert store.verify() == []
        assert store.leases() == []
        return [row for row in store.trials() if row.grade == grade]


def by_trick() -> dict:
    return {row.config["trick"]: row for row in rows()}


def key(config: ToyConfig) -> str:
    return canonical_json(config_to_dict(config))


def test_every_configuration_is_tried_once_and_the_fastest_wins():
    template = install()
    result = tune(SHAPE, options=options(template, ToyTimer(noise=0.001)))
    assert result.best_config == config_to_dict(ToyConfig(64, 3))
    assert result.best.grade == "final"
    assert result.stopped == "complete" and result.new_trials == 16
    tried = [canonical_json(row.config) for row in rows()]
    assert sorted(tried) == sorted(key(config) for config in template.configs)
    assert {row.status for row in rows()} == {"ok"}


def test_rows_carry_their_evidence():
    result = tune(SHAPE, options=options(install(), ToyTimer()))
    row = rows()[0]
    assert row.cell == "toy/N64/I8/forward"
    assert row.template == "toy_forward" and len(row.kernel_key) == 64 and len(row.cubin_sha256) == 64
    assert row.device["name"] == H200["name"] and row.device["rotated_sets"] >= 2
    assert row.toolchain["toy"] == "1" and "tpf_jit" in row.toolchain
    assert row.protocol and row.session == result.session
    assert len(row.samples_us) == 6 and row.errors == {"out": 0.0}
    assert "seed" in row.detail


@pytest.mark.parametrize("lease_s", [7200.0, 0.0, -1.0, float("nan")])
def test_leases_that_other_processes_would_not_respect_are_refused(lease_s):
    with pytest.raises(InvalidInput, match="lease_s: got .*; allowed: more than 0, at most 3600 s"):
        TuneOptions(lease_s=lease_s)


def test_the_longest_lease_holds_against_the_shortest_of_others():
    lease_s = TuneOptions(lease_s=LONGEST_LEASE_S).lease_s
    with TuningStore() as store:
        assert store.claim("cell", "work", "one", lease_s)
        assert not store.claim("cell", "work", "other", 1.0)
        store.release("cell", "work", "one")


def test_the_shoot_out_covers_the_eight_best():
    template = install()
    tune(SHAPE, options=options(template, ToyTimer()))
    finals = rows("final")
    best = sorted(template.configs, key=lambda config: (toy_us(config, SHAPE.crop), config.stages, config.tile))[:8]
    assert {canonical_json(row.config) for row in finals} == {key(config) for config in best}
    assert all("shoot-out of 8" in row.detail for row in finals)


FAULTY = tuple(
    ToyConfig(64, 3, trick)
    for trick in ("none", "skip", "race", "uncompilable", "unlaunchable", "greedy", "nan_tail")
)


def test_a_fast_wrong_configuration_loses():
    timer = ToyTimer()
    result = tune(ToyShape(63), options=options(install(FAULTY), timer))
    assert result.best_config == config_to_dict(FAULTY[0])
    found = by_trick()
    assert found["skip"].status == "wrong" and "out" in found["skip"].detail and found["skip"].errors["out"] > 0.01
    assert found["nan_tail"].status == "wrong" and found["nan_tail"].errors["out"] == float("inf")
    assert found["race"].status == "nondeterministic"
    assert all(timer.timed[key(ToyConfig(64, 3, trick))] == 0 for trick in ("skip", "nan_tail", "race"))


def test_it_is_the_check_that_stops_the_wrong_one(monkeypatch):
    """The same sweep without the check: the wrong configuration wins, so the test above does test the gate."""
    monkeypatch.setattr(check.Checker, "verdict", lambda self, kernel, config: check.Verdict("ok"))
    result = tune(ToyShape(63), options=options(install(FAULTY), ToyTimer()))
    assert result.best_config["trick"] == "skip"


def test_failures_are_rows_with_their_reason_and_the_sweep_goes_on():
    tune(ToyShape(63), options=options(install(FAULTY), ToyTimer()))
    found = by_trick()
    assert found["uncompilable"].status == "compile_error" and "ptxas says no" in found["uncompilable"].detail
    assert found["unlaunchable"].status == "launch_error" and "invalid configuration" in found["unlaunchable"].detail
    assert found["greedy"].status == "launch_error" and "out of device memory" in found["greedy"].detail
    assert len(found) == len(FAULTY)


def test_when_everything_fails_nothing_wins():
    result = tune(SHAPE, options=options(install((ToyConfig(trick="skip"), ToyConfig(trick="race"))), ToyTimer()))
    assert result.best is None and result.best_config is None
    assert "Nothing may win" in str(result)


def test_a_lost_device_ends_the_sweep_and_the_next_one_goes_on_after_it(monkeypatch):
    configs = (ToyConfig(16), ToyConfig(16, trick="deadly"), ToyConfig(64, 3))
    template = install(configs)
    with pytest.raises(MeasurementFailed, match="run the same command again"):
        tune(SHAPE, options=options(template, ToyTimer()))
    assert by_trick()["deadly"].status == "launch_error" and len(rows()) == 2
    monkeypatch.setattr(ToyTimer, "dead", False)
    result = tune(SHAPE, options=options(template, ToyTimer()))
    assert result.new_trials == 1 and result.best_config == config_to_dict(configs[2])


def test_a_device_lost_in_the_shoot_out_is_not_lost_there_again(monkeypatch):
    configs = (ToyConfig(16), ToyConfig(64, 3))
    template = install(configs)
    lost = ToyTimer()
    good, begin = ToyTimer.sample, WorkloadMeasurer.shootout
    finals = []

    def shootout(self, jobs):
        finals.append(jobs)
        return begin(self, jobs)

    def sample(self, launches, count, group=1, flush=False):
        if self is lost and finals and launches[0].kernel.config == configs[1]:
            type(self).dead = True
            raise RuntimeError("CUDA error: unspecified launch failure")
        return good(self, launches, count, group, flush)

    monkeypatch.setattr(ToyTimer, "sample", sample)
    monkeypatch.setattr(WorkloadMeasurer, "shootout", shootout)
    with pytest.raises(MeasurementFailed):
        tune(SHAPE, options=options(template, lost))
    assert [row.status for row in rows("final")] == ["launch_error"]
    monkeypatch.setattr(ToyTimer, "dead", False)
    result = tune(SHAPE, options=options(template, ToyTimer()))
    assert result.best_config == config_to_dict(configs[0])


def test_hopeless_candidates_stop_after_a_few_launches():
    configs = (ToyConfig(64, 3), ToyConfig(64, 30))
    timer = ToyTimer()
    tune(SHAPE, options=options(install(configs), timer))
    slow = next(row for row in rows() if row.config["stages"] == 30)
    assert slow.status == "slow" and len(slow.samples_us) == 3
    assert slow.median_us == pytest.approx(toy_us(configs[1], SHAPE.crop))
    assert "3 times the best" in slow.detail


def test_equal_device_code_is_timed_once_and_the_first_in_canonical_order_wins():
    configs = (ToyConfig(64, 3, twin=1), ToyConfig(64, 3, twin=0), ToyConfig(16))
    timer = ToyTimer()
    result = tune(SHAPE, options=options(install(configs), timer))
    twins = [row for row in rows() if row.config["tile"] == 64]
    assert twins[0].samples_us == twins[1].samples_us and twins[0].kernel_key != twins[1].kernel_key
    assert "same device code" in twins[1].detail
    finals = [row for row in rows("final") if row.config["tile"] == 64]
    assert len(finals) == 1
    assert result.best_config["twin"] == 0


def test_equal_device_code_is_still_checked():
    """Its host side may differ, as here, where the second one's result is wrong."""

    class HalfWrong(ToyBackend):
        def load(self, source, symbol, kind):
            kernel = super().load(source, symbol, kind)
            if kernel.config.twin:
                kernel.config = ToyConfig(kernel.config.tile, kernel.config.stages, "skip", 1)
            return kernel

    template = install((ToyConfig(64, 3), ToyConfig(64, 3, twin=1)))
    chosen = options(template, ToyTimer())
    make = chosen.make_measurer

    def make_measurer(template, shape):
        measurer = make(template, shape)
        measurer._load = HalfWrong().load
        return measurer

    object.__setattr__(chosen, "make_measurer", make_measurer)
    tune(SHAPE, options=chosen)
    assert {row.config["twin"]: row.status for row in rows()} == {0: "ok", 1: "wrong"}


def test_a_new_toolchain_with_equal_code_keeps_the_measurements(monkeypatch):
    template = install()
    tune(SHAPE, options=options(template, ToyTimer()))
    before = {canonical_json(row.config): row.samples_us for row in rows()}
    monkeypatch.setattr(ToyBackend, "version", "2")
    timer = ToyTimer()
    result = tune(SHAPE, options=options(template, timer))
    new = [row for row in rows() if row.session == result.session]
    assert len(new) == 16 and all(before[canonical_json(row.config)] == row.samples_us for row in new)
    assert {row.toolchain["toy"] for row in new} == {"2"}


def test_a_finished_sweep_returns_at_once():
    template = install()
    first = tune(SHAPE, options=options(template, ToyTimer()))
    timer, pool = ToyTimer(), InlinePool()
    second = tune(SHAPE, options=options(template, timer, pool))
    assert timer.calls == 0 and pool.compiled == []
    assert second.new_trials == 0 and second.best == first.best


def test_sweeps_in_pieces_try_everything_once():
    template = install()
    for _ in range(3):
        result = tune(SHAPE, max_trials=5, options=options(template, ToyTimer()))
        assert result.stopped == "trials" and result.new_trials == 5
    result = tune(SHAPE, options=options(template, ToyTimer()))
    assert result.new_trials == 1 and result.stopped == "complete"
    tried = [canonical_json(row.config) for row in rows()]
    assert len(tried) == len(set(tried)) == 16
    assert result.best_config == config_to_dict(ToyConfig(64, 3))


def test_a_budget_ends_the_search_but_not_the_shoot_out():
    template = install()
    tune(SHAPE, max_trials=3, options=options(template, ToyTimer()))
    result = tune(SHAPE, budget_s=0.0, options=options(template, ToyTimer()))
    assert result.stopped == "budget" and result.new_trials == 0
    assert result.best.grade == "final"


def test_ctrl_c_keeps_what_is_there(monkeypatch):
    template = install()
    timer = ToyTimer()
    good = ToyTimer.sample

    def sample(self, *args, **more):
        if self is timer and len(self.timed) > 4:
            raise KeyboardInterrupt
        return good(self, *args, **more)

    monkeypatch.setattr(ToyTimer, "sample", sample)
    result = tune(SHAPE, options=options(template, timer))
    assert result.interrupted and result.best is not None and result.best.grade == "search"
    kept = len(rows())
    assert 0 < kept < 16 and rows("final") == []
    assert tune(SHAPE, options=options(template, ToyTimer())).new_trials == 16 - kept


def test_failures_are_retried_only_when_asked(monkeypatch):
    configs = (ToyConfig(64, 3), ToyConfig(64, 3, "uncompilable"))
    template = install(configs)
    tune(SHAPE, options=options(template, ToyTimer()))
    assert tune(SHAPE, options=options(template, ToyTimer())).new_trials == 0
    assert tune(SHAPE, options=options(template, ToyTimer(), retry_failed=True)).new_trials == 1


def test_other_devices_and_cells_have_their_own_trials():
    template = install()
    tune(SHAPE, options=options(template, ToyTimer()))
    h100 = {**H200, "name": "Toy H100", "memory_bytes": 80 << 30}
    assert tune(SHAPE, options=options(template, ToyTimer(), facts=h100)).new_trials == 16
    assert tune(ToyShape(128), options=options(template, ToyTimer())).new_trials == 16
    with TuningStore() as store:
        assert len(store.devices()) == 2 and len(store.cells()) == 2


def test_the_neighbour_orders_the_next_cell():
    template = install()
    tune(SHAPE, options=options(template, ToyTimer()))
    timer = ToyTimer()
    result = tune(ToyShape(96), max_trials=3, options=options(template, timer))
    best = sorted(template.configs, key=lambda config: (toy_us(config, SHAPE.crop), key(config)))[:3]
    assert list(timer.timed) == [key(config) for config in best]
    assert "toy/N64/I8/forward" in result.order


def near(us: float) -> tuple:
    """Two configurations whose times differ by the given factor; the faster is second in canonical order."""

    class Near(ToyTemplate):
        def workload(self, shape, device, seed=0, family="normal"):
            workload = super().workload(shape, device, seed, family)
            prepare = workload.prepare

            def scaled(kernel, inputs):
                launch = prepare(kernel, inputs)
                launch.us = 100.0 * (us if kernel.config.stages == 3 else 1.0)
                return launch

            workload.prepare = scaled
            return workload

    from tpf_jit.templates import registry

    install()
    template = Near((ToyConfig(64, 2), ToyConfig(64, 3)))
    registry.register(template, replace=True)
    return template


@pytest.mark.parametrize(("factor", "stages"), [(0.998, 2), (0.96, 3)])
def test_within_noise_the_first_in_canonical_order_wins(factor, stages):
    result = tune(SHAPE, options=options(near(factor), ToyTimer(noise=0.001)))
    assert result.best_config["stages"] == stages
    assert result.best.ties == (2 if stages == 2 else 1)


def test_the_shoot_out_undoes_the_drift_of_the_search():
    """The clock slows down by more than the configurations differ; timed minutes apart, the first measured would win."""
    configs = tuple(ToyConfig(64, stages) for stages in (5, 4, 2, 1, 3))
    timer = ToyTimer(drift=4e-3)
    result = tune(SHAPE, options=options(install(configs), timer))
    search = sorted(rows(), key=lambda row: row.median_us)
    assert search[0].config["stages"] != 3, "the drift is too small to fool the search, so this test shows nothing"
    assert result.best_config["stages"] == 3


def test_a_close_candidate_is_timed_in_alternation_with_the_incumbent():
    configs = (ToyConfig(64, 3), ToyConfig(64, 4), ToyConfig(16, 1))
    timer = ToyTimer()
    tune(SHAPE, options=options(install(configs), timer))
    names = [name for name, _ in itertools.groupby(timer.sequence)]
    first, close = key(configs[0]), key(configs[1])
    turns = names[names.index(close) :][:4]
    assert turns.count(first) >= 1 and turns.count(close) >= 2


def test_problems_without_a_template_say_why():
    template = install()
    with pytest.raises(NoKernel, match="crop above 4096"):
        tune(ToyShape(8192), options=options(template, ToyTimer()))
    with pytest.raises(NoKernel, match="no template is registered for toy/backward"):
        tune(SHAPE, "backward", options=options(None, ToyTimer()))


def test_without_a_gpu_tuning_says_what_to_do(monkeypatch):
    from tpf_jit import device

    monkeypatch.setattr(device, "current_device", lambda index=None: None)
    install()
    with pytest.raises(MeasurementFailed, match="tpf-jit db import"):
        tune(SHAPE)


def test_an_old_gpu_has_nothing_to_tune(monkeypatch):
    from types import SimpleNamespace

    from tpf_jit import device

    a100 = SimpleNamespace(name="NVIDIA A100", arch=None, compute_capability=(8, 0))
    monkeypatch.setattr(device, "current_device", lambda index=None: a100)
    with pytest.raises(NoKernel, match="A100"):
        tune(SHAPE)


def test_tables_that_ship_are_read_once_and_again_when_they_change(tmp_path, monkeypatch):
    """The GPU waits while they are read, and every cell of a sweep asks."""
    from types import SimpleNamespace

    from tpf_jit.tune import sweep
    from tpf_jit.tuning_db import merge, reader

    tune(SHAPE, max_trials=2, options=options(install(), ToyTimer()))
    with TuningStore() as store:
        store.export(tmp_path / "shipped.jsonl")
        expected = {row.id: row for row in store.trials()}
    read = []
    honest = merge.read_lines
    monkeypatch.setattr(reader, "shipped_files", lambda: [tmp_path / "shipped.jsonl"])
    monkeypatch.setattr(merge, "read_lines", lambda path: read.append(path) or honest(path))
    template = next(iter(expected.values())).template
    assert expected
    for _ in range(3):
        assert set(sweep.shipped_rows(SimpleNamespace(name=template))) == set(expected)
        assert sweep.shipped_rows(SimpleNamespace(name="another")) == {}
    assert len(read) == 1
    (tmp_path / "shipped.jsonl").write_text("not a table\n")
    os.utime(tmp_path / "shipped.jsonl", (1, 1))
    assert sweep.shipped_rows(SimpleNamespace(name=template)) == {}
    assert len(read) == 2


def test_a_compile_that_takes_too_long_has_its_own_status():
    """As the pool words it, which has no exception of its own for it."""
    from tpf_jit import pool
    from tpf_jit.errors import CompileFailed
    from tpf_jit.tune import sweep

    class Silent:
        def send_bytes(self, payload):
            pass

        def poll(self, seconds):
            return False

    worker = object.__new__(pool._Worker)
    worker._connection = Silent()
    with pytest.raises(pool._WorkerLost) as lost:
        worker.run(b"", 5.0)
    assert sweep._compile_failure(CompileFailed(f"kernel did not compile: {lost.value}")).status == "compile_timeout"
    assert sweep._compile_failure(TimeoutError()).status == "compile_timeout"
    assert sweep._compile_failure(CompileFailed("ptxas says no")).status == "compile_error"
