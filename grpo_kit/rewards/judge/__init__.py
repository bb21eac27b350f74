"""The LLM-judge reward: another model scores each completion's quality, 1 to 5 on four criteria.

Sources: Trinity-RFT's report (arXiv 2505.17826, Figs 10-11); Data-Juicer's LLM quality scorer for
the criteria. Our reading: the score is normalised to [-0.5, 0.5] by (mean - 1) / 4 - 0.5.
"""

from grpo_kit.rewards.judge.judges import EndpointJudge, Failure, LocalJudge
from grpo_kit.rewards.judge.reward import QualityJudgeReward
from grpo_kit.rewards.judge.texts import parse_judgement, quality_prompt, tiny_prompt
