"""A training step of the kit beside TRL's: `grpo-kit bench`. A command, never a test.

Each trainer makes the same steps in a process of its own, so that its peak of memory is its own,
twice in turn: what else the machine does then meets both.
"""

import json
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

# A process whose memory is measured imports what a run needs, the rest is imported where used.
from grpo_kit import training
from grpo_kit.config import GRPOConfig
from grpo_kit.lab.records import where_it_ran
from grpo_kit.models import Policy, faster_in_bfloat16, load_policy
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.tasks import Task
from grpo_kit.tasks.word_problems import word_problems

TRAINERS = ("trl", "kit")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMOLLM2 = "SmolLM2"
# hidden size, layers, heads, heads of keys and values, MLP; vocabulary, if not the tiny base's
SHAPES = {
    "tiny": (128, 4, 4, 2, 384),
    "30 M": (512, 10, 8, 2, 1536),
    SMOLLM2: (576, 30, 9, 3, 1536, 49_152),
}


def run(output_dir: Path, policy_dir: Path, *, steps: int = 10) -> dict:
    """Measure `steps` of each trainer with a policy, 3 with each shape; write `bench.json`."""
    path, where = make_output_dir(output_dir) / "bench.json", where_it_ran(DEVICE)
    step = compare_steps(policy_dir, step_config(steps, 128, 64), word_problems())
    shapes = []
    for name in SHAPES:
        print(f"shape {name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            model, threads = make_model(Path(folder), name), 2 if name == SMOLLM2 else None
            measured = compare_steps(model, *setting_of(name, min(steps, 3)), threads=threads)
        shapes.append({"name": name, **measured})
    result = {"machine": where["machine"] | where["versions"], "step": step, "shapes": shapes}
    write_atomic(path, json.dumps(result, indent=1))
    return result


def report(result: dict) -> str:
    """The numbers of `run` as a Markdown table."""
    from grpo_kit.lab.summary import markdown_table

    rows = [["model", "completions a step", "mean length", "TRL (s)", "kit (s)", "TRL / kit",
             "TRL (MiB)", "kit (MiB)"]]  # fmt: skip
    for measured in (result["step"] | {"name": "the shipped base"}, *result["shapes"]):
        sampled = [measured["completions"], f"{measured['mean_length']:.0f}"]
        seconds = [f"{measured['median_seconds'][trainer]['step']:.2f}" for trainer in TRAINERS]
        ratio = f"{measured['trl_over_kit']['step']:.2f}"
        memory = [f"{measured['peak_mib'][trainer]:,.0f}" for trainer in TRAINERS]
        rows.append([measured["name"], *sampled, *seconds, ratio, *memory])
    machine, arithmetic = result["machine"], result["step"]["arithmetic"]
    where = f"{machine['processor']}, accelerator: {machine['accelerator']}, TRL {machine['trl']}"
    return f"{markdown_table(*rows)}\nMedian seconds of a step in {arithmetic}, on {where}.\n"


def step_config(steps: int, completions: int, length: int) -> GRPOConfig:
    """For `steps` measured steps and one warm-up; groups of 8, at most `length` tokens each."""
    return GRPOConfig(
        max_steps=steps + 1, learning_rate=1e-4, lr_scheduler_type="constant",
        num_generations=8, generation_batch_size=completions, max_completion_length=length,
        eval_on_start=False, eval_prompts=0, bf16="auto",
    )  # fmt: skip


def setting_of(shape: str, steps: int) -> tuple[GRPOConfig, Task]:
    """The config and the prompts of a shape; SmolLM2 gets prompts of about 80 tokens."""
    task = word_problems()
    if shape != SMOLLM2:
        return step_config(steps, 64, 64), task

    def longer(row: dict) -> dict:
        words = row["prompt"][0]["content"].split()
        return {"prompt": [{"role": "user", "content": " ".join((9 * words)[:63])}]}

    return step_config(steps, 64, 25), replace(task, train=task.train.map(longer))


def config_of(shape: str):
    """The transformers config of a shape or of a planner's model, with the tiny base's tokens."""
    from transformers import AutoConfig

    from grpo_kit.lab.planner import FIELDS, MODELS

    own = "llama" if shape == SMOLLM2 else "qwen2", *SHAPES.get(shape, ())
    kind, *sizes = MODELS.get(shape, own)
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer)} | dict(zip(FIELDS, sizes, strict=False))
    return AutoConfig.for_model(
        kind, **{"tie_word_embeddings": True} | sizes, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=2048,
    )  # fmt: skip


