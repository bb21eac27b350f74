"""A judge's replies as rewards under TRL's protocol: `QualityJudgeReward`, `OutcomeJudgeReward`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_kit.rewards.accuracy import correctness
from grpo_kit.rewards.judge.cache import JudgementCache, cache_key
from grpo_kit.rewards.judge.judges import Failure, FailureWindow, Reply, commonest_reason
from grpo_kit.rewards.judge.texts import Judgement, Outcome, outcome_prompt, parse_judgement
from grpo_kit.rewards.text import completion_text, question_text

LEAST = -0.5  # the reward of the lowest scores
HOPELESS = 8  # failures of that sort, before anything has been judged, that end a run at once


class QualityJudgeReward:
    """The quality of each completion as a judge sees it, in [-0.5, 0.5]; None if it was not judged.

    To be added to `accuracy_reward` and `format_reward`: the judge is frozen and gives the quality
    term only. Question (the last user message) and response are all that it sees. Equal ones of a
    batch are judged once.

    A coroutine: while judgements are awaited, other rewards go on, and with `rollout_chunks` so
    does the sampling of the batch's next part. (The next batch does not: on-policy, it waits for
    the update that these rewards make.) A failed judgement is
    None, not retried (what is worth it the endpoint judge has retried) and not cached. In the kit's
    loop a completion with a None leaves its group; TRL 1.16 adds up what other rewards gave it, so
    that beside others a None counts as 0 there, the middle of this scale.

    Args:
        judge: a `LocalJudge`, an `EndpointJudge`, or anything like them (see `judges`).
        cache_dir: folder of the cache on disk, which runs and processes may share; None = no cache.
        only_correct: give an answer that `accuracy_reward` finds wrong -0.5, the least, without
            asking the judge, and None where it says None. Needs the column `answer`.
        failure_window: judgements over which failures are counted, rounded up to whole batches.
        price: (read, written), of a million tokens in any currency, for an estimate of the cost.

    Attributes:
        totals: a `Counter` over all calls: calls, cached, failed, `failed/<kind>`, tokens read and
            written, cost. TRL's `log_metric` gets the same of each call, as `judge/…`; trainers log
            the mean over a step's calls, of which there is one a part of the batch.

    Raises ValueError for a failure_window below 1, RuntimeError for an unusable cache_dir.
    """

    __name__ = "quality_judge_reward"

    def __init__(
        self,
        judge: Any,
        *,
        cache_dir: str | Path | None = None,
        only_correct: bool = False,
        failure_window: int = 64,
        price: tuple[float, float] | None = None,
    ):
        self.judge = judge
        self.cache = None if cache_dir is None else JudgementCache(cache_dir)
        self.only_correct = only_correct
        self.window = FailureWindow(failure_window)
        self.price = price
        self.totals: Counter[str] = Counter()
        self._has_judged = False

    async def __call__(
        self,
        prompts: list,
        completions: list,
        completion_ids: list[list[int]],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """Return a reward for each of the N completions, strings or lists of messages.

        Raises RuntimeError, with the commonest reason, when more than half of a window of
        judgements failed, or when the first ones show that there is no judge to be had; ValueError
        where `only_correct` finds no column `answer`.
        """
        correct: list[float | None] = [1.0] * len(completions)
        if self.only_correct:
            correct = correctness(self.__name__, completions, columns)
        conversations = [
            self._conversation(question_text(prompt), completion_text(completion), columns, i)
            if correct[i]
            else None
            for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        keys = [c and cache_key(self.judge.name, c) for c in conversations]
        different = {key: c for key, c in zip(keys, conversations, strict=True) if c}
        judgements = self._cached(different)
        missing = [key for key in different if key not in judgements]
        stats = Counter(calls=len(missing), cached=len(judgements), failed=0, tokens=0)
        if missing:
            judgements |= await self._judge(missing, different, stats)
        self.totals.update(stats)
        if log_metric is not None:
            for name, value in stats.items():
                log_metric(f"judge/{name}", value)
            if judgements:
                log_metric("judge/mean_score", fmean(j.mean for j in judgements.values()))
        return [
            LEAST if right == 0 else judgements[key].reward if key in judgements else None
            for key, right in zip(keys, correct, strict=True)
        ]

    def _conversation(self, question: str, response: str, columns: dict, i: int) -> list[dict]:
        return self.judge.prompt(question, response)

    def _parsed(self, reply: str) -> Judgement | Outcome:
        return parse_judgement(reply)

    def _cached(self, keys: dict) -> dict[str, Judgement | Outcome]:
        judgements = {}
        for key, reply in self.cache.read(keys).items() if self.cache is not None else ():
            with suppress(ValueError):  # kept by an older parser: to be judged anew
                judgements[key] = self._parsed(reply)
        return judgements

    async def _judge(
        self, keys: list[str], conversations: dict[str, list[dict]], stats: Counter
    ) -> dict[str, Judgement | Outcome]:
        """Ask for the judgements `keys`; count in `stats`; return those that were made, by key."""
        judgements = {}
        failures: list[Failure] = []
        async with aclosing(self.judge([conversations[key] for key in keys])) as outcomes:
            async for i, outcome in outcomes:
                if isinstance(outcome, Reply):
                    self._count_tokens(outcome, stats)
                    try:
                        judgements[keys[i]] = self._parsed(outcome.text)
                    except ValueError as error:
                        outcome = Failure("unreadable", f"{self.judge.name} wrote: {error}.")
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    self._stop_if_most_fail(failures, len(keys))
                elif self.cache is not None:
                    self.cache.write(keys[i], outcome.text)
                self._has_judged |= bool(judgements)
        if failures:
            stats["failed"] = len(failures)
            stats.update(f"failed/{failure.kind}" for failure in failures)
        self.window.add(failures, len(keys))
        return judgements

    def _count_tokens(self, reply: Reply, stats: Counter) -> None:
        stats["tokens"] += reply.prompt_tokens + reply.completion_tokens
        if self.price is not None:
            read, written = self.price
            cost = reply.prompt_tokens * read + reply.completion_tokens * written
            stats["cost"] += cost / 1e6

    def _stop_if_most_fail(self, failures: list[Failure], asked: int) -> None:
        """Raise as soon as it is certain that most of the window will have failed."""
        hopeless = [failure for failure in failures if failure.hopeless]
        if not self._has_judged and len(hopeless) >= min(HOPELESS, asked):
            raise RuntimeError(f"there is no judge: {commonest_reason(hopeless)}")
        self.window.check(failures, asked)


class OutcomeJudgeReward(QualityJudgeReward):
    """1 where a judge finds that the completion gives the reference answer, else 0; None unjudged.

    An LLM as reward model, which AgentFlow (arXiv 2510.05592, section 3.2) takes for outcomes that
    no rule can compare. Needs the column `answer`. Arguments, cache and failures are those of
    `QualityJudgeReward`, but for `only_correct`; the judge must follow instructions, which the tiny
    base does not. Raises ValueError where there is no column `answer`.
    """

    __name__ = "outcome_judge_reward"

    def __init__(self, judge: Any, **options):
        if "only_correct" in options:
            raise ValueError("only_correct is what this reward asks the judge about; leave it out.")
        super().__init__(judge, **options)

    def _conversation(self, question: str, response: str, columns: dict, i: int) -> list[dict]:
        if "answer" not in columns:
            raise ValueError(
                f"{self.__name__} compares with the column `answer`, which the data lacks: add one."
            )
        return outcome_prompt(question, str(columns["answer"][i]), response)

    def _parsed(self, reply: str) -> Outcome:
        return parse_judgement(reply, Outcome)
