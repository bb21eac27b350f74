"""Deliberate breaks are noticed: each of `mutants.MUTANTS` makes the test fail that it names."""

import json

import pytest
from mutants import CHECKOUT, MUTANTS, RESULTS, broken, copy_of_the_kit, run_tests, survived

of_each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def test_there_are_enough_mutants_and_each_has_a_name_of_its_own():
    assert len(MUTANTS) >= 10
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@of_each_mutant
def test_a_mutant_is_still_python_and_its_test_is_still_there(mutant):
    compile(broken(mutant), mutant.file, "exec")
    assert mutant.old != mutant.new
    path, _, name = mutant.killed_by.partition("::")
    assert f"def {name.partition('[')[0]}(" in (CHECKOUT / path).read_text()


def test_the_reported_table_is_of_these_mutants_and_all_were_killed():
    rows = json.loads(RESULTS.read_text())
    again = "run `python tests/mutants.py` again"
    assert [(row["name"], row["what"], row["file"], row["killed_by"]) for row in rows] == [
        (mutant.name, mutant.what, mutant.file, mutant.killed_by) for mutant in MUTANTS
    ], again
    assert all(row["killed"] for row in rows), again


@pytest.mark.slow
def test_what_kills_mutants_passes_in_an_unbroken_copy(tmp_path):
    """Else a failure would say something of the copy, not of the break."""
    nodes = {mutant.killed_by for mutant in MUTANTS}
    done = run_tests(copy_of_the_kit(tmp_path / "copy"), *sorted(nodes))
    passed = {line.removeprefix("PASSED ") for line in done.stdout.splitlines()} & nodes
    assert done.returncode == 0 and passed == nodes, done.stdout + done.stderr


@pytest.mark.slow
@of_each_mutant
def test_a_mutant_is_killed(mutant, tmp_path):
    why = survived(mutant, tmp_path / "copy")
    assert not why, why
