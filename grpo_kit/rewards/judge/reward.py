"""A judge's replies as rewards under TRL's protocol: `QualityJudgeReward`, `OutcomeJudgeReward`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from grpo_kit.rewards.judge.cache import JudgementCache, cache_key
from grpo_kit.rewards.judge.judges import Failure, FailureWindow, Reply, commonest_reason
from grpo_kit.rewards.judge.texts import Judgement, Outcome, outcome_prompt, parse_judgement
from grpo_kit.rewards.rules import completion_text, correctness, question_text

LEAST = -0.5  # the reward of the lowest scores
HOPELESS = 8  # hopeless failures before the first judgement that end a run at once


@dataclass(eq=False, repr=False)
class QualityJudgeReward:
    """The quality of each completion as a judge sees it, in [-0.5, 0.5]; None if it was not judged.

    The judge sees only the question (the last user message) and the response, equal ones once. The
    call is a coroutine: other rewards, and with `rollout_chunks` the sampling of the batch's next
    part, go on meanwhile. A failed judgement is not cached, and not retried here: the endpoint
    judge already retries transient errors. TRL 1.16 counts a None as 0, the middle of this scale.

    `totals` counts calls, cached, failed, `failed/<kind>`, tokens and cost; TRL's `log_metric` gets
    those of each call as `judge/…`. Raises ValueError or RuntimeError for unusable arguments.
    """

    judge: Any  # a `LocalJudge`, an `EndpointJudge`, or anything like them (see `judges`)
    _: KW_ONLY
    cache_dir: str | Path | None = None  # runs and processes may share it; None = no cache
    only_correct: bool = False  # -0.5 for a wrong answer (column `answer`), without asking
    failure_window: int = 64  # see `FailureWindow`
    price: tuple[float, float] | None = None  # (read, written), of a million tokens

    __name__ = "quality_judge_reward"
    judgement_type = Judgement

    def __post_init__(self):
        self.window = FailureWindow(self.failure_window)
        self.cache = None if self.cache_dir is None else JudgementCache(self.cache_dir)
        self.totals: Counter[str] = Counter()
        self._has_judged = False

    async def __call__(
        self, prompts: list, completions: list, completion_ids: list, *,
        log_metric: Callable | None = None, **columns,
    ) -> list[float | None]:  # fmt: skip
        """Return a reward for each of the N completions, strings or lists of messages.

        Raises RuntimeError when most of a window of judgements failed or the first failures show
        that there is no judge; ValueError if `only_correct` finds no column `answer`.
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
        distinct = {key: c for key, c in zip(keys, conversations, strict=True) if c}
        judgements = {}
        for key, reply in self.cache.read(distinct).items() if self.cache else ():
            with suppress(ValueError):  # an older parser accepted it: judge anew
                judgements[key] = parse_judgement(reply, self.judgement_type)
        missing = {key: c for key, c in distinct.items() if key not in judgements}
        stats = Counter(calls=len(missing), cached=len(judgements), failed=0, tokens=0)
        if missing:
            judgements |= await self._judge(missing, stats)
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

    async def _judge(
        self, conversations: dict[str, list[dict]], stats: Counter
    ) -> dict[str, Judgement | Outcome]:
        """Return the judgements that succeed, by key, and count in `stats`."""
        keys, judgements = list(conversations), {}
        failures: list[Failure] = []
        async with aclosing(self.judge(list(conversations.values()))) as outcomes:
            async for i, outcome in outcomes:
                if isinstance(outcome, Reply):
                    self._count_tokens(outcome, stats)
                    try:
                        judgements[keys[i]] = parse_judgement(outcome.text, self.judgement_type)
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

    def _count_tokens(self, reply: Reply, stats: Counter) -> None:
        read, written = reply.prompt_tokens, reply.completion_tokens
        stats["tokens"] += read + written
        if self.price is not None:
            stats["cost"] += (read * self.price[0] + written * self.price[1]) / 1e6


class OutcomeJudgeReward(QualityJudgeReward):
    """1 where a judge finds that the completion gives the reference answer, else 0; None unjudged.

    For outcomes that no rule can compare, as in AgentFlow (arXiv 2510.05592, section 3.2). The
    judge must follow instructions, which the tiny base does not. Options are those of
    `QualityJudgeReward` without `only_correct`. Raises ValueError without the column `answer`.
    """

    __name__ = "outcome_judge_reward"
    judgement_type = Outcome

    def __post_init__(self):
        if self.only_correct:
            raise ValueError("only_correct is what this reward asks the judge about; leave it out.")
        super().__post_init__()

    def _conversation(self, question: str, response: str, columns: dict, i: int) -> list[dict]:
        if "answer" not in columns:
            raise ValueError(f"{self.__name__} compares with the column `answer`: add it.")
        return outcome_prompt(question, str(columns["answer"][i]), response)
