"""The workloads of the backward families, on PyTorch emulations of the kernels."""

from __future__ import annotations

import math

import pytest
import torch
from backward_emulation import EmulatedBackward

from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import Workload
from tpf_jit.templates.triangle_attention.inputs import FAMILIES
from tpf_jit.templates.triangle_attention.workload_backward import KeyWorkload, QueryWorkload, StatsWorkload, statistics
from tpf_jit.tune.check import Checker

KINDS = {"stats": StatsWorkload, "key": KeyWorkload, "query": QueryWorkload}
SHAPE = TriangleAttentionShape(33, heads=3, head_dim=16, rows=7, mask="bool")


def judge(name: str, workload, kernel=None) -> tuple[dict, dict]:
    data = workload.make_inputs(1)
    found = workload.run(kernel or getattr(EmulatedBackward(), name), data)
    return workload.errors(found, workload.reference(data)), workload.bounds()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_a_right_kernel_is_inside_the_bounds(name: str, dtype: str, family: str, mask: str) -> None:
    shape = TriangleAttentionShape(130, heads=3, head_dim=12, rows=7, dtype=dtype, mask=mask)
    workload = KINDS[name](shape, "cpu", family=family)
    assert isinstance(workload, Workload) and workload.bytes_per_set > 0
    errors, bounds = judge(name, workload)
    assert errors.keys() == bounds.keys()
    assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)


@pytest.mark.parametrize("pattern", ["rows", "random99", "soft"])
@pytest.mark.parametrize("name", KINDS)
def test_mask_patterns(name: str, pattern: str) -> None:
    shape = TriangleAttentionShape(130, heads=2, head_dim=16, rows=7, mask="additive")
    errors, bounds = judge(name, KINDS[name](shape, "cpu", mask_pattern=pattern))
    assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)


@pytest.mark.parametrize("flag", [True, False])
def test_variants_without_residual_and_without_a_bias_gradient(flag: bool) -> None:
    stats, query = StatsWorkload(SHAPE, "cpu"), QueryWorkload(SHAPE, "cpu")
    stats.residual = query.dbias = flag
    for name, workload in (("stats", stats), ("query", query)):
        errors, bounds = judge(name, workload)
        assert errors.keys() == bounds.keys() and ("dbias" in errors) == (flag and name == "query")
        assert all(errors[key] <= bounds[key] for key in bounds), (errors, bounds)


BROKEN = {
    "stats": [
        lambda last: last["stats"][..., 0, 33:].zero_(),
        lambda last: last["stats"][..., 1, 40].fill_(1.0),
        lambda last: last["stats"][0, 1, 1, 1, 3].mul_(1.1),
        lambda last: last["stats"][..., 0, :33].mul_(1 + 1e-5),
        lambda last: last["stats"][0, 0, 0, 2, 0].fill_(math.nan),
    ],
    "key": [
        lambda last: last["dk"][..., -1, :].fill_(math.nan),
        lambda last: last["dv"][0, 2].zero_(),
        lambda last: last["dk"].mul_(1.01),
        lambda last: last["dv"][0, :, 0, 5, 0].add_(1e-20),
    ],
    "query": [
        lambda last: last["dq"][0, 3, 1, 7].mul_(-1),
        lambda last: last["dbias"][..., 32, 32].fill_(math.nan),
        lambda last: last["dbias"][0].mul_(1.01),
        lambda last: last["dbias"].copy_(last["dbias"].bfloat16()),
    ],
}


@pytest.mark.parametrize("name, position", [(name, i) for name in KINDS for i in range(len(BROKEN[name]))])
def test_a_wrong_kernel_is_not(name: str, position: int) -> None:
    emulated = EmulatedBackward()
    workload = KINDS[name](SHAPE, "cpu", mask_pattern="random50")

    def kernel(*arguments) -> None:
        getattr(emulated, name)(*arguments)
        BROKEN[name][position](emulated.last[name])

    errors, bounds = judge(name, workload, kernel)
    assert any(not errors[key] <= bounds[key] for key in bounds), errors


