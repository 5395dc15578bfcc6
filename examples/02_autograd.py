"""Gradients of every input, in the caller's dtypes and layouts, under activation checkpointing and autocast.

    python examples/02_autograd.py [crop]
"""

import sys

import torch
from torch.utils.checkpoint import checkpoint

import tpf_jit

crop = int(sys.argv[1]) if len(sys.argv) > 1 else 64
channels, heads, head_dim = 128, 4, 32
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class TriangleAttention(torch.nn.Module):
    """Starting-node triangle attention of a pair tensor z (B, N, N, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(channels)
        self.qkv = torch.nn.Linear(channels, 3 * heads * head_dim, bias=False)
        self.bias = torch.nn.Linear(channels, heads, bias=False)
        self.gate = torch.nn.Linear(channels, heads * head_dim, bias=False)
        self.out = torch.nn.Linear(heads * head_dim, channels, bias=False)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.norm(z)
        q, k, v = (part.unflatten(-1, (heads, head_dim)).transpose(-2, -3) for part in self.qkv(x).chunk(3, dim=-1))
        bias = self.bias(x).permute(0, 3, 1, 2).unsqueeze(1)
        o = tpf_jit.triangle_attention(q, k, v, bias).transpose(-2, -3).flatten(-2)
        return z + self.out(o * self.gate(x).sigmoid())


module = TriangleAttention().to(device)
z = torch.randn(1, crop, crop, channels, device=device, requires_grad=True)
with torch.autocast(device, dtype=torch.bfloat16):
    y = checkpoint(module, z, use_reentrant=False)
y.float().square().mean().backward()

print(f"z.grad {tuple(z.grad.shape)} {z.grad.dtype}, norm {z.grad.norm():.4f}")
for name, parameter in module.named_parameters():
    print(f"{name:12s} grad norm {parameter.grad.norm():.4f}")
    if not torch.isfinite(parameter.grad).all() or not parameter.grad.any():
        sys.exit(f"{name} has no usable gradient")
