"""The read-write tuning database: kernels, trials, winners, leases, and their exchange between machines.

Safe with many processes on one host (see `connection`). WAL needs shared memory, so a database belongs on a local disk, not on
NFS: let every host write its own and `merge` them.

A file that turns out to be damaged is set aside (kept, under another name), a new one takes its place, and the rows that are
still readable and match their content hash move over, with one warning.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlite_utils import Database

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.tuning_db import contents, merge, prune
from tpf_jit.tuning_db.audit import audit
from tpf_jit.tuning_db.connection import DatabaseFile
from tpf_jit.tuning_db.reader import select_evidence, select_trials, user_database_path
from tpf_jit.tuning_db.rows import SAME_CODE, TrialRow, canonical_json, content_hash, device_model, split_cell, utc_now
from tpf_jit.tuning_db.winner import Winner, rank

BATCH = 200
"""Rows a transaction when many are added: short enough that other writers hardly wait."""

LONGEST_LEASE_S = 3600.0
"""No process reserves work for longer at once (`TuneOptions.lease_s` and `many.CELL_LEASE_S` keep to it)."""

T = TypeVar("T")

_KERNELS = """SELECT k.key, k.template, k.variant, c.fields AS config, k.arch, k.source_hash, t.facts AS toolchain,
    k.resources, o.sha256, o.kind, o.size, o.compile_s, o.date FROM kernel k JOIN config c ON c.id = k.config
    JOIN toolchain t ON t.id = k.toolchain LEFT JOIN object o ON o.key = k.key"""


_REFERRED = (
    ("device", "id", (("trial", "device"),)),
    ("problem", "key", (("trial", "cell"),)),
    ("config", "id", (("trial", "config"), ("kernel", "config"))),
    ("toolchain", "id", (("trial", "toolchain"), ("kernel", "toolchain"))),
)


class TuningStore:
    """An open tuning database. A context manager; usable from several threads, but not across a fork.

    Args:
        path: the file, made with its folder if need be; see `reader.user_database_path` when left out.
        timeout: longest wait for other writers, in seconds.

    Attributes:
        path: the file.

    Raises:
        DatabaseError: from every method, with one sentence that says what is wrong and what to do: full or read-only disk, a
            lock that is not released, a file of another application or of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, timeout: float = 30.0) -> None:
        self.path = user_database_path(path)
        self._file = DatabaseFile(self.path, timeout, _write_trial)

    @property
    def writable(self) -> bool:
        """False where the file or its folder is read-only; reading works then."""
        return self._file.writable

    def __enter__(self) -> TuningStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    # kernels

    def put_kernel(self, row: Mapping[str, Any]) -> None:
        """Keep a compiled kernel and the hash of its object file; storing it again replaces what was known.

        Args:
            row: key, template, variant, config, arch, source_hash, toolchain, resources (`merge.KERNEL_FIELDS`); and of the
                object sha256, kind, size (bytes) and compile_s.
        """
        kernel = merge.portable_kernel(row)
        missing = [name for name in ("sha256", "kind", "size") if row.get(name) is None]
        if missing:
            raise InvalidInput.of("kernel", f"a row without {missing[0]!r}", "rows with sha256, kind and size")
        built = {name: row.get(name) for name in ("key", "sha256", "kind", "size", "compile_s")}

        def work(db: Database) -> None:
            _write_kernel(db, kernel)
            db["object"].upsert({**built, "date": utc_now()}, pk="key")

        self._file.write(work)

    def kernels(self, template: str | None = None) -> list[dict[str, Any]]:
        """Compiled kernels by key; those built on this machine have sha256, kind, size, compile_s and date as well."""
        where, values = _where({"k.template": template})
        sql = f"{_KERNELS} WHERE {where} ORDER BY k.key"
        return self._file.read(lambda db: [_decode_kernel(row) for row in db.query(sql, values)])

    # trials

    def put_trial(self, row: TrialRow) -> str:
        """Append one trial; returns its id. The same content again changes nothing."""
        self._file.write(lambda db: _write_trial(db, row))
        return row.id

    def put_trials(self, rows: Iterable[TrialRow]) -> int:
        """Append trials in batches; returns how many were new."""
        return self._batches(list(rows), _write_trial)

    def trials(
        self, cell: str | None = None, device: Any = None, template: str | None = None, status: str | None = None
    ) -> list[TrialRow]:
        """Trials that match every given condition, oldest first.

        Args:
            cell: name of the cell.
            device: a device model (`NVIDIA H200/132sm/144g`), a device name, or facts; see `rows.device_model`.
            template: name of the template.
            status: one of `rows.STATUSES`.
        """
        where, values = _matching(cell, device, template, {"t.status": status})
        return self._file.read(lambda db: [row for _, row in select_trials(db.conn, where, values, trusted=True)])

    def best(self, cell: str, device: Any) -> Winner | None:
        """The winner of a cell, derived from its rows by `winner.rank`; None when nothing may win.

        Args:
            cell: name of the cell.
            device: as for `trials`; a mere name must not stand for several models.
        """
        model = _model(device)
        where = "t.cell = ? AND (t.model = ? OR t.device IN (SELECT id FROM device WHERE name = ?))"
        rows = self._file.read(lambda db: select_evidence(db.conn, where, (cell, model, model)))
        models = sorted({row.model for row in rows})
        if len(models) > 1:
            raise InvalidInput.of("device", f"{model!r}, which names several models", ", ".join(models))
        ranked = rank(rows)
        return ranked[0] if ranked else None

    def cells(self) -> list[str]:
        """Names of all cells that have trials."""
        return self._file.read(lambda db: [row["cell"] for row in db.query("SELECT DISTINCT cell FROM trial ORDER BY cell")])

    def devices(self) -> list[str]:
        """Models of all devices that have trials."""
        sql = "SELECT DISTINCT model FROM trial WHERE model != '' ORDER BY model"
        return self._file.read(lambda db: [row["model"] for row in db.query(sql)])

    # leases

    def claim(self, cell: str, work: str, owner: str, ttl_s: float) -> bool:
        """Reserve a piece of work (a configuration's JSON, a step of a sweep) for `ttl_s` seconds; claiming again extends it.

        Returns:
            False while another owner holds it. What a dead process held is free once its time is over. One that ends further
            ahead than any lease lasts was made before the clock was set back, and does not count.
        """
        now = time.time()
        latest = now + max(ttl_s, LONGEST_LEASE_S)

        def attempt(db: Database) -> bool:
            db.execute("DELETE FROM lease WHERE expires <= ? OR expires > ?", [now, latest])
            held = list(db.query("SELECT owner FROM lease WHERE cell = ? AND work = ?", [cell, work]))
            if held and held[0]["owner"] != owner:
                return False
            db["lease"].upsert({"cell": cell, "work": work, "owner": owner, "expires": now + ttl_s}, pk=("cell", "work"))
            return True

        return self._file.write(attempt)

    def release(self, cell: str, work: str, owner: str) -> bool:
        """Give a reservation back; False if `owner` does not hold it."""
        sql = "DELETE FROM lease WHERE cell = ? AND work = ? AND owner = ?"
        return self._file.write(lambda db: db.execute(sql, [cell, work, owner]).rowcount > 0)

    def leases(self) -> list[dict[str, Any]]:
        """Reservations in force: cell, work, owner, expires (seconds since 1970)."""
        sql = "SELECT cell, work, owner, expires FROM lease WHERE expires > ? ORDER BY cell, work"
        return self._file.read(lambda db: list(db.query(sql, [time.time()])))

    # exchange

    def export(
        self, path: str | os.PathLike[str], device: Any = None, template: str | None = None, grade: str | None = None
    ) -> int:
        """Write the trials that match every given condition, and all kernels they name, as sorted JSON lines (see `merge`). What
        is said of their device code (`trust.statement`), which names no device, goes with them.

        Args:
            path: file to write, replaced atomically.
            device, template: as for `trials`.
            grade: one of `rows.GRADES`.

        Returns:
            Number of trials written, with what is said of them.
        """
        where, values = _matching(None, device, template, {"t.grade": grade})
        stored = self._file.read(lambda db: list(select_trials(db.conn, where, values)))
        if device is not None or grade is not None:
            said = self._file.read(lambda db: list(select_trials(db.conn, f"t.status = '{SAME_CODE}'")))
            measured, known = {_code(row) for _, row in stored}, {identity for identity, _ in stored}
            stored += [(identity, row) for identity, row in said if identity not in known and _code(row) in measured]
        altered = [identity for identity, row in stored if identity != row.id]
        if altered:
            raise DatabaseError(f"{self.path}: trial {altered[0]} was altered; `tpf-jit db verify` shows all that is wrong")
        content = merge.Content(dict(stored))
        selected = device is not None or template is not None or grade is not None
        named = {row.kernel_key for row in content.trials.values()}
        content.kernels = {kernel["key"]: kernel for kernel in self.kernels() if not selected or kernel["key"] in named}
        return merge.write_lines(path, content)

    def import_(self, path: str | os.PathLike[str]) -> dict[str, int]:
        """Add the rows of an exported file. A damaged or altered line refuses the whole file.

        Returns:
            How many `trials` and `kernels` were new.
        """
        return self._add(merge.read_lines(path))

    def merge(self, other: str | os.PathLike[str]) -> dict[str, int]:
        """Add the rows of another database, which is only read, or of an exported `.jsonl` file. Order does not matter.

        Of a damaged database those that can be read are added, with one warning.

        Returns:
            How many `trials` and `kernels` were new, and, if there are any, how many were `refused` because they were altered.
        """
        other = Path(other)
        if other.suffix == ".jsonl":
            return self.import_(other)
        if not other.is_file():
            raise DatabaseError(f"{other} does not exist")
        if self.path.exists() and other.samefile(self.path):
            return {"trials": 0, "kernels": 0}
        content, refused = contents.of_another(other)
        return {**self._add(content), **({"refused": refused} if refused else {})}

    def verify(self) -> list[str]:
        """Everything that is wrong with the file, its schema or its rows, as sentences; empty when it is sound."""
        return self._file.read(lambda db: audit(db.conn, self.path))

    def prune(self, present: prune.Presents) -> dict[str, str]:
        """Drop the rows that decide nothing any more (see `prune.plan`), and what only they referred to.

        Args:
            present: what each template is compiled from today.

        Returns:
            Ids of the dropped trials, each with the reason.
        """

        def work(db: Database) -> dict[str, str]:
            # Planned inside the transaction, so that no row which another process adds meanwhile can need a dropped one.
            going = prune.plan(select_evidence(db.conn), present)
            for identity in going:
                db.execute("DELETE FROM trial WHERE id = ?", [identity])
            for table, column, users in _REFERRED:
                used = " UNION ".join(f"SELECT {name} FROM {user}" for user, name in users)
                db.execute(f"DELETE FROM {table} WHERE {column} NOT IN ({used})")
            return going

        return self._file.write(work)

    # inside

    def _add(self, content: merge.Content) -> dict[str, int]:
        kernels = self._batches([merge.portable_kernel(kernel) for kernel in content.kernels.values()], _merge_kernel)
        return {"trials": self.put_trials(content.trials.values()), "kernels": kernels}

    def _batches(self, rows: Sequence[T], write: Callable[[Database, T], bool]) -> int:
        added = 0
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            added += self._file.write(lambda db, batch=batch: sum([write(db, row) for row in batch]))
        return added


