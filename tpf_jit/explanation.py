"""What a call does, and why: the answer of `tpf_jit.explain`, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from tpf_jit import kernels
from tpf_jit.errors import CacheUntrusted, NoKernel, ShapeUnsupported
from tpf_jit.ops import launch, multiplication_backward, multiplication_routing
from tpf_jit.resolve import default_dispatcher
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape
from tpf_jit.templates.base import config_to_dict


@dataclass(frozen=True)
class Explanation:
    """What a call of a shape does, and why. `str()` is for people, `to_dict()` for programs."""

    shape: str
    """Key of the problem as the kernel sees it, or a description of the tensors where no kernel could take them."""
    path: str
    """"kernel" or "fallback" (the PyTorch path)."""
    reason: str
    """Why that path."""
    template: str | None = None
    arch: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_from: str | None = None
    """"tuned", "nearest", "sibling", "default" or "explicit"."""
    note: str = ""
    search: tuple[str, ...] = ()
    """The steps by which the configuration was found, and their outcomes."""
    record: str | None = None
    """The tuning trial behind the configuration."""
    measured_us: float | None = None
    """What that trial measured, in us, for its own problem on its own device."""
    state: str | None = None
    """"loaded", "cached", "not compiled", or why it cannot be had."""
    resources: dict[str, Any] = field(default_factory=dict)
    """Of the compiled kernel, or what arithmetic says before it is compiled."""
    forward: str | None = None
    """Of a triangle multiplication: the templates of the forward's kernels, in the order of their launches, each with where its
    configuration comes from (as `config_from`)."""
    training: str | None = None
    """Of triangle attention: the same of its forward in training, which is a kernel of its own."""
    backward: str | None = None
    """The same of the backward in which everything has a gradient, or "PyTorch: " and why."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-friendly values."""
        return {**vars(self), "config": dict(self.config), "search": list(self.search), "resources": dict(self.resources)}

    def __str__(self) -> str:
        taken = "compiled kernel" if self.path == "kernel" else "PyTorch"
        lines = [self.shape, f"  path       {taken}: {self.reason}"]
        if self.template is not None:
            would = "" if self.path == "kernel" else f" (what a device of {self.arch} would run)"
            measured = "" if self.measured_us is None else f", {self.measured_us:.1f} us"
            lines += [
                f"  kernel     {self.template}, {self.arch}{would}",
                "  config     " + ", ".join(f"{name}={value}" for name, value in self.config.items()),
                "  chosen     " + (self.note or "given by the caller"),
                *(f"  searched   {step}" for step in self.search),
                f"  record     {self.record or 'none'}{measured}",
                f"  object     {self.state}",
                "  resources  " + (", ".join(f"{name}={value}" for name, value in _shown(self.resources)) or "unknown"),
            ]
        for name in ("forward", "training", "backward"):
            kernels_of = getattr(self, name)
            if kernels_of is not None:
                # Six full names would fill several lines; all begin with that of the operation.
                short = kernels_of.replace(f"{self.shape.partition('/')[0]}_", "")
                lines.append(f"  {name:10} {short}")
        return "\n".join(lines)


class Passes(NamedTuple):
    """The kernels that a problem takes beside the one that is explained, as `Explanation` has them."""

    forward: str | None = None
    training: str | None = None
    backward: str | None = None


def explain_passes(shape: Any, arch: str, here: bool, in_pytorch: str | None = None, z: Tensor | None = None) -> Passes:
    """The kernels of the forward and of the backward of a call without residual, on this device or on one of the architecture.

    Args:
        shape: a problem of one of our operations; of others nothing is known.
        here: whether this device runs kernels.
        in_pytorch: why the backward is PyTorch's whatever kernels there are, None if nothing says so.
        z: of a triangle multiplication that is a call; a float32 one is made ready first, and again for the backward.
    """

    def named(variants: Iterable[tuple[str, kernels.Flags]]) -> str:
        try:
            found = [kernels.get_kernel(family, shape, flags) for family, flags in variants]
        except (NoKernel, ShapeUnsupported) as error:
            return f"PyTorch: {error}"
        names = ", ".join(dict.fromkeys(f"{kernel.spec.template} ({_chosen(kernel)})" for kernel in found))
        return names if here else f"{names} (what a device of {arch} would run)"

    if isinstance(shape, TriangleAttentionShape):
        forward, *backward = launch.training_variants(shape)
        return Passes(None, named([forward]), named(backward) if in_pytorch is None else f"PyTorch: {in_pytorch}")
    if not isinstance(shape, TriangleMultiplicationShape):
        return Passes()
    reason = in_pytorch or multiplication_routing.backward_unsupported(shape)
    first = () if z is None else multiplication_routing.centre_variants(z)
    backward = named((*first, *multiplication_backward.all_variants(shape))) if reason is None else f"PyTorch: {reason}"
    forward = named((*first, *multiplication_routing.usual_variants(shape)[:-1]))  # the last has a residual
    return Passes(forward, None, backward)


def _chosen(kernel: kernels.Kernel) -> str:
    """Where a configuration comes from, as `config_from`; or that there is but one."""
    single = kernel.config_from == "default" and len(kernel.template.space(kernel.shape)) == 1
    return "the only one" if single else kernel.config_from


def explain_kernel(kernel: kernels.Kernel, path: str, reason: str, passes: Passes | None = None) -> Explanation:
    """All about one kernel, for a call that takes `path` for `reason`, and the other kernels of both passes. Compiles nothing."""
    template = kernel.template
    found = None
    if kernel.config_from != "explicit":
        found = default_dispatcher().resolve(template.op, template.direction, kernel.shape)
    state, resources = _object_state(kernel)
    return Explanation(
        shape=kernel.shape.key(),
        path=path,
        reason=reason,
        template=template.name,
        arch=template.arch,
        config=config_to_dict(kernel.config),
        config_from=kernel.config_from,
        note=kernel.note,
        search=() if found is None else found.chain,
        record=None if found is None else found.trial_id,
        measured_us=None if found is None else found.us,
        state=state,
        resources=resources or vars(template.resources(kernel.shape, kernel.config)),
        **({} if passes is None else passes._asdict()),
    )


def _object_state(kernel: kernels.Kernel) -> tuple[str, dict[str, Any]]:
    """Where the compiled object is, and the resources recorded for it."""
    store = kernels.default_store()
    try:
        if kernel.is_loaded:
            return "loaded", store.resources(kernel.spec)
        if store.get(kernel.spec) is not None:
            return "cached", store.resources(kernel.spec)
    except (CacheUntrusted, NoKernel) as error:
        return f"cannot be had: {error}", {}
    return "not compiled", {}


def _shown(resources: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in resources.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
