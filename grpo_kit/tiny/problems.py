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

import random
import re

from grpo_kit.tasks.word_problems import HIGHEST, LOWEST, Problem, apply, order

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
