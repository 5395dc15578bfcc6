"""The benches on the CPU, where they run the same code with the wall clock: records, peers, checks, interleaving."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import pytest
import torch

from tpf_jit.bench import BenchSettings, RoundSettings, bench_attention, bench_latency, other_peers, peer_base
from tpf_jit.bench import attention as bench
from tpf_jit.bench import peers as peers_module
from tpf_jit.bench.environment import bench_device
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.tune import timing

SHAPE = TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=16)
QUICK = BenchSettings(rounds=2, samples=2, heat_s=0.0, check_rows=2)

pytestmark = pytest.mark.filterwarnings("ignore::tpf_jit.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def own_peers(monkeypatch, private_state):
    """Peers registered by one test are not there in the next. One thread: tiny tensors, and others need the cores."""
    monkeypatch.setattr(peers_module, "_PEERS", dict(peers_module._PEERS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quick(**changes) -> BenchSettings:
    import dataclasses

    return dataclasses.replace(QUICK, **changes)


def run(shapes=(SHAPE,), passes=("forward",), settings=QUICK):
    return bench_attention(list(shapes), passes, settings, device="cpu", command="tpf-jit bench attention")


def rows_by_impl(record) -> dict:
    return {row["impl"]: row for row in record["rows"]}


def test_a_record_says_what_was_measured_how_and_with_what():
    record = json.loads(json.dumps(run()))
    assert record["kind"] == "bench.attention" and record["command"] == "tpf-jit bench attention"
    assert record["date"].endswith("Z") and record["device"]["name"].startswith("cpu")
    assert record["versions"]["torch"] == torch.__version__ and "tpf_jit" in record["versions"]
    assert record["method"]["interleaved"] is True and record["method"]["repeats"] == 4
    assert record["method"]["timer"] == "perf_counter" and record["method"]["statistic"] == "median"
    assert len(record["source_hash"]["triangle_attention_forward_sm90"]) == 64
    assert "not installed" in record["absent_peers"]["cuequivariance"]
    row = rows_by_impl(record)["tpf_jit"]
    shape = {"op": "triangle_attention", "pass": "forward", "B": 1, "I": 5, "N": 16, "H": 2, "D": 16}
    assert row.items() >= shape.items()
    assert row["dtype"] == row["bias_dtype"] == "bfloat16" and row["mask"] == "none"
    assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"]
    assert row["config"] is None and row["config_from"].startswith("pytorch path")
    assert set(rows_by_impl(record)) == {"tpf_jit", "torch", "torch_chunked", "torch_sdpa"}


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("layout", bench.LAYOUTS)
def test_every_implementation_agrees_with_float64(mask, layout):
    shape = TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=16, mask=mask, batch=2, bias_dtype="float32")
    record = run([shape], bench.PASSES, quick(layout=layout))
    assert {(row["impl"], row["pass"]) for row in record["rows"]} >= {
        (impl, name) for impl in ("tpf_jit", "torch", "torch_chunked") for name in bench.PASSES
    }
    for row in record["rows"]:
        assert set(row["rel_rms"]) == ({"out"} if row["pass"] == "forward" else {"out", "dq", "dk", "dv"})
        assert all(1e-4 < value < 1e-2 for value in row["rel_rms"].values()), row


def test_the_layout_is_the_one_that_was_asked_for():
    problem = bench._Problem(SHAPE, "forward", torch.device("cpu"), timing.WallTimer(), quick(layout="model"))
    inputs = problem._inputs(0)
    assert inputs.q.transpose(2, 3).is_contiguous() and inputs.bias.stride(2) == 1
    problem = bench._Problem(SHAPE, "forward", torch.device("cpu"), timing.WallTimer(), quick(layout="contiguous"))
    again = problem._inputs(0)
    assert all(tensor.is_contiguous() for tensor in again.leaves())
    assert all(torch.equal(a, b) for a, b in zip(inputs.leaves(), again.leaves(), strict=True))


class Wrong(peers_module.Torch):
    name = "wrong"

    def forward(self, inputs):
        return super().forward(inputs) * 1.05


class WrongGradient(peers_module.Torch):
    name = "wrong_gradient"

    def forward(self, inputs):
        out = super().forward(inputs)
        return out.detach() + 1.05 * (out - out.detach())


class Crash(peers_module.Torch):
    name = "crash"

    def forward(self, inputs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 31.00 GiB\nand so on")


class Later(peers_module.Torch):
    """Fails only when it is timed."""

    name = "later"
    calls = 0

    def forward(self, inputs):
        type(self).calls += 1
        if type(self).calls > 3:
            raise RuntimeError("worn out")
        return super().forward(inputs)


def test_an_implementation_that_is_wrong_is_not_timed():
    peers_module.register(Wrong())
    peers_module.register(WrongGradient())
    record = run(passes=("forward", "backward"), settings=quick(impls=["torch", "wrong", "wrong_gradient"]))
    assert {(row["impl"], row["pass"]) for row in record["rows"]} == {
        ("torch", "forward"), ("torch", "backward"), ("wrong_gradient", "forward"),
    }  # fmt: skip
    assert "wrong: out is off by 0.05" in record["absent_peers"]["wrong"]
    assert "dq is off by 0.05" in record["absent_peers"]["wrong_gradient"]
    assert "I5/H2/N16/D16" in record["absent_peers"]["wrong"]


def test_an_implementation_that_fails_is_named_with_its_reason_and_the_others_go_on():
    peers_module.register(Crash())
    peers_module.register(Later())
    Later.calls = 0
    record = run([SHAPE, TriangleAttentionShape(crop=8, heads=2, head_dim=16)], settings=quick(impls=["crash", "torch", "later"]))
    assert set(rows_by_impl(record)) == {"torch"} and len(record["rows"]) == 2
    absent = record["absent_peers"]
    assert absent["crash"].startswith("RuntimeError: CUDA out of memory. Tried to allocate 31.00 GiB (")
    assert "I5/H2/N16" in absent["crash"] and "I8/H2/N8" in absent["crash"] and "and so on" not in absent["crash"]
    assert "worn out" in absent["later"]


def test_when_nothing_can_be_measured_the_reasons_are_the_error():
    peers_module.register(Crash())
    with pytest.raises(MeasurementFailed, match="31.00 GiB"):
        run(settings=quick(impls=["crash"]))


def test_a_lost_device_ends_the_bench(monkeypatch):
    peers_module.register(Crash())
    monkeypatch.setattr(timing.WallTimer, "alive", lambda self: False)
    with pytest.raises(MeasurementFailed, match="takes no more work"):
        run(settings=quick(impls=["crash", "torch"]))


def test_implementations_take_turns_in_mirrored_order(monkeypatch):
    turns = []
    sample = timing.WallTimer.sample
    launches = bench._Problem._launches

    def watched(self, peer):
        turns.append(peer.name)
        return launches(self, peer)

    monkeypatch.setattr(bench._Problem, "_launches", watched)
    monkeypatch.setattr(timing.WallTimer, "sample", sample)
    run(settings=quick(impls=["torch", "torch_chunked"], rounds=4))
    assert turns == ["torch", "torch_chunked", "torch_chunked", "torch"] * 2


def test_chunks_bound_the_score_tensor(monkeypatch):
    largest = []
    attend = peers_module._attend

    def watched(q, *others):
        largest.append(q.shape[1])
        return attend(q, *others)

    monkeypatch.setattr(peers_module, "_attend", watched)
    monkeypatch.setattr(peers_module, "TORCH_CHUNK_BYTES", 2 * 2 * 16 * 16 * 2)
    run(settings=quick(impls=["torch_chunked"]))
    assert max(largest) == 2


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidInput, match="sideways"):
        run(passes=("sideways",))
    with pytest.raises(InvalidInput, match="turbo"):
        run(settings=quick(impls=["turbo"]))
    with pytest.raises(InvalidInput, match="diagonal"):
        run(settings=quick(layout="diagonal"))


@pytest.mark.parametrize("device", ["gpu", "xpu", "meta", "foo", "cuda:x", "cuda:", "cpu:0", ""])
def test_a_device_is_a_gpu_or_the_cpu(device):
    with pytest.raises(InvalidInput, match="--device"):
        bench_device(device)


def test_nothing_is_measured_in_no_rounds_samples_or_repeats():
    for changes in ({"rounds": 0}, {"samples": 0}, {"rounds": -1}):
        with pytest.raises(InvalidInput, match=f"{next(iter(changes))}: got .*at least one"):
            quick(**changes)
        with pytest.raises(InvalidInput, match="at least one"):
            RoundSettings(**changes)
    with pytest.raises(InvalidInput, match="repeats: got 0"):
        bench_latency(SHAPE, repeats=0, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_bench_says_so():
    with pytest.raises(MeasurementFailed, match="PyTorch sees none"):
        bench_attention([SHAPE])
    assert isinstance(bench_device("cpu")[1], timing.WallTimer)


def test_cuequivariance_is_called_as_its_documentation_says(monkeypatch):
    calls = []

    def triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False):
        calls.append((bias.shape, mask.dtype if mask is not None else None, scale))
        return peers_module._attend(q * scale, k, v, bias, peer_base.additive(mask, q.dtype))

    for name in ("cuequivariance_torch", "cuequivariance_ops_torch"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.triangle_attention = triangle_attention
        monkeypatch.setitem(sys.modules, name, module)
    shape = TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=16, mask="bool")
    record = run([shape], settings=quick(impls=["cuequivariance", "torch"]))
    assert "cuequivariance" in rows_by_impl(record) and record["absent_peers"] == {}
    assert calls[0] == ((1, 1, 2, 16, 16), torch.bool, 0.25)
    additive = TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=16, mask="additive")
    record = run([additive], settings=quick(impls=["cuequivariance", "torch"]))
    assert "boolean masks only" in record["absent_peers"]["cuequivariance"]


def fake_module(monkeypatch, name: str, **members) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


EVOFORMER = """
import torch
CALLS = []

