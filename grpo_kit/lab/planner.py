"""What a run takes before it is started: memory by part, time and money. `grpo-kit plan`.

Counted from the model's shape and the config, not measured: weights, gradients and optimiser
exactly, activations by a formula that the tests hold against what autograd keeps, and time as the
least that the hardware allows, divided by the share of it that is reached (`reached`, a guess until
`grpo-kit bench --scaling` has measured it on such a machine: "of the limit").

The limits: a decode step reads all weights and the cache of all rows, or computes 2 N per row; an
update computes 6 N a token (4 N where only LoRA weights get a gradient), each pass without gradient
2 N. Sampling and updating take turns: what one of them needs is free for the other.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from grpo_kit.profiles import Profile

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions, as transformers' configs name them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    head_dim: int = 0  # 0 = hidden_size / num_attention_heads
    qkv_bias: bool = True  # Qwen2 has them
    head_norms: bool = False  # Qwen3 has them

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Of a transformers config of the Qwen2, Qwen3 or Llama family.

        Raises ValueError for another one, and for a mixture of experts.
        """
        names = list(cls.__dataclass_fields__)[:7]
        lacks = [name for name in names if not hasattr(config, name)]
        if lacks or hasattr(config, "num_experts"):
            raise ValueError(
                f"models of type {config.model_type!r} cannot be planned, only those built like "
                "Qwen2, Qwen3 or Llama; GRPO_KIT_SKIP_PLAN=1 begins a run without a plan."
            )
        return cls(
            *(getattr(config, name) for name in names),
            head_dim=getattr(config, "head_dim", None) or 0,
            qkv_bias=getattr(config, "attention_bias", config.model_type == "qwen2"),
            head_norms=config.model_type == "qwen3",
        )

    @property
    def head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        return self.num_attention_heads * self.head

    @property
    def key_value_size(self) -> int:
        return self.num_key_value_heads * self.head

    @property
    def linear_sizes(self) -> list[tuple[int, int]]:
        """(in, out) of the linear layers of a block, those that LoRA is put on."""
        h, m = self.hidden_size, self.intermediate_size
        q, kv = self.query_size, self.key_value_size
        return [(h, q), (h, kv), (h, kv), (q, h), (h, m), (h, m), (m, h)]

    @property
    def parameters(self) -> int:
        h = self.hidden_size
        block = sum(a * b for a, b in self.linear_sizes) + 2 * h
        block += self.qkv_bias * (self.query_size + 2 * self.key_value_size)
        block += self.head_norms * 2 * self.head
        embeddings = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * block + embeddings + h

    def lora_parameters(self, rank: int) -> int:
        return self.num_hidden_layers * rank * sum(a + b for a, b in self.linear_sizes)

    def cache_bytes(self, width: int = 2) -> int:
        """Of the keys and values of one token."""
        return 2 * self.num_hidden_layers * self.key_value_size * width

    def activation_bytes(self, width: int = 2) -> int:
        """What autograd keeps of one token in all blocks, in arithmetic of `width` bytes.

        Of a block: queries, keys and values (those repeated for every query head, as with a mask)
        and what attention returns; gate, up, what becomes of them; in 4 bytes what the two
        normalisations work with.
        """
        h, m = self.hidden_size, self.intermediate_size
        narrow = 4 * self.query_size + 4 * m + (h if width < 4 else 0)
        return self.num_hidden_layers * (narrow * width + 24 * h + 4 * self.num_attention_heads)

    def mask_bytes(self, length: int, width: int = 2) -> int:
        """Of the mask that every block keeps of one row of `length` tokens."""
        return self.num_hidden_layers * length**2 * width


SHAPES = {  # of the models that profiles name, so that planning needs no Hub
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(896, 24, 14, 2, 4864, 151_936, True),
    "Qwen/Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": Shape(3584, 28, 28, 4, 18_944, 152_064, False),
    "Qwen/Qwen3-32B": Shape(5120, 64, 64, 8, 25_600, 151_936, False, 128, False, True),
}


