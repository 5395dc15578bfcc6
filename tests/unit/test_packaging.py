"""What a wheel and an editable install contain, seen from throwaway environments outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pip carries the same parser on 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
MAPPED = {"tpf_jit": "tpf_jit", "templates": "tpf_jit.templates", "tuning_db": "tpf_jit.tuning_db"}
COPIED = ("tpf_jit", "templates", "tuning_db", "pyproject.toml", "README.md", "LICENSE")

# Runs in a throwaway environment: everything the package needs of itself, found where the package was installed.
PROBE = """
import importlib, json, sys
from importlib.resources import files
import tpf_jit, tpf_jit.templates, tpf_jit.tuning_db
from tpf_jit.templates import registry
for name in tpf_jit.__all__:
    getattr(tpf_jit, name)
for name in {modules!r}:
    importlib.import_module(name)

def names(package, folder, suffix):
    place = files(package) / folder
    return sorted(item.name for item in place.iterdir() if item.name.endswith(suffix)) if place.is_dir() else []

print(json.dumps({{
    "version": tpf_jit.__version__,
    "file": tpf_jit.__file__,
    "templates_file": tpf_jit.templates.__file__,
    "templates": [template.name for template in registry.templates()],
    "sources": all(path.is_file() for template in registry.templates() for path in template.sources()),
    "hashes": [template.source_hash() for template in registry.templates()],
    "presets": names("tpf_jit", "presets", ".json"),
    "shipped": names("tpf_jit.tuning_db", "shipped", ".jsonl"),
    "records": names("tpf_jit.tuning_db", "records", ".json"),
    "stray": [name for name in ("templates", "tuning_db", "tests", "examples") if importlib.util.find_spec(name)],
}}))
"""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def folders_with_code() -> set[str]:
    found = set()
    for folder, package in MAPPED.items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.parent.relative_to(ROOT / folder)
            found.add(".".join([package, *relative.parts]))
    return found


def module_names() -> list[str]:
    """Modules without a heavy import of their own, so the probe stays quick."""
    return ["tpf_jit.shape", "tpf_jit.errors", "tpf_jit.tuning_db.reader", "tpf_jit.templates.base"]


def test_the_package_list_equals_the_folders() -> None:
    setuptools = project()["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(folders_with_code())
    assert {package: folder for folder, package in MAPPED.items()} == setuptools["package-dir"]


def test_every_packaged_folder_is_a_regular_package() -> None:
    missing = [folder for folder in folders_with_code() if not (_folder_of(folder) / "__init__.py").is_file()]
    assert not missing


def _folder_of(package: str) -> Path:
    for folder, name in sorted(MAPPED.items(), key=lambda item: -len(item[1])):
        if package == name or package.startswith(name + "."):
            return ROOT.joinpath(folder, *package[len(name) + 1 :].split(".")) if package != name else ROOT / folder
    raise AssertionError(package)


def test_version_and_python_range() -> None:
    import tpf_jit

    metadata = project()["project"]
    assert metadata["requires-python"] == ">=3.10"
    prefix = "Programming Language :: Python :: 3."
    minors = {line.removeprefix(prefix) for line in metadata["classifiers"] if line.startswith(prefix)}
    assert minors == {"10", "11", "12", "13", "14"}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {tpf_jit.__version__}" in changelog
    assert {"cu13", "dev", "bench"} <= set(metadata["optional-dependencies"])


def test_tune_stays_callable_beside_its_subpackage() -> None:
    """`tpf_jit.tune` is a function and a subpackage; whichever is imported first, both uses work."""
    code = """
import tpf_jit, tpf_jit.api
calls = []
tpf_jit.api.tune = lambda *arguments, **options: calls.append((arguments, options))
if {first}:
    tpf_jit.tune("before")
