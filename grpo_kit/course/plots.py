"""Figures of runs, returned for a notebook to show and a script to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, MaxNLocator

HEALTH = ("reward", "eval/pass@1", "entropy", "completions/mean_length", "frac_reward_zero_std",
          "grad_norm")  # fmt: skip
CURVE_LABELS = {
    "reward": ("reward", "mean of a step"),
    "eval/pass@1": ("accuracy", "held-out pass@1"),
    "entropy": ("entropy", "nats a token"),
    "completions/mean_length": ("length", "tokens a completion"),
    "eval/mean_length": ("length", "tokens an answer, held-out"),
    "rewards/accuracy_reward/mean": ("accuracy in training", "mean of a step"),
    "rewards/quality_judge_reward/mean": ("the judge's reward", "mean of a step"),
    "meta/p_yes": ("the evaluator's P(Yes)", "mean of a step"),
    "verdicts/accuracy": ("verification accuracy", "held-out items"),
    "verdicts/yes_rate": ("share of Yes", "held-out items"),
    "eval/pass@8": ("pass@8", "held-out, of eight answers"),
    "eval/turns": ("turns", "an episode, held-out"),
    "eval/tool_errors": ("turns that brought nothing", "share, held-out"),
    "frac_reward_zero_std": ("groups without spread", "share of groups"),
    "grad_norm": ("gradient norm", "before clipping"),
}
VERDICT_LOOKS = {  # colour and marker
    "reproduced": ("#009E73", "o"), "contradicted": ("#D55E00", "X"),
    "no effect": ("#0072B2", "s"), "inconclusive": ("#888888", "|"),
}  # fmt: skip
# Okabe and Ito's colours, grey for what others are compared with
COLOUR_BLIND_SAFE = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
X_LABELS = {"num_generated_tokens": "generated tokens", "seconds": "seconds of training steps"}


def health(runs: Mapping[str, Sequence[dict]]) -> Figure:
    """Is my run healthy? Six panels over the steps, a line a run.

    `runs`: label -> history, the rows that `train` returns; a row may lack a metric.
    """
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axes, metric in zip(figure.subplots(2, 3, sharex=True).flat, HEALTH, strict=True):
        for label, history in runs.items():
            points = [(row["step"], row[metric]) for row in history if metric in row]
            if points:
                marker = "o" if len(points) < 12 else None
                axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
        title, unit = CURVE_LABELS[metric]
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        values = [value for line in axes.lines for value in line.get_ydata() if value > 0]
        if metric == "grad_norm" and values and max(values) > 30 * min(values):
            axes.set_yscale("log")  # a spike would flatten the rest
        if not axes.lines:
            axes.text(0.5, 0.5, "not logged", ha="center", transform=axes.transAxes)
    if len(runs) > 1:
        lines = figure.axes[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=len(runs))
    return figure


def episode_grid(
    lengths: Sequence, rewards: Sequence, advantages: Sequence, marks: Sequence
) -> Figure:
    """One group of episodes: a row an episode, a cell a turn, coloured by the advantage it gets.

    `lengths`: turns of each of the G episodes. A reward of None was not scored. `marks`: a short
    text a turn, e.g. the tool that was called. Raises ValueError for lists of different lengths.
    """
    n, width = len(lengths), max(lengths)
    figure = Figure(figsize=(1.35 * width + 3.2, 0.42 * n + 1.1), layout="constrained")
    axes = figure.subplots()
    largest = max(map(abs, advantages)) or 1.0
    episodes = zip(lengths, rewards, advantages, marks, strict=True)
    for i, (turns, reward, advantage, texts) in enumerate(episodes):
        colour = colormaps["RdYlGn"](0.5 + 0.375 * advantage / largest)
        for t in range(turns):
            axes.add_patch(Rectangle((t + 0.53, i - 0.42), 0.94, 0.84, color=colour))
            axes.text(t + 1, i, texts[t], ha="center", va="center", fontsize=8)
        earned = "not scored" if reward is None else f"r = {reward:g}"
        axes.text(turns + 0.6, i, f"{earned}   A = {advantage:+.2f}", va="center", fontsize=9)
    axes.set(
        xlim=(0.4, width + 2.2), ylim=(n - 0.4, -0.6), xlabel="turn", ylabel="episode",
        xticks=range(1, width + 1), yticks=range(n), yticklabels=range(1, n + 1),
    )  # fmt: skip
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def arm_bands(curves: Mapping[str, Mapping[str, dict]], x: str = "step") -> Figure:
    """Arms of an experiment, a panel a metric: median over seeds, band from lowest to highest.

    `curves`: metric -> arm -> `steps`, which are of `x`, and `values`, one list a seed, as
    `summarise` returns them; an arm may lack a metric.
    """
    fullest = sorted(curves.values(), key=len, reverse=True)  # for the order of the arms
    lines = dict.fromkeys(name for arms in fullest for name in arms)
    figure = Figure(figsize=(3.6 * len(curves), 3.4), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (metric, arms) in zip(panels, curves.items(), strict=True):
        for name, curve in arms.items():
            lines[name] = _band(axes, curve, f"C{[*lines].index(name)}", shade=0.2)
        title, unit = CURVE_LABELS.get(metric, (metric, metric))
        axes.set(title=title, xlabel=X_LABELS.get(x, x), ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 120k
        axes.grid(alpha=0.3)
        axes.margins(x=0.02)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines))
    return figure


def _band(axes, curve: dict, colour: str, shade: float, **style):
    """Draw the median of a curve's seeds, which is returned, and a band around it."""
    values = np.array(curve["values"])
    low, high = values.min(0), values.max(0)
    axes.fill_between(curve["steps"], low, high, color=colour, alpha=shade, linewidth=0)
    return axes.plot(curve["steps"], np.median(values, 0), color=colour, **style)[0]


