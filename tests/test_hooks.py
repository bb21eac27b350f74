"""A reader's own functions in `train`: they act, are checked, and may equal the package's."""

import math

import pytest
import torch
from toy import TASK, configure, even_ids, killed_in, weights_of, without_times

from grpo_kit import hooks, objective, training
from grpo_kit.training import train


def own_advantages(rewards, num_generations):
    return objective.group_advantages(rewards, num_generations)


def own_surrogate(logps, old_logps, advantages, mask):
    return objective.surrogate(logps, old_logps, advantages, mask)


def own_aggregate(per_token, mask, *, num_items_in_batch, num_sequences_in_batch):
    return objective.aggregate(per_token, mask, num_items_in_batch=num_items_in_batch)


def with_penalty(logps, old_logps, advantages, mask):
    return own_surrogate(logps, old_logps, advantages, mask) + 0.1 * logps


OWN = {"advantages": own_advantages, "surrogate": own_surrogate, "aggregate": own_aggregate}
MANY = {"num_iterations": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
CAPPED = {"importance_sampling_cap": 2.0, "top_entropy_quantile": 0.8}


@pytest.fixture
def run(new_policy, tmp_path):
    """Train a new policy of fixed weights for some steps; the run and the weights."""

    def make(changes=(), folder="run", reward=even_ids, resume=False, **options):
        config = configure(**{"max_steps": 2, "learning_rate": 1e-2, **dict(changes)})
        policy, where = new_policy(), tmp_path / folder
        made = train(
            policy, TASK, [reward], config, output_dir=where, seed=0, resume=resume, **options
        )
        return without_times(made.history), weights_of(policy)

    return make


@pytest.mark.parametrize("changes", [{}, MANY, {"beta": 0.05}, MANY | CAPPED | {"beta": 0.05}])
def test_a_hook_that_repeats_the_packages_function_gives_the_same_run(run, changes):
    history, weights = run(changes, "package")
    for kinds in (["advantages"], ["surrogate"], ["aggregate"], list(OWN)):
        own_history, own_weights = run(changes, "own", **{kind: OWN[kind] for kind in kinds})
        assert history == own_history and torch.equal(weights, own_weights), kinds
    assert history[-1]["grad_norm"] > 0 and ("kl" in history[-1]) == ("beta" in changes)


def test_each_hook_decides_what_is_learnt(run):
    """Twice the advantage, the loss of each token, or the sum: twice the gradient, unclipped."""

    def twice(function):
        def doubled(*arguments, **totals):
            return 2 * function(*arguments, **totals)

        return doubled

    changes = {"max_steps": 1, "max_grad_norm": 0.0}
    (_, plain), _ = run(changes)
    for kind, function in OWN.items():
        (_, row), _ = run(changes, kind, **{kind: twice(function)})
        assert row["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-4)


def test_rows_without_advantage_are_left_out_only_where_they_have_no_gradient(run):
    def same(completions, **columns):
        return [0.5] * len(completions)

    assert run(reward=same, surrogate=own_surrogate)[0][-1]["grad_norm"] == 0
    assert run(reward=same, folder="b", surrogate=with_penalty)[0][-1]["grad_norm"] > 0


def test_a_mean_over_the_tokens_of_one_call_is_that_of_the_whole_batch(run):
    """Such a function does not add up over parts: nothing is left out, as with "bnpo"."""

    def mean(per_token, mask, **totals):
        return (per_token * mask).sum() / mask.sum()

    bnpo, own = run({"loss_type": "bnpo"}, "a"), run((), "b", aggregate=mean)
    assert own[0][-1]["grad_norm"] == pytest.approx(bnpo[0][-1]["grad_norm"], rel=1e-5)


def whitened(logps, old_logps, advantages, mask):
    """The advantages normalised over the rows that it is given."""
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    return -(logps - old_logps).exp() * advantages[:, None]


def late(logps, old_logps, advantages, mask):
    """Later tokens count more, up to those at the right edge."""
    return own_surrogate(logps, old_logps, advantages, mask) * torch.linspace(0, 1, mask.shape[1])


def over_the_width(per_token, mask, *, num_items_in_batch, num_sequences_in_batch):
    return per_token.sum() / (num_sequences_in_batch * mask.shape[1])


@pytest.mark.parametrize(
    "own", [{"surrogate": whitened}, {"surrogate": late}, {"aggregate": over_the_width}]
)
def test_what_mixes_rows_or_counts_columns_gets_the_whole_batch(own, run, new_policy, monkeypatch):
    """On a CPU batches are cut, and rows without advantage left out, for other functions."""
    whole, _ = run({"max_steps": 1}, "whole", **own)
    monkeypatch.setattr(training, "PASS_TOKENS", 1)
    cut, _ = run({"max_steps": 1}, "cut", **own)
    assert cut[-1]["grad_norm"] == pytest.approx(whole[-1]["grad_norm"], rel=1e-5)
    learner = training.Learner(new_policy(), configure(), **own)
    assert learner.all_rows and not learner.may_cut


def test_tokens_that_a_hook_cuts_off_are_logged_like_those_of_the_clip():
    logps = torch.randn(6, 9, requires_grad=True)
    old, mask = logps.detach() + torch.randn(6, 9), torch.rand(6, 9) < 0.8
    batch = (logps, old, torch.randn(6), mask)
    expected = objective.policy_loss_stats(*batch)
    assert hooks.cut_off_stats(own_surrogate, *batch) == pytest.approx(expected, abs=1e-6)
    assert 0 < expected["clip_ratio/low_mean"] and 0 < expected["clip_ratio/high_mean"]


def test_an_unscored_completion_gets_no_advantage_from_a_hook(run):
    seen = []

    def sometimes(completion_ids, **columns):
        return [None if i % 4 == 0 else float(i % 2) for i in range(len(completion_ids))]

    def by_mean(rewards, num_generations):
        seen.append(rewards.isnan().tolist())
        groups = rewards.view(-1, num_generations)
        return (groups - groups.nanmean(dim=1, keepdim=True)).flatten()

    history, _ = run(reward=sometimes, advantages=by_mean)
    assert seen[0] == [True, False, False, False] * 2 and history[-1]["grad_norm"] > 0


def test_a_run_is_not_resumed_with_another_hook(run, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(reward=killed_in(1), surrogate=own_surrogate)
    for options, problem in (
        ({}, "surrogate 'own_surrogate' there, None here"),
        ({"surrogate": with_penalty}, "surrogate 'own_surrogate' there, 'with_penalty' here"),
        ({**OWN}, "aggregate None there, 'own_aggregate' here"),
    ):
        with pytest.raises(ValueError, match=problem):
            run(resume=True, **options)
    whole, _ = run(folder="whole", surrogate=own_surrogate)
    assert run(resume=True, surrogate=own_surrogate)[0] == whole


def without_gradient(logps, old_logps, advantages, mask):
    return own_surrogate(logps.detach(), old_logps, advantages, mask)


EACH_NORMALISED = {"changes": {"multi_objective_aggregation": "normalize_then_sum"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantages": lambda r, n: r[:3]}, r"returned a tensor of shape \(3,\); .* shape \(8,\)"),
        ({"advantages": lambda r, n: r / 0 * 0}, "returned nan .* std may be 0.* at step 1"),
        ({"surrogate": lambda lp, old, a, m: a}, r"returned a tensor of shape .*; .* adds to the"),
        ({"surrogate": without_gradient}, "without_gradient returned no gradient"),
        ({"surrogate": lambda lp, o, a, m: lp * a[:, None] / 0}, "hook <lambda> returned -?inf"),
        ({"aggregate": lambda x, m, **totals: x.sum().detach()}, "<lambda> returned no grad"),
        ({"aggregate": lambda x, m, **totals: x.sum(1)}, r"of shape \(\), the loss of the batch"),
        ({"aggregate": lambda x, m: x.sum()}, "cannot be called as aggregate.*num_items_in_batch"),
        ({"advantages": "group"}, "advantages is 'group'; give a function, called as advantages"),
        (EACH_NORMALISED | {"advantages": own_advantages}, "compares each by itself: choose"),
    ],
)
def test_a_hook_of_a_wrong_form_ends_in_a_sentence(run, options, message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        run(**options)


def test_a_huge_log_ratio_has_a_finite_gradient():
    """Beyond exp(88) the ratio is infinite, and infinity times 0 is NaN (PITFALLS 44)."""
    for gap in (-200.0, 200.0):
        for advantage in (-1.0, 1.0):
            for level in objective.IMPORTANCE_SAMPLING_LEVELS:
                logps = torch.full((1, 3), -1.0, requires_grad=True)
                loss = objective.policy_loss(
                    logps, logps.detach() - gap, torch.tensor([advantage]), torch.ones(1, 3).bool(),
                    importance_sampling_level=level, beta=0.1, ref_logps=logps.detach(),
                )  # fmt: skip
                (gradient,) = torch.autograd.grad(loss, logps)
                assert math.isfinite(loss.item()) and gradient.isfinite().all()
