"""Which configuration to try next: enumeration in a good order where there are few, Optuna by ask-and-tell above.

The order decides only how soon the answer is good, never what it is (few configurations: all are measured). It comes from the
nearest tuned cells where there are any: rankings transfer well between crops, between siblings of a chip, and from an older
version of the template, while one winner alone does not. Otherwise, and behind what the neighbours know, it is analytic: the
template's own cost model if it has one (an optional method ``cost(shape, config) -> float``, lower first), else that of
`tune.cost`, else closeness to its default. A far neighbour is mixed with the analytic order instead of leading it.

A `Source` hands out configurations (`ask`) and learns what came of them (`tell`), also of those measured earlier or elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tpf_jit import nearest as neighbours
from tpf_jit.device import sibling_class
from tpf_jit.templates.base import canonical_json, config_to_dict
from tpf_jit.tune import cost as cost_model

THIN = 8
"""A neighbour with fewer measured configurations is passed over for one up to a distance of 1 further off."""
FAR = 2.0
"""Distance from which a neighbour's order is only mixed in. 1 is a factor of two in the crop."""
NEIGHBOURS = 4
"""Cells nearer than `FAR` whose rankings take turns, as what is best may alternate with the crop: waves fill, or leave a gap."""
FIELD_WEIGHTS = {"crop": 1.0, "rows": 0.25, "batch": 0.125}
OTHER_WEIGHT = 0.5
"""Cost of a factor of two in a field of a shape, and of a differing text."""
STARTERS = 64
"""Configurations of the order that are measured before Optuna's sampler is asked."""
PATIENCE = 64
"""Optuna's search ends after this many distinct configurations without a gain."""
GAIN = 0.01
"""Relative gain that counts; smaller ones are within noise."""

_log = logging.getLogger("tpf_jit")


def config_json(config: Any) -> str:
    """Canonical JSON of a configuration: its identity."""
    return canonical_json(config_to_dict(config))


class Source(Protocol):
    """Hands out configurations to try."""

    total: int
    """Configurations there are."""

    def ask(self) -> Any | None:
        """The next configuration, never the same twice nor one already told; None when the search is over."""
        ...

    def tell(self, config: Any, us: float | None) -> None:
        """Learn a configuration's time in us; None if it failed or was stopped."""
        ...

    def close(self) -> None:
        """The search is over; what was handed out and not told was not tried."""
        ...


@dataclass(frozen=True)
class Neighbour:
    """The tuned cell whose ranking is borrowed."""

    cell: str
    device: str
    distance: float
    ranking: tuple[str, ...]
    """Canonical JSON of its configurations, fastest first."""


def analytic_order(template: Any, shape: Any, configs: Sequence[Any]) -> list[Any]:
    """Configurations by a cost model (`tune.cost`), or by closeness to the default; the default comes first."""
    default = template.default(shape)
    cost = cost_model.model(template)

    def key(config: Any) -> tuple:
        if config == default:
            return (0, 0.0, 0)
        if cost is not None:
            return (1, float(cost(shape, config)), 0)
        resources = template.resources(shape, config)
        return (1, _config_distance(default, config), -resources.threads * resources.ctas_per_sm)

    return sorted(configs, key=key)


def _config_distance(a: Any, b: Any) -> float:
    return sum(_value_distance(value, config_to_dict(b).get(name)) for name, value in config_to_dict(a).items())


def _value_distance(a: Any, b: Any) -> float:
    if type(a) is int and type(b) is int and a >= 0 and b >= 0:
        return abs(math.log2((1 + a) / (1 + b)))
    return 0.0 if a == b else 1.0


def shape_distance(a: Any, b: Any) -> float:
    """How far two problems are apart for tuning; 0 = equal, inf = of different kinds.

    The dispatcher's distance, and 1 for each trait that makes it other code (dtypes, head-dim tile, mask); for shapes of other
    operations, `FIELD_WEIGHTS`.
    """
    if type(a) is not type(b) or not dataclasses.is_dataclass(a):
        return 0.0 if a == b else math.inf
    try:
        return neighbours.distance(a, b) + sum(getattr(a, name) != getattr(b, name) for name in neighbours.SAME)
    except AttributeError:
        pass
    total = 0.0
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        total += FIELD_WEIGHTS.get(field.name, OTHER_WEIGHT) * _value_distance(x, y)
    return total


