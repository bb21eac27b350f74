"""`GRPOConfig`: every number of a run, in TRL's names.

Fields that TRL's `GRPOConfig` (or transformers' `TrainingArguments` below it) has mean the same
here; the few that it lacks stand at the end. pydantic checks the limits that each field carries.
"""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

AtLeast1 = Annotated[int, Field(ge=1)]
AtLeast0 = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
LossType = Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"]
# transformers' that need no arguments of their own
Schedule = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant",
                   "constant_with_warmup", "inverse_sqrt"]  # fmt: skip
Level = Literal["token", "sequence"]
Scale = Literal["group", "batch", "none", "mean"]
Baseline = Literal["group", "others", "batch"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
MOST_AT_ONCE = 256  # completions sampled together: their keys and values fill a GPU's memory
# In an error of a full GPU, as torch, cuBLAS and cuDNN's attention say it.
FULL = ("out of memory", "ALLOC_FAILED", "mha_graph.execute")


def reason(error: Exception) -> str:
    """An error in a line: of pydantic's, the first wrong field and what is wrong with it."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"])) + f": {first['msg']}"


def in_a_sentence(cls: type) -> type:
    """Make a pydantic dataclass say what is wrong as one ValueError with field, value and limit."""
    checked = cls.__init__

    @functools.wraps(checked)
    def init(self, *args, **fields) -> None:
        try:
            checked(self, *args, **fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            limit = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
            if first["type"] == "unexpected_keyword_argument":
                limit = f"{cls.__name__} has no such field"
            if first["loc"]:
                limit = f"{first['loc'][0]} is {first['input']!r}; {limit}."
            raise ValueError(limit) from None

    cls.__init__ = init
    return cls


@in_a_sentence
@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class GRPOConfig:
    """Every number of a GRPO run; the seed and the output folder are arguments of `train`.

    Batch: one step samples `generation_batch_size` completions, `num_generations` a prompt. They
    are passed over `num_iterations` times; each optimiser step takes
    `per_device_train_batch_size` * `gradient_accumulation_steps` of them, the first factor in one
    forward pass. The losses of micro-batches add up to that of the whole (but for `bnpo`).

    Raises ValueError, naming field, value and remedy, for a combination that cannot run.
    """

    max_steps: AtLeast1 = 100  # generation batches, each with all its updates
    learning_rate: NotNegative = 1e-6
    lr_scheduler_type: Schedule = "linear"
    warmup_steps: AtLeast0 = 0  # optimiser steps
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    max_grad_norm: NotNegative = 1.0  # 0 = no clipping
    # products in bfloat16 on a CPU, weights stay as they are; "auto": where one product is faster
    bf16: Literal["auto", True, False] = False  # a GPU always computes in 16 bits

    num_generations: Annotated[int, Field(ge=2)] = 8  # one has nothing to be compared with
    generation_batch_size: AtLeast1 = 128
    # None = the generation batch; a CPU takes a large one in passes, for the same gradient
    per_device_train_batch_size: AtLeast1 | None = None
    gradient_accumulation_steps: AtLeast1 = 1
    num_iterations: AtLeast1 = 1

    max_completion_length: AtLeast1 = 256  # tokens
    temperature: Positive = 1.0
    # the sampler is not truncated: log-probabilities are taken over the whole vocabulary
    top_p: Annotated[float, Field(ge=1, le=1)] = 1.0
    top_k: Literal[0] = 0

    loss_type: LossType = "dapo"
    epsilon: NotNegative = 0.2
    epsilon_high: Positive | None = None
    delta: float | None = None  # dual clip: bounds the ratio where the advantage is negative
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0  # tokens that are learnt from
    beta: NotNegative = 0.0
    use_bias_correction_kl: bool = True
    importance_sampling_level: Level = "token"
    scale_rewards: Scale | Literal[True, False] = "group"
    reward_weights: tuple[float, ...] | None = None
    multi_objective_aggregation: Aggregation = "sum_then_normalize"
    mask_truncated_completions: bool = False

    eval_steps: AtLeast0 = 0  # 0 = only after the last step
    eval_on_start: bool = True  # and before the first
    num_generations_eval: AtLeast1 = 8
    save_steps: AtLeast0 = 20  # 0 = only at the end

    # not in TRL's config
    max_generated_tokens: AtLeast1 | None = None  # stop after the step that reaches this many
    eval_prompts: AtLeast0 = 128  # the first rows of task.test
    eval_prompts_between: AtLeast0 | None = None  # in the midst of a run; None = as many
    baseline: Baseline = "group"  # what is taken off a reward; "others": RLOO, "batch": REINFORCE++
    dynamic_sampling_rounds: AtLeast0 = 0  # DAPO: how often groups without spread are resampled
    # the reward in which a group must differ, or "reward", their weighted sum; None =
    # what says what is right, where it is one of them, as in DAPO, else "reward"
    dynamic_sampling_metric: str | None = None
    importance_sampling_cap: Positive | None = None  # truncated importance sampling, C
    max_unscored_steps: AtLeast1 = 3  # steps in a row without a score before the run stops

    @model_validator(mode="after")
    def _fields_fit_together(self) -> GRPOConfig:
        group, rows = self.num_generations, self.optimizer_batch_size
        batch = f"generation_batch_size is {self.generation_batch_size}"
        if self.generation_batch_size % group:
            raise ValueError(f"{batch}; give a multiple of num_generations ({group}).")
        if self.generation_batch_size % rows:
            step = f"per_device_train_batch_size x gradient_accumulation_steps ({rows})"
            raise ValueError(f"{batch}; give a multiple of {step}.")
        schedule, without_end = self.lr_scheduler_type, ("constant", "constant_with_warmup")
        if self.max_generated_tokens is not None and schedule not in without_end:
            problem = f"lr_scheduler_type is {schedule!r}, but max_generated_tokens last an unknown"
            remedy = " or ".join(map(repr, without_end))
            raise ValueError(f"{problem} number of steps: use {remedy}.")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError("loss_type 'cispo' needs epsilon_high, the largest ratio; try 5.0.")
        if self.delta is not None:
            if self.loss_type == "cispo":
                raise ValueError(f"delta is {self.delta}, but 'cispo' bounds both sides: drop it.")
            highest = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
            if self.delta <= highest:
                limit = f"the clip already ends at {highest:g}: give more, or None"
                raise ValueError(f"delta is {self.delta}; {limit}.")
        if self.baseline != "group" and self.multi_objective_aggregation == "normalize_then_sum":
            problem = f"baseline is {self.baseline!r}, but 'normalize_then_sum' compares in groups"
            raise ValueError(f"{problem}: choose 'group', or 'sum_then_normalize'.")
        if self.reward_weights is not None and not any(self.reward_weights):
            raise ValueError(f"reward_weights are {self.reward_weights}; give one that is not 0.")
        return self

    @property
    def optimizer_batch_size(self) -> int:
        """Completions of one optimiser step."""
        per_pass = self.per_device_train_batch_size or self.generation_batch_size
        return per_pass * self.gradient_accumulation_steps

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps made from one generation batch."""
        return self.num_iterations * (self.generation_batch_size // self.optimizer_batch_size)

    @property
    def evaluation_batch_size(self) -> int:
        """Completions sampled at a time where nothing is learnt: few waste time, many memory."""
        return min(max(self.generation_batch_size, 128), MOST_AT_ONCE)

    def shared_by(self, processes: int) -> tuple[int, int]:
        """How `processes` share an optimiser step: completions of a forward pass, and passes.

        As few passes as keep each no larger than one process's. ValueError where it is uneven.
        """
        share, rest = divmod(self.optimizer_batch_size, processes)
        if rest:
            step = f"the {self.optimizer_batch_size} completions of an optimiser step"
            remedy = "change per_device_train_batch_size or gradient_accumulation_steps"
            raise ValueError(f"{processes} processes cannot share {step} evenly: {remedy}.")
        alone = self.per_device_train_batch_size or self.generation_batch_size
        passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= alone)
        return share // passes, passes
