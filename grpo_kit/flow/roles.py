"""The four roles of AgentFlow: a trained planner, a frozen executor, verifier and generator.

A frozen role speaks through a frozen `Policy` (greedy) or through any judge-like object that yields
replies to conversations (`EndpointJudge`). `Prompts` are the roles' requests: `TINY`, which the
shipped base knows, or `GENERAL`, for any model that follows instructions.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal

from grpo_kit.flow.episodes import Action, Memory
from grpo_kit.flow.tools import Toolkit
from grpo_kit.generation import Rollouts, generate, reply
from grpo_kit.models import Policy
from grpo_kit.rewards.judge.judges import Failure, FailureWindow, commonest_reason
from grpo_kit.rewards.judge.texts import fenced

REMEMBERED = 20_000  # replies that a frozen role keeps
PLACEHOLDER = "7f3a-7f3a"  # a text, where only a chat template's handling of it matters
FAILURE_WINDOW = 64  # if more than half of so many replies of an endpoint fail, the run ends


@dataclass(frozen=True)
class Prompts:
    """Templates of the request to each role, a user message, after a system message unless ""."""

    plan: str  # of question, memory, tools (described), names (of the tools)
    execute: str  # of context, goal, tool, tools
    verify: str  # of question, memory
    answer: str  # of question, memory
    system: str = ""

    def messages(self, content: str) -> list[dict]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": content}]

    def check(self, policy: Policy) -> None:
        """Raise ValueError where the chat template refuses or drops a role that is needed."""
        roles = [message["role"] for message in self.messages("")]
        policy.check_template([{"role": r, "content": f"{r} {PLACEHOLDER}"} for r in roles])


TINY = Prompts(
    plan="""\
Question: {question}
Tools: {names}
Memory: {memory}
What is the next step?""",
    execute="Context: {context}\nGoal: {goal}\nTool: {tool}\nWrite the call.",
    verify="Question: {question}\nMemory: {memory}\nSTOP or CONTINUE?",
    answer="Question: {question}\nMemory: {memory}\nWrite the final answer.",
)

_STATE = """
Question: {question}

Memory of the steps taken:
{memory}
"""
GENERAL = Prompts(
    plan="""\
Decide the next step towards answering the question. One step, one tool; what it returns will \
stand in the memory before you are asked again.

Question: {question}

Tools:
{tools}

Memory of the steps taken:
{memory}

Reply in exactly this form:
<think>why this is the next step</think>
Context: what the tool needs to know from question and memory, or none
Goal: what this step is to find out
Tool: the name of one tool""",
    execute="""\
Write the call of the tool that reaches the goal.

Context: {context}
Goal: {goal}
Tool: {tool}

Tools:
{tools}

Reply with one JSON object and nothing else: {{"name": "{tool}", "arguments": {{...}}}}""",
    verify=f"""\
Does the memory hold all that is needed to answer the question?
{_STATE}
Say in one sentence what is known and what is missing. Then write STOP if nothing is missing, else \
CONTINUE.""",
    answer=f"""\
Answer the question from the memory. Results of tools count, your own guesses do not.
{_STATE}
Give the final answer as <answer>answer here</answer>.""",
    system="You are one part of a system that answers questions.",
)


class Planner:
    """The trained role: samples actions from the policy, token ids in, token ids out."""

    def __init__(self, policy: Policy, toolkit: Toolkit, prompts: Prompts = TINY) -> None:
        prompts.check(policy)
        self.policy, self.toolkit, self.prompts = policy, toolkit, prompts

    def request(self, question: str, memory: Memory) -> list[dict]:
        state = {"question": question, "memory": memory, "tools": self.toolkit.describe()}
        state["names"] = ", ".join(self.toolkit.names)
        return self.prompts.messages(self.prompts.plan.format(**state))

    def plan(
        self, prompt_ids: Sequence[Sequence[int]], generator=None, **sampling
    ) -> tuple[Rollouts, list[Action]]:
        """Sample one action for each of N prompts, in their order; `sampling` is `generate`'s."""
        policy, places = self.policy, defaultdict(list)  # equal prompts are run once
        for i, ids in enumerate(prompt_ids):
            places[tuple(ids)].append(i)
        ends = {"eos_token_ids": policy.eos_token_ids, "pad_token_id": policy.pad_token_id}
        options = {"max_new_tokens": 64, "generator": generator} | ends | sampling
        sizes = [len(rows) for rows in places.values()]
        with policy.autocast():
            rollouts = generate(policy.model, list(map(list, places)), sizes, **options)
        order = torch.tensor([i for rows in places.values() for i in rows]).argsort()
        rollouts = rollouts.select(order.to(rollouts.mask.device))
        texts = policy.decode(rollouts.completion_lists())
        return rollouts, [read_action(text, self.toolkit.names) for text in texts]


FIELDS = ("context", "goal", "tool")
_LINE = re.compile(r"^[^\w\n]*(context|goal|sub-goal|tool)[^\w\n:]*:(.*)$", re.I | re.M)


