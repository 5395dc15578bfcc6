"""tpf_jit: kernels for AlphaFold3-style triangle attention, compiled just in time and tuned for the GPU at hand.

The names below load on first use (PEP 562), so ``import tpf_jit`` costs next to nothing and pulls in neither torch
nor the compiler:

    compile(shape)              a compiled kernel: configuration, where it came from, resources, and a call
    triangle_attention(...)     the operator, with autograd, masks and a PyTorch path for everything else
    triangle_multiplication(...)    the triangle multiplicative update, likewise
    is_supported(...)           (bool, reason): would this call take the kernel?
    explain(...)                which kernel a shape gets, and why
    tune(shape, ...)            measure configurations on this GPU and keep the evidence
    warmup(shapes)              load everything before training or a CUDA graph capture
    residual_compensation(on)   whether training keeps what rounding took from the output
    distributed.freeze(...)     all ranks of a job use rank 0's tuning
    TriangleAttentionShape, TriangleMultiplicationShape     one problem; ``preset(name)`` gives those of a model
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import _checkout

__version__ = "0.1.0"

_EXPORTS = {
    "TriangleAttentionShape": "shape",
    "TriangleMultiplicationShape": "shape",
    "compile": "api",
    "explain": "api",
    "is_supported": "api",
    "preset": "shape",
    "residual_compensation": "api",
    "triangle_attention": "api",
    "triangle_multiplication": "api",
    "tune": "api",
    "warmup": "api",
}

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from .api import (
        compile,
        explain,
        is_supported,
        residual_compensation,
        triangle_attention,
        triangle_multiplication,
        tune,
        warmup,
    )
    from .shape import TriangleAttentionShape, TriangleMultiplicationShape, preset

_checkout.install()

if os.environ.get("TPF_JIT_LOG"):
    import_module("._logging", __name__).configure(os.environ["TPF_JIT_LOG"])


def __getattr__(name: str):
    if name == "distributed":
        return import_module(".distributed", __name__)
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


class _TunePackage(ModuleType):
    """``tpf_jit.tune`` names a function and a subpackage; once the latter is imported, it answers to a call as well."""

    def __call__(self, *args, **kwargs):
        return import_module(".api", __name__).tune(*args, **kwargs)


class _Package(ModuleType):
    def __setattr__(self, name: str, value) -> None:
        if name == "tune" and isinstance(value, ModuleType):
            value.__class__ = _TunePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
