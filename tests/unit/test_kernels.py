"""Kernels of a process: chosen once, loaded once by however many threads, refused in a graph capture while cold."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import toy_template as toy

from tpf_jit import kernels
from tpf_jit.cache import ObjectStore
from tpf_jit.compiler import KernelSpec, toolchain
from tpf_jit.errors import ColdKernelInCapture, CompileFailed, InvalidInput, NoKernel, ShapeUnsupported
from tpf_jit.kernels import Kernel, get_kernel

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Resolution:
    template_name: str
    config: Any
    source: str
    note: str = ""


class FakeDispatcher:
    def __init__(self, resolution: Resolution) -> None:
        self.resolution, self.calls = resolution, 0

    def resolve(self, op: str, direction: str, shape: Any) -> Resolution:
        self.calls += 1
        assert (op, direction) == ("toy", "forward")
        return self.resolution


@pytest.fixture(autouse=True)
def backend(tmp_path: Path) -> Iterator[toy.ToyBackend]:
    kernels.forget()
    kernels._default_store.append(ObjectStore(tmp_path / "objects", toy.MemoryRecords()))
    yield toy.install()
    kernels.forget()


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> FakeDispatcher:
    fake = FakeDispatcher(Resolution("toy_forward", toy.ToyConfig(5), "nearest", "measured at size 16"))
    module = types.ModuleType("tpf_jit.resolve")
    module.default_dispatcher = lambda: fake
    monkeypatch.setitem(sys.modules, "tpf_jit.resolve", module)
    return fake


def kernel(tile: int = 1, mood: str = "good", shape: toy.ToyShape = toy.ToyShape()) -> Kernel:  # noqa: B008 - frozen
    return get_kernel("toy_forward", shape, config=toy.ToyConfig(tile, mood))


def test_a_kernel_is_compiled_and_loaded_when_first_used(backend: toy.ToyBackend) -> None:
    k = kernel(3)
    assert (k.config_from, k.config, k.note, backend.compiles, k.is_loaded) == ("explicit", toy.ToyConfig(3), "", 0, False)
    assert k(1, "x") == (3, 1, "x")
    assert (backend.compiles, len(backend.loads), k.is_loaded) == (1, 1, True)
    assert "function" in vars(k), "after the first use it is a plain attribute"
    assert k.function is kernel(3).function, "two kernels of one specification share the function"
    assert len(backend.loads) == 1 and "loaded" in repr(k)


def test_a_loaded_kernel_can_be_pickled_and_copied() -> None:
    kernel = get_kernel("toy_forward", toy.ToyShape(), config=toy.ToyConfig(3))
    assert callable(kernel.function)
    for copied in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)):
        assert copied.spec == kernel.spec and "function" not in vars(copied)
        assert copied.function is kernel.function


def test_shapes_that_share_a_variant_share_the_function(backend: toy.ToyBackend) -> None:
    a, b = kernel(shape=toy.ToyShape(8)), kernel(shape=toy.ToyShape(9))
    assert a.function is b.function and backend.compiles == 1
    assert kernel(shape=toy.ToyShape(8, "float16")).function is not a.function


def test_resources_need_no_loading(backend: toy.ToyBackend) -> None:
    assert kernel(2).resources["registers"] == 64
    assert (backend.compiles, backend.loads) == (1, [])
    assert kernel(2).resources["registers"] == 64 and backend.compiles == 1


def test_the_dispatcher_is_asked_once_a_problem(dispatcher: FakeDispatcher) -> None:
    first = get_kernel("toy/forward", toy.ToyShape(), (("residual", True),))
    assert get_kernel("toy/forward", toy.ToyShape(), (("residual", True),)) is first
    assert get_kernel("toy/forward", toy.ToyShape(), {"residual": True}) is first
    assert get_kernel("toy_forward", toy.ToyShape()).spec.variant == (("dtype", "bfloat16"),)
    assert dispatcher.calls == 2
    assert (first.config, first.config_from, first.note) == (toy.ToyConfig(5), "nearest", "measured at size 16")
    assert dict(first.spec.variant) == {"dtype": "bfloat16", "residual": True}
    kernels.reload_choices()
    assert get_kernel("toy/forward", toy.ToyShape(), (("residual", True),)) is not first


def test_a_named_template_that_the_dispatcher_did_not_choose_gets_its_default() -> None:
    class Rival(toy.ToyTemplate):
        name = "toy_rival"

    kernels.registry.register(Rival, replace=True)
    chosen = FakeDispatcher(Resolution("toy_rival", toy.ToyConfig(5), "tuned"))
    assert get_kernel("toy/forward", toy.ToyShape(), dispatcher=chosen).spec.template == "toy_rival"
    k = get_kernel("toy_forward", toy.ToyShape(), dispatcher=chosen)
    assert (k.spec.template, k.config, k.config_from) == ("toy_forward", toy.ToyConfig(2), "default")
    assert "toy_rival" in k.note


def test_a_measured_configuration_that_became_illegal_gives_way_to_the_default() -> None:
    stale = FakeDispatcher(Resolution("toy_forward", toy.ToyConfig(99), "tuned"))
    k = get_kernel("toy/forward", toy.ToyShape(), dispatcher=stale)
    assert (k.config, k.config_from) == (toy.ToyConfig(2), "default") and "not legal" in k.note


def test_what_cannot_be_had_is_said_clearly(dispatcher: FakeDispatcher) -> None:
    with pytest.raises(NoKernel, match="family 'toy/sideways'; families: .*toy/forward"):
        get_kernel("toy/sideways", toy.ToyShape())
    with pytest.raises(NoKernel, match="no template is named 'toys'"):
        get_kernel("toys", toy.ToyShape())
    with pytest.raises(InvalidInput, match="tile must be 1 to 8, is 9"):
        kernel(9)
    with pytest.raises(ShapeUnsupported, match="does not compute toy/0/bfloat16: size must be positive"):
        kernel(shape=toy.ToyShape(0))
    with pytest.raises(TypeError, match="unknown flags"):
        get_kernel("toy/forward", toy.ToyShape(), (("speed", True),))


def test_threads_that_need_one_kernel_compile_and_load_it_once(backend: toy.ToyBackend) -> None:
    ks = [kernel(4, "slow") for _ in range(16)]
    barrier = threading.Barrier(len(ks))
    functions: list[Any] = []

    def use(k: Kernel) -> None:
        barrier.wait()
        functions.append(k.function)

    threads = [threading.Thread(target=use, args=(k,)) for k in ks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(functions) == 16 and len(set(map(id, functions))) == 1
    assert (backend.compiles, len(backend.loads)) == (1, 1)


def test_a_failure_is_not_paid_for_twice(backend: toy.ToyBackend) -> None:
    for _ in range(3):
        with pytest.raises(CompileFailed, match="toy compiler says no"):
            kernel(1, "broken")()
    assert backend.compiles == 1
    kernels.forget()
    kernels._default_store.append(ObjectStore("/proc/none", toy.MemoryRecords()))
    with pytest.raises(CompileFailed):
        kernel(1, "broken")()
    assert backend.compiles == 2


def test_a_cache_that_cannot_be_executed_from_is_read_into_memory(backend: toy.ToyBackend) -> None:
    assert kernel(6, "noexec")() == (6,)
    path, content = backend.loads
    assert isinstance(path, Path) and isinstance(content, bytes) and backend.compiles == 1


def test_an_entry_that_vanishes_between_check_and_load_is_compiled_again(
    backend: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kernels.default_store()
    ensure = store.ensure

    def ensure_and_lose(spec: KernelSpec) -> Path:
        path = ensure(spec)
        path.unlink()
        return path

    monkeypatch.setattr(store, "ensure", ensure_and_lose)
    assert kernel(7)() == (7,)
    assert backend.compiles == 2


def fake_cuda(monkeypatch: pytest.MonkeyPatch, capturing: bool, initialized: bool = True) -> list[str]:
    asked: list[str] = []

    def is_capturing() -> bool:
        asked.append("capturing")
        return capturing

    cuda = types.SimpleNamespace(is_initialized=lambda: initialized, is_current_stream_capturing=is_capturing)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return asked


def test_a_cold_kernel_is_refused_in_a_capture_and_a_warm_one_is_not(
    backend: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, cold = kernel(1), kernel(2)
    assert kernels.warm([warm, warm]) == 1
    asked = fake_cuda(monkeypatch, capturing=True)
    with pytest.raises(ColdKernelInCapture, match=r"tile=2 .*is not loaded.*tpf_jit\.warmup"):
        cold()
    assert backend.compiles == 1, "nothing was done"
    asked.clear()
    assert warm(1) == (1, 1) and kernel(1)(2) == (1, 2)
    assert asked == [], "torch is asked about captures only while a kernel is cold"
    fake_cuda(monkeypatch, capturing=False)
    assert cold() == (2,)


def test_torch_is_not_asked_before_it_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_cuda(monkeypatch, capturing=True, initialized=False)
    assert kernel(3)() == (3,) and asked == []


def test_a_spec_survives_json_and_its_key_covers_what_matters(backend: toy.ToyBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kernel(2).spec
    again = KernelSpec.from_json(spec.to_json())
    assert again == spec and hash(again) == hash(spec) and again.key == spec.key and len(spec.key) == 64
    assert spec.symbol == "tpf_" + spec.key[:24]
    assert toolchain("toy") == {"toy": "1"}
    keys = [kernel(3).spec.key, kernel(2, shape=toy.ToyShape(8, "float16")).spec.key]
    keys.append(KernelSpec(spec.template, spec.variant, spec.config, "toy_2").key)

    def key_now() -> str:
        return KernelSpec.from_json(spec.to_json()).key

    monkeypatch.setitem(backend.versions, "toy", "2")
    keys.append(key_now())
    monkeypatch.undo()
    monkeypatch.setattr(toy.ToyTemplate, "options", "--opt-level 2")
    keys.append(key_now())
    monkeypatch.undo()
    monkeypatch.setattr(toy.ToyTemplate, "_source_hash", "0" * 64)
    keys.append(key_now())
    monkeypatch.undo()
    assert len({*keys, spec.key}) == 7 and key_now() == spec.key
    for bad in ("", "[]", '{"template":"x"}', '{"template":"x","variant":[1],"config":[],"arch":"y"}'):
        with pytest.raises(InvalidInput, match="not a kernel spec"):
            KernelSpec.from_json(bad)


def test_import_is_light() -> None:
    code = (
        "import sys, tpf_jit.kernels, tpf_jit.cache, tpf_jit.loader, tpf_jit.compiler, tpf_jit.pool;"
        "heavy = {'torch', 'numpy', 'cutlass', 'optuna', 'sqlite_utils', 'sqlite3', 'tvm_ffi', 'platformdirs', 'rich'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
