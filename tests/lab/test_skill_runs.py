"""Tasks, rewards and report of the runs on each skill."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from grpo_kit.lab import skill_runs
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr(skill_runs, "ROWS", {"train": 60, "test": 40})


def test_verification_items_are_balanced_and_their_labels_true():
    task = skill_runs.verify_task()
    answers = list(task.train["answer"])
    assert 0.3 < answers.count("Yes") / len(answers) < 0.7
    for row in task.test:
        question, proposed = row["prompt"][0]["content"].split("\nProposed answer: ")
        numbers = [int(word.strip(".")) for word in question.split() if word.strip(".").isdigit()]
        if set(question.replace(".", "").split()) & {"doubles", "triples"}:
            continue
        value, signs = numbers[0], [w for w in question.split() if w in sum(VERBS.values(), ())]
        for verb, amount in zip(signs, numbers[1:], strict=True):
            value += amount if verb in VERBS["+"] else -amount
        assert row["answer"] == ("Yes" if int(proposed.split("\n")[0]) == value else "No")


VERBS = {"+": ("finds", "buys", "wins", "gets"), "-": ("loses", "sells", "spends", "drops")}


def test_the_right_plan_earns_1_and_anything_else_0():
    task = skill_runs.plan_task()
    for row in task.test.select(range(10)):
        context, goal, tool = row["answer"].split("|")
        right = f"<think>So.</think>\nContext: {context}\nGoal: {goal}\nTool: {tool}"
        texts = [right, right.replace(f"Goal: {goal}", "Goal: find nothing"), "", "Goal: x"]
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        assert skill_runs.plan_reward(completions, [row["answer"]] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_every_skill_is_run_and_reported(saved_policy, tmp_path):
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy))
    config = dataclasses.replace(
        profile.config, max_steps=1, generation_batch_size=8, max_completion_length=4,
        eval_prompts=2, num_generations_eval=2,
    )  # fmt: skip
    result = skill_runs.run_skills(profile, config, tmp_path / "out")
    assert list(result) == list(skill_runs.SKILLS)
    assert json.loads((tmp_path / "out" / "skills.json").read_text()) == result
    assert 0 < result["bare"]["reward"][0] < 1
    for name, row in result.items():
        # an untrained judge writes no JSON, so nothing could be scored
        assert len(row["reward"]) == (name != "judge") and "eval/pass@1" in row["after"]
    text = (tmp_path / "out" / "skills.md").read_text()
    assert "| plan | 0.000 | 0.000 |" in text and "| none | none |" in text
    assert (tmp_path / "out" / "skills.png").stat().st_size > 1000


def test_a_judge_that_ends_its_run_leaves_the_other_skills_results(
    saved_policy, tmp_path, monkeypatch
):
    def fake(policy, task, rewards, config, *, output_dir, seed):
        if output_dir.name == "judge":
            raise RuntimeError("no reward scored anything")
        return SimpleNamespace(series=lambda name: ([1, 2], [0.0, 1.0]))

    monkeypatch.setattr(skill_runs, "train", fake)
    monkeypatch.setattr(
        skill_runs, "evaluate", lambda *_, **__: {"eval/pass@1": 0.5, "eval/greedy": 0.25}
    )
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy))
    with pytest.raises(RuntimeError, match="no reward scored"):
        skill_runs.run_skills(profile, profile.config, tmp_path)
    assert list(json.loads((tmp_path / "skills.json").read_text())) == [
        "solve", "verify", "plan", "meta", "bare",
    ]  # fmt: skip
    assert (
        "| meta | 0.500 | 0.500 | 0.250 | 0.250 | 0.000 | 1.000 |"
        in (tmp_path / "skills.md").read_text()
    )
    assert (tmp_path / "skills.png").stat().st_size > 1000


def test_one_skill_alone(saved_policy, tmp_path, monkeypatch):
    run = SimpleNamespace(series=lambda name: ([1], [0.5]))
    monkeypatch.setattr(skill_runs, "train", lambda *_, **__: run)
    monkeypatch.setattr(
        skill_runs, "evaluate", lambda *_, **__: {"eval/pass@1": 0.5, "eval/greedy": 0.25}
    )
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy))
    assert list(skill_runs.run_skills(profile, profile.config, tmp_path, names=["plan"])) == [
        "plan"
    ]


def test_accuracy_reads_a_verdict():
    texts = ["<answer>Yes</answer>", "<answer>No</answer>"]
    assert accuracy_reward([], texts, [], answer=["Yes", "Yes"]) == [1.0, 0.0]
