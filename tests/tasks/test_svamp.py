"""SVAMP as it is shipped: whole, split by bodies, its equations worked out."""

import gzip
import hashlib
import json

from grpo_kit.paths import data_dir
from grpo_kit.tasks.answers import is_correct
from grpo_kit.tasks.svamp import masked_body, split_by_body, svamp

PUBLISHED = "5be77703a6d891ae476d7c082787ad361392aa02453b132516cdd5f4e7934e3e"


def test_the_shipped_file_is_the_published_one_and_no_body_is_on_both_sides():
    published = gzip.decompress((data_dir() / "svamp" / "SVAMP.json.gz").read_bytes())
    assert hashlib.sha256(published).hexdigest() == PUBLISHED
    problems = json.loads(published)
    splits = split_by_body(problems)
    train, test = ({masked_body(p) for p in splits[name]} for name in ("train", "test"))
    assert not train & test and len(train | test) > 500
    ids = {name: {problem["ID"] for problem in own} for name, own in splits.items()}
    assert ids["train"] | ids["test"] == {problem["ID"] for problem in problems}
    assert sum(map(len, splits.values())) == len(problems), "each once"
    again = split_by_body(problems[::-1])  # the order of the file decides nothing
    assert {problem["ID"] for problem in again["test"]} == ids["test"]


def test_rows_have_what_rewards_and_the_warm_up_read():
    task = svamp()
    assert (len(task.train), len(task.test)) == (700, 300)
    rows = [*task.train, *task.test]
    for row in rows:
        assert row["prompt"][-1]["content"] == row["question"] and row["answer"].isdecimal()
    wrong = [r["id"] for r in rows if not is_correct(r["solution"].split()[-1], r["answer"])]
    assert wrong == ["chal-680"]  # as it was published
    kinds = {"Addition", "Subtraction", "Multiplication", "Common-Division"}
    assert {r["kind"] for r in rows} == kinds
