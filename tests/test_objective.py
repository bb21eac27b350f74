"""The formulas of `grpo_kit.objective` against values worked out by hand or with other tools.

Two stronger oracles live next door: `test_exact_oracle.py` (enumeration), `test_trl_oracle.py`.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_kit.objective import (
    LOSS_TYPES,
    combine_rewards,
    decoupled_advantages,
    group_advantages,
    kl_estimate,
    policy_loss,
    policy_loss_stats,
    truncated_importance_weights,
)

NAN = math.nan
EXTRA = {  # what each loss type cannot do without
    "grpo": {},
    "bnpo": {},
    "dapo": {},
    "dr_grpo": {"max_completion_length": 7},
    "cispo": {"epsilon_high": 1.1},
}


def random_batch(n=8, t=5, seed=0, dtype=torch.float64):
    """A ragged batch, off-policy enough that some ratios are clipped."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(n, t, generator=g, dtype=dtype)
    logps = (old + 0.3 * torch.randn(n, t, generator=g, dtype=dtype)).requires_grad_()
    ref = old + 0.3 * torch.randn(n, t, generator=g, dtype=dtype)
    lengths = torch.randint(1, t + 1, (n, 1), generator=g)
    lengths[0] = t
    mask = torch.arange(t) < lengths
    advantages = torch.randn(n, generator=g, dtype=dtype)
    return logps, old, ref, advantages, mask


def gradient(loss, logps):
    (grad,) = torch.autograd.grad(loss, logps, retain_graph=True)
    return grad


# --- rewards --------------------------------------------------------------------------------------


def test_rewards_are_summed_with_their_weights():
    table = torch.tensor([[1.0, 0.1], [0.0, -0.1]])
    assert combine_rewards(table, [1.0, 2.0]).tolist() == pytest.approx([1.2, -0.2])
    assert combine_rewards(table).tolist() == pytest.approx([1.1, -0.1])


def test_completion_with_one_unscored_reward_is_unscored():
    table = torch.tensor([[1.0, 0.1], [1.0, NAN], [NAN, NAN]])
    assert combine_rewards(table, [1.0, 1.0]).isnan().tolist() == [False, True, True]


def test_one_unscored_reward_leaves_siblings_alone():
    # PITFALLS 13, 14: a judge's time-out on the third completion of four.
    table = torch.tensor([[1.0, 0.8], [0.0, 0.2], [1.0, NAN], [0.0, 0.6]])
    with_timeout = group_advantages(combine_rewards(table), 4)
    without = group_advantages(combine_rewards(table[[0, 1, 3]]), 3)
    assert with_timeout[2] == 0
    torch.testing.assert_close(with_timeout[[0, 1, 3]], without)
    as_zero = group_advantages(combine_rewards(table.nan_to_num(0.0)), 4)
    assert not torch.allclose(as_zero[[0, 1, 3]], without)  # counting 0 would have moved them


def test_reward_of_weight_zero_excludes_nobody():
    assert combine_rewards(torch.tensor([[1.0, NAN]]), [1.0, 0.0]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("table", "weights", "sentence"),
    [
        (torch.ones(3), None, "give \\(N, R\\)"),
        (torch.ones(3, 2), [1.0], "one weight per reward"),
        (torch.ones(3, 2), [0.0, 0.0], "Every reward weight is 0"),
    ],
)
def test_rewards_that_cannot_be_combined_are_refused(table, weights, sentence):
    with pytest.raises(ValueError, match=sentence):
        combine_rewards(table, weights)


# --- advantages -----------------------------------------------------------------------------------


def test_std_has_ddof_one_and_epsilon_1e_4():
    # PITFALLS 7. Rewards 1, 0, 0, 0: mean 1/4, std sqrt(3/4 / 3) = 1/2 (ddof 0 would give 0.433).
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    assert got.tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-6)


