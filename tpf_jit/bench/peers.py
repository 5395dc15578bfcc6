"""Who is measured: tpf_jit, stock PyTorch in three spellings, and the libraries of `other_peers` where they are installed.

What a peer is and what it may say: `peer_base`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tpf_jit.bench.other_peers import CuEquivariance, FlashAttention4, MiniWorld, OpenFold3Triton, TurboPairFormer
from tpf_jit.bench.peer_base import Inputs, Peer, Plain, additive, chosen_of, configuration

TORCH_CHUNK_BYTES = 256 * 2**20
"""Scores of one chunk in the chunked PyTorch spelling, as frameworks bound them."""
WORKSPACE = "TPF_JIT_WORKSPACE_MIB"


class TpfJit(Plain):
    """This library, called as users call it."""

    name = "tpf_jit"
    compensated = True

    def ready(self, shape: Any, inputs: Inputs, direction: str = "forward") -> dict[str, Any]:
        import tpf_jit

        supported, reason = tpf_jit.is_supported(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask)
        if not supported:
            return {"config": None, "config_from": f"pytorch path: {reason}"}
        if direction == "forward":
            return configuration(tpf_jit.compile(shape))
        facts = configuration(tpf_jit.compile(shape, residual=self.compensated))
        return {**facts, "backward": _backward_configurations(shape, self.compensated)}

    def forward(self, inputs: Inputs) -> Any:
        import tpf_jit

        return tpf_jit.triangle_attention(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, inputs.scale)

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """With the smallest workspace."""
        before = os.environ.get(WORKSPACE)
        os.environ[WORKSPACE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[WORKSPACE]
            else:
                os.environ[WORKSPACE] = before


class TpfJitUncompensated(TpfJit):
    """This library without residual compensation: what the compensation is worth."""

    name = "tpf_jit_uncompensated"
    timed = False
    compensated = False

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.mask == "additive":
            return "additive masks are always compensated"
        return "differs from tpf_jit in gradients only" if direction == "forward" else None

    def forward(self, inputs: Inputs) -> Any:
        import tpf_jit

        with tpf_jit.residual_compensation(False):
            return super().forward(inputs)


def _backward_configurations(shape: Any, compensated: bool) -> dict[str, Any]:
    """Direction -> the configuration that a backward with all gradients gets, or why it takes the PyTorch path."""
    from tpf_jit.errors import NoKernel, ShapeUnsupported
    from tpf_jit.kernels import get_kernel

    flags = {"backward_stats": {"residual": compensated}, "backward_key": {}, "backward_query": {"dbias": True}}
    try:
        return {name: configuration(get_kernel(f"{shape.op}/{name}", shape, one)) for name, one in flags.items()}
    except (NoKernel, ShapeUnsupported) as error:
        return {"pytorch path": str(error).partition("\n")[0]}


class Torch(Plain):
    """Stock PyTorch as the models write it: the whole score tensor, softmax in the operands' dtype."""

    name = "torch"

    def forward(self, inputs: Inputs) -> Any:
        return _attend(inputs.q * inputs.scale, inputs.k, inputs.v, inputs.bias, additive(inputs.mask, inputs.q.dtype))


class TorchChunked(Plain):
    """The same over a bounded number of rows at a time, recomputed in the backward, as the models do when memory is short."""

    name = "torch_chunked"
    judged = False

    def forward(self, inputs: Inputs) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        q, k, v, bias = inputs.leaves()
        mask = additive(inputs.mask, q.dtype)
        batch, rows, heads, crop, _ = q.shape
        chunk = max(1, TORCH_CHUNK_BYTES // (batch * heads * crop * crop * q.element_size()))
        parts = []
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            arguments = (q[:, part] * inputs.scale, k[:, part], v[:, part], bias, None if mask is None else mask[:, part])
            grad = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in inputs.leaves())
            parts.append(checkpoint(_attend, *arguments, use_reentrant=False) if grad else _attend(*arguments))
        return torch.cat(parts, 1)


class TorchSdpa(Plain):
    """PyTorch's fused attention with the bias as its mask, rows as its batch."""

    name = "torch_sdpa"
    judged = False

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.batch != 1 or shape.mask != "none":
            return "the mask argument would have to be expanded to (rows, heads, N, N)"
        if direction != "forward":
            return "the gradient of the mask argument would have to be expanded to (rows, heads, N, N)"
        return None

    def forward(self, inputs: Inputs) -> Any:
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v, bias = inputs.leaves()
        bias = bias[0].to(q.dtype).expand(q.shape[1], -1, -1, -1)
        return scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=bias, scale=inputs.scale).unsqueeze(0)


_PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TpfJit(),
        TpfJitUncompensated(),
        TurboPairFormer(),
        CuEquivariance(),
        OpenFold3Triton(),
        MiniWorld(),
        FlashAttention4(),
        FlashAttention4(deterministic=True),
        Torch(),
        TorchChunked(),
        TorchSdpa(),
    )
}


def register(peer: Peer) -> None:
    """Add a peer to every later bench; one of the same name is replaced."""
    _PEERS[peer.name] = peer


def peers(names: list[str] | None = None) -> list[Peer]:
    """The peers of those names, or all. Raises InvalidInput for an unknown name."""
    return chosen_of(_PEERS, names)


def _attend(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """softmax(q k^T + mask + bias) v with q already scaled."""
    import torch

    scores = torch.matmul(q, k.transpose(-1, -2))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores + bias.to(scores.dtype), -1), v)
