"""GRPO on the planner's turns: collect episodes, score them, broadcast the reward, learn.

`FlowGRPO` is a batch source of `grpo_kit.training.train`. A batch holds only the planner's tokens;
the texts of tools and frozen roles appear in prompts at most, which have no loss.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from grpo_kit.config import GRPOConfig
from grpo_kit.flow.episodes import PER, Episode, Turn, episode_advantages, rewards_of, turn_rows
from grpo_kit.flow.rollout import AgentSystem, play
from grpo_kit.flow.toolbox import NOT_FOUND
from grpo_kit.models import Policy
from grpo_kit.objective import combine_rewards
from grpo_kit.rewards import accuracy_reward
from grpo_kit.rewards.scoring import reward_names, score_texts
from grpo_kit.training import Batch, PromptBatches

CHOICES = {  # the settings that episodes of several turns support
    "dynamic_sampling_rounds": (0,),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "eval_prompts": (0,),  # they would ask the planner for an answer in one turn
}


def score_episodes(
    episodes: Sequence[Episode], rewards: Sequence[Callable], weights=None, state=None, logged=None
) -> Tensor:
    """Score final outputs and set each episode's `reward`; returns (N, R) rewards, NaN = unscored.

    A reward's `completion_ids` are all that the planner wrote. See `scoring.score_texts`.
    """
    texts = [episode.output for episode in episodes]
    rows = [episode.row for episode in episodes]
    ids = [[i for turn in episode.turns for i in turn.completion_ids] for episode in episodes]
    rewards_per_func = score_texts(texts, ids, rows, rewards, state, logged)
    totals = combine_rewards(rewards_per_func, weights).tolist()
    for episode, reward in zip(episodes, totals, strict=True):
        episode.reward = None if math.isnan(reward) else reward
    return rewards_per_func


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean `turns`, the share `stopped` by the verifier, and two shares of all turns.

    `tool_errors` (no plan, no call, an error, or nothing found) and `repeated_calls`.
    """
    steps = [step for episode in episodes for step in episode.memory.steps]
    calls = [[s.call for s in episode.memory.steps if not s.error] for episode in episodes]
    return {
        "turns": fmean(len(episode.turns) for episode in episodes),
        "tool_errors": sum(s.error or s.result == NOT_FOUND for s in steps) / max(len(steps), 1),
        "repeated_calls": sum(len(own) - len(set(own)) for own in calls) / max(len(steps), 1),
        "stopped": fmean(episode.stopped == "verifier" for episode in episodes),
    }


