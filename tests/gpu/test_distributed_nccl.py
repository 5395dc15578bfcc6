"""Ranks agree under NCCL: two processes that torchrun starts, each on a GPU and with a database and object cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed

import tpf_jit
from tpf_jit.compiler import KernelSpec, toolchain
from tpf_jit.device import current_device
from tpf_jit.errors import NoKernel
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import order
from tpf_jit.tuning_db import TrialRow, TuningStore
from tpf_jit.tuning_db.rows import cell_key

ROOT = Path(__file__).resolve().parents[2]
SHAPE = TriangleAttentionShape(crop=192, rows=8)
DIFFERING = ("forward", "forward_training")
"""Directions in which the ranks' databases have other winners."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs; PyTorch sees {torch.cuda.device_count()}"),
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this PyTorch has no NCCL"),
]

# What every rank runs; MISMATCH may change rank 1 before it freezes. What a rank has to say is in a file of its own, as torchrun
# mixes what the ranks print.
WORKER = """
import datetime, json, os, sys, warnings
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch
folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
os.environ["TPF_JIT_DB"], os.environ["TPF_JIT_CACHE"] = str(folder / f"rank{rank}.db"), str(folder / f"objects{rank}")
import torch
import torch.distributed as dist
import tpf_jit
from tpf_jit import kernels, resolve
from tpf_jit.device import Device
from tpf_jit.errors import FallbackWarning, TpfError
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_to_dict

shape = TriangleAttentionShape.parse(sys.argv[2])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
said = {}

def say(**more):
    said.update(more)
    (folder / f"rank{rank}.json").write_text(json.dumps(said))

def chosen(direction="forward"):
    kernel = kernels.get_kernel(f"triangle_attention/{direction}", shape)
    return [kernel.config_from, config_to_dict(kernel.config)]

def attempt():
    try:
        tpf_jit.distributed.freeze([shape])
    except TpfError as error:
        return [type(error).__name__, str(error)]

def step():
    # The same inputs on every rank.
    draw = torch.Generator().manual_seed(5)
    size = (shape.batch, shape.rows, shape.heads, shape.crop, shape.head_dim)
    pair = (shape.batch, 1, shape.heads, shape.crop, shape.crop)
    made = [torch.randn(each, generator=draw).to(device, torch.bfloat16) for each in (size, size, size, pair, size)]
    leaves = [each.requires_grad_() for each in made[:4]]
    out = tpf_jit.triangle_attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, made[4])]

def same_bits(found):
    for each in found:
        ours = each.contiguous().view(torch.uint8)
        copies = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, ours)
        if not all(torch.equal(copies[0], copy) for copy in copies):
            return False
    return True

say(before=chosen())
BODY
dist.barrier()
dist.destroy_process_group()
"""

AGREE = """
result = tpf_jit.distributed.freeze([shape, "chai1"])
say(result=[result.ranks, result.facts, result.choices, list(result.sources)])
say(after=chosen(), training=chosen("forward_training"))
with warnings.catch_warnings():
    warnings.simplefilter("error", FallbackWarning)
    tpf_jit.warmup(shape, training=True)
    found = step()
say(finite=all(bool(each.isfinite().all()) for each in found), same=same_bits(found))
"""

MISMATCH = """
template = registry.get("triangle_attention_forward_sm90")
present = resolve.current_device()
other = Device("NVIDIA H100 PCIe", (9, 0), 114, present.l2_bytes, 85_031_714_816, present.driver)
cases = {
    "version": patch.object(tpf_jit, "__version__", "0.0.9"),
    "source": patch.object(type(template), "_source_hash", "f" * 64),
    "device": patch.object(resolve, "current_device", lambda: other),
}
attempts = {}
for what, change in cases.items():
    with change if rank == 1 else nullcontext():
        attempts[what] = attempt()
say(attempts=attempts, frozen=tpf_jit.distributed.frozen() is not None)
if rank == 1:
    tpf_jit.__version__ = "0.0.9"
tpf_jit.distributed.freeze()
say(trained=True)
"""