def _write_trial(db: Database, row: TrialRow) -> bool:
    op, shape, direction = split_cell(row.cell)
    facts = row.identity()
    device = _refer(db, "device", "facts", facts, name=facts.get("name", ""), model=device_model(facts))
    sql = "INSERT INTO problem (key, op, direction, shape) VALUES (?, ?, ?, ?) ON CONFLICT (key) DO NOTHING"
    db.execute(sql, [row.cell, op, direction, shape])
    values = {
        "id": row.id,
        "template": row.template,
        "cell": row.cell,
        "config": _refer(db, "config", "fields", row.config),
        "kernel_key": row.kernel_key,
        "source_hash": row.source_hash,
        "cubin_sha256": row.cubin_sha256,
        "device": device,
        "model": row.device_model,
        "device_state": canonical_json(row.device_state()),
        "toolchain": _refer(db, "toolchain", "facts", row.toolchain),
        "protocol": row.protocol,
        "samples_us": canonical_json(row.samples_us),
        "median_us": row.median_us,
        "p10_us": row.p10_us,
        "p90_us": row.p90_us,
        "errors": canonical_json(row.to_dict().get("errors", {})),
        "status": row.status,
        "detail": row.detail,
        "grade": row.grade,
        "date": row.date,
        "session": row.session,
    }
    # Not INSERT OR IGNORE, which would also swallow rows that break a constraint.
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    return db.execute(f"INSERT INTO trial ({names}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING", values).rowcount > 0


