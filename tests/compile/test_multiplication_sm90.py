"""The kernels of the triangle multiplicative update compile for sm_90a, on any machine, into the code their design promises."""

from __future__ import annotations

import dataclasses

import pytest

from tpf_jit.compiler import KernelSpec, compile_kernel
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates.registry import get

FRONT, BACK = (get(f"triangle_multiplication_{name}_sm90") for name in ("front", "back"))
PRODUCTS = {name: get(f"triangle_multiplication_product_{name}_sm90") for name in ("nt", "tn", "nn")}
BACKWARD = {
    name: get(f"triangle_multiplication_{name}_sm90")
    for name in ("back_backward", "back_weights", "front_backward", "front_weights")
}
GRADIENTS = get("triangle_multiplication_front_gradients_sm90")
# (C, D): the usual, both wide enough to leave one stage, unlike ones with an odd step, the narrowest.
WIDTHS = [(128, 128), (256, 256), (96, 160), (32, 32)]


def resources_of(template, shape: TriangleMultiplicationShape, **flags: bool) -> dict:
    config = template.default(shape)
    resources = compile_kernel(KernelSpec.make(template, shape, config, **flags)).resources
    assert resources["spill_bytes"] == 0, resources
    # C75xx: wgmma serialised, a wait injected, or setmaxnreg dropped.
    assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], resources["ptxas_notes"]
    assert resources["utmaldg"] > 0 and resources["utmastg"] > 0
    estimate = template.resources(shape, config)
    assert resources["threads"] == estimate.threads
    assert estimate.smem_bytes - 8192 <= resources["smem_bytes"] <= estimate.smem_bytes
    return resources


@pytest.mark.parametrize("channels, hidden", WIDTHS)
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_front(channels: int, hidden: int, mask: str) -> None:
    shape = TriangleMultiplicationShape(384, channels, hidden, mask=mask)
    # Values and gates, over all channels of z.
    assert resources_of(FRONT, shape)["hgmma"] == 2 * channels // 16


@pytest.mark.parametrize("channels, hidden", WIDTHS)
@pytest.mark.parametrize("stats, residual", [(False, False), (True, True)])
def test_back(channels: int, hidden: int, stats: bool, residual: bool) -> None:
    shape = TriangleMultiplicationShape(384, channels, hidden)
    assert resources_of(BACK, shape, stats=stats, residual=residual)["hgmma"] == (channels + hidden) // 16


@pytest.mark.parametrize("channels, hidden", WIDTHS)
@pytest.mark.parametrize("weight_dtype, bias", [("float32", False), ("bfloat16", True)])
def test_fold(channels: int, hidden: int, weight_dtype: str, bias: bool) -> None:
    template = get("triangle_multiplication_fold_sm90")
    shape = TriangleMultiplicationShape(384, channels, hidden, weight_dtype=weight_dtype)
    resources = compile_kernel(KernelSpec.make(template, shape, template.default(shape), bias=bias)).resources
    assert resources["spill_bytes"] == 0 and resources["threads"] == 256


