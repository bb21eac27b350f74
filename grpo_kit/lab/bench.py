"""Benchmarks as a command, never as tests: the kit's step beside TRL's, and the loss step's memory.

`grpo-kit bench` makes a kit step after every TRL step, in one process, with the same weights,
prompts and update, and reports medians and their ratio: on a shared machine ratios say more than
seconds. A peak of memory cannot be reset, so each is measured in a process of its own.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import TrainerCallback

from grpo_kit import training
from grpo_kit.config import GRPOConfig
from grpo_kit.flow import play
from grpo_kit.generation import token_logps
from grpo_kit.lab.records import where_it_ran
from grpo_kit.models import Policy, load_policy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import DiversityReward, LocalJudge, QualityJudgeReward
from grpo_kit.tasks.tool_questions import tool_questions
from grpo_kit.tasks.word_problems import word_problems

VOCABULARY, HIDDEN = 151_936, 64
TRAINERS = ("trl", "kit")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(output_dir: Path, policy_dir: Path, *, steps: int = 10, quick: bool = False) -> dict:
    """Run all benchmarks, write `bench.json`, `bench.md` and `bench.png`, return the numbers.

    `steps` of each trainer are measured, after one that is not; `quick` takes small batches.
    """
    output_dir = make_output_dir(output_dir)
    config = step_config(steps, *((4, 16, 16) if quick else (8, 128, 64)))
    result = {
        "machine": machine(),
        "step": compare_steps(policy_dir, output_dir, config),
        "reward_seconds": time_rewards(policy_dir, config),
        "episodes": time_episodes(policy_dir, steps, *((16, 2) if quick else (64, 4))),
        "loss_memory": compare_loss_memory(tokens=128 if quick else 1024),
    }
    write(output_dir / "bench", result, report(result), figure(result))
    return result


def write(path: Path, result: dict, text: str, drawing: Figure) -> None:
    """Write the numbers, their report and their figure beside each other."""
    write_atomic(path.with_suffix(".json"), json.dumps(result, indent=1))
    write_atomic(path.with_suffix(".md"), text)
    drawing.savefig(path.with_suffix(".png"), dpi=120)


def machine() -> dict[str, Any]:
    """Processor, accelerator and versions that the numbers were measured with."""
    where = where_it_ran(DEVICE)
    return where["machine"] | where["versions"]


def now() -> float:
    """Seconds of a clock, once the accelerator has finished its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def medians(columns: dict[str, Any]) -> dict[str, float]:
    """The median of each column, without its first value: the warm-up."""
    return {name: float(np.median(values[1:])) for name, values in columns.items()}


def _peak_of(function: Callable[..., float], *arguments: object) -> float:
    """MiB that a function of this module returns in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _peak_mib() -> float:
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


def step_config(steps: int, group: int, rows: int, length: int) -> GRPOConfig:
    """For `steps` measured steps and one warm-up, of `rows` completions in groups of `group`."""
    return GRPOConfig(
        max_steps=steps + 1, learning_rate=1e-4, lr_scheduler_type="constant",
        num_generations=group, generation_batch_size=rows, max_completion_length=length,
        eval_on_start=False, eval_prompts=0,
    )  # fmt: skip


def kit_steps(policy: Policy, config: GRPOConfig) -> Iterator[tuple[float, float, training.Batch]]:
    """Train by the kit; yields each step's seconds until it is scored, those in all, its batch."""
    prompts = training.PromptBatches(policy, word_problems(), [even_share], config, seed=0)
    learner = training.Learner(policy, config)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.max_steps):
        started = now()
        (batch,) = prompts(generator, None, {})
        scored = now()
        learner.update(batch)
        yield scored - started, now() - started, batch


