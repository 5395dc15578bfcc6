"""One cell searched by several processes through a study in a real PostgreSQL, each with a tuning database of its own."""

from __future__ import annotations

import json
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import many_fakes
import pytest
from many_fakes import CONFIGS, assert_all_tried_once, cells, search_rows, travelling
from tune_fakes import ToyConfig, ToyShape

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.templates.base import canonical_json
from tpf_jit.tune import order, shared_study
from tpf_jit.tune.many import Limits, sweep_many
from tpf_jit.tuning_db import TuningStore

HERE = Path(__file__).parent
CELL = cells([ToyShape(64, 8)])


@pytest.fixture(autouse=True)
def toy(private_state, monkeypatch):
    many_fakes.private_registry(monkeypatch)


def postgres_programs() -> Path | None:
    """Folder of initdb and pg_ctl; distributions keep them out of the path."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True) + sorted(Path("/usr").glob("pgsql-*/bin"))
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a private PostgreSQL server, which ends with the tests. It refuses to run as root, so root becomes somebody else."""
    pytest.importorskip("psycopg", reason="needs a PostgreSQL driver: pip install 'psycopg[binary]'")
    programs = postgres_programs()
    if programs is None:
        pytest.skip("needs PostgreSQL (Debian, Ubuntu: apt install postgresql)")
    user: dict[str, object] = {}
    folder = Path(tempfile.mkdtemp(prefix="tpf_jit_pg_"))
    if os.getuid() == 0:
        try:
            entry = pwd.getpwnam("postgres")
        except KeyError:
            entry = pwd.getpwnam("nobody")
        user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c timezone=UTC"
    log = ["-l", str(folder / "log")]

    def call(*command: object) -> None:
        done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, timeout=60, **user)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)

    try:
        try:
            call(programs / "initdb", "-D", data, "-U", "tuner", "-A", "trust", "--no-sync")
            call(programs / "pg_ctl", "-D", data, "-w", "-o", settings, *log, "start")
        except (RuntimeError, OSError) as error:
            pytest.skip(f"PostgreSQL does not start here: {str(error)[:300]}")
        yield f"postgresql://tuner@127.0.0.1:{port}/postgres"
        call(programs / "pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


WORKER = """
import sys, time
from dataclasses import replace
from pathlib import Path
import many_fakes as fakes
from tune_fakes import ToyShape
from tpf_jit.tune.many import sweep_many
fakes.register()
url, path, crop, together = sys.argv[1:]
Path(path + ".ready").touch()
while together and not (Path(path).parent / "go").exists():
    time.sleep(0.01)
options = replace(fakes.travelling(sample_s=0.002), storage=url)
summary = sweep_many(fakes.cells([ToyShape(int(crop), 8)]), path, options, progress=False)
print(summary.new_trials)
"""


def start(url: str, path: Path, crop: int, together: bool = False) -> subprocess.Popen:
    """A worker; `together`: it begins when its folder has a file named "go"."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    arguments = [url, str(path), str(crop), "together" if together else ""]
    return subprocess.Popen([sys.executable, "-c", WORKER, *arguments], env=environment, **pipes)


def finish(process: subprocess.Popen) -> int:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return int(out)


def test_four_processes_with_databases_of_their_own_search_one_cell(server, tmp_path):
    """They begin at once, on a server without tables."""
    paths = [tmp_path / f"{number}.db" for number in range(4)]
    processes = [start(server, path, 64, together=True) for path in paths]
    end = time.monotonic() + 60.0
    while not all(Path(f"{path}.ready").exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    counts = [finish(process) for process in processes]
    assert sum(counts) == len(CONFIGS) and sum(count > 0 for count in counts) >= 2
    random.Random(3).shuffle(paths)
    with TuningStore(tmp_path / "all.db") as store:
        for path in paths:
            store.merge(path)
    assert_all_tried_once(CELL, tmp_path / "all.db")


def test_what_a_killed_process_had_is_measured_by_another(server, tmp_path):
    planned = cells([ToyShape(128, 8)])
    process = start(server, tmp_path / "killed.db", 128)
    end = time.monotonic() + 60
    while time.monotonic() < end and not ((tmp_path / "killed.db").exists() and len(search_rows(tmp_path / "killed.db")) >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    known = len(search_rows(tmp_path / "killed.db"))
    assert 3 <= known < len(CONFIGS)
    # Long enough for a living process to be taken for one; what is left then is what the dead one had asked for.
    options = replace(travelling(), storage=server)
    first = sweep_many(planned, tmp_path / "other.db", options)
    assert known + first.new_trials < len(CONFIGS)
    second = sweep_many(planned, tmp_path / "other.db", replace(options, lease_s=0.01))
    with TuningStore(tmp_path / "other.db") as store:
        store.merge(tmp_path / "killed.db")
    assert second.new_trials > 0
    # The candidate in flight may have got its row, but not its end in the study, before the process was killed.
    tried = Counter(canonical_json(row.config) for row in search_rows(tmp_path / "other.db"))
    assert len(tried) == len(CONFIGS) and sum(tried.values()) <= len(CONFIGS) + 1


def test_a_limit_gives_back_what_was_asked_for_and_not_measured(server, tmp_path):
    planned = cells([ToyShape(192, 8)])
    options = replace(travelling(), storage=server)
    assert sweep_many(planned, tmp_path / "one.db", options, Limits(budget_s=0.0)).new_trials == 0
    assert sweep_many(planned, tmp_path / "one.db", options, Limits(max_trials=5)).new_trials == 5
    assert sweep_many(planned, tmp_path / "two.db", options).new_trials == len(CONFIGS) - 5
    # What one machine measured before it joined is not measured by the others.
    planned = cells([ToyShape(256, 8)])
    sweep_many(planned, tmp_path / "one.db", travelling(), Limits(max_trials=4))
    sweep_many(planned, tmp_path / "one.db", options, Limits(max_trials=1))
    assert sweep_many(planned, tmp_path / "two.db", options).new_trials == len(CONFIGS) - 5


def test_above_the_limit_the_sampler_proposes_and_nothing_is_handed_out_twice(server):
    space = [ToyConfig(tile, stages, twin=twin) for tile in range(16, 128, 16) for stages in range(1, 8) for twin in range(3)]
    storages = [shared_study.open_storage(server) for _ in range(3)]
    sources = [shared_study.SharedSource(each, "large", space, starters=12, seed=seed) for seed, each in enumerate(storages)]
    handed: list[str] = []
    held: list[tuple[object, ToyConfig]] = []
    for turn in range(60):
        source = sources[turn % 3]
        config = source.ask()
        handed.append(order.config_json(config))
        held.append((source, config))
        if len(held) > 6:
            owner, done = held.pop(0)
            owner.tell(done, 100.0 + abs(done.tile - 64) + 10 * abs(done.stages - 3))
    assert len(set(handed)) == 60
    assert handed[:12] == [order.config_json(config) for config in space[:12]]
    beyond = [abs(json.loads(text)["tile"] - 64) for text in handed[40:]]
    everywhere = [abs(config.tile - 64) for config in space]
    assert sum(beyond) / len(beyond) < sum(everywhere) / len(everywhere), "proposals are no better than any"


def test_of_two_that_choose_the_same_the_lower_number_has_it(server):
    space = [ToyConfig(tile) for tile in (16, 32, 64)]
    with closing(shared_study.SharedSource(shared_study.open_storage(server), "collision", space)) as source:
        first, second = source._study.ask(source._axes), source._study.ask(source._axes)
        text = order.config_json(space[0])
        for trial in (second, first):
            trial.set_user_attr(shared_study.BEGAN, time.time())
            trial.set_user_attr(shared_study.CONFIG, text)
        assert source._is_mine(first.number, text) and not source._is_mine(second.number, text)


@pytest.mark.parametrize("url", ["sqlite:///study.db", "tuning.db", "redis://host"])
def test_storages_that_are_no_server(url):
    with pytest.raises(InvalidInput, match="storage: got .*; allowed: postgresql://"):
        shared_study.open_storage(url)


def test_a_server_that_is_not_there():
    pytest.importorskip("psycopg", reason="needs a PostgreSQL driver: pip install 'psycopg[binary]'")
    with pytest.raises(DatabaseError, match="the study's database cannot be reached"):
        shared_study.open_storage("postgresql://tuner@127.0.0.1:1/none")
