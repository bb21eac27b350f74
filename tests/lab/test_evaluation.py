"""Test sets: how answers are graded, strictly, leniently or by a reward, with which interval."""

import pytest
from scipy.stats import binomtest

from grpo_kit.lab.evaluation import evaluate_test_set, in_words

ROWS = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(7)]


def test_a_test_set_is_counted_and_has_wilsons_interval(policy):
    def small(answer, **columns):
        return [None if gold == "6" else float(int(gold) < 2) for gold in answer]

    accuracy = evaluate_test_set(policy, ROWS, small, max_new_tokens=4, batch_size=2)
    assert accuracy["small"] == pytest.approx(2 / 6) and accuracy["n"] == 6
    interval = binomtest(2, 6).proportion_ci(method="wilson")
    assert (accuracy["small/low"], accuracy["small/high"]) == (interval.low, interval.high)
    assert in_words(accuracy).startswith("small    0.333 [") and "lenient" not in accuracy
    assert 0 < accuracy["mean_length"] <= 4 and 0 <= accuracy["truncated"] <= 1


def test_both_readings_stand_side_by_side_and_a_test_set_without_answers_is_refused(policy):
    accuracy = evaluate_test_set(policy, ROWS, max_new_tokens=4)
    assert {"strict", "lenient", "strict/low", "lenient/high"} < accuracy.keys()
    bare = [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(ValueError, match="needs a column 'answer', which the test set lacks"):
        evaluate_test_set(policy, bare, max_new_tokens=4)
    with pytest.raises(ValueError, match="accuracy_reward scores no row: give rows with"):
        evaluate_test_set(policy, [row | {"answer": None} for row in bare], max_new_tokens=4)
