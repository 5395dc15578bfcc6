"""The bench and the accuracy suite of the triangle multiplicative update on the CPU: records, checks, peers, verbs."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import sys
import types

import pytest
import torch

from tpf_jit import records
from tpf_jit.bench import (
    MultiplicationAccuracySettings,
    RoundSettings,
    accuracy_multiplication,
    bench_multiplication,
    interleaved,
    multiplication,
)
from tpf_jit.bench import multiplication_peers as peers_module
from tpf_jit.cli.app import run as run_cli
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.record_tables import record_table, row_keys
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.triangle_multiplication import reference
from tpf_jit.templates.triangle_multiplication.inputs import make_inputs
from tpf_jit.templates.triangle_multiplication.workload import relative_rms
from tpf_jit.tune import timing

SHAPE = TriangleMultiplicationShape(crop=12, channels=32, hidden=64)
SQUARE = TriangleMultiplicationShape(crop=12, channels=32, direction="incoming")
QUICK = RoundSettings(impls=["tpf_jit", "torch"], rounds=2, samples=2, heat_s=0.0)

pytestmark = pytest.mark.filterwarnings("ignore::tpf_jit.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def own_peers(monkeypatch, private_state):
    """Peers registered by one test are not there in the next. One thread: tiny tensors, and others need the cores."""
    monkeypatch.setattr(peers_module, "_PEERS", dict(peers_module._PEERS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(shapes=(SHAPE,), passes=("forward",), impls=("tpf_jit", "torch")):
    settings = dataclasses.replace(QUICK, impls=list(impls))
    return bench_multiplication(list(shapes), passes, settings, device="cpu", command="tpf-jit bench trimul")


def judge(shapes=(SHAPE,), impls=("tpf_jit", "torch"), **changes):
    settings = MultiplicationAccuracySettings(tuple(shapes), seeds=(0, 2), impls=list(impls), repeats=3)
    settings = dataclasses.replace(settings, **changes)
    return accuracy_multiplication(settings, device="cpu", command="tpf-jit accuracy-trimul")


def fake_module(monkeypatch, name: str, **members) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)


# the bench


def test_a_record_says_what_was_measured_and_is_valid():
    record = json.loads(json.dumps(run([SHAPE, SQUARE], interleaved.PASSES)))
    assert records.validate(record) == []
    assert record["kind"] == "bench.trimul" and record["absent_peers"] == {}
    assert record["method"]["interleaved"] is True and record["method"]["repeats"] == 4
    assert len(record["rows"]) == 2 * 3 * 2
    row = record["rows"][0]
    problem = {"op": "triangle_multiplication", "B": 1, "N": 12, "C": 32, "hidden": 64, "direction": "outgoing"}
    assert row.items() >= {**problem, "pass": "forward", "impl": "tpf_jit", "weight_dtype": "float32", "mask": "none"}.items()
    assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"]
    assert row["config"] is None and row["config_from"].startswith("pytorch path")


@pytest.mark.parametrize("shape", [SHAPE, SQUARE])
def test_rows_say_what_runs_in_their_pass(monkeypatch, shape):
    monkeypatch.setattr("tpf_jit.is_supported", lambda *tensors, **named: (True, ""))
    peer, inputs = peers_module.TpfJit(), multiplication.make_call(shape, "cpu", 0)
    forward = peer.ready(shape, inputs)
    products = ("nt", "nn", "tn") if shape.direction == "outgoing" else ("tn", "nt", "nn")
    first, left, right = (f"product_{name}" for name in products)
    assert list(forward["config"])[-3:] == ["fold_front", first, "back"] and "backward" not in forward
    for name in ("backward", "both"):
        facts = peer.ready(shape, inputs, name)
        assert list(facts["config"]) == list(forward["config"]) and facts["config_from"] == "default"
        families = ["back_backward", "back_weights", left, right, "front_backward", "front_weights", "finish"]
        assert list(facts["backward"]) == families
        assert all(one["config_from"] == "default" for one in facts["backward"].values())
        assert [name for name, one in facts["backward"].items() if not one["config"]] == ["finish"], "nothing to choose"
        json.dumps(facts)
    # Wide enough for one kernel in the place of two.
    usual = peer.ready(dataclasses.replace(shape, channels=128, hidden=128), inputs, "both")["backward"]
    assert list(usual) == [*families[:4], "front_gradients", "finish"]
    wide = dataclasses.replace(shape, channels=288)
    assert "up to 256" in peer.ready(wide, inputs, "both")["backward"]["pytorch path"]


def test_the_table_puts_implementations_side_by_side():
    table = record_table(run([SHAPE, SQUARE], ("forward", "both"), ("tpf_jit", "torch", "cuequivariance")), "name")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines[0].endswith("tpf_jit, ms | torch, ms |") and len(lines) == 2 + 4
    assert "cuequivariance (cuequivariance_torch is not installed)" in " ".join(table.split())


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_every_implementation_agrees_with_float64(mask, direction):
    shape = dataclasses.replace(SHAPE, mask=mask, direction=direction, batch=2)
    record = run([shape], interleaved.PASSES)
    assert {(row["impl"], row["pass"]) for row in record["rows"]} == {
        (impl, name) for impl in ("tpf_jit", "torch") for name in interleaved.PASSES
    }
    for row in record["rows"]:
        assert set(row["rel_rms"]) == ({"out"} if row["pass"] == "forward" else {"out", "dz", "dweights"})
        assert all(1e-4 < value < 4e-2 for value in row["rel_rms"].values()), row


def test_stock_pytorch_has_the_biases_of_projections():
    made = make_inputs(dataclasses.replace(SHAPE, dtype="float16"), "cpu", 1, projection_biases=True)
    found = peers_module._update(made.z, None, made.weights, "outgoing", 1e-5)
    assert relative_rms(found, reference.multiplication(made.z, "outgoing", None, made.weights)) < 5e-3
    without = made.weights._replace(p_in_bias=None)
    assert relative_rms(found, reference.multiplication(made.z, "outgoing", None, without)) > 5e-2


class Wrong(peers_module.Torch):
    name = "wrong"

    def forward(self, inputs):
        return super().forward(inputs) * 1.05


class WrongWeight(peers_module.Torch):
    """Its values are right, and one gradient of a weight is not."""

    name = "wrong_weight"

    def forward(self, inputs):
        p = inputs.weights.p_out_weight
        weights = inputs.weights._replace(p_out_weight=p.detach() + 0.8 * (p - p.detach()))
        return super().forward(dataclasses.replace(inputs, weights=weights))


class Residual(peers_module.Torch):
    name = "residual"
    residual = True

    def forward(self, inputs):
        return inputs.z + super().forward(inputs)


class NoResidual(peers_module.Torch):
    name = "no_residual"
    residual = True


class Crash(peers_module.Torch):
    name = "crash"

    def forward(self, inputs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 31.00 GiB\nand so on")


def test_an_implementation_that_is_wrong_is_not_timed():
    for peer in (Wrong(), WrongWeight(), NoResidual()):
        peers_module.register(peer)
    record = run(passes=("forward", "both"), impls=("torch", "wrong", "wrong_weight", "no_residual"))
    assert {(row["impl"], row["pass"]) for row in record["rows"]} == {
        ("torch", "forward"), ("torch", "both"), ("wrong_weight", "forward"),
    }  # fmt: skip
    assert "wrong: out is off by 0.05" in record["absent_peers"]["wrong"]
    assert record["absent_peers"]["wrong_weight"].startswith("wrong: dp_out_weight is off by 0.2 (")
    assert "C32/D64/outgoing" in record["absent_peers"]["wrong"]
    assert record["absent_peers"]["no_residual"].startswith("wrong: out")
    assert records.validate(record) == []


def test_one_that_adds_z_is_compared_with_that():
    peers_module.register(Residual())
    record = run(passes=interleaved.PASSES, impls=("torch", "residual"))
    assert record["absent_peers"] == {} and len(record["rows"]) == 6


def test_failures_and_absences_have_reasons():
    peers_module.register(Crash())
    record = run([SHAPE, SQUARE], impls=("crash", "torch", "cuequivariance", "turbopairformer", "miniworld_residual"))
    absent = record["absent_peers"]
    assert {row["impl"] for row in record["rows"]} == {"torch"}
    assert absent["crash"].startswith("RuntimeError: CUDA out of memory. Tried to allocate 31.00 GiB (B1/N12/C32/D64")
    assert absent["turbopairformer"] == "turbopairformer is not installed"
    assert absent["miniworld_residual"] == "miniworld_engine is not installed"
    with pytest.raises(MeasurementFailed, match="31.00 GiB"):
        run(impls=("crash",))


def test_replays_need_a_gpu():
    settings = dataclasses.replace(QUICK, replay=True)
    with pytest.raises(MeasurementFailed, match="replays need a CUDA device"):
        bench_multiplication([SHAPE], ("forward",), settings, device="cpu", command="tpf-jit bench trimul --replay")


def test_under_autocast_z_is_float32(monkeypatch):
    """As some models call it: every peer in one mode, those that want z in bf16 left out, errors against what z really is."""
    seen = []

    class Spy(peers_module._Update):
        name, any_z = "spy", True

        def forward(self, inputs):
            seen.append((inputs.z.dtype, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return peers_module._PEERS["torch"].forward(inputs)

    peers_module.register(Spy())
    monkeypatch.setattr(peers_module.TurboPairFormer, "absent", lambda self: None)
    settings = dataclasses.replace(QUICK, impls=["tpf_jit", "torch", "spy", "turbopairformer"])
    record = bench_multiplication([SHAPE], ("forward", "backward"), settings, "cpu", "tpf-jit", None, True)
    assert set(seen) == {(torch.float32, True, torch.bfloat16)}
    assert [row["impl"] for row in record["rows"]] == ["tpf_jit", "torch", "spy"] * 2
    assert all(0 < row["rel_rms"]["out"] < 2e-2 for row in record["rows"])
    assert "in the dtype that it computes in" in record["absent_peers"]["turbopairformer"]
    assert "z_dtype = float32" in record_table(record, "a record") and record["method"]["autocast"] == "bfloat16"
    assert not row_keys(record) & row_keys(run(passes=("forward", "backward"))), "neither supersedes the other"
    z = multiplication._AutocastProblem(SHAPE, "forward", torch.device("cpu"), None, settings)._inputs(0).z
    assert z.dtype == torch.float32 and not torch.equal(z, z.bfloat16().float())
    half = dataclasses.replace(SHAPE, dtype="float16")
    with pytest.raises(InvalidInput, match="^autocast: got True for float16"):
        bench_multiplication([half], ("forward",), settings, "cpu", "", None, True)


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidInput, match="sideways"):
        run(passes=("sideways",))
    with pytest.raises(InvalidInput, match="nobody"):
        run(impls=("nobody",))


def test_rotated_sets_differ_and_what_the_check_needed_is_gone():
    problem = multiplication._Problem(SHAPE, "both", torch.device("cpu"), timing.WallTimer(), QUICK)
    first, second = problem._inputs(0), problem._inputs(1)
    assert not torch.equal(first.z, second.z)
    assert problem._set_bytes(first) == 2 * first.z.numel() * 2
    problem.measure([peers_module.Torch()])
    assert problem._reference is None


# the libraries


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_cuequivariance_is_called_as_its_documentation_says(monkeypatch, weight_dtype):
    calls = []

    def triangle_multiplicative_update(
        x, direction="outgoing", mask=None, norm_in_weight=None, norm_in_bias=None, p_in_weight=None, g_in_weight=None,
        norm_out_weight=None, norm_out_bias=None, p_out_weight=None, g_out_weight=None, eps=1e-5,
    ):  # fmt: skip
        given = (norm_in_weight, norm_in_bias, p_in_weight, None, g_in_weight, None)
        weights = (*given, norm_out_weight, norm_out_bias, p_out_weight, None, g_out_weight, None)
        calls.append((mask.dtype, p_in_weight.dtype))
        from tpf_jit.templates.triangle_multiplication.layout import Weights

        return peers_module._update(x, mask, Weights(*weights), direction, eps)

    fake_module(monkeypatch, "cuequivariance_torch", triangle_multiplicative_update=triangle_multiplicative_update)
    fake_module(monkeypatch, "cuequivariance_ops_torch")
    shape = dataclasses.replace(SHAPE, mask="bool", weight_dtype=weight_dtype)
    record = run([shape], ("forward", "both"), ("torch", "cuequivariance", "cuequivariance_bf16"))
    impls = {row["impl"] for row in record["rows"]}
    assert impls == {"torch", "cuequivariance"} | ({"cuequivariance_bf16"} if weight_dtype == "float32" else set())
    assert set(calls) == {(torch.bfloat16, torch.float32), (torch.bfloat16,) * 2} - (
        {(torch.bfloat16, torch.float32)} if weight_dtype == "bfloat16" else set()
    )


def test_turbopairformer_gets_what_its_guide_asks_for(monkeypatch):
    loaded = []

    def turbo_trimul(z, direction, mask, eps, **weights):
        assert len(weights) == 8 and all(weight.dtype == torch.float32 for weight in weights.values()) and eps == 1e-5
        from tpf_jit.templates.triangle_multiplication.layout import Weights

        return peers_module._update(z, mask, Weights(**weights, **dict.fromkeys(_BIASES)), direction, eps)

    fake_module(monkeypatch, "turbopairformer", turbo_trimul=turbo_trimul)
    fake_module(monkeypatch, "turbopairformer.trimul_cuda", load_extension=lambda: loaded.append(1))
    peers_module.register(peers_module.TurboPairFormer())
    monkeypatch.setattr(peers_module.TurboPairFormer, "MIN_CROP", 12)
    shapes = [SHAPE, SQUARE, dataclasses.replace(SQUARE, crop=11), dataclasses.replace(SQUARE, weight_dtype="bfloat16")]
    record = run(shapes, ("both",), ("torch", "turbopairformer"))
    rows = [row for row in record["rows"] if row["impl"] == "turbopairformer"]
    assert [row["direction"] for row in rows] == ["incoming"] and loaded == [1]
    assert rows[0]["config"] == {"binaries": "wheel"}
    for reason in ("C = D of 32", "crops above 100", "float32 weights"):
        assert reason in record["absent_peers"]["turbopairformer"]


_BIASES = ("p_in_bias", "g_in_bias", "p_out_bias", "g_out_bias")


class Module(torch.nn.Module):
    """miniworld-engine's module in PyTorch."""

    def __init__(self, d_pair, *, d_hidden, outgoing, implementation, p_drop):
        super().__init__()
        assert implementation == "miniworld" and p_drop == 0.0
        self.outgoing = outgoing
        self.ln_pair, self.ln_out = torch.nn.LayerNorm(d_pair), torch.nn.LayerNorm(d_hidden)
        for name in ("to_left", "to_left_gate", "to_right", "to_right_gate"):
            setattr(self, name, torch.nn.Linear(d_pair, d_hidden, bias=False))
        self.to_gate = torch.nn.Linear(d_pair, d_pair, bias=False)
        self.to_out = torch.nn.Linear(d_hidden, d_pair, bias=False)

    def forward(self, pair):
        z = pair.float()
        zn = self.ln_pair(z)
        left = self.to_left_gate(zn).sigmoid() * self.to_left(zn)
        right = self.to_right_gate(zn).sigmoid() * self.to_right(zn)
        x = torch.einsum("bikd,bjkd->bijd" if self.outgoing else "bkid,bkjd->bijd", left, right)
        return (z + self.to_gate(zn).sigmoid() * self.to_out(self.ln_out(x))).to(pair.dtype)


