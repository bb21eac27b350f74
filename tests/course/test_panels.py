"""Moving a slider draws a panel's figure anew."""

from grpo_kit.course import panels


def test_a_slider_draws_anew_and_without_a_reader_there_is_the_figure_alone(monkeypatch):
    shown, drawn = [], []
    monkeypatch.setattr(panels, "display", shown.append)
    monkeypatch.delenv("GRPO_KIT_STATIC", raising=False)

    def draw(weight=0.5, std=True):
        drawn.append((weight, std))

    panels.panel(draw, weight=(0.0, 2.0, 0.1))
    weight, std, _ = shown[0].children
    assert (weight.value, weight.max, std.value) == (0.5, 2.0, True)
    assert shown[0].auto_display  # what `draw` returns
    weight.value = 1.5
    assert drawn[-1] == (1.5, True)

    monkeypatch.setenv("GRPO_KIT_STATIC", "1")
    panels.panel(lambda weight=0.5: f"figure of {weight}", weight=(0.0, 2.0, 0.1))
    assert shown[1:] == ["figure of 0.5"]
