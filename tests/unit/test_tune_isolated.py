"""Measuring in a child process: whatever a kernel does to it, the sweep goes on, and the row says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from isolated_fakes import Faults, broken, chatty, cuda, faulty, gone, killed_once, plain
from tune_fakes import SETTINGS, InlinePool, ToyConfig, ToyShape, ToyTemplate, install

from tpf_jit.device import Device
from tpf_jit.errors import MeasurementFailed
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import TuneOptions, measure, session, tune
from tpf_jit.tune.isolated import HardLimits, Isolation
from tpf_jit.tune.measure import Job
from tpf_jit.tuning_db import TuningStore

GOOD, OTHER = ToyConfig(64, 3), ToyConfig(64, 2)
LIMITS = HardLimits(start_s=60.0, first_s=3.0, step_s=2.5)


@pytest.fixture
def faults(tmp_path) -> Faults:
    return Faults(str(tmp_path))


@pytest.fixture
def isolation():
    with Isolation(LIMITS) as isolation:
        yield isolation


def job(config: ToyConfig) -> Job:
    text = canonical_json(config_to_dict(config))
    return Job(text, config, text.encode(), "toy", "so")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_figures_are_those_of_the_same_measurer_in_this_process(isolation, faults):
    here = plain(ToyTemplate(), ToyShape(), faults)
    there = isolation.measurer(plain, ToyTemplate(), ToyShape(), faults)
    assert (there.protocol, there.device) == (here.protocol, here.device)
    assert there.measure(job(GOOD)) == here.measure(job(GOOD))
    assert there.measure(job(OTHER), 100.0, job(GOOD)) == here.measure(job(OTHER), 100.0, job(GOOD))
    assert there.verify(job(ToyConfig(64, 3, "skip"))).status == "wrong"
    assert there.shootout([job(GOOD), job(OTHER)]) == here.shootout([job(GOOD), job(OTHER)])
    assert isolation.started == 1


def test_one_child_serves_one_measurer_after_another(isolation, faults):
    for crop in (64, 128):
        used = isolation.measurer(faulty, ToyTemplate(), ToyShape(crop), faults)
        assert used.measure(job(GOOD)).median_us == pytest.approx(100 * crop / 64)
        used.close()
    assert len(set(faults.pids("started"))) == 1 and isolation.started == 1


def test_two_measurers_may_take_turns(isolation, faults):
    small, large = (isolation.measurer(faulty, ToyTemplate(), ToyShape(crop), faults) for crop in (64, 128))
    assert small.measure(job(GOOD)).median_us < large.measure(job(GOOD)).median_us
    assert small.measure(job(OTHER)).status == "ok"


@pytest.mark.parametrize(
    ("trick", "said"),
    [
        ("hang", "timeout: no answer from the measuring process within"),
        ("segfault", "the measuring process crashed (SIGSEGV)"),
        ("exit", "ended itself with exit code 3"),
        ("killed", "was killed (SIGKILL: out of memory, or by hand)"),
        ("corrupt", "an illegal memory access was encountered"),
    ],
)
def test_a_lost_process_is_an_outcome_and_the_next_trial_is_untouched(isolation, faults, trick, said):
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    before = used.measure(job(GOOD))
    found = used.measure(job(ToyConfig(64, 3, trick)))
    assert found.status == "launch_error" and not found.fatal
    assert said in found.detail and "was replaced" in found.detail
    assert used.measure(job(GOOD)) == before
    # Only what the candidate need not have caused is tried once more.
    tries = 2 if trick == "killed" else 1
    assert len(faults.pids(trick)) == tries and isolation.started == 1 + tries
    assert not any(alive(pid) for pid in faults.pids(trick))


def test_running_out_of_device_memory_costs_no_process(isolation, faults):
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    found = used.measure(job(ToyConfig(64, 3, "oom")))
    assert found.status == "launch_error" and "out of device memory" in found.detail
    assert used.measure(job(GOOD)).status == "ok" and isolation.started == 1


@pytest.mark.parametrize("trick", ["killed", "ecc", "reset"])
def test_what_the_candidate_did_not_cause_is_tried_once_more(isolation, tmp_path, trick):
    faults = Faults(str(tmp_path), once=(trick,))
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    assert used.measure(job(ToyConfig(64, 3, trick))).status == "ok"
    assert isolation.started == 2


@pytest.mark.parametrize(("trick", "text"), [("ecc", "uncorrectable ECC error"), ("reset", "the driver was reset")])
def test_a_fault_of_the_machine_that_comes_back_ends_the_sweep(isolation, faults, trick, text):
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    found = used.measure(job(ToyConfig(64, 3, trick)))
    assert found.fatal and text in found.detail and len(faults.pids(trick)) == 2
    found = used.shootout([job(GOOD), job(ToyConfig(64, 3, trick))])
    assert [outcome.fatal for outcome in found.values()] == [True]


def test_a_device_that_does_not_come_back_is_said(isolation, faults):
    used = isolation.measurer(gone, ToyTemplate(), ToyShape(), faults)
    assert "timeout" in used.measure(job(ToyConfig(64, 3, "hang"))).detail
    with pytest.raises(MeasurementFailed, match="takes no work in a new process"):
        used.measure(job(GOOD))


def test_a_device_that_cannot_be_opened_is_said(isolation, faults):
    with pytest.raises(MeasurementFailed, match="CUDA driver initialization failed") as caught:
        isolation.measurer(broken, ToyTemplate(), ToyShape(), faults)
    assert "exclusive mode" in str(caught.value) and "--no-isolate" not in str(caught.value), "not every command has it"


@pytest.mark.parametrize("trick", ["segfault", "hang", "corrupt", "late"])
def test_a_finalist_that_takes_the_process_down_does_not_stop_the_others(isolation, faults, trick):
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    jobs = [job(GOOD), job(ToyConfig(64, 3, trick)), job(OTHER)]
    if trick == "late":
        # Passes the check and the search, and crashes in the middle of the rounds.
        for _ in range(3):
            assert used.measure(jobs[1]).status == "ok"
    found = used.shootout(jobs)
    assert [found[each.key].status for each in jobs] == ["ok", "launch_error", "ok"]
    assert len(found[jobs[0].key].samples_us) == SETTINGS.rounds * SETTINGS.round_samples


def test_a_killed_shoot_out_is_run_again(isolation, tmp_path):
    faults = Faults(str(tmp_path), once=("killed",))
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    found = used.shootout([job(GOOD), job(ToyConfig(64, 3, "killed"))])
    assert {outcome.status for outcome in found.values()} == {"ok"}


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_idle_child_may_be_killed(isolation, faults, kind):
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    before = used.measure(job(GOOD))
    os.kill(isolation._child.pid, kind)
    assert used.measure(job(GOOD)) == before and isolation.started == 2
    os.kill(isolation._child.pid, kind)
    assert {outcome.status for outcome in used.shootout([job(GOOD), job(OTHER)]).values()} == {"ok"}
    assert isolation.started == 3


def test_a_child_that_is_killed_while_it_starts_is_replaced_once(isolation, faults):
    used = isolation.measurer(killed_once, ToyTemplate(), ToyShape(), faults)
    assert used.measure(job(GOOD)).status == "ok" and isolation.started == 2


def test_what_the_child_prints_does_not_mix_with_the_caller_s_output(isolation, faults, capfd):
    assert isolation.measurer(chatty, ToyTemplate(), ToyShape(), faults).measure(job(GOOD)).status == "ok"
    out, err = capfd.readouterr()
    assert out == "" and "making" in err and "timing" in err


def test_the_real_measurer_can_be_made_in_a_child(isolation, monkeypatch, tmp_path):
    """As far as a process without a GPU gets: the template and the device travel, torch is asked, and its answer comes back."""
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    template, gpu = registry.get("triangle_attention_forward_sm90"), Device("NVIDIA H200", (9, 0), 132, 60 << 20, 141 << 30)
    with pytest.raises(MeasurementFailed, match="in a process of its own failed: (?i:.*(cuda|nvidia|gpu))"):
        isolation.measurer(measure.cuda_measurer, template, TriangleAttentionShape(crop=128), gpu, 0, tmp_path, 1)


def test_ctrl_c_ends_the_child_and_passes_through(isolation, faults):
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
    pid = isolation._child.pid
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        used.measure(job(ToyConfig(64, 3, "hang")))
    assert not alive(pid)
    assert used.measure(job(GOOD)).status == "ok"


def test_a_template_that_no_other_process_can_import_is_measured_here(isolation, faults):
    class Local(ToyTemplate):
        pass

    used = isolation.measurer(faulty, Local(), ToyShape(), faults)
    assert used.measure(job(GOOD)).status == "ok" and faults.pids("started") == [os.getpid()]


def test_the_child_ends_with_the_isolation(faults):
    with Isolation(LIMITS) as isolation:
        isolation.measurer(faulty, ToyTemplate(), ToyShape(), faults)
        (pid,) = faults.pids("started")
        assert alive(pid)
    assert not alive(pid)


KILLED_CALLER = """
import sys
from isolated_fakes import Faults, faulty
from test_tune_isolated import job
from tune_fakes import ToyConfig, ToyShape, ToyTemplate
from tpf_jit.tune.isolated import Isolation
with Isolation() as isolation:
    used = isolation.measurer(faulty, ToyTemplate(), ToyShape(), Faults(sys.argv[1]))
    used.measure(job(ToyConfig(64, 3, "hang")))
