"""What a panel shows is the objective's own gradient, and moving a slider draws it anew."""

import pytest
import torch

from grpo_kit.course import panels

GROUP = torch.tensor([1.0, 1.0, 0.0, 0.0])


def dots(figure) -> list[tuple[float, float]]:
    """Ratio and push of the marked points, the lowest advantage first."""
    lines = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    return [(line.get_xdata()[0], float(line.get_ydata()[0])) for line in lines]


@pytest.mark.parametrize(
    ("ratio", "beta", "worse", "better"),
    [
        (1.0, 0.0, -0.5, 0.5),
        (1.1, 0.0, -0.55, 0.55),  # rho * A
        (1.3, 0.0, -0.65, 0.0),  # above the clip nothing more is gained
        (0.7, 0.0, 0.0, 0.35),
        (1.25, 0.5, -0.625 - 0.1, -0.1),  # the KL pushes back by beta * (1 - 1 / rho)
    ],
)
def test_the_push_is_the_gradient_with_its_clip_and_its_kl(ratio, beta, worse, better):
    figure = panels.pushes(GROUP, scale_rewards="none", beta=beta, ratio=ratio)
    expected = [(ratio, pytest.approx(worse)), (ratio, pytest.approx(better))]
    assert dots(figure) == expected
    for line, (_, value) in zip(figure.axes[1].lines[::2], expected, strict=False):
        nearest = (panels.RATIOS - ratio).abs().argmin()  # the curve passes through its dot
        assert float(line.get_ydata()[nearest]) == pytest.approx(value.expected, abs=0.02)


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
