"""An experiment's records as numbers, tables and curves: one value a seed, medians, intervals.

`summarise` is what notebooks, README and report take their tables and figures of an experiment
from; differences from the first arm, the baseline, are taken seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import Experiment, command_of
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import interval

GRID = 17


def reported(name: str, profile: str = "tiny", results: str | Path | None = None) -> dict:
    """`summarise` of the reported runs of an experiment.

    Raises ValueError, saying how to make them, where there are none, or where a file of theirs
    cannot be used.
    """
    records, problems = load_current(results, profile, name)
    if problems:
        raise ValueError(" ".join(problems))
    if not records:
        raise ValueError(
            f"no run of {name!r} on profile {profile!r} is stored: `{command_of(name, profile)}` "
            "makes them."
        )
    return summarise(records, EXPERIMENTS[name])


def summarise(records: Iterable[Record], experiment: Experiment, x: str | None = None) -> dict:
    """Of one experiment's records on one profile: values, intervals, differences and curves.

    Returns `question`, `profile`, `config` (of the first arm), `seeds` (arm -> its seeds), `x`
    (what curves are over, the experiment's own unless given: "step", "num_generated_tokens" or
    "seconds"), and
    `final`: arm -> metric -> `values`, one a seed, and `interval`'s `median`, `low`, `high`, `n`;
    `difference`: arm but the first -> metric -> interval of the differences from the first arm over
    the seeds that both have; `curves`: metric -> arm that logs it -> `steps`, places on the axis
    `x`, and `values`, one list a seed. Arms without a record are left out.
    """
    there = by_arm(records)
    arms = {arm: there[arm] for arm in experiment.arms if arm in there}
    if not arms:
        raise ValueError(
            f"there is no run of an arm of this experiment; it has {', '.join(experiment.arms)}."
        )
    final = {arm: _final(of_seed.values()) for arm, of_seed in arms.items()}
    baseline = next(iter(experiment.arms))
    difference: dict = {}
    for arm in arms if baseline in arms else ():
        if arm == baseline:
            continue
        common = [seed for seed in arms[arm] if seed in arms[baseline]]
        rows = [(_row(arms[arm][seed]), _row(arms[baseline][seed])) for seed in common]
        difference[arm] = {
            metric: interval([here[metric] - first[metric] for here, first in rows])
            for metric in (rows[0][0] if rows else ())
            if all(metric in row for pair in rows for row in pair)
        }
    x = x or experiment.x
    curves = {
        metric: {
            arm: curve
            for arm, of_seed in arms.items()
            if (curve := _curve(list(of_seed.values()), metric, x))["steps"]
        }
        for metric in experiment.curves
    }
    first = next(iter(next(iter(arms.values())).values()))
    return {
        "question": experiment.question,
        "profile": first.profile,
        "config": first.config,
        "seeds": {arm: sorted(of_seed) for arm, of_seed in arms.items()},
        "final": final,
        "difference": difference,
        "curves": curves,
        "x": x,
    }


def _row(record: Record) -> dict[str, float]:
    values = {k: v for k, v in record.evaluation.items() if k != "eval/n" and v is not None}
    last = record.history[-1]
    return values | {"tokens": last["num_generated_tokens"], "seconds": record.seconds}


def _final(records: Iterable[Record]) -> dict[str, dict]:
    rows = [_row(record) for record in records]
    return {
        metric: {"values": (values := [row[metric] for row in rows]), **interval(values)}
        for metric in rows[0]
        if all(metric in row for row in rows)
    }


def _curve(records: Sequence[Record], metric: str, x: str) -> dict:
    """The steps at which all seeds have a value (one may have lacked any score), and the values.

    Over anything else than steps each seed has places of its own; values are interpolated linearly
    at `GRID` places, which all seeds reach.
    """
    points = [_points(record.history, metric, x) for record in records]
    if x == "step":
        places = sorted(set.intersection(*map(set, points)))
        return {"steps": places, "values": [[round(v[s], 4) for s in places] for v in points]}
    if not all(points):
        return {"steps": [], "values": []}
    places = np.linspace(max(map(min, points)), min(map(max, points)), GRID).round().tolist()
    values = [np.interp(places, list(v), list(v.values())).round(4).tolist() for v in points]
    return {"steps": places, "values": values}


def _points(history: Sequence[dict], metric: str, x: str) -> dict[float, float]:
    points, seconds = {}, 0.0
    for row in history:
        seconds += row.get("step_time", 0.0)
        if row.get(metric) is not None:
            points[seconds if x == "seconds" else row[x]] = row[metric]
    return points


def summary_text(summary: dict, metrics: Sequence[str] | None = None) -> str:
    """Markdown: each arm's median and interval, then the paired differences from the first arm.

    Of all `metrics`, or those given; "–" where an arm lacks one. Where arms have not all as many
    seeds, each says how many; differences are over those in common. A difference is marked where
    its interval holds 0 and with fewer than five seeds: it may be chance. These are intervals of
    one number each; verdicts on claims, which are judged together, are `claims`'.
    """
    first = next(iter(summary["final"]))
    config, counts = summary["config"], {arm: len(of) for arm, of in summary["seeds"].items()}
    alike = len(set(counts.values())) == 1
    seeds = f"{counts[first]}" if alike else f"{min(counts.values())} to {max(counts.values())}"
    heads = {arm: arm if alike else f"{arm} ({n} seeds)" for arm, n in counts.items()}
    metrics = list(summary["final"][first]) if metrics is None else list(metrics)
    tokens = config.get("max_generated_tokens")
    length = f"{tokens:,} generated tokens in" if tokens else f"{config['max_steps']}"
    lines = [
        f"{seeds} seeds, {length} steps of {config['generation_batch_size']} answers, "
        f"profile {summary['profile']}; median and 95 % bootstrap interval over seeds.",
        "",
        *_table("at the end", metrics, summary["final"], heads),
    ]
    if summary["difference"]:
        title = f"minus {first}, paired by seed"
        lines += ["", *_table(title, metrics, summary["difference"], heads, differences=True)]
    return "\n".join(lines) + "\n"


def is_clear(values: dict) -> bool:
    """Whether the interval of a difference, of five seeds at least, leaves out 0."""
    return values["n"] >= 5 and not values["low"] <= 0 <= values["high"]


def cell(values: dict | None, sign: str = "") -> str:
    """ "0.94 [0.93, 0.95]", of an interval; "–" where there is none."""
    if values is None:
        return "–"
    median, low, high = (number(values[name], sign) for name in ("median", "low", "high"))
    return median + (f" [{low}, {high}]" if values["n"] > 1 else "")


def number(value: float | None, sign: str = "") -> str:
    """Three significant digits: 0.0523, 152,000; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return ("+" * (sign == "+") if value > 0 else "-") + "∞"
    value = float(f"{value:.3g}") + 0.0  # no -0
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"


def _table(
    title: str, metrics: Sequence[str], table: dict, heads: dict, differences: bool = False
) -> list[str]:
    """A row a metric, a column an arm, named by `heads`; differences have signs, may be chance."""
    lines = [
        f"| {title} | {' | '.join(heads[arm] for arm in table)} |",
        "|" + "---|" * (1 + len(table)),
    ]
    for metric in metrics:
        cells = [
            "–"
            if metric not in row
            else cell(row[metric], "+" if differences else "")
            + (" *inconclusive*" if differences and not is_clear(row[metric]) else "")
            for row in table.values()
        ]
        lines.append(f"| {metric.removeprefix('eval/')} | {' | '.join(cells)} |")
    return lines
