"""A sweep over a Ray cluster: a real local one whose workers measure with the toy's clock. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import many_fakes
import pytest
from many_fakes import CONFIGS, SHAPES, assert_all_tried_once, cells, search_rows, travelling
from tune_fakes import ToyConfig, ToyShape

from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.tune.many import Limits, sweep_many
from tpf_jit.tune.ray_cluster import sweep_ray

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def toy(private_state, monkeypatch):
    many_fakes.private_registry(monkeypatch)


@pytest.fixture(scope="module")
def cluster():
    """Four workers with a GPU each, as far as Ray knows."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'tpf_jit[ray]'")
    path = os.pathsep.join([str(TESTS), str(TESTS.parents[1]), *filter(None, sys.path)])
    ray.init(
        address="local",
        num_gpus=4,
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield ray
    ray.shutdown()


def folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"tpf_jit-ray-{os.getuid()}-*"))


def test_one_of_four_workers_is_killed_in_the_middle_of_a_task(cluster, tmp_path):
    left_behind = set(folders())
    told: list[str] = []
    options = travelling(sample_s=0.001, die=str(tmp_path / "killed"))
    summary = sweep_ray(cells(), store=tmp_path / "home.db", options=options, on_cell=lambda report: told.append(report.cell))
    assert (tmp_path / "killed").exists() and summary.restarts == 1
    assert sorted(told) == sorted(cell.key for cell in cells())
    assert summary.unfinished == []
    assert_all_tried_once(cells(), tmp_path / "home.db")
    assert 0 < summary.idle_share < 1 and summary.compiled >= len({shape.rows for shape in SHAPES}) * len(CONFIGS) / 2
    assert set(folders()) <= left_behind, "the nodes' folders are not removed"
    again = sweep_ray(cells(), store=tmp_path / "home.db", options=travelling())
    assert again.new_trials == 0 and again.unfinished == []
    assert_all_tried_once(cells(), tmp_path / "home.db")


def test_what_the_caller_has_measured_is_not_measured_again(cluster, tmp_path):
    sweep_many(cells(SHAPES[:3]), tmp_path / "home.db", travelling(), Limits(max_trials=7), progress=False)
    before = {row.id for row in search_rows(tmp_path / "home.db")}
    summary = sweep_ray(cells(SHAPES[:3]), store=tmp_path / "home.db", options=travelling())
    assert summary.new_trials == 3 * (len(CONFIGS) - 7)
    assert before < {row.id for row in search_rows(tmp_path / "home.db")}
    assert_all_tried_once(cells(SHAPES[:3]), tmp_path / "home.db")


def test_a_kernel_that_takes_a_gpu_down_is_remembered(cluster, tmp_path):
    configs = (ToyConfig(16), ToyConfig(16, trick="deadly"), ToyConfig(64, 3))
    many_fakes.register(configs)
    planned = cells([ToyShape(64, 8)])
    summary = sweep_ray(planned, store=tmp_path / "home.db", options=travelling(configs=configs))
    assert summary.restarts == 1 and summary.unfinished == []
    assert_all_tried_once(planned, tmp_path / "home.db", configs)


def test_a_cluster_without_a_gpu(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(MeasurementFailed, match="has no GPU"):
        sweep_ray(cells(), store=tmp_path / "home.db", options=travelling())


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidInput, match=r"pip install 'tpf_jit\[ray\]'"):
        sweep_ray(cells(), store=tmp_path / "home.db", options=travelling())
