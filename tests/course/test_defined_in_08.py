"""What notebook 08 defines is what the package does; advantages, surrogate: beside those of 01."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in
from torch.testing import assert_close

from grpo_kit import objective
from grpo_kit.lab import planner
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward

ANSWERS = st.sampled_from(["7", "12", "-3", "700"])
SAID = st.sampled_from(
    ["{}", "<answer>{}</answer>", "{} <answer> {} </answer>", "<answer></answer>", "<answer>{}",
     "<answer>99</answer> <answer>{}</answer>", "<answer>{}</answer> or <answer>99</answer>"]
)  # fmt: skip


@given(st.lists(st.tuples(SAID, ANSWERS, ANSWERS), min_size=1, max_size=8))
def test_the_reward_of_08_equals_the_package(rows):
    said = [
        [{"role": "assistant", "content": form.format(*[number] * 2)}] for form, number, _ in rows
    ]
    golds = [gold for *_, gold in rows]
    expected = accuracy_reward([], said, [], answer=golds)
    assert defined_in("08").right(completions=said, answer=golds, prompts=[], extra=[]) == expected


@given(st.integers(0, 10_000), st.sampled_from([0.5, 2.0, 5.0, torch.inf]))
def test_the_importance_weight_of_08_equals_the_package(seed, cap):
    old, sampled = -3 * torch.rand((2, 4, 6), generator=torch.Generator().manual_seed(seed))
    weights = defined_in("08").importance_weight(old.requires_grad_(), sampled, cap)
    assert_close(weights, objective.importance_weights(old, sampled, cap))
    assert not weights.requires_grad


@given(st.integers(0, 10_000), st.sampled_from([2, 4, 8]))
def test_the_workers_of_08_are_right_only_where_they_see_whole_groups(seed, size):
    own, rewards = (
        defined_in("08"),
        torch.rand(4 * size, generator=torch.Generator().manual_seed(seed)),
    )
    expected = objective.group_advantages(rewards, size)
    split = own.dealt(rewards, size)
    for worker in range(2):  # what each of the two computes alone, by the package
        alone = objective.group_advantages(rewards[worker::2], size)
        assert_close(split[worker::2], alone)
    assert expected.view(-1, size).sum(1).abs().max() < 2e-3  # the alarm, but for rounding
    for rank in range(2):  # what each process of the notebook's script does, without the other
        with process_of_two(rank, rewards):
            rows, alone, together = own.work(rewards, size)
        assert rows == [*range(rank, 4 * size, 2)]
        assert_close(alone, split[rank::2])
        assert_close(together, expected[rank::2])


@contextmanager
def process_of_two(rank, rewards):
    """What `torch.distributed` says to process `rank`, with the other's rows in `rewards`."""

    def all_gather(parts, own):
        for i, part in enumerate(parts):
            part.copy_(rewards[i::2])

    with (
        mock.patch.object(dist, "is_available", lambda: True),
        mock.patch.object(dist, "get_world_size", lambda: 2),
        mock.patch.object(dist, "get_rank", lambda: rank),
        mock.patch.object(dist, "all_gather", all_gather),
    ):
        yield


def test_the_bytes_of_08_are_those_that_the_planner_counts():
    model, parts = planner.model_of(PROFILES["paper"].policy), planner.memory_of(PROFILES["paper"])
    counted = sum(parts[part] for part in ("weights", "gradients", "optimiser"))
    assert defined_in("08").training_bytes(model.num_parameters()) / planner.GIB == pytest.approx(
        counted
    )


@given(st.floats(1e6, 1e12), st.floats(1.0, 4.0), st.floats(0, 1e8), st.integers(1, 4096))
def test_the_floor_of_08_is_the_slower_of_reading_and_computing(n, width, cache, rows):
    card = {"bandwidth": 1e12, "flops": 1e14}
    floor = defined_in("08").decode_floor(n, width * n, cache, rows, **card)
    reading, computing = (width * n + rows * cache) / 1e12, 2 * n * rows / 1e14
    assert floor == pytest.approx(max(reading, computing))
