"""A judge's replies as rewards under TRL's protocol, each paid for once and kept on disk."""

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_kit.paths import make_output_dir
from grpo_kit.rewards.judge import texts
from grpo_kit.rewards.judge.judges import Failure
from grpo_kit.rewards.judge.texts import parse_judgement
from grpo_kit.rewards.rules import accuracy_reward, column, completion_text, question_text
from grpo_kit.visible import visible

FAILURE_WINDOW = 64  # judgements; the run ends when more than half of so many fail
LEAST = -0.5  # the reward of a wrong answer under only_correct
CACHE_FILE = "judgements.jsonl"

logger = logging.getLogger(__name__)


def cache_key(judge: str, messages: list[dict]) -> str:
    """A digest of judge, prompt version and the whole prompt, so of question and response."""
    return hashlib.sha256(json.dumps([judge, texts.PROMPT_VERSION, messages]).encode()).hexdigest()


class JudgementCache:
    """Replies by key in a file of JSON lines in `folder`, to which several processes may write.

    A line that a kill cut off is left out.
    """

    def __init__(self, folder: str | Path):
        self.path = make_output_dir(folder) / CACHE_FILE
        self.replies: dict[str, str] = {}
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.split(b"\n"):
            with suppress(ValueError):
                key, reply = json.loads(line)
                self.replies[key] = reply

    def write(self, key: str, reply: str) -> None:
        # One write of whole lines, so that processes do not mix theirs; the line break before
        # keeps this line apart from one that was cut off.
        line = b"\n" + json.dumps([key, reply]).encode() + b"\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line)
        self.replies[key] = reply


@dataclass(eq=False, repr=False)
class QualityJudgeReward:
    """The quality of each completion as a judge sees it, in [-0.5, 0.5]; None if it was not judged.

    The judge sees the question (the last user message) and the response, equal ones once. TRL 1.16
    counts a None as 0, the middle of this scale. `log_metric` gets, as `judge/…`, the counts calls,
    cached, failed and `failed/<kind>`, and the mean score.
    """

    judge: Any  # a `LocalJudge`, an `EndpointJudge`, or anything like them (see `judges`)
    _: KW_ONLY
    cache_dir: str | Path | None = None  # runs and processes may share it; None = no cache
    only_correct: bool = False  # the least for a wrong answer, without asking

    __name__ = "quality_judge_reward"

    def __post_init__(self):
        self._failed: deque[bool] = deque(maxlen=FAILURE_WINDOW)  # of the latest judgements
        self.cache = None if self.cache_dir is None else JudgementCache(self.cache_dir)

    async def __call__(
        self, prompts: list, completions: list, completion_ids: list, *,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Raises RuntimeError when most of a window of judgements failed."""
        correct = [1.0] * len(completions)
        if self.only_correct:
            answers = column(columns, "answer", "quality_judge_reward with only_correct")
            correct = accuracy_reward(prompts, completions, completion_ids, answer=answers)
        keys, distinct, judgements = [], {}, {}
        pairs = zip(map(question_text, prompts), map(completion_text, completions), strict=True)
        for (question, response), right in zip(pairs, correct, strict=True):
            conversation = self.judge.prompt(question, response)
            keys.append(cache_key(self.judge.name, conversation) if right else None)
            if right:
                distinct[keys[-1]] = conversation
        for key in distinct:
            if self.cache and key in self.cache.replies:
                with suppress(ValueError):  # an older parser accepted it: judge anew
                    judgements[key] = parse_judgement(self.cache.replies[key])
        missing = {key: c for key, c in distinct.items() if key not in judgements}
        stats = Counter(calls=len(missing), cached=len(judgements), failed=0)
        if missing:
            judgements |= await self._judge(missing, stats)
        if judgements:
            stats["mean_score"] = fmean(judgement.mean for judgement in judgements.values())
        for name, value in stats.items() if log_metric else ():
            log_metric(f"judge/{name}", value)
        return [
            LEAST if right == 0 else judgements[key].reward if key in judgements else None
            for key, right in zip(keys, correct, strict=True)
        ]

    async def _judge(self, conversations: dict[str, list[dict]], stats: Counter) -> dict:
        """The judgements that succeed, by key; counts in `stats`."""
        judgements, failures = {}, []
        outcomes = await self.judge(list(conversations.values()))
        for key, outcome in zip(conversations, outcomes, strict=True):
            if isinstance(outcome, str):
                try:
                    judgements[key] = parse_judgement(outcome)
                    if self.cache is not None:
                        self.cache.write(key, outcome)
                except ValueError as error:
                    outcome = Failure("unreadable", f"{self.judge.name} wrote: {error}.")
            if key not in judgements:
                failures.append(outcome)
            self._failed.append(key not in judgements)
        stats.update(f"failed/{failure.kind}" for failure in failures)
        stats["failed"] = len(failures)
        if failures:
            self._warn_or_end(failures)
        return judgements

    def _warn_or_end(self, failures: Sequence[Failure]) -> None:
        """Warn of a batch's failures; RuntimeError where most of the latest judgements failed."""
        ((reason, _),) = Counter(failure.reason for failure in failures).most_common(1)
        problem = f"{len(failures)} judgements failed"
        logger.warning("%s: %s", problem, visible(reason, newline=" "))
        failed = sum(self._failed)
        if 2 * failed > FAILURE_WINDOW:
            latest = len(self._failed)
            problem = f"more than half of the last {latest} judgements failed ({failed})"
            remedy = "None was scored 0; correct that and resume the run."
            raise RuntimeError(f"{problem}: {reason} {remedy}")
