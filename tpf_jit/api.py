"""The public functions: compile, explain, is_supported, tune, warmup, and the operator itself.

Thin: every answer comes from `ops` (what a call would do), `kernels` (which kernel, compiled and loaded) and `resolve` (which
configuration, and why). Nothing here is needed for an ordinary call of the operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpf_jit import kernels
from tpf_jit.compiler import KernelSpec
from tpf_jit.errors import ColdKernelInCapture, CompileFailed, InvalidInput, NoKernel, ShapeUnsupported
from tpf_jit.explanation import Explanation, explain_kernel, explain_passes
from tpf_jit.ops import inspection, launch, multiplication_backward, multiplication_routing, routing
from tpf_jit.ops.launch import run_kernel
from tpf_jit.ops.plans import shadows
from tpf_jit.ops.settings import residual_compensation
from tpf_jit.ops.triangle_attention import triangle_attention
from tpf_jit.ops.triangle_multiplication import triangle_multiplication
from tpf_jit.pool import CompilePool
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape, is_key, is_shape, parse_key, preset
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_from_dict

__all__ = [
    "CompiledKernel", "Explanation", "compile", "explain", "is_supported", "residual_compensation", "triangle_attention",
    "triangle_multiplication", "tune", "warmup",
]  # fmt: skip

DEFAULT_ARCH = "sm_90a"


class CompiledKernel:
    """One compiled kernel: what it is, where its configuration came from, what it uses, and a call.

    Attributes:
        kernel: the underlying `kernels.Kernel`.
        spec, shape, config, config_from, note, resources, function: those of the kernel. `function` is the raw launch function
            with the calling convention of `templates.triangle_attention.layout`.
    """

    def __init__(self, kernel: kernels.Kernel) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Launch exactly this kernel, whatever the dispatcher would choose; no autograd and no PyTorch path.

        A triangle-attention forward takes `(q, k, v, bias, mask=None, scale=None)` as `triangle_attention` does, all
        five-dimensional, and returns the output like q and the natural-log LSE `(B, I, H, N)` fp32. Any crop, rows, heads and
        batch will do, unless the configuration fixes the crop; dtypes, head-dim tile and presence of a mask must be the kernel's.
        Kernels of other families take the arguments of their own calling convention.

        Raises:
            InvalidInput: the tensors do not fit together, or are not what this kernel was compiled for.
            NoKernel: the tensors are not on a device that the kernel runs on.
        """
        if self.kernel.template.family in (routing.FORWARD, routing.FORWARD_TRAINING):
            return run_kernel(self.kernel, *arguments, **options)
        return self.kernel.function(*arguments, **options)

    def __repr__(self) -> str:
        return repr(self.kernel)

    def __str__(self) -> str:
        return str(explain_kernel(self.kernel, "kernel", "compiled for this shape"))


def is_supported(
    q: Tensor | TriangleAttentionShape | TriangleMultiplicationShape,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    **others: Any,
) -> tuple[bool, str]:
    """Whether a compiled kernel takes a call (its tensors) or a shape (on the current device), and why or why not.

    The tensors of `triangle_attention` are q, k, v, bias and mask; of `triangle_multiplication` those that matter are
    `is_supported(z, mask=mask, p_in_weight=p_in_weight)`, and its other arguments may be there.

    From metadata only: nothing is compiled, and False never means an error, as `triangle_attention` takes its PyTorch path
    then; except that tensors which do not fit together give False with the message that a call would raise.

    Raises:
        InvalidInput: what was given is neither a call nor a shape.
    """
    inspection.check_kind(q, k, v, bias, mask, p_in_weight, others)
    try:
        reason, _ = inspection.inspect(q, k, v, bias, mask, p_in_weight, others, _current_device())
    except InvalidInput as error:
        return False, str(error)
    return reason is None, reason or inspection.taken(q)


