"""The evolving memory M of an episode: one step a turn, new for every query.

Nothing in it is ever changed in place: `updated` returns a new memory, so that no episode can write
into another's, and every turn's memory can still be looked at afterwards.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

from grpo_kit.rewards.judge.texts import fenced


@dataclass(frozen=True)
class Action:
    """What the planner decided, a_t, read from its completion: sub-goal, its context, and a tool.

    `problem` says what is wrong with a completion that is no plan, in words for the memory.
    """

    justification: str = ""
    context: str = ""
    goal: str = ""
    tool: str = ""
    problem: str = ""

    @property
    def step(self) -> tuple[str, str, str]:
        """What is to be done: context, goal, tool."""
        return self.context, self.goal, self.tool


@dataclass(frozen=True)
class Step:
    """One line of memory: action, tool call, result (an error's text too), and the verdict on it.

    verdict: "STOP" or "CONTINUE"; "" until it is given, or where the verifier says neither.
    """

    action: Action
    call: str
    result: str
    error: bool = False
    verdict: str = ""


@dataclass(frozen=True)
class Memory:
    """The steps so far. `str(memory)` is what the roles read; `table()` is for people."""

    steps: tuple[Step, ...] = ()

    def updated(self, step: Step) -> Memory:
        """M_{t+1} = f(M_t, a_t, e_t, v_t): this memory with one step more."""
        return Memory((*self.steps, step))

    def judged(self, verdict: str) -> Memory:
        """With the verdict on the last step, which the verifier gave having read it."""
        return Memory((*self.steps[:-1], replace(self.steps[-1], verdict=verdict)))

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        """`1. lookup(lamp) -> lamp 14, shop Nord`, a line a step; "empty" without any.

        What tools returned can pose neither as a turn of the conversation (role marks and unseen
        characters are broken, `fenced`) nor as a further step (its lines after the first are
        indented).
        """
        lines = [
            f"{i}. {step.call} -> " + "\n   ".join(step.result.splitlines())
            for i, step in enumerate(self.steps, 1)
        ]
        return fenced("\n".join(lines)) or "empty"

    def table(self) -> str:
        """Every field of every step, for people: a block a step."""
        blocks = []
        for i, step in enumerate(self.steps, 1):
            fields = {
                "goal": step.action.goal,
                "tool": step.action.tool,
                "call": step.call,
                "result": step.result,
                "verdict": step.verdict,
            }
            lines = [f"  {name:8}{textwrap.shorten(value, 90)}" for name, value in fields.items()]
            blocks.append("\n".join([f"step {i}", *(line.rstrip() for line in lines)]))
        return "\n".join(blocks) or "empty"
