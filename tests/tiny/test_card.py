"""AUC on scores whose order is known."""

import math

import pytest

from grpo_kit.tiny import card


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
