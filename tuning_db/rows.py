"""One measurement as plain data: `TrialRow`, its content hash, and the names of cells and device models.

Standard library only; both the store and the launch-path reader use it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

from tpf_jit.errors import InvalidInput

STATUSES = (
    "ok",
    "wrong",
    "nondeterministic",
    "compile_error",
    "compile_timeout",
    "launch_error",
    "slow",
    "infeasible",
    "same_code",
)
"""Outcomes of a trial. `slow`: stopped early, far behind the best; `infeasible`: refused before it was compiled; `same_code`:
nothing was measured, but these sources and this compiler were seen to give the device code of an earlier measurement."""

SAME_CODE = "same_code"

REFUTING = ("wrong", "nondeterministic")
"""Outcomes that bar a configuration from winning its cell while its code stays the same."""

NEEDS_DEVICE = ("ok", "wrong", "nondeterministic", "launch_error", "slow")
"""Outcomes that only a device can produce."""

GRADES = ("search", "final")
"""`final`: measured interleaved with the other finalists; `search`: measured once on the way."""

IDENTITY_FACTS = ("name", "compute_capability", "sms", "l2_bytes", "memory_bytes", "driver")
"""Device facts that identify a device; all others (clocks, power, temperature, host) are its state during the trial."""

_MEMORY_CLASS = 16 << 30
_TEXTS = ("template", "cell", "kernel_key", "source_hash", "cubin_sha256", "protocol", "status", "detail", "grade", "session")


def canonical_json(value: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces, ASCII, no NaN or infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def content_hash(value: Any) -> str:
    """sha256 hex of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def cell_key(shape: Any, direction: str) -> str:
    """Name of a tuning cell: the shape's key and the direction, e.g. `triangle_attention/B1/.../mask-none/forward`."""
    return f"{shape.key()}/{direction}"


def split_cell(cell: str) -> tuple[str, str, str]:
    """`(op, shape key, direction)` of a cell.

    Raises:
        InvalidInput: when the text is no cell key.
    """
    shape_key, _, direction = cell.rpartition("/")
    op = shape_key.partition("/")[0]
    if not op or not direction or op == shape_key:
        raise InvalidInput.of("cell", repr(cell), "a shape key followed by '/forward' or '/backward'")
    return op, shape_key, direction


def cell_family(cell: str) -> str:
    """`op/direction` of a cell: its templates share one calling convention."""
    op, _, direction = split_cell(cell)
    return f"{op}/{direction}"


def device_model(device: Any) -> str:
    """The name under which measurements of equal devices are shared, e.g. `NVIDIA H200/132sm/144g`; "" without a device.

    Name, SM count and memory decide. Memory is rounded to 16 GiB, as drivers report the same board a few hundred MiB apart
    while the variants of a board differ by more (80, 94, 96, 141 GB); a MIG slice or a cut-down board gets its own model. A fact
    that is not known counts as 0, so it never matches by accident.

    Args:
        device: a mapping or an object with `name`, `sms` and `memory_bytes`.
    """
    get = device.get if isinstance(device, Mapping) else lambda key: getattr(device, key, None)
    name = get("name")
    if not name:
        return ""
    memory = round((get("memory_bytes") or 0) / _MEMORY_CLASS) * 16
    return f"{name}/{get('sms') or 0}sm/{memory}g"


def median(values: Iterable[float]) -> float:
    """As `statistics.median`, whose import costs as much as a tenth of reading a database."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def utc_now() -> str:
    """The present as rows and records write it: `2026-12-01T10:20:30Z`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def second_after(date: str) -> str:
    """The next second after a date as `utc_now` writes it."""
    return normal_date((datetime.fromisoformat(date.replace("Z", "+00:00")) + timedelta(seconds=1)).isoformat())


