"""tpf_jit.compile with the real compiler and cache, on a machine that needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tpf_jit
from tpf_jit import kernels
from tpf_jit.errors import InvalidInput

# float16: no shipped row is near, so every crop takes the default configuration.
SHAPE = tpf_jit.TriangleAttentionShape(crop=384, dtype="float16")


@pytest.fixture(autouse=True)
def fresh_process_state():
    kernels.forget()
    yield
    kernels.forget()


def test_one_shape_then_several(private_state: Path) -> None:
    kernel = tpf_jit.compile(SHAPE)
    assert kernel.resources["registers"] > 0 and kernel.resources["spill_bytes"] == 0
    assert kernel.resources["hgmma"] > 0 and kernel.resources["utmaldg"] > 0
    found = tpf_jit.explain(SHAPE)
    assert found.state == "cached" and found.resources["registers"] == kernel.resources["registers"]
    (entry,) = objects_of(private_state, kernel)
    written = entry.stat().st_ino

    several = tpf_jit.compile([SHAPE, replace(SHAPE, crop=512, rows=512), replace(SHAPE, head_dim=64)])
    assert several[0].spec == several[1].spec == kernel.spec, "one kernel serves every crop"
    assert several[2].spec != kernel.spec
    assert entry.stat().st_ino == written, "and is not compiled again"
    assert objects_of(private_state, several[2])

    code = (
        "import sys, tpf_jit; shape = tpf_jit.TriangleAttentionShape(crop=640, dtype='float16');"
        "print(tpf_jit.explain(shape).state, 'cutlass' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cached", "False"], "another process finds it without the compiler"


def objects_of(state: Path, kernel: tpf_jit.api.CompiledKernel) -> list[Path]:
    return list((state / "objects").glob(f"{kernel.spec.key}.*"))


def test_an_illegal_configuration_is_refused_before_the_compiler_starts() -> None:
    with pytest.raises(InvalidInput, match="registers|shared memory|outside"):
        tpf_jit.compile(SHAPE, config={"tile_n": 256, "consumer_warpgroups": 4})


INTERRUPTED = """
import signal, threading, time
import toy_template as toy
toy.install()
from tpf_jit import api, kernels
from tpf_jit.compiler import KernelSpec
specs = {KernelSpec.make("toy_forward", toy.ToyShape(), toy.ToyConfig(tile, "hanging", LOG)) for tile in range(1, 7)}
def interrupt():
    while not open(LOG).read():
        time.sleep(0.05)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    api._build(specs, 1)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_a_compile_of_many(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    root = Path(__file__).parents[2]
    code = f"import sys; sys.path.insert(0, {str(root / 'tests')!r}); LOG = {str(log)!r}\n{INTERRUPTED}"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr
    assert len(log.read_text().splitlines()) == 1, "what was queued is not begun"
