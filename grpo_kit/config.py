"""What a run is: `GRPOConfig`, in TRL's names, and the four profiles that move a notebook between
machines.

Fields that TRL's `GRPOConfig` (or transformers' `TrainingArguments` below it) has carry the same
name and meaning here; the few that it lacks stand at the end, marked. Nothing heavy is imported: a
profile loads its policy and its task only when asked to.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_kit.paths import data_dir

if TYPE_CHECKING:
    from grpo_kit.flow import AgentSystem
    from grpo_kit.models import Policy
    from grpo_kit.tasks import Task


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


@dataclass(frozen=True)
class Profile:
    """A machine's choice of policy, task and run length; notebooks take one by name."""

    name: str
    machine: str
    config: GRPOConfig
    policy: str  # a folder of the kit's data, or a Hub name
    revision: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    lora_rank: int = 0  # 0 = train all weights
    task: str = "word_problems"
    data: str | None = None  # a folder with the task's rows, instead of the Hub
    embedder: str = "minilm"  # what `load_embedder` takes
    judge: str = "tiny"  # a frozen tiny base, "self" (any frozen policy), or a model's name
    roles: str = "tiny"  # of Flow-GRPO, the frozen ones: as for the judge
    threads: int | None = field(default=None)  # torch threads that the notebooks set

    def load_policy(self) -> Policy:
        """The policy, ready to train. Raises RuntimeError if the machine lacks what it needs."""
        from grpo_kit.models import load_policy

        path = data_dir() / self.policy
        if "/" not in self.policy and not path.is_dir():  # a folder of the kit's, not a Hub name
            raise RuntimeError(
                f"profile {self.name!r} trains {self.policy}, which is not in {data_dir()}: build "
                "it with `grpo-kit pretrain` and give its folder, `--policy runs/base`."
            )
        return load_policy(
            path if path.is_dir() else self.policy,
            revision=self.revision,
            device=self.device,
            dtype=self.dtype,
            lora_rank=self.lora_rank,
        )

    def load_judge(self, policy: Policy) -> Any:
        """The judge: a frozen copy of `policy`, or the model behind the endpoint.

        The endpoint's address is the environment variable GRPO_KIT_JUDGE_URL, by default a vLLM
        server on this machine, and its key JUDGE_KEY (any text, where the server wants none).
        Raises ValueError where the key is not set.
        """
        from grpo_kit.rewards.judge import LocalJudge, quality_prompt

        if self.judge == "tiny":
            return LocalJudge(policy)
        if self.judge == "self":
            return LocalJudge(policy, prompt=quality_prompt, max_new_tokens=256)
        return _endpoint(
            self.judge, "JUDGE", extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )

    def load_agents(self, policy: Policy, **limits: Any) -> AgentSystem:
        """Flow-GRPO's roles and tools around `policy` as planner; `limits` are `agent_system`'s.

        The frozen roles are a copy of `policy` as it is now, or the model `roles` behind an
        endpoint: GRPO_KIT_ROLES_URL and the key ROLES_KEY, as for `load_judge`. Tools are `lookup`
        in the shipped catalogues and `calculator`.
        """
        from grpo_kit.flow import GENERAL, TINY, Lookup, Tool, Toolkit, agent_system, calculator
        from grpo_kit.tasks.tool_questions import catalogue_path

        toolkit = Toolkit([Tool.of(Lookup(catalogue_path()), columns=("catalogue",)), calculator])
        if self.roles == "tiny":
            return agent_system(policy, toolkit, prompts=TINY, **limits)
        frozen = None if self.roles == "self" else _endpoint(self.roles, "ROLES")
        return agent_system(
            policy, toolkit, frozen=frozen, prompts=GENERAL, max_reply_tokens=256, **limits
        )

    def load_task(self) -> Task:
        """The task's train and test rows."""
        if self.task == "gsm8k":
            from grpo_kit.tasks.gsm8k import gsm8k

            return gsm8k(Path(self.data)) if self.data else gsm8k()
        if self.task == "competition_math":
            from grpo_kit.tasks.competition_math import competition_math

            return competition_math(self.data)
        from grpo_kit.tasks.word_problems import word_problems

        return word_problems()


def _endpoint(model: str, name: str, **request: Any) -> Any:
    """`model` behind the endpoint at GRPO_KIT_<name>_URL, with the key in <name>_KEY."""
    from grpo_kit.rewards.judge import EndpointJudge

    return EndpointJudge(
        model,
        base_url=os.environ.get(f"GRPO_KIT_{name}_URL", "http://127.0.0.1:8000/v1"),
        api_key_env=f"{name}_KEY",
        concurrency=32,
        request={"temperature": 0.0, "max_tokens": 1024, **request},
    )


_TINY = GRPOConfig(
    max_steps=100,
    learning_rate=2e-4,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=5,
    num_generations=8,
    generation_batch_size=128,
    max_completion_length=64,
    eval_prompts=128,
)

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "smoke",
            "2 CPU cores, seconds a notebook",
            GRPOConfig(
                max_steps=3,
                learning_rate=1e-4,
                lr_scheduler_type="constant_with_warmup",
                num_generations=4,
                generation_batch_size=16,
                max_completion_length=48,
                eval_prompts=8,
                num_generations_eval=4,
            ),
            policy="tiny-base",
            threads=1,
        ),
        Profile("tiny", "2 CPU cores, minutes", _TINY, policy="tiny-base", threads=1),
        Profile(
            "colab",
            "one 16 GB GPU",
            GRPOConfig(
                max_steps=100,
                learning_rate=1e-5,
                num_generations=8,
                generation_batch_size=64,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=8,
                max_completion_length=400,
                eval_prompts=200,
            ),
            policy="Qwen/Qwen2.5-0.5B-Instruct",
            revision="7ae557604adf67be50417f59c2c2f167def9a775",
            device="cuda",
            dtype="half",
            lora_rank=32,
            task="gsm8k",
            judge="self",
            roles="self",
        ),
        Profile(
            "paper",
            "one 80 GB GPU or more",
            GRPOConfig(
                max_steps=100,
                learning_rate=1e-6,
                num_generations=8,
                generation_batch_size=768,
                per_device_train_batch_size=8,
                gradient_accumulation_steps=96,
                max_completion_length=1024,
                eval_prompts=1319,
                rollout_chunks=4,
            ),
            policy="Qwen/Qwen2.5-1.5B",
            revision="8faed761d45a263340a0528343f099c05c9a4323",
            device="cuda",
            dtype="float32",
            task="gsm8k",
            embedder="Alibaba-NLP/gte-Qwen2-1.5B-instruct",
            judge="Qwen/Qwen3-32B",
            roles="Qwen/Qwen2.5-7B-Instruct",
        ),
    )
}
