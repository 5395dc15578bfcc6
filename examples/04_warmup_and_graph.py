"""Load kernels before training starts, then capture a call into a CUDA graph and replay it.

Capturing with a kernel that is not loaded raises ColdKernelInCapture before the stream is touched, so a job that forgot to
warm up stops with a sentence instead of a broken graph. Without a GPU this shows the plan and stops.

    python examples/04_warmup_and_graph.py [crop]
"""

import sys

import torch

import tpf_jit

crop = int(sys.argv[1]) if len(sys.argv) > 1 else 128
shape = tpf_jit.TriangleAttentionShape(crop=crop)
print(tpf_jit.explain(shape))
if not torch.cuda.is_available():
    print("no CUDA device here: nothing to warm up or to capture")
    sys.exit(0)

tpf_jit.warmup([shape])

size = (1, crop, crop, shape.heads, shape.head_dim)
q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(-2, -3) for _ in range(3))
bias = torch.randn(1, shape.heads, crop, crop, device="cuda", dtype=torch.bfloat16)

graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    out = tpf_jit.triangle_attention(q, k, v, bias)

q.copy_(torch.randn_like(q))
graph.replay()
torch.cuda.synchronize()
eager = tpf_jit.triangle_attention(q, k, v, bias)
print("replay equals eager, bit for bit:", torch.equal(out, eager))
if not torch.equal(out, eager):
    sys.exit(1)
