"""What TRL's trainer samples in place of one answer a prompt: verdicts as well, or whole episodes.

Each class is a `rollout` of `trl_bridge.train`: called with the prompts of a process, it returns
what TRL's `rollout_func` has to. `dataset` is what TRL draws prompts from, `rewards` score what
came of them, `kinds` are the columns of rewards that belong together (a completion needs a score
from all of one kind), and `name` says in the run's files what this was.
"""

from collections.abc import Callable, Sequence
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object

from grpo_kit.flow import AgentSystem
from grpo_kit.flow.export import numbered_rows, of_output, trl_dataset, trl_rollout
from grpo_kit.generation import reply
from grpo_kit.rewards.rules import VerificationReward
from grpo_kit.rewards.scoring import is_coroutine, reward_name
from grpo_kit.self_verification import (
    STRATEGIES,
    SelfVerification,
    VerificationItem,
    labelled,
    post_process,
    that_fit,
    verification_prompt,
)
from grpo_kit.training import PromptBatches


class Episodes:
    """Flow-GRPO's episodes, each one growing text, paid by its output.

    TRL averages an episode's loss over its sampled tokens, the kit over each turn's, then turns.
    """

    def __init__(self, prompts: PromptBatches, system: AgentSystem) -> None:
        rows, length = prompts.task.train, prompts.config.max_completion_length
        self.play = trl_rollout(system, rows, max_new_tokens=length)
        self.dataset, self.rewards = trl_dataset(rows), list(map(of_output, prompts.rewards))
        self.kinds = [list(range(len(self.rewards)))]
        self.name = f"episodes, {system.max_turns} turns, {'+'.join(system.toolkit.names)}"

    def __call__(self, prompts: Sequence[list[dict]], trainer: Any) -> dict[str, list]:
        return self.play(prompts, trainer)


class Verdicts:
    """Self-verification: every second group holds verdicts on the answers of the others ("mixed").

    As in `SelfVerification` the items are made anew at each step, from answers of all processes.
    Different here: a batch is always full, so an item may be asked about twice, and where a step
    has no items (all answers right, or all wrong), the second groups answer too. "self-verify"
    learns from verdicts only. Raises ValueError for "verify-alter", whose steps have two updates.
    """

    def __init__(self, prompts: PromptBatches, strategy: str = "mixed") -> None:
        self.name = SelfVerification(prompts, strategy).name  # raises where things do not fit
        self.prompts, self.schedule = prompts, STRATEGIES[strategy]
        if slow := [reward_name(r) for r in prompts.rewards if is_coroutine(r)]:
            remedy = "under TRL verdicts take plain functions: leave it out, or --engine kit"
            raise ValueError(f"{slow[0]} is a coroutine, {remedy}.")
        if strategy == "verify-alter":
            one = "TRL makes one update of a batch"
            raise ValueError(f"{strategy} makes two at some steps, {one}: choose another strategy.")
        self.dataset = trl_dataset(prompts.task.train)
        self.rewards = [_of(reward, False) for reward in prompts.rewards]
        self.kinds = [list(range(len(self.rewards))), [len(self.rewards)]]
        self.rewards.append(_of(VerificationReward(), True))

    def __call__(self, prompts: Sequence[list[dict]], trainer: Any) -> dict[str, list]:
        config = self.prompts.config
        rows = numbered_rows(prompts, self.prompts.task.train)
        step = trainer.state.global_step // config.updates_per_step
        (kinds,) = self.schedule(step, step / config.max_steps)
        first = PartialState().process_index * len(rows)
        groups = [(first + i) // config.num_generations for i in range(len(rows))]
        every = {"G": 0, "V": 1, "GV": 2}[kinds]  # group has verdicts
        asked = [i for i, group in enumerate(groups) if every and group % every == every - 1]
        answering = [i for i in range(len(rows)) if i not in asked or kinds == "V"]

        sampled = self._sample([rows[i]["prompt"] for i in answering])
        n = config.generation_batch_size // config.num_generations // max(every, 1)
        items = self._items([rows[i] for i in answering], sampled, trainer, n) if every else []
        item_of = {i: items[groups[i] // every % len(items)] for i in asked if items}
        verdicts = [verification_prompt(item_of[i]) if items else rows[i]["prompt"] for i in asked]
        by_row = dict(zip(answering, sampled, strict=True))
        by_row |= zip(asked, self._sample(verdicts), strict=True)
        in_order = [by_row[i] for i in range(len(rows))]
        return {
            **{name: [one[name] for one in in_order] for name in in_order[0]},
            "is_verdict": [kinds == "V" or i in item_of for i in range(len(rows))],
            "correct": [item_of[i].correct if i in item_of else None for i in range(len(rows))],
        }

    def _sample(self, conversations: Sequence[list[dict]]) -> list[dict[str, list]]:
        """One completion of each, as TRL wants it."""
        policy, config = self.prompts.policy, self.prompts.config
        if not conversations:
            return []
        rollouts = reply(
            policy, conversations, max_new_tokens=config.max_completion_length,
            temperature=config.temperature, batch_size=config.evaluation_batch_size,
        )  # fmt: skip
        completions, logps = rollouts.completion_lists(), rollouts.logps.tolist()
        return [
            {"prompt_ids": prompt, "completion_ids": ids, "logprobs": values[: len(ids)]}
            for prompt, ids, values in zip(rollouts.prompt_ids, completions, logps, strict=True)
        ]

    def _items(
        self, rows: Sequence[dict], sampled: Sequence[dict], trainer: Any, n: int
    ) -> list[VerificationItem]:
        """The items of a step, the same in all processes."""
        policy, config = self.prompts.policy, self.prompts.config
        texts = policy.decode([one["completion_ids"] for one in sampled])
        items = gather_object(labelled(rows, texts) if rows else [])
        seed = trainer.args.seed * 1_000_003 + trainer.state.global_step
        return post_process(that_fit(policy, items, config), seed, n=n)


def _of(reward: Callable, verdicts: bool) -> Callable:
    """`reward` of the verdicts, or of the answers, alone; None for the others."""

    def scored(is_verdict, **columns):
        n = len(is_verdict)
        own = [i for i, of_item in enumerate(is_verdict) if of_item == verdicts]
        for name, values in columns.items():
            if isinstance(values, list) and len(values) == n:
                columns[name] = [values[i] for i in own]
        scores = dict(zip(own, reward(**columns) if own else [], strict=True))
        return [scores.get(i) for i in range(n)]

    scored.__name__ = reward_name(reward)
    if hasattr(reward, "num_generations"):  # it is given whole groups
        scored.num_generations = reward.num_generations
    return scored
