"""The engine: batches of episodes, ids in and out, and what goes wrong becomes memory."""

import pytest
import torch

from grpo_kit.flow import Toolkit, agent_system, play


def test_a_flawless_planner_takes_the_steps_of_the_plan_and_leaves(scripted, world):
    questions, rows, _ = world
    episodes = play(scripted(), rows, 2)
    assert [e.group_id for e in episodes] == [0, 0, 1, 1]
    for episode in episodes:
        question, steps = questions[episode.group_id], episode.memory.steps
        done = [(f"{t}({a})", question.run(t, a)) for t, a in question.plan]
        assert [(step.call, step.result) for step in steps] == done
        assert [step.verdict for step in steps] == ["CONTINUE"] * (len(done) - 1) + ["STOP"]
        assert len(episode.turns) == len(done) and episode.stopped == "verifier"
        assert episode.output == f"<answer>{question.answer}</answer>"


def test_the_turn_limit_ends_an_episode_that_still_gets_its_output(scripted, world):
    short, long = play(scripted(max_turns=2), world[1])
    assert (short.stopped, long.stopped, len(long.turns)) == ("verifier", "turn limit", 2)
    assert long.output is not None


def test_memory_is_new_for_every_query(scripted, world):
    system, row = scripted(), world[1][1]
    (first,), (second,) = play(system, [row]), play(system, [row])
    assert first.memory == second.memory and len(second.memory.steps) == 4
    read = system.planner.policy.tokenizer.decode
    assert all("Memory: empty" in read(e.turns[0].prompt_ids) for e in (first, second))


@pytest.mark.parametrize(
    ("said", "call", "result"),
    [
        ("Let me see.", "no call", "error: no context"),
        ("Context: none\nGoal: find it\nTool: oracle", "no call", 'error: no tool "oracle"'),
        ("Context: 1, 0\nGoal: multiply\nTool: calculator", "calculator(1*0)", "1*0 = 0"),
        ("Context: none\nGoal: find 1/0\nTool: calculator", "calculator(1/0)", "error: division"),
        ("Context: none\nGoal: find pearl\nTool: lookup", "lookup(pearl)", "not found"),
    ],
)
def test_a_bad_plan_or_call_is_a_turn_and_stops_nothing(scripted, world, said, call, result):
    questions, rows, _ = world
    episodes = play(scripted({0: said}), rows)
    for episode, question in zip(episodes, questions, strict=True):
        step = episode.memory.steps[0]
        assert step.call == call and step.result.startswith(result)
        assert step.error == result.startswith("error")
        assert len(episode.turns) == 1 + len(question.plan)  # the rest went on as ever
        assert episode.stopped == "verifier" and episode.turns[0].completion_ids


def test_a_memory_that_outgrows_the_frozen_roles_stops_nobody(base, world, text_tool):
    _, rows, _ = world
    lookup = text_tool("lookup", lambda query: "lamp 14 " * 300)
    system = agent_system(base, Toolkit([lookup], max_result_chars=3000), max_turns=8)
    episodes = play(system, rows * 2, generator=torch.Generator().manual_seed(0))
    assert {e.stopped for e in episodes} <= {"context", "turn limit", "verifier"}
    assert any(e.stopped == "context" for e in episodes)


def test_limits_that_cannot_be_are_refused(scripted):
    with pytest.raises(ValueError, match="max_turns is 0.*at least 1 turn"):
        scripted(max_turns=0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_batch_plays_as_each_episode_does_alone(base, world, batch_size):
    _, rows, toolkit = world
    together, parts = (
        play(agent_system(base, toolkit), rows * 2, 2, do_sample=False, batch_size=size)
        for size in (None, batch_size)
    )
    for one, two in zip(together, parts, strict=True):
        assert [t.completion_ids for t in one.turns] == [t.completion_ids for t in two.turns]
        assert (one.group_id, one.memory, one.output) == (two.group_id, two.memory, two.output)
