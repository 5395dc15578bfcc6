"""Winners are a pure function of the rows: the rule, its tie-break, and its independence of order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpf_jit.tuning_db.rows import canonical_json
from tpf_jit.tuning_db.winner import Evidence, protocol_order, rank

_count = iter(range(10**9))


def seen(us: float | None = 100.0, tile: int = 128, **fields) -> Evidence:
    values = {
        "id": f"{next(_count):064d}",
        "cell": "op/shape/forward",
        "model": "GPU/1sm/16g",
        "template": "t",
        "config": canonical_json({"tile": tile}),
        "kernel_key": "",
        "source_hash": "s",
        "cubin_sha256": "",
        "protocol": "p-1",
        "grade": "search",
        "status": "ok",
        "median_us": us,
        "p10_us": us,
        "p90_us": us,
        "date": "2026-12-01T00:00:00Z",
    }
    return Evidence(**{**values, **fields})


def winner(*rows: Evidence):
    ranked = rank(rows)
    return ranked[0].config["tile"] if ranked else None


def test_the_fastest_wins_and_others_follow_by_time() -> None:
    ranked = rank([seen(120, 1), seen(100, 2), seen(110, 3), seen(140, 4), seen(130, 5)])
    assert [each.config["tile"] for each in ranked] == [2, 3, 1, 5]
    assert [each.rank for each in ranked] == [0, 1, 2, 3]
    assert ranked[0].ties == 1


def test_within_noise_the_first_in_canonical_order_wins() -> None:
    ranked = rank([seen(100.0, 256), seen(100.4, 64), seen(100.3, 128), seen(101.0, 8)])
    assert ranked[0].config == {"tile": 64}
    assert ranked[0].ties == 3
    assert [each.config["tile"] for each in ranked[1:]] == [256, 128, 8]


def test_the_noise_band_follows_the_scatter_up_to_its_cap() -> None:
    def noisy(us, tile, spread):
        return seen(us, tile, p10_us=us - spread, p90_us=us + spread)

    assert winner(noisy(100, 2, 0.1), seen(100.9, 1)) == 2
    assert winner(noisy(100, 2, 1.0), seen(100.9, 1)) == 1
    assert winner(noisy(100, 2, 30.0), seen(101.9, 1)) == 1
    assert winner(noisy(100, 2, 30.0), seen(102.1, 1)) == 2


def test_nothing_wins_without_an_ok_row() -> None:
    assert rank([]) == []
    assert rank([seen(None, status="compile_error"), seen(90, status="slow"), seen(80, status="wrong")]) == []


@pytest.mark.parametrize("status", ["wrong", "nondeterministic"])
def test_a_refuted_configuration_cannot_win_while_its_code_is_the_same(status: str) -> None:
    assert winner(seen(100, 1), seen(120, 2), seen(100, 1, status=status)) == 2
    assert winner(seen(100, 1), seen(100, 1, status=status)) is None
    # Other sources: the verdict is not about them.
    assert winner(seen(100, 1), seen(120, 2), seen(100, 1, status=status, source_hash="older")) == 1
    # Other sources, but the very same device code.
    bad = seen(100, 1, status=status, source_hash="older", cubin_sha256="c")
    assert winner(seen(100, 1, cubin_sha256="c"), seen(120, 2), bad) == 2
    # The same sources, compiled by another compiler.
    assert winner(seen(100, 1, kernel_key="k2"), seen(120, 2), seen(100, 1, kernel_key="k1", status=status)) == 1
    assert winner(seen(100, 1, kernel_key="k1"), seen(120, 2), seen(100, 1, kernel_key="k1", status=status)) == 2


def test_a_failure_that_refutes_nothing_is_ignored() -> None:
    assert winner(seen(100, 1), seen(None, 1, status="launch_error"), seen(120, 2)) == 1


def test_final_rows_decide_where_there_are_any() -> None:
    assert winner(seen(90, 1), seen(100, 2, grade="final"), seen(101, 3, grade="final")) == 2
    # Refuted finals leave the decision to the search.
    assert winner(seen(90, 1), seen(100, 2, grade="final"), seen(100, 2, grade="final", status="wrong")) == 1


def test_the_newest_protocol_decides() -> None:
    assert winner(seen(50, 1, protocol="p-1"), seen(100, 2, protocol="p-2")) == 2
    assert winner(seen(50, 1, protocol="p-9"), seen(100, 2, protocol="p-10")) == 2
    assert sorted(["b-2", "a-2", "z", "a-10"], key=protocol_order) == ["z", "a-2", "b-2", "a-10"]


def test_an_unfinished_search_does_not_depose_a_finished_one() -> None:
    """A sweep under a new protocol or new sources that was interrupted after its first, slow candidates."""
    finished = [seen(100, 1, grade="final"), seen(110, 2, grade="final")]
    begun = seen(150, 3, protocol="p-2", source_hash="new", date="2026-12-02T00:00:00Z")
    assert winner(*finished, begun) == 1


def test_the_sources_measured_last_decide() -> None:
    old = [seen(80, 1, source_hash="old", date="2026-11-01T00:00:00Z")]
    new = [seen(100, 2, source_hash="new"), seen(90, 3, source_hash="new")]
    assert winner(*old, *new) == 3


def test_identical_device_code_keeps_its_measurement() -> None:
    old = seen(80, 1, source_hash="old", cubin_sha256="c", date="2026-11-01T00:00:00Z")
    new = [seen(81, 1, source_hash="new", cubin_sha256="c"), seen(80.5, 2, source_hash="new", cubin_sha256="d")]
    ranked = rank([old, *new])
    assert ranked[0].config == {"tile": 1}
    assert ranked[0].us == 80.5
    assert ranked[0].trial_id == new[0].id


def test_a_configuration_counts_with_the_median_of_its_rows() -> None:
    assert winner(seen(60, 1), seen(100, 1), seen(104, 1), seen(90, 2)) == 2


def test_templates_compete() -> None:
    ranked = rank([seen(100, 1, template="a"), seen(90, 1, template="b")])
    assert [each.template for each in ranked] == ["b", "a"]


rows = st.builds(
    seen,
    us=st.sampled_from([99.0, 100.0, 100.2, 100.4, 101.0, 102.5]),
    tile=st.sampled_from([8, 64, 128]),
    template=st.sampled_from(["t", "u"]),
    source_hash=st.sampled_from(["s", "r"]),
    cubin_sha256=st.sampled_from(["", "c", "d"]),
    protocol=st.sampled_from(["p-1", "p-2"]),
    grade=st.sampled_from(["search", "final"]),
    status=st.sampled_from(["ok", "ok", "ok", "ok", "wrong", "slow"]),
    date=st.sampled_from(["2026-12-01T00:00:00Z", "2026-12-02T00:00:00Z"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(rows, max_size=12), st.randoms())
def test_order_does_not_matter(evidence: list[Evidence], shuffler: random.Random) -> None:
    expected = rank(evidence)
    shuffled = list(evidence)
    shuffler.shuffle(shuffled)
    assert rank(shuffled) == expected
    ok = [row for row in evidence if row.status == "ok"]
    for found in expected:
        assert any(row.id == found.trial_id and row.config == canonical_json(found.config) for row in ok)
