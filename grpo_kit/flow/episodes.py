"""Episodes of several turns, their advantages, and the rows of tokens that are trained on.

An episode is ragged: T_i turns, each with the prompt that the planner read and the tokens that it
sampled. What is trained on are these very ids, never a text encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_kit.flow.memory import Memory
from grpo_kit.generation import Rollouts
from grpo_kit.objective import group_advantages
from grpo_kit.rewards import question_text

PER = ("trajectory", "turn")


@dataclass
class Turn:
    """One action of the planner, a_i^t.

    prompt_ids: what it read. completion_ids: what it sampled, EOS included. logprobs: one a
    completion token, nats, of the distribution that it was sampled from. finished: False where the
    token limit cut it off. entropies: of the same distributions, nats, to be logged.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finished: bool = True
    entropies: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(
                f"a turn has {len(self.completion_ids)} completion ids and {len(self.logprobs)} "
                "log-probabilities; give one a token, as they were sampled."
            )


@dataclass
class Episode:
    """A trajectory: its turns, and its one outcome reward, which all of them share.

    group_id: the query that its group answers. reward: None = could not be scored. The rest is what
    `play` leaves to look at: the row of data, the memory at the end (a step a turn), the final
    output, and what ended it: "verifier", "turn limit", "time limit", "context" (no room left), or
    "no reply" (of a frozen role behind an endpoint; such an episode is not scored).
    """

    group_id: Hashable
    reward: float | None
    turns: list[Turn]
    row: dict = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    output: str | None = None
    stopped: str = ""


def episode_advantages(
    episodes: Sequence[Episode],
    per: str = "trajectory",
    *,
    scale_rewards: str = "group",
    eps: float = 1e-4,
) -> Tensor:
    """The advantage of each episode within its group, the same for all of its turns.

    A_i = (R_i - mean_G R) / (std_G R + eps), AgentFlow (arXiv 2510.05592) eq. 7. With
    per="trajectory", the paper's, mean and std are over the episodes of a group. With per="turn",
    which is what the public code does, they are over its turn rows, so that an episode of six turns
    counts six times in them and one of two turns twice.

    Args:
        episodes: in any order; groups are told by `group_id` and may differ in size.
        per: "trajectory" or "turn".
        scale_rewards, eps: see `objective.group_advantages`; "batch" is not among them here.

    Returns:
        (len(episodes),) float. 0 for an episode that was not scored, which is left out of its
        group's mean and std, and for all of a group without spread.

    Raises ValueError for another `per`, a scale over the batch, or, per turn, for an episode
    without turns.
    """
    if per not in PER:
        raise ValueError(f"per is {per!r}; choose 'trajectory' (the paper) or 'turn'.")
    if scale_rewards == "batch":
        raise ValueError("scale_rewards 'batch' has no meaning here: choose 'group' or 'none'.")
    if per == "turn" and (empty := [i for i, e in enumerate(episodes) if not e.turns]):
        raise ValueError(f"episode {empty[0]} has no turn, so that per='turn' has no row of it.")
    members: dict[Hashable, list[int]] = {}
    for i, episode in enumerate(episodes):
        members.setdefault(episode.group_id, []).append(i)
    advantages = torch.zeros(len(episodes))
    for group in members.values():
        rows = [i for i in group for _ in range(len(episodes[i].turns) if per == "turn" else 1)]
        rewards = [math.nan if episodes[i].reward is None else episodes[i].reward for i in rows]
        values = group_advantages(torch.tensor(rewards), len(rows), scale_rewards, eps)
        advantages[rows] = values
    return advantages


def turn_rows(
    episodes: Sequence[Episode], pad_token_id: int, device="cpu"
) -> tuple[Rollouts, Tensor]:
    """All turns as rows to train on, episode by episode, and the episode of each row, (N,) long.

    Turns that read the same prompt share it (`Rollouts.prompt_index`), so that the update runs it
    once. `pad_token_id` fills completions up; masks come from lengths, never from the ids.
    """
    turns = [(i, turn) for i, episode in enumerate(episodes) for turn in episode.turns]
    if not turns:
        raise ValueError("there is no turn to train on; give episodes with at least one.")
    prompts: dict[tuple[int, ...], int] = {}
    prompt_index = [prompts.setdefault(tuple(t.prompt_ids), len(prompts)) for _, t in turns]
    lengths = torch.tensor([len(turn.completion_ids) for _, turn in turns], device=device)
    width = max(int(lengths.max()), 1)

    def padded(lists, fill) -> Tensor:
        return torch.tensor(
            [[*values, *[fill] * (width - len(values))] for values in lists], device=device
        )

    rollouts = Rollouts(
        prompt_ids=[list(ids) for ids in prompts],
        prompt_index=torch.tensor(prompt_index, device=device),
        completion_ids=padded([turn.completion_ids for _, turn in turns], pad_token_id),
        mask=torch.arange(width, device=device) < lengths[:, None],
        logps=padded([turn.logprobs for _, turn in turns], 0.0),
        entropies=padded([turn.entropies or [0.0] * len(turn.logprobs) for _, turn in turns], 0.0),
        finished=torch.tensor([turn.finished for _, turn in turns], device=device),
    )
    return rollouts, torch.tensor([i for i, _ in turns], device=device)


def episode_view(episodes: Sequence[Episode], advantages: Sequence[float]) -> dict:
    """One group as `viewer.episodes_html` and `episodes_text` take it."""
    return {
        "question": question_text(episodes[0].row["prompt"]),
        "episodes": [
            [
                {
                    "thought": step.action.justification,
                    "goal": step.action.goal,
                    "call": step.call,
                    "result": step.result,
                    "verdict": step.verdict,
                }
                for step in episode.memory.steps
            ]
            for episode in episodes
        ],
        "endings": [f"output: {e.output} (ended by the {e.stopped})" for e in episodes],
        "rewards": [episode.reward for episode in episodes],
        "advantages": [float(advantage) for advantage in advantages],
    }
