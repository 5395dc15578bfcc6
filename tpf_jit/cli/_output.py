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
WIDEST_WORD = 32
"""Longer words are folded when a table does not fit the terminal."""
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
    """Print rows under `columns`; numbers are set to the right, None is left empty."""
    from rich import box
    from rich.table import Table

    body = [list(row) for row in rows]
    screen = console()
    if not body and note:
        screen.print(note)
        return
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, name in enumerate(columns):
        numeric = any(isinstance(row[index], (int, float)) and not isinstance(row[index], bool) for row in body)
        words = f"{name} {' '.join(cell(row[index]) for row in body)}".split()
        longest = max(map(len, words), default=1)
        limits = (min(longest, WIDEST_WORD), None) if screen.is_terminal else (longest, max(longest, WIDEST_CELL))
        justify = "right" if numeric else "left"
        table.add_column(name, justify=justify, overflow="fold", min_width=limits[0], max_width=limits[1])
    for row in body:
        table.add_row(*(cell(value) for value in row))
    screen.print(table)
    if note:
        screen.print(note)


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
