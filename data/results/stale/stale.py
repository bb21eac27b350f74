"""What does a sampler cost that is out of date? The arms of notebook 08, Step 3.

Planned before these seeds ran: `grpo-kit compare data/results/stale/stale.py --seeds 100-104
--output data/results/stale`. Two questions: what do lags of 4 and 8 steps cost beside new weights
in each step, and does the weight help at a lag of 8, and where weights never travel? One seed had
been seen, notebook 08's: never renewed 0.73, with the weight 0.65, every 4 steps 0.82, each 0.85.

With these five seeds every arm but the first was *inconclusive*, so ten fresh ones, 105-114, do.
"""

from functools import partial

import torch

from grpo_kit import generation, models
from grpo_kit.rewards import accuracy_reward


@torch.no_grad()
def scored(policy, answers, config):  # log-probabilities by the policy, (N, T)
    options = {"temperature": config.temperature, "pad_token_id": policy.pad_token_id}
    with policy.autocast():
        return generation.completion_logps(policy.model, answers, **options)[0]


class StaleSampler:  # weights travel every `every` steps; `cap` bounds w, None: no w
    name = "stale sampler"

    def __init__(self, prompts, cap=None, every=1000):
        self.prompts, self.cap, self.every = prompts, cap, every
        self.state_dict = prompts.state_dict

    def __call__(self, generator, state, metrics):
        if state.global_step % self.every == 0:
            self.sampler = models.frozen_copy(self.prompts.policy)
        config = self.prompts.config
        sample = partial(generation.sample_groups, self.sampler, config=config, generator=generator)
        for batch in self.prompts(generator, state, metrics, sample=sample):
            p, q = scored(self.prompts.policy, batch.rollouts, config), batch.rollouts.logps
            metrics["off"] = (p - q)[batch.rollouts.mask].abs().mean().item()
            if self.cap is not None:
                batch.token_weights = (p - q).clamp(-20, 20).exp().clamp(max=self.cap)
            yield batch


CONFIG = {"max_steps": 24, "learning_rate": 4e-4, "generation_batch_size": 64, "eval_steps": 8,
          "eval_prompts": 500, "num_generations_eval": 4, "save_steps": 0}  # fmt: skip


def arm(**options):
    source = partial(StaleSampler, **options)
    return {"rewards": [accuracy_reward], "batch_source": source, "config": CONFIG}


arms = {
    "each step": arm(every=1),
    "every 4 steps": arm(every=4),
    "every 8 steps": arm(every=8),
    "every 8, weight up to 2": arm(every=8, cap=2.0),
    "never renewed": arm(),
    "never, weight up to 2": arm(cap=2.0),
}
