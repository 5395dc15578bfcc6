"""Compiled candidates: from the object cache where they are, else from worker processes, and then into the cache.

Workers compile while the measuring process measures; when they have nothing to do for the candidates at hand, they compile
those of later cells. No kernel is compiled twice, whichever cells want it. The pool starts with the first that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        depth: compiles that may be under way before more are begun for later cells.

    Attributes:
        compiled: kernels that were compiled so far.
    """

    def __init__(self, objects: Any, store: Any, make_pool: Callable[[], Any], depth: int = 8) -> None:
        self.compiled = 0
        self._objects = objects
        self._store = store
        self._make_pool = make_pool
        self._depth = depth
        self._pool: Any = None
        self._built: dict[str, Built] = {}
        # Under way, and failed: what failed is not compiled again for another cell.
        self._begun: dict[str, tuple[Any, Future]] = {}
        self._later: Iterator[Any] = iter(())

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._pool is not None:
            # Whatever is still compiling is not wanted any more.
            self._pool.close(wait=False)

    def submit(self, spec: Any) -> Future:
        """A future of whatever `finish` takes; ready at once where the cache has the object. One future for each kernel."""
        begun = self._begun.get(spec.key)
        if begun is not None:
            return begun[1]
        cached = self._built.get(spec.key) or self._cached(spec)
        if cached is not None:
            future: Future = Future()
            future.set_result(cached)
            return future
        if self._pool is None:
            self._pool = self._make_pool()
        future = self._pool.submit(spec)
        self._begun[spec.key] = (spec, future)
        return future

    def finish(self, spec: Any, future: Future) -> Built:
        """The compiled candidate of a finished future, kept in the cache. Raises what the compile raised."""
        if spec.key in self._built:
            # Another cell has asked for it meanwhile.
            return self._built[spec.key]
        result = future.result()
        if not isinstance(result, Built):
            result = self._keep(result)
            self.compiled += 1
        self._built[spec.key] = result
        self._begun.pop(spec.key, None)
        return result

    def get(self, spec: Any) -> Built:
        """The compiled candidate, compiled now if need be."""
        return self.finish(spec, self.submit(spec))

    def drop(self, spec: Any, future: Future) -> None:
        """The candidate is not wanted any more: its compile is called off, unless it has begun already."""
        if future.cancel() or future.cancelled():
            self._begun.pop(spec.key, None)

    def ahead(self, specs: Iterator[Any]) -> None:
        """Compile these as well, in order, as far as workers are free (`top_up`); replaces what an earlier call said."""
        self._later = specs

    def top_up(self) -> None:
        """Keep what was compiled ahead, and begin more. Called often: whenever the measuring process has a moment."""
        for spec, future in list(self._begun.values()):
            if future.done() and not future.cancelled() and future.exception() is None:
                # At once, so that nothing compiled is lost when this process is killed.
                self.finish(spec, future)
        # A few at a time: where the cache has them all, looking at each would keep the measuring process from its work.
        free = self._depth - sum(not future.done() for _, future in self._begun.values())
        for _ in range(free):
            spec = next(self._later, None)
            if spec is None:
                return
            self.submit(spec)

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
