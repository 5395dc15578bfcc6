"""Records of other problems and other devices that may serve one: what is comparable, and how far it is off.

Comparable is what runs the same code: equal padded head dim, dtypes, and with or without a mask. A record that differs in the
mask too serves where nothing comparable was measured on the device; nobody has measured how well. Standard library only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tpf_jit.device import Device, sibling_class
from tpf_jit.errors import TpfError
from tpf_jit.tuning_db.reader import Layer
from tpf_jit.tuning_db.rows import cell_key, split_cell
from tpf_jit.tuning_db.winner import Winner

SAME = ("tile_hdim", "dtype", "bias_dtype", "has_mask")
"""What a neighbour must have in common: it decides which code is compiled."""
_SIZES = ("crop", "heads", "rows", "batch", "head_dim")
_OF_OPS = {"triangle_multiplication": (("channels", "hidden", "dtype", "has_mask"), ("crop", "batch"))}
"""(`SAME`, sizes) of operations other than attention."""


@dataclass(frozen=True)
class Candidate:
    """A record that may serve the problem, and how far it is off."""

    winner: Winner
    layer: Layer
    distance: float
    masked: bool | None = None
    """Whether it was measured with a mask, where the problem differs in that; None where it does not."""


class Index:
    """The layers, and their cells by what neighbours must have in common."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self._families: dict[tuple[str, str], list[tuple[int, str, str]]] = defaultdict(list)
        self._shapes: dict[tuple[type, str, str], dict[tuple, list[tuple[int, str, str, Any]]]] = {}
        for number, layer in enumerate(layers):
            for cell, model in layer.winners:
                try:
                    op, _, direction = split_cell(cell)
                except TpfError:
                    continue
                self._families[op, direction].append((number, cell, model))

    def nearest(self, op: str, direction: str, shape: Any, model: str) -> Iterator[Candidate]:
        """Records of one device model, nearest first, without the exact one."""
        own = cell_key(shape, direction)
        return self._by_distance(op, direction, shape, lambda cell, where: where == model and cell != own)

    def across_mask(self, op: str, direction: str, shape: Any, model: str) -> Iterator[Candidate]:
        """Records of one device model that would be neighbours but for the mask, which only one of the two has; nearest first."""
        return self._by_distance(op, direction, shape, lambda _, where: where == model, other_mask=True)

    def elsewhere(self, op: str, direction: str, shape: Any, model: str, other_mask: bool = False) -> Iterator[Candidate]:
        """Records of all other devices, nearest first; with `other_mask` those that differ in whether there is a mask."""
        return self._by_distance(op, direction, shape, lambda cell, where: where != model, other_mask)

    def _by_distance(
        self, op: str, direction: str, shape: Any, wanted: Callable[[str, str], bool], other_mask: bool = False
    ) -> Iterator[Candidate]:
        found = [
            (distance(shape, other), -other.crop, number, cell, model)
            for number, cell, model, other in self._alike(op, direction, shape, other_mask)
            if wanted(cell, model)
        ]
        masked = not shape.has_mask if other_mask and found else None
        for apart, _, number, cell, model in sorted(found):
            for winner in self.layers[number].winners[cell, model]:
                yield Candidate(winner, self.layers[number], apart, masked)

    def _alike(self, op: str, direction: str, shape: Any, other_mask: bool) -> list[tuple[int, str, str, Any]]:
        """Parsed cells that share everything in `SAME` with the problem, or all but the mask; parsed once a kind of problem."""
        same, sizes = _OF_OPS.get(op, (SAME, _SIZES))
        if not hasattr(type(shape), "parse") or not all(hasattr(shape, name) for name in (*sizes, *same)):
            return []
        kind = (type(shape), op, direction)
        if kind not in self._shapes:
            groups: dict[tuple, list[tuple[int, str, str, Any]]] = defaultdict(list)
            for number, cell, model in self._families[op, direction]:
                try:
                    other = type(shape).parse(split_cell(cell)[1])
                except (TpfError, ValueError):
                    continue
                groups[_traits(other)].append((number, cell, model, other))
            self._shapes[kind] = groups
        return self._shapes[kind].get(_traits(shape, other_mask), [])


def distance(shape: Any, other: Any) -> float:
    """How far two problems of equal `SAME` are apart for tuning: |log2| of the crops' ratio, and less for what matters less.

    Heads and rows scale the work of every kernel alike; the rows count relative to the crop, as pair stacks have as many.
    """
    total = _octaves(shape.crop, other.crop) + 0.125 * _octaves(shape.batch, other.batch)
    if shape.op in _OF_OPS:
        return total
    total += 0.25 * _octaves(shape.heads, other.heads)
    total += 0.25 * _octaves(shape.rows * other.crop, other.rows * shape.crop)
    return total + 0.125 * _octaves(shape.head_dim, other.head_dim)


def _octaves(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def _traits(shape: Any, other_mask: bool = False) -> tuple:
    same, _ = _OF_OPS.get(shape.op, (SAME, _SIZES))
    traits = {name: getattr(shape, name) for name in same}
    if other_mask:
        traits["has_mask"] = not traits["has_mask"]
    return tuple(traits.values())


def siblings_first(candidates: Iterator[Candidate], device: Device | None) -> Iterator[Candidate]:
    """Records of other devices, those on the same die first, then by distance and number of SMs."""
    if device is None:
        return candidates
    own = sibling_class(device.name)

    def key(candidate: Candidate) -> tuple[bool, float]:
        name, sms, _ = candidate.winner.device.rsplit("/", 2)
        count = int(sms.removesuffix("sm") or 0)
        unlike = 0.5 * _octaves(count, device.sms) if count and device.sms else 0.5
        return (own is None or sibling_class(name) != own, candidate.distance + unlike)

    return iter(sorted(candidates, key=key))
