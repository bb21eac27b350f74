"""Episodes for TRL's trainer: a `rollout_func`, its dataset, and rewards of an episode's output.

TRL trains on one sequence per completion, so each turn's context has to extend the one before
(`AgentSystem(context="append")`). `trl_rollouts.Episodes` puts these parts together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_kit.flow.episodes import Episode
from grpo_kit.flow.rollout import AgentSystem, play
from grpo_kit.models import Policy
from grpo_kit.rewards import question_text
from grpo_kit.rewards.scoring import reward_name

if TYPE_CHECKING:
    import datasets


def one_sequence(episode: Episode) -> dict[str, list]:
    """An append-only episode for TRL: `prompt_ids` of the first turn, then all that follows.

    `logprobs` and `env_mask` are 0 at tokens that were not sampled.
    """
    ids = start = list(episode.turns[0].prompt_ids)
    mask, logprobs = [], []
    for number, turn in enumerate(episode.turns, 1):
        if turn.prompt_ids[: len(ids)] != ids:
            remedy = "play with context='append', or train on turn_rows"
            raise ValueError(f"turn {number} does not continue turn {number - 1}: {remedy}.")
        between = len(turn.prompt_ids) - len(ids)
        ids = list(turn.prompt_ids) + list(turn.completion_ids)
        mask += [0] * between + [1] * len(turn.completion_ids)
        logprobs += [0.0] * between + list(turn.logprobs)
    sampled = {"completion_ids": ids[len(start) :], "logprobs": logprobs, "env_mask": mask}
    return {"prompt_ids": start} | sampled


def trl_dataset(dataset: datasets.Dataset) -> datasets.Dataset:
    """The rows with their numbers inside their prompts: TRL hands over nothing but the prompt."""

    def numbered(row: dict, i: int) -> dict:
        return {"prompt": [*row["prompt"][:-1], {**row["prompt"][-1], "row": i}]}

    return dataset.map(numbered, with_indices=True)


def numbered_rows(prompts: Sequence[list[dict]], dataset: datasets.Dataset) -> list[dict]:
    """The rows that `trl_dataset` has numbered. Raises ValueError where they are of another one."""
    rows = [dataset[prompt[-1].get("row", 0) % len(dataset)] for prompt in prompts]
    for prompt, row in zip(prompts, rows, strict=True):
        question = question_text(prompt)
        if "row" not in prompt[-1] or question != question_text(row["prompt"]):
            remedy = "give trl_dataset and trl_rollout the same dataset"
            raise ValueError(f"{question!r} is none of the dataset's rows: {remedy}.")
    return rows


def trl_rollout(
    system: AgentSystem, dataset: datasets.Dataset, *, max_new_tokens: int = 64
) -> Callable[[list, Any], dict[str, list]]:
    """A `rollout_func` that plays `dataset`'s rows with the trainer's model as the planner.

    `max_new_tokens` limits an action; TRL's `max_completion_length` limits whole episodes. Beside
    TRL's fields it returns `output`, each episode's final output, for `of_output`.
    """
    if system.context != "append":
        raise ValueError(f"context is {system.context!r}: TRL needs a system with 'append'.")

    def rollout(prompts: list[list[dict]], trainer: Any) -> dict[str, list]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        policy = Policy(model, trainer.processing_class)
        rows = numbered_rows(prompts, dataset)
        episodes = play(  # TRL repeats each prompt once per completion
            system.with_planner(policy), rows,
            temperature=trainer.args.temperature, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        sequences = [one_sequence(episode) for episode in episodes]
        return {
            **{name: [sequence[name] for sequence in sequences] for name in sequences[0]},
            "output": [episode.output for episode in episodes],
        }

    return rollout


def of_output(reward: Callable) -> Callable:
    """The reward of an episode's final output instead of the planner's text."""

    async def outcome(*, completions: Sequence, output: Sequence[str], **columns) -> list:
        scores = reward(completions=list(output), **columns)
        return await scores if inspect.isawaitable(scores) else scores

    outcome.__name__ = reward_name(reward)
    return outcome
