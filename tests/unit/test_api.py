"""The public functions, with a cache and compile workers that compile nothing; tests/compile has the real ones."""

from __future__ import annotations

import importlib
import json
import re
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import multiplication_emulation
import pytest
import torch
from backward_emulation import EmulatedBackward
from emulation import EmulatedKernel

import tpf_jit
from tpf_jit import api, kernels, resolve
from tpf_jit.errors import ColdKernelInCapture, CompileFailed, FallbackWarning, InvalidInput, NoKernel, ShapeUnsupported
from tpf_jit.explanation import explain_passes
from tpf_jit.ops import multiplication_routing, plans, routing
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape, preset
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.config import ForwardConfig
from tpf_jit.templates.triangle_attention.workload import relative_rms

SHAPE = TriangleAttentionShape(384)
FACTS = {"registers": 168, "spill_bytes": 0, "ptxas_notes": ["text"]}


class FakeStore:
    """An object store that "compiles" by remembering; `fail` names a part of the specs that do not compile."""

    def __init__(self) -> None:
        self.compiled, self.here, self.fail = [], set(), None

    def get(self, spec):
        return Path("somewhere") if spec in self.here else None

    def ensure(self, spec, compile=None):
        if self.fail and self.fail in str(spec):
            raise CompileFailed(f"{spec}: ptxas says no")
        self.compiled.append((spec, compile is not None))
        if compile is not None:
            compile(spec)
        self.here.add(spec)
        return Path("somewhere")

    def resources(self, spec):
        return FACTS if spec in self.here else {}


class FakePool:
    """A compile pool that records what it was asked for."""

    opened: list = []

    def __init__(self, workers=None) -> None:
        self.workers, self.asked = workers or 2, []
        FakePool.opened.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, spec):
        self.asked.append(spec)
        future = Future()
        future.set_result(None)
        return future


@pytest.fixture(autouse=True)
def store(monkeypatch, private_state) -> FakeStore:
    kernels.forget()
    fake = FakeStore()
    monkeypatch.setattr(kernels, "default_store", lambda: fake)
    monkeypatch.setattr(api, "CompilePool", FakePool)
    monkeypatch.setattr(FakePool, "opened", [])
    monkeypatch.setattr(routing, "_warned", set())
    # What was measured for some crop must not decide what these tests see.
    monkeypatch.setattr(resolve, "_default_dispatcher", [resolve.Dispatcher(shipped=False)])
    plans._plans.clear()
    yield fake
    plans._plans.clear()
    kernels.forget()


@pytest.fixture
def hopper(monkeypatch) -> EmulatedKernel:
    """This machine passes for one with a Hopper GPU; every kernel loads as the emulation."""
    emulated = EmulatedKernel()
    monkeypatch.setattr(routing, "hardware", lambda device: routing.Hardware("sm_90a", "", 132))
    monkeypatch.setattr(kernels, "function_of", lambda spec, store=None: kernels._functions.setdefault(spec, emulated))
    return emulated


def tensors(B=1, I=5, N=16, H=3, D=16, dtype=torch.bfloat16) -> list[torch.Tensor]:  # noqa: E741
    torch.manual_seed(0)
    qkv = [torch.randn(B, I, N, H, D, dtype=dtype).transpose(2, 3) for _ in range(3)]
    return [*qkv, torch.randn(B, 1, H, N, N, dtype=dtype)]


# is_supported and explain


def test_public_names_are_these_functions() -> None:
    for name in ("compile", "explain", "is_supported", "triangle_attention", "warmup"):
        assert getattr(tpf_jit, name) is getattr(api, name)


def test_nothing_is_supported_without_a_gpu() -> None:
    supported, reason = api.is_supported(*tensors())
    assert not supported and "the tensors are on cpu" in reason and "Hopper" in reason


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_shape_without_a_gpu_is_told_of_the_gpu_not_of_tensors() -> None:
    for shape in (SHAPE, TriangleMultiplicationShape(64)):
        assert api.is_supported(shape) == (False, "there is no GPU here (PyTorch sees no CUDA device)")
        assert "there is no GPU here" in str(api.explain(shape))


