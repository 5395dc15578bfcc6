"""What became of a sweep of many cells: one report a cell, and what the GPUs' time went into. Plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tpf_jit.tune.report import Result

FINISHED = ("complete", "converged")
"""States after which the same command has nothing left to do for a cell."""


@dataclass(frozen=True)
class CellReport:
    """What became of one cell.

    Attributes:
        cell: its name in the database.
        state: ``complete`` or ``converged``; ``trials``, ``budget`` or ``interrupted`` when a limit or the user ended it;
            ``failed`` (see `detail`); ``left`` when it was not begun.
        device: device model.
        us: time of the winner in us, None without one; `config`, `grade` and `template` are its own.
        counts: configurations by what became of them.
        new_trials: configurations added by this run.
        elapsed_s: wall time; idle_s: of it, waiting for compiles.
    """

    cell: str
    state: str
    device: str = ""
    us: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    grade: str = ""
    template: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    new_trials: int = 0
    elapsed_s: float = 0.0
    idle_s: float = 0.0
    detail: str = ""

    @classmethod
    def of(cls, result: Result) -> CellReport:
        """The report of a finished `tune`."""
        best = result.best
        nothing = "every configuration that was tried failed" if result.counts else "nothing was tried"
        won = {} if best is None else {"us": best.us, "config": dict(best.config), "grade": best.grade, "template": best.template}
        return cls(
            cell=result.cell,
            state=result.stopped,
            device=result.device,
            counts=result.counts,
            new_trials=result.new_trials,
            elapsed_s=round(result.elapsed_s, 3),
            idle_s=round(result.idle_s, 3),
            detail="" if best is not None else nothing,
            **won,
        )

    def line(self) -> str:
        """One line of progress."""
        time = f"best {self.us:.1f} us" if self.us is not None else "no winner"
        text = f"{self.cell}: {self.state}, {time}, {self.new_trials} new in {self.elapsed_s:.0f} s"
        return f"{text}; {self.detail}" if self.detail else text


@dataclass(frozen=True)
class Summary:
    """Outcome of a sweep of many cells.

    Attributes:
        cells: one report for each planned cell, in order of the plan.
        elapsed_s: wall time.
        gpu_s: the sum over measuring processes of the time each was there.
        measuring_s: of it, the time spent checking and timing candidates.
        compiled: kernels that were compiled, not found in a cache.
        interrupted: the user stopped it; the same command goes on from here.
        restarts: measuring processes that were lost and replaced.
    """

    cells: tuple[CellReport, ...]
    elapsed_s: float = 0.0
    gpu_s: float = 0.0
    measuring_s: float = 0.0
    compiled: int = 0
    interrupted: bool = False
    restarts: int = 0

    @property
    def idle_share(self) -> float | None:
        """Share of the GPUs' time in which nothing was being checked or timed; None when there was none."""
        return None if self.gpu_s <= 0 else max(0.0, 1 - self.measuring_s / self.gpu_s)

    @property
    def new_trials(self) -> int:
        """Configurations this run added; those of a process that was lost in the middle of a cell are not counted."""
        return sum(report.new_trials for report in self.cells)

    @property
    def unfinished(self) -> list[CellReport]:
        """Cells for which the same command would still do something."""
        return [report for report in self.cells if report.state not in FINISHED]

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly, the idle share included."""
        share = self.idle_share
        derived = {"new_trials": self.new_trials, "idle_share": None if share is None else round(share, 4)}
        return {**asdict(self), "cells": [asdict(report) for report in self.cells], **derived}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Summary:
        """Inverse of `to_dict`."""
        own = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**own, "cells": tuple(CellReport(**report) for report in values["cells"])})

    def text(self) -> str:
        """One paragraph for people."""
        done = len(self.cells) - len(self.unfinished)
        text = f"{done} of {len(self.cells)} cells finished, {self.new_trials} new trials, {self.compiled} kernels compiled "
        text += f"in {self.elapsed_s:.0f} s"
        if self.idle_share is not None:
            text += f"; GPU idle {100 * self.idle_share:.0f} % of the time"
        if self.restarts:
            text += f"; {self.restarts} measuring processes were lost and replaced"
        return text + ("; interrupted, the same command goes on from here." if self.interrupted else ".")


def united(keys: Sequence[str], parts: Iterable[Summary], elapsed_s: float, **more: Any) -> Summary:
    """One summary of what several processes did to one list of cells.

    Args:
        keys: names of the planned cells.
        parts: the processes' own.
        elapsed_s: wall time of the whole.
        more: `interrupted`, `restarts`.
    """
    parts = list(parts)
    found: dict[str, CellReport] = {}
    for part in parts:
        for report in part.cells:
            found[report.cell] = _later(found.get(report.cell), report)
    interrupted = more.pop("interrupted", False) or any(part.interrupted for part in parts)
    return Summary(
        cells=tuple(found.get(key, CellReport(key, "left")) for key in keys),
        elapsed_s=round(elapsed_s, 3),
        gpu_s=round(sum(part.gpu_s for part in parts), 3),
        measuring_s=round(sum(part.measuring_s for part in parts), 3),
        compiled=sum(part.compiled for part in parts),
        interrupted=interrupted,
        **more,
    )


def _later(one: CellReport | None, other: CellReport) -> CellReport:
    """Of two processes' reports of a cell the one that knows more, with what both added."""
    if one is None:
        return other

    def rank(report: CellReport) -> tuple[bool, bool, bool, int]:
        tried = sum(report.counts.values())
        return (report.state in FINISHED, report.state != "left", report.us is not None, tried)

    kept = max((one, other), key=rank)
    return replace(
        kept,
        new_trials=one.new_trials + other.new_trials,
        elapsed_s=round(one.elapsed_s + other.elapsed_s, 3),
        idle_s=round(one.idle_s + other.idle_s, 3),
    )
