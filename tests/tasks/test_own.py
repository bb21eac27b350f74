"""A reader's own data: read exactly, split for good, and refused in a sentence."""

import csv
import json
from unittest.mock import Mock

import datasets
import pandas as pd
import pytest
from toy import configure, even_ids

from grpo_kit import training, trl_bridge
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.tasks import Task, own
from grpo_kit.tasks.own import read_task
from grpo_kit.tasks.published import gsm8k

ROWS = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]


def questions(rows):
    return [prompt[-1]["content"] for prompt in rows["prompt"]]


@pytest.fixture
def hard_csv(tmp_path):
    """200 questions with all that a spreadsheet may put into them, and a mark at the start."""
    texts = [f'Öl, "{i}" Fässer,\r\n\nund {i * 7} für Zoë; = wie viele? NA' for i in range(200)]
    with open(tmp_path / "mine.csv", "w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file)
        table.writerow([" question", "level", " answer"])
        table.writerows([text, "NA", "" if i == 7 else f"{i:,}"] for i, text in enumerate(texts))
    return tmp_path / "mine.csv", texts


@pytest.mark.parametrize("engine", [training, trl_bridge])
def test_a_csv_is_read_exactly_and_trains_in_both_engines(
    engine, hard_csv, policy, tmp_path, capsys
):
    file, texts = hard_csv
    own._print_once.cache_clear()
    task = read_task(file, system="Be brief.")
    rows = list(task.train) + list(task.test)
    asked = {row["prompt"][1]["content"]: row for row in rows}
    assert len(rows) == 200 and asked.keys() == {*texts} and 20 < len(task.test) < 60
    for i, text in enumerate(texts):
        assert asked[text]["answer"] == (None if i == 7 else f"{i:,}")
        assert asked[text]["prompt"][0] == {"role": "system", "content": "Be brief."}
        assert asked[text]["level"] == "NA" and asked[text]["question"] == text
    read_task(file, system="Be brief.")
    said = f"{len(task.train)} rows to learn from, {len(task.test)} held out by a hash"
    assert capsys.readouterr().out == f"mine.csv: {said} of the question.\n", "said once"
    given = {"output_dir": tmp_path / "run", "seed": 0}
    config = configure(max_steps=1, per_device_train_batch_size=8)
    run = engine.train(policy, task, [accuracy_reward, even_ids], config, **given)
    assert run.history[-1]["step"] == 1 and run.history[-1]["eval/n"] == 2


def lines(rows):
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def by_datasets(folder):
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)


WRITERS = {
    "own.jsonl": lambda path: path.write_text(lines(ROWS)),
    "lines.json": lambda path: path.write_text(lines(ROWS)),
    "list.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "own.csv": lambda path: pd.DataFrame(ROWS).to_csv(path),  # with its index
    "own.parquet": lambda path: pd.DataFrame(ROWS).to_parquet(path),
    "saved": by_datasets,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_source_gives_the_same_split(name, tmp_path):
    WRITERS[name](tmp_path / name)
    task = read_task(tmp_path / name)
    order = sorted(ROWS, key=lambda row: row["question"] in questions(task.test))
    rows = [*task.train, *task.test]
    assert [(row["question"], row["answer"]) for row in rows] == [(*row.values(),) for row in order]
    assert task.name == name and task.test[0]["prompt"][0]["role"] == "user"


def test_cells_of_a_table_stay_what_they_are(tmp_path):
    own = ["007", "1.50", "1,000", "NA", "10000000000000000000000001", ""]
    pd.DataFrame({"question": list("abcdef"), "answer": own}).to_csv(tmp_path / "own.csv")
    task = read_task(tmp_path / "own.csv", tmp_path / "own.csv")
    assert list(task.test["answer"]) == [*own[:-1], None]


def test_a_row_that_is_added_moves_no_other_and_equal_questions_stay_together(tmp_path):
    (tmp_path / "few.jsonl").write_text(lines(ROWS[:30]))
    spaced = [row | {"question": f"  {row['question']}\n"} for row in ROWS]
    (tmp_path / "more.jsonl").write_text(lines(ROWS[::-1] + spaced))
    few, more = (read_task(tmp_path / f"{name}.jsonl") for name in ("few", "more"))
    assert {*questions(few.test)} <= {*questions(more.test)}
    assert {*questions(few.train)} <= {*questions(more.train)}
    assert not {q.strip() for q in questions(more.train)} & {
        q.strip() for q in questions(more.test)
    }
    assert len(more.test) == 2 * len({q.strip() for q in questions(more.test)})


def test_a_folder_with_both_splits_and_a_file_for_the_test(tmp_path, gsm8k_folder, capsys):
    shipped, own = gsm8k(), read_task(gsm8k_folder)
    assert own.train["question"] == shipped.train["question"]
    assert own.test["question"] == shipped.test["question"]
    assert [a.replace(",", "") for a in own.test["answer"]] == shipped.test["answer"]
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    (tmp_path / "b.jsonl").write_text(lines(ROWS[:3]))
    task = read_task(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (len(task.train), len(task.test)) == (37, 3)
    assert "37 rows to learn from, 3 held out." in capsys.readouterr().out
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:3])
    )
    both.save_to_disk(tmp_path / "both")
    assert len(read_task(tmp_path / "both").test) == 3
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose" / "part-0.jsonl").write_text(lines(ROWS))
    loose = read_task(tmp_path / "loose")
    assert len(loose.train) + len(loose.test) == 40, "as datasets reads it"


