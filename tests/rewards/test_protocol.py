"""All rewards under TRL's protocol: called as TRL calls them, row by row, in either form."""

from __future__ import annotations

import inspect
import random

import pytest

from grpo_kit.rewards import OverlongPenalty, accuracy_reward, format_reward

REWARDS = [accuracy_reward, format_reward, OverlongPenalty(8, 4)]

# One row a completion. No two neighbours earn the same, so that a shifted row shows.
ROWS = [
    {"answer": "15", "text": "<think>a</think><answer>15</answer>", "length": 3},
    {"answer": "16", "text": "<answer>15</answer>", "length": 5},
    {"answer": None, "text": "<think>b</think><answer>15 coins</answer>", "length": 6},
    {"answer": "1/2", "text": "<think>c</think><answer>0.50</answer> ", "length": 7},
    {"answer": "Yes", "text": "no", "length": 9},
    {"answer": "Yes", "text": "<think>d</think><answer>yes</answer>", "length": 8},
]
EXPECTED = {
    "accuracy_reward": [1.0, 0.0, None, 1.0, 0.0, 1.0],
    "format_reward": [0.1, -0.1, 0.1, 0.1, -0.1, 0.1],
    "overlong_penalty": [0.0, -0.25, -0.5, -0.75, -1.0, -1.0],
}


def call_like_trl(reward, rows, conversational):
    """Call as `GRPOTrainer._calculate_rewards` of TRL 1.16 does, with all that it passes along."""
    prompts = [[{"role": "user", "content": "?"}] if conversational else "?" for _ in rows]
    completions = [
        [{"role": "assistant", "content": row["text"]}] if conversational else row["text"]
        for row in rows
    ]
    return reward(
        prompts=prompts,
        completions=completions,
        completion_ids=[[1] * row["length"] for row in rows],
        answer=[row["answer"] for row in rows],
        question=["?"] * len(rows),
        trainer_state=object(),
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
    )


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.__name__)
@pytest.mark.parametrize("conversational", [False, True])
class TestEveryReward:
    def test_scores_each_row_by_that_row(self, reward, conversational):
        assert call_like_trl(reward, ROWS, conversational) == EXPECTED[reward.__name__]

    def test_rows_in_another_order_keep_their_rewards(self, reward, conversational):
        order = list(range(len(ROWS)))
        for seed in range(20):
            random.Random(seed).shuffle(order)
            got = call_like_trl(reward, [ROWS[i] for i in order], conversational)
            assert got == [EXPECTED[reward.__name__][i] for i in order]

    def test_a_batch_scores_like_its_rows_one_by_one(self, reward, conversational):
        one_by_one = [call_like_trl(reward, [row], conversational)[0] for row in ROWS]
        assert one_by_one == call_like_trl(reward, ROWS, conversational)

    def test_empty_batch_gives_no_rewards(self, reward, conversational):
        assert call_like_trl(reward, [], conversational) == []


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.__name__)
def test_signature_is_the_protocol(reward):
    """The trainer names a missing column by reading what a reward requires."""
    parameters = inspect.signature(reward).parameters
    required = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert list(parameters)[:3] == ["prompts", "completions", "completion_ids"]
    assert required == (["answer"] if reward is accuracy_reward else [])
    assert any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_a_missing_answer_column_is_an_error_that_names_it():
    with pytest.raises(TypeError, match="answer"):
        accuracy_reward(prompts=["?"], completions=["x"], completion_ids=[[1]])
