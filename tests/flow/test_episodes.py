"""Advantages over trajectories, and rows of turns."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.flow import Episode, Turn, episode_advantages, turn_rows
from grpo_kit.objective import group_advantages


def episode(group, reward, turns=1):
    lengths = range(2, 2 + turns)
    return Episode(group, reward, [Turn([1, 2], [3] * n, [-0.1] * n) for n in lengths])


one = st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, 0.5, None]), st.integers(1, 5))


@given(st.lists(one, min_size=1, max_size=12))
def test_advantages_are_those_of_the_rewards_of_each_group_in_any_order(rows):
    """However many turns each episode has: PITFALLS 18."""
    episodes = [episode(*row) for row in rows]
    values = episode_advantages(episodes)
    assert values.shape == (len(episodes),)
    for group in {row[0] for row in rows}:
        members = [i for i, row in enumerate(rows) if row[0] == group]
        rewards = [math.nan if rows[i][1] is None else rows[i][1] for i in members]
        expected = group_advantages(torch.tensor(rewards), len(members))
        assert torch.allclose(values[members], expected)


def test_per_turn_long_episodes_weigh_more_in_mean_and_std():
    """One right answer in one turn, one wrong one in four: where the two differ."""
    episodes = [episode("q", 1.0, 1), episode("q", 0.0, 4)]
    expected = torch.tensor([0.5, -0.5]) / (math.sqrt(0.5) + 1e-4)
    assert torch.allclose(episode_advantages(episodes), expected)
    by_row = group_advantages(torch.tensor([1.0, 0, 0, 0, 0]), 5)
    assert torch.allclose(episode_advantages(episodes, per="turn"), by_row[:2])
    assert by_row[0] > 3 * -by_row[1]


def test_another_function_compares_the_groups():
    episodes = [episode("q", 1.0, 1), episode("q", 0.0, 4), episode("r", 1.0, 2)]

    def centred(rewards, num_generations):
        assert len(rewards) == num_generations
        return rewards - rewards.mean()

    assert episode_advantages(episodes, advantages=centred).tolist() == [0.5, -0.5, 0.0]
    by_row = episode_advantages(episodes, per="turn", advantages=centred)
    assert torch.allclose(by_row, torch.tensor([0.8, -0.2, 0.0]))


def test_a_turn_without_a_log_probability_for_each_token_is_refused():
    with pytest.raises(ValueError, match="3 completion ids and 2 logprobs; give one per token"):
        Turn([1], [1, 2, 3], [0.0, 0.0])


def test_rows_hold_the_very_ids_that_were_sampled_also_where_they_are_the_pad():
    """PITFALLS 16, 17 and 19."""
    pad, cpu = 0, torch.device("cpu")
    policy = SimpleNamespace(device=cpu, pad_token_id=pad, eos_token_ids=[pad])
    one = [Turn([5, 6], [7, pad, pad], [-1.0, -2.0, -3.0], True, [0.1, 0.2, 0.3])]
    two = [Turn([5, 6], [8], [-4.0], False), Turn([5, 9, 9], [1, 2], [-5.0, -6.0])]
    rollouts, index = turn_rows([Episode("q", 1.0, one), Episode("q", 0.0, two)], policy)
    assert rollouts.completion_lists() == [[7, pad, pad], [8], [1, 2]]
    assert [rollouts.prompt_ids[i] for i in rollouts.prompt_index] == [[5, 6], [5, 6], [5, 9, 9]]
    assert len(rollouts.prompt_ids) == 2  # read twice, run once
    assert rollouts.logps.tolist() == [[-1, -2, -3], [-4, 0, 0], [-5, -6, 0]]
    assert rollouts.finished.tolist() == [True, False, True] and index.tolist() == [0, 1, 1]
