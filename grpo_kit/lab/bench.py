"""Benchmarks as a command, never as tests: the kit's step beside TRL's, and how both grow.

`grpo-kit bench` makes a kit step after every TRL step, in one process, with the same weights,
prompts and update: on a shared machine their ratio says more than seconds. A peak of memory cannot
be reset, so each is measured in a process of its own. `scaling` repeats this with larger models,
`step_profile` tells where time goes.
"""

import json
import re
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader
from tqdm import tqdm

# A process whose memory is measured imports what a run needs, the rest is imported where used.
from grpo_kit import training
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import token_logps
from grpo_kit.lab.records import where_it_ran
from grpo_kit.models import Policy, faster_in_bfloat16, load_policy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.tasks import Task
from grpo_kit.tasks.word_problems import word_problems

TRAINERS = ("trl", "kit")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, HIDDEN, LOSS_TOKENS = 151_936, 64, 1024  # of the loss step
BASE = "0.8 M"
SIZES = {  # as planner.FIELDS: hidden size, layers, heads, heads of keys and values, MLP
    "0.3 M": (64, 4, 4, 2, 256),
    BASE: (128, 4, 4, 2, 384),
    "3 M": (256, 4, 4, 2, 768),
    "10 M": (384, 6, 6, 2, 1152),
    "30 M": (512, 10, 8, 2, 1536),
    "135 M": (576, 30, 9, 3, 1536, 49_152),  # SmolLM2's
    "1.5 B": (1536, 28, 12, 2, 8960, 151_936),  # Qwen2.5's, on a GPU
}
SMOL, LARGE = "135 M", "1.5 B"
SMOL_WORDS = 63  # of a prompt of 80 tokens


def run(output_dir: Path, policy_dir: Path, *, steps: int = 10) -> dict:
    """Measure `steps` of each trainer and their parts; write `bench.json`, return its numbers."""
    output_dir, config = make_output_dir(output_dir), step_config(steps, 8, 128, 64)
    loss = {kind: peak_of(loss_peak, kind) for kind in ("plain", "chunked")}
    result = {
        "machine": machine(),
        "step": compare_steps(policy_dir, config),
        "float32": compare_steps(policy_dir, replace(config, bf16=False)),
        "reward_seconds": time_rewards(policy_dir, config),
        "episodes": time_episodes(policy_dir, steps),
        "loss_memory": {
            "vocabulary": VOCABULARY,
            "tokens": LOSS_TOKENS,
            "peak_mib": loss,
            "chunked_over_plain": loss["chunked"] / loss["plain"],
        },
    }
    write_atomic(output_dir / "bench.json", json.dumps(result, indent=1))
    return result


def machine() -> dict[str, Any]:
    where = where_it_ran(DEVICE)
    return where["machine"] | where["versions"]


def arithmetic() -> str:
    """The type of the products of a step: 16 bits on a GPU, and on a CPU that is faster in them."""
    return "bfloat16" if DEVICE == "cuda" or faster_in_bfloat16() else "float32"


def now() -> float:
    """Seconds of a clock, once the accelerator has finished its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def medians(columns: dict[str, Any]) -> dict[str, float]:
    """The median of each column, without its first value: the warm-up."""
    return {name: float(np.median(values[1:])) for name, values in columns.items()}


def peak_of(function: Callable[..., float], *arguments: object) -> float:
    """MiB that a function of this module returns in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def peak_mib() -> float:
    """The most memory so far: of the accelerator where there is one, else of this process."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from what the parent process held
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def even_share(prompts, completions, completion_ids, **columns) -> list[float]:
    """A reward with spread in every group: without it the kit skips the update that TRL makes."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


# --- the step -------------------------------------------------------------------------------------


def step_config(steps: int, group: int, rows: int, length: int) -> GRPOConfig:
    """For `steps` measured steps and one warm-up, of `rows` completions in groups of `group`."""
    return GRPOConfig(
        max_steps=steps + 1, learning_rate=1e-4, lr_scheduler_type="constant",
        num_generations=group, generation_batch_size=rows, max_completion_length=length,
        eval_on_start=False, eval_prompts=0, bf16="auto",
    )  # fmt: skip


def prompts_of(size: str) -> Task:
    """Word problems; for `SMOL` each is told more than once, until it has about 80 tokens."""
    task = word_problems()
    if size != SMOL:
        return task

    def longer(row: dict) -> dict:
        words = row["prompt"][0]["content"].split()
        return {"prompt": [{"role": "user", "content": " ".join((9 * words)[:SMOL_WORDS])}]}

    return replace(task, train=task.train.map(longer))


