"""The format reward: +0.1 for reasoning and answer in their tags, -0.1 for anything else.

Source: the GSM8K reward of the Trinity-RFT technical report (arXiv 2505.17826). Stricter than a
regular expression alone: each tag must occur exactly once, and neither part may be empty.
"""

from __future__ import annotations

import re

from grpo_kit.rewards.text import completion_text

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_SHAPE = re.compile(
    r"\s*<think>(?P<think>.*)</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL
)


def has_format(text: str) -> bool:
    """Is the whole text `<think>…</think><answer>…</answer>`, each tag once, no part empty?

    White space is allowed before, between and after the two parts.
    """
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    match = _SHAPE.fullmatch(text)
    return match is not None and all(part.strip() for part in match.groups())


def format_reward(
    prompts: list, completions: list, completion_ids: list[list[int]], **columns
) -> list[float]:
    """Return +0.1 for each completion that `has_format`, else -0.1 (N values for N completions)."""
    return [0.1 if has_format(completion_text(c)) else -0.1 for c in completions]
