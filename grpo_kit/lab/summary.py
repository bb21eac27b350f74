"""An experiment's records as numbers, tables and curves, for notebooks, results page and report."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pandas as pd

from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import Experiment, command_of
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import MIN_SEEDS, interval
from grpo_kit.runs import value_of

GRID = 17  # places of a curve over tokens or seconds


def reported(
    name: str, profile: str = "tiny", results: str | Path | None = None, x: str | None = None
) -> dict:
    """`summarise` of an experiment's reported runs; ValueError if none or one cannot be used."""
    records, problems = load_current(results, profile, name)
    if problems:
        raise ValueError(" ".join(problems))
    if not records:
        raise ValueError(f"no run of {name!r} is stored: `{command_of(name, profile)}` makes them.")
    return summarise(records, EXPERIMENTS[name], x)


def summarise(records: Iterable[Record], experiment: Experiment, x: str | None = None) -> dict:
    """Values, intervals, paired differences and curves of one experiment on one profile.

    `x`: the axis of the curves, "step", "num_generated_tokens" or "seconds", else the experiment's.
    Returns `question`, `profile`, `config` (of the first arm), `problems` (how many it was tested
    on), `seeds` (arm -> its seeds), `x`; `final`: arm -> metric -> `values`, one a seed, and their
    `interval`, without seconds if not all ran on one kind of accelerator; `difference`: the same of
    other arms minus the first, over the seeds of both; `curves`: metric -> arm -> `steps`, places
    on the axis, and `values`, one list a seed. ValueError if no arm has a record.
    """
    recorded, x = by_arm(records), x or experiment.x
    arms = {arm: recorded[arm] for arm in experiment.arms if arm in recorded}
    if not arms:
        raise ValueError(f"no arm of this experiment has a run: {', '.join(experiment.arms)}.")
    rows = {arm: pd.DataFrame([*map(_row, of.values())], [*of]) for arm, of in arms.items()}
    if len({run.machine["accelerator"] for of in arms.values() for run in of.values()}) > 1:
        rows = {arm: of.drop(columns="seconds") for arm, of in rows.items()}
    baseline = next(iter(experiment.arms))
    others = [arm for arm in rows if arm != baseline and baseline in rows]
    curves = {metric: {} for metric in experiment.curves}
    for metric, (arm, by_seed) in product(curves, arms.items()):
        curve = _curve(by_seed.values(), metric, x)
        if curve["steps"]:
            curves[metric][arm] = curve
    first = next(iter(next(iter(arms.values())).values()))
    return {
        "question": experiment.question, "profile": first.profile, "config": first.config,
        "problems": first.evaluation.get("eval/n"),
        "seeds": {arm: sorted(by_seed) for arm, by_seed in arms.items()}, "x": x,
        "final": {arm: _intervals(of) for arm, of in rows.items()},
        "difference": {arm: _intervals(rows[arm] - rows[baseline]) for arm in others},
        "curves": curves,
    }  # fmt: skip


def _row(record: Record) -> dict[str, float]:
    values = {k: v for k, v in record.evaluation.items() if k != "eval/n" and v is not None}
    tokens = record.history[-1]["num_generated_tokens"]
    return values | {"tokens": tokens, "seconds": record.seconds}


def _intervals(rows: pd.DataFrame) -> dict[str, dict]:
    """Metric -> `values` and their `interval`, of the metrics that all rows (seeds) have."""
    shared = rows.dropna(how="all").dropna(axis=1)
    return {metric: {"values": of.tolist(), **interval(of)} for metric, of in shared.items()}


def _curve(records: Iterable[Record], metric: str, x: str) -> dict:
    """The steps at which all seeds have a value (one may have lacked any score), and the values.

    Over tokens or seconds, values are interpolated linearly at `GRID` places that all seeds reach.
    """
    points = []  # place -> value, of each seed
    for history in (record.history for record in records):
        seconds = accumulate(row.get("step_time", 0.0) for row in history)
        rows = [row | {"seconds": passed} for row, passed in zip(history, seconds, strict=True)]
        values = {row[x]: value_of(row, metric) for row in rows}
        points.append({place: value for place, value in values.items() if value is not None})
    if x == "step":
        places = sorted(set.intersection(*map(set, points)))
        return {"steps": places, "values": [[round(v[s], 4) for s in places] for v in points]}
    if not all(points):
        return {"steps": [], "values": []}
    places = np.linspace(max(map(min, points)), min(map(max, points)), GRID).round().tolist()
    values = [np.interp(places, list(v), list(v.values())).round(4).tolist() for v in points]
    return {"steps": places, "values": values}


def summary_text(summary: dict, metrics: Sequence[str] | None = None) -> str:
    """Markdown: each arm's mean and interval, then the paired differences from the first arm.

    `metrics`: those shown, by default all of the first arm. A difference is marked *may be 0* if
    its interval holds 0, and *few seeds* below five. Each interval stands alone; `claims` judges
    many together.
    """
    config, counts = summary["config"], {arm: len(of) for arm, of in summary["seeds"].items()}
    first, least, most = next(iter(counts)), min(counts.values()), max(counts.values())
    heads = {arm: arm if least == most else f"{arm} ({_seeds(n)})" for arm, n in counts.items()}
    tokens = config.get("max_generated_tokens")
    length = f"{tokens:,} generated tokens in" if tokens else f"{config['max_steps']}"
    samples = f", {config['num_generations_eval']} samples each" if config["eval_prompts"] else ""
    text = (
        f"{f'{least} to ' * (least < most)}{_seeds(most)}, {length} steps of "
        f"{config['generation_batch_size']} answers, profile {summary['profile']}; tested on "
        f"{summary['problems']} problems{samples}; "
        "mean and 95 % interval over seeds (Student's t).\n"
    )
    for title, arms, show in (
        ("at the end", summary["final"], cell),
        (f"minus {first}, paired by seed", summary["difference"], difference_cell),
    ):
        rows = [
            [metric.removeprefix("eval/"), *(show(values.get(metric)) for values in arms.values())]
            for metric in metrics or summary["final"][first]
            if any(metric in of for of in summary["final"].values())
        ]
        if arms:
            text += "\n" + markdown_table([title, *(heads[arm] for arm in arms)], *rows)
    return text


def _seeds(n: int) -> str:
    return f"{n} seed{'s' * (n != 1)}"


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


def difference_cell(values: Mapping | None) -> str:
    """`cell` with signs; *few seeds*, or *may be 0* of an interval that holds it."""
    shown = cell(values, "+")
    if values is None or values["n"] < MIN_SEEDS:
        return f"{shown} *few seeds*" if values else shown
    return f"{shown} *may be 0*" if values["low"] <= 0 <= values["high"] else shown


def number(value: float | None, sign: str = "") -> str:
    """Three significant digits: 0.0523, 152,000, ∞; "–" for None and NaN."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return f"{value:{sign}}".replace("inf", "∞")
    value = float(f"{round(value, 12):.3g}") + 0.0  # no -0, nor what rounding left of 0
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"
