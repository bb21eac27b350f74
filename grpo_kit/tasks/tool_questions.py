"""Tool questions of the tiny world: the facts are in a catalogue, not in the question.

"What do 3 of the lamp cost after the discount of the shop?" takes one to four calls: `lookup` reads
a price and shop, or a discount, and `calculator` combines them; the next call depends on earlier
results. Which of two prices is lower only Python says, a third tool. Train and test never share a
catalogue: a hash of its facts decides the split.
"""

import random
import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task, shipped, split_of
from grpo_kit.tasks.word_problems import apply

ITEMS = "lamp chair table clock mirror carpet basket kettle bottle ladder bucket drum".split()
SHOPS = "Nord Alba Cora Duna".split()
QUESTIONS = {
    "price": "What does a {item} cost?",
    "several": "What do {count} of the {item} cost?",
    "together": "What do a {item} and a {other} cost together?",
    "discount": "What does a {item} cost after the discount of its shop?",
    "several_discount": "What do {count} of the {item} cost after the discount of the shop?",
}
KINDS = tuple(QUESTIONS)
WEIGHTS = (10, 25, 25, 20, 20)  # of the kinds
TOOLS = ("lookup", "calculator")
THREE_TOOLS = (*TOOLS, "python")
PYTHON_KINDS = {"cheaper": "min", "dearer": "max"}  # and the function that answers them
QUESTIONS |= {k: f"What does the {k} of {{item}} and {{other}} cost?" for k in PYTHON_KINDS}

Step = tuple[str, str]  # tool, argument
Memory = list[tuple[str, str, str]]  # tool, argument, result


def last_number(text: str) -> str:
    """The last number in a text, `"7-5 = 2"` -> `"2"`."""
    return re.findall(r"\d+", text)[-1]


@dataclass(frozen=True)
class ToolQuestion:
    """A question, and the catalogue that answers it: name -> the text that `lookup` returns."""

    kind: str
    items: tuple[str, str]
    count: int
    catalogue: dict[str, str] = field(hash=False)
    tools: tuple[str, ...] = TOOLS

    @property
    def prices(self) -> tuple[int, ...]:
        return tuple(int(last_number(self.catalogue[item])) for item in self.items)

    @property
    def text(self) -> str:
        item, other = self.items
        return QUESTIONS[self.kind].format(item=item, other=other, count=self.count)

    @property
    def plan(self) -> list[Step]:
        """The steps that answer the question, in order."""
        (item, other), (price, other_price) = self.items, self.prices
        shop = self.catalogue[item].rsplit(" ", 1)[1]
        find, find_shop = ("lookup", item), ("lookup", shop)
        multiply = ("calculator", f"{price}*{self.count}")
        total, less = price * self.count, last_number(self.catalogue[shop])
        ask = f"print({PYTHON_KINDS.get(self.kind)}({price},{other_price}))"
        return {
            **dict.fromkeys(PYTHON_KINDS, [find, ("lookup", other), ("python", ask)]),
            "price": [find],
            "several": [find, multiply],
            "together": [find, ("lookup", other), ("calculator", f"{price}+{other_price}")],
            "discount": [find, find_shop, ("calculator", f"{price}-{less}")],
            "several_discount": [find, multiply, find_shop, ("calculator", f"{total}-{less}")],
        }[self.kind]

    @property
    def answer(self) -> int:
        return int(last_number(self.run(*self.plan[-1])))

    def run(self, tool: str, argument: str) -> str:
        """The tool's reply in this world: a catalogue's text, `7-5 = 2`, a print, or "error"."""
        if tool == "lookup":
            return self.catalogue.get(argument, "not found")
        printed = re.fullmatch(r"print\((min|max)\((\d+),(\d+)\)\)", argument)
        if tool == "python" and printed:
            return str({"min": min, "max": max}[printed[1]](int(printed[2]), int(printed[3])))
        match = re.fullmatch(r"(\d{1,4})([-+*])(\d{1,4})", argument)
        if tool != "calculator" or not match:
            return "error"
        return f"{argument} = {apply(int(match[1]), match[2], int(match[3]))}"

    def next_step(self, memory: Memory) -> Step | None:
        """The first step of the plan that memory does not hold yet; None when all are done."""
        done = {step[:2] for step in memory}
        return next((step for step in self.plan if step not in done), None)


