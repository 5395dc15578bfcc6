"""Ranks agree: real processes under gloo, each with a database of its own; what differs is said on every rank, nobody hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from tuning_samples import H100, H200, trial

import tpf_jit
from tpf_jit import distributed, kernels, resolve
from tpf_jit.errors import RanksDisagree
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_to_dict
from tpf_jit.tuning_db.store import TuningStore

ROOT = Path(__file__).resolve().parents[2]
SHAPE = TriangleAttentionShape(crop=384)
OTHER = TriangleAttentionShape(crop=512)
FORWARD = "triangle_attention/forward"
TEMPLATE = "triangle_attention_forward_sm90"

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")

# What every rank runs: `before` may change its process, then it freezes and says what it would launch.
WORKER = """
import json, sys, datetime
import torch.distributed as dist
import tpf_jit
from tpf_jit import kernels, resolve
from tpf_jit.errors import TpfError
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.base import config_to_dict
rank, count, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=count,
                        timeout=datetime.timedelta(seconds=60))

def chosen(crop):
    kernel = kernels.get_kernel("triangle_attention/forward", TriangleAttentionShape(crop=crop))
    return [kernel.config_from, config_to_dict(kernel.config), kernel.note]

said = {"before": chosen(384)}
BEFORE
try:
    result = tpf_jit.distributed.freeze(SHAPES)
    said["result"] = [result.ranks, result.facts, result.choices, list(result.sources)]
except TpfError as error:
    said["error"] = [type(error).__name__, str(error)]
said["after"], said["unlisted"] = chosen(384), chosen(512)
said["frozen"] = tpf_jit.distributed.frozen() is not None
AFTER
dist.barrier()
dist.destroy_process_group()
print(json.dumps(said))
"""


def configs(count: int) -> list[dict]:
    """Different legal configurations, none of them the default."""
    template = registry.get(TEMPLATE)
    space = [config_to_dict(config) for config in template.space(SHAPE) if config != template.default(SHAPE)]
    return [space[index * (len(space) - 1) // max(count - 1, 1)] for index in range(count)]


def database(path: Path, config: dict, **fields) -> Path:
    """A database in which `config` has won two problems on the H200."""
    source = registry.get(TEMPLATE).source_hash()
    rows = [
        trial(shape, grade="final", template=TEMPLATE, config=config, source_hash=source, **fields) for shape in (SHAPE, OTHER)
    ]
    with TuningStore(path) as store:
        store.put_trials(rows)
    return path


def run(folder: Path, count: int, before: str = "", after: str = "", shapes: str = "") -> list[dict]:
    """Run the worker as `count` ranks, each with a database in which another configuration won; what each said."""
    script = WORKER.replace("BEFORE", before).replace("AFTER", after).replace("SHAPES", shapes)
    processes = []
    for rank, config in enumerate(configs(count)):
        path = database(folder / f"rank{rank}.db", config)
        environment = {**os.environ, "TPF_JIT_DB": str(path), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", script, str(rank), str(count), str(folder / "meeting")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_ranks_with_different_databases_agree_after_freeze(tmp_path: Path) -> None:
    said = run(tmp_path, 3)
    assert [rank["before"][1] for rank in said] == configs(3), "each rank started with its own winner"
    assert len({json.dumps(config) for config in configs(3)}) == 3
    for rank in said:
        assert rank["after"][1] == rank["unlisted"][1] == configs(3)[0], "rank 0 decides, also for what was not listed"
        assert "rank 0: " in rank["after"][2] and "rank0.db" in rank["after"][2]
        assert rank["frozen"]
        assert rank["result"] == said[0]["result"]
        assert rank["result"][0] == 3


def test_a_process_group_freezes_by_itself(tmp_path: Path) -> None:
    """The group's first rank decides for its members; the rank outside keeps its own and is not waited for."""
    before = """
group = dist.new_group([1, 2])
if rank:
    tpf_jit.distributed.freeze(group=group)
said["within"] = chosen(384)
tpf_jit.distributed.thaw()
"""
    said = run(tmp_path, 3, before=before)
    own = configs(3)
    assert [rank["within"][1] for rank in said] == [own[0], own[1], own[1]]
    assert all(rank["after"][1] == own[0] for rank in said)


def test_listed_shapes_are_compared_and_shown(tmp_path: Path) -> None:
    after = 'tpf_jit.distributed.thaw(); said["thawed"] = chosen(384)'
    said = run(tmp_path, 2, shapes=repr([SHAPE.key(), "chai1"]), after=after)
    _, facts, choices, sources = said[1]["result"]
    assert choices == said[0]["result"][2]
    config = " ".join(f"{name}={value}" for name, value in configs(2)[0].items())
    assert choices[f"{FORWARD} {SHAPE.key()}"] == f"{TEMPLATE} {config}"
    assert f"triangle_attention/backward_query {SHAPE.key()}" in choices
    assert any("/D64/" in problem for problem in choices)
    assert facts["tpf_jit"] == tpf_jit.__version__ and facts["device"] == "no GPU"
    assert sources[0].endswith("rank0.db")
    assert [rank["thawed"][1] for rank in said] == configs(2), "thawed ranks have their own winners again"


