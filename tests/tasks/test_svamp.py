"""SVAMP as it is shipped: the published problems, split by bodies, their equations worked out."""

import gzip
import hashlib
import json
import re

import pytest

from grpo_kit.flow import calculator
from grpo_kit.paths import data_dir
from grpo_kit.tasks.answers import is_correct
from grpo_kit.tasks.published import svamp

PUBLISHED = "5be77703a6d891ae476d7c082787ad361392aa02453b132516cdd5f4e7934e3e"


@pytest.fixture(scope="module")
def task():
    return svamp()


def test_rows_are_the_published_ones_and_no_body_is_on_both_sides(task):
    published = gzip.decompress((data_dir() / "svamp" / "SVAMP.json.gz").read_bytes())
    assert hashlib.sha256(published).hexdigest() == PUBLISHED
    problems = {problem["ID"]: problem for problem in json.loads(published)}
    assert (len(task.train), len(task.test)) == (700, 300)
    assert {*task.train["id"], *task.test["id"]} == problems.keys() and len(problems) == 1000
    bodies = {}
    for split, rows in (("train", task.train), ("test", task.test)):
        for row in rows:
            problem = problems[row["id"]]
            body, asked = problem["Body"].strip(), problem["Question"].strip()
            assert row["question"] in {f"{body}{stop} {asked}" for stop in ("", ".")}
            assert float(row["answer"]) == float(problem["Answer"])
            masked = re.sub(r"[0-9][0-9.,]*", "#", body).lower().strip(" .")
            assert bodies.setdefault(" ".join(masked.split()), split) == split
    assert len(bodies) > 500


def test_rows_have_what_rewards_and_the_warm_up_read(task):
    rows = [*task.train, *task.test]
    for row in rows:
        assert row["prompt"][-1]["content"] == row["question"] and row["answer"].isdecimal()
        for step in row["solution"].split(", "):
            sides = [calculator(side).split(" = ")[-1] for side in step.split(" = ")]
            assert float(sides[0]) == pytest.approx(float(sides[-1]), rel=1e-5)
    wrong = [r["id"] for r in rows if not is_correct(r["solution"].split()[-1], r["answer"])]
    assert wrong == ["chal-680"]  # as it was published
    kinds = {"Addition", "Subtraction", "Multiplication", "Common-Division"}
    assert {r["kind"] for r in rows} == kinds
