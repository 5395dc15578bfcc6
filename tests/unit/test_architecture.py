"""The rules of the source tree: which way imports point, how long things get, what the environment may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"tpf_jit": "tpf_jit", "templates": "tpf_jit.templates", "tuning_db": "tpf_jit.tuning_db"}
ENVIRONMENT = {"TPF_JIT_DB", "TPF_JIT_CACHE", "TPF_JIT_LOG", "TPF_JIT_WORKSPACE_MIB"}
HOST_LINES, KERNEL_LINES, PARAMETERS = 400, 900, 8

OFFLINE = ("tpf_jit.tune", "tpf_jit.bench", "tpf_jit.cli", "tpf_jit.demo")
NO_TORCH = (
    "tpf_jit.shape",
    "tpf_jit.resolve",
    "tpf_jit.tuning_db.reader",
    "tpf_jit.templates.base",
    "tpf_jit.templates.registry",
)
DATABASE_WRITERS = ("tpf_jit.tuning_db.store", "tpf_jit.tuning_db.schema", "tpf_jit.tuning_db.merge")


def package_files() -> list[Path]:
    return sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


def source_files() -> list[Path]:
    return package_files() + sorted(path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *rest]).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_kernel(path: Path) -> bool:
    """Device code: a module of a template that is made of cutlass, and imported only when something is built."""
    return is_within(module_name(path), "tpf_jit.templates") and (path.stem.endswith("_sm90") or path.parent.name == "common")


def guarded(node: ast.If) -> bool:
    """``if TYPE_CHECKING:``, which never runs."""
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Absolute names a module imports; for ``from a import b`` both ``a`` and ``a.b``."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    stack: list[ast.AST] = [tree(path)]
    while stack:
        node = stack.pop()
        if top_level_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and guarded(node):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                base = f"{parent}.{base}" if base else parent
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        stack.extend(ast.iter_child_nodes(node))
    return found


def offenders(path: Path, forbidden: tuple[str, ...], top_level_only: bool = False) -> list[str]:
    return sorted(name for name in imports(path, top_level_only) if any(is_within(name, target) for target in forbidden))


PACKAGE_FILES = package_files()
each_module = pytest.mark.parametrize("path", PACKAGE_FILES, ids=[label(path) for path in PACKAGE_FILES])


@each_module
def test_imports_point_one_way(path: Path) -> None:
    name = module_name(path)
    if is_within(name, "tpf_jit.templates"):
        allowed = ("tpf_jit.templates", "tpf_jit.errors", "tpf_jit.shape")
    elif is_within(name, "tpf_jit.tuning_db"):
        allowed = ("tpf_jit.tuning_db", "tpf_jit.errors", "tpf_jit.shape", "tpf_jit.templates.base")
    elif name == "tpf_jit.errors":
        allowed = ()
    elif name == "tpf_jit.shape":
        allowed = ("tpf_jit.errors",)
    else:
        allowed = ("tpf_jit",)
    ours = {target for target in imports(path) if is_within(target, "tpf_jit") and target not in ("tpf_jit", "tpf_jit.templates")}
    bad = sorted(target for target in ours if not any(is_within(target, package) for package in allowed))
    assert not bad, f"{name} may import {allowed or 'the standard library'} but imports {bad}"


@each_module
def test_nothing_depends_on_the_offline_parts(path: Path) -> None:
    name = module_name(path)
    if any(is_within(name, package) for package in OFFLINE) or name == "tpf_jit.__main__":
        return
    # The public functions that start offline work reach it from inside a function, never at import.
    entry = name in ("tpf_jit.api", "tpf_jit")
    bad = offenders(path, OFFLINE, top_level_only=entry)
    assert not bad, f"{name} imports {bad}"


@each_module
def test_heavy_packages_are_imported_where_they_are_used(path: Path) -> None:
    name = module_name(path)
    never_at_import = ["optuna", "matplotlib", "tvm_ffi", "ray", "sqlalchemy", "psycopg"]
    if not is_kernel(path):
        never_at_import.append("cuda")
    if not is_within(name, "tpf_jit.cli"):
        never_at_import += ["rich", "typer"]
    if name not in DATABASE_WRITERS:
        never_at_import.append("sqlite_utils")
    bad = offenders(path, tuple(never_at_import), top_level_only=True)
    if name in NO_TORCH:
        bad += offenders(path, ("torch", "cutlass", "numpy"), top_level_only=True)
    elif not is_kernel(path):
        # A kernel module is made of cutlass; whoever builds it imports it from inside a function.
        bad += offenders(path, ("cutlass",), top_level_only=True)
    assert not bad, f"{name} imports {bad} when it is imported"


def test_the_compiler_is_reached_from_few_places() -> None:
    """Outside templates, only these modules may import cutlass at all, so the production path cannot grow into it."""
    allowed = {"tpf_jit.compiler", "tpf_jit.pool", "tpf_jit.loader", "tpf_jit.cli.doctor"}
    users = {module_name(path) for path in PACKAGE_FILES if offenders(path, ("cutlass",))}
    assert {name for name in users if not is_within(name, "tpf_jit.templates")} <= allowed


@each_module
def test_modules_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    kernel = is_within(module_name(path), "tpf_jit.templates")
    assert lines <= (KERNEL_LINES if kernel else HOST_LINES), f"{label(path)} has {lines} lines"


@each_module
def test_functions_take_few_parameters(path: Path) -> None:
    """Device code is exempt (its arguments are tensors); the CLI is too, whose parameters are options with names."""
    name = module_name(path)
    if is_within(name, "tpf_jit.cli") or is_kernel(path):
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in arguments)
            message = f"{label(path)}:{node.lineno} {node.name} takes {count} parameters"
            assert count <= PARAMETERS or _fixed_signature(node), message


def _fixed_signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A signature that is set elsewhere: kernel calling conventions, torch.library ops, autograd functions, cuEquivariance's."""
    names = [argument.arg for argument in node.args.args]
    if {"q", "k", "v", "bias"} <= set(names) or {"norm_in_weight", "p_in_weight"} <= set(names):
        return True
    return bool(names) and names[0] == "ctx"


