"""The benches on the CPU, where they run the same code with the wall clock: records, peers, checks, interleaving."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import pytest
import torch

from tpf_jit.bench import BenchSettings, bench_attention, bench_latency
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_bench_says_so():
    with pytest.raises(MeasurementFailed, match="PyTorch sees none"):
        bench_attention([SHAPE])
    assert isinstance(bench_device("cpu")[1], timing.WallTimer)


def test_cuequivariance_is_called_as_its_documentation_says(monkeypatch):
    calls = []

    def triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False):
        calls.append((bias.shape, mask.dtype if mask is not None else None, scale))
        additive = peers_module._additive(mask, q.dtype)
        return peers_module._attend(q * scale, k, v, bias, additive)

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
