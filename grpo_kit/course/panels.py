"""Panels to move: sliders above a figure that the kit's own functions draw anew each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from inspect import signature
from io import BytesIO
from typing import Any

import torch
from IPython.display import display
from matplotlib.figure import Figure

from grpo_kit.course.plots import DOWN, UP


def panel(draw: Callable[..., Figure], **ranges: Any) -> None:
    """Show `draw()` with a slider an argument, moved from its default within `ranges`.

    A range is (low, high, step) or a list of choices, as `ipywidgets.interactive` takes them; an
    argument without one is moved by its default, such as a bool. Where nobody can move anything (a
    notebook executed by the course's runner) the figure alone.

    The figure is an image: under papermill an output widget has waited for ever, one time in three
    on a busy machine.
    """
    if os.environ.get("GRPO_KIT_STATIC") or find_spec("ipywidgets") is None:
        display(draw())
        return
    from ipywidgets import HBox, Image, Layout, VBox, interactive

    controls, image = {}, Image(format="png")
    for name, argument in signature(draw).parameters.items():
        given = ranges.get(name, argument.default)
        controls[name] = interactive.widget_from_abbrev(given, argument.default)
        controls[name].description = name

    def redraw(_: Any = None) -> None:
        picture = BytesIO()
        draw(**{name: control.value for name, control in controls.items()}).savefig(picture)
        image.value = picture.getvalue()

    redraw()
    for control in controls.values():
        control.observe(redraw, "value")
    display(VBox([HBox([*controls.values()], layout=Layout(flex_flow="row wrap")), image]))


def advantage_bars(
    names: Sequence[str], rewards: torch.Tensor, advantages: torch.Tensor, what: str = "reward"
) -> Figure:
    """What each answer of a group is paid, (G,), and what advantage, (G,), that becomes."""
    figure = Figure(figsize=(10, 0.34 * len(names) + 1.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh(range(len(names)), rewards.tolist(), color="#888888")
    left.set(xlabel=what, yticks=range(len(names)), yticklabels=names)
    left.invert_yaxis()
    _advantages(right, advantages)
    right.set(xlabel="advantage")
    return figure


def _advantages(axes, advantages: torch.Tensor) -> None:
    values = advantages.tolist()
    axes.barh(range(len(values)), values, color=[UP if value > 0 else DOWN for value in values])
    axes.axvline(0, color="black", linewidth=0.8)
    for place, value in enumerate(values):
        side, where = (4, "left") if value >= 0 else (-4, "right")
        axes.annotate(f"{value:+.2f}".replace("-", "−"), (value, place), xytext=(side, 0), ha=where,
                      textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    axes.margins(x=0.18)
