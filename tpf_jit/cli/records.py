"""`tpf-jit records`: the measured claims, whether they are current, and the README's tables made from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tpf_jit.cli._output import Json, print_json, print_pairs, print_table, say

app = typer.Typer(no_args_is_help=True, help="List, show and check measured records, and make tables from them.")

BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"
NONE_CURRENT = "No record is current with these sources yet."

Folder = Annotated[Path | None, typer.Option("--folder", help="Folder of records; tuning_db/records if left out.")]
Kind = Annotated[str | None, typer.Option("--kind", help="Only this kind, such as bench.attention or bench.")]


@app.command("list")
def list_(kind: Kind = None, folder: Folder = None, json: Json = False) -> None:
    """The records, by date."""
    from tpf_jit import records

    found = records.list_records(_existing(folder), kind)
    _some(found, kind, folder)
    if json:
        print_json([{"name": r.name, "kind": r.kind, "date": r.date, "device": r.device, "problems": r.problems} for r in found])
        return
    rows = [(r.name, r.kind, r.date, r.device, len(r.content.get("rows", ())), "; ".join(r.problems)) for r in found]
    print_table("records", ("name", "kind", "date", "device", "rows", "problems"), rows, "" if rows else "there are none")


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A record's name, a part of it, or its file.")],
    folder: Folder = None,
    json: Json = False,
) -> None:
    """One record: where, when, how, and its rows."""
    from tpf_jit import records

    record = records.show(name, _existing(folder))
    if json:
        print_json(record.content)
        return
    head = {field: value for field, value in record.content.items() if field != "rows"}
    print_pairs({"file": record.path, **head, **({"problems": "; ".join(record.problems)} if record.problems else {})})
    rows = record.content.get("rows", [])
    names = list(dict.fromkeys(field for row in rows for field in row))
    print_table("rows", names, [tuple(row.get(field) for field in names) for row in rows])


@app.command()
def check(kind: Kind = None, folder: Folder = None, json: Json = False) -> None:
    """Which records were measured with the sources of this tree. Exit code 1 where one is stale or invalid."""
    from tpf_jit import records

    verdicts = records.check(_existing(folder), kind=kind)
    _some(verdicts, kind, folder)
    if json:
        print_json([{"name": v.record.name, "state": v.state, "detail": v.detail} for v in verdicts])
    else:
        rows = [(v.state, v.record.name, v.record.device, v.record.date, v.detail) for v in verdicts]
        print_table("records", ("state", "name", "device", "date", "detail"), rows, "" if rows else "there are none")
    if any(verdict.state != "current" for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def table(
    kind: Kind = None,
    folder: Folder = None,
    update: Annotated[Path | None, typer.Option("--update", help="Put the tables between the markers of this file.")] = None,
) -> None:
    """Markdown tables from current records only, as they stand in the README."""
    from tpf_jit import records

    _some(records.list_records(_existing(folder), kind), kind, folder)
    text = records.table(kind, folder).strip() or NONE_CURRENT
    if update is None:
        print(text)
        return
    from tpf_jit.errors import InvalidInput

    content = update.read_text(encoding="utf-8") if update.is_file() else ""
    if not (BEGIN in content and END in content):
        raise InvalidInput.of("--update", str(update), f"a file with the lines {BEGIN} and {END}")
    fresh = between(content, text)
    if fresh != content:
        update.write_text(fresh, encoding="utf-8")
    say(f"{'updated' if fresh != content else 'unchanged'}: {update}")


def _existing(folder: Path | None) -> Path | None:
    """The folder, which must exist: a mistyped one would pass for one whose records are all current."""
    from tpf_jit.errors import InvalidInput

    if folder is not None and not folder.is_dir():
        raise InvalidInput.of("--folder", str(folder), "a folder that exists")
    return folder


def _some(found: Sequence[Any], kind: str | None, folder: Path | None) -> None:
    """Refuse a kind that no record of the folder has."""
    from tpf_jit import records
    from tpf_jit.errors import InvalidInput

    if found or kind is None:
        return
    there = sorted({record.kind for record in records.list_records(folder)} - {""})
    known = ", ".join(there) + ", or the part of one before its dot"
    where = folder or records.records_folder()
    raise InvalidInput.of("--kind", repr(kind), known if there else f"nothing, as no record in {where} has a kind")


def between(content: str, text: str) -> str:
    """`content` with `text` in place of what stands between its markers."""
    before, _, rest = content.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def marked(content: Any) -> str:
    """What stands between the markers."""
    return content.partition(BEGIN)[2].partition(END)[0].strip()
