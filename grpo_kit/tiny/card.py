"""Sample a policy's replies, and say how well scores tell right answers from wrong ones."""

from collections.abc import Sequence

import torch

from grpo_kit.generation import reply


def auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Chance that a right one is scored above a wrong one, ties half; NaN without both."""
    scores = torch.tensor(scores, dtype=torch.float64)
    labels = torch.tensor(labels, dtype=torch.bool)
    right, wrong = scores[labels][:, None], scores[~labels]
    above, equal = (right > wrong).double(), (right == wrong).double()
    return (above + equal / 2).mean().item()


def texts_of(
    policy, conversations, generator=None, *, num_generations=1, limit=96, batch_size=64, **options
) -> list[str]:
    """The policy's replies, sampled if a generator is given, else the most likely ones.

    `limit` is in tokens, `batch_size` in conversations; `options` are those of `generate`.
    """
    options |= {"do_sample": generator is not None, "generator": generator}
    options |= {"max_new_tokens": limit, "batch_size": batch_size * num_generations}
    rollouts = reply(policy, conversations, num_generations, **options)
    return policy.decode(rollouts.completion_lists())
