"""An experiment's records as numbers, curves and Markdown tables, for notebooks and reports."""

import math
from collections.abc import Iterable, Mapping
from html import escape
from itertools import accumulate
from pathlib import Path

import numpy as np
import pandas as pd

from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import Experiment, command_of
from grpo_kit.lab.records import COSTS, Record, by_arm
from grpo_kit.lab.statistics import interval, within
from grpo_kit.runs import value_of

GRID = 17  # points of a curve over tokens or seconds


def reported(
    name: str, profile: str = "tiny", results: str | Path | None = None, x: str | None = None
) -> dict:
    """`summarise` an experiment's reported runs; ValueError if none or one cannot be used."""
    records, problems = load_current(results, profile, name)
    if problems:
        raise ValueError(" ".join(problems))
    if not records:
        raise ValueError(f"no run of {name!r} is stored: `{command_of(name, profile)}` makes them.")
    return summarise(records, EXPERIMENTS[name], x)


def summarise(records: Iterable[Record], experiment: Experiment, x: str | None = None) -> dict:
    """Values, intervals, paired differences and curves of one experiment on one profile.

    `x`: the axis of the curves, "step", "num_generated_tokens" or "seconds", else the experiment's.
    Returns `profile`, `config` (of the first arm), `problems` (how many it was tested
    on), `seeds` (arm -> its seeds), `x`; `final`: arm -> metric -> `values`, one a seed, and their
    `interval`, without seconds if not all ran on one kind of accelerator; `difference`: the same of
    other arms minus the first, over the seeds of both; `curves`: metric -> arm -> `steps`, points
    on the axis, and `values`, one list a seed. ValueError if no arm has a record.
    """
    recorded, x = by_arm(records), x or experiment.x
    arms = {arm: recorded[arm] for arm in experiment.arms if arm in recorded}
    if not arms:
        raise ValueError(f"no arm of this experiment has a run: {', '.join(experiment.arms)}.")
    runs = [record for by_seed in arms.values() for record in by_seed.values()]
    one_kind = len({run.machine["accelerator"] for run in runs}) == 1
    rows = {}
    for arm, by_seed in arms.items():
        ends = pd.DataFrame([_end(record) for record in by_seed.values()], [*by_seed])
        rows[arm] = ends if one_kind else ends.drop(columns="seconds")
    baseline = next(iter(experiment.arms))
    others = [arm for arm in rows if arm != baseline and baseline in rows]
    curves = {metric: {} for metric in experiment.curves}
    for metric, of in curves.items():
        for arm, by_seed in arms.items():
            curve = _curve(by_seed.values(), metric, x)
            if curve["steps"]:
                of[arm] = curve
    return {
        "profile": runs[0].profile, "config": runs[0].config,
        "problems": runs[0].evaluation.get("eval/n"),
        "seeds": {arm: sorted(by_seed) for arm, by_seed in arms.items()}, "x": x,
        "final": {arm: _within(_intervals(of)) for arm, of in rows.items()},
        "difference": {arm: _intervals(rows[arm] - rows[baseline]) for arm in others},
        "curves": curves,
    }  # fmt: skip


def _end(record: Record) -> dict[str, float]:
    values = {k: v for k, v in record.evaluation.items() if k != "eval/n" and v is not None}
    return values | dict(zip(COSTS, record.cost, strict=True))


def _intervals(rows: pd.DataFrame) -> dict[str, dict]:
    """Metric -> `values` and their `interval`, of the metrics that all rows (seeds) have."""
    shared = rows.dropna(how="all").dropna(axis=1)
    return {metric: {"values": of.tolist(), **interval(of)} for metric, of in shared.items()}


def _within(of: dict[str, dict]) -> dict[str, dict]:
    return {metric: within(metric, found) for metric, found in of.items()}


def _curve(records: Iterable[Record], metric: str, x: str) -> dict:
    """The steps at which all seeds have a value (one may have lacked any score), and the values.

    Over tokens or seconds, values are interpolated linearly at `GRID` points that all seeds reach.
    """
    curves = []  # of each seed: x -> value
    for history in (record.history for record in records):
        seconds = accumulate(row.get("step_time", 0.0) for row in history)
        curve = {}
        for row, passed in zip(history, seconds, strict=True):
            if (value := value_of(row, metric)) is not None:
                curve[passed if x == "seconds" else row[x]] = value
        curves.append(curve)
    if x == "step":
        steps = sorted(set.intersection(*map(set, curves)))
        return {"steps": steps, "values": [[round(of[s], 4) for s in steps] for of in curves]}
    if not all(curves):
        return {"steps": [], "values": []}
    points = np.linspace(max(map(min, curves)), min(map(max, curves)), GRID).round().tolist()
    values = [np.interp(points, list(of), list(of.values())).round(4).tolist() for of in curves]
    return {"steps": points, "values": values}


def circumstances(summary: dict) -> str:
    """In a sentence: budget, profile, and on how many problems it was tested."""
    config = summary["config"]
    tokens = config.get("max_generated_tokens")
    length = f"{tokens:,} generated tokens in" if tokens else f"{config['max_steps']}"
    return (
        f"{length} steps of {config['generation_batch_size']} answers, profile "
        f"{summary['profile']}; tested on {summary['problems']} problems; "
        "mean and 95 % interval over seeds (Student's t).\n"
    )


def summary_text(summary: dict) -> str:
    """Markdown: each arm's mean and interval, then the paired differences from the first arm.

    Of all metrics of the first arm. Each interval stands alone; `claims` judges many together.
    """
    text, first = circumstances(summary), next(iter(summary["seeds"]))
    heads = {arm: f"{arm} (n = {len(of)})" for arm, of in summary["seeds"].items()}
    for title, arms, sign in (
        ("at the end", summary["final"], ""),
        (f"minus {first}, paired by seed", summary["difference"], "+"),
    ):
        rows = []
        for metric in summary["final"][first]:
            cells = (cell(values.get(metric), sign) for values in arms.values())
            rows.append([metric.removeprefix("eval/"), *cells])
        if arms:
            text += "\n" + markdown_table([title, *(heads[arm] for arm in arms)], *rows)
    return text


def markdown_table(*rows: Iterable[object]) -> str:
    """A Markdown table, its head first, without padding, so that a diff shows changed rows only."""
    head, *lines = (f"| {' | '.join(map(plain, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(list(rows[0])), *lines]) + "\n"


def plain(text: object) -> str:
    """Text that neither ends a cell of a Markdown table nor is markup."""
    return " ".join(escape(str(text), quote=False).replace("|", "\\|").split())


def cell(values: Mapping | None, sign: str = "") -> str:
    """ "0.94 [0.93, 0.95]", of an interval; "–" where there is none."""
    if values is None:
        return "–"
    mean, low, high = (number(values[name], sign) for name in ("mean", "low", "high"))
    return mean + (f" [{low}, {high}]" if values["n"] > 1 else "")


def number(value: float | None, sign: str = "") -> str:
    """Three significant digits: 0.0523, 152,000; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    value = float(f"{round(value, 12):.3g}") + 0.0  # no -0, nor what rounding left of 0
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"
