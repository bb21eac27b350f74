"""The shipped tool questions, answered by their catalogues alone."""

import hashlib
import re
import sqlite3

from grpo_kit.flow import Lookup, calculator
from grpo_kit.tasks.tool_questions import catalogue_path, tool_questions


def test_train_and_test_share_no_catalogue():
    """Neither a number of one nor the facts in it."""
    facts = {}
    with sqlite3.connect(f"{catalogue_path().as_uri()}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT catalogue, text FROM facts ORDER BY rowid")
        for catalogue, text in rows:
            facts.setdefault(catalogue, []).append(text)
    task = tool_questions()
    train, test = set(task.train["catalogue"]), set(task.test["catalogue"])
    assert len(test) == 100 and not train & test
    for catalogue in train | test:
        digest = hashlib.sha256("|".join(facts[catalogue]).encode()).digest()
        assert (digest[0] % 10 == 0) == (catalogue in test)


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
