"""A training step of the kit beside TRL's: `grpo-kit bench`. A command, never a test.

The trainers take turns, step by step, in one process, with the same weights, prompts and update: on
a shared machine their ratio says more than seconds. A process cannot reset its peak of memory, so
each trainer's peak is measured in a process of its own.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
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
    shapes, threads = [], torch.get_num_threads()
    for name in SHAPES:
        print(f"shape {name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder), name)
            torch.set_num_threads(2 if name == SMOLLM2 else threads)
            shapes.append({"name": name, **compare_steps(model, *setting_of(name, min(steps, 3)))})
        torch.set_num_threads(threads)
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


def compare_steps(policy_dir: Path, config: GRPOConfig, task: Task, **loading) -> dict:
    """Median seconds of both trainers in turn, each one's peak MiB; loading: `load_policy`'s."""
    few = (policy_dir, replace(config, max_steps=3), task, loading)
    peaks = {trainer: _peak_mib(trainer, *few) for trainer in TRAINERS}  # while there is room
    policy, other = (load_policy(policy_dir, device=DEVICE, **loading) for _ in range(2))
    steps, kit, lengths = kit_steps(policy, config, task), [], []

    def kit_step() -> None:
        *seconds, batch = next(steps)
        kit.append(seconds)
        lengths.append(batch.rollouts.lengths.float().mean().item())

    trl = trl_steps(other, config, task, after_step=kit_step)
    median = {"trl": _medians(trl), "kit": _medians(kit)}
    ratio = {part: median["trl"][part] / median["kit"][part] for part in median["kit"]}
    faster = config.bf16 and (DEVICE == "cuda" or faster_in_bfloat16())
    return {
        "completions": config.generation_batch_size,
        "max_completion_length": config.max_completion_length,
        "mean_length": float(np.mean(lengths[1:])),
        "prompt_length": float(np.mean([*map(len, policy.encode(task.train["prompt"]))])),
        "steps": config.max_steps - 1,
        "threads": torch.get_num_threads(),
        "arithmetic": "bfloat16" if faster else "float32",
        "median_seconds": median,
        "trl_over_kit": ratio,
        "peak_mib": peaks,
    }


def _medians(pairs: list) -> dict[str, float]:
    """Medians of (seconds until scored, seconds in all), without the first step: the warm-up."""
    scored, step = np.array(pairs[1:]).T
    parts = {"generation": scored, "step": step, "update": step - scored}
    return {name: float(np.median(seconds)) for name, seconds in parts.items()}


def kit_steps(policy: Policy, config: GRPOConfig, task: Task) -> Iterator[tuple]:
    """Train by the kit; yields each step's seconds until it is scored, those in all, its batch."""
    prompts = training.PromptBatches(policy, task, [even_share], config, seed=0)
    learner = training.Learner(policy, config)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.max_steps):
        started = now()
        (batch,) = prompts(generator, None, {})
        scored = now()
        learner.update(batch)
        yield scored - started, now() - started, batch


def trl_steps(
    policy: Policy, config: GRPOConfig, task: Task, after_step: Callable[[], None], **overrides
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
        options = {"output_dir": folder, "seed": 0, "save_strategy": "no", **overrides}
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


def _peak_mib(*arguments: object) -> float:
    """`train_and_measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(train_and_measure, *arguments).result()


def train_and_measure(trainer: str, policy_dir: Path, config, task: Task, loading: dict) -> float:
    """The most MiB of the accelerator, or else of this process, after the steps of a trainer."""
    policy = load_policy(policy_dir, device=DEVICE, **loading)
    if trainer == "trl":
        trl_steps(policy, config, task, after_step=lambda: None)
    else:
        for _ in kit_steps(policy, config, task):  # a list would keep every batch
            pass
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start from what the parent process held
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) / 2**10
    import resource  # which Windows lacks

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS counts bytes


def now() -> float:
    """Seconds of a clock, once the accelerator has finished its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
