"""Chain word problems of the tiny world.

"Mia has 12 coins. Mia first finds 7. Mia then loses 4. How many coins does Mia have?" Every value
on the way stays within 1..40, so that a tiny model can do the sums when it writes the steps down.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

from grpo_kit.tasks import Task, shipped, split_of

NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Sam")
ITEMS = ("coins", "cards", "books", "shells", "stamps", "apples", "pens", "stones")
VERBS = {
    "+": ("finds", "buys", "wins", "gets"),
    "-": ("loses", "sells", "spends", "drops"),
    "*": ("doubles", "triples"),
}
# The word that opens each step, in question and solution. A small model looks a step up by it;
# without it, 1,600 steps of warm-up had not taught which comes next.
ORDER = ("first", "then", "next", "later", "finally")
LOWEST, HIGHEST = 1, 40
LARGEST_AMOUNT = 9  # added or taken in one step
DIFFICULTIES = (2, 3)  # steps of the shipped problems, which the tiny base was warmed up on


@dataclass(frozen=True)
class Problem:
    """A chain problem: `start`, then `steps` of (operator, amount), about `name` and `item`."""

    start: int
    steps: tuple[tuple[str, int], ...]
    name: str = "Mia"
    item: str = "coins"
    verbs: tuple[str, ...] = ()

    @property
    def values(self) -> list[int]:
        """Every value on the way, the start first and the answer last."""
        return list(accumulate(self.steps, lambda v, step: apply(v, *step), initial=self.start))

    @property
    def answer(self) -> int:
        return self.values[-1]

    @property
    def question(self) -> str:
        facts = (f"has {self.start} {self.item}", *self.clauses)
        story = " ".join(f"{self.name} {fact}." for fact in facts)
        return f"{story} How many {self.item} does {self.name} have?"

    @property
    def clauses(self) -> list[str]:
        """The event of each step, `first finds 7`."""
        parts = zip(order(len(self.steps)), self.steps, self.verbs, strict=True)
        return [
            f"{word} {verb} {'them' if operator == '*' else amount}"
            for word, (operator, amount), verb in parts
        ]

    @property
    def numbers(self) -> str:
        """The chain by itself, `12+7-4`."""
        return f"{self.start}" + "".join(f"{operator}{amount}" for operator, amount in self.steps)


def apply(value: int, operator: str, amount: int) -> int:
    """One step of a chain: `value operator amount` for the operators +, - and *."""
    return {"+": value + amount, "-": value - amount, "*": value * amount}[operator]


def order(n_steps: int) -> list[str]:
    """The words that open `n_steps` steps; the last of `ORDER` opens all that come after it."""
    return [ORDER[min(i, len(ORDER) - 1)] for i in range(n_steps)]


def make_problem(rng: random.Random, difficulty: int, split: str | None = None) -> Problem:
    """A random problem of `difficulty` steps, from `split` ("train", "test") or from either."""
    while True:
        value = start = rng.randint(3, 30)
        steps, verbs = [], []
        while len(steps) < difficulty:
            operator = rng.choices("+-*", weights=(45, 45, 10))[0]
            amount = rng.randint(2, 3) if operator == "*" else rng.randint(2, LARGEST_AMOUNT)
            result = apply(value, operator, amount)
            if LOWEST <= result <= HIGHEST:
                value = result
                steps.append((operator, amount))
                choice = amount - 2 if operator == "*" else rng.randrange(4)
                verbs.append(VERBS[operator][choice])
        problem = Problem(start, tuple(steps), rng.choice(NAMES), rng.choice(ITEMS), tuple(verbs))
        if split in (None, split_of(problem.numbers)):
            return problem


def word_problems() -> Task:
    """4,000 train and 500 test rows: `prompt` (one user message), `answer` (str), `difficulty`
    (steps of the chain) and `numbers`."""
    return shipped("word_problems")


def two_then_three() -> Task:
    """`word_problems`: those of two steps to train on, those of three to be tested on."""
    whole = word_problems()
    train, test = (
        split.filter(lambda row, n=n: row["difficulty"] == n)
        for split, n in ((whole.train, 2), (whole.test, 3))
    )
    return Task("two_then_three", train, test)