def test_each_scale_divides_by_its_own_std():
    rewards = np.array([1.0, 0.0, 0.5, 0.1, 0.7, 0.9])
    groups = rewards.reshape(2, 3)
    centred = groups - groups.mean(1, keepdims=True)
    wanted = {
        "group": centred / (groups.std(1, ddof=1, keepdims=True) + 1e-4),
        "batch": centred / (rewards.std(ddof=1) + 1e-4),
        "none": centred,
    }
    for scale, want in wanted.items():
        got = group_advantages(torch.tensor(rewards), 3, scale)
        np.testing.assert_allclose(got.numpy(), want.reshape(-1), rtol=1e-12)
    assert torch.equal(
        group_advantages(torch.tensor(rewards), 3, True), group_advantages(torch.tensor(rewards), 3)
    )
    assert torch.equal(
        group_advantages(torch.tensor(rewards), 3, False),
        group_advantages(torch.tensor(rewards), 3, "none"),
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_groups_that_compare_nothing_get_exactly_zero(scale):
    # PITFALLS 8: groups of one; without spread (3 x 1.1 has a mean off by a rounding); one or none
    # scored. The last group has spread, so that the batch's std is not 0.
    assert group_advantages(torch.tensor([3.0, 5.0]), 1, scale).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([NAN]), 1, scale).tolist() == [0.0]
    rewards = torch.tensor([1.1, 1.1, 1.1, NAN, 2.0, NAN, NAN, NAN, NAN, 0.0, 1.0, 0.3])
    got = group_advantages(rewards, 3, scale)
    assert got[:9].tolist() == [0.0] * 9
    assert got.isfinite().all() and (got[9:] != 0).all()


def test_batch_of_unscored_completions_gives_zeros():
    for scale in ("group", "batch", "none"):
        assert group_advantages(torch.full((4,), NAN), 2, scale).tolist() == [0.0] * 4


def test_a_group_does_not_feel_another_group():
    # PITFALLS 18: the baseline is the completions of the same prompt, nothing else.
    a, b = torch.tensor([1.0, 0.0, 0.2]), torch.tensor([0.3, 0.9, NAN])
    both = group_advantages(torch.cat([a, b]), 3)
    torch.testing.assert_close(both[:3], group_advantages(a, 3))
    torch.testing.assert_close(both[3:], group_advantages(b, 3))


