"""What a kernel template is: parameters, the rules between them, defaults, and the code that builds the kernel.

A template is one class (`Template`) with one instance in the registry. Everything here is stdlib only: the dispatcher
asks templates for legality and defaults in processes that never import torch or the compiler.

Contract: `supports`, `variant`, `check`, `space`, `default` and `resources` are pure functions of their arguments. They
read no tensor contents, no device and no environment variable. `check` is the only statement of what is legal;
`space` and `default` return nothing that `check` rejects.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from tpf_jit.templates import sources as _sources

Scalar = str | int | bool
ConfigT = TypeVar("ConfigT")


@runtime_checkable
class ProblemShape(Protocol):
    """What a template may assume of any problem: an operation name, a stable key, and a JSON form.

    `tpf_jit.TriangleAttentionShape` is one; an operation of a third party brings its own.
    """

    op: ClassVar[str]

    def key(self) -> str:
        """Stable text that names this problem in the tuning database."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly fields."""
        ...


@dataclass(frozen=True)
class Resources:
    """Resources of one CTA by arithmetic, before anything is compiled."""

    threads: int
    """Threads per CTA."""
    smem_bytes: int
    """Shared memory per CTA in bytes, static and dynamic together."""
    registers_per_consumer: int
    """32-bit registers a thread of a computing warp may use."""
    ctas_per_sm: int
    """CTAs resident on one SM under these limits."""


@runtime_checkable
class Workload(Protocol):
    """Inputs, launch, reference and error bounds of one problem on one device: what tuner, tests and benches run.

    Made by `Template.workload`. Tensors live on the device the workload was made for. Where the launch arguments depend on the
    configuration, a workload also has `configure(config)`, called before `prepare` and `run` of a kernel of that configuration.
    """

    bytes_per_set: int
    """Bytes one set of inputs and outputs occupies; the tuner rotates enough sets to exceed the L2 cache."""

    def make_inputs(self, seed: int) -> Any:
        """A fresh set of inputs (opaque to the caller), a pure function of the seed."""
        ...

    def prepare(self, kernel_fn: Callable[..., Any], inputs: Any) -> Callable[[], None]:
        """A zero-argument callable that launches the kernel once; layout work and allocation are already done."""
        ...

    def run(self, kernel_fn: Callable[..., Any], inputs: Any) -> dict[str, Any]:
        """Launch once into outputs that were filled with NaN first; name -> tensor."""
        ...

    def reference(self, inputs: Any) -> dict[str, Any]:
        """The same outputs computed in float64; name -> float64 tensor."""
        ...

    def errors(self, out: dict[str, Any], ref: dict[str, Any]) -> dict[str, float]:
        """Relative RMS error by output name; a NaN anywhere gives inf, never a pass."""
        ...

    def bounds(self) -> dict[str, float]:
        """Largest relative RMS error accepted, by output name."""
        ...


@dataclass(frozen=True)
class Compiled:
    """What a backend makes of one configuration."""

    data: bytes
    """The object, as it is stored in the cache and given to `Backend.load`."""
    kind: str
    """File name suffix of the object in the cache, e.g. ``so``."""
    resources: dict[str, Any]
    """What the compiled code uses: registers, stack_bytes and so on, JSON-friendly; see `tpf_jit.inspect_sass`."""


@runtime_checkable
class Backend(Protocol):
    """A compiler and loader for templates whose `backend` names it. The built-in one, ``cute``, is the CuTe DSL."""

    name: str

    def toolchain(self) -> dict[str, str]:
        """Versions that decide what `compile` generates: part of every cache key. Must be cheap (no compiler import)."""
        ...

    def compile(self, template: Template, variant: Mapping[str, Scalar], config: Any, symbol: str) -> Compiled:
        """Build one kernel whose exported symbol is `symbol`, unique to it. Any exception is reported as CompileFailed."""
        ...

    def load(self, source: Path | bytes, symbol: str, kind: str) -> Callable[..., Any]:
        """The callable of an object, from its verified file or from memory."""
        ...