def kit_steps(policy: Policy, config: GRPOConfig, size: str = BASE) -> Iterator[tuple]:
    """Train by the kit; yields each step's seconds until it is scored, those in all, its batch."""
    prompts = training.PromptBatches(policy, prompts_of(size), [even_share], config, seed=0)
    learner = training.Learner(policy, config)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.max_steps):
        started = now()
        (batch,) = prompts(generator, None, {})
        scored = now()
        learner.update(batch)
        yield scored - started, now() - started, batch


def trl_steps(
    policy: Policy, config: GRPOConfig, after_step: Callable, size: str = BASE
) -> list[tuple[float, float]]:
    """Train by TRL; returns each step's seconds until it is scored, and those in all."""
    from transformers import TrainerCallback

    from grpo_kit import trl_bridge

    generated, seconds = [], []

    class Timer(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = now()

        def on_step_end(self, args, state, control, **kwargs):
            seconds.append((generated[-1], now() - self.started))
            after_step()

    with tempfile.TemporaryDirectory() as folder:
        options = {"output_dir": folder, "seed": 0, "save_strategy": "no"}
        task = prompts_of(size)
        trainer = trl_bridge.grpo_trainer(policy, task, [even_share], config, **options)
        generate = trainer._generate_and_score_completions  # private, but nothing else times it

        def timed(inputs):
            started = now()
            output = generate(inputs)
            generated.append(now() - started)
            return output

        trainer._generate_and_score_completions = timed
        trainer.add_callback(Timer())
        trainer.train()
    return seconds


def compare_steps(policy_dir: Path, config: GRPOConfig, size: str = BASE) -> dict:
    """Median seconds of both trainers, in turn, and the MiB that a process with each one takes."""
    policy, other = (load_policy(policy_dir, device=DEVICE) for _ in TRAINERS)
    steps, kit, lengths = kit_steps(policy, config, size), [], []

    def kit_step() -> None:
        *seconds, batch = next(steps)
        kit.append(seconds)
        lengths.append(batch.rollouts.lengths.float().mean().item())

    median = {}
    trl = trl_steps(other, config, kit_step, size)
    for name, pairs in (("trl", trl), ("kit", kit)):
        scored, step = np.array(pairs).T
        median[name] = medians({"generation": scored, "step": step, "update": step - scored})
    prompt_ids = policy.encode(prompts_of(size).train["prompt"])
    few = (policy_dir, replace(config, max_steps=3), size)
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "mean_length": float(np.mean(lengths[1:])),
        "prompt_length": float(np.mean([len(ids) for ids in prompt_ids])),
        "steps": config.max_steps - 1,
        "threads": torch.get_num_threads(),
        "arithmetic": arithmetic() if config.bf16 else "float32",
        "median_seconds": median,
        "trl_over_kit": {part: median["trl"][part] / median["kit"][part] for part in median["kit"]},
        "peak_mib": {name: peak_of(step_peak, name, *few) for name in TRAINERS},
    }


def step_peak(trainer: str, policy_dir: Path, config: GRPOConfig, size: str) -> float:
    """The most MiB of the accelerator, or else of this process, after the steps of a trainer."""
    policy = load_policy(policy_dir, device=DEVICE)
    if trainer == "trl":
        trl_steps(policy, config, after_step=lambda: None, size=size)
    else:
        for _ in kit_steps(policy, config, size):  # a list would keep every batch
            pass
    return peak_mib()


def time_rewards(policy_dir: Path, config: GRPOConfig) -> dict[str, float]:
    """Median seconds a batch of the diversity reward and of a judge, and of a step without them."""
    from grpo_kit.rewards import DiversityReward, LocalJudge, QualityJudgeReward

    policy, seconds = load_policy(policy_dir, device=DEVICE), defaultdict(list)
    rewards = {
        "diversity": DiversityReward(config.num_generations),
        "judge": QualityJudgeReward(LocalJudge(policy)),
    }
    steps = kit_steps(policy, config)
    for _, step, batch in tqdm(steps, "rewards", config.max_steps, file=sys.stdout):
        seconds["step"].append(step)
        for name, reward in rewards.items():
            started = now()
            training.score(policy, batch.rollouts, batch.examples, [reward])
            seconds[name].append(now() - started)
    return medians(seconds)


