"""Which template and configuration serve a problem, and where that choice comes from.

    exact cell, measured on this device model                 "tuned"
    nearest crop on this device model                         "nearest"
    the same without the mask, or with one                    "nearest", and the note says so
    another Hopper device's record, exact before nearest      "sibling"
    the template's default                                    "default"

The tuning database is read once; afterwards an answer comes from memory, and the same question again costs one look-up in a
dict. A stored configuration that the template refuses today is skipped; one that was measured with other sources or another
compiler is used, the note says so, and one warning a template and process does, unless its device code is known to be the same
(`tuning_db.trust`). Databases never raise here: a layer that cannot be read counts as empty.

Standard library only; templates come from the registry, which imports neither torch nor the compiler.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpf_jit.device import Device, current_device
from tpf_jit.errors import NoKernel, user_level
from tpf_jit.nearest import Candidate, Index, siblings_first
from tpf_jit.templates.base import config_from_dict
from tpf_jit.tuning_db import trust
from tpf_jit.tuning_db.reader import Layer, default_layers, read_layer, read_shipped
from tpf_jit.tuning_db.rows import cell_key
from tpf_jit.tuning_db.winner import Winner, protocol_order

log = logging.getLogger("tpf_jit")

MAX_TRIES = 64
"""Neighbours that are looked at before the default is taken."""


@dataclass(frozen=True)
class Resolution:
    """The answer for one problem.

    Attributes:
        template_name: name of the template.
        config: its configuration, an instance of the template's `Config`.
        source: "tuned", "nearest", "sibling" or "default".
        note: one sentence for people: where the configuration comes from and what to know about it.
        distance: between the measured problem and this one; 1 is a factor of two in the crop. 0 for an exact record,
            infinite for a default.
        trial_id: the measurement it stands on, None for a default.
        us: the time that was measured for it, in us, on `device` and for the problem of `cell`.
        cell: cell of the record, None for a default.
        device: device model of the record, None for a default.
        chain: every step of the search and its outcome, for `explain`.
    """

    template_name: str
    config: Any
    source: str
    note: str
    distance: float
    trial_id: str | None = None
    us: float | None = None
    cell: str | None = None
    device: str | None = None
    chain: tuple[str, ...] = ()


class Dispatcher:
    """Answers which template and configuration serve a problem. Thread-safe.

    Args:
        user_db: the user's database: a path, several (first wins), or False for none; found as `user_database_path` says when
            left out. Databases that are named here always beat the shipped tables.
        shipped: whether the tables that install with the package lie underneath.
        device: the device to answer for; the current one when left out (looked up when first needed).
        registry: where templates come from: `get(name)` and `templates(op=, direction=, arch=)`; `templates.registry` when left
            out.

    Attributes:
        warns: whether a stale record that is used is logged as a warning, once a template and process.
    """

    warns = True

    def __init__(
        self,
        user_db: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | bool | None = None,
        shipped: bool = True,
        device: Device | None = None,
        registry: Any = None,
    ) -> None:
        self._user_db = user_db
        self._shipped = shipped
        self._given_device = device
        self._registry = registry
        self._lock = threading.RLock()
        self._memo: dict[tuple[str, str, Any], Resolution] = {}
        self._index: Index | None = None
        self._current: tuple[Device | None] | None = None
        self._present: dict[str, trust.Present] = {}
        self._statements: trust.Statements = {}

    def resolve(self, op: str, direction: str, shape: Any) -> Resolution:
        """The template and configuration for a problem; from memory after the first time.

        Args:
            op: operation, e.g. "triangle_attention".
            direction: "forward", or "backward_key" and so on.
            shape: the problem, hashable, with `key()`.

        Raises:
            NoKernel: no registered template computes this problem on this device; the message has the reasons.
        """
        found = self._memo.get((op, direction, shape))
        if found is not None:
            return found
        with self._lock:
            found = self._search(op, direction, shape)
            return self._memo.setdefault((op, direction, shape), found)

    def reload(self) -> None:
        """Forget every answer and read the databases again when next asked, e.g. after tuning."""
        with self._lock:
            self._index = None
            self._current = None
            self._present = {}
            self._memo = {}

    @property
    def device(self) -> Device | None:
        """The device answered for; None where there is no GPU."""
        with self._lock:
            if self._given_device is not None:
                return self._given_device
            if self._current is None:
                self._current = (current_device(),)
            return self._current[0]

    def layers(self) -> list[Layer]:
        """The databases in order of precedence, as they were read."""
        with self._lock:
            return self._loaded().layers

    def misses(self) -> list[tuple[str, str, Any, Resolution]]:
        """The problems asked for so far that have no record of their own: (op, direction, shape, answer). Tune these."""
        return [(*question, answer) for question, answer in list(self._memo.items()) if answer.source != "tuned"]

    def _loaded(self) -> Index:
        if self._index is None:
            self._index = Index(self._read_layers())
            self._statements = {}
            for layer in self._index.layers:
                trust.add(self._statements, layer.statements)
        return self._index

    def _read_layers(self) -> list[Layer]:
        if self._user_db is None or self._user_db is True:
            return default_layers(self._shipped)
        if self._user_db is False:
            paths = []
        elif isinstance(self._user_db, (str, os.PathLike)):
            paths = [self._user_db]
        else:
            paths = list(self._user_db)
        layers = [read_layer(os.path.expanduser(path)) for path in paths]
        return [*layers, read_shipped()] if self._shipped else layers

    def _templates(self) -> Any:
        if self._registry is None:
            from tpf_jit.templates import registry

            self._registry = registry
        return self._registry

    def _search(self, op: str, direction: str, shape: Any) -> Resolution:
        device = self.device
        usable = self._usable(op, direction, shape, device)
        index = self._loaded()
        chain = [f"{layer.name}: {layer.problem}" for layer in index.layers if layer.problem]
        model = device.model if device is not None else ""
        measured = next(iter(usable.values())).measured_as(shape)
        problem = (op, direction, measured, model)
        steps = (
            ("tuned", self._exact(cell_key(measured, direction), model, usable)),
            ("nearest", itertools.chain(index.nearest(*problem), index.across_mask(*problem))),
            ("sibling", itertools.chain(*(siblings_first(index.elsewhere(*problem, mask), device) for mask in (False, True)))),
        )
        for source, candidates in steps:
            found = self._first_accepted(source, candidates, shape, usable, chain)
            if found is not None:
                return found
        return _default(shape, usable, device, chain)

    def _usable(self, op: str, direction: str, shape: Any, device: Device | None) -> dict[str, Any]:
        """Templates that compute the problem on the device, by name, in the registry's order."""
        where = device.name if device is not None else "any GPU"
        if device is not None and device.arch is None:
            major, minor = device.compute_capability
            raise NoKernel(f"there are no kernels for {device.name} (compute capability {major}.{minor}); they need Hopper (9.0)")
        arch = device.arch if device is not None else None
        templates = self._templates().templates(op=op, direction=direction, arch=arch)
        verdicts = [(template, *_supports(template, shape)) for template in templates]
        usable = {template.name: template for template, able, _ in verdicts if able}
        if not usable:
            reasons = "; ".join(f"{template.name}: {reason}" for template, _, reason in verdicts) or "none is registered"
            raise NoKernel(f"no template of {op}/{direction} computes {shape.key()} on {where} ({reasons})")
        return usable

    def _exact(self, cell: str, model: str, usable: dict[str, Any]) -> Iterator[Candidate]:
        layers = [(layer, layer.winners[cell, model]) for layer in self._loaded().layers if (cell, model) in layer.winners]
        # A table shipped later with better evidence beats an older row of the user's default database, not one named explicitly.
        if len(layers) > 1 and self._shipped and self._user_db in (None, True):
            (upper, upper_rows), (lower, lower_rows) = layers[0], layers[-1]
            if lower_rows[0].date > upper_rows[0].date and self._evidence(lower_rows[0], usable) > self._evidence(
                upper_rows[0], usable
            ):
                layers = [(lower, lower_rows), (upper, upper_rows)]
        return (Candidate(winner, layer, 0.0) for layer, rows in layers for winner in rows)

    def _first_accepted(
        self, source: str, candidates: Iterable[Candidate], shape: Any, usable: dict[str, Any], chain: list[str]
    ) -> Resolution | None:
        count = 0
        for candidate in candidates:
            count += 1
            if count > MAX_TRIES:
                break
            winner = candidate.winner
            config, problem = _fit(winner, shape, usable, exact=source == "tuned")
            record = f"{winner.cell} on {winner.device_name}"
            if config is None:
                chain.append(f"{source}: {record}, {_text(winner.config)}: skipped, {problem}")
                continue
            stale = self._stale(winner, usable[winner.template])
            remarks = _remarks(winner, stale, problem)
            if stale and self.warns:
                _warn_stale(winner.template, stale)
            if candidate.masked is not None:
                remarks.insert(0, f"measured {'with' if candidate.masked else 'without'} a mask, unlike this problem")
            note = _note(source, candidate, self.device, remarks)
            chain.append(f"{source}: {record}, {_text(winner.config)}, {winner.us:.1f} us: used")
            return Resolution(
                template_name=winner.template,
                config=config,
                source=source,
                note=note,
                distance=candidate.distance,
                trial_id=winner.trial_id,
                us=winner.us,
                cell=winner.cell,
                device=winner.device,
                chain=tuple(chain),
            )
        if not count:
            chain.append(f"{source}: no record")
        return None

    def _evidence(self, winner: Winner, usable: dict[str, Any]) -> tuple[bool, bool, tuple[int, str]]:
        template = usable.get(winner.template)
        current = template is not None and not self._stale(winner, template)
        return current, winner.grade == "final", protocol_order(winner.protocol)

    def _stale(self, winner: Winner, template: Any) -> list[str]:
        """What has changed since a winner was measured, in words; empty when it is current."""
        if template.name not in self._present:
            self._present[template.name] = present(template)
        return trust.outdated(winner, self._present[template.name], self._statements)


