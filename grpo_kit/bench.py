"""Benchmarks as commands, never as tests: the kit's step beside TRL's, and the loss step's memory.

`grpo-kit bench --policy FOLDER` runs both trainers in one process, a kit step after every TRL step,
with the same weights, prompts a step, group, token limit, sampling and update, and reports medians
and their ratio: on a shared machine seconds say little, two things measured in turn say more. The
memory of the loss step is measured in a process of its own for each way of computing it, with a
vocabulary of Qwen's size.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm.auto import tqdm

from grpo_kit.paths import make_output_dir, write_atomic

VOCABULARY, HIDDEN = 151_936, 64


def run(
    output_dir: str | Path, policy_dir: str | Path, *, steps: int = 10, quick: bool = False
) -> dict:
    """Run both benchmarks, write `bench.json` and `bench.md` to `output_dir`, return the numbers.

    Args:
        policy_dir: folder of a saved model; both trainers start from it.
        steps: measured steps of each trainer, after one that is not counted.
        quick: 4 prompts x 4 completions and 128 loss tokens, for a first look.

    Raises ValueError for fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; measure at least 1.")
    output_dir = make_output_dir(output_dir)
    result = {
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "step": compare_steps(policy_dir, output_dir, steps=steps, quick=quick),
        "loss_memory": compare_loss_memory(tokens=128 if quick else 1024),
    }
    write_atomic(output_dir / "bench.json", json.dumps(result, indent=1))
    write_atomic(output_dir / "bench.md", report(result))
    return result


# --- a step ---------------------------------------------------------------------------------------


def even_share(prompts, completions, completion_ids, **columns) -> list[float]:
    """The share of even token ids: a reward with spread in every group.

    Groups without spread are an update that the kit skips and TRL makes; with a base that is never
    right the comparison would be of nothing with something.
    """
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def compare_steps(policy_dir: str | Path, output_dir: Path, *, steps: int, quick: bool) -> dict:
    """Median seconds of generation and update of both trainers, measured in turn."""
    import torch
    import trl
    from transformers import TrainerCallback

    from grpo_kit import training
    from grpo_kit.config import GRPOConfig
    from grpo_kit.models import load_policy
    from grpo_kit.tasks.word_problems import word_problems

    config = GRPOConfig(
        max_steps=steps + 1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        num_generations=4 if quick else 8,
        generation_batch_size=16 if quick else 128,
        max_completion_length=16 if quick else 64,
        scale_rewards="group",
    )
    rewards = [even_share]
    task = word_problems()
    policy = load_policy(policy_dir)
    prompt_ids = policy.encode(task.train["prompt"])
    optimizer, schedule = training.make_optimizer(policy, config)
    generator, cursor = torch.Generator().manual_seed(0), training.Cursor(len(prompt_ids), 0)

    theirs = load_policy(policy_dir)
    trainer = trl.GRPOTrainer(
        model=theirs.model,
        reward_funcs=rewards,
        args=trl.GRPOConfig(
            output_dir=str(output_dir / "trl"),
            max_steps=config.max_steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type="constant",
            num_generations=config.num_generations,
            per_device_train_batch_size=config.generation_batch_size,
            max_completion_length=config.max_completion_length,
            temperature=config.temperature,
            loss_type=config.loss_type,
            beta=0.0,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=task.train,
        processing_class=theirs.tokenizer,
    )
    seconds: dict[str, list[float]] = {
        name: [] for name in ("kit generation", "kit step", "trl generation", "trl step")
    }
    generate = trainer._generate  # private, but the only place where its generation can be timed

    def timed_generate(prompts):
        started = time.perf_counter()
        output = generate(prompts)
        seconds["trl generation"].append(time.perf_counter() - started)
        return output

    trainer._generate = timed_generate
    progress = tqdm(total=config.max_steps, desc="bench")

    class InTurn(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            seconds["trl step"].append(time.perf_counter() - self.started)
            started = time.perf_counter()
            batch = training.collect(
                policy, task, prompt_ids, rewards, config, cursor, generator, None
            )
            seconds["kit generation"].append(time.perf_counter() - started)
            training.update(policy, None, optimizer, schedule, batch, config)
            seconds["kit step"].append(time.perf_counter() - started)
            progress.update()

    trainer.add_callback(InTurn())
    trainer.train()
    progress.close()
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "median_seconds": median,
        "trl_over_kit": median["trl step"] / median["kit step"],
    }


# --- memory of the loss step ----------------------------------------------------------------------


def compare_loss_memory(tokens: int) -> dict:
    """Peak memory of forward and backward through the head, plain and chunked, in MiB.

    Each in a fresh process, above what the process had before, since a peak cannot be reset.
    """
    code = "import sys, grpo_kit.bench as b; print(b.loss_peak(sys.argv[1], int(sys.argv[2])))"
    peak = {
        kind: float(
            subprocess.run(
                [sys.executable, "-c", code, kind, str(tokens)],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()[-1]
        )
        for kind in ("plain", "chunked")
    }
    return {
        "vocabulary": VOCABULARY,
        "tokens": tokens,
        "peak_mib": peak,
        "chunked_over_plain": peak["chunked"] / peak["plain"],
    }


def loss_peak(kind: str, tokens: int) -> float:
    """MiB that one loss step adds to this process's peak: `kind` is "plain" or "chunked"."""
    import torch

    from grpo_kit.generation import token_logps

    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,))
    head.weight.grad = torch.zeros_like(head.weight)  # the same for both
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "plain":
        logps = torch.log_softmax(head(hidden).float(), -1).gather(1, targets[:, None])[:, 0]
    else:
        logps, _ = token_logps(head, hidden, targets, 1.0)
    logps.sum().backward()
    unit = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def report(result: dict) -> str:
    """The numbers as Markdown."""
    step, memory = result["step"], result["loss_memory"]
    seconds = step["median_seconds"]
    lines = [
        f"{step['completions']} completions a step, up to {step['max_completion_length']} tokens, "
        f"{step['steps']} steps of each trainer in turn, {step['threads']} thread(s).",
        "",
        "| | generation and rewards (s) | update (s) | step (s) |",
        "|---|---|---|---|",
    ]
    for name in ("trl", "kit"):
        whole, part = seconds[f"{name} step"], seconds[f"{name} generation"]
        lines.append(f"| {name} | {part:.3f} | {whole - part:.3f} | {whole:.3f} |")
    lines += [
        "",
        f"A TRL step takes {step['trl_over_kit']:.2f} times as long as the kit's.",
        "",
        f"Loss step, {memory['tokens']} tokens, vocabulary {memory['vocabulary']:,}: peak "
        f"{memory['peak_mib']['chunked']:.0f} MiB chunked, {memory['peak_mib']['plain']:.0f} MiB "
        f"with a plain log-softmax ({memory['chunked_over_plain']:.0%}).",
    ]
    return "\n".join(lines) + "\n"
