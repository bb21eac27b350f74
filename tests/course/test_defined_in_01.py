"""What notebook 01 defines is what the package does; advantages also those of 08 and 09."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in, with_gradient
from torch.testing import assert_close

from grpo_kit import generation, hooks, objective
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward
from grpo_kit.training import train


@pytest.mark.parametrize(("notebook", "scored"), [("01", True), ("08", False), ("09", False)])
@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.booleans(), st.floats(0, 1))
def test_advantages_of_the_notebooks_equal_the_package(
    notebook, scored, seed, size, binary, missing
):
    """Also where answers were not scored, in the notebooks that have such answers."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(4 * size, generator=generator)
    rewards = rewards.round() if binary else rewards
    if not scored:
        rewards[torch.rand(4 * size, generator=generator) < missing] = torch.nan
    expected = objective.group_advantages(rewards, size)
    assert_close(defined_in(notebook).advantages(rewards, size), expected)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.04, 1.0]), st.sampled_from([0.1, 0.2]))
def test_loss_and_kl_of_the_notebook_equal_the_package(seed, beta, epsilon):
    generator = torch.Generator().manual_seed(seed)
    logps, old, ref = -torch.rand((3, 4, 6), generator=generator) * 3
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    advantages = torch.randn(4, generator=generator)
    assert_close(defined_in("01").kl(logps, ref), objective.kl_estimate(logps, ref, "k3"))
    given = {"epsilon": epsilon, "beta": beta, "ref_logps": ref}
    packaged = {"loss_type": "grpo", "use_bias_correction_kl": False, **given}
    mine = with_gradient(defined_in("01").grpo_loss, logps, old, advantages, mask, **given)
    theirs = with_gradient(objective.policy_loss, logps, old, advantages, mask, **packaged)
    assert_close(mine, theirs)


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.2]), st.integers(1, 3))
def test_surrogate_and_aggregate_of_01_equal_the_package(seed, epsilon, cut):
    generator = torch.Generator().manual_seed(seed)
    logps, old = -torch.rand((2, 4, 6), generator=generator) * 3
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    advantages, own = torch.randn(4, generator=generator), defined_in("01")
    per_token = own.surrogate(logps, old, advantages, mask, epsilon)
    packaged = objective.surrogate(logps, old, advantages, mask, epsilon=epsilon)
    assert_close(per_token, packaged)
    whole = objective.aggregate(per_token, mask, loss_type="grpo")
    assert_close(own.aggregate(per_token, mask), whole)
    parts = [
        own.aggregate(per_token[rows], mask[rows], num_sequences_in_batch=4)
        for rows in (slice(cut), slice(cut, 4))
    ]
    assert_close(sum(parts), whole)


def test_the_hooks_of_01_let_the_package_save_work():
    """Their batches may be cut into parts, and rows without advantage left out."""
    own = defined_in("01")
    assert hooks.adds_up(own.aggregate) and hooks.ignores_zero_advantages(own.surrogate)


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