class Template(ABC):
    """One kernel family: what it computes, which configurations are legal, and how it is built.

    Subclasses set the class attributes and implement the abstract methods; `register` puts an instance into the
    registry. See `examples/third_party_template` for a complete small one.
    """

    name: ClassVar[str]
    """Unique name, e.g. ``triangle_attention_forward_sm90``."""
    op: ClassVar[str]
    """Operation, e.g. ``triangle_attention``; equals the `op` of the shapes it takes."""
    direction: ClassVar[str] = "forward"
    """``forward``, ``backward_key`` and so on: what the kernel computes of the operation."""
    arch: ClassVar[str] = "sm_90a"
    """Target architecture as the compiler spells it."""
    Config: ClassVar[type]
    """Frozen dataclass of launch choices; fields are ints, strs and bools only."""
    options: ClassVar[str] = ""
    """Extra compiler options, part of the cache key."""
    optional: ClassVar[bool] = False
    """Whether others do its work where it does not serve, so that a sweep need not say that it does not."""
    backend: ClassVar[str] = "cute"
    """Name of the registered backend that compiles and loads this template."""

    @property
    def family(self) -> str:
        """``op/direction``: templates of one family share a calling convention."""
        return f"{self.op}/{self.direction}"

    @abstractmethod
    def supports(self, shape: Any) -> tuple[bool, str]:
        """Whether this template computes the problem, and if not, why (a sentence for the user)."""

    @abstractmethod
    def variant(self, shape: Any, **flags: Scalar) -> dict[str, Scalar]:
        """What of the problem is compiled in. Two problems with equal variants share one kernel.

        An unknown flag raises TypeError.
        """

    def measured_as(self, shape: Any) -> Any:
        """The problem under whose name measurements for `shape` are kept: itself, or one with the same kernels and the same work,
        so that problems which differ in nothing that the kernel sees are measured once. All templates of a family agree.

        What a shape's own `measured_as` says, if it has one, of the variant.
        """
        named = getattr(shape, "measured_as", None)
        return shape if named is None else named(self.variant(shape))

    @abstractmethod
    def check(self, shape: Any, config: Any) -> str | None:
        """None if the configuration is legal for the problem, else the reason."""

    @abstractmethod
    def space(self, shape: Any) -> list[Any]:
        """All legal configurations for the problem, in canonical order (ties in tuning go to the first)."""

    @abstractmethod
    def default(self, shape: Any) -> Any:
        """The configuration used when nothing was measured; legal for every supported problem."""

    @abstractmethod
    def resources(self, shape: Any, config: Any) -> Resources:
        """Resources of one CTA by arithmetic."""

    @abstractmethod
    def build(self, variant: Mapping[str, Scalar], config: Any, options: str) -> Any:
        """Trace and compile; returns what the backend expects (backend ``cute``: the result of `cute.compile`).

        Only `tpf_jit.compiler` calls this. Imports ``cutlass`` inside, and passes `options` to `cute.compile` as it
        is. The symbol name is chosen by the caller at export.
        """

    @abstractmethod
    def workload(self, shape: Any, device: Any, seed: int = 0, family: str = "normal") -> Workload:
        """Inputs and reference for tuning and tests; imports torch inside. `family` names the input distribution."""

    def sources(self) -> tuple[Path, ...]:
        """Files whose text decides what `build` generates, sorted: this class's module and the helpers it imports.

        Default: the import closure inside the top-level package of the template (see `sources.closure`), leaving out
        what only `workload` imports. A template that reads data files at trace time overrides this and adds them.
        """
        return tuple(path for _, path in self._labelled_sources())

    def source_hash(self) -> str:
        """sha256 hex of the sources' normalised text: comments, docstrings and whitespace do not count.

        The same on every Python version and in every install location. Computed once per class and process, as the code
        a process traces does not change either.
        """
        cls = type(self)
        cached = cls.__dict__.get("_source_hash")
        if cached is None:
            cached = _sources.hash_files(self._labelled_sources())
            cls._source_hash = cached
        return cached

    def _labelled_sources(self) -> list[tuple[str, Path]]:
        cls = type(self)
        if cls.sources is not Template.sources:
            return _sources.label(self.sources())
        return _sources.closure(cls.__module__)


def config_to_dict(config: Any) -> dict[str, Scalar]:
    """Fields of a configuration dataclass as a plain dict, in field order."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def config_from_dict(cls: type[ConfigT], d: Mapping[str, Any]) -> ConfigT:
    """Configuration from a dict. Missing fields take their defaults.

    Raises ValueError for a field the class does not have, a missing one without default, or a value of another type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(d) - set(fields))
    if unknown:
        raise ValueError(f"{cls.__qualname__} has no field {', '.join(unknown)}; it has {', '.join(fields)}")
    types = {"int": int, "str": str, "bool": bool}
    for name, value in d.items():
        declared = fields[name].type
        expected = types.get(declared, declared) if isinstance(declared, str) else declared
        if isinstance(expected, type) and type(value) is not expected:
            raise ValueError(f"{cls.__qualname__}.{name} must be {expected.__name__}, got {value!r}")
    try:
        return cls(**dict(d))
    except TypeError as error:
        raise ValueError(f"{cls.__qualname__}: {error}") from None


def canonical_json(d: Any) -> str:
    """The one text of a JSON value: sorted keys, no spaces, ASCII, no NaN. Used for hashes and database keys."""
    return json.dumps(d, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