def normal_date(text: str) -> str:
    """An ISO date with a time zone in the one spelling of the database: UTC, whole seconds, `Z`.

    Raises:
        InvalidInput: when it is no such date.
    """
    try:
        moment = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput.of("date", repr(text), "ISO 8601 with a time zone, like 2026-12-01T10:20:30Z")
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def config_order(config: Mapping[str, Any]) -> tuple:
    """Sort key of the canonical order of configurations: fields by name, numbers by value. Needs nothing but the row."""
    return tuple((name, _sortable(value)) for name, value in sorted(config.items()))


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One measured, or failed, configuration of one problem on one device. Immutable; `id` is the hash of its content.

    Times are in us and rounded to 0.1 ns. `median_us`, `p10_us` and `p90_us` are computed from the samples when left out. In
    `errors` (name -> relative RMS error against float64) NaN is stored as infinity, as neither passes.

    Attributes:
        template: name of the template.
        cell: `cell_key(shape, direction)`.
        config: the configuration's fields.
        kernel_key: key of the compiled kernel, "" if it never compiled.
        source_hash: sha256 of the template's sources.
        cubin_sha256: hash of the device code, "" if unknown; equal code keeps its measurement across toolchains.
        device: facts (`Device.facts()`) and, besides them, anything of the moment: clocks, power, host.
        toolchain: versions (compiler, driver, torch).
        protocol: id of the measuring method, ending in its version number: "events-rotated-2" is newer than "events-rotated-1".
        samples_us: the single measurements.
        status: one of `STATUSES`.
        detail: why it failed, for people.
        grade: one of `GRADES`.
        date: UTC, `2026-12-01T10:20:30Z`.
        session: name of the run that measured it.

    Raises:
        InvalidInput: naming the field, what came, and what is allowed.
    """

    template: str
    cell: str
    config: dict[str, Any]
    kernel_key: str = ""
    source_hash: str = ""
    cubin_sha256: str = ""
    device: dict[str, Any] = field(default_factory=dict)
    toolchain: dict[str, Any] = field(default_factory=dict)
    protocol: str = ""
    samples_us: list[float] = field(default_factory=list)
    median_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    status: str
    detail: str = ""
    grade: str = "search"
    date: str
    session: str = ""

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is None and name not in ("template", "cell", "status"):
                self._set(name, "")
            elif not isinstance(value, str):
                raise InvalidInput.of(name, repr(value), "a string")
        if not self.template:
            raise InvalidInput.of("template", "an empty name", "the name of a template")
        split_cell(self.cell)
        if self.status not in STATUSES:
            raise InvalidInput.of("status", repr(self.status), ", ".join(STATUSES))
        if self.grade not in GRADES:
            raise InvalidInput.of("grade", repr(self.grade), ", ".join(GRADES))
        self._set("date", normal_date(self.date))
        for name in ("config", "device", "toolchain"):
            self._set(name, _plain(name, getattr(self, name)))
        self._set("errors", _error_values(self.errors))
        self._set_times()
        if self.status in NEEDS_DEVICE and not self.device.get("name"):
            raise InvalidInput.of("device", "facts without a name", f"the facts of the device that gave {self.status!r}")
        if self.status == "ok" and self.median_us is None:
            raise InvalidInput.of("median_us", "nothing", "a time in us, or samples_us, as the status is 'ok'")
        if self.status == "ok" and self.median_us <= 0:
            raise InvalidInput.of("median_us", self.median_us, "a time > 0, as the status is 'ok'")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _set_times(self) -> None:
        samples = [_microseconds("samples_us", value) for value in self.samples_us]
        self._set("samples_us", samples)
        computed = _summary(samples) if samples else (None, None, None)
        for name, from_samples in zip(("median_us", "p10_us", "p90_us"), computed, strict=True):
            value = getattr(self, name)
            self._set(name, from_samples if value is None else _microseconds(name, value))

    @cached_property
    def id(self) -> str:
        """sha256 hex of the content: equal measurements have equal ids on every machine."""
        return content_hash(self.to_dict())

    @property
    def device_model(self) -> str:
        """Model of the device, see `device_model`."""
        return device_model(self.device)

    def identity(self) -> dict[str, Any]:
        """The facts that identify the device."""
        return {name: value for name, value in self.device.items() if name in IDENTITY_FACTS}

    def device_state(self) -> dict[str, Any]:
        """The facts of the moment: clocks, power, temperature, host."""
        return {name: value for name, value in self.device.items() if name not in IDENTITY_FACTS}

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly fields without those at their default, so that a later field leaves the ids of old rows alone."""
        values = {}
        for each in fields(self):
            value = getattr(self, each.name)
            default = each.default_factory() if each.default_factory is not MISSING else each.default
            if value != default:
                values[each.name] = value
        if "errors" in values:
            values["errors"] = {name: "inf" if math.isinf(value) else value for name, value in self.errors.items()}
        return values

    @classmethod
    def trusted(cls, values: dict[str, Any]) -> TrialRow:
        """A row from all its fields in normal form, as the store wrote them: unchecked, and several times quicker."""
        row = object.__new__(cls)
        row.__dict__.update(values)
        return row

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrialRow:
        """Inverse of `to_dict`.

        Raises:
            InvalidInput: for a field that this version does not know, a missing one, or a value that is not allowed.
        """
        names = {each.name for each in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise InvalidInput.of("trial", f"the unknown field {unknown[0]!r}", ", ".join(sorted(names)))
        missing = [name for name in ("template", "cell", "config", "status", "date") if name not in values]
        if missing:
            raise InvalidInput.of("trial", f"a row without {missing[0]!r}", "rows with template, cell, config, status and date")
        return cls(**values)


def _plain(name: str, value: Any) -> dict[str, Any]:
    try:
        plain = json.loads(canonical_json(dict(value)))
    except (TypeError, ValueError) as error:
        raise InvalidInput.of(name, f"{value!r} ({error})", "a dict of JSON values") from error
    return plain


def _error_values(errors: Mapping[str, Any]) -> dict[str, float]:
    try:
        values = {str(name): float(value) for name, value in dict(errors).items()}
    except (TypeError, ValueError) as error:
        raise InvalidInput.of("errors", f"{errors!r} ({error})", "a dict of name -> relative RMS error") from error
    return {name: math.inf if math.isnan(value) else value for name, value in values.items()}


def _microseconds(name: str, value: Any) -> float:
    try:
        time = round(float(value), 4)
    except (TypeError, ValueError):
        time = math.nan
    if not (time >= 0 and math.isfinite(time)):
        raise InvalidInput.of(name, repr(value), "finite times in us, >= 0")
    return time


def _summary(samples: list[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile (nearest rank)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return (round(median(ordered), 4), ordered[round(0.1 * last)], ordered[round(0.9 * last)])
