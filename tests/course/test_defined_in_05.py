"""What notebook 05 defines is what the package does; its surrogate beside those of 01."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in
from torch.testing import assert_close

from grpo_kit import objective, rewards
from grpo_kit.rewards import read_yes
from grpo_kit.rewards.label_free import MEASURES


@given(st.integers(0, 10_000), st.sampled_from([2, 4]))
def test_reward_and_advantages_of_05_equal_the_package(seed, size):
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand((8, 2), generator=generator).round(decimals=1)
    paid = defined_in("05").meta_reward(p, [0.5, 2.0])
    by_hand = [0.5 * math.log(max(x, 1e-4)) + 2 * math.log(max(y, 1e-4)) for x, y in p.tolist()]
    assert paid.tolist() == pytest.approx(by_hand, rel=1e-4)
    for scale, mine in {"none": "centred", "group": "standardised"}.items():
        advantages = getattr(defined_in("05"), mine)(paid, size)
        packaged = objective.group_advantages(paid, size, scale_rewards=scale)
        assert_close(advantages, packaged, atol=1e-3, rtol=1e-3)


def test_the_probability_of_05_is_the_one_that_the_package_reads(policy):
    own = defined_in("05")
    words = [own.spellings(policy.tokenizer, word) for word in ("Yes", "No")]
    assert words == [*map(list, rewards.yes_no_tokens(policy.tokenizer))]
    asked = ("Is 12 + 7 = 19 correct?", "Mia has 12 coins. Is the answer correct?", "Well?")
    conversations = [[{"role": "user", "content": text}] for text in asked]
    packaged = [reading for (reading,) in read_yes(policy, [[one] for one in conversations])]
    for conversation, reading in zip(conversations, packaged, strict=True):
        assert own.probability(policy, conversation) == pytest.approx(tuple(reading), rel=1e-4)
    in_one_pass = torch.stack(own.probabilities(policy, conversations), dim=1)  # padded
    assert_close(in_one_pass, torch.tensor(packaged), rtol=1e-4, atol=1e-5)


def test_the_reward_of_05_is_the_package_s_for_one_question_and_for_several(policy):
    prompts = [[{"role": "user", "content": f"What is {i} + 7?"}] for i in range(5)]
    completions = [
        [{"role": "assistant", "content": f"<answer>{i + 7}</answer>"}] for i in range(5)
    ]
    given, logged = (prompts, completions, [[1]] * 5), {}
    for questions in ({"Is the answer correct?": 1.0}, {"Is it right?": 0.5, "Is it short?": 2.0}):
        mine = defined_in("05").PYesReward(policy, questions)(
            *given, log_metric=logged.__setitem__, answer=["7"] * 5
        )
        packaged = rewards.MetaEvaluationReward(policy, [*questions], [*questions.values()])(*given)
        assert mine == pytest.approx(packaged, rel=1e-3)
    assert 0 < logged["meta/p_yes"] < 1


@given(st.lists(st.sampled_from(["15", "12", "9", None]), min_size=2, max_size=8))
def test_the_vote_of_05_equals_the_package(answers):
    texts = ["Well." if answer is None else f"<answer>{answer}</answer>" for answer in answers]
    packaged = rewards.MajorityReward(len(texts))(texts, texts, [[1]] * len(texts))
    assert defined_in("05").majority(answers) == packaged


@pytest.mark.parametrize("name", MEASURES)
def test_the_certainty_of_05_equals_the_package(policy, name):
    prompts = [[{"role": "user", "content": "What is 12 + 7?"}]] * 3
    ids = policy.tokenizer(["19", "first 12 + 7 = 19.", "<answer>19</answer>"])["input_ids"]
    measure = getattr(defined_in("05"), name.replace("-", "_"))
    mine = defined_in("05").CertaintyReward(policy, measure)(prompts, [], ids)
    assert mine == pytest.approx(rewards.CertaintyReward(policy, name)(prompts, [], ids), rel=1e-3)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_the_coin_of_05_is_fair_seeded_by_the_step_and_blind(step, n):
    state, coin = SimpleNamespace(global_step=step), defined_in("05").coin
    first = coin(completions=["yes"] * n, trainer_state=state, prompts=["a"] * n)
    assert first == coin(completions=["no"] * n, trainer_state=state, prompts=["b"] * n)
    assert len(first) == n and {*first} <= {0.0, 1.0}