@dataclass(frozen=True)
class GPU:
    """By its data sheet: GiB, GB/s, and TFLOP/s of dense 16-bit arithmetic."""

    name: str
    memory: float
    bandwidth: float
    tflops: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("T4", 15, 320, 65),
        GPU("L4", 22, 300, 121),
        GPU("A100-40", 40, 1555, 312),
        GPU("A100-80", 80, 2039, 312),
        GPU("H100", 80, 3350, 989),
        GPU("H200", 139, 4800, 989),
    )
}
ENGINES = ("kit", "trl", "trl+vllm", "trl+vllm-server")
SAMPLING = ("cache of sampling", "weights gathered to sample")
UPDATING = ("gradients", "16-bit weights", "activations", "logits")
RESERVE = 1.5  # GiB of context, kernels and what the allocator cannot hand out again
REACHED = 0.3  # of the limits; a guess, see the module's docstring
VLLM_SHARE = 0.3  # of a GPU, TRL's default


@dataclass(frozen=True)
class Plan:
    """What a run takes: GiB a GPU by part, seconds a step by part, hours in all."""

    memory: dict[str, float]
    seconds: dict[str, float]
    tokens_per_second: float  # generated, all GPUs together, while generating
    hours: float
    gpus: int
    gpu: GPU

    @property
    def total(self) -> float:
        """GiB at the fuller of the two moments: sampling, updating."""
        sampling, updating = (
            sum(self.memory.get(part, 0.0) for part in parts) for parts in (SAMPLING, UPDATING)
        )
        return sum(self.memory.values()) - min(sampling, updating)

    @property
    def room(self) -> float:
        """GiB of a GPU that are left, negative where it is too small."""
        return self.gpu.memory - self.total


def shape_of(profile: Profile) -> Shape:
    """The shape of the profile's policy: known, or read from its folder or the Hub's config."""
    if profile.policy in SHAPES:
        return SHAPES[profile.policy]
    from transformers import AutoConfig

    from grpo_kit.paths import data_dir

    folder = data_dir() / profile.policy
    source = folder if folder.is_dir() else profile.policy
    return Shape.of(AutoConfig.from_pretrained(source, revision=profile.revision))


def plan(
    profile: Profile,
    *,
    gpus: int = 1,
    gpu: str | GPU = "H100",
    engine: str = "kit",
    sharded: bool = False,
    vllm_share: float = VLLM_SHARE,
    prompt_length: int = 200,
    mean_share: float = 0.5,
    reached: float = REACHED,
) -> Plan:
    """Count what a run of the profile takes on `gpus` of a kind.

    Args:
        gpu: a name of `GPUS`, or another one's data.
        engine: "kit" runs on one GPU; "trl" shares the batch among all; "trl+vllm" samples by vLLM
            on the same GPUs, "trl+vllm-server" on others, as many and alike, which are not counted.
        sharded: weights, gradients and optimiser spread over the GPUs (ZeRO-3, FSDP).
        vllm_share: of a GPU, what vLLM takes on it ("trl+vllm"); TRL's vllm_gpu_memory_utilization.
        prompt_length: tokens of a prompt, with the chat template.
        mean_share: of `max_completion_length`, how long a completion is in the mean.
        reached: the share of the hardware's limits that is reached.

    Judges, embedders and their GPUs are not counted. Raises ValueError for what does not go
    together.
    """
    if isinstance(gpu, str) and gpu not in GPUS:
        raise ValueError(f"unknown GPU {gpu!r}: choose among {', '.join(GPUS)}.")
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: choose among {', '.join(ENGINES)}.")
    if gpus < 1 or (engine == "kit" and (gpus > 1 or sharded)):
        raise ValueError(
            f"{gpus} GPUs: the kit's own trainer runs on one, choose engine 'trl' for more."
            if engine == "kit"
            else f"gpus is {gpus}, it must be at least 1."
        )
    if not (0 < mean_share <= 1 and 0 < reached <= 1 and 0 < vllm_share <= 1):
        raise ValueError("mean_share, reached and vllm_share are shares: more than 0, at most 1.")
    shape, config = shape_of(profile), profile.config
    machine = GPUS[gpu] if isinstance(gpu, str) else gpu
    memory = _memory(profile, shape, gpus, engine, sharded, prompt_length)
    if engine == "trl+vllm":
        memory["vLLM"] = vllm_share * machine.memory
    mean = mean_share * config.max_completion_length
    wide = 4 if profile.device == "cpu" else 2  # bytes of a number that is computed with
    cached = wide if engine.startswith("trl+vllm") else _cache_width(profile)

    def sampling(rows: float, batches: int) -> float:
        """Seconds for `batches` of `rows` completions, one batch after the other."""
        read = config.max_completion_length * shape.parameters * wide
        read += rows * mean * (prompt_length + mean / 2) * shape.cache_bytes(cached)
        computed = (
            2 * shape.parameters * (rows * mean + rows / config.num_generations * prompt_length)
        )
        least = max(read / machine.bandwidth / 1e9, computed / machine.tflops / 1e12)
        return batches * least / reached

    rows = config.generation_batch_size / gpus
    chunks = config.rollout_chunks if engine == "kit" else 1
    update = _update_flops(profile, shape, rows, engine, prompt_length, mean)
    seconds = {
        "generation": sampling(rows / chunks, chunks),
        "update": update / machine.tflops / 1e12 / reached,
    }
    evaluations = int(config.eval_on_start) + 1
    if config.eval_steps:
        evaluations += (config.max_steps - 1) // config.eval_steps
    answers = config.eval_prompts * (1 + config.num_generations_eval)
    at_a_time = config.evaluation_batch_size  # of one process, the others wait
    evaluating = evaluations * sampling(at_a_time, math.ceil(answers / at_a_time))
    hours = (config.max_steps * sum(seconds.values()) + evaluating) / 3600
    tokens = config.generation_batch_size * mean / seconds["generation"]
    return Plan(memory, seconds, tokens, hours, gpus, machine)


