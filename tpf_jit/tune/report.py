"""What a sweep says: a progress bar while it runs, a `Result` and its table afterwards."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tpf_jit.templates.base import canonical_json


@dataclass(frozen=True)
class Result:
    """Outcome of `tune` for one cell on one device model.

    Attributes:
        shape: the problem.
        direction: ``forward``, ``forward_training``, ``backward_stats``, ``backward_key`` or ``backward_query``.
        cell: its name in the database.
        device: device model.
        best: the winner as the database derives it (`tuning_db.Winner`), None when nothing may win.
        trials: all rows of the cell on this device model under this protocol, older sessions' too.
        session: name of this run.
        stopped: why it ended: ``complete``, ``budget``, ``trials``, ``converged`` or ``interrupted``.
        elapsed_s: wall time in seconds.
        idle_s: of it, the time spent waiting for compiles.
        order: where the order of trials came from.
        default_config: the template's default, for comparison.
    """

    shape: Any
    direction: str
    cell: str
    device: str
    best: Any
    trials: Sequence[Any]
    session: str
    stopped: str
    elapsed_s: float
    idle_s: float = 0.0
    order: str = ""
    default_config: dict[str, Any] = field(default_factory=dict)

    @property
    def best_config(self) -> dict[str, Any] | None:
        """Fields of the winning configuration."""
        return dict(self.best.config) if self.best is not None else None

    @property
    def interrupted(self) -> bool:
        """Whether the user stopped it; what was measured is kept, and the same call goes on from there."""
        return self.stopped == "interrupted"

    @property
    def new_trials(self) -> int:
        """Configurations this run added."""
        return sum(row.session == self.session and row.grade == "search" for row in self.trials)

    @property
    def counts(self) -> dict[str, int]:
        """Configurations by what became of them."""
        return dict(Counter(row.status for row in self.trials if row.grade == "search"))

    def summary(self) -> str:
        """One paragraph for people."""
        counts = ", ".join(f"{number} {status}" for status, number in sorted(self.counts.items()))
        text = f"{self.cell} on {self.device}: {counts or 'nothing tried'}; {self.new_trials} new in {self.elapsed_s:.0f} s"
        if self.idle_s >= 1:
            text += f", {self.idle_s:.0f} s of it waiting for compiles"
        if self.best is None:
            return text + ". Nothing may win: every configuration failed, see the table."
        text += f". Best {self.best.us:.1f} us ({self.best.grade}) with {_fields(self.best.config)}"
        others = [row.median_us for row in self.trials if row.status == "ok" and row.config == self.default_config]
        if others and self.best.config != self.default_config:
            text += f"; the default takes {others[-1] / self.best.us:.2f} times as long"
        if self.best.ties > 1:
            text += f"; {self.best.ties} configurations are within noise, the first in canonical order is taken"
        return text + "."

    def table(self, limit: int = 10) -> str:
        """The fastest `limit` configurations, then a line for each kind of failure, as plain text."""
        lines = [f"{'us':>10} {'p10':>9} {'p90':>9}  {'grade':6} {'error':>8}  configuration"]
        for row in sorted_rows(self.trials)[:limit]:
            mark = " *" if self.best is not None and row.config == self.best.config else ""
            worst = max(row.errors.values(), default=float("nan"))
            times = f"{row.median_us:10.2f} {row.p10_us:9.2f} {row.p90_us:9.2f}"
            lines.append(f"{times}  {row.grade:6} {worst:8.1e}  {_fields(row.config)}{mark}")
        for status, number in sorted(self.counts.items()):
            if status != "ok":
                example = next(row for row in self.trials if row.status == status)
                lines.append(f"{number:>10} {status}: e.g. {_fields(example.config)}: {_reason(example.detail)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly summary."""
        best = self.best
        return {
            "shape": self.shape.to_dict(),
            "direction": self.direction,
            "cell": self.cell,
            "device": self.device,
            "best": None
            if best is None
            else {"template": best.template, "config": dict(best.config), "us": best.us, "grade": best.grade, "ties": best.ties},
            "counts": self.counts,
            "new_trials": self.new_trials,
            "stopped": self.stopped,
            "elapsed_s": round(self.elapsed_s, 3),
            "idle_s": round(self.idle_s, 3),
            "order": self.order,
            "session": self.session,
        }

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"


def sorted_rows(rows: Sequence[Any]) -> list[Any]:
    """The best-graded newest row of each configuration that was right, fastest first."""
    chosen: dict[str, Any] = {}
    for row in sorted(rows, key=lambda row: (row.grade == "final", row.date)):
        if row.status == "ok":
            chosen[row.template + canonical_json(row.config)] = row
    return sorted(chosen.values(), key=lambda row: (row.grade != "final", row.median_us))


def _reason(detail: str, width: int = 110) -> str:
    """The first line of a detail; of a long one the end, where the reason is."""
    line = (detail.strip().splitlines() or [""])[0]
    return line if len(line) <= width else "..." + line[3 - width :]


def _fields(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


class Progress:
    """A progress bar on stderr when that is a terminal, else silent."""

    def __init__(self, title: str, total: int, enabled: bool = True) -> None:
        self._bar: Any = None
        self._task: Any = None
        if not enabled or not sys.stderr.isatty():
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress
        except ImportError:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self._bar = RichProgress(*columns, TimeElapsedColumn(), console=Console(stderr=True, markup=False))
        self._task = self._bar.add_task(title, total=total, note="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, note: str) -> None:
        """`done` configurations are dealt with."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
