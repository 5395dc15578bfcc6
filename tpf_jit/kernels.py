"""Kernels of this process: from (operation, shape) to a function that launches, loaded once and shared.

    get_kernel  memoised; asks the dispatcher which template and configuration, gives a `Kernel`
    Kernel      knows its specification, and compiles and loads when first needed

Several shapes usually share one compiled kernel, so functions are kept by `KernelSpec`. Loading is thread-safe: two threads
that need one kernel get the same function, and it is compiled once. After the first call `Kernel.function` is a plain
attribute holding the foreign function: no look-up, no check, no Python frame of ours in a launch.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpf_jit.cache import ObjectStore
from tpf_jit.compiler import KernelSpec, backend, compile_kernel
from tpf_jit.errors import ColdKernelInCapture, CompileFailed, InvalidInput, NoKernel
from tpf_jit.templates import registry
from tpf_jit.templates.base import Scalar, Template

if TYPE_CHECKING:
    from tpf_jit.compiler import CompiledObject

log = logging.getLogger("tpf_jit")

Flags = tuple[tuple[str, Scalar], ...]
Launch = Callable[..., Any]

_lock = threading.Lock()
_functions: dict[KernelSpec, Launch] = {}
_failures: dict[KernelSpec, Exception] = {}
_loading: dict[KernelSpec, threading.Lock] = {}
_kernels: dict[tuple[str, Any, Flags], Kernel] = {}
_default_store: list[ObjectStore] = []

generation = 0
"""Grows whenever memoised choices are dropped: what a caller keeps of them is good for one generation."""


class Kernel:
    """One kernel for one problem. Creating it neither compiles nor loads.

    Attributes:
        spec: what it is made from.
        shape: the problem.
        config: the template's configuration dataclass.
        config_from: "tuned" (measured for exactly this problem), "nearest" (for the nearest crop), "sibling" (on another
            Hopper device), "default" (nothing measured) or "explicit" (given by the caller).
        note: a sentence about that choice for people, or "".
    """

    def __init__(self, spec: KernelSpec, shape: Any, config: Any, config_from: str = "explicit", note: str = "") -> None:
        self.spec, self.shape, self.config = spec, shape, config
        self.config_from, self.note = config_from, note

    @cached_property
    def function(self) -> Launch:
        """The launch function, on torch's current stream, with the calling convention of the template's family.

        The first access compiles (or finds the cached object) and loads.

        Raises:
            ColdKernelInCapture: a CUDA graph is being captured on the current stream; nothing was done to it.
            CompileFailed, NoKernel, CacheUntrusted: no kernel can be had; asking again does not compile again.
        """
        return function_of(self.spec)

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def is_loaded(self) -> bool:
        """Whether a call would launch at once."""
        return self.spec in _functions

    @property
    def template(self) -> Template:
        """The template it is made from."""
        return registry.get(self.spec.template)

    @cached_property
    def resources(self) -> dict[str, Any]:
        """What the compiled kernel uses (see `inspect_sass.inspect_cubin`); compiles if need be, which needs no GPU."""
        store = default_store()
        facts = store.resources(self.spec) if store.get(self.spec) is not None else {}
        if not facts:
            store.ensure(self.spec)
            facts = store.resources(self.spec)
        return facts

    def __getstate__(self) -> dict[str, Any]:
        """What pickling and copying keep: the loaded function belongs to this process, so a copy loads its own when called."""
        return {name: value for name, value in self.__dict__.items() if name != "function"}

    def __repr__(self) -> str:
        state = "loaded" if self.is_loaded else "not loaded"
        return f"<Kernel {self.spec} ({self.config_from}, {state}) for {self.shape.key()}>"


def get_kernel(
    name: str, shape: Any, flags: Flags | Mapping[str, Scalar] = (), config: Any = None, dispatcher: Any = None
) -> Kernel:
    """The kernel for a problem: memoised, and without compiling or loading anything.

    Args:
        name: a family ("triangle_attention/forward"), where the dispatcher chooses template and configuration, or the name of
            one template.
        shape: the problem.
        flags: for `Template.variant`, as sorted (name, value) pairs, e.g. ``(("residual", True),)``; a mapping will do, slower.
        config: a configuration of the named template, in place of the dispatcher's.
        dispatcher: by default the process's own (`resolve.default_dispatcher`).

    Raises:
        NoKernel: no template has that name or is of that family.
        ShapeUnsupported: the template does not compute this problem.
        InvalidInput: the explicit configuration is not legal.
    """
    if not isinstance(flags, tuple):
        flags = tuple(sorted(flags.items()))
    if config is not None:
        template = registry.get(name)
        return Kernel(KernelSpec.make(template, shape, config, **dict(flags)), shape, config)
    memo = (name, shape, flags)
    kernel = _kernels.get(memo) if dispatcher is None else None
    if kernel is None:
        kernel = _resolve(name, shape, flags, dispatcher)
        if dispatcher is None:
            with _lock:
                kernel = _kernels.setdefault(memo, kernel)
    return kernel


def _resolve(name: str, shape: Any, flags: Flags, dispatcher: Any) -> Kernel:
    template = None if "/" in name else registry.get(name)
    op, _, direction = (template.family if template is not None else name).partition("/")
    if template is None and not registry.templates(op, direction):
        raise NoKernel(f"no template is of family {name!r}; families: {_families()}")
    if dispatcher is None:
        from tpf_jit.resolve import default_dispatcher

        dispatcher = default_dispatcher()
    chosen = dispatcher.resolve(op, direction, shape)
    if template is not None and chosen.template_name != template.name:
        config, source, note = template.default(shape), "default", f"{chosen.template_name} was chosen by measurement"
    else:
        template = registry.get(chosen.template_name)
        config, source, note = chosen.config, chosen.source, chosen.note or ""
    try:
        spec = KernelSpec.make(template, shape, config, **dict(flags))
    except InvalidInput as error:
        # A row measured with an older version of the template must not stop anybody.
        log.warning("configuration from the tuning database is not usable, taking the default: %s", error)
        config, source, note = template.default(shape), "default", "the measured configuration is not legal any more"
        spec = KernelSpec.make(template, shape, config, **dict(flags))
    return Kernel(spec, shape, config, source, note)


def function_of(spec: KernelSpec, store: ObjectStore | None = None) -> Launch:
    """The loaded function of a specification, shared by the process. Raises as `Kernel.function`."""
    function = _functions.get(spec)
    if function is not None:
        return function
    _refuse_in_capture(spec)
    with _lock:
        gate = _loading.setdefault(spec, threading.Lock())
    with gate:
        function = _functions.get(spec)
        if function is None:
            failure = _failures.get(spec)
            if failure is not None:
                raise failure.with_traceback(None)
            try:
                function = _load(spec, store or default_store())
            except (CompileFailed, NoKernel) as error:
                # Every step of a training run would pay for the same failure again.
                _failures[spec] = error
                raise
            _functions[spec] = function
    return function


def warm(kernels: Iterable[Kernel]) -> int:
    """Compile what is missing and load all of them; how many were not loaded before. Raises as `Kernel.function`."""
    count = 0
    for kernel in kernels:
        count += not kernel.is_loaded
        kernel.function  # noqa: B018 - loads
    return count


def check_operation(template: Template, op: str) -> None:
    """Raises InvalidInput, with the names that would do, for a template of another operation than a problem's."""
    if template.op != op:
        names = ", ".join(each.name for each in registry.templates(op)) or "none is registered"
        raise InvalidInput.of("template", f"{template.name}, which computes {template.op}", f"templates of {op}: {names}")