def trl_steps(
    policy: Policy, config: GRPOConfig, output_dir: Path, after_step: Callable[[], Any]
) -> list[tuple[float, float]]:
    """Train by TRL; returns each step's seconds until it is scored, and those in all."""
    from grpo_kit import trl_bridge

    trainer = trl_bridge.grpo_trainer(
        policy, word_problems(), [even_share], config,
        output_dir=str(output_dir / "trl"), seed=0, save_strategy="no",
    )  # fmt: skip
    generate, scored, seconds = trainer._generate_and_score_completions, [], []

    def timed_generate(inputs):
        started = now()
        output = generate(inputs)
        scored.append(now() - started)
        return output

    class Timer(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = now()

        def on_step_end(self, args, state, control, **kwargs):
            seconds.append((scored[-1], now() - self.started))
            after_step()

    trainer._generate_and_score_completions = timed_generate  # private, but nothing else times it
    trainer.add_callback(Timer())
    trainer.train()
    return seconds


def compare_steps(policy_dir: Path, output_dir: Path, config: GRPOConfig) -> dict:
    """Median seconds of both trainers, in turn, and the MiB that a process with each one takes."""
    policy, other = (load_policy(policy_dir, device=DEVICE) for _ in TRAINERS)
    steps, kit, lengths = kit_steps(policy, config), [], []

    def kit_step() -> None:
        *seconds, batch = next(steps)
        kit.append(seconds)
        lengths.append(batch.rollouts.lengths.float().mean().item())

    median = {}
    for name, pairs in (("trl", trl_steps(other, config, output_dir, kit_step)), ("kit", kit)):
        scored, step = np.array(pairs).T
        median[name] = medians({"generation": scored, "step": step, "update": step - scored})
    prompt_ids = policy.encode(word_problems().train["prompt"])
    few = (policy_dir, output_dir, replace(config, max_steps=3))
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "mean_length": float(np.mean(lengths[1:])),
        "prompt_length": float(np.mean([len(ids) for ids in prompt_ids])),
        "steps": config.max_steps - 1,
        "threads": torch.get_num_threads(),
        "median_seconds": median,
        "trl_over_kit": {part: median["trl"][part] / median["kit"][part] for part in median["kit"]},
        "peak_mib": {name: _peak_of(step_peak, name, *few) for name in TRAINERS},
    }


def step_peak(trainer: str, policy_dir: Path, output_dir: Path, config: GRPOConfig) -> float:
    """MiB that this process has held at most, imports included, after the steps of a trainer."""
    policy = load_policy(policy_dir, device=DEVICE)
    if trainer == "trl":
        trl_steps(policy, config, output_dir, after_step=lambda: None)
    else:
        list(kit_steps(policy, config))
    return _peak_mib()


def time_rewards(policy_dir: Path, config: GRPOConfig) -> dict[str, float]:
    """Median seconds a batch of the diversity reward and of a judge, and of a step without them."""
    policy = load_policy(policy_dir, device=DEVICE)
    rewards = {
        "diversity": DiversityReward(config.num_generations),
        "judge": QualityJudgeReward(LocalJudge(policy)),
    }
    seconds: dict[str, list[float]] = {**{name: [] for name in rewards}, "step": []}
    steps = kit_steps(policy, config)
    for _, step, batch in tqdm(steps, "rewards", config.max_steps, file=sys.stdout):
        seconds["step"].append(step)
        for name, reward in rewards.items():
            started = now()
            training.score(policy, batch.rollouts, batch.examples, [reward])
            seconds[name].append(now() - started)
    return medians(seconds)


