"""Flow-GRPO's episodes, sampled for TRL's trainer in place of one answer a prompt.

`Episodes` is a `rollout` of `trl_bridge.train`: it gets the prompts of a process and returns what
TRL's `rollout_func` has to. TRL draws prompts from `dataset` and pays episodes by `rewards`; `name`
is the batch source in the run's files.
"""

from collections.abc import Sequence
from typing import Any

from grpo_kit.flow import AgentSystem
from grpo_kit.flow.export import of_output, trl_dataset, trl_rollout
from grpo_kit.training import PromptBatches


class Episodes:
    """Flow-GRPO's episodes, each one growing text, paid by its output.

    TRL averages an episode's loss over its sampled tokens, the kit over each turn's, then turns.
    """

    def __init__(self, prompts: PromptBatches, system: AgentSystem) -> None:
        rows, length = prompts.task.train, prompts.config.max_completion_length
        self.play = trl_rollout(system, rows, max_new_tokens=length)
        self.dataset, self.rewards = trl_dataset(rows), list(map(of_output, prompts.rewards))
        self.name = f"episodes, {system.max_turns} turns, {'+'.join(system.toolkit.names)}"

    def __call__(self, prompts: Sequence[list[dict]], trainer: Any) -> dict[str, list]:
        return self.play(prompts, trainer)
