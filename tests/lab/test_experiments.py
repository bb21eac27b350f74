"""What the experiments measure, and that every arm of theirs runs from end to end."""

import dataclasses
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from toy import items_of

from grpo_kit.lab import experiments, measures
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.grid import Trained, run_grid
from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards.meta_evaluation import BREVITY_QUESTION, META_QUESTION, as_turns, read_yes
from grpo_kit.self_verification import diversify, filter_queries, post_process
from grpo_kit.tasks import Task, tool_questions
from grpo_kit.tasks.word_problems import DIFFICULTIES, make_problem
from grpo_kit.tiny import problems, skills
from grpo_kit.training import PromptBatches, check_task

SMOKE = PROFILES["smoke"]


@pytest.fixture(scope="module")
def task():
    return SMOKE.load_task()


def trained(policy, base, task, n):
    """A run's result on a task with `n` held-out problems."""
    few = Task(task.name, task.train, task.test.select(range(n)))
    return Trained(None, policy, base, few, SMOKE, SMOKE.config)


def say(monkeypatch, answers):
    """A policy that answers this when it is measured."""
    said = SimpleNamespace(completion_lists=lambda: answers)
    monkeypatch.setattr(measures, "reply", lambda *a, **k: said)
    return SimpleNamespace(decode=list)


def test_alike_answers_have_no_diversity(task, monkeypatch):
    alike = "<think>Maybe 3.</think><answer>3</answer>"
    other = "<think>first 1 + 2 = 3.</think><answer>3</answer>"
    letters = SimpleNamespace(encode=lambda texts: [[float(len(t)), 1.0] for t in texts])

    def measured(answers):
        return measures.diversity_of(say(monkeypatch, answers), task, letters, SMOKE.config)

    first, second = measured([alike] * 256), measured([alike, other] * 128)
    assert first == pytest.approx({"distinct": 1 / 8, "styles": 1.0, "distance": 0.0}, abs=1e-6)
    assert second["distinct"] == 2 / 8 and second["styles"] == pytest.approx(2.0)
    assert second["distance"] > 0


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{arms: {plain: {rewards: plain and diversty}}}", "rewards are 'plain and diversty': ch"),
        ("{arms: {plain: {beta: 0.1}}}", "nothing takes beta; the config's go under `config`"),
        ("{arms: {plain: {}}, measure: [speed]}", "'mine' in mine.yaml: .*'speed'"),
        ("{arms: {plain: {}}, seed: 3}", "'mine' in mine.yaml: .*'seed'"),
        ("{arms: {plain: {}", "mine.yaml cannot be read as YAML: .*line 1"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(entry, problem, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"mine: {entry}")
    with pytest.raises(ValueError, match=problem):
        experiments.read_experiments(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("name", "arm", "metrics"),
    [
        ("basic", "more warm-up", ["eval/greedy", "before/pass@64"]),
        ("verification", "mixed", ["of_n/own_verdicts", "gained/verification"]),
        ("meta", "truth 10 %", ["eval/lenient/pass@1"]),
        ("brevity", "short x 2", ["eval/mean_length"]),
        ("engines", "TRL", ["eval/pass@1", "eval/mean_length"]),
        ("label-free", "random and format", ["eval/lenient/greedy", "eval/mean_length/wrong"]),
        ("corrections", "DPPO", ["eval/pass@1"]),
        ("corrections", "overlong penalty", ["eval/pass@1"]),
        pytest.param("flow", "per turn", ["gained/success", "eval/tool_errors", "after/turns/10"],
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_arm_is_trained_watched_and_measured_from_end_to_end(
    name, arm, metrics, tmp_path, monkeypatch
):
    monkeypatch.setattr(measures, "TRIED", 4)
    monkeypatch.setattr(experiments, "_taught_brevity", SMOKE.load_policy)  # it takes a minute
    config = dataclasses.replace(SMOKE.config, max_steps=1, save_steps=0, eval_prompts=4)
    profile = dataclasses.replace(SMOKE, config=config)
    where = {"results": tmp_path / "results", "work": tmp_path / "work", "arms": [arm]}
    (record,) = run_grid(name, EXPERIMENTS[name], profile, [0], **where)
    assert all(math.isfinite(record.evaluation[metric]) for metric in metrics)
    assert {"prompt", "completion", "right"} == set(record.samples[0]) and record.seconds > 0
    assert record.history[-1]["step"] == 1 and not [*tmp_path.rglob("checkpoint*")]


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.1, 0.2, 0.8, 0.9], [False, False, True, True], 1.0),
        ([0.5, 0.5, 0.5], [True, False, False], 0.5),
        ([0.1, 0.3, 0.2, 0.4], [True, True, False, False], 0.25),
        ([0.1, 0.2], [True, True], math.nan),
    ],
)
def test_auc_is_the_share_of_pairs_in_order_and_needs_both_labels(scores, labels, expected):
    assert measures.auc(scores, labels) == pytest.approx(expected, nan_ok=True)


