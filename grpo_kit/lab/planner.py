"""What a run takes before it is started: memory by part, time and money. `grpo-kit plan`.

Nothing is measured. Weights are counted, activations follow a formula that the tests compare with
what autograd keeps. Time is the least that the hardware allows, divided by the share of it that is
reached; `grpo-kit bench --scaling` measures that share on a machine, as "of the limit".

The limits: a decode step reads all N weights and the cache of all rows, or computes 2 N a row; an
update computes 6 N a token (4 N with LoRA), each pass without gradient 2 N. Sampling and updating
take turns: the memory of one is free for the other.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from grpo_kit.paths import data_dir
from grpo_kit.profiles import Profile

GIB = 2**30
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size", "tie_word_embeddings")  # fmt: skip
MODELS = {  # of the profiles, so that planning needs no Hub: the type, then FIELDS
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 24, 14, 2, 4864, 151_936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 25_600, 151_936, False),
}
ENGINES = ("kit", "trl", "trl+vllm", "trl+vllm-server")
SAMPLING = ("cache of sampling", "weights gathered to sample")
UPDATING = ("gradients", "16-bit weights", "activations", "logits")
RESERVE = 1.5  # GiB of context, kernels and what the allocator cannot hand out again
REACHED = 0.3  # share of the hardware's limits; a guess for a machine without a benchmark


class GPU(NamedTuple):
    """By its data sheet: GiB, GB/s, and TFLOP/s of dense 16-bit arithmetic."""

    name: str
    memory: float
    bandwidth: float
    tflops: float


GPUS = {sheet[0]: GPU(*sheet) for sheet in (
    ("T4", 15, 320, 65), ("L4", 22, 300, 121), ("A100-40", 40, 1555, 312),
    ("A100-80", 80, 2039, 312), ("H100", 80, 3350, 989), ("H200", 139, 4800, 989),
)}  # fmt: skip


class Shape:
    """A decoder's sizes, from a transformers config of the Qwen2, Qwen3 or Llama family.

    `parameters` and `lora_parameters_per_rank` are counted on torch's `meta` device. Raises
    ValueError for another family, and for a mixture of experts.
    """

    def __init__(self, config: Any) -> None:
        if not all(hasattr(config, name) for name in FIELDS) or hasattr(config, "num_experts"):
            raise ValueError(
                f"models of type {config.model_type!r} cannot be planned, only those built like "
                "Qwen2, Qwen3 or Llama; GRPO_KIT_SKIP_PLAN=1 begins a run without a plan."
            )
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        linear = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.config, self.layers = config, config.num_hidden_layers
        self.parameters = sum(p.numel() for p in model.parameters())
        self.lora_parameters_per_rank = sum(m.in_features + m.out_features for m in linear)
        self.query_size = config.num_attention_heads * head
        self.key_value_size = config.num_key_value_heads * head

    def cache_bytes(self, width: int = 2) -> int:
        """Of the keys and values of one token, in numbers of `width` bytes."""
        return 2 * self.layers * self.key_value_size * width

    def activation_bytes(self, tokens: int, rows: int, length: int, width: int = 2) -> int:
        """What autograd keeps in all blocks of `tokens` in `rows` of `length` at most.

        Of a token in a block: queries, keys and values (repeated for every query head) and what
        attention returns; gate, up, and two products of them; in 4 bytes what the two
        normalisations work with. Of a row: the mask. `width`: bytes of a number of the arithmetic.
        """
        h, heads = self.config.hidden_size, self.config.num_attention_heads
        narrow = 4 * self.query_size + 4 * self.config.intermediate_size + (h if width < 4 else 0)
        per_token = narrow * width + 24 * h + 4 * heads
        return self.layers * (tokens * per_token + rows * length**2 * width)


@cache
def shape_of(policy: str, revision: str | None = None) -> Shape:
    """The shape of a policy: known by name, or read from its folder or the Hub's config."""
    from transformers import AutoConfig

    if policy in MODELS:
        kind, *sizes = MODELS[policy]
        return Shape(AutoConfig.for_model(kind, **dict(zip(FIELDS, sizes, strict=True))))
    folder = data_dir() / policy
    source = folder if folder.is_dir() else policy
    return Shape(AutoConfig.from_pretrained(source, revision=revision))


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
        turns = [
            sum(self.memory.get(part, 0.0) for part in parts) for parts in (SAMPLING, UPDATING)
        ]
        return sum(self.memory.values()) - min(turns)

    @property
    def room(self) -> float:
        """GiB of a GPU that are left, negative where it is too small."""
        return self.gpu.memory - self.total


