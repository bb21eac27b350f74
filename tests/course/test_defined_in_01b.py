"""What notebook 01b defines is what the package does; the surrogate also that of 09."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in, with_gradient
from torch.testing import assert_close

from grpo_kit import hooks, objective
from grpo_kit.lab import surrogates


def _batch(seed: int, spread: float):
    """(logps, old_logps, advantages, mask) of four answers, masked tokens included."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand((4, 6), generator=generator)
    old = logps + spread * torch.randn((4, 6), generator=generator)
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    return logps, old, torch.randn(4, generator=generator), mask


SURROGATES = {  # of the notebook -> of the package
    "surrogate": objective.surrogate,
    "clip_higher": partial(objective.surrogate, epsilon_high=0.28),
    "cispo": partial(objective.surrogate, loss_type="cispo", epsilon_high=5.0),
    "sapo": surrogates.sapo,
    "sequence_mask": surrogates.off_policy_mask,
}


@pytest.mark.parametrize(
    ("notebook", "name"), [("09", "surrogate"), *(("01b", name) for name in SURROGATES)]
)
@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.5, 1.5]))
def test_surrogates_of_the_notebooks_equal_the_package(notebook, name, seed, spread):
    logps, *others, mask = _batch(seed, spread)

    def loss(function):
        return lambda *batch: (function(*batch) * mask).sum()

    mine = with_gradient(loss(getattr(defined_in(notebook), name)), logps, *others, mask)
    assert_close(mine, with_gradient(loss(SURROGATES[name]), logps, *others, mask))


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.booleans())
def test_advantages_of_01b_equal_the_package(seed, size, binary):
    rewards = torch.rand(4 * size, generator=torch.Generator().manual_seed(seed))
    rewards = rewards.round() if binary else rewards
    own, scales = defined_in("01b"), {"advantages": "group", "no_std": "none", "maxrl": "mean"}
    for name, scale in scales.items():
        expected = objective.group_advantages(rewards, size, scale)
        assert_close(getattr(own, name)(rewards, size), expected)
    kept = objective.group_advantages(rewards, size).view(-1, size).any(dim=1)
    assert own.mixed(rewards, size).tolist() == kept.tolist()


@given(st.integers(0, 10_000), st.sampled_from([1, 3]))
def test_aggregates_of_01b_equal_the_package_and_add_up(seed, cut):
    per_token, _, _, mask = _batch(seed, 0.0)
    per_token, own = per_token * mask, defined_in("01b")
    limit = {"loss_type": "dr_grpo", "max_completion_length": 64}
    packaged = {
        "aggregate": {"loss_type": "grpo"}, "token_mean": {"loss_type": "dapo"},
        "constant_divisor": limit,
    }  # fmt: skip
    totals = {"num_items_in_batch": mask.sum(), "num_sequences_in_batch": 4}
    for name, options in packaged.items():
        function, whole = getattr(own, name), objective.aggregate(per_token, mask, **options)
        assert_close(function(per_token, mask), whole)
        parts = [
            function(per_token[rows], mask[rows], **totals) for rows in (slice(cut), slice(cut, 4))
        ]
        assert_close(sum(parts), whole)


@given(st.integers(0, 10_000))
def test_kl_and_tis_of_01b_equal_the_package(seed):
    logps, other, _, mask = _batch(seed, 0.5)
    assert_close(defined_in("01b").kl(logps, other), objective.kl_estimate(logps, other))
    weighted = defined_in("01b").tis(torch.ones(4, 6), logps, other)
    assert_close(weighted, objective.importance_weights(logps, other, cap=2.0))


def test_the_hooks_of_01b_are_ones_that_train_takes_and_may_cut_into_parts():
    own = defined_in("01b")
    for name in (*SURROGATES, "no_clip"):
        hooks.check_hook("surrogate", getattr(own, name))
        assert hooks.ignores_zero_advantages(getattr(own, name))
    for name in ("aggregate", "token_mean", "constant_divisor"):
        hooks.check_hook("aggregate", getattr(own, name))
        assert hooks.adds_up(getattr(own, name))
    for name in ("advantages", "no_std", "maxrl"):
        hooks.check_hook("advantages", getattr(own, name))
