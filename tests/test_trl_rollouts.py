"""Verdicts and episodes under TRL: what is sampled and scored, and that a run can be resumed."""

import dataclasses
import json
from functools import partial

import pytest
import torch
from test_trl_bridge import launch_and_wait
from toy import logged, without_times

from grpo_kit import trl_bridge
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.rewards.rules import parse_verdict
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.trl_rollouts import Episodes, Verdicts

PROFILE = PROFILES["smoke"]
CONFIG = dataclasses.replace(
    PROFILE.config, generation_batch_size=32, max_steps=2, eval_prompts=0, learning_rate=1e-3
)


def trainer_of(folder, strategy="mixed", rewards=(accuracy_reward, format_reward), **changes):
    given = PROFILE.load_policy(), PROFILE.load_task(), list(rewards)
    config = dataclasses.replace(CONFIG, **changes)
    rollout = partial(Verdicts, strategy=strategy)
    return trl_bridge.grpo_trainer(*given, config, rollout=rollout, output_dir=str(folder))


def sampled(trainer, monkeypatch) -> list[dict]:
    """What the rollout of each step returned, its prompts, and TRL's batch made of it."""
    steps, rollout, batch_of = [], trainer.rollout_func, trainer._generate_and_score_completions

    def watched(prompts, owner):
        steps.append({"prompts": prompts, **rollout(prompts, owner)})
        return {k: v for k, v in steps[-1].items() if k != "prompts"}

    def scored(inputs):
        batch = batch_of(inputs)
        steps[-1] |= {"advantages": batch["advantages"].view(-1, 4)}
        return batch

    monkeypatch.setattr(trainer, "rollout_func", watched)
    monkeypatch.setattr(trainer, "_generate_and_score_completions", scored)
    trainer.train()
    return steps


@pytest.mark.parametrize(
    ("strategy", "verdicts"),
    [("mixed", [0, 1] * 4), ("self-verify", [1] * 8), ("generate", [0] * 8)],
)
def test_groups_of_answers_and_of_verdicts_are_scored_each_in_its_way(
    strategy, verdicts, tmp_path, monkeypatch
):
    trainer = trainer_of(tmp_path, strategy)
    policy, task = PROFILE.load_policy(), PROFILE.load_task()
    weights = trainer.model.get_input_embeddings().weight.detach().clone()
    steps = sampled(trainer, monkeypatch)
    assert len(steps) == 2
    for step in steps:
        texts = policy.decode(step["completion_ids"])
        asked = policy.decode(step["prompt_ids"])
        for group, of_item in enumerate(verdicts):
            own = range(4 * group, 4 * group + 4)
            assert {step["is_verdict"][i] for i in own} == {bool(of_item)}
            assert len({asked[i] for i in own}) == 1
            assert ("Proposed answer" in asked[own[0]]) == of_item
            rows = [task.train[step["prompts"][i][-1]["row"]] for i in own]
            if of_item:
                labels = {step["correct"][i] for i in own}
                assert len(labels) == 1 and None not in labels
                rewards = [float(parse_verdict(texts[i]) is step["correct"][i]) for i in own]
            else:
                given = [row["prompt"] for row in rows], [texts[i] for i in own], []
                answers = [row["answer"] for row in rows]
                scores = (accuracy_reward(*given, answer=answers), format_reward(*given))
                rewards = [a + b for a, b in zip(*scores, strict=True)]
            rewards = torch.tensor(rewards)
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            torch.testing.assert_close(step["advantages"][group], expected, atol=1e-5, rtol=0)
        marked = zip(step["correct"], step["is_verdict"], strict=True)
        labels = [correct for correct, is_verdict in marked if is_verdict]
        assert sum(labels) * 2 == len(labels), "as many right as wrong"
    assert not torch.equal(weights, trainer.model.get_input_embeddings().weight)
    row = logged(tmp_path)[-1]
    assert ("rewards/verification_reward/mean" in row) == (strategy != "generate")


def test_where_no_items_can_be_made_all_groups_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_kit.trl_rollouts.post_process", lambda *given, n: [])
    (step, _) = sampled(trainer_of(tmp_path), monkeypatch)
    assert not any(step["is_verdict"]) and set(step["correct"]) == {None}
    assert step["advantages"].abs().sum() > 0


def test_two_updates_of_a_step_are_refused(tmp_path):
    with pytest.raises(ValueError, match="verify-alter makes two at some steps, TRL makes one"):
        trainer_of(tmp_path, "verify-alter")


def test_a_reward_that_is_a_coroutine_is_refused_for_verdicts(tmp_path):
    async def slow(completions, **columns):
        return [1.0] * len(completions)

    with pytest.raises(ValueError, match="slow is a coroutine, under TRL verdicts take plain"):
        trainer_of(tmp_path, rewards=[slow])


@pytest.mark.parametrize("what", ["self-verification", "episodes"])
def test_a_run_that_is_taken_up_again_is_the_unbroken_one(what, tmp_path):
    base, config = PROFILE.load_policy(), dataclasses.replace(CONFIG, generation_batch_size=16)
    system = PROFILE.load_agents(base, context="append", max_turns=2)
    rollout = partial(Episodes, system=system) if what == "episodes" else Verdicts
    task = tool_questions() if what == "episodes" else PROFILE.load_task()
    calls = []

    def breaking(prompts, completions, **columns):
        calls.append(len(prompts))
        if len(calls) == 4:  # the second step of the second run
            raise RuntimeError("a power cut")
        return [0.0] * len(prompts)

    def run(folder, **options):
        given = PROFILE.load_policy(), task, [accuracy_reward, breaking]
        options |= {"output_dir": tmp_path / folder, "seed": 0, "rollout": rollout}
        return trl_bridge.train(*given, dataclasses.replace(config, save_steps=1), **options)

    whole = run("whole")
    assert what in whole.start["batch_source"]
    with pytest.raises(RuntimeError, match="a power cut"):
        run("broken")
    resumed = run("broken", resume=True)
    assert len(calls) == 5, "one step was lost"
    assert without_times(resumed.history) == without_times(whole.history)


@pytest.mark.slow
def test_two_processes_ask_about_the_same_items_where_a_group_lies_in_both(tmp_path):
    """56 completions in groups of 8: the fourth, of verdicts, is split."""
    launch_and_wait("verdicts", tmp_path)
    first, second = json.loads((tmp_path / "seen.json").read_text())
    assert len(first) == len(second) == 2
    for own, other in zip(first, second, strict=True):
        whole = {name: own[name] + other[name] for name in own}
        for group in range(7):
            rows = slice(8 * group, 8 * group + 8)
            assert set(whole["is_verdict"][rows]) == {group % 2 == 1}
            assert all(ids == whole["prompt_ids"][8 * group] for ids in whole["prompt_ids"][rows])
            assert len(set(whole["correct"][rows])) == 1
        assert len(set(map(str, whole["completion_ids"][24:32]))) > 1, "each draws its own"
