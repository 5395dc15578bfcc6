"""Stored winners put to the test again: by compiling them (is it the same device code?) or by timing them (is it as fast?).

    confirm     recompiles stale winners; equal device code is stated in the database, and the measurement stays in force
    remeasure   times a sample of winners on this GPU and compares with what is stored; writes nothing
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import InvalidInput, MeasurementFailed, TpfError
from tpf_jit.shape import parse_key
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_from_dict
from tpf_jit.tune.build import Builder
from tpf_jit.tune.measure import Job
from tpf_jit.tuning_db import trust
from tpf_jit.tuning_db.rows import split_cell
from tpf_jit.tuning_db.winner import Winner

TOLERANCE = 0.05
"""Drift of a winner's time that is reported."""

SAME, OTHER, FAILED = "same code", "other code", "failed"
STEADY, DRIFTED = "steady", "drifted"


@dataclass(frozen=True)
class Verdict:
    """What became of one winner.

    Attributes:
        winner: the winner.
        outcome: "same code", "other code" or "failed" from `confirm`; "steady", "drifted" or "failed" from `remeasure`.
        detail: for people.
        us: time measured now, in us.
    """

    winner: Winner
    outcome: str
    detail: str = ""
    us: float | None = None

    @property
    def drift(self) -> float | None:
        """Relative change of the time: 0.05 is 5 % slower than stored."""
        return None if self.us is None else self.us / self.winner.us - 1.0


def confirm(
    winners: Sequence[Winner], store: Any, builder: Builder, present: Callable[[str], trust.Present | None]
) -> Iterator[Verdict]:
    """Compile winners as they would be today; where the device code is the measured one, append the statement that says so.

    Args:
        winners: those to compile, runners-up among them.
        store: the open database that gets the statements.
        builder: compiles.
        present: what a template is compiled from today.
    """
    begun = []
    for winner in winners:
        try:
            spec = _spec(winner)[2]
            begun.append((winner, spec, builder.submit(spec)))
        except TpfError as error:
            yield Verdict(winner, FAILED, str(error))
    for winner, spec, future in begun:
        try:
            built = builder.finish(spec, future)
        except Exception as error:  # noqa: BLE001 - one that does not compile any more must not stop the others
            yield Verdict(winner, FAILED, str(error))
            continue
        now = present(winner.template)
        if now is not None and built.cubin_sha256 and built.cubin_sha256 == winner.cubin_sha256:
            store.put_trial(trust.statement(winner, spec.key, now))
            yield Verdict(winner, SAME, "the measurement stays in force")
        elif built.cubin_sha256 and winner.cubin_sha256:
            yield Verdict(winner, OTHER, "tune again")
        else:
            yield Verdict(winner, FAILED, "the device code of the measurement or of the object is not known")


def sample(winners: Iterable[Winner], count: int, seed: int | None = None) -> list[Winner]:
    """`count` winners at random, all if there are fewer.

    Raises:
        InvalidInput: when `count` is below 1.
    """
    if count < 1:
        raise InvalidInput.of("count", count, "an integer >= 1")
    ordered = sorted(winners, key=lambda winner: (winner.device, winner.cell))
    return random.Random(seed).sample(ordered, min(count, len(ordered)))


def remeasure(
    winners: Sequence[Winner],
    builder: Builder,
    make_measurer: Callable[[Any, Any], Any],
    tolerance: float = TOLERANCE,
) -> Iterator[Verdict]:
    """Check and time winners on this GPU, one after another.

    Args:
        winners: of this GPU's model.
        builder: compiles what is in no cache.
        make_measurer: `(template, shape) -> Measurer`.
        tolerance: relative difference up to which a time counts as steady.

    Raises:
        MeasurementFailed: the device was lost.
    """
    for winner in winners:
        try:
            template, shape, spec = _spec(winner)
            built = builder.get(spec)
        except Exception as error:  # noqa: BLE001 - refused or not compiling today: a verdict of its own
            yield Verdict(winner, FAILED, str(error))
            continue
        job = Job(spec.key, config_from_dict(template.Config, winner.config), built.binary, spec.symbol, built.kind)
        with contextlib.closing(make_measurer(template, shape)) as measurer:
            found = measurer.measure(job)
        if found.fatal:
            raise MeasurementFailed(f"the GPU takes no more work after {winner.cell}: {found.detail}")
        if found.status != "ok" or found.median_us is None:
            yield Verdict(winner, FAILED, f"{found.status}: {found.detail}")
            continue
        # Where the code is another one, another time is no sign of a machine that changed.
        known = winner.cubin_sha256 and built.cubin_sha256
        same = "compiled to other code than was measured" if known and built.cubin_sha256 != winner.cubin_sha256 else ""
        steady = abs(found.median_us / winner.us - 1.0) <= tolerance
        yield Verdict(winner, STEADY if steady else DRIFTED, same, found.median_us)


def _spec(winner: Winner) -> tuple[Any, Any, KernelSpec]:
    """Template, shape and kernel of a winner. Raises TpfError when it is refused today."""
    template = registry.get(winner.template)
    shape = parse_key(split_cell(winner.cell)[1])
    try:
        config = config_from_dict(template.Config, winner.config)
    except ValueError as error:
        raise InvalidInput(f"{winner.template}: {error}") from error
    return template, shape, KernelSpec.make(template, shape, config)
