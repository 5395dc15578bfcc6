"""Kernel or PyTorch: the decision for a call, from metadata only, and the one seam to the kernels.

The same call takes the same path on every rank and in a checkpointed recompute, because nothing but shapes, dtypes, strides and
the device is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tpf_jit import errors, kernels
from tpf_jit.device import current_device
from tpf_jit.errors import CompileFailed, FallbackWarning, NoKernel, ShapeUnsupported
from tpf_jit.shape import BIAS_DTYPES, KERNEL_DTYPES, MAX_HEAD_DIM, TriangleAttentionShape, dtype_name
from tpf_jit.templates import registry
from tpf_jit.templates.triangle_attention.layout import bias_kernel_dtype, outer_sizes

FORWARD = "triangle_attention/forward"
FORWARD_TRAINING = "triangle_attention/forward_training"
BACKWARD_STATS = "triangle_attention/backward_stats"
BACKWARD_KEY = "triangle_attention/backward_key"
BACKWARD_QUERY = "triangle_attention/backward_query"
FRONT_WEIGHTS = "triangle_multiplication/front_weights"
BACK_WEIGHTS = "triangle_multiplication/back_weights"
FRONT_GRADIENTS = "triangle_multiplication/front_gradients"

EMPTY = "the tensors are empty"
NO_GPU = "there is no GPU here (PyTorch sees no CUDA device)"

_warned: set[str] = set()


class Hardware(NamedTuple):
    """What a device offers: its architecture where kernels exist for it (else None and why), and its number of SMs."""

    arch: str | None
    reason: str
    sms: int


class Launch(NamedTuple):
    """A loaded kernel, the grid it is launched with, for query-side backward kernels the slabs of the bias's gradient, for those
    that sum weights' gradients the parts in which they do, and how many CTAs read each tile of z."""

    function: Callable[..., None]
    num_ctas: int
    slabs: int = 1
    splits: int = 1
    readers: int = 1


def fallback_reason(q: Tensor, bias: Tensor, device: torch.device) -> str | None:
    """Why no kernel of any kind takes a call of canonical rank on a device, or None if some may (see `unsupported`)."""
    found = hardware(device)
    return unserved(q, bias) if found.arch else found.reason


def besides(reason: str | None, refused: str | None) -> str | None:
    """What stands against a call on a device, and what would on any."""
    if reason is None or refused is None or refused in (reason, EMPTY):
        return reason or refused
    return f"{reason}; besides, {refused}"


def unserved(q: Tensor, bias: Tensor) -> str | None:
    """What of `fallback_reason` does not depend on the device."""
    if q.dtype not in _KERNEL_DTYPES:
        return f"q, k and v are {dtype_name(q.dtype)}, and kernels take {' and '.join(KERNEL_DTYPES)}"
    if bias.dtype not in _BIAS_DTYPES:
        return f"the bias is {dtype_name(bias.dtype)}, and kernels take {', '.join(BIAS_DTYPES)}"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"the head dim is {q.shape[-1]}, and kernels take up to {MAX_HEAD_DIM}"
    return EMPTY if q.numel() == 0 else None


def unsupported(shape: TriangleAttentionShape, device: torch.device | None) -> str | None:
    """Why no registered forward template for a device serves the shape, or None if one does."""
    reasons, arch = [], hardware(device).arch
    for template in registry.templates(op=shape.op, direction="forward", arch=arch):
        served, reason = template.supports(shape)
        if served:
            return None
        reasons.append(f"{template.name}: {reason}")
    return "; ".join(reasons) or f"no template of {shape.op} forward is registered for {arch}"


def kernel_shape(q: Tensor, bias: Tensor, mask: Tensor | None) -> TriangleAttentionShape:
    """The problem as a kernel sees it: batch and rows folded by how the bias is shared (see `shape.fold`)."""
    batch, rows, heads, crop, dim = q.shape
    batch, rows = outer_sizes(batch, rows, bias)
    kind = "none" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
    return _shape(crop, heads, dim, rows, batch, q.dtype, bias_kernel_dtype(q.dtype, bias.dtype), kind)


@lru_cache(maxsize=4096)
def _shape(*fields) -> TriangleAttentionShape:
    return TriangleAttentionShape(*fields)


def hardware(device: torch.device | None) -> Hardware:
    """What the device of a call offers, looked up once a device; None stands for a machine without a GPU, and no tensors."""
    if device is None:
        return Hardware(None, NO_GPU, 0)
    if device.type != "cuda" or torch.version.cuda is None:
        return Hardware(None, f"the tensors are on {device.type}, and kernels run on Hopper GPUs", 0)
    return _cuda_hardware(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_hardware(index: int) -> Hardware:
    found = current_device(index)
    if found is None:
        return Hardware(None, f"the properties of CUDA device {index} cannot be read", 0)
    major, minor = found.compute_capability
    reason = f"{found.name} (compute capability {major}.{minor}) is not a Hopper GPU (9.0)"
    sms = found.sms or torch.cuda.get_device_properties(index).multi_processor_count
    return Hardware(found.arch, "" if found.arch else reason, sms)


def find_kernel(family: str, shape: TriangleAttentionShape, flags: kernels.Flags, device: torch.device) -> Launch | str:
    """The kernel of a family for a call, compiled and loaded on first use, or why there is none.

    Raises:
        ColdKernelInCapture: a CUDA graph is being captured and the kernel is not loaded; the stream is untouched.
        CacheUntrusted: the object cache could have been written by somebody else.
    """
    try:
        kernel = kernels.get_kernel(family, shape, flags)
        function = kernel.function
    except (NoKernel, CompileFailed, ShapeUnsupported) as error:
        first_line = str(error).partition("\n")[0]
        return f"no kernel could be had ({type(error).__name__}: {first_line})"
    sms = hardware(device).sms
    if family == BACKWARD_QUERY:
        return Launch(function, sms, slabs=kernel.template.slabs(shape, kernel.config, sms))
    if family in (FRONT_WEIGHTS, BACK_WEIGHTS, FRONT_GRADIENTS):
        return Launch(function, sms, splits=kernel.template.splits(shape, kernel.config, sms))
    return Launch(function, sms, readers=getattr(kernel.config, "parts", 1))


def warn_once(reason: str, what: str = "triangle_attention") -> None:
    """Give a FallbackWarning that names the reason, the first time in this process that it applies."""
    text = f"{what} takes the PyTorch path: {reason}"
    if text in _warned or reason == EMPTY:
        return
    _warned.add(text)
    errors.warn(text, FallbackWarning)


_KERNEL_DTYPES = tuple(getattr(torch, name) for name in KERNEL_DTYPES)
_BIAS_DTYPES = tuple(getattr(torch, name) for name in BIAS_DTYPES)
