"""How the stored winners stand today: what each was measured with, what has changed since, and what serves meanwhile.

The report behind `tpf-jit db stale`; also what judges rows for `tpf-jit db prune`. Reads only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpf_jit.device import Device
from tpf_jit.errors import TpfError
from tpf_jit.resolve import Dispatcher, present
from tpf_jit.shape import parse_key
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tuning_db import trust
from tpf_jit.tuning_db.reader import Layer
from tpf_jit.tuning_db.rows import SAME_CODE, TrialRow, split_cell
from tpf_jit.tuning_db.winner import Winner


@dataclass(frozen=True)
class Standing:
    """One winner.

    Attributes:
        layer: name of the database it comes from.
        winner: the winner.
        changes: what has changed since it was measured, in words; empty when it is current.
        rows, stale_rows: measurements of its problem on its device model, and how many of them are stale like that.
        serves: what the dispatcher gives for the problem on that device today.
    """

    layer: str
    winner: Winner
    changes: tuple[str, ...]
    rows: int
    stale_rows: int
    serves: str


class Presents:
    """What each template is compiled from today, by name; looked up once. None for a template that is not installed."""

    def __init__(self) -> None:
        self._known: dict[str, trust.Present | None] = {}

    def __call__(self, name: str) -> trust.Present | None:
        if name not in self._known:
            try:
                self._known[name] = present(registry.get(name))
            except TpfError:
                self._known[name] = None
        return self._known[name]


def survey(
    layers: list[Layer], trials: Mapping[str, TrialRow], dispatching: tuple[str | os.PathLike[str] | None, bool]
) -> list[Standing]:
    """The standing of every winner, by device and problem.

    Args:
        layers: the databases in order of precedence, as they were read.
        trials: their trials by id.
        dispatching: the user database (None for the default one) and whether the shipped tables count, for what serves.
    """
    presents = Presents()
    said: trust.Statements = {}
    for layer in layers:
        trust.add(said, layer.statements)
    measured: dict[tuple[str, str], list[TrialRow]] = defaultdict(list)
    for row in trials.values():
        if row.status != SAME_CODE:
            measured[row.cell, row.device_model].append(row)
    dispatchers: dict[str, Dispatcher] = {}
    found = []
    for layer in layers:
        for (cell, model), (winner, *_) in layer.winners.items():
            now = presents(winner.template)
            changes = trust.outdated(winner, now, said) if now is not None else [f"{winner.template} is not installed"]
            rows = measured[cell, model]
            stale = sum(bool(_row_changes(row, presents)) for row in rows)
            if model not in dispatchers:
                user, shipped = dispatching
                dispatchers[model] = Dispatcher(user, shipped, _device(rows, model))
                dispatchers[model].warns = False  # the report says it
            serves = _serves(dispatchers[model], winner)
            found.append(Standing(layer.name, winner, tuple(changes), len(rows), stale, serves))
    return sorted(found, key=lambda each: (each.winner.device, each.winner.cell, each.layer))


def _row_changes(row: TrialRow, presents: Presents) -> list[str]:
    now = presents(row.template)
    return trust.changes(row.source_hash, row.toolchain, now) if now is not None else ["not installed"]


def _device(rows: Iterable[TrialRow], model: str) -> Device | None:
    """The device of a model from the facts in its rows; None where they do not suffice."""
    for row in rows:
        facts: dict[str, Any] = row.identity()
        try:
            capability = tuple(facts.pop("compute_capability"))
            return Device(compute_capability=capability, **{"l2_bytes": 0, **facts})
        except (KeyError, TypeError):
            continue
    return None


def _serves(dispatcher: Dispatcher, winner: Winner) -> str:
    op, key, direction = split_cell(winner.cell)
    try:
        answer = dispatcher.resolve(op, direction, parse_key(key))
    except TpfError as error:
        return f"the PyTorch path ({error})"
    if answer.trial_id == winner.trial_id:
        return "this winner, with a note" if "tune again" in answer.note else "this winner"
    fields = " ".join(f"{name}={value}" for name, value in config_to_dict(answer.config).items())
    return f"{answer.source}: {answer.template_name} {fields}"
