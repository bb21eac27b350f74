"""Moving a slider draws a panel's figure anew."""

import pytest
from matplotlib.figure import Figure

from grpo_kit.course import panels

widgets = pytest.importorskip("ipywidgets")


def test_a_slider_draws_anew_and_without_a_reader_there_is_the_figure_alone(monkeypatch):
    shown, drawn = [], []
    monkeypatch.setattr(panels, "display", shown.append)
    monkeypatch.delenv("GRPO_KIT_STATIC", raising=False)

    def draw(weight=0.5, std=True):
        drawn.append((weight, std))
        figure = Figure(figsize=(2, 1))
        figure.subplots().bar([0], [weight])
        return figure

    panels.panel(draw, weight=(0.0, 2.0, 0.1))
    (weight, std), image = shown[0].children[0].children, shown[0].children[1]
    assert (weight.value, weight.max, std.value, std.description) == (0.5, 2.0, True, "std")
    before = image.value
    weight.value = 1.5
    assert drawn == [(0.5, True), (1.5, True)]
    assert bytes(before).startswith(b"\x89PNG") and image.value != before
    # an output widget sends messages while its cell runs: papermill has waited for ever then
    assert not any(isinstance(child, widgets.Output) for child in shown[0].children)

    monkeypatch.setenv("GRPO_KIT_STATIC", "1")
    panels.panel(lambda weight=0.5: f"figure of {weight}", weight=(0.0, 2.0, 0.1))
    assert shown[1:] == ["figure of 0.5"]
