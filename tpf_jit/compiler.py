"""From a template, a variant and a configuration to a compiled object and the facts about it.

`KernelSpec` names a kernel before it exists; its `key` covers everything the generated code depends on, so equal keys mean
interchangeable objects on every machine of the same toolchain. `compile_kernel` builds one, with or without a GPU.

The compiler (package ``cutlass``) is imported only when something compiles. It is not thread-safe: compiles of one process
run one after another, `tpf_jit.pool` runs many in processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tpf_jit import inspect_sass, linker, loader
from tpf_jit.errors import CompileFailed, InvalidInput, NoKernel, ShapeUnsupported
from tpf_jit.templates import registry
from tpf_jit.templates.base import Backend, Compiled, Scalar, Template, canonical_json, config_from_dict, config_to_dict

log = logging.getLogger("tpf_jit")

FORMAT = 1
"""Raised when the layout of objects or the way they are called changes, which makes every older entry a miss."""

# The DSL generates host code for the CPU it runs on, AVX-512 included; objects must also run on the next machine.
_HOST_CPU = "x86-64-v2"
_HOST_FEATURES = '#llvm.target_features<["+sse4.2"]>'
# Variables of the DSL that change generated code.
_DSL_SWITCHES = (
    "AUTO_M2S", "COMPILER_BACKEND", "COMPILER_OPT", "DEBUG", "DRYRUN", "ENABLE_ASSERTIONS", "ENABLE_PYIR", "LINEINFO",
    "LOC_TRACEBACKS", "TOLERATE_M2M",
)  # fmt: skip
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_compile_lock = threading.Lock()

Pairs = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True)
class KernelSpec:
    """One kernel by what it is made from. Hashable, picklable, and the same in every process.

    template: name in the registry; variant: what of the problem is compiled in, by name; config: the launch choices;
    arch: target, e.g. "sm_90a".
    """

    template: str
    variant: Pairs
    config: Pairs
    arch: str

    @classmethod
    def make(cls, template: str | Template, shape: Any, config: Any = None, **flags: Scalar) -> KernelSpec:
        """The kernel that serves `shape`; without `config`, in the template's default configuration.

        `flags` go to `Template.variant` (for example ``residual=True``).

        Raises:
            ShapeUnsupported: the template does not compute this problem.
            InvalidInput: the configuration is not legal for it.
            NoKernel: no template has that name.
        """
        chosen = registry.get(template) if isinstance(template, str) else template
        supported, reason = chosen.supports(shape)
        if not supported:
            raise ShapeUnsupported(f"{chosen.name} does not compute {shape.key()}: {reason}")
        if config is None:
            config = chosen.default(shape)
        illegal = chosen.check(shape, config)
        if illegal is not None:
            raise InvalidInput(f"config {config_to_dict(config)} is not legal for {shape.key()} in {chosen.name}: {illegal}")
        variant = chosen.variant(shape, **flags)
        return cls(chosen.name, tuple(sorted(variant.items())), tuple(config_to_dict(config).items()), chosen.arch)

    @cached_property
    def key(self) -> str:
        """64 hex digits over everything the generated code depends on. NoKernel if template or toolchain is missing."""
        template = registry.get(self.template)
        content = {
            "format": FORMAT,
            "template": self.template,
            "source": template.source_hash(),
            "variant": dict(self.variant),
            "config": dict(self.config),
            "arch": self.arch,
            "options": template.options,
            "toolchain": toolchain(template.backend),
        }
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()

    @property
    def symbol(self) -> str:
        """Name the kernel is exported under, unique to it."""
        return f"tpf_{self.key[:24]}"

    def to_json(self) -> str:
        """Canonical text; inverse of `from_json`."""
        return canonical_json(
            {"template": self.template, "variant": self.variant, "config": self.config, "arch": self.arch}
        )

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """Inverse of `to_json`. Raises InvalidInput for text that is no such spec."""
        try:
            d = json.loads(text)
            pairs = {name: tuple((str(key), value) for key, value in d[name]) for name in ("variant", "config")}
            return cls(str(d["template"]), pairs["variant"], pairs["config"], str(d["arch"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInput(f"not a kernel spec: {text[:200]!r} ({error})") from error

    def __str__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config)
        variant = " ".join(f"{name}={value}" for name, value in self.variant)
        return f"{self.template}[{variant}] {config}".rstrip()


@dataclass
class CompiledObject:
    """A compiled kernel: the bytes to store and load, and what is known about them."""

    spec: KernelSpec
    data: bytes
    kind: str
    """"so" (shared library), "o" (no linker was found), or a backend's own."""
    resources: dict[str, Any]
    """See `inspect_sass.inspect_cubin`; also smem_bytes (static and dynamic, per CTA)."""
    compile_s: float
    """Seconds in the compiler, without its import."""
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        self.sha256 = hashlib.sha256(self.data).hexdigest()

    def to_row(self) -> dict[str, Any]:
        """The arguments of `TuningStore.put_kernel`."""
        template = registry.get(self.spec.template)
        versions: dict[str, Any] = dict(toolchain(template.backend))
        if self.resources.get("ptxas_version"):
            versions["ptxas"] = self.resources["ptxas_version"]
        return {
            "key": self.spec.key,
            "template": self.spec.template,
            "variant": dict(self.spec.variant),
            "config": dict(self.spec.config),
            "arch": self.spec.arch,
            "source_hash": template.source_hash(),
            "toolchain": versions,
            "sha256": self.sha256,
            "kind": self.kind,
            "size": len(self.data),
            "resources": self.resources,
            "compile_s": self.compile_s,
        }


