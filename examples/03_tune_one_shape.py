"""Tune one problem on this GPU, look at the evidence, and see the next call use it.

Every outcome becomes a row of the tuning database, failures included; this script uses a throwaway one. Without a GPU it shows
what there is to tune.

    python examples/03_tune_one_shape.py [crop] [seconds]
"""

import sys
import tempfile
from pathlib import Path

import torch

import tpf_jit
from tpf_jit.templates import registry

crop = int(sys.argv[1]) if len(sys.argv) > 1 else 256
budget_s = float(sys.argv[2]) if len(sys.argv) > 2 else 30.0
shape = tpf_jit.TriangleAttentionShape(crop=crop)

for template in registry.templates(op=shape.op, direction="forward"):
    configs = template.space(shape)
    print(f"{template.name}: {len(configs)} legal configurations, default {template.default(shape)}")

if not torch.cuda.is_available():
    print("no CUDA device here: nothing to measure with")
    sys.exit(0)

with tempfile.TemporaryDirectory() as folder:
    database = Path(folder) / "tuned.db"
    result = tpf_jit.tune(shape, budget_s=budget_s, store=database)
    print(result)
    # The same call again finds everything in the database and measures only what is missing.
    again = tpf_jit.tune(shape, max_trials=0, store=database)
    print(f"second run: {again.new_trials} new trials")
    print("rows kept:", len(result.trials))