def TritonEvoformer(q, k, v, res_mask, pair_bias, has_pair_bias=True, dynamic=False, softmax_scale=None):
    batch, rows, crop, heads, dim = q.shape
    assert res_mask.shape == (batch, rows, 1, 1, crop) and pair_bias.shape == (batch, 1, heads, crop, crop)
    CALLS.append((res_mask.dtype, has_pair_bias, dynamic, softmax_scale))
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    scores = (q * softmax_scale) @ k.transpose(-1, -2) + res_mask + pair_bias
    return (torch.softmax(scores, -1).to(v.dtype) @ v).transpose(2, 3).contiguous()
"""


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_openfold3_is_loaded_from_its_one_file(monkeypatch, tmp_path, mask):
    folder = tmp_path / "openfold3" / "core" / "kernels" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "openfold3" / "__init__.py").write_text("raise ImportError('a bench needs none of this')")
    (folder / "evoformer.py").write_text(EVOFORMER)
    monkeypatch.syspath_prepend(tmp_path)
    fake_module(monkeypatch, "triton")
    peers_module.register(other_peers.OpenFold3Triton())
    shape = TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=16, mask=mask, batch=2)
    record = run([shape], bench.PASSES, quick(impls=["openfold3_triton"]))
    assert [row["pass"] for row in record["rows"]] == list(bench.PASSES) and record["absent_peers"] == {}
    calls = sys.modules["_tpf_jit_bench_openfold3_evoformer"].CALLS
    assert set(calls) == {(torch.bfloat16, True, False, 0.25)}
    monkeypatch.delitem(sys.modules, "_tpf_jit_bench_openfold3_evoformer")


def test_an_openfold3_that_cannot_be_loaded_says_why(monkeypatch, tmp_path):
    folder = tmp_path / "openfold3" / "core" / "kernels" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "openfold3" / "__init__.py").write_text("")
    (folder / "evoformer.py").write_text("TritonEvoformer = None")
    monkeypatch.syspath_prepend(tmp_path)
    fake_module(monkeypatch, "triton")
    peer = other_peers.OpenFold3Triton()
    assert "Triton is not available" in peer.absent() and "Triton is not available" in peer.absent()


@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_turbopairformer_gets_an_additive_mask_and_returns_the_projection_layout(monkeypatch, mask):
    calls = []

    def turbo_attention(q, k, v, res_mask=None, pair_bias=None):
        calls.append(None if res_mask is None else (res_mask.dtype, float(res_mask.min())))
        out = peers_module._attend(q * q.shape[-1] ** -0.5, k, v, pair_bias, None if res_mask is None else res_mask.to(q.dtype))
        return out.transpose(2, 3).contiguous()

    loaded = []
    fake_module(monkeypatch, "turbopairformer", turbo_attention=turbo_attention)
    for name in other_peers.TurboPairFormer.LOADERS:
        fake_module(monkeypatch, f"turbopairformer.{name}", load_extension=lambda name=name: loaded.append(name))
    peers_module.register(other_peers.TurboPairFormer())
    shapes = [TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=dim, mask=mask, batch=2) for dim in (16, 72)]
    record = run(shapes, bench.PASSES, quick(impls=["turbopairformer", "torch"]))
    rows = [row for row in record["rows"] if row["impl"] == "turbopairformer"]
    assert [(row["D"], row["pass"]) for row in rows] == [(16, name) for name in bench.PASSES]
    assert {row["binaries"] for row in rows} == {"wheel"} and loaded == list(other_peers.TurboPairFormer.LOADERS)
    assert "up to 64" in record["absent_peers"]["turbopairformer"]
    masked = -torch.inf if mask == "bool" else float(torch.tensor(-1e9))
    assert set(calls) == {None if mask == "none" else (torch.float32, masked)}


def test_a_turbopairformer_that_cannot_be_built_is_absent_and_built_once(monkeypatch, tmp_path):
    builds = tmp_path / "builds"
    package = tmp_path / "turbopairformer"
    package.mkdir()
    (package / "__init__.py").write_text("def turbo_attention(*tensors): raise ValueError('no GPU')")
    fails = f"def load_extension():\n    open({str(builds)!r}, 'a').write('x')\n    raise OSError('ABI mismatch, no nvcc')"
    for name in other_peers.TurboPairFormer.LOADERS:
        (package / f"{name}.py").write_text(fails)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TURBOPAIRFORMER_ALLOW_JIT", "1")
    peers_module.register(other_peers.TurboPairFormer())
    try:
        record = run([SHAPE], bench.PASSES, quick(impls=["turbopairformer", "torch"]))
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "turbopairformer"]:
            del sys.modules[name]
    assert "triangle_forward cannot be built: OSError: ABI mismatch, no nvcc" in record["absent_peers"]["turbopairformer"]
    assert builds.read_text() == "x" * 4


class Core:
    """miniworld-engine's core in PyTorch: projection layout, bias / scale in bf16, delta given, dbias added into."""

    def scaled_bias(self, bias, scale):
        return (bias.float() / scale).to(torch.bfloat16).contiguous()

    def _core(self):
        return self

    _bwd = _core

    def triattn_fwd(self, q, k, v, sbias, scale, want_lse):
        scores = self.scores(q, k, sbias, scale)
        out = torch.softmax(scores, -1) @ v.transpose(2, 3).float()
        return [out.transpose(2, 3).to(q.dtype).contiguous(), torch.logsumexp(scores, -1), None, None]

    def scores(self, q, k, sbias, scale):
        assert q.is_contiguous() and q.shape[-1] == 32 and sbias.dim() == 4
        q, k = (x.transpose(2, 3).float() for x in (q, k))
        return scale * (q @ k.transpose(-1, -2) + sbias.float().unsqueeze(1))

    def triattn_delta(self, grad, out):
        assert grad.is_contiguous() and out.is_contiguous()
        return (grad.float() * out.float()).sum(-1).transpose(2, 3)

    def _dscores(self, q, k, v, sbias, grad, lse, delta, scale):
        prob = torch.exp(self.scores(q, k, sbias, scale) - lse.unsqueeze(-1))
        grad = grad.transpose(2, 3).float()
        return prob, prob * (grad @ v.transpose(2, 3).float().transpose(-1, -2) - delta.unsqueeze(-1))

    def triattn_bwd_kv(self, q, k, v, sbias, grad, lse, delta, scale):
        prob, dscores = self._dscores(q, k, v, sbias, grad, lse, delta, scale)
        dk = scale * dscores.transpose(-1, -2) @ q.transpose(2, 3).float()
        dv = prob.transpose(-1, -2) @ grad.transpose(2, 3).float()
        return tuple(x.transpose(2, 3).to(q.dtype) for x in (dk, dv))

    def bwd_q(self, kernels, q, k, v, sbias, grad, lse, delta, scale, dbias):
        _, dscores = self._dscores(q, k, v, sbias, grad, lse, delta, scale)
        dbias += dscores.sum(1)
        return (scale * dscores @ k.transpose(2, 3).float()).transpose(2, 3).to(q.dtype)