def winner(direction: str, rank: int) -> TrialRow:
    """A measurement that makes the default win on rank 1, and on rank 0 the legal configuration that is nearest to it."""
    template = registry.templates(SHAPE.op, direction)[0]
    config = order.analytic_order(template, SHAPE, list(template.space(SHAPE)))[1 - rank]
    return TrialRow(
        template=template.name,
        cell=cell_key(SHAPE, direction),
        config=config_to_dict(config),
        kernel_key=KernelSpec.make(template, SHAPE, config).key,
        source_hash=template.source_hash(),
        device=current_device().facts(),
        toolchain=toolchain(template.backend),
        protocol="events-rotated-cold-1",
        samples_us=[100.0, 100.1, 100.2],
        errors={"out": 1e-3},
        status="ok",
        grade="final",
        date="2026-12-01T10:20:30Z",
        session="s",
    )


@pytest.fixture
def databases(tmp_path: Path) -> list[dict]:
    """A database for each rank; what won the forward in each."""
    found = []
    for rank in (0, 1):
        rows = [winner(direction, rank) for direction in DIFFERING]
        with TuningStore(tmp_path / f"rank{rank}.db") as store:
            store.put_trials(rows)
        (tmp_path / f"objects{rank}").mkdir(mode=0o700)
        found.append(dict(rows[0].config))
    assert found[0] != found[1]
    return found


def torchrun(folder: Path, body: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run the worker on two GPUs: (how torchrun ended, what each rank said)."""
    script = folder / "worker.py"
    script.write_text(WORKER.replace("BODY", body))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launcher, str(script), str(folder), SHAPE.key()],
        env=environment, capture_output=True, text=True, timeout=300, cwd=folder,
    )  # fmt: skip
    said = [folder / f"rank{rank}.json" for rank in (0, 1)]
    assert all(path.exists() for path in said), ended.stdout[-2000:] + ended.stderr[-6000:]
    return ended, [json.loads(path.read_text()) for path in said]


def compiler_is_here() -> bool:
    try:
        return bool(toolchain("cute").get("dsl"))
    except NoKernel:
        return False


def test_two_ranks_run_what_rank_0_measured(databases: list[dict], tmp_path: Path) -> None:
    if not compiler_is_here():
        pytest.skip("needs the kernel compiler: pip install nvidia-cutlass-dsl")
    ended, said = torchrun(tmp_path, AGREE)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert [rank["before"] for rank in said] == [["tuned", config] for config in databases], "each began with its own winner"
    for rank in said:
        assert rank["after"] == ["tuned", databases[0]], "rank 0 decides"
        assert rank["training"] == said[0]["training"] and rank["training"][0] == "tuned"
        assert rank["result"] == said[0]["result"] and rank["result"][0] == 2
        assert rank["result"][1]["device"] == current_device().model
        assert f"{SHAPE.op}/forward {SHAPE.key()}" in rank["result"][2]
        assert rank["result"][3][0].startswith("rank 0: ") and rank["result"][3][0].endswith("rank0.db")
        assert rank["finite"] and rank["same"], "a training step gives the same bits on both"


def test_a_mismatch_ends_the_job_before_training(databases: list[dict], tmp_path: Path) -> None:
    ended, said = torchrun(tmp_path, MISMATCH)
    source = registry.get("triangle_attention_forward_sm90").source_hash()[:16]
    expected = {
        "version": f"tpf_jit: {tpf_jit.__version__} on rank 0",
        "source": f"source of triangle_attention_forward_sm90: {source} on rank 0",
        "device": f"device: {current_device().model} on rank 0",
    }
    for what, beginning in expected.items():
        kind, text = said[0]["attempts"][what]
        assert kind == "RanksDisagree" and beginning in text and "on rank 1" in text and "nothing was frozen" in text
        assert said[1]["attempts"][what] == [kind, text], "both ranks say the same"
    assert not any(rank["frozen"] or "trained" in rank for rank in said)
    assert ended.returncode != 0 and "RanksDisagree" in ended.stderr
