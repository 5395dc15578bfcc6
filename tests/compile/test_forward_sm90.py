"""Every variant of the forward kernel compiles for sm_90a, on any machine, into the code its design promises."""

from __future__ import annotations

import pytest

from tpf_jit.compiler import KernelSpec, compile_kernel
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.registry import get
from tpf_jit.templates.triangle_attention.config import ForwardConfig, registers_needed

TEMPLATE = get("triangle_attention_forward_sm90")

# Grid reduced on purpose: head dim tiles x bias width cover the layouts, mask and residual add independent code, so one
# head dim has them on and the next off. fp16 differs from bf16 only in instruction types.
VARIANTS = [
    dict(head_dim=16, mask="bool"),
    dict(head_dim=32),
    dict(head_dim=32, dtype="float16", mask="additive"),
    dict(head_dim=32, bias_dtype="float32", mask="bool"),
    dict(head_dim=64, bias_dtype="float32"),
    dict(head_dim=96, mask="bool"),
    dict(head_dim=128),
]


def expected_hgmma(shape: TriangleAttentionShape, config: ForwardConfig) -> int:
    """Tensor-core instructions of one pass over the body: QK over the head dim, PV over the keys, for every row."""
    return config.rows_per_cta * (shape.tile_hdim // 16 + config.tile_n // 16)


def inspect(shape: TriangleAttentionShape, config: ForwardConfig, residual: bool, spill_bytes: int = 0) -> dict:
    resources = compile_kernel(KernelSpec.make(TEMPLATE, shape, config, residual=residual)).resources
    assert resources["spill_bytes"] <= spill_bytes, resources
    assert resources["hgmma"] == expected_hgmma(shape, config), resources
    assert resources["utmaldg"] > 0 and resources["utmastg"] > 0, resources
    assert resources["setmaxnreg"] == 2, "the registers were not redistributed"
    # C75xx: wgmma serialised, a wait injected, or setmaxnreg dropped.
    assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], resources["ptxas_notes"]
    estimate = TEMPLATE.resources(shape, config)
    assert resources["threads"] == estimate.threads
    assert estimate.smem_bytes - 2048 <= resources["smem_bytes"] <= estimate.smem_bytes
    return resources


@pytest.mark.parametrize("residual", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: "-".join(map(str, f.values())))
def test_default_configuration(fields: dict, residual: bool) -> None:
    shape = TriangleAttentionShape(crop=384, **fields)
    inspect(shape, TEMPLATE.default(shape), residual)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_the_tightest_legal_configuration_hardly_spills(head_dim: int) -> None:
    shape = TriangleAttentionShape(crop=768, head_dim=head_dim, mask="bool")
    by_slack = sorted(
        TEMPLATE.space(shape),
        key=lambda c: TEMPLATE.resources(shape, c).registers_per_consumer - registers_needed(shape.tile_hdim, c),
    )
    inspect(shape, by_slack[0], residual=True, spill_bytes=128)


def test_constant_crop() -> None:
    shape = TriangleAttentionShape(crop=384)
    inspect(shape, ForwardConfig(tile_n=128, crop=384), residual=False)
