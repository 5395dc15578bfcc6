"""What a sweep knows and tells: the rows of its cell, and the leases that keep processes off each other's candidates.

Rows are *current* when they are of the same cell, device model, protocol and compiled kernel; those need not be tried again.
Every outcome is written at once, in one short transaction of the store; what a killed process loses is the candidate in flight.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune.measure import DETAIL_LIMIT, Outcome
from tpf_jit.tuning_db.rows import TrialRow, device_model, second_after, utc_now

RETRIED = ("compile_timeout", "launch_error", "compile_error")
"""Outcomes that `retry_failed` tries again: a machine's state may have caused them."""


@dataclass(frozen=True)
class Candidate:
    """A configuration of the problem and the kernel it compiles to."""

    config: Any
    json: str
    spec: Any

    @property
    def key(self) -> str:
        """Key of the compiled kernel."""
        return self.spec.key


class Ledger:
    """Rows and leases of one cell, for one template on one device under one protocol.

    Args:
        store: the tuning database.
        cell: name of the cell.
        template: the template.
        measurer: whose device facts and protocol the rows carry.
        toolchain: versions for the rows.
        lease_s: seconds after which another process may take over a candidate that this one does not report on.
        retry_failed: whether failures that may be due to a machine's state count as untried.
    """

    def __init__(
        self,
        store: Any,
        cell: str,
        template: Any,
        measurer: Any,
        toolchain: dict[str, str] | None = None,
        lease_s: float = 120.0,
        retry_failed: bool = False,
    ) -> None:
        self.session = f"{utc_now()}-{secrets.token_hex(4)}"
        self.cell = cell
        self.model = device_model(measurer.device)
        self.protocol = measurer.protocol
        self.rows: list[TrialRow] = []
        self._store = store
        self._template = template
        self._device = dict(measurer.device)
        self._toolchain = dict(toolchain or {})
        self._lease_s = lease_s
        self._retry_failed = retry_failed
        self._owner = owner(self.session)
        self._held: dict[str, float] = {}
        self._current: dict[tuple[str, str, str], TrialRow] = {}
        self._newest: dict[str, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the rows that other processes may have added."""
        rows = self._store.trials(cell=self.cell, device=self.model, template=self._template.name)
        self.rows = []
        self._current = {}
        for row in rows:
            if row.protocol == self.protocol:
                self._add(row)

    def find(self, candidate: Candidate, grade: str = "search") -> TrialRow | None:
        """The current row of a candidate: same configuration, same kernel; the newest of several."""
        return self._current.get((grade, candidate.key, candidate.json))

    def same_code(self, cubin_sha256: str) -> TrialRow | None:
        """A measured row of the same device code, from whichever configuration or toolchain."""
        for row in self.rows:
            if cubin_sha256 and row.cubin_sha256 == cubin_sha256 and row.grade == "search" and row.status in ("ok", "slow"):
                return row
        return None

    def record(self, candidate: Candidate, outcome: Outcome, cubin_sha256: str = "", grade: str = "search") -> TrialRow:
        """Write what became of a candidate."""
        row = TrialRow(
            template=self._template.name,
            cell=self.cell,
            config=config_to_dict(candidate.config),
            kernel_key=candidate.key,
            source_hash=self._template.source_hash(),
            cubin_sha256=cubin_sha256,
            device={**self._device, **outcome.state},
            toolchain=self._toolchain,
            protocol=self.protocol,
            samples_us=outcome.samples_us,
            errors=outcome.errors,
            status=outcome.status,
            detail=outcome.detail[:DETAIL_LIMIT],
            grade=grade,
            date=self._date(self._template.source_hash()),
            session=self.session,
        )
        self._store.put_trial(row)
        self._add(row)
        return row

    def _date(self, source_hash: str) -> str:
        """Which sources were measured last goes by date, so rows are later than all of other sources, whatever the clock says."""
        others = [second_after(date) for source, date in self._newest.items() if source != source_hash]
        return max(utc_now(), self._newest.get(source_hash, ""), *others)

    def _add(self, row: TrialRow) -> None:
        self.rows.append(row)
        self._newest[row.source_hash] = max(self._newest.get(row.source_hash, ""), row.date)
        if not (self._retry_failed and row.status in RETRIED and row.session != self.session):
            self._current[row.grade, row.kernel_key, canonical_json(row.config)] = row

    def claim(self, name: str) -> bool:
        """Reserve a candidate (its canonical JSON) or another piece of work of this cell; False if another process has it.

        What a process of this machine held when it was killed is free at once, elsewhere when its time is over.
        """
        if not claim(self._store, self.cell, self._lease_name(name), self._owner, self._lease_s):
            return False
        self._held[name] = time.monotonic()
        return True

    def release(self, name: str) -> None:
        """Give a reservation back."""
        if self._held.pop(name, None) is not None:
            self._store.release(self.cell, self._lease_name(name), self._owner)

    def renew(self) -> None:
        """Extend the reservations that are a third of their time old."""
        for name, since in list(self._held.items()):
            if time.monotonic() - since > self._lease_s / 3:
                self.claim(name)

    def release_all(self) -> None:
        """Give all reservations back."""
        for name in list(self._held):
            self.release(name)

    def _lease_name(self, name: str) -> str:
        return canonical_json({"device": self.model, "protocol": self.protocol, "template": self._template.name, "work": name})


def owner(session: str) -> str:
    """What this process calls itself in leases, so that others can tell whether it still runs."""
    return f"{_identity(os.getpid())}@{session}"


def claim(store: Any, cell: str, work: str, owner: str, lease_s: float) -> bool:
    """`store.claim`, where what a process of this machine held when it was killed is free at once."""
    if store.claim(cell, work, owner, lease_s):
        return True
    held = [lease["owner"] for lease in store.leases() if (lease["cell"], lease["work"]) == (cell, work)]
    if not held or _alive(held[0]):
        return False
    store.release(cell, work, held[0])
    return store.claim(cell, work, owner, lease_s)


def _identity(pid: int) -> str:
    """A process by machine boot, process namespace, id and start time, which no other process ever has; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return f"{boot}/{namespace}/{pid}/{_started(pid)}"


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot; "" for one that has ended, None where it cannot be read."""
    try:
        # The command name, in parentheses, may contain anything.
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state in "ZX" else fields[18]


def _alive(owner: str) -> bool:
    """Whether a lease's owner may still be running; False only for a process that this one could see and that is gone."""
    there = owner.partition("@")[0].split("/")
    here = _identity(os.getpid()).split("/")
    if len(there) != 4 or there[:2] != here[:2] or not there[2].isdecimal():
        return True
    try:
        os.kill(int(there[2]), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    started = _started(int(there[2]))
    return started is None or started == there[3]
