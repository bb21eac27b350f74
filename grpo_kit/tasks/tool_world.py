"""The catalogue world of the tool questions: its facts, its five kinds of question, its oracle.

Facts are not in the question: an item's price and shop, and a shop's discount, stand in a catalogue
that `lookup` reads, and `calculator` combines them. Which step comes next depends on what the
earlier ones returned. Train and test never share a catalogue: the split is a hash of it.
"""

import hashlib
import random
import re
from dataclasses import dataclass, field, replace

ITEMS = "lamp chair table clock mirror carpet basket kettle bottle ladder bucket drum".split()
SHOPS = "Nord Alba Cora Duna".split()
KINDS = ("price", "several", "together", "discount", "several_discount")
KIND_WEIGHTS = (10, 25, 25, 20, 20)


@dataclass(frozen=True)
class ToolQuestion:
    """A question, the catalogue that answers it (name -> what `lookup` returns), and the answer."""

    kind: str
    items: tuple[str, ...]
    count: int
    prices: tuple[int, ...]
    shop: str
    discount: int
    catalogue: dict[str, str] = field(hash=False)

    @property
    def text(self) -> str:
        item = self.items[0]
        return {
            "price": f"What does a {item} cost?",
            "several": f"What do {self.count} of the {item} cost?",
            "together": f"What do a {item} and a {self.items[-1]} cost together?",
            "discount": f"What does a {item} cost after the discount of its shop?",
            "several_discount": f"What do {self.count} of the {item} cost after the discount of "
            "the shop?",
        }[self.kind]

    @property
    def answer(self) -> int:
        price = self.prices[0]
        return {
            "price": price,
            "several": price * self.count,
            "together": sum(self.prices),
            "discount": price - self.discount,
            "several_discount": price * self.count - self.discount,
        }[self.kind]

    @property
    def plan(self) -> list[tuple[str, str]]:
        """The steps that answer the question, as (tool, call argument), in order."""
        item, price = self.items[0], self.prices[0]
        total = price * self.count
        first, shop = ("lookup", item), ("lookup", self.shop)
        return {
            "price": [first],
            "several": [first, ("calculator", f"{price}*{self.count}")],
            "together": [
                first,
                ("lookup", self.items[-1]),
                ("calculator", f"{price}+{self.prices[-1]}"),
            ],
            "discount": [first, shop, ("calculator", f"{price}-{self.discount}")],
            "several_discount": [
                first,
                ("calculator", f"{price}*{self.count}"),
                shop,
                ("calculator", f"{total}-{self.discount}"),
            ],
        }[self.kind]

    @property
    def split(self) -> str:
        """`"test"` for a tenth of all catalogues, else `"train"`."""
        key = "|".join(self.catalogue.values())
        return "test" if hashlib.sha256(key.encode()).digest()[0] % 10 == 0 else "train"

    def run(self, tool: str, argument: str) -> str:
        """What the tool returns in this world: catalogue text or `7-5 = 2`, else "error"."""
        if tool == "lookup":
            return self.catalogue.get(argument, "not found")
        match = re.fullmatch(r"(\d{1,4})([-+*])(\d{1,4})", argument)
        if tool != "calculator" or not match:
            return "error"
        left, operator, right = int(match[1]), match[2], int(match[3])
        values = {"+": left + right, "-": left - right, "*": left * right}
        return f"{argument} = {values[operator]}"

    def next_step(self, memory: list[tuple[str, str, str]]) -> tuple[str, str] | None:
        """The first step of the plan that memory does not hold yet; None when all are done."""
        done = {(tool, argument) for tool, argument, _ in memory}
        return next((step for step in self.plan if step not in done), None)


def make_tool_question(rng: random.Random, split: str, kind: str | None = None) -> ToolQuestion:
    """A random question from `split` with its own catalogue of four items and two shops."""
    while True:
        names = rng.sample(ITEMS, 4)
        shops = rng.sample(SHOPS, 2)
        prices = [rng.randint(6, 24) for _ in names]
        sellers = [rng.choice(shops) for _ in names]
        discounts = {shop: rng.randint(2, 5) for shop in shops}
        catalogue = {
            name: f"{name} {price}, shop {shop}"
            for name, price, shop in zip(names, prices, sellers, strict=True)
        } | {shop: f"{shop} discount {amount}" for shop, amount in discounts.items()}
        question = ToolQuestion(
            kind=kind or rng.choices(KINDS, weights=KIND_WEIGHTS)[0],
            items=tuple(names[:2]),
            count=rng.randint(2, 4),
            prices=tuple(prices[:2]),
            shop=sellers[0],
            discount=discounts[sellers[0]],
            catalogue=catalogue,
        )
        if question.split == split:
            return question


def ask_again(question: ToolQuestion, rng: random.Random) -> ToolQuestion:
    """Another random question about the same catalogue."""
    items = [name for name in question.catalogue if name in ITEMS]
    names = tuple(rng.sample(items, 2))
    facts = [re.fullmatch(r"\w+ (\d+), shop (\w+)", question.catalogue[name]) for name in names]
    shop = facts[0][2]
    return replace(
        question,
        kind=rng.choices(KINDS, weights=KIND_WEIGHTS)[0],
        items=names,
        count=rng.randint(2, 4),
        prices=tuple(int(fact[1]) for fact in facts),
        shop=shop,
        discount=int(question.catalogue[shop].rsplit(" ", 1)[1]),
    )


def random_step(question: ToolQuestion, rng: random.Random) -> tuple[str, str]:
    """A step taken without thought: any name of the catalogue, or any numbers at hand."""
    if rng.random() < 0.5:
        return "lookup", rng.choice(list(question.catalogue))
    left = rng.choice((*question.prices, rng.randint(2, 60)))
    return "calculator", f"{left}{rng.choice('+-*')}{rng.randint(2, 9)}"
