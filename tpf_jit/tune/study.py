"""The rows of a tuning database as Optuna studies, one a problem and device model, for Optuna's own tools to look at.

Searches keep their study in memory and rebuild it from rows, so there is no second store to keep in step; this writes a copy.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from tpf_jit.errors import DatabaseError
from tpf_jit.tuning_db.rows import TrialRow


def write_studies(path: str | os.PathLike[str], trials: Iterable[TrialRow]) -> int:
    """Write an Optuna journal file; `optuna-dashboard FILE` and `JournalFileBackend(FILE)` read it.

    A row that was timed is a complete trial whose value is its median in us; all others are failed ones. Template, status,
    grade, session and the reason of a failure are user attributes. Rows without a device (`same_code`) measured nothing and are
    left out.

    Args:
        path: a file that does not exist yet.
        trials: rows of any number of problems and devices.

    Returns:
        How many studies it holds.

    Raises:
        DatabaseError: the file exists already, or cannot be written.
    """
    import optuna

    target = Path(path)
    if target.exists():
        raise DatabaseError(f"{target} exists already; studies are written into a new file")
    groups: dict[tuple[str, str], list[TrialRow]] = defaultdict(list)
    for row in trials:
        if row.device_model:
            groups[row.cell, row.device_model].append(row)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(target)))
        for (cell, model), rows in sorted(groups.items()):
            study = optuna.create_study(storage=storage, study_name=f"{cell} on {model}", direction="minimize")
            study.add_trials(_trials(optuna, sorted(rows, key=lambda row: (row.date, row.id))))
    except OSError as error:
        raise DatabaseError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        optuna.logging.set_verbosity(verbosity)
    return len(groups)


def _trials(optuna: Any, rows: list[TrialRow]) -> list[Any]:
    distributions = _distributions(optuna, rows)
    found = []
    for number, row in enumerate(rows):
        timed = row.status == "ok"
        date = datetime.fromisoformat(row.date.replace("Z", "+00:00")).replace(tzinfo=None)
        facts = {name: getattr(row, name) for name in ("template", "status", "grade", "session", "detail") if getattr(row, name)}
        found.append(
            optuna.trial.FrozenTrial(
                number=number,
                trial_id=number,
                state=optuna.trial.TrialState.COMPLETE if timed else optuna.trial.TrialState.FAIL,
                value=row.median_us if timed else None,
                datetime_start=date,
                datetime_complete=date,
                params=dict(row.config),
                distributions={name: distributions[name] for name in row.config},
                user_attrs={**facts, "id": row.id},
                system_attrs={},
                intermediate_values={},
            )
        )
    return found


def _distributions(optuna: Any, rows: list[TrialRow]) -> dict[str, Any]:
    """By field: a range where all values are numbers, else the values that occur."""
    values: dict[str, dict[Any, None]] = defaultdict(dict)
    for row in rows:
        for name, value in row.config.items():
            values[name][value] = None
    return {
        name: optuna.distributions.IntDistribution(min(tried), max(tried))
        if all(type(value) is int for value in tried)
        else optuna.distributions.CategoricalDistribution(list(tried))
        for name, tried in values.items()
    }
