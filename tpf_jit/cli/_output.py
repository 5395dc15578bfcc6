"""What commands print: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]

WIDEST_CELL = 44
"""Longer cells wrap between words where the output is no terminal, whose width would decide."""
WIDEST_WORDS = (32, 20)
"""Longer words are folded when a table does not fit the terminal, by the second if the first leaves it too wide."""
UNLIMITED = 10_000
"""Columns of an output that is no terminal: files and logs keep their words whole."""


def print_json(document: Any) -> None:
    """Print one JSON document; values that JSON does not know (paths, dates) become text."""
    json.dump(document, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def console(stderr: bool = False) -> Any:
    """A rich console that neither cuts tables at 80 columns in files nor guesses at markup in data."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNLIMITED
    return Console(file=stream, width=width, markup=False, highlight=False, soft_wrap=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> None:
    """Print rows under `columns`; numbers are set to the right, None is left empty.

    Where a terminal is too narrow for all columns, the rows become lines of `column: value`.
    """
    body = [list(row) for row in rows]
    screen = console()
    if not body and note:
        screen.print(note)
        return
    widths = _widths(columns, body, screen.width) if screen.is_terminal else None
    if screen.is_terminal and widths is None:
        _print_listing(screen, title, columns, body)
    else:
        screen.print(_table(title, columns, body, widths))
    if note:
        screen.print(note)


def _table(title: str, columns: Sequence[str], body: Sequence[Sequence[Any]], widths: Sequence[int] | None) -> Any:
    """The rows as a table, of a file where there are no widths."""
    from rich import box
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        numeric = any(isinstance(row[index], (int, float)) and not isinstance(row[index], bool) for row in body)
        longest = _longest_word(name, body, index)
        limits = {"min_width": longest, "max_width": max(longest, WIDEST_CELL)} if widths is None else {"width": widths[index]}
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", **limits)
    for row in body:
        table.add_row(*(cell(value) for value in row))
    return table


def _widths(columns: Sequence[str], body: Sequence[Sequence[Any]], screen: int) -> list[int] | None:
    """Widths by which all columns have room on a screen, or None: rich itself would leave out the last ones without a word."""
    words = [_longest_word(name, body, index) for index, name in enumerate(columns)]
    lines = [
        max(len(line) for text in (name, *(cell(row[index]) for row in body)) for line in text.splitlines() or [""])
        for index, name in enumerate(columns)
    ]
    room = screen - 3 * len(columns) + 1  # between two columns there are three, at both ends one
    for widest in WIDEST_WORDS:
        widths = [min(word, widest) for word in words]
        if sum(widths) <= room:
            break
    else:
        return None
    # What is left goes, one by one, where cells would wrap most.
    for _ in range(min(room, sum(lines)) - sum(widths)):
        index = max(range(len(widths)), key=lambda i: lines[i] / max(1, widths[i]))
        widths[index] += 1
    return widths


def _longest_word(name: str, body: Sequence[Sequence[Any]], index: int) -> int:
    return max(map(len, f"{name} {' '.join(cell(row[index]) for row in body)}".split()), default=1)


def _print_listing(screen: Any, title: str, columns: Sequence[str], body: Sequence[Sequence[Any]]) -> None:
    """The rows below each other, a line for every value that there is."""
    if title:
        screen.print(title, style="italic")
    for row in body:
        screen.print()
        for name, text in zip(columns, map(cell, row), strict=True):
            if text:
                text = " ".join(text.splitlines())
                screen.print(f"{name}: {text}" if name else text, overflow="fold")
    screen.print()


def print_pairs(pairs: Mapping[str, Any], title: str = "") -> None:
    """Print a mapping as two columns."""
    print_table(title, ("", ""), [(name, cell(value)) for name, value in pairs.items()])


def cell(value: Any) -> str:
    """One value as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={cell(item)}" for name, item in value.items())
    return str(value)


def number(value: float) -> str:
    """Three significant digits, more before the point; very small values in exponent notation."""
    if value == 0 or value != value or value in (float("inf"), float("-inf")):
        return f"{value:g}"
    if abs(value) < 1e-2:
        return f"{value:.2e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def say(text: str) -> None:
    """A line of progress or explanation, to stderr so that stdout stays for results."""
    print(text, file=sys.stderr, flush=True)
