"""Measuring: rotation, grouping, memory, rounds, interleaving, locks; with a deterministic clock."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from tune_fakes import SETTINGS, ToyBackend, ToyConfig, ToyKernel, ToyShape, ToyTemplate, ToyTimer, ToyWorkload

from tpf_jit.errors import MeasurementFailed, NoKernel
from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import timing
from tpf_jit.tune.measure import Job, MeasureSettings, WorkloadMeasurer, steady_rounds
from tpf_jit.tune.timing import contenders


@pytest.fixture(autouse=True)
def working_device(monkeypatch):
    monkeypatch.setattr(ToyTimer, "dead", False)


def job(config: ToyConfig) -> Job:
    text = canonical_json(config_to_dict(config))
    return Job(text, config, text.encode(), "toy", "so")


def measurer(timer: ToyTimer, template: ToyTemplate | None = None, settings: MeasureSettings = SETTINGS, **options):
    return WorkloadMeasurer(
        template or ToyTemplate(), ToyShape(), timer, ToyBackend().load, "toy", settings=settings, options=options
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cold", "each", "copies", "flush"),
    [
        (100, 60, 2, False),  # two copies exceed it
        (100, 1000, 2, False),  # one would, but its end would still be in the cache when it starts again
        (100, 10, 11, False),
        (100, 1, 32, True),  # too small: the cache is flushed as well
        (0, 0, 2, False),
    ],
)
def test_rotated_copies_exceed_the_cache(cold, each, copies, flush):
    found = timing.rotation(cold, each)
    assert found == (copies, flush or copies * each <= cold)
    assert found[1] == flush or each == 0


@pytest.mark.parametrize(
    ("us", "copies", "flush", "group"),
    [(200.0, 2, False, 1), (60.0, 2, False, 2), (10.0, 2, False, 16), (0.5, 2, False, 64), (10.0, 32, True, 16), (9, 5, True, 4)],
)
def test_short_kernels_are_timed_in_groups(us, copies, flush, group):
    assert timing.group_size(us, copies, flush) == group


def test_quantiles():
    assert timing.median([3.0, 1.0, 2.0]) == 2.0
    assert timing.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert timing.quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert timing.quantile([7.0], 0.1) == 7.0


def test_a_candidate_s_outcome():
    found = measurer(ToyTimer()).measure(job(ToyConfig(64, 3)))
    assert found.status == "ok" and found.median_us == pytest.approx(100.0)
    assert len(found.samples_us) == 6
    # 512 bytes a set, 2,000 to exceed.
    assert found.state["rotated_sets"] == 4 and found.state["flushed"] is False and found.state["group"] == 1
    assert found.against_us is None and found.relative is None


def test_clocks_are_recorded_before_and_after():
    readings = iter([{"sm_clock_mhz": 1980}, {"sm_clock_mhz": 1755}])
    found = measurer(ToyTimer(), clocks=lambda: next(readings)).measure(job(ToyConfig(64, 3)))
    assert found.state["clocks_before"] == {"sm_clock_mhz": 1980} and found.state["clocks_after"] == {"sm_clock_mhz": 1755}


def test_drift_hits_both_sides_of_a_comparison():
    timer = ToyTimer(drift=1e-3)
    used = measurer(timer)
    best = job(ToyConfig(64, 3))
    first = used.measure(best)
    found = used.measure(job(ToyConfig(64, 2)), first.median_us, best)
    assert found.median_us > 1.12 * first.median_us
    assert found.relative == pytest.approx(1.1, abs=0.01)


def test_a_candidate_far_behind_is_timed_alone():
    timer = ToyTimer()
    used = measurer(timer)
    best = job(ToyConfig(64, 3))
    first = used.measure(best)
    before = timer.timed[best.key]
    found = used.measure(job(ToyConfig(16, 1)), first.median_us, best)
    assert found.status == "ok" and found.relative is None and timer.timed[best.key] == before


def test_memory_that_runs_out_means_fewer_copies(monkeypatch):
    made = []
    make = ToyWorkload.make_inputs

    def scarce(self, seed):
        if self.shape.crop == ToyShape().crop and len(made) >= 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        made.append(seed)
        return make(self, seed)

    timer = ToyTimer()
    used = measurer(timer)
    used.verify(job(ToyConfig(64, 3)))
    monkeypatch.setattr(ToyWorkload, "make_inputs", scarce)
    found = used.measure(job(ToyConfig(64, 3)))
    assert found.status == "ok" and found.state["rotated_sets"] == 1 and found.state["flushed"] is True
    assert timer.released >= 1


def test_memory_that_does_not_suffice_for_one_copy_is_an_outcome(monkeypatch):
    used = measurer(ToyTimer())
    used.verify(job(ToyConfig(64, 3)))

    def none(self, seed):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(ToyWorkload, "make_inputs", none)
    found = used.measure(job(ToyConfig(64, 3)))
    assert found.status == "launch_error" and "out of device memory" in found.detail and not found.fatal


def test_the_incumbent_steps_aside_where_memory_holds_one_candidate(monkeypatch):
    used = measurer(ToyTimer())
    best = job(ToyConfig(64, 3))
    first = used.measure(best)
    prepare = ToyWorkload.prepare

    def scarce(self, kernel, inputs):
        if kernel.config == ToyConfig(64, 3):
            raise RuntimeError("CUDA out of memory")
        return prepare(self, kernel, inputs)

    monkeypatch.setattr(ToyWorkload, "prepare", scarce)
    found = used.measure(job(ToyConfig(64, 2)), first.median_us, best)
    assert found.status == "ok" and found.relative is None


def test_little_free_memory_limits_the_copies_from_the_start():
    found = measurer(ToyTimer(), memory_bytes=4 * 512).measure(job(ToyConfig(64, 3)))
    assert found.state["rotated_sets"] == 1 and found.state["flushed"] is True


def test_a_hung_kernel_is_fatal(monkeypatch):
    def wait(self):
        raise timing.DeviceHung("no result from the GPU within 60 s")

    monkeypatch.setattr(ToyTimer, "wait", wait)
    found = measurer(ToyTimer()).measure(job(ToyConfig(64, 3)))
    assert found.status == "launch_error" and found.fatal and "within 60 s" in found.detail


def test_an_object_that_cannot_be_opened_as_a_file_is_loaded_from_memory(tmp_path):
    text = canonical_json(config_to_dict(ToyConfig(64, 3)))
    path = tmp_path / "kernel.so"
    path.write_text(text)

    def load(binary, symbol, kind):
        if not isinstance(binary, bytes):
            raise NoKernel("failed to map segment from shared object")
        return ToyBackend().load(binary, symbol, kind)

    used = WorkloadMeasurer(ToyTemplate(), ToyShape(), ToyTimer(), load, "toy", settings=SETTINGS)
    assert used.measure(Job("key", ToyConfig(64, 3), path, "toy")).status == "ok"


def test_finalists_take_turns_in_mirrored_order():
    timer = ToyTimer()
    used = measurer(timer)
    jobs = [job(ToyConfig(64, stages)) for stages in (3, 2, 4)]
    found = used.shootout(jobs)
    assert {outcome.status for outcome in found.values()} == {"ok"}
    assert all(len(outcome.samples_us) == 6 for outcome in found.values())
    assert [jobs[0].key, jobs[1].key, jobs[2].key, jobs[1].key, jobs[0].key] == timer.sequence


def test_a_finalist_far_behind_is_spared_the_later_rounds():
    settings = MeasureSettings(heat_s=0.0)
    jobs = [job(ToyConfig(64, 3)), job(ToyConfig(16, 2))]
    timer = ToyTimer()
    found = measurer(timer, settings=settings).shootout(jobs)
    assert [len(found[each.key].samples_us) for each in jobs] == [60, 20]
    assert found[jobs[1].key].median_us > settings.hopeless * found[jobs[0].key].median_us
    assert found[jobs[1].key].detail.endswith("shoot-out of 2, 2 of 2 rounds kept, then left out as far behind")
    lasting = MeasureSettings(heat_s=0.0, hopeless=100.0)
    found = measurer(ToyTimer(), settings=lasting).shootout(jobs)
    assert [len(found[each.key].samples_us) for each in jobs] == [60, 60]
    assert contenders({"a": [1.0, 3.0], "b": [2.3], "c": [], "d": [2.0, 2.1]}, 1.1) == {"a", "d"}


def test_a_finalist_that_fails_does_not_stop_the_others():
    jobs = [job(ToyConfig(64, 3)), job(ToyConfig(64, 3, "skip")), job(ToyConfig(64, 3, "unlaunchable"))]
    found = measurer(ToyTimer()).shootout(jobs)
    assert [found[each.key].status for each in jobs] == ["ok", "wrong", "launch_error"]
    assert found[jobs[0].key].samples_us


@pytest.mark.parametrize("long_us, samples, finals", [(1e9, 24, 60), (50.0, 12, 30), (25.0, 8, 12), (1.0, 8, 12)])
def test_long_launches_are_sampled_fewer_times(long_us, samples, finals):
    """A toy's launch takes 100 us. Half of the samples where that is twice as long as is taken to be long; never fewer than two
    at a time."""
    settings = MeasureSettings(heat_s=0.0, long_us=long_us)
    one = job(ToyConfig(tile=64, stages=3))
    found = measurer(ToyTimer(), settings=settings).measure(one)
    assert (found.status, len(found.samples_us)) == ("ok", samples), found.detail
    final = measurer(ToyTimer(), settings=settings).shootout([one])[one.key]
    assert len(final.samples_us) == finals


def test_slow_rounds_are_dropped_for_all_alike():
    calm, throttled = [10.0, 10.1], [14.0, 14.1]
    assert steady_rounds([[calm, throttled, calm, calm], [calm, calm, calm, calm]], 1.05) == [0, 2, 3]
    # Half of the rounds stay whatever they show.
    assert steady_rounds([[calm, throttled, throttled, throttled]], 1.05) == [0, 1]
    assert steady_rounds([], 1.05) == []


def test_unknown_options_are_refused():
    with pytest.raises(MeasurementFailed, match="tea"):
        measurer(ToyTimer(), tea=1)


def test_one_gpu_is_timed_by_one_process_at_a_time(tmp_path):
    path = tmp_path / "gpu.lock"
    script = (
        "import sys, time; from pathlib import Path; from tpf_jit.tune.timing import exclusive\n"
        "with exclusive(Path(sys.argv[1])) as held:\n"
        "    print(held, flush=True); time.sleep(0.5)"
    )
    root = __file__.rpartition("/tests/")[0]
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "True"
    begin = time.monotonic()
    with timing.exclusive(path) as held:
        assert held and time.monotonic() - begin > 0.2
    process.communicate()
    assert path.stat().st_mode & 0o777 == 0o600


def test_where_the_lock_cannot_be_made_timing_goes_on(tmp_path):
    with timing.exclusive(tmp_path / "missing" / "gpu.lock") as held:
        assert not held
    (tmp_path / "target").write_text("")
    (tmp_path / "link.lock").symlink_to(tmp_path / "target")
    with timing.exclusive(tmp_path / "link.lock") as held:
        assert not held
    with timing.exclusive(None) as held:
        assert not held


def test_the_wall_clock_times_each_launch():
    timer = timing.WallTimer()
    turns = []
    launches = [lambda: turns.append(0) or time.sleep(0.002), lambda: turns.append(1) or time.sleep(0.002)]
    found = timer.sample(launches, 3, group=2)
    assert turns == [0, 1] * 3 and all(value >= 2000 for value in found)
    timing.heat(timer, launches, 0.0)
    assert len(turns) == 14


def test_a_kernel_is_loaded_once():
    loads = []

    def load(binary, symbol, kind):
        loads.append(binary)
        return ToyKernel(ToyConfig(64, 3))

    used = WorkloadMeasurer(ToyTemplate(), ToyShape(), ToyTimer(), load, "toy", settings=SETTINGS)
    used.measure(job(ToyConfig(64, 3)))
    used.shootout([job(ToyConfig(64, 3))])
    assert len(loads) == 1
    used.close()
