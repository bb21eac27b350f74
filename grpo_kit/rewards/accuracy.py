"""The accuracy reward: 1 for the right final answer, 0 for a wrong one or none.

What counts as the same answer is decided in `grpo_kit.tasks.answers`.
"""

from __future__ import annotations

import math
import numbers

from grpo_kit.rewards.text import completion_text
from grpo_kit.tasks.answers import extract_answer, is_correct


def accuracy_reward(
    prompts: list,
    completions: list,
    completion_ids: list[list[int]],
    *,
    answer: list,
    **columns,
) -> list[float | None]:
    """Return 1.0 for each completion whose last `<answer>…</answer>` is correct, else 0.0.

    `completions` are strings or message lists, `answer` the gold answers, one a completion: text
    or a number. Where there is no gold answer (None, empty, NaN) nothing can be scored and the
    reward is None. The prompt is not read, and the format of the rest is `format_reward`'s matter.

    Raises ValueError where `answer` and `completions` differ in length, TypeError where a gold
    answer is neither text nor a number.
    """
    if len(answer) != len(completions):
        raise ValueError(
            f"accuracy_reward got {len(answer)} gold answers for {len(completions)} completions: "
            "repeat the column `answer` for every completion of its prompt"
        )
    golds = [_gold_text(gold) for gold in answer]
    return [
        None if gold is None else float(is_correct(extract_answer(completion_text(c)), gold))
        for c, gold in zip(completions, golds, strict=True)
    ]


def correctness(reward: str, completions: list, columns: dict) -> list[float | None]:
    """What `accuracy_reward` says, for another reward that pays right answers only.

    Raises ValueError, naming the `reward`, where the `columns` hold no `answer`.
    """
    if "answer" not in columns:
        raise ValueError(
            f"{reward} with only_correct=True needs the gold answers, but the data has no column "
            "`answer`: add one, or pay every response with only_correct=False"
        )
    return accuracy_reward([], completions, [], answer=columns["answer"])


def _gold_text(gold: object) -> str | None:
    if gold is None or isinstance(gold, float) and math.isnan(gold):
        return None
    if not isinstance(gold, str | numbers.Number):
        raise TypeError(
            f"the column `answer` holds {gold!r}; accuracy_reward needs text, a number or None"
        )
    return str(gold).strip() or None
