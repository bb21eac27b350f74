"""The same run under TRL: a `GRPOTrainer` from our policy, task, rewards and config.

`GRPOConfig` has TRL's names, so most of this is a table of what is called alike (`SAME`) and of
what TRL cannot do (`REFUSED`). Three things need a hand, and get one here:

- TRL counts optimiser steps, our config generation batches: `updates_per_step` lie between.
- In several processes a group may be split between them. A reward that compares the completions of
  a group (it has the attribute `num_generations`) is computed where all are, see `whole_groups`.
- A completion that one reward could not score (None) is left out of its group here; TRL counts
  that reward as 0. The trainer made here leaves it out, too.

Tested with TRL 1.16.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm
from transformers import PrinterCallback, TrainerCallback
from trl.import_utils import is_vllm_available

from grpo_kit.config import GRPOConfig
from grpo_kit.models import Policy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.tasks import Task
from grpo_kit.training import HISTORY, RUN, Run, check_task, evaluate, reward_name

SAME = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1",
    "adam_beta2", "max_grad_norm", "num_generations", "generation_batch_size", "num_iterations",
    "max_completion_length", "temperature", "top_p", "top_k", "loss_type", "epsilon",
    "epsilon_high", "beta", "use_bias_correction_kl", "importance_sampling_level", "scale_rewards",
    "multi_objective_aggregation", "mask_truncated_completions",
)  # fmt: skip
REFUSED = {  # field -> the value that TRL's trainer has, and why there is no other
    "max_generated_tokens": (None, "TRL counts steps only: give max_steps"),
    "dynamic_sampling_rounds": (0, "TRL does not sample groups anew: choose 0, or --engine kit"),
    "importance_sampling_cap": (
        None,
        "TRL corrects for another sampler only where vLLM samples: use use_vllm=True, "
        "vllm_importance_sampling_mode='token_truncate' and vllm_importance_sampling_clip_max",
    ),
}
# What they mean stays the same: `rollout_chunks` saves time and changes no number, the others are
# read by the callback below.
OURS = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "reward_weights",
        "rollout_chunks", "sampling_backend", "eval_steps", "eval_on_start", "eval_prompts",
        "num_generations_eval", "save_steps", "max_unscored_steps")  # fmt: skip


def trl_config(config: GRPOConfig, policy: Policy, processes: int = 1, **overrides: Any):
    """TRL's `GRPOConfig` that means the same; `overrides` are fields of it, and win.

    `processes`: of the run; the batch is theirs together, so that their number changes nothing that
    is learnt. Raises ValueError, naming the field, for what TRL cannot do.
    """
    for name, (only, why) in REFUSED.items():
        if (value := getattr(config, name)) != only:
            raise ValueError(f"{name} is {value!r}, which TRL's trainer does not have: {why}.")
    cuda = policy.device.type == "cuda"
    fields = {
        **{name: getattr(config, name) for name in SAME},
        **_batches(config, processes),
        "max_steps": config.max_steps * config.updates_per_step,
        "reward_weights": config.reward_weights and list(config.reward_weights),
        "logging_steps": config.updates_per_step,
        "save_strategy": "steps",
        "save_steps": (config.save_steps or config.max_steps) * config.updates_per_step,
        "save_total_limit": 2,
        "bf16": policy.half == torch.bfloat16,
        "fp16": policy.half == torch.float16,
        "use_cpu": not cuda,
        "gradient_checkpointing": False,
        "cache_implementation": "static" if config.sampling_backend == "static" else None,
        "use_transformers_continuous_batching": config.sampling_backend == "continuous",
        "report_to": [],
        "disable_tqdm": True,  # there is a bar below
    }
    return trl.GRPOConfig(**{**fields, **overrides})


def _batches(config: GRPOConfig, processes: int) -> dict[str, int]:
    """How `processes` share an optimiser step's completions."""
    rows, passes = config.optimizer_batch_size, config.gradient_accumulation_steps
    if passes % processes == 0:
        passes //= processes
    if rows % (passes * processes):
        raise ValueError(
            f"{processes} processes cannot share the {rows} completions of an optimiser step in "
            f"{passes} passes each: choose per_device_train_batch_size x "
            "gradient_accumulation_steps so that they can."
        )
    return {
        "per_device_train_batch_size": rows // (passes * processes),
        "gradient_accumulation_steps": passes,
    }


def join(device: str = "cpu") -> int:
    """Take part in the run that torchrun or accelerate has launched; the number of its processes.

    Before the policy is loaded, so that each process has its own GPU: "cuda" is that from here on.
    """
    return PartialState(cpu=device == "cpu").num_processes


def is_sharded() -> bool:
    """Whether accelerate has launched this process with FSDP or DeepSpeed."""
    names = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
    return any(os.environ.get(name, "").lower() == "true" for name in names)