def test_is_supported_with_a_gpu(hopper) -> None:
    assert api.is_supported(SHAPE) == (True, "a compiled kernel takes it")
    assert api.is_supported(*tensors())[0]
    assert api.is_supported(*(x[0] for x in tensors()))[0], "four dimensions"
    supported, reason = api.is_supported(*(x.float() for x in tensors()))
    assert not supported and "float32" in reason
    q, k, v, bias = tensors()
    supported, reason = api.is_supported(q, k, v, bias[..., :7])
    assert not supported and reason.startswith("bias: got")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert api.is_supported(*(x.float() for x in tensors()))[0], "autocast makes bfloat16 of it"
    assert hopper.calls == 0


def test_is_supported_says_what_the_call_does(hopper) -> None:
    """Each case once asked and once called: the kernel runs exactly when it was promised."""
    q, k, v, bias = tensors(B=2)
    mask = torch.ones(2, 5, 1, 1, 16, dtype=torch.bool)
    cases = [
        (q, k, v, bias, mask), (q, k, v, bias[:1]), (q, k, v, bias.expand(2, 5, 3, 16, 16)), (q, k, v, bias.half()),
        (q.double(), k.double(), v.double(), bias), (q, k, v, bias.double()), (q[:, :0], k[:, :0], v[:, :0], bias),
    ]  # fmt: skip
    for case in cases:
        before = hopper.calls
        supported, reason = api.is_supported(*case)
        if supported or case[0].numel() == 0:
            api.triangle_attention(*case)
        else:
            with pytest.warns(FallbackWarning) as caught:
                api.triangle_attention(*case)
            assert reason in str(caught[0].message)
        assert (hopper.calls > before) == supported, reason


def test_is_supported_refuses_half_a_call() -> None:
    q, k, *_ = tensors()
    assert "v: got NoneType" in api.is_supported(q, k)[1]
    for given, came in (((q,), "Tensor alone"), (("boltz2",), "str")):  # to say False here would hide a mistake
        with pytest.raises(InvalidInput, match=f"^q: got {came}; allowed: a shape alone, .+ z with p_in_weight"):
            api.is_supported(*given)
    with pytest.raises(InvalidInput, match="shape alone"):
        api.explain(SHAPE, q)
    with pytest.raises(InvalidInput, match="^q: got int"):
        api.explain(384)


def test_explain_without_a_gpu_says_what_no_kernel_takes() -> None:
    assert "the kernel takes bfloat16, not float16" in api.explain(TriangleMultiplicationShape(64, dtype="float16")).reason
    assert "besides" not in api.explain(SHAPE).reason


def test_nothing_is_hidden_by_there_being_no_gpu() -> None:
    """Else it reads as if a GPU were all that is missing."""
    wide, single = torch.zeros(1, 4, 4, 600, dtype=torch.bfloat16), torch.zeros(1, 4, 4, 64)
    q, bias = torch.zeros(1, 4, 2, 4, 200, dtype=torch.bfloat16), torch.zeros(1, 2, 4, 4)
    for call, named, said in (
        ((TriangleMultiplicationShape(64, dtype="float16"),), {}, "bfloat16, not float16"),
        ((wide,), {"p_in_weight": torch.zeros(64, 600)}, "got 600"),
        ((single,), {"p_in_weight": torch.zeros(64, 64)}, "autocast is off"),
        ((q, q, q, bias), {}, "head dim is 200"),
        ((q.float(), q.float(), q.float(), bias), {}, "are float32"),
    ):
        for reason in (api.is_supported(*call, **named)[1], api.explain(*call, **named).reason):
            assert re.match(f"(there is no GPU|the tensors are on cpu).+; besides, .*{said}", reason), reason


