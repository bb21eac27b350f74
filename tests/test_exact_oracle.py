"""GRPO against the exact answer, in a world small enough to write every completion down.

Three tokens (0 ends the completion), at most three steps: fifteen completions, one to three tokens
long. The policy is a table of logits, one row a prefix. So expected reward, policy gradient and KL
are plain sums over fifteen terms, the expectation of any estimator over groups is a plain sum over
groups, and nothing has to be sampled.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from grpo_kit.objective import group_advantages, kl_estimate, policy_loss

VOCABULARY, STEPS, EOS = 3, 3, 0


def enumerate_completions():
    """All completions: those that end with EOS, and those cut off after STEPS tokens."""
    done, open_ = [], [()]
    for _ in range(STEPS):
        grown = [prefix + (token,) for prefix in open_ for token in range(VOCABULARY)]
        done += [c for c in grown if c[-1] == EOS]
        open_ = [c for c in grown if c[-1] != EOS]
    return done + open_


COMPLETIONS = enumerate_completions()
PREFIXES = sorted({c[:t] for c in COMPLETIONS for t in range(len(c))})
N = len(COMPLETIONS)
LENGTHS = torch.tensor([len(c) for c in COMPLETIONS], dtype=torch.float64)
MASK = torch.arange(STEPS) < LENGTHS[:, None]
# (N, STEPS): which row of the table, and which token of it; 0 where there is none
ROWS = torch.zeros(N, STEPS, dtype=torch.long)
TOKENS = torch.zeros(N, STEPS, dtype=torch.long)
for i, completion in enumerate(COMPLETIONS):
    for t, token in enumerate(completion):
        ROWS[i, t], TOKENS[i, t] = PREFIXES.index(completion[:t]), token


def table(seed, scale=0.7):
    g = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(len(PREFIXES), VOCABULARY, generator=g, dtype=torch.float64)
    return logits.requires_grad_()


POLICY, OLD, REFERENCE = table(0), table(1), table(2)
BINARY = torch.tensor([float(c[-1] != EOS or len(c) == 2) for c in COMPLETIONS]).double()
GRADED = torch.tensor([0.3 * sum(c) - 0.1 * len(c) + (c[0] == 1) for c in COMPLETIONS]).double()


def token_logps(logits):
    """(N, STEPS) log-probabilities of the completions' tokens, NaN at padding (nobody may look)."""
    return logits.log_softmax(-1)[ROWS, TOKENS].masked_fill(~MASK, math.nan)


def completion_logps(logits):
    return torch.where(MASK, logits.log_softmax(-1)[ROWS, TOKENS], 0.0).sum(1)


def gradient(scalar, logits=POLICY):
    (grad,) = torch.autograd.grad(scalar, logits)
    return grad


def expected(values, logits=POLICY):
    """Exact expectation of a value per completion; differentiable in the logits."""
    return (completion_logps(logits).exp() * values).sum()


def mean_over_all_groups(size, scale_rewards, rewards, loss_type, baseline="group"):
    """Gradient of `policy_loss`, averaged over every possible group with its probability.

    One call holds all groups: the loss is linear in positive multiples of the advantages, so each
    group's probability goes in with them; the divisor is set to that of one group.
    """
    groups = torch.tensor(list(itertools.product(range(N), repeat=size)))
    probability = completion_logps(POLICY).detach()[groups].sum(1).exp()
    assert probability.sum().item() == pytest.approx(1, abs=1e-12), "each completion, once"
    rows = groups.view(-1)
    advantages = group_advantages(rewards[rows], size, scale_rewards, 0.0, baseline)
    advantages *= probability.repeat_interleave(size)
    options = {"max_completion_length": STEPS, "num_sequences_in_batch": size}
    logps = token_logps(POLICY)[rows]
    loss = policy_loss(logps, None, advantages, MASK[rows], loss_type=loss_type, **options)
    return gradient(loss)


def assert_same(got, want, rtol=1e-9):
    assert want.norm() > 1e-3  # 0 = 0 would prove nothing
    assert (got - want).norm() <= rtol * want.norm()


