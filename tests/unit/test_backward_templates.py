"""The rules of the backward's templates, without a compiler."""

from __future__ import annotations

import itertools

import pytest

from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.triangle_attention import backward as module
from tpf_jit.templates.triangle_attention.backward_tile import TileConfig, TriangleAttentionBackwardTile
from tpf_jit.templates.triangle_attention.config import register_split

STATS = module.TriangleAttentionBackwardStats()
KEY = module.TriangleAttentionBackwardKey()
QUERY = module.TriangleAttentionBackwardQuery()
TILE = TriangleAttentionBackwardTile()


@pytest.mark.parametrize("crop", [1, 7, 64, 65, 100, 384, 768, 2048])
def test_a_legal_default_for_every_problem(crop: int) -> None:
    for head_dim, bias, mask, rows in itertools.product(range(8, 129, 8), ("bfloat16", "float32"), ("none", "bool"), (1, 3, 768)):
        shape = TriangleAttentionShape(crop=crop, head_dim=head_dim, bias_dtype=bias, mask=mask, rows=rows)
        for template in (STATS, KEY, QUERY):
            assert template.check(shape, template.default(shape)) is None, (template.name, shape)


@pytest.mark.parametrize("template", [STATS, KEY, QUERY], ids=lambda t: t.direction)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
def test_space_is_legal_distinct_and_small(head_dim: int, template) -> None:
    shape = TriangleAttentionShape(crop=768, head_dim=head_dim)
    space = template.space(shape)
    assert len(space) == len(set(space)) and 2 <= len(space) <= 300
    assert all(template.check(shape, config) is None for config in space)
    assert template.default(shape) in space


@pytest.mark.parametrize("template", [KEY, QUERY], ids=lambda t: t.direction)
def test_rejections_name_the_limit(template) -> None:
    shape = TriangleAttentionShape(crop=768, head_dim=128)
    reasons = {
        template.check(shape, template.Config(consumer_warpgroups=7)),
        template.check(shape, template.Config(consumer_warpgroups=3)),
    }
    assert any("consumer_warpgroups=7" in reason for reason in reasons)
    assert any("registers" in reason for reason in reasons)
    crowded = module.KeyConfig(64, 1, 4, 2) if template is KEY else module.QueryConfig(32, 1, 2, 4, 2, 2)
    assert template.check(shape, crowded) is not None


def test_registers_fit_the_sm() -> None:
    shape = TriangleAttentionShape(crop=768, head_dim=32)
    for template in (KEY, QUERY):
        for config in template.space(shape):
            producer, consumer = register_split(config)
            assert 128 * config.ctas_per_sm * (producer + config.consumer_warpgroups * consumer) <= 65536


@pytest.mark.parametrize("crop, rows", [(1, 1), (100, 3), (384, 384), (768, 768), (2048, 2048)])
def test_slabs_cover_the_rows_and_fill_the_device(crop: int, rows: int) -> None:
    shape = TriangleAttentionShape(crop=crop, rows=rows)
    config = QUERY.default(shape)
    slabs = QUERY.slabs(shape, config, 132)
    groups = -(-rows // config.rows_per_cta)
    assert 1 <= slabs <= min(groups, module.MOST_SLABS)
    assert slabs == QUERY.slabs(shape, config, 132)
    blocks = shape.heads * -(-crop // (64 * config.consumer_warpgroups))
    waves = -(-blocks * slabs // 132)
    assert waves * -(-groups // slabs) <= -(-blocks // 132) * groups, "no worse than one slab"


@pytest.mark.parametrize("crop", [1, 64, 97, 256, 384, 600, 640])
@pytest.mark.parametrize("head_dim", [8, 32, 64])
def test_tiles_of_a_cluster_cover_the_keys(crop: int, head_dim: int) -> None:
    shape = TriangleAttentionShape(crop=crop, head_dim=head_dim, mask="bool", bias_dtype="float32")
    space = TILE.space(shape)
    assert TILE.supports(shape)[0] and space and len(space) == len(set(space))
    for config in space:
        assert TILE.check(shape, config) is None
        assert (config.cluster - 1) * config.tile_n < crop <= config.cluster * config.tile_n
        producer, consumer = register_split(config)
        assert 128 * config.ctas_per_sm * (producer + config.consumer_warpgroups * consumer) <= 65536
        assert 1 <= TILE.slabs(shape, config, 132) <= min(shape.rows, module.MOST_SLABS)
    assert TILE.default(shape) in space


def test_tiles_say_what_they_do_not_take() -> None:
    assert "768" in TILE.supports(TriangleAttentionShape(769))[1]
    assert "head dims" in TILE.supports(TriangleAttentionShape(384, head_dim=72))[1]
    assert "float32" in TILE.supports(TriangleAttentionShape(384, dtype="float16", bias_dtype="bfloat16"))[1]
    assert "do not cover 768" in TILE.check(TriangleAttentionShape(768), TileConfig(cluster=4))
    assert TILE.family == QUERY.family, "the tuner measures both"


def test_flags_are_compiled_in_and_unknown_ones_refused() -> None:
    shape = TriangleAttentionShape(crop=384)
    assert QUERY.variant(shape) != QUERY.variant(shape, dbias=False)
    assert STATS.variant(shape) != STATS.variant(shape, residual=False)
    for template in (STATS, KEY, QUERY):
        assert template.variant(shape) == template.variant(TriangleAttentionShape(crop=777, heads=2, rows=5))
        with pytest.raises(TypeError):
            template.variant(shape, unknown=True)
