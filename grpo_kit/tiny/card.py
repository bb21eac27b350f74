"""Sample a policy's replies and measure what a tiny base solves.

The shipped cards also hold measurements of the other skills. Notebook 03 measures its judgements,
notebook 05 its P(Yes), notebook 06 whole episodes of Flow-GRPO.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

import torch

from grpo_kit.generation import reply
from grpo_kit.models import Policy
from grpo_kit.tiny import skills
from grpo_kit.tiny.problems import solution_style


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


def measure(policy: Policy, *, n: int = 256, seed: int = 0) -> dict:
    """Solve `n` test problems, eight times each at temperature 1: the scores, as plain dicts.

    `by_style` has the share of all samples of each style, and its accuracy.
    """
    rng = random.Random(f"card-{seed}")
    generator = torch.Generator().manual_seed(seed)
    problems = [skills.make_subject("solve", rng, "test") for _ in range(n)]
    requests = [[{"role": "user", "content": problem.question}] for problem in problems]
    sampled = texts_of(policy, requests, generator, num_generations=8, batch_size=16)
    right = [skills.is_right(problems[i // 8].answer, text) for i, text in enumerate(sampled)]
    by_style = defaultdict(list)
    for text, hit in zip(sampled, right, strict=True):
        by_style[solution_style(text)].append(hit)
    return {
        "n": n,
        "pass@1": fmean(right),
        "pass@8": fmean(any(right[i : i + 8]) for i in range(0, len(right), 8)),
        "by_style": {
            style: {"share": len(hits) / len(right), "accuracy": fmean(hits)}
            for style, hits in by_style.items()
        },
    }