class FlowGRPO:
    """Steps of Flow-GRPO (AgentFlow, arXiv 2510.05592, eq. 4-7 and 10): a batch source for `train`.

    A step plays `generation_batch_size` episodes of `system` around the trained policy; all turns
    of an episode get its advantage. loss_type "grpo" is eq. 10: 1/G over episodes, 1/T_i over
    turns, 1/|a| over tokens. `max_completion_length` limits an action.

    per: see `episode_advantages`. credit: "all" turns (the paper), or, for comparison, only the
    "final" one, whose weight stays 1/T_i.
    """

    def __init__(
        self, prompts: PromptBatches, system: AgentSystem, *, per="trajectory", credit="all"
    ) -> None:
        config = prompts.config
        given = {"per": per, "credit": credit} | {name: getattr(config, name) for name in CHOICES}
        for name, choices in ({"per": PER, "credit": ("all", "final")} | CHOICES).items():
            if given[name] not in choices:
                needed = f"{' or '.join(map(repr, choices))} (and evaluate_episodes)"
                raise ValueError(f"{name} is {given[name]!r}; episodes need {needed}.")
        if per == "turn" and "batch" in (config.baseline, config.scale_rewards):
            problem = "baseline or scale_rewards is 'batch', which takes all episodes at once"
            raise ValueError(f"{problem}, but per='turn' takes one group: choose 'trajectory'.")
        self.prompts, self.per, self.credit = prompts, per, credit
        self.system = system.with_planner(prompts.policy)
        self.state_dict, self.load_state_dict = prompts.state_dict, prompts.load_state_dict
        self.name = (  # what a resumed run must have in common
            f"flow-grpo, memory, per {per}, credit {credit}, {system.max_turns} turns, "
            f"{'+'.join(system.toolkit.names)}"
        )

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        episodes, rewards_per_func, logged = self.episodes(generator, state)
        names = reward_names(self.prompts.rewards)
        batch = self.batch(episodes, names, rewards_per_func, self.advantages(episodes))
        metrics |= dataclasses.replace(  # rewards by episode, completions by turn
            batch, rewards_per_func=rewards_per_func, rewards=rewards_of(episodes),
            num_generations=self.prompts.config.num_generations, logged=logged,
        ).metrics()  # fmt: skip
        metrics["generated_tokens"] = batch.generated_tokens
        metrics |= {f"episode/{name}": value for name, value in episode_metrics(episodes).items()}
        yield batch

    def advantages(self, episodes: Sequence[Episode]) -> Tensor:
        """The advantage of each of E scored episodes, which stand in whole groups; (E,) float."""
        compare = self.prompts.advantages
        if self.per == "turn":  # groups of different numbers of rows, one at a time
            return episode_advantages(episodes, "turn", advantages=compare)
        return compare(rewards_of(episodes), self.prompts.config.num_generations)

    def episodes(
        self, generator: torch.Generator, state: Any = None
    ) -> tuple[list[Episode], Tensor, dict[str, list[float]]]:
        """Scored episodes of the next questions, their (N, R) rewards, and what rewards logged."""
        config, logged = self.prompts.config, {}
        places = self.prompts.take(config.generation_batch_size // config.num_generations)
        rows = [self.prompts.rows[place] for place in places]
        episodes = play(
            self.system, rows, config.num_generations, generator=generator,
            temperature=config.temperature, max_new_tokens=config.max_completion_length,
        )  # fmt: skip
        weights = config.reward_weights
        rewards = score_episodes(episodes, self.prompts.rewards, weights, state, logged)
        return episodes, rewards, logged

    def batch(
        self, episodes: Sequence[Episode], names: list[str], rewards_per_func: Tensor, advantages
    ) -> Batch:
        """All turns as a `Batch`, one row each, with rewards and advantage of its episode."""
        rollouts, index = turn_rows(episodes, self.prompts.policy)
        own = advantages[index]
        if self.credit == "final":
            own = own.where(index.diff(append=torch.tensor([-1])).bool(), 0.0)
        return Batch(
            rollouts, names, rewards_per_func[index], rewards_of(episodes)[index], own, 1,
            [episodes[i].row for i in index.tolist()],
            generated_tokens=int(rollouts.mask.sum()), episode_index=index,
        )  # fmt: skip


class OfflineTraces:
    """The planner fine-tuned on successful traces, for comparison: a batch source for `train`.

    The first step plays the episodes of all steps with the untrained policy and keeps the
    successful ones. Every step learns from the next of them with advantage 1.
    """

    def __init__(self, prompts: PromptBatches, system: AgentSystem) -> None:
        config = prompts.config
        given = (config.updates_per_step, config.beta, config.max_generated_tokens)
        if given != (1, 0, None):
            names = "updates a step, beta, max_generated_tokens"
            raise ValueError(f"{names} are {given}; traces need (1, 0, None).")
        if prompts.own_advantages:
            problem = "offline traces all have advantage 1 and would ignore the advantages hook"
            raise ValueError(f"{problem}: leave it out, or train by FlowGRPO.")
        self.flow = FlowGRPO(prompts, system)
        self.name = f"offline traces, {self.flow.name}"
        self.traces: list[Episode] = []

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        size = self.flow.prompts.config.generation_batch_size
        metrics["generated_tokens"] = 0
        if not self.traces:
            for _ in range(state.max_steps):
                episodes, _, _ = self.flow.episodes(generator, state)
                turns = [turn for episode in episodes for turn in episode.turns]
                metrics["generated_tokens"] += sum(len(turn.completion_ids) for turn in turns)
                self.traces += [e for e in episodes if e.reward is not None and e.reward >= 1]
            random.Random(self.flow.prompts.seed).shuffle(self.traces)  # a group's stood together
            metrics["offline/traces"] = len(self.traces)
            if not self.traces:
                none = f"none of {state.max_steps * size} episodes earned a reward of 1"
                raise RuntimeError(f"{none}: take an easier task or a better policy.")
        first = state.global_step * size
        traces = [self.traces[i % len(self.traces)] for i in range(first, first + size)]
        ones = torch.ones(size)
        yield self.flow.batch(traces, ["success"], ones[:, None], ones)

    def state_dict(self) -> dict:
        traces = [[dataclasses.astuple(turn) for turn in e.turns] for e in self.traces]
        return {"flow": self.flow.state_dict(), "traces": traces}

    def load_state_dict(self, state: dict) -> None:
        self.flow.load_state_dict(state["flow"])
        traces = enumerate(state["traces"])
        self.traces = [Episode(i, 1.0, [Turn(*turn) for turn in turns]) for i, turns in traces]


def evaluate_episodes(
    policy: Policy, system: AgentSystem, dataset, config: GRPOConfig,
    *, questions: int = 128, samples: int = 2, seed: int = 0, correct: Callable = accuracy_reward,
) -> dict[str, float]:  # fmt: skip
    """Success on the first `questions` rows, `samples` episodes each and a greedy one.

    Returns `eval/pass@1` (sampled) and `eval/greedy`, shares of episodes whose output is right,
    which is where the reward `correct` is 1;
    `episode_metrics` of the sampled ones as `eval/…`; and `eval/n`.
    """
    rows = list(dataset.select(range(min(questions, len(dataset)))))
    play_all = partial(
        play, system.with_planner(policy), rows, temperature=config.temperature,
        max_new_tokens=config.max_completion_length, batch_size=config.evaluation_batch_size,
    )  # fmt: skip
    sampled = play_all(samples, generator=torch.Generator().manual_seed(seed))
    greedy = play_all(do_sample=False)
    right = [score_episodes(part, [correct])[:, 0] == 1 for part in (sampled, greedy)]
    return {
        "eval/pass@1": right[0].float().mean().item(),
        "eval/greedy": right[1].float().mean().item(),
        **{f"eval/{name}": value for name, value in episode_metrics(sampled).items()},
        "eval/n": len(rows),
    }
