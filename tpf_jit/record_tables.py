"""Markdown tables from records: implementations side by side where rows have a time each, tensors side by side where they have
an error each, the closest case where rows have bounds, states of knowledge side by side where rows are searches, else one line a
row."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_MEASURED = ("ms", "ms_p10", "ms_p90", "peak_mib", "config", "config_from", "rel_rms")
"""Fields of a timed row that are results; all others say what was measured."""
_SIZES = ("B", "I", "N", "H", "D", "C", "hidden", "crop")
_COUNTED = (
    "cases", "not_finite", "not_zero", "rel_rms_mean", "rel_rms_max", "max_abs",
    "bitwise_repeats", "bitwise_cases", "bitwise_equal",
)  # fmt: skip
"""Fields of a judged row that are results of one problem, of which a table shows the sum over all."""
_SEARCHED = ("knowledge", "order", "failed", "trials", "found_us", "best_us", "ratio", "trials_to_2pct")
"""Fields of a replayed search that are none of its problem and size."""
OURS = "tpf_jit"


def row_keys(record: Mapping[str, Any]) -> set[tuple]:
    """What a record makes statements about; a newer record with all of these supersedes it."""
    if _is_timed(record):
        return {(row["impl"], *_problem(row)) for row in record["rows"]}
    rest = ("order",) if _is_searched(record) else ()
    return {
        tuple((k, str(value)) for k, value in sorted(row.items()) if k not in rest and (k in _SIZES or isinstance(value, str)))
        for row in record["rows"]
    }


def record_table(record: Mapping[str, Any], name: str) -> str:
    """A record as a Markdown table with a line above that says where, when and how it was measured.

    Args:
        record: a valid record.
        name: name of its file, for the caption.
    """
    layouts = ((_is_timed, _side_by_side), (_is_judged, _errors), (_is_bounded, _closest), (_is_searched, _searches))
    layout = next((layout for applies, layout in layouts if applies(record)), _one_by_one)
    header, lines = layout(record)
    numeric = [all(_looks_numeric(line[column]) for line in lines) for column in range(len(header))]
    table = [_line(header), _line(["---:" if right else "---" for right in numeric]), *map(_line, lines)]
    return "\n".join([_wrapped(_caption(record, name)), "", *table, *map(_wrapped, _footnote(record)), ""])


def _wrapped(prose: str) -> str:
    return textwrap.fill(prose, 130, break_long_words=False, break_on_hyphens=False)


def _is_timed(record: Mapping[str, Any]) -> bool:
    return all("impl" in row and "ms" in row for row in record["rows"])


def _is_judged(record: Mapping[str, Any]) -> bool:
    return all({"family", "impl", "tensor", "cases", "rel_rms_mean", "bitwise_equal"} <= set(row) for row in record["rows"])


def _is_bounded(record: Mapping[str, Any]) -> bool:
    return all({"pass", "impl", "tensor", "dtype", "rel_rms_max", "bound", "bitwise_equal"} <= set(row) for row in record["rows"])


def _is_searched(record: Mapping[str, Any]) -> bool:
    return all({"pass", "knowledge", "configurations", "share", "ratio", "trials_to_2pct"} <= set(row) for row in record["rows"])


def _problem(row: Mapping[str, Any]) -> tuple:
    fields = ((name, value) for name, value in row.items() if name not in ("impl", "binaries") and name not in _MEASURED)
    return tuple((name, _cell(value)) for name, value in fields if isinstance(value, (str, int)))


def _side_by_side(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line a problem, a column an implementation, ours first; fields that never change move to the caption."""
    rows = record["rows"]
    impls = sorted({row["impl"] for row in rows}, key=lambda impl: (impl != OURS, impl))
    problems: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        problems.setdefault(_problem(row), {})[row["impl"]] = row
    constant = _constants(rows)
    names = list(dict.fromkeys(name for problem in problems for name, _ in problem if name not in constant))
    lines = []
    for problem, measured in problems.items():
        fields = dict(problem)
        lines.append([fields.get(name, "") for name in names] + [_time(measured.get(impl)) for impl in impls])
    return [*names, *(f"{impl}, ms" for impl in impls)], lines