@pytest.mark.parametrize("value", ["no", 1, None])
def test_switches_are_true_or_false(value: object) -> None:
    x = torch.zeros(1, 4, 4, 8)
    weights = {f"{name}_weight": torch.zeros(16 if "in" in name else 8, 8) for name in ("p_in", "g_in", "p_out", "g_out")}
    for name in ("inplace", "recompute"):
        with pytest.raises(InvalidInput, match=f"^{name}: got .+; allowed: True or False"):
            tpf_jit.triangle_multiplication(x, **weights, **{name: value})
    q = torch.zeros(1, 2, 1, 2, 8)
    with pytest.raises(InvalidInput, match="^return_lse: got .+; allowed: True or False"):
        tpf_jit.triangle_attention(q, q, q, torch.zeros(1, 1, 2, 2), return_lse=value)
    with pytest.raises(InvalidInput, match="^enabled: got .+; allowed: True or False"):
        tpf_jit.residual_compensation(value)


def test_explain_without_a_gpu_shows_what_one_would_run() -> None:
    found = api.explain(SHAPE)
    assert (found.path, found.template, found.config_from, found.state) == (
        "fallback", "triangle_attention_forward_sm90", "default", "not compiled",
    )  # fmt: skip
    text = str(found)
    for part in (SHAPE.key(), "PyTorch", "would run", "tile_n=", "smem_bytes="):
        assert part in text
    assert found.config == vars(kernels.registry.get(found.template).default(SHAPE))
    assert json.loads(json.dumps(found.to_dict()))["config"] == found.config


def test_explain_of_tensors_is_that_of_their_shape(hopper) -> None:
    q, k, v, bias = tensors()
    mask = torch.ones(1, 5, 1, 1, 16, dtype=torch.bool)
    assert api.explain(q, k, v, bias, mask) == api.explain(TriangleAttentionShape.from_tensors(q, k, v, bias, mask))
    assert api.explain(q, k, v, bias).path == "kernel"


def test_explain_names_what_a_training_step_of_attention_runs(hopper, monkeypatch) -> None:
    usual = kernels.get_kernel
    asked = []

    def get_kernel(name, shape, flags=(), *rest):
        asked.append((name.partition("/")[2], dict(flags)))
        return usual(name, shape, flags, *rest)

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    found = api.explain(SHAPE)
    assert [name for name, _ in asked] == ["forward", "forward_training", "backward_stats", "backward_key", "backward_query"]
    assert asked[2:] == [("backward_stats", {"residual": True}), ("backward_key", {}), ("backward_query", {"dbias": True})]
    steps = [kernel.spec.template for kernel in api._of_training(SHAPE)]
    assert found.training == f"{steps[0]} (default)"
    assert found.backward == ", ".join(f"{name} (default)" for name in steps[1:]) and found.forward is None
    text = str(found)
    assert "\n  training   forward_training_sm90 (default)\n  backward   backward_stats_sm90 (default), backward_key_sm90" in text
    assert set(found.to_dict()) >= {"training", "backward"}
    with tpf_jit.residual_compensation(False):
        plain = api.explain(SHAPE)
    assert plain.training == "triangle_attention_forward_sm90 (default)" and asked[-3] == ("backward_stats", {"residual": False})


def test_explain_says_where_the_configurations_of_training_come_from(hopper, monkeypatch) -> None:
    monkeypatch.setattr(resolve, "_default_dispatcher", [resolve.Dispatcher(user_db=False)])
    kernels.reload_choices()
    found = api.explain(SHAPE)
    # The shipped tables are of an H200, which this machine does not say that it has.
    assert found.training.endswith(" (sibling)") and found.backward.count("(sibling)") == 3