def test_miniworld_gets_its_weights_by_each_call_and_only_its_own_path_counts(monkeypatch):
    modules, integrations = peers_module.MiniWorld.MODULES, peers_module.MiniWorld.SERVES
    for name in ("miniworld_engine", "miniworld_engine.modules", "miniworld_engine.integrations"):
        fake_module(monkeypatch, name)
    fake_module(monkeypatch, modules, TriangleMultiplication=Module)

    def serves_inference(module, pair, *, bidirectional):
        return not torch.is_grad_enabled() and not bidirectional

    def serves_single(module, pair):
        return module.outgoing

    fake_module(monkeypatch, integrations, serves_inference=serves_inference, serves_single=serves_single)
    peers_module.register(peers_module.MiniWorld())
    shapes = [SHAPE, SQUARE, dataclasses.replace(SHAPE, mask="bool")]
    record = run(shapes, ("forward", "both"), ("torch", "miniworld_residual"))
    rows = [(row["direction"], row["pass"]) for row in record["rows"] if row["impl"] == "miniworld_residual"]
    assert rows == [("outgoing", "forward"), ("outgoing", "both"), ("incoming", "forward")]
    assert "does not serve" in record["absent_peers"]["miniworld_residual"]
    assert "one of tokens" in record["absent_peers"]["miniworld_residual"]