"""


def test_a_killed_caller_takes_the_child_along_even_in_a_hanging_kernel(faults):
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)])}
    caller = subprocess.Popen([sys.executable, "-c", KILLED_CALLER, faults.folder], env=env)
    end = time.monotonic() + 60
    while not faults.pids("hang") and time.monotonic() < end:
        time.sleep(0.02)
    (pid,) = faults.pids("hang")
    caller.kill()
    caller.wait()
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)


def sweep(faults: Faults, isolation: Isolation, *configs: ToyConfig, **more):
    """Tune the toy with these configurations, measured in the child."""
    template = install(configs)
    options = TuneOptions(
        template=template,
        make_measurer=lambda chosen, shape: isolation.measurer(faulty, chosen, shape, faults),
        make_pool=InlinePool,
        seed=7,
        workers=2,
        **more,
    )
    return tune(ToyShape(), progress=False, options=options)


def test_a_sweep_among_hanging_crashing_and_corrupting_kernels(private_state, isolation, faults):
    tricks = ("none", "hang", "segfault", "exit", "corrupt", "oom", "none")
    configs = [ToyConfig(64, stages, trick) for stages, trick in enumerate(tricks, 1)]
    result = sweep(faults, isolation, *configs)
    assert result.best_config == config_to_dict(configs[0]) and result.best.grade == "final"
    with TuningStore() as store:
        found = {row.config["stages"]: row.status for row in store.trials() if row.grade == "search"}
        assert found == {1: "ok", **dict.fromkeys(range(2, 7), "launch_error"), 7: "ok"}
        assert store.verify() == [] and store.leases() == []
    again = sweep(faults, isolation, *configs)
    assert again.new_trials == 0, "what cost a process is not tried again"


def test_a_machine_fault_in_a_sweep_is_recorded_and_the_next_sweep_goes_on(private_state, isolation, faults):
    configs = [ToyConfig(64, 3), ToyConfig(64, 2, "ecc"), ToyConfig(64, 1)]
    with pytest.raises(MeasurementFailed, match="uncorrectable ECC error"):
        sweep(faults, isolation, *configs)
    assert sweep(faults, isolation, *configs).best_config == config_to_dict(configs[0])
    retried = sweep(Faults(faults.folder, once=("ecc",)), isolation, *configs, retry_failed=True)
    assert retried.new_trials >= 1


@pytest.mark.parametrize("isolate", [True, False])
def test_tuning_on_cuda_is_isolated_unless_it_is_switched_off(private_state, monkeypatch, isolate):
    monkeypatch.setattr(measure, "cuda_measurer", cuda)
    monkeypatch.setattr(session, "_gpu", lambda index: (Device("Toy H200", (9, 0), 132, 1000, 141 << 30, "1"), 0))
    template = install((GOOD, OTHER))
    options = TuneOptions(template=template, make_pool=InlinePool, seed=7, isolate=isolate)
    result = tune(ToyShape(), progress=False, options=options)
    assert result.best_config == config_to_dict(GOOD) and result.best.grade == "final"
    (pid,) = Faults(str(private_state)).pids("started")
    assert (pid != os.getpid()) == isolate
    assert pid == os.getpid() or not alive(pid)
