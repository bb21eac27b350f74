"""The verification reward: 1 for a verdict that says what is true of the answer that it judges.

Source: "Learning to Self-Verify Makes Language Models Better Reasoners" (arXiv 2602.07594) and its
code. The verdict is compared with the correctness label that the rule verifier gave, not with the
reference answer, which the policy is never shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import fmean

from grpo_kit.rewards.text import completion_text

PASS_RATE_CAP = 0.5

_BOXED = re.compile(r"\\boxed\{(?:\\text\{)?\s*(yes|no)\s*\.?\s*\}", re.IGNORECASE)
_WORD = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def parse_verdict(text: str) -> bool | None:
    """Return True for Yes, False for No, None where there is no verdict.

    It is the last `\\boxed{Yes}` or `\\boxed{No}` after the analysis, and where there is none, the
    last of the two words, in any case. The analysis ends with the last `</think>`; one that is
    opened and never closed has no verdict after it, whatever it says.
    """
    _, opened, after_open = text.rpartition("<think>")
    if opened and "</think>" not in after_open:
        return None
    conclusion = text.rpartition("</think>")[2]
    found = _BOXED.findall(conclusion) or _WORD.findall(conclusion)
    return found[-1].lower() == "yes" if found else None


def verdict_stats(verdicts: Sequence[bool | None], labels: Sequence[bool]) -> dict[str, float]:
    """How good verdicts are, of N answers with their labels; all shares, in 0..1.

    Returns `accuracy` (no verdict is a wrong one), `false_yes` (share of the wrong answers that
    were called right), `false_no` (of the right answers, called wrong), `yes_rate` (of all) and
    `unparsed`. An error rate is left out where there is no answer of its kind.
    """
    pairs = list(zip(verdicts, labels, strict=True))
    stats = {
        "accuracy": fmean(verdict is label for verdict, label in pairs),
        "yes_rate": fmean(verdict is True for verdict, _ in pairs),
        "unparsed": fmean(verdict is None for verdict, _ in pairs),
    }
    for name, label in (("false_yes", False), ("false_no", True)):
        of_kind = [verdict for verdict, true in pairs if true is label]
        if of_kind:
            stats[name] = fmean(verdict is not label and verdict is not None for verdict in of_kind)
    return stats


class VerificationReward:
    """1.0 where the verdict equals the column `correct`, else 0.0; no verdict earns 0.0.

    Not None, which would spare a policy that gives no verdict. None is for rows whose `correct` is
    None: they are no verification items. TRL's `log_metric` gets
    `verdict_stats` of each call but the accuracy, which is the reward's mean.

    Args:
        pass_rate_factor: multiply by min(pass rate, 0.5), as the paper's code does. The pass rate
            is the share of right answers to the query, the column `pass_rate`. Within a group it is
            a constant, so that advantages divided by the std do not change.
    """

    __name__ = "verification_reward"

    def __init__(self, *, pass_rate_factor: bool = False):
        self.pass_rate_factor = pass_rate_factor

    def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]],
        *,
        correct: list[bool | None],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """Return a reward for each of the N completions, strings or lists of messages.

        Raises ValueError where `correct` or `pass_rate` has another length, or the latter is asked
        for and missing.
        """
        rates = columns.get("pass_rate", []) if self.pass_rate_factor else [1.0] * len(correct)
        for name, column in (("correct", correct), ("pass_rate", rates)):
            if len(column) != len(completions):
                raise ValueError(
                    f"verification_reward got {len(column)} values of the column {name!r} for "
                    f"{len(completions)} completions: give every verification item one."
                )
        labels = [None if label is None else bool(label) for label in correct]
        verdicts = [parse_verdict(completion_text(completion)) for completion in completions]
        graded = [pair for pair in zip(verdicts, labels, strict=True) if pair[1] is not None]
        if log_metric is not None and graded:
            for name, value in verdict_stats(*zip(*graded, strict=True)).items():
                if name != "accuracy":
                    log_metric(name, value)
        return [
            None
            if label is None
            else (min(rate, PASS_RATE_CAP) if self.pass_rate_factor else 1.0) * (verdict is label)
            for verdict, label, rate in zip(verdicts, labels, rates, strict=True)
        ]
