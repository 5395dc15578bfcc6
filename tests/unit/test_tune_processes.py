"""Sweeps and the operating system: killed at any moment, eight processes at once. Real processes, real database."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tune_fakes import ToyConfig, ToyShape, ToyTimer, install, options

from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import ledger, tune
from tpf_jit.tuning_db import TuningStore

CONFIGS = tuple(ToyConfig(tile, stages) for tile in (16, 32, 64, 128) for stages in range(1, 9))
HERE = Path(__file__).parent

SWEEP = """
import sys
from tune_fakes import H200, ToyBackend, ToyShape, ToyTimer, install, options
from test_tune_processes import CONFIGS
from tpf_jit.tune import tune
ToyBackend.compile_s = float(sys.argv[1])
template = install(CONFIGS)
result = tune(ToyShape(), progress=False, options=options(template, ToyTimer(noise=0.001)))
print(result.new_trials, result.best.trial_id, sep=";", flush=True)
"""

DISPATCH = """
import time
from tune_fakes import H200, ToyShape, install
from test_tune_processes import CONFIGS
from tpf_jit.device import Device
from tpf_jit.resolve import Dispatcher
import os
install(CONFIGS)
facts = dict(H200, compute_capability=(9, 0))
seen, end = [], time.monotonic() + 60
while time.monotonic() < end:
    dispatcher = Dispatcher(os.environ["TPF_JIT_DB"], shipped=False, device=Device(**facts))
    answer = dispatcher.resolve("toy", "forward", ToyShape())
    if not seen or seen[-1] != answer.source:
        seen.append(answer.source)
    if answer.source == "tuned" and (answer.config.tile, answer.config.stages) == (64, 3):
        break
print(*seen, sep=",", flush=True)
"""


def start(script: str, *arguments: str) -> subprocess.Popen:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def search_rows() -> list:
    with TuningStore() as store:
        return [row for row in store.trials() if row.grade == "search"]


def finish(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "Traceback" not in error and "Warning" not in error, error
    return out.strip()


def assert_nothing_lost_or_doubled() -> None:
    tried = sorted(canonical_json(row.config) for row in search_rows())
    assert tried == sorted(canonical_json(config_to_dict(config)) for config in CONFIGS)
    with TuningStore() as store:
        assert store.verify() == []


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_in_the_middle_and_resumed(private_state, seed):
    chance = random.Random(seed)
    known = 0
    for kill in range(2):
        process = start(SWEEP, "0.02")
        wanted, end = known + chance.randint(2, 8), time.monotonic() + 60
        while len(search_rows()) < wanted and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the sweep ended before it could be killed"
        before, known = known, len(search_rows())
        assert known > before, f"kill {kill} lost what was measured"
    begin = time.monotonic()
    result = tune(ToyShape(), progress=False, options=options(install(CONFIGS), ToyTimer()))
    assert result.new_trials == len(CONFIGS) - known
    assert result.best_config == config_to_dict(ToyConfig(64, 3))
    assert_nothing_lost_or_doubled()
    # The leases of the killed processes are taken over, not waited for (they last 120 s).
    assert time.monotonic() - begin < 30


def test_eight_processes_tune_and_dispatch_at_once(private_state):
    install(CONFIGS)
    tuners = [start(SWEEP, "0.02") for _ in range(6)]
    dispatchers = [start(DISPATCH) for _ in range(2)]
    results = [finish(process).split(";") for process in tuners]
    answers = [finish(process).split(",") for process in dispatchers]
    assert sum(int(new) for new, _ in results) == len(CONFIGS)
    assert len({winner for _, winner in results}) == 1, "the processes do not agree on the winner"
    assert all(answer[-1] == "tuned" for answer in answers)
    assert_nothing_lost_or_doubled()
    with TuningStore() as store:
        finals = [row for row in store.trials() if row.grade == "final"]
        assert store.leases() == []
    # One process ran the shoot-out: of the eight best by time, and of those that are among the eight by relative score only.
    assert len({row.session for row in finals}) == 1
    assert len({canonical_json(row.config) for row in finals}) == len(finals) and 8 <= len(finals) <= 16


def test_the_lease_of_a_dead_process_is_free_and_that_of_a_living_one_is_not():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = f"{ledger._identity(process.pid)}@session"
    assert ledger._alive(owner)
    process.kill()
    end = time.monotonic() + 10
    while ledger._alive(owner) and time.monotonic() < end:
        time.sleep(0.01)
    assert not ledger._alive(owner), "a killed process that its parent has not waited for counts as alive"
    process.wait()
    process.stdin.close()
    assert not ledger._alive(owner)
    # Another machine's or container's process cannot be judged from here, nor an owner in another format.
    assert ledger._alive("0" * 36 + owner[36:]) and ledger._alive("somebody")
    assert ledger._alive(f"{ledger._identity(os.getpid())}@session")
    # The same number, but a process that started at another time.
    assert not ledger._alive(f"{ledger._identity(os.getpid())}9@session")