def explain(
    q: Tensor | TriangleAttentionShape | TriangleMultiplicationShape,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    p_in_weight: Tensor | None = None,
    **others: Any,
) -> Explanation:
    """Which path and kernel a call (its tensors) or a shape (on the current device) gets, and why. Compiles nothing.

    Calls are named by their tensors as for `is_supported`. Shown is the kernel of inference, of a triangle multiplication's the
    contraction. The others of the forward, and those of a training step in which everything has a gradient, are named in the
    order of their launches, with where their configurations come from. Where no kernel can run here, the explanation shows those
    that the default architecture would run.

    Raises:
        InvalidInput: tensors that do not fit together, or what is neither a call nor a shape.
    """
    inspection.check_kind(q, k, v, bias, mask, p_in_weight, others)
    reason, shape = inspection.inspect(q, k, v, bias, mask, p_in_weight, others, _current_device())
    if shape is None:
        name = "q" if p_in_weight is None else "z"
        return Explanation(f"{name} {tuple(q.shape)} {q.dtype} on {q.device}", "fallback", reason)
    several = isinstance(shape, TriangleMultiplicationShape)
    in_pytorch = None if k is None else launch.repeats_in_training(*shadows(q, k, v, bias)[::3])
    try:
        family = multiplication_routing.contraction(shape.direction) if several else f"{shape.op}/forward"
        kernel = kernels.get_kernel(family, shape)
    except (NoKernel, ShapeUnsupported) as error:
        return Explanation(shape.key(), "fallback", reason or str(error))
    passes = explain_passes(shape, kernel.spec.arch, reason is None, in_pytorch, q if isinstance(q, Tensor) else None)
    return explain_kernel(kernel, "fallback" if reason else "kernel", reason or inspection.taken(q), passes)


def compile(
    problem: Any,
    arch: str | None = None,
    template: str | None = None,
    config: Any = None,
    residual: bool = False,
    workers: int | None = None,
    training: bool = False,
) -> CompiledKernel | list[CompiledKernel]:
    """Compile the kernel of a shape, or of every shape of a list or preset, with or without a GPU.

    Args:
        problem: a shape (also as its key), an iterable of shapes, a preset's name or the path of a preset file.
        arch: the target, "sm_90a"; that of the current device when left out, or "sm_90a" where it has none.
        template: use this template in place of the dispatcher's choice.
        config: a configuration of that template (or of the first that serves the shape), as its dataclass or as a dict.
        residual: the forward of training, which also writes what rounding took from its output or, of a triangle
            multiplication, its statistics.
        workers: compile processes for several kernels; one per usable CPU when left out.
        training: also what a training step runs for these shapes (see `warmup`), after the others.

    Returns:
        One `CompiledKernel` for a shape, otherwise a list in the order of the shapes; a triangle multiplication has several
        (fold, front, contraction, back with and without a residual, and centre, which makes a float32 z ready), which come as a
        list too. Nothing is loaded yet.

    Raises:
        InvalidInput: no such preset, shape or configuration.
        ShapeUnsupported: no template computes the shape.
        NoKernel: no template exists for the architecture, or the compiler is not installed.
        CompileFailed: with the compiler's log; what else was asked for is compiled and kept.
        CacheUntrusted: others may write to the object cache.
    """
    shapes, single = _shapes(problem)
    chosen = chosen_kernels(shapes, arch, template, config, residual, training)
    _build({kernel.spec for kernel in chosen}, workers)
    compiled = [CompiledKernel(kernel) for kernel in chosen]
    return compiled[0] if single and len(compiled) == 1 else compiled


def chosen_kernels(
    shapes: Iterable[Any], arch: str | None, template: str | None, config: Any, residual: bool, training: bool
) -> list[kernels.Kernel]:
    """The kernels that `compile` makes sure of for these shapes; arguments and errors are its."""
    shapes = list(shapes)
    chosen = [kernel for shape in shapes for kernel in _choose(shape, _target(arch), template, config, residual)]
    if not training:
        return chosen
    return list(dict.fromkeys([*chosen, *(kernel for shape in shapes for kernel in _of_training(shape))]))


