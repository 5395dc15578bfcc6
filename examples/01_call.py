"""Call triangle attention the way an AlphaFold3-style model does, and compare with the formula in FP64.

Runs anywhere: on an H100 or H200 through the compiled kernel, elsewhere through the PyTorch path.

    python examples/01_call.py [crop]
"""

import sys

import torch

import tpf_jit

crop = int(sys.argv[1]) if len(sys.argv) > 1 else 96
batch, heads, head_dim = 1, 4, 32
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# Models project the pair tensor to (B, I, N, H, D) and hand over a transposed view; the kernel reads it without a copy.
q, k, v = (
    torch.randn(batch, crop, crop, heads, head_dim, device=device, dtype=torch.bfloat16).transpose(-2, -3) for _ in range(3)
)
# The pair bias comes out of a linear layer as (B, N, N, H): heads innermost.
bias = torch.randn(batch, crop, crop, heads, device=device, dtype=torch.bfloat16).permute(0, 3, 1, 2).unsqueeze(1)
# True keeps a key. The last keys of every row are padding here.
mask = (torch.arange(crop, device=device) < crop - 5).expand(batch, crop, 1, 1, crop)

supported, reason = tpf_jit.is_supported(q, k, v, bias, mask)
print("takes the kernel" if supported else f"takes the PyTorch path: {reason}")

out = tpf_jit.triangle_attention(q, k, v, bias, mask)
print(f"out {tuple(out.shape)} {out.dtype}, strides {out.stride()}")

scores = q.double() @ k.double().transpose(-1, -2) * head_dim**-0.5 + bias.double()
reference = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.double()
error = (out.double() - reference).norm() / reference.norm()
print(f"relative RMS error against FP64: {error:.2e}")
if not error < 4e-3:
    sys.exit("the error is larger than bfloat16 explains")
