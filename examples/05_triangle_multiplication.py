"""The triangle multiplicative update in a module: training under autocast with FP32 weights, and inference in place.

    python examples/05_triangle_multiplication.py [crop]
"""

import sys

import torch

import tpf_jit

crop = int(sys.argv[1]) if len(sys.argv) > 1 else 48
channels, hidden = 128, 128
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class TriangleMultiplication(torch.nn.Module):
    """z + update(z) for a pair tensor z (B, N, N, C), with cuEquivariance's names and layouts of the weights."""

    def __init__(self, direction: str) -> None:
        super().__init__()
        self.direction = direction
        self.norm_in, self.norm_out = torch.nn.LayerNorm(channels), torch.nn.LayerNorm(hidden)
        self.p_in, self.g_in = (torch.nn.Linear(channels, 2 * hidden, bias=False) for _ in range(2))
        self.p_out = torch.nn.Linear(hidden, channels, bias=False)
        self.g_out = torch.nn.Linear(channels, channels, bias=False)

    def forward(self, z: torch.Tensor, mask: torch.Tensor, **options: bool) -> torch.Tensor:
        layers = {name: getattr(self, name) for name in ("norm_in", "p_in", "g_in", "norm_out", "p_out", "g_out")}
        weights = {f"{name}_weight": layer.weight for name, layer in layers.items()}
        weights |= {f"{name}_bias": layer.bias for name, layer in layers.items()}
        return tpf_jit.triangle_multiplication(z, self.direction, mask, **weights, residual=z, **options)


outgoing, incoming = (TriangleMultiplication(direction).to(device) for direction in ("outgoing", "incoming"))
z = torch.randn(1, crop, crop, channels, device=device, dtype=torch.bfloat16, requires_grad=True)  # kernels take bf16
token = torch.arange(crop, device=device) < round(0.8 * crop)  # the last tokens are padding
mask = (token[:, None] & token)[None]

print(tpf_jit.explain(z, mask=mask, p_in_weight=outgoing.p_in.weight))

# Training. recompute=True saves nothing of a pair tensor's size but z; the default saves three more, and is faster.
with torch.autocast(device, dtype=torch.bfloat16):
    y = incoming(outgoing(z, mask, recompute=True), mask)
y.float().square().mean().backward()
print(f"y {tuple(y.shape)} {y.dtype}, z.grad norm {z.grad.float().norm():.4f}")
for name, parameter in [*outgoing.named_parameters(), *incoming.named_parameters()]:
    if not torch.isfinite(parameter.grad).all() or not parameter.grad.any():
        sys.exit(f"{name} has no usable gradient")

# Inference. With inplace=True the result takes the place of z.
with torch.inference_mode():
    expected = incoming(outgoing(z, mask), mask)
    own = z.clone()
    incoming(outgoing(own, mask, inplace=True), mask, inplace=True)
print(f"in place: {'equal' if torch.equal(own, expected) else 'different'}")
if not torch.equal(own, expected):
    sys.exit("the update in place differs")
