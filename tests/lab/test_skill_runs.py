"""Tasks, rewards and report of the runs on each skill."""

import dataclasses
import json
from itertools import pairwise

import pytest

from grpo_kit.lab import skill_runs
from grpo_kit.profiles import PROFILES

LOSSES = ("loses", "sells", "spends", "drops")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(skill_runs, "ROWS", {"train": 60, "test": 40})


def test_verification_items_are_balanced_and_their_labels_true():
    task = skill_runs.task_of("verify")
    answers = list(task.train["answer"])
    assert 0.3 < answers.count("Yes") / len(answers) < 0.7
    for row in task.test:
        question, proposed = row["prompt"][0]["content"].split("\nProposed answer: ")
        value = 0
        for before, word in pairwise(question.replace(".", "").split()):
            value *= {"doubles": 2, "triples": 3}.get(word, 1)
            value += int(word) * (-1 if before in LOSSES else 1) if word.isdigit() else 0
        assert row["answer"] == ("Yes" if int(proposed.split("\n")[0]) == value else "No")


def test_the_right_plan_earns_1_and_anything_else_0():
    for row in skill_runs.task_of("plan").test.select(range(10)):
        context, goal, tool = row["answer"].split("|")
        right = f"<think>So.</think>\nContext: {context}\nGoal: {goal}\nTool: {tool}"
        texts = [right, right.replace(f"Goal: {goal}", "Goal: find nothing"), "", "Goal: x"]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        assert skill_runs.plan_reward(completions, [row["answer"]] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_every_skill_is_run_and_reported_and_a_failing_one_leaves_the_others_results(
    saved_policy, tmp_path
):
    config = dataclasses.replace(
        PROFILES["smoke"].config, max_steps=1, generation_batch_size=8, max_completion_length=4,
        eval_prompts=2, num_generations_eval=2,
    )  # fmt: skip
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy), config=config)
    result = skill_runs.run_skills(profile, tmp_path / "out")
    assert list(result) == list(skill_runs.SKILLS)
    assert json.loads((tmp_path / "out" / "skills.json").read_text()) == result
    assert 0 < result["bare"]["reward"][0] < 1
    for name, row in result.items():
        # an untrained judge writes no JSON, so nothing could be scored
        assert len(row["reward"]) == (name != "judge") and "eval/pass@1" in row["after"]
    text = skill_runs.skills_text(result)
    assert "| plan | 0.000 | 0.000 |" in text and "| none | none |" in text

    config = dataclasses.replace(config, max_unscored_steps=1)
    profile = dataclasses.replace(profile, config=config)
    with pytest.raises(RuntimeError, match="no completion could be scored"):
        skill_runs.run_skills(profile, tmp_path, names=["solve", "judge"])
    assert list(json.loads((tmp_path / "skills.json").read_text())) == ["solve"]
