"""How fast can the tiny base be taught? `grpo-kit bench --speedrun`.

The clock runs from the start of a process, imports and evaluations included, until the lower 95 %
bound of pass@1 on all test problems is above `TARGET`. The median of the seeds counts.
"""

import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from grpo_kit.config import GRPOConfig  # what takes long is imported where used: it counts
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.profiles import PROFILES

TARGET, MARGIN, NEVER = 0.90, 0.01, float("inf")
GLANCE, ALL = (128, 4), (500, 8)  # test problems, samples; all if a glance is above both
SETTING = {"max_steps": 200, "eval_steps": 5, "eval_prompts": 0, "eval_on_start": False,
           "save_steps": 0}  # fmt: skip


class _Reached(Exception):
    """The target is reached; ends a run."""


def run_entry(config: GRPOConfig, seed: int, started: float) -> dict:
    """One run in this process, which began at `started` (Unix time): its seconds and curve."""
    import torch
    from scipy.stats import ttest_1samp

    from grpo_kit.generation import reply
    from grpo_kit.rewards import accuracy_reward, format_reward
    from grpo_kit.training import score, train

    profile, curve, seconds = PROFILES["tiny"], [], None
    task = profile.load_task()
    torch.set_num_threads(1)

    def look(policy, problems: int, samples: int) -> tuple[float, float]:
        """Add a point to the curve; return pass@1 and its lower bound (t over problems)."""
        rows, draws = task.test.select(range(problems)), torch.Generator().manual_seed(len(curve))
        limits = {"max_new_tokens": config.max_completion_length, "batch_size": 1024}
        torch.set_num_threads(2)  # a long batch gains from the second core, a step hardly
        rollouts = reply(policy, rows["prompt"], samples, generator=draws, **limits)
        torch.set_num_threads(1)
        examples = [row for row in rows for _ in range(samples)]
        right = score(policy, rollouts, examples, [accuracy_reward]).view(-1, samples).mean(1)
        low, high = ttest_1samp(right.tolist(), 0).confidence_interval(0.95)
        curve.append([time.time() - started, problems, right.mean().item(), low, high])
        return right.mean().item(), low

    def measure(policy) -> dict[str, float]:
        if look(policy, *GLANCE)[0] > TARGET + MARGIN and look(policy, *ALL)[1] > TARGET:
            raise _Reached
        return {}

    try:
        with tempfile.TemporaryDirectory() as folder:
            options = {"output_dir": folder, "seed": seed, "measure": measure}
            train(profile.load_policy(), task, [accuracy_reward, format_reward], config, **options)
    except _Reached:
        seconds = curve[-1][0]
    return {"seed": seed, "seconds": seconds, "curve": curve}


def run(output_dir: Path, name: str, changes: dict, seeds: list[int]) -> dict:
    """Run an entry, each seed in a fresh process; put it beside those in `speedrun.json`."""
    from grpo_kit.lab.records import where_it_ran

    config = replace(PROFILES["tiny"].config, **SETTING | changes)
    path = make_output_dir(output_dir) / "speedrun.json"
    result = json.loads(path.read_text()) if path.exists() else {"entries": {}}
    runs = []
    for seed in seeds:
        print(f"{name}, seed {seed} ...", flush=True)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            runs.append(pool.submit(run_entry, config, seed, time.time()).result())
    seconds = median(one["seconds"] or NEVER for one in runs)
    entry = {"changes": dict(changes), "runs": runs, **where_it_ran()}
    result["entries"][name] = entry | {"seconds": seconds if seconds < NEVER else None}
    write_atomic(path, json.dumps(result, indent=1))
    return result


def report(result: dict) -> str:
    """The entries as a Markdown table, the fastest first."""
    from grpo_kit.lab.summary import markdown_table, number

    entries = sorted(result["entries"].items(), key=lambda item: item[1]["seconds"] or NEVER)
    rows = [["entry", "seconds (median)", "by seed", "changes"]]
    for name, entry in entries:
        each = " / ".join(number(one["seconds"]) for one in entry["runs"])
        changes = ", ".join(f"`{key}={value}`" for key, value in entry["changes"].items())
        rows.append([name, number(entry["seconds"]), each, changes or "–"])
    machines = sorted({entry["machine"]["processor"] for _, entry in entries})
    return f"{markdown_table(*rows)}\nOn {' and '.join(machines)}.\n"
