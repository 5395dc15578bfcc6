"""The HTML report: valid and self-contained, its numbers those of the rows, charts where points belong, and the command."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from tuning_samples import H100, H200, SOURCE, on, shape, trial
from typer.testing import CliRunner

from tpf_jit.cli import report as command
from tpf_jit.errors import DatabaseError
from tpf_jit.shape import TriangleMultiplicationShape
from tpf_jit.templates import registry
from tpf_jit.tune import html_report, html_report_facts
from tpf_jit.tune.html_report_facts import Work, work
from tpf_jit.tune.html_report_svg import Chart, Series, bars, number
from tpf_jit.tuning_db import contents
from tpf_jit.tuning_db.rows import cell_key
from tpf_jit.tuning_db.store import TuningStore

TEMPLATE = "triangle_attention_forward_sm90"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Strict about nesting: every element is closed in order. Keeps ids, links, attributes that load something, and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        assert len(values) == len(attrs), f"an attribute of {tag} comes twice"
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values["href"])
        self.loads += [value for name, value in attrs if name in ("src", "href", "action", "data") and tag != "a"]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.tables and ("td" in self.open or "th" in self.open):
            self.tables[-1][-1][-1] += data

    def table(self, first: str) -> list[list[str]]:
        return next(table for table in self.tables if table[0][0] == first)


@pytest.fixture(scope="module")
def shipped() -> list:
    return list(contents.shipped().values())


@pytest.fixture(scope="module")
def text(shipped: list) -> str:
    return html_report.page(shipped, html_report_facts.cells(shipped), ["the shipped tables"])


def page(*trials) -> Page:
    return Page(html_report.page(list(trials), html_report_facts.cells(trials)))


def timed(crop: int, us: float, **fields):
    """A final row of the real template with today's sources."""
    values = {"template": TEMPLATE, "source_hash": registry.get(TEMPLATE).source_hash(), "grade": "final"}
    return trial(shape(crop=crop, **fields.pop("problem", {})), us, **{**values, **fields})