def warmup(problem: Any, residual: bool = False, workers: int | None = None, training: bool = False) -> list[CompiledKernel]:
    """Compile, load and once launch the kernels of all shapes, so that training and graph capture meet none that is cold.

    Args:
        problem: as for `compile`; warms what calls will use for these shapes on the current device.
        residual: the forward of training in place of that of inference.
        workers: compile processes.
        training: also what a training step runs for these shapes: the forward that keeps its roundings (unless
            `residual_compensation` is off) or, of a triangle multiplication, its statistics, and the backward's kernels. A step
            whose bias is frozen has a variant of its own, which its first run compiles, as have triangle multiplications with
            projection biases.

    Returns:
        The kernels. Where the current device runs none, a FallbackWarning says why, and the list is empty.

    Raises:
        ColdKernelInCapture: a CUDA graph is being captured.
        As `compile`.
    """
    shapes, _ = _shapes(problem)
    device = _current_device()
    here = routing.hardware(device)
    if here.arch is None:
        for op in dict.fromkeys(shape.op for shape in shapes):
            routing.warn_once(here.reason, op)
        return []
    chosen = chosen_kernels(shapes, here.arch, None, None, residual, training)
    if torch.cuda.is_current_stream_capturing():
        raise ColdKernelInCapture("warmup launches kernels, and the current stream is being captured; call it before capturing")
    _build({kernel.spec for kernel in chosen if not kernel.is_loaded}, workers)
    for kernel in {kernel.spec: kernel for kernel in chosen}.values():
        _launch_once(kernel, device)
    torch.cuda.synchronize(device)
    return [CompiledKernel(kernel) for kernel in chosen]


def tune(problem: Any, direction: str | None = None, *arguments: Any, **options: Any) -> Any:
    """Measure configurations for a shape (a list or preset: for each) on this GPU and keep the evidence.

    Arguments are those of `tpf_jit.tune.tune`, but that a direction left out stands for all that inference runs; calls made
    afterwards in this process use what was found.

    Returns:
        The result of the sweep, or a list of results where there are several shapes or directions.
    """
    from tpf_jit import resolve
    from tpf_jit.tune import tune as sweep
    from tpf_jit.tune.cells import inference_cells

    shapes, single = _shapes(problem)
    results = [sweep(shape, each, *arguments, **options) for shape, each in inference_cells(shapes, direction)]
    resolve.reload()
    kernels.reload_choices()
    return results[0] if single and len(results) == 1 else results


def _current_device() -> torch.device | None:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def _shapes(problem: Any) -> tuple[list[Any], bool]:
    """The shapes of a problem, and whether it was a single one."""
    if is_shape(problem):
        return [problem], True
    if isinstance(problem, str) and is_key(problem):
        return [parse_key(problem)], True
    if isinstance(problem, (str, os.PathLike)):
        return preset(problem), False
    if isinstance(problem, Iterable) and not isinstance(problem, (Mapping, Tensor)):
        return [shape for item in problem for shape in _shapes(item)[0]], False
    raise InvalidInput.of("problem", type(problem).__name__, "a shape, its key, a preset's name, or an iterable of these")


def _target(arch: str | None) -> str:
    return arch or routing.hardware(_current_device()).arch or DEFAULT_ARCH


def _choose(shape: Any, arch: str, template: str | None, config: Any, residual: bool) -> list[kernels.Kernel]:
    """The kernels for a shape and architecture: the dispatcher's choice, or with the caller's template or configuration."""
    if template is None and isinstance(shape, TriangleMultiplicationShape):
        if config is not None:
            raise InvalidInput.of("config", config, f"none without template=: {shape.op} has several kernels")
        stats = residual and multiplication_routing.backward_unsupported(shape) is None
        wanted = *multiplication_routing.usual_variants(shape, stats), (multiplication_routing.CENTRE, ())
        return [_choose_one(shape, arch, *variant) for variant in wanted]
    if template:
        kernels.check_operation(registry.get(template), shape.op)
    family = registry.get(template).family if template else f"{shape.op}/{'forward_training' if residual else 'forward'}"
    if template and residual and family.endswith("/forward"):
        raise InvalidInput.of("template", template, f"one of {family}_training, as residual=True asks for such a kernel")
    return [_choose_one(shape, arch, family, (), template, config)]


