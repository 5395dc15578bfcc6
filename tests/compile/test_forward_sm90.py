"""Every variant of the forward kernel compiles for sm_90a, on any machine, into the code its design promises."""

from __future__ import annotations

import pytest

from tpf_jit.compiler import KernelSpec, compile_kernel
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.registry import get
from tpf_jit.templates.triangle_attention.config import ForwardConfig, TriangleAttentionForward, registers_needed

TEMPLATES = [get(f"triangle_attention_forward_{kind}sm90") for kind in ("", "training_")]
both = pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.direction)

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


def expected_hgmma(shape: TriangleAttentionShape, config: ForwardConfig, residual: bool) -> int:
    """Tensor-core instructions of one pass over the body: QK over the head dim, PV over the keys (in training twice, for P's
    two halves), for every row."""
    return config.rows_per_cta * (shape.tile_hdim // 16 + config.tile_n // 16 * (2 if residual else 1))


def inspect(
    template: TriangleAttentionForward, shape: TriangleAttentionShape, config: ForwardConfig, spill_bytes: int = 0
) -> dict:
    resources = compile_kernel(KernelSpec.make(template, shape, config)).resources
    assert resources["spill_bytes"] <= spill_bytes, resources
    assert resources["hgmma"] == expected_hgmma(shape, config, template.residual), resources
    assert resources["utmaldg"] > 0 and resources["utmastg"] > 0, resources
    assert resources["setmaxnreg"] == 2, "the registers were not redistributed"
    # C75xx: wgmma serialised, a wait injected, or setmaxnreg dropped.
    assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], resources["ptxas_notes"]
    estimate = template.resources(shape, config)
    assert resources["threads"] == estimate.threads
    assert estimate.smem_bytes - 2048 <= resources["smem_bytes"] <= estimate.smem_bytes
    return resources


@both
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: "-".join(map(str, f.values())))
def test_default_configuration(fields: dict, template: TriangleAttentionForward) -> None:
    shape = TriangleAttentionShape(crop=384, **fields)
    inspect(template, shape, template.default(shape))


@both
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_the_tightest_legal_configuration_hardly_spills(head_dim: int, template: TriangleAttentionForward) -> None:
    shape = TriangleAttentionShape(crop=768, head_dim=head_dim, mask="bool")

    def slack(config: ForwardConfig) -> int:
        available = template.resources(shape, config).registers_per_consumer
        return available - registers_needed(shape.tile_hdim, config, template.residual)

    inspect(template, shape, min(template.space(shape), key=slack), spill_bytes=128)


def test_constant_crop() -> None:
    shape = TriangleAttentionShape(crop=384)
    inspect(TEMPLATES[0], shape, ForwardConfig(tile_n=128, crop=384))
