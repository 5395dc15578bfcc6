"""Who is measured at the triangle multiplicative update, on the same tensors; what a peer is says `peer_base`.

    tpf_jit              this library
    torch                stock PyTorch in the dtype of z, step by step as OpenFold's module does it
    torch_compile        the same through torch.compile, compiled anew for every problem
    cuequivariance       cuequivariance_torch.triangle_multiplicative_update, with the weights as they are
    cuequivariance_bf16  the same with the weights converted to z's dtype inside the call, for which it has faster routes
    turbopairformer      turbopairformer.turbo_trimul: bf16 z, float32 weights, C = D up to 128, N > 100
    miniworld_residual   miniworld-engine's TriangleMultiplication, which computes z + update: that is what it is compared with.
                         Only what its CUDA path serves, and without a mask, as its own is one of tokens

How to make each library importable: `other_peers` (miniworld-engine's modules also want jaxtyping, einops and scipy).
Masks, zeros and ones, reach all but tpf_jit and turbopairformer in z's dtype.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tpf_jit.bench import other_peers
from tpf_jit.bench.peer_base import Peer, Plain, chosen_of, configuration, installed_version
from tpf_jit.errors import ShapeUnsupported


@dataclass(frozen=True)
class MultiplicationInputs:
    """Tensors of one call: z, grad `(B, N, N, C)`, mask `(B, N, N)` or None, weights as `layout.Weights`."""

    z: Any
    mask: Any
    weights: Any
    grad: Any
    direction: str
    eps: float

    def leaves(self) -> tuple[Any, ...]:
        """The tensors whose gradients are taken: z, then the weights that there are."""
        return self.z, *(weight for weight in self.weights if weight is not None)

    def names(self) -> tuple[str, ...]:
        """What records call the gradients of `leaves`."""
        present = (name for name, weight in self.weights._asdict().items() if weight is not None)
        return "dz", *(f"d{name}" for name in present)

    def with_grad(self) -> MultiplicationInputs:
        """The same values in leaves of their own that require gradients."""
        weights = (None if weight is None else weight.detach().requires_grad_() for weight in self.weights)
        return replace(self, z=self.z.detach().requires_grad_(), weights=type(self.weights)(*weights))

    def mask_like_z(self) -> Any:
        """The mask in z's dtype, or None."""
        return None if self.mask is None else self.mask.to(self.z.dtype)


class _Update(Plain):
    """Defaults; `residual` says whether it computes z + update, as some libraries do whether it is wanted or not."""

    residual = False
    any_z = False
    """Whether z may be float32 while autocast computes in bf16."""


class TpfJit(_Update):
    """This library, called as users call it."""

    name = "tpf_jit"
    any_z = True

    def ready(self, shape: Any, inputs: MultiplicationInputs, direction: str = "forward") -> dict[str, Any]:
        import tpf_jit
        from tpf_jit.ops.multiplication_backward import all_variants
        from tpf_jit.ops.multiplication_routing import backward_unsupported, centre_variants, usual_variants

        supported, reason = tpf_jit.is_supported(inputs.z, mask=inputs.mask, p_in_weight=inputs.weights.p_in_weight)
        if not supported:
            return {"config": None, "config_from": f"pytorch path: {reason}"}
        differentiated = direction != "forward"
        refused = backward_unsupported(shape) if differentiated else None
        # The last of the usual kernels is the one with a residual, which is not what is measured.
        variants = usual_variants(shape, stats=differentiated and refused is None)[:-1]
        found = _configurations(shape, (*centre_variants(inputs.z), *variants))
        facts: dict[str, Any] = {
            "config": {name: one["config"] for name, one in found.items()},
            "config_from": ", ".join(dict.fromkeys(one["config_from"] for one in found.values())),
        }
        if differentiated:
            facts["backward"] = _configurations(shape, all_variants(shape)) if refused is None else {"pytorch path": refused}
        return facts

    def forward(self, inputs: MultiplicationInputs) -> Any:
        import tpf_jit

        return tpf_jit.triangle_multiplication(
            inputs.z, inputs.direction, inputs.mask, **inputs.weights._asdict(), eps=inputs.eps
        )