@pytest.mark.parametrize("name", KINDS)
def test_a_kernel_that_writes_nothing_never_passes(name: str) -> None:
    errors, bounds = judge(name, KINDS[name](SHAPE, "cpu"), lambda *arguments: None)
    assert all(not errors[key] <= bounds[key] for key in bounds), errors


@pytest.mark.parametrize("name", KINDS)
def test_prepare_launches_once_a_call_on_the_same_tensors(name: str) -> None:
    emulated, workload = EmulatedBackward(), KINDS[name](SHAPE, "cpu")
    launch = workload.prepare(getattr(emulated, name), workload.make_inputs(0))
    assert emulated.calls == []
    launch()
    first = emulated.last[name]
    launch()
    assert emulated.calls == [name] * 2 and all(emulated.last[name][key] is first[key] for key in first)


@pytest.mark.parametrize("name", KINDS)
def test_inputs_are_a_function_of_the_seeds(name: str) -> None:
    first, again, other = (KINDS[name](SHAPE, "cpu", seed).make_inputs(2) for seed in (1, 1, 2))
    assert torch.equal(first.stats, again.stats) and torch.equal(first.call.grad_out, again.call.grad_out)
    assert not torch.equal(first.out, other.out)


def test_templates_give_these_workloads() -> None:
    for name, kind in KINDS.items():
        workload = registry.get(f"triangle_attention_backward_{name}_sm90").workload(SHAPE, "cpu", 3, "trained_like")
        assert type(workload) is kind and (workload.seed, workload.family) == (3, "trained_like")


def test_the_query_side_takes_the_slabs_of_its_configuration() -> None:
    template = registry.get("triangle_attention_backward_query_sm90")
    workload = QueryWorkload(TriangleAttentionShape(64, rows=64), "cpu", num_ctas=32)
    counts = set()
    for config in template.space(workload.shape):
        workload.configure(config)
        counts.add(workload.slabs)
        assert workload.slabs == template.slabs(workload.shape, config, 32)
    assert len(counts) > 1
    emulated = EmulatedBackward()
    workload.run(emulated.query, workload.make_inputs(0))
    assert emulated.last["query"]["slabs"] == workload.slabs


@pytest.mark.parametrize("name", KINDS)
def test_the_tuner_can_check_a_kernel(name: str) -> None:
    template, emulated = registry.get(f"triangle_attention_backward_{name}_sm90"), EmulatedBackward()
    shape = TriangleAttentionShape(48, rows=7, heads=2, head_dim=16, mask="bool")
    checker = Checker(template, shape, "cpu", seed=5)
    for config in (template.space(shape)[0], template.space(shape)[-1]):
        verdict = checker.verdict(getattr(emulated, name), config)
        assert verdict.ok and verdict.errors, verdict
        if name == "query":
            assert emulated.last[name]["slabs"] == template.slabs(checker.cases[-1].shape, config, 1)

    def forgetful(*arguments) -> None:
        getattr(emulated, name)(*arguments)
        next(x for x in reversed(arguments) if isinstance(x, torch.Tensor))[..., 0] = 7.0

    assert checker.verdict(forgetful, config).status == "wrong"


def test_statistics_rebuild_the_probabilities() -> None:
    lse = torch.tensor([1.5, -1e9, 5000.0, -math.inf]).view(1, 1, 1, 4)
    low = torch.tensor([1e-8, 3.0, 2e-4, 0.0]).view(1, 1, 1, 4)
    lse2, delta, offset = statistics(lse, low, torch.ones(1, 1, 1, 4))[0, 0, 0, :, :4]
    assert delta.tolist() == [1.0] * 4 and offset.tolist() == [0.0, 1e9, -5000.0, 0.0]
    exact = lse.double()[0, 0, 0] + low.double()[0, 0, 0]
    log2_e = math.log2(math.e)
    prob = torch.exp2((exact - 2.0 + offset) * log2_e - lse2)
    torch.testing.assert_close(prob[:3], torch.full((3,), math.exp(-2.0), dtype=torch.float64), rtol=1e-6, atol=0)
    assert lse2[3] == math.inf
