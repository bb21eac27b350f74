"""The four roles of AgentFlow: a trained planner, a frozen executor, verifier and generator.

`Prompts` are the requests to the roles: `TINY`, which the shipped base knows, or `GENERAL`, for any
model that follows instructions. For a role behind a server, write an object with the same method,
`execute`, `verify` or `answer`, and give it to `AgentSystem`.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from grpo_kit.flow.episodes import Action, Memory
from grpo_kit.flow.tools import Toolkit
from grpo_kit.generation import Rollouts, reply, sample
from grpo_kit.models import Policy
from grpo_kit.rewards.judge.texts import fenced

REMEMBERED = 60_000  # replies kept; they are greedy and would come out again


@dataclass(frozen=True)
class Prompts:
    """Templates of the request to each role, which is a user message."""

    plan: str  # of question, memory, tools (described), names (of the tools)
    execute: str  # of context, goal, tool, tools
    verify: str  # of question, memory
    answer: str  # of question, memory


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

Reply with the call and nothing else, as {tool}(...), its argument as plain text without quotes.""",
    verify=f"""\
Does the memory hold all that is needed to answer the question?
{_STATE}
Say in one sentence what is known and what is missing. Then write STOP if nothing is missing, else \
CONTINUE.""",
    answer=f"""\
Answer the question from the memory. Results of tools count, your own guesses do not.
{_STATE}
Give the final answer as <answer>answer here</answer>.""",
)


class Planner:
    """The trained role: samples actions from the policy, token ids in, token ids out."""

    def __init__(self, policy: Policy, toolkit: Toolkit, prompts: Prompts = TINY) -> None:
        self.policy, self.toolkit, self.prompts = policy, toolkit, prompts

    def request(self, question: str, memory: Memory) -> list[dict]:
        state = {"question": question, "memory": memory, "tools": self.toolkit.describe()}
        state["names"] = ", ".join(self.toolkit.names)
        return [{"role": "user", "content": self.prompts.plan.format(**state)}]

    def plan(
        self, prompt_ids: Sequence[Sequence[int]], generator=None, **sampling
    ) -> tuple[Rollouts, list[Action]]:
        """Sample one action for each of N prompts, in their order; `sampling` is `generate`'s."""
        policy, places = self.policy, defaultdict(list)  # equal prompts are run once
        for i, ids in enumerate(prompt_ids):
            places[tuple(ids)].append(i)
        options = {"max_new_tokens": 64, "generator": generator} | sampling
        sizes = [len(rows) for rows in places.values()]
        rollouts = sample(policy, list(map(list, places)), sizes, **options)
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


class FrozenRoles:
    """Executor, verifier and generator: greedy replies of a frozen policy, each computed once."""

    def __init__(self, policy: Policy, prompts: Prompts = TINY, max_new_tokens: int = 64):
        if any(parameter.requires_grad for parameter in policy.model.parameters()):
            raise ValueError("these roles are frozen: give them frozen_copy(policy).")
        self.policy, self.prompts, self.max_new_tokens = policy, prompts, max_new_tokens
        self._remembered: dict[str, str] = {}

    def execute(self, actions: Sequence[Action], toolkit: Toolkit) -> list[str]:
        """The text of the tool call that each decision of the planner asks for."""
        template, tools = self.prompts.execute, toolkit.describe()
        requests = [template.format(**vars(action), tools=tools) for action in actions]
        return self.ask([fenced(request) for request in requests])

    def verify(self, states: Sequence[tuple[str, Memory]]) -> list[str]:
        """Is the memory enough for the question? STOP, CONTINUE, or "" for a reply with neither."""
        replies = self.ask([self.prompts.verify.format(question=q, memory=m) for q, m in states])
        verdicts = re.compile(r"\b(STOP|CONTINUE)\b")
        return [["", *verdicts.findall(text)][-1] for text in replies]

    def answer(self, states: Sequence[tuple[str, Memory]]) -> list[str]:
        """The final output of each episode, from its question and memory."""
        return self.ask([self.prompts.answer.format(question=q, memory=m) for q, m in states])

    def ask(self, contents: Sequence[str]) -> list[str]:
        """The reply to each request without its thinking, "" where the request is too long."""
        if len(self._remembered) > REMEMBERED:
            self._remembered.clear()
        new = [c for c in dict.fromkeys(contents) if c not in self._remembered]
        self._remembered |= dict.fromkeys(new, "")
        policy, limit = self.policy, self.max_new_tokens
        conversations = [[{"role": "user", "content": content}] for content in new]
        lengths = map(len, policy.encode(conversations))
        fits = [length <= policy.context_length - limit for length in lengths]
        new, conversations = list(compress(new, fits)), list(compress(conversations, fits))
        if conversations:
            options = {"batch_size": 128, "max_new_tokens": limit, "do_sample": False}
            rollouts = reply(policy, conversations, **options)
            for content, text in zip(new, policy.decode(rollouts.completion_lists()), strict=True):
                _, closed, answer = text.rpartition("</think>")
                thought_only = "<think>" in text and not closed
                self._remembered[content] = "" if thought_only else answer.strip()
        return [self._remembered[content] for content in contents]
