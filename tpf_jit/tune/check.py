"""Right before fast: the verdict a configuration needs before it may be timed, let alone win.

A kernel is run on fresh random inputs into outputs filled with NaN, compared with the template's float64 reference under the
workload's bounds, and run again: every repeat must be bitwise equal. Cases, each its own workload:
  - the problem itself, where it has rows with fewer of them if all would cost the reference too much;
  - a ragged one: an odd crop that fits no tile, and a handful of rows, unless the configuration was compiled for one crop or the
    operation has no problem of that crop;
  - the ragged one with other families of inputs (outliers, huge logits, a growing maximum), where the workload has them.

References are computed once a sweep and reused for every configuration; seeds are drawn anew for every sweep and kept in the
evidence.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpf_jit.errors import InvalidInput

RAGGED_CROP = 203
"""Odd, and no multiple of any tile: 203 = 64 * 3 + 11 = 128 + 75 = 192 + 11."""
RAGGED_ROWS = 5
FAMILIES = ("normal", "trained_like", "extreme", "adversarial", "small")
"""Families of inputs (design: numerics), of which each workload has some; a template with others names them in an attribute
`check_families`."""
REPEATS = 2
"""Further runs of the problem itself that must equal the first bit for bit."""
SCORES_LIMIT = {"cuda": 4 << 30, "cpu": 1 << 22}
"""Score elements (B I H N N) of the reference per case, by device type; rows are dropped until it fits."""


@dataclass(frozen=True)
class Case:
    """One checked problem: its shape, the seed of its inputs and their family."""

    shape: Any
    seed: int
    family: str = "normal"

    def __str__(self) -> str:
        return f"{self.shape.key()} ({self.family} inputs, seed {self.seed})"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check. `status` is a trial status: ``ok``, ``wrong`` or ``nondeterministic``."""

    status: str
    detail: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative RMS error by output over the cases, even when the verdict is bad."""

    @property
    def ok(self) -> bool:
        """Whether the configuration may be timed."""
        return self.status == "ok"


def plan(shape: Any, device_type: str = "cuda", seed: int | None = None, families: Sequence[str] = FAMILIES) -> list[Case]:
    """The cases for a problem. Shapes without `crop` (third-party operations) are checked as they are."""
    base = secrets.randbelow(1 << 31) if seed is None else seed
    names = {item.name for item in dataclasses.fields(shape)} if dataclasses.is_dataclass(shape) else set()
    if "crop" not in names:
        return [Case(shape, base + i, family) for i, family in enumerate(families)]
    whole, fewer = {}, {}
    if "rows" in names:
        per_row = shape.crop * shape.crop * getattr(shape, "heads", 1) * getattr(shape, "batch", 1)
        whole = {"rows": max(1, min(shape.rows, SCORES_LIMIT.get(device_type, SCORES_LIMIT["cpu"]) // per_row))}
        fewer = {"rows": min(shape.rows, RAGGED_ROWS)}
    cases = [Case(dataclasses.replace(shape, **whole), base)]
    crop = min(shape.crop - 1, RAGGED_CROP)
    if crop >= 1:
        crop -= 1 - crop % 2
        try:
            ragged = dataclasses.replace(shape, crop=crop, **fewer)
        except ValueError:  # of a third party's shape; InvalidInput is one
            ragged = shape
        cases += [Case(ragged, base + 1 + i, family) for i, family in enumerate(families)]
    return cases


def configure(workload: Any, config: Any) -> None:
    """Tell a workload whose arguments depend on it which configuration comes next; most have no such method."""
    if hasattr(workload, "configure"):
        workload.configure(config)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two outputs (torch tensors, or anything with a buffer) are equal bit for bit; NaN equals the same NaN."""
    if hasattr(a, "untyped_storage"):
        import torch

        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bytes_of(a), _bytes_of(b))
    return memoryview(a).tobytes() == memoryview(b).tobytes()


def _bytes_of(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Checker:
    """Verdicts for the configurations of one problem on one device.

    Args:
        template: the template whose workload and legality rules apply.
        shape: the problem being tuned.
        device: torch device (or its name) the kernels run on.
        seed: of the inputs; fresh when left out.
        wait: called after every launch; blocks until the device is done and raises what went wrong there.
    """

    def __init__(self, template: Any, shape: Any, device: Any, seed: int | None = None, wait: Callable[[], None] | None = None):
        self._template = template
        self._shape = shape
        self._device = device
        self._wait = wait or (lambda: None)
        device_type = str(device).split(":")[0]
        self.cases = plan(shape, device_type, seed, getattr(template, "check_families", FAMILIES))
        self._prepared: dict[Case, tuple[Any, Any, Any] | None] = {}

    @property
    def seed(self) -> int:
        """Seed of the first case, which the others follow."""
        return self.cases[0].seed

    def verdict(self, kernel_fn: Callable[..., Any], config: Any) -> Verdict:
        """Check one loaded kernel. Errors of the launch itself propagate: they are no verdict."""
        worst: dict[str, float] = {}
        checked = 0
        for index, case in enumerate(self.cases):
            if not self._applies(case, config):
                continue
            prepared = self._case(case)
            if prepared is None:
                continue
            configure(prepared[0], config)
            bad = self._judge(kernel_fn, prepared, REPEATS if index == 0 else 1, worst)
            if bad is not None:
                return Verdict(bad[0], f"{bad[1]} at {case}", worst)
            checked += 1
        if not checked:
            return Verdict("wrong", "the workload offers no inputs to check with")
        return Verdict("ok", f"right on {checked} cases, seed {self.seed}", worst)

    def close(self) -> None:
        """Drop inputs and references."""
        self._prepared.clear()

    def _applies(self, case: Case, config: Any) -> bool:
        if case.shape == self._shape:
            return True
        if self._template.check(case.shape, config) is not None:
            return False
        return self._template.variant(case.shape) == self._template.variant(self._shape)

    def _judge(
        self, kernel_fn: Callable[..., Any], prepared: tuple[Any, Any, Any], repeats: int, worst: dict[str, float]
    ) -> tuple[str, str] | None:
        workload, inputs, reference = prepared
        first = workload.run(kernel_fn, inputs)
        self._wait()
        errors = {name: float(value) for name, value in workload.errors(first, reference).items()}
        for name, value in errors.items():
            worst[name] = max(worst.get(name, 0.0), value if not math.isnan(value) else math.inf)
        bounds = workload.bounds()
        for name, bound in bounds.items():
            value = errors.get(name, math.inf)
            if not value <= bound:
                return "wrong", f"{name}: relative RMS error {value:.3g} above {bound:.3g}"
        for name, value in errors.items():
            if name not in bounds and not math.isfinite(value):
                return "wrong", f"{name}: not finite"
        if not bounds:
            return "wrong", "the workload states no error bound, so nothing shows that the result is right"
        for _ in range(repeats):
            again = workload.run(kernel_fn, inputs)
            self._wait()
            for name, value in first.items():
                if not same_bits(value, again[name]):
                    return "nondeterministic", f"{name}: a repeated run gave other bits"
        return None

    def _case(self, case: Case) -> tuple[Any, Any, Any] | None:
        """Workload, inputs and reference; None where the workload has no such family of inputs."""
        if case not in self._prepared:
            try:
                workload = self._template.workload(case.shape, self._device, case.seed, case.family)
                inputs = workload.make_inputs(case.seed)
            except InvalidInput:
                if case.family == "normal":
                    raise
                self._prepared[case] = None
            else:
                self._prepared[case] = workload, inputs, workload.reference(inputs)
        return self._prepared[case]
