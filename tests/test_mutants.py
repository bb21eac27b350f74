"""Deliberate breaks are noticed: each of `mutants.MUTANTS` makes the test fail that it names."""

import json
import subprocess
import sys

import mutants
import pytest
from mutants import CHECKOUT, MUTANTS, RESULTS, broken

of_each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@pytest.fixture(scope="session")
def warm():
    """Asks one process, which has imported what is heavy, for a fork a question."""
    command = [sys.executable, mutants.__file__, "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:

        def ask(name: str) -> str:
            print(name, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def test_there_are_enough_mutants_and_each_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 29


@of_each_mutant
def test_a_mutant_is_still_python_and_its_test_is_still_there(mutant):
    compile(broken(mutant), mutant.file, "exec")
    assert mutant.old != mutant.new
    path, _, name = mutant.killed_by.partition("::")
    assert f"def {name.partition('[')[0]}(" in (CHECKOUT / path).read_text()


def test_the_reported_table_is_of_these_mutants_and_all_were_killed():
    named = ("name", "what", "file", "killed_by")
    rows = [{name: getattr(mutant, name) for name in named} for mutant in MUTANTS]
    reported = [
        {k: v for k, v in row.items() if k != "seconds"} for row in json.loads(RESULTS.read_text())
    ]
    assert reported == [row | {"killed": True} for row in rows], "run tests/mutants.py again"


@pytest.mark.slow
def test_what_kills_mutants_passes_on_the_unbroken_package(warm):
    """Else a failure would say something of the fork, not of the break."""
    output = warm("unbroken")
    assert not output, output


@pytest.mark.slow
@of_each_mutant
def test_a_mutant_is_killed(mutant, warm):
    why = warm(mutant.name)
    assert not why, why