def test_more_tries_solve_more_problems(base, task):
    t = dataclasses.replace(trained(base, base, task, 6), run=SimpleNamespace(seed=0))
    known = measures.knows(t)
    before = {k.removeprefix("before/"): v for k, v in known.items() if k.startswith("before/")}
    assert known == {f"{when}/{k}": v for when in ("before", "after") for k, v in before.items()}
    rising = [before[f"pass@{k}"] for k in (1, 2, 4, 8, 16, 32, 64)]
    assert rising == sorted(rising) and rising[0] < rising[-1] <= 1


def test_the_truth_is_read_by_rule_in_the_tiny_world_only(policy):
    arm = EXPERIMENTS["meta"].arms["truth 10 %"]
    for profile, ruled in ((SMOKE, True), (dataclasses.replace(SMOKE, judge="self"), False)):
        reward = arm.rewards(profile, profile.config, policy)[-1]
        assert (reward.truth_reader is not None) == ruled
    with pytest.raises(ValueError, match="of the tiny world: choose another"):
        EXPERIMENTS["brevity"].arms["short x 1"].rewards(PROFILES["smol"], SMOKE.config, policy)
    right = experiments.read_truth("<answer>12.0</answer>", "12")
    assert right > 0.9 and experiments.read_truth("12", "13") < 0.1


def test_ablations_leave_out_one_stage_each():
    hard, easy, mixed = items_of("hard", 0, 6), items_of("easy", 6, 0), items_of("mixed", 3, 3)
    every = hard + easy + mixed
    assert any(item.query_id == "hard" for item in experiments.unfiltered(every, 0, 6))
    assert all(item.query_id != "hard" for item in post_process(every, 0, 6))
    assert len({i.answer for i in experiments.undiversified(mixed, 0, 6) if i.correct}) == 3
    chosen, filler = diversify(filter_queries(mixed))
    assert len({i.answer for i in chosen + filler if i.correct}) == 2
    crowd = [item for i in range(9) for item in items_of(f"easy {i}", 6, 0)] + mixed
    assert sum(i.correct for i in experiments.unbalanced(crowd, 0, 8)) > 4
    assert sum(i.correct for i in post_process(crowd, 0, 8)) == 4
    assert len(experiments.unprocessed(hard, 0, 4)) == 4 and not post_process(hard, 0, 4)


def test_what_a_judge_thinks_of_answers_and_how_many_claim_to_be_checked(base, task, monkeypatch):
    assured = "<think>Surely 3, checked twice.</think><answer>3</answer>"
    said = [assured, "<think>Maybe 3.</think><answer>3</answer>"] * 8
    two = trained(say(monkeypatch, said), base, task, 2)
    rewards = torch.tensor([[0.5], [-0.25]] * 7 + [[torch.nan]] * 2)  # scores of 5 and 2
    monkeypatch.setattr(measures, "score_texts", lambda *arguments: rewards)
    measured = measures.quality_of(two)
    assert math.isnan(measured.pop("judge/auc")), "no answer was right"
    assert measured == {"judged": pytest.approx(3.5), "assured": 0.5}
    rewards.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="none of 16 answers"):
        measures.quality_of(two)


