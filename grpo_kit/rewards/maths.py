"""The maths reward: `accuracy_reward` where answers are LaTeX, compared by what they mean.

The comparing is math-verify's (`pip install 'grpo-kit[math]'`): \\frac12 is 0.5, \\sqrt{8} is
2\\sqrt{2}. Where all answers are numbers `accuracy_reward` is exact, and a thousand times faster.
"""

from __future__ import annotations

import threading

from grpo_kit.rewards.text import completion_text
from grpo_kit.tasks.answers import extract_answer

MAX_CHARS = 10_000  # of an answer that is read as mathematics


def maths_reward(
    prompts: list,
    completions: list,
    completion_ids: list[list[int]],
    *,
    answer: list[str],
    **columns,
) -> list[float]:
    """Return 1.0 for each completion whose last `<answer>…</answer>` means what `answer` does.

    `completions` are strings or message lists, `answer` the gold answers in LaTeX, one a
    completion. Raises what `means_the_same` raises.
    """
    return [
        float(means_the_same(extract_answer(completion_text(completion)), gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def means_the_same(answer: str | None, gold: str, prose: bool = False) -> bool:
    """Does `answer`, in LaTeX with or without dollars, say what `gold`, in LaTeX, says?

    All of it: "7 or 8" is not 8. With `prose`, what math-verify takes for the answer in a text. It
    takes milliseconds, and five seconds where it gives up. Raises RuntimeError where math-verify
    is not installed, and outside the main thread: its time limit is a signal's, without which one
    answer such as 9^{9^{9^9}} would hold up a run for ever.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise RuntimeError(
            'comparing mathematical answers needs math-verify: pip install "grpo-kit[math]"'
        ) from error
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "mathematical answers are compared in the main thread only, since the time limit of "
            "math-verify needs a signal: call the reward there."
        )
    if not answer or len(answer) > MAX_CHARS:
        return False
    return verify(parse(f"${gold}$"), parse(answer if prose else f"${answer.strip('$')}$"))