def test_miniworld_is_tied_together_for_autograd(monkeypatch):
    name = "miniworld_engine.kernels.triangle_attention.cuda"
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        fake_module(monkeypatch, ".".join(parts[:count]))
    core = Core()
    monkeypatch.setitem(sys.modules, f"{name}.h100_sm90", core)
    monkeypatch.setattr(sys.modules[name], "h100_sm90", core, raising=False)
    peer = other_peers.MiniWorld()
    peers_module.register(peer)
    shape = TriangleAttentionShape(crop=128, rows=2, heads=2, head_dim=32, bias_dtype="float32", batch=2)
    record = run([shape, SHAPE], bench.PASSES, quick(impls=["miniworld", "torch"]))
    rows = [row for row in record["rows"] if row["impl"] == "miniworld"]
    assert [(row["N"], row["pass"]) for row in rows] == [(128, name) for name in bench.PASSES]
    assert "whole tiles of 128" in record["absent_peers"]["miniworld"]
    # The bench leaves the bias's gradient to the accuracy suite.
    problem = bench._Problem(shape, "both", torch.device("cpu"), timing.WallTimer(), quick(layout="model"))
    found = problem._both(peer, problem._inputs(0).with_grad())[3]
    expected = problem._both(peers_module.Torch(), problem._inputs(0).with_grad())[3]
    assert found.dtype == torch.float32 and found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_a_line_without_bias_is_held_to_a_reference_without_bias(monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None, deterministic=False):
        calls.append((q.shape, deterministic))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.softmax(softmax_scale * q @ k.transpose(-1, -2), -1) @ v
        return out.transpose(1, 2), None

    fake_module(monkeypatch, "flash_attn")
    fake_module(monkeypatch, "flash_attn.cute", flash_attn_func=flash_attn_func)
    shapes = [TriangleAttentionShape(crop=16, rows=5, heads=2, head_dim=16, batch=2, mask=mask) for mask in ("none", "bool")]
    impls = ["fa4_nobias", "fa4_nobias_deterministic", "torch"]
    record = run(shapes, bench.PASSES, quick(impls=impls))
    found = {(row["impl"], row["pass"]): row for row in record["rows"] if row["mask"] == "none"}
    assert set(found) == {(impl, name) for impl in impls for name in bench.PASSES} - {("fa4_nobias_deterministic", "forward")}
    assert {row["impl"] for row in record["rows"] if row["mask"] == "bool"} == {"torch"}
    assert "takes no mask per row" in record["absent_peers"]["fa4_nobias"]
    assert set(found["fa4_nobias", "both"]["rel_rms"]) == {"out", "dq", "dk", "dv"}
    assert set(calls) == {((10, 16, 2, 16), False), ((10, 16, 2, 16), True)}


