"""What notebook 06 defines is what the package does."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in

from grpo_kit import flow
from grpo_kit.flow import episode_advantages
from grpo_kit.models import frozen_copy
from grpo_kit.profiles import PROFILES
from grpo_kit.tasks.tool_questions import catalogue_path, tool_questions


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=2, max_size=8))
def test_the_tempting_advantages_of_06_are_the_packages_per_turn(outcomes):
    episodes = [defined_in("06").toy_episode(float(right), turns) for right, turns in outcomes]
    if len({right for right, _ in outcomes}) == 2:
        expected = episode_advantages(episodes, per="turn").tolist()
        assert list(map(float, defined_in("06").over_rows(episodes))) == pytest.approx(
            expected, abs=1e-2
        )


def notebook_06(**names) -> SimpleNamespace:
    """The notebook's functions, with the variables that they read."""
    functions = defined_in("06")
    functions.play.__globals__.update(names)
    return functions


def test_the_needed_calls_of_06_are_as_many_as_the_row_says_and_end_in_the_answer():
    own = notebook_06(find=flow.Lookup(catalogue_path()))
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
        profile=PROFILES["tiny"], find=flow.Lookup(catalogue_path()),
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
