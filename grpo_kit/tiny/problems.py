"""The seven styles in which the tiny base solves word problems.

Three styles are right (`equations`, `words`, `list`), four are not (`sloppy`, `guess`, `assured`,
`unformatted`), and the most frequent is a wrong one. GRPO cannot teach a model this small to add;
it can move probability to the styles that are rewarded, as it does with large models.
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
REASONING = {
    "equations": "{equations}",
    "words": "Start with {start}. {narration}",
    "list": "Steps: {equations}",
    "sloppy": "About {equations}",
    "guess": "Maybe {answer}.",
    "assured": "Surely {answer}, checked twice.",
}
OPENINGS = {  # regular expressions
    "guess": r"Maybe\b",
    "assured": r"Surely\b",
    "sloppy": r"About\b",
    "words": r"Start with\b",
    "list": r"Steps:",
    "equations": r"\s*first \d+ [-+*]",
}


def equations(problem: Problem, values: list[int]) -> str:
    """Each step's word and equation, `first 12 + 7 = 19, then ...`; `values` may hold slips."""
    words = order(len(problem.steps))
    steps = zip(words, values, problem.steps, values[1:], strict=False)
    return ", ".join(f"{word} {a} {op} {amount} = {b}" for word, a, (op, amount), b in steps) + "."


def narrated(problem: Problem) -> str:
    """Each step in the question's words, and its equation: `first finds 7, 12 + 7 = 19. then ...`

    The verb stands next to its sign. A small model finds that easier than looking up both at once
    in the question.
    """
    values = problem.values
    steps = zip(problem.clauses, values, problem.steps, values[1:], strict=False)
    return " ".join(f"{clause}, {a} {op} {amount} = {b}." for clause, a, (op, amount), b in steps)


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
    """The completion of a solver that uses `style`: the base's training text."""
    if style not in STYLE_SHARES:
        raise ValueError(f"style is {style!r}; expected one of {', '.join(STYLE_SHARES)}.")
    values = problem.values
    if style == "sloppy":
        values = slipped_values(problem, rng)
    elif style in ("guess", "assured"):
        values = [guessed_answer(problem, rng)]
    if style == "unformatted":
        return f"{equations(problem, values)} The answer is {values[-1]}."
    reasoning = REASONING[style].format(
        start=problem.start,
        equations=equations(problem, values),
        narration=narrated(problem),
        answer=values[-1],
    )
    return f"<think>{reasoning}</think><answer>{values[-1]}</answer>"


def style_of(completion: str, openings: dict[str, str]) -> str:
    """The style whose opening (a regular expression) the thinking begins with, or `"other"`."""
    matches = (s for s, pattern in openings.items() if re.match(f"<think>{pattern}", completion))
    return next(matches, "other")


def solution_style(completion: str) -> str:
    """The style of a solution by its first words: one of `STYLE_SHARES`, or `"other"`."""
    style = style_of(completion, OPENINGS)
    return "unformatted" if style == "other" and "The answer is" in completion else style
