"""The backward's kernels compile for sm_90a, on any machine, into the code their design promises."""

from __future__ import annotations

import pytest

from tpf_jit.compiler import KernelSpec, compile_kernel
from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import backward as module
from tpf_jit.templates.triangle_attention.backward_tile import TileConfig, TriangleAttentionBackwardTile

VARIANTS = [
    dict(head_dim=16, mask="bool"),
    dict(head_dim=32),
    dict(head_dim=32, dtype="float16", bias_dtype="float32", mask="additive"),
    dict(head_dim=64, mask="bool"),
    dict(head_dim=128, bias_dtype="float32"),
]


def resources_of(template, shape: TriangleAttentionShape, spill_bytes: int = 0, config=None, **flags: bool) -> dict:
    config = config or template.default(shape)
    spec = KernelSpec.make(template, shape, config, **flags)
    resources = compile_kernel(spec).resources
    assert resources["spill_bytes"] <= spill_bytes, resources
    # C75xx: wgmma serialised, a wait injected, or setmaxnreg dropped.
    assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], resources["ptxas_notes"]
    estimate = template.resources(shape, config)
    assert resources["threads"] == estimate.threads
    return resources


@pytest.fixture(autouse=True)
def registered():
    """The templates are looked up by name while compiling."""
    from tpf_jit.templates import registry

    for template in TEMPLATES:
        registry.register(template)


TEMPLATES = (
    module.TriangleAttentionBackwardStats(), module.TriangleAttentionBackwardKey(), module.TriangleAttentionBackwardQuery(),
    TriangleAttentionBackwardTile(),
)  # fmt: skip
STATS, KEY, QUERY, TILE = TEMPLATES


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: "-".join(map(str, f.values())))
def test_key_side(fields: dict) -> None:
    shape = TriangleAttentionShape(crop=384, **fields)
    resources, config = resources_of(KEY, shape), KEY.default(shape)
    # S and dP over the head dim, dV and dK over the queries of a tile.
    assert resources["hgmma"] == 2 * (shape.tile_hdim // 16) + 2 * (config.tile_m // 16)
    assert resources["utmaldg"] > 0 and resources["utmastg"] > 0 and resources["setmaxnreg"] == 2


@pytest.mark.parametrize("dbias", [True, False], ids=["bias", "frozen"])
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: "-".join(map(str, f.values())))
def test_query_side(fields: dict, dbias: bool) -> None:
    shape = TriangleAttentionShape(crop=384, **fields)
    # Four rows of 64 keys spill a little and are still the fastest measured.
    resources, config = resources_of(QUERY, shape, spill_bytes=256, dbias=dbias), QUERY.default(shape)
    # S and dP over the head dim, dQ over the keys of a tile, for every row.
    assert resources["hgmma"] == config.rows_per_cta * (2 * (shape.tile_hdim // 16) + config.tile_n // 16)
    assert resources["utmaldg"] > 0 and resources["utmastg"] > 0 and resources["setmaxnreg"] == 2
    assert (resources["utmaredg"] > 0) == dbias, "the bias gradient joins its plane by TMA reduce-adds"


@pytest.mark.parametrize("dbias", [True, False], ids=["bias", "frozen"])
@pytest.mark.parametrize("fields, config", [
    (dict(head_dim=16, mask="bool"), TileConfig(96, 2, 4)), (dict(), TileConfig(96, 1, 4, 2, 2)),
    (dict(dtype="float16", bias_dtype="float32", mask="additive"), TileConfig(80, 2, 5)),
    (dict(head_dim=64, mask="bool"), TileConfig(80, 1, 5, 2)),
], ids=str)  # fmt: skip
def test_query_side_by_tiles(fields: dict, config: TileConfig, dbias: bool) -> None:
    shape = TriangleAttentionShape(crop=384, **fields)
    resources = resources_of(TILE, shape, config=config, dbias=dbias)
    # S before the rows and S of the next row, dP, dQ.
    assert resources["hgmma"] == 3 * (shape.tile_hdim // 16) + config.tile_n // 16
    assert resources["utmaldg"] > 0 and resources["utmaredg"] == 0 and resources["setmaxnreg"] == 2
    estimate = TILE.resources(shape, config).smem_bytes
    assert estimate - 3072 <= resources["smem_bytes"] <= estimate


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("head_dim", [8, 32, 96])
def test_statistics(head_dim: int, residual: bool) -> None:
    resources = resources_of(STATS, TriangleAttentionShape(crop=384, head_dim=head_dim), residual=residual)
    assert resources["hgmma"] == 0 and resources["registers"] <= 64