def compile_kernel(spec: KernelSpec) -> CompiledObject:
    """Compile one kernel in this process, one at a time. Needs no GPU; the target is `spec.arch`.

    Raises:
        CompileFailed: the template or the compiler failed; the message carries the compiler's log.
        NoKernel: the template, its backend or the compiler is not installed.
    """
    template = registry.get(spec.template)
    chosen = backend(template.backend)
    try:
        config = config_from_dict(template.Config, dict(spec.config))
    except ValueError as error:
        raise InvalidInput(f"{spec.template}: {error}") from error
    with _compile_lock:
        if chosen is _CUTE:
            import_dsl(template.arch)
        started = time.perf_counter()
        try:
            built = chosen.compile(template, dict(spec.variant), config, spec.symbol)
        except (CompileFailed, NoKernel):
            raise
        except Exception as error:
            raise CompileFailed(f"{spec} did not compile for {spec.arch}: {_explain(error)}") from error
        seconds = time.perf_counter() - started
    result = CompiledObject(spec, built.data, built.kind, built.resources, seconds)
    log.info("compiled %s in %.2f s: %s", spec, seconds, _summary(built.resources))
    return result


def toolchain(backend_name: str = "cute") -> dict[str, str]:
    """Versions that decide what is generated: part of every key. Imports no compiler. NoKernel if they are missing."""
    return backend(backend_name).toolchain()


def backend(name: str) -> Backend:
    """The backend of that name, ``cute`` or a registered one."""
    return _CUTE if name == "cute" else registry.backend(name)