@pytest.mark.parametrize("channels, hidden", [(128, 128), (96, 160), (32, 32), (256, 64)])
@pytest.mark.parametrize("weight_dtype, bias, mask", [("float32", False, "none"), ("bfloat16", True, "bool")])
def test_fold_front(channels: int, hidden: int, weight_dtype: str, bias: bool, mask: str) -> None:
    template = get("triangle_multiplication_fold_front_sm90")
    shape = TriangleMultiplicationShape(100, channels, hidden, weight_dtype=weight_dtype, mask=mask)
    blocks = 2 * hidden // template.default(shape).tile_h
    assert resources_of(template, shape, bias=bias)["hgmma"] == blocks * (channels // 16 + 1)


@pytest.mark.parametrize("channels, hidden", WIDTHS)
@pytest.mark.parametrize(
    "weight_dtype, norm_dtype, bias", [("float32", "float32", False), ("bfloat16", "float32", True), ("bfloat16", "", True)]
)
def test_finish(channels: int, hidden: int, weight_dtype: str, norm_dtype: str, bias: bool) -> None:
    template = get("triangle_multiplication_finish_sm90")
    shape = TriangleMultiplicationShape(384, channels, hidden, weight_dtype=weight_dtype)
    flags = dict(bias=bias, norm_dtype=norm_dtype)
    resources = compile_kernel(KernelSpec.make(template, shape, template.default(shape), **flags)).resources
    assert resources["spill_bytes"] == 0 and resources["threads"] == 256
    # Eight vectors in flight: with fewer registers ptxas waits for one load after the other; with more, fewer CTAs share an SM.
    assert 64 <= resources["registers"] <= 80
    assert resources["smem_bytes"] <= template.resources(shape, template.default(shape)).smem_bytes


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("crop", [64, 768])
def test_products(crop: int, product: str) -> None:
    template, shape = PRODUCTS[product], TriangleMultiplicationShape(crop)
    resources = resources_of(template, shape)
    assert resources["hgmma"] == template.default(shape).tile_k // 16 and resources["setmaxnreg"] == 2


def products_of(name: str, template, shape: TriangleMultiplicationShape) -> int:
    """wgmma instructions of what is unrolled: the projections' depth and a step for means and biases, then that of what is made
    of their results."""
    config, channels, hidden = template.default(shape), shape.channels, shape.hidden
    depth, outer = channels // 16 + 1, hidden // 16 + 1
    if name == "front_weights":
        return config.tiles * (2 * depth + 4 * config.tile_n // 16)
    if name == "back_weights":
        return config.tiles * (depth + outer + 4 * config.tile_n // 16)
    if name == "front_backward":
        steps = 2 * hidden // config.tile_h
        return max(n for n in range(1, 9) if steps % n == 0) * (depth + 2 * config.tile_h // 16)
    return depth * template.passes(channels, hidden) + outer + 2 * config.tile_c // 16


@pytest.mark.parametrize("channels, hidden", WIDTHS)
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str, channels: int, hidden: int) -> None:
    template, shape = BACKWARD[name], TriangleMultiplicationShape(384, channels, hidden, mask="bool")
    config = template.default(shape)
    resources = compile_kernel(KernelSpec.make(template, shape, config)).resources
    # 256 channels leave no register for a few addresses; the others fit, but for a step of 64 pairs of the weight gradients.
    assert resources["spill_bytes"] <= (448 if channels == 256 else 256 if name.endswith("weights") else 0), resources
    assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], resources["ptxas_notes"]
    assert resources["hgmma"] == products_of(name, template, shape)
    assert resources["utmaldg"] > 0 and (resources["utmastg"] > 0) == (not name.endswith("weights"))
    estimate = template.resources(shape, config)
    assert resources["threads"] == estimate.threads
    assert estimate.smem_bytes - 8192 <= resources["smem_bytes"] <= estimate.smem_bytes


@pytest.mark.parametrize("channels", [32, 96, 128, 192, 224, 256, 288, 512])
def test_centre(channels: int) -> None:
    """Reads 16 bytes at a time and keeps nothing in local memory; four CTAs of 256 threads share an SM up to 256 channels."""
    template = get("triangle_multiplication_centre_sm90")
    shape = TriangleMultiplicationShape(384, channels)
    resources = compile_kernel(KernelSpec.make(template, shape, template.default(shape))).resources
    assert resources["spill_bytes"] == 0 and resources["threads"] == 256
    assert resources["registers"] <= template.resources(shape, template.default(shape)).registers_per_consumer


@pytest.mark.parametrize("hidden", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "bool"])
def test_front_gradients(hidden: int, mask: str) -> None:
    """A kernel for every 128 rows of the weights. Nothing spills, though sums for two weights leave few registers."""
    shape, launches = TriangleMultiplicationShape(384, 128, hidden, mask=mask), 2 * hidden // 128
    resources = resources_of(GRADIENTS, shape)
    assert resources["stl"] == resources["ldl"] == 0 and resources["setmaxnreg"] == 2 * launches
    # Values and gates with a step for means and biases; sums of both over 64 pairs, and their means; t over the rows of both.
    assert resources["hgmma"] == launches * (2 * (128 // 16 + 1) + 2 * 2 * 64 // 16 + 2 * 128 // 16)
    # dz alone leaves through TMA, half of the channels at a time; planes are stored by the threads that sum.
    assert resources["utmastg"] == launches
    assert resources["threads"] * resources["registers"] <= 65536


@pytest.mark.parametrize("name", BACKWARD)
def test_every_configuration_compiles(name: str) -> None:
    """None serialises its products, whether weights stay or come again, whether a step is one tile or two."""
    template, shape = BACKWARD[name], TriangleMultiplicationShape(384)
    for config in template.space(shape)[:: 1 if name.endswith("weights") else 4]:
        resources = compile_kernel(KernelSpec.make(template, shape, config)).resources
        assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], (config, resources["ptxas_notes"])
        assert resources["spill_bytes"] <= 256, (config, resources["spill_bytes"])


@pytest.mark.parametrize("channels, hidden", [(128, 128), (64, 64), (64, 128), (32, 32), (192, 192), (256, 256), (256, 512)])
@pytest.mark.parametrize("name", ["front_rows", "back_rows"])
def test_rows(name: str, channels: int, hidden: int) -> None:
    """Operands in registers, all blocks unrolled, no product serialised."""
    template = get(f"triangle_multiplication_{name}_sm90")
    shape = TriangleMultiplicationShape(384, channels, hidden, mask="bool")
    if name == "back_rows" and (channels == 32 or hidden == 512):
        assert not template.supports(shape)[0]  # too few channels for two blocks, or too many for two SMs
        return
    config = template.default(shape)
    if name == "front_rows":
        products = 2 * hidden // config.parts // config.tile_h * (channels // 16 + 1)
    else:
        products = channels // config.parts // config.tile_c * (channels // 16 + hidden // 16 + 2)
    assert resources_of(template, shape)["hgmma"] == products
    assert template.check(shape, template.default(shape)) is None


def test_rows_need_all_weights_on_few_sms() -> None:
    """Those of front may be on up to eight, those of back on two, where warpgroups share the tiles."""
    wide, wider = (TriangleMultiplicationShape(64, channels, channels) for channels in (256, 512))
    for name, shape in (("front_rows", wider), ("back_rows", wider), ("fold_front", wide)):
        supported, reason = get(f"triangle_multiplication_{name}_sm90").supports(shape)
        assert not supported and "do not fit" in reason
    front, back = (get(f"triangle_multiplication_{name}_rows_sm90") for name in ("front", "back"))
    shapes = [TriangleMultiplicationShape(384, *widths) for widths in ((128, 128), (192, 192), (256, 256))]
    assert [front.default(shape).parts for shape in shapes] == [1, 2, 4]
    assert [(c.parts, c.shared) for c in map(back.default, shapes)] == [(1, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("name", ["front_rows", "back_rows"])
@pytest.mark.parametrize("channels", [192, 256])
def test_shared_tiles_compile(name: str, channels: int) -> None:
    """No product is serialised, and what the estimate says of shared memory holds."""
    template, shape = get(f"triangle_multiplication_{name}_sm90"), TriangleMultiplicationShape(384, channels, channels)
    configs = [config for config in template.space(shape) if config.shared]
    assert configs
    for config in configs:
        resources = compile_kernel(KernelSpec.make(template, shape, config)).resources
        assert not [note for note in resources["ptxas_notes"] if "C75" in str(note)], (config, resources["ptxas_notes"])
        assert resources["spill_bytes"] <= 64 and resources["smem_bytes"] <= template.shared_bytes(shape, config), config


@pytest.mark.parametrize("channels, hidden", [(64, 384), (128, 384), (256, 128), (256, 256)])
def test_back_rows_spills_nothing_where_it_serves(channels: int, hidden: int) -> None:
    template = get("triangle_multiplication_back_rows_sm90")
    assert resources_of(template, TriangleMultiplicationShape(384, channels, hidden))["spill_bytes"] == 0
    assert "384, not 416" in template.check(TriangleMultiplicationShape(384, channels, 416), template.Config())


@pytest.mark.parametrize(
    "fields, reason", [(dict(shared=1, z_stages=2), "none of their own"), (dict(shared=2, consumer_warpgroups=1), "as many")]
)
def test_shared_tiles_are_for_all_warpgroups(fields: dict, reason: str) -> None:
    template, shape = get("triangle_multiplication_front_rows_sm90"), TriangleMultiplicationShape(384, 256, 256)
    assert reason in template.check(shape, dataclasses.replace(template.default(shape), **fields))


def test_splits_fill_the_gpu_and_depend_on_nothing_else() -> None:
    template = BACKWARD["front_weights"]
    shape = TriangleMultiplicationShape(384)
    assert template.splits(shape, template.default(shape), 132) == 66
    assert template.splits(TriangleMultiplicationShape(1), template.default(shape), 132) == 1
    assert "256" in template.supports(TriangleMultiplicationShape(64, 288))[1]
    # Every CTA has all rows of a launch, so there are as many shares as CTAs.
    assert GRADIENTS.splits(shape, GRADIENTS.default(shape), 132) == 132
    assert GRADIENTS.splits(TriangleMultiplicationShape(1), GRADIENTS.default(shape), 132) == 1


def test_a_legal_default_for_every_width() -> None:
    for channels in range(32, 513, 32):
        for hidden in range(32, 513, 32):
            for mask in ("none", "float"):
                shape = TriangleMultiplicationShape(100, channels, hidden, mask=mask)
                for template in (FRONT, BACK, PRODUCTS["nt"]):
                    space, default = template.space(shape), template.default(shape)
                    assert template.check(shape, default) is None and len(set(space)) == len(space)
                    assert all(template.check(shape, config) is None for config in space)
                for template in (*BACKWARD.values(), GRADIENTS):
                    if template.supports(shape)[0]:
                        assert template.default(shape) in template.space(shape)


def test_rejections_name_the_limit() -> None:
    shape = TriangleMultiplicationShape(384, 96, 160)
    assert "tile_k=64" in FRONT.check(shape, FRONT.Config(tile_k=64))
    assert "shared memory" in FRONT.check(TriangleMultiplicationShape(384, 512, 512), FRONT.Config(128, 2, 64))
    assert "tile_c=64" in BACK.check(shape, BACK.Config(tile_c=64, tile_k=32))
    product = PRODUCTS["nt"]
    assert "registers" in product.check(shape, product.Config(tile_n=256, consumer_warpgroups=3))
    assert "float16" in FRONT.supports(TriangleMultiplicationShape(384, dtype="float16"))[1]
    for fields in ({"tile_n": 192}, {"tile_n": 128, "tile_k": 128}):
        config = dataclasses.replace(product.default(shape), cluster=2, **fields)
        assert "shares for 2 CTAs" in product.check(shape, config)


@pytest.mark.parametrize("name, fields", [("front_rows", {"out_stages": 4}), ("back_rows", {"out_stages": 4, "tile_c": 32})])
def test_rows_with_two_blocks_under_way(name: str, fields: dict) -> None:
    template, shape = get(f"triangle_multiplication_{name}_sm90"), TriangleMultiplicationShape(384)
    config = dataclasses.replace(template.default(shape), consumer_warpgroups=2, sets=2, **fields)
    assert template.check(shape, config) is None
    resources = compile_kernel(KernelSpec.make(template, shape, config)).resources
    assert resources["spill_bytes"] == 0 and not [note for note in resources["ptxas_notes"] if "C75" in str(note)]


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_clusters(product: str) -> None:
    """Each CTA of two fetches half of the columns' operand for both."""
    template, shape = PRODUCTS[product], TriangleMultiplicationShape(768)
    for config in (config for config in template.space(shape) if config.cluster == 2):
        built = compile_kernel(KernelSpec.make(template, shape, config))
        assert built.resources["spill_bytes"] == 0 and not built.resources["ptxas_notes"]
        assert built.resources["hgmma"] == config.tile_k // 16
