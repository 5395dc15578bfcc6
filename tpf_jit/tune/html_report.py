"""What a tuning database knows as one HTML page: no script, no network, readable in light and dark mode.

    write_report("tuning.html", trials, ["tuning.db"])

Every number comes from rows. Charts are inline SVG with a tooltip on each point; tables hold the same numbers as text.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tpf_jit import __version__
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.tune import html_report_facts as facts
from tpf_jit.tune.html_report_facts import PEAKS, Cell
from tpf_jit.tune.html_report_style import STYLE
from tpf_jit.tune.html_report_svg import Chart, Series, bars, number
from tpf_jit.tuning_db.rows import TrialRow, utc_now

MOST_SESSIONS, MOST_HISTORIES, MOST_STALE = 60, 24, 200
ASSUMED = (
    "Assumed: bytes count every operand and result once (q, k, v, out, bias, mask, LSE and what the direction adds); "
    "FLOP count the products Q·K and P·V of the forward (4·D a score), four products for dK and dV, three for dQ. Peaks "
    "are those of NVIDIA's data sheets for the 700 W boards, which a kernel at its power limit does not reach. The "
    "dashed lines by head dim are what one exponential a score allows at 16 a clock and SM at 1.83 GHz; a kernel that "
    "computes some of them by polynomials may pass them. Inputs were rotated beyond the L2 cache."
)
_SECTIONS = ("best", "speed", "parameters", "roofline", "history", "staleness")


def write_report(path: str | os.PathLike[str], trials: Iterable[TrialRow], sources: Sequence[str] = ()) -> int:
    """Write the page.

    Args:
        path: the file; its folder must exist. It is replaced in one step.
        trials: the rows, of any number of cells and devices.
        sources: where they come from, for the heading.

    Returns:
        How many problems have a winner.

    Raises:
        OSError: the file cannot be written.
    """
    trials = list(trials)
    cells = facts.cells(trials)
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.write_text(page(trials, cells, sources), encoding="utf-8")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return len(cells)


def page(trials: list[TrialRow], cells: list[Cell], sources: Sequence[str] = ()) -> str:
    """The page as text."""
    body = [
        _heading(trials, cells, sources),
        _section("best", "Best configurations", _best(cells)),
        _section("speed", "Speed against N", _speed(cells)),
        _section("parameters", "Parameters", _parameters(cells)),
        _section("roofline", "Roofline", _roofline(cells)),
        _section("history", "History", _history(trials, cells)),
        _section("staleness", "Staleness", _staleness(cells)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tpf_jit tuning report</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _heading(trials: list[TrialRow], cells: list[Cell], sources: Sequence[str]) -> str:
    dates = sorted(row.date for row in trials)
    tiles = {
        "problems with a winner": len(cells),
        "device models": len({cell.model for cell in cells}),
        "trials": len(trials),
        "of them right and timed": sum(row.status == "ok" for row in trials),
        "stale winners": sum(bool(cell.stale) for cell in cells),
    }
    span = f"Measured from {dates[0]} to {dates[-1]}." if dates else "There are no rows."
    where = "; ".join(sources) or "rows in memory"
    shown = "".join(f'<div class="tile"><b>{count:,}</b>{escape(name)}</div>' for name, count in tiles.items())
    links = "".join(f'<a href="#{name}">{name}</a>' for name in _SECTIONS)
    return (
        f"<h1>Tuning report</h1>\n<p class='note'>Written {utc_now()} by tpf_jit {__version__} from {escape(where)}. {span}</p>\n"
        f"<nav>{links}</nav>\n<div class='tiles'>{shown}</div>"
    )


def _section(name: str, title: str, content: str) -> str:
    return f"<section id='{name}'>\n<h2>{title}</h2>\n{content}\n</section>"


def _best(cells: list[Cell]) -> str:
    if not cells:
        return "<p>Nothing has a winner yet.</p>"
    columns = ("problem", "us#", "p10 to p90#", "TFLOP/s#", "configuration", "tie#", "grade", "date", "state")
    parts = [
        _note(
            "The winner is the first in canonical order of the configurations within noise of the fastest; ‘tie’ is how "
            "many these are. Times are medians, for the kernel alone. TFLOP/s count the matrix products that the "
            "mathematics asks for."
        )
    ]
    for (model, family), members in _grouped(cells, lambda cell: (cell.model, cell.family)).items():
        rows = []
        for cell in members:
            best, row = cell.best, next(row for row in cell.rows if row.id == cell.best.trial_id)
            state = _state(cell)
            spread = "" if row.p10_us is None else f"{number(row.p10_us)} to {number(row.p90_us)}"
            speed = "" if cell.tflops is None else number(cell.tflops)
            texts = (escape(_problem(cell)), number(best.us), spread, speed, _code(best.config))
            rows.append((*texts, str(best.ties), best.grade, _date(best.date), state))
        parts.append(f"<h3>{escape(family)} on {escape(model)}</h3>{_table(columns, rows)}")
        parts.append(_runners_up(members))
    return "\n".join(parts)


def _runners_up(members: list[Cell]) -> str:
    rows = [
        (escape(_problem(cell)), number(each.us), f"{(each.us / cell.best.us - 1) * 100:+.1f}%", _code(each.config))
        for cell in members
        for each in cell.winners[1:]
    ]
    if not rows:
        return ""
    table = _table(("problem", "us#", "beside the winner#", "configuration"), rows)
    return f"<details><summary>Kept behind the winners ({len(rows)})</summary>{table}</details>"


def _speed(cells: list[Cell]) -> str:
    known = [cell for cell in cells if cell.shape is not None]
    if not known:
        return "<p>No problem of a triangle operation has a winner.</p>"
    figures = []
    for title, members in _grouped(known, _kind).items():
        times, speeds = [], []
        for colour, (dim, line) in enumerate(_by_width(members)):
            line = sorted(line, key=lambda cell: cell.shape.crop)
            tip = [f"N={cell.shape.crop} {dim}: {number(cell.best.us)} us, {_config(cell.best.config)}" for cell in line]
            timed = [(cell.shape.crop, cell.best.us, text) for cell, text in zip(line, tip, strict=True)]
            times.append(Series(dim, timed, "line", colour))
            rated = [(c.shape.crop, c.tflops, f"N={c.shape.crop} {dim}: {number(c.tflops)} TFLOP/s") for c in line if c.tflops]
            speeds.append(Series(dim, rated, "line", colour))
        ticks = [(crop, str(crop)) for crop in _spread(sorted({cell.shape.crop for cell in members}))]
        one = Chart(f"Time against N: {title}", "N", "us", True, True, ticks, series=times)
        two = Chart(f"Speed against N: {title}", "N", "TFLOP/s", True, False, ticks, True, series=speeds)
        figures += [_figure(f"{title}: time", one.svg()), _figure(f"{title}: TFLOP/s", two.svg())]
    return _note("Winners; one line a head dim (D) or width (C).") + f"<div class='charts'>{''.join(figures)}</div>"


def _parameters(cells: list[Cell]) -> str:
    parts = [
        _note(
            "Importance is the part of the variance of log(time / best of its problem) that one field's value accounts "
            "for alone (eta squared). Fields that were not varied independently share what they explain, and where only "
            "finalists are stored it speaks of near-best configurations only. A slice shows, for every problem where a "
            "value was tried, the best time with that value over the best of the problem; the line is the geometric "
            "mean."
        )
    ]
    for (model, template), members in _grouped(cells, lambda cell: (cell.model, cell.best.template)).items():
        found = facts.parameters(members)
        count = sum(len(facts.configuration_times(cell.rows, template)) for cell in members)
        finals = all(row.grade == "final" for cell in members for row in cell.rows if row.status == "ok")
        parts.append(f"<h3>{escape(template)} on {escape(model)}</h3>")
        scope = f"{count} timed configurations of {len(members)} problems{', finalists only' if finals else ''}."
        if not found:
            parts.append(f"<p>{scope} No field was tried at more than one value.</p>")
            continue
        shares = [(each.name, each.share, f"{each.share * 100:.1f}%") for each in found]
        parts.append(f"<p>{scope}</p><div class='charts'>{_figure('importance', bars(f'Importance, {template}', shares))}</div>")
        parts.append("<div class='charts small'>" + "".join(_figure(each.name, _slice(each)) for each in found) + "</div>")
    return "\n".join(parts) if len(parts) > 1 else "<p>Nothing has been measured.</p>"


def _slice(parameter: facts.Parameter) -> str:
    dots, means = [], []
    for place, (value, tried) in enumerate(parameter.slices.items()):
        dots += [(place, ratio, f"{parameter.name}={value}: {ratio:.3f} in {cell}") for ratio, cell in tried]
        mean = facts.geometric_mean(ratio for ratio, _ in tried)
        means.append((place, mean, f"{parameter.name}={value}: {mean:.3f} over {len(tried)} problems"))
    ticks = [(place, str(value)) for place, value in enumerate(parameter.slices)]
    series = [Series("", dots, "dots", 0), Series("mean", means, "line", 1)]
    title, size = f"Slice of {parameter.name}", (360, 230)
    return Chart(title, parameter.name, "best with it / best", x_ticks=ticks, size=size, series=series).svg()


def _roofline(cells: list[Cell]) -> str:
    rated = [cell for cell in cells if cell.work is not None]
    parts = []
    for (model, family), members in _grouped(rated, lambda cell: (cell.model, cell.family)).items():
        peaks = PEAKS.get(members[0].best.device_name)
        series = []
        for colour, (dim, points) in enumerate(_by_width(members)):
            dots = [(c.work.intensity, c.tflops, f"{_problem(c)}: {_share(c)}") for c in points]
            series.append(Series(dim, dots, "points", colour))
        if peaks is not None:
            series += _roofs(peaks, members)
        title, size = f"Roofline, {family}, {model}", (760, 380)
        chart = Chart(title, "FLOP per byte that must move", "TFLOP/s", True, True, size=size, series=series)
        said = "no peaks are known for it, so no roof"
        if peaks is not None:
            said = f"{peaks[0] / 1e12:g} TB/s and {peaks[1] / 1e12:g} TFLOP/s dense bf16"
        parts.append(_figure(f"{family}, {model}: {said}", chart.svg()))
        if peaks is not None:
            rows = [
                (escape(_problem(cell)), number(cell.work.intensity), number(cell.tflops), *_limits(cell)) for cell in members
            ]
            columns = ("problem", "FLOP/byte#", "TFLOP/s#", "of dense bf16#", "of memory#", "of exponentials#")
            parts.append(f"<details><summary>As a table</summary>{_table(columns, rows)}</details>")
    left = len(cells) - len(rated)
    extra = f"{left} problems have no count of their work (no matrix products, or another operation)."
    return "\n".join([_note(ASSUMED), *parts, *([_note(extra)] if left else [])])


def _roofs(peaks: tuple[float, float, float], members: list[Cell]) -> list[Series]:
    memory, dense, exps = peaks
    places = [cell.work.intensity for cell in members]
    low, high = min(places) / 4, max(max(places) * 2, 2 * dense / memory)
    ridge = dense / memory
    start = min(low, ridge / 2)
    roof = [(start, start * memory / 1e12, ""), (ridge, dense / 1e12, ""), (high, dense / 1e12, "")]
    series = [Series("dense bf16", roof, "roof", None)]
    for colour, (dim, alike) in enumerate(_by_width(members)):
        least = alike[0].work
        limit = least.flop / least.exps * exps / 1e12 if least.exps else math.inf
        if limit < 0.99 * dense / 1e12:
            series.append(Series(f"exp, {dim}", [(limit * 1e12 / memory, limit, ""), (high, limit, "")], "roof", colour))
    return series


def _limits(cell: Cell) -> tuple[str, str, str]:
    memory, dense, exps = PEAKS[cell.best.device_name]
    seconds, least = cell.best.us / 1e6, cell.work
    return tuple(f"{100 * part / seconds:.0f}%" for part in (least.flop / dense, least.bytes / memory, least.exps / exps))


def _share(cell: Cell) -> str:
    text = f"{number(cell.best.us)} us, {number(cell.tflops)} TFLOP/s"
    if cell.best.device_name not in PEAKS:
        return text
    dense, memory, exps = _limits(cell)
    return f"{text}; {dense} of dense bf16, {memory} of memory, {exps} of exponentials"


def _history(trials: list[TrialRow], cells: list[Cell]) -> str:
    several = [(cell, line) for cell in cells if len(line := facts.progress(cell)) > 1]
    several.sort(key=lambda item: item[1][-1][1] / item[1][0][1])
    parts = []
    if several:
        rows = [
            (escape(_problem(cell)), escape(cell.family), escape(cell.model), _times(line))
            for cell, line in several[:MOST_HISTORIES]
        ]
        series = []
        for colour, (cell, line) in enumerate(several[:MOST_HISTORIES]):
            steps = enumerate(line)
            points = [(place, us / line[0][1], f"{_problem(cell)}, {date}: {number(us)} us") for place, (date, us) in steps]
            series.append(Series("", points, "line", colour))
        ticks = [(place, str(place + 1)) for place in range(max(len(each.points) for each in series))]
        chart = Chart("Best time by session", "session of the problem", "time / first session's", x_ticks=ticks, series=series)
        parts.append(f"<div class='charts'>{_figure('best of each session, beside the first', chart.svg())}</div>")
        parts.append(f"<details><summary>{len(several)} problems measured in several sessions</summary>")
        parts.append(_table(("problem", "kernel", "device", "us by session"), rows) + "</details>")
    else:
        parts.append("<p>Every problem was measured in one session so far.</p>")
    found = facts.sessions(trials)
    rows = [
        (each.last, escape(each.device), str(each.cells), _code(each.counts), escape(each.driver), _code(each.toolchain))
        for each in found[:MOST_SESSIONS]
    ]
    columns = ("last row", "device", "problems#", "rows", "driver", "versions")
    more = _note(f"{len(found) - len(rows)} older sessions are left out.") if len(found) > len(rows) else ""
    parts.append(f"<details><summary>{len(found)} sessions</summary>{_table(columns, rows)}{more}</details>")
    failed = facts.failures(trials)
    if failed:
        rows = [(escape(template), escape(status), str(count), escape(why[:300])) for template, status, count, why in failed]
        parts.append(f"<h3>What failed</h3>{_table(('template', 'outcome', 'rows#', 'for example'), rows)}")
    return "\n".join(parts)


def _times(line: list[tuple[str, float]]) -> str:
    return " → ".join(f"{number(us)} ({date[:10]})" for date, us in line)


def _staleness(cells: list[Cell]) -> str:
    stale = [cell for cell in cells if cell.stale]
    intro = _note(
        "A winner is stale when the template's sources or the compiler installed here differ from those it was measured "
        "with, unless they are known to give the same device code. It serves until it is measured again."
    )
    if not stale:
        return f"{intro}<p>{'All winners are current.' if cells else 'There are no winners.'}</p>"
    rows = [
        (escape(cell.name), escape(cell.model), _date(cell.best.date), _state(cell))
        for cell in sorted(stale, key=lambda cell: cell.best.date)[:MOST_STALE]
    ]
    text = f"<p>{len(stale)} of {len(cells)} winners are stale, oldest first.</p>"
    return intro + text + _table(("problem", "device", "measured", "what changed"), rows)


def _grouped(items: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return dict(groups)


def _by_width(members: list[Cell]) -> list[tuple[str, list[Cell]]]:
    """("D=32", those cells) and so on, narrow ones first."""
    groups = sorted(_grouped(members, lambda cell: facts.width(cell.shape)).items())
    return [(f"{letter}={size}", cells) for (letter, size), cells in groups]


def _multiplication(shape: TriangleMultiplicationShape) -> str:
    hidden = f" D={shape.hidden}" * (shape.hidden != shape.channels)
    mask = f" {shape.mask} mask" * (shape.mask != "none")
    return f"{hidden} {shape.direction} {shape.dtype} weights {shape.weight_dtype}{mask}"


def _kind(cell: Cell) -> str:
    shape = cell.shape
    if isinstance(shape, TriangleMultiplicationShape):
        return f"{cell.family}, {cell.model}: B={shape.batch}{_multiplication(shape)}"
    rows = "I=N" if shape.rows == shape.crop else f"I={shape.rows}"
    mask = "" if shape.mask == "none" else f", {shape.mask} mask"
    return f"{cell.family}, {cell.model}: B={shape.batch} {rows} H={shape.heads}, {shape.dtype}, bias {shape.bias_dtype}{mask}"


def _problem(cell: Cell) -> str:
    shape = cell.shape
    if shape is None:
        return cell.name
    if isinstance(shape, TriangleMultiplicationShape):
        return f"B={shape.batch} " * (shape.batch != 1) + f"N={shape.crop} C={shape.channels}{_multiplication(shape)}"
    head = f"B={shape.batch} " * (shape.batch != 1) + f"N={shape.crop} " + f"I={shape.rows} " * (shape.rows != shape.crop)
    tail = f" bias {shape.bias_dtype}" * (shape.bias_dtype != shape.dtype) + f" {shape.mask} mask" * shape.has_mask
    return f"{head}H={shape.heads} D={shape.head_dim} {shape.dtype}{tail}"


def _spread(values: list[int]) -> list[int]:
    """The values that fit under an axis: each at least an eighth larger than the one before."""
    kept: list[int] = []
    for value in values:
        if not kept or value >= kept[-1] * 1.125:
            kept.append(value)
    return kept


def _config(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _code(config: dict[str, Any]) -> str:
    return f"<code>{escape(_config(config))}</code>"


def _date(text: str) -> str:
    return f"<span class='date'>{escape(text[:10])}</span>"


def _state(cell: Cell) -> str:
    return f"<span class='bad'>{escape('; '.join(cell.stale))}</span>" if cell.stale else "<span class='good'>current</span>"


def _note(text: str) -> str:
    return f"<p class='note'>{escape(text)}</p>"


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" if svg else ""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of HTML cells; a column whose name ends in # is set to the right."""
    kinds = [' class="n"' * column.endswith("#") for column in columns]
    head = "".join(f"<th{kind}>{escape(column.rstrip('#'))}</th>" for column, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{text}</td>" for text, kind in zip(row, kinds, strict=True)) + "</tr>" for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