class CuteBackend:
    """The CuTe DSL: traces a template, compiles it for its architecture, exports and links the host function."""

    name = "cute"

    def toolchain(self) -> dict[str, str]:
        """Versions of the DSL, its runtime flavour and tvm-ffi, the host target, and DSL switches set in the environment."""
        versions = _installed_versions() | {"runtime": loader.runtime_library()[0], "host": _HOST_CPU}
        switches = {name: os.environ.get(f"CUTE_DSL_{name}") for name in _DSL_SWITCHES}
        versions.update({f"CUTE_DSL_{name}": value for name, value in switches.items() if value})
        return versions

    def compile(self, template: Template, variant: Mapping[str, Scalar], config: Any, symbol: str) -> Compiled:
        """See `Backend.compile`."""
        import_dsl(template.arch)
        with tempfile.TemporaryDirectory(prefix="tpf_jit_") as folder:
            options = (
                f"--enable-tvm-ffi --gpu-arch {template.arch} --keep-cubin remarks{{ptx}} "
                f"--dump-dir {shlex.quote(folder)} {template.options}"
            ).strip()
            captured = io.StringIO()
            with _stderr_of_this_thread(captured):
                function = template.build(variant, config, options)
            ptxas_log = _ANSI.sub("", captured.getvalue())
            if not function.__cubin__:
                raise CompileFailed(f"{template.name}: the compiler kept no cubin; build() must pass its options to cute.compile")
            resources = inspect_sass.inspect_cubin(function.__cubin__, ptxas_log)
            threads, dynamic_smem = inspect_sass.launch_facts(str(function.ir_module))
            resources["threads"] = threads or resources["threads"]
            resources["smem_bytes"] = resources.pop("static_smem_bytes") + dynamic_smem
            _pin_host_cpu(function.ir_module)
            path = Path(folder) / f"{symbol}.o"
            function.export_to_c(str(path), function_name=symbol, export_only_tvm_ffi_symbols=True)
            linked = linker.link(path)
            return Compiled(linked or path.read_bytes(), "so" if linked else "o", resources)

    def load(self, source: Path | bytes, symbol: str, kind: str) -> Any:
        """See `loader.load`."""
        return loader.load(source, symbol, kind)


_CUTE = CuteBackend()


@cache
def _installed_versions() -> dict[str, str]:
    versions = {}
    for name, package in (("dsl", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise NoKernel(f"{package} is not installed, which kernels need; remedy: pip install {package}") from None
    return versions


def import_dsl(arch: str = "sm_90a") -> None:
    """Import the DSL with its default target set: it is read once at import, and without a GPU it would be another one.

    Raises NoKernel if it is not installed.
    """
    if "cutlass" in sys.modules:
        return
    started = time.perf_counter()
    previous = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = previous or arch
    try:
        import cutlass  # noqa: F401
        import cutlass.cute  # noqa: F401
    except ImportError as error:
        raise NoKernel(
            f"the kernel compiler cannot be imported ({error}); remedy: pip install nvidia-cutlass-dsl apache-tvm-ffi"
        ) from error
    finally:
        if previous is None:
            del os.environ["CUTE_DSL_ARCH"]
    log.info("imported the kernel compiler in %.2f s", time.perf_counter() - started)


class _ThreadTee(io.TextIOBase):
    """Stands in for sys.stderr: what one thread writes is kept, what others write passes through."""

    def __init__(self, kept: io.StringIO, outer: Any) -> None:
        self._kept, self._outer, self._owner = kept, outer, threading.get_ident()

    def write(self, text: str) -> int:
        target = self._kept if threading.get_ident() == self._owner or self._outer is None else self._outer
        return target.write(text)

    def flush(self) -> None:
        if self._outer is not None:
            self._outer.flush()


@contextlib.contextmanager
def _stderr_of_this_thread(kept: io.StringIO) -> Iterator[None]:
    outer = sys.stderr
    tee = _ThreadTee(kept, outer)
    sys.stderr = tee
    try:
        yield
    finally:
        if sys.stderr is tee:
            sys.stderr = outer


def _pin_host_cpu(module: Any) -> None:
    """Give every host function of an MLIR module the baseline CPU instead of the one that compiles."""
    from cutlass._mlir import ir

    def visit(op: Any) -> Any:
        if op.name == "llvm.func":
            op.attributes["target_cpu"] = ir.StringAttr.get(_HOST_CPU)
            op.attributes["target_features"] = ir.Attribute.parse(_HOST_FEATURES)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


def _explain(error: Exception) -> str:
    text = _ANSI.sub("", str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _summary(resources: Mapping[str, Any]) -> str:
    shown = ("registers", "spill_bytes", "smem_bytes", "hgmma", "sass_instructions")
    return ", ".join(f"{name} {resources[name]}" for name in shown if resources.get(name) is not None)
