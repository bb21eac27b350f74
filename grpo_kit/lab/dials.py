"""When does a method matter? A dial turns one number and draws the effect against it.

A dial is an experiment with `settings` (`data/experiments.yaml`): every arm is trained in each of
them, as "ARM, SETTING". Its first arm is the baseline, the last one the method.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from statistics import fmean
from textwrap import fill

from matplotlib.figure import Figure

from grpo_kit.course.plots import CURVE_LABELS, arm_colours, shown
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import Experiment, command_of
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import interval, within
from grpo_kit.lab.summary import cell, circumstances, markdown_table

PREFIX = "dial-"


def arms_of(experiment: Experiment) -> list[str]:
    """The arms of a dial, without their settings."""
    last = f", {experiment.settings[-1]}"
    return [arm.removesuffix(last) for arm in experiment.arms if arm.endswith(last)]


def turned(records: Iterable[Record], experiment: Experiment) -> dict[str, dict[str, dict]]:
    """Arm -> setting -> `interval` of the metric shown and its `values`, one a seed; but for the
    first arm also `minus`, the interval of the differences from it, paired by seed; of a lenient
    metric also the `strict` mean; of an end also `before`, the mean without training. Settings
    without runs are left out."""
    runs, (first, *_) = by_arm(records), arms_of(experiment)
    measure = methodcaller(experiment.of, experiment.shown)
    strict = methodcaller(experiment.of, experiment.shown.replace("lenient/", ""))
    found: dict[str, dict[str, dict]] = {}
    least = 0.0 if experiment.of == "end" else -1.0  # of a share, or of its change
    for arm in arms_of(experiment):
        for setting in experiment.settings:
            mine, base = (runs.get(f"{name}, {setting}", {}) for name in (arm, first))
            measured = {seed: measure(run) for seed, run in mine.items()}
            if not measured:
                continue
            values = [*measured.values()]
            own = within(experiment.shown, interval(values), least)
            entry = found.setdefault(arm, {})[setting] = own | {"values": values}
            pairs = [
                value - measure(base[seed]) for seed, value in measured.items() if seed in base
            ]
            if arm != first and pairs:
                entry["minus"] = interval(pairs)
            if "lenient/" in experiment.shown:
                entry["strict"] = fmean(map(strict, mine.values()))
            if experiment.of == "end":
                entry["before"] = fmean(run.logged(experiment.shown)[0] for run in mine.values())
    return found


def reported_dials(results: str | Path | None = None) -> dict[str, dict]:
    """Name -> `turned` of each dial that has stored runs, by default among the shipped ones."""
    names = [name for name in EXPERIMENTS if name.startswith(PREFIX)]
    runs = {name: load_current(results, "tiny", name)[0] for name in names}
    return {name: turned(of, EXPERIMENTS[name]) for name, of in runs.items() if of}


def dial(name: str, shown: str = "", profile: str = "tiny") -> Figure:
    """The figure of one dial, of its metric or of `shown`; ValueError without stored runs."""
    runs, _ = load_current(None, profile, name)
    if not runs:
        raise ValueError(f"no run of {name!r} is stored: `{command_of(name, profile)}` makes them.")
    experiment = replace(EXPERIMENTS[name], shown=shown or EXPERIMENTS[name].shown)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    draw(figure.subplots(), turned(runs, experiment), experiment)
    figure.suptitle(fill(experiment.question, 90), fontsize=10, fontweight="bold")
    return figure


def all_dials(found: Mapping[str, dict] | None = None) -> Figure:
    """One panel a dial of `reported_dials`: when does it matter?"""
    found = found or reported_dials()
    rows = -(-len(found) // 2)
    figure = Figure(figsize=(11, 3.3 * rows), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.15)
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for (name, of), axes in zip(found.items(), panels, strict=False):
        draw(axes, of, EXPERIMENTS[name])
        axes.set_title(name.removeprefix(PREFIX))
    for axes in panels[len(found) :]:
        axes.remove()
    return figure


def draw(axes, found: dict[str, dict[str, dict]], experiment: Experiment) -> None:
    """Each arm's mean in each setting, with its 95 % interval over seeds, and each seed, pale.

    Dotted: before training.
    """
    colours = arm_colours(found)
    settings = [name for name in experiment.settings if any(name in of for of in found.values())]
    if experiment.of == "end":
        before = [next(of[name] for of in found.values() if name in of) for name in settings]
        axes.plot([one["before"] for one in before], ":", color="black", label="before")
    for i, (arm, of) in enumerate(found.items()):
        beside = 0.08 * (i - (len(found) - 1) / 2)
        places = [settings.index(setting) + beside for setting in of]
        means = [one["mean"] for one in of.values()]
        ends = [[one["mean"] - one["low"] for one in of.values()],
                [one["high"] - one["mean"] for one in of.values()]]  # fmt: skip
        strict = [one["strict"] for one in of.values() if "strict" in one]
        label = f"{shown(arm)}, lenient" if strict else shown(arm)
        look = {"color": colours[arm], "marker": "o", "capsize": 3, "label": label}
        axes.errorbar(places, means, ends, **look)
        for place, one in zip(places, of.values(), strict=True):
            seeds = one["values"]
            axes.plot([place] * len(seeds), seeds, ".", color=colours[arm], alpha=0.4, ms=6)
        if strict:
            dashed = {"linestyle": "--", "marker": "x", "label": f"{shown(arm)}, strict"}
            axes.plot(places, strict, color=colours[arm], **dashed)
    axes.set_xticks(range(len(settings)), settings)
    metric = experiment.shown.removeprefix("eval/").removeprefix("lenient/")
    metric, *_ = CURVE_LABELS.get(metric, [metric])
    if experiment.of == "change":
        axes.axhline(0, color="black", linewidth=0.8)
        metric = f"change of {metric}"
    axes.set(xlabel=experiment.turned, ylabel=metric)
    axes.legend(fontsize=8)


def dial_text(records: Iterable[Record], experiment: Experiment, summary: dict) -> str:
    """Markdown, a row an arm: its mean in each setting, and its differences from the first arm.

    `summary`: of the same records, as `summarise` returns it.
    """
    found = turned(records, experiment)
    settings = [name for name in experiment.settings if any(name in of for of in found.values())]
    rows = []
    for arm, of in found.items():
        minus = [cell(of.get(name, {}).get("minus"), "+") for name in settings]
        rows.append([arm, *(cell(of.get(name)) for name in settings), *minus])
    shown = f"{experiment.of} of {experiment.shown.removeprefix('eval/')}"
    first = next(iter(found))
    head = [f"{shown}, by {experiment.turned}", *settings]
    head += [f"{name}, minus {first}" for name in settings]
    return f"{circumstances(summary)}\n{markdown_table(head, *rows)}"
