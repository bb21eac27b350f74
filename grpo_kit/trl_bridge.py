"""The same run under TRL: a `GRPOTrainer` from our policy, task, rewards and config.

TRL counts optimiser steps, our config generation batches. What stays different: random numbers and
the order of prompts; TRL updates also where no completion could be scored; `bnpo` averages over
each process's own pass; `top_entropy_quantile` chooses a share of each pass's tokens as they are
now, ours of the whole batch's as they were sampled. Tested with TRL 1.7 to 1.16.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from anyio.from_thread import start_blocking_portal
from safetensors import SafetensorError
from transformers import PrinterCallback, TrainerCallback

from grpo_kit import training
from grpo_kit.config import GRPOConfig
from grpo_kit.models import Policy, frozen_copy
from grpo_kit.paths import make_output_dir, write_atomic, writing
from grpo_kit.rewards.rules import accuracy_reward
from grpo_kit.rewards.scoring import finite_values, reward_name, score_texts
from grpo_kit.runs import CHECKPOINT, RUN, Run, RunFiles
from grpo_kit.tasks import Task

HOOKS = ("advantages", "surrogate", "aggregate", "batch_source")  # what TRL's trainer lacks
REFUSED = {  # field -> the value that TRL's trainer has, and why there is no other
    "max_generated_tokens": (None, "TRL counts steps only: give max_steps"),
    "baseline": ("group", "choose 'group', or --engine kit"),
    "dynamic_sampling_rounds": (0, "TRL does not sample groups anew: choose 0, or --engine kit"),
    "dynamic_sampling_metric": (None, "TRL does not sample groups anew: leave it at None"),
    "importance_sampling_cap": (
        None,
        "TRL corrects for another sampler only where vLLM samples: add use_vllm=True",
    ),
}
# These mean the same: they are translated here, or read by the callback below.
OURS = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "reward_weights",
        "eval_steps", "eval_on_start", "eval_prompts", "eval_prompts_between",
        "num_generations_eval", "save_steps", "max_unscored_steps", "bf16")  # fmt: skip
# These have TRL's names.
SAME = tuple(f.name for f in fields(GRPOConfig) if f.name not in (*REFUSED, *OURS))
IDENTITY = "identity.json"  # of a checkpoint's run; written last, so it marks one that is whole
PATIENCE = timedelta(hours=2)  # how long processes wait for one that evaluates or scores


def trl_config(config: GRPOConfig, policy: Policy, processes: int = 1, **overrides: Any):
    """TRL's `GRPOConfig` that means the same; `overrides` are other fields of it.

    `processes` share the batch: their number changes nothing that is learnt. Raises ValueError,
    naming the field, for what TRL cannot do, and for overrides of what `config` decides.
    """
    for name in HOOKS:
        if overrides.pop(name, None) is not None:
            problem = f"{name} is a hook of the kit's trainer, TRL's has none"
            raise ValueError(f"{problem}: change the config, or subclass trl.GRPOTrainer.")
    if taken := sorted({*SAME, *OURS, "logging_steps"} & set(overrides)):
        raise ValueError(f"{', '.join(taken)}: that is the config's to say; change it there.")
    known = {"importance_sampling_cap"} if overrides.get("use_vllm") else set()
    for name, (only, why) in REFUSED.items():
        if (value := getattr(config, name)) != only and name not in known:
            raise ValueError(f"{name} is {value!r}, which TRL's trainer does not have: {why}.")
    if config.scale_rewards == "mean":
        remedy = "choose 'group', 'batch' or 'none', or the kit's trainer"
        raise ValueError(f"scale_rewards is 'mean', which TRL's trainer does not have: {remedy}.")
    rows, passes = config.shared_by(processes)
    cap, per_step = config.importance_sampling_cap, config.updates_per_step
    settings = {
        **{name: getattr(config, name) for name in SAME},
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": passes,
        "max_steps": config.max_steps * per_step,
        "reward_weights": config.reward_weights and list(config.reward_weights),
        "logging_steps": per_step,
        "save_strategy": "steps",
        "save_steps": (config.save_steps or config.max_steps) * per_step,
        "save_total_limit": 2,
        "bf16": policy.half == torch.bfloat16,
        "fp16": policy.half == torch.float16,
        "use_cpu": policy.device.type != "cuda",
        "gradient_checkpointing": False,  # TRL's default is True
        "disable_dropout": True,
        "logging_nan_inf_filter": False,  # it would hide what `_Watcher` looks for
        "vllm_importance_sampling_correction": cap is not None,
        "report_to": [],
        "disable_tqdm": True,  # there is a bar below
    }
    if cap is not None:
        settings["vllm_importance_sampling_mode"] = "token_truncate"
        settings["vllm_importance_sampling_clip_max"] = cap
    return trl.GRPOConfig(**{**settings, **overrides})


def join(device: str = "cpu") -> int:
    """Join the run that torchrun or accelerate has launched; returns the number of its processes.

    To be called before the policy is loaded: from here on "cuda" is this process's own GPU.
    ValueError where accelerate is to shard the weights: no process could evaluate or save alone.
    """
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        if os.environ.get(name, "").lower() == "true":
            problem = f"{name} is set, but here each process holds all weights"
            remedy = "launch with data/accelerate/ddp.yaml, or give the rewards to a GRPOTrainer"
            raise ValueError(f"{problem}: {remedy} of your own.")
    return PartialState(cpu=device == "cpu", timeout=PATIENCE).num_processes


def leave() -> None:
    """Wait until all processes of the run are here, then close what joins them.

    To be called last: a process that ends while another still talks to it can bring that one down.
    """
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


def grpo_trainer(
    policy: Policy,
    task: Task,
    rewards: Sequence[Callable],
    config: GRPOConfig,
    *,
    measure: Callable[[Policy], dict[str, float]] | None = None,
    correct: Callable = accuracy_reward,
    **overrides: Any,
) -> trl.GRPOTrainer:
    """A `GRPOTrainer`, ready for `.train()`, that learns what `training.train` would.

    It evaluates as the kit does and writes the same files into its `output_dir`. `overrides` are
    fields of TRL's config, among them `output_dir`, `seed` and `report_to`, a tracker. Raises
    ValueError where these do not fit together or TRL lacks a field.
    """
    processes = join(policy.device.type)
    # checks what goes together, and sets the arithmetic, which TRL's config takes from the policy
    prompts = training.PromptBatches(policy, task, rewards, config, seed=0, correct=correct)
    args = trl_config(config, policy, processes, **overrides)
    wanted = config.generation_batch_size // config.num_generations
    if len(task.train) < wanted:
        raise ValueError(
            f"task {task.name!r} has {len(task.train)} rows to learn from, TRL takes {wanted} at "
            "each step: lower generation_batch_size, or give more rows."
        )
    start = training.run_start(policy, f"TRL {trl.__version__}", prompts)
    for module in policy.model.modules():  # a number, which TRL's `disable_dropout` does not reach
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0

    def reference(*_, **__):  # TRL would load it by name: what the policy once was
        return frozen_copy(policy).model

    with mock.patch("trl.trainer.grpo_trainer.create_model_from_path", reference):
        given = policy.model, [_stand_in(name) for name in start["rewards"]], args, task.train
        trainer = _Trainer(*given, processing_class=policy.tokenizer)
    trainer.rewards = [whole_groups(r) if hasattr(r, "num_generations") else r for r in rewards]
    trainer.remove_callback(PrinterCallback)
    files = RunFiles(args.output_dir, config, args.seed, start)
    trainer.watcher = _Watcher(files, policy, task, measure, correct)
    trainer.add_callback(trainer.watcher)
    return trainer


def train(
    policy: Policy,
    task: Task,
    rewards: Sequence[Callable],
    config: GRPOConfig,
    *,
    output_dir: str | Path,
    seed: int,
    resume: bool = False,
    **options: Any,
) -> Run:
    """Do what `training.train` does by TRL's trainer; the files and the result are the same.

    `options` are those of `grpo_trainer`. Without `resume`, checkpoints of an earlier run in
    `output_dir` are deleted. Raises as `grpo_trainer` and `training.train`.
    """
    output_dir = make_output_dir(output_dir)
    with writing(output_dir) if PartialState().is_main_process else nullcontext():
        options |= {"output_dir": str(output_dir), "seed": seed}
        trainer = grpo_trainer(policy, task, rewards, config, **options)
        trainer.train(resume_from_checkpoint=resume)
    PartialState().wait_for_everyone()  # the first process writes what all of them read
    run = json.loads((output_dir / RUN).read_text())
    return Run(output_dir, config, seed, run["history"], run["start"])


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest of TRL's checkpoints that all processes have saved, None where there is none."""
    saved = [mark.parent for mark in Path(output_dir).glob(f"checkpoint-*/{IDENTITY}")]
    return max(saved, key=lambda path: int(path.name.split("-")[1]), default=None)