def labelled_curves(curves: Mapping[str, dict], xlabel: str, ylabel: str) -> Figure:
    """One panel, each curve named at its end: median over seeds, band from lowest to highest.

    curves: name -> `steps` and `values`, one list a seed, as `arm_bands` takes them.
    """
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    ends = []
    for (name, curve), colour in zip(curves.items(), COLOUR_BLIND_SAFE, strict=False):
        line = _band(axes, curve, colour, shade=0.12, linewidth=2)
        ends.append((line.get_ydata()[-1], curve["steps"][-1], name, colour))
    placed: list[tuple[float, float]] = []
    near = max(step for _, step, *_ in ends) / 4
    for value, step, name, colour in sorted(ends):
        height = value + 0.05  # a label stands above its line and those of its neighbours
        while any(abs(step - x) < near and abs(height - y) < 0.06 for x, y in placed):
            height += 0.01
        placed.append((step, height))
        at = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (step, height), color=colour, fontsize=11, annotation_clip=False, **at)
    axes.margins(x=0.02)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 1.2))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return figure


def forest(rows: Sequence[tuple[str, str, str, Mapping[str, float], float]]) -> Figure:
    """Claims as points with intervals, in units of the smallest difference that matters.

    `rows`: label, direction, verdict, the judgement's `mean`, `low` and `high`, and that unit.
    Within the grey band, from -1 to 1, nothing matters; the axis is logarithmic outside of it.
    """
    figure = Figure(figsize=(9, 0.3 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-1, 1, color="#888888", alpha=0.18, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (_, direction, verdict, found, delta) in enumerate(reversed(rows)):
        colour, marker = VERDICT_LOOKS[verdict]
        mean, low, high = (found[name] / delta for name in ("mean", "low", "high"))
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(mean, place, marker, color=colour, markersize=7, markeredgewidth=2)
        axes.annotate(
            direction, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
    for verdict, (colour, marker) in VERDICT_LOOKS.items():
        axes.plot([], [], marker, color=colour, label=verdict)
    axes.set_xscale("symlog", linthresh=1, linscale=0.7)
    farthest = max([10.0, *(abs(x) for line in axes.lines for x in line.get_xdata())])
    ticks = [tick for tick in (1, 3, 10, 30, 100) if tick <= farthest]
    axes.set_xticks([*(-tick for tick in reversed(ticks)), 0, *ticks])
    axes.xaxis.set_major_formatter("{x:+g}")
    axes.minorticks_off()
    axes.set(
        xlabel="mean difference, in units of the smallest that matters",
        ylim=(-0.7, len(rows) - 0.3), yticks=range(len(rows)),
        yticklabels=[label for label, *_ in reversed(rows)],
    )  # fmt: skip
    axes.annotate("claimed:", (1.01, 1.0), xycoords="axes fraction", va="bottom", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
