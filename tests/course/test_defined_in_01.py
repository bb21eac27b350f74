"""What notebooks 01 and 01b define is what the package does; formulas also of 05, 08 and 09."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in, with_gradient
from torch.testing import assert_close

from grpo_kit import generation, hooks, objective
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


@pytest.mark.parametrize(
    ("notebook", "scored"), [("01", True), ("01b", True), ("08", False), ("09", False)]
)
@given(seeds, st.sampled_from([2, 3, 8]), st.booleans(), st.floats(0, 1))
def test_advantages_of_the_notebooks_equal_the_package(
    notebook, scored, seed, size, binary, missing
):
    """Also where answers were not scored, in the notebooks that have such answers."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(4 * size, generator=generator)
    rewards = rewards.round() if binary else rewards
    if not scored:
        rewards[torch.rand(4 * size, generator=generator) < missing] = torch.nan
    own, expected = defined_in(notebook), objective.group_advantages(rewards, size)
    assert_close(own.advantages(rewards, size), expected)
    if notebook == "01b":
        for name, scale in {"no_std": "none", "maxrl": "mean"}.items():
            packaged = objective.group_advantages(rewards, size, scale)
            assert_close(getattr(own, name)(rewards, size), packaged)
        assert own.mixed(rewards, size).tolist() == expected.view(-1, size).any(dim=1).tolist()


CISPO = partial(objective.surrogate, loss_type="cispo", epsilon_high=5.0)
SURROGATES = {  # of a notebook -> of the package
    **{(number, "surrogate"): objective.surrogate for number in ("01", "01b", "08", "09")},
    ("01b", "clip_higher"): partial(objective.surrogate, epsilon_high=0.28),
    ("01b", "cispo"): CISPO,
    ("05", "cispo"): CISPO,
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


AGGREGATES = {  # of a notebook -> options of the package's
    ("01", "aggregate"): {"loss_type": "grpo"},
    ("01b", "aggregate"): {"loss_type": "grpo"},
    ("01b", "token_mean"): {"loss_type": "dapo"},
    ("01b", "constant_divisor"): {"loss_type": "dr_grpo", "max_completion_length": 64},
}


@pytest.mark.parametrize(("notebook", "name"), AGGREGATES)
@given(seeds, st.integers(1, 3))
def test_aggregates_of_the_notebooks_equal_the_package_and_add_up(notebook, name, seed, cut):
    per_token, _, _, mask = batch_of(seed, 0.0)
    per_token, function = per_token * mask, getattr(defined_in(notebook), name)
    whole = objective.aggregate(per_token, mask, **AGGREGATES[notebook, name])
    assert_close(function(per_token, mask), whole)
    totals = {"num_items_in_batch": mask.sum(), "num_sequences_in_batch": 4}
    parts = [
        function(per_token[rows], mask[rows], **totals) for rows in (slice(cut), slice(cut, 4))
    ]
    assert_close(sum(parts), whole)


def test_the_hooks_of_the_notebooks_are_ones_that_train_takes_and_may_save_work_with():
    """Their batches may be cut into parts, and rows without advantage left out."""
    for notebook, name in (*SURROGATES, ("01b", "no_clip")):
        hooks.check_hook("surrogate", getattr(defined_in(notebook), name))
        assert hooks.ignores_zero_advantages(getattr(defined_in(notebook), name))
    for notebook, name in AGGREGATES:
        hooks.check_hook("aggregate", getattr(defined_in(notebook), name))
        assert hooks.adds_up(getattr(defined_in(notebook), name))
    for name in ("advantages", "no_std", "maxrl"):
        hooks.check_hook("advantages", getattr(defined_in("01b"), name))


@given(seeds, st.sampled_from([0.0, 0.04, 1.0]), st.sampled_from([0.1, 0.2]))
def test_loss_and_kl_of_01_equal_the_package(seed, beta, epsilon):
    logps, old, advantages, mask = batch_of(seed, 0.5)
    ref = batch_of(seed + 1, 0.0)[0]
    assert_close(defined_in("01").kl(logps, ref), objective.kl_estimate(logps, ref, "k3"))
    given = {"epsilon": epsilon, "beta": beta, "ref_logps": ref}
    packaged = {"loss_type": "grpo", "use_bias_correction_kl": False, **given}
    mine = with_gradient(defined_in("01").grpo_loss, logps, old, advantages, mask, **given)
    theirs = with_gradient(objective.policy_loss, logps, old, advantages, mask, **packaged)
    assert_close(mine, theirs)


@given(seeds)
def test_kl_and_tis_of_01b_equal_the_package(seed):
    logps, other, _, mask = batch_of(seed, 0.5)
    assert_close(defined_in("01b").kl(logps, other), objective.kl_estimate(logps, other))
    weighted = defined_in("01b").tis(torch.ones(4, 6), logps, other)
    assert_close(weighted, objective.importance_weights(logps, other, cap=2.0))


@pytest.mark.parametrize("seed", range(3))
def test_answers_and_log_probabilities_of_01_are_the_package_s(new_policy, seed):
    own, policy, n = defined_in("01"), new_policy(seed), 3
    texts = "Is 12 + 7 = 19?", "Why?", "Mia has 3 coins. Mia first finds 4. How many?"
    prompts = [[{"role": "user", "content": text}] for text in texts]
    ids, mask = own.sample(policy, prompts, n, 20, torch.Generator().manual_seed(seed))
    options = {"max_new_tokens": 20, "generator": torch.Generator().manual_seed(seed)}
    rollouts = generation.reply(policy, prompts, n, **options)
    assert own.cut(ids, mask) == rollouts.completion_lists()
    groups = zip(prompts, ids.split(n), strict=True)
    with torch.no_grad():
        logps = torch.cat([own.token_logps(policy, prompt, part) for prompt, part in groups])
    assert_close(logps[mask], rollouts.logps[mask], atol=1e-4, rtol=1e-4)


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
