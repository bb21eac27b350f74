"""What notebooks 01 and 01b define is what the package does; formulas also of 05, 08 and 09."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in, with_gradient
from torch.testing import assert_close

from grpo_kit import hooks, objective
from grpo_kit.lab import surrogates
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.training import train

seeds = st.integers(0, 10_000)


def batch_of(seed: int, spread: float):
    """(logps, old_logps, advantages, mask) of four answers, masked tokens included."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand((4, 6), generator=generator)
    old = logps + spread * torch.randn((4, 6), generator=generator)
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    return logps, old, torch.randn(4, generator=generator), mask


@pytest.mark.parametrize("notebook", ["08", "09"])
@given(seeds, st.sampled_from([2, 3, 8]), st.floats(0, 1))
def test_advantages_of_the_notebooks_equal_the_package_where_not_all_are_scored(
    notebook, seed, size, missing
):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(4 * size, generator=generator)
    rewards[torch.rand(4 * size, generator=generator) < missing] = torch.nan
    own, expected = defined_in(notebook), objective.group_advantages(rewards, size)
    assert_close(own.advantages(rewards, size), expected)


SURROGATES = {  # of a notebook -> of the package
    ("01b", "clip_higher"): partial(objective.surrogate, epsilon_high=0.28),
    ("01b", "cispo"): partial(objective.surrogate, loss_type="cispo", epsilon_high=5.0),
    ("01b", "sapo"): surrogates.sapo,
    ("01b", "sequence_mask"): surrogates.off_policy_mask,
}


@pytest.mark.parametrize(("notebook", "name"), SURROGATES)
@given(seeds, st.sampled_from([0.1, 0.5, 1.5]))
def test_surrogates_of_the_notebooks_equal_the_package(notebook, name, seed, spread):
    logps, *others, mask = batch_of(seed, spread)

    def loss(function):
        return lambda *batch: (function(*batch) * mask).sum()

    mine = with_gradient(loss(getattr(defined_in(notebook), name)), logps, *others, mask)
    packaged = SURROGATES[notebook, name]
    assert_close(mine, with_gradient(loss(packaged), logps, *others, mask))


AGGREGATES = (
    ("01", "aggregate"),
    ("01b", "aggregate"),
    ("01b", "token_mean"),
    ("01b", "constant_divisor"),
)


def test_the_hooks_of_the_notebooks_are_ones_that_train_takes_and_may_save_work_with():
    """Their batches may be cut into parts, and rows without advantage left out."""
    for notebook, name in (*SURROGATES, ("01b", "no_clip"), ("05", "cispo")):
        hooks.check_hook("surrogate", getattr(defined_in(notebook), name))
        assert hooks.ignores_zero_advantages(getattr(defined_in(notebook), name))
    for notebook, name in AGGREGATES:
        hooks.check_hook("aggregate", getattr(defined_in(notebook), name))
        assert hooks.adds_up(getattr(defined_in(notebook), name))
    for name in ("advantages", "no_std", "maxrl"):
        hooks.check_hook("advantages", getattr(defined_in("01b"), name))


@given(seeds)
def test_the_kl_of_01b_equals_the_package(seed):
    logps, other, *_ = batch_of(seed, 0.5)
    assert_close(defined_in("01b").kl(logps, other), objective.kl_estimate(logps, other))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_loop_of_01_makes_the_run_that_train_makes(beta, tmp_path, monkeypatch):
    own, profile = defined_in("01"), PROFILES["smoke"]
    task, config = profile.load_task(), profile.with_config(
        loss_type="grpo", beta=beta, use_bias_correction_kl=False, num_iterations=2, max_steps=2,
        lr_scheduler_type="constant", warmup_steps=0, eval_steps=1, eval_prompts=0,
    ).config  # fmt: skip
    names = {
        "config": config, "task": task, "held_out": list(task.test.select(range(4))), "SEED": 3,
        "G": 4, "LIMIT": 48, "UPDATES": 2, "BETA": beta, "steps": 2, "answers": 16,
    }  # fmt: skip
    for name, value in names.items():  # what the notebook's parameters and settings set
        monkeypatch.setitem(own.my_train.__globals__, name, value)
    mine = own.my_train(profile.load_policy())
    given = {"output_dir": tmp_path, "seed": 3, "measure": own.evaluate}
    theirs = train(profile.load_policy(), task, [accuracy_reward], config, **given).history
    compared = (
        "reward",
        "completions/mean_length",
        "frac_reward_zero_std",
        "grad_norm",
        "eval/pass@1",
    )
    for one, other in zip(mine, theirs, strict=True):
        found = {name: one[name] for name in compared if name in one}
        assert found == pytest.approx({name: other[name] for name in found}, rel=2e-3)
    assert {*compared} <= {*mine[-1]}
