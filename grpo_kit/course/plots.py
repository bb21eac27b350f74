"""Figures of runs, returned for a notebook to show and a script to save, in the course's style,
which importing this module sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib import style
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator
from scipy.ndimage import uniform_filter1d

style.use("grpo_kit.course.figures")

HEALTH = ("reward", "eval/pass@1", "entropy", "completions/mean_length", "frac_reward_zero_std",
          "grad_norm")  # fmt: skip
CURVE_LABELS = {
    "reward": ("reward", "mean of a step"),
    "eval/pass@1": ("accuracy", "held-out pass@1"),
    "eval/lenient/pass@1": ("accuracy, lenient", "held-out pass@1"),
    "entropy": ("entropy", "nats per token"),
    "completions/mean_length": ("length", "tokens per completion"),
    "eval/mean_length": ("length", "tokens per answer, held-out"),
    "rewards/accuracy_reward/mean": ("accuracy in training", "mean of a step"),
    "rewards/quality_judge_reward/mean": ("the judge's reward", "mean of a step"),
    "meta/p_yes": ("the evaluator's P(Yes)", "mean of a step"),
    "verdicts/accuracy": ("verification accuracy", "held-out items"),
    "verdicts/yes_rate": ("share of Yes", "held-out items"),
    "eval/pass@8": ("pass@8", "held-out, of eight answers"),
    "eval/turns": ("turns", "per episode, held-out"),
    "eval/tool_errors": ("turns that brought nothing", "share, held-out"),
    "frac_reward_zero_std": ("groups without spread", "share of groups"),
    "grad_norm": ("gradient norm", "before clipping"),
}
VERDICT_LOOKS = {  # colour and marker
    "reproduced": ("#009E73", "o"), "contradicted": ("#D55E00", "X"),
    "no effect": ("#0072B2", "s"), "inconclusive": ("#666666", "$?$"),
    "not tested": ("#BBBBBB", "D"),
}  # fmt: skip
# Okabe and Ito's colours
COLOUR_BLIND_SAFE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C510A")
# What is pushed up is blue in every figure, what is pushed down orange.
UP, DOWN = COLOUR_BLIND_SAFE[:2]
SIGNS = LinearSegmentedColormap.from_list("signs", [DOWN, "white", UP])
BASELINES = ("plain", "plain GRPO", "labels", "generate", "kit", "clip", "your loop")  # grey
METHOD_COLOURS = {  # as in the pictures of their loops
    "diversity": "#E69F00", "judge": "#CC79A7", "verification": "#009E73", "meta": "#D55E00",
    "flow": "#56B4E9",
}  # fmt: skip
ARMS = {  # the arms that stand for a method
    "diversity": ("diversity", "diversity reward"),
    "judge": ("judge", "judge added", "LLM judge"),
    "verification": ("self-verify", "self-verification"),
    "meta": ("P(Yes) alone", "P(Yes), no labels", 'P("Yes") and format'),
    "flow": ("trajectory", "Flow-GRPO (tool questions)"),
}
ARM_COLOURS = dict.fromkeys(BASELINES, "#555555")
ARM_COLOURS |= {arm: METHOD_COLOURS[method] for method, arms in ARMS.items() for arm in arms}
ARM_COLOURS |= {"mixed": "#0072B2", "verify-init": "#CC79A7", "verify-alter": "#E69F00"}
ARM_COLOURS |= dict.fromkeys(("only correct", "gated"), "#009E73")
ARM_COLOURS |= {"judge only": "#D55E00", "offline traces": "#E69F00"}
ARM_COLOURS |= dict.fromkeys(("random", "as they come"), "#999999")
ARM_COLOURS |= {"per turn": "#009E73", "final turn only": "#CC79A7"}
ARM_COLOURS |= dict.fromkeys(("no clip", "neighbour"), "#CC79A7")
ARM_COLOURS |= {"SAPO": "#009E73", "unbalanced": "#E69F00"}
LINES = ("-", "--", ":")
MOST_BANDS = 8
X_LABELS = {"num_generated_tokens": "generated tokens", "seconds": "seconds of training steps"}


def health(runs: Mapping[str, Sequence[dict]]) -> Figure:
    """Is my run healthy? Six panels over the steps, a line a run.

    `runs`: label -> history, the rows that `train` returns; a row may lack a metric.
    """
    figure = Figure(figsize=(11, 6), layout="constrained")
    colours = arm_colours(runs)
    last = max((row["step"] for history in runs.values() for row in history), default=1)
    for axes, metric in zip(figure.subplots(2, 3, sharex=True).flat, HEALTH, strict=True):
        for i, (label, history) in enumerate(runs.items()):
            points = [(row["step"], row[metric]) for row in history if metric in row]
            if points:  # the first of several lies below the others, and shows beside them
                look = {"linewidth": 4, "alpha": 0.4} if i == 0 and len(runs) > 1 else {}
                look |= {"color": colours[label], "marker": "o" if len(points) < 12 else None}
                axes.plot(*zip(*points, strict=True), label=label, markersize=4, **look)
        title, unit = CURVE_LABELS[metric]
        axes.set(title=title, xlabel="step", ylabel=unit, xlim=(0, last + 0.5))
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


def arm_bands(curves: Mapping[str, Mapping[str, dict]], x: str = "step") -> Figure:
    """Arms of an experiment, a panel a metric: median over seeds, band from lowest to highest.

    Of more than `MOST_BANDS` arms the medians alone: bands would hide each other.

    `curves`: metric -> arm -> `steps`, which are of `x`, and `values`, one list a seed, as
    `summarise` returns them; an arm may lack a metric.
    """
    fullest = sorted(curves.values(), key=len, reverse=True)  # for the order of the arms
    colours = arm_colours(dict.fromkeys(name for arms in fullest for name in arms))
    before, styles = Counter(), {}  # of many arms some share a colour
    for name, colour in colours.items():
        styles[name] = LINES[min(before[colour], len(LINES) - 1)]
        before[colour] += 1
    columns = min(2, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.1 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for (metric, arms), axes in zip(curves.items(), panels, strict=False):  # drops no panel
        for name, curve in arms.items():
            look = {"color": colours[name], "linestyle": styles[name]}
            _band(axes, curve, look, 0.15 if len(colours) <= MOST_BANDS else 0)
        title, unit = CURVE_LABELS.get(metric, (metric, metric))
        axes.set(title=title, xlabel=X_LABELS.get(x, x), ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=x == "step"))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 120k
        measured = sorted({step for curve in arms.values() for step in curve["steps"]})
        if x == "step" and len(measured) < 6:
            axes.set_xticks(measured)
        axes.grid(alpha=0.3)
        axes.margins(x=0.02)
    for axes in list(panels):
        axes.remove()
    handles = [
        Line2D([], [], color=colour, linestyle=styles[name], label=shown(name))
        for name, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * columns)
    return figure


SHOWN = {  # parts of arms' names, as stored and as figures say them
    "random": "coin", " and format, our defaults": ", std + format", ", our defaults": ", std",
    "our defaults": "std + format", " and format": " + format", "self-verification": "mixed",
}  # fmt: skip


def shown(arm: str) -> str:
    """What figures and notebooks call an arm."""
    for stored, said in SHOWN.items():
        arm = arm.replace(stored, said)
    return arm


def arm_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour an arm: grey for what the others are compared with, a method's own everywhere."""
    names = list(names)
    own = {name: colour for name, colour in ARM_COLOURS.items() if name in names}
    others = [c for c in COLOUR_BLIND_SAFE if c not in own.values()]
    rest = cycle(others or COLOUR_BLIND_SAFE)
    return {name: own.get(name) or next(rest) for name in names}