def _errors(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line a family and implementation, a column a tensor: the mean over all cases of all problems, in brackets the largest."""
    tensors = list(dict.fromkeys(row["tensor"] for row in record["rows"]))
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["family"], row["impl"]), []).append(row)
    lines = []
    for (family, impl), rows in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] != OURS, item[0][1])):
        by_tensor = {tensor: [row for row in rows if row["tensor"] == tensor] for tensor in tensors}
        cases = max(sum(row["cases"] for row in of_one) for of_one in by_tensor.values())
        unequal = [tensor for tensor, of_one in by_tensor.items() if not all(row["bitwise_equal"] for row in of_one)]
        same = "no: " + ", ".join(unequal) if unequal else "yes"
        lines.append([family, impl, str(cases), *(_error(of_one) for of_one in by_tensor.values()), same])
    return ["family", "implementation", "cases", *(f"{tensor}, mean (max)" for tensor in tensors), "same bits"], lines


def _closest(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line a pass, tensor and dtype: how many cases, and of them the one that came closest to its bound."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["impl"], row["pass"], row["tensor"], row["dtype"]), []).append(row)
    lines = []
    for group, rows in groups.items():
        worst = max(rows, key=lambda row: float("inf") if row["rel_rms_max"] is None else row["rel_rms_max"] / row["bound"])
        error = "not finite" if worst["rel_rms_max"] is None else _number(worst["rel_rms_max"])
        within = sum(row["rel_rms_max"] is not None and row["rel_rms_max"] <= row["bound"] for row in rows)
        same = sum(row["bitwise_equal"] for row in rows)
        lines.append([*group, str(len(rows)), str(within), error, _number(worst["bound"]), str(same)])
    counts = ["cases", "within bounds", "closest to its bound", "that bound", "same bits"]
    return ["implementation", "pass", "tensor", "dtype", *counts], lines


def _searches(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A line a cell: the time found over the best after the share of all trials, in brackets the trials until within 2 %."""
    rows = record["rows"]
    known = list(dict.fromkeys(row["knowledge"] for row in rows))
    constant = _constants(rows)
    names = [name for name in rows[0] if name not in _SEARCHED and name not in constant]
    problems: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        problems.setdefault(tuple(_cell(row.get(name)) for name in names), {})[row["knowledge"]] = row
    lines = []
    for problem, by_knowledge in problems.items():
        one = next(iter(by_knowledge.values()))
        found = (_ratio(by_knowledge.get(knowledge)) for knowledge in known)
        lines.append([*problem, _cell(one["trials"]), _cell(float(one["best_us"])), *found])
    return [*names, "trials", "best, us", *(f"{knowledge}, found / best (trials to 2 %)" for knowledge in known)], lines


def _ratio(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    near = "never" if row["trials_to_2pct"] is None else _cell(row["trials_to_2pct"])
    return f"{'nothing' if row['ratio'] is None else format(row['ratio'], '.3f')} ({near})"


def _error(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    if wrong := faults(rows):
        return wrong
    mean = sum(row["cases"] * row["rel_rms_mean"] for row in rows) / sum(row["cases"] for row in rows)
    return f"{mean:.3e} ({max(row['rel_rms_max'] for row in rows):.3e})"


def faults(rows: Sequence[Mapping[str, Any]]) -> str:
    """In how many cases judged rows have no error that is a number, and why; "" where all have one."""
    counts = {"not finite": "not_finite", "not exactly zero": "not_zero"}
    return ", ".join(
        f"{words} in {count}" for words, field in counts.items() if (count := sum(row.get(field, 0) for row in rows))
    )


def _one_by_one(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    constant = _constants(record["rows"])
    names = list(dict.fromkeys(name for row in record["rows"] for name in row if name not in constant))
    return names, [[_cell(row.get(name)) for name in names] for row in record["rows"]]


def _constants(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Fields that are the same in all of several rows."""
    if len(rows) < 2:
        return {}
    measured = (*_MEASURED, "impl", "binaries")
    shared = {name: _cell(value) for name, value in rows[0].items() if name not in measured and isinstance(value, (str, int))}
    return {name: value for name, value in shared.items() if all(_cell(row.get(name)) == value for row in rows)}


def _caption(record: Mapping[str, Any], name: str) -> str:
    device, versions = record["device"], record["versions"]
    facts = [device["name"]]
    if device.get("sm_clock_mhz"):
        facts.append(f"{_cell(device['sm_clock_mhz'])} MHz")
    if device.get("driver"):
        facts.append(f"driver {device['driver']}")
    facts += [f"PyTorch {versions['torch']}", f"tpf_jit {versions['tpf_jit']}", record["date"][:10]]
    counted = _COUNTED if _is_judged(record) or _is_bounded(record) else _SEARCHED if _is_searched(record) else ()
    shared = {field: value for field, value in _constants(record["rows"]).items() if field not in counted}
    constant = ", ".join(f"{field} = {value}" for field, value in shared.items())
    method = ", ".join(f"{field} {_cell(value)}" for field, value in record["method"].items())
    parts = [f"**{record['kind']}** on {', '.join(facts)}"]
    parts += [constant] if constant else []
    parts += [method, f"record `{name}`"]
    return ". ".join(parts) + "."


def _footnote(record: Mapping[str, Any]) -> list[str]:
    absent = {**(record.get("absent_peers") or {}), **(record.get("absent_cells") or {})}
    return ["", "Not measured: " + "; ".join(f"{peer} ({_cell(why)})" for peer, why in absent.items()) + "."] if absent else []


def _time(row: Mapping[str, Any] | None) -> str:
    return _cell(float(row["ms"])) if row is not None else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_cell, value))
    return " ".join(str(value).replace("|", "\\|").split())


def _number(value: float) -> str:
    """Three significant digits, all of them before the point; a trailing zero is a digit that was measured."""
    if value == 0 or not 1e-2 <= abs(value) < 1e6:
        return f"{value:.2e}" if value else "0"
    if abs(value) >= 1:
        return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"
    return f"{value:.{3 if abs(value) >= 0.1 else 4}f}"


def _looks_numeric(text: str) -> bool:
    try:
        float(text or 0)
    except ValueError:
        return False
    return True


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
