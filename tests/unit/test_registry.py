"""Templates: what the registry accepts, how plugins come in, and which changes of source change a kernel's key."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import warnings
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import toy_template as toy

from tpf_jit.errors import NoKernel
from tpf_jit.templates import registry, sources
from tpf_jit.templates.base import Template, canonical_json, config_from_dict, config_to_dict

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No template, no backend, and nothing discovered yet."""
    monkeypatch.setattr(registry, "_templates", {})
    monkeypatch.setattr(registry, "_backends", {})
    monkeypatch.setattr(registry, "_state", {"started": False, "done": False})
    monkeypatch.setattr(registry, "_load_builtin", lambda: None)
    monkeypatch.setattr(registry, "entry_points", lambda group: [])


def test_register_get_and_filter(empty_registry: None) -> None:
    assert registry.register(toy.ToyTemplate) is toy.ToyTemplate
    assert registry.get("toy_forward").family == "toy/forward"
    assert [t.name for t in registry.templates("toy", "forward", "toy_1")] == ["toy_forward"]
    assert registry.templates("toy", "backward") == [] == registry.templates(arch="sm_90a")


def test_same_class_again_is_a_no_op_and_keeps_the_instance(empty_registry: None) -> None:
    registry.register(toy.ToyTemplate)
    first = registry.get("toy_forward")
    registry.register(toy.ToyTemplate())
    assert registry.get("toy_forward") is first


def test_a_name_that_is_taken_is_refused(empty_registry: None) -> None:
    registry.register(toy.ToyTemplate)

    class Other(toy.ToyTemplate):
        pass

    with pytest.raises(ValueError, match=r"'toy_forward' is taken by toy_template\.ToyTemplate"):
        registry.register(Other)
    registry.register(Other, replace=True)
    assert type(registry.get("toy_forward")) is Other


def test_an_unknown_name_lists_what_there_is(empty_registry: None) -> None:
    registry.register(toy.ToyTemplate)
    with pytest.raises(NoKernel, match="'nope'; registered: toy_forward"):
        registry.get("nope")
    with pytest.raises(NoKernel, match="'nope'; registered: cute"):
        registry.backend("nope")


@dataclass
class Thawed:
    tile: int = 1


@dataclass(frozen=True)
class Fractional:
    tile: float = 1.0


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("name", "", "name must be a non-empty string"),
        ("op", None, "op must be a non-empty string"),
        ("Config", Thawed, "must be a frozen dataclass"),
        ("Config", dict, "must be a frozen dataclass"),
        ("Config", Fractional, "Config.tile must be declared int, str or bool"),
    ],
)
def test_an_incomplete_template_is_refused(empty_registry: None, attribute: str, value: object, message: str) -> None:
    bad = type("Bad", (toy.ToyTemplate,), {attribute: value})
    with pytest.raises(TypeError, match=message):
        registry.register(bad)
    assert registry.templates() == []


def test_what_is_no_template_is_refused(empty_registry: None) -> None:
    class Abstract(Template):
        name = op = "abstract"

    for thing in (Abstract, object(), dict, "toy_forward"):
        with pytest.raises(TypeError):
            registry.register(thing)
    with pytest.raises(TypeError, match="not a backend"):
        registry.register_backend(object())


def test_the_built_in_backend_cannot_be_taken_by_accident(empty_registry: None) -> None:
    backend = toy.ToyBackend()
    backend.name = "cute"
    with pytest.raises(ValueError, match="taken"):
        registry.register_backend(backend)


def points(**plugins: str):
    def entry_points(group: str) -> list[EntryPoint]:
        known = {"tpf_jit.templates": [EntryPoint(name, value, group) for name, value in plugins.items()]}
        return known.get(group, [])

    return entry_points


def test_plugins_load_on_first_use_and_a_broken_one_warns_once(empty_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "entry_points", points(good="toy_template:ToyTemplate", broken="no_such_module:X", wrong="json:dumps")
    )
    with pytest.warns(RuntimeWarning) as caught:
        assert [t.name for t in registry.templates()] == ["toy_forward"]
    messages = sorted(str(w.message) for w in caught)
    assert len(messages) == 2
    assert "plugin 'broken' is left out: ModuleNotFoundError" in messages[0]
    assert "plugin 'wrong' is left out: TypeError" in messages[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(registry.templates()) == 1


def test_threads_never_see_half_a_registry(empty_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started, proceed = threading.Event(), threading.Event()

    def slow_builtin() -> None:
        started.set()
        proceed.wait(5)
        registry.register(toy.ToyTemplate)

    monkeypatch.setattr(registry, "_load_builtin", slow_builtin)
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(len(registry.templates()))) for _ in range(4)]
    threads[0].start()
    started.wait(5)
    for thread in threads[1:]:
        thread.start()
    proceed.set()
    for thread in threads:
        thread.join(5)
    assert seen == [1, 1, 1, 1]


def test_configs_survive_json_and_reject_what_they_do_not_know() -> None:
    config = toy.ToyConfig(3, "slow")
    assert config_from_dict(toy.ToyConfig, config_to_dict(config)) == config
    assert config_from_dict(toy.ToyConfig, {}) == toy.ToyConfig()
    with pytest.raises(ValueError, match="no field speed; it has tile, mood, log"):
        config_from_dict(toy.ToyConfig, {"speed": 1})
    with pytest.raises(ValueError, match="tile must be int, got True"):
        config_from_dict(toy.ToyConfig, {"tile": True})
    assert canonical_json({"b": 1, "a": [True, "é"]}) == '{"a":[true,"\\u00e9"],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


