"""Run one configuration with several seeds, and say what came out with an interval.

One seed is an anecdote. `run_seeds` trains from the same base with each, skips what is finished and
goes on with what was killed; `summarise` gives medians with 95 % bootstrap intervals.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from grpo_kit.config import GRPOConfig, Profile
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.plots import seed_curves
from grpo_kit.training import train


def interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median of `values` with its 95 % percentile-bootstrap interval: median, low, high, n.

    low and high are NaN for fewer than two values. Raises ValueError for none.
    """
    if not len(values):
        raise ValueError("there is no value to summarise; give at least one.")
    low = high = math.nan
    if len(values) > 1:
        low, high = bootstrap(
            (np.asarray(values, dtype=float),),
            np.median,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return {"median": float(np.median(values)), "low": float(low), "high": float(high),
            "n": len(values)}  # fmt: skip


def summarise(histories: Sequence[list[dict]]) -> dict[str, dict]:
    """Of every `eval/` metric, before the first and after the last step, and of the seconds."""
    names = [name for name in histories[0][0] if name.startswith("eval/") and name != "eval/n"]
    table = {
        name: {
            "before": interval([history[0][name] for history in histories]),
            "after": interval([history[-1][name] for history in histories]),
        }
        for name in names
    }
    seconds = [sum(row.get("step_time", 0.0) for row in history) for history in histories]
    return {"metrics": table, "seconds": interval(seconds)}


def run_seeds(
    profile: Profile,
    rewards: Sequence[Callable],
    config: GRPOConfig,
    seeds: Sequence[int],
    output_dir: str | Path,
) -> dict:
    """Train `profile`'s policy once a seed, into `output_dir/seed-<seed>`; return the summary.

    Writes `summary.json` (config, seeds, summary, each seed's last row), `summary.md` and
    `curves.png`. A seed that was killed is resumed, a finished one is not run again.
    """
    output_dir = make_output_dir(output_dir)
    task, histories = profile.load_task(), []
    for seed in seeds:
        print(f"seed {seed}", flush=True)
        run = train(
            profile.load_policy(),
            task,
            rewards,
            config,
            output_dir=output_dir / f"seed-{seed}",
            seed=seed,
            resume=True,
        )
        histories.append(run.history)
    summary = {
        "profile": profile.name,
        "config": dataclasses.asdict(config),
        "seeds": list(seeds),
        **summarise(histories),
        "last": [history[-1] for history in histories],
    }
    write_atomic(output_dir / "summary.json", json.dumps(summary, indent=1))
    write_atomic(output_dir / "summary.md", summary_text(summary))
    seed_curves(histories).savefig(output_dir / "curves.png", dpi=120)
    return summary


def summary_text(summary: dict) -> str:
    """The summary as a Markdown table."""

    def cell(values: dict) -> str:
        return f"{values['median']:.3f} [{values['low']:.3f}, {values['high']:.3f}]"

    lines = [
        f"{len(summary['seeds'])} seeds, {summary['config']['max_steps']} steps, profile "
        f"{summary['profile']}; median and 95 % bootstrap interval over seeds.",
        "",
        "| held-out | before | after |",
        "|---|---|---|",
    ]
    for name, row in summary["metrics"].items():
        lines.append(f"| {name[5:]} | {cell(row['before'])} | {cell(row['after'])} |")
    each = ", ".join(f"{row['eval/pass@1']:.3f}" for row in summary["last"])
    lines += ["", f"pass@1 of each seed after: {each}.", ""]
    return "\n".join(lines) + f"\nSeconds of a run's steps: {cell(summary['seconds'])}.\n"
