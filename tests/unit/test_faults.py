"""Faults during a sweep and around the database, by name. docs/faults.md lists which test covers which fault."""

from __future__ import annotations

import ast
import errno
import os
import random
import re
import signal
import sqlite3
import threading
import time
import warnings
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import pytest
from isolated_fakes import Faults, faulty
from test_tune_processes import CONFIGS, assert_nothing_lost_or_doubled, search_rows, start
from tune_fakes import InlinePool, ToyBackend, ToyConfig, ToyShape, ToyTemplate, ToyTimer, install, options
from tuning_samples import open_folder, shape, trial

from tpf_jit.errors import DatabaseError
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import TuneOptions, ledger, tune
from tpf_jit.tune.isolated import HardLimits, Isolation
from tpf_jit.tuning_db import TuningStore, merge, prune, rows, trust
from tpf_jit.tuning_db.reader import read_layer

ROOT = Path(__file__).resolve().parents[2]
WINNER = config_to_dict(ToyConfig(64, 3))


@pytest.fixture(autouse=True)
def working_device(monkeypatch):
    monkeypatch.setattr(ToyTimer, "dead", False)


class At:
    """A timer that does something once, after so many samples."""

    def __init__(self, calls: int, action) -> None:
        self.calls, self.action = calls, action

    def timer(self) -> ToyTimer:
        outer = self

        class Timer(ToyTimer):
            def sample(self, *arguments, **more):
                if self.calls >= outer.calls and outer.action is not None:
                    action, outer.action = outer.action, None
                    action()
                return super().sample(*arguments, **more)

        return Timer()


def finish_sweep() -> None:
    """The sweep goes on where it stopped and ends as if nothing had happened."""
    result = tune(ToyShape(), progress=False, options=options(install(CONFIGS), ToyTimer()))
    assert result.best_config == WINNER and result.best.grade == "final"
    assert_nothing_lost_or_doubled()


# kill -9


def test_kill_9_of_the_measuring_process_at_any_moment(private_state, tmp_path):
    template, faults, stop = install(CONFIGS), Faults(str(tmp_path)), threading.Event()
    kills = []
    with Isolation(HardLimits(start_s=60, first_s=60, step_s=60)) as isolation:

        def killer() -> None:
            moments, known = random.Random(3), 0
            while not stop.wait(moments.uniform(0.0, 0.1)) and len(kills) < 5:
                # One kill a trial: a second one in a row is held against the candidate.
                child, known_now = isolation._child, len(search_rows())
                if child is not None and known_now > known:
                    kills.append(child.pid)
                    os.kill(child.pid, signal.SIGKILL)
                    known = known_now + 1

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            used = TuneOptions(
                template=template,
                make_measurer=lambda chosen, problem: isolation.measurer(faulty, chosen, problem, faults),
                make_pool=lambda: SlowPool(),
                seed=7,
            )
            result = tune(ToyShape(), progress=False, options=used)
        finally:
            stop.set()
            thread.join()
    assert kills and isolation.started > 1
    assert result.best_config == WINNER and {row.status for row in result.trials} == {"ok"}
    assert_nothing_lost_or_doubled()


class SlowPool(InlinePool):
    """Gives the killer time to strike between trials as well."""

    def submit(self, spec):
        time.sleep(0.05)
        return super().submit(spec)


ISOLATED_SWEEP = """
import sys
from isolated_fakes import Faults, faulty
from test_tune_processes import CONFIGS
from tune_fakes import InlinePool, ToyBackend, ToyShape, install
from tpf_jit.tune import TuneOptions, tune
from tpf_jit.tune.isolated import Isolation
ToyBackend.compile_s = 0.02
with Isolation() as isolation:
    make = lambda template, shape: isolation.measurer(faulty, template, shape, Faults(sys.argv[1]))
    tune(ToyShape(), progress=False, options=TuneOptions(template=install(CONFIGS), make_measurer=make, make_pool=InlinePool))
"""


