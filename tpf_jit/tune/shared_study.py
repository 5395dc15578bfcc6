"""One cell that several machines search together, through an Optuna study in a PostgreSQL (or MySQL) database.

For the rare cell that is too large for one GPU; many cells are better divided by `cells.shard`. Each machine keeps its own tuning
database and measures what it asks for; the study only says who has which configuration, and what came of it. Rows are united
afterwards as always.

A configuration belongs to the lowest-numbered live trial that has chosen it. The server numbers trials without gaps, so the first
ones take the order's configurations by number and never collide. Later choices may: a trial publishes its choice, waits until
those numbered below have published theirs, and gives way to an equal one. A trial that has run for longer than `stale_s` was
somebody's who is gone; what it had is free again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.tune import order

SERVERS = ("postgresql", "mysql")
"""Optuna's own advice is not to share an SQLite file."""
CONFIG = "config"
"""Attribute of a trial: canonical JSON of its configuration."""
BEGAN = "began"
"""Attribute of a trial: seconds since 1970 when it was chosen, as time zones of machines differ."""
PUBLISH_S = 10.0
"""Longest wait for a lower-numbered trial to publish its choice."""
_POLL_S = 0.02
_ASKS = 8


def open_storage(url: str) -> Any:
    """Optuna's storage on a database server; its tables are made if need be.

    Raises:
        InvalidInput: the URL names no server of `SERVERS`, or its driver is not installed.
        DatabaseError: the server cannot be reached.
    """
    import optuna
    import sqlalchemy

    scheme, separator, rest = url.partition("://")
    if not separator or scheme.partition("+")[0] not in SERVERS:
        raise InvalidInput.of("storage", repr(scheme), "postgresql://user@host/database, or mysql://")
    if scheme == "postgresql" and importlib.util.find_spec("psycopg2") is None:
        scheme = "postgresql+psycopg"
    problem: Exception | None = None
    for attempt in range(5):
        try:
            with order.quiet(optuna):
                return optuna.storages.RDBStorage(f"{scheme}://{rest}", engine_kwargs={"pool_pre_ping": True})
        except ImportError as error:
            raise InvalidInput.of("storage", repr(scheme), "a server whose driver is installed: pip install psycopg") from error
        except sqlalchemy.exc.OperationalError as error:
            raise DatabaseError(f"the study's database cannot be reached: {error.orig}") from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            # Machines that begin at the same moment make the tables at the same moment; all but one see them exist then.
            problem = error
            time.sleep(0.2 * (attempt + 1))
    raise DatabaseError(f"the study's database cannot be used: {problem}") from problem


