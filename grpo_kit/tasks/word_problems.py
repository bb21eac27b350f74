"""Chain word problems of the tiny world, as shipped or freshly generated.

"Mia has 12 coins. Mia finds 7. Mia loses 4. How many coins does Mia have?" Train and test are split
by a hash of the numbers (`Problem.split`), so they never share a problem.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task

NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Sam")
ITEMS = ("coins", "cards", "books", "shells", "stamps", "apples", "pens", "stones")
VERBS = {
    "+": ("finds", "buys", "wins", "gets"),
    "-": ("loses", "sells", "spends", "drops"),
    "*": ("doubles", "triples"),
}
# the word that opens each step, in the question and in every solution that shows its steps: what a
# small model looks a step up by (without it 1,600 steps of warm-up had not taught which comes next)
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
        values = [self.start]
        for operator, amount in self.steps:
            values.append(apply(values[-1], operator, amount))
        return values

    @property
    def answer(self) -> int:
        return self.values[-1]

    @property
    def question(self) -> str:
        changes = " ".join(f"{self.name} {clause}." for clause in self.clauses)
        start = f"{self.name} has {self.start} {self.item}."
        return f"{start} {changes} How many {self.item} does {self.name} have?"

    @property
    def clauses(self) -> list[str]:
        """What happens in each step, `first finds 7`."""
        return [
            f"{word} {verb} {'them' if operator == '*' else amount}"
            for word, (operator, amount), verb in zip(
                order(len(self.steps)), self.steps, self.verbs, strict=True
            )
        ]

    @property
    def split(self) -> str:
        """`"test"` for a tenth of all problems, else `"train"`; a hash of the numbers alone."""
        key = f"{self.start}" + "".join(f"{operator}{amount}" for operator, amount in self.steps)
        return "test" if hashlib.sha256(key.encode()).digest()[0] % 10 == 0 else "train"


def apply(value: int, operator: str, amount: int) -> int:
    """One step of a chain: `value operator amount` for the operators +, - and *."""
    return {"+": value + amount, "-": value - amount, "*": value * amount}[operator]


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


def order(n_steps: int) -> list[str]:
    """The words that open `n_steps` steps: `ORDER`, its last one for all that come after."""
    return [ORDER[min(i, len(ORDER) - 1)] for i in range(n_steps)]


def make_rows(split: str, n: int, difficulties: Sequence[int], seed: int = 0) -> list[dict]:
    """`n` distinct problems: `question`, `answer` (str), `difficulty` (steps), `numbers`.

    `numbers` is the chain by itself, `12+7-4`; no two rows share it.
    """
    rng = random.Random(f"{split}-{seed}")
    rows: dict[str, dict] = {}
    for _ in range(20 * n):
        if len(rows) == n:
            return list(rows.values())
        problem = make_problem(rng, rng.choice(list(difficulties)), split)
        numbers = f"{problem.start}" + "".join(f"{o}{a}" for o, a in problem.steps)
        rows.setdefault(
            numbers,
            {
                "question": problem.question,
                "answer": str(problem.answer),
                "difficulty": len(problem.steps),
                "numbers": numbers,
            },
        )
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

    For 2 and 3 steps, which the tiny base was warmed up on, the shipped rows are taken; other
    difficulties are generated, from a fixed seed.

    Returns a task with columns `prompt` (one user message), `answer` (str), `difficulty` (int)
    and `numbers`. Raises ValueError for no difficulty, one below 1, or too many rows.
    """
    from datasets import Dataset

    if not difficulties or min(difficulties) < 1:
        raise ValueError(f"difficulties are {difficulties!r}; give at least one, each 1 or more.")
    splits = {}
    for split, n in (("train", n_train), ("test", n_test)):
        n = SHIPPED_ROWS[split] if n is None else n
        rows = []
        if set(difficulties) <= set(SHIPPED_DIFFICULTIES):
            lines = (data_dir() / "word_problems" / f"{split}.jsonl").read_text().splitlines()
            rows = [r for line in lines if (r := json.loads(line))["difficulty"] in difficulties]
        if len(rows) < n:
            rows = make_rows(split, n, difficulties)
        splits[split] = Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": row["question"]}],
                    **{k: row[k] for k in ("answer", "difficulty", "numbers")},
                }
                for row in rows[:n]
            ]
        )
    return Task("word_problems", **splits)
