"""How long a configuration should take, by arithmetic: ranks what nothing near has been measured for, before anything compiles.

Whether a configuration is legal (registers, shared memory, shapes of the matrix instructions) is the template's word (`check`,
`resources`); this says which of the legal ones to try first. Triangle multiplications are modelled
in `cost_multiplication`; triangle attention here, in clocks of an SM for one score:

    exponentials      1 / 16
    other arithmetic  `ALU` / 128
    matrix products   2 D a product, 4096 FLOP a clock
    traffic from L2   the bias once for each row of a CTA, keys and values once for each query of a CTA; `L2_BYTES` a clock
    a step            `STEP` clocks a tile of 64 by tile_n, shared among the warpgroups of the SM
    a CTA             `CTA` clocks at begin and end, shared among the CTAs of the SM

times what is padding, what a last wave leaves empty, and how well other warpgroups, CTAs and stages fill the waits. The constants
without a source are fitted to what ships for the H200 (tests/unit/test_tune_cost.py checks them against it). The model is for
ranking: its absolute times are no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tpf_jit.templates.base import config_to_dict
from tpf_jit.tune import cost_multiplication
from tpf_jit.tune.cost_sm90 import L2_BYTES, MMA_FLOP, SMS, WARPGROUP

ALU = 20.0
"""Instructions for a score beside its exponential."""
STEP, CTA = 560.0, 630.0
"""Clocks."""
WAITS, ALONE, STAGES = 0.3, 0.16, 0.01
"""Shares of the time lost: with one warpgroup on an SM, with one CTA, and with one stage in each pipeline."""

PRODUCTS = {"forward": 2, "forward_training": 3, "backward_key": 4, "backward_query": 3}
"""Matrix products of triangle attention's directions; training's forward takes P in two halves."""


def model(template: Any) -> Callable[[Any, Any], float] | None:
    """`(shape, config) -> cost`, lower first: the template's own method ``cost`` if it has one, else the one of this module; None
    where there is none."""
    own = getattr(template, "cost", None)
    if own is not None:
        return own
    if template.name in cost_multiplication.ROUNDS:
        return lambda shape, config: cost_multiplication.clocks(template, shape, config)
    names = getattr(template.Config, "__dataclass_fields__", {})
    fits = "consumer_warpgroups" in names and ("tile_n" in names or "tile_m" in names)
    if template.op != "triangle_attention" or template.direction not in PRODUCTS or not fits:
        return None
    return lambda shape, config: attention_clocks(template.direction, shape, config_to_dict(config))


def attention_clocks(direction: str, shape: Any, config: dict[str, Any]) -> float:
    """Clocks of an SM for one score of triangle attention.

    Args:
        direction: one of `PRODUCTS`.
        shape: the problem.
        config: fields of the configuration: each of `consumer_warpgroups` owns 64 queries (backward_key: keys); `tile_n`
            (backward_key: `tile_m`) is the tile that streams by; `rows_per_cta`, `ctas_per_sm` and numbers of stages as far as
            there are any. A configuration with a `cluster` walks all rows.
    """
    crop, rows, head_dim, products = shape.crop, shape.rows, shape.head_dim, PRODUCTS[direction]
    warpgroups, ctas = config["consumer_warpgroups"], config.get("ctas_per_sm", 1)
    owned, streamed = WARPGROUP * warpgroups, config.get("tile_n") or config["tile_m"]
    together = rows if "cluster" in config else min(rows, config.get("rows_per_cta", 1))
    concurrent = warpgroups * ctas
    clocks = 1 / 16 + ALU / 128 + 2 * products * head_dim / MMA_FLOP
    clocks += (2 / together + 2 * products * head_dim / owned) / L2_BYTES
    clocks += STEP / (WARPGROUP * streamed * concurrent)
    clocks *= 1 + WAITS / concurrent + ALONE * (ctas == 1)
    clocks *= 1 + STAGES * sum(1 / value for name, value in config.items() if name.endswith("stages"))
    clocks += CTA / (together * owned * crop * ctas)
    blocks = shape.batch * shape.heads * math.ceil(rows / together) * math.ceil(crop / owned)
    waves = blocks / (SMS * ctas)
    padding = math.ceil(crop / owned) * owned * math.ceil(crop / streamed) * streamed / crop**2
    return clocks * padding * math.ceil(waves) / waves
