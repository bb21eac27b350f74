"""How fast can the tiny base be taught? `grpo-kit speedrun`.

The clock runs from the start of a process, imports and evaluations included, to the first
evaluation whose lower 95 % bound of pass@1 is above `TARGET`: on all test problems, with eight
samples each. An entry is a config with its reason; three seeds, the median counts.
"""

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

# What draws and reports is imported where it is used: imports count.
from grpo_kit.paths import write_atomic, writing

TARGET, SAMPLES = 0.90, 8
# Test problems and samples of a first look; a policy that is well above the target sees all.
GLANCE, MARGIN = (128, 4), 0.01
SETTING = {"max_steps": 200, "eval_steps": 5, "eval_prompts": 0, "eval_on_start": False,
           "save_steps": 0}  # fmt: skip
SCHEDULE = {"bf16": "auto", "learning_rate": 6e-4, "lr_scheduler_type": "linear",
            "warmup_steps": 0, "max_steps": 45, "max_completion_length": 48}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What an entry changes in the config of profile `tiny`, and why.

    `engine`: "kit" or "trl".
    """

    reason: str
    changes: Mapping[str, object] = field(default_factory=dict)
    engine: str = "kit"


ENTRIES = {
    "kit": Entry("the profile as it is"),
    "TRL": Entry("the same config by TRL's trainer", engine="trl"),
    "bfloat16": Entry("products in bfloat16 where this CPU is faster in it", {"bf16": "auto"}),
    "schedule": Entry(
        "large steps at first, small ones at the end, so half as many; no answer needs 64 tokens",
        SCHEDULE,
    ),
}  # fmt: skip


def own_entry(changes: Sequence[str], engine: str, reason: str) -> Entry:
    """An entry from changes "name=value". Raises ValueError for what a config does not take."""
    import yaml

    from grpo_kit.profiles import PROFILES

    given = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--change {change!r} is not name=value, as in learning_rate=3e-4")
        given[name] = yaml.safe_load(value)
    config = replace(PROFILES["tiny"].config, **SETTING | given)
    return Entry(reason, {name: getattr(config, name) for name in given}, engine)


class _Reached(Exception):
    """The target is reached; ends a run."""


def run_entry(entry: Entry, seed: int, started: float) -> dict:
    """One run in this process, which began at `started` (seconds since 1970): its time and curve.

    A point of the curve: seconds, test problems, pass@1, lower and upper bound.
    """
    import torch
    from scipy.stats import ttest_1samp

    from grpo_kit.generation import reply
    from grpo_kit.profiles import PROFILES
    from grpo_kit.rewards import accuracy_reward, format_reward
    from grpo_kit.training import score

    profile = PROFILES["tiny"]
    torch.set_num_threads(1)
    if entry.engine == "trl":
        from grpo_kit.trl_bridge import train
    else:
        from grpo_kit.training import train
    config = replace(profile.config, **(SETTING | dict(entry.changes)))
    task, curve = profile.load_task(), []

    def look(policy, problems: int, samples: int) -> tuple[float, float]:
        """pass@1 on the first test problems, and its lower bound (Student's t over problems)."""
        rows = task.test.select(range(problems))
        torch.set_num_threads(2)  # a long batch gains from the second core, a step hardly
        rollouts = reply(
            policy, rows["prompt"], samples, generator=torch.Generator().manual_seed(len(curve)),
            max_new_tokens=config.max_completion_length, batch_size=1024,
        )  # fmt: skip
        torch.set_num_threads(1)
        examples = [row for row in rows for _ in range(samples)]
        right = score(policy, rollouts, examples, [accuracy_reward]).view(-1, samples).mean(1)
        low, high = ttest_1samp(right.tolist(), 0).confidence_interval(0.95)
        curve.append([time.time() - started, problems, right.mean().item(), low, high])
        return right.mean().item(), low

    def measure(policy) -> dict[str, float]:
        promising = look(policy, *GLANCE)[0] > TARGET + MARGIN
        if promising and look(policy, len(task.test), SAMPLES)[1] > TARGET:
            raise _Reached
        return {}

    seconds, rewards = None, [accuracy_reward, format_reward]
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = {"output_dir": folder, "seed": seed, "measure": measure}
            train(profile.load_policy(), task, rewards, config, **options)
    except _Reached:
        seconds = curve[-1][0]
    return {"seed": seed, "seconds": seconds, "curve": curve}


def run(output_dir: Path, entries: Mapping[str, Entry], seeds: Sequence[int]) -> dict:
    """Run entries, each seed in a fresh process, seed by seed in turn; write `speedrun.json`.

    It is written after each run, so that none is lost; entries that are in the file already and not
    given stay. Also draws `speedrun.png`. Raises RuntimeError where a run fails.
    """
    with writing(output_dir, "speedrun") as folder:
        return _run(folder / "speedrun.json", entries, seeds)


def _run(path: Path, entries: Mapping[str, Entry], seeds: Sequence[int]) -> dict:
    from grpo_kit.lab.records import where_it_ran

    result = json.loads(path.read_text()) if path.exists() else {"entries": {}}
    result |= {"target": TARGET, "samples": SAMPLES}
    fresh: dict[str, dict] = {}  # an entry in the file is replaced when its first run has ended
    for seed in seeds:
        for name, entry in entries.items():
            print(f"{name}, seed {seed} ...", flush=True)
            try:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    outcome = pool.submit(run_entry, entry, seed, time.time()).result()
            except Exception as error:
                problem = f"entry {name!r}, seed {seed}, failed ({error})"
                raise RuntimeError(f"{problem}; the runs before are in {path}.") from error
            of = fresh.setdefault(name, asdict(entry) | where_it_ran() | {"runs": []})
            result["entries"][name] = of
            of["runs"].append(outcome)
            seconds = median(one["seconds"] or math.inf for one in of["runs"])
            of["seconds"] = seconds if math.isfinite(seconds) else None
            print(f"  {outcome['seconds']} s", flush=True)
            write_atomic(path, json.dumps(result, indent=1))
    figure(result).savefig(path.with_suffix(".png"), dpi=120)
    return result


def report(result: dict) -> str:
    """The entries as a Markdown table, the fastest first."""
    from grpo_kit.lab.summary import markdown_table, number

    entries, rows = _fastest_first(result), []
    for name, entry in entries:
        each = " / ".join(number(one["seconds"]) for one in entry["runs"])
        changes = ", ".join(f"`{k}={v}`" for k, v in entry["changes"].items())
        rows.append([name, number(entry["seconds"]), each, entry["reason"], changes or "–"])
    table = markdown_table(["entry", "seconds (median)", "by seed", "why", "changes"], *rows)
    machines = sorted({of["machine"]["processor"] for _, of in entries})
    return f"{table}\nOn {' and '.join(machines)}.\n"


def _fastest_first(result: dict) -> list[tuple[str, dict]]:
    return sorted(result["entries"].items(), key=lambda item: item[1]["seconds"] or math.inf)


def figure(result: dict):
    """pass@1 over seconds, a line a seed, an entry a colour: a matplotlib figure."""
    from matplotlib.figure import Figure

    from grpo_kit.course.plots import COLOUR_BLIND_SAFE
    from grpo_kit.lab.summary import number

    drawing = Figure(figsize=(8, 4), layout="constrained")
    axes = drawing.subplots()
    named = _fastest_first(result)
    for colour, (name, entry) in zip(COLOUR_BLIND_SAFE, named, strict=False):
        label = f"{name}: {number(entry['seconds'])} s"
        for one in entry["runs"]:
            seconds, problems, means, *_ = zip(*one["curve"], strict=True)
            axes.plot(seconds, means, "o-", color=colour, alpha=0.7, markersize=3, label=label)
            label = None
    axes.legend(loc="lower right", title="median")
    axes.axhline(result["target"], color="grey", linestyle=":")
    axes.set(xlabel="seconds since the process began", ylabel="held-out pass@1", ylim=(0, 1))
    return drawing