@each_module
def test_no_assert_in_library_code(path: Path) -> None:
    """`python -O` removes asserts; users get exceptions."""
    lines = [node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)]
    assert not lines, f"{label(path)}: assert on lines {lines}"


@each_module
def test_environment_variables_are_the_known_ones(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    unknown = set(re.findall(r"\bTPF_JIT_[A-Z_]+\b", text)) - ENVIRONMENT
    assert not unknown, f"{label(path)} names {sorted(unknown)}"


def test_no_machine_paths() -> None:
    """No absolute path of somebody's machine: not in code, documents or data."""
    pattern = re.compile(r"(?<![\w.<-])/(?:home|root|work|mnt|scratch|Users|opt|srv)/[\w.-]+")
    suffixes = {".py", ".md", ".toml", ".json", ".jsonl", ".yaml", ".yml", ".cfg", ".txt", ""}
    folders = [ROOT / name for name in (*PACKAGES, "tests", "examples", "docs", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.suffix in suffixes]
    found = []
    for path in files:
        if "__pycache__" in path.parts or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{label(path)}:{number}: {match.group(0)}" for match in pattern.finditer(line)]
    assert not found, "\n".join(found)


def test_every_module_has_a_docstring() -> None:
    missing = [label(path) for path in PACKAGE_FILES if path.stat().st_size and not ast.get_docstring(tree(path))]
    assert not missing


def test_importing_tpf_jit_loads_nothing_heavy() -> None:
    code = (
        "import sys, tpf_jit, tpf_jit.shape, tpf_jit.errors;"
        "heavy = {'torch', 'numpy', 'cutlass', 'optuna', 'sqlite_utils', 'rich', 'typer', 'tvm_ffi', 'cuda', 'matplotlib'}"
        " | {'ray', 'sqlalchemy', 'psycopg'};"
        "print(*sorted(heavy & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_registry_needs_no_torch_and_no_compiler() -> None:
    """The dispatcher and the CLI list templates in processes that will never compile."""
    code = (
        "import sys; from tpf_jit.templates import registry; registry.templates();"
        "print(*sorted({'torch', 'cutlass'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
