"""Bench of triangle attention: every installed implementation on the same tensors, in the same run.

An implementation is timed only after its output agrees with float64 on a sample of rows (rows are independent, so a sample
of a full-size call is exact evidence about those rows). Implementations take turns in rounds of mirrored order, inputs rotate
through more than twice the L2 cache, the GPU is heated first, and the figure is the median of all samples.

Passes: ``forward`` without autograd; ``backward`` the gradients of q, k, v and bias with the graph at hand; ``both`` a forward
that keeps what the backward needs, and the backward. A peer that takes no bias is compared with float64 without it, and its
backward lacks that gradient.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpf_jit.bench.environment import bench_device, record_head
from tpf_jit.bench.peer_base import Inputs, Peer, differentiated
from tpf_jit.bench.peers import peers
from tpf_jit.errors import InvalidInput, MeasurementFailed
from tpf_jit.tune import timing

PASSES = ("forward", "backward", "both")
LAYOUTS = ("model", "contiguous")
WRONG = 2e-2
"""Relative RMS error against float64 above which an implementation is left out as wrong: an order above what rounding costs."""


@dataclass(frozen=True)
class BenchSettings:
    """How to measure.

    Attributes:
        impls: names of the implementations; when None all but the ablations.
        layout: ``model``: q, k, v as views of (B, I, N, H, D), bias as a view with the heads innermost, as projections leave
            them; ``contiguous``: every tensor contiguous as its shape says.
        rounds: rounds of the interleaving, even.
        samples: samples a round.
        heat_s: seconds of load before the first sample.
        check_rows: rows compared with float64.
        seed: of the inputs.
    """

    impls: list[str] | None = None
    layout: str = "contiguous"
    rounds: int = 10
    samples: int = 20
    heat_s: float = 0.3
    check_rows: int = 4
    seed: int = 0


def bench_attention(
    shapes: Sequence[Any],
    passes: Sequence[str] = ("forward",),
    settings: BenchSettings | None = None,
    device: str | None = None,
    command: str = "",
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure every implementation on every problem and pass.

    Args:
        shapes: `TriangleAttentionShape`s.
        passes: of `PASSES`.
        settings: see `BenchSettings`.
        device: torch device; the current CUDA device when left out. ``cpu`` times with the wall clock.
        command: command line for the record.
        say: told about every finished row, for people.

    Returns:
        A record of kind ``bench.attention``.

    Raises:
        MeasurementFailed: no CUDA device, or nothing could be measured.
        InvalidInput: an unknown pass, layout or implementation.
    """
    settings = settings or BenchSettings()
    for name in passes:
        if name not in PASSES:
            raise InvalidInput.of("passes", repr(name), ", ".join(PASSES))
    if settings.layout not in LAYOUTS:
        raise InvalidInput.of("layout", repr(settings.layout), ", ".join(LAYOUTS))
    chosen = peers(settings.impls) if settings.impls is not None else [peer for peer in peers() if peer.timed]
    gpu, timer = bench_device(device)
    absent: dict[str, str] = {}
    present = []
    for peer in chosen:
        why = peer.absent()
        if why is None:
            present.append(peer)
        else:
            absent[peer.name] = why
    unmeasured: dict[str, dict[str, list[str]]] = {}
    rows = []
    for shape in shapes:
        for name in passes:
            run = _Problem(shape, name, gpu, timer, settings)
            found, failed = run.measure(present)
            rows += found
            for impl, why in failed.items():
                unmeasured.setdefault(impl, {}).setdefault(why, []).append(f"{shape.key().partition('/')[2]} {name}")
            if say is not None:
                times = ", ".join(f"{row['impl']} {row['ms']:.3f} ms" for row in found)
                say(f"{shape.key()} {name}: {times or 'nothing measured'}")
    for impl, reasons in unmeasured.items():
        absent[impl] = "; ".join(f"{why} ({', '.join(where)})" for why, where in reasons.items())
    if not rows:
        raise MeasurementFailed("nothing could be measured: " + "; ".join(f"{impl}: {why}" for impl, why in absent.items()))
    record = record_head("bench.attention", command, gpu, {peer.name: peer.version() for peer in present})
    record["method"] = {
        "timer": timer.name,
        "statistic": "median",
        "repeats": settings.rounds * settings.samples,
        "l2": "rotated inputs",
        "interleaved": True,
        "layout": settings.layout,
        "peak_mib": "above the inputs",
        "checked": f"against float64 on {settings.check_rows} rows",
    }
    return {**record, "absent_peers": absent, "rows": rows}


