"""Which cells a sweep of many covers, in which order, and how they are divided.

A cell is one problem in one direction, `tuning_db`'s unit of tuning on a device model. The order is a function of the set of
cells alone, not of how they were named, so every machine that is given the same targets plans the same list. Cells that compile
to the same kernels (crops of one model, mostly) stand next to each other: their ranking carries over from one to the next, and a
contiguous block of the list compiles hardly anything that another block compiles too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tpf_jit.errors import InvalidInput, NoKernel
from tpf_jit.kernels import check_operation
from tpf_jit.shape import TriangleMultiplicationShape, is_key, is_shape, parse_key, preset
from tpf_jit.templates import registry
from tpf_jit.templates.base import canonical_json
from tpf_jit.tune.session import supporting

T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """A problem in one direction."""

    shape: Any
    direction: str

    @property
    def key(self) -> str:
        """Its name in the tuning database."""
        return f"{self.shape.key()}/{self.direction}"


@dataclass(frozen=True)
class Plan:
    """What to tune, in order, and what no template can be tuned for."""

    cells: tuple[Cell, ...]
    refused: tuple[tuple[str, str], ...] = ()
    """(cell, reason) pairs."""


def plan(problem: Any, directions: Iterable[str] | None = None, template: Any = None, gpu: Any = None) -> Plan:
    """The cells of `problem`, each once, under the names their measurements have (`Template.measured_as`); a cell without a
    choice is none, and refused if its direction was asked for.

    Args:
        problem: a shape, a list of shapes, a shape key, or a preset (name or path).
        directions: of each shape; all that its operation has templates for when left out.
        template: tune this template only (name or instance), in its own direction unless `directions` says otherwise.
        gpu: the `Device` to tune on; templates for any when left out.

    Raises:
        InvalidInput: a direction that no template of the operation has, a template of an operation that no problem is of, or no
            problem at all.
    """
    groups: dict[str, list[tuple[tuple[Any, ...], Cell]]] = {}
    refused: list[tuple[str, str]] = []
    planned: set[Cell] = set()
    asked = None if directions is None else list(dict.fromkeys(directions))
    chosen = registry.get(template) if isinstance(template, str) else template
    if chosen is not None and asked is None:
        asked = [chosen.direction]
    shapes = list(dict.fromkeys(shapes_of(problem)))
    if chosen is not None and all(shape.op != chosen.op for shape in shapes):
        check_operation(chosen, shapes[0].op)
    known = {op: tunable_directions(op) for op in dict.fromkeys(shape.op for shape in shapes)}
    everything = list(dict.fromkeys(direction for directions in known.values() for direction in directions))
    for direction in asked or ():
        if direction not in everything:
            raise InvalidInput.of("direction", repr(direction), ", ".join(everything) or "none, as there are no templates")
    for shape in shapes:
        if not known[shape.op]:
            refused.append((shape.key(), f"no template is registered for {shape.op}"))
        for direction in known[shape.op]:
            if asked is not None and direction not in asked:
                continue
            if chosen is not None and chosen.op != shape.op:
                refused.append((Cell(shape, direction).key, f"{chosen.name} computes {chosen.op}"))
                continue
            try:
                templates = supporting(shape, direction, gpu, chosen)
            except NoKernel as error:
                if asked is not None or not all(each.optional for each in registry.templates(shape.op, direction)):
                    refused.append((Cell(shape, direction).key, str(error)))
                continue
            if sum(len(each.space(shape)) for each in templates) < 2:
                if asked is not None:
                    refused.append((Cell(shape, direction).key, f"{direction} has one configuration only, so nothing to choose"))
                continue
            cell = Cell(templates[0].measured_as(shape), direction)
            if cell in planned:
                continue
            planned.add(cell)
            kernels = [(each.name, dict(each.variant(shape))) for each in templates]
            group = canonical_json([shape.op, known[shape.op].index(direction), kernels])
            groups.setdefault(group, []).append((_natural(cell.key), cell))
    ordered = [cell for group in sorted(groups, key=_natural) for _, cell in sorted(groups[group], key=lambda entry: entry[0])]
    return Plan(tuple(ordered), tuple(sorted(refused)))


def tunable_directions(op: str) -> list[str]:
    """Directions that the registered templates of an operation have, in order of registration."""
    return list(dict.fromkeys(template.direction for template in registry.templates(op)))


def inference_directions(shape: Any) -> list[str]:
    """Those that a call without gradients runs, in order: forward, or three kernels of a triangle multiplication, as one that
    only folds its weights has nothing to choose."""
    if shape.op != TriangleMultiplicationShape.op:
        return ["forward"]
    from tpf_jit.ops.multiplication_routing import FOLD, families

    return [family.partition("/")[2] for family in families(shape) if family != FOLD]


def inference_cells(shapes: Iterable[Any], direction: str | None = None) -> list[tuple[Any, str]]:
    """(shape, direction) of what calls without gradients run, or of one direction; each measurement once, by its first name."""
    found: dict[str, tuple[Any, str]] = {}
    for shape in shapes:
        for each in [direction] if direction else inference_directions(shape):
            templates = registry.templates(shape.op, each)
            named = templates[0].measured_as(shape) if templates else shape
            found.setdefault(Cell(named, each).key, (shape, each))
    return list(found.values())


def shapes_of(problem: Any) -> list[Any]:
    """The shapes that `problem` names (see `plan`). Raises InvalidInput for what is none, or nothing at all."""
    if isinstance(problem, str) and is_key(problem):
        return [parse_key(problem)]
    if isinstance(problem, (str, os.PathLike)):
        return preset(problem)
    found = [problem] if is_shape(problem) else list(problem) if isinstance(problem, Iterable) else []
    if not found or not all(is_shape(item) for item in found):
        raise InvalidInput.of("problem", repr(problem)[:200], "a shape, a list of shapes, a shape key, or a preset")
    return found


def shard(cells: Sequence[T], text: str) -> list[T]:
    """The part of `cells` that shard `text` (``3/16``: the third of sixteen) tunes: a contiguous block.

    The blocks of all shards are disjoint, cover the list, and differ in length by at most one.

    Raises:
        InvalidInput: for anything but two whole numbers i/n with 1 <= i <= n.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*/\s*([0-9]+)\s*", text)
    number, count = (int(part) for part in match.groups()) if match else (0, 0)
    if not 1 <= number <= count:
        raise InvalidInput.of("shard", repr(text), "i/n with 1 <= i <= n, such as 3/16")
    return list(cells[(number - 1) * len(cells) // count : number * len(cells) // count])


def share_s(left_s: float | None, cells_left: int, processes: int = 1) -> float | None:
    """Seconds of search for the next cell: an equal part of the time left, so what quick cells leave goes to later ones.

    Args:
        left_s: time left for all; None without limit.
        cells_left: cells not begun yet, the next one included.
        processes: measuring processes that work on these cells at once.
    """
    if left_s is None:
        return None
    return max(0.0, left_s) * min(1.0, processes / max(1, cells_left))


def _natural(text: str) -> tuple[Any, ...]:
    """A sort key by which N384 comes before N1024."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", text) if part)