def arm_points(final: Mapping[str, Mapping], metrics: Mapping[str, str]) -> Figure:
    """Arms of an experiment at their end, a panel a metric: mean over seeds, and its interval.

    `final`: arm -> metric -> `mean`, `low`, `high`, as `summarise` returns it; an arm may lack a
    metric. `metrics`: metric -> title of its panel.
    """
    colours = arm_colours(final)
    figure = Figure(
        figsize=(3.3 * len(metrics) + 1.2, 0.36 * len(final) + 1.1), layout="constrained"
    )
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axes, (metric, title) in zip(panels, metrics.items(), strict=True):
        for place, (name, table) in enumerate(final.items()):
            if metric in table:
                low, mean, high = (table[metric][key] for key in ("low", "mean", "high"))
                axes.plot([low, high], [place, place], color=colours[name], linewidth=2.5)
                axes.plot(mean, place, "o", color=colours[name], markersize=7)
        axes.set(title=title, yticks=range(len(final)), yticklabels=[*map(shown, final)])
        axes.set_ylim(len(final) - 0.5, -0.5)
        left, right = axes.get_xlim()
        least = 0.05 * max(abs(left), abs(right))  # no magnifying of what hardly differs
        if right - left < least:
            axes.set_xlim((left + right - least) / 2, (left + right + least) / 2)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.grid(alpha=0.3)
    return figure


