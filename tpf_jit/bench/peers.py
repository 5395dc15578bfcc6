"""Who is measured: tpf_jit, stock PyTorch in three spellings, and cuEquivariance where it is installed.

A peer gets the same tensors as everybody else and returns the output `(B, I, H, N, D)`; whatever it does to layouts and dtypes on
the way is part of its time. `absent` says why a peer cannot run here, `unsupported` why it cannot run a problem; both end up in
the record.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

ADDITIVE_MASKED = -1e9
"""What the models add to the scores of an excluded key."""
TORCH_CHUNK_BYTES = 256 * 2**20
"""Scores of one chunk in the chunked PyTorch spelling, as frameworks bound them."""


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call: q, k, v, grad `(B, I, H, N, D)`, bias `(B, 1, H, N, N)`, mask `(B, I, 1, 1, N)` or None."""

    q: Any
    k: Any
    v: Any
    bias: Any
    mask: Any
    grad: Any
    scale: float

    def leaves(self) -> tuple[Any, Any, Any, Any]:
        """The tensors whose gradients are taken."""
        return self.q, self.k, self.v, self.bias


class Peer(Protocol):
    """One implementation."""

    name: str

    def absent(self) -> str | None:
        """Why it cannot run in this environment; None if it can."""
        ...

    def unsupported(self, shape: Any, direction: str) -> str | None:
        """Why it cannot run this problem; None if it can."""
        ...

    def version(self) -> str | None:
        """Version of its package, None for those that are part of others."""
        ...

    def ready(self, shape: Any, inputs: Inputs) -> dict[str, Any]:
        """Compile and load whatever the problem needs; returns further fields for the record's row."""
        ...

    def forward(self, inputs: Inputs) -> Any:
        """The output; differentiable where the inputs require gradients."""
        ...


class _Plain:
    """Defaults: always there, takes every problem, nothing to prepare."""

    def absent(self) -> str | None:
        return None

    def unsupported(self, shape: Any, direction: str) -> str | None:
        return None

    def version(self) -> str | None:
        return None

    def ready(self, shape: Any, inputs: Inputs) -> dict[str, Any]:
        return {}


class TpfJit(_Plain):
    """This library, called as users call it."""

    name = "tpf_jit"

    def ready(self, shape: Any, inputs: Inputs) -> dict[str, Any]:
        import tpf_jit
        from tpf_jit.templates.base import config_to_dict

        supported, reason = tpf_jit.is_supported(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask)
        if not supported:
            return {"config": None, "config_from": f"pytorch path: {reason}"}
        kernel = tpf_jit.compile(shape)
        config = kernel.config if isinstance(kernel.config, dict) else config_to_dict(kernel.config)
        return {"config": config, "config_from": kernel.config_from}

    def forward(self, inputs: Inputs) -> Any:
        import tpf_jit

        return tpf_jit.triangle_attention(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, inputs.scale)


class Torch(_Plain):
    """Stock PyTorch as the models write it: the whole score tensor, softmax in the operands' dtype."""

    name = "torch"

    def forward(self, inputs: Inputs) -> Any:
        return _attend(inputs.q * inputs.scale, inputs.k, inputs.v, inputs.bias, _additive(inputs.mask, inputs.q.dtype))


class TorchChunked(_Plain):
    """The same over a bounded number of rows at a time, recomputed in the backward, as the models do when memory is short."""

    name = "torch_chunked"

    def forward(self, inputs: Inputs) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        q, k, v, bias = inputs.leaves()
        mask = _additive(inputs.mask, q.dtype)
        batch, rows, heads, crop, _ = q.shape
        chunk = max(1, TORCH_CHUNK_BYTES // (batch * heads * crop * crop * q.element_size()))
        parts = []
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            arguments = (q[:, part] * inputs.scale, k[:, part], v[:, part], bias, None if mask is None else mask[:, part])
            grad = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in inputs.leaves())
            parts.append(checkpoint(_attend, *arguments, use_reentrant=False) if grad else _attend(*arguments))
        return torch.cat(parts, 1)


class TorchSdpa(_Plain):
    """PyTorch's fused attention with the bias as its mask, rows as its batch."""

    name = "torch_sdpa"

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


class CuEquivariance(_Plain):
    """NVIDIA's cuequivariance_torch.triangle_attention."""

    name = "cuequivariance"

    def absent(self) -> str | None:
        for module in ("cuequivariance_torch", "cuequivariance_ops_torch"):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        try:
            from cuequivariance_torch import triangle_attention  # noqa: F401
        except Exception as error:  # whatever its import does on this machine
            return f"cuequivariance_torch cannot be imported: {type(error).__name__}: {error}"
        return None

    def unsupported(self, shape: Any, direction: str) -> str | None:
        return "takes boolean masks only" if shape.mask == "additive" else None

    def version(self) -> str | None:
        return installed_version("cuequivariance-torch")

    def forward(self, inputs: Inputs) -> Any:
        from cuequivariance_torch import triangle_attention

        return triangle_attention(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, inputs.scale)


_PEERS: dict[str, Peer] = {peer.name: peer for peer in (TpfJit(), CuEquivariance(), Torch(), TorchChunked(), TorchSdpa())}


def register(peer: Peer) -> None:
    """Add a peer to every later bench; one of the same name is replaced."""
    _PEERS[peer.name] = peer


def peers(names: list[str] | None = None) -> list[Peer]:
    """The peers of those names, or all. Raises InvalidInput for an unknown name."""
    from tpf_jit.errors import InvalidInput

    if names is None:
        return list(_PEERS.values())
    unknown = [name for name in names if name not in _PEERS]
    if unknown:
        raise InvalidInput.of("impl", repr(unknown[0]), ", ".join(_PEERS))
    return [_PEERS[name] for name in names]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _attend(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    """softmax(q k^T + mask + bias) v with q already scaled."""
    import torch

    scores = torch.matmul(q, k.transpose(-1, -2))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores + bias.to(scores.dtype), -1), v)


def _additive(mask: Any, dtype: Any) -> Any:
    """A boolean keep-mask as the models add it; an additive one in the scores' dtype."""
    import torch

    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, ADDITIVE_MASKED)
    return mask.to(dtype)