class _Trainer(trl.GRPOTrainer):
    """TRL's trainer, with the kit's scoring of rewards and the kit's way to resume."""

    watcher: _Watcher
    rewards: list[Callable]
    _epochs_behind = 0

    def train(self, resume_from_checkpoint: bool = False, **keywords):
        folder = Path(self.args.output_dir)
        last = last_checkpoint(folder) if resume_from_checkpoint else None
        if not last:
            if resume_from_checkpoint and (folder / CHECKPOINT).exists():
                problem = f"{folder} holds a run by the kit's trainer"
                raise ValueError(f"{problem}: resume with that (--engine kit), or choose another.")
            self.watcher.begin()
            return super().train(**keywords)
        state = json.loads((last / "trainer_state.json").read_text())
        self.watcher.resume(last)
        if state["global_step"] >= self.args.max_steps:  # TRL would make one step more
            self._load_from_checkpoint(str(last))
            return self.watcher.end()
        self._epochs_behind = int(state["epoch"])
        return super().train(resume_from_checkpoint=str(last), **keywords)

    def _save_checkpoint(self, model, trial):
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            step = self.state.global_step // self.watcher.config.updates_per_step
            raise self.watcher.files.unwritten(f"checkpoint of step {step}", error) from error

    def _get_train_sampler(self, dataset=None):
        """TRL draws each epoch's order from one generator, which a resumed run restarts."""
        sampler = super()._get_train_sampler(dataset)
        for _ in range(self._epochs_behind):
            torch.randperm(sampler.num_samples, generator=sampler.generator)
        return sampler

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
        """Score as the kit does; what one reward could not score is missing in the others too."""
        texts, logged = [completion[-1]["content"] for completion in completions], {}
        step = self.state.global_step // self.watcher.config.updates_per_step + 1
        with training.errors_named(step, self.watcher.files.remedy):
            own = score_texts(texts, completion_ids, inputs, self.rewards, self.state, logged)
        for name, values in logged.items():
            self._log_metric(name, sum(values) / len(values))
        rewards_per_func = self.accelerator.gather(own.to(self.accelerator.device))
        counted = self.reward_weights.to(rewards_per_func.device) != 0
        missing = (rewards_per_func.isnan() & counted).any(dim=1, keepdim=True)
        return rewards_per_func.masked_fill(missing, torch.nan)