import tpf_jit.tune.sweep as sweep
from tpf_jit import tune
tune("shape", budget_s=1)
tpf_jit.tune("other")
assert calls[-2:] == [(("shape",), {{"budget_s": 1}}), (("other",), {{}})], calls
assert tpf_jit.tune.sweep is sweep
"""
    for first in (True, False):
        subprocess.run([sys.executable, "-c", code.format(first=first)], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what builds read, so that the build leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment without the variables that would put the checkout on the path."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def make_venv(folder: Path, environment: dict[str, str]) -> Path:
    """A new environment that sees the packages of the running one (but not the checkout); returns its python."""
    command = [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)]
    subprocess.run(command, check=True, env=environment)
    python = folder / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", ask], check=True, env=environment, text=True, capture_output=True).stdout.strip())
    seen = [Path(entry).resolve() for entry in sys.path if entry and Path(entry).is_dir()]
    site.joinpath("packages_of_the_parent.pth").write_text(
        "".join(f"{path}\n" for path in seen if path != ROOT and ROOT / "tests" not in (path, *path.parents)), encoding="utf-8"
    )
    return python


def pip(python: Path, environment: dict[str, str], *arguments: str) -> None:
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run([python, "-m", "pip", *arguments, *offline], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def probe(python: Path, environment: dict[str, str], folder: Path) -> dict:
    code = PROBE.format(modules=module_names())
    done = subprocess.run([python, "-c", code], cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_contents(found: dict, source: Path) -> None:
    import tpf_jit

    assert found["version"] == tpf_jit.__version__
    assert found["templates"], "no template is registered"
    assert found["sources"]
    assert found["presets"] == sorted(path.name for path in (source / "tpf_jit" / "presets").glob("*.json"))
    assert found["shipped"] == sorted(path.name for path in (source / "tuning_db" / "shipped").glob("*.jsonl"))
    assert found["records"] == sorted(path.name for path in (source / "tuning_db" / "records").glob("*.json"))


@pytest.fixture(scope="module")
def wheel(outside: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip(Path(sys.executable), environment, "wheel", "-w", str(folder), str(outside))
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_contents(wheel: Path, outside: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode())
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tpf_jit"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shipped = {f"tpf_jit/tuning_db/shipped/{path.name}" for path in (outside / "tuning_db" / "shipped").glob("*.jsonl")}
    code = {f"tpf_jit/{path.relative_to(outside / 'tpf_jit').as_posix()}" for path in (outside / "tpf_jit").rglob("*.py")}
    assert shipped | code | {"tpf_jit/py.typed"} <= set(names)


def test_wheel_install(wheel: Path, outside: Path, environment: dict[str, str], tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", environment)
    pip(python, environment, "install", "--ignore-installed", str(wheel))
    found = probe(python, environment, tmp_path)
    assert Path(found["templates_file"]).parent == Path(found["file"]).parent / "templates"
    assert tmp_path in Path(found["file"]).parents
    assert found["stray"] == []
    check_contents(found, outside)
    script = tmp_path / "venv" / "bin" / "tpf-jit"
    done = subprocess.run([script, "--version"], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert found["version"] in done.stdout
    # A checkout with a plain install beside it: ./tpf_jit shadows the installed package, and its hook must find the rest.
    inside = probe(python, environment, outside)
    assert Path(inside["templates_file"]) == outside / "templates" / "__init__.py"
    check_contents(inside, outside)
    assert inside["hashes"] == found["hashes"], "the source hash must not depend on where the package lies"


def test_editable_install(outside: Path, environment: dict[str, str], tmp_path: Path) -> None:
    python = make_venv(tmp_path / "venv", environment)
    pip(python, environment, "install", "--ignore-installed", "-e", str(outside))
    for folder in (tmp_path, outside):
        found = probe(python, environment, folder)
        assert Path(found["file"]) == outside / "tpf_jit" / "__init__.py"
        assert Path(found["templates_file"]) == outside / "templates" / "__init__.py"
        # A process that runs in the checkout has it on sys.path, so there its folders have bare names of their own.
        assert folder == outside or found["stray"] == []
        check_contents(found, outside)