@pytest.mark.parametrize(
    ("rewards", "kwargs", "sentence"),
    [
        (torch.ones(7), {"num_generations": 4}, "7 rewards cannot be cut.*num_generations=4"),
        (torch.ones(4), {"num_generations": 0}, "num_generations=0"),
        (torch.ones(2, 2), {"num_generations": 2}, "shape \\(2, 2\\)"),
        (torch.ones(4, dtype=torch.long), {"num_generations": 2}, "one float a completion"),
        (torch.tensor([1.0, math.inf]), {"num_generations": 2}, "infinity"),
        (torch.ones(4), {"num_generations": 2, "scale_rewards": "std"}, "scale_rewards is 'std'"),
    ],
)
def test_rewards_that_make_no_groups_are_refused(rewards, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        group_advantages(rewards, **kwargs)


reward = st.one_of(
    st.sampled_from([0.0, 1.0, 0.1, -0.1, NAN]), st.floats(-2, 2).map(lambda x: round(x, 3))
)
a_batch = st.integers(1, 5).flatmap(
    lambda g: st.tuples(
        st.just(g),
        st.lists(st.lists(reward, min_size=g, max_size=g), min_size=1, max_size=4),
        st.sampled_from(["group", "batch", "none"]),
    )
)


@settings(max_examples=100, deadline=None)
@given(a_batch, st.floats(-3, 3).map(lambda x: round(x, 3)))
def test_advantages_are_finite_centred_and_blind_to_an_offset(batch, offset):
    g, groups, scale = batch
    rewards = torch.tensor(groups, dtype=torch.float64).view(-1)
    got = group_advantages(rewards, g, scale)
    assert got.isfinite().all()
    assert (got[rewards.isnan()] == 0).all()
    torch.testing.assert_close(got.view(-1, g).sum(1), torch.zeros(len(groups)).double())
    torch.testing.assert_close(
        group_advantages(rewards + offset, g, scale), got, rtol=1e-6, atol=1e-8
    )


@settings(max_examples=50, deadline=None)
@given(a_batch, st.randoms(use_true_random=False))
def test_order_inside_a_group_does_not_matter(batch, random):
    g, groups, scale = batch
    rewards = torch.tensor(groups, dtype=torch.float64)
    order = torch.tensor([random.sample(range(g), g) for _ in groups])
    shuffled = group_advantages(rewards.gather(1, order).view(-1), g, scale)
    straight = group_advantages(rewards.view(-1), g, scale).view(-1, g)
    torch.testing.assert_close(shuffled.view(-1, g), straight.gather(1, order))


@settings(max_examples=50, deadline=None)
@given(st.lists(reward, min_size=2, max_size=6), st.sampled_from(["group", "batch", "none"]))
def test_unscored_completions_might_as_well_not_be_there(group, scale):
    rewards = torch.tensor(group, dtype=torch.float64)
    scored = rewards[~rewards.isnan()]
    if len(scored):
        got = group_advantages(rewards, len(group), scale)[~rewards.isnan()]
        torch.testing.assert_close(got, group_advantages(scored, len(scored), scale))


# --- KL -------------------------------------------------------------------------------------------


def test_kl_estimates_by_hand():
    # policy gives the token 1/2, the reference 1/4: d = ln(1/2).
    logps, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    ln2 = math.log(2)
    assert kl_estimate(logps, ref, "k1").item() == pytest.approx(ln2)
    assert kl_estimate(logps, ref, "k2").item() == pytest.approx(ln2**2 / 2)
    assert kl_estimate(logps, ref, "k3").item() == pytest.approx(0.5 + ln2 - 1)


def test_k3_is_never_negative_and_zero_only_at_the_reference():
    # PITFALLS 20. In float32, exp(d) - d - 1 is negative for many small d.
    d = torch.cat([torch.logspace(-8, 1, 2000), -torch.logspace(-8, 1, 2000)])
    logps = torch.full_like(d, -1.0)
    assert (kl_estimate(torch.zeros_like(d), d) >= 0).all()
    assert (kl_estimate(logps, logps) == 0).all()
    assert ((d.exp() - d - 1) < 0).any()  # the trap is real


def test_kl_refuses_other_shapes_and_kinds():
    with pytest.raises(ValueError, match="score the same tokens"):
        kl_estimate(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="kind is 'k4'"):
        kl_estimate(torch.zeros(2), torch.zeros(2), "k4")


# --- the loss -------------------------------------------------------------------------------------

# Two completions of 2 and 1 tokens; ratios 1.5, 0.5 and 0.9; advantages 1 and -2.
# Clipped terms: min(1.5, 1.2) = 1.2 · min(0.5, 0.8) = 0.5 · min(-1.8, -1.8) = -1.8.
HAND = {
    "grpo": -((1.2 + 0.5) / 2 + -1.8) / 2,
    "bnpo": -(1.2 + 0.5 - 1.8) / 3,
    "dapo": -(1.2 + 0.5 - 1.8) / 3,
    "dr_grpo": -(1.2 + 0.5 - 1.8) / (2 * 7),
    # weights min(rho, 1.1), log-probabilities -1, -2, -3
    "cispo": -(1.1 * 1 * -1 + 0.5 * 1 * -2 + 0.9 * -2 * -3) / 3,
}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_by_hand(loss_type):
    logps = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    old = logps - torch.tensor([[1.5, 0.5], [0.9, 1.0]]).log()
    mask = torch.tensor([[1, 1], [1, 0]])
    loss = policy_loss(
        logps, old, torch.tensor([1.0, -2.0]), mask, loss_type=loss_type, **EXTRA[loss_type]
    )
    assert loss.item() == pytest.approx(HAND[loss_type], rel=1e-6)


def test_sequence_ratio_is_the_geometric_mean_by_hand():
    logps = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    old = logps - torch.tensor([[1.5, 0.5], [0.9, 1.0]]).log()
    mask = torch.tensor([[1, 1], [1, 0]])
    kwargs = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    loss = policy_loss(logps, old, torch.tensor([1.0, -2.0]), mask, **kwargs)
    assert loss.item() == pytest.approx(-(math.sqrt(0.75) - 1.8) / 2, rel=1e-6)


def test_upper_clip_has_its_own_epsilon():
    logps = torch.tensor([[math.log(1.5)]], requires_grad=True)
    args = (logps, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1))
    assert policy_loss(*args).item() == pytest.approx(-1.2)
    assert policy_loss(*args, epsilon_high=0.28).item() == pytest.approx(-1.28)
    assert policy_loss(*args, epsilon_high=0.6).item() == pytest.approx(-1.5)
    assert gradient(policy_loss(*args, epsilon_high=0.28), logps).item() == 0  # clipped
    assert gradient(policy_loss(*args, epsilon_high=0.6), logps).item() == pytest.approx(-1.5)