def test_messages_numbers_and_other_columns(tmp_path):
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"}]
    rows = [
        {"prompt": chat, "answer": 4, "tests": ["a", "b"]},
        {"prompt": "3 + 3?", "answer": 6.5}, {"prompt": "4?", "answer": float("nan"), "level": 1},
        {"prompt": "5?", "answer": "first 1 then\n#### 5 "}, {"prompt": "6?", "answer": " "},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text(lines(rows))
    read = read_task(tmp_path / "a.jsonl", tmp_path / "a.jsonl", system="Be brief.").test
    assert read["answer"] == ["4", "6.5", None, "5", None]
    assert read[0]["prompt"] == chat and read[1]["prompt"][0]["content"] == "Be brief."
    assert read["tests"][0] == ["a", "b"] and read["level"][2] == 1


def test_the_hub_is_asked_for_a_name_and_a_revision(monkeypatch):
    rows = datasets.DatasetDict(
        test=datasets.Dataset.from_list([{"problem": "1/2?", "answer": "2"}])
    )
    load = Mock(side_effect=[rows, ConnectionError("unknown host\nlong")])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert questions(read_task("owner/MATH-500@abc").test) == ["1/2?"]
    load.assert_called_once_with("owner/MATH-500", revision="abc")
    with pytest.raises(ValueError, match="owner/none cannot be read .unknown host.*Hub"):
        read_task("owner/none")


@pytest.mark.parametrize("rows", [ROWS, None, pd.DataFrame(ROWS), datasets.DatasetDict()])
def test_rows_that_are_no_dataset_are_refused_in_a_sentence(rows):
    good = datasets.Dataset.from_list(ROWS)
    for split, given in (("train", (rows, good)), ("test", (good, rows))):
        message = f"the {split} rows of task 'own' are a {type(rows).__name__}: give a Dataset"
        with pytest.raises(TypeError, match=message):
            Task("own", *given)


GOOD = lines(ROWS)
FILES = {
    "good.jsonl": GOOD, "sums.xlsx": GOOD, "empty.csv": "",
    "other.csv": "frage,answer\n1 + 1?,2\n", "none.jsonl": "",
    "long.csv": "question,answer\n1?,2\n1, 2?,3\n", "longer.csv": "question,answer\n1, 2?,3\n",
    "open.csv": 'question,answer\n"1?,2\n', "gap.csv": "question,answer\n1?,2\n,3\n",
    "half.jsonl": GOOD[:60],
    "number.jsonl": '{"question": 5}\n', "role.jsonl": '{"prompt": [{"role": "user"}]}\n',
    "answers.jsonl": '{"question": "1?", "answer": [1, 2]}\n', "one.jsonl": lines(ROWS[:1]),
    "fake.parquet": GOOD, "half.json": f"[{GOOD}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("no.csv",), "no.csv cannot be read .*No such file"),
        (("sums.xlsx",), "sums.xlsx is of an unknown kind: give .jsonl"),
        (("empty.csv",), "empty.csv cannot be read .No columns to parse from file"),
        (("none.jsonl",), "none.jsonl cannot be read .it has no rows"),
        (("other.csv",), "other.csv.* has the columns frage, answer: give rows with a column `que"),
        (("long.csv",), "long.csv cannot be read .*Expected 2 fields in line 3, saw 3"),
        (("longer.csv",), "longer.csv cannot be read .*rows have more cells than the header"),
        (("open.csv",), "open.csv cannot be read .*EOF inside string"),
        (("gap.csv",), "row 2 of gap.csv, train has as `question` '': give text"),
        (("latin.csv",), "latin.csv .*can't decode byte 0xfc"),
        (("half.jsonl",), "half.jsonl cannot be read .*JSON parse error: Missing a closing quot"),
        (("number.jsonl",), "row 1 of number.jsonl, .* has as `question` 5: give text, or mess"),
        (("role.jsonl",), "row 1 of role.jsonl, train has as `prompt` .*role and content"),
        (("answers.jsonl",), r"row 1 of answers.jsonl, .* has as `answer` \[1, 2\]: give text, a"),
        (("fake.parquet",), "fake.parquet cannot be read .*not a parquet file"),
        (("half.json",), "half.json cannot be read .*Unexpected character"),
        (("one.jsonl", None, 0.1), "0 held out by a hash of the question: give more rows"),
        (("good.jsonl", "other.csv"), "other.csv.* has the columns frage, answer"),
        (("good.jsonl", None, 1e-9), "0 held out by a hash.*another test_share"),
        ((".",), "cannot be read .*give a file in UTF-8, a folder, or a name on the Hub"),
    ],
)
def test_what_cannot_be_used_ends_in_a_sentence(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "latin.csv").write_bytes("question\nfür\n".encode("latin-1"))
    with pytest.raises(ValueError, match=words) as raised:
        read_task(*given)
    assert "\n" not in str(raised.value)


def test_a_profile_asks_own_rows_by_the_system_prompt_of_its_task(policy, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    own = (
        PROFILES["smol"]
        .with_data(str(tmp_path / "a.jsonl"), test_share=0.5)
        .with_config(max_steps=3)
    )
    assert own.config.max_steps == 3 and 10 < len(own.load_task().test) < 30
    assert "<think>steps</think>" in own.load_task().train[0]["prompt"][0]["content"]
    words = PROFILES["tiny"].with_data(str(tmp_path / "a.jsonl"), str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match="the train rows of task 'a.jsonl' are empty"):
        training.PromptBatches(policy, words.load_task(), [even_ids], configure(), seed=0)