def test_a_library_whose_import_fails_is_absent(monkeypatch):
    fake_module(monkeypatch, "turbopairformer")
    assert "turbopairformer cannot be imported: AttributeError" in other_peers.TurboPairFormer().absent()
    assert other_peers.FlashAttention4().absent() == "flash_attn.cute is not installed"
    assert other_peers.MiniWorld().absent() == "miniworld_engine is not installed"


def test_latency_of_calls_and_of_new_processes(monkeypatch):
    from tpf_jit.bench import latency

    monkeypatch.setattr(latency, "BATCH", 5)
    record = json.loads(json.dumps(bench_latency(SHAPE, repeats=1, device="cpu", command="tpf-jit bench latency")))
    assert record["kind"] == "latency"
    calls = {row["impl"]: row for row in record["rows"] if row["what"] == "call overhead"}
    assert set(calls) == {"tpf_jit", "tpf_jit, recording gradients", "torch.add"}
    assert all(0 < row["us_p10"] <= row["us"] <= row["us_p90"] for row in calls.values())
    first = {row["cache"]: row for row in record["rows"] if row["what"] == "first result"}
    assert set(first) == {"warm", "cold"}
    for row in first.values():
        parts = row["import_tpf_jit_s"] + row["context_and_inputs_s"] + row["first_call_s"]
        assert row["import_to_first_result_s"] == pytest.approx(parts, abs=1e-3)
        assert row["compiler_imported"] is False


def test_a_new_process_that_fails_is_an_error(monkeypatch):
    from tpf_jit.bench import latency

    monkeypatch.setattr(latency, "_SCRIPT", "raise SystemExit('no such kernel')")
    with pytest.raises(MeasurementFailed, match="no such kernel"):
        latency._fresh_process(SHAPE, "cpu", {})
