"""Episodes of several turns: memory, token ids, advantages, and the rows to train on.

Training uses the very ids that were read and sampled, never a text encoded again. A memory never
changes in place, so no episode can write into another's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from grpo_kit.generation import Rollouts
from grpo_kit.models import Policy
from grpo_kit.objective import group_advantages
from grpo_kit.rewards.judge.texts import fenced

PER = ("trajectory", "turn")


@dataclass(frozen=True)
class Action:
    """The planner's decision a_t; `problem` says why a completion is not a plan, else ""."""

    justification: str = ""
    context: str = ""
    goal: str = ""
    tool: str = ""
    problem: str = ""

    @property
    def step(self) -> tuple[str, str, str]:
        return self.context, self.goal, self.tool


@dataclass(frozen=True)
class Step:
    """One line of memory. verdict: "STOP", "CONTINUE", or "" where the verifier says neither."""

    action: Action
    call: str
    result: str
    error: bool = False
    verdict: str = ""


@dataclass(frozen=True)
class Memory:
    """The steps so far; `str(memory)` is what the roles read."""

    steps: tuple[Step, ...] = ()

    def updated(self, step: Step) -> Memory:
        """M_{t+1} = f(M_t, a_t, e_t, v_t)."""
        return Memory((*self.steps, step))

    def judged(self, verdict: str) -> Memory:
        """This memory with a verdict on its last step."""
        return Memory((*self.steps[:-1], replace(self.steps[-1], verdict=verdict)))

    def __str__(self) -> str:
        # no result can pose as a turn (`fenced` breaks role marks) or a step (lines are indented)
        lines = [
            f"{i}. {step.call} -> " + "\n   ".join(step.result.splitlines())
            for i, step in enumerate(self.steps, 1)
        ]
        return fenced("\n".join(lines)) or "empty"


@dataclass
class Turn:
    """One action of the planner, a_i^t: the ids that it read and sampled, EOS included.

    logprobs, entropies: per sampled token, nats. finished: False where the token limit cut it off.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finished: bool = True
    entropies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            sizes = f"{len(self.completion_ids)} completion ids and {len(self.logprobs)} logprobs"
            raise ValueError(f"a turn has {sizes}; give one per token, as they were sampled.")


@dataclass
class Episode:
    """A trajectory: its turns, and the one outcome reward that they share (None = not scored).

    group_id: the query that its group answers. stopped: "verifier", "turn limit" or "context" (no
    room left).
    """

    group_id: Hashable
    reward: float | None
    turns: list[Turn]
    row: dict = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    output: str = ""
    stopped: str = ""


def rewards_of(episodes: Sequence[Episode]) -> Tensor:
    """The rewards of N episodes, (N,) float; NaN = not scored."""
    return torch.tensor([math.nan if e.reward is None else e.reward for e in episodes])


def episode_advantages(
    episodes: Sequence[Episode], per: str = "trajectory", *, advantages: Callable = group_advantages
) -> Tensor:
    """The advantage of each episode within its group, the same for all of its turns; (N,) float.

    A_i = (R_i - mean_G R) / (std_G R + eps), AgentFlow (arXiv 2510.05592) eq. 7, as in
    `objective.group_advantages`. A group shares a `group_id`; it may be of any size.

    per: "trajectory" (the paper) takes mean and std over the episodes of a group; "turn" (the
    public code) over its turn rows, so that an episode of six turns counts six times.
    advantages: the function that compares one group, `(rewards, num_generations) -> (N,)`.
    """
    if per not in PER:
        raise ValueError(f"per is {per!r}; choose 'trajectory' or 'turn'.")
    groups = defaultdict(list)
    for i, episode in enumerate(episodes):
        groups[episode.group_id].append(i)
    rewards, values = rewards_of(episodes), torch.zeros(len(episodes))
    for group in groups.values():
        rows = [i for i in group for _ in range(len(episodes[i].turns) if per == "turn" else 1)]
        values[rows] = advantages(rewards[rows], len(rows))
    return values


def turn_rows(episodes: Sequence[Episode], policy: Policy) -> tuple[Rollouts, Tensor]:
    """All turns as rows to train on, episode by episode, and the episode of each row, (N,) long."""
    turns = [turn for episode in episodes for turn in episode.turns]
    rollouts = Rollouts.given(
        [turn.prompt_ids for turn in turns], [turn.completion_ids for turn in turns], policy,
        logps=[turn.logprobs for turn in turns], entropies=[turn.entropies for turn in turns],
        finished=[turn.finished for turn in turns],
    )  # fmt: skip
    index = [i for i, episode in enumerate(episodes) for _ in episode.turns]
    return rollouts, torch.tensor(index)
