"""Chain word problems of the tiny world, as shipped or freshly generated.

"Mia has 12 coins. Mia first finds 7. Mia then loses 4. How many coins does Mia have?" Every value
on the way stays within 1..40, so that a model of a million parameters can do the sums when it
writes the steps down. Train and test are split by a hash of the numbers alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from grpo_kit.tasks import Task, as_dataset, shipped_rows, split_of

NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Sam")
ITEMS = ("coins", "cards", "books", "shells", "stamps", "apples", "pens", "stones")
VERBS = {
    "+": ("finds", "buys", "wins", "gets"),
    "-": ("loses", "sells", "spends", "drops"),
    "*": ("doubles", "triples"),
}
# The word that opens each step, in the question and in every solution that shows its steps. A small
# model looks a step up by it: without it, 1,600 steps of warm-up had not taught which comes next.
ORDER = ("first", "then", "next", "later", "finally")
LOWEST, HIGHEST = 1, 40
LARGEST_AMOUNT = 9  # added or taken in one step

SHIPPED_DIFFICULTIES = (2, 3)
SHIPPED_ROWS = {"train": 4000, "test": 500}


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
        facts = " ".join(
            f"{self.name} {fact}." for fact in (f"has {self.start} {self.item}", *self.clauses)
        )
        return f"{facts} How many {self.item} does {self.name} have?"

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

    @property
    def split(self) -> str:
        return split_of(self.numbers)


def apply(value: int, operator: str, amount: int) -> int:
    """One step of a chain: `value operator amount` for the operators +, - and *."""
    return {"+": value + amount, "-": value - amount, "*": value * amount}[operator]


def order(n_steps: int) -> list[str]:
    """The words that open `n_steps` steps; the last of `ORDER` opens all that come after it."""
    return [ORDER[min(i, len(ORDER) - 1)] for i in range(n_steps)]


def make_problem(rng: random.Random, difficulty: int, split: str | None = None) -> Problem:
    """A random problem of `difficulty` steps, from `split` ("train", "test") or from either."""
    if difficulty < 1:
        raise ValueError(f"difficulty is {difficulty}; a problem needs at least 1 step.")
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
        if split in (None, problem.split):
            return problem


def make_rows(split: str, n: int, difficulties: Sequence[int], seed: int = 0) -> list[dict]:
    """`n` problems: `question`, `answer` (str), `difficulty` (steps) and `numbers`.

    No two have the same numbers. Raises ValueError where there are fewer than `n`.
    """
    rng = random.Random(f"{split}-{seed}")
    rows: dict[str, dict] = {}
    for _ in range(20 * n):
        problem = make_problem(rng, rng.choice(list(difficulties)), split)
        row = {"question": problem.question, "answer": str(problem.answer)}
        row |= {"difficulty": len(problem.steps), "numbers": problem.numbers}
        rows.setdefault(problem.numbers, row)
        if len(rows) == n:
            return list(rows.values())
    raise ValueError(
        f"there are fewer than {n} distinct {split} problems of difficulties "
        f"{list(difficulties)}; ask for fewer rows or a higher difficulty."
    )


def word_problems(
    difficulties: Sequence[int] = SHIPPED_DIFFICULTIES,
    *,
    n_train: int | None = None,
    n_test: int | None = None,
) -> Task:
    """Word problems of the given difficulties (steps of the chain).

    Problems of 2 and 3 steps, which the tiny base was warmed up on, are the shipped ones as far as
    they go; others are generated from a fixed seed. Columns: `prompt` (one user message), `answer`
    (str), `difficulty` (int), `numbers`. Raises ValueError for no difficulty, one below 1, or more
    rows than there are.
    """
    if not difficulties or min(difficulties) < 1:
        raise ValueError(f"difficulties are {difficulties!r}; give at least one, each 1 or more.")
    splits = {}
    for split, n in (("train", n_train), ("test", n_test)):
        n = SHIPPED_ROWS[split] if n is None else n
        rows = [
            row for row in shipped_rows("word_problems", split) if row["difficulty"] in difficulties
        ]
        if len(rows) < n or not set(difficulties) <= set(SHIPPED_DIFFICULTIES):
            rows = make_rows(split, n, difficulties)
        splits[split] = as_dataset(rows[:n])
    return Task("word_problems", **splits)