def test_compiled_pytorch_is_compiled_anew_for_every_problem(monkeypatch):
    compiled = []

    def compile_(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    record = run([SHAPE, SQUARE], ("forward", "backward", "both"), ("torch", "torch_compile"))
    assert [row["pass"] for row in record["rows"] if row["impl"] == "torch_compile"] == ["forward", "both"] * 2
    assert compiled == [{"dynamic": False, "fullgraph": True}] * 4
    assert "with its forward only" in record["absent_peers"]["torch_compile"]


# accuracy


def test_a_small_grid_gives_a_valid_record_and_a_table():
    record = json.loads(json.dumps(judge([SHAPE, dataclasses.replace(SQUARE, mask="float")])))
    assert records.validate(record) == [] and record["kind"] == "accuracy.trimul"
    tensors = [row["tensor"] for row in record["rows"] if (row["impl"], row["family"]) == ("tpf_jit", "normal")]
    assert tensors[:3] == ["out", "dz", "dnorm_in_weight"] and len(set(tensors)) == 10
    assert all(row["cases"] == 2 and row["bitwise_equal"] and row["bitwise_repeats"] == 3 for row in record["rows"])
    ours = [row["rel_rms_max"] for row in record["rows"] if row["impl"] == "tpf_jit"]
    assert max(ours) < 1e-2
    assert set(record["configurations"]["tpf_jit"]) == {SHAPE.key(), dataclasses.replace(SQUARE, mask="float").key()}
    table = record_table(record, "name")
    assert "| normal | tpf_jit | 4 |" in table and "dz, mean (max)" in table


class Unsteady(peers_module.Torch):
    name = "unsteady"
    calls = 0

    def forward(self, inputs):
        type(self).calls += 1
        return super().forward(inputs) * (1 + 0.01 * (type(self).calls % 2))


class NotFinite(peers_module.Torch):
    name = "not_finite"

    def forward(self, inputs):
        return super().forward(inputs) * float("inf")


def test_bits_that_differ_and_numbers_that_are_none_are_told():
    for peer in (Unsteady(), NotFinite(), Residual(), Crash()):
        peers_module.register(peer)
    record = judge(impls=("unsteady", "not_finite", "residual", "crash", "cuequivariance"), families=("normal",))
    rows = {(row["impl"], row["tensor"]): row for row in record["rows"]}
    assert rows["unsteady", "out"]["bitwise_equal"] is False and rows["unsteady", "out"]["bitwise_cases"] == 0
    assert rows["not_finite", "out"]["not_finite"] == 2 and rows["not_finite", "out"]["rel_rms_mean"] is None
    assert rows["residual", "out"]["rel_rms_max"] < 1e-2 and rows["residual", "dz"]["rel_rms_max"] < 2e-2
    assert "31.00 GiB (B1/N12/C32/D64" in record["absent_peers"]["crash"] and "2 cases" in record["absent_peers"]["crash"]
    assert record["absent_peers"]["cuequivariance"] == "cuequivariance_torch is not installed"
    assert records.validate(record) == []


def test_grids_without_sense_are_refused():
    with pytest.raises(InvalidInput, match="strange"):
        judge(families=("strange",))
    with pytest.raises(InvalidInput, match="at least one seed"):
        judge(seeds=(2, 2))
    with pytest.raises(InvalidInput, match="repeats"):
        judge(repeats=0)
    peers_module.register(Crash())
    with pytest.raises(MeasurementFailed, match="31.00 GiB"):
        judge(impls=("crash",))


# the verbs


def test_the_bench_verb_writes_a_record(tmp_path, capsys):
    words = "bench trimul --crops 12,8 --channels 32 --hidden 64 --direction outgoing,incoming --passes forward,both --impls"
    options = "torch,cuequivariance --rounds 2 --samples 1 --device cpu"
    assert run_cli([*words.split(), *options.split(), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "triangle multiplicative update on cpu" in printed and "cuequivariance_torch is not installed" in printed
    (kept,) = records.list_records(tmp_path)
    assert kept.kind == "bench.trimul" and kept.problems == () and len(kept.content["rows"]) == 8


def test_the_bench_verb_says_when_z_is_float32(capsys):
    words = "bench trimul --crops 8 --channels 32 --impls torch --rounds 2 --samples 1 --device cpu".split()
    for more, title in ((["--autocast"], ", z in float32 under bfloat16 autocast"), ([], "")):
        assert run_cli([*words, *more]) == 0
        (found,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("triangle multiplicative update")]
        assert found.strip().endswith(f"){title}")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--passes", ""], "--passes: got ''; allowed: names separated by commas"),
        (["--replay"], "--replay times CUDA graphs and needs a CUDA device; with --device cpu leave it out"),
        (["--crops", "8,x"], "--crops: got '8,x'; allowed: numbers separated by commas"),
        (["--crops", ""], "--crops: got ''; allowed: crops with commas, a model preset, or a shape key"),
    ],
)
def test_the_bench_verb_names_its_options(words, text, capsys):
    assert run_cli(["bench", "trimul", "--crops", "8", "--channels", "32", "--device", "cpu", *words]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"Error: {text}\n")


def test_the_bench_verb_takes_keys_and_refuses_other_problems(capsys):
    options = "--impls torch --rounds 2 --samples 1 --device cpu --json".split()
    assert run_cli(["bench", "trimul", "--crops", SQUARE.key(), *options]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row["N"], row["direction"]) == (12, "incoming")
    assert run_cli(["bench", "trimul", "--crops", "triangle_attention/B1/I8/H4/N8/D32/bfloat16/bias-bfloat16/mask-none"]) == 1
    assert "problems of triangle_multiplication" in capsys.readouterr().err


def test_the_accuracy_verb_writes_a_record(tmp_path, capsys):
    words = "accuracy-trimul --crops 8 --channels 32 --direction outgoing --families normal --seeds 1:2 --repeats 2 --impls torch"
    assert run_cli([*words.split(), "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "dp_in_weight" in capsys.readouterr().out
    (kept,) = records.list_records(tmp_path)
    assert kept.kind == "accuracy.trimul" and kept.problems == () and kept.content["method"]["seeds"] == "1..1"
