"""Charts of the report as inline SVG: text and shapes only, coloured by the page's style sheet, so that they follow dark mode.

Standard library only: a page must be written where matplotlib is not installed, and matplotlib's colours are fixed when it draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = 8
"""Series colours that the style sheet defines, `c0` to `c7`; more series start again."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 118, 14, 44


@dataclass(frozen=True)
class Series:
    """Points under one name, drawn in order.

    Attributes:
        name: shown at the last point.
        points: (x, y, what a tooltip says).
        style: "line" with points, "points", "dots" (faint points, for many), or "roof" (a dashed line without points).
        colour: number of its colour; None for that of the text.
    """

    name: str
    points: Sequence[tuple[float, float, str]]
    style: str = "line"
    colour: int | None = 0


@dataclass
class Chart:
    """Axes with series. Logarithmic axes take positive values only; points that are not are left out.

    Attributes:
        title: what it shows, for screen readers.
        x_label, y_label: with the unit.
        log_x, log_y: whether an axis is logarithmic.
        x_ticks: (value, text) where the caller knows the values that count; chosen by decades or steps when empty.
        y_from_zero: whether a linear y axis begins at 0.
        size: (width, height) in px.
    """

    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[tuple[float, str]] = ()
    y_from_zero: bool = False
    size: tuple[int, int] = (520, 300)
    series: list[Series] = field(default_factory=list)

    def svg(self) -> str:
        """The chart, or "" where nothing can be drawn."""
        drawn = [(each, [point for point in each.points if self._shown(point)]) for each in self.series]
        drawn = [(each, points) for each, points in drawn if points]
        if not drawn:
            return ""
        values = [point for _, points in drawn for point in points]
        xs = _Scale([x for x, _, _ in values] + [x for x, _ in self.x_ticks], self.log_x, _LEFT, self.size[0] - _RIGHT)
        low = [0.0] * self.y_from_zero
        ys = _Scale([y for _, y, _ in values] + low, self.log_y, self.size[1] - _BOTTOM, _TOP, self.y_from_zero)
        parts = [*self._axes(xs, ys), *self._names(drawn, xs, ys)]
        for each, points in drawn:
            parts.append(_draw(each, [(xs(x), ys(y), tip) for x, y, tip in points]))
        width, height = self.size
        head = f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" xmlns="http://www.w3.org/2000/svg">'
        return f"{head}<title>{escape(self.title)}</title>{''.join(parts)}</svg>"

    def _shown(self, point: tuple[float, float, str]) -> bool:
        x, y, _ = point
        return math.isfinite(x) and math.isfinite(y) and (x > 0 or not self.log_x) and (y > 0 or not self.log_y)

    def _axes(self, xs: _Scale, ys: _Scale) -> list[str]:
        width, height = self.size
        bottom, right = height - _BOTTOM, width - _RIGHT
        parts = []
        for value, text in ys.ticks():
            y = ys(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            parts.append(_text(_LEFT - 6, y + 4, text, "end"))
        for value, text in self.x_ticks or xs.ticks():
            x = xs(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
            parts.append(_text(x, bottom + 16, text, "middle"))
        parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        parts.append(_text((_LEFT + right) / 2, height - 8, self.x_label, "middle", "label"))
        middle = (_TOP + bottom) / 2
        parts.append(f'<g transform="rotate(-90 14 {middle:.1f})">{_text(14, middle, self.y_label, "middle", "label")}</g>')
        return parts

    def _names(self, drawn: list[tuple[Series, list]], xs: _Scale, ys: _Scale) -> list[str]:
        """Each series' name at its last point, moved down where it would cover another."""
        ends = [(ys(points[-1][1]), xs(points[-1][0]), each) for each, points in drawn if each.name]
        parts, lowest = [], -math.inf
        for y, x, each in sorted(ends, key=lambda end: end[:2]):
            lowest = max(y, lowest + 13)
            colour = "" if each.colour is None else f" t{each.colour % COLOURS}"
            parts.append(_text(min(x + 8, self.size[0] - _RIGHT + 8), lowest + 4, each.name, "start", f"name{colour}"))
        return parts


def bars(title: str, rows: Sequence[tuple[str, float, str]], width: int = 520) -> str:
    """Horizontal bars: (name, share from 0 to 1, text beside the bar)."""
    if not rows:
        return ""
    height = 24 * len(rows) + 8
    room = width - 170 - 120
    parts = []
    for index, (name, share, text) in enumerate(rows):
        y = 24 * index + 6
        length = room * min(max(share, 0.0), 1.0)
        parts.append(_text(162, y + 12, name, "end"))
        parts.append(f'<rect class="c0" x="170" y="{y}" width="{max(length, 1):.1f}" height="15" rx="2"/>')
        parts.append(_text(178 + length, y + 12, text, "start"))
    head = f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="img" xmlns="http://www.w3.org/2000/svg">'
    return f"{head}<title>{escape(title)}</title>{''.join(parts)}</svg>"


class _Scale:
    """From values to pixels, with a margin, and round ticks."""

    def __init__(self, values: list[float], log: bool, start: float, end: float, from_zero: bool = False) -> None:
        self.log = log
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        pad = (high - low) * 0.06 or (0.15 if log else abs(high) * 0.1 or 1.0)
        self.low, self.high = low if from_zero else low - pad, high + pad
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        place = math.log10(value) if self.log else value
        return self.start + (place - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[tuple[float, str]]:
        if self.log:
            span = self.high - self.low
            steps = (1, 2, 5) if span < 2.2 else (1, 3) if span < 3.5 else (1,)
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [value for value in found if self.low <= math.log10(value) <= self.high]
            return [(value, number(value)) for value in found]
        rough = (self.high - self.low) / 5
        base = 10.0 ** math.floor(math.log10(rough))
        step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough)
        first = math.ceil(self.low / step)
        # As many decimals as the step has, so that 1.025 is not called 1.03.
        digits = next((digits for digits in range(9) if abs(round(step, digits) - step) < step * 1e-6), 9)
        places = range(first, math.floor(self.high / step) + 1)
        return [(index * step, f"{index * step:,.{digits}f}") for index in places]


def number(value: float) -> str:
    """Three significant digits, without an exponent from 0.001 to a million."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _draw(series: Series, points: list[tuple[float, float, str]]) -> str:
    colour = "text" if series.colour is None else f"c{series.colour % COLOURS}"
    parts = []
    if series.style in ("line", "roof") and len(points) > 1:
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in points)
        parts.append(f'<path class="line {colour}{" roof" * (series.style == "roof")}" d="{path}"/>')
    if series.style != "roof":
        faint = " faint" if series.style == "dots" else ""
        for x, y, tip in points:
            place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.2"'
            parts.append(f'<circle class="{colour}{faint}" {place}><title>{escape(tip)}</title></circle>')
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