def _write_kernel(db: Database, kernel: Mapping[str, Any]) -> None:
    values = {
        "key": kernel["key"],
        "template": kernel["template"],
        "variant": canonical_json(dict(kernel["variant"])),
        "config": _refer(db, "config", "fields", dict(kernel["config"])),
        "arch": kernel["arch"],
        "source_hash": kernel["source_hash"],
        "toolchain": _refer(db, "toolchain", "facts", dict(kernel["toolchain"])),
        "resources": canonical_json(dict(kernel["resources"])),
    }
    db["kernel"].upsert(values, pk="key")


def _merge_kernel(db: Database, kernel: Mapping[str, Any]) -> bool:
    known = [_decode_kernel(row) for row in db.query(f"{_KERNELS} WHERE k.key = ?", [kernel["key"]])]
    if not known or merge.preferred_kernel(known[0], kernel) != merge.portable_kernel(known[0]):
        _write_kernel(db, kernel)
    return not known


def _refer(db: Database, table: str, column: str, content: Mapping[str, Any], **more: str) -> str:
    """Id of a row that is stored once by content, making it if need be."""
    identity = content_hash(content)
    values = {"id": identity, column: canonical_json(content), **more}
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT (id) DO NOTHING", values)
    return identity


def _decode_kernel(row: Mapping[str, Any]) -> dict[str, Any]:
    decoded = {name: json.loads(row[name]) for name in ("variant", "config", "toolchain", "resources")}
    return {name: decoded.get(name, value) for name, value in row.items() if value is not None}


def _where(conditions: Mapping[str, Any]) -> tuple[str, list[Any]]:
    given = {column: value for column, value in conditions.items() if value is not None}
    return " AND ".join(["1", *(f"{column} = ?" for column in given)]), list(given.values())


def _code(row: TrialRow) -> tuple[str, ...]:
    """What a statement speaks of: problem, template, configuration and device code."""
    return row.cell, row.template, canonical_json(row.config), row.cubin_sha256


def _matching(cell: str | None, device: Any, template: str | None, more: Mapping[str, Any]) -> tuple[str, list[Any]]:
    where, values = _where({"t.cell": cell, "t.template": template, **more})
    if device is None:
        return where, values
    return f"{where} AND (t.model = ? OR d.name = ?)", [*values, _model(device), _model(device)]


def _model(device: Any) -> str:
    return device if isinstance(device, str) else device_model(device)