def make_model(folder: Path, shape: str) -> Path:
    """Save a model of a shape; its weights are random, so that completions are long."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(DEVICE):  # a GPU makes a large one at once
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(data_dir() / "tiny-base")


def even_share(prompts, completions, completion_ids, **columns) -> list[float]:
    """A reward with spread in every group: without it the kit skips the update that TRL makes."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def compare_steps(
    policy_dir: Path, config: GRPOConfig, task: Task, threads: int | None = None, **loading
) -> dict:
    """Median seconds and peak MiB of both trainers; `loading`: `load_policy`'s options."""
    given = policy_dir, config, task, threads or torch.get_num_threads(), loading
    runs = {trainer: [] for trainer in TRAINERS}
    for trainer in 2 * TRAINERS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            runs[trainer].append(pool.submit(train_and_measure, trainer, *given).result())
    seconds = {name: [s for run in of for s in run["seconds"]] for name, of in runs.items()}
    median = {name: {"step": float(np.median(of))} for name, of in seconds.items()}
    faster = config.bf16 and (DEVICE == "cuda" or faster_in_bfloat16())
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "mean_length": float(np.mean([run["mean_length"] for run in runs["kit"]])),
        "prompt_length": runs["kit"][0]["prompt_length"],
        "steps": len(seconds["kit"]),
        "threads": given[3],
        "arithmetic": "bfloat16" if faster else "float32",
        "median_seconds": median,
        "trl_over_kit": {"step": median["trl"]["step"] / median["kit"]["step"]},
        "peak_mib": {name: max(run["peak_mib"] for run in of) for name, of in runs.items()},
    }


def train_and_measure(
    trainer: str, policy_dir: Path, config: GRPOConfig, task: Task, threads: int, loading: dict
) -> dict:
    """Seconds and mean length of a trainer's steps but for the first one, which warms up.

    And the most MiB of the accelerator, or else of this process.
    """
    torch.set_num_threads(threads)
    policy = load_policy(policy_dir, device=DEVICE, **loading)
    prompt_length = float(np.mean([*map(len, policy.encode(task.train["prompt"]))]))
    steps = (trl_steps if trainer == "trl" else kit_steps)(policy, config, task)
    seconds, lengths = zip(*steps[1:], strict=True)
    return {
        "seconds": seconds,
        "mean_length": float(np.mean(lengths)),
        "prompt_length": prompt_length,
        "peak_mib": peak_mib(),
    }


def peak_mib() -> float:
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from what the parent process held
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) / 2**10
    import resource  # which Windows lacks

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def kit_steps(policy: Policy, config: GRPOConfig, task: Task) -> list[tuple[float, float]]:
    """Train by the kit; seconds and mean length of each step."""
    prompts = training.PromptBatches(policy, task, [even_share], config, seed=0)
    learner = training.Learner(policy, config)
    generator, steps = torch.Generator().manual_seed(0), []
    for _ in range(config.max_steps):
        started = time.perf_counter()
        (batch,) = prompts(generator, None, {})
        learner.update(batch)
        length = batch.rollouts.lengths.float().mean().item()
        steps.append((time.perf_counter() - started, length))
    return steps


def trl_steps(policy: Policy, config: GRPOConfig, task: Task) -> list[tuple[float, float]]:
    """Train by TRL; seconds and mean length of each step."""
    from grpo_kit import trl_bridge

    with tempfile.TemporaryDirectory() as folder:
        options = {"output_dir": folder, "seed": 0, "save_strategy": "no"}
        trainer = trl_bridge.grpo_trainer(policy, task, [even_share], config, **options)
        trainer.train()
    history = trainer.watcher.files.run.history
    return [(row["step_time"], row["completions/mean_length"]) for row in history]
