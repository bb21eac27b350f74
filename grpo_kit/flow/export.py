"""The same episodes under TRL: a `rollout_func` for its `GRPOTrainer` (tested with TRL 1.16).

TRL trains on one sequence a completion: prompt, then everything that follows, with a mask that says
which of it the policy sampled. An episode fits if each turn's context is the one before with more
at its end (`AgentSystem(context="append")`). Where the context is written anew each turn, as memory
is in AgentFlow, it does not: its turns are separate (prompt, action) rows that share an advantage.
Engines that train such rows ("step-wise") take them; `turn_rows` and `episode_advantages` are what
they need.

    trainer = GRPOTrainer(
        model, [of_output(accuracy_reward)], train_dataset=trl_dataset(task.train),
        rollout_func=trl_rollout(system, task.train), args=...,
    )
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
    """An append-only episode as TRL takes it.

    Returns `prompt_ids` of the first turn; `completion_ids`, all that follows; `logprobs`, 0 at
    what was not sampled; and `env_mask`, 1 at tokens that the policy sampled, else 0.

    Raises ValueError for an episode without turns, or one whose contexts were written anew.
    """
    if not episode.turns:
        raise ValueError("the episode has no turn: there is nothing to train on.")
    first, *others = episode.turns
    ids = list(first.prompt_ids) + list(first.completion_ids)
    start = len(first.prompt_ids)
    mask, logprobs = [1] * len(first.completion_ids), list(first.logprobs)
    for number, turn in enumerate(others, 2):
        if turn.prompt_ids[: len(ids)] != ids:
            raise ValueError(
                f"the prompt of turn {number} does not continue turn {number - 1}: its context was "
                "written anew, so that the episode is no single sequence. Play it with "
                "AgentSystem(context='append'), or train its turns as rows (turn_rows)."
            )
        between = len(turn.prompt_ids) - len(ids)
        ids = list(turn.prompt_ids) + list(turn.completion_ids)
        mask += [0] * between + [1] * len(turn.completion_ids)
        logprobs += [0.0] * between + list(turn.logprobs)
    return {
        "prompt_ids": ids[:start],
        "completion_ids": ids[start:],
        "logprobs": logprobs,
        "env_mask": mask,
    }


def trl_dataset(dataset: datasets.Dataset) -> datasets.Dataset:
    """The rows with their numbers in their prompts, which is all of a row that TRL hands over."""

    def numbered(row: dict, i: int) -> dict:
        return {"prompt": [*row["prompt"][:-1], {**row["prompt"][-1], "row": i}]}

    return dataset.map(numbered, with_indices=True)


def trl_rollout(
    system: AgentSystem, dataset: datasets.Dataset, *, max_new_tokens: int = 64
) -> Callable[[list, Any], dict[str, list]]:
    """A `rollout_func`: plays `dataset`'s rows with the trainer's model as the planner.

    `max_new_tokens` is the limit of an action; TRL's `max_completion_length` is of whole episodes.
    Beside TRL's fields it returns `output`, the final output of each episode, for `of_output`.

    Raises ValueError unless the system's context is "append", and in a rollout for a prompt that is
    not one of `dataset` (of an `eval_dataset`, say: give it that very dataset).
    """
    if system.context != "append":
        raise ValueError(
            f"context is {system.context!r}: TRL trains one sequence a completion, which an "
            "episode is with context='append' only."
        )

    def rollout(prompts: list[list[dict]], trainer: Any) -> dict[str, list]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        policy = Policy(model, trainer.processing_class)
        rows = [dataset[prompt[-1].get("row", 0) % len(dataset)] for prompt in prompts]
        for prompt, row in zip(prompts, rows, strict=True):
            if "row" not in prompt[-1] or question_text(prompt) != question_text(row["prompt"]):
                raise ValueError(
                    f"the prompt {question_text(prompt)!r} is none of the dataset's rows: make the "
                    "trainer's dataset by trl_dataset from the one that trl_rollout was given."
                )
        episodes = play(  # TRL gives each prompt as often as it wants completions
            system.with_planner(policy),
            rows,
            temperature=trainer.args.temperature,
            max_new_tokens=max_new_tokens,
        )
        sequences = [one_sequence(episode) for episode in episodes]
        return {
            **{name: [sequence[name] for sequence in sequences] for name in sequences[0]},
            "output": [episode.output for episode in episodes],
        }

    return rollout


def of_output(reward: Callable) -> Callable:
    """The reward, of an episode's final output in place of all that the planner wrote.

    None where there is no output. A coroutine function stays one.
    """

    def given(prompts: Sequence, output: Sequence[str | None], columns: dict) -> dict:
        texts = [text or "" for text in output]  # all, so that groups stay complete
        return {"prompts": prompts, "completions": texts, **columns}

    def kept(values: Sequence, output: Sequence[str | None]) -> list:
        return [v if text is not None else None for v, text in zip(values, output, strict=True)]

    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__):

        async def outcome(prompts: Sequence, completions: Sequence, output: Sequence, **columns):
            return kept(await reward(**given(prompts, output, columns)), output)

    else:

        def outcome(prompts: Sequence, completions: Sequence, output: Sequence, **columns):
            return kept(reward(**given(prompts, output, columns)), output)

    outcome.__name__ = reward_name(reward)
    return outcome
