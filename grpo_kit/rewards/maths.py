"""The maths reward: answers in LaTeX, compared by what they mean (\\frac12 is 0.5).

For answers that are numbers `accuracy_reward` is exact, and a thousand times faster.
"""

from __future__ import annotations

import threading

from grpo_kit.rewards.rules import completion_text
from grpo_kit.tasks.answers import extract_answer

MAX_CHARS = 10_000  # of an answer that is read as mathematics


def maths_reward(
    prompts: list, completions: list, completion_ids: list, *, answer: list, **columns
) -> list[float]:
    """1.0 for each completion whose `<answer>…</answer>` means what `answer` does, else 0.0."""
    return [
        float(means_the_same(extract_answer(completion_text(c)), gold))
        for c, gold in zip(completions, answer, strict=True)
    ]


def means_the_same(answer: str | None, gold: str, prose: bool = False) -> bool:
    """Does all of `answer` mean what `gold` means, both in LaTeX? "7 or 8" is not 8.

    With `prose`, math-verify looks for the answer in a text. Raises RuntimeError without it, and
    outside the main thread, where no time limit would stop a 9^{9^{9^9}}.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise RuntimeError('it needs math-verify: pip install "grpo-kit[math]"') from error
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math-verify's time limit is a signal: call it in the main thread only.")
    if not answer or len(answer) > MAX_CHARS:
        return False
    return verify(parse(f"${gold}$"), parse(answer if prose else f"${answer.strip('$')}$"))
