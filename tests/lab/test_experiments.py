"""What the experiments measure, and that every arm of theirs runs from end to end."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kit.lab.experiments import (
    EXPERIMENTS,
    diversity_of,
    examined,
    fell,
    quality_of,
    read_truth,
    stopped_early,
    unbalanced,
    undiversified,
    unfiltered,
)
from grpo_kit.lab.grid import Trained, run_grid
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards.judge import Reply
from grpo_kit.self_verification import (
    VerificationItem,
    balance,
    diversify,
    filter_queries,
    post_process,
)
from grpo_kit.tasks import Task
from grpo_kit.training import PromptCollector, Run, check_task


class Letters:
    def encode(self, texts):
        return [[float(len(text)), float(text.count("1")), 1.0] for text in texts]


def test_alike_answers_have_no_diversity(saved_policy, monkeypatch):
    from grpo_kit.lab import experiments

    profile = PROFILES["smoke"]
    task = profile.load_task()
    alike = "<think>Maybe 3.</think><answer>3</answer>"
    other = "<think>first 1 + 2 = 3.</think><answer>3</answer>"
    answers = iter([[alike] * 16, [alike, other] * 8])
    monkeypatch.setattr(experiments, "texts_of", lambda *a, **k: next(answers))
    found = diversity_of(None, task, Letters(), profile.config, prompts=2)
    assert found == pytest.approx({"distinct": 1 / 8, "styles": 1.0, "distance": 0.0}, abs=1e-6)
    found = diversity_of(None, task, Letters(), profile.config, prompts=2)
    assert found["distinct"] == 2 / 8 and found["styles"] == pytest.approx(2.0)
    assert found["distance"] > 0


def test_the_few_labels_choose_the_first_of_the_best():
    few, held_out = [0.2, 0.9, 0.9, 0.4], [0.3, 0.8, 0.7, 0.95]
    history = [{"step": i, "few/pass@1": f, "eval/pass@1": e}
               for i, (f, e) in enumerate(zip(few, held_out, strict=True))]  # fmt: skip
    run = Run(Path(), None, 0, [{"step": 0}, *history])
    assert stopped_early(run) == 0.8
    run = Run(Path(), None, 0, history[:3])
    assert fell(run) == pytest.approx(0.8 - 0.7)


def test_an_answer_is_overrated_by_what_the_evaluator_thinks_beyond_the_truth(monkeypatch):
    from grpo_kit.lab import experiments

    profile = PROFILES["smoke"]
    policy, task = profile.load_policy(), profile.load_task()
    right = f"<think>first 1 + 2 = 3.</think><answer>{task.test[0]['answer']}</answer>"
    monkeypatch.setattr(experiments, "texts_of", lambda *a, **k: [right] * 4)
    found = experiments.overrated(policy, policy, task, profile.config, prompts=1, samples=4)
    assert 0 < found["p_yes"] < 1 and found["overrated"] == pytest.approx(found["p_yes"] - 1)


@pytest.mark.parametrize(
    ("name", "arm"),
    [("verification", "mixed"), ("meta", "truth 10 %"), ("meta", "labels"), ("flow", "per turn")],
)
def test_an_arm_is_trained_watched_and_measured_from_end_to_end(name, arm, tmp_path):
    whole, profile = EXPERIMENTS[name], PROFILES["smoke"]
    config = dataclasses.replace(profile.config, max_steps=1, save_steps=0, eval_prompts=4)
    profile = dataclasses.replace(profile, config=config)
    where = {"results": tmp_path / "results", "work": tmp_path / "work", "arms": [arm]}
    (record,) = run_grid(name, whole, profile, [0], **where)
    wanted = {"verification": "of_n/own_verdicts gained/verification verdicts/false_yes",
              "meta": "p_yes overrated fell stopped\xa0early",
              "flow": "gained/success gained/turns eval/tool_errors"}[name]  # fmt: skip
    for metric in wanted.split(" "):
        assert math.isfinite(record.evaluation[metric.replace("\xa0", " ")]), metric
    assert {"prompt", "completion", "right"} == set(record.samples[0]) and record.seconds > 0
    assert record.history[-1]["step"] == 1


def test_the_truth_is_read_by_rule_in_the_tiny_world_only():
    arm = EXPERIMENTS["meta"].arms["truth 10 %"]
    policy, tiny = PROFILES["smoke"].load_policy(), PROFILES["smoke"]
    for profile, ruled in ((tiny, True), (dataclasses.replace(tiny, judge="self"), False)):
        reward = arm.rewards(profile, profile.config, policy)[-1]
        assert (reward.truth_reader is not None) == ruled
    assert read_truth("<answer>12.0</answer>", "12") > 0.9 > 0.1 > read_truth("12", "13")


def test_ablations_leave_out_one_stage_each():
    def items(query, right, wrong):
        return [VerificationItem(query, query, str(i), i < right) for i in range(right + wrong)]

    hard, easy, mixed = items("hard", 0, 6), items("easy", 6, 0), items("mixed", 3, 3)
    every = hard + easy + mixed
    assert any(item.query_id == "hard" for item in unfiltered(every, 0, 6))
    assert all(item.query_id != "hard" for item in post_process(every, 0, 6))
    assert len({i.answer for i in undiversified(mixed, 0, 6) if i.correct}) == 3
    whole = balance(*diversify(filter_queries(mixed)), 6)
    assert len({i.answer for i in whole if i.correct}) == 2
    crowd = [item for i in range(9) for item in items(f"easy {i}", 6, 0)] + mixed
    counts = [sum(i.correct for i in f(crowd, 0, 8)) for f in (unbalanced, post_process)]
    assert counts[0] > 4 == counts[1]


def test_what_a_judge_thinks_of_answers_and_how_many_claim_to_be_checked(monkeypatch):
    from grpo_kit.lab import experiments

    class Generous:
        name = "generous"

        def prompt(self, question, response):
            return [{"role": "user", "content": response}]

        async def __call__(self, conversations):
            for i, messages in enumerate(conversations):
                n = 5 if "Surely" in messages[0]["content"] else 2
                scores = dict.fromkeys(("accuracy", "grammar", "informativeness", "coherence"), n)
                yield i, Reply(json.dumps(scores) if self.name == "generous" else "No.")

    profile = PROFILES["smoke"]
    assured = "<think>Surely 3, checked twice.</think><answer>3</answer>"
    answers = [assured, "<think>Maybe 3.</think><answer>3</answer>"] * 8
    monkeypatch.setattr(experiments, "texts_of", lambda *a, **k: answers)
    found = quality_of(Generous(), None, profile.load_task(), profile.config, prompts=2)
    assert found == {"judged": pytest.approx(3.5), "assured": 0.5}
    monkeypatch.setattr(Generous, "name", "silent")
    with pytest.raises(RuntimeError, match="none of 16 answers"):
        quality_of(Generous(), None, profile.load_task(), profile.config, prompts=2)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "published"])
def test_every_arm_makes_a_batch_and_the_first_is_plain_grpo(name):
    experiment, profile = EXPERIMENTS[name], PROFILES["smoke"]
    plain = next(iter(experiment.arms))
    assert "?" in experiment.question
    policy, task = profile.load_policy(), (experiment.task or profile.load_task)()
    common = {k: v for k, v in experiment.changes.items() if k != "num_generations_eval"}
    usual = ["accuracy_reward"] if name == "flow" else ["accuracy_reward", "format_reward"]
    for arm_name, arm in experiment.arms.items():
        config = dataclasses.replace(profile.config, **common, **arm.changes)
        rewards = arm.rewards(profile, config, policy)
        assert [reward.__name__ for reward in rewards[:2]] == usual
        assert len(rewards) == len(usual) or arm_name != plain
        check_task(task, rewards, config)
        few = Task(task.name, task.train.select(range(8)), task.test)
        source = PromptCollector(policy, few, rewards, config, 0)
        source = arm.collector(profile)(source) if arm.collector else source
        state = SimpleNamespace(global_step=0, max_steps=1, progress=0.0)
        (batch,) = source(torch.Generator().manual_seed(0), state, {})
        assert not batch.rewards.isnan().any() and batch.advantages.abs().max() > 0


def test_arms_of_real_models_name_the_model_a_commit_and_the_gpu_that_they_want():
    experiment = EXPERIMENTS["published"]
    for name, arm in experiment.arms.items():
        for profile in (PROFILES["colab"], PROFILES["paper"]):
            chosen, config = experiment.profile(profile, name), experiment.config(profile, name)
            assert chosen.policy.startswith("Qwen/") and len(chosen.revision) == 40
            assert chosen.device == "cuda" and config.generation_batch_size % 8 == 0
            identity = experiment.identity(profile, name)
            assert identity["policy"] == chosen.policy and identity["task"] == chosen.task
        wanted = [f.__name__ for f in arm.rewards(chosen, config, None)]
        first = "maths_reward" if chosen.task == "competition_math" else "accuracy_reward"
        assert wanted == [first, "format_reward"]
        with pytest.raises(ValueError, match="wants a GPU: choose --profile colab"):
            experiment.profile(PROFILES["tiny"], name)


def test_a_policy_is_examined_before_and_after(policy):
    task = PROFILES["smoke"].load_task()
    few = Task(task.name, task.train, task.test.select(range(6)))
    base = PROFILES["smoke"].load_policy()
    found = examined(Trained(None, policy, base, few, None, None), max_new_tokens=32)
    assert found["exam/n"] == 6 and 0 <= found["exam/strict"] <= found["exam/lenient"] <= 1
    again = examined(Trained(None, base, base, few, None, None), max_new_tokens=32)
    assert again["gained/strict"] == again["gained/lenient"] == 0
    lost = found["exam/lenient"] - again["exam/lenient"]
    assert found["gained/lenient"] == pytest.approx(lost)
