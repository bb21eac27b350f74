"""Benchmarks as commands, never as tests: the kit's step beside TRL's, and the loss step's memory.

`grpo-kit bench` runs both trainers in one process, a kit step after every TRL step, with the same
weights, prompts a step, group, token limit, sampling and update, and reports medians and their
ratio: on a shared machine seconds say little, two things measured in turn say more. Memory is
measured in a process of its own for each, since a peak cannot be reset: that of a few steps of each
trainer, and that of the loss step alone with a vocabulary of Qwen's size. Then what the rewards
with models of their own take, each on the batches of a few more kit steps, and what batching saves
in episodes of several turns.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tqdm import tqdm

from grpo_kit.config import GRPOConfig
from grpo_kit.lab.records import processor
from grpo_kit.paths import make_output_dir, write_atomic

VOCABULARY, HIDDEN = 151_936, 64
TRAINERS = ("trl", "kit")


def run(
    output_dir: str | Path, policy_dir: str | Path, *, steps: int = 10, quick: bool = False
) -> dict:
    """Run all benchmarks, write `bench.json`, `bench.md` and `bench.png`, return the numbers.

    Args:
        policy_dir: folder of a saved model; both trainers start from it.
        steps: measured steps of each trainer, after one that is not counted.
        quick: 4 prompts x 4 completions and 128 loss tokens, for a first look.

    Raises ValueError for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; measure at least 1.")
    output_dir = make_output_dir(output_dir)
    step = compare_steps(policy_dir, output_dir, bench_config(steps + 1, quick))
    step["peak_mib"] = step_peaks(policy_dir, output_dir, bench_config(3, quick))
    result = {
        "machine": machine(),
        "step": step,
        "reward_seconds": time_rewards(policy_dir, steps=steps, quick=quick),
        "episodes": time_episodes(policy_dir, steps=steps, quick=quick),
        "loss_memory": compare_loss_memory(tokens=128 if quick else 1024),
    }
    write_atomic(output_dir / "bench.json", json.dumps(result, indent=1))
    write_atomic(output_dir / "bench.md", report(result))
    figure(result).savefig(output_dir / "bench.png", dpi=120)
    return result


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import torch
    import trl

    return {
        "processor": processor(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trl": trl.__version__,
    }


def _in_a_process(function: str, *arguments: str) -> float:
    """What a function of this module returns, called with strings in a fresh process."""
    code = f"import sys, grpo_kit.lab.bench as b; print(b.{function}(*sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def _peak_mib() -> float:
    """The most memory so far: of the accelerator where there is one, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from what the parent process held
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def now() -> float:
    """Seconds of a clock, when the accelerator has done what it was asked to."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# --- a step ---------------------------------------------------------------------------------------


def even_share(prompts, completions, completion_ids, **columns) -> list[float]:
    """The share of even token ids: a reward with spread in every group.

    Groups without spread are an update that the kit skips and TRL makes; with a base that is never
    right the comparison would be of nothing with something.
    """
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def bench_config(steps: int, quick: bool) -> GRPOConfig:
    """The config of the comparison; `steps` counts the one that is not measured too."""
    return GRPOConfig(
        max_steps=steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        num_generations=4 if quick else 8,
        generation_batch_size=16 if quick else 128,
        max_completion_length=16 if quick else 64,
    )


class KitSteps:
    """The kit's trainer, a step a call; `seconds` are (generation and rewards, whole step).

    `lengths`: the mean length of each step's completions, in tokens.
    """

    rewards: tuple = (even_share,)

    def __init__(self, policy_dir: str | Path, config) -> None:
        import torch

        from grpo_kit import training
        from grpo_kit.models import load_policy
        from grpo_kit.tasks.word_problems import word_problems

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.policy = load_policy(policy_dir, device=device)
        self.task, self.config = word_problems(), config
        self.prompt_ids = self.policy.encode(self.task.train["prompt"])
        self.optimizer, self.schedule = training.make_optimizer(self.policy, config)
        self.scaler = training.make_scaler(self.policy)
        self.generator = torch.Generator().manual_seed(0)
        self.cursor = training.Cursor(len(self.prompt_ids), 0)
        self.seconds: list[tuple[float, float]] = []
        self.lengths: list[float] = []

    def step(self) -> None:
        from grpo_kit import training

        started = now()
        batch = training.collect(
            self.policy,
            self.task,
            self.prompt_ids,
            self.rewards,
            self.config,
            self.cursor,
            self.generator,
            None,
        )
        generated = now()
        training.update(
            self.policy, None, self.optimizer, self.schedule, batch, self.config, self.scaler
        )
        self.seconds.append((generated - started, now() - started))
        self.lengths.append(batch.rollouts.lengths.float().mean().item())


def trl_steps(policy_dir: str | Path, config, output_dir: Path, after_step=lambda: None):
    """TRL's trainer on the same; returns it and the list that gets its seconds, as `KitSteps`."""
    import torch
    import trl
    from transformers import TrainerCallback

    from grpo_kit.models import load_policy
    from grpo_kit.tasks.word_problems import word_problems

    cuda = torch.cuda.is_available()
    policy = load_policy(policy_dir, device="cuda" if cuda else "cpu")
    trainer = trl.GRPOTrainer(
        model=policy.model,
        reward_funcs=[even_share],
        args=trl.GRPOConfig(
            output_dir=str(output_dir / "trl"),
            max_steps=config.max_steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler_type,
            num_generations=config.num_generations,
            per_device_train_batch_size=config.generation_batch_size,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            loss_type=config.loss_type,
            beta=config.beta,
            use_cpu=not cuda,
            bf16=cuda and policy.half == torch.bfloat16,
            fp16=cuda and policy.half == torch.float16,
            gradient_checkpointing=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=word_problems().train,
        processing_class=policy.tokenizer,
    )
    seconds: list[tuple[float, float]] = []
    generate = trainer._generate_and_score_completions  # private, but only here it can be timed
    generation = 0.0

    def timed_generate(inputs):
        nonlocal generation
        started = now()
        output = generate(inputs)
        generation = now() - started
        return output

    trainer._generate_and_score_completions = timed_generate

    class Timer(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = now()

        def on_step_end(self, args, state, control, **kwargs):
            seconds.append((generation, now() - self.started))
            after_step()

    trainer.add_callback(Timer())
    return trainer, seconds


def compare_steps(policy_dir: str | Path, output_dir: Path, config: GRPOConfig) -> dict:
    """Median seconds of generation and update of both trainers, measured in turn.

    Of `config.max_steps` steps of each the first is not counted.
    """
    import torch

    kit = KitSteps(policy_dir, config)
    progress = tqdm(total=config.max_steps, desc="bench", file=sys.stdout)

    def kit_step() -> None:
        kit.step()
        progress.update()

    trainer, seconds = trl_steps(policy_dir, config, output_dir, after_step=kit_step)
    trainer.train()
    progress.close()
    median = {
        name: {
            "generation": statistics.median(generation for generation, _ in values[1:]),
            "step": statistics.median(step for _, step in values[1:]),
            "update": statistics.median(step - generation for generation, step in values[1:]),
        }
        for name, values in (("trl", seconds), ("kit", kit.seconds))
    }
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "mean_length": statistics.mean(kit.lengths[1:]),
        "prompt_length": statistics.mean(map(len, kit.prompt_ids)),
        "steps": config.max_steps - 1,
        "threads": torch.get_num_threads(),
        "median_seconds": median,
        "trl_over_kit": {
            part: median["trl"][part] / median["kit"][part]
            for part in ("generation", "update", "step")
        },
    }


def step_peaks(policy_dir: str | Path, output_dir: Path, config: GRPOConfig) -> dict[str, float]:
    """MiB that a process with one trainer has held at most, imports included, for each trainer."""
    told = json.dumps(dataclasses.asdict(config))
    return {
        kind: _in_a_process("step_peak", kind, str(policy_dir), str(output_dir), told)
        for kind in TRAINERS
    }


def step_peak(kind: str, policy_dir: str, output_dir: str, told: str) -> float:
    """`step_peaks` of one trainer, in this process; `told` is the config as JSON."""
    config = GRPOConfig(**json.loads(told))
    if kind == "kit":
        kit = KitSteps(policy_dir, config)
        for _ in range(config.max_steps):
            kit.step()
    else:
        trl_steps(policy_dir, config, Path(output_dir))[0].train()
    return _peak_mib()


def time_rewards(policy_dir: str | Path, *, steps: int, quick: bool) -> dict[str, float]:
    """Median seconds a batch of the diversity reward and of the judge, and of a step without them.

    The judge is a frozen copy of the policy, in this process.
    """
    from anyio.from_thread import start_blocking_portal

    from grpo_kit.rewards import DiversityReward, LocalJudge, QualityJudgeReward

    config = bench_config(steps + 1, quick)
    kit = KitSteps(policy_dir, config)
    judge = QualityJudgeReward(LocalJudge(kit.policy))
    taken: dict[str, list[float]] = {"diversity": [], "judge": []}

    def measured(name: str, function: Callable) -> Callable:
        def reward(**arguments) -> list[float]:
            started = now()
            function(**arguments)
            taken[name].append(now() - started)
            return [0.0] * len(arguments["completions"])

        return reward

    with start_blocking_portal() as portal:
        rewards = {
            "diversity": DiversityReward(config.num_generations),
            "judge": lambda **arguments: portal.call(partial(judge, **arguments)),
        }
        kit.rewards = (even_share, *(measured(*item) for item in rewards.items()))
        for _ in tqdm(range(steps + 1), desc="rewards", file=sys.stdout):
            kit.step()
    whole = [step for _, step in kit.seconds]
    alone = [step - sum(each) for step, *each in zip(whole, *taken.values(), strict=True)]
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    return medians | {"step": statistics.median(alone[1:])}


def time_episodes(policy_dir: str | Path, *, steps: int, quick: bool) -> dict:
    """Seconds an episode of tool questions, played in a batch and one at a time, in turn.

    The frozen roles are a copy of the policy and remember nothing from one play to the next.
    """
    import torch

    from grpo_kit.flow import play
    from grpo_kit.models import load_policy
    from grpo_kit.profiles import PROFILES
    from grpo_kit.tasks.tool_questions import tool_questions

    policy, group = load_policy(policy_dir), 8
    batch, singles = (16, 2) if quick else (64, 4)
    rows = list(tool_questions(n_train=batch * (steps + 1), n_test=1).train)

    def seconds(rows: list[dict], group: int, seed: int) -> float:
        system = PROFILES["tiny"].load_agents(policy)
        started = now()
        play(system, rows, group, generator=torch.Generator().manual_seed(seed))
        return (now() - started) / (len(rows) * group)

    taken: dict[str, list[float]] = {"batched": [], "single": []}
    for step in tqdm(range(steps + 1), desc="episodes", file=sys.stdout):
        own = rows[step * batch : (step + 1) * batch]
        taken["batched"].append(seconds(own[: batch // group], group, step))
        alone = [seconds([row], 1, step) for row in own[:singles]]
        taken["single"].append(statistics.fmean(alone))
    medians = {name: statistics.median(values[1:]) for name, values in taken.items()}
    ratios = [s / b for s, b in zip(*list(taken.values())[::-1], strict=True)][1:]
    return {
        "batch": batch,
        "median_seconds": medians,
        "single_over_batched": statistics.median(ratios),
    }


# --- memory of the loss step ----------------------------------------------------------------------


def compare_loss_memory(tokens: int) -> dict:
    """Peak memory of forward and backward through the head, plain and chunked, in MiB.

    Each in a fresh process, above what the process had before, since a peak cannot be reset.
    """
    peak = {kind: _in_a_process("loss_peak", kind, str(tokens)) for kind in ("plain", "chunked")}
    return {
        "vocabulary": VOCABULARY,
        "tokens": tokens,
        "peak_mib": peak,
        "chunked_over_plain": peak["chunked"] / peak["plain"],
    }


def loss_peak(kind: str, tokens: str) -> float:
    """MiB that one loss step adds to this process's peak: `kind` is "plain" or "chunked"."""
    import torch

    from grpo_kit.generation import token_logps

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device=device)
    hidden = torch.randn(int(tokens), HIDDEN, requires_grad=True, device=device)
    targets = torch.randint(VOCABULARY, (int(tokens),), device=device)
    head.weight.grad = torch.zeros_like(head.weight)  # the same for both
    before = _peak_mib()
    if kind == "plain":
        logps = torch.log_softmax(head(hidden).float(), -1).gather(1, targets[:, None])[:, 0]
    else:
        logps, _ = token_logps(head, hidden, targets, 1.0)
    logps.sum().backward()
    return _peak_mib() - before


# --- report ---------------------------------------------------------------------------------------


def report(result: dict) -> str:
    """The numbers as Markdown."""
    step, memory, where = result["step"], result["loss_memory"], result["machine"]
    seconds, episodes = result["reward_seconds"], result["episodes"]
    shares = {n: seconds[n] / (seconds["step"] + seconds[n]) for n in ("diversity", "judge")}
    ratio = step["trl_over_kit"]
    lines = [
        f"{step['completions']} completions a step, up to {step['max_completion_length']} tokens, "
        f"{step['steps']} steps of each trainer in turn, {step['threads']} thread(s), "
        f"{where['processor']}, accelerator: {where['accelerator']}.",
        "",
        "| | generation and rewards (s) | update (s) | step (s) | peak memory (MiB) |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in TRAINERS:
        cells = [f"{step['median_seconds'][name][p]:.3f}" for p in ("generation", "update", "step")]
        lines.append(f"| {name} | {' | '.join(cells)} | {step['peak_mib'][name]:.0f} |")
    lines += [
        f"| trl / kit | {ratio['generation']:.2f} | {ratio['update']:.2f} | {ratio['step']:.2f} | "
        f"{step['peak_mib']['trl'] / step['peak_mib']['kit']:.2f} |",
        "",
        "Memory is that of a process with this trainer alone, imports included. "
        f"A TRL step takes {ratio['step']:.2f} times as long as the kit's.",
        "",
        f"Loss step, {memory['tokens']} tokens, vocabulary {memory['vocabulary']:,}: peak "
        f"{memory['peak_mib']['chunked']:.0f} MiB chunked, {memory['peak_mib']['plain']:.0f} MiB "
        f"with a plain log-softmax ({memory['chunked_over_plain']:.0%}).",
        "",
        "Rewards with a model of their own, on the same batches: "
        + " and ".join(f"{name} {seconds[name]:.3f} s" for name in shares)
        + ", or "
        + " and ".join(f"{share:.0%}" for share in shares.values())
        + " of a step that has this one.",
        "",
        f"Episodes of Flow-GRPO: {episodes['median_seconds']['batched'] * 1000:.0f} ms each where "
        f"{episodes['batch']} are played together, "
        f"{episodes['median_seconds']['single'] * 1000:.0f} ms one at a time, "
        f"{episodes['single_over_batched']:.1f} times as long.",
    ]
    return "\n".join(lines) + "\n"


def figure(result: dict):
    """Seconds of a step, each process's peak memory, and the loss step's memory, as bars."""
    from matplotlib.figure import Figure

    step, memory = result["step"], result["loss_memory"]
    drawn = Figure(figsize=(11, 2.8), layout="constrained")
    times, peaks, loss = drawn.subplots(1, 3, width_ratios=(2, 1, 1))
    left = [0.0, 0.0]
    for part in ("generation", "update"):
        values = [step["median_seconds"][name][part] for name in TRAINERS]
        times.barh(TRAINERS, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    times.set(
        xlabel="seconds (median)",
        title=f"a step of {step['completions']} completions: {step['trl_over_kit']['step']:.1f}×",
    )
    times.legend()
    peaks.barh(TRAINERS, [step["peak_mib"][name] for name in TRAINERS], color="tab:gray")
    peaks.set(xlabel="MiB", title="peak memory, all in all")
    kinds = ("plain", "chunked")
    loss.barh(kinds, [memory["peak_mib"][kind] for kind in kinds], color="tab:gray")
    loss.set(
        xlabel="MiB",
        title=f"loss step: {memory['chunked_over_plain']:.0%} of plain",
    )
    for axes in (times, peaks, loss):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    return drawn