@pytest.mark.slow
def test_the_evaluator_that_was_taught_brevity_tells_short_from_long_and_right_from_wrong():
    rng, read = random.Random(5), []
    for _ in range(200):
        problem = make_problem(rng, rng.choice(DIFFICULTIES), "test")
        text = problems.solve(problem, rng.choice(list(problems.STYLES)), rng)
        asked = [META_QUESTION, BREVITY_QUESTION]
        row = [as_turns(problem.question, text, question) for question in asked]
        last = re.findall(r"\d+", text)[-1]  # marked or not: the grader does not mind the form
        read.append((last == str(problem.answer), len(text.split()), row))
    right, words, rows = zip(*read, strict=True)
    short = [count < sorted(words)[len(words) // 2] for count in words]
    evaluators = experiments._taught_brevity(), SMOKE.load_policy()
    taught, untaught = (read_yes(one, rows) for one in evaluators)
    assert measures.auc([is_right.p_yes for is_right, _ in taught], right) > 0.85
    assert measures.auc([is_short.p_yes for _, is_short in taught], short) > 0.85
    assert measures.auc([is_short.p_yes for _, is_short in untaught], short) < 0.3


QUICK = [name for name in EXPERIMENTS if name not in ("published", "flow")]


@pytest.mark.parametrize("name", [*QUICK, pytest.param("flow", marks=pytest.mark.slow)])
def test_every_arm_makes_a_batch_and_the_first_is_plain_grpo(name, base, task, monkeypatch):
    monkeypatch.setattr(experiments, "warm_up_more", lambda base, seed: base)  # takes ten seconds
    monkeypatch.setattr(experiments, "_taught_brevity", lambda: base)  # a minute
    experiment, plain = EXPERIMENTS[name], next(iter(EXPERIMENTS[name].arms))
    assert "?" in experiment.question
    task = experiment.task() if experiment.task else task
    common = {k: v for k, v in experiment.changes.items() if k != "num_generations_eval"}
    usual = ["accuracy_reward", "format_reward"][: 1 if name in ("flow", "dial-turns") else 2]
    for arm_name, arm in experiment.arms.items():
        config = dataclasses.replace(SMOKE.config, **common, **arm.changes)
        rewards = arm.rewards(SMOKE, config, base)
        assert [reward.__name__ for reward in rewards[: len(usual)]] == usual
        if name not in ("dial-judge", "dial-evaluator"):  # their baselines are other rewards
            assert len(rewards) == len(usual) or arm_name != plain
        check_task(task, rewards, config)
        eight = Task(task.name, task.train.select(range(8)), task.test)
        source = PromptBatches(base, eight, rewards, config, 0)
        source = arm.batch_source(SMOKE)(source) if arm.batch_source else source
        state = SimpleNamespace(global_step=0, max_steps=1, progress=0.0)
        (batch,) = source(torch.Generator().manual_seed(0), state, {})
        assert not batch.rewards.isnan().any() and batch.advantages.abs().max() > 0


@pytest.mark.parametrize("name", EXPERIMENTS["published"].arms)
def test_arms_of_real_models_name_the_model_a_commit_and_the_gpu_that_they_want(name):
    experiment, profile = EXPERIMENTS["published"], PROFILES["colab"]
    chosen, config = experiment.setting(profile, name)
    assert chosen.policy.startswith("Qwen/") and len(chosen.revision) == 40
    assert chosen.device == "cuda" and config.generation_batch_size % 8 == 0
    identity = experiment.identity(profile, name)
    assert identity["policy"] == chosen.policy and identity["task"] == chosen.task
    rewards = experiment.arms[name].rewards(chosen, config, None)
    assert [reward.__name__ for reward in rewards] == ["accuracy_reward", "format_reward"]
    with pytest.raises(ValueError, match="wants a GPU: choose --profile colab"):
        experiment.setting(PROFILES["tiny"], name)


def test_accuracy_on_the_test_set_before_and_after(policy, base, task):
    after, before = (measures.on_test_set(trained(one, base, task, 6)) for one in (policy, base))
    strict, lenient = after["test_set/strict"], after["test_set/lenient"]
    assert after["test_set/n"] == 6 and 0 <= strict <= lenient <= 1
    gained = lenient - before["test_set/lenient"]
    assert before["gained/lenient"] == 0 and after["gained/lenient"] == pytest.approx(gained)


def test_the_planner_has_room_for_every_right_plan():
    """A limit that cuts off the plans of one tool would teach that it is never called."""
    profile, config = EXPERIMENTS["flow"].setting(PROFILES["tiny"], "trajectory")
    tokenizer, rng = load_policy(data_dir() / profile.policy).tokenizer, random.Random(0)
    longest = 0
    for _ in range(200):
        question, memory = tool_questions.make_tool_question(rng, "test"), []
        for step in question.plan:
            plan = skills.plan_text(step, f"Careful: {skills.progress_text(question, memory)}")
            longest = max(longest, len(tokenizer(plan)["input_ids"]) + 1)  # and the EOS
            memory.append((*step, question.run(*step)))
    assert longest <= config.max_completion_length
