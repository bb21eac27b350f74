"""The corrections of the clip, beside TRL's code and numbers by hand."""

import pytest
import torch
from trl import GRPOTrainer

from grpo_kit import hooks
from grpo_kit.config import GRPOConfig
from grpo_kit.lab.surrogates import MOST_KL, dppo, off_policy_mask, sapo
from grpo_kit.objective import surrogate

g = torch.Generator().manual_seed(0)
OLD = -3 * torch.rand(6, 5, generator=g) - 0.05
LOGPS = (OLD + 0.8 * torch.randn(6, 5, generator=g)).clamp(max=-1e-3)
ADVANTAGES = torch.tensor([1.2, -0.7, -0.5, 0.9, -1.1, 0.0])
MASK = torch.arange(5) < torch.tensor([5, 2, 4, 1, 5, 3])[:, None]
BATCH = LOGPS, OLD, ADVANTAGES, MASK


def gradient(function, logps=LOGPS):
    logps = logps.clone().requires_grad_()
    torch.where(MASK, function(logps, *BATCH[1:]), 0.0).sum().backward()
    return logps.grad


@pytest.mark.parametrize("function", [sapo, off_policy_mask, dppo])
def test_where_nothing_has_moved_each_has_the_gradient_of_the_clip(function):
    def fresh(logps, old, *rest):
        return function(logps, logps.detach(), *rest)

    def clip(logps, old, *rest):
        return surrogate(logps, None, *rest)

    assert torch.allclose(gradient(fresh), gradient(clip), atol=1e-6)
    assert hooks.ignores_zero_advantages(hooks.surrogate_by(function, GRPOConfig()))


def test_the_sequences_that_are_left_out_are_those_of_trl():
    far = LOGPS.clone()
    far[1], far[4] = OLD[1] - 2 * MOST_KL, OLD[4] - 0.5 * MOST_KL
    far[0] = OLD[0] - 2 * MOST_KL  # as far, but good
    kept = GRPOTrainer.get_off_policy_mask(ADVANTAGES[:, None], far, OLD, MASK, MOST_KL)
    assert kept[:, 0].tolist() == [1, 0, 1, 1, 1, 1]
    clip = torch.where(MASK, surrogate(far, *BATCH[1:]), 0.0)
    own = torch.where(MASK, off_policy_mask(far, *BATCH[1:]), 0.0)
    assert torch.allclose(own, clip * kept)


def test_dppo_stops_common_tokens_late_and_rare_ones_never_so_soon():
    """Ratio 1.5: the clip stops both; of probability 0.01 only 0.005 has moved, of 0.6 0.3."""
    old = torch.tensor([[0.01, 0.6, 0.01, 0.6]]).log()
    logps = old + torch.tensor([1.5, 1.5, 1 / 1.5, 1 / 1.5]).log()
    mask, moved = torch.ones(1, 4, dtype=torch.bool), {}
    for advantage in (1.0, -1.0):
        leaf = logps.clone().requires_grad_()
        dppo(leaf, old, torch.tensor([advantage]), mask).sum().backward()
        moved[advantage] = (leaf.grad != 0).tolist()[0]
    assert moved == {1.0: [True, False, True, True], -1.0: [True, True, True, True]}
    leaf = (old + torch.tensor([1, 1, 1, 0.5]).log()).requires_grad_()
    dppo(leaf, old, torch.tensor([-1.0]), mask).sum().backward()
    assert (leaf.grad != 0).tolist() == [[True, True, True, False]], "0.6 to 0.3"
