"""GRPO on the planner's turns: collect episodes, score them, broadcast the reward, learn.

`FlowGRPO` is a collector of `grpo_kit.training.train`: the loop, the update and the checkpoints are
those of every other run. Only the planner's tokens are ever in a batch; what tools and frozen roles
wrote is in prompts at most, which have no loss.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch

from grpo_kit.config import GRPOConfig
from grpo_kit.flow.episodes import PER, Episode, Turn, episode_advantages, turn_rows
from grpo_kit.flow.rollout import AgentSystem, play
from grpo_kit.flow.toolbox import NOT_FOUND
from grpo_kit.models import Policy
from grpo_kit.objective import combine_rewards
from grpo_kit.rewards import accuracy_reward
from grpo_kit.rewards.scoring import reward_name, score_texts
from grpo_kit.training import Batch, PromptBatches

CREDIT = ("all", "final")


def score_episodes(
    episodes: Sequence[Episode],
    rewards: Sequence[Callable],
    weights: Sequence[float] | None = None,
    state: Any = None,
    logged: dict[str, list[float]] | None = None,
) -> torch.Tensor:
    """Score final outputs, set each episode's `reward`; returns the table, (N, R), NaN = unscored.

    Rewards are those of any task: they get the question as prompt, the output as completion and the
    row's columns, but no completion ids, as no policy of ours sampled the output. An episode whose
    output could not be had (an endpoint's failure) is not scored.
    """
    table = score_texts(
        [episode.output or "" for episode in episodes],  # all, so that groups stay complete
        [[] for _ in episodes],
        [episode.row for episode in episodes],
        rewards,
        state,
        logged,
    )
    table[torch.tensor([episode.output is None for episode in episodes])] = math.nan
    for episode, reward in zip(episodes, combine_rewards(table, weights).tolist(), strict=True):
        episode.reward = None if math.isnan(reward) else reward
    return table


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """What there is to see of episodes, means an episode unless told otherwise.

    `turns`; `tool_errors`, the share of turns that brought nothing (no plan, no call, a tool's
    error, or nothing found); `repeated_calls`, the share of turns whose call had been made before;
    `stopped`, the share of episodes that the verifier ended.
    """
    steps = [step for episode in episodes for step in episode.memory.steps]
    failed = sum(step.error or step.result == NOT_FOUND for step in steps)
    repeated = sum(
        len(calls) - len(set(calls))
        for calls in ([s.call for s in e.memory.steps if not s.error] for e in episodes)
    )
    return {
        "turns": fmean(len(episode.turns) for episode in episodes),
        "tool_errors": failed / max(len(steps), 1),
        "repeated_calls": repeated / max(len(steps), 1),
        "stopped": fmean(episode.stopped == "verifier" for episode in episodes),
    }


class FlowGRPO:
    """Steps of Flow-GRPO (AgentFlow, arXiv 2510.05592, eq. 4-7 and 10); a collector for `train`.

    `train(..., collector=partial(FlowGRPO, system=system))`. A step plays
    `generation_batch_size` episodes, `num_generations` a question; all turns of an episode get its
    advantage. With loss_type "grpo" the loss is eq. 10's, 1/G over episodes, 1/T_i over turns,
    1/|a| over tokens; with "dapo" all of the batch's tokens count the same. `max_completion_length`
    is the limit of an action. `num_generated_tokens` are the planner's.

    Args:
        prompts: made by `train`.
        system: whose planner is replaced by the policy that is trained.
        per: "trajectory" (the paper), or "turn": see `episode_advantages`.
        credit: "all" turns (the paper), or only the "final" one, for comparison; its weight in eq.
            10 stays 1/T_i, so that its gradient is smaller, too.

    Raises ValueError for what a config asks for and this cannot do.
    """

    def __init__(
        self,
        prompts: PromptBatches,
        system: AgentSystem,
        *,
        per: str = "trajectory",
        credit: str = "all",
    ) -> None:
        config = prompts.config
        if per not in PER or credit not in CREDIT:
            raise ValueError(
                f"per is {per!r} and credit {credit!r}; choose {' or '.join(PER)}, and "
                f"{' or '.join(CREDIT)}."
            )
        for name, only in {
            "dynamic_sampling_rounds": 0,
            "rollout_chunks": 1,
            "multi_objective_aggregation": "sum_then_normalize",
        }.items():
            if getattr(config, name) != only:
                raise ValueError(
                    f"{name} is {getattr(config, name)!r}, which episodes of several turns do not "
                    f"have: set it to {only!r}."
                )
        if config.scale_rewards == "batch":
            raise ValueError("scale_rewards 'batch' has no meaning here: choose 'group' or 'none'.")
        if config.eval_prompts:
            raise ValueError(
                f"eval_prompts is {config.eval_prompts}, which would ask the planner for an answer "
                "in one turn: set it to 0 and give `train` measure=partial(evaluate_episodes, ...)."
            )
        for tool in system.toolkit.tools.values():
            if missing := set(tool.columns) - set(prompts.task.train.column_names):
                raise ValueError(
                    f"the tool {tool.name} takes the column {min(missing)!r}, which task "
                    f"{prompts.task.name!r} lacks; it has "
                    f"{', '.join(prompts.task.train.column_names)}."
                )
        self.prompts, self.per, self.credit = prompts, per, credit
        self.system = system.with_planner(prompts.policy)
        self.name = (  # what a resumed run must have in common
            f"flow-grpo, {system.context}, per {per}, credit {credit}, {system.max_turns} turns, "
            f"{system.episode_timeout:g} s, {'+'.join(system.toolkit.names)}"
        )

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        episodes, table, logged = self.episodes(generator, state)
        batch = self.batch(episodes, table)
        metrics |= self.metrics(episodes, batch) | {k: fmean(v) for k, v in logged.items()}
        yield batch

    def episodes(
        self, generator: torch.Generator, state: Any = None
    ) -> tuple[list[Episode], torch.Tensor, dict[str, list[float]]]:
        """Scored episodes of the next questions, their table, and what the rewards logged."""
        config, logged = self.prompts.config, {}
        places = self.prompts.order.take(config.generation_batch_size // config.num_generations)
        episodes = play(
            self.system,
            [self.prompts.task.train[place] for place in places],
            config.num_generations,
            generator=generator,
            temperature=config.temperature,
            max_new_tokens=config.max_completion_length,
        )
        table = score_episodes(episodes, self.prompts.rewards, config.reward_weights, state, logged)
        return episodes, table, logged

    def batch(self, episodes: Sequence[Episode], table: torch.Tensor) -> Batch:
        """The turns of episodes as a batch to learn from."""
        config, policy = self.prompts.config, self.prompts.policy
        advantages = episode_advantages(episodes, self.per, scale_rewards=config.scale_rewards)
        names = [reward_name(reward) for reward in self.prompts.rewards]
        return turn_batch(policy, episodes, names, table, advantages, self.credit)

    def metrics(self, episodes: Sequence[Episode], batch: Batch) -> dict[str, float]:
        """TRL's metrics, of episodes where they are of completions elsewhere, and `episode/…`."""
        size = self.prompts.config.num_generations
        first = batch.episode_index.diff(prepend=torch.tensor([-1])).bool()  # a row an episode
        outcome = dataclasses.replace(
            batch,
            rewards_per_func=batch.rewards_per_func[first],
            rewards=batch.rewards[first],
            num_generations=size,
        )
        return {
            **outcome.metrics(),
            "generated_tokens": batch.generated_tokens,
            **{f"episode/{name}": value for name, value in episode_metrics(episodes).items()},
        }

    def state_dict(self) -> dict:
        return self.prompts.state_dict()

    def load_state_dict(self, state: dict) -> None:
        self.prompts.load_state_dict(state)


def turn_batch(
    policy: Policy,
    episodes: Sequence[Episode],
    names: list[str],
    table: torch.Tensor,
    advantages: torch.Tensor,
    credit: str = "all",
) -> Batch:
    """All turns as a `Batch`, a row each: reward and advantage of its episode, broadcast.

    names, table: of the rewards, R, and their values, (N, R). With credit "final" only an episode's
    last turn has the advantage, the others 0.
    """
    rollouts, index = turn_rows(episodes, policy.pad_token_id, policy.device)
    index = index.cpu()
    own = advantages[index]
    if credit == "final":
        own = own.where(index.diff(append=torch.tensor([-1])).bool(), 0.0)
    totals = torch.tensor([math.nan if e.reward is None else e.reward for e in episodes])
    return Batch(
        rollouts,
        names,
        table[index],
        totals[index],
        own,
        1,
        [episodes[i].row for i in index.tolist()],
        generated_tokens=int(rollouts.mask.sum()),
        episode_index=index,
    )


class OfflineTraces:
    """The planner fine-tuned on successful traces, for comparison; a collector for `train`.

    At its first step it plays the episodes of all steps with the policy as it is, and keeps the
    successful ones. Every step learns from `generation_batch_size` of those, drawn in turn, with
    advantage 1 and nothing against the others: the gradient is that of the log-likelihood of the
    kept actions. It never plays again, so it never sees what its own errors lead to.

    Raises ValueError for a config with more than one update a step, a KL term or a limit of tokens
    (all of a run's are generated at its first step); RuntimeError where no episode succeeds.
    """

    def __init__(self, prompts: PromptBatches, system: AgentSystem) -> None:
        if prompts.config.updates_per_step != 1:
            raise ValueError(
                f"there are {prompts.config.updates_per_step} updates a step; likelihood has no "
                "ratio to an older policy, so take one."
            )
        if prompts.config.beta or prompts.config.max_generated_tokens:
            raise ValueError(
                f"beta is {prompts.config.beta} and max_generated_tokens "
                f"{prompts.config.max_generated_tokens}; learning from traces has neither: set 0 "
                "and None."
            )
        self.flow = FlowGRPO(prompts, system)
        self.name = f"offline traces, {self.flow.name}"
        self.traces: list[Episode] = []

    def __call__(self, generator: torch.Generator, state: Any, metrics: dict) -> Iterator[Batch]:
        config = self.flow.prompts.config
        metrics["generated_tokens"] = 0
        if not self.traces:
            for _ in range(state.max_steps):
                episodes, _, _ = self.flow.episodes(generator, state)
                metrics["generated_tokens"] += sum(
                    len(turn.completion_ids) for episode in episodes for turn in episode.turns
                )
                self.traces += [e for e in episodes if e.reward is not None and e.reward >= 1]
            random.Random(self.flow.prompts.seed).shuffle(self.traces)  # a group's stood together
            metrics["offline/traces"] = len(self.traces)
            if not self.traces:
                raise RuntimeError(
                    f"none of {state.max_steps * config.generation_batch_size} episodes earned a "
                    "reward of 1: there is no trace to learn from."
                )
        size = config.generation_batch_size
        first = state.global_step * size
        drawn = [self.traces[i % len(self.traces)] for i in range(first, first + size)]
        ones = torch.ones(size)
        yield turn_batch(self.flow.prompts.policy, drawn, ["success"], ones[:, None], ones)

    def state_dict(self) -> dict:
        traces = [[dataclasses.astuple(turn) for turn in e.turns] for e in self.traces]
        return {"flow": self.flow.state_dict(), "traces": traces}

    def load_state_dict(self, state: dict) -> None:
        self.flow.load_state_dict(state["flow"])
        self.traces = [
            Episode(i, 1.0, [Turn(*turn) for turn in turns])
            for i, turns in enumerate(state["traces"])
        ]


# --- measuring ------------------------------------------------------------------------------------


def evaluate_episodes(
    policy: Policy,
    system: AgentSystem,
    dataset,
    config: GRPOConfig,
    *,
    questions: int = 128,
    samples: int = 2,
    seed: int = 0,
    correct: Callable = accuracy_reward,
) -> dict[str, float]:
    """Success on the first `questions` rows, the planner sampled (`samples` times) and greedy.

    Returns `eval/pass@1` and `eval/greedy`, shares of episodes whose output `correct` gives 1, and
    of the sampled ones `eval/turns`, `eval/tool_errors`, `eval/repeated_calls`, `eval/stopped` (see
    `episode_metrics`), and `eval/n`. To be given to `train` as `measure`, with `eval_prompts` 0.
    """
    rows = list(dataset.select(range(min(questions, len(dataset)))))
    system = system.with_planner(policy)
    options = {
        "temperature": config.temperature,
        "max_new_tokens": config.max_completion_length,
        "batch_size": config.evaluation_batch_size,
    }
    generator = torch.Generator().manual_seed(seed)
    sampled = play(system, rows, samples, generator=generator, **options)
    greedy = play(system, rows, do_sample=False, **options)
    right = [score_episodes(episodes, [correct])[:, 0] == 1 for episodes in (sampled, greedy)]
    return {
        "eval/pass@1": right[0].float().mean().item(),
        "eval/greedy": right[1].float().mean().item(),
        **{f"eval/{name}": value for name, value in episode_metrics(sampled).items()},
        "eval/n": len(rows),
    }