def _stand_in(name: str) -> Callable:
    """A function of this name, for TRL's log; `_Trainer` calls the rewards itself."""

    def reward(**columns): ...

    reward.__name__ = name
    return reward


def whole_groups(reward: Callable) -> Callable:
    """`reward` for one of several processes, as a function of the completions of all of them.

    A group may lie in two processes. The first one computes the reward of all completions; each
    returns its own part, or raises RuntimeError where the reward fails, so that none waits.
    """
    state, name = PartialState(), reward_name(reward)
    if state.num_processes == 1:
        return reward

    def gathered(prompts: list, **columns: Any) -> list[float | None]:
        n, own = len(prompts), {"prompts": prompts}
        own |= {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == n}
        everyone = {name: gather_object(values) for name, values in own.items()}
        outcome, failure = [None], None
        if state.is_main_process:
            try:
                values = reward(**columns | everyone)
                if inspect.isawaitable(values):
                    with start_blocking_portal() as portal:
                        values = portal.call(lambda: values)
                finite_values(name, values, len(everyone["prompts"]))
                outcome = [list(values)]
            except Exception as error:  # the others would wait for ever
                failure, outcome = error, [f"{type(error).__name__}: {error}"]
        (values,) = broadcast_object_list(outcome)
        if isinstance(values, str):
            problem = f"the first process could not compute {name}: {values}"
            raise RuntimeError(problem) from failure
        return values[n * state.process_index :][:n]  # TRL gives each process as many

    gathered.__name__ = name
    return gathered