def test_the_first_launch_after_freeze_and_a_later_reload_keep_it(tmp_path: Path) -> None:
    """What tuning does at its end (forget, read again) does not thaw; no collective hides in it, as ranks do it alone."""
    after = 'resolve.reload(); kernels.reload_choices(); said["again"] = chosen(384) if rank else None'
    said = run(tmp_path, 2, after=after)
    assert said[1]["again"][1] == configs(2)[0]


# One after another in the same processes; `patch` is undone after each attempt.
MISMATCHES = f"""
from contextlib import nullcontext
from unittest.mock import patch
import torch
from tpf_jit import compiler
from tpf_jit.device import Device
from tpf_jit.templates import registry
toolchain = compiler.toolchain
cases = {{
    "tpf_jit": patch.object(tpf_jit, "__version__", "0.0.9"),
    "torch": patch.object(torch, "__version__", "1.13.1"),
    "compiler": patch.object(compiler, "toolchain", lambda name: {{**toolchain(name), "dsl": "9.9.9"}}),
    "source": patch.object(type(registry.get("{TEMPLATE}")), "_source_hash", "f" * 64),
    "device": patch.object(resolve, "current_device", lambda: {H100!r}),
}}
present = resolve.current_device
said["attempts"] = {{}}
for what, change in cases.items():
    resolve.current_device = (lambda: {H200!r}) if what == "device" else present
    with change if rank == 2 else nullcontext():
        try:
            tpf_jit.distributed.freeze()
        except TpfError as error:
            said["attempts"][what] = [type(error).__name__, str(error)]
    said["frozen after " + what] = tpf_jit.distributed.frozen() is not None
resolve.current_device = present
resolve.reload()
kernels.reload_choices()
said["own"] = chosen(384)
"""


def test_a_mismatch_names_ranks_and_values_on_every_rank(tmp_path: Path) -> None:
    said = run(tmp_path, 3, before=MISMATCHES)
    expected = {
        "tpf_jit": f"tpf_jit: {tpf_jit.__version__} on ranks 0-1 (",
        "torch": f"torch: {torch.__version__} on ranks 0-1 (",
        "compiler": "cute dsl: ",
        "source": f"source of {TEMPLATE}: {registry.get(TEMPLATE).source_hash()[:16]} on ranks 0-1 (",
        "device": f"device: {H200.model} on ranks 0-1 (",
    }
    values = {"tpf_jit": "0.0.9", "torch": "1.13.1", "compiler": "9.9.9", "source": "f" * 16, "device": H100.model}
    for what, beginning in expected.items():
        (error, text) = said[0]["attempts"][what]
        assert [rank["attempts"][what] for rank in said] == [[error, text]] * 3, "every rank says the same"
        assert error == "RanksDisagree" and "nothing was frozen" in text
        assert beginning in text and f"; {values[what]} on rank 2 (" in text
        assert len(text.splitlines()) == 3, "only what differs is listed"
        assert not any(rank["frozen after " + what] for rank in said)
    assert [rank["own"][1] for rank in said] == configs(3), "each rank kept its own"
    assert all(rank["after"][1] == configs(3)[0] for rank in said), "and once they are alike, they agree"


def test_a_rank_that_fails_alone_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    change = "from tpf_jit.templates.base import Template\n    Template.source_hash = lambda self: 1 / 0"
    said = run(tmp_path, 2, before=f"if rank == 1:\n    {change}")
    for rank in said:
        assert rank["error"][0] == "RanksDisagree"
        assert "rank 1 (" in rank["error"][1] and "ZeroDivisionError" in rank["error"][1] and "rank 0 (" not in rank["error"][1]


def test_a_failure_after_the_tables_were_sent_undoes_them_everywhere(tmp_path: Path) -> None:
    change = "from tpf_jit import distributed\n    distributed._answer = lambda *_: 1 / 0"
    said = run(tmp_path, 2, before=f"if rank == 1:\n    {change}", shapes=repr([SHAPE.key()]))
    assert all("ZeroDivisionError" in rank["error"][1] for rank in said)
    assert [rank["after"][1] for rank in said] == configs(2) and not any(rank["frozen"] for rank in said)


