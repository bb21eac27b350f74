"""Rewards that need neither label nor question: the group's vote, the model's certainty, a coin.

They stand beside P("Yes") of `meta_evaluation`: what they pay is what the policy says already. The
coin is their control: what it does as well is not their doing.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from grpo_kit.rewards.rules import completion_text
from grpo_kit.tasks.answers import extract_answer, parse_number

if TYPE_CHECKING:
    from grpo_kit.models import Policy

MEASURES = ("self-certainty", "likelihood")


@dataclass(eq=False)
class MajorityReward:
    """1.0 for the answer that most of its group give, else 0.0: TTRL (arXiv 2504.16084).

    Numbers are compared exactly, other answers as text; in a draw the first of them wins.
    Without an answer a completion has no vote and earns 0. ValueError for incomplete groups.
    """

    num_generations: int  # completions per prompt, as in the trainer

    __name__ = "majority_reward"

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, **columns
    ) -> list[float]:
        size = self.num_generations
        if len(completions) % size:
            problem = f"{len(completions)} completions make no groups of {size}"
            raise ValueError(f"{problem}: give complete groups, and the trainer's num_generations.")
        answers = [_answer(completion_text(completion)) for completion in completions]
        rewards = []
        for start in range(0, len(answers), size):
            group = answers[start : start + size]
            votes = Counter(answer for answer in group if answer is not None)
            winner = votes.most_common(1)[0][0] if votes else None
            rewards += [float(answer is not None and answer == winner) for answer in group]
        return rewards


def _answer(text: str) -> Hashable | None:
    """The number in the last `<answer>…</answer>`, else its text; None where there is none."""
    answer = extract_answer(text)
    if not answer:
        return None
    number = parse_number(answer)
    return " ".join(answer.casefold().split()) if number is None else number


def random_reward(
    prompts: list, completions: list, completion_ids: list, *, trainer_state: Any = None, **columns
) -> list[float]:
    """1.0 or 0.0 by a coin, whatever the completion: a spurious reward (arXiv 2506.10947).

    Drawn from the prompts and the step, so that a resumed run tosses the same coins.
    """
    step = getattr(trainer_state, "global_step", 0)
    rng = random.Random(json.dumps([step, prompts], default=str))
    return [float(rng.random() < 0.5) for _ in completions]


@dataclass(eq=False, repr=False)
class CertaintyReward:
    """How sure `policy` is of each completion's tokens, on average, in nats.

    "self-certainty" is the mean of KL(uniform || p) over the tokens (INTUITOR, arXiv 2505.19590),
    p being the distribution from which a token was drawn, at temperature 1; "likelihood" the mean
    of log p(token). None for an empty completion and beyond the context.
    """

    policy: Policy  # the one that is trained, or a frozen copy
    measure: str = "self-certainty"
    _: KW_ONLY
    batch_size: int = 16  # completions a pass, each with its prompt

    __name__ = "certainty_reward"

    def __post_init__(self):
        if self.measure not in MEASURES:
            raise ValueError(f"measure={self.measure!r}; choose one of {', '.join(MEASURES)}.")

    def __call__(
        self, prompts: list, completions: list, completion_ids: list, **columns
    ) -> list[float | None]:
        from grpo_kit.generation import fitting_batches

        pairs = zip(self.policy.encode(prompts), completion_ids, strict=True)
        whole = [[*prompt, *completion] if len(completion) else [] for prompt, completion in pairs]
        rewards: list[float | None] = [None] * len(prompts)
        for part in fitting_batches(self.policy, whole, self.batch_size):
            values = self._certainty([whole[i] for i in part], [completion_ids[i] for i in part])
            for i, value in zip(part, values, strict=True):
                rewards[i] = value
        return rewards

    def _certainty(self, whole: list, completion_ids: list) -> list[float]:
        """Of texts with their prompts, as ids, and the completions that end them."""
        import torch

        from grpo_kit.generation import last_logits, left_pad

        lengths = torch.tensor([len(ids) for ids in completion_ids], device=self.policy.device)
        longest = int(lengths.max())
        logits = last_logits(self.policy, whole, longest + 1)[:, :-1]
        logps = logits.log_softmax(dim=-1)  # (B, longest, V)
        if self.measure == "likelihood":
            last, _ = left_pad(completion_ids, self.policy.pad_token_id, logps.device)
            values = logps.gather(-1, last[..., None])[..., 0]
        else:
            values = -logps.mean(dim=-1) - torch.tensor(float(logps.shape[-1])).log()
        own = torch.arange(longest, device=logps.device) >= longest - lengths[:, None]
        return ((values * own).sum(dim=1) / lengths).tolist()
