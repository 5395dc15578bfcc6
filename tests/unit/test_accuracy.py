"""The accuracy suite on the CPU, through the PyTorch paths: float64 in one pass, cases, slices, records, the verb."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

from tpf_jit import records
from tpf_jit.bench import AccuracySettings, accuracy, accuracy_attention, float64
from tpf_jit.bench import peers as peers_module
from tpf_jit.bench.accuracy_work import WorkFile
from tpf_jit.bench.concurrent_load import concurrent_load
from tpf_jit.bench.peer_base import Inputs, Once
from tpf_jit.cli.app import run as run_cli
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.record_tables import record_table
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import reference
from tpf_jit.templates.triangle_attention.inputs import make_inputs
from tpf_jit.templates.triangle_attention.workload import relative_rms
from tpf_jit.tune import timing

QUICK = AccuracySettings(crops=(16, 24), head_dims=(16,), seeds=(0, 2), heads=2, rows=5, repeats=3, impls=["tpf_jit", "torch"])
FLOOR = {"out": 2.1e-3, "dq": 2.5e-3, "dk": 2.5e-3, "dv": 2.5e-3, "dbias": 2.2e-3}

pytestmark = pytest.mark.filterwarnings("ignore::tpf_jit.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def own_peers(monkeypatch, private_state):
    """Peers registered by one test are not there in the next. One thread: tiny tensors, and others need the cores."""
    monkeypatch.setattr(peers_module, "_PEERS", dict(peers_module._PEERS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def quick(**changes) -> AccuracySettings:
    return dataclasses.replace(QUICK, **changes)


def run(settings=QUICK, **options):
    return accuracy_attention(settings, device="cpu", command="tpf-jit accuracy", **options)


def problem(mask="none", pattern=None, batch=1, value=None) -> Inputs:
    shape = TriangleAttentionShape(crop=12, rows=5, heads=2, head_dim=8, batch=batch, mask=mask, bias_dtype="float32")
    made = make_inputs(shape, "cpu", 3, "normal", pattern, value, with_grad_out=True)
    return Inputs(made.q, made.k, made.v, made.bias, made.mask, made.grad_out, 0.3)


# float64


@pytest.mark.parametrize(
    ("mask", "pattern", "value"),
    [
        ("none", None, None), ("bool", "random50", None), ("bool", "rows", None), ("additive", "rows", -1e9),
        ("additive", "rows", -math.inf), ("additive", "soft", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows_at_a_time", [1, 2, 99])
def test_one_pass_gives_what_the_reference_gives(monkeypatch, mask, pattern, value, rows_at_a_time):
    monkeypatch.setattr(float64, "CHUNK_BYTES", rows_at_a_time * 2 * 12 * 12 * 8)
    inputs = problem(mask, pattern, batch=2, value=value)
    before = [x.clone() for x in inputs.leaves()]
    found = float64.outputs(inputs)
    arguments = (*inputs.leaves(), inputs.mask, inputs.scale)
    expected = [reference.attention(*arguments)[0], *reference.attention_backward(inputs.grad, *arguments)]
    for name, ref in zip(float64.TENSORS, expected, strict=True):
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], ref, rtol=1e-12, atol=1e-13, msg=name)
        assert torch.equal(found[name] == 0, ref == 0), f"{name}: zeros are exact"
    assert all(torch.equal(x, y) for x, y in zip(inputs.leaves(), before, strict=True)), "inputs are left alone"


def test_the_estimate_grows_with_the_problem():
    shapes = [TriangleAttentionShape(crop=crop, head_dim=dim) for crop, dim in ((384, 16), (384, 32), (768, 32))]
    seconds = [float64.estimate_s(shape) for shape in shapes]
    assert 0 < seconds[0] < seconds[1] < seconds[2] < 1.0
    assert seconds[2] == pytest.approx(8 * seconds[1])


def test_errors_are_relative_to_the_reference_and_nothing_wrong_passes():
    inputs = problem("bool", "rows")
    ref = float64.outputs(inputs)
    yardstick = float64.Yardstick(ref, float64.without_keys(inputs))
    rounded = {name: value.to(torch.bfloat16) for name, value in ref.items()}
    for name, (error, largest) in yardstick.errors(rounded).items():
        assert error == pytest.approx(relative_rms(rounded[name], ref[name]), rel=1e-9)
        assert largest == pytest.approx(float((rounded[name].double() - ref[name]).abs().max()))
    for value in (math.nan, math.inf):
        broken = ref["dq"].clone()
        broken[0, 1, 0, 0, 0] = value
        assert yardstick.errors({"dq": broken}) == {"dq": (math.inf, math.inf)}
    # Every third row is masked as a whole: zero there, and exactly.
    broken = ref["dq"].clone()
    assert not broken[0, 0].any()
    broken[0, 0, 0, 0, 0] = 1e-30
    assert yardstick.errors({"dq": broken, "out": ref["out"]}) == {"dq": (math.inf, 1e-30), "out": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("mask", "pattern", "value"), [("bool", "rows", None), ("bool", "random50", None), ("additive", "rows", -math.inf)]
)
def test_only_the_mask_says_what_is_exactly_zero(mask, pattern, value):
    inputs = problem(mask, pattern, value=value)
    zero = float64.without_keys(inputs)
    ref = float64.outputs(inputs)
    found = {name: zero[name].expand(*tensor.shape[:-1], 1) for name, tensor in ref.items()}
    assert all(torch.equal(lines, (ref[name] == 0).all(-1, keepdim=True)) for name, lines in found.items())
    assert found["dk"].any() and not found["dk"].all() and bool(found["out"].any()) == (pattern == "rows")
    for name, lines in found.items():
        broken = ref[name].masked_fill(lines, 1e-30)
        expected = (math.inf, 1e-30) if lines.any() else (0.0, 0.0)
        assert float64.Yardstick(ref, zero).errors({name: broken}) == {name: expected}


def test_no_key_in_any_row_makes_the_bias_gradient_exactly_zero():
    inputs = problem("bool", "rows")
    inputs.mask.fill_(False)
    zero, ref = float64.without_keys(inputs), float64.outputs(inputs)
    assert float64.Yardstick(ref, zero).errors(ref) == dict.fromkeys(float64.TENSORS, (0.0, 0.0))
    small = {name: tensor + 1e-30 for name, tensor in ref.items()}
    assert float64.Yardstick(ref, zero).errors(small) == dict.fromkeys(float64.TENSORS, (math.inf, 1e-30))


def test_what_is_zero_by_underflow_may_be_as_far_off_as_all_else():
    inputs = problem()
    inputs.bias[..., 0, :] = -1e4  # nearly all of the first query's probability goes to its first key
    inputs.bias[..., 0, 0] = 0.0
    assert float64.without_keys(inputs) == {} and float64.without_keys(problem("additive", "rows", value=-1e9))["out"].any() == 0
    ref = float64.outputs(inputs)
    line = ref["dbias"][0, 0, 0, 0]
    assert (line[1:] == 0).all(), "underflow"
    ref["dbias"][0, 0, 0, 0] = 0.0  # what is left of the first key cancels, up to rounding
    found = ref["dbias"].clone()
    found[0, 0, 0, 0, 0] = 1e-6
    error, largest = float64.Yardstick(ref, {}).errors({"dbias": found})["dbias"]
    assert 0 < error < 1e-6 and largest == 1e-6


def test_bits_are_compared_not_values():
    same = float64.same_bits
    assert same(torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]))
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    x = torch.randn(3, 4).to(torch.bfloat16)
    assert same(x.T.contiguous().T, x)


# the suite


def test_a_small_grid_gives_a_valid_record():
    outcome = run()
    record = json.loads(json.dumps(outcome.record))
    assert (outcome.done, outcome.cases) == (8, 8)
    assert records.validate(record) == []
    assert record["kind"] == "accuracy.attention" and record["command"] == "tpf-jit accuracy"
    assert record["method"]["cases"] == 8 and record["method"]["seeds"] == "0..1"
    rows = {(row["N"], row["family"], row["impl"], row["tensor"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 2 * 2 * 2 * 5
    for (_, _, impl, tensor), row in rows.items():
        assert row["cases"] == row["bitwise_cases"] == 2 and row["bitwise_equal"] is True and row["bitwise_repeats"] == 3
        assert row["I"] == 5 and row["H"] == 2 and row["D"] == 16 and row["not_finite"] == 0
        assert 1e-4 < row["rel_rms_mean"] <= row["rel_rms_max"] < 0.5 and row["max_abs"] > 0
        if impl == "tpf_jit":
            assert row["rel_rms_max"] < FLOOR[tensor]
    assert record["configurations"]["tpf_jit"]["N=16 D=16"]["config_from"].startswith("pytorch path")


def test_every_judged_peer_is_asked_and_those_that_are_absent_say_why():
    record = run(quick(crops=(16,), seeds=(0, 1), families=("normal",), impls=None)).record
    judged = {peer.name for peer in peers_module.peers() if peer.judged}
    assert {"tpf_jit", "tpf_jit_uncompensated", "turbopairformer", "cuequivariance", "openfold3_triton", "miniworld"} < judged
    assert {row["impl"] for row in record["rows"]} | set(record["absent_peers"]) == judged
    assert "turbopairformer is not installed" in record["absent_peers"]["turbopairformer"]
    assert {"torch", "tpf_jit", "tpf_jit_uncompensated"} <= {row["impl"] for row in record["rows"]}


def test_compensation_is_off_for_the_ablation_and_on_again_after_it(monkeypatch):
    from tpf_jit.ops import settings

    seen = []
    monkeypatch.setattr(peers_module.TpfJit, "forward", lambda self, inputs: seen.append(settings.compensate))
    for peer in peers_module.peers(["tpf_jit", "tpf_jit_uncompensated", "tpf_jit"]):
        peer.forward(problem())
    assert seen == [True, False, True]
    ablation = peers_module.peers(["tpf_jit_uncompensated"])[0]
    assert "always compensated" in ablation.unsupported(TriangleAttentionShape(crop=16, mask="additive"), "both")


def test_every_other_call_has_the_smallest_workspace(monkeypatch):
    monkeypatch.setenv("TPF_JIT_WORKSPACE_MIB", "77")
    seen = []
    call = accuracy._Suite._call
    monkeypatch.setattr(
        accuracy._Suite, "_call", lambda *args: seen.append(os.environ["TPF_JIT_WORKSPACE_MIB"]) or call(*args)
    )
    run(quick(crops=(16,), seeds=(0, 1), families=("normal",), impls=["tpf_jit"], repeats=5))
    assert seen == ["77", "77", "1", "77", "1", "77"]  # the first warms up
    monkeypatch.delenv("TPF_JIT_WORKSPACE_MIB")
    with peers_module.TpfJit().perturbed():
        assert os.environ["TPF_JIT_WORKSPACE_MIB"] == "1"
    assert "TPF_JIT_WORKSPACE_MIB" not in os.environ


class Unsteady(peers_module.Torch):
    """Its gradient of v is never the same twice."""

    name = "unsteady"
    calls = itertools.count()

    def forward(self, inputs):
        noise = 1.0 + 0.01 * (next(self.calls) % 7)
        v = inputs.v
        return super().forward(dataclasses.replace(inputs, v=v * noise + (v - v * noise).detach()))


class NotFinite(peers_module.Torch):
    name = "not_finite"

    def forward(self, inputs):
        return super().forward(inputs) + inputs.q * math.nan


class Crash(peers_module.Torch):
    name = "crash"

    def forward(self, inputs):
        if inputs.q.shape[3] == 24:
            raise RuntimeError("no such tile\nand so on")
        return super().forward(inputs)


def test_what_is_wrong_is_recorded_as_it_is():
    for peer in (Unsteady(), NotFinite(), Crash()):
        peers_module.register(peer)
    record = run(quick(impls=["torch", "unsteady", "not_finite", "crash"])).record
    assert records.validate(record) == []
    rows = {(row["impl"], row["N"], row["tensor"]): row for row in record["rows"] if row["family"] == "normal"}
    assert not rows["unsteady", 16, "dv"]["bitwise_equal"] and rows["unsteady", 16, "dv"]["bitwise_cases"] == 0
    assert rows["unsteady", 16, "dq"]["bitwise_equal"]
    assert rows["not_finite", 16, "out"]["not_finite"] == 2 and rows["not_finite", 16, "out"]["rel_rms_mean"] is None
    assert ("crash", 16, "out") in rows and ("crash", 24, "out") not in rows
    assert record["absent_peers"]["crash"] == "RuntimeError: no such tile (N=24 D=16, 4 cases)"
    table = record_table(record, "name")
    assert "| normal | unsteady | 4 |" in table and "| no: dv |" in table and "not finite in 4" in table


class NotZero(peers_module.Torch):
    """A row without keys is not quite zero."""

    name = "not_zero"

    def forward(self, inputs):
        return super().forward(inputs) + 1e-6


def test_what_is_finite_is_not_called_otherwise(capsys):
    from tpf_jit.cli.accuracy import _table

    for peer in (NotZero(), NotFinite()):
        peers_module.register(peer)
    said = []
    # Every third row of this family's mask is without a key.
    settings = quick(crops=(16,), seeds=(0, 1), families=("extreme",), mask="bool", impls=["tpf_jit", "not_zero", "not_finite"])
    record = run(settings, say=said.append).record
    assert records.validate(record) == []
    rows = {(row["impl"], row["tensor"]): row for row in record["rows"]}
    counts = {impl: [rows[impl, "out"][name] for name in ("not_finite", "not_zero")] for impl in settings.impls}
    assert counts == {"tpf_jit": [0, 0], "not_zero": [0, 1], "not_finite": [1, 0]}
    assert rows["not_zero", "out"]["rel_rms_mean"] is None and 0 < rows["not_zero", "out"]["max_abs"] < 10
    assert rows["not_finite", "out"]["max_abs"] is None
    assert "not_zero wrong (not exactly zero: out" in said[-1] and "not_finite wrong (not finite: out" in said[-1]
    lines = {line.split(" | ")[1]: line for line in record_table(record, "name").splitlines() if line.startswith("| extreme")}
    assert "not exactly zero in 1" in lines["not_zero"] and "not finite" not in lines["not_zero"]
    assert "| not finite in 1 |" in lines["not_finite"]
    assert "not_zero = " not in record_table(record, "name").partition("\n\n")[0]
    _table(record)
    printed = capsys.readouterr().out
    assert "not exactly zero in 1" in printed and "not finite in 1" in printed


def test_on_a_cpu_nothing_is_said_of_an_h200():
    said = []
    run(quick(crops=(16,), seeds=(0, 1), families=("normal",), impls=["torch"]), say=said.append)
    assert said[0] == "1 of 1 cases to do"


def test_a_lost_device_ends_the_run_and_keeps_what_was_done(monkeypatch, tmp_path):
    peers_module.register(Crash())
    monkeypatch.setattr(timing.WallTimer, "alive", lambda self: False)
    with pytest.raises(MeasurementFailed, match="takes no more work"):
        run(quick(impls=["crash", "torch"]), work=tmp_path / "work.jsonl")
    assert sum('"result"' in line for line in (tmp_path / "work.jsonl").read_text().splitlines()) == 2


def test_arguments_that_make_no_sense():
    with pytest.raises(InvalidInput, match="sideways"):
        run(quick(families=("sideways",)))
    with pytest.raises(InvalidInput, match="seeds"):
        run(quick(seeds=(3, 3)))
    with pytest.raises(InvalidInput, match="repeats"):
        run(quick(repeats=0))
    with pytest.raises(MeasurementFailed, match="not installed"):
        run(quick(impls=["turbopairformer"]))


def test_load_is_for_gpus_only():
    with concurrent_load(None), concurrent_load(torch.device("cpu")):
        assert torch.ones(1).item() == 1.0


def test_something_costly_is_tried_once():
    calls = []

    def fail():
        calls.append(1)
        raise RuntimeError("no compiler")

    build = Once(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            build()
    assert calls == [1] and Once(lambda: 7)() == 7


# slices


@pytest.fixture
def judged(monkeypatch):
    """Cases that are measured, as (crop, implementation)."""
    found = []
    measure = accuracy._Suite._measure

    def watched(self, peer, inputs, yardstick):
        found.append((inputs.q.shape[3], peer.name))
        return measure(self, peer, inputs, yardstick)

    monkeypatch.setattr(accuracy._Suite, "_measure", watched)
    return found


def test_a_run_goes_on_where_it_stopped(tmp_path, judged):
    work = tmp_path / "folder" / "work.jsonl"
    first = run(quick(seeds=(0, 1), impls=["torch"]), work=work)
    assert (first.done, first.cases, len(judged)) == (4, 4, 4)
    with pytest.raises(InvalidInput, match="exists"):
        run(work=work)
    judged.clear()
    second = run(work=work, resume=True)
    assert (second.done, second.cases) == (8, 8)
    assert len(judged) == 16 - 4 and {impl for _, impl in judged} == {"tpf_jit", "torch"}
    whole = run().record
    assert [{**row} for row in second.record["rows"]] == whole["rows"]
    judged.clear()
    again = run(work=work, resume=True)
    assert judged == [] and again.record["rows"] == whole["rows"]


def test_a_slice_that_starts_later_leaves_the_earlier_one_in_the_record(tmp_path):
    run(quick(seeds=(0, 1)), work=tmp_path / "work.jsonl")
    record = run(quick(seeds=(1, 2)), work=tmp_path / "work.jsonl", resume=True).record
    assert record["method"]["seeds"] == "0..1" and {row["cases"] for row in record["rows"]} == {2}


def test_an_unfinished_line_is_dropped(tmp_path, judged):
    work = tmp_path / "work.jsonl"
    run(quick(seeds=(0, 1), impls=["torch"]), work=work)
    text = work.read_text()
    work.write_text(text[:-20])
    judged.clear()
    assert run(quick(seeds=(0, 1), impls=["torch"]), work=work, resume=True).done == 4
    assert len(judged) == 1
    assert all(json.loads(line) for line in work.read_text().splitlines())


def test_another_context_is_refused(tmp_path):
    work = tmp_path / "work.jsonl"
    run(quick(seeds=(0, 1), impls=["torch"]), work=work)
    with pytest.raises(InvalidInput, match="another heads, repeats"):
        run(quick(heads=1, repeats=2), work=work, resume=True)
    for text in ("{}\n", "[1]\n", "no json\n", '{"type": "context"}\n{"type": "result"}\n'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(InvalidInput, match="work"):
            WorkFile(tmp_path / "other", {}, resume=True)


def test_no_case_starts_that_does_not_fit_the_budget(tmp_path, monkeypatch, judged):
    clock = itertools.count()
    monkeypatch.setattr(accuracy, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    said = []
    outcome = run(quick(budget_s=9.0, impls=["torch"]), work=tmp_path / "work.jsonl", say=said.append)
    assert 0 < outcome.done < outcome.cases and len(judged) == outcome.done
    assert "8 of 8 cases to do" in said[0] and "the budget is spent" in said[-1]
    assert run(quick(impls=["torch"]), work=tmp_path / "work.jsonl", resume=True).done == 8
    with pytest.raises(MeasurementFailed, match="fits the budget"):
        run(quick(budget_s=0.0))


def test_failures_are_tried_again_only_when_asked(tmp_path):
    peers_module.register(Crash())
    settings = quick(impls=["crash"], seeds=(0, 1))
    run(settings, work=tmp_path / "work.jsonl")

    class Mended(peers_module.Torch):
        name = "crash"

    peers_module.register(Mended())
    assert "crash" in run(settings, work=tmp_path / "work.jsonl", resume=True).record["absent_peers"]
    record = run(dataclasses.replace(settings, retry=True), work=tmp_path / "work.jsonl", resume=True).record
    assert record["absent_peers"] == {} and {row["N"] for row in record["rows"]} == {16, 24}


# table and verb


def test_the_table_has_a_line_for_every_family_and_implementation():
    record = run().record
    lines = [line for line in record_table(record, "name").splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert lines[0].startswith("| family | implementation | cases | out, mean (max) | dq, mean (max) |")
    assert [line.split(" | ")[1] for line in lines[2:]] == ["tpf_jit", "torch"] * 2
    rows = [row for row in record["rows"] if (row["family"], row["impl"], row["tensor"]) == ("normal", "tpf_jit", "dk")]
    mean = sum(row["rel_rms_mean"] for row in rows) / 2
    assert f"{mean:.3e} ({max(row['rel_rms_max'] for row in rows):.3e})" in lines[2]
    assert lines[2].endswith(" yes |")
    caption = " ".join(record_table(record, "name").partition("\n\n")[0].split())
    assert "D = 16" in caption and "cases 8" in caption and "cases = " not in caption


ARGUMENTS = ["accuracy", "--device", "cpu", "--crops", "16", "--head-dim", "16", "--rows", "3", "--heads", "1", "--repeats", "2"]


def test_the_verb_writes_a_record_when_all_is_done(tmp_path, capsys):
    more = ["--impls", "tpf_jit,torch", "--work", str(tmp_path / "work.jsonl"), "--out", str(tmp_path)]
    assert run_cli([*ARGUMENTS, "--seeds", "0:1", *more]) == 0
    printed = capsys.readouterr()
    assert "tpf_jit" in printed.out and "dbias" in printed.out and "written: " in printed.err
    assert run_cli([*ARGUMENTS, "--seeds", "2", *more, "--continue", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {row["cases"] for row in record["rows"]} == {2}
    assert len(records.list_records(tmp_path, "accuracy")) == 2
    assert all(not record.problems for record in records.list_records(tmp_path))


def test_the_verb_writes_no_record_of_a_part_unless_told_to(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accuracy._Suite, "_fits", lambda self, case: not self.kept.results)
    arguments = [*ARGUMENTS, "--seeds", "2", "--impls", "torch", "--out", str(tmp_path)]
    assert run_cli(arguments) == 0
    assert "1 of 4 cases are done" in capsys.readouterr().err and records.list_records(tmp_path) == []
    assert run_cli([*arguments, "--partial"]) == 0
    assert len(records.list_records(tmp_path)) == 1


@pytest.mark.parametrize("seeds", ["x", "1:x", ":", "3:1", "0"])
def test_seeds_that_are_none(seeds, capsys):
    assert run_cli([*ARGUMENTS, "--seeds", seeds]) == 1
    assert "seeds" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--continue"], ["--budget-s", "5"]])
def test_going_on_needs_a_work_file(words, capsys):
    assert run_cli([*ARGUMENTS, "--seeds", "1", "--impls", "torch", *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"Error: {words[0]} needs --work FILE, which keeps results for the next run\n"


def test_no_families_name_their_option(capsys):
    for verb in (ARGUMENTS, ["accuracy-trimul", "--device", "cpu", "--crops", "8"]):
        assert run_cli([*verb, "--families", ""]) == 1
        assert capsys.readouterr().err.startswith("Error: --families: got ''; allowed: ")