def _supports(template: Any, shape: Any) -> tuple[bool, str]:
    try:
        return template.supports(shape)
    except Exception as error:  # noqa: BLE001 - one broken plugin must not stop the others' kernels
        return False, f"{type(error).__name__}: {error}"


def _fit(winner: Winner, shape: Any, usable: dict[str, Any], exact: bool) -> tuple[Any, str | None]:
    """The record's configuration as the template takes it today and a remark, or None and the reason."""
    template = usable.get(winner.template)
    if template is None:
        return None, f"template {winner.template} is not available for this problem"
    try:
        config = config_from_dict(template.Config, winner.config)
        remark = None
        if not exact and getattr(config, "crop", 0) not in (0, getattr(shape, "crop", 0)):
            # Measured with another crop compiled in; the same kernel with a dynamic crop is what carries over.
            config, remark = dataclasses.replace(config, crop=0), "measured with its crop compiled in, used with a dynamic one"
        problem = template.check(shape, config)
    except Exception as error:  # noqa: BLE001 - a third party's template may fail in any way, and training must go on
        return None, f"it does not fit {winner.template} ({error})"
    return (config, remark) if problem is None else (None, problem)


def _remarks(winner: Winner, stale: list[str], remark: str | None) -> list[str]:
    remarks = [remark] if remark else []
    if winner.rank:
        remarks.append(f"number {winner.rank + 1} of its measurement, as those before it cannot be used")
    if stale:
        remarks.append(f"measured with {' and '.join(stale)}: tune again to be sure")
    if winner.grade != "final":
        remarks.append("from an unfinished search")
    return remarks