def test_the_shipped_tables_make_a_valid_page_that_loads_nothing(text: str) -> None:
    parsed = Page(text)
    assert text.startswith("<!DOCTYPE html>") and parsed.tags[:2] == ["html", "head"]
    assert {"script", "iframe", "img", "link", "object"}.isdisjoint(parsed.tags) and not parsed.loads
    assert set(parsed.links) == {f"#{name}" for name in parsed.ids} and len(set(parsed.ids)) == len(parsed.ids) == 6
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}, "only the name of SVG's namespace"
    assert "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        assert ElementTree.fromstring(svg).find("{http://www.w3.org/2000/svg}title").text
        assert "nan" not in svg and "inf" not in svg


def test_colours_of_both_schemes_can_be_read(text: str) -> None:
    """Contrast of text and series with the panel behind them, by the WCAG formula: 4.5 for text, 3 for lines."""
    light, dark = re.findall(r":root \{(.*?)\}", text, re.S)[:2]
    for scheme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for name in ("text", "faint", "good", "bad"):
            assert contrast(colours[name], colours["panel"]) >= 4.5, name
        for index in range(8):
            assert contrast(colours[f"c{index}"], colours["panel"]) >= 3


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_winner_is_listed_with_its_own_numbers(shipped: list, text: str) -> None:
    from tpf_jit.tuning_db import reader

    winners = reader.read_shipped().winners
    rows = [row for table in Page(text).tables if table[0][:2] == ["problem", "us"] and "grade" in table[0] for row in table[1:]]
    assert len(rows) == len(winners) > 0
    said = {(row[1], row[4]) for row in rows}
    for entry in winners.values():
        fields = " ".join(f"{name}={value}" for name, value in entry[0].config.items())
        assert (number(entry[0].us), fields) in said


def test_work_and_roofs() -> None:
    """By hand for N=256, H=4, D=32: 2 products of 2 FLOP for each of 256^3 x 4 scores and 32 channels."""
    least = html_report_facts.work(shape(crop=256), "forward")
    scores = 256**3 * 4
    assert least.flop == 4 * 32 * scores and least.exps == scores
    assert least.bytes == 4 * 256**2 * 4 * 32 * 2 + 256**2 * 4 * 4 + 4 * 256**2 * 2
    masked = html_report_facts.work(shape(crop=256, mask="bool", bias_dtype="float32"), "forward")
    assert masked.bytes - least.bytes == 256**2 * 4 + 4 * 256**2 * 2
    assert html_report_facts.work(shape(crop=256), "backward_key").flop == 2 * least.flop
    assert html_report_facts.work(shape(crop=256), "backward_query").flop == 1.5 * least.flop
    assert html_report_facts.work(shape(), "backward_stats") is None
    (cell,) = html_report_facts.cells([timed(256, 59.8)])
    assert cell.tflops == pytest.approx(4 * 32 * scores / 59.8e-6 / 1e12)
    memory, dense, exps = html_report_facts.PEAKS["NVIDIA H200"]
    assert (memory, dense) == (4.8e12, 989e12) and exps == pytest.approx(3.9e12, rel=0.02)
    parsed = page(timed(256, 59.8))
    (row,) = parsed.table("problem")[1:]
    assert row[3] == number(cell.tflops)
    roof = next(table for table in parsed.tables if "FLOP/byte" in table[0])[1]
    expected = (least.flop / dense, least.bytes / memory, least.exps / exps)
    assert roof[3:] == [f"{100 * part / 59.8e-6:.0f}%" for part in expected]
    assert "4.8 TB/s and 989 TFLOP/s" in "".join(parsed.text)


def test_the_roof_of_exponentials_follows_the_products_of_the_kernel() -> None:
    """One exponential a score: at D=16 it allows 64 FLOP each in the forward, 128 in the kernel of dK and dV."""
    rows = [timed(256, 60.0, problem={"head_dim": 16}), timed(256, 150.0, problem={"head_dim": 16}, direction="backward_key")]
    found = html_report_facts.cells(rows)
    limits = []
    for cell in found:
        roofs = html_report._roofs(html_report_facts.PEAKS["NVIDIA H200"], [cell])
        (exp,) = [series for series in roofs if series.name == "exp, D=16"]
        limits.append(exp.points[-1][1])
    exps = html_report_facts.PEAKS["NVIDIA H200"][2]
    expected = {"triangle_attention/forward": 64 * exps / 1e12, "triangle_attention/backward_key": 128 * exps / 1e12}
    assert limits == pytest.approx([expected[cell.family] for cell in found])


def test_a_device_without_known_peaks_has_no_roof() -> None:
    other = dataclasses.replace(H100, name="NVIDIA H100 PCIe")
    text = "".join(page(timed(256, 80.0, device=on(other))).text)
    assert "no peaks are known for it, so no roof" in text and "dense bf16#" not in text


def test_importance_and_slices() -> None:
    """tile_n decides the time alone here, stages not at all, and crop never varies."""
    times = {(64, 1): 100.0, (64, 2): 100.0, (128, 1): 200.0, (128, 2): 200.0}
    rows = [
        timed(crop, us * crop, config={"tile_n": tile, "stages": stages, "crop": 0})
        for crop in (256, 384)
        for (tile, stages), us in times.items()
    ]
    found = {each.name: each for each in html_report_facts.parameters(html_report_facts.cells(rows))}
    assert set(found) == {"tile_n", "stages"}
    assert found["tile_n"].share == pytest.approx(1) and found["stages"].share == pytest.approx(0)
    assert [[ratio for ratio, _ in tried] for tried in found["tile_n"].slices.values()] == [[1.0, 1.0], [2.0, 2.0]]
    assert [[ratio for ratio, _ in tried] for tried in found["stages"].slices.values()] == [[1.0, 1.0], [1.0, 1.0]]
    text = "".join(page(*rows).text)
    assert "8 timed configurations of 2 problems, finalists only." in text
    assert "finalists only" not in "".join(page(*rows, timed(512, 9.0, grade="search")).text)


def test_history_compares_sessions_of_a_problem() -> None:
    rows = [
        timed(256, 100.0, session="first", date="2026-11-01T00:00:00Z"),
        timed(256, 80.0, session="second", date="2026-12-01T00:00:00Z", config={"tile_n": 64, "stages": 2, "crop": 0}),
        timed(384, 300.0, session="first", date="2026-11-01T00:00:00Z"),
    ]
    parsed = page(*rows)
    assert "1 problems measured in several sessions" in parsed.text and "2 sessions" in parsed.text
    (row,) = next(table for table in parsed.tables if "us by session" in table[0])[1:]
    assert row[-1] == "100 (2026-11-01) → 80 (2026-12-01)"
    assert "2026-12-01T00:00:00Z: 80 us" in "".join(parsed.text), "the chart's tooltip"
    assert "Every problem was measured in one session so far." in page(rows[0]).text


def test_staleness_says_what_changed() -> None:
    fresh, old = timed(256, 60.0), timed(384, 160.0, source_hash=SOURCE)
    foreign = trial(shape(crop=512), 380.0, template="removed_template")
    parsed = page(fresh, old, foreign)
    assert "2 of 3 winners are stale, oldest first." in parsed.text
    said = {row[0]: row[3] for row in next(table for table in parsed.tables if "what changed" in table[0])[1:]}
    assert "other sources of the template" in said[old.cell]
    assert said[foreign.cell] == "a template that is not installed here"
    assert "All winners are current." in page(fresh).text


def test_failures_are_counted_with_an_example() -> None:
    bad = [timed(256, 0, status="wrong", detail="out: <3e-2> & more", config={"tile_n": index}) for index in (1, 2)]
    table = page(timed(256, 60.0), *bad).table("template")
    assert table[1] == [TEMPLATE, "wrong", "2", "out: <3e-2> & more"], "escaped, not swallowed"


def test_other_operations_and_empty_databases() -> None:
    class Other:
        op = "another_operation"

        def key(self) -> str:
            return "another_operation/N64/<b>"

    parsed = page(timed(256, 60.0), trial(Other(), 5.0))
    assert any(row[0] == "another_operation/N64/<b>/forward" and row[3] == "" for table in parsed.tables for row in table)
    assert "1 problems have no count of their work" in "".join(parsed.text)
    empty = page()
    assert "There are no rows." in "".join(empty.text) and "svg" not in empty.tags
    only_failed = page(timed(256, 0, status="compile_error", detail="no"))
    assert "Nothing has a winner yet." in only_failed.text and only_failed.table("template")[1][1] == "compile_error"


def test_multiplications_are_counted_named_and_drawn() -> None:
    def measured(crop: int, direction: str, us: float, **fields):
        return trial(TriangleMultiplicationShape(crop, **fields), us, direction)

    front = work(TriangleMultiplicationShape(100, 64, 32, mask="float"), "front")
    assert front == Work(4 * 2 * 100**2 * 64 * 32, 100**2 * (2 * 64 + 2 * 2 * 32 + 4), 2 * 100**2 * 32)
    for name in ("nt", "tn", "nn"):
        product = work(TriangleMultiplicationShape(100, 64, 32), f"product_{name}")
        assert product == Work(2 * 100**3 * 32, 3 * 2 * 100**2 * 32, 0)
    back = work(TriangleMultiplicationShape(100, 64, 32), "back")
    assert back == Work(2 * 100**2 * (32 * 64 + 64 * 64), 2 * 100**2 * (32 + 64 + 64), 100**2 * 64)
    backward = {name: work(TriangleMultiplicationShape(100, 64, 32, mask="float"), name) for name in (
        "back_backward", "back_weights", "front_backward", "front_weights", "front_gradients")}  # fmt: skip
    # Values and gates again, and as many products for the gradients; in one kernel for both kinds of them.
    assert [each.flop for each in backward.values()] == 2 * [2 * back.flop] + 2 * [2 * front.flop] + [3 * front.flop]
    assert [each.exps for each in backward.values()] == 2 * [back.exps] + 3 * [front.exps]
    assert [each.bytes / 100**2 for each in backward.values()] == [
        2 * (3 * 64 + 2 * 32), 2 * (2 * 64 + 32), 2 * (3 * 64 + 2 * 32) + 4, 2 * (64 + 2 * 32) + 4,
        2 * (3 * 64 + 2 * 32) + 4,
    ]  # fmt: skip
    assert work(TriangleMultiplicationShape(100), "fold") is None
    parsed = page(
        *(measured(crop, "product_nt", crop / 2, channels=channels) for crop in (1024, 256, 512) for channels in (64, 128)),
        measured(256, "front", 90.0, mask="float"), measured(256, "fold", 50.0),
    )  # fmt: skip
    rows = [row for table in parsed.tables for row in table if row[0].startswith("N=")]
    named = [row[0] for row in rows if "outgoing bfloat16 weights float32" in row[0]]
    assert named[named.index("N=256 C=64 outgoing bfloat16 weights float32") :][:3] == [
        f"N={crop} C=64 outgoing bfloat16 weights float32" for crop in (256, 512, 1024)
    ]
    assert "N=256 C=128 outgoing bfloat16 weights float32 float mask" in named
    speed = 2 * 256**3 * 64 / 128.0 / 1e6
    assert any(row[0] == "N=256 C=64 outgoing bfloat16 weights float32" and row[3] == number(speed) for row in rows)
    assert {"C=64", "C=128"} <= set(parsed.text)
    assert "1 problems have no count of their work" in "".join(parsed.text)


def test_one_line_a_head_dim_and_one_chart_a_kind() -> None:
    rows = [timed(crop, crop / 4 * dim, problem={"head_dim": dim}) for crop in (256, 512) for dim in (16, 32)]
    rows += [timed(256, 70.0, problem={"mask": "bool"}), timed(256, 90.0, device=on(H100))]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html_report.page(rows, html_report_facts.cells(rows)))
    speed = [caption for caption in captions if caption.endswith(": TFLOP/s")]
    assert len(speed) == 3 and sum("bool mask" in caption for caption in speed) == 1 and sum(H100.model in c for c in speed) == 1


