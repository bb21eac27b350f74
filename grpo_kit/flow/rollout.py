"""The rollout engine: many episodes at once, one batched generation a role and turn.

All running episodes take their turn together: the planner acts for all of them in one batch, then
the executor, the tools and the verifier; whoever is told to STOP leaves. What happens to one never
stops another: a malformed plan, a call that fails and a tool that hangs become lines of memory.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from grpo_kit.flow.episodes import Episode, Turn
from grpo_kit.flow.memory import Action, Step
from grpo_kit.flow.roles import (
    PLACEHOLDER,
    TINY,
    Executor,
    Generator,
    Planner,
    Prompts,
    Verifier,
)
from grpo_kit.flow.tools import Toolkit
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.rewards import question_text

CONTEXTS = ("memory", "append")


@dataclass
class AgentSystem:
    """A planner, the three frozen roles, the tools, and the limits of an episode.

    max_turns: the planner acts at most so often. episode_timeout: seconds, of the turns that an
    episode took part in and of its own tools; it ends with the turn in which they are over.
    context: what the planner reads at turn t. "memory" is the paper's: question and memory, written
    anew. "append" leaves what was read and sampled before in place, ids and all, and adds the new
    request to it; such an episode is one sequence, which any trainer can take (see `export`).
    """

    planner: Planner
    executor: Executor
    verifier: Verifier
    generator: Generator
    toolkit: Toolkit
    max_turns: int = 6
    episode_timeout: float = 500.0
    context: str = "memory"

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns is {self.max_turns}; an episode needs at least 1 turn.")
        if self.episode_timeout <= 0:
            raise ValueError(f"episode_timeout is {self.episode_timeout}; give seconds above 0.")
        if self.context not in CONTEXTS:
            raise ValueError(f"context is {self.context!r}; choose 'memory' or 'append'.")
        if self.context == "append":
            continuation_ids(self.planner.policy, [0], "")  # can the chat template do it?

    def with_planner(self, policy: Policy) -> AgentSystem:
        """The same frozen system around another policy."""
        planner = Planner(policy, self.toolkit, self.planner.prompts)
        return dataclasses.replace(self, planner=planner)


def agent_system(
    policy: Policy,
    toolkit: Toolkit,
    *,
    frozen=None,
    prompts: Prompts = TINY,
    max_reply_tokens: int = 64,
    **limits,
) -> AgentSystem:
    """A system whose planner is `policy` and whose other roles are one frozen model.

    Args:
        frozen: a frozen `Policy` or a judge-like object (an endpoint); None = `frozen_copy(policy)`
            as it is now.
        prompts: what all roles are asked.
        max_reply_tokens: limit of a frozen role's reply.
        limits: `max_turns`, `episode_timeout`, `context` of the `AgentSystem`.
    """
    frozen = frozen_copy(policy) if frozen is None else frozen
    roles = (
        role(frozen, prompts, max_new_tokens=max_reply_tokens)
        for role in (Executor, Verifier, Generator)
    )
    return AgentSystem(Planner(policy, toolkit, prompts), *roles, toolkit, **limits)


@dataclass
class _Running:
    """An episode under way: itself, its question, and the seconds it has had."""

    episode: Episode
    question: str
    seconds: float = 0.0
    ids: list[int] = field(default_factory=list)  # of the whole conversation, for "append"


def play(
    system: AgentSystem,
    rows: Sequence[dict],
    num_generations: int = 1,
    *,
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
    max_new_tokens: int = 64,
    do_sample: bool = True,
    group_ids: Sequence[Hashable] | None = None,
    batch_size: int | None = None,
) -> list[Episode]:
    """Play `num_generations` episodes of every row; those of a row stand together, not yet scored.

    Args:
        rows: of a dataset, with `prompt` (messages; the last of the user is the question) and what
            columns the tools need.
        generator, temperature, max_new_tokens, do_sample: of the planner's actions.
        group_ids: one a row; the row's place by default.
        batch_size: most episodes at a time, in whole groups; None = all.

    An episode whose next prompt leaves no room for an action in the model's context ends there.
    Raises ValueError where that is so at the first turn.
    """
    group_ids = range(len(rows)) if group_ids is None else group_ids
    each = len(rows) if batch_size is None else max(1, batch_size // num_generations)
    if len(rows) > each:
        options = {"generator": generator, "temperature": temperature, "do_sample": do_sample}
        return [
            episode
            for i in range(0, len(rows), each)
            for episode in play(
                system, rows[i : i + each], num_generations, max_new_tokens=max_new_tokens,
                group_ids=group_ids[i : i + each], **options,
            )
        ]  # fmt: skip
    everyone = [
        _Running(Episode(group_id, None, [], copy.deepcopy(row)), question_text(row["prompt"]))
        for group_id, row in zip(group_ids, rows, strict=True)
        for _ in range(num_generations)
    ]
    policy, running = system.planner.policy, everyone
    for turn in range(system.max_turns):
        if not running:
            break
        started = time.perf_counter()
        prompt_ids = _contexts(system, running)
        room = policy.context_length - max_new_tokens
        if turn:  # at the first turn `generate` says that nothing fits
            for one, ids in zip(running, prompt_ids, strict=True):
                one.episode.stopped = "context" if len(ids) > room else ""
            prompt_ids = [ids for ids in prompt_ids if len(ids) <= room]
            running = [one for one in running if not one.episode.stopped]
            if not running:
                break
        rollouts, actions = system.planner.plan(
            prompt_ids, generator, temperature=temperature, max_new_tokens=max_new_tokens,
            do_sample=do_sample,
        )  # fmt: skip
        for one, made in zip(running, _turns(prompt_ids, rollouts), strict=True):
            one.episode.turns.append(made)
            one.ids = made.prompt_ids + made.completion_ids
        shared = time.perf_counter() - started

        own = _act(system, running, actions)

        started = time.perf_counter()
        verdicts = system.verifier.verify([(one.question, one.episode.memory) for one in running])
        shared += time.perf_counter() - started
        for one, verdict, seconds in zip(running, verdicts, own, strict=True):
            one.episode.memory = one.episode.memory.judged(verdict or "")
            one.seconds += shared + (seconds or 0.0)
            if verdict is None or seconds is None:
                one.episode.stopped = "no reply"
            elif verdict == "STOP":
                one.episode.stopped = "verifier"
            elif one.seconds > system.episode_timeout:
                one.episode.stopped = "time limit"
        running = [one for one in running if not one.episode.stopped]
    for one in running:
        one.episode.stopped = "turn limit"
    whole = [one for one in everyone if one.episode.stopped != "no reply"]
    outputs = system.generator.answer([(one.question, one.episode.memory) for one in whole])
    for one, output in zip(whole, outputs, strict=True):
        one.episode.output = output
    return [one.episode for one in everyone]


def _turns(prompt_ids: Sequence[list[int]], rollouts) -> list[Turn]:
    """The planner's sampled rows as turns, ids and log-probabilities as they were sampled."""
    columns = (rollouts.logps.tolist(), rollouts.entropies.tolist(), rollouts.finished.tolist())
    return [
        Turn(list(prompt), ids, logps[: len(ids)], finished, entropies[: len(ids)])
        for prompt, ids, logps, entropies, finished in zip(
            prompt_ids, rollouts.completion_lists(), *columns, strict=True
        )
    ]


