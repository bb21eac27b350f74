"""Chain word problems, and the seven styles in which the tiny base answers them.

A problem starts from a number and applies a chain of one-step changes; every value on the way stays
within 1..40, so that a model of a million parameters can do the arithmetic when it writes the steps
down. Train and test never share a problem: the split is a hash of the numbers alone, so that
neither another name nor another item can carry a problem across.

The styles are the heart of the tiny world. Three are right (`equations`, `words`, `list`), four
are not (`sloppy`, `guess`, `assured`, `unformatted`), and the most frequent is a wrong one. GRPO
cannot teach a model this small to add; it can move probability to the styles that are rewarded,
which is what it does to large models too.
"""

import hashlib
import random
import re
from dataclasses import dataclass

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

# share of each style in the base's warm-up data; the imperfections are planted here and only here
STYLE_SHARES = {
    "equations": 0.13,
    "words": 0.12,
    "list": 0.09,
    "sloppy": 0.16,
    "guess": 0.37,
    "assured": 0.04,
    "unformatted": 0.09,
}
RIGHT_STYLES = ("equations", "words", "list")
SLIP_RATE = 0.45  # chance that a step of a sloppy solution is off


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


def equation_list(problem: Problem, values: list[int]) -> list[str]:
    """Each step as an equation, `12 + 7 = 19`; `values` may hold slips."""
    return [
        f"{before} {operator} {amount} = {after}"
        for before, (operator, amount), after in zip(
            values, problem.steps, values[1:], strict=False
        )
    ]


def equations(problem: Problem, values: list[int]) -> str:
    """Each step's word and equation, `first 12 + 7 = 19, ...`; `values` may hold slips."""
    words = order(len(problem.steps))
    steps = zip(words, equation_list(problem, values), strict=True)
    return ", ".join(f"{word} {equation}" for word, equation in steps) + "."


def narrated(problem: Problem) -> str:
    """Each step as it was told, and its equation: `first finds 7, 12 + 7 = 19. then ...`

    The verb stands next to the sign that it asks for, which is easier for a small model than to
    find both at once in the question.
    """
    told = zip(problem.clauses, equation_list(problem, problem.values), strict=True)
    return " ".join(f"{clause}, {equation}." for clause, equation in told)


def slipped_values(problem: Problem, rng: random.Random) -> list[int]:
    """The values of a careless solver: each step is off by up to 9 at `SLIP_RATE`."""
    values = [problem.start]
    for operator, amount in problem.steps:
        value = apply(values[-1], operator, amount)
        if rng.random() < SLIP_RATE:
            value += rng.choice((-1, 1)) * rng.randint(1, 9)
        values.append(min(max(value, LOWEST), HIGHEST))
    return values


def guessed_answer(problem: Problem, rng: random.Random) -> int:
    """An answer without reasoning: within 8 of the right one, seldom right."""
    return min(max(problem.answer + rng.randint(-8, 8), LOWEST), HIGHEST)


def solve(problem: Problem, style: str, rng: random.Random) -> str:
    """The completion of a solver that uses `style`; what the base is warmed up on."""
    values = problem.values
    if style == "equations":
        reasoning = equations(problem, values)
    elif style == "words":
        reasoning = f"Start with {problem.start}. {narrated(problem)}"
    elif style == "list":
        reasoning = f"Steps: {equations(problem, values)}"
    elif style == "sloppy":
        values = slipped_values(problem, rng)
        reasoning = f"About {equations(problem, values)}"
    elif style == "guess":
        values = [guessed_answer(problem, rng)]
        reasoning = f"Maybe {values[-1]}."
    elif style == "assured":
        values = [guessed_answer(problem, rng)]
        reasoning = f"Surely {values[-1]}, checked twice."
    elif style == "unformatted":
        return f"{equations(problem, values)} The answer is {values[-1]}."
    else:
        raise ValueError(f"style is {style!r}; expected one of {', '.join(STYLE_SHARES)}.")
    return f"<think>{reasoning}</think><answer>{values[-1]}</answer>"


_STYLE_PATTERNS = {
    "guess": r"<think>Maybe\b",
    "assured": r"<think>Surely\b",
    "sloppy": r"<think>About\b",
    "words": r"<think>Start with\b",
    "list": r"<think>Steps:",
    "equations": r"<think>\s*first \d+ [-+*]",
}


def solution_style(completion: str) -> str:
    """The style of a completion by its first words: one of `STYLE_SHARES`, or `"other"`."""
    for style, pattern in _STYLE_PATTERNS.items():
        if re.match(pattern, completion):
            return style
    return "unformatted" if re.search(r"The answer is", completion) else "other"
