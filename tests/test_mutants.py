"""Deliberate breaks are noticed: each of `mutants.MUTANTS` makes the test fail that it names."""

import json

import pytest
from mutants import CHECKOUT, MUTANTS, RESULTS, broken, outcome, survived

of_each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@of_each_mutant
def test_a_mutant_is_still_python_and_its_test_is_still_there(mutant):
    compile(broken(mutant), mutant.file, "exec")
    assert mutant.old != mutant.new
    path, _, name = mutant.killed_by.partition("::")
    assert f"def {name.partition('[')[0]}(" in (CHECKOUT / path).read_text()


def test_the_reported_table_is_of_these_mutants_and_all_were_killed():
    named = ("name", "what", "file", "killed_by")
    rows = [{name: getattr(mutant, name) for name in named} for mutant in MUTANTS]
    reported = json.loads(RESULTS.read_text())
    for row in reported:
        assert row.pop("killed") and row.pop("seconds")
    assert reported == rows, "run tests/mutants.py again"
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 29


@pytest.mark.slow
def test_what_kills_mutants_passes_on_the_unbroken_package():
    """Else a failure would say something of the fork, not of the break."""
    nodes = sorted({mutant.killed_by for mutant in MUTANTS})
    status, output = outcome(nodes)
    assert status == 0 and all(f"PASSED {node}\n" in output for node in nodes), output


@pytest.mark.slow
@of_each_mutant
def test_a_mutant_is_killed(mutant):
    why = survived(mutant)
    assert not why, why