def default_store() -> ObjectStore:
    """The object cache this process uses."""
    if not _default_store:
        with _lock:
            if not _default_store:
                _default_store.append(ObjectStore())
    return _default_store[0]


def forget() -> None:
    """Drop every memoised choice, failure and loaded function, as in a new process. `Kernel` objects in use stay valid."""
    global generation
    with _lock:
        for table in (_functions, _failures, _loading, _kernels):
            table.clear()
        _default_store.clear()
        generation += 1


def reload_choices() -> None:
    """Drop memoised choices, so that the next `get_kernel` asks the dispatcher again; loaded functions stay."""
    global generation
    with _lock:
        _kernels.clear()
        generation += 1


def _load(spec: KernelSpec, store: ObjectStore) -> Launch:
    load = backend(registry.get(spec.template).backend).load
    found: Path | CompiledObject = store.ensure(spec)
    if not isinstance(found, Path):
        return load(found.data, spec.symbol, found.kind)
    try:
        return load(found, spec.symbol, found.suffix[1:])
    except NoKernel as error:
        # A cache on a file system mounted noexec, or an entry that was pruned meanwhile.
        log.warning("%s; trying from memory", error)
    try:
        return load(found.read_bytes(), spec.symbol, found.suffix[1:])
    except (NoKernel, OSError) as error:
        log.warning("%s; compiling again", error)
    obj = compile_kernel(spec)
    store.put(obj)
    return load(obj.data, spec.symbol, obj.kind)


def _refuse_in_capture(spec: KernelSpec) -> None:
    """Raise if the current stream is being captured; asks torch only if this process has used CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ColdKernelInCapture(
            f"kernel {spec} is not loaded, and loading inside a CUDA graph capture would break the capture; "
            "remedy: call tpf_jit.warmup(...) with this shape, or run it once, before capturing"
        )


def _families() -> str:
    return ", ".join(sorted({template.family for template in registry.templates()})) or "none"
