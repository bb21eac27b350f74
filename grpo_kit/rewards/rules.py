"""Rewards by rule: right answers, the format, overlong completions, verdicts.

`grpo_kit.tasks.answers` decides which answers are the same.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from statistics import fmean

from grpo_kit.tasks.answers import extract_answer, is_correct

PASS_RATE_CAP = 0.5

_FORMAT = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{(?:\\text\{)?\s*(yes|no)\s*\.?\s*\}", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)

# --- the text of a prompt or completion, which are strings or lists of messages -------------------


def completion_text(completion: str | list[dict]) -> str:
    """Return what the policy wrote: the string, or the texts of the assistant's messages.

    A tool's output must not bring in an answer. Raises TypeError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(m, dict) for m in completion):
        kind = type(completion).__name__
        raise TypeError(f"a completion is a string or messages, not {kind}: decode token ids first")
    own = (m for m in completion if m.get("role", "assistant") == "assistant")
    return "\n".join(_content_text(m.get("content")) for m in own)


def question_text(prompt: str | list[dict]) -> str:
    """Return the question: the string, or the text of the user's last message."""
    if isinstance(prompt, str):
        return prompt
    questions = [message for message in prompt if message.get("role") == "user"]
    return _content_text(questions[-1].get("content")) if questions else ""


def _content_text(content: str | list[dict] | None) -> str:
    if content is None or isinstance(content, str):  # None: a bare tool call
        return content or ""
    return "".join(part.get("text") or "" for part in content)


# --- answers --------------------------------------------------------------------------------------


def accuracy_reward(
    prompts: list, completions: list, completion_ids: list, *, answer: list, **columns
) -> list[float | None]:
    """Return 1.0 for each completion whose last `<answer>…</answer>` is correct, else 0.0.

    `answer` holds a gold answer for each completion, text or a number; without one (None, empty,
    NaN) the reward is None. Raises ValueError for another number, TypeError for other types.
    """
    if len(answer) != len(completions):
        raise ValueError(
            f"there are {len(answer)} gold answers for {len(completions)} completions: repeat the "
            "column `answer` for every completion of its prompt"
        )
    golds = [_gold_text(gold) for gold in answer]
    return [
        None if gold is None else float(is_correct(extract_answer(completion_text(c)), gold))
        for c, gold in zip(completions, golds, strict=True)
    ]


def _gold_text(gold: object) -> str | None:
    if gold is None or isinstance(gold, float) and math.isnan(gold):
        return None
    if not isinstance(gold, str | numbers.Number):
        raise TypeError(f"the column `answer` holds {gold!r}; give text, a number or None")
    return str(gold).strip() or None


def correctness(reward: str, completions: list, columns: dict) -> list[float | None]:
    """Score by `accuracy_reward` for the `reward` of that name; ValueError without `answer`."""
    if "answer" not in columns:
        raise ValueError(f"{reward} with only_correct=True needs the column `answer`: add it")
    return accuracy_reward([], completions, [], answer=columns["answer"])


# --- format and length ----------------------------------------------------------------------------


def has_format(text: str) -> bool:
    """Is the whole text `<think>…</think><answer>…</answer>`, each tag once, no part empty?"""
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return False
    match = _FORMAT.fullmatch(text)
    return match is not None and all(part.strip() for part in match.groups())


def format_reward(prompts: list, completions: list, completion_ids: list, **columns) -> list[float]:
    """Return +0.1 for each completion that `has_format`, else -0.1 (arXiv 2505.17826, GSM8K)."""
    return [0.1 if has_format(completion_text(c)) else -0.1 for c in completions]