class _Problem:
    """One problem and pass on one device."""

    def __init__(self, shape: Any, name: str, device: Any, timer: timing.Timer, settings: BenchSettings) -> None:
        self._shape = shape
        self._pass = name
        self._device = device
        self._timer = timer
        self._settings = settings
        self._sets: list[Inputs] = []

    def measure(self, present: Sequence[Peer]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """(rows, why others have none)."""
        failed: dict[str, str] = {}
        facts: dict[str, dict[str, Any]] = {}
        first = self._inputs(0)
        self._sets = [first]
        for peer in present:
            why = peer.unsupported(self._shape, self._pass)
            if why is None:
                why, facts[peer.name] = self._admit(peer, first)
            if why is not None:
                failed[peer.name] = why
        running = [peer for peer in present if peer.name not in failed]
        copies, flush = timing.rotation(self._timer.cold_bytes, self._set_bytes(first))
        self._sets += [self._inputs(number) for number in range(1, copies)]
        samples: dict[str, list[float]] = {peer.name: [] for peer in running}
        group: dict[str, int] = {}
        for number in range(self._settings.rounds):
            for peer in running if number % 2 == 0 else reversed(running):
                if peer.name in failed:
                    continue
                launches: list[Callable[[], Any]] = []
                try:
                    launches = self._launches(peer)
                    timing.heat(self._timer, launches, self._settings.heat_s / (1 if number == 0 else 10))
                    if peer.name not in group:
                        one = timing.median(self._timer.sample(launches, 3, 1, flush))
                        group[peer.name] = timing.group_size(one, len(launches), flush)
                    samples[peer.name] += self._timer.sample(launches, self._settings.samples, group[peer.name], flush)
                except Exception as error:
                    failed[peer.name] = self._why(error)
                launches.clear()
                if peer.name in failed:
                    self._recover()
        self._sets.clear()
        rows = [self._row(peer.name, samples[peer.name], facts[peer.name]) for peer in running if peer.name not in failed]
        return rows, failed

    def _row(self, impl: str, samples: list[float], facts: dict[str, Any]) -> dict[str, Any]:
        shape = self._shape
        return {
            "op": shape.op,
            "pass": self._pass,
            "impl": impl,
            "B": shape.batch,
            "I": shape.rows,
            "N": shape.crop,
            "H": shape.heads,
            "D": shape.head_dim,
            "dtype": shape.dtype,
            "bias_dtype": shape.bias_dtype,
            "mask": shape.mask,
            "ms": round(timing.median(samples) / 1e3, 5),
            "ms_p10": round(timing.quantile(samples, 0.1) / 1e3, 5),
            "ms_p90": round(timing.quantile(samples, 0.9) / 1e3, 5),
            **facts,
        }

    def _admit(self, peer: Peer, inputs: Inputs) -> tuple[str | None, dict[str, Any]]:
        """Load, check and weigh one implementation: (why it is left out, fields of its row)."""
        try:
            facts = dict(peer.ready(self._shape, inputs, self._pass))
            errors = self._errors(peer, inputs)
            wrong = {name: value for name, value in errors.items() if not value <= WRONG}
            if wrong:
                return "wrong: " + ", ".join(f"{name} is off by {value:.2g}" for name, value in wrong.items()), {}
            facts["rel_rms"] = {name: float(f"{value:.4g}") for name, value in errors.items()}
            peak = self._peak_mib(peer, inputs)
            return None, facts if peak is None else {**facts, "peak_mib": peak}
        except Exception as error:
            why = self._why(error)
        # Only now, as the exception kept the tensors of the failed call alive.
        self._recover()
        return why, {}

    def _why(self, error: Exception) -> str:
        """The reason for a record. An implementation's failure is not the bench's, but a lost device ends it."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if not self._timer.alive():
            raise MeasurementFailed(f"the device takes no more work after {text}") from error
        return text

    def _recover(self) -> None:
        gc.collect()
        self._timer.release_memory()

    def _launches(self, peer: Peer) -> list[Callable[[], Any]]:
        if self._pass == "forward":
            return [lambda one=one: self._forward(peer, one) for one in self._sets]
        if self._pass == "both":
            return [lambda one=one: self._both(peer, one) for one in (one.with_grad() for one in self._sets)]
        import torch

        launches = []
        # Two graphs suffice: what they hold beside the inputs is larger than the cache, and for unfused peers huge.
        for one in (one.with_grad() for one in self._sets[:2]):
            out, leaves = peer.forward(one), differentiated(peer, one)
            launches.append(
                lambda one=one, out=out, leaves=leaves: torch.autograd.grad(out, leaves, one.grad, retain_graph=True)
            )
        return launches

    def _forward(self, peer: Peer, inputs: Inputs) -> Any:
        import torch

        with torch.no_grad():
            return peer.forward(inputs)

    def _both(self, peer: Peer, inputs: Inputs) -> Any:
        import torch

        return torch.autograd.grad(peer.forward(inputs), differentiated(peer, inputs), inputs.grad)

    def _peak_mib(self, peer: Peer, inputs: Inputs) -> float | None:
        import torch

        if torch.device(self._device).type != "cuda":
            return None
        gc.collect()
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = self._forward(peer, inputs) if self._pass == "forward" else self._both(peer, inputs.with_grad())
        self._timer.wait()
        del result
        return round((torch.cuda.max_memory_allocated(self._device) - before) / 2**20, 1)

    def _errors(self, peer: Peer, inputs: Inputs) -> dict[str, float]:
        """Relative RMS errors on a sample of rows, spread over all rows."""
        import torch

        rows = self._shape.rows
        picked = sorted({round(i * (rows - 1) / max(1, self._settings.check_rows - 1)) for i in range(self._settings.check_rows)})
        no_bias = inputs.bias.new_zeros(()).expand_as(inputs.bias)
        reference = _float64(inputs if peer.biased else replace(inputs, bias=no_bias), picked)
        if self._pass == "forward":
            found = {"out": self._forward(peer, inputs)}
        else:
            leaves = inputs.with_grad()
            out = peer.forward(leaves)
            found = {"out": out.detach()}
            gradients = torch.autograd.grad(out, differentiated(peer, leaves), inputs.grad)
            found |= dict(zip(("dq", "dk", "dv"), gradients[:3], strict=True))
        return {name: _relative_rms(value[:, picked], reference[name]) for name, value in found.items()}

    def _inputs(self, number: int) -> Inputs:
        import torch

        from tpf_jit.templates.triangle_attention.inputs import make_inputs

        made = make_inputs(self._shape, self._device, self._settings.seed + number, with_grad_out=True)
        tensors = [made.q, made.k, made.v, made.grad_out]
        bias = made.bias
        if self._settings.layout == "contiguous":
            tensors = [tensor.contiguous() for tensor in tensors]
        else:
            bias = bias.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        q, k, v, grad = (tensor.detach() for tensor in tensors)
        return Inputs(q, k, v, bias, made.mask, grad, torch.tensor(self._shape.head_dim).double().rsqrt().item())

    def _set_bytes(self, inputs: Inputs) -> int:
        tensors = inputs.leaves() if self._pass == "forward" else (*inputs.leaves(), inputs.grad)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _float64(inputs: Inputs, rows: list[int]) -> dict[str, Any]:
    """out, dq, dk, dv of the given rows in float64."""
    from tpf_jit.templates.triangle_attention import reference

    q, k, v, grad = (tensor[:, rows] for tensor in (inputs.q, inputs.k, inputs.v, inputs.grad))
    mask = None if inputs.mask is None else inputs.mask[:, rows]
    out, _ = reference.attention(q, k, v, inputs.bias, mask, inputs.scale)
    dq, dk, dv, _ = reference.attention_backward(grad, q, k, v, inputs.bias, mask, inputs.scale)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def _relative_rms(value: Any, reference: Any) -> float:
    difference = float((value.double() - reference).norm())
    norm = float(reference.norm())
    found = difference / norm if norm else (0.0 if difference == 0 else float("inf"))
    return found if found == found else float("inf")
