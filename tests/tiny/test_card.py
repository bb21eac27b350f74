"""The card's scores on texts whose scores are known, and the whole table on an untrained policy."""

import json
import math
import random

import pytest
import torch

from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir
from grpo_kit.tasks.tool_questions import make_tool_question
from grpo_kit.tasks.word_problems import make_problem
from grpo_kit.tiny import card, problems, skills


def test_shares_and_accuracies_by_style_are_those_of_the_texts():
    table = card.by_style(["b", "a", "a", "a"], [True, True, False, False])
    assert list(table) == ["a", "b"], "the most frequent style stands first"
    assert table["a"] == {"share": 0.75, "accuracy": pytest.approx(1 / 3)}
    assert table["b"] == {"share": 0.25, "accuracy": 1.0}


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.1, 0.2, 0.8, 0.9], [False, False, True, True], 1.0),
        ([0.9, 0.1], [False, True], 0.0),
        ([0.5, 0.5, 0.5], [True, False, False], 0.5),
        ([0.1, 0.3, 0.2, 0.4], [True, True, False, False], 0.25),
        ([0.1, 0.2], [True, True], math.nan),
    ],
)
def test_auc_is_the_share_of_pairs_in_order_and_needs_both_labels(scores, labels, expected):
    assert card.auc(scores, labels) == pytest.approx(expected, nan_ok=True)


def test_a_judge_that_follows_the_rubric_correlates_fully_and_a_constant_one_not_at_all():
    rng, styles = random.Random(0), list(problems.STYLE_SHARES)
    subjects = [make_problem(rng, 2) for _ in range(60)]
    responses = [problems.solve(problem, rng.choice(styles), rng) for problem in subjects]
    rubrics = [skills.rubric(p.answer, r) for p, r in zip(subjects, responses, strict=True)]
    table = card.judge_table(subjects, responses, list(map(json.dumps, rubrics)))
    assert table == {"parsed": 1.0, "spearman": pytest.approx(1.0)}
    constant = [json.dumps(dict.fromkeys(skills.CRITERIA, 3))] * 59 + ["no JSON"]
    table = card.judge_table(subjects, responses, constant)
    assert table == {"parsed": pytest.approx(59 / 60), "spearman": 0.0}


def test_episodes_fail_without_a_plan_and_the_shipped_base_succeeds_now_and_then(policy):
    rng = random.Random(0)
    questions = [make_tool_question(rng, "test", kind) for kind in ("price", "several_discount")]
    assert card.succeed(policy, questions, torch.Generator().manual_seed(0)) == [False, False]
    base = load_policy(data_dir() / "tiny-base")
    questions = [make_tool_question(rng, "test", "price") for _ in range(12)]
    assert 3 < sum(card.succeed(base, questions, torch.Generator().manual_seed(0))) <= 12


def test_the_table_is_whole_for_any_policy_and_the_card_tells_what_is_missed(policy):
    table = card.measure(policy, n=4)
    warm_up = dict(seed=0, steps=1, processes=1, seconds=60.0, loss=5.0, parameters=1000)
    assert "| solve | pass@8 | 0.000 | 0.95–1.00 | **no** |" in card.card_text(table, warm_up)
