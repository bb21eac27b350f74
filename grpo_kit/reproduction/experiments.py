"""Compare rewards on equal terms: the arms of an experiment, several seeds each, paired by seed.

One run of each of two rewards tells next to nothing: seeds differ more than rewards do.
`run_experiment` trains every arm from the same weights with the same seeds, hence on the same
prompts in the same order, and takes the differences from the first arm seed by seed. What is
finished is not run again, what was killed goes on.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean

from grpo_kit.config import GRPOConfig, Profile
from grpo_kit.models import Policy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.plots import arm_bands
from grpo_kit.reproduction.seeds import interval
from grpo_kit.rewards import DiversityReward, accuracy_reward, format_reward, load_embedder
from grpo_kit.tasks import Task
from grpo_kit.tiny.card import reply
from grpo_kit.tiny.problems import solution_style
from grpo_kit.training import Run, train

CURVES = ("reward", "eval/pass@1", "entropy", "completions/mean_length")
Rewards = Callable[[Profile, GRPOConfig, Policy], list[Callable]]
Measure = Callable[[Profile, Policy, Task, GRPOConfig], dict[str, float]]


@dataclass(frozen=True)
class Arm:
    """One way to train: its rewards, made anew for a run, and what it changes in the config."""

    rewards: Rewards
    changes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A question, its arms, the baseline first, and what is measured of each trained policy."""

    question: str
    arms: Mapping[str, Arm]
    measure: Measure


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
    output_dir = make_output_dir(output_dir)
    task = profile.load_task()
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
            )
            runs[name].append((run, experiment.measure(profile, policy, task, arm_config)))
        summary = {"question": experiment.question, "profile": profile.name, **summarise(runs)}
        write_atomic(output_dir / "summary.json", json.dumps(summary, indent=1))
        write_atomic(output_dir / "summary.md", summary_text(summary))
        arm_bands(summary["curves"]).savefig(output_dir / "curves.png", dpi=120)
    return summary


def summarise(runs: Mapping[str, Sequence[tuple[Run, dict]]]) -> dict:
    """Per arm, one value a seed of every metric at the end, its interval, and the curves.

    Returns `seeds`, `max_steps`, `final` (arm -> metric -> `values`, `median`, `low`, `high`),
    `difference` (arm but the first -> metric -> interval of the differences from the first, paired
    by seed) and `curves` (metric -> arm -> `steps` and one list of values a seed).
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
        }
        for name, table in final.items()
        if name != first
    }
    curves = {
        metric: {
            name: {
                "steps": done[0][0].series(metric)[0],
                "values": [run.series(metric)[1] for run, _ in done],
            }
            for name, done in runs.items()
        }
        for metric in CURVES
    }
    seeds = [run.seed for run, _ in runs[first]]
    steps = runs[first][0][0].config.max_steps
    return {"seeds": seeds, "max_steps": steps, "final": final, "difference": difference,
            "curves": curves}  # fmt: skip


def summary_text(summary: dict) -> str:
    """Markdown: each arm's median and interval, and the paired differences from the first arm.

    A difference whose interval holds 0 is inconclusive; with fewer than five seeds all are.
    """
    arms = list(summary["final"])
    n = len(summary["seeds"])
    lines = [
        f"{n} seeds, {summary['max_steps']} steps, profile {summary['profile']}; median and 95 % "
        "bootstrap interval over seeds. Differences are paired by seed.",
        "",
        f"| at the end | {' | '.join(arms)} | "
        + " | ".join(f"{arm} − {arms[0]}" for arm in arms[1:])
        + " |",
        "|" + "---|" * (2 * len(arms)),
    ]
    for metric in summary["final"][arms[0]]:
        cells = [_cell(summary["final"][arm][metric]) for arm in arms]
        for arm in arms[1:]:
            values = summary["difference"][arm][metric]
            clear = n >= 5 and not values["low"] <= 0 <= values["high"]
            cells.append(_cell(values, "+") + ("" if clear else " inconclusive"))
        lines.append(f"| {metric.removeprefix('eval/')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: dict, sign: str = "") -> str:
    return f"{values['median']:{sign}.3f} [{values['low']:{sign}.3f}, {values['high']:{sign}.3f}]"


# --- what is measured of a trained policy ---------------------------------------------------------


def diversity_of(
    policy: Policy, task: Task, embedder, *, prompts: int = 32, samples: int = 8, seed: int = 0
) -> dict[str, float]:
    """How unlike the sampled answers to one held-out prompt are, the mean over `prompts` prompts.

    Returns `distinct` (share of different texts), `styles` (effective number of solution styles of
    the tiny world, the exponential of the entropy of their shares over all answers) and `distance`
    (mean of 1 - cosine over the pairs of a group's embeddings).
    """
    import math

    import torch

    rows = task.test.select(range(min(prompts, len(task.test))))
    generator = torch.Generator().manual_seed(seed)
    texts = reply(policy, rows["prompt"], generator, num_generations=samples, limit=64, batch=16)
    groups = [texts[i : i + samples] for i in range(0, len(texts), samples)]
    vectors = torch.as_tensor(embedder.encode(list(dict.fromkeys(texts))))
    vectors = torch.nn.functional.normalize(vectors.float(), dim=1)
    row_of = dict(zip(dict.fromkeys(texts), vectors, strict=True))
    distances = [
        1 - float(row_of[a] @ row_of[b]) for group in groups for a, b in combinations(group, 2)
    ]
    shares = [n / len(texts) for n in Counter(map(solution_style, texts)).values()]
    return {
        "distinct": fmean(len(set(group)) / samples for group in groups),
        "styles": math.exp(-sum(share * math.log(share) for share in shares)),
        "distance": fmean(distances),
    }


# --- the experiments ------------------------------------------------------------------------------


def _plain(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
    return [accuracy_reward, format_reward]


def _diverse(**options) -> Rewards:
    def rewards(profile: Profile, config: GRPOConfig, policy: Policy) -> list[Callable]:
        embedder = load_embedder(profile.embedder)
        return [
            accuracy_reward,
            format_reward,
            DiversityReward(config.num_generations, embedder, **options),
        ]

    return rewards


EXPERIMENTS = {
    "diversity": Experiment(
        "Does a reward for being unlike the group keep ways of answering alive, and at what cost?",
        {
            "plain": Arm(_plain),
            "diversity": Arm(_diverse()),
            "only correct": Arm(_diverse(only_correct=True)),
        },
        lambda profile, policy, task, config: diversity_of(
            policy, task, load_embedder(profile.embedder)
        ),
    ),
}