def around(shape: Any, direction: str, device: str, rows: Iterable[Any]) -> list[Neighbour]:
    """The nearest tuned cells among trial rows of one template, nearest first, on this device model before others.

    Args:
        shape: the problem to be tuned.
        direction: ``forward``, ``forward_training``, ``backward_stats``, ``backward_key`` or ``backward_query``.
        device: its device model (`tuning_db.device_model`).
        rows: trial rows of the template, of any cell and device, less those that are current for this very cell (a sweep that
            resumes would else take its own beginning for a neighbour); rows without a time do not matter.

    Returns:
        Up to `NEIGHBOURS` that are nearer than `FAR`, or one that is not.
    """
    times: dict[tuple[str, str], dict[str, list[tuple[bool, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.status in ("ok", "slow") and row.median_us is not None:
            times[row.cell, row.device_model][canonical_json(row.config)].append((row.status == "slow", row.median_us))
    found: list[Neighbour] = []
    for (cell, model), configs in sorted(times.items()):
        text, _, cell_direction = cell.rpartition("/")
        if cell_direction != direction:
            continue
        try:
            distance = shape_distance(shape, type(shape).parse(text))
        except (AttributeError, ValueError):
            continue
        if model != device:
            # The same die with another memory is a sibling; anything else is mixed with the analytic order.
            chip = sibling_class(device.rsplit("/", 2)[0])
            distance += 0.5 if chip is not None and sibling_class(model.rsplit("/", 2)[0]) == chip else FAR
        rank = {
            config: (min(slow for slow, _ in seen), statistics.median(us for _, us in seen)) for config, seen in configs.items()
        }
        ranking = tuple(sorted(rank, key=lambda config: (*rank[config], config)))
        if math.isfinite(distance):
            found.append(Neighbour(cell, model, distance, ranking))
    found.sort(key=lambda each: (each.distance + (len(each.ranking) < THIN), -len(each.ranking)))
    if not found or found[0].distance >= FAR:
        return found[:1]
    return [each for each in found if each.distance < FAR][:NEIGHBOURS]


def plan(configs: Sequence[Any], analytic: Sequence[Any], *near: Neighbour) -> list[Any]:
    """All of `configs` in the order to try them, by the neighbours' rankings in turns."""
    if not near:
        return list(analytic)
    legal = {config_json(config): config for config in configs}
    rankings = [[legal[text] for text in each.ranking if text in legal] for each in near]
    borrowed = [config for turn in itertools.zip_longest(*rankings) for config in turn if config is not None]
    if near[0].distance < FAR:
        return _unique([*borrowed, *analytic])
    mixed = [config for pair in zip(borrowed, analytic, strict=False) for config in pair]
    return _unique([*mixed, *borrowed, *analytic])


def _unique(configs: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(configs))


class EnumeratedSource:
    """Every configuration once, in the given order."""

    def __init__(self, ordered: Sequence[Any]) -> None:
        self.total = len(ordered)
        self._waiting = {config_json(config): config for config in ordered}

    def ask(self) -> Any | None:
        if not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))

    def tell(self, config: Any, us: float | None) -> None:
        self._waiting.pop(config_json(config), None)

    def close(self) -> None:
        pass


class OptunaSource:
    """Optuna's TPE sampler over the legal configurations, by ask-and-tell.

    The first `starters` come from the order; then the sampler proposes. A proposal that is illegal or already known never
    leaves this class: the sampler learns of it, and after a few such the next unseen configuration of the order is taken. The
    study lives in memory and is rebuilt from the database's rows by `tell`. Numbers are given to the sampler by rank among the
    values that occur, so that 64, 128, 192 are equally spaced neighbours.
    """

    _ASKS = 8

    def __init__(
        self, ordered: Sequence[Any], seed: int | None = None, starters: int = STARTERS, patience: int = PATIENCE
    ) -> None:
        import optuna

        self._optuna = optuna
        self._legal = {config_json(config): config for config in ordered}
        self.total = len(self._legal)
        self._unseen = dict(self._legal)
        self._starters = starters
        self._patience = patience
        self._stale = 0
        self._best = math.inf
        self._open: dict[str, Any] = {}
        self._values, self._distributions = axes(optuna, ordered)
        self._by_params = {self._params_key(self._params(config)): text for text, config in self._legal.items()}
        with quiet(optuna):
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
            self._study = optuna.create_study(direction="minimize", sampler=sampler)

    def ask(self) -> Any | None:
        if not self._unseen or self._stale >= self._patience:
            return None
        if self._starters > 0:
            self._starters -= 1
            return self._take(next(iter(self._unseen)))
        for _ in range(self._ASKS):
            trial = self._study.ask(self._distributions)
            text = self._by_params.get(self._params_key(trial.params))
            if text in self._unseen:
                self._open[text] = trial
                return self._unseen.pop(text)
            # Pruned: the sampler counts the place as bad. Failed: it forgets the ask, as it knows the place already.
            state = self._optuna.trial.TrialState
            self._study.tell(trial, state=state.PRUNED if text is None else state.FAIL)
        return self._take(next(iter(self._unseen)))

    def tell(self, config: Any, us: float | None) -> None:
        text = config_json(config)
        if text not in self._legal:
            return
        self._unseen.pop(text, None)
        state = self._optuna.trial.TrialState
        trial = self._open.pop(text, None)
        outcome = state.PRUNED if us is None else state.COMPLETE
        if trial is not None:
            self._study.tell(trial, us, state=outcome)
        else:
            # Measured earlier or elsewhere. Cheaper than asking first: the sampler need not think.
            create = self._optuna.trial.create_trial
            known = create(params=self._params(config), distributions=self._distributions, value=us, state=outcome)
            self._study.add_trial(known)
        if us is not None and us < self._best * (1 - GAIN):
            self._stale = 0
        else:
            self._stale += 1
        self._best = min(self._best, math.inf if us is None else us)

    def close(self) -> None:
        pass

    def _take(self, text: str) -> Any:
        config = self._unseen.pop(text)
        self._open[text] = self._enqueued(config)
        return config

    def _enqueued(self, config: Any) -> Any:
        self._study.enqueue_trial(self._params(config))
        return self._study.ask(self._distributions)

    def _params(self, config: Any) -> dict[str, Any]:
        return params(config, self._values, self._distributions)

    @staticmethod
    def _params_key(params: dict[str, Any]) -> str:
        return canonical_json(params)


def axes(optuna: Any, configs: Sequence[Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(values of each field that varies, in order; Optuna's distribution of each): numbers by rank among their values."""
    distributions = optuna.distributions
    seen: dict[str, set[Any]] = defaultdict(set)
    for config in configs:
        for name, value in config_to_dict(config).items():
            seen[name].add(value)
    values = {name: sorted(found) for name, found in seen.items() if len(found) > 1}
    spread: dict[str, Any] = {}
    for name, found in values.items():
        if all(type(value) is int for value in found):
            spread[name] = distributions.IntDistribution(0, len(found) - 1)
        else:
            spread[name] = distributions.CategoricalDistribution(found)
    return values, spread


def params(config: Any, values: dict[str, list[Any]], distributions: dict[str, Any]) -> dict[str, Any]:
    """A configuration as Optuna's parameters, on the `axes` of its space."""
    fields = config_to_dict(config)
    # A distribution of choices takes the value itself, one of whole numbers the value's rank.
    return {
        name: fields[name] if hasattr(distributions[name], "choices") else found.index(fields[name])
        for name, found in values.items()
    }


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Without Optuna's line about the new study and its notes about options that older releases call experimental."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(level)


def make_source(ordered: Sequence[Any], enumerate_limit: int, seed: int | None = None) -> Source:
    """Enumeration up to `enumerate_limit` configurations, Optuna above (without Optuna: the first ones of the order)."""
    if len(ordered) <= enumerate_limit:
        return EnumeratedSource(ordered)
    try:
        return OptunaSource(ordered, seed)
    except ImportError:
        _log.warning("optuna is not installed: of %d configurations the first %d are tried", len(ordered), enumerate_limit)
        return EnumeratedSource(ordered[:enumerate_limit])