def _cache_width(profile: Profile) -> int:
    """Bytes of a number in the cache: with weights of 4 bytes 4, 16-bit arithmetic or not."""
    return 4 if profile.dtype == "float32" else 2


def _memory(
    profile: Profile, shape: Shape, gpus: int, engine: str, sharded: bool, prompt: int
) -> dict[str, float]:
    config, full = profile.config, not profile.lora_rank
    n, width = shape.parameters, 4 if profile.dtype == "float32" else 2
    arithmetic = 4 if profile.device == "cpu" else 2
    trained = (n if full else shape.lora_parameters(profile.lora_rank)) * (width if full else 4)
    spread = gpus if sharded else 1
    length = config.max_completion_length
    rows, _ = config.shared_by(gpus)
    group = config.num_generations if engine == "kit" else 1  # the kit runs a prompt once a group
    tokens = rows * length + max(1, rows // group) * prompt
    activations = tokens * shape.activation_bytes(arithmetic)
    activations += rows * shape.mask_bytes(prompt + length, arithmetic)
    from grpo_kit.generation import LOGITS_BUDGET

    # Both trainers take the head in tiles; its gradient is summed beside that of the embedding.
    logits = (
        2 * LOGITS_BUDGET[profile.device != "cpu"] * 4
        + full * shape.vocab_size * shape.hidden_size * 4
    )
    at_once = config.generation_batch_size // (gpus if engine != "kit" else config.rollout_chunks)
    if engine.startswith("trl+vllm"):
        at_once = 0
    if not sharded:  # else nothing is evaluated
        at_once = max(
            at_once,
            min(config.evaluation_batch_size, config.eval_prompts * config.num_generations_eval),
        )
    parts = {
        "weights": n * width / spread + (0 if full else trained),
        "optimiser": 2 * trained / spread,
        "reference": (n * width / spread) if config.beta and full else 0,
        "gradients": trained / spread,
        "16-bit weights": n * 2 / spread if width > arithmetic else 0,
        "activations": activations,
        "logits": logits,
        "cache of sampling": at_once * (prompt + length) * shape.cache_bytes(_cache_width(profile)),
        "weights gathered to sample": n * width if sharded and engine == "trl" else 0,
        "reserve": RESERVE * GIB,
    }
    return {part: value / GIB for part, value in parts.items() if value}


def _update_flops(
    profile: Profile, shape: Shape, rows: float, engine: str, prompt: int, mean: float
) -> float:
    """Of one GPU's share of a step: updates, and passes for old and reference log-probabilities."""
    config = profile.config
    shared = rows / config.num_generations if engine == "kit" else rows  # prompts that are run
    tokens = rows * mean + shared * prompt
    a_token = (4 if profile.lora_rank else 6) * config.num_iterations
    a_token += 2 * (config.updates_per_step > 1) + 2 * bool(config.beta)
    if engine == "kit" and profile.device != "cpu":
        a_token += 2  # what another backend has sampled is scored, see `backends`
    return shape.parameters * tokens * a_token


def check_room(profile: Profile, gib: float, **how: Any) -> None:
    """Raise ValueError, with what needs the memory and what to lower, where `gib` are too few.

    `gib`: of the GPU, without what others hold of it, an endpoint's server say; `how`: `plan`'s
    `gpus`, `engine`, `sharded` and `vllm_share`.

    GRPO_KIT_SKIP_PLAN=1 lets a run begin all the same: the plan counts the longest completions.
    """
    if os.environ.get("GRPO_KIT_SKIP_PLAN") == "1":
        return
    machine = GPU("the GPU here, as it is now,", gib, 1.0, 1.0)
    made = plan(profile, gpu=machine, **how)
    if made.room < 0:
        raise ValueError(f"{advice(profile, made)} (GRPO_KIT_SKIP_PLAN=1 begins all the same.)")


def advice(profile: Profile, made: Plan) -> str:
    """Whether it fits, in a sentence; where it does not, what to lower first."""
    if made.room >= 0:
        return f"It fits: {made.total:.1f} of {made.gpu.memory:.0f} GiB."
    rows, _ = profile.config.shared_by(made.gpus)
    ways = {
        "weights": "train LoRA weights (lora_rank=32) or take a smaller model",
        "gradients": "train LoRA weights (lora_rank=32)",
        "optimiser": "train LoRA weights (lora_rank=32), or spread it over GPUs (--sharded)",
        "reference": "leave out the KL term (beta=0)",
        "activations": f"lower per_device_train_batch_size ({rows}) and raise "
        "gradient_accumulation_steps",
        "logits": f"lower per_device_train_batch_size ({rows}) and raise "
        "gradient_accumulation_steps",
        "16-bit weights": "train LoRA weights (lora_rank=32)",
        "cache of sampling": "lower generation_batch_size or max_completion_length, or raise "
        "rollout_chunks",
        "vLLM": "lower vLLM's share (--vllm-share), or give vLLM a GPU of its own",
        "weights gathered to sample": "sample by vLLM",
    }
    largest = sorted(made.memory, key=made.memory.get, reverse=True)
    told = dict.fromkeys(ways[part] for part in largest if part in ways)
    parts = ", ".join(f"{part} {made.memory[part]:.1f}" for part in largest[:4])
    return (
        f"It does not fit: {made.total:.1f} GiB are needed ({parts}), and {made.gpu.name} has "
        f"{made.gpu.memory:.0f}. What helps: {'; '.join(list(told)[:3])}."
    )


def table(made: Plan, price: float | None = None) -> Any:
    """The plan as a table for a terminal."""
    from rich.table import Table

    rows = Table("", title=f"{made.gpus} x {made.gpu.name}")
    rows.add_column("", justify="right")
    for part, gib in made.memory.items():
        rows.add_row(part, f"{gib:.2f} GiB")
    rows.add_row("a GPU in all", f"{made.total:.1f} of {made.gpu.memory:.0f} GiB")
    rows.add_section()
    for part, seconds in made.seconds.items():
        rows.add_row(f"{part}, a step", f"{seconds:.1f} s")
    rows.add_row("tokens a second, sampling", f"{made.tokens_per_second:,.0f}")
    rows.add_row("the run, evaluations too", f"{made.hours:.2f} h")
    if price is not None:
        rows.add_row("cost", f"{made.hours * made.gpus * price:,.2f}")
    return rows
