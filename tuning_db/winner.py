"""From measurements to winners: one pure function of the rows, so that ranks, processes and merges agree without talking.

The rule, for one cell on one device model:

1. A kernel that was seen to be wrong or non-deterministic cannot win; compiled from other sources or by another compiler it may.
2. Evidence of the better kind decides: rows of grade `final` where there are any, else `search`; among those the newest
   protocol; of each template the sources measured last, and older rows whose device code is identical.
3. The time of a configuration is the median of its rows' medians.
4. All configurations within the noise of the fastest tie, and the first of them in canonical order wins. Then come the others
   by time: they serve when the winner cannot be used.

Standard library only.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpf_jit.tuning_db.rows import REFUTING, config_order, median

NOISE_FLOOR = 0.005
"""Configurations closer than this to the fastest always tie: medians of separate runs differ that much."""
NOISE_CAP = 0.02
"""However wide the samples scatter, never give away more than this."""
RUNNERS_UP = 3
"""How many further configurations are kept behind the winner."""


class Evidence(NamedTuple):
    """The columns of a trial that decide winners. `config` is canonical JSON; times in us, None where not measured."""

    id: str
    cell: str
    model: str
    template: str
    config: str
    kernel_key: str
    source_hash: str
    cubin_sha256: str
    protocol: str
    grade: str
    status: str
    median_us: float | None
    p10_us: float | None
    p90_us: float | None
    date: str
    toolchain: str = "{}"
    """Versions of what compiled it, as JSON."""


@dataclass(frozen=True, slots=True)
class Winner:
    """A configuration that may serve a cell, with the evidence it stands on.

    Attributes:
        cell: shape key and direction.
        device: device model, see `rows.device_model`.
        template: name of the template.
        config: its fields.
        us: time in us, median of medians.
        source_hash: of the sources that were measured.
        cubin_sha256: hash of the device code, "" if unknown.
        protocol: measuring method.
        grade: `final` or `search`.
        date: of the newest row behind it.
        trial_id: that row.
        ties: how many configurations were within noise of the fastest (1 = none but itself).
        rank: 0 for the winner, then 1, 2, ... for those kept behind it.
        toolchain: versions of what compiled it, of that row.
    """

    cell: str
    device: str
    template: str
    config: dict[str, Any]
    us: float
    source_hash: str
    cubin_sha256: str
    protocol: str
    grade: str
    date: str
    trial_id: str
    ties: int = 1
    rank: int = 0
    toolchain: dict[str, Any] = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """Name of the device as the driver gives it."""
        return self.device.rsplit("/", 2)[0]


def protocol_order(protocol: str) -> tuple[int, str]:
    """Sort key of protocols, newest last: by the version number they end in, then by name."""
    number = re.search(r"(\d+)$", protocol)
    return (int(number.group(1)) if number else 0, protocol)


def rank(rows: Iterable[Evidence], keep: int = RUNNERS_UP) -> list[Winner]:
    """The winner of one cell on one device model, followed by up to `keep` others; empty when nothing may win.

    Args:
        rows: all rows of that cell and model, in any order; rows of other statuses than `ok` and `REFUTING` do not matter.
        keep: how many configurations to keep behind the winner.
    """
    rows = list(rows)
    groups = defaultdict(list)
    for row in admissible(rows):
        groups[row.template, row.config].append(row)
    entries = []
    for (template, text), members in groups.items():
        config = json.loads(text)
        us = median(row.median_us for row in members)
        entries.append((us, (config_order(config), template), config, max(members, key=lambda row: (row.date, row.id)), members))
    if not entries:
        return []
    entries.sort(key=lambda entry: entry[:2])
    limit = entries[0][0] * (1 + _noise(entries[0][0], entries[0][4]))
    ties = [entry for entry in entries if entry[0] <= limit]
    first = min(ties, key=lambda entry: entry[1])
    order = [first, *(entry for entry in entries if entry is not first)][: keep + 1]
    return [
        Winner(
            cell=row.cell,
            device=row.model,
            template=row.template,
            config=config,
            us=us,
            source_hash=row.source_hash,
            cubin_sha256=row.cubin_sha256,
            protocol=row.protocol,
            grade=row.grade,
            date=row.date,
            trial_id=row.id,
            ties=len(ties),
            rank=position,
            toolchain=json.loads(row.toolchain),
        )
        for position, (us, _, config, row, _) in enumerate(order)
    ]


def admissible(rows: list[Evidence]) -> list[Evidence]:
    """The rows of one cell and model that decide: rules 1 and 2."""
    refuted = {kernel_of(row) for row in rows if row.status in REFUTING}
    refuted_code = {row.cubin_sha256 for row in rows if row.status in REFUTING} - {""}
    pool = [
        row
        for row in rows
        if row.status == "ok"
        and row.median_us is not None
        and kernel_of(row) not in refuted
        and row.cubin_sha256 not in refuted_code
    ]
    pool = [row for row in pool if row.grade == "final"] or pool
    newest = max((protocol_order(row.protocol) for row in pool), default=None)
    pool = [row for row in pool if protocol_order(row.protocol) == newest]
    latest: dict[str, tuple[str, str]] = {}
    for row in pool:
        latest[row.template] = max(latest.get(row.template, ("", "")), (row.date, row.source_hash))
    current_code = {row.cubin_sha256 for row in pool if row.source_hash == latest[row.template][1]} - {""}
    return [row for row in pool if row.source_hash == latest[row.template][1] or row.cubin_sha256 in current_code]


def kernel_of(row: Evidence) -> str | tuple[str, str, str]:
    """What was measured: the compiled kernel, or its description where the key is not known."""
    return row.kernel_key or (row.template, row.config, row.source_hash)


def _noise(us: float, members: list[Evidence]) -> float:
    spreads = [(row.p90_us - row.p10_us) / 2 for row in members if row.p10_us is not None and row.p90_us is not None]
    relative = median(spreads) / us if spreads and us > 0 else 0.0
    return min(max(NOISE_FLOOR, relative), NOISE_CAP)
