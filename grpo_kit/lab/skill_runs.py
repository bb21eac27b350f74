"""Can GRPO raise each skill of a base? A short run on every one, before and after on held-out rows.

RL raises a skill only if one of its styles is already reliable, so `grpo-kit skill-runs` tries a
base before it is fixed. Where a run without labels (`SKILLS`) raises its reward while accuracy
falls, the evaluator or judge is hacked.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from datasets import Dataset

from grpo_kit.config import GRPOConfig
from grpo_kit.course.plots import labelled_curves
from grpo_kit.flow.roles import read_action
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
from grpo_kit.tasks.tool_questions import make_tool_question
from grpo_kit.tasks.word_problems import make_problem
from grpo_kit.tiny import skills as S
from grpo_kit.training import evaluate, train

ROWS = {"train": 2000, "test": 256}


def _verify_row(rng: random.Random, split: str) -> dict:
    problem = make_problem(rng, rng.choice(S.DIFFICULTIES), split)
    message = S.sample_verify(problem, rng)[0]
    right = f"Proposed answer: {problem.answer}\n" in message["content"]
    return {"prompt": [message], "answer": "Yes" if right else "No"}


def _plan_row(rng: random.Random, split: str) -> dict:
    """A tool question in the middle of an episode; `answer` is the right step, joined by `|`."""
    question = make_tool_question(rng, split)
    memory = S.sample_memory(question, rng)
    memory = [] if question.next_step(memory) is None else memory
    content = S.plan_prompt(question.text, S.memory_text(memory))
    step = S.step_text(question.next_step(memory))
    return {"prompt": [{"role": "user", "content": content}], "answer": "|".join(step)}


def task_of(skill: str) -> Task:
    """Rows of a skill in `ROW_MAKERS`."""
    splits = {}
    for split, n in ROWS.items():
        rng = random.Random(f"{skill}-{split}-0")
        splits[split] = Dataset.from_list([ROW_MAKERS[skill](rng, split) for _ in range(n)])
    return Task(skill, **splits)


def plan_reward(completions, answer, **columns) -> list[float]:
    """1 for the right next step, else 0."""
    plans = [read_action(completion_text(completion)) for completion in completions]
    return [
        float(not plan.problem and "|".join(plan.step) == right)
        for plan, right in zip(plans, answer, strict=True)
    ]


def _p_yes(policy: Policy) -> MetaEvaluationReward:
    return MetaEvaluationReward(frozen_copy(policy), transform="p")


ROW_MAKERS = {"verify": _verify_row, "plan": _plan_row}  # the others are on word problems
SKILLS: dict[str, Callable[[Policy], list[Callable]]] = {  # -> rewards of its run
    "solve": lambda policy: [accuracy_reward],
    "verify": lambda policy: [accuracy_reward],
    "plan": lambda policy: [plan_reward],
    # without labels
    "meta": lambda policy: [_p_yes(policy), format_reward],
    "bare": lambda policy: [_p_yes(policy)],
    "judge": lambda policy: [QualityJudgeReward(LocalJudge(policy))],
}


def run_skills(
    profile: Profile, config: GRPOConfig, output_dir: str | Path, names: Sequence[str] = (*SKILLS,)
) -> dict:
    """One GRPO run per skill from `profile`'s policy; writes `skills.json`, `.md` and `.png`.

    Returns skill -> `before` and `after` (`evaluate` on held-out rows, by labels for every skill)
    and `reward`, the mean of each step. Raises ValueError for an unknown skill.
    """
    if unknown := [name for name in names if name not in SKILLS]:
        raise ValueError(f"there is no skill {unknown[0]!r}: choose among {', '.join(SKILLS)}")
    output_dir = make_output_dir(output_dir)
    result: dict = {}
    for name in names:
        print(name, flush=True)
        task = task_of(name) if name in ROW_MAKERS else profile.load_task()
        correct = plan_reward if name == "plan" else accuracy_reward
        policy = profile.load_policy()
        before = evaluate(policy, task.test, config, correct=correct)
        rewards, run_config = SKILLS[name](policy), dataclasses.replace(config, eval_prompts=0)
        run = train(policy, task, rewards, run_config, output_dir=output_dir / name, seed=0)
        after = evaluate(policy, task.test, config, correct=correct)
        result[name] = {"before": before, "after": after, "reward": run.series("reward")[1]}
        # after each, since a judge that cannot be read ends its run with an error
        write_atomic(output_dir / "skills.json", json.dumps(result, indent=1))
        write_atomic(output_dir / "skills.md", skills_text(result))
    curves = {
        name: {"steps": range(1, len(row["reward"]) + 1), "values": [row["reward"]]}
        for name, row in result.items()
        if row["reward"]
    }
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