def plan(
    profile: Profile,
    *,
    gpus: int = 1,
    gpu: str | GPU = "H100",
    engine: str = "kit",
    sharded: bool = False,
    vllm_share: float = 0.3,
    prompt_length: int = 200,
    mean_share: float = 0.5,
    reached: float = REACHED,
) -> Plan:
    """Count what a run of the profile takes on `gpus` of a kind; judges and embedders are left out.

    Args:
        gpu: a name of `GPUS`, or another one's data.
        engine: "kit" runs on one GPU; "trl" shares the batch among all; "trl+vllm" samples by vLLM
            on the same GPUs, "trl+vllm-server" on others, as many and alike, which are not counted.
        sharded: weights, gradients and optimiser spread over the GPUs (ZeRO-3, FSDP).
        vllm_share: of a GPU, what vLLM takes on it ("trl+vllm"); TRL's vllm_gpu_memory_utilization.
        prompt_length: tokens of a prompt, with the chat template.
        mean_share: mean length of a completion, as a share of `max_completion_length`.
        reached: the share of the hardware's limits that is reached.

    Raises ValueError for an unknown name, a number out of range, and several GPUs of the kit's.
    """
    for what, name, known in (("GPU", gpu, GPUS), ("engine", engine, ENGINES)):
        if isinstance(name, str) and name not in known:
            raise ValueError(f"unknown {what} {name!r}: choose among {', '.join(known)}.")
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}, it must be at least 1.")
    if engine == "kit" and (gpus > 1 or sharded):
        raise ValueError("the kit's own trainer runs on one GPU, unsharded: choose engine 'trl'.")
    shares = {"mean_share": mean_share, "reached": reached, "vllm_share": vllm_share}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise ValueError(f"{name} is {share}; give a share, more than 0 and at most 1.")
    machine = GPUS[gpu] if isinstance(gpu, str) else gpu
    memory = _memory(profile, gpus, engine, sharded, prompt_length)
    if engine == "trl+vllm":
        memory["vLLM"] = vllm_share * machine.memory
    config, shape = profile.config, shape_of(profile.policy, profile.revision)
    mean = mean_share * config.max_completion_length
    width, arithmetic = _widths(profile)
    cached = width if engine in ("kit", "trl") else arithmetic

    def sampling(rows: float, batches: int) -> float:
        """Seconds for `batches` of `rows` completions, one batch after the other."""
        read = config.max_completion_length * shape.parameters * arithmetic
        read += rows * mean * (prompt_length + mean / 2) * shape.cache_bytes(cached)
        tokens = rows * mean + rows / config.num_generations * prompt_length
        computed = 2 * shape.parameters * tokens
        least = max(read / machine.bandwidth / 1e9, computed / machine.tflops / 1e12)
        return batches * least / reached

    rows = config.generation_batch_size / gpus
    chunks = config.rollout_chunks if engine == "kit" else 1
    update = _update_flops(profile, rows, engine, prompt_length, mean)
    seconds = {
        "generation": sampling(rows / chunks, chunks),
        "update": update / machine.tflops / 1e12 / reached,
    }
    evaluations = int(config.eval_on_start) + 1
    if config.eval_steps:
        evaluations += (config.max_steps - 1) // config.eval_steps
    answers = config.eval_prompts * (1 + config.num_generations_eval)
    at_once = config.evaluation_batch_size  # of one process, the others wait
    evaluating = evaluations * sampling(at_once, math.ceil(answers / at_once))
    hours = (config.max_steps * sum(seconds.values()) + evaluating) / 3600
    tokens = config.generation_batch_size * mean / seconds["generation"]
    return Plan(memory, seconds, tokens, hours, gpus, machine)


def _widths(profile: Profile) -> tuple[int, int]:
    """Bytes of a weight (and of a number in the cache), and of a number that is computed with."""
    return 4 if profile.dtype == "float32" else 2, 4 if profile.device == "cpu" else 2


