"""The rules of the forward template, without a compiler."""

from __future__ import annotations

import itertools

import pytest

from tpf_jit.shape import TriangleAttentionShape
from tpf_jit.templates.registry import get
from tpf_jit.templates.triangle_attention.config import ForwardConfig, register_split, shared_bytes

TEMPLATE = get("triangle_attention_forward_sm90")


@pytest.mark.parametrize("crop", [1, 7, 64, 65, 100, 384, 768, 2048])
def test_a_legal_default_for_every_problem(crop: int) -> None:
    for head_dim, bias, mask, rows in itertools.product(range(8, 129, 8), ("bfloat16", "float32"), ("none", "bool"), (1, 3, 768)):
        shape = TriangleAttentionShape(crop=crop, head_dim=head_dim, bias_dtype=bias, mask=mask, rows=rows)
        assert TEMPLATE.check(shape, TEMPLATE.default(shape)) is None, shape


@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128])
def test_space_is_legal_distinct_and_small(head_dim: int) -> None:
    shape = TriangleAttentionShape(crop=768, head_dim=head_dim)
    space = TEMPLATE.space(shape)
    assert len(space) == len(set(space)) and 5 <= len(space) <= 300
    assert all(TEMPLATE.check(shape, config) is None for config in space)
    assert TEMPLATE.default(shape) in space


@pytest.mark.parametrize(
    "config, word",
    [
        (ForwardConfig(tile_n=40), "tile_n=40"),
        (ForwardConfig(tile_n=256, consumer_warpgroups=3), "registers"),
        (ForwardConfig(crop=384), "crop 384"),
        (ForwardConfig(64, consumer_warpgroups=1, rows_per_cta=2, ctas_per_sm=2, kv_stages=8, bias_stages=4), "shared memory"),
    ],
)
def test_rejections_name_the_limit(config: ForwardConfig, word: str) -> None:
    reason = TEMPLATE.check(TriangleAttentionShape(crop=768, head_dim=64), config)
    assert reason is not None and word in reason


@pytest.mark.parametrize("warpgroups, ctas", list(itertools.product((1, 2, 3, 4), (1, 2))))
def test_registers_fit_the_sm(warpgroups: int, ctas: int) -> None:
    producer, consumer = register_split(ForwardConfig(consumer_warpgroups=warpgroups, ctas_per_sm=ctas))
    assert producer % 8 == 0 and consumer % 8 == 0 and 24 <= consumer <= 240
    assert 128 * ctas * (producer + warpgroups * consumer) <= 65536


def test_kernels_are_shared_between_crops_and_not_between_variants() -> None:
    def variant(**fields: object) -> dict:
        return TEMPLATE.variant(TriangleAttentionShape(**{"crop": 384, **fields}))

    assert variant() == variant(crop=777, rows=5, heads=8, batch=2) == variant(head_dim=24)
    different = [variant(), variant(head_dim=64), variant(dtype="float16"), variant(bias_dtype="float32"), variant(mask="bool")]
    assert len({tuple(v.items()) for v in different}) == len(different)
    with pytest.raises(TypeError):
        TEMPLATE.variant(TriangleAttentionShape(crop=384), unknown=True)


def test_shared_memory_grows_with_what_is_staged() -> None:
    shape = TriangleAttentionShape(crop=768)
    small, large = ForwardConfig(kv_stages=2), ForwardConfig(kv_stages=3)
    assert shared_bytes(shape, large) - shared_bytes(shape, small) == 2 * 128 * 32 * 2