# charts


def points(svg: str) -> list[tuple[float, float]]:
    root = ElementTree.fromstring(svg)
    circles = root.iter("{http://www.w3.org/2000/svg}circle")
    return [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles]


def test_points_are_where_their_values_are() -> None:
    chart = Chart("t", "x", "y", log_x=True, series=[Series("a", [(1, 0, ""), (10, 5, ""), (100, 10, "")])])
    (x0, y0), (x1, y1), (x2, y2) = points(chart.svg())
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x2 > x0, "decades are equally wide"
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2) and y2 < y0, "up is more"
    assert 0 < x0 < x2 < chart.size[0] and 0 < y2 < y0 < chart.size[1]


def test_ticks_say_where_they_are() -> None:
    """A step of 0.025 needs three decimals: 1.025 must not be called 1.03."""
    chart = Chart("t", "x", "y", series=[Series("a", [(0, 1.0, ""), (1, 1.1, "")])])
    (_, low), (_, high) = points(chart.svg())
    root = ElementTree.fromstring(chart.svg())
    ticks = [(float(text.text), float(text.get("y")) - 4) for text in root.iter() if text.get("text-anchor") == "end"]
    assert len(ticks) >= 4
    for value, y in ticks:
        assert y == pytest.approx(low + (value - 1.0) / 0.1 * (high - low), abs=0.3)