def read_action(text: str, names: Sequence[str] | None = None) -> Action:
    """The planner's decision: each name's last line. `problem` if one, or the tool, is missing."""
    thought, closed, decision = text.rpartition("</think>")
    if not closed and "<think>" in text:  # cut off while thinking: nothing has been decided
        thought, decision = text, ""
    lines = {
        name.lower().removeprefix("sub-"): value.strip().strip("*`").strip()
        for name, value in _LINE.findall(decision)
    }
    context, goal, tool = (lines.get(name, "") for name in FIELDS)
    problem = next((f"error: no {name}" for name in FIELDS if not lines.get(name)), "")
    if not problem and names is not None and tool not in names:
        problem = f'error: no tool "{tool[:40]}"'
    return Action(thought.rpartition("<think>")[2].strip(), context, goal, tool, problem)


class FrozenRole:
    """A role that is never trained; `model` is a frozen `Policy`, or a judge-like object."""

    def __init__(self, model: Policy | Any, prompts: Prompts = TINY, max_new_tokens: int = 64):
        self.name = type(self).__name__.lower()
        if isinstance(model, Policy):
            if any(parameter.requires_grad for parameter in model.model.parameters()):
                raise ValueError(f"the {self.name} is frozen: give it frozen_copy(policy).")
            prompts.check(model)
        self.model, self.prompts, self.max_new_tokens = model, prompts, max_new_tokens
        self._remembered: dict[str, str] = {}  # not in checkpoints: greedy, so it comes out again
        self._window = FailureWindow(FAILURE_WINDOW, what=f"replies of the {self.name}")

    def forgetful(self) -> "FrozenRole":
        """The same role, which remembers no replies yet: what it is asked leaves this one alone."""
        other = copy.copy(self)
        other._remembered = {}
        return other

    def ask(self, contents: Sequence[str]) -> list[str | None]:
        """Likeliest replies, without thinking; "" for one too long to ask, None for a failure."""
        if len(self._remembered) > REMEMBERED:
            self._remembered.clear()
        new = [c for c in dict.fromkeys(contents) if c not in self._remembered]
        replies = self._replies([self.prompts.messages(content) for content in new]) if new else []
        for content, text in zip(new, replies, strict=True):
            if text is not None:
                _, closed, answer = text.rpartition("</think>")
                thought_only = "<think>" in text and not closed
                self._remembered[content] = "" if thought_only else answer.strip()
        return [self._remembered.get(content) for content in contents]

    def _replies(self, conversations: list[list[dict]]) -> list[str | None]:
        if not isinstance(self.model, Policy):
            with start_blocking_portal() as portal:  # a notebook has an event loop in this thread
                return portal.call(self._asked, conversations)
        policy, limit = self.model, self.max_new_tokens
        lengths = map(len, policy.encode(conversations))
        fits = [length <= policy.context_length - limit for length in lengths]
        texts = iter(())
        if fitting := [c for c, fit in zip(conversations, fits, strict=True) if fit]:
            rollouts = reply(policy, fitting, batch_size=128, max_new_tokens=limit, do_sample=False)
            texts = iter(policy.decode(rollouts.completion_lists()))
        return [next(texts) if fit else "" for fit in fits]

    async def _asked(self, conversations: list[list[dict]]) -> list[str | None]:
        async with aclosing(self.model(conversations)) as stream:
            outcomes = {i: outcome async for i, outcome in stream}
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, Failure)]
        if len(failures) == len(outcomes) and all(failure.hopeless for failure in failures):
            raise RuntimeError(f"the {self.name} cannot be had: {commonest_reason(failures)}")
        self._window.add(failures, len(outcomes))
        ordered = [outcomes[i] for i in range(len(conversations))]
        return [None if isinstance(outcome, Failure) else outcome.text for outcome in ordered]


class Executor(FrozenRole):
    """Turns the planner's decision into the text of a tool call."""

    def execute(self, actions: Sequence[Action], toolkit: Toolkit) -> list[str | None]:
        template, tools = self.prompts.execute, toolkit.describe()
        requests = [template.format(**vars(action), tools=tools) for action in actions]
        return self.ask([fenced(request) for request in requests])


class Verifier(FrozenRole):
    """Says whether memory holds what the question needs."""

    def verify(self, states: Sequence[tuple[str, Memory]]) -> list[str | None]:
        """The last STOP or CONTINUE of each reply, "" without either, None without a reply."""
        replies = self.ask([self.prompts.verify.format(question=q, memory=m) for q, m in states])
        verdicts = re.compile(r"\b(STOP|CONTINUE)\b")
        return [text and ["", *verdicts.findall(text)][-1] for text in replies]


class Generator(FrozenRole):
    """Writes the final output from question and memory."""

    def answer(self, states: Sequence[tuple[str, Memory]]) -> list[str | None]:
        return self.ask([self.prompts.answer.format(question=q, memory=m) for q, m in states])
