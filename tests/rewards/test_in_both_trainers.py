"""The same completions score the same in TRL's `GRPOTrainer` and in our loop, tags and all.

TRL decodes without special tokens: were `<answer>` one of them, every reward would be 0 there.
"""

import math

import pytest
import torch
from test_judge import FakeJudge, response_in, scores
from torch.nn.utils.rnn import pad_sequence
from toy import Letters

from grpo_kit.models import frozen_copy
from grpo_kit.rewards import (
    DiversityReward,
    QualityJudgeReward,
    VerificationReward,
    accuracy_reward,
    format_reward,
)
from grpo_kit.rewards import MetaEvaluationReward as Meta
from grpo_kit.rewards.judge import Failure, tiny_prompt
from grpo_kit.rewards.scoring import score_texts

QUESTION = [{"role": "user", "content": "Mia has 12 coins. Mia finds 7. How many coins?"}]
EXAMPLE = {"prompt": QUESTION, "answer": "19", "correct": True}
TEXTS = [
    "<think>12+7=19.</think><answer>19</answer>",
    "<think>Maybe 15.</think><answer>15</answer>",
    "12+7=19. The answer is 19.",
    "<answer>19</answer>",
]


def scores_in_trl(policy, folder, rewards, texts):
    """What the trainer computes in a step from `texts`, which the model seems to generate."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    tables = []

    class Recording(trl.GRPOTrainer):
        def _calculate_rewards(self, *arguments, **keywords):
            tables.append(super()._calculate_rewards(*arguments, **keywords))
            return tables[-1]

    args = trl.GRPOConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_steps=1, max_completion_length=64,
        per_device_train_batch_size=len(texts), num_generations=len(texts),
    )  # fmt: skip
    data = Dataset.from_list([EXAMPLE] * 2)
    trainer = Recording(policy.model, rewards, args, data, processing_class=policy.tokenizer)
    rows = [torch.tensor(row) for row in ids_of(policy, texts)]
    padded = pad_sequence(rows, batch_first=True, padding_value=policy.pad_token_id)

    trainer.model.generate = lambda input_ids, **options: torch.cat([input_ids, padded], dim=1)
    trainer.train()
    return tables


def ids_of(policy, texts):
    return policy.tokenizer([text + policy.tokenizer.eos_token for text in texts])["input_ids"]


def scores_in_ours(policy, rewards, texts):
    ids = ids_of(policy, texts)
    return score_texts(policy.decode(ids), ids, [EXAMPLE] * len(texts), rewards)


def test_the_same_completions_score_the_same(policy, tmp_path):
    """The evaluator a frozen copy, or the very model that TRL trains; the truth shown on half. The
    judge a coroutine, which TRL has to see, and silent about the second completion."""
    texts = [*TEXTS, "<think>19 agrees.</think><answer>Yes</answer>", "<answer>No</answer>"]

    def judged(message):
        i = texts.index(response_in(message))
        return Failure("timeout", "Wait.") if i == 1 else scores(*[min(i, 3) + 1] * 4)

    rewards = [
        accuracy_reward, format_reward, VerificationReward(),
        QualityJudgeReward(FakeJudge(judged, prompt=tiny_prompt)),
        Meta(frozen_copy(policy), truth_fraction=0.5),
        Meta(policy, ["Is it right?", "Sure?"], transform="p"),
        DiversityReward(6, Letters("12579<aeht", 0.1)),
    ]  # fmt: skip
    ours = scores_in_ours(policy, rewards, texts)
    by_hand = [
        [1, 0, 0, 1, 0, 0], [0.1, 0.1, -0.1, -0.1, 0.1, -0.1], [0, 0, 0, 0, 1, 0],
        [-0.5, math.nan, 0, 0.25, 0.25, 0.25],
    ]  # fmt: skip
    torch.testing.assert_close(ours[:, :4].T, torch.tensor(by_hand), equal_nan=True)
    assert ours[:, 4:].std(0).min() > 0
    (theirs,) = scores_in_trl(policy, tmp_path, rewards, texts)
    torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-4, atol=1e-5, equal_nan=True)
