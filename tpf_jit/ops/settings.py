"""What a process may choose about training: whether roundings are compensated, and how much memory the backward may take."""

from __future__ import annotations

import os

from tpf_jit.errors import InvalidInput
from tpf_jit.ops.checks import check_switches

WORKSPACE_VARIABLE = "TPF_JIT_WORKSPACE_MIB"
WORKSPACE_MIB = 256

compensate = True
"""Read when a forward runs (torch.compile guards on it); set by `residual_compensation`."""


class residual_compensation:  # noqa: N801 - reads like torch.no_grad
    """Choose whether training keeps what rounding took from the output, so that the backward can do without that error.

    On by default. It costs a second tensor of the output's size between forward and backward; without it the gradients of q, k
    and the bias are somewhat less exact. Acts at once and for the whole process; as a context manager until its end:

        tpf_jit.residual_compensation(False)
        with tpf_jit.residual_compensation(False): ...

    What counts is the setting during the forward. Calls with an additive mask are always compensated: where such a mask swallows
    the logits, as -1e9 does, probabilities cannot be rebuilt from a rounded LSE.
    """

    def __init__(self, enabled: bool) -> None:
        global compensate
        check_switches(enabled=enabled)
        self._before = compensate
        compensate = enabled

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        global compensate
        compensate = self._before


def compensates(additive_mask: bool) -> bool:
    """Whether a call in training is compensated as things stand."""
    return compensate or additive_mask


def check_workspace(workspace_mib: object) -> int | None:
    """A budget as `triangle_attention` takes it.

    Raises:
        InvalidInput: for anything but a positive integer or None.
    """
    if workspace_mib is None:
        return None
    if isinstance(workspace_mib, bool) or not isinstance(workspace_mib, int) or workspace_mib < 1:
        raise InvalidInput.of("workspace_mib", repr(workspace_mib), "a positive integer, or None for the environment's or 256")
    return workspace_mib


def workspace_bytes(workspace_mib: int | None) -> int:
    """The budget of the bias gradient's buffer in bytes: the caller's, else the environment's, else 256 MiB.

    Raises:
        InvalidInput: the environment variable holds no positive integer.
    """
    if workspace_mib is None:
        text = os.environ.get(WORKSPACE_VARIABLE, "")
        if text.strip():
            if not text.strip().isdecimal() or int(text) < 1:
                raise InvalidInput.of(WORKSPACE_VARIABLE, repr(text), "a positive number of MiB")
            workspace_mib = int(text)
    return (workspace_mib or WORKSPACE_MIB) * 2**20