def test_kill_9_of_the_sweep_takes_its_measuring_process_along(private_state, tmp_path):
    faults = Faults(str(tmp_path))
    process = start(ISOLATED_SWEEP, str(tmp_path))
    end = time.monotonic() + 60
    while len(search_rows()) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    (child,) = set(faults.pids("started"))
    while time.monotonic() < end and Path(f"/proc/{child}").exists():
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
    assert 5 <= len(search_rows()) < len(CONFIGS)
    finish_sweep()


PRUNING = """
import sys
from tpf_jit.tuning_db import TuningStore, trust
with TuningStore(sys.argv[1]) as store:
    print("open", flush=True)
    store.prune(lambda name: trust.Present("9" * 64))
"""


def test_kill_9_while_rows_are_pruned(tmp_path):
    path = tmp_path / "tuning.db"
    with TuningStore(path) as store:
        store.put_trials(
            trial(shape(crop=64 + crop), us=100 + n, source_hash=f"{n}" * 64, grade="final", date=f"2026-12-0{n}T00:00:00Z")
            for crop in range(300)
            for n in (1, 2, 3)
        )
    before = read_layer(path).winners
    moments = random.Random(11)
    for _ in range(4):
        process = start(PRUNING, str(path))
        assert process.stdout.readline().strip() == "open"
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        process.communicate()
        with TuningStore(path) as store:
            assert store.verify() == [] and len(store.trials()) in (300, 900), "all that may go went, or nothing did"
        assert read_layer(path).winners == before
    with TuningStore(path) as store:
        store.prune(lambda name: trust.Present("9" * 64))
        assert len(store.trials()) == 300 and store.verify() == []
    assert read_layer(path).winners == before


# disks and databases


def test_the_disk_fills_up_during_a_sweep(private_state):
    def fill(store: TuningStore) -> None:
        pages = store._file._db.execute("PRAGMA page_count").fetchone()[0]
        store._file._db.execute(f"PRAGMA max_page_count = {pages}")

    with TuningStore() as store:
        timer = At(40, lambda: fill(store)).timer()
        with pytest.raises(DatabaseError, match="disk is full: free space, or name a file on another disk with TPF_JIT_DB"):
            tune(ToyShape(), store=store, progress=False, options=options(install(CONFIGS), timer))
        store._file._db.execute("PRAGMA max_page_count = 1000000")
        assert store.verify() == []
    assert 0 < len(search_rows()) < len(CONFIGS)
    finish_sweep()


def test_the_disk_is_full_while_rows_are_exported(tmp_path, monkeypatch):
    target = tmp_path / "rows.jsonl"
    target.write_text("as it was")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(merge.os, "fsync", full)
    with TuningStore(tmp_path / "tuning.db") as store:
        store.put_trial(trial())
        with pytest.raises(DatabaseError, match="No space left"):
            store.export(target)
    assert target.read_text() == "as it was" and {item.name for item in tmp_path.iterdir()} == {"rows.jsonl", "tuning.db"}


READ_ONLY_SWEEP = """
import os, sys
from pathlib import Path
from tune_fakes import InlinePool, ToyShape, ToyTimer, install, options
from test_tune_processes import CONFIGS
from tpf_jit.cache import ObjectStore
from tpf_jit.errors import DatabaseError
from tpf_jit.tune import tune
from tpf_jit.tuning_db import TuningStore
template, timer, pool = install(CONFIGS), ToyTimer(), InlinePool()
chosen = options(template, timer, pool, objects=ObjectStore())
with TuningStore() as store:
    tune(ToyShape(), store=store, max_trials=1, progress=False, options=chosen)
calls = timer.calls
try:
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
except OSError:
    sys.exit(77)
try:
    tune(ToyShape(), store=Path(sys.argv[1]), progress=False, options=chosen)
except DatabaseError as error:
    print(timer.calls - calls, error)
"""


