"""GSM8K: every published row is there, with its answer."""

import json
from fractions import Fraction

import pytest

from grpo_kit.rewards import accuracy_reward, format_reward, parse_number
from grpo_kit.tasks.published import gsm8k


@pytest.fixture(scope="module")
def task():
    return gsm8k()


def test_all_rows_are_there(task):
    assert (task.name, len(task.train), len(task.test)) == ("gsm8k", 7473, 1319)
    assert task.train.column_names == task.test.column_names
    assert not set(task.train["question"]) & set(task.test["question"])
    assert task.train[0]["solution"].startswith("Natalia sold 48/2 = <<48/2=24>>24")
    assert "####" not in task.train[0]["solution"]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gold_answer_is_rewarded_and_every_other_number_is_not(task, gsm8k_folder, split):
    rows = getattr(task, split)
    # Read by another route than the loader's parser: all gold answers are whole numbers.
    lines = (gsm8k_folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    gold = [int(json.loads(x)["answer"].split("\n#### ")[1].replace(",", "")) for x in lines]
    assert [parse_number(answer) for answer in rows["answer"]] == gold

    columns = rows.to_dict()
    columns["prompts"] = columns.pop("prompt")

    def score(answers):
        completions = [f"<think>so</think><answer>{text}</answer>" for text in answers]
        call = {"completions": completions, "completion_ids": [[0]] * len(rows), **columns}
        assert format_reward(**call) == [0.1] * len(rows)
        return set(accuracy_reward(**call))

    for form in ("{}", "${:,} a day", r"\boxed{{{}}}"):
        assert score([form.format(number) for number in gold]) == {1.0}, form
    for change in (1, -1, Fraction(1, 3)):
        assert score([number + change for number in gold]) == {0.0}, change
    assert score([-number if number else 1 for number in gold]) == {0.0}