def test_explain_says_why_pytorch_does_the_backward_of_attention(hopper, monkeypatch) -> None:
    q, k, v, _ = tensors(B=2)
    rows = torch.randn(1, 5, 3, 16, 16)
    assert api.explain(q, k, v, rows).backward == "PyTorch: every row has a bias of its own that all batch elements share"
    shared = torch.randn(1, 1, 3, 16, 16)
    for bias in (shared, shared.expand(2, 5, 3, 16, 16), torch.randn(2, 5, 3, 16, 16)):
        assert "PyTorch" not in api.explain(q, k, v, bias).backward
    usual = kernels.get_kernel

    def get_kernel(name, *rest):
        if name == routing.BACKWARD_KEY:
            raise NoKernel("there is none")
        return usual(name, *rest)

    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    found = api.explain(SHAPE)
    assert found.backward == "PyTorch: there is none" and "forward_training" in found.training


def test_explain_of_what_no_kernel_could_take(hopper) -> None:
    found = api.explain(*(x.double() for x in tensors()))
    assert found.path == "fallback" and found.template is None and "float64" in str(found)


def test_explain_follows_the_object(hopper, store) -> None:
    assert api.explain(SHAPE).state == "not compiled"
    kernel = api.compile(SHAPE)
    assert (api.explain(SHAPE).state, api.explain(SHAPE).resources) == ("cached", FACTS)
    kernel.function  # noqa: B018 - loads
    found = api.explain(SHAPE)
    assert found.state == "loaded" and "registers=168" in str(found) and "ptxas_notes" not in str(found)


# compile


def test_compile_gives_one_kernel_with_its_facts(store) -> None:
    kernel = api.compile(SHAPE)
    assert [spec for spec, _ in store.compiled] == [kernel.spec]
    assert kernel.shape == SHAPE and kernel.config_from == "default" and kernel.spec.arch == "sm_90a"
    assert kernel.config == kernels.registry.get(kernel.spec.template).default(SHAPE)
    assert "triangle_attention_forward_sm90" in str(kernel) and "default" in repr(kernel)
    api.compile(SHAPE)
    assert len(store.compiled) == 1, "the second time it is there"


def test_compile_of_several_shares_kernels_and_uses_workers(store) -> None:
    shapes = [SHAPE, TriangleAttentionShape(512), TriangleAttentionShape(384, head_dim=16)]
    compiled = api.compile(shapes, workers=3)
    assert [kernel.shape for kernel in compiled] == shapes
    assert {spec for spec, _ in store.compiled} == {kernel.spec for kernel in compiled}
    assert len(store.compiled) == len({kernel.spec for kernel in compiled})
    (pool,) = FakePool.opened
    assert pool.workers == 3 and set(pool.asked) == {kernel.spec for kernel in compiled}


def test_compile_takes_presets_keys_and_files(tmp_path) -> None:
    compiled = [kernel.shape for kernel in api.compile("protenix")]
    assert list(dict.fromkeys(compiled)) == preset("protenix")
    of_multiplications = [shape for shape in compiled if isinstance(shape, TriangleMultiplicationShape)]
    several = len(multiplication_routing.usual_variants(of_multiplications[0])) + 1  # and centre
    assert len(of_multiplications) == several * len(set(of_multiplications))
    assert api.compile(SHAPE.key()).shape == SHAPE
    path = tmp_path / "mine.json"
    path.write_text('{"shapes": [{"crop": 64}]}', encoding="utf-8")
    assert [kernel.shape.crop for kernel in api.compile(path)] == [64]
    assert list(dict.fromkeys(kernel.shape for kernel in api.compile(["boltz2", SHAPE]))) == [*preset("boltz2"), SHAPE]
    with pytest.raises(InvalidInput, match="openfold3"):
        api.compile("openfold9")
    with pytest.raises(InvalidInput, match="^problem: got int"):
        api.compile(384)


def test_compile_with_an_explicit_configuration() -> None:
    config = ForwardConfig(tile_n=64, consumer_warpgroups=2)
    kernel = api.compile(SHAPE, config=config)
    assert kernel.config == config and kernel.config_from == "explicit"
    assert "given by the caller" in str(kernel)
    same = api.compile(SHAPE, config={"tile_n": 64, "consumer_warpgroups": 2}, template="triangle_attention_forward_sm90")
    assert same.spec == kernel.spec
    with pytest.raises(InvalidInput, match="tile_k"):
        api.compile(SHAPE, config={"tile_k": 64})
    with pytest.raises(InvalidInput, match="tile_n"):
        api.compile(SHAPE, config={"tile_n": 1024})


