"""A judge's replies as rewards under TRL's protocol, each paid for once and kept on disk."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_kit.paths import make_output_dir
from grpo_kit.rewards.judge import texts
from grpo_kit.rewards.judge.judges import Failure, FailureWindow, Reply, commonest_reason
from grpo_kit.rewards.judge.texts import parse_judgement
from grpo_kit.rewards.rules import accuracy_reward, column, completion_text, question_text

HOPELESS = 8  # hopeless failures before the first judgement that end a run at once
FAILURE_WINDOW = 64  # judgements; the run ends when more than half of so many fail
LEAST = -0.5  # the reward of a wrong answer under only_correct
CACHE_FILE = "judgements.jsonl"


def cache_key(judge: str, messages: list[dict]) -> str:
    """A digest of judge, prompt version and the whole prompt, so of question and response."""
    return hashlib.sha256(json.dumps([judge, texts.PROMPT_VERSION, messages]).encode()).hexdigest()


class JudgementCache:
    """Replies by key in a file of JSON lines in `folder`, to which several processes may write.

    A kill loses at most the reply being written. RuntimeError where the file cannot be used.
    """

    def __init__(self, folder: str | Path):
        self.path = make_output_dir(folder) / CACHE_FILE
        self.replies: dict[str, str] = {}
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise self._unusable(error) from error
        for line in content.split(b"\n"):
            with suppress(ValueError):  # a line that a kill cut off
                key, reply = json.loads(line)
                self.replies[key] = reply

    def write(self, key: str, reply: str) -> None:
        # One write of whole lines, so that processes do not mix theirs; the line break before
        # keeps this line apart from one that was cut off.
        line = b"\n" + json.dumps([key, reply]).encode() + b"\n"
        try:
            with open(self.path, "ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            raise self._unusable(error) from error
        self.replies[key] = reply

    def _unusable(self, error: OSError) -> RuntimeError:
        remedy = "free it, or choose another cache_dir"
        return RuntimeError(f"cannot use {self.path} ({error.strerror or error}): {remedy}.")


@dataclass(eq=False, repr=False)
class QualityJudgeReward:
    """The quality of each completion as a judge sees it, in [-0.5, 0.5]; None if it was not judged.

    The judge sees the question (the last user message) and the response, equal ones once. TRL 1.16
    counts a None as 0, the middle of this scale. `totals` counts calls, cached, failed,
    `failed/<kind>` and tokens; `log_metric` gets those of each call as `judge/…`.
    """

    judge: Any  # a `LocalJudge`, an `EndpointJudge`, or anything like them (see `judges`)
    _: KW_ONLY
    cache_dir: str | Path | None = None  # runs and processes may share it; None = no cache
    only_correct: bool = False  # the least for a wrong answer (column `answer`), without asking

    __name__ = "quality_judge_reward"

    def __post_init__(self):
        self.window = FailureWindow(FAILURE_WINDOW)
        self.cache = None if self.cache_dir is None else JudgementCache(self.cache_dir)
        self.totals: Counter[str] = Counter()
        self._has_judged = False

    async def __call__(
        self, prompts: list, completions: list, completion_ids: list, *,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Raises RuntimeError when most of a window of judgements failed or there is no judge."""
        correct = [1.0] * len(completions)
        if self.only_correct:
            answer = column(columns, "answer", f"{self.__name__} with only_correct")
            correct = accuracy_reward([], completions, [], answer=answer)
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
        stats = Counter(calls=len(missing), cached=len(judgements), failed=0, tokens=0)
        if missing:
            judgements |= await self._judge(missing, stats)
        self.totals.update(stats)
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
        keys, judgements, failures = list(conversations), {}, []
        async with aclosing(self.judge(list(conversations.values()))) as outcomes:
            async for i, outcome in outcomes:
                if isinstance(outcome, Reply):
                    stats["tokens"] += outcome.prompt_tokens + outcome.completion_tokens
                    try:
                        judgements[keys[i]] = parse_judgement(outcome.text)
                    except ValueError as error:
                        outcome = Failure("unreadable", f"{self.judge.name} wrote: {error}.")
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    # at once, where it is certain that most will have failed
                    hopeless = [failure for failure in failures if failure.hopeless]
                    if not self._has_judged and len(hopeless) >= min(HOPELESS, len(keys)):
                        raise RuntimeError(f"there is no judge: {commonest_reason(hopeless)}")
                    self.window.check(failures, len(keys))
                elif self.cache is not None:
                    self.cache.write(keys[i], outcome.text)
                self._has_judged |= bool(judgements)
        stats.update(f"failed/{failure.kind}" for failure in failures)
        stats["failed"] = len(failures)
        self.window.add(failures, len(keys))
        return judgements