def time_episodes(policy_dir: Path, steps: int, batch: int, singles: int) -> dict:
    """Seconds an episode of tool questions, played in a batch and one at a time, in turn."""
    policy, group = load_policy(policy_dir), 8
    rows = list(tool_questions(n_train=batch * (steps + 1), n_test=1).train)

    def seconds(rows: list[dict], group: int, seed: int) -> float:
        system = PROFILES["tiny"].load_agents(policy)  # anew: it remembers nothing of other plays
        started = now()
        play(system, rows, group, generator=torch.Generator().manual_seed(seed))
        return (now() - started) / (len(rows) * group)

    batched, single = [], []
    for step in tqdm(range(steps + 1), "episodes", file=sys.stdout):
        own = rows[step * batch : (step + 1) * batch]
        batched.append(seconds(own[: batch // group], group, step))
        single.append(np.mean([seconds([row], 1, step) for row in own[:singles]]))
    return {
        "batch": batch,
        "median_seconds": medians({"batched": batched, "single": single}),
        **medians({"single_over_batched": np.divide(single, batched)}),
    }


def compare_loss_memory(tokens: int) -> dict:
    """Peak MiB of forward and backward through a head of Qwen's size, plain and chunked."""
    peak = {kind: _peak_of(loss_peak, kind, tokens) for kind in ("plain", "chunked")}
    result = {"vocabulary": VOCABULARY, "tokens": tokens, "peak_mib": peak}
    return result | {"chunked_over_plain": peak["chunked"] / peak["plain"]}


def loss_peak(kind: str, tokens: int) -> float:
    """MiB of one kind of loss step, in this process, above what it held before."""
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=DEVICE)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True, device=DEVICE)
    targets = torch.randint(VOCABULARY, (tokens,), device=DEVICE)
    head.weight.grad = torch.zeros_like(head.weight)  # the same for both
    before = _peak_mib()
    if kind == "plain":
        logps = torch.log_softmax(head(hidden).float(), -1).gather(1, targets[:, None])[:, 0]
    else:
        logps, _ = token_logps(head, hidden, targets, 1.0)
    logps.sum().backward()
    return _peak_mib() - before


def report(result: dict) -> str:
    """The numbers as Markdown."""
    step, rewards = result["step"], result["reward_seconds"]
    peaks, play = step["peak_mib"], result["episodes"]["median_seconds"]
    rows = "\n".join(
        f"| {name} | {of['generation']:.3f} | {of['update']:.3f} | {of['step']:.3f} | "
        f"{peaks[name]:.0f} |"
        for name, of in step["median_seconds"].items()
    )
    share = {name: rewards[name] / (rewards["step"] + rewards[name]) for name in rewards}
    milliseconds = {name: 1000 * seconds for name, seconds in play.items()}
    peak_ratio = peaks["trl"] / peaks["kit"]
    return REPORT.format(**result, rows=rows, share=share, ms=milliseconds, peak_ratio=peak_ratio)


REPORT = """\
{step[completions]} completions a step, up to {step[max_completion_length]} tokens, {step[steps]} \
steps of each trainer in turn, {step[threads]} thread(s), {machine[processor]}, accelerator: \
{machine[accelerator]}.

| | generation and rewards (s) | update (s) | step (s) | peak memory (MiB) |
|---|---:|---:|---:|---:|
{rows}
| trl / kit | {step[trl_over_kit][generation]:.2f} | {step[trl_over_kit][update]:.2f} | \
{step[trl_over_kit][step]:.2f} | {peak_ratio:.2f} |

Memory is that of a process with this trainer alone, imports included. A TRL step takes \
{step[trl_over_kit][step]:.2f} times as long as the kit's.

Loss step, {loss_memory[tokens]} tokens, vocabulary {loss_memory[vocabulary]:,}: peak \
{loss_memory[peak_mib][chunked]:.0f} MiB chunked, {loss_memory[peak_mib][plain]:.0f} MiB with a \
plain log-softmax ({loss_memory[chunked_over_plain]:.0%}).

Rewards with a model of their own, on the same batches: diversity {reward_seconds[diversity]:.3f} \
s and judge {reward_seconds[judge]:.3f} s, or {share[diversity]:.0%} and {share[judge]:.0%} of a \
step that has this one.

Episodes of Flow-GRPO: {ms[batched]:.0f} ms each where {episodes[batch]} are played together, \
{ms[single]:.0f} ms one at a time, {episodes[single_over_batched]:.1f} times as long.
"""


def figure(result: dict) -> Figure:
    """Bars: seconds of a step, each process's peak memory, and the loss step's memory."""
    seconds = pd.DataFrame(result["step"]["median_seconds"]).T[["generation", "update"]]
    drawing = Figure(figsize=(11, 2.8), layout="constrained")
    panels = drawing.subplots(1, 3, width_ratios=(2, 1, 1))
    seconds.plot.barh(stacked=True, ax=panels[0], title="seconds of a step (median)")
    for panel, name, title in zip(
        panels[1:], ("step", "loss_memory"), ("peak memory (MiB)", "loss step (MiB)"), strict=True
    ):
        pd.Series(result[name]["peak_mib"]).plot.barh(ax=panel, color="tab:gray", title=title)
    return drawing
