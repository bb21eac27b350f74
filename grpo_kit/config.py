"""What a run is: `GRPOConfig`, in TRL's names, and the four profiles that move a notebook between
machines.

Fields that TRL's `GRPOConfig` (or transformers' `TrainingArguments` below it) has carry the same
name and meaning here; the few that it lacks stand at the end, marked. Nothing heavy is imported: a
profile loads its policy and its task only when asked to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


CHOICES = {
    "loss_type": ("grpo", "bnpo", "dapo", "dr_grpo", "cispo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "sampling_backend": ("auto", "plain", "static", "continuous"),
}
AT_LEAST = {
    "max_steps max_completion_length num_iterations gradient_accumulation_steps "
    "per_device_train_batch_size num_generations_eval max_unscored_steps rollout_chunks "
    "max_generated_tokens": 1,
    "eval_steps save_steps eval_prompts warmup_steps dynamic_sampling_rounds epsilon beta": 0,
}


@dataclass(frozen=True)
class GRPOConfig:
    """Every number of a GRPO run; the seed and the output folder are arguments of `train`.

    Batch: one step samples `generation_batch_size` completions, `num_generations` a prompt. They
    are passed over `num_iterations` times; each optimiser step takes
    `per_device_train_batch_size` * `gradient_accumulation_steps` of them, the former in one forward
    pass. The losses of micro-batches add up to that of the whole, whatever the split (but for
    `bnpo`, which is local by definition).

    Raises ValueError, naming field, value and remedy, for a combination that cannot run.
    """

    max_steps: int = 100  # generation batches, each with all its updates
    learning_rate: float = 1e-6
    lr_scheduler_type: str = "linear"  # any of transformers' schedulers
    warmup_steps: int = 0  # optimiser steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0  # 0 = no clipping

    num_generations: int = 8
    generation_batch_size: int = 128
    per_device_train_batch_size: int | None = None  # None = the generation batch
    gradient_accumulation_steps: int = 1
    num_iterations: int = 1

    max_completion_length: int = 256  # tokens
    temperature: float = 1.0
    top_p: float = 1.0  # here for the sentence that refuses another value
    top_k: int = 0

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: str = "token"
    scale_rewards: str = "group"
    reward_weights: tuple[float, ...] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False

    eval_steps: int = 0  # 0 = only after the last step
    eval_on_start: bool = True  # and before the first
    num_generations_eval: int = 8
    save_steps: int = 20  # 0 = only at the end

    # not in TRL's config
    max_generated_tokens: int | None = None  # stop after the step that reaches so many
    eval_prompts: int = 128  # the first rows of task.test
    dynamic_sampling_rounds: int = 0  # DAPO: how often groups without spread are sampled anew
    importance_sampling_cap: float | None = None  # truncated importance sampling, C
    rollout_chunks: int = 1  # parts of a batch; a part is judged while the next is sampled
    sampling_backend: str = "auto"  # plain, static, continuous; see grpo_kit.backends
    max_unscored_steps: int = 3  # steps in a row without any scored completion before the run stops

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                told = ", ".join(repr(choice) for choice in choices if isinstance(choice, str))
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {told}.")
        for names, least in AT_LEAST.items():
            for name in names.split():
                if (value := getattr(self, name)) is not None and value < least:
                    raise ValueError(f"{name} is {value}; it must be at least {least}.")
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations is {self.num_generations}; a group of one has nothing to be "
                "compared with, take 2 or more."
            )
        if self.generation_batch_size < 1 or self.generation_batch_size % self.num_generations:
            raise ValueError(
                f"generation_batch_size is {self.generation_batch_size}; it must be a multiple of "
                f"num_generations ({self.num_generations}), so that groups are complete."
            )
        if self.generation_batch_size % self.optimizer_batch_size:
            raise ValueError(
                f"generation_batch_size ({self.generation_batch_size}) is not a multiple of "
                f"per_device_train_batch_size x gradient_accumulation_steps "
                f"({self.optimizer_batch_size}); choose values that divide it."
            )
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p is {self.top_p} and top_k is {self.top_k}; training samples from the whole "
                "distribution, since log-probabilities are taken over the whole vocabulary and a "
                "ratio to a truncated sampler would not be 1: use top_p=1.0 and top_k=0 (both are "
                "free in evaluation)."
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature is {self.temperature}; sampling needs more than 0.")
        constant = ("constant", "constant_with_warmup")
        if self.max_generated_tokens is not None and self.lr_scheduler_type not in constant:
            raise ValueError(
                f"lr_scheduler_type is {self.lr_scheduler_type!r} with max_generated_tokens: how "
                "many steps the tokens last is not known before, so that no rate can be let down "
                "over them; use 'constant' or 'constant_with_warmup'."
            )
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("loss_type 'cispo' needs epsilon_high, the largest ratio; try 5.0.")
        if self.reward_weights is not None:
            object.__setattr__(self, "reward_weights", tuple(self.reward_weights))
            if not any(self.reward_weights):
                raise ValueError(
                    f"reward_weights are {self.reward_weights}: nothing would be learnt; give one "
                    "that is not 0."
                )

    @property
    def optimizer_batch_size(self) -> int:
        """Completions of one optimiser step."""
        return (
            self.per_device_train_batch_size or self.generation_batch_size
        ) * self.gradient_accumulation_steps

    def shared_by(self, processes: int) -> tuple[int, int]:
        """How `processes` share an optimiser step: completions of a forward pass, and passes.

        As few passes as keep each no larger than one process's alone would be. Raises ValueError
        where they cannot share evenly.
        """
        rows, most = self.optimizer_batch_size, self.per_device_train_batch_size
        share, rest = divmod(rows, processes)
        if rest:
            raise ValueError(
                f"{processes} processes cannot share the {rows} completions of an optimiser step "
                "evenly: choose per_device_train_batch_size x gradient_accumulation_steps to be a "
                "multiple of their number."
            )
        alone = most or self.generation_batch_size
        passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= alone)
        return share // passes, passes

    @property
    def evaluation_batch_size(self) -> int:
        """Completions sampled at a time where nothing is learnt: a short batch wastes time."""
        return max(self.generation_batch_size // self.rollout_chunks, 128)

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps made from one generation batch."""
        return self.num_iterations * (self.generation_batch_size // self.optimizer_batch_size)