class SharedSource:
    """A `Source` whose configurations are asked for and told in a study that other machines use as well.

    Args:
        storage: see `open_storage`.
        name: of the study: the same on all machines that search this cell on this device model.
        ordered: all legal configurations, in an order that is the same on all machines.
        starters: of them, how many are tried before Optuna's sampler is asked; all when left out.
        stale_s: seconds after which a trial's owner counts as gone.
        seed: of the sampler.
    """

    def __init__(
        self,
        storage: Any,
        name: str,
        ordered: Sequence[Any],
        starters: int | None = None,
        stale_s: float = 600.0,
        seed: int | None = None,
    ) -> None:
        import optuna

        self._optuna = optuna
        self._legal = {order.config_json(config): config for config in ordered}
        self.total = len(self._legal)
        self._texts = list(self._legal)
        self._starters = self.total if starters is None else min(starters, self.total)
        self._stale_s = stale_s
        self._values, self._axes = order.axes(optuna, ordered)
        self._by_params = {self._key(self._params(text)): text for text in self._texts}
        self._open: dict[str, Any] = {}
        with order.quiet(optuna):
            sampler = _sampler(optuna, self._axes, self._forced, seed)
            self._study = optuna.create_study(
                storage=storage, study_name=name, direction="minimize", sampler=sampler, load_if_exists=True
            )
        self._trials: list[Any] = []
        self._force: str | None = None
        self._lost: set[int] = set()
        """Trials that were begun and never chose: their processes were killed in between."""

    def ask(self) -> Any | None:
        for number in range(self.total + _ASKS):
            taken = self._taken()
            if len(taken) == self.total or self._converged():
                return None
            # After several proposals that were of no use, the first free one of the order is.
            self._force = next(text for text in self._texts if text not in taken) if number >= _ASKS else None
            trial = self._study.ask(self._axes)
            text = self._by_params.get(self._key(trial.params))
            if text is None:
                self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
                continue
            trial.set_user_attr(BEGAN, time.time())
            trial.set_user_attr(CONFIG, text)
            if self._is_mine(trial.number, text):
                self._open[text] = trial
                return self._legal[text]
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return None

    def tell(self, config: Any, us: float | None) -> None:
        text = order.config_json(config)
        if text not in self._legal:
            return
        state = self._optuna.trial.TrialState
        outcome = state.PRUNED if us is None else state.COMPLETE
        trial = self._open.pop(text, None)
        if trial is not None:
            # Somebody who took this process for dead may have ended it.
            with contextlib.suppress(ValueError, RuntimeError):
                self._study.tell(trial, us, state=outcome)
        elif text not in self._taken(finished=True):
            # Measured earlier, and not by way of this study.
            known = self._optuna.trial.create_trial(
                params=self._params(text), distributions=self._axes, value=us, state=outcome, user_attrs={CONFIG: text}
            )
            self._study.add_trial(known)

    def close(self) -> None:
        """Give back what was asked for and not measured."""
        for trial in self._open.values():
            with contextlib.suppress(ValueError, RuntimeError):
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        self._open.clear()

    def _forced(self, number: int) -> Mapping[str, Any] | None:
        """What trial `number` takes without asking the sampler; None where the sampler is to propose."""
        if self._force is not None:
            return self._params(self._force)
        taken = self._taken()
        if number < self._starters and self._texts[number] not in taken:
            return self._params(self._texts[number])
        left = [text for text in self._texts[: self._starters] if text not in taken]
        # Machines that choose at the same moment mostly choose differently.
        return self._params(left[number % len(left)]) if left else None

    def _is_mine(self, number: int, text: str) -> bool:
        """Whether no lower-numbered live trial has chosen the same; waits until all of them have published."""
        end = time.monotonic() + PUBLISH_S
        while True:
            below = [trial for trial in self._refresh() if trial.number < number and self._lives(trial)]
            if any(trial.user_attrs.get(CONFIG) == text for trial in below):
                return False
            choosing = {trial.number for trial in below if CONFIG not in trial.user_attrs and not trial.state.is_finished()}
            if time.monotonic() > end:
                self._lost |= choosing
            if choosing <= self._lost:
                return True
            time.sleep(_POLL_S)

    def _taken(self, finished: bool = False) -> set[str]:
        """Configurations that have an outcome, or (unless `finished`) a live trial that works on them."""
        found = {
            trial.user_attrs[CONFIG]
            for trial in self._refresh()
            if CONFIG in trial.user_attrs and self._lives(trial) and (trial.state.is_finished() or not finished)
        }
        # What this process works on it knows to be alive, however long it takes.
        return found if finished else found | set(self._open)

    def _lives(self, trial: Any) -> bool:
        state = self._optuna.trial.TrialState
        if trial.state in (state.COMPLETE, state.PRUNED):
            return True
        if trial.state != state.RUNNING:
            return False
        return BEGAN not in trial.user_attrs or time.time() - trial.user_attrs[BEGAN] < self._stale_s

    def _converged(self) -> bool:
        """Beyond the starters: nothing of the last trials of all machines was better than what came before by more than noise."""
        if self._starters == self.total:
            return False
        best, stale = math.inf, 0
        for trial in self._trials:
            if trial.state == self._optuna.trial.TrialState.COMPLETE:
                gained = trial.value < best * (1 - order.GAIN)
                stale = 0 if gained else stale + 1
                best = min(best, trial.value)
        return stale >= order.PATIENCE

    def _refresh(self) -> list[Any]:
        self._trials = self._study.get_trials(deepcopy=False)
        return self._trials

    def _params(self, text: str) -> dict[str, Any]:
        return order.params(self._legal[text], self._values, self._axes)

    @staticmethod
    def _key(params: Mapping[str, Any]) -> str:
        return order.canonical_json(dict(params))


def _sampler(optuna: Any, axes: Mapping[str, Any], forced: Any, seed: int | None) -> Any:
    class Numbered(optuna.samplers.TPESampler):
        """What `forced` says for a trial's number; else TPE over all machines' trials."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return dict(axes)

        def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
            params = forced(trial.number)
            return super().sample_relative(study, trial, search_space) if params is None else dict(params)

    return Numbered(seed=seed, multivariate=True, constant_liar=True)
