"""Panels to move: sliders above a figure that the kit's own functions draw anew each time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from IPython.display import display
from matplotlib.figure import Figure

from grpo_kit import objective
from grpo_kit.course.plots import DOWN, UP

NOTHING = "#555555"
RATIOS = torch.linspace(0.5, 1.6, 111)


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
        axes.annotate(f"{value:+.2f}", (max(value, 0), place), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    axes.margins(x=0.18)


def pushes(
    rewards: torch.Tensor, *, scale_rewards: str = "group", epsilon: float = 0.2,
    beta: float = 0.0, ratio: float = 1.0,
) -> Figure:  # fmt: skip
    """From the rewards of one group, (G,), to the push on a token of each answer.

    The push is minus the gradient of what the token adds to the loss by the token's
    log-probability. `ratio` is that of now to then; the reference, for `beta`, is the policy then.
    """
    A = objective.group_advantages(rewards, len(rewards), scale_rewards)
    options = {"epsilon": epsilon, "beta": beta, "use_bias_correction_kl": False}
    figure = Figure(figsize=(10, 0.3 * len(rewards) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _advantages(left, A)
    now = _push(A, torch.tensor([ratio]), **options)[:, 0]
    names = [f"R = {reward:g}" for reward in rewards.tolist()]
    left.set(xlabel="advantage of the answer", yticks=range(len(names)), yticklabels=names)
    left.invert_yaxis()

    different = A.unique()
    for advantage, curve in zip(different, _push(different, RATIOS, **options), strict=True):
        colour = NOTHING if advantage == 0 else UP if advantage > 0 else DOWN
        right.plot(RATIOS, curve, color=colour, linewidth=2)
        at = now[(A == advantage).nonzero()[0, 0]]
        right.plot(ratio, at, "o", color=colour, markersize=8)
        away = -14 if advantage < 0 else 6  # from the curve, which goes on to the right
        right.annotate(f"{at:+.2f}", (ratio, at), xytext=(-8, away), textcoords="offset points",
                       color=colour, fontsize=10, ha="right")  # fmt: skip
    right.axvspan(1 - epsilon, 1 + epsilon, color="#888888", alpha=0.15, linewidth=0)
    right.axvline(ratio, color="black", linewidth=0.8, linestyle=":")
    right.axhline(0, color="black", linewidth=0.8)
    right.set(xlabel="ratio of a token: probability now / then", ylabel="push on the token")
    return figure


def _push(advantages: torch.Tensor, ratios: torch.Tensor, **options: Any) -> torch.Tensor:
    """(A, R): of tokens with these advantages, (A,), at these ratios, (R,)."""
    logps = ratios.log().expand(len(advantages), -1).clone().requires_grad_()
    then = torch.zeros_like(logps)
    mask = torch.ones_like(logps, dtype=torch.bool)
    # the mean over all tokens, so that its gradient times their number is that of each token
    objective.policy_loss(logps, then, advantages, mask, ref_logps=then, **options).backward()
    return -logps.grad * logps.numel()
