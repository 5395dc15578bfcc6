"""The compile pool: real kernels side by side, and every way a compile can go wrong without taking the others along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import toy_template as toy

from tpf_jit.compiler import CompiledObject, KernelSpec
from tpf_jit.errors import CompileFailed, NoKernel
from tpf_jit.pool import CompilePool
from tpf_jit.templates import registry

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "third_party_template" / "src"))

import tpf_scaled_bias as example  # noqa: E402

registry.register(example.ScaledBiasForward)


def toy_spec(tile: int = 1, mood: str = "good", log: Path | str = "") -> KernelSpec:
    return KernelSpec.make("toy_forward", toy.ToyShape(), toy.ToyConfig(tile, mood, str(log)))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "zombie" not in Path(f"/proc/{pid}/status").read_text()


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def toys() -> None:
    toy.install()


@pytest.fixture(scope="module")
def pool():
    with CompilePool(2, timeout_s=60.0) as pool:
        yield pool


def test_real_kernels_compile_in_workers(pool: CompilePool) -> None:
    """Also with a template the workers know only because the job says where it lives."""
    shape = example.ScaledBiasShape(512, 512)
    specs = [
        KernelSpec.make("scaled_bias_forward", shape, example.ScaledBiasConfig(rows_per_cta=rows)) for rows in (1, 2)
    ]
    done = [future.result(60) for future in [pool.submit(spec) for spec in specs]]
    assert [obj.spec for obj in done] == specs and all(obj.data[:4] == b"\x7fELF" for obj in done)
    assert done[0].sha256 != done[1].sha256 and done[0].resources["registers"] > 0


def test_one_failure_is_one_failed_future(pool: CompilePool) -> None:
    futures = [pool.submit(toy_spec(tile, mood)) for tile, mood in enumerate(("good", "broken", "good", "deadly", "good"), 1)]
    outcomes = [future.exception(60) for future in futures]
    assert [type(error) for error in outcomes] == [type(None), CompileFailed, type(None), CompileFailed, type(None)]
    assert "toy compiler says no: C7508" in str(outcomes[1])
    assert "tile=4 mood=deadly" in str(outcomes[3]) and "worker process died" in str(outcomes[3])
    assert futures[4].result().resources["registers"] == 5 * 32


def test_a_hanging_compile_is_stopped_and_its_worker_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with CompilePool(1, timeout_s=1.0) as pool:
        hanging, after = pool.submit(toy_spec(1, "hanging", log)), pool.submit(toy_spec(2, "good", log))
        with pytest.raises(CompileFailed, match="took longer than 1 s and was stopped"):
            hanging.result(60)
        assert after.result(60).resources["registers"] == 64
        first, second = map(int, log.read_text().split())
        assert first != second
        wait_until(lambda: not alive(first))
    wait_until(lambda: not alive(second))


def test_a_worker_killed_from_outside_fails_only_its_job(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with CompilePool(1) as pool:
        victim, after = pool.submit(toy_spec(1, "hanging", log)), pool.submit(toy_spec(3))
        wait_until(log.exists, 60)
        wait_until(lambda: bool(log.read_text().strip()))
        os.kill(int(log.read_text()), signal.SIGKILL)
        assert isinstance(victim.exception(60), CompileFailed)
        assert after.result(60).resources["registers"] == 96


def test_the_process_that_starts_workers_may_die_too() -> None:
    with CompilePool(1) as pool:
        assert pool.submit(toy_spec(1)).result(60)
        pool._nursery._process.kill()
        pool._nursery._process.wait()
        outcomes = [pool.submit(toy_spec(2)).exception(60), pool.submit(toy_spec(2)).exception(60)]
        assert outcomes[1] is None, "at most the job that met the dead worker is lost"


def test_workers_see_no_gpu_and_do_not_write_to_standard_output(pool: CompilePool) -> None:
    obj = pool.submit(toy_spec(7)).result(60)
    assert obj.resources["pid"] != os.getpid()
    environment = Path(f"/proc/{obj.resources['pid']}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    output = os.readlink(f"/proc/{obj.resources['pid']}/fd/1")
    assert output == os.readlink(f"/proc/{obj.resources['pid']}/fd/2")


def test_jobs_run_side_by_side(pool: CompilePool) -> None:
    pids = {future.result(60).resources["pid"] for future in [pool.submit(toy_spec(1, "slow")) for _ in range(2)]}
    assert len(pids) == 2


def test_closing_without_waiting_cancels_and_kills(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pool = CompilePool(1)
    running, waiting = pool.submit(toy_spec(1, "hanging", log)), pool.submit(toy_spec(2))
    wait_until(log.exists, 60)
    wait_until(lambda: bool(log.read_text().strip()))
    started = time.monotonic()
    pool.close(wait=False)
    assert time.monotonic() - started < 10
    assert waiting.cancelled() and isinstance(running.exception(1), CompileFailed)
    wait_until(lambda: not alive(int(log.read_text())))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(toy_spec(1))
    pool.close()


def test_an_unused_pool_costs_nothing() -> None:
    with CompilePool(4) as pool:
        assert pool._nursery._process is None and pool._threads == []


def test_what_workers_cannot_have_is_refused_at_once(pool: CompilePool) -> None:
    class Local(toy.ToyTemplate):
        name = "toy_local"

    registry.register(Local, replace=True)
    with pytest.raises(CompileFailed, match=r"toy_local is defined in .*<locals>\.Local.*remedy: move it to a module"):
        pool.submit(KernelSpec.make("toy_local", toy.ToyShape()))
    with pytest.raises(NoKernel, match="no template is named"):
        pool.submit(KernelSpec("toy_absent", (), (), "toy_1"))


def test_sources_that_changed_meanwhile_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that would trace newer code than this process believes in must not store it under the old key."""
    module = tmp_path / "toy_that_changes.py"
    module.write_text("from toy_template import ToyTemplate\nclass Changing(ToyTemplate):\n    name = 'toy_changing'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from toy_that_changes import Changing

    registry.register(Changing, replace=True)
    spec = KernelSpec.make("toy_changing", toy.ToyShape())
    with CompilePool(1) as pool:
        assert isinstance(pool.submit(spec).result(60), CompiledObject)
    module.write_text(module.read_text() + "    extra = 1\n")
    with CompilePool(1) as pool:
        with pytest.raises(CompileFailed, match="source files of toy_changing changed"):
            pool.submit(spec).result(60)


PROGRAM = """
    import sys; sys.path.insert(0, sys.argv[1])
    import toy_template as toy
    from tpf_jit.compiler import KernelSpec
    from tpf_jit.pool import CompilePool
    def spec(tile):
        return KernelSpec.make("toy_forward", toy.ToyShape(), toy.ToyConfig(tile, "hanging", sys.argv[2]))
"""


def program(log: Path, body: str) -> subprocess.Popen:
    """A script without a ``__main__`` guard, as people write them."""
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    path = log.with_suffix(".py")
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(path), str(ROOT / "tests"), str(log)], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def workers_of(log: Path, count: int) -> list[int]:
    wait_until(lambda: log.exists() and len(log.read_text().split()) == count, 60)
    return [int(pid) for pid in log.read_text().split()]


