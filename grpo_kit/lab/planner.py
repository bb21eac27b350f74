"""Memory of a run by the kit's trainer, counted. `grpo-kit plan`.

Only Qwen2, Qwen3 and Llama are counted; for others there is `accelerate estimate-memory MODEL`.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_kit import smollm2
from grpo_kit.generation import LOGITS_BUDGET
from grpo_kit.paths import data_dir
from grpo_kit.profiles import Profile
from grpo_kit.training import PASS_TOKENS

GIB = 2**30
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size", "tie_word_embeddings")  # fmt: skip
MODELS = {  # of the profiles, so that planning needs no Hub: the type, then FIELDS
    smollm2.NAME: ("llama", 576, 30, 9, 3, 1536, 49_152, True),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 24, 14, 2, 4864, 151_936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True),
}
GPUS = {"T4": 15, "L4": 22, "A100-40": 40, "A100-80": 80, "H100": 80, "H200": 140}  # GiB
SAMPLING, UPDATING = ["cache of sampling"], ["gradients", "16-bit weights", "activations", "logits"]
RESERVE, PROCESS = 1.5, 0.55  # GiB: a GPU's context, kernels, fragments; Python's with torch


class Plan(NamedTuple):
    """GiB by part, and GiB that are there."""

    memory: dict[str, float]
    has: float

    @property
    def total(self) -> float:
        """GiB at the fuller of the two moments: sampling, updating."""
        turns = [sum(self.memory.get(part, 0) for part in parts) for parts in (SAMPLING, UPDATING)]
        return sum(self.memory.values()) - min(turns)

    def __str__(self) -> str:
        if self.total <= self.has:
            return f"It fits: {self.total:.1f} of {self.has:.0f} GiB."
        problem = f"It does not fit: {self.total:.1f} GiB are needed, {self.has:.0f} are there"
        return f"{problem}. Lower per_device_train_batch_size, or take a profile with LoRA: colab."


@cache
def model_of(policy: str, revision: str | None = None) -> Any:
    """A policy's model without its weights. Raises ValueError for one that cannot be counted."""
    if policy in MODELS:
        kind, *sizes = MODELS[policy]
        config = AutoConfig.for_model(kind, **dict(zip(FIELDS, sizes, strict=True)))
    else:
        path = data_dir() / policy
        config = AutoConfig.from_pretrained(path if path.is_dir() else policy, revision=revision)
    if not all(hasattr(config, name) for name in FIELDS) or hasattr(config, "num_experts"):
        problem = f"a model of type {config.model_type!r} cannot be planned"
        raise ValueError(f"{problem}: take Qwen2, Qwen3 or Llama, or `accelerate estimate-memory`.")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def cache_bytes(model: Any, width: int) -> int:
    """Bytes of the keys and values of one token, in numbers of `width` bytes."""
    attention = model.base_model.layers[0].self_attn
    return 2 * model.config.num_hidden_layers * attention.k_proj.out_features * width


def activation_bytes(model: Any, tokens: int, rows: int, length: int, width: int) -> int:
    """What autograd keeps of `tokens` in `rows` of at most `length`; `width`: bytes of a number."""
    config, queries = model.config, model.base_model.layers[0].self_attn.q_proj.out_features
    # queries, keys, values (once a query head), attention's output; gate, up, two products of them
    narrow = 4 * (queries + config.intermediate_size) + config.hidden_size * (width < 4)
    per_token = narrow * width + 24 * config.hidden_size + 4 * config.num_attention_heads
    return config.num_hidden_layers * (tokens * per_token + rows * length**2 * width)


def memory_of(profile: Profile, prompt_length: int = 200) -> dict[str, float]:
    """GiB by part; judges and embedders are left out."""
    config, model = profile.config, model_of(profile.policy, profile.revision)
    on_cpu, longest = profile.device == "cpu", prompt_length + config.max_completion_length
    # bytes of a weight and of a cached number, and of a number that is computed with
    width, arithmetic = 4 if profile.dtype == "float32" else 2, 4 if on_cpu else 2
    linear = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    lora = 4 * profile.lora_rank * sum(m.in_features + m.out_features for m in linear)
    weights = width * model.num_parameters()
    rows, _ = config.shared_by(1)
    if on_cpu:  # it passes over a large batch in parts
        each = config.max_completion_length + prompt_length // config.num_generations
        rows = min(rows, PASS_TOKENS // each + 1)
    prompts = max(1, rows // config.num_generations)  # each runs once for its group
    tokens = rows * config.max_completion_length + prompts * prompt_length
    head = 0 if lora else model.config.vocab_size * model.config.hidden_size  # its gradient
    parts = {
        "weights": weights + lora,
        "optimiser": 2 * (lora or weights),
        "reference": weights if config.beta and not lora else 0,
        "gradients": lora or weights,
        "16-bit weights": weights / 2 if width > arithmetic else 0,
        "activations": activation_bytes(model, tokens, rows, longest, arithmetic),
        "logits": (4 * LOGITS_BUDGET[not on_cpu] + head) * 4,
        "cache of sampling": config.evaluation_batch_size * longest * cache_bytes(model, width),
        "reserve": (PROCESS if on_cpu else RESERVE) * GIB,
    }
    return {part: size / GIB for part, size in parts.items() if size}


def plan(profile: Profile, gpu: str = "H100", prompt_length: int = 200) -> Plan:
    """The plan of a run on one of `GPUS`; prompts have `prompt_length` tokens."""
    return Plan(memory_of(profile, prompt_length), GPUS[gpu])