@pytest.mark.parametrize("rewards", [BINARY, GRADED], ids=["binary", "graded"])
@pytest.mark.parametrize("size", [2, 3])
def test_dr_grpo_is_the_exact_policy_gradient(size, rewards):
    # The mean contains the completion's own reward, which shrinks the advantage by (G - 1) / G and
    # biases nothing else: E[grad] = -(G - 1) / G / L * grad J.
    exact = gradient(expected(rewards))
    got = mean_over_all_groups(size, "none", rewards, "dr_grpo")
    assert_same(got, -(size - 1) / size / STEPS * exact)
    # RLOO takes the mean of the others, which biases nothing at all
    got = mean_over_all_groups(size, "none", rewards, "dr_grpo", baseline="others")
    assert_same(got, -exact / STEPS)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_groups_mean_as_divisor_climbs_the_log_of_the_pass_rate(size):
    # MaxRL: the sum over k < G of (1 - p)^(k - 1) grad p, grad log p for G without end. The
    # mean contains the completion's own reward; without that the sum would go to G.
    p = expected(BINARY)
    orders = sum((1 - p.item()) ** k for k in range(size - 1))
    got = mean_over_all_groups(size, "mean", BINARY, "dr_grpo")
    assert_same(got, -orders / STEPS * gradient(p))


def test_gradient_equals_the_chain_rule_written_out():
    """Token after token; `test_trl_oracle.py` has every loss, with and without KL."""
    advantages = GRADED - GRADED.mean()
    log_pi, log_old = (x.detach().log_softmax(-1).numpy() for x in (POLICY, OLD))
    oracle, cut = np.zeros_like(log_pi), 0
    for completion, a in zip(COMPLETIONS, advantages.tolist(), strict=True):
        for t, token in enumerate(completion):
            row = PREFIXES.index(completion[:t])
            ratio = math.exp(log_pi[row, token] - log_old[row, token])
            clipped = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.8)
            d_logits = -np.exp(log_pi[row])
            d_logits[token] += 1
            oracle[row] -= (not clipped) * a * ratio * d_logits / len(completion) / N
            cut += clipped
    assert cut > 1, "the clip bites"
    loss = policy_loss(
        token_logps(POLICY), token_logps(OLD), advantages, MASK, loss_type="grpo", epsilon_high=0.3
    )
    assert_same(gradient(loss), torch.tensor(oracle), rtol=1e-12)


def exact_kl(logits=POLICY, reference=REFERENCE):
    """KL of the distributions over whole completions; nothing token-wise about it."""
    log_p, log_q = completion_logps(logits), completion_logps(reference)
    return (log_p.exp() * (log_p - log_q)).sum()


def expected_kl(kind):
    per_token = kl_estimate(token_logps(POLICY), token_logps(REFERENCE), kind)
    return expected(torch.where(MASK, per_token, 0.0).sum(1)).item()


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    # PITFALLS 20. The chain rule: KL over completions = expected sum of the KL at each token.
    forward, reversed_ = exact_kl().item(), exact_kl(REFERENCE, POLICY).item()
    assert abs(forward - reversed_) > 0.01 * forward, "the next lines could not tell them apart"
    assert expected_kl("k1") == pytest.approx(forward, rel=1e-12)
    assert expected_kl("k3") == pytest.approx(forward, rel=1e-12)
    assert abs(expected_kl("k2") - forward) > 0.01 * forward


def test_what_each_kl_estimate_pulls_towards_when_used_as_a_loss():
    # One step, four tokens, on-policy samples: the expected gradient sum_x p(x) grad k(x).
    g = torch.Generator().manual_seed(5)
    z = torch.randn(4, generator=g, dtype=torch.float64, requires_grad=True)
    log_q = torch.randn(4, generator=g, dtype=torch.float64).log_softmax(-1)

    def kl(x):
        return (x.softmax(-1) * (x.log_softmax(-1) - log_q)).sum()

    def reversed_kl(x):
        return (log_q.exp() * (log_q - x.log_softmax(-1))).sum()

    p = z.softmax(-1).detach()
    pull = {
        kind: gradient((p * kl_estimate(z.log_softmax(-1), log_q, kind)).sum(), z)
        for kind in ("k1", "k2", "k3")
    }
    kl_gradient, reversed_gradient = (gradient(f(z), z) for f in (kl, reversed_kl))
    assert pull["k1"].norm() < 1e-12
    assert_same(pull["k2"], kl_gradient, rtol=1e-8)
    assert_same(pull["k3"], reversed_gradient, rtol=1e-8)
    assert not torch.allclose(kl_gradient, reversed_gradient, rtol=0.01)
