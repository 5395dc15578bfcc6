"""Two databases or exported files side by side: cells won differently, times that differ, cells that one of them lacks.

Standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tpf_jit.tuning_db.winner import Evidence, Winner, rank

TOLERANCE = 0.02
"""Times within this share of each other count as equal: so much do separate sessions differ."""

WON_DIFFERENTLY, TIME, ONLY_FIRST, ONLY_SECOND, SAME = "won differently", "time", "only in A", "only in B", "same"


@dataclass(frozen=True)
class Difference:
    """One cell on one device model. `first` and `second` are its winners, None where there is none."""

    cell: str
    device: str
    kind: str
    first: Winner | None
    second: Winner | None

    @property
    def ratio(self) -> float | None:
        """Time of the second over that of the first; below 1 the second is faster."""
        return self.second.us / self.first.us if self.first and self.second and self.first.us else None


def winners(rows: Iterable[Evidence]) -> dict[tuple[str, str], Winner]:
    """(cell, device model) -> winner."""
    cells: dict[tuple[str, str], list[Evidence]] = defaultdict(list)
    for row in rows:
        cells[row.cell, row.model].append(row)
    ranked = {pair: rank(members, keep=0) for pair, members in cells.items()}
    return {pair: found[0] for pair, found in ranked.items() if found}


def compare(first: Iterable[Evidence], second: Iterable[Evidence], tolerance: float = TOLERANCE) -> list[Difference]:
    """Every cell that either has a winner for, by name."""
    ours, theirs = winners(first), winners(second)
    found = []
    for cell, model in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get((cell, model)), theirs.get((cell, model))
        found.append(Difference(cell, model, _kind(one, other, tolerance), one, other))
    return found


def _kind(one: Winner | None, other: Winner | None, tolerance: float) -> str:
    if one is None or other is None:
        return ONLY_SECOND if one is None else ONLY_FIRST
    if (one.template, one.config) != (other.template, other.config):
        return WON_DIFFERENTLY
    return TIME if abs(one.us - other.us) > tolerance * min(one.us, other.us) else SAME
