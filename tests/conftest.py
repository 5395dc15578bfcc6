"""What every test gets: its own database and object cache, and a clear skip where the machine lacks something."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; one thread each keeps CPU references from fighting. Must precede the first torch import.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--state", help="folder for the tests' database and objects, kept afterwards (default: a temporary one)")
    parser.addoption("--record", help="folder for a record of what the GPU tests saw (default: none is kept)")


def pytest_configure(config: pytest.Config) -> None:
    # Before collection, so that nothing a test module reads at import time can see the developer's own files. One folder
    # per worker process: kernels compiled by one test serve the next, and a test that needs an empty one sets its own.
    kept = config.getoption("--state")
    folder = Path(kept or tempfile.mkdtemp(prefix="tpf_jit_tests_")).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.environ["TPF_JIT_DB"] = str(folder / "user.db")
    os.environ["TPF_JIT_CACHE"] = str(folder / "objects")
    if not kept:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.relative_to(ROOT).parts
        if parts[:2] == ("tests", "gpu"):
            item.add_marker(pytest.mark.gpu)
        elif parts[:2] == ("tests", "compile"):
            item.add_marker(pytest.mark.compile)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    missing = _why_no_gpu() if gpu else None
    for item in gpu:
        item.add_marker(pytest.mark.xdist_group("gpu"))
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))
    if importlib.util.find_spec("cutlass") is None:
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(pytest.mark.skip(reason="needs the kernel compiler: pip install nvidia-cutlass-dsl"))


def _why_no_gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return "needs PyTorch"
    if not torch.cuda.is_available():
        return "needs a Hopper GPU; PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (compute capability 9.0); this one has {major}.{minor}"
    return None


@pytest.fixture(scope="session")
def root() -> Path:
    """Folder of the checkout."""
    return ROOT


@pytest.fixture
def private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user database and object cache for one test; the folder that holds them."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TPF_JIT_DB", str(folder / "user.db"))
    monkeypatch.setenv("TPF_JIT_CACHE", str(folder / "objects"))
    return folder
