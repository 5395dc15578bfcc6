"""Whether a measurement still speaks for the code that runs today.

A row names the sources and the compiler it was measured with. Where either differs now, the winner still serves, with a note,
until the problem is measured again. It is current again without a measurement once the sources and the compiler of today are
seen to give the very device code that was measured: then a row of status `same_code` says so. Rows are never changed.

Standard library only; what is true today (`Present`) is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpf_jit.tuning_db.rows import SAME_CODE, TrialRow, canonical_json, utc_now
from tpf_jit.tuning_db.winner import Evidence, Winner

HOST_ONLY = ("tvm_ffi", "runtime", "host", "tpf_jit", "python", "torch")
"""Versions in a row's toolchain that do not reach the device code."""


@dataclass(frozen=True)
class Present:
    """What a template is compiled from today.

    Attributes:
        source_hash: of its sources, None where they cannot be read (a frozen application): then they count as unchanged.
        toolchain: versions of its compiler, empty where it is not installed: then it counts as unchanged.
    """

    source_hash: str | None = None
    toolchain: Mapping[str, Any] = field(default_factory=dict)


Key = tuple[str, str, str, str]
Statements = dict[Key, tuple[Present, ...]]
"""(cell, template, configuration as JSON, device code) -> what was seen to give that code."""


def statements(rows: Iterable[Evidence]) -> Statements:
    """The statements among rows."""
    said: Statements = {}
    for row in rows:
        if row.status == SAME_CODE and row.cubin_sha256:
            key = (row.cell, row.template, row.config, row.cubin_sha256)
            said[key] = (*said.get(key, ()), Present(row.source_hash, json.loads(row.toolchain)))
    return said


def add(said: Statements, more: Statements) -> None:
    """Add statements of another source to `said`."""
    for key, values in more.items():
        said[key] = (*said.get(key, ()), *values)


def changes(source_hash: str, toolchain: Mapping[str, Any], now: Present) -> list[str]:
    """What differs between the making of a row and the present, in words; empty when nothing is known to differ."""
    found = []
    if now.source_hash is not None and source_hash != now.source_hash:
        found.append("other sources of the template")
    then, today = _deciding(toolchain), _deciding(now.toolchain)
    # Without a name in common the row was written elsewhere and says nothing about the compiler.
    if then.keys() & today.keys():
        for name in sorted(then.keys() | today.keys()):
            if then.get(name) != today.get(name):
                found.append(f"{name} {then.get(name, 'unset')} (now {today.get(name, 'unset')})")
    return found


def outdated(winner: Winner, now: Present, said: Statements) -> list[str]:
    """What makes a winner stale, in words; empty when it is current: measured so, or its device code is seen to be the same."""
    found = changes(winner.source_hash, winner.toolchain, now)
    if not found or not winner.cubin_sha256:
        return found
    key = (winner.cell, winner.template, canonical_json(winner.config), winner.cubin_sha256)
    confirmed = any(not changes(each.source_hash or "", each.toolchain, now) for each in said.get(key, ()))
    return [] if confirmed else found


def statement(winner: Winner, kernel_key: str, now: Present, session: str = "") -> TrialRow:
    """The row which says that `now` gives the device code of a winner's measurement."""
    return TrialRow(
        template=winner.template,
        cell=winner.cell,
        config=winner.config,
        kernel_key=kernel_key,
        source_hash=now.source_hash or "",
        cubin_sha256=winner.cubin_sha256,
        toolchain=dict(now.toolchain),
        protocol=winner.protocol,
        status=SAME_CODE,
        detail=f"compiles to the device code that trial {winner.trial_id} measured on {winner.device_name}",
        date=utc_now(),
        session=session,
    )


def _deciding(toolchain: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in toolchain.items() if name not in HOST_ONLY}