def test_cispo_never_cuts_a_gradient_off():
    logps = torch.tensor([[math.log(1.5)]], requires_grad=True)
    args = (logps, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1))
    loss = policy_loss(*args, loss_type="cispo", epsilon_high=1.2)
    assert gradient(loss, logps).item() == pytest.approx(-1.2)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_zero_loss_on_policy_still_teaches(loss_type, level):
    # PITFALLS 24: assert the gradient's norm, not the loss. Equal lengths, so the sum is exactly 0.
    logps = torch.full((4, 3), -1.0, requires_grad=True)
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    loss = policy_loss(
        logps,
        None,
        advantages,
        torch.ones(4, 3),
        loss_type=loss_type,
        importance_sampling_level=level,
        **EXTRA[loss_type],
    )
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert gradient(loss, logps).norm() > 0.05


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_missing_old_logps_mean_the_first_update(loss_type):
    logps, _, _, advantages, mask = random_batch()
    kwargs = {"loss_type": loss_type, **EXTRA[loss_type]}
    absent = policy_loss(logps, None, advantages, mask, **kwargs)
    detached = policy_loss(logps, logps.detach(), advantages, mask, **kwargs)
    attached = policy_loss(logps, logps, advantages, mask, **kwargs)  # forgetting .detach() is safe
    assert torch.equal(gradient(absent, logps), gradient(detached, logps))
    assert torch.equal(gradient(absent, logps), gradient(attached, logps))
    assert gradient(absent, logps).norm() > 0


def test_second_update_uses_the_logps_of_sampling():
    # PITFALLS 11: a softmax over two tokens, token 0 sampled with A = 1; two SGD steps of 0.5.
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def logp():
        return logits.log_softmax(-1)[0].view(1, 1)

    old = logp().detach()
    grads = []
    for _ in range(2):
        loss = policy_loss(logp(), old, torch.ones(1), torch.ones(1, 1), epsilon_high=9.0)
        (grad,) = torch.autograd.grad(loss, logits)
        grads.append(grad[0].item())
        with torch.no_grad():
            logits -= 0.5 * grad
    # first: p = 1/2, ratio 1, d logp / d z0 = 1 - p. second: z = (1/4, -1/4), p = sigmoid(1/2).
    p = 1 / (1 + math.exp(-0.5))
    assert grads == pytest.approx([-0.5, -(p / 0.5) * (1 - p)], rel=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up_to_the_batch(loss_type, level, beta):
    # PITFALLS 10: micro-batches of 1, 2, 3 (uneven), and all 8.
    logps, old, ref, advantages, mask = random_batch(n=8)

    def grad(size):
        total = torch.zeros_like(logps)
        for rows in torch.arange(8).split(size):
            loss = policy_loss(
                logps[rows],
                old[rows],
                advantages[rows],
                mask[rows],
                loss_type=loss_type,
                importance_sampling_level=level,
                beta=beta,
                ref_logps=ref[rows],
                num_items_in_batch=mask.sum(),
                num_sequences_in_batch=8,
                **EXTRA[loss_type],
            )
            total += gradient(loss, logps)
        return total

    whole = grad(8)
    assert whole.norm() > 0
    for size in (1, 2, 3):
        if loss_type == "bnpo":  # local by definition: the split matters
            assert not torch.allclose(grad(size), whole)
        else:
            torch.testing.assert_close(grad(size), whole, rtol=1e-12, atol=1e-15)


def test_defaults_are_those_of_the_whole_batch():
    logps, old, _, advantages, mask = random_batch()
    for loss_type in ("grpo", "dapo", "dr_grpo", "cispo"):
        kwargs = {"loss_type": loss_type, **EXTRA[loss_type]}
        said = policy_loss(
            logps,
            old,
            advantages,
            mask,
            num_items_in_batch=int(mask.sum()),
            num_sequences_in_batch=8,
            **kwargs,
        )
        assert torch.equal(policy_loss(logps, old, advantages, mask, **kwargs), said)


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_masked_garbage_does_not_leak(loss_type, level, garbage):
    # PITFALLS 9, 12, 19: only the mask says what is trained on.
    logps, old, ref, advantages, mask = random_batch()
    weights = torch.rand(mask.shape, dtype=torch.float64)
    per_token = advantages[:, None].expand_as(mask)
    kwargs = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.05,
        **EXTRA[loss_type],
    }
    clean = policy_loss(
        logps, old, per_token, mask, ref_logps=ref, truncated_importance_weights=weights, **kwargs
    )

    def dirt(x):
        return x.detach().masked_fill(~mask, garbage)

    dirty_logps = dirt(logps).requires_grad_()
    dirty = policy_loss(
        dirty_logps,
        dirt(old),
        dirt(per_token),
        mask,
        ref_logps=dirt(ref),
        truncated_importance_weights=dirt(weights),
        **kwargs,
    )
    assert torch.equal(dirty, clean)
    dirty_grad = gradient(dirty, dirty_logps)
    assert torch.equal(dirty_grad, gradient(clean, logps))
    assert (dirty_grad[~mask] == 0).all()
    stat_args = {k: v for k, v in kwargs.items() if k not in ("beta", "max_completion_length")}
    stats = policy_loss_stats(logps, old, per_token, mask, ref_logps=ref, **stat_args)
    assert stats == policy_loss_stats(
        dirty_logps, dirt(old), dirt(per_token), mask, ref_logps=dirt(ref), **stat_args
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_growing_a_masked_row_changes_nothing(loss_type, level):
    # PITFALLS 9: a truncated completion is masked in the numerator *and* in the divisor.
    logps, old, ref, advantages, mask = random_batch()
    mask = mask.clone()
    mask[0] = False  # the truncated one
    kwargs = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.05,
        **EXTRA[loss_type],
    }
    short = policy_loss(logps, old, advantages, mask, ref_logps=ref, **kwargs)

    def grow(x, value):
        return torch.nn.functional.pad(x, (0, 6), value=value)

    grown = policy_loss(
        grow(logps, -9.0),
        grow(old, -1.0),
        advantages,
        grow(mask, False),
        ref_logps=grow(ref, -2.0),
        **kwargs,
    )
    assert torch.allclose(grown, short)
    torch.testing.assert_close(gradient(grown, logps), gradient(short, logps))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_fully_masked_batch_gives_zero_and_a_finite_gradient(loss_type, level):
    # PITFALLS 12
    logps, old, ref, advantages, mask = random_batch()
    kwargs = {"loss_type": loss_type, "importance_sampling_level": level, **EXTRA[loss_type]}
    loss = policy_loss(
        logps, old, advantages, torch.zeros_like(mask), beta=0.05, ref_logps=ref, **kwargs
    )
    assert loss.item() == 0
    assert (gradient(loss, logps) == 0).all()
    kwargs.pop("max_completion_length", None)
    stats = policy_loss_stats(
        logps, old, advantages, torch.zeros_like(mask), ref_logps=ref, **kwargs
    )
    assert set(stats.values()) == {0.0}


