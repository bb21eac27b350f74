"""What a reader sees: lines where there are values, and a policy's text never as markup."""

import pytest

from grpo_kit.course.plots import health
from grpo_kit.course.viewer import group_html


def test_a_metric_that_was_not_logged_is_said_to_be_missing():
    figure = health({"run": [{"step": 1, "reward": 1.0}]})
    assert not figure.axes[0].texts
    assert figure.axes[0].lines[0].get_ydata() == [1.0]
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