def _note(source: str, candidate: Candidate, device: Device | None, remarks: list[str]) -> str:
    winner = candidate.winner
    where = f"on {winner.device_name} on {winner.date[:10]} ({winner.us:.1f} us; {candidate.layer.name})"
    if source == "tuned":
        text = f"measured for exactly this problem {where}"
    elif candidate.distance == 0.0 and candidate.masked is None:
        text = f"measured for an equal problem {where}"
    else:
        text = f"measured for the near problem {winner.cell} {where}, distance {candidate.distance:.2f}"
    if source == "sibling":
        text += "; there is no GPU here" if device is None else f"; nothing comparable was measured on {device.name}"
    return "; ".join([text, *remarks])


def _default(shape: Any, usable: dict[str, Any], device: Device | None, chain: list[str]) -> Resolution:
    template = next(iter(usable.values()))
    where = f"on {device.name}" if device is not None else "anywhere, and there is no GPU here"
    note = f"default of {template.name}: nothing usable was measured for this kind of problem {where}"
    chain.append(f"default: {template.name}: used")
    return Resolution(template.name, template.default(shape), "default", note, math.inf, chain=tuple(chain))


def present(template: Any) -> trust.Present:
    """What a template is compiled from today; what cannot be told counts as unchanged."""
    try:
        source = template.source_hash()
    except Exception:  # noqa: BLE001 - sources that cannot be read (a frozen application, a plugin) cannot tell
        source = None
    try:
        from tpf_jit.compiler import toolchain

        versions = toolchain(template.backend)
    except Exception:  # noqa: BLE001 - no compiler here, or a plugin's backend that fails: measurements serve all the same
        versions = {}
    return trust.Present(source, versions)


_warned_stale: set[str] = set()


def _warn_stale(template: str, stale: list[str]) -> None:
    if template not in _warned_stale:
        _warned_stale.add(template)
        text = "%s: a configuration was measured with %s; it serves until tuned again: tpf-jit db stale"
        log.warning(text, template, " and ".join(stale), stacklevel=user_level())


def _text(config: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


_default_lock = threading.Lock()
_default_dispatcher: list[Dispatcher] = []


def default_dispatcher() -> Dispatcher:
    """The dispatcher of this process: user database, shipped tables, current device."""
    if not _default_dispatcher:
        with _default_lock:
            if not _default_dispatcher:
                _default_dispatcher.append(Dispatcher())
    return _default_dispatcher[0]


def use(dispatcher: Dispatcher) -> None:
    """Answer with this dispatcher from now on. `kernels.reload_choices` drops what was chosen before."""
    with _default_lock:
        _default_dispatcher[:] = [dispatcher]


def reload() -> None:
    """Make the process's dispatcher read the databases again, e.g. after tuning."""
    if _default_dispatcher:
        _default_dispatcher[0].reload()
