"""Kernels under pressure: hundreds of launches on the same inputs must agree bit for bit.

The configurations keep their rings as short as the rules allow and two CTAs on an SM, where a missing fence shows: the forward
without the proxy fence before it gives a bias tile back differed in 120 of 120 launches of the first of these (H200).
"""

from __future__ import annotations

import pytest
import torch

import tpf_jit
from tpf_jit import kernels
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
    (32, 80, 1, 2, 3, 1, 1, 2, "bool"),
    (16, 64, 4, 2, 2, 1, 1, 1, "bool"),
    (128, 64, 2, 1, 2, 1, 1, 1, "bool"),
]
NAMES = ("tile_n", "consumer_warpgroups", "rows_per_cta", "kv_stages", "bias_stages", "q_stages", "ctas_per_sm")


def forward_cases(name: str) -> list:
    """(template, shape, configuration) of every line above; in training fewer are legal, as P takes twice the registers."""
    template, found = registry.get(name), []
    for fields in TIGHT:
        head_dim, *values, mask = fields
        shape = TriangleAttentionShape(768, head_dim=head_dim, mask=mask)
        config = config_from_dict(template.Config, dict(zip(NAMES, values, strict=True)))
        if template.residual and template.check(shape, config) is not None:
            continue
        found.append(pytest.param(template, shape, config, id="-".join(map(str, (template.direction, *fields)))))
    return found


@pytest.mark.parametrize(
    "template, shape, config",
    forward_cases("triangle_attention_forward_sm90") + forward_cases("triangle_attention_forward_training_sm90"),
)
def test_forward_repeats_with_short_rings(template, shape: TriangleAttentionShape, config) -> None:
    kernel = tpf_jit.compile(shape, template=template.name, config=config)
    pattern = "random50" if shape.mask == "bool" else None
    agree(ForwardWorkload(shape, "cuda", residual=template.residual, mask_pattern=pattern), kernel.function)


# direction, head dim, mask, bias dtype, configuration
TIGHT_BACKWARD = [
    ("backward_key", 32, "none", "bfloat16", {"tile_m": 32, "consumer_warpgroups": 1, "stages": 2, "ctas_per_sm": 2}),
    ("backward_key", 64, "bool", "bfloat16", {"tile_m": 32, "consumer_warpgroups": 2, "stages": 2, "ctas_per_sm": 1}),
    ("backward_key", 32, "none", "bfloat16", {"tile_m": 48, "consumer_warpgroups": 1, "stages": 3, "ctas_per_sm": 1}),
    ("backward_key", 32, "bool", "bfloat16", {"tile_m": 80, "consumer_warpgroups": 1, "stages": 2, "ctas_per_sm": 1}),
    ("backward_key", 16, "none", "float32", {"tile_m": 64, "consumer_warpgroups": 1, "stages": 2, "ctas_per_sm": 2}),
    ("backward_query", 32, "none", "bfloat16", {"tile_n": 32, "consumer_warpgroups": 1, "rows_per_cta": 1, "ctas_per_sm": 2}),
    ("backward_query", 32, "bool", "bfloat16", {"tile_n": 64, "consumer_warpgroups": 2, "rows_per_cta": 2, "ctas_per_sm": 1}),
    ("backward_query", 32, "bool", "bfloat16", {"tile_n": 48, "consumer_warpgroups": 1, "rows_per_cta": 2, "ctas_per_sm": 2}),
    ("backward_tile", 32, "bool", "bfloat16", {"tile_n": 64, "consumer_warpgroups": 1, "stages": 2, "ctas_per_sm": 2}),
    ("backward_tile", 16, "none", "float32", {"tile_n": 64, "consumer_warpgroups": 2, "stages": 2, "ctas_per_sm": 1}),
    ("backward_query", 64, "none", "float32", {"tile_n": 32, "consumer_warpgroups": 1, "rows_per_cta": 2, "ctas_per_sm": 1}),
]


@pytest.mark.parametrize("direction, head_dim, mask, bias_dtype, fields", TIGHT_BACKWARD, ids=str)
def test_backward_repeats_with_short_rings(direction: str, head_dim: int, mask: str, bias_dtype: str, fields: dict) -> None:
    shape = TriangleAttentionShape(512, head_dim=head_dim, mask=mask, bias_dtype=bias_dtype)
    template = registry.get(f"triangle_attention_{direction}_sm90")
    if direction == "backward_query":
        fields = fields | {"kv_stages": 2, "bias_stages": 1}
    config = config_from_dict(template.Config, fields)
    if (reason := template.check(shape, config)) is not None:
        raise ShapeUnsupported(f"the test's configuration is not legal: {reason}")
    workload = template.workload(shape, "cuda")
    if hasattr(workload, "configure"):
        workload.configure(config)
    agree(workload, kernels.get_kernel(template.name, shape, (), config).function)


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
