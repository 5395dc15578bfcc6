"""Bench of triangle attention: every installed implementation on the same tensors, in the same run.

An implementation is timed only after its output agrees with float64 on a sample of rows (rows are independent, so a sample
of a full-size call is exact evidence about those rows). Implementations take turns in rounds of mirrored order, inputs rotate
through more than twice the L2 cache, the GPU is heated first, and the figure is the median of all samples.

Passes: ``forward`` without autograd; ``backward`` the gradients of q, k, v and bias with the graph at hand; ``both`` a forward
that keeps what the backward needs, and the backward. A peer that takes no bias is compared with float64 without it, and its
backward lacks that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpf_jit.bench.interleaved import PASSES, Problem, RoundSettings, check_passes, measure_all, relative_rms
from tpf_jit.bench.peer_base import Inputs, Peer, differentiated
from tpf_jit.bench.peers import peers
from tpf_jit.errors import InvalidInput

__all__ = ["LAYOUTS", "PASSES", "BenchSettings", "bench_attention"]

LAYOUTS = ("model", "contiguous")


@dataclass(frozen=True)
class BenchSettings(RoundSettings):
    """How to measure.

    Attributes:
        impls, rounds, samples, heat_s, seed: see `RoundSettings`.
        layout: ``model``: q, k, v as views of (B, I, N, H, D), bias as a view with the heads innermost, as projections leave
            them; ``contiguous``: every tensor contiguous as its shape says.
        check_rows: rows compared with float64.
    """

    layout: str = "contiguous"
    check_rows: int = 4


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
    check_passes(passes)
    if settings.layout not in LAYOUTS:
        raise InvalidInput.of("layout", repr(settings.layout), ", ".join(LAYOUTS))
    chosen = peers(settings.impls) if settings.impls is not None else [peer for peer in peers() if peer.timed]

    def make(*problem: Any) -> _Problem:
        return _Problem(*problem, settings)

    measured = measure_all(make, shapes, passes, chosen, device, say)
    checked = f"against float64 on {settings.check_rows} rows"
    return measured.record("bench.attention", command, settings, layout=settings.layout, checked=checked)


def problem_fields(shape: Any) -> dict[str, Any]:
    """Fields of a row that say which problem it is."""
    return {
        "B": shape.batch,
        "I": shape.rows,
        "N": shape.crop,
        "H": shape.heads,
        "D": shape.head_dim,
        "dtype": shape.dtype,
        "bias_dtype": shape.bias_dtype,
        "mask": shape.mask,
    }


class _Problem(Problem):
    """One problem and pass on one device."""

    def _fields(self) -> dict[str, Any]:
        return problem_fields(self._shape)

    def _leaves(self, peer: Peer, inputs: Inputs) -> tuple[Any, ...]:
        return differentiated(peer, inputs)

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
        return {name: relative_rms(value[:, picked], reference[name]) for name, value in found.items()}

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
