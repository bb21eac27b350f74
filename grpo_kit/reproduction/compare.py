"""Compare ways to train on equal terms: arms of an experiment, several seeds each, paired by seed.

One run of each of two rewards tells next to nothing: seeds differ more than rewards do.
`run_experiment` trains every arm from the same weights with the same seeds, hence on the same
prompts in the same order, and takes the differences from the first arm seed by seed. What is
finished is not run again, what was killed goes on.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from grpo_kit.config import GRPOConfig, Profile
from grpo_kit.models import Policy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.plots import arm_bands
from grpo_kit.reproduction.seeds import interval
from grpo_kit.tasks import Task
from grpo_kit.training import Run, train

Rewards = Callable[[Profile, GRPOConfig, Policy], list[Callable]]
MEASURED = "measured.json"
GRID = 17
MARGIN = 0.05  # what counts as unchanged, in shares and accuracies


@dataclass(frozen=True)
class Trained:
    """A finished run with the policy that it made, and the policy that it began with."""

    run: Run
    policy: Policy
    base: Policy
    task: Task
    profile: Profile
    config: GRPOConfig


@dataclass(frozen=True)
class Arm:
    """One way to train: its rewards, made anew for a run, what it changes in the config, and, made
    for a profile, how its steps collect what they learn from (see `train`)."""

    rewards: Rewards
    changes: Mapping[str, object] = field(default_factory=dict)
    collector: Callable[[Profile], Callable] | None = None


@dataclass(frozen=True)
class Experiment:
    """A question, its arms, the baseline first, what is measured of each trained policy, and which
    metrics' curves are kept.

    `watch` makes, from profile, base, task and config, what `train` is to measure at every
    evaluation. `x` is what curves are drawn over: "step", or "num_generated_tokens" where arms have
    equal budgets of tokens and so unequal steps. `changes` to the config are common to all arms,
    and evaluated is after every 1/`evaluations` of the steps. `task` is loaded in place of the
    profile's.
    """

    question: str
    arms: Mapping[str, Arm]
    measure: Callable[[Trained], dict[str, float]]
    curves: Sequence[str] = ("reward", "eval/pass@1", "entropy", "completions/mean_length")
    watch: Callable[[Profile, Policy, Task, GRPOConfig], Callable] | None = None
    x: str = "step"
    changes: Mapping[str, object] = field(default_factory=dict)
    evaluations: int = 6
    task: Callable[[], Task] | None = None


def run_experiment(
    experiment: Experiment,
    profile: Profile,
    config: GRPOConfig,
    seeds: Sequence[int],
    output_dir: str | Path,
) -> dict:
    """Train every arm with every seed, into `output_dir/<arm>/seed-<seed>`; return the summary.

    Writes `summary.json`, `summary.md` and `curves.png` (see `summarise`) after each seed of all
    arms, so that an interrupted experiment leaves what it has. Raises ValueError for no seed.
    """
    if not len(seeds):
        raise ValueError("there is no seed; give at least one.")
    if experiment.x == "num_generated_tokens" and config.max_generated_tokens is None:
        raise ValueError(
            "this experiment compares arms that have generated the same number of tokens: give "
            "that number, --tokens 130000, and --steps enough to reach it."
        )
    output_dir = make_output_dir(output_dir)
    every = max(1, config.max_steps // experiment.evaluations)
    config = dataclasses.replace(config, **{"eval_steps": every, **experiment.changes})
    task, base = (experiment.task or profile.load_task)(), profile.load_policy()
    watch = experiment.watch and experiment.watch(profile, base, task, config)
    runs: dict[str, list[tuple[Run, dict]]] = {name: [] for name in experiment.arms}
    summary: dict = {}
    for seed in seeds:
        for name, arm in experiment.arms.items():
            print(f"{name}, seed {seed}", flush=True)
            policy = profile.load_policy()
            arm_config = dataclasses.replace(config, **arm.changes)
            run = train(
                policy,
                task,
                arm.rewards(profile, arm_config, policy),
                arm_config,
                output_dir=output_dir / name.replace(" ", "-") / f"seed-{seed}",
                seed=seed,
                resume=True,
                collector=arm.collector and arm.collector(profile),
                measure=watch,
            )
            measured = run.output_dir / MEASURED
            if not measured.exists():
                found = experiment.measure(Trained(run, policy, base, task, profile, arm_config))
                write_atomic(measured, json.dumps(found))
            runs[name].append((run, json.loads(measured.read_text())))
        summary = {
            "question": experiment.question,
            "profile": profile.name,
            "config": dataclasses.asdict(config),
            **summarise(runs, experiment.curves, experiment.x),
        }
        write_atomic(output_dir / "summary.json", json.dumps(summary, indent=1))
        write_atomic(output_dir / "summary.md", summary_text(summary))
        arm_bands(summary["curves"], summary["x"]).savefig(output_dir / "curves.png", dpi=120)
    return summary


def summarise(
    runs: Mapping[str, Sequence[tuple[Run, dict]]], curves: Sequence[str], x: str = "step"
) -> dict:
    """Per arm, one value a seed of every metric at the end, its interval, and the curves over `x`.

    Returns `seeds`, `final` (arm -> metric -> `values`, `median`, `low`, `high`),
    `difference` (arm but the first -> metric -> interval of the differences from the first, paired
    by seed), `curves` (metric -> arm that logs it -> `steps`, places on the axis `x`, and one list
    of values a seed) and `x`.
    """
    first = next(iter(runs))
    final: dict = {}
    for name, done in runs.items():
        rows = [
            {k: v for k, v in run.history[-1].items() if k.startswith("eval/") and k != "eval/n"}
            | {k: run.history[-1][k] for k in ("entropy",) if k in run.history[-1]}
            | {"seconds": sum(row.get("step_time", 0.0) for row in run.history)}
            | measured
            for run, measured in done
        ]
        final[name] = {
            metric: {"values": [row[metric] for row in rows], **interval([r[metric] for r in rows])}
            for metric in rows[0]
        }
    difference = {
        name: {
            metric: interval(
                [
                    there - here
                    for there, here in zip(
                        table[metric]["values"], final[first][metric]["values"], strict=True
                    )
                ]
            )
            for metric in table
            if metric in final[first]
        }
        for name, table in final.items()
        if name != first
    }
    lines = {
        metric: {
            name: curve
            for name, done in runs.items()
            if (curve := _curve([run for run, _ in done], metric, x))["steps"]
        }
        for metric in curves
    }
    seeds = [run.seed for run, _ in runs[first]]
    return {"seeds": seeds, "final": final, "difference": difference, "curves": lines, "x": x}


def _curve(runs: Sequence[Run], metric: str, x: str) -> dict:
    """The steps at which all seeds have a value (one may have lacked any score), and the values.

    Over anything else than steps each seed has places of its own; values are interpolated linearly
    at `GRID` places, which all seeds reach.
    """
    points = [{row[x]: row[metric] for row in run.history if metric in row} for run in runs]
    if x == "step":
        places = sorted(set.intersection(*map(set, points)))
        return {"steps": places, "values": [[round(v[s], 4) for s in places] for v in points]}
    if not all(points):
        return {"steps": [], "values": []}
    places = np.linspace(max(map(min, points)), min(map(max, points)), GRID).round().tolist()
    values = [np.interp(places, list(v), list(v.values())).round(4).tolist() for v in points]
    return {"steps": places, "values": values}


def summary_text(summary: dict, metrics: Sequence[str] | None = None) -> str:
    """Markdown: each arm's median and interval, then the paired differences from the first arm.

    Of all `metrics`, or those given; "–" where an arm lacks one. A difference whose interval holds
    0 is inconclusive; with fewer than five seeds all are.
    """
    first = next(iter(summary["final"]))
    n, config = len(summary["seeds"]), summary["config"]
    metrics = list(summary["final"][first]) if metrics is None else list(metrics)
    tokens = config.get("max_generated_tokens")
    length = f"{tokens:,} generated tokens in" if tokens else f"{config['max_steps']}"
    lines = [
        f"{n} seeds, {length} steps of {config['generation_batch_size']} answers, "
        f"profile {summary['profile']}; median and 95 % bootstrap interval over seeds.",
        "",
        *_table("at the end", metrics, summary["final"]),
        "",
        *_table(f"minus {first}, paired by seed", metrics, summary["difference"], differences=True),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Claim:
    """What is claimed of a metric: that it "rises", "falls" or "stays" (within `MARGIN` of 0).

    `arm`: where another is meant than the table's. `paired`: of its difference from the first arm,
    seed by seed, else of the arm's own value, for metrics that are changes themselves.
    """

    metric: str
    expects: str = "rises"
    arm: str | None = None
    paired: bool = True


def claims_text(summary: dict, arm: str, claims: Mapping[str, str | Claim]) -> str:
    """Markdown: claims of `arm`, and what the seeds say.

    `claims`: claim -> `Claim`, or a metric that is claimed to be higher than in the first arm.
    Reproduced or contradicted where the interval lies wholly where the claim puts it or wholly
    elsewhere; inconclusive otherwise, and with fewer than five seeds.
    """
    lines = ["| published | difference here | verdict |", "|---|---|---|"]
    for text, claim in claims.items():
        if isinstance(claim, str):
            claim = Claim(claim)
        who = claim.arm or arm
        values = summary["difference" if claim.paired else "final"][who][claim.metric]
        name = claim.metric.removeprefix("eval/")
        of = f"{who}: {name}" if claim.arm else name
        lines.append(f"| {text} | {of} {_cell(values, '+')} | **{verdict(values, claim)}** |")
    return "\n".join(lines) + "\n"


def verdict(values: dict, claim: Claim) -> str:
    """ "reproduced", "contradicted" or "inconclusive", of an interval (low, high, n)."""
    if values["n"] < 5:
        return "inconclusive"
    low, high = {
        "rises": (0, math.inf), "falls": (-math.inf, 0), "stays": (-MARGIN, MARGIN)
    }[claim.expects]  # fmt: skip
    if low < values["low"] and values["high"] < high:
        return "reproduced"
    return "contradicted" if values["high"] < low or values["low"] > high else "inconclusive"


def _is_clear(values: dict) -> bool:
    return values["n"] >= 5 and not values["low"] <= 0 <= values["high"]


def _cell(values: dict, sign: str = "") -> str:
    median, low, high = (f"{values[name] + 0.0:{sign}.3g}" for name in ("median", "low", "high"))
    return median + (f" [{low}, {high}]" if values["n"] > 1 else "")


def _table(title: str, metrics: Sequence[str], table: dict, differences: bool = False) -> list[str]:
    """A row a metric, a column an arm; differences have signs and may be inconclusive."""
    lines = [f"| {title} | {' | '.join(table)} |", "|" + "---|" * (1 + len(table))]
    for metric in metrics:
        cells = [
            "–"
            if metric not in row
            else _cell(row[metric], "+" if differences else "")
            + (" *inconclusive*" if differences and not _is_clear(row[metric]) else "")
            for row in table.values()
        ]
        lines.append(f"| {metric.removeprefix('eval/')} | {' | '.join(cells)} |")
    return lines
