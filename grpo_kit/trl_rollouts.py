"""Flow-GRPO's episodes, sampled for TRL's trainer in place of one answer a prompt.

TRL trains on one sequence per completion. So each turn's prompt has to continue the turn before,
as with `AgentSystem(context="append")`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from grpo_kit.flow import AgentSystem, Episode, play
from grpo_kit.models import Policy
from grpo_kit.rewards.scoring import reward_name
from grpo_kit.training import PromptBatches


class Episodes:
    """Plays episodes for TRL's `rollout_func`; a `rollout` of `trl_bridge.train`.

    TRL draws prompts from `dataset`, which is the task with the number of each row in its prompt:
    TRL hands over nothing but the prompt. `rewards` score an episode's output. `name` is the batch
    source in the run's files.

    TRL averages an episode's loss over its sampled tokens, the kit over each turn's, then turns.
    """

    def __init__(self, prompts: PromptBatches, system: AgentSystem) -> None:
        if system.context != "append":
            raise ValueError(f"context is {system.context!r}: TRL needs a system with 'append'.")
        self.system, self.rows = system, prompts.task.train
        self.max_new_tokens = prompts.config.max_completion_length  # of an action
        self.dataset = self.rows.map(_numbered, with_indices=True)
        self.rewards = [of_output(reward) for reward in prompts.rewards]
        self.name = f"episodes, {system.max_turns} turns, {'+'.join(system.toolkit.names)}"

    def __call__(self, prompts: Sequence[list[dict]], trainer: Any) -> dict[str, list]:
        """Play an episode for each prompt, which TRL repeats once per completion."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        system = self.system.with_planner(Policy(model, trainer.processing_class))
        rows = [self.rows[prompt[-1]["row"]] for prompt in prompts]
        options = {"temperature": trainer.args.temperature, "max_new_tokens": self.max_new_tokens}
        episodes = play(system, rows, **options)
        sequences = [one_sequence(episode) for episode in episodes]
        fields = {name: [sequence[name] for sequence in sequences] for name in sequences[0]}
        return fields | {"output": [episode.output for episode in episodes]}


def _numbered(row: dict, number: int) -> dict:
    *before, last = row["prompt"]
    return {"prompt": [*before, last | {"row": number}]}


def one_sequence(episode: Episode) -> dict[str, list]:
    """An append-only episode for TRL: `prompt_ids` of the first turn, then all that follows.

    `logprobs` and `env_mask` are 0 at tokens that were not sampled.
    """
    ids = start = list(episode.turns[0].prompt_ids)
    mask, logprobs = [], []
    for turn in episode.turns:
        between = len(turn.prompt_ids) - len(ids)
        ids = list(turn.prompt_ids) + list(turn.completion_ids)
        mask += [0] * between + [1] * len(turn.completion_ids)
        logprobs += [0.0] * between + list(turn.logprobs)
    sampled = {"completion_ids": ids[len(start) :], "logprobs": logprobs, "env_mask": mask}
    return {"prompt_ids": start} | sampled


def of_output(reward: Callable) -> Callable:
    """The reward of an episode's final output instead of the planner's text."""

    async def outcome(*, completions: Sequence, output: Sequence[str], **columns) -> list:
        scores = reward(completions=list(output), **columns)
        return await scores if inspect.isawaitable(scores) else scores

    outcome.__name__ = reward_name(reward)
    return outcome