def vllm_options(mode: str) -> dict[str, Any]:
    """Fields of TRL's config for sampling by vLLM: "colocate" on the trainer's GPUs, or "server".

    A server is started with `trl vllm-serve --model NAME` on a GPU of its own. Raises ValueError
    for another mode, RuntimeError where vLLM is not installed; of a version that it does not know,
    TRL warns.
    """
    if mode not in ("colocate", "server"):
        raise ValueError(f"vLLM's mode is {mode!r}; choose colocate or server.")
    if not is_vllm_available():
        raise RuntimeError(
            "sampling by vLLM needs vLLM, which is not installed: pip install vllm (TRL says which "
            "versions it knows), on Linux with a GPU; or sample by transformers, without --vllm."
        )
    return {"use_vllm": True, "vllm_mode": mode}


def grpo_trainer(
    policy: Policy,
    task: Task,
    rewards: Sequence[Callable],
    config: GRPOConfig,
    *,
    measure: Callable[[Policy], dict[str, float]] | None = None,
    **overrides: Any,
) -> trl.GRPOTrainer:
    """A `GRPOTrainer`, ready for `.train()`, that learns what `training.train` would.

    It writes `history.jsonl` and `run.json` of the same form into its `output_dir`, with the same
    evaluation, so that notebooks, plots and reports read either. `overrides` are fields of TRL's
    config, `output_dir` and `seed` among them (and `use_vllm`); `measure` is `train`'s.

    Raises ValueError where policy, task, rewards and config do not fit together or TRL lacks a
    field; what TRL raises for its own.
    """
    check_task(task, rewards, config)
    processes = join(policy.device.type)
    args = trl_config(config, policy, processes, **overrides)
    with _as_reference(policy, Path(args.output_dir)) if args.beta else nullcontext():
        trainer = _Trainer(
            model=policy.model,
            reward_funcs=[
                whole_groups(reward) if hasattr(reward, "num_generations") else reward
                for reward in rewards
            ],
            args=args,
            train_dataset=task.train,
            processing_class=policy.tokenizer,
        )
    names = [reward_name(reward) for reward in rewards]
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_RunFiles(trainer, policy, task, config, names, measure))
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
    measure: Callable[[Policy], dict[str, float]] | None = None,
    **overrides: Any,
) -> Run:
    """`training.train`, done by TRL; arguments, files and what is returned are the same.

    There is no `collector`: TRL collects its own. Its checkpoints are `checkpoint-N` in
    `output_dir`. Raises, beside what `grpo_trainer` raises, RuntimeError where no completion could
    be scored for several steps in a row, and where another process of the run has ended.
    """
    output_dir = make_output_dir(output_dir)
    trainer = grpo_trainer(
        policy, task, rewards, config, measure=measure,
        **{"output_dir": str(output_dir), "seed": seed, **overrides},
    )  # fmt: skip
    last = last_checkpoint(output_dir) if resume else None
    several = PartialState().num_processes > 1
    try:
        with _told_when_ended(output_dir) if several else nullcontext():
            trainer.train(resume_from_checkpoint=last and str(last))
    except RuntimeError as error:
        if several and any(word in str(error) for word in ("peer", "gloo", "NCCL")):
            why = str(error).splitlines()[0][:120]
            raise RuntimeError(_ended(output_dir, f" ({why})")) from None
        raise
    PartialState().wait_for_everyone()  # the first process writes what all of them read
    told = json.loads((output_dir / RUN).read_text())
    return Run(output_dir, config, seed, told["history"], told["start"])


@contextmanager
def _told_when_ended(output_dir: Path) -> Iterator[None]:
    """A launcher ends all processes where one has failed: say so, and how to go on."""

    def end(*_: object) -> None:
        raise RuntimeError(_ended(output_dir))

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest of TRL's checkpoints that was written to its end, None where there is none."""

    def step(path: Path) -> int:
        return int(path.name.split("-")[-1])

    for path in sorted(Path(output_dir).glob("checkpoint-*"), key=step, reverse=True):
        try:
            if json.loads((path / "trainer_state.json").read_text())["global_step"] == step(path):
                return path  # it is written last
        except (OSError, ValueError, KeyError):
            continue
    return None


def _ended(output_dir: Path, why: str = "") -> str:
    last = last_checkpoint(output_dir)
    how = f"resume, from {last.name}" if last else "start again, there is no checkpoint yet"
    return f"another process of this run has ended, so this one stops{why}: {how} in {output_dir}."


@contextmanager
def _as_reference(policy: Policy, output_dir: Path) -> Iterator[None]:
    """Let TRL find the policy as it is now where it looks for the reference model.

    It loads that by the name of the policy's, which may have another revision on the Hub, or may
    not be what the policy is by now. (With LoRA it switches the adapter off, and loads nothing.)
    """
    config, folder = policy.model.config, output_dir / "reference"
    named = config._name_or_path
    if PartialState().is_main_process and not hasattr(policy.model, "disable_adapter"):
        policy.model.save_pretrained(folder)
    PartialState().wait_for_everyone()
    config._name_or_path = str(folder)
    try:
        yield
    finally:
        config._name_or_path = named


# --- what TRL's trainer does otherwise ------------------------------------------------------------