def _configurations(shape: Any, variants: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Direction of each (family, flags) -> the configuration that it gets."""
    from tpf_jit.kernels import get_kernel

    return {family.partition("/")[2]: configuration(get_kernel(family, shape, flags)) for family, flags in variants}


class Torch(_Update):
    """Stock PyTorch as the models write it, everything in z's dtype."""

    name = "torch"
    any_z = True

    def forward(self, inputs: MultiplicationInputs) -> Any:
        return _update(inputs.z, inputs.mask_like_z(), inputs.weights, inputs.direction, inputs.eps)


class TorchCompile(_Update):
    """The same through torch.compile."""

    name = "torch_compile"
    judged = False
    any_z = True

    def __init__(self) -> None:
        self._function: Any = None

    def unsupported(self, shape: Any, direction: str) -> str | None:
        # A compiled backward may take what the forward saved as its workspace, so it runs once a forward.
        return "its backward is timed with its forward only" if direction == "backward" else None

    def ready(self, shape: Any, inputs: MultiplicationInputs, direction: str = "forward") -> dict[str, Any]:
        import torch

        # Anew for every problem: beyond a number of shapes the compiler would give up, and run what `torch` runs.
        torch._dynamo.reset()
        self._function = torch.compile(_update, dynamic=False, fullgraph=True)
        return {}

    def forward(self, inputs: MultiplicationInputs) -> Any:
        return self._function(inputs.z, inputs.mask_like_z(), inputs.weights, inputs.direction, inputs.eps)


class CuEquivariance(_Update):
    """NVIDIA's cuequivariance_torch.triangle_multiplicative_update."""

    def __init__(self, convert: bool = False) -> None:
        self.name = "cuequivariance_bf16" if convert else "cuequivariance"
        self._convert, self.any_z = convert, not convert

    def absent(self) -> str | None:
        missing = other_peers.missing("cuequivariance_torch", "cuequivariance_ops_torch")
        return missing or other_peers.broken("cuequivariance_torch", "triangle_multiplicative_update")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if self._convert and (shape.dtype != "bfloat16" or shape.weight_dtype == shape.dtype):
            return "z and weights are of one dtype, or z is not bf16"
        return None

    def version(self) -> str | None:
        return installed_version("cuequivariance-torch")

    def forward(self, inputs: MultiplicationInputs) -> Any:
        from cuequivariance_torch import triangle_multiplicative_update

        # Biases of projections only where there are any: earlier versions have no such arguments.
        weights = {name: weight for name, weight in inputs.weights._asdict().items() if weight is not None}
        if self._convert:
            weights = {name: weight.to(inputs.z.dtype) for name, weight in weights.items()}
        return triangle_multiplicative_update(
            inputs.z, direction=inputs.direction, mask=inputs.mask_like_z(), **weights, eps=inputs.eps
        )


class TurboPairFormer(other_peers.TurboPairFormer):
    """turbopairformer.turbo_trimul; its contract is in its own API_GUIDE.md."""

    LOADERS = ("trimul_cuda",)
    WIDTHS = (32, 64, 96, 128)
    MIN_CROP = 101
    residual, any_z = False, False

    def absent(self) -> str | None:
        return other_peers.missing("turbopairformer") or other_peers.broken("turbopairformer", "turbo_trimul")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.dtype != "bfloat16" or shape.weight_dtype != "float32":
            return "takes bf16 activations and float32 weights only"
        if shape.channels not in self.WIDTHS or shape.hidden != shape.channels:
            return f"takes C = D of {', '.join(map(str, self.WIDTHS))} only"
        return None if shape.crop >= self.MIN_CROP else "takes crops above 100 only"

    def ready(self, shape: Any, inputs: MultiplicationInputs, direction: str = "forward") -> dict[str, Any]:
        return {"config": {"binaries": self._load()}}

    def forward(self, inputs: MultiplicationInputs) -> Any:
        from turbopairformer import turbo_trimul

        weights = {name: weight for name, weight in inputs.weights._asdict().items() if weight is not None}
        return turbo_trimul(inputs.z, direction=inputs.direction, mask=inputs.mask, **weights, eps=inputs.eps)


class MiniWorld(_Update):
    """miniworld-engine's module, given its weights by each call; the module is where its CUDA path for Hopper is chosen."""

    name = "miniworld_residual"
    residual = True
    MODULES = "miniworld_engine.modules.triangle_multiplication"
    SERVES = "miniworld_engine.integrations.trimul_h100"

    def __init__(self) -> None:
        self._modules: dict[tuple, Any] = {}

    def absent(self) -> str | None:
        missing = other_peers.missing("miniworld_engine") or other_peers.broken(self.MODULES, "TriangleMultiplication")
        return missing or other_peers.broken(self.SERVES, "serves_single")

    def unsupported(self, shape: Any, direction: str) -> str | None:
        if shape.dtype != "bfloat16" or shape.weight_dtype != "float32":
            return "takes bf16 activations and float32 weights only"
        return "its mask is one of tokens, not of pairs" if shape.has_mask else None

    def version(self) -> str | None:
        return installed_version("miniworld-engine")

    def ready(self, shape: Any, inputs: MultiplicationInputs, direction: str = "forward") -> dict[str, Any]:
        import torch

        serves, module = importlib.import_module(self.SERVES), self._module(inputs)
        if direction == "forward":
            with torch.no_grad():
                served = serves.serves_inference(module, inputs.z, bidirectional=False)
        else:
            served = serves.serves_single(module, inputs.z)
        if not served:
            raise ShapeUnsupported("its CUDA path does not serve this problem, where its module runs other code")
        return {}

    def forward(self, inputs: MultiplicationInputs) -> Any:
        import torch

        w = inputs.weights
        p_left, p_right = w.p_in_weight.chunk(2)
        g_left, g_right = w.g_in_weight.chunk(2)
        weights = {
            "ln_pair.weight": w.norm_in_weight, "ln_pair.bias": w.norm_in_bias,
            "to_left.weight": p_left, "to_right.weight": p_right,
            "to_left_gate.weight": g_left, "to_right_gate.weight": g_right,
            "ln_out.weight": w.norm_out_weight, "ln_out.bias": w.norm_out_bias,
            "to_out.weight": w.p_out_weight, "to_gate.weight": w.g_out_weight,
        }  # fmt: skip
        return torch.func.functional_call(self._module(inputs), weights, (inputs.z,))

    def _module(self, inputs: MultiplicationInputs) -> Any:
        z, hidden = inputs.z, inputs.weights.hidden
        key = z.shape[-1], hidden, inputs.direction, z.device
        if key not in self._modules:
            make = importlib.import_module(self.MODULES).TriangleMultiplication
            made = make(
                z.shape[-1], d_hidden=hidden, outgoing=inputs.direction == "outgoing", implementation="miniworld", p_drop=0.0
            )
            self._modules[key] = made.to(z.device)
        return self._modules[key]


class UnderAutocast(_Update):
    """A peer whose calls are made under bf16 autocast, for a float32 z."""

    def __init__(self, peer: Any) -> None:
        self.peer, self.name, self.residual = peer, peer.name, peer.residual

    def absent(self) -> str | None:
        return self.peer.absent()

    def unsupported(self, shape: Any, direction: str) -> str | None:
        return self.peer.unsupported(shape, direction) if self.peer.any_z else "takes z in the dtype that it computes in"

    def version(self) -> str | None:
        return self.peer.version()

    def ready(self, shape: Any, inputs: MultiplicationInputs, direction: str = "forward") -> dict[str, Any]:
        with _autocast(inputs):
            return self.peer.ready(shape, inputs, direction)

    def forward(self, inputs: MultiplicationInputs) -> Any:
        with _autocast(inputs):
            return self.peer.forward(inputs)


def _autocast(inputs: MultiplicationInputs) -> Any:
    import torch

    return torch.autocast(inputs.z.device.type, dtype=torch.bfloat16)


_PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        TpfJit(),
        CuEquivariance(),
        CuEquivariance(convert=True),
        TurboPairFormer(),
        MiniWorld(),
        Torch(),
        TorchCompile(),
    )
}


