"""The shipped tool questions, answered by their catalogues alone."""

import hashlib
import json
import re
import sqlite3
from collections import Counter

import pytest

from grpo_kit.flow import Lookup, calculator
from grpo_kit.paths import data_dir
from grpo_kit.tasks.tool_questions import (
    PYTHON_KINDS,
    catalogue_path,
    three_tools,
    tool_questions,
)


@pytest.fixture(scope="module")
def shipped():
    """Of each split, the rows and the facts of their catalogues."""
    with sqlite3.connect(f"{catalogue_path().as_uri()}?mode=ro", uri=True) as connection:
        facts = connection.execute("SELECT catalogue, name, text FROM facts ORDER BY rowid")
        facts = list(facts)
    splits = {}
    for split in ("train", "test"):
        lines = (data_dir() / "tool_questions" / f"{split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        own = {row["catalogue"] for row in rows}
        splits[split] = rows, [fact for fact in facts if fact[0] in own]
    return splits


def test_train_and_test_share_no_catalogue(shipped):
    """Neither a number of one nor the facts in it."""
    catalogues = {"train": {}, "test": {}}
    for split, (_, facts) in shipped.items():
        for catalogue, _, text in facts:
            catalogues[split].setdefault(catalogue, []).append(text)
        for texts in catalogues[split].values():
            is_test = hashlib.sha256("|".join(texts).encode()).digest()[0] % 10 == 0
            assert is_test == (split == "test")
    train, test = catalogues.values()
    assert len(test) == 100 and not train.keys() & test.keys()


def test_questions_hold_no_fact_and_need_one_to_four_calls(shipped):
    rows = [row for rows, _ in shipped.values() for row in rows]
    for row in rows:
        digits = re.findall(r"\d+", row["question"])
        assert row["answer"] not in digits or row["kind"].startswith("several")
        assert all(int(digit) <= 4 for digit in digits)
    calls = Counter(row["calls"] for row in rows)
    assert set(calls) == {1, 2, 3, 4} and min(calls.values()) > len(rows) / 20
    assert len({(row["question"], row["catalogue"]) for row in rows}) == len(rows)


def test_the_tools_lead_to_the_answer_by_results_alone():
    """Worked as a reader would: the second call depends on the first result."""
    lookup, task = Lookup(catalogue_path()), tool_questions()
    assert (len(task.train), len(task.test)) == (4000, 500)
    assert task.train.column_names == ["prompt", "answer", "catalogue", "kind", "calls"]
    for row in task.test:
        question, of = row["prompt"][0]["content"], {"catalogue": row["catalogue"]}
        names = re.findall(r"(?:a|the) (\w+)", question)
        item = lookup(names[0], **of)
        price, shop = re.fullmatch(rf"{names[0]} (\d+), shop (\w+)", item).groups()
        value, calls = price, 1
        if row["kind"].startswith("several"):
            count = re.search(r"\d", question)[0]
            value, calls = calculator(f"{value}*{count}").split(" = ")[1], calls + 1
        if row["kind"] == "together":
            other = re.search(r" (\d+),", lookup(names[1], **of))[1]
            value, calls = calculator(f"{value}+{other}").split(" = ")[1], calls + 2
        if row["kind"].endswith("discount"):
            discount = lookup(shop, **of).split()[-1]
            value, calls = calculator(f"{value}-{discount}").split(" = ")[1], calls + 2
        assert (value, calls) == (row["answer"], row["calls"])


def test_every_second_question_for_three_tools_needs_a_comparison_of_two_prices():
    lookup, task, two = Lookup(catalogue_path()), three_tools(), tool_questions()
    for split in ("train", "test"):
        rows, before = getattr(task, split), getattr(two, split)
        assert list(rows)[1::2] == list(before)[1::2] and rows.column_names == before.column_names
        assert rows["catalogue"] == before["catalogue"]
    answers = Counter()
    for row in list(task.test)[::2]:
        pattern = r"What does the (cheaper|dearer) of (\w+) and (\w+) cost\?"
        kind, *names = re.fullmatch(pattern, row["prompt"][0]["content"]).groups()
        texts = [lookup(name, catalogue=row["catalogue"]) for name in names]
        prices = [int(re.search(r" (\d+),", text)[1]) for text in texts]
        expected = min(prices) if kind == "cheaper" else max(prices)
        assert (row["kind"], row["answer"], row["calls"]) == (kind, str(expected), 3)
        answers[kind, prices[0] == expected] += 1
    assert len(answers) == 2 * len(PYTHON_KINDS) and min(answers.values()) > 40
