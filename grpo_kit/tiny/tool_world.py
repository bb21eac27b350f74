"""The catalogue world of the tool questions: its facts, its five kinds of question, its oracle.

Facts are not in the question: an item's price and shop, and a shop's discount, stand in a catalogue
that `lookup` reads, and `calculator` combines them. Which step comes next depends on what the
earlier ones returned. Names are made of syllables and split by a hash, so that test catalogues
hold names that no training text ever did.
"""

import hashlib
import random
import re
from dataclasses import dataclass, field

_SYLLABLES = (
    "ba bel dor fin gam hul jik kam lor mep nax nil "
    "pod quil rem sal tef tov ulk vim wob yar zed zun"
).split()
KINDS = ("price", "several", "together", "discount", "several_discount")


def catalogue_name(rng: random.Random, split: str, shop: bool = False) -> str:
    """A made-up name of two syllables from `split`; shops end in "co"."""
    while True:
        name = rng.choice(_SYLLABLES) + rng.choice(_SYLLABLES) + ("co" if shop else "")
        in_test = hashlib.sha256(name.encode()).digest()[0] % 5 == 0
        if in_test == (split == "test"):
            return name


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
            "several": f"What do {self.count} {item} cost?",
            "together": f"What do a {item} and a {self.items[-1]} cost together?",
            "discount": f"What does a {item} cost after the discount of its shop?",
            "several_discount": f"What do {self.count} {item} cost after the discount of the shop?",
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

    def run(self, tool: str, argument: str) -> str:
        """What the tool returns in this world: catalogue text or a number, else "error"."""
        if tool == "lookup":
            return self.catalogue.get(argument, "not found")
        match = re.fullmatch(r"(\d{1,4})([-+*])(\d{1,4})", argument)
        if tool != "calculator" or not match:
            return "error"
        left, operator, right = int(match[1]), match[2], int(match[3])
        return str({"+": left + right, "-": left - right, "*": left * right}[operator])

    def next_step(self, memory: list[tuple[str, str, str]]) -> tuple[str, str] | None:
        """The first step of the plan that memory does not hold yet; None when all are done."""
        done = {(tool, argument) for tool, argument, _ in memory}
        return next((step for step in self.plan if step not in done), None)


def make_tool_question(rng: random.Random, split: str, kind: str | None = None) -> ToolQuestion:
    """A random question with its own catalogue of four items and two shops, names from `split`."""
    kind = kind or rng.choices(KINDS, weights=(10, 25, 25, 20, 20))[0]
    items = tuple(catalogue_name(rng, split) for _ in range(4))
    shops = tuple(catalogue_name(rng, split, shop=True) for _ in range(2))
    if len(set(items)) < 4 or len(set(shops)) < 2:
        return make_tool_question(rng, split, kind)
    prices = tuple(rng.randint(6, 24) for _ in items)
    sellers = [rng.choice(shops) for _ in items]
    discounts = {shop: rng.randint(2, 5) for shop in shops}
    catalogue = {
        item: f"price {price}, shop {shop}"
        for item, price, shop in zip(items, prices, sellers, strict=True)
    } | {shop: f"discount {amount}" for shop, amount in discounts.items()}
    return ToolQuestion(
        kind=kind,
        items=items[:2],
        count=rng.randint(2, 4),
        prices=prices[:2],
        shop=sellers[0],
        discount=discounts[sellers[0]],
        catalogue=catalogue,
    )


def random_step(question: ToolQuestion, rng: random.Random) -> tuple[str, str]:
    """A step taken without thought: any name of the catalogue, or any numbers at hand."""
    if rng.random() < 0.5:
        return "lookup", rng.choice(list(question.catalogue))
    left = rng.choice((*question.prices, rng.randint(2, 60)))
    return "calculator", f"{left}{rng.choice('+-*')}{rng.randint(2, 9)}"