def test_a_read_only_database_ends_a_sweep_before_anything_is_measured(private_state):
    with open_folder() as folder:
        with TuningStore(folder / "tuning.db") as store:
            store.put_trial(trial())
        (folder / "tuning.db").chmod(0o444)
        folder.chmod(0o555)
        process = start(READ_ONLY_SWEEP, str(folder / "tuning.db"))
        out, err = process.communicate(timeout=60)
    if process.returncode == 77:
        pytest.skip("needs another user id to be denied anything")
    assert process.returncode == 0, err
    assert out.startswith("0 ") and "is read-only" in out and "TPF_JIT_DB" in out, out + err


def test_a_database_that_stays_locked_ends_a_sweep_and_nothing_is_lost(private_state):
    with TuningStore(timeout=0.2) as store, closing(sqlite3.connect(store.path)) as other:
        timer = At(40, lambda: other.execute("BEGIN IMMEDIATE")).timer()
        with pytest.raises(DatabaseError, match="locked by another process for 0.2 s"):
            # Leases that could not be given back end soon: this process lives on, so nobody may take them over before.
            tune(ToyShape(), store=store, progress=False, options=options(install(CONFIGS), timer, lease_s=1.0))
        other.execute("ROLLBACK")
    assert 0 < len(search_rows()) < len(CONFIGS)
    finish_sweep()


def test_a_database_that_is_locked_for_a_moment_is_waited_for(private_state):
    with TuningStore(timeout=30) as store, closing(sqlite3.connect(store.path, check_same_thread=False)) as other:

        def lock() -> None:
            other.execute("BEGIN IMMEDIATE")
            threading.Timer(0.3, other.execute, ("ROLLBACK",)).start()

        result = tune(ToyShape(), store=store, progress=False, options=options(install(CONFIGS), At(40, lock).timer()))
    assert result.best_config == WINNER
    assert_nothing_lost_or_doubled()


