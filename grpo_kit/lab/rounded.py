"""Sampling that rounds, as fast engines do, for experiments on the corrections for it."""

from collections.abc import Iterator
from functools import partial

import torch

from grpo_kit.generation import sample_groups
from grpo_kit.models import frozen_copy
from grpo_kit.training import Batch, PromptBatches


class Rounded:
    """A batch source that samples as fast engines do: with the layers' matrices in 8 bits (fp8).

    What it samples from is a little off the policy; `importance_sampling_cap` can correct for that.
    """

    name = "prompts, sampled in 8 bits"

    def __init__(self, prompts: PromptBatches) -> None:
        self.prompts, self.sampler = prompts, frozen_copy(prompts.policy)
        self.state_dict, self.load_state_dict = prompts.state_dict, prompts.load_state_dict

    @torch.no_grad()
    def _round(self) -> None:
        largest = torch.finfo(torch.float8_e4m3fn).max
        copies = dict(self.sampler.model.named_parameters())
        for name, weight in self.prompts.policy.model.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                scale = largest / weight.abs().max().clamp(min=1e-9)
                weight = (weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale
            copies[name].copy_(weight)

    def __call__(self, generator: torch.Generator, state, metrics: dict) -> Iterator[Batch]:
        self._round()
        options = {"config": self.prompts.config, "generator": generator}
        sample = partial(sample_groups, self.sampler, **options)
        yield from self.prompts(generator, state, metrics, sample)
