"""Can GRPO raise each skill of a base? A short run on every one, before and after on held-out rows.

RL raises a skill only if one of its styles is already reliable, so `grpo-kit skill-runs` tries a
base before it is fixed. Where a run without labels (`SKILLS`) raises its reward while accuracy
falls, the evaluator or judge is hacked.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from datasets import Dataset

from grpo_kit.course.plots import labelled_curves
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.profiles import Profile
from grpo_kit.rewards import (
    LocalJudge,
    MetaEvaluationReward,
    QualityJudgeReward,
    accuracy_reward,
    completion_text,
    format_reward,
)
from grpo_kit.tasks import Task
from grpo_kit.tiny import skills as S
from grpo_kit.training import evaluate, train

ROWS = {"train": 2000, "test": 256}
ITEMS = {"verify": S.verify_item, "plan": S.plan_item}  # the other skills are on word problems


def task_of(skill: str) -> Task:
    """Rows of a skill in `ITEMS`."""
    splits = {}
    for split, n in ROWS.items():
        rng = random.Random(f"{skill}-{split}-0")
        items = [ITEMS[skill](S.make_subject(skill, rng, split), rng) for _ in range(n)]
        rows = [{"prompt": [request], "answer": answer} for request, answer in items]
        splits[split] = Dataset.from_list(rows)
    return Task(skill, **splits)


def plan_reward(completions, answer, **columns) -> list[float]:
    """1 for the right next step, else 0."""
    steps = [S.read_step(completion_text(completion)) for completion in completions]
    return [float(step == right) for step, right in zip(steps, answer, strict=True)]


SKILLS: dict[str, Callable[[Policy], list[Callable]]] = {  # -> rewards of its run
    "solve": lambda policy: [accuracy_reward],
    "verify": lambda policy: [accuracy_reward],
    "plan": lambda policy: [plan_reward],
    # without labels
    "meta": lambda policy: [
        MetaEvaluationReward(frozen_copy(policy), transform="p"),
        format_reward,
    ],
    "bare": lambda policy: [MetaEvaluationReward(frozen_copy(policy), transform="p")],
    "judge": lambda policy: [QualityJudgeReward(LocalJudge(policy))],
}


def run_skills(
    profile: Profile, output_dir: str | Path, names: Sequence[str] = (*SKILLS,)
) -> dict[str, dict]:
    """One GRPO run per skill from `profile`'s policy; writes `skills.json` and `skills.png`.

    Returns skill -> `before` and `after` (`evaluate` on held-out rows, by labels for every skill)
    and `reward`, the mean of each step. Raises ValueError for an unknown skill.
    """
    if unknown := [name for name in names if name not in SKILLS]:
        raise ValueError(f"there is no skill {unknown[0]!r}: choose among {', '.join(SKILLS)}")
    output_dir = make_output_dir(output_dir)
    result, curves, config = {}, {}, dataclasses.replace(profile.config, eval_prompts=0)
    for name in names:
        print(name, flush=True)
        task = task_of(name) if name in ITEMS else profile.load_task()
        policy, correct = profile.load_policy(), plan_reward if name == "plan" else accuracy_reward
        measure = partial(evaluate, policy, task.test, profile.config, correct=correct)
        before, rewards = measure(), SKILLS[name](policy)
        run = train(policy, task, rewards, config, output_dir=output_dir / name, seed=0)
        steps, means = run.series("reward")
        result[name] = {"before": before, "after": measure(), "reward": means}
        # after each, since a judge that cannot be read ends its run with an error
        write_atomic(output_dir / "skills.json", json.dumps(result, indent=1))
        if means:
            curves[name] = {"steps": steps, "values": [means]}
    figure = labelled_curves(curves, "step", "mean reward of a step")
    figure.savefig(output_dir / "skills.png", dpi=120)
    return result


def skills_text(result: dict) -> str:
    """Before and after of each skill, as a Markdown table; rewards of the first and last tenth."""
    text = "| skill | pass@1 before | after | greedy before | after | reward first | last |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for name, row in result.items():
        metrics = ("eval/pass@1", "eval/greedy")
        cells = [f"{row[when][metric]:.3f}" for metric in metrics for when in ("before", "after")]
        tenth = max(1, len(row["reward"]) // 10)
        for part in (row["reward"][:tenth], row["reward"][-tenth:]):
            cells.append(f"{fmean(part):.3f}" if part else "none")
        text += f"| {name} | {' | '.join(cells)} |\n"
    return text
