"""A sweep over a Ray cluster: one actor for each GPU, cells as tasks. Needs the extra ``tpf_jit[ray]``.

Actors of one node share a database in a private folder of that node's local disk; each starts from the caller's rows, so what
was measured before is not measured again. When a cell is done its rows come home as the lines of an export and are united by
content hash into the caller's database, the only thing that outlives the run. An actor that is lost costs the candidate in
flight, a node at most the cells in work on it: they are given to other actors, with the rows that are known. An actor that
cannot start, or whose node cannot keep its database, is given up, and the others do its part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpf_jit.errors import DatabaseError, InvalidInput, MeasurementFailed, TpfError
from tpf_jit.tune.cells import Cell, shard, share_s
from tpf_jit.tune.many import Limits, Runner
from tpf_jit.tune.session import TuneOptions
from tpf_jit.tune.summary import CellReport, Summary, united
from tpf_jit.tuning_db import merge

ATTEMPTS = 4
"""Times a cell is begun before it is given up: its actors were lost or its GPU was."""
START_S = 600.0
"""Longest wait for a first or another GPU while nothing runs."""
LOST = "lost"
"""State of a cell whose actor cannot measure any more."""
CLOSE_S = 60.0
"""Longest wait for the nodes to remove what a run has left there; on busy cores compile workers outlive a killed actor."""
FOLLOWING = 8
"""Cells an actor is told of ahead, so that its workers compile for them."""

_log = logging.getLogger("tpf_jit")


@dataclass
class _Member:
    """An actor, what it does, and what it is to do next."""

    actor: Any
    queue: list[Cell]
    future: Any = None
    cell: Cell | None = None
    ready: bool = False


def sweep_ray(
    cells: Sequence[Cell],
    address: str | None = None,
    store: Any = None,
    options: TuneOptions | None = None,
    limits: Limits | None = None,
    on_cell: Callable[[CellReport], None] | None = None,
) -> Summary:
    """Tune cells on every GPU of a Ray cluster, and bring the rows home.

    Args:
        cells: what to tune (`cells.plan`).
        address: of the cluster, as `ray.init` takes it; ``auto`` for the one this machine belongs to, ``local`` for one that is
            started here and ended afterwards; None for the one this process is connected to, or else as ``local``.
            Nodes of a running cluster need this package.
        store: path of the caller's tuning database; the user's when left out.
        options: see `TuneOptions`; must be picklable. `workers` are those of each actor: by default its share of the node's CPUs.
        limits: when to stop.
        on_cell: told about every cell when its rows are home.

    Returns:
        What became of every cell. Ctrl-C ends the sweep; the rows there are come home (`Summary.interrupted`).

    Raises:
        InvalidInput: Ray is not installed.
        MeasurementFailed: the cluster cannot be reached or has no GPU to give, or no actor is left that could measure.
        DatabaseError: the caller's database cannot be read or written, or that of no node.
            Whatever is raised, the rows that are there have come home as far as they can.
    """
    ray = _ray()
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        _connect(ray, address, stack)
        from tpf_jit.tuning_db.store import TuningStore

        store = stack.enter_context(TuningStore(store))
        drive = _Drive(ray, store, options or TuneOptions(), limits or Limits(), on_cell)
        stack.callback(drive.close)
        try:
            drive.run(list(cells))
        except KeyboardInterrupt:
            drive.interrupted = True
            drive.bring()
        except BaseException:
            with contextlib.suppress(TpfError):  # the error at hand is the one to be told
                drive.bring()
            raise
        summaries = drive.parts + drive.leave()
        return united(
            [cell.key for cell in cells],
            summaries,
            time.monotonic() - begin,
            interrupted=drive.interrupted,
            restarts=drive.restarts,
        )


class _Drive:
    """The caller's side: which actor tunes which cell, and what to do about those that are lost."""

    def __init__(self, ray: Any, store: Any, options: TuneOptions, limits: Limits, on_cell: Any) -> None:
        self.parts: list[Summary] = []
        self.interrupted = False
        self.restarts = 0
        self._ray = ray
        self._store = store
        self._limits = limits
        self._on_cell = on_cell
        self._begin = time.monotonic()
        self._attempts: Counter[str] = Counter()
        total = ray.cluster_resources()
        self._gpus = int(total.get("GPU", 0))
        if self._gpus < 1:
            raise MeasurementFailed("the Ray cluster has no GPU; start its nodes with GPUs visible, or `ray start --num-gpus=N`")
        cpus = max(1, int(total.get("CPU", 1)) // self._gpus)
        options = replace(options, workers=options.workers or max(1, cpus - 1), make_pool=options.make_pool)
        # Rows by reference: every node fetches them once.
        self._rows = ray.put(_lines(_content(store)))
        self._run = secrets.token_hex(8)
        self._arguments = (self._run, options, limits.max_trials)
        # Two threads: one measures, the other hands out rows meanwhile.
        self._class = ray.remote(num_gpus=1, num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=2)(_Actor)
        self._members: list[_Member] = []
        self._started = False

    def run(self, cells: list[Cell]) -> None:
        """All cells, until they are done, given up, or out of time."""
        count = min(self._gpus, len(cells))
        for number in range(count):
            self._join(shard(cells, f"{number + 1}/{count}"))
        waiting_since = time.monotonic()
        while self._give():
            futures = [member.future for member in self._members if member.future is not None]
            done, _ = self._ray.wait(futures, num_returns=1, timeout=1.0)
            if done or any(member.cell for member in self._members):
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since > START_S:
                raise MeasurementFailed(f"the Ray cluster gave no GPU within {START_S:g} s; `ray status` shows what it waits for")
            for member in [each for each in self._members if each.future in done]:
                self._take(member)

    def bring(self, members: Sequence[_Member] | None = None) -> None:
        """Rows of the cells in work, or of those that these members work on, as far as they are."""
        members = self._members if members is None else members
        asked = [member.actor.rows.remote(member.cell.key) for member in members if member.cell is not None]
        for future in asked:
            with contextlib.suppress(self._ray.exceptions.RayError):
                _import(self._store, self._ray.get(future, timeout=30))

    def leave(self) -> list[Summary]:
        """Let the actors end in order, and hear what they did."""
        futures = [member.actor.leave.remote() for member in self._members if member.ready and member.cell is None]
        found = []
        for future in futures:
            with contextlib.suppress(Exception):
                found.append(Summary.from_dict(self._ray.get(future, timeout=30)))
        return found

    def close(self) -> None:
        """End all actors and remove the run's folder on every node, those included whose actors are lost."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for member in self._members:
            with contextlib.suppress(Exception):
                self._ray.kill(member.actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove = self._ray.remote(num_cpus=0, max_retries=0)(_remove_folder)
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
            there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
            asked = [remove.options(scheduling_strategy=each).remote(self._run) for each in there]
            self._ray.wait(asked, num_returns=len(asked), timeout=CLOSE_S)
        # This node's again, last: where the cores are busy, Ray may start no worker for the task in time.
        _remove_folder(self._run)

    def _join(self, queue: list[Cell]) -> None:
        actor = self._class.remote(*self._arguments, self._rows)
        self._members.append(_Member(actor, queue, actor.hello.remote()))

    def _give(self) -> bool:
        """A cell for every actor that has none: of its own part, or the last one of the longest part. False: all is done."""
        for member in self._members:
            if not member.ready or member.future is not None:
                continue
            left_s = None if self._limits.budget_s is None else self._limits.budget_s - (time.monotonic() - self._begin)
            if left_s is not None and left_s <= 0:
                for each in self._members:
                    each.queue.clear()
                break
            if not member.queue:
                longest = max(self._members, key=lambda each: len(each.queue))
                if not longest.queue:
                    continue
                member.queue.append(longest.queue.pop())
            waiting = sum(len(each.queue) for each in self._members)
            member.cell = member.queue.pop(0)
            key = member.cell.key
            known = _lines(_content(self._store, key)) if self._attempts[key] else b""
            self._attempts[key] += 1
            budget_s = share_s(left_s, waiting, len(self._members))
            member.future = member.actor.run.remote(member.cell, budget_s, member.queue[:FOLLOWING], known)
        return any(member.cell is not None or member.queue for member in self._members)

    def _take(self, member: _Member) -> None:
        """What an actor answered, or that it is lost."""
        future, member.future = member.future, None
        try:
            answer = self._ray.get(future)
        except self._ray.exceptions.RayTaskError as error:
            self.bring([member])
            self._lost(member, error.cause if isinstance(error.cause, TpfError) else error)
        except self._ray.exceptions.RayError as error:
            self._lost(member, error)
        else:
            member.ready = self._started = True
            if member.cell is None:
                return
            report, lines = answer
            _import(self._store, lines)
            if report["state"] == LOST:
                self._lost(member, MeasurementFailed(report["detail"]))
            else:
                member.cell = None
                self._report(CellReport(**report))

    def _lost(self, member: _Member, error: Exception) -> None:
        """Replace an actor, or give it up where another would not do better; its cells are for whoever is free first."""
        self._members.remove(member)
        with contextlib.suppress(Exception):
            self._ray.kill(member.actor, no_restart=True)
        if member.cell is not None:
            key = member.cell.key
            if self._attempts[key] < ATTEMPTS:
                member.queue.insert(0, member.cell)
            else:
                self._report(CellReport(key, "failed", detail=f"given up after {ATTEMPTS} attempts: {error}"[:500]))
        if member.ready and not isinstance(error, DatabaseError):
            self.restarts += 1
            # Even without cells of its own left, it can help; it may take long to come, so others may take its cells.
            self._join(member.queue)
            return
        # Another would not come up either: no kernels for its GPU, no place for its database.
        if not self._started or (member.queue and not self._members):
            raise _as_ours(error)
        _log.warning("an actor is given up, the other %d go on: %s", len(self._members), error)
        if member.queue:
            min(self._members, key=lambda each: len(each.queue)).queue.extend(member.queue)

    def _report(self, report: CellReport) -> None:
        self.parts.append(Summary((report,)))
        if self._on_cell is not None:
            self._on_cell(report)


class _Actor:
    """The GPU's side: one process of the cluster with one GPU."""

    def __init__(self, run: str, options: TuneOptions, max_trials: int | None, rows: bytes) -> None:
        from tpf_jit.cache import ObjectStore
        from tpf_jit.object_records import DatabaseRecords

        self._folder = _private_folder(run)
        path = self._folder / "tuning.db"
        if options.objects is None:
            # Not the user's: homes are often shared by all nodes over a network.
            options = replace(options, objects=ObjectStore(self._folder / "objects", DatabaseRecords(path)))
        self._runner = Runner(path, options, max_trials=max_trials, progress=False)
        self._runner.__enter__()
        _import(self._runner.session.store, rows)

    def hello(self) -> None:
        """Answers when the actor is up."""

    def run(self, cell: Cell, budget_s: float | None, following: list[Cell], known: bytes) -> tuple[dict[str, Any], bytes]:
        """(report, exported rows) of a cell, of which the rows `known` are there; LOST when this process can measure no more."""
        if known:
            _import(self._runner.session.store, known)
        try:
            report = self._runner.run(cell, budget_s, following)
        except MeasurementFailed as error:
            report = CellReport(cell.key, LOST, detail=str(error))
        return dict(report.__dict__), self.rows(cell.key)

    def rows(self, cell: str) -> bytes:
        """Exported rows of a cell, as far as they are."""
        return _lines(_content(self._runner.session.store, cell))

    def leave(self) -> dict[str, Any]:
        """Close the database; the account of this actor's time."""
        summary = self._runner.summary([])
        self._runner.__exit__(None, None, None)
        return summary.to_dict()


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise InvalidInput("a sweep over a Ray cluster needs Ray, which is not installed: pip install 'tpf_jit[ray]'") from error
    return ray


def _connect(ray: Any, address: str | None, stack: contextlib.ExitStack) -> None:
    """Connect unless this process is connected already; what was begun here ends with `stack`."""
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "logging_level": "ERROR"}
    if address in (None, "local"):
        # The actors run what this process runs, installed or not.
        environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        options |= {"address": "local", "runtime_env": environment}
    else:
        del options["include_dashboard"]
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MeasurementFailed(f"the Ray cluster at {address!r} cannot be reached: {error}") from error
    stack.callback(ray.shutdown)