def test_what_cannot_be_drawn_is_left_out() -> None:
    bad = [(0, 1, ""), (1, 0, ""), (2, math.nan, ""), (3, 3, "kept")]
    assert len(points(Chart("t", "x", "y", True, True, series=[Series("a", bad)]).svg())) == 1
    assert Chart("t", "x", "y", series=[Series("a", [])]).svg() == "" and bars("t", []) == ""
    ElementTree.fromstring(Chart("a<b", "x&y", "y", series=[Series("<s>", [(1, 1, "<tip>")])]).svg())
    ElementTree.fromstring(bars("a<b", [("x&y", 2.0, "<1>"), ("z", -1.0, "")]))


def test_names_of_lines_do_not_cover_each_other() -> None:
    series = [Series(f"s{index}", [(1, 1 + index / 1000, "")]) for index in range(4)]
    root = ElementTree.fromstring(Chart("t", "x", "y", series=series, size=(400, 400)).svg())
    texts = root.iter("{http://www.w3.org/2000/svg}text")
    places = sorted(float(text.get("y")) for text in texts if text.get("class").startswith("name"))
    assert len(places) == 4 and all(after - before >= 12 for before, after in zip(places, places[1:], strict=False))


@pytest.mark.parametrize(
    ("value", "expected"), [(0, "0"), (0.0123, "0.0123"), (1.5, "1.5"), (59.84, "59.8"), (2769.4, "2,769"), (1000, "1,000")]
)
def test_numbers(value: float, expected: str) -> None:
    assert number(value) == expected


