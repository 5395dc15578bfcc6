"""Which files a template's device code comes from, and a hash of them that ignores comments and layout.

The hash is part of every object's cache key and of every measured row, so it must not depend on the Python version,
the install location, or how the code is wrapped. It is taken over tokens, with each string literal (f-strings too) kept
as one token, since Python 3.12 changed how f-strings are tokenised.
"""

from __future__ import annotations

import ast
import hashlib
import io
import os
import sys
import token
import tokenize
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

# Host-side modules that templates import but that cannot change generated code.
_HOST_ONLY = frozenset(
    {"tpf_jit", "tpf_jit.errors", "tpf_jit.shape", "tpf_jit.templates", "tpf_jit.templates.base",
     "tpf_jit.templates.registry", "tpf_jit.templates.sources"}
)
# Functions whose imports serve tests and tuning only.
_NOT_TRACED = frozenset({"workload"})

_OPENERS = {getattr(token, name) for name in ("FSTRING_START", "TSTRING_START") if hasattr(token, name)}
_CLOSERS = {getattr(token, name) for name in ("FSTRING_END", "TSTRING_END") if hasattr(token, name)}


def normalised(text: str) -> str:
    """Source text reduced to what Python executes: tokens separated by spaces, one logical line a line.

    Comments, blank lines, docstrings and other bare string statements, indentation width and line wrapping are gone.
    Raises SyntaxError for text that is not Python.
    """
    lines: list[str] = []
    line: list[str] = []
    for kind, value in _tokens(text):
        if kind == "newline":
            if line and not (len(line) == 1 and line[0].startswith("s:")):
                lines.append(" ".join(line))
            line = []
        elif kind == "indent":
            lines.append(value)
        else:
            line.append(f"{kind}:{value}")
    return "\n".join(lines) + "\n"


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """(kind, text) with kind t (any token), s (string literal), newline or indent; f-strings as one token of kind t."""
    source = text.replace("\r\n", "\n").replace("\r", "\n")
    rows = source.split("\n")
    depth, opened = 0, (0, 0)
    try:
        for tok in tokenize.generate_tokens(io.StringIO(source).readline):
            if tok.type in _OPENERS:
                if depth == 0:
                    opened = tok.start
                depth += 1
            elif tok.type in _CLOSERS:
                depth -= 1
                if depth == 0:
                    yield "t", _span(rows, opened, tok.end)
            elif depth or tok.type in (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER, tokenize.ENCODING):
                continue
            elif tok.type == tokenize.NEWLINE:
                yield "newline", ""
            elif tok.type == tokenize.INDENT:
                yield "indent", ">"
            elif tok.type == tokenize.DEDENT:
                yield "indent", "<"
            elif tok.type == tokenize.STRING and "f" not in tok.string[: tok.string.find(tok.string[-1])].lower():
                yield "s", tok.string
            else:
                yield "t", tok.string
    except tokenize.TokenError as error:
        raise SyntaxError(f"cannot tokenise: {error.args[0]}") from error


def _span(rows: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    (first, left), (last, right) = start, end
    if first == last:
        return rows[first - 1][left:right]
    return "\n".join([rows[first - 1][left:], *rows[first : last - 1], rows[last - 1][:right]])


def hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """sha256 hex over (label, content) pairs, in label order. Files not ending in .py count byte for byte."""
    digest = hashlib.sha256()
    for name, path in sorted(files):
        data = path.read_bytes()
        if path.suffix == ".py":
            data = normalised(data.decode("utf-8-sig")).encode()
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def label(paths: Iterable[Path]) -> list[tuple[str, Path]]:
    """Install-independent labels for a template's own list of files: paths relative to their common folder."""
    files = [Path(path).resolve() for path in paths]
    if not files:
        raise ValueError("a template must name at least one source file")
    root = Path(os.path.commonpath([str(path.parent) for path in files]))
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def closure(module: str) -> list[tuple[str, Path]]:
    """(module name, file) of `module` and of everything it imports, directly or not, from its own top-level package
    (for modules of tpf_jit: from `tpf_jit.templates` only) and from `tpf_jit.templates`.

    Imports inside functions count, except in a function or method called ``workload``.
    """
    top = module.partition(".")[0]
    scopes = {"tpf_jit.templates"} if top == "tpf_jit" else {"tpf_jit.templates", top}
    found: dict[str, Path] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        if name in found or (name in _HOST_ONLY and name != module):
            continue
        path, is_package = _locate(name)
        if path is None:
            continue
        found[name] = path
        tree = ast.parse(path.read_bytes(), filename=str(path))
        for target in _imports(tree, name if is_package else name.rpartition(".")[0]):
            if any(target == scope or target.startswith(scope + ".") for scope in scopes):
                pending.append(target)
    if module not in found:
        raise FileNotFoundError(f"no source file for module {module!r}; a template's code must live in a .py file")
    # Started as a script the module is __main__, in the script's worker processes __mp_main__.
    return sorted(("__main__" if name == "__mp_main__" else name, path) for name, path in found.items())


def _locate(name: str) -> tuple[Path | None, bool]:
    """Source file of a module, without importing it or its parents, and whether it is a package."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and spec is None:  # __main__, and modules loaded by hand
        file = getattr(module, "__file__", None)
        return (Path(file), False) if file else (None, False)
    spec = spec or _find_spec(name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None, False
    return Path(spec.origin), spec.submodule_search_locations is not None


def _find_spec(name: str) -> ModuleSpec | None:
    """What the import system would load for `name`; unlike `importlib.util.find_spec` it never imports the parents.

    Kernel modules import the compiler, which a process that only looks up a cached kernel must not load.
    """
    parent = name.rpartition(".")[0]
    search: list[str] | None = None
    if parent:
        loaded = sys.modules.get(parent)
        spec = None if loaded is not None else _find_spec(parent)
        locations = getattr(loaded, "__path__", None) if loaded is not None else spec and spec.submodule_search_locations
        if locations is None:
            return None
        search = list(locations)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, search)
        if spec is not None:
            return spec
    return None


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names that may be imported by a module; for ``from a import b`` also ``a.b``, and ``a`` only if some ``b`` is no
    submodule: a package that merely lists its templates is not part of each of them."""
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in _NOT_TRACED:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from names
            if not all(_locate(name)[0] for name in names):
                yield base
        stack.extend(ast.iter_child_nodes(node))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parent = ".".join(parts[: len(parts) - node.level + 1])
    return f"{parent}.{node.module}" if node.module else parent
