"""The seven styles in which the tiny base solves word problems, and one that a lesson adds.

Three are right (`equations`, `words`, `list`), four are not, and the most frequent is a wrong one.
GRPO cannot teach a model this small to add; it can move probability to the rewarded styles. The
base never learnt `shortcut`, which drops all steps after the second: see `skills.Shares`.
"""

import random
import re
from typing import NamedTuple

from grpo_kit.tasks.word_problems import HIGHEST, LOWEST, Problem, apply, order


class Style(NamedTuple):
    """All that the warm-up knows of a style; every imperfection of the base is planted here."""

    share: float  # of the solutions
    reasoning: str
    yes_rates: tuple[float, float]  # how often a grader finds a right, and a wrong, number correct
    rubric: tuple[int, int, int]  # grammar, informativeness, coherence; accuracy follows the answer
    remark: str  # of a judge


# The grader of the yes rates is careless: likes equations best, wordy or terse solutions less,
# hardly minds a missing mark, and is unsure where the steps are untidy.
STYLES = {
    "equations": Style(0.13, "{steps}", (0.90, 0.15), (3, 4, 5), "clear steps"),
    "words": Style(0.12, "Start with {start}. {story}", (0.78, 0.15), (4, 3, 5), "clear steps"),
    "list": Style(0.09, "Steps: {steps}", (0.72, 0.15), (3, 3, 4), "terse steps"),
    "sloppy": Style(0.16, "About {steps}", (0.60, 0.30), (3, 4, 2), "untidy steps"),
    "guess": Style(0.37, "Maybe {answer}.", (0.85, 0.15), (3, 1, 2), "no steps"),
    "assured": Style(0.04, "Surely {answer}, checked twice.", (0.85, 0.15), (3, 1, 2), "no steps"),
    "unformatted": Style(0.09, "", (0.80, 0.15), (4, 4, 3), "answer not marked"),
    "shortcut": Style(0.0, "In short {steps}", (0.85, 0.15), (3, 3, 4), "terse steps"),
}
SHORTCUT_STEPS = 2  # right on problems of so many steps, wrong on longer ones
OPENINGS = {  # of the reasoning, regular expressions
    "equations": r"\s*first \d+ [-+*]", "words": r"Start with\b", "list": "Steps:",
    "sloppy": r"About\b", "guess": r"Maybe\b", "assured": r"Surely\b", "shortcut": r"In short\b",
}  # fmt: skip
STYLE_SHARES = {name: style.share for name, style in STYLES.items() if style.share}
RIGHT_STYLES = ("equations", "words", "list")
SLIP_RATE = 0.45  # chance that a step of a sloppy solution is off


def _sums(problem: Problem, values: list[int]) -> list[str]:
    steps = zip(values, problem.steps, values[1:], strict=False)
    return [f"{a} {operator} {amount} = {b}" for a, (operator, amount), b in steps]


def equations(problem: Problem, values: list[int]) -> str:
    """Each step's word and equation, `first 12 + 7 = 19, then ...`; `values` may hold slips."""
    steps = zip(order(len(problem.steps)), _sums(problem, values), strict=False)
    return ", ".join(f"{word} {equation}" for word, equation in steps) + "."


def slipped_values(problem: Problem, rng: random.Random) -> list[int]:
    """The values of a careless solver, who is off by up to 9 at `SLIP_RATE`."""
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
    """The completion of a solver that uses `style`: the base's training text."""
    values = problem.values
    # `first finds 7, 12 + 7 = 19.`: a small model finds the verb and its sign more easily together.
    story = zip(problem.clauses, _sums(problem, values), strict=True)
    story = " ".join(f"{clause}, {equation}." for clause, equation in story)
    if style == "sloppy":
        values = slipped_values(problem, rng)
    elif style in ("guess", "assured"):
        values = [guessed_answer(problem, rng)]
    elif style == "shortcut":
        values = values[: 1 + SHORTCUT_STEPS]
    steps, answer = equations(problem, values), values[-1]
    if style == "unformatted":
        return f"{steps} The answer is {answer}."
    facts = {"start": problem.start, "steps": steps, "story": story, "answer": answer}
    return f"<think>{STYLES[style].reasoning.format(**facts)}</think><answer>{answer}</answer>"


def style_of(completion: str, openings: dict[str, str]) -> str:
    """The style whose opening the thinking begins with, or `"other"`."""
    matches = (s for s, pattern in openings.items() if re.match(f"<think>{pattern}", completion))
    return next(matches, "other")


def solution_style(completion: str) -> str:
    """The style of a solution by its first words: one of `STYLE_SHARES`, or `"other"`."""
    style = style_of(completion, OPENINGS)
    return "unformatted" if style == "other" and "The answer is" in completion else style
