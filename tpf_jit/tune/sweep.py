"""The sweep of one cell: candidates in order, compiled ahead, checked and measured one by one, finalists shot out.

One cell is one operation, direction and shape on one device model. The loop keeps the compile workers busy and measures
whatever is ready; each outcome is a row in the database before the next candidate is touched, so a sweep can be killed at any
point and goes on from there. Several processes may tune one cell on one database: leases keep them off each other's
candidates, and only one of them runs the shoot-out.

Which configuration wins is not decided here: it is derived from the rows (`tuning_db.winner`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import MeasurementFailed, TpfError
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import order
from tpf_jit.tune.build import Builder, Built
from tpf_jit.tune.ledger import Candidate, Ledger
from tpf_jit.tune.measure import Job, Measurer, Outcome
from tpf_jit.tune.report import Progress
from tpf_jit.tuning_db import merge, reader
from tpf_jit.tuning_db.rows import config_order

SHOOTOUT = "shoot-out"
_POLL_S = 0.2

_log = logging.getLogger("tpf_jit")


@dataclass(frozen=True)
class Limits:
    """When to stop. The shoot-out comes on top of the budget: a few seconds."""

    budget_s: float | None = None
    """Wall time of the search in seconds."""
    max_trials: int | None = None
    """Configurations this run may add."""
    finalists: int = 8
    in_flight: int = 8
    """Candidates compiled ahead of the measurement."""


class Sweep:
    """Search and shoot-out of one cell with one template.

    Args:
        ledger: rows and leases of the cell.
        template: the template.
        shape: the problem.
        source: what to try next (`order.make_source`).
        builder: compiles.
        measurer: checks and times.
        limits: when to stop.
        progress: told after every candidate.
    """

    def __init__(
        self,
        ledger: Ledger,
        template: Any,
        shape: Any,
        source: order.Source,
        builder: Builder,
        measurer: Measurer,
        limits: Limits,
        progress: Progress | None = None,
    ) -> None:
        self.idle_s = 0.0
        self.stopped = "complete"
        self._ledger = ledger
        self._template = template
        self._shape = shape
        self._source = source
        self._builder = builder
        self._measurer = measurer
        self._limits = limits
        self._progress = progress or Progress("", 0, enabled=False)
        self._begin = time.monotonic()
        self._pending: deque[tuple[Candidate, Future]] = deque()
        self._foreign: list[Candidate] = []
        self._added = 0
        self._done = 0
        self._candidates = [self._candidate(config) for config in template.space(shape)]
        self._scores: dict[str, float] = {}
        self._jobs: dict[str, Job | None] = {}

    def run(self) -> None:
        """Search, then shoot out. Raises MeasurementFailed when the device is lost; what was measured is kept."""
        try:
            self._recall()
            self._search()
            self._final()
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            for candidate, future in self._pending:
                self._builder.drop(candidate.spec, future)
            self._source.close()
            self._ledger.release_all()

    def _recall(self) -> None:
        """Learn what the database already knows of this cell."""
        for candidate in self._candidates:
            row = self._ledger.find(candidate)
            if row is not None:
                self._learn(candidate, row)

    def _search(self) -> None:
        while True:
            self._fill()
            ready = self._next_ready()
            if ready is not None:
                self._try(*ready)
            elif not self._foreign or self._stopping():
                return
            elif not self._take_over():
                self._pause()

    def _fill(self) -> None:
        while len(self._pending) < self._limits.in_flight and not self._stopping():
            config = self._source.ask()
            if config is None:
                if self._source.total > self._done + len(self._pending) + len(self._foreign):
                    self.stopped = "converged"
                return
            candidate = self._candidate(config)
            if not self._start(candidate):
                self._foreign.append(candidate)

    def _start(self, candidate: Candidate) -> bool:
        """Lease and submit a candidate, or learn its row if there is one by now; False while another process holds it."""
        if not self._ledger.claim(candidate.json):
            return False
        # Read after the lease was won: its former holder wrote the row before giving the lease back.
        self._ledger.refresh()
        row = self._ledger.find(candidate)
        if row is not None:
            self._ledger.release(candidate.json)
            self._learn(candidate, row)
        else:
            self._pending.append((candidate, self._builder.submit(candidate.spec)))
        return True

    def _take_over(self) -> bool:
        """Deal with candidates that other processes held: learn their rows, or start those that were abandoned."""
        self._ledger.refresh()
        waiting, self._foreign = self._foreign, []
        for candidate in waiting:
            row = self._ledger.find(candidate)
            if row is not None:
                self._learn(candidate, row)
            elif len(self._pending) >= self._limits.in_flight or not self._start(candidate):
                self._foreign.append(candidate)
        return len(self._foreign) < len(waiting)

    def _stopping(self) -> bool:
        limits = self._limits
        if limits.budget_s is not None and time.monotonic() - self._begin > limits.budget_s:
            self.stopped = "budget"
            # What is being compiled would only run over the budget.
            while self._pending:
                candidate, future = self._pending.pop()
                self._builder.drop(candidate.spec, future)
                self._ledger.release(candidate.json)
            return True
        if limits.max_trials is not None and self._added + len(self._pending) >= limits.max_trials:
            if self._added >= limits.max_trials:
                self.stopped = "trials"
            return True
        return False

    def _next_ready(self) -> tuple[Candidate, Future] | None:
        """The first finished candidate in submission order; waits for one. None when nothing is in flight."""
        while self._pending:
            self._ledger.renew()
            self._builder.top_up()
            for position, (_, future) in enumerate(self._pending):
                if future.done():
                    found = self._pending[position]
                    del self._pending[position]
                    return found
            start = time.monotonic()
            wait([future for _, future in self._pending], timeout=1.0, return_when=FIRST_COMPLETED)
            self.idle_s += time.monotonic() - start
            if self._stopping() and not self._pending:
                return None
        return None

    def _try(self, candidate: Candidate, future: Future) -> None:
        """Measure one candidate and write the row; the lease ends after the row is there."""
        built: Built | None = None
        try:
            built = self._builder.finish(candidate.spec, future)
        except Exception as error:
            outcome = _compile_failure(error)
        else:
            outcome = self._measure(candidate, built)
        row = self._ledger.record(candidate, outcome, built.cubin_sha256 if built else "")
        self._ledger.release(candidate.json)
        self._added += 1
        best = min(self._scores.values(), default=None)
        if built is not None:
            self._jobs[candidate.json] = _job(candidate, built)
        # Relative to the incumbent timed beside it, drift of the clocks cancels out.
        score = outcome.relative * best if outcome.relative is not None and best is not None else None
        self._learn(candidate, row, score)
        if outcome.fatal:
            raise _lost(candidate, outcome)

    def _measure(self, candidate: Candidate, built: Built) -> Outcome:
        job = _job(candidate, built)
        twin = self._ledger.same_code(built.cubin_sha256)
        if twin is not None:
            # The same device code is timed once. Its host side may differ, so the result is still checked.
            outcome = self._measurer.verify(job)
            if outcome.status == "ok":
                outcome.status = twin.status
                outcome.samples_us = list(twin.samples_us)
                outcome.detail += f"; same device code as trial {twin.id[:12]}, whose samples these are"
            return outcome
        return self._measurer.measure(job, min(self._scores.values(), default=None), self._incumbent())

    def _incumbent(self) -> Job | None:
        """The best candidate so far, loadable; None when there is none or its object is gone and does not compile again."""
        if not self._scores:
            return None
        best = min(self._scores, key=self._scores.__getitem__)
        if best not in self._jobs:
            candidate = next(each for each in self._candidates if each.json == best)
            try:
                self._jobs[best] = _job(candidate, self._builder.get(candidate.spec))
            except Exception as error:
                _log.info("the best configuration so far cannot be timed again: %s", error)
                self._jobs[best] = None
        return self._jobs[best]

    def _learn(self, candidate: Candidate, row: Any, score: float | None = None) -> None:
        us = (score or row.median_us) if row.status == "ok" else None
        if us is not None:
            self._scores[candidate.json] = us
        self._source.tell(candidate.config, us)
        self._done += 1
        best = min(self._scores.values(), default=None)
        self._progress.update(self._done, f"best {best:.1f} us" if best is not None else "")

    def _final(self) -> None:
        """The shoot-out of the best, by one process at a time; skipped when its rows are there already."""
        if not self._finalists():
            return
        while not self._ledger.claim(SHOOTOUT):
            self._pause()
        self._ledger.refresh()
        # By the rows alone, so that every process asks the same question.
        if all(self._ledger.find(candidate, "final") for candidate in self._finalists()):
            return
        # Where scores relative to the incumbent say otherwise, those by score take part as well.
        finalists = list(dict.fromkeys([*self._finalists(), *self._finalists(self._scores)]))
        jobs = []
        built: dict[str, Built] = {}
        for candidate in finalists:
            try:
                built[candidate.key] = self._builder.get(candidate.spec)
            except Exception as error:
                _log.warning("a finalist cannot be compiled again and is left out: %s", error)
                continue
            jobs.append(_job(candidate, built[candidate.key]))
            self._ledger.renew()
        outcomes = self._measurer.shootout(jobs)
        measured = [(candidate, outcomes[candidate.key]) for candidate in finalists if candidate.key in outcomes]
        for candidate, outcome in measured:
            self._ledger.record(candidate, outcome, built[candidate.key].cubin_sha256, "final")
        for candidate, outcome in measured:
            if outcome.fatal:
                raise _lost(candidate, outcome)

    def _finalists(self, scores: Mapping[str, float] | None = None) -> list[Candidate]:
        """The fastest by their search rows, or by `scores`; of equal device code the first in canonical order."""
        found: dict[str, tuple[float, Any, Candidate]] = {}
        for candidate in self._candidates:
            row = self._ledger.find(candidate)
            final = self._ledger.find(candidate, "final")
            if row is None or row.status != "ok" or (final is not None and final.status != "ok"):
                continue
            code = row.cubin_sha256 or candidate.key
            rank = config_order(row.config)
            us = row.median_us if scores is None else scores.get(candidate.json, row.median_us)
            if code not in found or rank < found[code][1]:
                found[code] = (us, rank, candidate)
        ranked = sorted(found.values(), key=lambda entry: entry[:2])
        return [candidate for _, _, candidate in ranked[: self._limits.finalists]]

    def _candidate(self, config: Any) -> Candidate:
        return Candidate(config, order.config_json(config), KernelSpec.make(self._template, self._shape, config))

    def _pause(self) -> None:
        self._ledger.renew()
        time.sleep(_POLL_S)
        self.idle_s += _POLL_S


def _job(candidate: Candidate, built: Built) -> Job:
    return Job(candidate.key, candidate.config, built.binary, candidate.spec.symbol, built.kind)


def _compile_failure(error: Exception) -> Outcome:
    timed_out = isinstance(error, TimeoutError) or "took longer than" in str(error)
    return Outcome("compile_timeout" if timed_out else "compile_error", f"{error}"[-2000:])


def _lost(candidate: Candidate, outcome: Outcome) -> MeasurementFailed:
    return MeasurementFailed(
        f"the GPU takes no more work from this process after {config_to_dict(candidate.config)}: {outcome.detail}. "
        "The trial is recorded as launch_error; run the same command again, in a new process, and the sweep goes on after it."
    )


def neighbour_rows(store: Any, template: Any, cell: str) -> list[Any]:
    """Rows that may order a sweep of `cell`: the template's, of the database and those that ship, but the cell's own current."""
    rows = {row.id: row for row in store.trials(template=template.name)} | shipped_rows(template)
    current = template.source_hash()
    return [row for row in rows.values() if not (row.cell == cell and row.source_hash == current)]


def shipped_rows(template: Any) -> dict[str, Any]:
    """The template's rows in the tables that ship, by id."""
    rows: dict[str, Any] = {}
    for path in reader.shipped_files():
        try:
            rows |= _by_template(path, path.stat().st_mtime_ns).get(template.name, {})
        except (TpfError, OSError) as error:
            _log.info("%s is left out of the order: %s", path.name, error)
    return rows


@lru_cache(maxsize=8)
def _by_template(path: Path, modified_ns: int) -> dict[str, dict[str, Any]]:
    """Rows of a table that ships, by template and id. Kept: every cell of a sweep asks, and meanwhile the GPU waits."""
    found: dict[str, dict[str, Any]] = {}
    for name, row in merge.read_lines(path).trials.items():
        found.setdefault(row.template, {})[name] = row
    return found


def ordered_space(template: Any, shape: Any, direction: str, model: str, rows: Sequence[Any]) -> tuple[list[Any], str]:
    """(all legal configurations in the order to try them, where that order came from)."""
    configs = list(template.space(shape))
    analytic = order.analytic_order(template, shape, configs)
    near = order.around(shape, direction, model, rows)
    if not near:
        return analytic, "analytic"
    mixed = " mixed with the analytic order" if near[0].distance >= order.FAR else ""
    names = ", ".join(f"{each.cell} on {each.device} (distance {each.distance:.2f})" for each in near)
    return order.plan(configs, analytic, *near), f"ranking of {names}{mixed}"
