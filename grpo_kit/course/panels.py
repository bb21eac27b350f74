"""Panels to move: sliders above a figure that the kit's own functions draw anew each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from IPython.display import display
from matplotlib.figure import Figure

from grpo_kit.course.plots import DOWN, UP


def panel(draw: Callable[..., Figure], **ranges: Any) -> None:
    """Show `draw()` with a slider an argument, moved from its default within `ranges`.

    A range is (low, high, step), a list of choices, or a bool, as `ipywidgets.interactive` takes
    them. Where nobody can move anything (a notebook executed by papermill) the figure alone.
    """
    if os.environ.get("GRPO_KIT_STATIC") or find_spec("ipywidgets") is None:
        display(draw())
        return
    from ipywidgets import Layout, interactive

    box = interactive(draw, {"auto_display": True}, **ranges)
    box.layout = Layout(flex_flow="row wrap")
    display(box)


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
