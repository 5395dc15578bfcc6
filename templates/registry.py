"""Which templates and backends exist: the built-in ones, those of installed packages, and those registered by hand.

Built in: every subpackage of `tpf_jit.templates` whose ``__init__`` has a ``TEMPLATES`` tuple of `Template` classes.
From other packages, through entry points:

    [project.entry-points."tpf_jit.templates"]
    my_kernel = "my_package.my_module:MyTemplate"        # a Template class or instance

    [project.entry-points."tpf_jit.backends"]
    my_compiler = "my_package.my_module:MyBackend"       # a Backend class or instance

Both are loaded on the first look-up. A plugin that fails to load is left out with one warning: it must not stop
anybody's training. Thread-safe.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import threading
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from tpf_jit import templates as _package
from tpf_jit.errors import NoKernel
from tpf_jit.templates.base import Backend, Template

TEMPLATE_GROUP = "tpf_jit.templates"
BACKEND_GROUP = "tpf_jit.backends"
_SCALARS = {"int", "str", "bool", int, str, bool}

T = TypeVar("T")

_lock = threading.RLock()
_templates: dict[str, Template] = {}
_backends: dict[str, Backend] = {}
_state = {"started": False, "done": False}


def register(template: T, replace: bool = False) -> T:
    """Add a `Template` instance or class (usable as a class decorator); returns its argument.

    Raises TypeError for something that is not a complete template, ValueError for a name that another template already
    has, unless `replace`.
    """
    instance = _instance(template, Template)
    _validate(instance)
    with _lock:
        present = _templates.get(instance.name)
        if present is not None and not replace and not _same_class(present, instance):
            raise ValueError(
                f"template name {instance.name!r} is taken by {_where(present)}; choose another name for {_where(instance)}"
            )
        if present is None or replace:
            _templates[instance.name] = instance
    return template


def get(name: str) -> Template:
    """The template of that name. Raises NoKernel listing the names there are."""
    found = _templates.get(name)
    if found is None:
        _discover()
        found = _templates.get(name)
    if found is None:
        known = ", ".join(sorted(_templates)) or "none"
        raise NoKernel(f"no template is named {name!r}; registered: {known}")
    return found


def templates(op: str | None = None, direction: str | None = None, arch: str | None = None) -> list[Template]:
    """Registered templates, built-in ones first, then in order of registration; each argument narrows the list."""
    _discover()
    with _lock:
        found = list(_templates.values())
    return [t for t in found if op in (None, t.op) and direction in (None, t.direction) and arch in (None, t.arch)]


def register_backend(backend: T, replace: bool = False) -> T:
    """Add a `Backend` instance or class: a way to compile and load templates that is not the CuTe DSL.

    Raises TypeError for something that is not a backend, ValueError for a name that is taken, unless `replace`.
    """
    instance = backend() if isinstance(backend, type) else backend
    if not isinstance(instance, Backend) or not isinstance(instance.name, str) or not instance.name:
        raise TypeError(f"{backend!r} is not a backend: see tpf_jit.templates.base.Backend")
    with _lock:
        present = _backends.get(instance.name)
        taken = instance.name == "cute" or present is not None and not _same_class(present, instance)
        if taken and not replace:
            raise ValueError(f"backend name {instance.name!r} is taken")
        _backends[instance.name] = instance
    return backend


def backend(name: str) -> Backend:
    """The registered backend of that name. Raises NoKernel listing the names there are."""
    _discover()
    found = _backends.get(name)
    if found is None:
        raise NoKernel(f"no backend is named {name!r}; registered: {', '.join(sorted({'cute', *_backends}))}")
    return found


def _discover() -> None:
    if _state["done"]:
        return
    with _lock:
        if _state["started"]:  # a plugin that looks templates up while it loads
            return
        _state["started"] = True
        try:
            _load_builtin()
            for group, add in ((BACKEND_GROUP, register_backend), (TEMPLATE_GROUP, register)):
                for point in sorted(entry_points(group=group), key=lambda point: point.name):
                    _load_plugin(point, add)
            _state["done"] = True
        finally:
            _state["started"] = _state["done"]


def _load_builtin() -> None:
    for info in pkgutil.iter_modules(_package.__path__):
        if info.ispkg:
            module = importlib.import_module(f"{_package.__name__}.{info.name}")
            for template in getattr(module, "TEMPLATES", ()):
                register(template)


def _load_plugin(point: EntryPoint, add: Any) -> None:
    try:
        add(point.load())
    except Exception as error:  # noqa: BLE001 - a plugin may fail in any way
        origin = f" of {point.dist.name}" if point.dist is not None else ""
        warnings.warn(
            f"{point.group} plugin {point.name!r}{origin} is left out: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _instance(item: Any, base: type[T]) -> T:
    try:
        instance = item() if isinstance(item, type) and issubclass(item, base) else item
    except TypeError as error:
        raise TypeError(f"{item.__module__}.{item.__qualname__} is incomplete: {error}") from None
    if not isinstance(instance, base):
        raise TypeError(f"{item!r} is neither a {base.__name__} nor a subclass of it")
    return instance


def _validate(template: Template) -> None:
    where = _where(template)
    for attribute in ("name", "op", "direction", "arch", "backend"):
        value = getattr(template, attribute, None)
        if not isinstance(value, str) or not value:
            raise TypeError(f"{where}.{attribute} must be a non-empty string, got {value!r}")
    config = getattr(template, "Config", None)
    if not (isinstance(config, type) and dataclasses.is_dataclass(config) and config.__dataclass_params__.frozen):
        raise TypeError(f"{where}.Config must be a frozen dataclass, got {config!r}")
    for field in dataclasses.fields(config):
        if field.type not in _SCALARS:
            raise TypeError(f"{where}.Config.{field.name} must be declared int, str or bool, is declared {field.type!r}")


def _same_class(a: object, b: object) -> bool:
    """Whether two instances are of one class; a reloaded module's class counts as the same."""
    return _where(a) == _where(b)


def _where(item: object) -> str:
    cls = type(item)
    return f"{cls.__module__}.{cls.__qualname__}"
