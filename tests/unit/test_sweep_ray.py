"""A sweep over a Ray cluster: a real local one whose workers measure with the toy's clock. Skipped where Ray is not installed."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import many_fakes
import pytest
from many_fakes import CONFIGS, SHAPES, assert_all_tried_once, cells, search_rows, travelling
from tune_fakes import InlinePool, ToyConfig, ToyShape

from tpf_jit.errors import DatabaseError, InvalidInput, MeasurementFailed
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


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"tpf_jit-ray-{os.getuid()}-*"))


def assert_removed(left_behind: set[Path]) -> None:
    """The nodes' folders go; with busy cores a task of Ray's that removes one may come after the sweep's own end."""
    end = time.monotonic() + 60
    while not folders() <= left_behind and time.monotonic() < end:
        time.sleep(0.2)
    assert folders() <= left_behind, "the nodes' folders are not removed"


def test_one_of_four_workers_is_killed_in_the_middle_of_a_task(cluster, tmp_path):
    left_behind = folders()
    told: list[str] = []
    options = travelling(sample_s=0.001, die=str(tmp_path / "killed"))
    summary = sweep_ray(cells(), store=tmp_path / "home.db", options=options, on_cell=lambda report: told.append(report.cell))
    assert (tmp_path / "killed").exists() and summary.restarts == 1
    assert sorted(told) == sorted(cell.key for cell in cells())
    assert summary.unfinished == []
    assert_all_tried_once(cells(), tmp_path / "home.db")
    assert 0 < summary.idle_share < 1 and summary.compiled >= len({shape.rows for shape in SHAPES}) * len(CONFIGS) / 2
    assert_removed(left_behind)
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


class Startable:
    """An object cache that is the default one to the first `count` processes that receive it; the others cannot start."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count

    def __reduce__(self) -> Any:
        return _received, (self.folder, self.count)


def _received(folder: Path, count: int) -> None:
    (folder / f"{os.getpid()}.started").touch()
    if len(list(folder.glob("*.started"))) > count:
        raise DatabaseError("no place for a database")


def test_a_replacement_that_cannot_start_leaves_its_cells_to_the_others(cluster, tmp_path):
    left_behind = folders()
    killed = tmp_path / "killed"
    options = replace(travelling(sample_s=0.001, die=str(killed)), objects=Startable(tmp_path, 4))
    summary = sweep_ray(cells(), store=tmp_path / "home.db", options=options)
    assert killed.exists() and summary.restarts == 1 and summary.unfinished == []
    assert_all_tried_once(cells(), tmp_path / "home.db")
    assert_removed(left_behind)


def test_a_cluster_on_which_nothing_starts(cluster, tmp_path):
    with pytest.raises(MeasurementFailed, match="no place for a database"):
        sweep_ray(cells(), store=tmp_path / "home.db", options=replace(travelling(), objects=Startable(tmp_path, 0)))


class FullDisk(InlinePool):
    """The first process to come so far cannot keep what it compiles any more."""

    def __init__(self, found: str) -> None:
        super().__init__()
        self.found = found

    def submit(self, spec: Any) -> Any:
        if len(self.compiled) == len(CONFIGS) - 2 and not os.path.exists(self.found):
            Path(self.found).touch()
            raise DatabaseError("the disk is full")
        return super().submit(spec)


def test_a_database_that_fails_on_a_node_costs_its_actor_not_the_sweep(cluster, tmp_path):
    options = replace(travelling(sample_s=0.001), make_pool=partial(FullDisk, str(tmp_path / "full")))
    summary = sweep_ray(cells(), store=tmp_path / "home.db", options=options)
    assert (tmp_path / "full").exists() and summary.unfinished == []
    assert_all_tried_once(cells(), tmp_path / "home.db")
    assert summary.new_trials < len(SHAPES) * len(CONFIGS), "what it had measured came home and was not measured again"


def test_an_error_in_the_middle_brings_the_rows_home_and_removes_the_folders(cluster, tmp_path):
    left_behind = folders()

    def on_cell(report: Any) -> None:
        time.sleep(0.5)
        raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        sweep_ray(cells(), store=tmp_path / "home.db", options=travelling(sample_s=0.004), on_cell=on_cell)
    assert len({row.cell for row in search_rows(tmp_path / "home.db")}) > 1, "the cells of the others were in work"
    assert_removed(left_behind)


def test_a_cluster_without_a_gpu(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "cluster_resources", lambda: {"CPU": 4.0})
    with pytest.raises(MeasurementFailed, match="has no GPU"):
        sweep_ray(cells(), store=tmp_path / "home.db", options=travelling())


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidInput, match=r"pip install 'tpf_jit\[ray\]'"):
        sweep_ray(cells(), store=tmp_path / "home.db", options=travelling())
