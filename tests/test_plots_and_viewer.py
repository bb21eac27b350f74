"""What a reader sees: lines where there are values, and a policy's text never as markup."""

import io

import pytest

from grpo_kit.plots import HEALTH, health
from grpo_kit.viewer import group_html


def test_every_logged_metric_is_drawn_for_every_run():
    history = [
        {"step": 0, "eval/pass@1": 0.4},
        *({"step": i, **{metric: 0.1 * i for metric, _, _ in HEALTH}} for i in (1, 2, 3)),
    ]
    figure = health({"one": history, "two": history[:2]})
    for axes, (metric, title, unit) in zip(figure.axes, HEALTH, strict=True):
        assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (title, "step", unit)
        one, two = axes.lines
        expected = [(row["step"], row[metric]) for row in history if metric in row]
        steps, values = zip(*expected, strict=True)
        assert tuple(one.get_xdata()) == steps
        assert list(one.get_ydata()) == pytest.approx(values)
        assert len(two.get_xdata()) == len(expected) - 2
    figure.savefig(io.BytesIO(), format="png")


def test_a_metric_that_was_not_logged_is_said_to_be_missing():
    figure = health({"run": [{"step": 1, "reward": 1.0}]})
    assert not figure.axes[0].texts
    assert [axes.texts[0].get_text() for axes in figure.axes[1:]] == ["not logged"] * 5
    with pytest.raises(ValueError, match="no run to draw"):
        health({})


def test_completions_stand_best_first_with_reward_and_advantage():
    page = group_html("q", [["bad"], ["good"], ["odd"]], [0.0, 1.0, None], [-1.0, 1.0, 0.0])
    assert page.index("good") < page.index("odd") < page.index("bad")
    assert "not scored" in page and "+1.00" in page and "-1.00" in page


def test_a_policys_text_is_never_markup():
    page = group_html("<b>q</b>", [["<script>", "</td>\n"]], [1.0], [0.0])
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;/td&gt;⏎<br>" in page
    assert "<b>q" not in page and "&lt;b&gt;q" in page


def test_deeper_colour_means_a_larger_advantage_and_weights_fade_it():
    page = group_html("q", [["a", "b"], ["c", "d"]], [1, 0], [2.0, -1.0], [[1, 0], [1, 1]])
    assert page.count("rgba(46,160,67,0.60)") == 1  # a
    assert page.count(",0.00)") == 1  # b, faded out
    assert page.count("rgba(218,54,51,0.30)") == 2  # c and d


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="1 completions, 2 rewards"):
        group_html("q", [["a"]], [1, 2], [0.0])
    with pytest.raises(ValueError, match="one weight a token"):
        group_html("q", [["a"]], [1], [0.0], [[1.0, 1.0]])
