"""The LLM-judge reward: another model scores each completion's quality, 1 to 5 on four criteria.

texts    what a judge is asked, with the response fenced in, and how its reply is read
judges   who judges: a local model, or any OpenAI-compatible endpoint
cache    judgements on disk, shared by runs and processes
reward   `QualityJudgeReward`, which puts them together under TRL's protocol; `OutcomeJudgeReward`,
         which asks whether an answer is the reference's

Sources: Trinity-RFT's report (arXiv 2505.17826, Figs 10-11), where Qwen3-32B scores quality and the
score, normalised to [-0.5, 0.5], is added to the rule-based rewards; the four criteria are those of
Data-Juicer's LLM quality scorer. Our reading: the report does not print the normalisation, and as
groups are centred only its slope matters; (mean - 1) / 4 - 0.5 uses the whole range. Data-Juicer
gives quality 0 where it cannot read a judgement; here that is None, and the completion is left out
of its group.
"""

from grpo_kit.rewards.judge.judges import EndpointJudge, Failure, LocalJudge, Reply
from grpo_kit.rewards.judge.reward import OutcomeJudgeReward, QualityJudgeReward
from grpo_kit.rewards.judge.texts import Judgement, parse_judgement, quality_prompt, tiny_prompt

__all__ = [
    "EndpointJudge",
    "Failure",
    "Judgement",
    "LocalJudge",
    "OutcomeJudgeReward",
    "QualityJudgeReward",
    "Reply",
    "parse_judgement",
    "quality_prompt",
    "tiny_prompt",
]
