"""Verdicts: what counts as one, what it earns, and the error rates."""

import pytest

from grpo_kit.rewards import VerificationReward, parse_verdict, verdict_stats


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("<think>So it agrees.</think><answer>Yes</answer>", True),
        ("<think>It differs.</think><answer>No</answer>", False),
        ("Is 7 right? No, wait. Yes.", True),
        ("Yes, at first sight. But 3 + 4 is 7: NO", False),
        ("The verdict is \\boxed{No}, although many would say yes.", False),
        ("\\boxed{Yes} or rather \\boxed{\\text{no}.}", False),
        ("<think>yes yes yes</think> The answer is **no**.", False),
        ("<think>Yes, surely", None),  # the analysis was cut off
        ("<think>a</think>Yes<think>but then", None),
        ("Yesterday I knew it; nobody does.", None),
        ("<think>Yes</think> I cannot tell.", None),
        ("", None),
    ],
)
def test_the_last_word_after_the_analysis_counts(text, verdict):
    assert parse_verdict(text) is verdict


def test_error_rates_by_hand():
    verdicts = [True, True, False, None, False, True]
    labels = [True, False, False, False, True, True]
    stats = verdict_stats(verdicts, labels)
    assert stats["accuracy"] == pytest.approx(3 / 6)
    assert stats["yes_rate"] == pytest.approx(3 / 6)
    assert stats["unparsed"] == pytest.approx(1 / 6)
    assert stats["false_yes"] == pytest.approx(1 / 3)  # one of three wrong answers
    assert stats["false_no"] == pytest.approx(1 / 3)
    assert "false_yes" not in verdict_stats([True], [True])


def chat(text):
    return [{"role": "assistant", "content": text}]


def test_a_verdict_is_compared_with_the_label_not_with_the_answer():
    """The column `answer` is there, says Yes, and is not looked at."""
    reward = VerificationReward()
    texts = ["Yes", "No", "Yes", "No", "hm"]
    labels = [True, True, False, False, True]
    logged = {}
    earned = reward(
        prompts=[None] * 5, completions=[chat(t) for t in texts], completion_ids=[[]] * 5,
        correct=labels, answer=["Yes"] * 5, log_metric=logged.__setitem__,
    )  # fmt: skip
    assert earned == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert logged["false_yes"] == 0.5 and logged["unparsed"] == 0.2 and "accuracy" not in logged


def test_the_pass_rate_is_a_factor_and_capped():
    reward = VerificationReward(pass_rate_factor=True)
    earned = reward([None] * 4, ["Yes", "Yes", "No", "No"], [[]] * 4,
                    correct=[True, True, True, False], pass_rate=[0.25, 0.9, 0.9, 0.5])  # fmt: skip
    assert earned == [0.25, 0.5, 0.0, 0.5]


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="'pass_rate'"):
        VerificationReward(pass_rate_factor=True)([None], ["Yes"], [[]], correct=[True])
    with pytest.raises(ValueError, match="2 values of the column 'correct' for 1"):
        VerificationReward()([None], ["Yes"], [[]], correct=[True, False])


def test_rows_that_are_no_items_are_not_scored():
    reward, logged = VerificationReward(), {}
    earned = reward([None] * 3, ["Yes", "No", "No"], [[]] * 3, correct=[True, None, True],
                    log_metric=logged.__setitem__)  # fmt: skip
    assert earned == [1.0, None, 0.0] and logged["yes_rate"] == 0.5
