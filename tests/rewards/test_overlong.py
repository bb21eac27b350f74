"""The soft overlong penalty against DAPO's equation 13 and against TRL."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.rewards import OverlongPenalty


def score(penalty, lengths):
    return penalty(
        prompts=["?"] * len(lengths),
        completions=["x"] * len(lengths),
        completion_ids=[[7] * length for length in lengths],
        answer=["1"] * len(lengths),
    )


def test_golden_values_of_equation_13():
    penalty = OverlongPenalty(max_completion_length=100, cache_length=20)
    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 500]
    assert score(penalty, lengths) == [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1]


@given(st.data())
def test_equals_trl(data):
    trl_rewards = pytest.importorskip("trl.rewards")
    longest = data.draw(st.integers(1, 64))
    cache = data.draw(st.integers(1, longest))
    lengths = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=8))
    theirs = trl_rewards.get_soft_overlong_punishment(longest, cache)
    ours = OverlongPenalty(longest, cache)
    assert score(ours, lengths) == score(theirs, lengths)


def test_is_named_and_survives_pickling():
    penalty = pickle.loads(pickle.dumps(OverlongPenalty(100, 20)))
    assert penalty.__name__ == "overlong_penalty"
    assert score(penalty, [90]) == [-0.5]


@pytest.mark.parametrize(
    ("longest", "cache", "named"),
    [(0, 1, "max_completion_length=0"), (10, 0, "cache_length=0"), (10, 11, "cache_length=11")]
    + [(10.5, 2, "max_completion_length=10.5"), (10, True, "cache_length=True")],
)
def test_bad_lengths_are_named(longest, cache, named):
    with pytest.raises(ValueError, match=named):
        OverlongPenalty(longest, cache)