def test_ctrl_c_ends_everything_cleanly(tmp_path: Path) -> None:
    process = program(
        tmp_path / "log",
        """
        try:
            with CompilePool(2) as pool:
                futures = [pool.submit(spec(tile)) for tile in (1, 2, 3, 4)]
                futures[0].result()
        except KeyboardInterrupt:
            print("interrupted", [f.cancelled() for f in futures])
        """,
    )
    workers = workers_of(tmp_path / "log", 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    out, err = process.communicate(timeout=20)
    assert out.strip() == "interrupted [False, False, True, True]" and err == ""
    wait_until(lambda: not any(map(alive, workers)))


def test_interpreter_exit_ends_workers(tmp_path: Path) -> None:
    process = program(
        tmp_path / "log",
        """
        import os, time
        pool = CompilePool(1)
        future = pool.submit(spec(1))
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.05)
        """,
    )
    (worker,) = workers_of(tmp_path / "log", 1)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0 and err == ""
    wait_until(lambda: not alive(worker))


def test_killing_the_caller_ends_workers(tmp_path: Path) -> None:
    process = program(tmp_path / "log", "with CompilePool(1) as pool: pool.submit(spec(1)).result()\n")
    (worker,) = workers_of(tmp_path / "log", 1)
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not alive(worker), 10)
