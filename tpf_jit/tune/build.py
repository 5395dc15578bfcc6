"""Compiled candidates: from the object cache where they are, else from worker processes, and then into the cache.

Workers compile while the measuring process measures. The pool starts with the first candidate that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Built:
    """A compiled candidate, loadable: a file of the cache, or the bytes themselves where no file could be kept."""

    binary: Path | bytes
    kind: str
    cubin_sha256: str = ""
    resources: dict[str, Any] = field(default_factory=dict)


class Builder:
    """Makes `Built` from kernel specs. A context manager: leaving it stops the workers.

    Args:
        objects: the object cache (`tpf_jit.cache.ObjectStore`).
        store: the tuning database, which keeps what is known about each kernel.
        make_pool: makes the pool (`tpf_jit.pool.CompilePool`): anything with `submit(spec) -> Future` and `close(wait)`.
    """

    def __init__(self, objects: Any, store: Any, make_pool: Callable[[], Any]) -> None:
        self._objects = objects
        self._store = store
        self._make_pool = make_pool
        self._pool: Any = None
        self._built: dict[str, Built] = {}

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            # Whatever is still compiling is not wanted any more.
            self._pool.close(wait=False)

    def submit(self, spec: Any) -> Future:
        """A future of whatever `finish` takes; ready at once where the cache has the object."""
        cached = self._built.get(spec.key) or self._cached(spec)
        if cached is not None:
            future: Future = Future()
            future.set_result(cached)
            return future
        if self._pool is None:
            self._pool = self._make_pool()
        return self._pool.submit(spec)

    def finish(self, spec: Any, future: Future) -> Built:
        """The compiled candidate of a finished future, kept in the cache. Raises what the compile raised."""
        result = future.result()
        if not isinstance(result, Built):
            result = self._keep(result)
        self._built[spec.key] = result
        return result

    def get(self, spec: Any) -> Built:
        """The compiled candidate, compiled now if need be."""
        return self.finish(spec, self.submit(spec))

    def _cached(self, spec: Any) -> Built | None:
        path = self._objects.get(spec)
        if path is None:
            return None
        resources = self._objects.resources(spec)
        return Built(Path(path), Path(path).suffix.lstrip("."), resources.get("cubin_sha256") or "", resources)

    def _keep(self, compiled: Any) -> Built:
        # Also in the sweep's own database, which may be another than the one that vouches for the cache.
        self._store.put_kernel(compiled.to_row())
        path = self._objects.put(compiled)
        binary = Path(path) if path is not None else compiled.data
        return Built(binary, compiled.kind, compiled.resources.get("cubin_sha256") or "", compiled.resources)
