"""Every exception and warning that tpf_jit raises on purpose, and how warnings find the line that they are about.

All of them derive from `TpfError`, so `except tpf_jit.errors.TpfError` catches exactly what the library means to say; each also
derives from the built-in class that callers would expect (`ValueError` for a wrong argument, `RuntimeError` for the rest).
Every one is built from one message, so instances survive pickling between worker processes.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType


class TpfError(Exception):
    """Base of every error that tpf_jit raises on purpose."""


class InvalidInput(TpfError, ValueError):
    """An argument is wrong: the message names the argument, what came, and what is allowed."""

    @classmethod
    def of(cls, argument: str, got: object, allowed: str) -> InvalidInput:
        """Build the error in the project's one wording.

        Args:
            argument: name of the argument as the caller knows it.
            got: what was passed, described in words (a shape, a dtype, a value).
            allowed: what would have been accepted.
        """
        return cls(f"{argument}: got {got}; allowed: {allowed}")


class ShapeUnsupported(TpfError, ValueError):
    """No template serves this shape (ordinary calls take the PyTorch path instead; explicit compiles raise this)."""


class NoKernel(TpfError, RuntimeError):
    """There is no kernel for this template and architecture, or it cannot be built here."""


class CompileFailed(TpfError, RuntimeError):
    """A kernel did not compile; the message carries the compiler's log."""


class ColdKernelInCapture(TpfError, RuntimeError):
    """A CUDA graph is being captured and the kernel is not loaded yet; raised before the stream is touched.

    The remedy is to call `tpf_jit.warmup(...)` with the shape, or to run one call of it, before capturing.
    """


class CacheUntrusted(TpfError, RuntimeError):
    """The object cache belongs to, or can be written by, somebody else: loading from it would run their code."""


class DatabaseError(TpfError, RuntimeError):
    """The tuning database is damaged, locked for too long, or of an unknown version."""


class MeasurementFailed(TpfError, RuntimeError):
    """A timing could not be taken, or was too unsteady to be used."""


class RanksDisagree(TpfError, RuntimeError):
    """The ranks of a distributed job would not run the same kernels; the message names the ranks and what differs."""


class NotDifferentiable(TpfError, RuntimeError):
    """A second derivative was asked for; the gradients of our operators have no gradients of their own."""


class FallbackWarning(UserWarning):
    """A call took the PyTorch path; given once a process for each distinct reason."""


class CacheWarning(UserWarning):
    """The object cache cannot be used as asked (read-only, full disk), so kernels stay in memory."""


_PASSED_OVER = ("tpf_jit", "torch", "typer", "click", "importlib", "functools", "contextlib", "")
"""Modules whose lines are not the user's: ours, and what stands between and calls us. Generated code has no module's name."""


def warn(message: str, category: type[Warning]) -> None:
    """Give a warning that shows the line of the user's that led here, not one of ours."""
    warnings.warn(message, category, stacklevel=user_level())


def user_level() -> int:
    """The `stacklevel`, for a call of `warnings.warn` or of a logger in the function that asks, of the nearest line that is the
    user's; the outermost where there is none, as in a thread of autograd's. (From Python 3.12 `skip_file_prefixes` does that for
    warnings.)"""
    frame: FrameType = sys._getframe(1)
    level = 1
    while frame.f_back is not None and _is_passed_over(frame):
        frame = frame.f_back
        # Those of an import are not counted by whoever takes the level.
        level += not _module(frame).startswith("importlib._bootstrap")
    return level


def _is_passed_over(frame: FrameType) -> bool:
    return _module(frame).partition(".")[0] in _PASSED_OVER


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
