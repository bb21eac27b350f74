"""Corrections of the clip that are a few lines each, as `surrogate` hooks of `train`.

Each is called as (logps, old_logps (N, T) float, nats; advantages (N,); mask (N, T) bool) and
returns what each token adds to the loss, (N, T).
"""

import torch
from torch import Tensor

from grpo_kit import objective

BOUND = 0.2  # of the clip, and of DPPO's difference of probabilities (arXiv 2602.04879, verl)
MOST_KL = 0.5  # nats a token; TRL's example of `off_policy_mask_threshold`
TEMPERATURES = 1.0, 1.05  # of SAPO's gate where A > 0, and elsewhere; TRL's defaults


def sapo(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A soft gate in place of the clip: 4/t · sigmoid(t · (ratio - 1)) (arXiv 2511.20347)."""
    ratio, advantages = (logps - old_logps).exp(), advantages[:, None]
    t = torch.where(advantages > 0, *TEMPERATURES)
    return -4 / t * (t * (ratio - 1)).sigmoid() * advantages


def off_policy_mask(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The clip; bad completions that have left the sampler far behind do not count.

    Those with A < 0 whose mean of old_logps - logps is above `MOST_KL` (DeepSeek-V3.2, arXiv
    2512.02556, eq. 9).
    """
    moved = torch.where(mask, old_logps - logps, 0.0).detach().sum(dim=1)
    kept = (advantages >= 0) | (moved <= MOST_KL * mask.sum(dim=1))
    clipped = objective.surrogate(logps, old_logps, advantages, mask, epsilon=BOUND)
    return clipped * kept[:, None]


def dppo(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A token is left out where its *probability* has moved far enough already, not its ratio.

    By more than `BOUND` the way that its advantage asks (DPPO's binary total variation, arXiv
    2602.04879): the ratio stops rare tokens early and common ones late.
    """
    ratio, advantages = (logps - old_logps).exp(), advantages[:, None]
    moved = (logps.exp() - old_logps.exp()).detach() * advantages.sign()
    return -ratio * advantages * (moved <= BOUND)