def test_a_database_that_is_damaged_during_a_sweep(private_state):
    """Overwritten by something else: the next write finds out, sets the file aside, and the sweep goes on or can be repeated."""
    with TuningStore() as store:
        path = store.path

        def damage() -> None:
            # The journal as well, or SQLite would restore the pages from it.
            for name in (path, path.with_name(path.name + "-wal")):
                size = name.stat().st_size if name.exists() else 0
                with name.open("r+b") as file:
                    file.write(os.urandom(size))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tune(ToyShape(), store=store, progress=False, options=options(install(CONFIGS), At(40, damage).timer()))
            except DatabaseError as error:
                assert "damaged" in str(error) or "disk fails" in str(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finish_sweep()
    assert list(path.parent.glob("user.db.damaged-*")), "what was there is kept"


# clocks


class Clock:
    """The wall clock as an administrator may set it: each reading is an hour before the last one."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def time(self) -> float:
        self.now -= 3600.0
        return self.now

    def utc_now(self) -> str:
        return datetime.fromtimestamp(self.time(), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def backwards(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tpf_jit.tuning_db.store.time.time", clock.time)
    monkeypatch.setattr(ledger, "utc_now", clock.utc_now)
    return clock


def test_a_clock_that_runs_backwards_during_a_sweep(private_state, backwards):
    timer = ToyTimer()
    result = tune(ToyShape(), progress=False, options=options(install(CONFIGS), timer))
    assert result.best_config == WINNER and result.new_trials == len(CONFIGS) and result.elapsed_s >= 0
    assert_nothing_lost_or_doubled()
    dates = [row.date for row in result.trials]
    assert dates == sorted(dates), "later rows are not older"


@pytest.mark.parametrize("source", ["6" * 64, "4" * 64])
def test_a_clock_that_was_set_back_does_not_keep_old_sources_in_force(private_state, backwards, monkeypatch, source):
    """Of equal dates the greater hash would decide: the old sources' is "555...", greater than the second one here."""
    template = install(CONFIGS)
    tune(ToyShape(), progress=False, options=options(template, ToyTimer()))
    monkeypatch.setattr(ToyTemplate, "source_hash", lambda self: source)
    changed = ToyBackend.compile

    def compile_(self, *arguments):
        found = changed(self, *arguments)
        found.resources["cubin_sha256"] = found.resources["cubin_sha256"][::-1]
        return found

    monkeypatch.setattr(ToyBackend, "compile", compile_)
    monkeypatch.setattr(ledger, "utc_now", lambda: "2020-01-01T00:00:00Z")
    result = tune(ToyShape(), progress=False, options=options(template, ToyTimer()))
    assert result.best.source_hash == source
    new = [row for row in result.trials if row.source_hash == source]
    old = [row for row in result.trials if row.source_hash != source]
    assert len({row.date for row in new}) == 1 and new[0].date > max(row.date for row in old)


def test_a_lease_from_before_the_clock_was_set_back_does_not_last_for_ever(tmp_path, monkeypatch):
    now = [2_000_000_000.0]
    monkeypatch.setattr("tpf_jit.tuning_db.store.time.time", lambda: now[0])
    with TuningStore(tmp_path / "tuning.db") as store:
        assert store.claim("cell", "work", "elsewhere", 120)
        now[0] -= 60.0
        assert not store.claim("cell", "work", "me", 120), "a small step back only prolongs it"
        now[0] -= 86400.0
        assert store.claim("cell", "work", "me", 120)


# rows that must not go


@pytest.mark.parametrize("seed", range(30))
def test_pruning_never_changes_a_winner(seed):
    """Random histories: sources, methods, compilers, failures, verdicts, statements."""
    chance = random.Random(seed)
    history = []
    for n in range(60):
        status = chance.choice(["ok"] * 6 + ["wrong", "nondeterministic", "launch_error", "compile_error", "slow", "same_code"])
        source, tile = chance.choice("123"), chance.choice([32, 64, 128])
        history.append(
            trial(
                shape(crop=chance.choice([256, 384])),
                us=chance.uniform(90, 110),
                status=status,
                config={"tile_n": tile, "stages": 2, "crop": 0},
                source_hash=source * 64,
                cubin_sha256=rows.content_hash(f"{tile} {chance.choice([source, 'same'])}"),
                protocol=f"events-{chance.choice([1, 1, 2])}",
                grade=chance.choice(rows.GRADES),
                date=f"2026-12-{n // 3 + 1:02d}T00:00:00Z",
            )
        )
    evidence = [read_evidence(row) for row in history]
    for now in ("1", "3", "4"):
        going = prune.plan(evidence, lambda name, now=now: trust.Present(now * 64))
        kept = [row for row in evidence if row.id not in going]
        assert ranked(kept) == ranked(evidence)
        again = prune.plan(kept, lambda name, now=now: trust.Present(now * 64))
        assert ranked(row for row in kept if row.id not in again) == ranked(evidence)
        current = [row for row in evidence if row.source_hash == now * 64 and row.status == "ok"]
        assert all(going.get(row.id) in (None, prune.PROTOCOL) for row in current)


def read_evidence(row):
    from tpf_jit.tuning_db.reader import evidence

    return evidence(row.id, row)


def ranked(evidence):
    from tpf_jit.tuning_db.winner import rank

    evidence = list(evidence)
    cells = {(row.cell, row.model) for row in evidence}
    found = {pair: rank(row for row in evidence if (row.cell, row.model) == pair) for pair in cells}
    return {pair: winners for pair, winners in found.items() if winners}


# the list


def test_every_test_that_the_list_of_faults_names_exists():
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+/test_\w+\.py)`?((?:[ :,]*`test_\w+`)+)", text)
    assert named and len(re.findall(r"`test_\w+`", text)) == sum(len(re.findall(r"`test_\w+`", tests)) for _, tests in named)
    for path, tests in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing = set(re.findall(r"`(test_\w+)`", tests)) - defined
        assert not missing, f"{path} has no {sorted(missing)}"
