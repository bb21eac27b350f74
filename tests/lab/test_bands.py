"""What notebooks measured beside the reported seeds: inside, outside, missing, and stored anew."""

import json

import pytest

from grpo_kit.lab.bands import compare, numbers, read_result, show, store
from grpo_kit.lab.records import NOTEBOOKS, load

NAME = "02_diversity_reward"
VALUES = [0.9, 0.91, 0.89, 0.92, 0.88]
RESULT = {
    "profile": "tiny", "seed": 0, "steps": 40,
    "after": {"eval/pass@1": 0.9, "eval/greedy": 1.0, "eval/n": 128, "step_time": 3.0},
    "arms": {"plain": {"pass@1": 0.8, "length": 26.0}, "other": {"note": "none", "pass@1": None}},
}  # fmt: skip


def write(folder, accuracy, seed=0):
    (folder / NAME).mkdir(parents=True)
    result = {**RESULT, "seed": seed, "after": {**RESULT["after"], "eval/pass@1": accuracy}}
    (folder / NAME / "result.json").write_text(json.dumps(result))
    return folder


@pytest.fixture
def reported(tmp_path):
    """Five seeds of one notebook: 0.88 to 0.92."""
    for seed, accuracy in enumerate(VALUES):
        folder = write(tmp_path / f"seed-{seed}", accuracy, seed)
        assert len(store(folder, {NAME: 100.0, "09_silent": 1.0}, tmp_path / "results")) == 1
    return tmp_path / "results"


def test_the_compared_numbers_are_stored_as_records_like_all_others(reported):
    records, problems = load(reported, "tiny", NOTEBOOKS)
    assert problems == [] and [record.seed for record in records] == [0, 1, 2, 3, 4]
    assert records[0].arm == NAME and records[0].seconds == 100.0
    assert records[0].config == {"profile": "tiny", "seed": 0, "steps": 40}
    assert records[0].evaluation == numbers(RESULT)
    assert numbers(RESULT) == {
        "after · eval/pass@1": 0.9, "after · eval/greedy": 1.0,
        "arms · plain · pass@1": 0.8, "arms · plain · length": 26.0,
    }  # fmt: skip


@pytest.mark.parametrize(("accuracy", "inside"), [(0.9, True), (0.86, True), (0.4, False)])
def test_a_run_is_inside_where_another_seed_could_be(accuracy, inside, reported, tmp_path, capsys):
    rows, problems = compare(write(tmp_path / "run", accuracy), [NAME], "tiny", reported)
    assert problems == [] and len(rows) == 4
    row = rows[0]
    assert row.quantity == "after · eval/pass@1" and row.here == accuracy
    assert row.inside == inside and (row.low, row.high) == pytest.approx((0.66, 1.14))
    assert all(other.inside for other in rows[1:])
    assert rows[3].low == pytest.approx(0.76 * 26), "of a length relative to itself"
    show(rows, problems)
    shown = capsys.readouterr().out
    assert f"{4 if inside else 3} of 4 numbers are inside" in shown
    assert ("outside: 02_diversity_reward, after · eval/pass@1 is 0.4" in shown) != inside


def test_a_missing_number_is_outside_an_unreported_notebook_is_named(reported, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    rows, problems = compare(tmp_path / "run", [NAME, "09_new"], "tiny", reported)
    assert len(rows) == 4 and not any(row.inside for row in rows)
    assert len(problems) == 1 and "notebook 09_new is not reported on profile 'tiny'" in problems[0]
    assert str(rows[0]).startswith("after · eval/pass@1 is missing, its band is 0.66 to 1.14")
    assert compare(tmp_path / "run", [NAME], "smoke", reported) == ([], [])
    show([], [])
    assert "nothing is reported of this profile" in capsys.readouterr().out
    path = next(reported.rglob("seed-2.json"))
    path.write_text(path.read_text().replace("0.89", "0.99"))
    rows, problems = compare(tmp_path / "run", [NAME], "tiny", reported)
    assert len(rows) == 4 and len(problems) == 1 and "was edited" in problems[0]


def test_a_result_that_is_no_json_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    for content in ("{", "[1, 2]", "3", '{"seed": 0}'):
        (tmp_path / "a" / "result.json").write_text(content)
        with pytest.raises(ValueError, match="execute the notebook again"):
            read_result(tmp_path, "a")
    assert read_result(tmp_path, "b") == {}
