"""Keeps what the GPU tests saw as a record: `pytest tests/gpu --record tuning_db/records`."""

from __future__ import annotations

import sys

import pytest

RECORDS = {
    "correctness.attention": (("test_forward", "test_backward"), ("out", "dq")),
    "correctness.trimul": (("test_multiplication_grid",), ("out",)),
}
"""Kind of record -> test modules that have EVIDENCE for it, and the tensors that count its cases."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = session.config.getoption("--record")
    for kind, (modules, counted) in RECORDS.items():
        rows = [row for name in modules for row in getattr(sys.modules.get(name), "EVIDENCE", [])]
        if folder and rows:
            _write(kind, rows, counted, session.testsfailed, folder)


def _write(kind: str, rows: list[dict], counted: tuple[str, ...], failed: int, folder: str) -> None:
    import torch

    from tpf_jit import records
    from tpf_jit.bench.environment import record_head

    record = record_head(kind, "pytest tests/gpu --record tuning_db/records", torch.device("cuda", 0), {})
    record["method"] = {
        "reference": "float64 on the GPU, on a sample of the rows where all would be too many",
        "error": "relative RMS",
        "cases": len([row for row in rows if row["tensor"] in counted]),
        "failed": failed,
    }
    print(f"\nrecord: {records.write(record | {'absent_peers': {}, 'rows': rows}, folder)}")