def test_padding_can_be_an_ordinary_token():
    # PITFALLS 19: all tokens have one id and one log-probability; the mask alone tells them apart.
    logps = torch.full((1, 4), -1.0, requires_grad=True)
    loss = policy_loss(logps, None, torch.ones(1), torch.tensor([[1, 1, 1, 0]]))
    assert gradient(loss, logps)[0].tolist() == pytest.approx([-1 / 3] * 3 + [0])


def test_advantages_may_differ_by_token():
    logps, old, _, advantages, mask = random_batch()
    same = policy_loss(logps, old, advantages[:, None].expand_as(logps), mask)
    assert torch.equal(same, policy_loss(logps, old, advantages, mask))
    per_token = torch.tensor([[1.0, -2.0]])
    loss = policy_loss(torch.zeros(1, 2), None, per_token, torch.ones(1, 2))
    assert loss.item() == pytest.approx(0.5)


def test_kl_correction_adds_the_score_term_to_the_gradient():
    # On-policy the values agree, but d(k3 rho)/dlogp has a term k3 that d(k3)/dlogp lacks.
    logps = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5]], dtype=torch.float64)
    args = (logps, None, torch.zeros(1), torch.ones(1, 1))
    k3 = math.exp(-0.5) + 0.5 - 1
    corrected = policy_loss(*args, beta=2.0, ref_logps=ref)
    plain = policy_loss(*args, beta=2.0, ref_logps=ref, use_bias_correction_kl=False)
    assert corrected.item() == pytest.approx(2 * k3) == plain.item()
    assert gradient(plain, logps).item() == pytest.approx(2 * (1 - math.exp(-0.5)))
    assert gradient(corrected, logps).item() == pytest.approx(2 * (k3 + 1 - math.exp(-0.5)))


# --- truncated importance sampling ----------------------------------------------------------------