def time_episodes(policy_dir: Path, steps: int) -> dict:
    """Seconds an episode of tool questions, played in a batch and one at a time, in turn."""
    from grpo_kit.flow import play
    from grpo_kit.profiles import PROFILES
    from grpo_kit.tasks.tool_questions import tool_questions

    policy, batch, group = load_policy(policy_dir), 64, 8
    policy.compute_in("auto")
    rows = list(tool_questions().train.select(range(batch * (steps + 1))))

    def seconds(rows: list[dict], group: int, seed: int) -> float:
        system = PROFILES["tiny"].load_agents(policy)  # anew: it remembers nothing of other plays
        started = now()
        play(system, rows, group, generator=torch.Generator().manual_seed(seed))
        return (now() - started) / (len(rows) * group)

    batched, single = [], []
    for step in tqdm(range(steps + 1), "episodes", file=sys.stdout):
        own = rows[step * batch : (step + 1) * batch]
        batched.append(seconds(own[: batch // group], group, step))
        single.append(np.mean([seconds([row], 1, step) for row in own[:4]]))
    return {
        "batch": batch,
        "median_seconds": medians({"batched": batched, "single": single}),
        **medians({"single_over_batched": np.divide(single, batched)}),
    }


def loss_peak(kind: str) -> float:
    """MiB that forward and backward through a head of Qwen's size add in this process."""
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=DEVICE)
    hidden = torch.randn(LOSS_TOKENS, HIDDEN, requires_grad=True, device=DEVICE)
    targets = torch.randint(VOCABULARY, (LOSS_TOKENS,), device=DEVICE)
    head.weight.grad = torch.zeros_like(head.weight)  # the same for both
    before = peak_mib()
    if kind == "plain":
        logps = torch.log_softmax(head(hidden).float(), -1).gather(1, targets[:, None])[:, 0]
    else:
        logps, _ = token_logps(head, hidden, targets, 1.0)
    logps.sum().backward()
    return peak_mib() - before


def report(result: dict) -> str:
    """The numbers of `run` as Markdown."""
    loader = PackageLoader("grpo_kit.lab")
    templates = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
    return templates.get_template("bench.md.j2").render(result)


# --- what it should reach -------------------------------------------------------------------------


def goals(folder: Path) -> str:
    """A Markdown table: which goals hold in the `bench.json` and `scaling.json` of a folder."""
    from grpo_kit.lab.summary import markdown_table

    def ratio(of: dict) -> float:
        return of["trl_over_kit"]["step"]

    def memory(of: dict) -> float:
        return of["peak_mib"]["kit"] / of["peak_mib"]["trl"]

    checks: list[tuple[str, float, str, float]] = []  # what, measured, "≥" or "≤", goal
    if (path := folder / "bench.json").exists():
        bench = json.loads(path.read_text())
        step, exact, rewards = bench["step"], bench["float32"], bench["reward_seconds"]
        share = rewards["diversity"] / (rewards["step"] + rewards["diversity"])
        single = bench["episodes"]["single_over_batched"]
        checks += [
            ("a step of the tiny base, TRL / kit", ratio(step), "≥", 4),
            ("the same in float32", ratio(exact), "≥", 4),
            ("its memory, kit / TRL", memory(step), "≤", 0.6),
            ("the same in float32", memory(exact), "≤", 0.6),
            ("share of the embedding in a step", share, "≤", 0.2),
            ("one episode at a time / 64 together", single, "≥", 20),
        ]
    if (path := folder / "scaling.json").exists():
        scaling = json.loads(path.read_text())
        on_gpu = scaling["machine"]["accelerator"] != "none"
        grid = [row for row in scaling["rows"] if row["size"] not in (SMOL, LARGE)]
        checks += [
            ("every point of the grid, TRL / kit", min(map(ratio, grid)), "≥", 2),
            ("its memory, kit / TRL", max(map(memory, grid)), "≤", 0.6),
        ]
        for row in scaling["rows"]:
            size, seconds = row["size"], row["median_seconds"]["kit"]
            reached = {part: limit / seconds[part] for part, limit in row["limit"].items()}
            if size in ("30 M", SMOL):
                checks.append((f"share of the limit at {size}", reached["step"], "≥", 0.6))
            if size == SMOL:
                gib = row["peak_mib"]["kit"] / 1024
                checks += [("135 M, TRL / kit", ratio(row), "≥", 6), ("its GiB", gib, "≤", 5)]
            if on_gpu and size in (SMOL, LARGE):
                for part, goal in (("generation", 0.5), ("update", 0.45)):
                    what = f"{size}, {part}, share of the limit"
                    checks.append((what, reached[part], "≥", goal))
                checks.append((f"{size}, TRL / kit", ratio(row), "≥", 1.5))
    rows = []
    for what, value, sign, goal in checks:
        holds = value >= goal if sign == "≥" else value <= goal
        rows.append([what, f"{value:.2f}", f"{sign} {goal}", "yes" if holds else "no"])
    return markdown_table(["", "measured", "goal", "holds"], *rows)
