"""The libraries that tpf_jit is measured beside. None is a dependency; each is used where it can be imported.

    cuequivariance      pip install cuequivariance-torch cuequivariance-ops-torch-cu13 (or -cu12)
    openfold3_triton    OpenFold3's Triton kernel. Only the one source file is loaded, so an unpacked wheel on the search path
                        does: pip download openfold3==0.5.0 --no-deps, unzip it into a folder, put that folder on PYTHONPATH
    turbopairformer     its wheel holds binaries for Python 3.14 and PyTorch 2.10, and the CUDA sources. Installed there it is
                        used as it is. Anywhere else unpack the wheel (pip download turbopairformer --no-deps --only-binary=:all:
                        --python-version 3.14) on the search path: its own development build then compiles the sources on first
                        use, which takes nvcc, ninja and some minutes (torch.utils.cpp_extension keeps the result)
    miniworld           miniworld-engine's sm_90a core (head dim 32, whole 128-key tiles, no mask), which compiles on first use;
                        its source archive unpacked does too, with the folder src on the search path
    fa4_nobias          FlashAttention-4 (flash-attn-4), forward and backward without bias and so without its gradient: no
                        implementation of the operator, but the speed that a good kernel reaches without it

Masks reach each library in its own convention; a dense one is built inside the call where the library has no other.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tpf_jit.bench.peer_base import Inputs, Once, Plain, additive, installed_version
from tpf_jit.errors import MeasurementFailed, ShapeUnsupported


class CuEquivariance(Plain):
    """NVIDIA's cuequivariance_torch.triangle_attention."""

    name = "cuequivariance"

    def absent(self) -> str | None:
        absent = missing("cuequivariance_torch", "cuequivariance_ops_torch")
        return absent or broken("cuequivariance_torch", "triangle_attention")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        return "takes boolean masks only" if shape.mask == "additive" else None

    def version(self) -> str | None:
        return installed_version("cuequivariance-torch")

    def forward(self, inputs: Inputs) -> Any:
        from cuequivariance_torch import triangle_attention

        return triangle_attention(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, inputs.scale)


class OpenFold3Triton(Plain):
    """openfold3.core.kernels.triton.evoformer.TritonEvoformer: projection layout in and out, additive mask always there."""

    name = "openfold3_triton"

    def __init__(self) -> None:
        self._kernel = Once(_load_evoformer)

    def absent(self) -> str | None:
        absent = missing("openfold3", "triton")
        if absent:
            return absent
        try:
            self._kernel()
        except Exception as error:
            return f"openfold3's Triton kernel cannot be loaded: {type(error).__name__}: {error}"
        return None

    def version(self) -> str | None:
        return installed_version("openfold3")

    def forward(self, inputs: Inputs) -> Any:
        q, k, v = (x.transpose(2, 3) for x in (inputs.q, inputs.k, inputs.v))
        batch, rows, heads, crop, _ = inputs.q.shape
        mask = additive(inputs.mask, inputs.q.dtype)
        if mask is None:
            mask = inputs.q.new_zeros(batch, rows, 1, 1, crop)
        bias = inputs.bias.expand(batch, 1, heads, crop, crop)
        # Trailing arguments: has_pair_bias, dynamic (one compile for all lengths), softmax_scale.
        return self._kernel()(q, k, v, mask, bias, True, False, inputs.scale).transpose(2, 3)


class TurboPairFormer(Plain):
    """turbopairformer.turbo_attention: bf16, head dim up to 64, additive mask, scale D ** -0.5; returns (B, I, N, H, D)."""

    name = "turbopairformer"
    LOADERS = ("triangle_forward", "triangle_delta", "triangle_dkdv", "triangle_dq_dbias")
    """Its modules that each load one extension, by a function `load_extension`."""
    BUILD = "TURBOPAIRFORMER_ALLOW_JIT"
    """Its own switch for compiling the sources that the wheel holds."""

    def __init__(self) -> None:
        self._load = Once(self._load_extensions)

    def absent(self) -> str | None:
        return missing("turbopairformer") or broken("turbopairformer", "turbo_attention")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.dtype != "bfloat16":
            return "takes bf16 only"
        return "takes head dims up to 64" if shape.head_dim > 64 else None

    def version(self) -> str | None:
        return installed_version("turbopairformer")

    def ready(self, shape: Any, inputs: Inputs, direction: str = "forward") -> dict[str, Any]:
        return {"binaries": self._load()}

    def forward(self, inputs: Inputs) -> Any:
        import torch
        from turbopairformer import turbo_attention

        if not math.isclose(inputs.scale, inputs.q.shape[-1] ** -0.5):
            raise ShapeUnsupported(f"turbopairformer's scale is D ** -0.5, not {inputs.scale}")
        mask = additive(inputs.mask, torch.float32, -math.inf)
        return turbo_attention(inputs.q, inputs.k, inputs.v, mask, inputs.bias).transpose(2, 3)

    def _load_extensions(self) -> str:
        """Load its four extensions: "wheel" for those of the wheel, "built here" for its development build."""
        load = [importlib.import_module(f"turbopairformer.{name}").load_extension for name in self.LOADERS]
        if os.environ.get(self.BUILD) is None:
            try:
                for one in load:
                    one()
                return "wheel"
            except Exception:  # an ABI that is not the wheel's; the build says what else is wrong
                os.environ[self.BUILD] = "1"
        # Each in a process of its own: the package builds one after another, and nvcc takes minutes for some.
        script = "import importlib, sys; importlib.import_module('turbopairformer.' + sys.argv[1]).load_extension()"
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        builds = [
            subprocess.Popen([sys.executable, "-c", script, name], env=environment, **options) for name in self.LOADERS
        ]
        outputs = [build.communicate()[0] for build in builds]
        for name, build, output in zip(self.LOADERS, builds, outputs, strict=True):
            if build.returncode != 0:
                last = (output.strip().splitlines() or ["no message"])[-1]
                raise MeasurementFailed(f"turbopairformer's {name} cannot be built: {last[:200]}")
        for one in load:
            one()
        return "built here"


