"""Loading objects: from files and from memory, without one kernel answering for another, and with clear errors.

The objects are small C functions with the calling convention of compiled kernels, so no kernel compiler is needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tpf_jit import linker, loader
from tpf_jit.errors import NoKernel

ROOT = Path(__file__).resolve().parents[2]

# The second function has the same name in every library, as helpers of generated host code could.
SOURCE = """
#include <stdint.h>
typedef struct {{ int32_t type_index; uint32_t padding; int64_t value; }} Any;
int shared_helper(void) {{ return {value}; }}
int __tvm_ffi_{symbol}(void* self, const Any* args, int32_t count, Any* result) {{
  result->type_index = 1;  /* an int */
  result->padding = 0;
  result->value = shared_helper() + 1000 * count;
  return 0;
}}
"""

needs_kernels_runtime = pytest.mark.skipif(
    importlib.util.find_spec("tvm_ffi") is None or not loader._installed_runtimes(), reason="needs tvm-ffi and the kernel runtime"
)


def compiler() -> str:
    command = linker.linker()
    if command is None or not Path(command[0]).name.startswith(("cc", "gcc", "clang")):
        pytest.skip("needs a C compiler")
    return command[0]


def build(folder: Path, symbol: str, value: int) -> Path:
    """A shared library made the way kernels are: an object file, linked by `linker.link`."""
    source = folder / f"{symbol}.c"
    source.write_text(SOURCE.format(symbol=symbol, value=value))
    path = folder / f"{symbol}.o"
    subprocess.run([compiler(), "-c", "-fPIC", "-o", str(path), str(source)], check=True)
    library = folder / f"{symbol}.so"
    library.write_bytes(linker.link(path))
    return library


def test_a_linker_that_cannot_be_started_leaves_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x01\x02")
    broken.chmod(0o755)
    monkeypatch.setattr(linker, "linker", lambda: (str(broken),))
    assert linker.link(tmp_path / "kernel.o") is None
    assert "cannot link kernels" in caplog.text and "Exec format error" in caplog.text


@needs_kernels_runtime
def test_two_kernels_from_disk_do_not_answer_for_each_other(tmp_path: Path) -> None:
    one, two = build(tmp_path, "tpf_one", 1), build(tmp_path, "tpf_two", 2)
    first, second = loader.load(one, "tpf_one"), loader.load(two, "tpf_two")
    assert (first(), second(), first(None)) == (1, 2, 1001)
    with pytest.raises(AttributeError):
        getattr(ctypes.CDLL(None), "__tvm_ffi_tpf_one")  # noqa: B009 - RTLD_GLOBAL would make it visible


@needs_kernels_runtime
def test_kernels_from_memory_do_not_answer_for_each_other(tmp_path: Path) -> None:
    images = {value: build(tmp_path, f"tpf_m{value}", value).read_bytes() for value in (3, 4, 5)}
    functions = {value: loader.load(image, f"tpf_m{value}") for value, image in images.items()}
    for path in tmp_path.iterdir():
        path.unlink()
    assert {value: function() for value, function in functions.items()} == {3: 3, 4: 4, 5: 5}


@needs_kernels_runtime
def test_libraries_name_no_machine(tmp_path: Path) -> None:
    """No run path, no needed library: what the code needs is found in the process."""
    content = build(tmp_path, "tpf_clean", 1).read_bytes()
    assert str(tmp_path).encode() not in content and b"/lib" not in content and b".so" not in content


@needs_kernels_runtime
def test_a_rewritten_file_does_not_disturb_what_is_loaded(tmp_path: Path) -> None:
    path = build(tmp_path, "tpf_old", 6)
    function = loader.load(path, "tpf_old")
    (tmp_path / "new").mkdir()
    os.replace(build(tmp_path / "new", "tpf_old", 7), path)
    assert function() == 6


@needs_kernels_runtime
def test_what_cannot_be_loaded_is_said_clearly(tmp_path: Path) -> None:
    path = build(tmp_path, "tpf_here", 1)
    with pytest.raises(NoKernel, match="cannot load kernel tpf_absent from .*tpf_here.so"):
        loader.load(path, "tpf_absent")
    with pytest.raises(NoKernel, match="from memory"):
        loader.load(path.read_bytes()[:100], "tpf_here")
    with pytest.raises(NoKernel, match="cannot load kernel"):
        loader.load(tmp_path / "none.so", "tpf_here")
    with pytest.raises(NoKernel, match="kind 'exe' are not known"):
        loader.load(path, "tpf_here", "exe")


@needs_kernels_runtime
def test_threads_may_load_at_once(tmp_path: Path) -> None:
    paths = {value: build(tmp_path, f"tpf_t{value}", value) for value in range(10, 18)}
    results: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda v=value, p=path: results.update({v: loader.load(p, f"tpf_t{v}")()}))
        for value, path in paths.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {value: value for value in paths}


@needs_kernels_runtime
def test_a_shared_library_needs_no_compiler(tmp_path: Path) -> None:
    path = build(tmp_path, "tpf_fresh", 9)
    code = (
        "import sys; from tpf_jit import loader; f = loader.load(sys.argv[1], 'tpf_fresh');"
        "print(f(), sorted({'cutlass', 'optuna', 'sqlite_utils'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9 []"


def install_runtimes(monkeypatch: pytest.MonkeyPatch, driver: int | None, *majors: int) -> None:
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(loader, "_installed_runtimes", lambda: {major: Path(f"cu{major}/lib/x.so") for major in majors})
    monkeypatch.setattr(loader, "driver_cuda_major", lambda: driver)


@pytest.mark.parametrize(
    ("driver", "installed", "chosen"),
    [(None, (12, 13), "cu13"), (13, (12, 13), "cu13"), (12, (12, 13), "cu12"), (13, (12,), "cu12"), (14, (12, 13), "cu13")],
)
def test_the_runtime_is_the_newest_the_driver_supports(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, installed: tuple[int, ...], chosen: str
) -> None:
    install_runtimes(monkeypatch, driver, *installed)
    flavor, path = loader.runtime_library()
    assert (flavor, path.parts[0]) == (chosen, chosen)


def test_a_missing_or_unusable_runtime_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    install_runtimes(monkeypatch, None)
    with pytest.raises(NoKernel, match="pip install"):
        loader.runtime_library()
    install_runtimes(monkeypatch, 12, 13)
    with pytest.raises(NoKernel, match="for CUDA 13 but the driver supports CUDA 12; remedy: update the driver"):
        loader.runtime_library()


def test_a_runtime_chosen_for_the_dsl_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one process the DSL and the kernels must share one runtime, so its own variable counts."""
    library = tmp_path / "cu12" / "lib" / "libcute_dsl_runtime.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    monkeypatch.setenv("CUTE_DSL_LIBS", f"/nowhere/libother.so{os.pathsep}{library}")
    assert loader.runtime_library() == ("cu12", library)


def test_a_missing_package_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(NoKernel, match="pip install apache-tvm-ffi"):
        loader.load(b"", "tpf_x")


@needs_kernels_runtime
def test_the_installed_runtime_is_found_without_importing_the_dsl() -> None:
    code = "import sys; from tpf_jit import loader; print(loader.runtime_library()[1].is_file(), 'cutlass' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
