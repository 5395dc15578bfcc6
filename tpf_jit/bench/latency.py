"""What a call costs beside the kernel, and what a new process costs before its first result.

Call overhead, of the operator and of the launch alone: host time to enqueue one call of a problem so small that the GPU keeps
up, over many calls without a synchronisation, in batches short enough for the launch queue; the median batch. Beside it a plain
PyTorch operator, as the floor that the framework sets.

First result: fresh processes, one after another, that import torch, import tpf_jit, make inputs (which creates the CUDA
context) and run one call; each step timed inside the process. ``warm`` uses the present database and object cache, ``cold`` an
empty cache and database, so that the kernel is compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpf_jit.bench.environment import bench_device, record_head
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.tune import timing

BATCH = 100
"""Calls between synchronisations: far below the ~1,000 entries of the launch queue."""

_SCRIPT = """
import json, sys, time
start = time.perf_counter()
import torch
after_torch = time.perf_counter()
import tpf_jit
from tpf_jit.shape import TriangleAttentionShape
after_library = time.perf_counter()
shape, device = TriangleAttentionShape.parse(sys.argv[1]), sys.argv[2]
from tpf_jit.templates.triangle_attention.inputs import make_inputs
made = make_inputs(shape, device)
if device != "cpu":
    torch.cuda.synchronize()
after_inputs = time.perf_counter()
with torch.no_grad():
    out = tpf_jit.triangle_attention(made.q, made.k, made.v, made.bias, made.mask)
first = float(out.flatten()[0])
after_call = time.perf_counter()
print(json.dumps({
    "import_torch_s": after_torch - start,
    "import_tpf_jit_s": after_library - after_torch,
    "context_and_inputs_s": after_inputs - after_library,
    "first_call_s": after_call - after_inputs,
    "import_to_first_result_s": after_call - after_torch,
    "total_s": after_call - start,
    "compiler_imported": "cutlass" in sys.modules,
}))
"""


def bench_latency(
    shape: Any = None, repeats: int = 5, cold: bool = True, device: str | None = None, command: str = ""
) -> dict[str, Any]:
    """Measure both; returns a record of kind ``latency``.

    Args:
        shape: problem of the first result; crop 384 when left out. The call overhead uses crop 16 with its other fields.
        repeats: fresh processes per kind, and a hundredfold of calls.
        cold: also measure with an empty cache, which compiles.
        device: torch device; the current CUDA device when left out.
        command: command line for the record.

    Raises:
        InvalidInput: no repeat, or a device that is neither cpu nor a CUDA device.
        MeasurementFailed: no CUDA device, or a fresh process failed.
    """
    import dataclasses

    from tpf_jit.shape import TriangleAttentionShape

    if repeats < 1:
        raise InvalidInput.of("repeats", repeats, "at least one")
    shape = shape or TriangleAttentionShape(crop=384)
    where, timer = bench_device(device)
    small = dataclasses.replace(shape, crop=16, rows=16, batch=1)
    rows = call_overhead(small, where, timer, max(3, 10 * repeats))
    rows.append(_first_result(shape, where, repeats, "warm"))
    if cold:
        rows.append(_first_result(shape, where, 1, "cold"))
    record = record_head("latency", command, where, {})
    record["method"] = {
        "timer": "perf_counter",
        "statistic": "median",
        "repeats": repeats,
        "calls_per_sample": BATCH,
        "processes": "fresh, one after another",
    }
    return {**record, "rows": rows}


def call_overhead(shape: Any, device: Any, timer: timing.Timer, samples: int) -> list[dict[str, Any]]:
    """Host microseconds per call: of the operator without and with autograd recording, of the launch function alone (where a
    kernel runs), and of a plain PyTorch operator."""
    import torch

    import tpf_jit
    from tpf_jit.templates.triangle_attention.inputs import make_inputs

    made = make_inputs(shape, device)
    plain = (made.q, made.k, made.v, made.bias, made.mask)
    leaves = [tensor.detach().requires_grad_() for tensor in plain[:4]]
    calls: dict[str, Callable[[], Any]] = {
        "tpf_jit": lambda: tpf_jit.triangle_attention(*plain),
        "tpf_jit, recording gradients": lambda: tpf_jit.triangle_attention(*leaves, made.mask),
        "torch.add": lambda: torch.add(made.q, made.k),
    }
    launch = _bare_launch(shape, device)
    if launch is not None:
        calls["tpf_jit, launch alone"] = launch
    rows = []
    for name, call in calls.items():
        with torch.set_grad_enabled("gradients" in name):
            taken = _host_us(call, timer, samples)
        rows.append(
            {
                "op": shape.op,
                "what": "call overhead",
                "impl": name,
                "N": shape.crop,
                "us": round(timing.median(taken), 3),
                "us_p10": round(timing.quantile(taken, 0.1), 3),
                "us_p90": round(timing.quantile(taken, 0.9), 3),
            }
        )
    return rows


def _bare_launch(shape: Any, device: Any) -> Callable[[], Any] | None:
    """One launch of the kernel that serves the shape, its operands laid out before; None where the PyTorch path serves it."""
    import tpf_jit
    from tpf_jit.kernels import get_kernel

    if device.type != "cuda" or not tpf_jit.is_supported(shape)[0]:
        return None
    kernel = get_kernel(f"{shape.op}/forward", shape)
    workload = kernel.template.workload(shape, device)
    return workload.prepare(kernel.function, workload.make_inputs(0))


def _host_us(call: Callable[[], Any], timer: timing.Timer, samples: int) -> list[float]:
    for _ in range(BATCH):
        call()
    timer.wait()
    taken = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        taken.append(1e6 * (time.perf_counter() - start) / BATCH)
        timer.wait()
    return taken


def _first_result(shape: Any, device: Any, repeats: int, kind: str) -> dict[str, Any]:
    found = []
    if kind == "warm":
        _fresh_process(shape, device, {})  # fills the cache, perhaps by compiling
    for _ in range(repeats):
        if kind == "warm":
            found.append(_fresh_process(shape, device, {}))
            continue
        with tempfile.TemporaryDirectory(prefix="tpf_jit_latency_") as folder:
            empty = {"TPF_JIT_CACHE": str(Path(folder) / "objects"), "TPF_JIT_DB": str(Path(folder) / "user.db")}
            found.append(_fresh_process(shape, device, empty))
    row: dict[str, Any] = {"op": shape.op, "what": "first result", "impl": "tpf_jit", "cache": kind}
    row |= {"N": shape.crop, "D": shape.head_dim}
    for name in found[0]:
        values = [one[name] for one in found]
        row[name] = any(values) if isinstance(values[0], bool) else round(timing.median(values), 4)
    return row


def _fresh_process(shape: Any, device: Any, environment: dict[str, str]) -> dict[str, Any]:
    import tpf_jit

    # The child must find the same package, installed or a checkout, and no more of this process's search path than that.
    root = str(Path(tpf_jit.__file__).resolve().parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-c", _SCRIPT, shape.key(), str(device)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True)
    if done.returncode != 0:
        raise MeasurementFailed(f"a fresh process failed with exit code {done.returncode}: {done.stderr.strip()[-1000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
