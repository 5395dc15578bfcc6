"""The accuracy suite's work file: one line a result, so that a device lent for minutes can do hours of cases in slices.

JSON lines. The first says what every result has in common (device, versions, sources, settings); a run is continued only where
that is the same. Then come runs (who was there, with which versions) and results, appended as they are measured. A line that a
killed process left unfinished is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpf_jit.errors import DatabaseError, InvalidInput

Key = tuple[int, int, str, int, str]
"""Crop, head dim, family, seed, implementation."""


class WorkFile:
    """Results of one run or of several slices, in memory and, where a path is given, on disk.

    Args:
        path: the file; None keeps results in memory only.
        context: what all results have in common.
        resume: whether to go on with a file that is there.

    Raises:
        InvalidInput: the file is there and is not to be continued, or belongs to something else.
        DatabaseError: it cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str] | None, context: Mapping[str, Any], resume: bool = False) -> None:
        self._path = None if path is None else Path(path)
        self.results: dict[Key, dict[str, Any]] = {}
        self.runs: list[dict[str, Any]] = []
        # As JSON gives it back, so that it compares.
        context = json.loads(json.dumps(context))
        lines = self._read()
        if not lines:
            self._append({"type": "context", **context})
            return
        if not resume:
            raise InvalidInput.of("work", f"{self._path}, which exists", "a new file, or --continue to go on with it")
        first = lines[0]
        if first.pop("type", None) != "context":
            raise InvalidInput.of("work", str(self._path), "a file that the accuracy suite wrote")
        differ = sorted(name for name in {*first, *context} if first.get(name) != context.get(name))
        if differ:
            raise InvalidInput.of("work", f"{self._path}, measured with another {', '.join(differ)}", "a new file")
        for line in lines[1:]:
            if line.get("type") == "run":
                self.runs.append(line)
            else:
                self.results[_key(line)] = line

    def add_run(self, facts: Mapping[str, Any]) -> None:
        """Keep what is particular to one run: its command, the peers that were there."""
        line = {"type": "run", **facts}
        self.runs.append(line)
        self._append(line)

    def add(self, key: Key, result: Mapping[str, Any]) -> None:
        """Keep one result; a later one of the same key replaces it."""
        line = {"type": "result", **dict(zip(("N", "D", "family", "seed", "impl"), key, strict=True)), **result}
        self.results[key] = line
        self._append(line)

    def _read(self) -> list[dict[str, Any]]:
        if self._path is None or not self._path.exists():
            return []
        try:
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self._path, len(whole))
        except OSError as error:
            raise DatabaseError(f"{self._path} cannot be read ({error.strerror or error})") from error
        try:
            lines = [json.loads(line) for line in whole.decode("utf-8").splitlines()]
        except ValueError:
            lines = [None]
        if not all(isinstance(line, dict) for line in lines):
            raise InvalidInput.of("work", str(self._path), "a file that the accuracy suite wrote")
        return lines

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise DatabaseError(f"{self._path} cannot be written ({error.strerror or error})") from error


def _key(line: Mapping[str, Any]) -> Key:
    try:
        return (line["N"], line["D"], line["family"], line["seed"], line["impl"])
    except KeyError as error:
        raise InvalidInput.of("work", f"a result without {error}", "a file that the accuracy suite wrote") from error
