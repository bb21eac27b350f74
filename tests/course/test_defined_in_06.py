"""What notebook 06 defines is what the package does."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_notebooks import defined_in, with_gradient
from torch.testing import assert_close

from grpo_kit import flow, objective
from grpo_kit.flow import episode_advantages
from grpo_kit.flow.roles import read_action
from grpo_kit.models import frozen_copy
from grpo_kit.profiles import PROFILES
from grpo_kit.tasks.tool_questions import catalogue_path, tool_questions


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=2, max_size=8))
def test_the_advantages_of_06_equal_the_package(outcomes):
    episodes = [defined_in("06").toy_episode(float(right), turns) for right, turns in outcomes]
    assert_close(defined_in("06").advantages(episodes), episode_advantages(episodes))
    told_longer = [defined_in("06").toy_episode(float(right), 3 * n) for right, n in outcomes]
    assert_close(defined_in("06").advantages(told_longer), defined_in("06").advantages(episodes))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=2, max_size=8))
def test_the_tempting_advantages_of_06_are_the_packages_per_turn(outcomes):
    episodes = [defined_in("06").toy_episode(float(right), turns) for right, turns in outcomes]
    if len({right for right, _ in outcomes}) == 2:
        expected = episode_advantages(episodes, per="turn").tolist()
        assert list(map(float, defined_in("06").over_rows(episodes))) == pytest.approx(
            expected, abs=1e-2
        )


turn_lengths = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(st.integers(0, 10_000), st.lists(turn_lengths, min_size=1, max_size=4))
def test_the_loss_of_06_equals_the_package(seed, lengths):
    """The three nested means, the same as two hooks of `train`, and the package's loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(i, n) for i, turns in enumerate(lengths) for n in turns]
    logps, old = -3 * torch.rand((2, len(rows), 4), generator=generator)
    mask = torch.arange(4) < torch.tensor([n for _, n in rows])[:, None]
    index = torch.tensor([i for i, _ in rows])
    advantages = torch.randn(len(lengths), generator=generator)
    nested = []
    for values in (logps, old):
        cut = iter([row[:n] for row, (_, n) in zip(values, rows, strict=True)])
        nested.append([[next(cut) for _ in turns] for turns in lengths])
    weights = defined_in("06").turn_weights(index)
    options = {"turn_weights": weights, "num_sequences_in_batch": len(lengths)}
    batch = (old, advantages[index], mask)

    def hooks_loss(logps, old, advantages, mask):
        per_token = defined_in("06").surrogate(logps, old, advantages, mask) * weights[:, None]
        totals = {"num_items_in_batch": mask.sum(), "num_sequences_in_batch": len(lengths)}
        return defined_in("06").three_means(per_token, mask, **totals)

    mine = with_gradient(hooks_loss, logps, *batch)
    theirs = with_gradient(objective.policy_loss, logps, *batch, loss_type="grpo", **options)
    assert_close(mine, theirs)
    assert_close(-defined_in("06").eq_10(*nested, advantages), theirs[0])


def notebook_06(**names) -> SimpleNamespace:
    """The notebook's functions, with the variables that they read."""
    functions = defined_in("06")
    functions.play.__globals__.update(names)
    return functions


PLAN_LINES = [
    "Context: none",
    "Goal: find lamp",
    "Tool: lookup",
    "Tool: fly",
    "Goal:",
    "<think>So.</think>",
    "x",
]


@given(st.lists(st.sampled_from(PLAN_LINES), max_size=6))
def test_the_plans_of_06_are_read_as_the_package_reads_them(lines):
    tools = {"lookup": None, "calculator": None}
    mine = notebook_06(TOOLS=tools).read_plan("\n".join(lines))
    theirs = read_action("\n".join(lines), [*tools])
    assert mine["problem"] == theirs.problem
    if not theirs.problem:
        assert (mine["context"], mine["goal"], mine["tool"]) == theirs.step


CALLS = st.sampled_from([
    "lookup(lamp)", "lookup(boat)", "lookup()", "calculator(2*3)", "calculator(2/0)",
    "calculator(exit())", "fly(moon)", "lookup(lamp", "lamp", "",
])  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(CALLS)
def test_the_calls_of_06_give_what_the_packages_tools_give(call):
    own = notebook_06(catalogue=flow.Lookup(catalogue_path()))
    own = notebook_06(TOOLS={"lookup": own.lookup, "calculator": own.calculator})
    row = {"catalogue": 1_000_000}
    tools = [flow.Tool(flow.Lookup(catalogue_path()), columns=["catalogue"]), flow.calculator]
    (theirs,) = flow.Toolkit(tools).run([(call, row)])
    mine = own.run_call(call, row)
    assert mine.startswith("error") if theirs.error else mine == theirs.text


def test_the_needed_calls_of_06_are_as_many_as_the_row_says_and_end_in_the_answer():
    own = notebook_06(catalogue=flow.Lookup(catalogue_path()))
    own = notebook_06(TOOLS={"lookup": own.lookup, "calculator": own.calculator})
    for row in tool_questions().test.select(range(40)):
        calls = own.needed_calls(row)
        assert len(calls) == row["calls"]
        assert row["answer"] in re.findall(r"\d+", own.run_call(calls[-1], row))
        made = [calls[0], "lookup(boat)", *calls]  # a useless call, and the first one again
        episode = own.Episode(0, row, memory=[f"{call} -> a result" for call in made])
        assert own.needed(episode) == [True, False, False, *[True] * (len(calls) - 1)]


@pytest.mark.slow
def test_the_agent_of_06_plays_as_the_packages():
    """Greedy: the same calls, results and outputs. Sampled: the rows are each episode's ids."""
    policy, rows = PROFILES["tiny"].load_policy(), [tool_questions().test[i] for i in range(8)]
    limits = {"max_new_tokens": 48, "temperature": 1.0}
    own = notebook_06(
        PROMPTS=vars(flow.TINY), MAX_TURNS=6, frozen=frozen_copy(policy), replies={}, limits=limits,
        profile=PROFILES["tiny"], catalogue=flow.Lookup(catalogue_path()),
    )  # fmt: skip
    own = notebook_06(TOOLS={"lookup": own.lookup, "calculator": own.calculator})
    theirs = flow.play(
        PROFILES["tiny"].load_agents(policy), rows, do_sample=False, max_new_tokens=48
    )
    mine = own.play(policy, rows, do_sample=False)
    assert [one.output for one in mine] == [one.output for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.memory == [f"{step.call} -> {step.result}" for step in other.memory.steps]
        packaged = [turn.completion_ids for turn in other.turns]
        assert [turn.completion_lists()[0] for turn in one.turns] == packaged

    sampled = own.play(policy, rows[:2], 3, generator=torch.Generator().manual_seed(0))
    batch, index = own.turn_rows(sampled)
    ids = iter(batch.completion_lists())
    prompts = iter(batch.prompt_index.tolist())
    for i, one in enumerate(sampled):
        assert (index == i).sum() == len(one.turns) == len(one.memory)
        for turn in one.turns:
            assert next(ids) == turn.completion_lists()[0]
            assert batch.prompt_ids[next(prompts)] == turn.prompt_ids[0]
    assert len({id(one.memory) for one in sampled}) == 6  # no memory is shared