def test_different_shapes_are_a_mismatch(tmp_path: Path) -> None:
    said = run(tmp_path, 2, shapes='"chai1" if rank else "boltz2"')
    assert all("shapes: " in rank["error"][1] and "on rank 1" in rank["error"][1] for rank in said)


def test_without_freeze_ranks_use_their_own_and_nothing_is_sent(tmp_path: Path) -> None:
    """Only rank 1 asks for a shape nobody has used: a hidden collective would wait for rank 0 until the time-out."""
    stop = "dist.barrier(); dist.destroy_process_group(); print(json.dumps(said)); sys.exit()"
    said = run(tmp_path, 2, before=f'said["alone"] = chosen(520) if rank else None\n{stop}')
    assert [rank["before"][1] for rank in said] == configs(2)
    assert said[1]["alone"][1] == configs(2)[1]


# Shipped tables whose evidence is newer and better: they beat a row of the user's default database, not one named explicitly.
EXPLICIT = f"""
import os
from tpf_jit.device import Device
from tpf_jit.tuning_db import reader
resolve.current_device = lambda: {H200!r}
reader.read_shipped = resolve.read_shipped = lambda: reader.read_layer("SHIPPED")
if rank == 0:
    resolve.use(resolve.Dispatcher(os.environ["TPF_JIT_DB"]))
resolve.reload()
kernels.reload_choices()
said["own"] = chosen(384)
"""


def test_a_database_that_rank_0_names_explicitly_stays_first_on_every_rank(tmp_path: Path) -> None:
    shipped = database(tmp_path / "shipped.db", configs(3)[1], protocol="events-rotated-2", date="2026-12-02T00:00:00Z")
    said = run(tmp_path, 2, before=EXPLICIT.replace("SHIPPED", str(shipped)))
    assert [rank["own"][1] for rank in said] == [configs(2)[0], configs(3)[1]]
    assert [rank["after"][1] for rank in said] == [configs(2)[0]] * 2


# one process


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process of its own, with a database; everything is put back."""
    monkeypatch.setenv("TPF_JIT_DB", str(database(tmp_path / "own.db", configs(2)[0])))
    monkeypatch.setattr(resolve, "current_device", lambda: H200)
    monkeypatch.setattr(resolve, "_default_dispatcher", [])
    kernels.reload_choices()
    yield tmp_path / "own.db"
    distributed.thaw()
    kernels.reload_choices()


def config_now() -> dict:
    return config_to_dict(kernels.get_kernel(FORWARD, SHAPE).config)


def test_a_single_process_freezes_its_own_tables(own: Path) -> None:
    assert distributed.frozen() is None
    result = tpf_jit.distributed.freeze(SHAPE)
    assert result.ranks == 1 and distributed.frozen() is result
    assert f"{own} (2 problems)" in str(result) and f"{FORWARD} {SHAPE.key()}: {TEMPLATE} " in str(result)
    faster = configs(2)[1]
    with TuningStore(own) as store:
        store.put_trials([trial(SHAPE, us=10, grade="final", template=TEMPLATE, config=faster, source_hash=result_source())])
    resolve.reload()
    kernels.reload_choices()
    assert config_now() == configs(2)[0], "frozen: a later row does not change the answer"
    distributed.freeze()
    assert config_now() == faster, "frozen again, from the rows there are now"
    distributed.thaw()
    assert distributed.frozen() is None and config_now() == faster
    distributed.thaw()


def result_source() -> str:
    return registry.get(TEMPLATE).source_hash()


def test_a_dispatcher_of_the_caller_s_keeps_its_device_and_templates(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "current_device", lambda: None)
    mine = resolve.Dispatcher(own, shipped=False, device=H200, registry=registry)
    resolve.use(mine)
    distributed.freeze()
    used = resolve.default_dispatcher()
    assert used is not mine and used.device is H200 and used._templates() is registry
    assert used.resolve(SHAPE.op, "forward", SHAPE).source == "tuned"


def test_shapes_that_are_none_are_refused_and_nothing_changes(own: Path) -> None:
    with pytest.raises(RanksDisagree, match="InvalidInput: preset: got 'alphafold9'"):
        distributed.freeze("alphafold9")
    assert distributed.frozen() is None and config_now() == configs(2)[0]


def test_named_ranks() -> None:
    hosts = ["a", "a", "a", "b", "b", "b"]
    assert distributed._named([0, 1, 2, 5], hosts) == "ranks 0-2, 5 (a, b)"
    assert distributed._named([4], hosts) == "rank 4 (b)"
    assert distributed._named(list(range(6)), [f"n{index}" for index in range(6)]) == "ranks 0-5"


def test_the_module_loads_on_first_use_and_without_torch() -> None:
    code = (
        "import sys, tpf_jit; first = 'tpf_jit.distributed' in sys.modules; tpf_jit.distributed.freeze;"
        "print(first, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
