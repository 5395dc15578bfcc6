"""Kernels under pressure: hundreds of launches on the same inputs must agree bit for bit.

The configurations keep their rings as short as the rules allow and two CTAs on an SM, where a missing fence shows: the forward
without the proxy fence before it gives a bias tile back differed in 120 of 120 launches of the first of these (H200).
"""

from __future__ import annotations

import pytest
import torch

import tpf_jit
from tpf_jit.errors import ShapeUnsupported
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import config_from_dict
from tpf_jit.templates.triangle_attention.workload import ForwardWorkload

pytestmark = pytest.mark.gpu

LAUNCHES = 120
# head dim, tile_n, warpgroups, rows, K/V stages, bias stages, query stages, CTAs an SM, mask
TIGHT = [
    (64, 128, 1, 2, 2, 1, 1, 2, "none"),
    (64, 64, 1, 2, 2, 1, 1, 2, "none"),
    (64, 96, 1, 2, 2, 1, 1, 2, "bool"),
    (32, 128, 1, 4, 2, 1, 1, 2, "none"),
    (32, 64, 1, 2, 2, 1, 1, 2, "bool"),
    (32, 192, 1, 2, 2, 1, 1, 2, "none"),
    (16, 64, 4, 2, 2, 1, 1, 1, "bool"),
    (128, 64, 2, 1, 2, 1, 1, 1, "bool"),
]
NAMES = ("tile_n", "consumer_warpgroups", "rows_per_cta", "kv_stages", "bias_stages", "q_stages", "ctas_per_sm")


@pytest.mark.parametrize("residual", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("fields", TIGHT, ids=lambda f: "-".join(map(str, f)))
def test_forward_repeats_with_short_rings(fields: tuple, residual: bool) -> None:
    head_dim, *values, mask = fields
    template = registry.get("triangle_attention_forward_sm90")
    shape = TriangleAttentionShape(768, head_dim=head_dim, mask=mask)
    config = config_from_dict(template.Config, dict(zip(NAMES, values, strict=True)))
    if (reason := template.check(shape, config)) is not None:
        raise ShapeUnsupported(f"the test's configuration is not legal: {reason}")
    kernel = tpf_jit.compile(shape, template=template.name, config=config, residual=residual)
    agree(ForwardWorkload(shape, "cuda", residual=residual, mask_pattern="random50" if mask == "bool" else None), kernel.function)


def agree(workload, function) -> None:
    """Launch again and again over poisoned outputs, a second stream keeping the memory busy."""
    inputs = workload.make_inputs(0)
    first = {name: x.clone() for name, x in workload.run(function, inputs).items()}
    errors, bounds = workload.errors(first, workload.reference(inputs)), workload.bounds()
    assert all(errors[name] <= bounds[name] for name in bounds), (errors, bounds)
    noise, side = torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    different = []
    for number in range(LAUNCHES):
        with torch.cuda.stream(side):
            noise.add_(1)
        out = workload.run(function, inputs)
        if not all(torch.equal(out[name], first[name]) for name in first):
            different.append(number)
    assert not different, f"{len(different)} of {LAUNCHES} launches differ, the first is number {different[0]}"
