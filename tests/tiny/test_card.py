"""The card's scores on texts whose scores are known, and the whole table on an untrained policy."""

import math

import pytest

from grpo_kit.tiny import card


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


def test_the_table_and_the_card_are_whole_for_any_policy(policy):
    table = card.measure(policy, n=4)
    warm_up = dict(seed=0, steps=1, seconds=60.0, loss=5.0, parameters=1000)
    text = card.card_text(table, warm_up)
    assert "| solve | pass@8 | 0.000 |" in text
    assert all(f"| {skill}: style | share |" in text for skill in ("solve", "verify", "plan"))
