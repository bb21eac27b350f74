"""The format reward: the one shape that is paid, and near misses that are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.rewards import format_reward

GOOD = [
    "<think>a</think><answer>15</answer>",
    "<think>a</think> \n <answer>15</answer>",
    "\n <think>\na\nb\n</think>\n<answer>\n15\n</answer>\n",
    "<think>1 < 2 > 0 <b>x</b></think><answer>Yes</answer>",
]
BAD = [
    "",
    "15",
    "<answer>15</answer>",
    "<think>a</think>",
    "<think>a</think><answer>15",
    "<think>a<answer>15</answer>",
    "a</think><answer>15</answer>",
    "<think></think><answer>15</answer>",
    "<think>a</think><answer> \n </answer>",
    "<answer>15</answer><think>a</think>",
    "<think>a<answer>15</answer></think>",
    "<answer><think>a</think>15</answer>",
    "x<think>a</think><answer>15</answer>",
    "<think>a</think>x<answer>15</answer>",
    "<think>a</think><answer>15</answer>x",
    "<think>a</think><think>b</think><answer>15</answer>",
    "<think><think>a</think><answer>15</answer>",
    "<think>a</think><answer>15</answer><answer>16</answer>",
    "<think>a</think></think><answer>15</answer>",
    "<Think>a</Think><answer>15</answer>",
    "<think>" * 50_000,
    "<think>a</think>" + " " * 100_000 + "<answer>15",
]


def score(completions):
    return format_reward(
        prompts=["?"] * len(completions), completions=completions, completion_ids=[[]], answer=["1"]
    )


@pytest.mark.parametrize("text", GOOD)
def test_whole_completion_in_the_format_is_paid(text):
    assert score([text]) == [0.1]


@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:50]))
def test_anything_else_is_charged(text):
    assert score([text]) == [-0.1]


filled = st.text(alphabet="a1.>/ \n½五", min_size=1).filter(str.strip)
blank = st.text(alphabet=" \t\n", max_size=4)


@given(blank, filled, blank, filled, blank)
def test_any_filled_parts_are_paid_and_any_lost_tag_is_charged(before, a, between, b, after):
    text = f"{before}<think>{a}</think>{between}<answer>{b}</answer>{after}"
    assert score([text]) == [0.1]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert score([text.replace(tag, ""), text + tag]) == [-0.1, -0.1]


def test_message_lists_score_like_strings():
    texts = GOOD + BAD[:10]
    assert score([[{"role": "assistant", "content": text}] for text in texts]) == score(texts)
