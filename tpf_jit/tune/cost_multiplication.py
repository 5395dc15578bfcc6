"""How long a configuration of a triangle multiplication's kernel should take, by arithmetic: `cost`'s model for that operation.

W warpgroups of an SM take a tile each, and that round repeats until all tiles are done. A round, in clocks:

    products      for 64 rows by n columns and 16 of depth, 4096 FLOP a clock, or the shared memory that is read for them at 128
                  bytes a clock: n by 16 of one operand, and 64 by 16 of the other unless that is in registers
    gates         an exponential and a reciprocal an element, 16 a clock, where one reciprocal does not serve two elements or
                  four, or one tanh does for both; the arithmetic beside them (about 10 instructions, 128 a clock) takes less
    traffic       what the round reads from L2 (weights that do not stay on the SM; operands of the product kernels, less where
                  CTAs of a cluster share them, and of the weight gradients), and what it moves to or from memory
    a warpgroup   its own products and gates, one after the other, and its waits: `STEP` for a step (products, then gates),
                  `RING` for a stage of a ring that others fill, over how many are free, `LOAD` for a tile with no second buffer

These are joined by a norm of degree `OVERLAP` (1: nothing overlaps; infinite: all does). Products and gates count for all W
warpgroups, waits for one: more warpgroups hide them. But in the first templates of front and back all W begin a tile at once,
so that one's products hardly run beside another's gates: there products and gates of all count one after the other, `STORE` a
step instead of `STEP`, as a step also waits for the only buffer of results, and in the front the warpgroup that takes the
statistics is a further part.

Rounds are whole and so are tiles: what pads a crop and what a last wave leaves empty costs as much as work. What is the same for
all configurations (launch, fetching weights once) is left out, and so is whether warpgroups take turns in a tile. The constants
below are fitted to what was measured on an H200 at 64 and 128 channels and crops of 256 to 2048, those of the chip (`cost_sm90`)
are not; tests check the ranking against measurements. The model is for ranking: its absolute times are no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpf_jit.tune.cost_sm90 import L2_BYTES, MEMORY_BYTES, MMA_FLOP, MUFU, SHARED_BYTES, SMS, WARPGROUP

OVERLAP = 1.15
"""Degree of the norm that joins the parts of a round."""
STEP, STORE, RING, LOAD = 100.0, 435.0, 500.0, 4000.0
"""Clocks that a warpgroup waits: see above. A load of a tile is one of memory."""
STATISTICS = 45.0
"""Clocks for a pair's mean and deviation in the first front's one warpgroup for them."""
READS = 1.1
"""Clocks of reading shared memory over those at its full rate."""
SETS, SETS_BACKWARD = 0.12, 0.47
"""Share of the shorter of products and gates that a second set of accumulators hides; in the backward sums go on beside them."""
MORE = 16
"""Columns that carry means and biases through the products."""


@dataclass(frozen=True)
class Round:
    """What W warpgroups of an SM do at a time; a tile is one warpgroup's share of it.

    Attributes:
        count: rounds until all is done.
        warpgroups: W.
        mma: clocks of a tile's products.
        gates: elements of a tile that are gated.
        powers: exponentials, reciprocals and tanhs for one.
        steps: of a tile.
        l2: bytes that the round reads from L2.
        memory: bytes to and from memory for a tile.
        ring: waits for the next stage of a ring, over the stages that are free.
        unbuffered: whether a tile's data is fetched only when the tile before is done.
        sets: sets of accumulators.
        hides: what the second hides.
        locked: whether the warpgroups begin together.
        statistics: pairs of a tile whose statistics one warpgroup takes for all.
    """

    count: int
    warpgroups: int
    mma: float
    gates: float
    steps: int
    l2: float
    memory: float
    ring: float = 0.0
    unbuffered: bool = False
    sets: int = 1
    locked: bool = False
    statistics: int = 0
    powers: float = 1.5
    hides: float = SETS

    def clocks(self) -> float:
        """Of all rounds."""
        width, gates = self.warpgroups, self.gates * self.powers / MUFU
        waits = self.steps * (STORE if self.locked else STEP) + self.ring * RING + self.unbuffered * LOAD
        hidden = (self.sets - 1) * self.hides * min(self.mma, gates + self.steps * STEP)
        parts = [self.l2 / L2_BYTES, width * self.memory / MEMORY_BYTES, width * self.statistics * STATISTICS]
        if self.locked:
            parts += [width * (self.mma + gates) + waits]
        else:
            parts += [width * self.mma, width * gates, self.mma + gates + waits - hidden]
        return self.count * sum(part**OVERLAP for part in parts) ** (1 / OVERLAP)


def clocks(template: Any, shape: Any, config: Any) -> float:
    """Clocks of an SM for a whole problem; `template` is one of `ROUNDS`."""
    return ROUNDS[template.name](template, shape, config).clocks()


def product(rows: float, columns: float, depth: float, registers: bool = False) -> float:
    """Clocks of a matrix product of a warpgroup; `registers`: the operand with the rows does not come from shared memory."""
    flop = 2 * WARPGROUP * columns * 16 / MMA_FLOP
    shared = READS * 2 * 16 * (columns + (0 if registers else WARPGROUP)) / SHARED_BYTES
    return rows / WARPGROUP * depth / 16 * max(flop, shared)


def tiles(shape: Any, pairs: int = WARPGROUP) -> int:
    """Tiles of that many pairs of one row of the pair tensor."""
    return shape.batch * shape.crop * -(-shape.crop // pairs)


def front(template: Any, shape: Any, config: Any) -> Round:
    channels, width = shape.channels, config.consumer_warpgroups
    steps = 2 * shape.hidden // WARPGROUP
    stages = steps * (channels // config.tile_k)
    streams = config.weight_stages < stages
    return Round(
        count=math.ceil(tiles(shape, config.tile_n) / (SMS * width)),
        warpgroups=width,
        mma=2 * steps * product(WARPGROUP, config.tile_n, channels),
        gates=2 * shape.hidden * config.tile_n,
        steps=steps,
        l2=streams * 8 * shape.hidden * channels,
        memory=2 * config.tile_n * (channels + 2 * shape.hidden),
        ring=streams * stages / (config.weight_stages - 1),
        unbuffered=config.z_stages == 1,
        locked=True,
        statistics=config.tile_n,
        powers=2.0,
    )


def front_rows(template: Any, shape: Any, config: Any) -> Round:
    channels, rows = shape.channels, 2 * shape.hidden // config.parts
    steps = rows // config.tile_h
    return Round(
        count=math.ceil(tiles(shape) / (SMS // config.parts * config.consumer_warpgroups)),
        warpgroups=config.consumer_warpgroups,
        mma=steps * product(WARPGROUP, 2 * config.tile_h, channels + MORE, True) + _to_registers(channels),
        gates=rows * WARPGROUP,
        steps=steps,
        l2=0,
        memory=2 * WARPGROUP * (channels // config.parts + rows),
        sets=config.sets,
        powers=1.0,
    )


def back(template: Any, shape: Any, config: Any) -> Round:
    depth, width = shape.channels + shape.hidden, config.consumer_warpgroups
    steps = shape.channels // config.tile_c
    stages = steps * (depth // config.tile_k)
    streams = config.weight_stages < stages
    return Round(
        count=math.ceil(tiles(shape) / (SMS * width)),
        warpgroups=width,
        mma=steps * product(WARPGROUP, config.tile_c, depth),
        gates=WARPGROUP * shape.channels,
        steps=steps,
        l2=streams * 2 * shape.channels * depth,
        memory=2 * WARPGROUP * (depth + shape.channels),
        ring=streams * stages / (config.weight_stages - 1),
        unbuffered=config.stages == 1,
        locked=True,
        powers=2.0,
    )


def back_rows(template: Any, shape: Any, config: Any) -> Round:
    depth, channels = shape.channels + shape.hidden, shape.channels // config.parts
    steps = channels // config.tile_c
    return Round(
        count=math.ceil(tiles(shape) / (SMS // config.parts * config.consumer_warpgroups)),
        warpgroups=config.consumer_warpgroups,
        mma=steps * product(WARPGROUP, config.tile_c, depth + 2 * MORE, True) + _to_registers(depth),
        gates=WARPGROUP * channels,
        steps=steps,
        l2=0,
        memory=2 * WARPGROUP * (depth // config.parts + channels),
        sets=config.sets,
        powers=1.0,
    )


def contraction(template: Any, shape: Any, config: Any) -> Round:
    """The product kernels: operands come from L2, where a channel's stay."""
    stages, rows = -(-shape.crop // config.tile_k), WARPGROUP * config.consumer_warpgroups
    depth, columns = stages * config.tile_k, config.tile_n / config.cluster
    tasks = shape.batch * shape.hidden * -(-shape.crop // (rows * config.cluster)) * -(-shape.crop // config.tile_n)
    return Round(
        count=math.ceil(tasks / (SMS // config.cluster)),
        warpgroups=config.consumer_warpgroups,
        mma=product(WARPGROUP, config.tile_n, depth),
        gates=0,
        steps=1,
        l2=2 * depth * (rows + columns),
        memory=2 * WARPGROUP * config.tile_n,
        ring=stages / (config.stages - 1),
    )


def back_backward(template: Any, shape: Any, config: Any) -> Round:
    channels, hidden = shape.channels, shape.hidden
    depth, steps, passes = channels + hidden, channels // config.tile_c, template.passes(channels, hidden)
    streams = config.weight_stages < steps
    again = product(WARPGROUP, config.tile_c, depth + 2 * MORE)
    return Round(
        count=math.ceil(tiles(shape) / (SMS * config.consumer_warpgroups)),
        warpgroups=config.consumer_warpgroups,
        mma=passes * steps * again + product(WARPGROUP, depth, channels, True),
        gates=passes * WARPGROUP * channels,
        steps=2 * passes * steps,
        l2=streams * passes * 2 * channels * depth,
        memory=2 * WARPGROUP * (3 * channels + 2 * hidden),
        ring=streams * passes * steps / max(1, config.weight_stages - 1),
        unbuffered=config.pair_stages == 1,
    )


def front_backward(template: Any, shape: Any, config: Any) -> Round:
    channels, hidden = shape.channels, shape.hidden
    steps = 2 * hidden // config.tile_h
    streams = config.weight_stages < steps
    again = product(WARPGROUP, 2 * config.tile_h, channels + MORE, bool(config.operand_registers))
    return Round(
        count=math.ceil(tiles(shape) / (SMS * config.consumer_warpgroups)),
        warpgroups=config.consumer_warpgroups,
        mma=steps * again + 2 * product(WARPGROUP, channels, 2 * hidden, True),
        gates=2 * hidden * WARPGROUP,
        steps=2 * steps,
        l2=streams * 8 * hidden * channels,
        memory=2 * WARPGROUP * (3 * channels + 2 * hidden),
        # A step's weights come back when the products of the step after it, with two sets of three, are under way.
        ring=streams * steps / max(1, config.weight_stages - 2 * config.sets + 1),
        unbuffered=config.pair_stages == 1,
        sets=config.sets,
        hides=SETS_BACKWARD,
    )


def weights(template: Any, shape: Any, config: Any) -> Round:
    """Both sides' weight gradients: a CTA reads all pairs of its share, for the rows that it owns."""
    columns, pairs = template.values(shape) + shape.channels, config.tiles * config.tile_n
    again = config.tiles * product(WARPGROUP, config.tile_n, columns + 2 * MORE)
    read = columns if template.direction == "back_weights" else shape.channels
    return Round(
        count=math.ceil(tiles(shape, pairs) / template.splits(shape, config, SMS)),
        warpgroups=config.consumer_warpgroups,
        mma=again + product(WARPGROUP, columns / template.parts(shape) + 2 * MORE, pairs, True),
        gates=WARPGROUP * pairs,
        steps=2,
        l2=2 * pairs * (read + WARPGROUP * config.consumer_warpgroups),
        memory=0,
        sets=config.tiles,
        hides=SETS_BACKWARD,
    )


def front_gradients(template: Any, shape: Any, config: Any) -> Round:
    """A launch for the rows that a CTA owns; each reads all pairs again. For t, a warpgroup takes its share of the channels, and
    the rows of all."""
    channels, rows = shape.channels, WARPGROUP * config.consumer_warpgroups
    again = 2 * product(WARPGROUP, WARPGROUP, channels + MORE)
    sums = 2 * product(WARPGROUP, channels + MORE, WARPGROUP, True)
    return Round(
        count=2 * shape.hidden // rows * math.ceil(tiles(shape) / template.splits(shape, config, SMS)),
        warpgroups=config.consumer_warpgroups,
        mma=again + sums + product(WARPGROUP, channels / config.consumer_warpgroups, 2 * rows),
        gates=WARPGROUP * WARPGROUP,
        steps=3,
        l2=0,
        memory=2 * WARPGROUP * (3 * channels + rows) / config.consumer_warpgroups,
    )


def _to_registers(columns: int) -> float:
    """Clocks to read a tile of pairs from shared memory."""
    return 2 * WARPGROUP * columns / SHARED_BYTES


ROUNDS: dict[str, Callable[[Any, Any, Any], Round]] = {
    f"triangle_multiplication_{name}_sm90": count
    for name, count in {
        "front": front, "front_rows": front_rows, "fold_front": front_rows, "back": back, "back_rows": back_rows,
        "product_nt": contraction, "product_tn": contraction, "product_nn": contraction, "back_backward": back_backward,
        "back_weights": weights, "front_backward": front_backward, "front_weights": weights, "front_gradients": front_gradients,
    }.items()
}  # fmt: skip
"""Template -> what a round of a configuration is."""
