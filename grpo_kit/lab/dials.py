"""When does a method matter? A dial turns one number and draws the effect against it.

A dial is an experiment with `settings` (`data/experiments.yaml`): every arm is trained in each of
them, as "ARM, SETTING". Its first arm is the baseline, the last one the method.
"""

from collections.abc import Iterable
from operator import methodcaller

from matplotlib.figure import Figure

from grpo_kit.course.plots import arm_colours
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import Experiment, command_of
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import interval


def arms_of(experiment: Experiment) -> list[str]:
    """The arms of a dial, without their settings."""
    last = f", {experiment.settings[-1]}"
    return [arm.removesuffix(last) for arm in experiment.arms if arm.endswith(last)]


def turned(records: Iterable[Record], experiment: Experiment) -> dict[str, dict[str, dict]]:
    """Arm -> setting -> `interval` of the metric shown, and, but for the first arm, `minus`: the
    interval of the differences from it, paired by seed. Settings without runs are left out."""
    runs, (first, *_) = by_arm(records), arms_of(experiment)
    measure = methodcaller(experiment.of, experiment.shown)
    found: dict[str, dict[str, dict]] = {}
    for arm in arms_of(experiment):
        for setting in experiment.settings:
            mine, base = (runs.get(f"{name}, {setting}", {}) for name in (arm, first))
            measured = {seed: measure(run) for seed, run in mine.items()}
            if not measured:
                continue
            entry = found.setdefault(arm, {})[setting] = interval([*measured.values()])
            pairs = [
                value - measure(base[seed]) for seed, value in measured.items() if seed in base
            ]
            if arm != first and pairs:
                entry["minus"] = interval(pairs)
    return found


def stored(name: str) -> list[Record]:
    """The stored runs of a dial that this version would make."""
    return load_current(profile="tiny", experiment=name)[0]


def dial(name: str) -> Figure:
    """The figure of one dial; ValueError where no run of it is stored."""
    if not (records := stored(name)):
        raise ValueError(f"no run of {name!r} is stored: `{command_of(name, 'tiny')}` makes them.")
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    draw(figure.subplots(), turned(records, EXPERIMENTS[name]), EXPERIMENTS[name])
    return figure


def draw(axes, found: dict[str, dict[str, dict]], experiment: Experiment) -> None:
    """Each arm's mean in each setting, with its 95 % interval over seeds."""
    colours = arm_colours(found)
    for i, (arm, of) in enumerate(found.items()):
        places = [experiment.settings.index(setting) + 0.08 * i for setting in of]
        means = [one["mean"] for one in of.values()]
        least = 0.0 if experiment.of == "end" else -1.0
        ends = [[one["mean"] - max(one["low"], least) for one in of.values()],
                [min(one["high"], 1) - one["mean"] for one in of.values()]]  # fmt: skip
        look = {"color": colours[arm], "marker": "o", "capsize": 3, "label": arm}
        axes.errorbar(places, means, ends, **look)
    axes.set_xticks(range(len(experiment.settings)), experiment.settings)
    metric = experiment.shown.removeprefix("eval/")
    if experiment.of == "change":
        axes.axhline(0, color="black", linewidth=0.8)
        metric = f"change of {metric}"
    axes.set(xlabel=experiment.turned, ylabel=metric)
    axes.legend(fontsize=8)
