"""Tool questions of the tiny world: the facts are in a catalogue, not in the question.

"What do 3 of the lamp cost after the discount of the shop?" takes one to four calls: `lookup` reads
a price and shop, or a discount, and `calculator` combines them; the next call depends on earlier
results. Train and test never share a catalogue: a hash of its facts decides the split.
"""

import random
import re
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
        return {
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
        """The tool's reply in this world: a catalogue's text, `7-5 = 2`, or "error"."""
        if tool == "lookup":
            return self.catalogue.get(argument, "not found")
        match = re.fullmatch(r"(\d{1,4})([-+*])(\d{1,4})", argument)
        if tool != "calculator" or not match:
            return "error"
        return f"{argument} = {apply(int(match[1]), match[2], int(match[3]))}"

    def next_step(self, memory: Memory) -> Step | None:
        """The first step of the plan that memory does not hold yet; None when all are done."""
        done = {step[:2] for step in memory}
        return next((step for step in self.plan if step not in done), None)


def make_tool_question(rng: random.Random, split: str, kind: str | None = None) -> ToolQuestion:
    """A random question from `split` with its own catalogue of four items and two shops."""
    while True:
        names, shops = rng.sample(ITEMS, 4), rng.sample(SHOPS, 2)
        prices = [rng.randint(6, 24) for _ in names]
        sellers = [rng.choice(shops) for _ in names]
        items = zip(names, prices, sellers, strict=True)
        catalogue = {name: f"{name} {price}, shop {shop}" for name, price, shop in items}
        catalogue |= {shop: f"{shop} discount {rng.randint(2, 5)}" for shop in shops}
        drawn = kind or rng.choices(KINDS, WEIGHTS)[0]
        question = ToolQuestion(drawn, tuple(names[:2]), rng.randint(2, 4), catalogue)
        if split_of("|".join(catalogue.values())) == split:
            return question


def random_step(question: ToolQuestion, rng: random.Random) -> Step:
    """A step taken without thought: any name of the catalogue, or any numbers at hand."""
    if rng.random() < 0.5:
        return "lookup", rng.choice(list(question.catalogue))
    left = rng.choice((*question.prices, rng.randint(2, 60)))
    return "calculator", f"{left}{rng.choice('+-*')}{rng.randint(2, 9)}"


def catalogue_path() -> Path:
    """The shipped catalogues of all rows: an SQLite file, which `flow.Lookup` reads."""
    return data_dir() / "tool_questions" / "catalogue.sqlite"


def tool_questions() -> Task:
    """4,000 train and 500 test rows.

    Columns: `prompt` (one user message), `answer` (str), `catalogue` (int, from 1,000,000 in test),
    `kind` (one of `KINDS`) and `calls` (how many it takes, 1 to 4).
    """
    return shipped("tool_questions")
