"""What a report says about trials, as numbers: winners, work and roofs, which parameters matter, sessions, staleness."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpf_jit import resolve
from tpf_jit.errors import NoKernel, TpfError
from tpf_jit.shape import SHAPES, TriangleAttentionShape, TriangleMultiplicationShape
from tpf_jit.templates import registry
from tpf_jit.templates.base import canonical_json
from tpf_jit.tuning_db import trust
from tpf_jit.tuning_db.reader import evidence
from tpf_jit.tuning_db.rows import TrialRow, median, split_cell
from tpf_jit.tuning_db.winner import Winner, rank

_EXP_PER_S = 132 * 16 * 1.83e9
PEAKS = {
    "NVIDIA H200": (4.8e12, 989e12, _EXP_PER_S),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12, _EXP_PER_S),
}
"""Device name -> bytes/s of memory and dense bf16 FLOP/s (NVIDIA's data sheets, boards of 700 W), and exponentials/s: 16 a clock
and SM (CUDA programming guide, compute capability 9.0) at 1.83 GHz, the clock that the FLOP/s stand for."""

_PRODUCTS = {"forward": 2, "forward_training": 2, "backward_key": 4, "backward_query": 3}
"""Matrix products over all scores that the mathematics asks of a kernel; what is computed twice for exactness does not count."""
_TENSORS = {"forward": 4, "forward_training": 5, "backward_key": 6, "backward_query": 5}
"""16-bit tensors like q that it must read or write once: q k v out; and the residual; q k v dO dK dV; q k v dO dQ."""
_VECTORS = {"forward": 1, "forward_training": 2, "backward_key": 2, "backward_query": 2}
"""fp32 values a query row: LSE; and its low part; LSE and delta."""


@dataclass(frozen=True)
class Work:
    """Least work of a problem: FLOP of its matrix products, bytes that must move once, and exponentials."""

    flop: float
    bytes: float
    exps: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.bytes


@dataclass(frozen=True)
class Cell:
    """One problem on one device model, and what is known of it.

    Attributes:
        name: of the cell.
        model: device model.
        shape: the problem, None where this version does not know its operation.
        family: operation and direction.
        winners: as `winner.rank` gives them: the winner and those kept behind it.
        rows: all its trials.
        stale: why the winner is stale, empty when it is current.
    """

    name: str
    model: str
    shape: Any
    family: str
    winners: list[Winner]
    rows: list[TrialRow]
    stale: list[str]

    @property
    def best(self) -> Winner:
        """The winner."""
        return self.winners[0]

    @property
    def work(self) -> Work | None:
        """Its least work, None where there is no count for its kind."""
        return work(self.shape, self.family.partition("/")[2])

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the winner."""
        least = self.work
        return None if least is None else least.flop / self.best.us / 1e6


@dataclass(frozen=True)
class Session:
    """One run of the tuner, as its rows tell."""

    name: str
    first: str
    last: str
    device: str
    toolchain: dict[str, Any]
    driver: str
    counts: dict[str, int]
    cells: int


@dataclass(frozen=True)
class Parameter:
    """How a configuration field bears on the time, over the cells of one template on one device model.

    Attributes:
        share: part of the variance of log(time / best of the cell) that its value alone accounts for (eta squared), 0 to 1.
        slices: value -> for each cell where it was tried, the best time with this value over the best of the cell, and the cell.
    """

    name: str
    share: float
    slices: dict[Any, list[tuple[float, str]]] = field(default_factory=dict)


def cells(trials: Iterable[TrialRow]) -> list[Cell]:
    """The cells that have a winner, by device model, family and size."""
    groups: dict[tuple[str, str], list[TrialRow]] = defaultdict(list)
    for row in trials:
        groups[row.cell, row.device_model].append(row)
    said = trust.statements(evidence("", row) for rows in groups.values() for row in rows)
    present: dict[str, trust.Present] = {}
    found = []
    for (name, model), rows in groups.items():
        winners = rank(evidence(row.id, row) for row in rows)
        if winners:
            op, key, direction = split_cell(name)
            stale = _stale(winners[0], said, present)
            found.append(Cell(name, model, _shape(op, key), f"{op}/{direction}", winners, rows, stale))
    return sorted(found, key=_order)


def work(shape: Any, direction: str) -> Work | None:
    """Least work of a kernel of a triangle operation; None for other operations, and for kernels without a matrix product."""
    if isinstance(shape, TriangleMultiplicationShape):
        return _multiplication_work(shape, direction)
    if not isinstance(shape, TriangleAttentionShape) or direction not in _PRODUCTS:
        return None
    queries = shape.batch * shape.rows * shape.heads * shape.crop
    scores = queries * shape.crop
    plane = shape.batch * shape.heads * shape.crop**2
    moved = _TENSORS[direction] * queries * shape.head_dim * 2 + _VECTORS[direction] * queries * 4
    moved += plane * (4 if shape.bias_dtype == "float32" else 2) + shape.has_mask * shape.batch * shape.rows * shape.crop * 4
    if direction == "backward_query":
        moved += plane * 4  # the gradient of the bias, fp32
    return Work(2.0 * _PRODUCTS[direction] * shape.head_dim * scores, float(moved), float(scores))


def _multiplication_work(shape: TriangleMultiplicationShape, direction: str) -> Work | None:
    """z is read by all but the products; front writes two factors, each product reads two and writes one, back reads x and writes
    the result. The backward's kernels get neither values nor gates, so computing them counts: each multiplies twice what its
    forward does, and front_gradients, which makes two things of them, three times. back_backward reads z, x and dout, and writes
    dx and the gate's share dzn; front_backward and front_gradients read z, dzn and the gradients of both factors, and write dz;
    those of the weights read the same but dzn, and write little. Statistics, weights and folding them are left out. A sigmoid is
    an exponential."""
    pairs, c, d = shape.batch * shape.crop**2, shape.channels, shape.hidden
    masks = pairs * (4 if shape.mask == "float" else 1) * (shape.mask != "none")
    front, back = 8.0 * pairs * c * d, 2.0 * pairs * c * (c + d)
    found = {
        **dict.fromkeys(("front", "fold_front"), (front, 2 * pairs * (c + 2 * d) + masks, 2 * pairs * d)),
        "back": (back, 2 * pairs * (2 * c + d), pairs * c),
        "back_backward": (2 * back, 2 * pairs * (3 * c + 2 * d), pairs * c),
        "back_weights": (2 * back, 2 * pairs * (2 * c + d), pairs * c),
        "front_backward": (2 * front, 2 * pairs * (3 * c + 2 * d) + masks, 2 * pairs * d),
        "front_weights": (2 * front, 2 * pairs * (c + 2 * d) + masks, 2 * pairs * d),
        "front_gradients": (3 * front, 2 * pairs * (3 * c + 2 * d) + masks, 2 * pairs * d),
    }
    if direction.startswith("product_"):
        return Work(2.0 * pairs * shape.crop * d, 6.0 * pairs * d, 0.0)
    return Work(*map(float, found[direction])) if direction in found else None


def width(shape: Any) -> tuple[str, int]:
    """What tells the lines of a chart apart: ("D", head dim) of attention, ("C", channels) of a multiplication."""
    return ("C", shape.channels) if isinstance(shape, TriangleMultiplicationShape) else ("D", shape.head_dim)


def parameters(members: list[Cell]) -> list[Parameter]:
    """The fields that were tried at more than one value, those that matter most first. `members` share template and model."""
    template = members[0].best.template
    entries: list[tuple[str, dict[str, Any], float]] = []
    for cell in members:
        times = configuration_times(cell.rows, template)
        best = min((us for _, us in times.values()), default=math.nan)
        entries += [(cell.name, config, us / best) for config, us in times.values()]
    names = dict.fromkeys(name for _, config, _ in entries for name in config)
    found = [_parameter(name, entries) for name in names]
    return sorted((each for each in found if len(each.slices) > 1), key=lambda each: -each.share)


def configuration_times(rows: Iterable[TrialRow], template: str) -> dict[str, tuple[dict[str, Any], float]]:
    """Configuration as JSON -> its fields and its time in us: the median of its rows' medians."""
    groups: dict[str, list[TrialRow]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.template == template and row.median_us:
            groups[canonical_json(row.config)].append(row)
    return {text: (group[0].config, median(row.median_us for row in group)) for text, group in groups.items()}


def sessions(trials: Iterable[TrialRow]) -> list[Session]:
    """The runs behind the rows, newest first."""
    groups: dict[tuple[str, str], list[TrialRow]] = defaultdict(list)
    for row in trials:
        groups[row.session, row.device_model].append(row)
    found = []
    for (name, model), rows in groups.items():
        counts: dict[str, int] = defaultdict(int)
        for row in rows:
            counts[row.status] += 1
        dates = sorted(row.date for row in rows)
        last = max(rows, key=lambda row: row.date)
        driver = str(last.device.get("driver", ""))
        found.append(
            Session(name, dates[0], dates[-1], model, last.toolchain, driver, dict(counts), len({row.cell for row in rows}))
        )
    return sorted(found, key=lambda each: each.last, reverse=True)


def progress(cell: Cell) -> list[tuple[str, float]]:
    """(date, best time in us) of each session that measured a cell, oldest first; finals where the session has any."""
    groups: dict[str, list[TrialRow]] = defaultdict(list)
    for row in cell.rows:
        if row.status == "ok" and row.median_us:
            groups[row.session].append(row)
    found = []
    for rows in groups.values():
        rows = [row for row in rows if row.grade == "final"] or rows
        found.append((max(row.date for row in rows), min(row.median_us for row in rows)))
    return sorted(found)


def failures(trials: Iterable[TrialRow]) -> list[tuple[str, str, int, str]]:
    """(template, status, how many, an example of why), for rows that are no measurement."""
    groups: dict[tuple[str, str], list[TrialRow]] = defaultdict(list)
    for row in trials:
        if row.status not in ("ok", "same_code"):
            groups[row.template, row.status].append(row)
    return [(*key, len(rows), rows[-1].detail.strip()) for key, rows in sorted(groups.items())]


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _parameter(name: str, entries: list[tuple[str, Mapping[str, Any], float]]) -> Parameter:
    logs: dict[Any, list[float]] = defaultdict(list)
    best: dict[Any, dict[str, float]] = defaultdict(dict)
    for cell, config, ratio in entries:
        if name in config:
            value = config[name]
            logs[value].append(math.log(ratio))
            best[value][cell] = min(ratio, best[value].get(cell, math.inf))
    everything = [value for group in logs.values() for value in group]
    mean = sum(everything) / len(everything)
    total = sum((value - mean) ** 2 for value in everything)
    between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in logs.values())
    ordered = sorted(best, key=lambda value: (isinstance(value, str), value))
    slices = {value: [(ratio, cell) for cell, ratio in best[value].items()] for value in ordered}
    return Parameter(name, between / total if total > 0 else 0.0, slices)


def _shape(op: str, key: str) -> Any:
    try:
        return SHAPES[op].parse(key) if op in SHAPES else None
    except TpfError:
        return None


def _stale(winner: Winner, said: trust.Statements, present: dict[str, trust.Present]) -> list[str]:
    if winner.template not in present:
        try:
            present[winner.template] = resolve.present(registry.get(winner.template))
        except NoKernel:
            return ["a template that is not installed here"]
    return trust.outdated(winner, present[winner.template], said)


def _order(cell: Cell) -> tuple:
    shape = cell.shape
    size: tuple = ()
    if isinstance(shape, TriangleAttentionShape):
        size = (shape.head_dim, shape.heads, shape.dtype, shape.bias_dtype, shape.mask, shape.crop)
    elif shape is not None:
        size = (shape.channels, shape.hidden, shape.dtype, shape.weight_dtype, shape.mask, shape.direction, shape.crop)
    return (cell.model, cell.family, shape is None, size, cell.name)