def make_tool_question(
    rng: random.Random, split: str, kind: str | None = None, tools: tuple[str, ...] = TOOLS
) -> ToolQuestion:
    """A random question from `split` with its own catalogue of four items and two shops.

    With `THREE_TOOLS` every second question needs Python.
    """
    while True:
        names, shops = rng.sample(ITEMS, 4), rng.sample(SHOPS, 2)
        prices = [rng.randint(6, 24) for _ in names]
        sellers = [rng.choice(shops) for _ in names]
        items = zip(names, prices, sellers, strict=True)
        catalogue = {name: f"{name} {price}, shop {shop}" for name, price, shop in items}
        catalogue |= {shop: f"{shop} discount {rng.randint(2, 5)}" for shop in shops}
        kind_asked = kind or rng.choices(KINDS, WEIGHTS)[0]
        if tools == THREE_TOOLS and not kind and rng.random() < 0.5:
            kind_asked = rng.choice(list(PYTHON_KINDS))
        question = ToolQuestion(kind_asked, tuple(names[:2]), rng.randint(2, 4), catalogue, tools)
        if split_of("|".join(catalogue.values())) == split:
            return question


def random_step(question: ToolQuestion, rng: random.Random) -> Step:
    """A step taken without thought: any name of the catalogue, or any numbers at hand."""
    if "python" in question.tools and rng.random() < 1 / 3:
        function, pair = rng.choice(list(PYTHON_KINDS.values())), rng.sample(range(2, 61), 2)
        left, right = question.prices if rng.random() < 0.5 else pair
        return "python", f"print({function}({left},{right}))"
    if rng.random() < 0.5:
        return "lookup", rng.choice(list(question.catalogue))
    left = rng.choice((*question.prices, rng.randint(2, 60)))
    return "calculator", f"{left}{rng.choice('+-*')}{rng.randint(2, 9)}"


def catalogue_path() -> Path:
    """The shipped catalogues of all rows: an SQLite file, which `flow.Lookup` reads."""
    return data_dir() / "tool_questions" / "catalogue.sqlite"


def three_tools() -> Task:
    """`tool_questions`, but every second row asks what needs Python of the same catalogue."""
    from datasets import Dataset

    with closing(sqlite3.connect(f"{catalogue_path().as_uri()}?mode=ro", uri=True)) as connection:
        facts = connection.execute("SELECT catalogue, name, text FROM facts").fetchall()
    catalogues: dict[int, dict[str, str]] = defaultdict(dict)
    for catalogue, name, text in facts:
        catalogues[catalogue][name] = text
    rng, two = random.Random("three-tools"), tool_questions()

    def changed(row: dict) -> dict:
        catalogue = catalogues[row["catalogue"]]
        pair = tuple(rng.sample([name for name in catalogue if name in ITEMS], 2))
        question = ToolQuestion(rng.choice(list(PYTHON_KINDS)), pair, 2, catalogue, THREE_TOOLS)
        prompt = [{"role": "user", "content": question.text}]
        known = {"prompt": prompt, "answer": str(question.answer), "kind": question.kind}
        return row | known | {"calls": len(question.plan)}

    splits = [
        Dataset.from_list([row if i % 2 else changed(row) for i, row in enumerate(rows)])
        for rows in (two.train, two.test)
    ]
    return Task("three_tools", *splits)


def tool_questions() -> Task:
    """4,000 train and 500 test rows.

    Columns: `prompt` (one user message), `answer` (str), `catalogue` (int, from 1,000,000 in test),
    `kind` (one of `KINDS`) and `calls` (how many it takes, 1 to 4).
    """
    return shipped("tool_questions")