@dataclass(eq=False)
class OverlongPenalty:
    """DAPO's soft overlong penalty, 0 down to -1 by length in tokens (arXiv 2503.14476, eq. 13).

    With L = len(completion_ids[i]), Lmax = `max_completion_length`, Lcache = `cache_length`:
    0 for L <= Lmax - Lcache; ((Lmax - Lcache) - L) / Lcache up to Lmax; -1 beyond.
    Raises ValueError unless both are whole numbers of tokens with 1 <= Lcache <= Lmax.
    """

    max_completion_length: int
    cache_length: int

    __name__ = "overlong_penalty"

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of tokens, 1 or more")
        if self.cache_length > self.max_completion_length:
            raise ValueError(f"cache_length={self.cache_length} exceeds max_completion_length")

    def __call__(self, prompts: list, completions: list, completion_ids: list, **columns) -> list:
        """Return a penalty for each completion; rows of `completion_ids` carry no padding."""
        start = self.max_completion_length - self.cache_length
        shares = [(len(ids) - start) / self.cache_length for ids in completion_ids]
        return [-min(max(share, 0.0), 1.0) or 0.0 for share in shares]  # `or`: no -0.0


# --- verdicts (arXiv 2602.07594) ------------------------------------------------------------------


def parse_verdict(text: str) -> bool | None:
    """Return True for Yes, False for No, None without a verdict.

    The last `\\boxed{Yes}` or `\\boxed{No}` after the analysis counts, else the last of the two
    words, in any case. The analysis ends with the last `</think>`; left open, it has no verdict.
    """
    _, opened, after_open = text.rpartition("<think>")
    if opened and "</think>" not in after_open:
        return None
    conclusion = text.rpartition("</think>")[2]
    words = _BOXED.findall(conclusion) or _WORD.findall(conclusion)
    return words[-1].lower() == "yes" if words else None


def verdict_stats(verdicts: Sequence[bool | None], labels: Sequence[bool]) -> dict[str, float]:
    """Compare N verdicts with the labels of their answers: shares, 0..1.

    A missing verdict (`unparsed`) is inaccurate. `false_yes` is of the wrong answers, `false_no` of
    the right ones; each is left out where there is no such answer.
    """
    pairs = list(zip(verdicts, labels, strict=True))
    stats = {
        "accuracy": fmean(verdict is label for verdict, label in pairs),
        "yes_rate": fmean(verdict is True for verdict, _ in pairs),
        "unparsed": fmean(verdict is None for verdict, _ in pairs),
    }
    for name, wanted in (("false_yes", False), ("false_no", True)):
        if errors := [verdict is (not wanted) for verdict, label in pairs if label is wanted]:
            stats[name] = fmean(errors)
    return stats


@dataclass(eq=False)
class VerificationReward:
    """1.0 where the verdict equals the column `correct`, else 0.0, also without a verdict.

    `correct` is the rule verifier's label of the answer; rows where it is None are no verification
    items and get None. TRL's `log_metric` gets `verdict_stats` but the accuracy (the mean reward).
    """

    _: KW_ONLY
    pass_rate_factor: bool = False  # times min(column `pass_rate`, 0.5), as in the paper's code

    __name__ = "verification_reward"

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, *, correct: list,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Return N rewards; raises ValueError if `correct` or a needed `pass_rate` has not N."""
        rates = columns.get("pass_rate", []) if self.pass_rate_factor else [1.0] * len(correct)
        for name, column in (("correct", correct), ("pass_rate", rates)):
            if len(column) != len(completions):
                counts = f"{len(column)} values for {len(completions)} completions"
                raise ValueError(f"the column {name!r} has {counts}: give each completion one.")
        labels = [None if label is None else bool(label) for label in correct]
        verdicts = [parse_verdict(completion_text(completion)) for completion in completions]
        graded = [pair for pair in zip(verdicts, labels, strict=True) if pair[1] is not None]
        if log_metric is not None and graded:
            for name, value in verdict_stats(*zip(*graded, strict=True)).items():
                if name != "accuracy":
                    log_metric(name, value)
        cap = PASS_RATE_CAP if self.pass_rate_factor else 1.0
        return [
            None if label is None else min(rate, cap) * (verdict is label)
            for verdict, label, rate in zip(verdicts, labels, rates, strict=True)
        ]