def test_compile_with_residual_is_another_kernel() -> None:
    assert dict(api.compile(SHAPE, residual=True).spec.variant)["residual"] is True
    assert api.compile(SHAPE).spec != api.compile(SHAPE, residual=True).spec
    with pytest.raises(InvalidInput, match="forward_training"):
        api.compile(SHAPE, template="triangle_attention_forward_sm90", residual=True)


def test_compile_with_residual_takes_the_statistics_of_a_multiplication() -> None:
    def stats(compiled) -> list[bool]:
        return [bool(dict(kernel.spec.variant).get("stats")) for kernel in compiled]

    usual, kept = (api.compile(TriangleMultiplicationShape(96), residual=flag) for flag in (False, True))
    assert not any(stats(usual)) and stats(kept)[-3:] == [True, True, False], "back, with and without a residual"
    wide = api.compile(TriangleMultiplicationShape(96, 512), residual=True)
    assert not any(stats(wide)), "its backward is PyTorch's"
    trained = api.compile(TriangleMultiplicationShape(96), residual=True, training=True)
    assert [kernel.spec for kernel in trained[: len(kept)]] == [kernel.spec for kernel in kept]
    assert len({kernel.spec for kernel in trained}) == len(trained) == len(kept) + 9
    narrow = [api.compile(TriangleMultiplicationShape(96, 64), residual=True, training=flag) for flag in (False, True)]
    assert len(narrow[1]) == len(narrow[0]) + 8, "no one kernel for the gradients of the front"


def test_compile_refuses_other_architectures() -> None:
    with pytest.raises(NoKernel, match="sm_100a.*sm_90a"):
        api.compile(SHAPE, arch="sm_100a")
    assert api.compile(SHAPE, arch="sm_90a").spec.arch == "sm_90a"


def test_compile_of_what_no_template_computes() -> None:
    odd = TriangleAttentionShape(64, dtype="float16", bias_dtype="bfloat16")
    with pytest.raises(ShapeUnsupported):
        api.compile(odd)
    with pytest.raises(ShapeUnsupported):
        api.compile(odd, config={"tile_n": 64})


def test_one_failure_does_not_waste_the_others(store) -> None:
    store.fail = "tile_hdim=128"
    shapes = [TriangleAttentionShape(384, head_dim=dim) for dim in (16, 128, 32)]
    with pytest.raises(CompileFailed, match="ptxas says no"):
        api.compile(shapes)
    assert len(store.here) == 2


def test_ctrl_c_does_not_wait_for_what_is_queued(store, monkeypatch) -> None:
    class SlowPool(FakePool):
        """Kernels take "for ever", as long as nobody leaves the pool by an exception."""

        def __init__(self, workers=None) -> None:
            super().__init__(1)
            self.futures, self.closed = [], False

        def submit(self, spec):
            if self.closed:
                raise RuntimeError("the compile pool is closed")
            self.asked.append(spec)
            self.futures.append(Future())
            main = threading.main_thread().ident
            threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]).start()
            timer = threading.Timer(20.0, self.__exit__, [None])
            timer.daemon = True
            timer.start()
            return self.futures[-1]

        def __exit__(self, *_):
            self.closed = True
            for future in self.futures:
                future.cancel()

    monkeypatch.setattr(api, "CompilePool", SlowPool)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        api.compile([TriangleAttentionShape(384, head_dim=dim) for dim in (16, 32, 64, 128)])
    assert time.monotonic() - started < 10
    assert FakePool.opened[0].closed and len(FakePool.opened[0].asked) == 1
    assert not store.here


def test_a_configuration_of_another_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="config.*object.*ForwardConfig"):
        api.compile(SHAPE, config=object())


