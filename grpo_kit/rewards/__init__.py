"""Rewards: callables under TRL's protocol (see `scoring`), which know no trainer."""

from grpo_kit.rewards.diversity import (
    DiversityReward,
    group_similarities,
    linear_weight,
    load_embedder,
)
from grpo_kit.rewards.judge import EndpointJudge, LocalJudge, QualityJudgeReward
from grpo_kit.rewards.label_free import CertaintyReward, MajorityReward, random_reward
from grpo_kit.rewards.meta_evaluation import MetaEvaluationReward, read_yes, yes_no_tokens
from grpo_kit.rewards.rules import (
    VerificationReward,
    accuracy_reward,
    completion_text,
    format_reward,
    lenient_accuracy_reward,
    parse_verdict,
    question_text,
)  # fmt: skip
from grpo_kit.tasks.answers import extract_answer, is_correct, parse_number
