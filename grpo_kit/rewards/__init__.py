"""Rewards: callables under TRL's protocol (see `scoring`), which know no trainer."""

from grpo_kit.rewards.diversity import (
    DiversityReward,
    group_similarities,
    linear_weight,
    load_embedder,
)
from grpo_kit.rewards.judge import EndpointJudge, LocalJudge, OutcomeJudgeReward, QualityJudgeReward
from grpo_kit.rewards.meta_evaluation import MetaEvaluationReward, read_yes, yes_no_tokens
from grpo_kit.rewards.rules import (
    VerificationReward,
    accuracy_reward,
    completion_text,
    format_reward,
    maths_reward,
    parse_verdict,
    question_text,
    verdict_stats,
)  # fmt: skip
from grpo_kit.tasks.answers import extract_answer, is_correct, parse_number

__all__ = [
    "DiversityReward", "EndpointJudge", "LocalJudge", "MetaEvaluationReward", "OutcomeJudgeReward",
    "QualityJudgeReward", "VerificationReward", "accuracy_reward", "completion_text",
    "extract_answer", "format_reward", "group_similarities", "is_correct", "linear_weight",
    "load_embedder", "maths_reward", "parse_number", "parse_verdict", "question_text", "read_yes",
    "verdict_stats", "yes_no_tokens",
]  # fmt: skip