def _memory(
    profile: Profile, gpus: int, engine: str, sharded: bool, prompt: int
) -> dict[str, float]:
    """GiB of a GPU by part, vLLM's left out."""
    from grpo_kit.generation import LOGITS_BUDGET

    config, full, kit = profile.config, not profile.lora_rank, engine == "kit"
    shape, (width, arithmetic) = shape_of(profile.policy, profile.revision), _widths(profile)
    spread = gpus if sharded else 1
    weights = shape.parameters * width / spread
    lora = shape.lora_parameters_per_rank * profile.lora_rank * 4
    trained = weights if full else lora / spread
    longest = prompt + config.max_completion_length
    rows, _ = config.shared_by(gpus)
    prompts = max(1, rows // config.num_generations) if kit else rows  # TRL runs one a completion
    tokens = rows * config.max_completion_length + prompts * prompt
    # Both trainers take the head in tiles; its gradient is summed beside that of the embedding.
    head = full * shape.config.vocab_size * shape.config.hidden_size
    sampled = config.generation_batch_size // (config.rollout_chunks if kit else gpus)
    if engine.startswith("trl+vllm"):
        sampled = 0
    if not sharded:  # else nothing is evaluated
        answers = config.eval_prompts * config.num_generations_eval
        sampled = max(sampled, min(config.evaluation_batch_size, answers))
    parts = {
        "weights": weights + (0 if full else lora),
        "optimiser": 2 * trained,
        "reference": weights if config.beta and full else 0,
        "gradients": trained,
        "16-bit weights": weights / 2 if width > arithmetic else 0,
        "activations": shape.activation_bytes(tokens, rows, longest, arithmetic),
        "logits": (2 * LOGITS_BUDGET[profile.device != "cpu"] + head) * 4,
        "cache of sampling": sampled * longest * shape.cache_bytes(width),
        "weights gathered to sample": weights * gpus if sharded and engine == "trl" else 0,
        "reserve": RESERVE * GIB,
    }
    return {part: size / GIB for part, size in parts.items() if size}


def _update_flops(profile: Profile, rows: float, engine: str, prompt: int, mean: float) -> float:
    """Of one GPU's share of a step: updates, and passes for old and reference log-probabilities."""
    config = profile.config
    prompts = rows / config.num_generations if engine == "kit" else rows
    per_token = (4 if profile.lora_rank else 6) * config.num_iterations
    per_token += 2 * (config.updates_per_step > 1) + 2 * bool(config.beta)
    if engine == "kit" and profile.device != "cpu":
        per_token += 2  # what another backend has sampled is scored, see `backends`
    parameters = shape_of(profile.policy, profile.revision).parameters
    return parameters * (rows * mean + prompts * prompt) * per_token


def check_room(profile: Profile, gib: float, **options: Any) -> None:
    """Raise ValueError, with what needs the memory and what to lower, where `gib` are too few.

    `gib`: of the GPU, without what others hold of it, such as an endpoint's server; `options`:
    `plan`'s. GRPO_KIT_SKIP_PLAN=1 begins all the same: the longest completions are counted.
    """
    if os.environ.get("GRPO_KIT_SKIP_PLAN") == "1":
        return
    needed = plan(profile, gpu=GPU("the GPU here, as it is now,", gib, 1.0, 1.0), **options)
    if needed.room < 0:
        raise ValueError(f"{advice(profile, needed)} (GRPO_KIT_SKIP_PLAN=1 begins all the same.)")


def advice(profile: Profile, needed: Plan) -> str:
    """Whether it fits, in a sentence; where it does not, what to lower first."""
    if needed.room >= 0:
        return f"It fits: {needed.total:.1f} of {needed.gpu.memory:.0f} GiB."
    rows, _ = profile.config.shared_by(needed.gpus)
    lora = "train LoRA weights (lora_rank=32)"
    batch = f"lower per_device_train_batch_size ({rows}) and raise gradient_accumulation_steps"
    remedies = {
        "weights": f"{lora} or take a smaller model",
        **dict.fromkeys(("gradients", "16-bit weights"), lora),
        **dict.fromkeys(("activations", "logits"), batch),
        "optimiser": f"{lora}, or spread it over GPUs (--sharded)",
        "reference": "leave out the KL term (beta=0)",
        "cache of sampling": "lower generation_batch_size or max_completion_length, or raise "
        "rollout_chunks",
        "vLLM": "lower vLLM's share (--vllm-share), or give vLLM a GPU of its own",
        "weights gathered to sample": "sample by vLLM",
    }
    largest = sorted(needed.memory, key=needed.memory.get, reverse=True)
    helps = dict.fromkeys(remedies[part] for part in largest if part in remedies)
    parts = ", ".join(f"{part} {needed.memory[part]:.1f}" for part in largest[:4])
    return (
        f"It does not fit: {needed.total:.1f} GiB are needed ({parts}), and {needed.gpu.name} has "
        f"{needed.gpu.memory:.0f}. What helps: {'; '.join(list(helps)[:3])}."
    )


def table(needed: Plan, price: float | None = None) -> Any:
    """The plan as a table for a terminal; `price` of an hour of one GPU."""
    from rich.table import Column, Table

    rows = Table("", Column(justify="right"), title=f"{needed.gpus} x {needed.gpu.name}")
    for part, gib in needed.memory.items():
        rows.add_row(part, f"{gib:.2f} GiB")
    rows.add_row("a GPU in all", f"{needed.total:.1f} of {needed.gpu.memory:.0f} GiB")
    rows.add_section()
    for part, seconds in needed.seconds.items():
        rows.add_row(f"{part}, a step", f"{seconds:.1f} s")
    rows.add_row("tokens a second, sampling", f"{needed.tokens_per_second:,.0f}")
    rows.add_row("the run, evaluations too", f"{needed.hours:.2f} h")
    if price is not None:
        rows.add_row("cost", f"{needed.hours * needed.gpus * price:,.2f}")
    return rows