class _Watcher(TrainerCallback):
    """Evaluates as `training.train` does, and leaves the same files; the first process writes."""

    def __init__(self, files: RunFiles, policy: Policy, task: Task, measure, correct) -> None:
        self.files, self.policy, self.task, self.measure = files, policy, task, measure
        self.correct, self.config = correct, files.run.config
        self.began, self.progress = 0.0, None

    def begin(self) -> None:
        """Empty the folder for a new run."""
        folder = self.files.folder
        if PartialState().is_main_process:
            for old in folder.glob("checkpoint-*"):
                shutil.rmtree(old)
            (folder / RUN).unlink(missing_ok=True)
            self.files.begin()
        PartialState().wait_for_everyone()

    def resume(self, checkpoint: Path) -> None:
        """Go on with the run of a checkpoint. ValueError where that is another run."""
        self.files.begin(json.loads((checkpoint / IDENTITY).read_text()), checkpoint.name)
        PartialState().wait_for_everyone()

    def end(self) -> None:
        if PartialState().is_main_process:
            self.files.finish()

    def _evaluated(self, between: bool = False) -> dict[str, float]:
        given = self.policy, self.task, self.config, self.measure, self.files.run.seed
        return training.evaluate_run(*given, between, self.correct)

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        done = state.global_step // self.config.updates_per_step
        if not done and self.config.eval_on_start:
            self.files.log({"step": 0, "num_generated_tokens": 0, **self._evaluated()})
        self.progress = training.progress_bar(self.config, done, engine="trl")

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.config.updates_per_step == 0:
            self.began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "completions/mean_length" not in (logs or {}):
            return
        config, step = self.config, state.global_step // self.config.updates_per_step
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(logs.get(name, 0.0))]
        if bad and not args.fp16:  # there a scale that was too large makes one, and is lowered
            problem = f"{' and '.join(bad)} is not finite at step {step}"
            raise RuntimeError(f"{problem}: lower learning_rate; {self.files.remedy}.")
        generated = round(logs["completions/mean_length"] * config.generation_batch_size)
        row = {"step": step, "num_generated_tokens": self.files.tokens + generated}
        row |= {k: v for k, v in logs.items() if isinstance(v, (int, float)) and k != "step_time"}
        row["step_time"] = time.perf_counter() - self.began
        names = self.files.run.start["rewards"]
        scored = any(logs.get(f"rewards/{name}/mean") is not None for name in names)
        self.files.count_unscored(row, scored, names)
        if step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0):
            row |= self._evaluated(between=step < config.max_steps)
        self.files.log(row)
        training.show_progress(self.progress, row)

    def on_save(self, args, state, control, **kwargs):
        """Mark a checkpoint as whole once no process still writes its part."""
        PartialState().wait_for_everyone()
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.files.remedy = f"resume from {checkpoint.name} in {self.files.folder}"
        if state.is_world_process_zero:
            write_atomic(checkpoint / IDENTITY, json.dumps(self.files.state, indent=1))

    def on_train_end(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.close()
        self.end()