def _choose_one(
    shape: Any, arch: str, family: str, flags: kernels.Flags, template: str | None = None, config: Any = None
) -> kernels.Kernel:
    op, _, direction = family.partition("/")
    if not registry.templates(op, direction, arch):
        known = ", ".join(sorted({other.arch for other in registry.templates(op, direction)})) or "none"
        raise NoKernel(f"no template of {family} targets {arch}; there are templates for: {known}")
    owner = registry.get(template) if template else _first_that_serves(shape, op, direction, arch)
    if config is None:
        kernel = kernels.get_kernel(template or family, shape, flags)
    else:
        if isinstance(config, Mapping):
            try:
                config = config_from_dict(owner.Config, config)
            except ValueError as error:
                raise InvalidInput.of("config", str(error), f"the fields of {owner.Config.__qualname__}") from error
        if not isinstance(config, owner.Config):
            raise InvalidInput.of("config", type(config).__name__, f"a {owner.Config.__qualname__} or a dict of its fields")
        kernel = kernels.get_kernel(owner.name, shape, (), config)
    if kernel.spec.arch != arch:
        raise NoKernel(f"{kernel.spec.template} targets {kernel.spec.arch}, not {arch}")
    return kernel


def _of_training(shape: Any) -> list[kernels.Kernel]:
    """The kernels of training steps, whatever has a gradient; none for operations other than our own, nor where the backward
    takes the PyTorch path and the forward is that of inference."""
    if isinstance(shape, TriangleMultiplicationShape):
        if multiplication_routing.backward_unsupported(shape) is not None:
            return []
        backward = multiplication_backward.all_variants(shape, partial=True)
        wanted = [*multiplication_routing.usual_variants(shape, stats=True), *backward]
        return [kernels.get_kernel(family, shape, flags) for family, flags in dict.fromkeys(wanted)]
    if not isinstance(shape, TriangleAttentionShape):
        return []
    return [kernels.get_kernel(family, shape, flags) for family, flags in launch.training_variants(shape)]


def _first_that_serves(shape: Any, op: str, direction: str, arch: str) -> Any:
    reasons = []
    for template in registry.templates(op, direction, arch):
        served, reason = template.supports(shape)
        if served:
            return template
        reasons.append(f"{template.name}: {reason}")
    raise ShapeUnsupported(f"no template computes {shape.key()}: {'; '.join(reasons)}")


def _build(specs: Iterable[KernelSpec], workers: int | None) -> None:
    """Compile what the cache lacks: one kernel in this process, several in worker processes."""
    store = kernels.default_store()
    missing = [spec for spec in specs if store.get(spec) is None]
    if len(missing) <= 1:
        for spec in missing:
            store.ensure(spec)
        return
    failures = []
    with CompilePool(workers) as pool:
        threads = ThreadPoolExecutor(pool.workers)
        try:
            jobs = [threads.submit(store.ensure, spec, lambda spec: pool.submit(spec).result()) for spec in missing]
            for job in jobs:
                error = job.exception()
                if isinstance(error, CompileFailed):
                    failures.append(error)
                elif error is not None:
                    raise error
        except BaseException:
            # Ctrl-C must not wait for what is queued; leaving the pool by an exception ends what runs.
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        threads.shutdown()
    if failures:
        raise failures[0]


# A variant's flag, and the attribute by which a workload gives a kernel what it compiles in.
_FLAG_ATTRIBUTES = (
    ("residual", "residual"), ("residual", "with_residual"), ("dbias", "dbias"), ("stats", "with_stats"), ("stats", "stats"),
    ("bias", "projection_biases"), ("norm_dtype", "norm_dtype"),
)  # fmt: skip


def _launch_once(kernel: kernels.Kernel, device: torch.device) -> None:
    """Load a kernel and launch it on a small problem, as the driver loads code lazily, at the first launch."""
    shape = kernel.shape
    if isinstance(shape, TriangleAttentionShape):
        crop = shape.crop if getattr(kernel.config, "crop", 0) else min(shape.crop, 64)
        shape = replace(shape, batch=1, rows=1, heads=1, crop=crop)
    elif isinstance(shape, TriangleMultiplicationShape):
        shape = replace(shape, batch=1, crop=min(shape.crop, 64))
    with torch.cuda.device(device):
        workload = kernel.template.workload(shape, device)
        variant = dict(kernel.spec.variant)
        for flag, attribute in _FLAG_ATTRIBUTES:
            if flag in variant and hasattr(workload, attribute):
                setattr(workload, attribute, variant[flag])
        if hasattr(workload, "configure"):
            workload.configure(kernel.config)
        workload.prepare(kernel.function, workload.make_inputs(0))()
