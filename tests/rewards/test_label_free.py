"""Rewards without labels: the group's vote and certainty, beside computations by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_kit.generation import Rollouts, completion_logps
from grpo_kit.rewards import CertaintyReward, MajorityReward, random_reward


def said(*answers):
    return [f"<think>so</think><answer>{answer}</answer>" for answer in answers]


def vote(completions, size):
    n = len(completions)
    return MajorityReward(size)([None] * n, completions, [None] * n)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["3", "5", "3", "7"], [1, 0, 1, 0]),
        (["1,080", "$1080.00", "1080 coins", "12"], [1, 1, 1, 0]),  # one number, spelt differently
        (["5", "3", "3", "5"], [1, 0, 0, 1]),  # a tie goes to the first
        (["", "3", "", ""], [0, 1, 0, 0]),  # nothing said is no vote
        (["A lot", "a  LOT", "many", "5"], [1, 1, 0, 0]),
    ],
)
def test_the_answer_of_most_is_paid(answers, expected):
    assert vote(said(*answers), 4) == expected


def test_each_group_votes_for_itself():
    assert vote(said("1", "1", "2", "3", "2", "2"), 3) == [1, 1, 0, 0, 1, 1]
    assert vote(["no tags", "none"], 2) == [0, 0]
    with pytest.raises(ValueError, match="3 completions make no groups of 2"):
        vote(said("1", "1", "1"), 2)


def test_a_coin_is_fair_blind_to_the_answer_and_the_same_when_a_run_goes_on():
    def toss(step, prompts, completions):
        state = SimpleNamespace(global_step=step)
        return random_reward(prompts, completions, [], trainer_state=state)

    prompts = [[{"role": "user", "content": str(i)}] for i in range(500)]
    first = toss(0, prompts, ["a"] * 500)
    assert first == toss(0, prompts, ["b"] * 500) and set(first) == {0.0, 1.0}
    assert 200 < sum(first) < 300
    others = [toss(1, prompts, ["a"] * 500), toss(0, prompts[::-1], ["a"] * 500)]
    for other in others:  # another step, other prompts: other coins
        assert 200 < sum(a == b for a, b in zip(first, other, strict=True)) < 300
    assert len(set(random_reward(prompts[:1] * 64, ["same"] * 64, []))) == 2


PROMPTS = [[{"role": "user", "content": text}] for text in ("12 coins", "Mia has 3 apples", "Mia")]


def test_certainty_is_what_the_distributions_say_whatever_the_padding(policy):
    g = torch.Generator().manual_seed(0)
    vocabulary = len(policy.tokenizer)
    ids = [torch.randint(10, vocabulary, (n,), generator=g).tolist() for n in (7, 1, 4)]
    rewards = {
        measure: [
            CertaintyReward(policy, measure, batch_size=size)(PROMPTS, [""] * 3, ids)
            for size in (1, 3)
        ]
        for measure in ("self-certainty", "likelihood")
    }
    for alone, together in rewards.values():
        assert alone == pytest.approx(together, rel=1e-4)

    rollouts = Rollouts.given(policy.encode(PROMPTS), ids, policy)
    logps, _ = completion_logps(policy.model, rollouts, pad_token_id=policy.pad_token_id)
    likelihood = logps.sum(1) / rollouts.lengths
    assert rewards["likelihood"][0] == pytest.approx(likelihood.tolist(), rel=1e-4)

    rows = zip(policy.encode(PROMPTS), ids, rewards["self-certainty"][0], strict=True)
    for prompt, completion, reward in rows:
        logits = policy.model(torch.tensor([[*prompt, *completion]])).logits
        logits = logits[0, len(prompt) - 1 : -1]
        p = torch.distributions.Categorical(logits=logits)
        uniform = torch.distributions.Categorical(logits=torch.zeros_like(logits))
        expected = torch.distributions.kl_divergence(uniform, p).mean().item()
        assert reward == pytest.approx(expected, rel=1e-4)


def test_what_cannot_be_measured_is_not_scored(policy):
    reward = CertaintyReward(policy)
    long = [11] * (policy.context_length + 1)
    values = reward(PROMPTS, [""] * 3, [[], long, [12]])
    assert values[:2] == [None, None] and math.isfinite(values[2])
