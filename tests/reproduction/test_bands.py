"""What notebooks measured beside the reported seeds: inside, outside, missing, and stored anew."""

import json

import pytest

from grpo_kit.reproduction.bands import EXPERIMENT, compare, numbers, read_result, show, store
from grpo_kit.reproduction.records import load

RESULT = {
    "profile": "tiny", "seed": 0, "steps": 40,
    "after": {"eval/pass@1": 0.9, "eval/n": 128, "step_time": 3.0, "loss": 0.2},
    "arms": {"plain": {"pass@1": 0.8, "length": 26.0}, "other": {"note": "none", "pass@1": None}},
}  # fmt: skip


def write(folder, notebook, accuracy, seed=0):
    own = folder / notebook
    own.mkdir(parents=True)
    result = {**RESULT, "seed": seed, "after": {**RESULT["after"], "eval/pass@1": accuracy}}
    (own / "result.json").write_text(json.dumps(result))


@pytest.fixture
def reported(tmp_path):
    """Five seeds of one notebook: 0.88 to 0.92."""
    results = tmp_path / "results"
    for seed, accuracy in enumerate([0.9, 0.91, 0.89, 0.92, 0.88]):
        folder = tmp_path / f"seed-{seed}"
        write(folder, "02_diversity_reward", accuracy, seed)
        assert len(store(folder, {"02_diversity_reward": 100.0, "09_silent": 1.0}, results)) == 1
    return results


def test_only_quantities_that_tell_something_are_compared():
    assert numbers(RESULT) == {
        "after · eval/pass@1": 0.9,
        "arms · plain · pass@1": 0.8,
        "arms · plain · length": 26.0,
    }


def test_stored_numbers_are_records_like_all_others(reported):
    records, problems = load(reported, "tiny", EXPERIMENT)
    assert problems == [] and [record.seed for record in records] == [0, 1, 2, 3, 4]
    assert records[0].arm == "02_diversity_reward" and records[0].seconds == 100.0
    assert records[0].config == {"profile": "tiny", "seed": 0, "steps": 40}
    assert records[0].evaluation["after · eval/pass@1"] == 0.9


@pytest.mark.parametrize(("accuracy", "inside"), [(0.9, True), (0.86, True), (0.4, False)])
def test_a_run_is_inside_where_another_seed_could_be(accuracy, inside, reported, tmp_path, capsys):
    write(tmp_path / "run", "02_diversity_reward", accuracy)
    rows, problems = compare(tmp_path / "run", ["02_diversity_reward"], "tiny", reported)
    assert problems == [] and len(rows) == 3
    row = rows[0]
    assert row.quantity == "after · eval/pass@1" and row.here == accuracy and row.reported == 0.9
    assert row.inside == inside and 0.6 < row.low < 0.88 and 0.92 < row.high < 1.2
    assert all(other.inside for other in rows[1:])
    show(rows, problems)
    said = capsys.readouterr().out
    assert f"{3 if inside else 2} of 3 numbers are inside" in said and ("NO" in said) != inside


def test_another_seed_is_beside_its_own_and_an_unknown_one_beside_the_median(reported, tmp_path):
    write(tmp_path / "run", "02_diversity_reward", 0.9, seed=3)
    write(tmp_path / "other", "02_diversity_reward", 0.9, seed=77)
    for folder, told in (("run", 0.92), ("other", 0.9)):
        rows, _ = compare(tmp_path / folder, ["02_diversity_reward"], "tiny", reported)
        assert rows[0].reported == told


def test_what_is_missing_is_outside_and_what_was_never_reported_is_said(reported, tmp_path):
    (tmp_path / "run").mkdir()
    rows, problems = compare(tmp_path / "run", ["02_diversity_reward", "09_new"], "tiny", reported)
    assert len(rows) == 3 and not any(row.inside for row in rows)
    assert problems == [
        "nothing is reported of notebook 09_new on profile 'tiny': its numbers are not compared."
    ]
    rows, problems = compare(tmp_path / "run", ["02_diversity_reward"], "smoke", reported)
    assert rows == [] and len(problems) == 1


def test_a_result_that_is_no_json_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text("{")
    with pytest.raises(ValueError, match="execute the notebook again"):
        read_result(tmp_path, "a")
    assert read_result(tmp_path, "b") is None
