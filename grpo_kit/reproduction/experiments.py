"""The experiments by name: what each asks, its arms, and what is measured of a trained policy.

diversity   a reward for being unlike the group (notebook 02): as published, and two remedies
judge       a judge's scores (notebook 03): added as published, as the only reward, and cures for
            what the policy then does to its judge
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations
from statistics import fmean

import torch
from anyio.from_thread import start_blocking_portal

from grpo_kit.config import GRPOConfig, Profile
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.reproduction.compare import Arm, Experiment, Rewards
from grpo_kit.reproduction.skill_runs import yes_reward
from grpo_kit.rewards import (
    DiversityReward,
    QualityJudgeReward,
    accuracy_reward,
    format_reward,
    load_embedder,
)
from grpo_kit.tasks import Task
from grpo_kit.tiny.card import reply
from grpo_kit.tiny.problems import solution_style
from grpo_kit.tiny.skills import STEPS_QUESTION


def _answers(
    policy: Policy, task: Task, config: GRPOConfig, prompts: int, samples: int, seed: int
) -> tuple[list[dict], list[str]]:
    """Rows of the first held-out prompts and `samples` sampled answers to each, in groups."""
    rows = list(task.test.select(range(min(prompts, len(task.test)))))
    texts = reply(
        policy,
        [row["prompt"] for row in rows],
        torch.Generator().manual_seed(seed),
        num_generations=samples,
        temperature=config.temperature,
        limit=config.max_completion_length,
        batch=16,
    )
    return [row for row in rows for _ in range(samples)], texts


# --- diversity ------------------------------------------------------------------------------------


def diversity_of(
    policy: Policy,
    task: Task,
    embedder,
    config: GRPOConfig,
    *,
    prompts: int = 32,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """How unlike the sampled answers to one held-out prompt are, the mean over `prompts` prompts.

    Returns `distinct` (share of different texts), `styles` (effective number of solution styles of
    the tiny world, the exponential of the entropy of their shares over all answers) and `distance`
    (mean of 1 - cosine over the pairs of a group's embeddings).
    """
    _, texts = _answers(policy, task, config, prompts, samples, seed)
    groups = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    vectors = torch.as_tensor(embedder.encode(list(dict.fromkeys(texts))))
    vectors = torch.nn.functional.normalize(vectors.float(), dim=1)
    row_of = dict(zip(dict.fromkeys(texts), vectors, strict=True))
    distances = [
        1 - float(row_of[a] @ row_of[b]) for group in groups for a, b in combinations(group, 2)
    ]
    shares = [n / len(texts) for n in Counter(map(solution_style, texts)).values()]
    return {
        "distinct": fmean(len(set(group)) / samples for group in groups),
        "styles": math.exp(-sum(share * math.log(share) for share in shares)),
        "distance": fmean(distances),
    }


def _plain(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    return [accuracy_reward, format_reward]


def _diverse(**options) -> Rewards:
    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        embedder = load_embedder(profile.embedder)
        diversity = DiversityReward(config.num_generations, embedder, **options)
        return [accuracy_reward, format_reward, diversity]

    return rewards


# --- judge ----------------------------------------------------------------------------------------


def quality_of(
    judge,
    policy: Policy,
    task: Task,
    config: GRPOConfig,
    *,
    prompts: int = 32,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """What the judge thinks of sampled answers to held-out prompts, and what they are.

    Returns `judged` (its mean score, 1 to 5, of the answers that it could judge) and `assured` (the
    share of answers in the tiny world's style that claims to be checked).
    """
    rows, texts = _answers(policy, task, config, prompts, samples, seed)
    judged = partial(
        QualityJudgeReward(judge),
        prompts=[row["prompt"] for row in rows],
        completions=texts,
        completion_ids=[[]] * len(texts),
    )
    with start_blocking_portal() as portal:  # a notebook has an event loop running in this thread
        scores = [4 * (reward + 0.5) + 1 for reward in portal.call(judged) if reward is not None]
    if not scores:
        raise RuntimeError(
            f"the judge could judge none of {len(texts)} answers: look at what it replies"
        )
    return {
        "judged": fmean(scores),
        "assured": sum(solution_style(text) == "assured" for text in texts) / len(texts),
    }


def _judged(*weights: float, only_correct: bool = False, **changes) -> Arm:
    """Accuracy, format and judge, in this order; a weight of 0 leaves a reward to be watched."""

    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        quality = QualityJudgeReward(profile.load_judge(policy), only_correct=only_correct)
        return [accuracy_reward, format_reward, quality]

    return Arm(rewards, {"reward_weights": weights, **changes})


def _two_judges(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    quality = QualityJudgeReward(profile.load_judge(policy))
    second = yes_reward(frozen_copy(policy), STEPS_QUESTION)
    return [accuracy_reward, format_reward, quality, second]


EXPERIMENTS = {
    "diversity": Experiment(
        "Does a reward for being unlike the group keep ways of answering alive, and at what cost?",
        {
            "plain": Arm(_plain),
            "diversity": Arm(_diverse()),
            "only correct": Arm(_diverse(only_correct=True)),
            "normalised first": Arm(
                _diverse(), {"multi_objective_aggregation": "normalize_then_sum"}
            ),
        },
        lambda profile, policy, base, task, config: diversity_of(
            policy, task, load_embedder(profile.embedder), config
        ),
    ),
    "judge": Experiment(
        "Does a judge's score help, what does a policy do to a judge that it is left alone with, "
        "and what prevents that?",
        {
            "plain": Arm(_plain),
            "judge added": _judged(1, 1, 1),
            "judge x 8": _judged(1, 1, 8),
            "judge only": _judged(0, 0, 1),
            "only correct": _judged(0, 0, 1, only_correct=True),
            "two judges": Arm(_two_judges, {"reward_weights": (0, 0, 1, 1)}),
            "KL": _judged(0, 0, 1, beta=1.0),
        },
        lambda profile, policy, base, task, config: quality_of(
            profile.load_judge(base), policy, task, config
        ),
        (
            "rewards/quality_judge_reward/mean",
            "rewards/accuracy_reward/mean",
            "eval/pass@1",
            "completions/mean_length",
        ),
    ),
}
