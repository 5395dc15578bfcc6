"""Documents keep up with the code: commands exist, verbs are documented, tables are the generated ones, links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tpf_jit
from tpf_jit import records
from tpf_jit.cli import records as cli_records
from tpf_jit.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted([README, ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
ENVIRONMENT = ("TPF_JIT_DB", "TPF_JIT_CACHE", "TPF_JIT_LOG", "TPF_JIT_WORKSPACE_MIB")


def commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that call it."""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield words, command
        return
    for name, child in command.commands.items():
        yield from commands(child, (*words, name))


COMMANDS = dict(commands())
GROUPS = {words[0] for words in COMMANDS if len(words) > 1}


def mentioned(text: str) -> set[tuple[str, ...]]:
    """Commands a document calls: the words after `tpf-jit`, as far as they can name a command."""
    found = set()
    for match in re.finditer(r"tpf-jit((?: [a-z][\w-]*)+)", text):
        words = tuple(match.group(1).split())
        found.add(words[:2] if words[0] in GROUPS else words[:1])
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(path: Path) -> None:
    unknown = {words for words in mentioned(path.read_text(encoding="utf-8")) if words not in COMMANDS and words != ("bench",)}
    assert not unknown


def test_every_verb_is_documented() -> None:
    text = README.read_text(encoding="utf-8")
    table = text[text.index("## Command line") : text.index("## Caching and safety")]
    missing = [words for words in COMMANDS if not re.search(rf"tpf-jit {words[0]}\b", table) or f"{words[-1]}" not in table]
    assert not missing


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_and_option_has_help(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    assert command.help, "no help"
    bare = [option.name for option in command.params if option.name not in ("help", "file") and not getattr(option, "help", "-")]
    assert not bare, f"options without help: {bare}"


READING = ("list", "show", "check", "verify", "explain", "doctor", "compile")


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[-1] in READING], ids=" ".join)
def test_reading_commands_take_json(words: tuple[str, ...]) -> None:
    assert "json" in {option.name for option in COMMANDS[words].params}


def test_every_public_name_is_documented() -> None:
    text = README.read_text(encoding="utf-8")
    missing = [name for name in tpf_jit.__all__ if name != "__version__" and f"`{name}(" not in text]
    assert not missing


def test_public_names_have_docstrings() -> None:
    missing = [name for name in tpf_jit.__all__ if name != "__version__" and not getattr(tpf_jit, name).__doc__]
    assert not missing


def test_environment_variables_are_documented() -> None:
    text = README.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in ENVIRONMENT)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in target]
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_documents_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    names = set(re.findall(r"\b(?:tpf_jit|templates|tuning_db|tests|examples|docs)/[\w/]+\.(?:py|md|json|toml)\b", text))
    missing = [name for name in sorted(names) if not (ROOT / name).exists()]
    assert not missing


def test_python_blocks_parse_and_use_public_names() -> None:
    for path in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tpf_jit":
                    assert node.attr in tpf_jit.__all__, f"{path.name} uses tpf_jit.{node.attr}"


def test_figures_in_the_readme_are_the_generated_ones() -> None:
    """`tpf-jit records table --update README.md` writes them; nothing is typed, and nothing stale stays."""
    expected = records.table().strip() or cli_records.NONE_CURRENT
    assert cli_records.marked(README.read_text(encoding="utf-8")) == expected


def test_no_figures_outside_the_generated_tables() -> None:
    """A time or a factor in prose would not be checked against any record."""
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        if path == README:
            text = text.replace(cli_records.marked(text), "")
        if not path.name.startswith("kernel-"):  # these date their measurements, of designs that are no longer there too
            found = re.findall(r"\b\d+(?:\.\d+)? ?(?:ms|us|µs|TFLOP\S*|GB/s)\b|\b\d+(?:\.\d+)?x (?:faster|slower)\b", text)
            assert not found, f"{path.name}: {found}"


def test_lines_are_not_endless() -> None:
    """Prose wraps at about 130 columns; tables and code may be wider."""
    long = [
        f"{path.name}:{number}"
        for path in DOCUMENTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 140 and not line.startswith("|")
    ]
    assert not long