def _folder(run: str) -> Path:
    return Path(tempfile.gettempdir()) / f"tpf_jit-ray-{os.getuid()}-{run}"


def _remove_folder(run: str) -> None:
    """Remove this run's folder on the node where this is called; an actor that is being killed may make and fill it until it is
    dead, so it must stay away for some seconds."""
    now = seen = time.monotonic()
    end = now + CLOSE_S / 2
    while now < end and now < seen + 3.0:
        if (folder := _folder(run)).exists():
            shutil.rmtree(folder, ignore_errors=True)
            seen = now
        time.sleep(0.05)
        now = time.monotonic()


def _private_folder(run: str) -> Path:
    """This run's folder on a node's local disk, shared by the actors there. Refused if somebody else has made it."""
    folder = _folder(run)
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise DatabaseError(f"{folder} is not a private folder of this user; set TMPDIR to another place on the nodes")
    return folder


def _content(store: Any, cell: str | None = None) -> merge.Content:
    """Rows of one cell, or of all, with the kernels they name."""
    trials = {row.id: row for row in store.trials(cell=cell)}
    named = {row.kernel_key for row in trials.values()}
    kernels = {kernel["key"]: merge.portable_kernel(kernel) for kernel in store.kernels() if kernel["key"] in named}
    return merge.Content(trials, kernels)


def _lines(content: merge.Content) -> bytes:
    return "\n".join(content.lines()).encode()


def _import(store: Any, lines: bytes) -> None:
    """Unite exported rows with a database; each is checked against its content hash."""
    with tempfile.TemporaryDirectory(prefix="tpf_jit_rows_") as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_bytes(lines)
        store.import_(file)


def _as_ours(error: Exception) -> TpfError:
    if isinstance(error, TpfError):
        return error
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, TpfError) else MeasurementFailed(f"no actor starts on the Ray cluster: {error}")
