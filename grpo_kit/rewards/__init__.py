"""Rewards: callables under TRL's protocol, `f(prompts, completions, completion_ids, **columns)`.

Each is called by keyword once for a batch of complete groups, with every dataset column by name,
and returns one `float` a completion, or `None` where a completion could not be scored. They know
no trainer, so the same objects run here and under TRL's `GRPOTrainer`. A reward is named by its
`__name__`, else by its class.
"""

from grpo_kit.rewards.diversity import DiversityReward, group_similarities, linear_weight
from grpo_kit.rewards.embedder import load_embedder
from grpo_kit.rewards.judge import EndpointJudge, LocalJudge, OutcomeJudgeReward, QualityJudgeReward
from grpo_kit.rewards.maths import maths_reward
from grpo_kit.rewards.meta_evaluation import MetaEvaluationReward, read_yes, yes_no_tokens
from grpo_kit.rewards.rules import (
    OverlongPenalty,
    VerificationReward,
    accuracy_reward,
    completion_text,
    format_reward,
    parse_verdict,
    question_text,
    verdict_stats,
)  # fmt: skip
from grpo_kit.tasks.answers import extract_answer, is_correct, parse_number

__all__ = [
    "DiversityReward", "EndpointJudge", "LocalJudge", "MetaEvaluationReward", "OutcomeJudgeReward",
    "OverlongPenalty", "QualityJudgeReward", "VerificationReward", "accuracy_reward",
    "completion_text", "extract_answer", "format_reward", "group_similarities", "is_correct",
    "linear_weight", "load_embedder", "maths_reward", "parse_number", "parse_verdict",
    "question_text", "read_yes", "verdict_stats", "yes_no_tokens",
]  # fmt: skip
