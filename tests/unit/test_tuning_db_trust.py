"""What makes a measurement stale, and what makes it current again."""

from __future__ import annotations

import pytest
from tuning_samples import H200, trial

from tpf_jit.tuning_db import TuningStore, trust
from tpf_jit.tuning_db.reader import evidence
from tpf_jit.tuning_db.trust import Present, changes, outdated
from tpf_jit.tuning_db.winner import rank

OLD, NEW = "1" * 64, "2" * 64
DSL = {"dsl": "4.8.1", "tvm_ffi": "0.1.13", "runtime": "cu13", "host": "x86-64-v2"}


def measured(**fields):
    row = trial(source_hash=OLD, cubin_sha256="c" * 64, toolchain={**DSL, "torch": "2.11"}, **fields)
    return rank([evidence(row.id, row)])[0]


def said(*rows):
    return trust.statements(evidence(row.id, row) for row in rows)


@pytest.mark.parametrize(
    ("toolchain", "found"),
    [
        (DSL, []),
        ({**DSL, "dsl": "4.9.0"}, ["dsl 4.8.1 (now 4.9.0)"]),
        # What does not reach the device code changes nothing: another driver's runtime, another PyTorch.
        ({**DSL, "tvm_ffi": "9", "runtime": "cu12", "host": "x", "torch": "9", "python": "9"}, []),
        # A switch that changes what is generated, set only now.
        ({**DSL, "CUTE_DSL_COMPILER_OPT": "0"}, ["CUTE_DSL_COMPILER_OPT unset (now 0)"]),
        # No compiler here, or one that the row does not name: nothing is known to differ.
        ({}, []),
        ({"triton": "3"}, []),
    ],
)
def test_what_of_a_toolchain_counts(toolchain, found):
    assert changes(OLD, {**DSL, "torch": "2.11"}, Present(OLD, toolchain)) == found


def test_sources():
    assert changes(OLD, {}, Present(NEW)) == ["other sources of the template"]
    assert changes(OLD, {}, Present(None)) == [], "sources that cannot be read count as unchanged"


def test_a_statement_makes_a_winner_current_for_what_it_speaks_of():
    now = Present(NEW, {**DSL, "dsl": "4.9.0"})
    row = trust.statement(measured(), "k" * 64, now)
    assert (row.status, row.median_us, row.cubin_sha256, row.source_hash) == ("same_code", None, "c" * 64, NEW)
    assert outdated(measured(), now, {}) == ["other sources of the template", "dsl 4.8.1 (now 4.9.0)"]
    assert outdated(measured(), now, said(row)) == []
    assert outdated(measured(), Present("3" * 64, now.toolchain), said(row))
    assert outdated(measured(), Present(NEW, {**DSL, "dsl": "5.0"}), said(row))
    assert outdated(measured(config={"tile_n": 1, "stages": 2, "crop": 0}), now, said(row)), "it speaks of one configuration"


@pytest.mark.parametrize("field", ["cell", "template", "cubin_sha256"])
def test_a_statement_about_something_else_does_not_count(field):
    now = Present(NEW, DSL)
    row = trust.statement(measured(), "k" * 64, now)
    other = {"cell": row.cell.replace("N384", "N385"), "template": "another", "cubin_sha256": "d" * 64}[field]
    altered = type(row).from_dict({**row.to_dict(), field: other})
    assert outdated(measured(), now, said(row)) == [] and outdated(measured(), now, said(altered))


def test_device_code_that_is_not_known_is_never_the_same():
    row = trial(source_hash=OLD)
    winner = rank([evidence(row.id, row)])[0]
    assert outdated(winner, Present(NEW), said(trust.statement(winner, "k", Present(NEW))))


def test_statements_decide_no_winner_and_pass_the_audit(tmp_path):
    with TuningStore(tmp_path / "tuning.db") as store:
        store.put_trial(trial(us=100.0, source_hash=OLD, cubin_sha256="c" * 64))
        before = store.best(trial().cell, H200.model)
        store.put_trial(trust.statement(before, "k" * 64, Present(NEW, DSL)))
        assert store.best(trial().cell, H200.model) == before and store.verify() == []
        assert store.devices() == [H200.model]


def test_the_winner_names_what_compiled_it(tmp_path):
    with TuningStore(tmp_path / "tuning.db") as store:
        row = trial()
        store.put_trial(row)
        assert store.best(row.cell, H200.model).toolchain == row.toolchain