# A compiled kernel's call


def test_a_compiled_kernel_runs_itself(hopper) -> None:
    q, k, v, bias = tensors(D=12)
    mask = torch.rand(1, 5, 1, 1, 16) > 0.3
    config = ForwardConfig(tile_n=64, consumer_warpgroups=1)
    kernel = api.compile(TriangleAttentionShape.from_tensors(q, k, v, bias, mask), config=config)
    out, lse = kernel(q, k, v, bias, mask)
    ref_out, ref_lse = reference.attention(q, k, v, bias, mask)
    assert hopper.calls == 1 and hopper.last["num_ctas"] == 132
    assert relative_rms(out, ref_out) < 2.6e-3 and relative_rms(lse, ref_lse) < 1e-6
    assert kernel(*tensors(D=16, N=24, I=2), mask=torch.ones(1, 1, 1, 1, 24), scale=0.5)[0].shape == (1, 2, 3, 24, 16)


def test_a_compiled_kernel_refuses_what_it_was_not_compiled_for(hopper) -> None:
    kernel = api.compile(TriangleAttentionShape.from_tensors(*tensors()))
    for wrong in (tensors(D=64), tensors(dtype=torch.float16), tensors(dtype=torch.float32)):
        with pytest.raises(InvalidInput, match="compiled for"):
            kernel(*wrong)
    with pytest.raises(InvalidInput, match="compiled for"):
        kernel(*tensors(), mask=torch.ones(1, 1, 1, 1, 16))
    with pytest.raises(InvalidInput, match="^bias"):
        q, k, v, bias = tensors()
        kernel(q, k, v, bias[..., :3])
    assert hopper.calls == 0


def test_a_compiled_kernel_needs_its_device() -> None:
    with pytest.raises(NoKernel, match="sm_90a"):
        api.compile(TriangleAttentionShape.from_tensors(*tensors()))(*tensors())


# warmup and tune


def test_warmup_without_a_gpu_warns_and_does_nothing(store) -> None:
    with pytest.warns(FallbackWarning, match="there is no GPU here"):
        assert api.warmup("openfold3") == []
    assert store.compiled == []