CODE = '''
"""Docstring."""
import math  # a comment


def f(x: int) -> str:
    """What it does."""
    y = {"a": 1, "b": x}  # another
    return f"{y['a']:>{x}} # no comment" + "# nor this"
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace("  # a comment", ""),
        CODE.replace('"""What it does."""', '"""Something else."""'),
        CODE.replace("    ", "\t"),
        CODE.replace('{"a": 1, "b": x}', '{"a":1,\n        # why\n\n        "b": x}'),
        CODE.replace("\n", "\r\n"),
        CODE + "\n\n# the end\n",
    ],
)
def test_comments_docstrings_and_layout_do_not_count(same: str) -> None:
    assert same != CODE
    assert sources.normalised(same) == sources.normalised(CODE)


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("1", "2"),
        CODE.replace("# no comment", "# no  comment"),
        CODE.replace("# nor this", "# nor that"),
        CODE.replace("    return", "    if x:\n        return"),
        CODE.replace("x: int", "x: float"),
    ],
)
def test_code_and_string_contents_count(other: str) -> None:
    assert sources.normalised(other) != sources.normalised(CODE)


def test_the_hash_is_the_same_on_every_python(tmp_path: Path) -> None:
    """f-strings became several tokens in Python 3.12; the recorded value was made under 3.11 and must hold everywhere."""
    path = tmp_path / "code.py"
    path.write_text(CODE)
    assert sources.hash_files([("code", path)]) == "9eae5ad8ae649cfcf838ad9064d49a467553b0e4ef282004ec9659a420a5ae43"


def test_text_that_is_not_python_is_an_error() -> None:
    with pytest.raises(SyntaxError):
        sources.normalised("x = (")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a template-like module, helpers, and parts that must not count."""
    root = tmp_path / "pkg_under_test"
    (root / "device").mkdir(parents=True)
    files = {
        "__init__.py": "raise RuntimeError('hashing must not import')",
        "main.py": """
            import torch_like_thing
            from . import plain
            from .device import helper as h
            from tpf_jit.templates import base

            class T:
                def build(self):
                    from pkg_under_test.device.kernel import K
                def workload(self):
                    from .tests_only import W
        """,
        "plain.py": "X = 1",
        "tests_only.py": "W = 1",
        "unrelated.py": "U = 1",
        "device/__init__.py": "D = 1",
        "device/helper.py": "from ..second import S",
        "device/kernel.py": "raise RuntimeError('hashing must not import')\nfrom .helper import Y",
        "second.py": "S = 1",
    }
    for name, text in files.items():
        (root / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def test_a_package_counts_only_for_what_it_defines(package: Path) -> None:
    (package / "other.py").write_text("from .device import D")
    names = [name for name, _ in sources.closure("pkg_under_test.other")]
    assert names == ["pkg_under_test.device", "pkg_under_test.other"]


def test_the_closure_holds_what_build_imports_and_nothing_else(package: Path) -> None:
    names = [name for name, _ in sources.closure("pkg_under_test.main")]
    assert names == [
        "pkg_under_test.device.helper",
        "pkg_under_test.device.kernel",
        "pkg_under_test.main",
        "pkg_under_test.plain",
        "pkg_under_test.second",
    ]
    assert not {"pkg_under_test", "pkg_under_test.device.kernel"} & set(sys.modules)


@pytest.mark.parametrize(("file", "changes"), [("second.py", True), ("device/kernel.py", True), ("tests_only.py", False)])
def test_the_hash_follows_the_closure(package: Path, file: str, changes: bool) -> None:
    before = sources.hash_files(sources.closure("pkg_under_test.main"))
    with (package / file).open("a") as text:
        text.write("\nMORE = 2\n")
    assert (sources.hash_files(sources.closure("pkg_under_test.main")) != before) is changes


def test_the_hash_does_not_depend_on_the_install_location(tmp_path: Path) -> None:
    """The same files in another folder and under another process give the same hash."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from tpf_jit.templates import sources; print(sources.hash_files(sources.closure('moved_pkg.main')))"
    )
    seen = set()
    for place in ("here", "there/deeper"):
        folder = tmp_path / place / "moved_pkg"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "main.py").write_text("from .more import M\n")
        (folder / "more.py").write_text("M = 1\n")
        command = [sys.executable, "-c", code, str(folder.parent)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seen.add(done.stdout)
    assert len(seen) == 1


def test_explicit_sources_and_data_files(tmp_path: Path) -> None:
    table = tmp_path / "table.bin"
    table.write_bytes(b"\x00\x01 # data, not Python")
    code = tmp_path / "code.py"
    code.write_text("x = 1  # one\n")

    class WithData(toy.ToyTemplate):
        def sources(self) -> tuple[Path, ...]:
            return (code, table)

    class Again(WithData):
        pass

    class Changed(WithData):
        pass

    first = WithData().source_hash()
    code.write_text("x = 1  # two\n")
    assert Again().source_hash() == first
    table.write_bytes(b"\x00\x02 # data, not Python")
    assert Changed().source_hash() != first
    assert WithData().source_hash() == first, "a running process keeps the hash of the code it has loaded"
