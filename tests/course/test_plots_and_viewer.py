"""What a reader sees: lines where there are values, and a policy's text never as markup."""

import io
import xml.etree.ElementTree as ET

import pytest

from grpo_kit.course.loops import PICTURES, loop
from grpo_kit.course.plots import CURVE_LABELS, HEALTH, health
from grpo_kit.course.viewer import episodes_html, group_html


def test_every_logged_metric_is_drawn_for_every_run():
    steps = [{"step": i, **{metric: 0.1 * i for metric in HEALTH}} for i in (1, 2, 3)]
    history = [{"step": 0, "eval/pass@1": 0.4}, *steps]
    figure = health({"one": history, "two": history[:2]})
    for axes, metric in zip(figure.axes, HEALTH, strict=True):
        assert (axes.get_title(), axes.get_ylabel()) == CURVE_LABELS[metric]
        assert axes.get_xlabel() == "step"
        one, two = axes.lines
        expected = [(row["step"], row[metric]) for row in history if metric in row]
        assert list(zip(one.get_xdata(), one.get_ydata(), strict=True)) == expected
        assert len(two.get_xdata()) == len(expected) - 2
    figure.savefig(io.BytesIO(), format="png")


def test_a_metric_that_was_not_logged_is_said_to_be_missing():
    figure = health({"run": [{"step": 1, "reward": 1.0}]})
    assert not figure.axes[0].texts
    assert [axes.texts[0].get_text() for axes in figure.axes[1:]] == ["not logged"] * 5


def test_completions_stand_best_first_with_reward_and_advantage_and_are_never_markup():
    tokens = [["<b>bad"], ["good", "</td>\n"], ["odd"]]
    page = group_html("<b>q</b>", tokens, [0.0, 1.0, None], [-0.5, 1.0, 0.0])
    assert page.index("good") < page.index("odd") < page.index("bad")
    assert "not scored" in page and "+1.00" in page and "-0.50" in page
    assert "<b>bad" not in page and "&lt;b&gt;bad" in page and "&lt;/td&gt;⏎<br>" in page
    assert "<b>q" not in page and "&lt;b&gt;q" in page
    assert page.count("rgba(0,114,178,0.60)") == 1 and page.count("rgba(213,94,0,0.30)") == 1
    with pytest.raises(ValueError, match="longer"):
        group_html("q", [["a"]], [1, 2], [0.0])


def test_episodes_open_one_by_one():
    turns = [[{"goal": "find <b>", "call": "lookup(a)"}], [{"goal": "x", "call": "y"}] * 2]
    page = episodes_html("<b>q?", turns, ["<script>", "two"], [1.0, None], [-0.7, 0.7])
    assert "&lt;b&gt;q?" in page and "find &lt;b&gt;" in page and "&lt;script&gt;" in page
    assert page.index(">2 turns, two</summary>") < page.index(">1 turn, &lt;script")


@pytest.mark.parametrize("method", sorted(file.stem for file in PICTURES.iterdir()))
def test_the_picture_of_a_loop_is_one_svg_that_marks_what_is_new(method):
    svg = ET.fromstring(loop(method))
    name = "{http://www.w3.org/2000/svg}"
    boxes = [box.get("class") for box in svg.iter(f"{name}rect") if box.get("class")]
    assert len(boxes) >= 4 and "box own" in boxes and svg.find(f"{name}title").text


def test_a_loop_that_nobody_drew_is_named():
    with pytest.raises(ValueError, match="no loop of 'ppo': choose among basic, diversity, flow"):
        loop("ppo")