# the command


def run(*arguments: str):
    app = typer.Typer()
    app.command("report")(command.report)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_reads_databases_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPF_JIT_DB", str(tmp_path / "absent.db"))
    database, export, out = tmp_path / "a.db", tmp_path / "b.jsonl", tmp_path / "page.html"
    with TuningStore(database) as store:
        store.put_trials([timed(256, 60.0)])
    with TuningStore(tmp_path / "c.db") as store:
        store.put_trials([timed(384, 160.0), timed(384, 200.0, device=on(H100))])
        store.export(export)
    before = database.read_bytes()
    done = run("--out", str(out), "--db", str(database), "--db", str(export), "--no-shipped", "--device", "h200")
    assert done.exit_code == 0, done.output
    parsed = Page(out.read_text(encoding="utf-8"))
    assert [row[0] for row in parsed.table("problem")[1:]] == ["N=256 H=4 D=32 bfloat16", "N=384 H=4 D=32 bfloat16"]
    assert database.read_bytes() == before and sorted(path.name for path in tmp_path.glob(".*")) == []
    assert H100.model not in "".join(parsed.text) and H200.model in "".join(parsed.text)


def test_the_command_takes_the_shipped_tables_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPF_JIT_DB", str(tmp_path / "absent.db"))
    assert run("--out", str(tmp_path / "page.html")).exit_code == 0
    parsed = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "the shipped tables" in "".join(parsed.text) and len(parsed.tables) > 2
    assert not (tmp_path / "absent.db").exists()


def test_rows_as_optuna_studies(tmp_path: Path) -> None:
    import optuna

    database, file = tmp_path / "a.db", tmp_path / "studies.log"
    other = {"tile_n": 64, "stages": 3, "crop": 0, "softmax": "exact"}
    rows = [
        timed(256, 60.0),
        timed(256, 55.0, config=other),
        timed(256, 0, status="wrong", detail="out 3e-2", config={"tile_n": 96, "stages": 2, "crop": 0}),
        timed(384, 160.0, device=on(H100)),
    ]
    with TuningStore(database) as store:
        store.put_trials(rows)
    arguments = ("--db", str(database), "--no-shipped", "--out", str(tmp_path / "x.html"), "--studies", str(file))
    assert run(*arguments).exit_code == 0
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))
    names = sorted(study.study_name for study in optuna.get_all_study_summaries(storage))
    assert names == sorted([f"{rows[0].cell} on {H200.model}", f"{rows[3].cell} on {H100.model}"])
    study = optuna.load_study(study_name=f"{rows[0].cell} on {H200.model}", storage=storage)
    assert (study.best_value, study.best_params) == (55.0, other)
    states = {trial.user_attrs["id"]: trial.state.name for trial in study.trials}
    assert states == {rows[0].id: "COMPLETE", rows[1].id: "COMPLETE", rows[2].id: "FAIL"}
    again = run(*arguments)
    assert isinstance(again.exception, DatabaseError) and "exists already" in str(again.exception)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    missing = run("--db", str(tmp_path / "none.db"), "--out", str(tmp_path / "x.html"))
    assert isinstance(missing.exception, DatabaseError) and "does not exist" in str(missing.exception)
    nowhere = run("--no-shipped", "--out", str(tmp_path / "no" / "x.html"))
    assert isinstance(nowhere.exception, DatabaseError) and "cannot be written" in str(nowhere.exception)


def test_db_report_is_a_command() -> None:
    from tpf_jit.cli import db

    assert "report" in {each.name or each.callback.__name__ for each in db.app.registered_commands}


def test_the_cell_of_a_row_names_its_problem() -> None:
    assert html_report_facts.cells([timed(256, 1.0)])[0].name == cell_key(shape(crop=256), "forward")
