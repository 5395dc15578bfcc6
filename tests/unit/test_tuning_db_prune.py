"""Which rows may go, case by case; random histories are in test_faults.py."""

from __future__ import annotations

import itertools

from tpf_jit.tuning_db import prune
from tpf_jit.tuning_db.rows import canonical_json
from tpf_jit.tuning_db.trust import Present
from tpf_jit.tuning_db.winner import Evidence, rank

_count = itertools.count()


def seen(us: float | None = 100.0, tile: int = 128, **fields) -> Evidence:
    number = next(_count)
    source = fields.get("source_hash", "now")
    values = {
        "id": f"{number:064d}",
        "cell": "op/shape/forward",
        "model": "GPU/1sm/16g",
        "template": "t",
        "config": canonical_json({"tile": tile}),
        "kernel_key": f"{tile} {source}",
        "source_hash": source,
        "cubin_sha256": f"{tile} {source}",
        "protocol": "p-1",
        "grade": "final",
        "status": "ok",
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "date": f"2026-12-01T00:{number // 60 % 60:02d}:{number % 60:02d}Z",
    }
    return Evidence(**{**values, **fields})


def failed(status: str, tile: int = 128, **fields) -> Evidence:
    return seen(None, tile, status=status, grade="search", **fields)


def going(*rows: Evidence, now: str | None = "now") -> dict[int, str]:
    """Position of the rows that may go, and why; winners never change."""
    found = prune.plan(rows, lambda name: None if now is None else Present(now))
    assert rank(row for row in rows if row.id not in found) == rank(rows)
    return {position: found[row.id] for position, row in enumerate(rows) if row.id in found}


def test_sources_that_were_measured_again() -> None:
    older = [seen(source_hash="old"), failed("compile_error", 64, source_hash="old"), failed("slow", 32, source_hash="old")]
    assert going(*older, seen(110.0)) == dict.fromkeys(range(3), prune.SOURCES)
    assert going(*older) == {}, "the only evidence of a stale winner stays, and what else is known of those sources"


def test_older_sources_go_even_where_the_newest_measured_are_stale_too() -> None:
    assert going(seen(source_hash="oldest"), seen(source_hash="old")) == {0: prune.SOURCES}


def test_equal_device_code_stays() -> None:
    assert going(seen(source_hash="old", cubin_sha256="128 now"), seen(110.0)) == {}


def test_an_older_method() -> None:
    assert going(seen(90.0), seen(100.0, protocol="p-2")) == {0: prune.PROTOCOL}
    assert going(seen(90.0), failed("compile_error", protocol="p-2")) == {}, "nothing was measured by the newer one yet"


def test_failures_that_were_seen_again() -> None:
    assert going(seen(), failed("launch_error", 64), failed("launch_error", 64)) == {1: prune.REPEATED}
    assert going(seen(), failed("launch_error", 64), failed("compile_timeout", 64), failed("launch_error", 32)) == {}


def test_measurements_of_today_s_sources_stay_however_many() -> None:
    assert going(*(seen(us, grade=grade) for us in (100, 101, 102) for grade in ("search", "final"))) == {}


def test_a_verdict_on_code_that_could_win_stays() -> None:
    fast, wrong = seen(50.0, 64, source_hash="old"), failed("wrong", 64, source_hash="old")
    assert going(fast, wrong, seen(100.0, source_hash="old")) == {}
    assert going(fast, wrong, seen(100.0)) == {0: prune.SOURCES, 1: prune.SOURCES}
    # The same code compiled from the sources of today: barred by the old verdict.
    again = seen(50.0, 64, cubin_sha256=wrong.cubin_sha256)
    assert going(wrong, again, seen(100.0)) == {}


def test_devices_and_cells_are_judged_apart() -> None:
    assert going(seen(source_hash="old"), seen(model="other GPU/1sm/16g"), seen(cell="op/other/forward")) == {}


def test_what_cannot_be_judged_stays() -> None:
    rows = [seen(source_hash="oldest"), seen(source_hash="old"), failed("launch_error", 64), failed("launch_error", 64)]
    assert going(*rows, now=None) == {}
    assert prune.plan(rows, lambda name: Present(None)).keys() == {rows[2].id}, "sources that cannot be read"


def test_statements_go_with_the_sources_they_speak_of() -> None:
    current, gone = failed("same_code", model="", cubin_sha256="128 old"), failed("same_code", model="", source_hash="b")
    rows = [seen(source_hash="old"), current, gone]
    assert going(*rows) == {2: prune.STATEMENT}