@pytest.fixture
def cuda_of_cpu(hopper, monkeypatch):
    """What warmup needs of torch.cuda, on a CPU."""
    import contextlib

    monkeypatch.setattr(api, "_current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return hopper


def test_warmup_launches_every_kernel_once(cuda_of_cpu, store) -> None:
    shapes = [SHAPE, TriangleAttentionShape(512), TriangleAttentionShape(40, head_dim=24, mask="bool", bias_dtype="float32")]
    warmed = api.warmup(shapes)
    specs = {kernel.spec for kernel in warmed}
    assert store.here == specs and cuda_of_cpu.calls == len(specs)
    assert all(kernel.is_loaded for kernel in warmed)
    assert cuda_of_cpu.last["q"].shape[0:3] == (1, 1, 1)
    api.warmup(SHAPE, residual=True)
    assert cuda_of_cpu.last["residual"] is not None


def test_warmup_of_a_multiplication_is_small_and_covers_residuals(cuda_of_cpu, monkeypatch) -> None:
    seen, last = [], []

    def function_of(spec, store=None):
        def launch(*arguments) -> None:
            emulated = getattr(multiplication_emulation, kernels.registry.get(spec.template).direction)
            emulated(*arguments)
            last[:] = [arguments]
            seen.append((spec.template, arguments[0].shape, arguments[6] is not None if len(arguments) == 11 else None))

        return kernels._functions.setdefault(spec, launch)

    monkeypatch.setattr(kernels, "function_of", function_of)
    warmed = api.warmup(TriangleMultiplicationShape(2048, 32, 64))
    assert [kernel.spec.template.removeprefix("triangle_multiplication_") for kernel in warmed] == [
        "fold_sm90", "front_rows_sm90", "product_nt_sm90", "back_sm90", "back_sm90", "centre_sm90",
    ]
    assert len(seen) == 6 and [residual for *_, residual in seen[3:5]] == [False, True]
    assert all(max(shape) <= 64 for _, shape, _ in seen[1:])
    for family, flags, place in (
        (multiplication_routing.FOLD, multiplication_routing.fold_flags(True), 8),
        (multiplication_routing.BACK, multiplication_routing.back_flags(True, True), 8),
    ):
        api._launch_once(kernels.get_kernel(family, TriangleMultiplicationShape(64, 32), flags), torch.device("cpu"))
        assert last[0][place] is not None, "a bias; statistics of x"
    assert len(api.compile(TriangleMultiplicationShape(384))) == 6
    with pytest.raises(InvalidInput, match="config"):
        api.compile(TriangleMultiplicationShape(384), config={"tile_n": 64})
    one = api.compile(TriangleMultiplicationShape(384), template="triangle_multiplication_front_sm90", config={"tile_n": 96})
    assert one.config.tile_n == 96


def test_a_training_step_of_a_multiplication(monkeypatch) -> None:
    """What is compiled and warmed for one beside inference, and what is explained; nothing where PyTorch does the backward."""
    shape = TriangleMultiplicationShape(64, direction="incoming")
    asked = []

    def get_kernel(family, shape, flags=(), *rest):
        name = family.partition("/")[2] or "by name"
        asked.append((name, dict(flags)))
        return SimpleNamespace(spec=SimpleNamespace(template=f"fake_{name}"), config_from="nearest")

    monkeypatch.setattr(multiplication_routing, "backward_unsupported", lambda shape: "too wide")
    assert api._of_training(shape) == []
    assert api.explain(shape).backward == "PyTorch: too wide" and "backward   PyTorch: too wide" in str(api.explain(shape))
    assert len(api.compile(shape, training=True)) == 5
    monkeypatch.setattr(multiplication_routing, "backward_unsupported", lambda shape: None)
    monkeypatch.setattr(kernels, "get_kernel", get_kernel)
    backward = ["back_backward", "back_weights", "product_nt", "product_nn", "front_gradients", "finish"]
    narrow = [kernel.spec.template for kernel in api._of_training(TriangleMultiplicationShape(64, 64, direction="incoming"))]
    asked.clear()
    assert narrow[4:] == [f"fake_{name}" for name in [*backward[:4], "front_backward", "front_weights", "finish", "by name"]]
    found = [kernel.spec.template for kernel in api._of_training(shape)]
    # Where only one side of the front has a gradient, and where factors are made again.
    partial = ["front_backward", "front_weights", "by name"]
    assert found == [f"fake_{name}" for name in ["fold_front", "product_tn", "back", "back", *backward, *partial]]
    assert [flags for _, flags in asked[:4]] == [
        {"bias": False}, {}, *({"residual": added, "stats": True} for added in (False, True)),
    ]  # fmt: skip
    both = ["fold_front", "product_tn", "back"], backward
    texts = [", ".join(f"fake_{name} (nearest)" for name in names) for names in both]
    assert explain_passes(shape, "sm_90a", True) == (texts[0], None, texts[1])
    there = [f"{text} (what a device of sm_90a would run)" for text in texts]
    assert explain_passes(shape, "sm_90a", False) == (there[0], None, there[1])


@pytest.mark.parametrize("mask", ["none", "additive"])
def test_warmup_for_training_launches_what_a_step_runs(cuda_of_cpu, monkeypatch, mask: str) -> None:
    emulated, loaded = EmulatedBackward(), []
    direction = {"backward_stats": emulated.stats, "backward_key": emulated.key}
    direction |= dict.fromkeys(["forward", "forward_training"], emulated.forward)

    def function_of(spec, store=None):
        loaded.append(spec)
        name = kernels.registry.get(spec.template).direction
        return kernels._functions.setdefault(spec, direction.get(name, emulated.query))

    monkeypatch.setattr(kernels, "function_of", function_of)
    q, k, v, bias = tensors()
    given = None if mask == "none" else torch.zeros(1, 5, 1, 1, 16)
    warmed = api.warmup(TriangleAttentionShape.from_tensors(q, k, v, bias, given), training=True)
    assert len(warmed) == len({kernel.spec for kernel in warmed}) == 5
    assert emulated.forward.calls == 2 and sorted(emulated.calls) == ["key", "query", "stats"]
    loaded.clear()
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    api.triangle_attention(*leaves, given).sum().backward()
    assert set(loaded) <= {kernel.spec for kernel in warmed} and emulated.calls[3:] == ["stats", "key", "query"]
    with api.residual_compensation(False):
        variants = {tuple(kernel.spec.variant) for kernel in api.warmup(SHAPE, training=True)}
    assert not any(dict(variant).get("residual") for variant in variants)


def test_warmup_launches_each_finish_kernel_with_norms_of_its_dtype(cuda_of_cpu) -> None:
    template, given = registry.get("triangle_multiplication_finish_sm90"), []
    shape = TriangleMultiplicationShape(40, 64, 64, weight_dtype="bfloat16")
    for flags in ({"bias": False, "norm_dtype": "float32"}, {"bias": True, "norm_dtype": "bfloat16"}):
        spec = SimpleNamespace(variant=tuple(template.variant(shape, **flags).items()))
        function = lambda *arguments: given.append(arguments)  # noqa: E731
        kernel = SimpleNamespace(shape=shape, template=template, spec=spec, config=template.default(shape), function=function)
        api._launch_once(kernel, torch.device("cpu"))
    plain, biased = given
    assert {x.dtype for x in plain[:4]} == {x.dtype for x in biased[:8]} == {torch.bfloat16}
    assert {x.dtype for x in plain[4:8]} == {torch.float32}
    assert plain[20] is None and biased[20].dtype == torch.bfloat16, "a gradient of a bias"


def test_a_warm_kernel_is_the_one_calls_use(cuda_of_cpu, monkeypatch) -> None:
    q, k, v, bias = tensors()
    (kernel,) = api.warmup([TriangleAttentionShape.from_tensors(q, k, v, bias)])
    before = cuda_of_cpu.calls
    monkeypatch.setattr(kernels, "function_of", lambda spec, store=None: pytest.fail("a cold kernel"))
    api.triangle_attention(q, k, v, bias)
    assert cuda_of_cpu.calls == before + 1


def test_warmup_in_capture_raises_before_anything_is_launched(cuda_of_cpu, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ColdKernelInCapture, match="before capturing"):
        api.warmup(SHAPE)
    assert cuda_of_cpu.calls == 0


def test_tune_hands_every_shape_on_and_reloads(monkeypatch) -> None:
    from tpf_jit import resolve

    tune_package = importlib.import_module("tpf_jit.tune")
    seen, reloaded = [], []
    monkeypatch.setattr(tune_package, "tune", lambda shape, *a, **o: seen.append((shape, a, o)) or f"result {shape.crop}")
    monkeypatch.setattr(resolve, "reload", lambda: reloaded.append("resolve"))
    monkeypatch.setattr(kernels, "reload_choices", lambda: reloaded.append("kernels"))
    assert api.tune(SHAPE, budget_s=3) == "result 384"
    assert api.tune([SHAPE, TriangleAttentionShape(512)], "forward") == ["result 384", "result 512"]
    assert seen[0] == (SHAPE, ("forward",), {"budget_s": 3}) and seen[1][1] == ("forward",)
    assert reloaded == ["resolve", "kernels"] * 2
    seen.clear()
    multiplication = TriangleMultiplicationShape(96)
    assert api.tune(multiplication) == ["result 96"] * 3
    assert [arguments for _, arguments, _ in seen] == [("fold_front",), ("product_nt",), ("back",)]
    assert api.tune(multiplication, "front_weights", 3) == "result 96" and seen[-1][1] == ("front_weights", 3)