class _Trainer(trl.GRPOTrainer):
    """What one reward could not score is spared the other rewards too, as in `training.score`."""

    def _calculate_rewards(self, *arguments, **keywords):
        table = super()._calculate_rewards(*arguments, **keywords)
        counted = self.reward_weights.to(table.device) != 0
        missing = table[:, counted].isnan().any(dim=1)
        return table.masked_fill(missing[:, None], torch.nan)


def whole_groups(reward: Callable) -> Callable:
    """`reward` for one of several processes: it gets the completions of all, in their order.

    A trainer deals the completions of a batch out to its processes, and where their number is no
    multiple of the group size, one group lies in two of them. The first process computes the reward
    of all of them, the others wait; each returns its own part. In one process it is `reward`.

    Raises what `reward` raises, in every process, so that none waits for another.
    """
    state = PartialState()
    if state.num_processes == 1:
        return reward

    def gathered(prompts, completions, completion_ids, **columns):
        own = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        own |= {k: v for k, v in columns.items() if isinstance(v, list) and len(v) == len(prompts)}
        rest = {k: v for k, v in columns.items() if k not in own}
        sizes = gather_object([len(prompts)])
        everyone = {name: gather_object(values) for name, values in own.items()}
        outcome: list[Any] = [None]
        if state.is_main_process:
            try:
                outcome = [reward(**everyone, **rest)]
            except Exception as error:  # told to the others, which would wait for ever
                outcome = [error]
        (values,) = broadcast_object_list(outcome)
        if isinstance(values, Exception):
            raise values
        start = sum(sizes[: state.process_index])
        return values[start : start + len(prompts)]

    gathered.__name__ = reward_name(reward)
    return gathered


class _RunFiles(TrainerCallback):
    """Writes `history.jsonl` and `run.json` as `training.train` does, and evaluates as it does.

    The first process writes. Where the weights are spread over several processes (ZeRO-3, FSDP)
    none of them can sample alone: nothing is evaluated then, and `run.json` says so.
    """

    def __init__(self, trainer, policy, task, config, names, measure) -> None:
        self.trainer, self.policy, self.task, self.config = trainer, policy, task, config
        self.folder, self.measure = Path(trainer.args.output_dir), measure
        self.history: list[dict] = []
        self.start = {"collector": f"TRL {trl.__version__}", "rewards": names}
        self.unscored = self.tokens = 0
        self.began = 0.0
        self.progress = tqdm(disable=True)

    def _evaluated(self) -> dict[str, float]:
        if is_sharded():
            self.start["evaluation"] = "none: the weights are spread over several processes"
            return {}
        training = self.policy.model.training
        self.policy.model.eval()
        measured = self.measure(self.policy) if self.measure else {}
        found = evaluate(self.policy, self.task.test, self.config, seed=self.trainer.args.seed)
        self.policy.model.train(training)
        return found | measured

    def _log(self, row: dict) -> None:
        self.history.append(row)
        write_atomic(self.folder / HISTORY, "".join(json.dumps(one) + "\n" for one in self.history))

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        done = state.global_step // self.config.updates_per_step
        if done:  # resumed
            rows = map(json.loads, (self.folder / HISTORY).read_text().splitlines())
            self.history = [row for row in rows if row["step"] <= done]
            self.tokens = self.history[-1]["num_generated_tokens"]
        elif self.config.eval_on_start:
            self._log({"step": 0, "num_generated_tokens": 0, **self._evaluated()})
        self.progress = tqdm(initial=done, total=self.config.max_steps, desc="trl", file=sys.stdout)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % self.config.updates_per_step == 0:
            self.began = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or "completions/mean_length" not in (logs or {}):
            return
        config, step = self.config, state.global_step // self.config.updates_per_step
        names = self.start["rewards"]
        unscored = all(logs.get(f"rewards/{name}/mean") is None for name in names)
        self.unscored = self.unscored + 1 if unscored else 0
        self.tokens += round(logs["completions/mean_length"] * config.generation_batch_size)
        row = {"step": step, "num_generated_tokens": self.tokens}
        row |= {k: v for k, v in logs.items() if isinstance(v, (int, float)) and k != "step_time"}
        row["step_time"] = time.perf_counter() - self.began
        if self.unscored >= config.max_unscored_steps:
            self._log(row)
            raise RuntimeError(
                f"no completion could be scored for {self.unscored} steps in a row (up to step "
                f"{step}): look at what {', '.join(names)} return."
            )
        if step == config.max_steps or (config.eval_steps and step % config.eval_steps == 0):
            row |= self._evaluated()
        self._log(row)
        self.progress.update()
        shown = {"reward": row.get("reward"), "pass@1": row.get("eval/pass@1")}
        self.progress.set_postfix({k: f"{v:.2f}" for k, v in shown.items() if v is not None})

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.close()
        if state.is_world_process_zero:
            told = {"config": dataclasses.asdict(self.config), "seed": args.seed,
                    "start": self.start, "history": self.history}  # fmt: skip
            write_atomic(self.folder / RUN, json.dumps(told, indent=1))
