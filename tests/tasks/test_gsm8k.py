"""GSM8K: every published row; folders and the Hub, and the error for whatever is amiss."""

import gzip
import json
from fractions import Fraction
from unittest.mock import Mock

import datasets
import huggingface_hub
import pytest

from grpo_kit.rewards import accuracy_reward, format_reward, parse_number
from grpo_kit.tasks.published import MATH_500, gsm8k, math500

ROW = {"question": "What is 40 + 8?", "answer": "40+8=<<40+8=48>>48\n#### 48"}


@pytest.fixture(scope="module")
def task():
    return gsm8k()


@pytest.fixture
def make_folder(tmp_path):
    """Write a folder with the given train rows (dicts, or raw lines) and one good test row."""

    def make(*train, test=(ROW,)):
        for name, rows in (("train", train), ("test", test)):
            lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
            (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path

    return make


def test_all_rows_are_there(task):
    assert (task.name, len(task.train), len(task.test)) == ("gsm8k", 7473, 1319)
    assert task.train.column_names == task.test.column_names
    assert not set(task.train["question"]) & set(task.test["question"])


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

    for form in ("{}", "{:,}", "{}.00", "${:,} a day", r"\boxed{{{}}}"):
        assert score([form.format(number) for number in gold]) == {1.0}, form
    for change in (1, -1, Fraction(1, 3)):
        assert score([number + change for number in gold]) == {0.0}, change
    assert score([-number if number else 1 for number in gold]) == {0.0}


def test_row_holds_prompt_answer_question_and_solution(task):
    row = task.train[0]
    system, user = row["prompt"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "<think>" in system["content"] and "<answer>" in system["content"]
    assert user["content"] == row["question"] and row["answer"] == "72"
    assert row["question"].startswith("Natalia sold clips to 48 of her friends")
    assert row["solution"].startswith("Natalia sold 48/2 = <<48/2=24>>24")
    assert "####" not in row["solution"]


@pytest.mark.parametrize("name", ["{}", "openai/gsm8k", "~/nowhere"])
def test_a_missing_file_or_folder_is_named_and_the_hub_is_not_asked(make_folder, name):
    folder = make_folder(ROW)
    (folder / "test.jsonl").unlink()
    file = "/test" if name == "{}" else f"{name[-5:]}/train"
    with pytest.raises(FileNotFoundError, match=f"no file .*{file}.jsonl': put the rows of gsm8k"):
        gsm8k(name.format(folder))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "48"}, "'48' does not end in '####' and a number"),
        ({"question": "?", "answer": "#### many"}, "'#### many' does not end in"),
        ({"question": "?"}, "lacks the texts question and answer"),
        ({"question": "?", "answer": 48}, "lacks the texts question and answer"),
        ([48], "lacks the texts question and answer"),
        ("{", "Expecting property name"),
    ],
)
def test_bad_row_is_named(make_folder, row, message):
    with pytest.raises(ValueError, match=f"row 2 of train: .*{message}"):
        gsm8k(make_folder(ROW, row))


def test_empty_split_is_named_and_a_blank_last_line_is_no_row(make_folder):
    assert len(gsm8k(make_folder(ROW, "")).train) == 1
    with pytest.raises(ValueError, match="the test split of gsm8k is empty"):
        gsm8k(make_folder(ROW, test=()))


def test_the_hub_is_asked_for_the_pinned_revision_and_told_at_once_to_be_unreachable(monkeypatch):
    name, revision = MATH_500
    rows = datasets.Dataset.from_list([{"problem": "What is 40 + 8?", "answer": "48"}])
    info = Mock(side_effect=[None, ConnectionError("[Errno -2] Name or service not known")])
    load = Mock(return_value=rows)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert math500()[0]["answer"] == "48"
    load.assert_called_once_with(name, split="test", revision=revision)
    assert info.call_args.args == (name,) and info.call_args.kwargs["revision"] == revision
    with pytest.raises(RuntimeError, match="ConnectionError.*local folder.*HF_HUB_OFFLINE=1"):
        math500()
    assert load.call_count == 1, "it would retry for 30 s"


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: packed[:9] * 9])
def test_a_file_that_was_not_fetched_whole_is_named(tmp_path, damage):
    packed = gzip.compress(json.dumps(ROW).encode() * 50)
    (tmp_path / "train.jsonl.gz").write_bytes(damage(packed))
    with pytest.raises(ValueError, match="train.jsonl.gz' is damaged .*: fetch it again"):
        gsm8k(tmp_path)
