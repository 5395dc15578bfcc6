"""What an implementation is to the bench and to the accuracy suite: its inputs, its protocol, its defaults.

A peer gets the same tensors as everybody else and returns the output `(B, I, H, N, D)`; whatever it does to layouts and dtypes on
the way is part of its time. `absent` says why a peer cannot run here, `unsupported` why it cannot run a problem; both end up in
the record. One that raises on a problem is left out of that problem, with what it said as the reason.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tpf_jit.errors import InvalidInput

ADDITIVE_MASKED = -1e9
"""What the models add to the scores of an excluded key."""


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

    def with_grad(self) -> Inputs:
        """The same values in leaves of their own that require gradients."""
        leaves = [leaf.detach().requires_grad_() for leaf in self.leaves()]
        return replace(self, q=leaves[0], k=leaves[1], v=leaves[2], bias=leaves[3])


class Peer(Protocol):
    """One implementation."""

    name: str
    biased: bool
    """Whether it adds the pair bias; one that cannot is a line to compare with, not an implementation of the operator."""
    timed: bool
    """Whether benches run it when no implementation is named."""
    judged: bool
    """Whether the accuracy suite runs it when no implementation is named."""

    def absent(self) -> str | None:
        """Why it cannot run in this environment; None if it can."""
        ...

    def unsupported(self, shape: Any, direction: str) -> str | None:
        """Why it cannot run this problem; None if it can."""
        ...

    def version(self) -> str | None:
        """Version of its package, None for those that are part of others."""
        ...

    def ready(self, shape: Any, inputs: Inputs, direction: str = "forward") -> dict[str, Any]:
        """Compile and load whatever the problem and pass need; returns further fields for the record's row."""
        ...

    def perturbed(self) -> AbstractContextManager[Any]:
        """Inside, calls run under conditions that must not change a bit of the results, such as little workspace."""
        ...

    def forward(self, inputs: Inputs) -> Any:
        """The output; differentiable where the inputs require gradients."""
        ...


class Plain:
    """Defaults: always there, takes every problem, nothing to prepare."""

    biased = True
    timed = True
    judged = True

    def absent(self) -> str | None:
        return None

    def unsupported(self, shape: Any, direction: str) -> str | None:
        return None

    def version(self) -> str | None:
        return None

    def ready(self, shape: Any, inputs: Inputs, direction: str = "forward") -> dict[str, Any]:
        return {}

    def perturbed(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Once:
    """The outcome of something costly, such as building an extension: its value, or what it raised, every time."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._outcome: tuple[Any, Exception | None] | None = None

    def __call__(self) -> Any:
        if self._outcome is None:
            try:
                self._outcome = (self._make(), None)
            except Exception as error:
                # Without its traceback, which would keep the tensors of the call alive.
                self._outcome = (None, error.with_traceback(None))
        value, error = self._outcome
        if error is not None:
            raise error
        return value


def differentiated(peer: Peer, inputs: Inputs) -> tuple[Any, ...]:
    """The leaves that a peer's output depends on."""
    return inputs.leaves() if peer.biased else inputs.leaves()[:3]


def chosen_of(known: Mapping[str, Peer], names: list[str] | None) -> list[Peer]:
    """The peers of those names, or all. Raises InvalidInput for an unknown name."""
    if names is None:
        return list(known.values())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidInput.of("impl", repr(unknown[0]), ", ".join(known))
    return [known[name] for name in names]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def configuration(kernel: Any) -> dict[str, Any]:
    """What a row says of a kernel of ours: its configuration, and where that came from."""
    from tpf_jit.templates.base import config_to_dict

    config = kernel.config if isinstance(kernel.config, dict) else config_to_dict(kernel.config)
    return {"config": config, "config_from": kernel.config_from}


def additive(mask: Any, dtype: Any, masked: float = ADDITIVE_MASKED) -> Any:
    """A boolean keep-mask as `masked` where it excludes; an additive one in `dtype`; None stays None."""
    import torch

    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, masked)
    return mask.to(dtype)