def test_importance_weights_are_truncated_from_above_only():
    train = torch.tensor([[4.0, 1.5, 1.0, 0.01]]).log().requires_grad_()
    weights = truncated_importance_weights(train, torch.zeros(1, 4))
    assert weights.tolist()[0] == pytest.approx([2.0, 1.5, 1.0, 0.01])
    assert not weights.requires_grad
    assert truncated_importance_weights(train, torch.zeros(1, 4), cap=3.0)[0, 0] == 3
    assert truncated_importance_weights(train, torch.full((1, 4), NAN)).tolist() == [[1.0] * 4]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_importance_weights_scale_the_policy_term_but_not_the_kl(loss_type):
    logps, old, ref, advantages, mask = random_batch()
    kwargs = {"loss_type": loss_type, "beta": 0.5, "ref_logps": ref, **EXTRA[loss_type]}
    halves = torch.full_like(old, 0.5)
    weighted = policy_loss(
        logps, old, advantages, mask, truncated_importance_weights=halves, **kwargs
    )
    assert torch.allclose(weighted, policy_loss(logps, old, advantages / 2, mask, **kwargs))


# --- statistics -----------------------------------------------------------------------------------


def test_clip_shares_by_hand():
    # ratios 1.5 (A > 0: high) 0.5 (A > 0: not) | 1.5 (A < 0: not) 0.5 (A < 0: low) 1.0 | KL d = 0.
    logps = torch.tensor([[1.5, 0.5, NAN], [1.5, 0.5, 1.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    old = torch.zeros(2, 3)
    stats = policy_loss_stats(logps, old, torch.tensor([1.0, -1.0]), mask, ref_logps=logps)
    assert stats == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 5,
            "clip_ratio/high_mean": 1 / 5,
            "clip_ratio/region_mean": 2 / 5,
            "kl": 0.0,
        }
    )
    assert all(type(value) is float for value in stats.values())
    stats = policy_loss_stats(
        logps, old, torch.tensor([1.0, -1.0]), mask, loss_type="cispo", epsilon_high=1.2
    )
    assert stats == pytest.approx({"cispo_clip_ratio": 1 / 5})


def test_clip_shares_of_sequences_count_completions():
    logps = torch.tensor([[2.0, 2.0, NAN], [1.0, 1.0, 1.0]]).log()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    stats = policy_loss_stats(
        logps, torch.zeros(2, 3), torch.ones(2), mask, importance_sampling_level="sequence"
    )
    assert stats["clip_ratio/high_mean"] == 0.5


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; choose one of grpo, bnpo"),
        ({"loss_type": "dr_grpo"}, "needs max_completion_length"),
        ({"loss_type": "cispo"}, "needs epsilon_high"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level is 'word'"),
        ({"beta": 0.1}, "beta is 0.1 but ref_logps is missing"),
        ({"logps": torch.zeros(4)}, "logps has shape \\(4,\\)"),
        ({"mask": torch.ones(4, 1)}, "mask has shape \\(4, 1\\) but logps \\(4, 3\\)"),
        ({"old_logps": torch.zeros(3)}, "old_logps has shape \\(3,\\)"),
        ({"beta": 0.1, "ref_logps": torch.zeros(4, 1)}, "ref_logps has shape"),
        ({"advantages": torch.zeros(3)}, "advantages has shape \\(3,\\) but logps \\(4, 3\\)"),
        ({"advantages": torch.zeros(4, 1)}, "give one advantage a completion"),
    ],
)
def test_loss_refuses_what_does_not_fit(change, sentence):
    args = {
        "logps": torch.zeros(4, 3),
        "old_logps": torch.zeros(4, 3),
        "advantages": torch.zeros(4),
        "mask": torch.ones(4, 3),
    }
    with pytest.raises(ValueError, match=sentence):
        policy_loss(**{**args, **change})


def test_what_is_not_scored_by_one_reward_moves_no_sibling_where_each_is_normalised_first():
    nan = float("nan")
    scored = torch.tensor([[1.0, 0.2], [0.0, 0.4], [0.0, 0.1], [1.0, 0.5]])
    with_gap = torch.cat([torch.tensor([[1.0, nan]]), scored])
    even = torch.zeros(5, 2)  # a group without any spread
    advantages = decoupled_advantages(torch.cat([with_gap, even]), 5)
    assert advantages[0] == 0 and advantages[5:].abs().max() < 1e-6
    assert advantages.sum().abs() < 1e-5
    alone = decoupled_advantages(torch.cat([scored, torch.zeros(5, 2)[:4]]), 4)[:4]
    torch.testing.assert_close(advantages[1:5] / advantages[1], alone / alone[0])
    weighted = decoupled_advantages(torch.cat([with_gap, even]), 5, (1.0, 0.0))
    assert weighted[0] > 0, "a reward without weight takes nobody out"