def _band(axes, curve: dict, look: dict, alpha: float) -> None:
    """Draw the median of a curve's seeds and a band around it, as opaque as `alpha`.

    Of a curve of more than 30 points each is a mean over five: single steps are noise.
    """
    values = np.array(curve["values"], dtype=float)
    if values.shape[1] > 30:
        values = uniform_filter1d(values, 5, axis=1, mode="nearest")
    low, high = values.min(0), values.max(0)
    axes.fill_between(curve["steps"], low, high, color=look["color"], alpha=alpha, linewidth=0)
    marker = "o" if values.shape[1] < 12 else None  # few points: show which were measured
    axes.plot(curve["steps"], np.median(values, 0), linewidth=2, marker=marker, ms=4, **look)


def forest(rows: Sequence[tuple[str, str, str, Mapping[str, float], float]]) -> Figure:
    """Claims as points with intervals, in units of the smallest difference that matters.

    `rows`: label, direction, verdict, the judgement's `mean`, `low` and `high`, and that unit.
    Within the grey band, from -1 to 1, nothing matters; the axis is logarithmic outside of it.
    """
    height = sum(0.12 + 0.18 * (1 + label.count("\n")) for label, *_ in rows)
    figure = Figure(figsize=(9, height + 1.4), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(-1, 1, color="#888888", alpha=0.18, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (_, direction, verdict, found, delta) in enumerate(reversed(rows)):
        colour, marker = VERDICT_LOOKS[verdict]
        mean, low, high = (found[name] / delta for name in ("mean", "low", "high"))
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(mean, place, **_mark(marker, colour))
        axes.annotate(
            direction, (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
    for verdict in sorted({row[2] for row in rows}, key=[*VERDICT_LOOKS].index):
        colour, marker = VERDICT_LOOKS[verdict]
        axes.plot([], [], label=verdict, **_mark(marker, colour))
    axes.set_xscale("symlog", linthresh=1, linscale=0.7)
    farthest = max([10.0, *(abs(x) for line in axes.lines for x in line.get_xdata())])
    ticks = [tick for tick in (1, 3, 10, 30, 100) if tick <= farthest]
    axes.set_xticks([*(-tick for tick in reversed(ticks)), 0, *ticks])
    axes.xaxis.set_major_formatter(lambda x, place: f"{x:+g}" if x else "0")
    axes.minorticks_off()
    axes.set(
        xlabel="mean difference ÷ δ, the smallest that matters (grey: too small)",
        ylim=(-0.7, len(rows) - 0.3), yticks=range(len(rows)),
        yticklabels=[label for label, *_ in reversed(rows)],
    )  # fmt: skip
    axes.annotate("claimed:", (1.01, 1.0), xycoords="axes fraction", va="bottom", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def _mark(marker: str, colour: str) -> dict:
    """The look of a point of `forest`: a mark that is a letter is larger, a diamond hollow."""
    size, fill = 14 if marker.startswith("$") else 6, "white" if marker == "D" else colour
    return {"marker": marker, "linestyle": "none", "color": colour, "markersize": size,
            "markeredgewidth": 1.5 if size == 6 else 0.8, "markerfacecolor": fill}  # fmt: skip