def _act(
    system: AgentSystem, running: Sequence[_Running], actions: Sequence[Action]
) -> list[float | None]:
    """Executor and tools for all plans; a step for each memory.

    Returns each one's seconds, None where the executor could not be had.
    """
    started = time.perf_counter()
    able = [i for i, action in enumerate(actions) if not action.problem]
    texts = system.executor.execute([actions[i] for i in able], system.toolkit)
    shared = time.perf_counter() - started
    calls = [(i, text) for i, text in zip(able, texts, strict=True) if text is not None]
    results = system.toolkit.run([(text, running[i].episode.row) for i, text in calls])
    done = dict(zip((i for i, _ in calls), results, strict=True))
    for i, (one, action) in enumerate(zip(running, actions, strict=True)):
        if i in done:
            step = Step(action, done[i].call, done[i].text, done[i].error)
        else:  # nothing was called
            step = Step(action, "no call", action.problem or "error: no executor", True)
        one.episode.memory = one.episode.memory.updated(step)
    silent = set(able) - set(done)
    return [
        None if i in silent else shared + (done[i].seconds if i in done else 0.0)
        for i in range(len(running))
    ]


def _contexts(system: AgentSystem, running: Sequence[_Running]) -> list[list[int]]:
    """What the planner reads now, as ids."""
    planner = system.planner
    requests = [planner.request(one.question, one.episode.memory) for one in running]
    if system.context == "memory" or not running[0].ids:
        return planner.policy.encode(requests)
    return [
        one.ids + continuation_ids(planner.policy, one.ids, request[-1]["content"])
        for one, request in zip(running, requests, strict=True)
    ]


def continuation_ids(policy: Policy, ids: Sequence[int], content: str) -> list[int]:
    """What stands between a sampled action and the next: its closing, `content` as the user's.

    Taken from the chat template's text of an example, from the mark that ends an assistant's turn
    on: what has been sampled is never encoded again. The mark itself is added where the token limit
    cut the action off.

    Raises ValueError for a chat template that leaves out earlier answers.
    """
    example = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": PLACEHOLDER},
        {"role": "user", "content": content},
    ]
    text = policy.tokenizer.apply_chat_template(example, tokenize=False, add_generation_prompt=True)
    _, found, rest = text.partition(PLACEHOLDER)
    if not found:
        raise ValueError(
            "the chat template leaves out earlier answers, so that context='append' cannot be had "
            "with it: take context='memory'."
        )
    marks = {policy.tokenizer.convert_ids_to_tokens(i): i for i in policy.eos_token_ids}
    mark = next((mark for mark in marks if rest.lstrip().startswith(mark)), None)
    if mark is not None:
        rest = rest.lstrip().removeprefix(mark)
    rest_ids = policy.tokenizer(rest, add_special_tokens=False)["input_ids"]
    ended = mark is None or ids[-1] in policy.eos_token_ids
    return rest_ids if ended else [marks[mark], *rest_ids]
