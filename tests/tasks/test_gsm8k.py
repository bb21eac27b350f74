"""GSM8K: every published row; folders and the Hub, and the error for whatever is amiss."""

import gzip
import json
from fractions import Fraction
from unittest.mock import Mock

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


def test_a_missing_file_is_named(make_folder):
    folder = make_folder(ROW)
    (folder / "test.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="no file .*/test.jsonl': put the rows there"):
        gsm8k(folder)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?", "answer": "48"}, "'48' does not end in '####' and a number"),
        ({"question": "?"}, "lacks the texts question and answer"),
        ([48], "lacks the texts question and answer"),
        ("{", "Expecting property name"),
    ],
)
def test_bad_row_is_named(make_folder, row, message):
    with pytest.raises(ValueError, match=f"row 2 of train.jsonl: .*{message}"):
        gsm8k(make_folder(ROW, row))


def test_empty_split_is_named_and_a_blank_last_line_is_no_row(make_folder):
    assert len(gsm8k(make_folder(ROW, "")).train) == 1
    with pytest.raises(ValueError, match="test.jsonl' is empty: fetch it again"):
        gsm8k(make_folder(ROW, test=()))


def test_math500_of_the_hub_is_pinned_and_out_of_reach_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "test.jsonl").write_text('{"problem": "What is half of one?", "answer": "1/2"}')
    fetch = Mock(side_effect=[str(tmp_path / "test.jsonl"), ConnectionError("unknown host")])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    (row,) = math500()
    assert row["answer"] == "1/2" and "number" not in row["prompt"][0]["content"]
    name, revision = MATH_500
    assert fetch.call_args.args[0] == name and fetch.call_args.kwargs["revision"] == revision
    with pytest.raises(RuntimeError, match="did not give .*ConnectionError.*: pass a local folder"):
        math500()


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: packed[:9] * 9])
def test_a_file_that_was_not_fetched_whole_is_named(tmp_path, damage):
    packed = gzip.compress(json.dumps(ROW).encode() * 50)
    (tmp_path / "train.jsonl.gz").write_bytes(damage(packed))
    with pytest.raises(ValueError, match="train.jsonl.gz' is damaged .*: fetch it again"):
        gsm8k(tmp_path)
