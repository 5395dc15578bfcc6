"""Turns a compiled object into a callable, without the compiler.

An object is a shared library (kind ``so``), or where the machine that compiled had no linker a relocatable object (kind
``o``). Both leave the CUDA calls and the calling convention to two libraries that must be in the process first, and that are
found through the import system, so objects carry no machine's paths:

    libcute_dsl_runtime.so   of the package nvidia-cutlass-dsl-libs-cu12 or -cu13, opened RTLD_GLOBAL
    libtvm_ffi.so            of apache-tvm-ffi, opened by ``import tvm_ffi``

Kernels themselves are opened RTLD_LOCAL, and each exports one symbol of its own, so that no kernel can answer for another.
An object does not depend on the Python version that made it.

Kind ``o`` is loaded by apache-tvm-ffi-orcjit where it is installed (20 ms, but a 16 MB package), else by the DSL's own loader,
which imports the compiler.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tpf_jit.errors import NoKernel

log = logging.getLogger("tpf_jit")

_RUNTIME = "libcute_dsl_runtime.so"
_lock = threading.Lock()
# Nothing is ever unloaded: a CUDA graph may hold kernels of a library whose Python objects are gone.
_alive: list[Any] = []


def load(source: str | os.PathLike[str] | bytes, symbol: str, kind: str = "so") -> Callable[..., Any]:
    """The function of one compiled kernel: takes torch tensors and scalars, runs on torch's current stream.

    Args:
        source: path of the object, whose content the caller has verified, or the object itself.
        symbol: the name it was exported under (`KernelSpec.symbol`).
        kind: "so" or "o".

    Raises:
        NoKernel: a library that kernels need is missing, or the object cannot be loaded or has no such symbol.
    """
    started = time.perf_counter()
    with _lock:
        tvm_ffi = _require("tvm_ffi", "apache-tvm-ffi")
        _open_runtime()
        try:
            if kind == "so":
                function = _load_shared(tvm_ffi, source, symbol)
            elif kind == "o":
                function = _load_object(source, symbol)
            else:
                raise NoKernel(f"objects of kind {kind!r} are not known; expected 'so' or 'o'")
        except NoKernel:
            raise
        except Exception as error:
            where = "memory" if isinstance(source, bytes) else os.fspath(source)
            raise NoKernel(f"cannot load kernel {symbol} from {where}: {error}") from error
    log.debug("loaded %s in %.1f ms", symbol, 1e3 * (time.perf_counter() - started))
    return function


def runtime_library() -> tuple[str, Path]:
    """("cu12" | "cu13", path of the kernel runtime library), chosen as the DSL chooses: the newest CUDA flavour that the
    driver supports, or the newest installed where there is no driver.

    Raises:
        NoKernel: no usable runtime library is installed.
    """
    for entry in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):
        path = Path(entry)
        if path.name == _RUNTIME and path.is_file():
            return next((part for part in reversed(path.parts) if part in ("cu12", "cu13")), "custom"), path
    found = _installed_runtimes()
    if not found:
        raise NoKernel(
            "the kernel runtime is not installed; remedy: pip install 'tpf_jit[cu13]' (or nvidia-cutlass-dsl for CUDA 12)"
        )
    driver = driver_cuda_major()
    usable = [major for major in found if driver is None or major <= driver]
    if not usable:
        raise NoKernel(
            f"the kernel runtimes here are for CUDA {', '.join(map(str, sorted(found)))} but the driver supports CUDA {driver}; "
            "remedy: update the driver or install the nvidia-cutlass-dsl libraries for it"
        )
    return f"cu{max(usable)}", found[max(usable)]


@cache
def driver_cuda_major() -> int | None:
    """Major CUDA version the driver supports, or None without a driver. Does not initialise CUDA."""
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None


@cache
def _installed_runtimes() -> dict[int, Path]:
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    found: dict[int, Path] = {}
    for root in list(spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).glob(f"cu[0-9]*/lib/{_RUNTIME}"):
            found.setdefault(int(path.parts[-3][2:]), path)
    return found


@cache
def _open_runtime() -> ctypes.CDLL:
    flavor, path = runtime_library()
    try:
        # Global: the kernels' own libraries, opened locally, resolve their undefined symbols here.
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise NoKernel(f"cannot open the {flavor} kernel runtime: {error}") from error


def _require(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NoKernel(f"kernels need {package} ({error}); remedy: pip install {package}") from error


def _load_shared(tvm_ffi: Any, source: str | os.PathLike[str] | bytes, symbol: str) -> Callable[..., Any]:
    if not isinstance(source, bytes):
        module = tvm_ffi.load_module(os.path.abspath(source))
        _alive.append(module)
        return module.get_function(symbol)
    # The dynamic linker only opens files, and tvm_ffi only names ending in .so: an anonymous file serves the former, the
    # entry point is looked up by hand. The descriptor stays open, as a path once used names its library for ever.
    descriptor = os.memfd_create(symbol, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(source)
    library = ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_LOCAL)
    address = ctypes.cast(getattr(library, f"__tvm_ffi_{symbol}"), ctypes.c_void_p).value
    _alive.append(library)
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=library)


def _load_object(source: str | os.PathLike[str] | bytes, symbol: str) -> Callable[..., Any]:
    if importlib.util.find_spec("tvm_ffi_orcjit") is not None:
        session = importlib.import_module("tvm_ffi_orcjit").default_session()
        module = session.load_module(source if isinstance(source, bytes) else os.path.abspath(source), keep_module_alive=True)
        return module.get_function(symbol)
    import tempfile

    import cutlass.cute as cute

    log.info("loading %s with the compiler's own loader; a C compiler at compile time avoids this", symbol)
    with tempfile.TemporaryDirectory(prefix="tpf_jit_") as folder:
        path = Path(folder) / "kernel.o" if isinstance(source, bytes) else Path(source)
        if isinstance(source, bytes):
            path.write_bytes(source)
        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    _alive.append(module)
    return getattr(module, symbol)
