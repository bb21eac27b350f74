"""Rewards by rule: right answers, the format, verdicts."""

import numbers
import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from grpo_kit.tasks.answers import extract_answer, is_correct

_FORMAT = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{(?:\\text\{)?\s*(yes|no)\s*\.?\s*\}", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def completion_text(completion: str | list[dict]) -> str:
    """The string, or the assistant's messages alone: a tool must not bring in an answer."""
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, list) or not all(isinstance(m, dict) for m in completion):
        kind = type(completion).__name__
        raise TypeError(f"a completion is a string or messages, not {kind}: decode token ids first")
    own = (m for m in completion if m.get("role", "assistant") == "assistant")
    return "\n".join(m.get("content") or "" for m in own)  # None in a bare tool call


def question_text(prompt: str | list[dict]) -> str:
    """The question: the string, or the text of the user's last message."""
    if isinstance(prompt, str):
        return prompt
    return next((m["content"] for m in reversed(prompt) if m["role"] == "user"), "")


def column(columns: dict, name: str, needed_by: str) -> list:
    """The column `name`; raises ValueError, naming what needs it, where the data has none."""
    if name not in columns:
        raise ValueError(f"{needed_by} needs the column `{name}`: add it to the data.")
    return columns[name]


def accuracy_reward(
    prompts: list, completions: list, completion_ids: list, *, answer: list, **columns
) -> list[float | None]:
    """1.0 for a right last `<answer>…</answer>`, else 0.0; None without a gold answer."""
    return _graded(completions, answer)


def lenient_accuracy_reward(
    prompts: list, completions: list, completion_ids: list, *, answer: list, **columns
) -> list[float | None]:
    """As `accuracy_reward`, but without tags the answer is what `extract_answer` takes for it.

    For evaluation: it tells an answer that is wrong from one that is not tagged.
    """
    return _graded(completions, answer, extract=partial(extract_answer, lenient=True))


def _graded(
    completions: list, answer: list, extract: Callable = extract_answer
) -> list[float | None]:
    golds = [_gold_text(gold) for gold in answer]
    return [
        None if gold is None else float(is_correct(extract(completion_text(completion)), gold))
        for completion, gold in zip(completions, golds, strict=True)
    ]


def _gold_text(gold: object) -> str | None:
    if gold is None or gold != gold:  # NaN, as pandas marks what is missing
        return None
    if not isinstance(gold, str | numbers.Number):
        raise TypeError(f"the column `answer` holds {gold!r}; give text, a number or None")
    return str(gold).strip() or None


def format_reward(prompts: list, completions: list, completion_ids: list, **columns) -> list[float]:
    """+0.1 for the format with each tag once and no part empty, else -0.1 (arXiv 2505.17826)."""
    return [0.1 if _has_format(completion_text(c)) else -0.1 for c in completions]


def _has_format(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in ("<think>", "</think>", "<answer>", "</answer>")):
        return False
    match = _FORMAT.fullmatch(text)
    return match is not None and all(part.strip() for part in match.groups())


def parse_verdict(text: str) -> bool | None:
    """Yes or No: the last in `\\boxed{}` after the last `</think>`, else the last; None without."""
    _, opened, after_open = text.rpartition("<think>")
    if opened and "</think>" not in after_open:
        return None
    conclusion = text.rpartition("</think>")[2]
    words = _BOXED.findall(conclusion) or _WORD.findall(conclusion)
    return words[-1].lower() == "yes" if words else None


def verdict_stats(verdicts: Sequence[bool | None], labels: Sequence[bool]) -> dict[str, float]:
    """Shares of N verdicts, 0..1; `false_yes` is of the wrong answers, `false_no` of the right."""
    pairs = list(zip(verdicts, labels, strict=True))
    stats = {
        "accuracy": fmean(verdict is label for verdict, label in pairs),
        "yes_rate": fmean(verdict is True for verdict, _ in pairs),
        "unparsed": fmean(verdict is None for verdict, _ in pairs),
    }
    for name, right in (("false_yes", False), ("false_no", True)):
        if errors := [verdict is (not right) for verdict, label in pairs if label is right]:
            stats[name] = fmean(errors)
    return stats


class VerificationReward:
    """1.0 where the verdict equals the column `correct`, else 0.0; None where that is None.

    `log_metric` gets `verdict_stats` but the accuracy, the mean reward (arXiv 2602.07594).
    """

    __name__ = "verification_reward"

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, *, correct: list,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        labels = [None if label is None else bool(label) for label in correct]
        verdicts = [parse_verdict(completion_text(completion)) for completion in completions]
        graded = [pair for pair in zip(verdicts, labels, strict=True) if pair[1] is not None]
        if log_metric is not None and graded:
            for name, value in verdict_stats(*zip(*graded, strict=True)).items():
                if name != "accuracy":
                    log_metric(name, value)
        return [
            None if label is None else float(verdict is label)
            for verdict, label in zip(verdicts, labels, strict=True)
        ]
