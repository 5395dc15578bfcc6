"""Options of problems beside presets and keys: they choose, and what chooses nothing is refused; and what is used if left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import tpf_jit
from tpf_jit.cli import _shapes
from tpf_jit.cli.app import app, run
from tpf_jit.errors import InvalidInput
from tpf_jit.shape import TriangleAttentionShape, TriangleMultiplicationShape

ATTENTION, MULTIPLICATION = TriangleAttentionShape.op, TriangleMultiplicationShape.op
KEY = TriangleAttentionShape(384, head_dim=16, mask="bool").key()

CHOICES = [
    ("openfold3", {"channels": "64"}, lambda s: s.op == MULTIPLICATION and s.channels == 64),
    ("openfold3", {"head_dim": "16"}, lambda s: s.op == ATTENTION and s.head_dim == 16),
    ("openfold3", {"head_dim": "16,32"}, lambda s: s.op == ATTENTION),
    ("openfold3", {"mask": "float"}, lambda s: s.op == MULTIPLICATION),
    ("openfold3", {"direction": "incoming", "channels": "64"}, lambda s: s.op == MULTIPLICATION and s.direction == "incoming"
     and s.channels == 64),
    ("protenix", {"heads": 8}, lambda s: s.op == ATTENTION and s.heads == 8),
    ("protenix", {"rows": 512, "heads": 2}, lambda s: s.op == ATTENTION and s.rows == 512 and s.heads == 2),
    ("protenix", {"hidden": 128, "channels": "64"}, lambda s: s.op == MULTIPLICATION and (s.hidden, s.channels) == (128, 64)),
    ("protenix", {"bias_dtype": "fp32"}, lambda s: s.op == ATTENTION),
    ("protenix", {"weight_dtype": "float32"}, lambda s: s.op == MULTIPLICATION),
    ("boltz2", {"batch": 4}, lambda s: s.op == ATTENTION and s.batch == 4),
    ("boltz2", {"dtype": "bf16"}, lambda s: True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "meant"), CHOICES, ids=[f"{name}-{options}" for name, options, _ in CHOICES])
def test_options_choose_among_the_problems_of_a_preset(name: str, options: dict[str, Any], meant: Any) -> None:
    expected = [shape for shape in tpf_jit.preset(name) if meant(shape)]
    assert expected and _shapes.shapes([name], **options) == expected


def test_options_choose_for_every_target() -> None:
    found = _shapes.shapes(["384", KEY, "openfold3"], head_dim="16")
    assert found[:2] == [TriangleAttentionShape(384, head_dim=16), TriangleAttentionShape.parse(KEY)]
    assert {shape.head_dim for shape in found} == {16}
    # What --op leaves out of a target, options are not asked of.
    assert _shapes.shapes([KEY, "openfold3"], MULTIPLICATION, channels="64") == _shapes.shapes(["openfold3"], channels="64")


def test_files_are_presets_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"shapes": [{"crop": 64, "heads": 2}, {"crop": 64, "heads": 3}]}))
    assert _shapes.shapes([str(file)], heads=3) == [TriangleAttentionShape(64, heads=3)]
    with pytest.raises(InvalidInput, match="--heads: got 4; allowed: 2, 3, as .*mine.json has"):
        _shapes.shapes([str(file)], heads=4)


REFUSED = [
    (["openfold3", "--channels", "96"], "--channels: got 96; allowed: 128, 64, as openfold3 has"),
    (["openfold3", "--channels", "64,96"], "--channels: got 96; allowed: 128, 64, as openfold3 has"),
    (["openfold3", "--mask", "bool"], "--mask: got 'bool'; allowed: 'additive', 'float', as openfold3 has"),
    (["chai1", "--dtype", "float16"], "--dtype: got 'float16'; allowed: 'bfloat16', as chai1 has"),
    (["boltz2", "--op", ATTENTION, "--hidden", "128"],
     "--hidden: got 128; allowed: nothing, as boltz2 has triangle_attention only"),
    (["openfold3", "--head-dim", "16", "--channels", "64"],
     "--channels: got 64; allowed: nothing, as openfold3 with --head-dim 16 has triangle_attention only"),
    ([KEY, "--head-dim", "64"], f"--head-dim: got 64; allowed: 16, as {KEY} has"),
    ([KEY, "--mask", "none"], f"--mask: got 'none'; allowed: 'bool', as {KEY} has"),
    (["openfold3", "chai1", "--head-dim", "16"], "--head-dim: got 16; allowed: 64, as chai1 has"),
    (["openfold3", "--head-dim", "wide"], "--head-dim: got 'wide'; allowed: numbers separated by commas"),
]  # fmt: skip


@pytest.fixture
def call(private_state: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process; gives (exit code, stdout, stderr)."""

    def calling(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(list(argv))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return calling


@pytest.mark.parametrize("verb", ["compile", "explain", "tune", "sweep"])
@pytest.mark.parametrize(("words", "text"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_what_no_problem_has_is_refused(call: Any, verb: str, words: list[str], text: str) -> None:
    assert call(verb, *words) == (1, "", f"Error: {text}\n")


BENCHES = [("bench", "attention"), ("bench", "trimul"), ("bench", "search"), ("accuracy-trimul",)]


@pytest.mark.parametrize("verb", BENCHES, ids=" ".join)
def test_benches_refuse_it_too(call: Any, verb: tuple[str, ...]) -> None:
    words = ["--channels", "96"] if verb[-1].endswith("trimul") else ["--head-dim", "96"]
    allowed = "128, 64" if verb[-1].endswith("trimul") else "32, 16"
    assert call(*verb, "--crops", "openfold3", *words) == (
        1, "", f"Error: {words[0]}: got 96; allowed: {allowed}, as openfold3 has\n"
    )  # fmt: skip


@pytest.mark.parametrize("verb", BENCHES, ids=" ".join)
def test_crops_that_are_none_name_the_option(call: Any, verb: tuple[str, ...]) -> None:
    for crops, allowed in (("8,x", "numbers separated by commas"), ("", "crops with commas, a model preset, or a shape key")):
        assert call(*verb, "--crops", crops) == (1, "", f"Error: --crops: got {crops!r}; allowed: {allowed}\n")
    assert call("explain", "")[2].startswith("Error: TARGET: got ''; allowed: crops with commas")


class TestWhatReachesTheWork:
    """The shapes that commands hand on, where crops and options come from the command line."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        import tpf_jit.bench as benches

        asked: list[Any] = []

        class Enough(Exception):
            pass

        def take(shapes: Any, *rest: Any) -> None:
            asked.append(list(getattr(shapes, "shapes", None) or [getattr(each, "shape", each) for each in shapes]))
            raise Enough

        for name in ("bench_attention", "bench_multiplication", "bench_search", "accuracy_multiplication"):
            monkeypatch.setattr(benches, name, take)
        monkeypatch.setattr(tpf_jit, "compile", take)
        self.enough = Enough
        return asked

    def shapes(self, asked: list[Any], *argv: str) -> list[Any]:
        with pytest.raises(self.enough):
            run(list(argv))
        return list(dict.fromkeys(asked.pop()))

    def test_defaults_of_crops_are_as_they_were(self, asked: list[Any], private_state: Path) -> None:
        both = [TriangleMultiplicationShape(n, direction=way) for way in ("outgoing", "incoming") for n in (256, 384)]
        assert self.shapes(asked, "bench", "attention") == [TriangleAttentionShape(384), TriangleAttentionShape(768)]
        assert self.shapes(asked, "bench", "trimul") == [TriangleMultiplicationShape(n) for n in (384, 768, 1024)]
        assert self.shapes(asked, "accuracy-trimul") == both
        assert self.shapes(asked, "bench", "search", "--direction", "forward") == [
            TriangleAttentionShape(n) for n in (384, 640, 768)
        ]

    def test_presets_are_taken_whole_or_by_options(self, asked: list[Any], private_state: Path) -> None:
        all_of = tpf_jit.preset("openfold3")
        multiplications = [shape for shape in all_of if shape.op == MULTIPLICATION]
        assert self.shapes(asked, "bench", "trimul", "--crops", "openfold3") == multiplications
        assert self.shapes(asked, "accuracy-trimul", "--crops", "openfold3", "--direction", "incoming") == [
            shape for shape in multiplications if shape.direction == "incoming"
        ]
        assert self.shapes(asked, "bench", "attention", "--crops", "openfold3", "--head-dim", "16") == [
            shape for shape in all_of if shape.op == ATTENTION and shape.head_dim == 16
        ]
        assert self.shapes(asked, "compile", "openfold3", "--channels", "64") == [
            shape for shape in multiplications if shape.channels == 64
        ]


def commands(*path: str) -> list[tuple[str, Any]]:
    """Name and command of a verb, or of all below it."""
    command = typer.main.get_command(app)
    for word in path:
        command = command.commands[word]
    children = getattr(command, "commands", None)
    return [(" ".join(path), command)] if children is None else [pair for name in children for pair in commands(*path, name)]


@pytest.mark.parametrize(
    ("name", "command"),
    [pair for verb in ("bench", "tune", "sweep", "compile", "explain", "accuracy", "accuracy-trimul") for pair in commands(verb)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_help_says_what_is_used_if_an_option_is_left_out(call: Any, name: str, command: Any) -> None:
    code, out, _ = call(*name.split(), "--help")
    assert code == 0
    # An option begins a line two columns in; what follows deeper belongs to it.
    shown = {part.split()[0].rstrip(","): " ".join(part.split()) for part in re.split(r"\n  (?=-)", out)[1:]}
    for option in command.params:
        if option.param_type_name == "option" and option.name != "help" and not (option.is_flag and not option.default):
            text = shown[option.opts[0]]
            assert "if left out" in text.lower() or "[default: " in text, f"{name}: {text}"
