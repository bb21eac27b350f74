"""Rewards by rule: LaTeX and what is around it, the format, overlong completions, verdicts."""

import pytest

from grpo_kit.rewards import VerificationReward, accuracy_reward, format_reward
from grpo_kit.rewards.rules import parse_verdict, verdict_stats

# Of every form that MATH has; then what models write around an answer.
GOLDS = [
    "42", "-3", "5.", "E", "p - q", "3R^2", "6 - 5i", "2,4", "1,-2", "52_8", "[0,1)", "y = 2x+3",
    r"\frac{1}{2}", r"\frac12", r"137 \frac{1}{2}", r"2\sqrt{5}", r"11\sqrt2", r"\sqrt{x}+1",
    r"\left( 3, \frac{\pi}{2} \right)", r"(-\infty, 2)\cup(3,4]", r"x \in [-2,7]", r"90^\circ",
    r"\$16386.17", r"10\%", r"1{,}080", r"\text{Evelyn}", r"\text{(B)}", r"\text{6 inches}",
    r"\mathbf{v}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\begin{pmatrix}1\\[2pt]2\end{pmatrix}",
    r"f(x)=\left\{\begin{array}{l}1\\2\end{array}\right.",
]  # fmt: skip
WRAPPINGS = [
    "{}", "\n{} \n", "{}.", "**{}**", "**{}**.", "**{}.**", "*{}*", "__{}__", "`{}`",
    "```\n{}\n```",
    "${}$", "${}$.", "${}.$", "$${}$$", r"\({}\)", r"\({}\).", r"\[{}\]", r"\[ {} \].",
    r"\boxed{{{}}}", r"\[ \boxed{{{}}} \]", r"$\boxed{{{}}}$.", r"**\({}\)**",
    r"**$\boxed{{{}}}$**",
    r"\text{{{}}}", r"\textbf{{{}}}", r"\mathbf{{{}}}", r"\mathrm{{{}}}", r"\fbox{{{}}}",
    r"\displaystyle {}", r"$\displaystyle {}$",
]  # fmt: skip


@pytest.mark.parametrize("gold", GOLDS)
def test_what_models_write_around_a_right_answer_costs_nothing(gold):
    texts = [f"<answer>{wrapping.format(gold)}</answer>" for wrapping in WRAPPINGS]
    rewards = accuracy_reward([], texts, [], answer=[gold] * len(texts))
    assert dict(zip(texts, rewards, strict=True)) == dict.fromkeys(texts, 1.0)
    golds = [wrapping.format(gold) for wrapping in WRAPPINGS]
    chat = [{"role": "assistant", "content": texts[0]}]
    assert set(accuracy_reward([], [chat] * len(texts), [], answer=golds)) == {1.0}


def test_a_wrong_answer_stays_wrong_in_every_wrapping():
    either = ("$42$ or $43$", r"\text{42} or \text{43}", "42, 43")
    for wrong in ("43", r"\frac{1}{3}", r"\text{Anna}", *either, "", "9" * 20_000):
        texts = [f"<answer>{wrapping.format(wrong)}</answer>" for wrapping in WRAPPINGS]
        assert set(accuracy_reward([], texts, [], answer=["42"] * len(texts))) == {0.0}, wrong


GOOD = [
    "<think>a</think><answer>15</answer>",
    "<think>a</think> \n <answer>15</answer>",
    "\n <think>\na\nb\n</think>\n<answer>\n15\n</answer>\n",
    "<think>1 < 2 > 0 <b>x</b></think><answer>Yes</answer>",
]
BAD = [
    "", "15", "<answer>15</answer>", "<think>a</think>", "<think>a</think><answer>15",
    "<think>a<answer>15</answer>", "a</think><answer>15</answer>",
    "<think></think><answer>15</answer>", "<think>a</think><answer> \n </answer>",
    "<answer>15</answer><think>a</think>", "<think>a<answer>15</answer></think>",
    "<answer><think>a</think>15</answer>", "x<think>a</think><answer>15</answer>",
    "<think>a</think>x<answer>15</answer>", "<think>a</think><answer>15</answer>x",
    "<think>a</think><think>b</think><answer>15</answer>",
    "<think><think>a</think><answer>15</answer>",
    "<think>a</think><answer>15</answer><answer>16</answer>",
    "<think>a</think></think><answer>15</answer>", "<Think>a</Think><answer>15</answer>",
    "<think>" * 50_000, "<think>a</think>" + " " * 100_000 + "<answer>15",
]  # fmt: skip


def formats(completions):
    return format_reward(prompts=[], completions=completions, completion_ids=[], answer=["1"])


def test_a_whole_completion_in_the_format_is_paid_and_anything_else_is_charged():
    texts = [*BAD, *GOOD, *BAD]
    expected = [-0.1] * len(BAD) + [0.1] * len(GOOD) + [-0.1] * len(BAD)
    assert formats(texts) == expected
    assert formats([[{"role": "assistant", "content": text}] for text in texts]) == expected
    assert formats([]) == accuracy_reward([], [], [], answer=[]) == []


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
    shares = {"accuracy": 3 / 6, "yes_rate": 3 / 6, "unparsed": 1 / 6}
    errors = {"false_yes": 1 / 3, "false_no": 1 / 3}  # of three wrong and three right answers
    assert verdict_stats(verdicts, labels) == pytest.approx(shares | errors)
    assert "false_yes" not in verdict_stats([True], [True])


def verdict_rewards(texts, correct, **columns):
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    given = [None] * len(texts), completions, [[]] * len(texts)
    return VerificationReward()(*given, correct=correct, **columns)


def test_a_verdict_is_compared_with_the_label_not_with_the_answer():
    """The column `answer` is there, says Yes, and is not looked at."""
    logged, labels = {}, [True, True, False, False, True]
    texts = ["Yes", "No", "Yes", "No", "hm"]
    rewards = verdict_rewards(texts, labels, answer=["Yes"] * 5, log_metric=logged.__setitem__)
    assert rewards == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert logged["false_yes"] == 0.5 and logged["unparsed"] == 0.2 and "accuracy" not in logged


def test_rows_that_are_no_items_are_not_scored():
    logged = {}
    rewards = verdict_rewards(["Yes", "No"], [True, None], log_metric=logged.__setitem__)
    assert rewards == [1.0, None] and logged["yes_rate"] == 1.0
