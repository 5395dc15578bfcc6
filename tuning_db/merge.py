"""Measurements as sorted JSON lines: text to review and to keep in git, and the union of such files.

The first line names the format, every other line is one trial or one kernel with all it refers to. Lines are sorted and rows
are keyed by their content, so exporting is deterministic, and merging is a set union: order-free and repeatable.

Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpf_jit.errors import DatabaseError, InvalidInput
from tpf_jit.tuning_db.rows import TrialRow, canonical_json

FORMAT = "tpf_jit.tuning_db"
VERSION = 1
HEADER = {"format": FORMAT, "version": VERSION}

KERNEL_FIELDS = ("key", "template", "variant", "config", "arch", "source_hash", "toolchain", "resources")
"""What of a kernel travels; the hash of the object file stays on the machine that built it."""


@dataclass
class Content:
    """Rows of a file or of several: trials by id, kernels by key."""

    trials: dict[str, TrialRow] = field(default_factory=dict)
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, other: Content) -> Content:
        """Union with another; returns itself."""
        self.trials.update(other.trials)
        for key, kernel in other.kernels.items():
            self.kernels[key] = preferred_kernel(self.kernels.get(key), kernel)
        return self

    def lines(self) -> list[str]:
        """The lines of a file, header first, without line ends."""
        trials = [canonical_json({"kind": "trial", "id": identity, **row.to_dict()}) for identity, row in self.trials.items()]
        kernels = [canonical_json({"kind": "kernel", **portable_kernel(kernel)}) for kernel in self.kernels.values()]
        return [canonical_json(HEADER), *sorted(kernels), *sorted(trials)]


def portable_kernel(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a kernel's row that travels.

    Raises:
        InvalidInput: when a field is missing.
    """
    missing = [name for name in KERNEL_FIELDS if name not in kernel]
    if missing:
        raise InvalidInput.of("kernel", f"a row without {missing[0]!r}", "rows with " + ", ".join(KERNEL_FIELDS))
    return {name: kernel[name] for name in KERNEL_FIELDS}


def preferred_kernel(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> dict[str, Any]:
    """Of two descriptions of one kernel key, the one that every merge order keeps."""
    if one is None:
        return dict(other)
    return min(portable_kernel(one), portable_kernel(other), key=canonical_json)


def read_lines(path: str | os.PathLike[str], check: bool = True) -> Content:
    """Rows of an exported file.

    Args:
        path: the file.
        check: recompute every trial's content hash and refuse a row that was altered.

    Raises:
        DatabaseError: naming the line: no such format, a newer version, a damaged or altered row. Nothing is returned then.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DatabaseError(f"{path} cannot be read: {error}") from error
    content = Content()
    header = False
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            if header:
                raise DatabaseError(f"{path}, line {number}: {error}") from error
            wanted = "JSON lines that `tpf-jit db export FILE` wrote; `tpf-jit db merge FILE` takes databases"
            raise DatabaseError(f"{path} is no export: it should hold {wanted}") from error
        try:
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            if "format" in values:
                header = _accept_header(values)
            elif not header:
                raise ValueError(f"the first line must be {canonical_json(HEADER)}")
            else:
                _add(content, values, check)
        except (ValueError, TypeError) as error:
            raise DatabaseError(f"{path}, line {number}: {error}") from error
    if not header:
        raise DatabaseError(f"{path} is empty; a file of measurements starts with {canonical_json(HEADER)}")
    return content


def _accept_header(values: dict[str, Any]) -> bool:
    if values["format"] != FORMAT or not isinstance(values.get("version"), int):
        raise ValueError(f"not a file of measurements: {canonical_json(values)[:200]}")
    if values["version"] > VERSION:
        raise ValueError(f"written by a newer tpf_jit (format {values['version']}, this version knows up to {VERSION})")
    return True


def _add(content: Content, values: dict[str, Any], check: bool) -> None:
    kind = values.pop("kind", None)
    if kind == "kernel":
        kernel = portable_kernel(values)
        content.kernels[kernel["key"]] = preferred_kernel(content.kernels.get(kernel["key"]), kernel)
    elif kind == "trial":
        identity = values.pop("id", None)
        row = TrialRow.from_dict(values)
        if check and identity != row.id:
            raise ValueError(f"the row was altered: its content has the hash {row.id}, the line says {identity}")
        if not isinstance(identity, str):
            raise ValueError("a trial without id")
        content.trials[identity] = row
    else:
        raise ValueError(f"unknown kind of row {kind!r}; known: kernel, trial")


def write_lines(path: str | os.PathLike[str], content: Content) -> int:
    """Write a file of rows, sorted and atomically; returns the number of trials.

    Raises:
        DatabaseError: when it cannot be written; an earlier file is then untouched.
    """
    path = Path(path)
    text = "\n".join(content.lines()) + "\n"
    try:
        write_atomically(path, text)
    except OSError as error:
        raise DatabaseError(f"{path} cannot be written: {error.strerror or error}") from error
    return len(content.trials)


def union(paths: Iterable[str | os.PathLike[str]], target: str | os.PathLike[str]) -> int:
    """Unite exported files into one, without a database; returns the number of trials.

    Raises:
        DatabaseError: see `read_lines` and `write_lines`.
    """
    content = Content()
    for path in paths:
        content.add(read_lines(path))
    return write_lines(target, content)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file so that readers see the old or the new one, also after a crash. Raises OSError."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _new_file_mode(path))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _new_file_mode(path: Path) -> int:
    # mkstemp makes private files, and asking for the umask would change it for other threads; the folder says what is usual here.
    return path.stat().st_mode & 0o777 if path.exists() else path.parent.stat().st_mode & 0o666