def register(peer: Peer) -> None:
    """Add a peer to every later bench; one of the same name is replaced."""
    _PEERS[peer.name] = peer


def multiplication_peers(names: list[str] | None = None) -> list[Peer]:
    """The peers of those names, or all. Raises InvalidInput for an unknown name."""
    return chosen_of(_PEERS, names)


def _update(z: Any, mask: Any, weights: Any, direction: str, eps: float) -> Any:
    """The update as OpenFold's module computes it: four projections for the factors, then the contraction channel by channel."""
    import torch
    from torch.nn.functional import layer_norm, linear

    def like_z(x: Any) -> Any:
        return None if x is None else x.to(z.dtype)

    w = type(weights)(*map(like_z, weights))
    zn = layer_norm(z, z.shape[-1:], w.norm_in_weight, w.norm_in_bias, eps)
    factors = []
    for half in range(2):
        of_value = w.p_in_weight.chunk(2)[half], None if w.p_in_bias is None else w.p_in_bias.chunk(2)[half]
        of_gate = w.g_in_weight.chunk(2)[half], None if w.g_in_bias is None else w.g_in_bias.chunk(2)[half]
        factor = torch.sigmoid(linear(zn, *of_gate)) * linear(zn, *of_value)
        factors.append(factor if mask is None else factor * mask.unsqueeze(-1))
    a, b = factors
    if direction == "outgoing":
        x = torch.matmul(a.permute(0, 3, 1, 2), b.permute(0, 3, 2, 1))
    else:
        x = torch.matmul(a.permute(0, 3, 2, 1), b.permute(0, 3, 1, 2))
    y = layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], w.norm_out_weight, w.norm_out_bias, eps)
    update = linear(y, w.p_out_weight, w.p_out_bias)
    return update * torch.sigmoid(linear(zn, w.g_out_weight, w.g_out_bias))
