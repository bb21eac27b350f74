"""Arms, seeds and paired differences: the arithmetic, and that nothing finished is run again."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_kit.config import PROFILES
from grpo_kit.plots import arm_bands
from grpo_kit.reproduction.compare import (
    Arm,
    Claim,
    Experiment,
    claims_text,
    run_experiment,
    summarise,
    summary_text,
    verdict,
)
from grpo_kit.reproduction.experiments import (
    EXPERIMENTS,
    diversity_of,
    fell,
    quality_of,
    read_truth,
    stopped_early,
    unbalanced,
    undiversified,
    unfiltered,
)
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


def finished(seed: int, accuracy: float, **measured):
    history = [
        {"step": 0, "eval/pass@1": 0.25, "eval/n": 4},
        {"step": 1, "reward": accuracy / 2, "entropy": 0.4, "step_time": 2.0},
        {"step": 2, "reward": accuracy, "entropy": 0.2, "eval/pass@1": accuracy, "eval/n": 4,
         "step_time": 3.0},
    ]  # fmt: skip

    def series(name):
        rows = [row for row in history if name in row]
        return [row["step"] for row in rows], [row[name] for row in rows]

    return SimpleNamespace(history=history, seed=seed, series=series), measured


def five(plain, other, **shift):
    runs = {
        "plain": [finished(seed, value, styles=1.0) for seed, value in enumerate(plain)],
        "other": [finished(seed, value, styles=2.0) for seed, value in enumerate(other)],
    }
    config = {"max_steps": 2, "generation_batch_size": 8}
    return summarise(runs, ("reward", "eval/pass@1")) | {"profile": "tiny", "config": config}


def test_differences_are_paired_by_seed():
    """The medians of both arms are the same, and yet each seed gains 0.1 or loses 0.3."""
    summary = five([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.2])
    assert summary["seeds"] == [0, 1, 2, 3, 4]
    final = summary["final"]
    assert final["plain"]["eval/pass@1"]["median"] == final["other"]["eval/pass@1"]["median"] == 0.3
    difference = summary["difference"]["other"]["eval/pass@1"]
    assert difference["median"] == pytest.approx(0.1) and difference["n"] == 5
    assert difference["low"] == pytest.approx(-0.3) and difference["high"] == pytest.approx(0.1)
    assert final["plain"]["seconds"]["values"] == [5.0] * 5
    assert summary["difference"]["other"]["styles"]["median"] == 1.0
    assert "eval/n" not in final["plain"]


def test_a_difference_whose_interval_holds_0_is_inconclusive_and_so_are_few_seeds():
    lines = summary_text(five([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.2])).splitlines()
    assert lines[2] == "| at the end | plain | other |"
    row = {line.split(" | ")[0]: line for line in lines}  # the second table's rows come later
    assert "| minus plain, paired by seed | other |" in lines
    assert row["| pass@1"] == "| pass@1 | +0.1 [-0.3, +0.1] *inconclusive* |"
    assert row["| styles"] == "| styles | +1 [+1, +1] |"
    assert "+1 [+1, +1] *inconclusive*" in summary_text(five([0.1, 0.2], [0.3, 0.4]))
    assert "| styles | +1 *inconclusive* |" in summary_text(five([0.1], [0.3]))


def test_a_claim_is_judged_by_its_interval():
    def row_of(claim_holds_for, summary):
        (row,) = claims_text(summary, "other", {"more": claim_holds_for}).splitlines()[2:]
        return row

    rising = five([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.6])
    falling = five([0.2, 0.3, 0.4, 0.5, 0.6], [0.1, 0.2, 0.3, 0.4, 0.5])
    mixed = five([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.2])
    assert row_of("eval/pass@1", rising) == "| more | pass@1 +0.1 [+0.1, +0.1] | **reproduced** |"
    assert row_of("eval/pass@1", falling).endswith("-0.1] | **contradicted** |")
    assert row_of("eval/pass@1", mixed).endswith("| **inconclusive** |")
    assert row_of("eval/pass@1", five([0.1, 0.2], [0.3, 0.4])).endswith("| **inconclusive** |")


def test_what_an_arm_does_not_log_is_left_out_of_its_differences_and_dashed():
    """An arm that samples nothing after its first step has no entropy."""
    runs = {name: [finished(seed, 0.5) for seed in range(5)] for name in ("plain", "silent")}
    for run, _ in runs["silent"]:
        del run.history[-1]["entropy"]
    config = {"max_steps": 2, "generation_batch_size": 8}
    summary = summarise(runs, ()) | {"profile": "tiny", "config": config}
    assert "entropy" not in summary["difference"]["silent"]
    text = summary_text(summary)
    assert "| entropy | 0.2 [0.2, 0.2] | – |" in text and "| entropy | – |" in text


def test_a_claim_may_be_that_something_falls_or_stays_or_is_an_arms_own():
    summary = five([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.6])
    of = {"n": 5, "median": 0.0}
    for claim, cases in {
        Claim("m", "falls"): [(-0.3, -0.1, "reproduced"), (0.1, 0.3, "contradicted"),
                              (-0.1, 0.1, "inconclusive"), (-0.1, 0.0, "inconclusive")],
        Claim("m", "stays"): [(-0.04, 0.04, "reproduced"), (0.06, 0.2, "contradicted"),
                              (0.01, 0.2, "inconclusive"), (-0.2, -0.06, "contradicted")],
    }.items():  # fmt: skip
        for low, high, expected in cases:
            assert verdict({**of, "low": low, "high": high}, claim) == expected, (claim, low, high)
            assert verdict({"n": 4, "low": low, "high": high}, claim) == "inconclusive"
    claims = {"a": Claim("styles", "stays", "plain", paired=False), "b": Claim("eval/pass@1")}
    rows = claims_text(summary, "other", claims).splitlines()[2:]
    assert rows[0] == "| a | plain: styles +1 [+1, +1] | **contradicted** |"
    assert rows[1] == "| b | pass@1 +0.1 [+0.1, +0.1] | **reproduced** |"


def test_bands_have_a_panel_a_metric_and_a_line_an_arm():
    summary = five([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.2])
    panels = arm_bands(summary["curves"]).axes
    assert [axes.get_title() for axes in panels][:2] == ["reward", "accuracy"]
    assert panels[0].lines[0].get_ydata().tolist() == pytest.approx([0.15, 0.3])
    assert len(panels[0].collections) == 2 and all(axes.get_ylabel() for axes in panels)
    one = {"reward": summary["curves"]["reward"], "kl": {"other": {"steps": [1], "values": [[2]]}}}
    first, second = arm_bands(one).axes
    assert second.lines[0].get_color() == first.lines[1].get_color() != first.lines[0].get_color()
    with pytest.raises(ValueError, match="no metric"):
        arm_bands({})


def even(prompts, completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def odd(prompts, completions, completion_ids, **columns):
    return [1 - share for share in even(prompts, completions, completion_ids)]


def test_arms_are_run_once_and_start_from_the_same_weights(saved_policy, tmp_path):
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy))
    config = dataclasses.replace(
        profile.config, max_steps=2, max_completion_length=6, eval_prompts=2, save_steps=1
    )
    measured = []

    def measure(trained):
        both = (trained.policy, trained.base)
        assert not torch.equal(*(p.model.get_input_embeddings().weight for p in both))
        assert trained.run.history[-1]["step"] == 2 and trained.task.name == "word_problems"
        measured.append((trained.config.beta, trained.policy.model.dtype))
        return {"seen": float(len(measured))}

    experiment = Experiment(
        "odd or even?",
        {
            "even": Arm(lambda *given: [even]),
            "odd, held": Arm(lambda *given: [odd], {"beta": 0.1}),
        },
        measure,
    )
    first = run_experiment(experiment, profile, config, [0], tmp_path / "out")
    assert [beta for beta, _ in measured] == [0.0, 0.1]
    folders = [tmp_path / "out" / name / "seed-0" for name in ("even", "odd,-held")]
    start = [
        torch.load(folder / "checkpoint.pt", weights_only=True)["start"]["first weights"]
        for folder in folders
    ]
    assert start[0] == start[1]
    again = run_experiment(experiment, profile, config, [0, 1], tmp_path / "out")
    assert len(measured) == 4, "what is measured is kept too"
    for name in experiment.arms:  # the first seed's seconds are those of its only run
        seconds = [table["final"][name]["seconds"]["values"][0] for table in (first, again)]
        assert seconds[0] == seconds[1] > 0
    stored = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert stored["seeds"] == [0, 1] and stored["question"] == "odd or even?"
    assert (tmp_path / "out" / "odd,-held" / "seed-1" / "run.json").exists()
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no seed"):
        run_experiment(experiment, profile, config, [], tmp_path / "none")


class Letters:
    def encode(self, texts):
        return [[float(len(text)), float(text.count("1")), 1.0] for text in texts]


def test_alike_answers_have_no_diversity(saved_policy, monkeypatch):
    from grpo_kit.reproduction import experiments

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


def test_a_step_without_any_score_in_one_seed_is_left_out_of_the_curves():
    runs = {"plain": [finished(seed, 0.5) for seed in range(2)]}
    runs["plain"][1][0].history.insert(2, {"step": 1.5, "reward": 0.4})
    curve = summarise(runs, ("reward",))["curves"]["reward"]["plain"]
    assert curve["steps"] == [1, 2] and [len(values) for values in curve["values"]] == [2, 2]


def test_over_tokens_each_seed_has_places_of_its_own():
    def run(*points):
        history = [{"num_generated_tokens": x, "eval/pass@1": y, "step": i}
                   for i, (x, y) in enumerate(points)]  # fmt: skip
        return Run(Path(), None, 0, [*history, {"num_generated_tokens": 999, "step": 9}]), {}

    runs = {"plain": [run((0, 0.0), (100, 1.0)), run((0, 0.5), (50, 0.5), (120, 0.5))]}
    summary = summarise(runs, ("eval/pass@1", "never"), "num_generated_tokens")
    assert summary["x"] == "num_generated_tokens" and summary["curves"]["never"] == {}
    curve = summary["curves"]["eval/pass@1"]["plain"]
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 100), "places that all seeds reach"
    assert curve["values"][0] == pytest.approx([x / 100 for x in curve["steps"]])
    assert set(curve["values"][1]) == {0.5}
    panel = arm_bands({"eval/pass@1": summary["curves"]["eval/pass@1"]}, summary["x"]).axes[0]
    assert panel.get_xlabel() == "generated tokens"


def test_the_few_labels_choose_the_first_of_the_best():
    few, held_out = [0.2, 0.9, 0.9, 0.4], [0.3, 0.8, 0.7, 0.95]
    history = [{"step": i, "few/pass@1": f, "eval/pass@1": e}
               for i, (f, e) in enumerate(zip(few, held_out, strict=True))]  # fmt: skip
    run = Run(Path(), None, 0, [{"step": 0}, *history])
    assert stopped_early(run) == 0.8
    run = Run(Path(), None, 0, history[:3])
    assert fell(run) == pytest.approx(0.8 - 0.7)


def test_an_answer_is_overrated_by_what_the_evaluator_thinks_beyond_the_truth(monkeypatch):
    from grpo_kit.reproduction import experiments

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
    one = dataclasses.replace(whole, arms={arm: whole.arms[arm]})
    config = dataclasses.replace(profile.config, max_steps=1, save_steps=0, eval_prompts=4)
    if name == "verification":
        with pytest.raises(ValueError, match="give that number, --tokens"):
            run_experiment(one, profile, config, [0], tmp_path)
        config = dataclasses.replace(config, max_generated_tokens=100)
    summary = run_experiment(one, profile, config, [0], tmp_path)
    measured = summary["final"][arm]
    wanted = {"verification": "of_n/own_verdicts gained/verification verdicts/false_yes",
              "meta": "p_yes overrated fell stopped\xa0early",
              "flow": "gained/success gained/turns eval/tool_errors"}[name]  # fmt: skip
    for metric in wanted.split(" "):
        assert math.isfinite(measured[metric.replace("\xa0", " ")]["values"][0]), metric
    assert set(one.curves) >= set(summary["curves"])


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
    from grpo_kit.reproduction import experiments

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


@pytest.mark.parametrize("name", EXPERIMENTS)
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
