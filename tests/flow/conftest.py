"""A system whose every role can be scripted, and the shipped one."""

import random

import pytest

from grpo_kit.flow import AgentSystem, Lookup, Tool, Toolkit, calculator, make_catalogue
from grpo_kit.flow.roles import TINY, read_action
from grpo_kit.generation import Rollouts
from grpo_kit.tasks import Task
from grpo_kit.tasks.tool_questions import make_tool_question, tool_questions
from grpo_kit.tiny import skills


class Scripted:
    """All four roles: the oracle of the tiny world, or what `said` says at a turn instead."""

    def __init__(self, policy, questions, said=None):
        self.policy, self.questions, self.said, self.turn = policy, questions, said or {}, 0

    def request(self, question, memory):
        state = {"question": question, "memory": memory, "names": "lookup, calculator"}
        return [{"role": "user", "content": TINY.plan.format(**state)}]

    def question_of(self, text):
        return next(q for q in self.questions if q.text in text)

    def steps(self, question, memory):
        return [s for s in question.plan if f"{s[0]}({s[1]}) ->" in str(memory)]

    def plan(self, prompt_ids, **options):
        texts = []
        for ids in prompt_ids:
            prompt = self.policy.tokenizer.decode(ids)
            question = self.question_of(prompt)
            done = [(*step, "") for step in self.steps(question, prompt)]
            step = question.next_step(done) or question.plan[-1]
            texts.append(self.said.get(self.turn, skills.plan_text(step, "Careful.")))
        self.turn += 1
        ends = self.policy.eos_token_ids[:1]
        rows = [self.policy.tokenizer(t)["input_ids"] + ends for t in texts]
        rollouts = Rollouts.given(prompt_ids, rows, self.policy)
        return rollouts, [read_action(text, ["lookup", "calculator", "slow"]) for text in texts]

    def execute(self, actions, toolkit):
        calls = []
        for action in actions:
            if action.goal.startswith("find "):
                calls.append(f"{action.tool}({action.goal.removeprefix('find ')})")
            else:
                left, right = action.context.split(", ")
                sign = {"add": "+", "subtract": "-", "multiply": "*"}[action.goal]
                calls.append(f"calculator({left}{sign}{right})")
        return calls

    def verify(self, states):
        done = [len(self.steps(self.question_of(q), m)) == len(self.question_of(q).plan)
                for q, m in states]  # fmt: skip
        return ["STOP" if stop else "CONTINUE" for stop in done]

    def answer(self, states):
        return [f"<answer>{self.question_of(q).answer}</answer>" if m.steps else "nothing"
                for q, m in states]  # fmt: skip


@pytest.fixture(scope="session")
def text_tool():
    """Make a function that can be a tool."""

    def make(name, function):
        def tool(text: str) -> str:
            """Do it."""
            return function(text)

        tool.__name__ = name
        return tool

    return make


@pytest.fixture(scope="session")
def task():
    """A few of the shipped questions."""
    task = tool_questions()
    return Task(task.name, task.train.select(range(40)), task.test.select(range(8)))


@pytest.fixture
def world(tmp_path):
    """Two questions, of one call and of four, their rows, and a toolkit over their catalogues."""
    rng = random.Random(0)
    questions = [make_tool_question(rng, "test", kind) for kind in ("price", "several_discount")]
    path = tmp_path / "catalogue.sqlite"
    facts = [(i, *fact) for i, q in enumerate(questions) for fact in q.catalogue.items()]
    make_catalogue(path, facts)
    rows = [
        {"prompt": [{"role": "user", "content": q.text}], "answer": str(q.answer), "catalogue": i}
        for i, q in enumerate(questions)
    ]
    toolkit = Toolkit([Tool(Lookup(path), columns=("catalogue",)), calculator])
    return questions, rows, toolkit


@pytest.fixture
def scripted(policy, world):
    """Make a system of scripted roles."""
    questions, _, toolkit = world

    def make(said=None, **options):
        role = Scripted(policy, questions, said)
        return AgentSystem(role, role, role, role, options.pop("toolkit", toolkit), **options)

    return make
