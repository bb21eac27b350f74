"""The rollout engine: all running episodes take their turn together, one batch per role.

The planner acts for all of them, then the executor, the tools and the verifier; an episode that is
told to STOP leaves. A malformed plan, a failing call or a hanging tool becomes a line of memory.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_kit.flow.episodes import Action, Episode, Memory, Step, Turn
from grpo_kit.flow.roles import TINY, FrozenRoles, Planner
from grpo_kit.flow.tools import Toolkit
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.rewards import question_text


@dataclass
class AgentSystem:
    """A planner, three frozen roles, tools, and the most turns of an episode.

    At each turn the planner reads question and memory, written anew.
    """

    planner: Planner
    executor: FrozenRoles
    verifier: FrozenRoles
    generator: FrozenRoles
    toolkit: Toolkit
    max_turns: int = 6

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}; give at least 1 turn.")

    def with_planner(self, policy: Policy) -> AgentSystem:
        """The same frozen system around another policy."""
        planner = Planner(policy, self.toolkit, self.planner.prompts)
        return dataclasses.replace(self, planner=planner)


def agent_system(
    policy: Policy, toolkit: Toolkit, *, frozen=None, prompts=TINY, max_reply_tokens=64, **limits
) -> AgentSystem:
    """A system whose planner is `policy` and whose other roles are one frozen model.

    frozen: a frozen `Policy`; None = `frozen_copy(policy)`. limits: `AgentSystem`'s.
    """
    roles = FrozenRoles(frozen or frozen_copy(policy), prompts, max_reply_tokens)
    return AgentSystem(Planner(policy, toolkit, prompts), roles, roles, roles, toolkit, **limits)


def play(
    system: AgentSystem, rows: Sequence[dict], num_generations=1, *, batch_size=None, **sampling
) -> list[Episode]:
    """Play `num_generations` episodes of every row, not yet scored; those of a row stand together.

    rows: with `prompt` (messages) and the tools' columns. batch_size: most episodes at a time, in
    whole groups. sampling: of actions (`generator`, `temperature`, `max_new_tokens`, `do_sample`).
    """
    sampling.setdefault("max_new_tokens", 64)
    episodes = [
        Episode(i, None, [], copy.deepcopy(row))
        for i, row in enumerate(rows)
        for _ in range(num_generations)
    ]
    groups = len(rows) if batch_size is None else batch_size // num_generations
    size = max(1, groups) * num_generations
    for start in range(0, len(episodes), size):
        _play_together(system, episodes[start : start + size], sampling)
    return episodes


def _play_together(system: AgentSystem, episodes: Sequence[Episode], sampling: dict) -> None:
    running = list(episodes)
    for _ in range(system.max_turns):
        running, actions = _plan(system, running, sampling)
        if not running:
            break
        _act(system, running, actions)
        for one, verdict in zip(running, system.verifier.verify(_states(running)), strict=True):
            one.memory = one.memory.judged(verdict)
            one.stopped = "verifier" if verdict == "STOP" else ""
        running = [one for one in running if not one.stopped]
    for one in running:
        one.stopped = "turn limit"
    for one, output in zip(episodes, system.generator.answer(_states(episodes)), strict=True):
        one.output = output


def _states(episodes: Sequence[Episode]) -> list[tuple[str, Memory]]:
    return [(question_text(one.row["prompt"]), one.memory) for one in episodes]


def _plan(system: AgentSystem, running: list[Episode], sampling: dict) -> tuple[list, list[Action]]:
    """Sample the next actions. Returns the episodes that have room for one, and the actions."""
    policy = system.planner.policy
    contexts = policy.encode([system.planner.request(*state) for state in _states(running)])
    room = policy.context_length - sampling["max_new_tokens"]
    for one, prompt in zip(running, contexts, strict=True):
        if one.turns and len(prompt) > room:  # at the first turn `generate` says that nothing fits
            one.stopped = "context"
    fitting = [pair for pair in zip(running, contexts, strict=True) if not pair[0].stopped]
    if not fitting:
        return [], []
    rollouts, actions = system.planner.plan([prompt for _, prompt in fitting], **sampling)
    finished, completions = rollouts.finished.tolist(), rollouts.completion_lists()
    for i, ((one, prompt), ids) in enumerate(zip(fitting, completions, strict=True)):
        logps, entropies = (x[i, : len(ids)].tolist() for x in (rollouts.logps, rollouts.entropies))
        one.turns.append(Turn(list(prompt), ids, logps, finished[i], entropies))
    return [one for one, _ in fitting], actions


def _act(system: AgentSystem, running: Sequence[Episode], actions: Sequence[Action]) -> None:
    """Run executor and tools for all plans; each memory gets a step."""
    able = [i for i, action in enumerate(actions) if not action.problem]
    texts = system.executor.execute([actions[i] for i in able], system.toolkit)
    calls = [(text, running[i].row) for i, text in zip(able, texts, strict=True)]
    result_of = dict(zip(able, system.toolkit.run(calls), strict=True))
    for i, (one, action) in enumerate(zip(running, actions, strict=True)):
        step = Step(action, "no call", action.problem, True)
        if result := result_of.get(i):
            step = Step(action, result.call, result.text, result.error)
        one.memory = one.memory.updated(step)