class MiniWorld(Plain):
    """miniworld-engine's sm_90a attention core with its three backward kernels, tied together for autograd here."""

    name = "miniworld"
    HEAD_DIM, TILE = 32, 128

    def __init__(self) -> None:
        self._function = Once(_miniworld_function)

    def absent(self) -> str | None:
        return missing("miniworld_engine") or broken("miniworld_engine.kernels.triangle_attention.cuda.h100_sm90", "bwd_q")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.dtype != "bfloat16" or shape.head_dim != self.HEAD_DIM or shape.crop % self.TILE:
            return f"takes bf16, head dim {self.HEAD_DIM} and crops of whole tiles of {self.TILE} only"
        return "its core takes no mask per row" if shape.has_mask else None

    def version(self) -> str | None:
        return installed_version("miniworld-engine")

    def forward(self, inputs: Inputs) -> Any:
        return self._function().apply(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.scale)


class FlashAttention4(Plain):
    """flash_attn.cute.flash_attn_func without the bias, rows as its batch; its default backward or the deterministic one."""

    biased = False
    judged = False

    def __init__(self, deterministic: bool = False) -> None:
        self.name = "fa4_nobias_deterministic" if deterministic else "fa4_nobias"
        self._deterministic = deterministic

    def absent(self) -> str | None:
        return missing("flash_attn.cute") or broken("flash_attn.cute", "flash_attn_func")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.has_mask:
            return "takes no mask per row"
        return "its forward is the same" if self._deterministic and direction == "forward" else None

    def version(self) -> str | None:
        return installed_version("flash-attn-4")

    def forward(self, inputs: Inputs) -> Any:
        from flash_attn.cute import flash_attn_func

        q, k, v = (x.transpose(2, 3).flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        out, _ = flash_attn_func(q, k, v, softmax_scale=inputs.scale, deterministic=self._deterministic)
        return out.unflatten(0, inputs.q.shape[:2]).transpose(2, 3)


def missing(*modules: str) -> str | None:
    """Which module is not installed; None if all are."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # no parent package
            found = None
        except Exception as error:  # whatever the import of the parent does on this machine
            return f"{module} cannot be looked up: {type(error).__name__}: {error}".splitlines()[0][:300]
        if found is None:
            return f"{module} is not installed"
    return None


def broken(module: str, attribute: str) -> str | None:
    """Why a name cannot be imported, whatever its import does on this machine; None if it can."""
    try:
        getattr(importlib.import_module(module), attribute)
    except Exception as error:
        return f"{module} cannot be imported: {type(error).__name__}: {error}".splitlines()[0][:300]
    return None


def _load_evoformer() -> Callable[..., Any]:
    """The kernel's entry point from its one source file: the package around it imports what a bench does not need."""
    folders = importlib.util.find_spec("openfold3").submodule_search_locations
    path = os.path.join(list(folders)[0], "core", "kernels", "triton", "evoformer.py")
    name = "_tpf_jit_bench_openfold3_evoformer"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Triton looks the kernels' globals up in the module they came from.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    if module.TritonEvoformer is None:
        raise ImportError("Triton is not available to it")
    return module.TritonEvoformer


def _miniworld_function() -> Any:
    """An autograd function over (q, k, v, bias, scale) that runs miniworld-engine's kernels."""
    import torch
    from miniworld_engine.kernels.triangle_attention.cuda import h100_sm90 as core

    forward_kernels, backward_kernels = core._core(), core._bwd()

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, bias, scale):
            batch, _, heads, crop, _ = q.shape
            q, k, v = (x.transpose(2, 3).contiguous() for x in (q, k, v))
            bias_dtype, bias_shape = bias.dtype, bias.shape
            scaled = core.scaled_bias(bias.expand(batch, 1, heads, crop, crop).squeeze(1), scale)
            out, lse = forward_kernels.triattn_fwd(q, k, v, scaled, scale, any(ctx.needs_input_grad))[:2]
            out = out.view(q.shape)
            ctx.save_for_backward(q, k, v, scaled, out, lse)
            ctx.scale, ctx.bias_dtype, ctx.bias_shape = scale, bias_dtype, bias_shape
            return out.transpose(2, 3)

        @staticmethod
        def backward(ctx, grad):
            q, k, v, scaled, out, lse = ctx.saved_tensors
            grad = grad.transpose(2, 3).contiguous()
            delta = backward_kernels.triattn_delta(grad, out)
            dk, dv = backward_kernels.triattn_bwd_kv(q, k, v, scaled, grad, lse, delta, ctx.scale)
            dbias = torch.zeros(scaled.shape, dtype=torch.float32, device=q.device)
            dq = core.bwd_q(backward_kernels, q, k, v, scaled, grad, lse, delta, ctx.scale, dbias)
            dbias = dbias.unsqueeze(1).sum_to_size(ctx.bias_shape).to(ctx.bias_dtype)
            return dq.transpose(2, 3), dk.transpose(2, 3), dv.transpose(2, 3), dbias, None

    return Function
