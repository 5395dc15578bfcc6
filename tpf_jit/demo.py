"""The job of `make demo`: what tpf_jit does, shown on this machine with real input.

On a Hopper GPU it tunes one crop within a small budget, dispatches a call, and compares it with FP64 and with stock PyTorch.
Without one it compiles the forward kernels for sm_90a, shows what they use, and checks the operator's PyTorch path against FP64.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpf_jit.shape import TriangleAttentionShape

Say = Callable[[str], None]

HEAD_DIMS = (16, 32, 64, 128)
"""What a machine without a GPU compiles: one kernel for each of these."""
CPU_CROP = 72
"""Small enough for a second of CPU time, ragged for every tile size."""
PEERS = ("tpf_jit", "cuequivariance", "torch", "torch_chunked")

BOUNDS = {"out": 2.1e-3, "dq": 2.5e-3, "dk": 2.5e-3, "dv": 2.5e-3, "dbias": 2.5e-3}
"""Largest relative RMS error against FP64 for bf16 tensors: their floors (docs/numerics.md) and a few percent."""


@dataclass(frozen=True)
class Part:
    """One table of the demo. `passed` is False where a result is not as it should be."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    passed: bool = True

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly: rows as objects."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "note": self.note, "passed": self.passed}


def run(crop: int = 384, budget_s: float = 60.0, say: Say = print) -> Iterator[Part]:
    """The demo that this machine can show, part by part as they are done.

    Args:
        crop: of the call that is tuned and compared on a GPU.
        budget_s: seconds of tuning on a GPU.
        say: told what is going on.
    """
    from tpf_jit.device import current_device

    device = current_device()
    if device is not None and device.arch is not None:
        say(f"{device.name}: tuning one problem, then dispatching a call and comparing it")
        yield from _on_gpu(TriangleAttentionShape(crop=crop), budget_s, say)
        return
    reason = "no GPU here" if device is None else f"{device.name} is no Hopper GPU"
    say(f"{reason}: compiling the kernels for sm_90a, then checking the PyTorch path against FP64")
    yield _compile()
    yield _check_cpu(TriangleAttentionShape(crop=CPU_CROP, mask="bool"))


def _on_gpu(shape: TriangleAttentionShape, budget_s: float, say: Say) -> Iterator[Part]:
    import tpf_jit
    from tpf_jit.bench import BenchSettings, bench_attention, peers

    result = tpf_jit.tune(shape, budget_s=budget_s)
    yield _tuned(result)
    explanation = tpf_jit.explain(shape)
    if explanation.path != "kernel":
        yield Part("dispatch", ("path", "reason"), [(explanation.path, explanation.reason)], passed=False)
        return
    say(str(explanation))
    yield _repeats(shape)
    present = [peer.name for peer in peers.peers(list(PEERS)) if peer.absent() is None]
    record = bench_attention([shape], ("forward",), BenchSettings(impls=present, rounds=4, samples=10), command="tpf-jit demo")
    yield _compared(record)


def _tuned(result: Any) -> Part:
    from tpf_jit.tune.report import sorted_rows

    best = result.best_config
    rows = [
        (row.median_us, row.p10_us, row.p90_us, row.grade, max(row.errors.values(), default=None), row.config, row.config == best)
        for row in sorted_rows(result.trials)[:8]
    ]
    columns = ("us", "p10", "p90", "grade", "error", "configuration", "winner")
    return Part("tuned: the fastest configurations, each checked against FP64", columns, rows, result.summary(), best is not None)


def _repeats(shape: TriangleAttentionShape, device: str = "cuda") -> Part:
    import torch

    import tpf_jit
    from tpf_jit.templates.triangle_attention.inputs import make_inputs

    made = make_inputs(shape, device)
    with torch.no_grad():
        calls = [tpf_jit.triangle_attention(made.q, made.k, made.v, made.bias, made.mask) for _ in range(3)]
    equal = all(torch.equal(calls[0], other) for other in calls[1:])
    return Part("repeated calls", ("calls", "equal bit for bit"), [(len(calls), equal)], passed=equal)


def _compared(record: dict[str, Any]) -> Part:
    rows = record["rows"]
    ours = next((row for row in rows if row["impl"] == "tpf_jit"), None)
    table = []
    for row in sorted(rows, key=lambda row: row["ms"]):
        factor = row["ms"] / ours["ms"] if ours else None
        table.append((row["impl"], row["ms"], factor, row.get("peak_mib"), row["rel_rms"]["out"]))
    absent = "; ".join(f"{impl}: {why}" for impl, why in record["absent_peers"].items())
    columns = ("implementation", "ms", "times tpf_jit", "peak MiB", "relative RMS error against FP64")
    problem = " ".join(f"{name}={rows[0][name]}" for name in ("I", "N", "H", "D"))
    title = f"compared on {record['device']['name']}: forward, {problem}, {rows[0]['dtype']}"
    passed = ours is not None and ours["rel_rms"]["out"] <= BOUNDS["out"]
    return Part(title, columns, table, f"not measured: {absent}" if absent else "", passed)


def _compile() -> Part:
    import tpf_jit

    shapes = [TriangleAttentionShape(crop=384, head_dim=dim) for dim in HEAD_DIMS]
    kernels = tpf_jit.compile(shapes, arch="sm_90a")
    names = ("threads", "registers", "smem_bytes", "spill_bytes", "hgmma", "utmaldg", "utmastg")
    rows = [
        (kernel.shape.head_dim, dict(kernel.spec.config), *(kernel.resources.get(name) for name in names)) for kernel in kernels
    ]
    columns = ("head dim", "configuration", "threads", "registers", "shared bytes", "spilled bytes")
    columns = (*columns, "wgmma", "TMA loads", "TMA stores")
    sound = all(kernel.resources.get("spill_bytes") == 0 and kernel.resources.get("hgmma") for kernel in kernels)
    note = "registers are those a warp starts with; warps then move registers from the producer to the consumers (setmaxnreg)"
    return Part("forward kernels compiled for sm_90a", columns, rows, note, sound)


def _check_cpu(shape: TriangleAttentionShape) -> Part:
    import tpf_jit
    from tpf_jit.errors import FallbackWarning
    from tpf_jit.templates.triangle_attention import reference
    from tpf_jit.templates.triangle_attention.inputs import make_inputs

    made = make_inputs(shape, "cpu", with_grad_out=True)
    leaves = [tensor.detach().requires_grad_() for tensor in (made.q, made.k, made.v, made.bias)]
    _, reason = tpf_jit.is_supported(*leaves, made.mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        out = tpf_jit.triangle_attention(*leaves, made.mask)
    out.backward(made.grad_out)
    tensors = (made.q, made.k, made.v, made.bias, made.mask)
    expected = [reference.attention(*tensors)[0], *reference.attention_backward(made.grad_out, *tensors)]
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    rows = []
    for name, value, exact in zip(BOUNDS, found, expected, strict=True):
        error = ((value.double() - exact).norm() / exact.norm()).item()
        dtype = str(value.dtype).removeprefix("torch.")
        rows.append((name, tuple(value.shape), dtype, error, BOUNDS[name], error <= BOUNDS[name]))
    columns = ("tensor", "shape", "dtype", "relative RMS error against FP64", "bound", "within")
    title = f"the operator on random input, forward and backward: {shape.key()}"
    return Part(title, columns, rows, f"PyTorch path: {reason}", all(row[-1] for row in rows))
