"""What a run takes before it is started: memory by part, time and money. `grpo-kit plan`.

Tests compare the sizes with real models. Time is the least that the hardware allows, divided by
the share of it that is reached (see `bench --scaling`): a decode step reads all N weights and the
cache of all rows, or computes 2 N a row; an update computes 6 N a token (4 N with LoRA), each pass
without gradient 2 N. Several GPUs exchange the gradients by a ring once an update, or, sharded, the
weights twice and the gradients once a pass (ZeRO, arXiv 1910.02054, section 7).
"""

import math
import os
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import psutil
import torch
from rich.table import Column, Table
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_kit import smollm2
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import LOGITS_BUDGET, at_once
from grpo_kit.paths import data_dir
from grpo_kit.profiles import Profile
from grpo_kit.rewards.rules import accuracy_reward, format_reward
from grpo_kit.training import PASS_TOKENS, evaluate, train

GIB = 2**30
FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "intermediate_size", "vocab_size", "tie_word_embeddings")  # fmt: skip
MODELS = {  # of the profiles, so that planning needs no Hub: the type, then FIELDS
    smollm2.NAME: ("llama", 576, 30, 9, 3, 1536, 49_152, True),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 24, 14, 2, 4864, 151_936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 25_600, 151_936, False),
}
Engine = Literal["kit", "trl", "trl+vllm", "trl+vllm-server"]
SAMPLING = ("cache of sampling", "weights gathered to sample")  # memory in turn with UPDATING's
UPDATING = ("gradients", "16-bit weights", "activations", "logits")
RESERVE = 1.5  # GiB of context, kernels and what the allocator cannot hand out again
PROCESS = 0.55  # GiB, on a CPU, of Python with torch and transformers
ARITHMETIC = "arithmetic"
REACHED = 0.3  # share of the hardware's limits; a guess for a machine without a benchmark


class GPU(NamedTuple):
    """By its data sheet: GiB, GB/s, dense 16-bit TFLOP/s, and GB/s to the GPUs of its node."""

    name: str
    memory: float
    bandwidth: float
    tflops: float
    link: float = 16.0  # one way; PCIe where there is no NVLink


GPUS = {sheet[0]: GPU(*sheet) for sheet in (
    ("T4", 15, 320, 65), ("L4", 22, 300, 121, 32), ("A100-40", 40, 1555, 312, 300),
    ("A100-80", 80, 2039, 312, 300), ("H100", 80, 3350, 989, 450), ("H200", 139, 4800, 989, 450),
)}  # fmt: skip
NODE = 8  # GPUs of a node
NETWORK = 50.0  # GB/s of a GPU to other nodes: 400 Gbit/s each


class Shape:
    """Sizes of a decoder like Qwen2, Qwen3 or Llama, from its config. ValueError for others."""

    def __init__(self, config: Any) -> None:
        if not all(hasattr(config, name) for name in FIELDS) or hasattr(config, "num_experts"):
            kind = f"a model of type {config.model_type!r} cannot be planned"
            raise ValueError(f"{kind}: take Qwen2, Qwen3 or Llama, or set GRPO_KIT_SKIP_PLAN=1.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        linear = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.config, self.layers = config, config.num_hidden_layers
        self.parameters = sum(p.numel() for p in model.parameters())
        self.lora_parameters_per_rank = sum(m.in_features + m.out_features for m in linear)
        self.query_size = config.num_attention_heads * head
        self.key_value_size = config.num_key_value_heads * head

    def cache_bytes(self, width: int) -> int:
        """Of the keys and values of one token, in numbers of `width` bytes."""
        return 2 * self.layers * self.key_value_size * width

    def activation_bytes(self, tokens: int, rows: int, length: int, width: int = 2) -> int:
        """Kept by autograd of `tokens` in `rows` of at most `length`; `width`: bytes of a number.

        Per token and block: queries, keys, values (repeated for every query head), what attention
        returns; gate, up, two products of them; in 4 bytes two normalisations. Per row: the mask.
        """
        hidden, heads = self.config.hidden_size, self.config.num_attention_heads
        narrow = 4 * (self.query_size + self.config.intermediate_size) + hidden * (width < 4)
        per_token = narrow * width + 24 * hidden + 4 * heads
        return self.layers * (tokens * per_token + rows * length**2 * width)


@cache
def shape_of(policy: str, revision: str | None = None) -> Shape:
    """The shape of a policy: known by name, or read from its folder or the Hub's config."""
    if policy in MODELS:
        kind, *sizes = MODELS[policy]
        return Shape(AutoConfig.for_model(kind, **dict(zip(FIELDS, sizes, strict=True))))
    shipped = data_dir() / policy
    source = shipped if shipped.is_dir() else policy
    return Shape(AutoConfig.from_pretrained(source, revision=revision))


@dataclass(frozen=True)
class Plan:
    """What a run takes: GiB a GPU by part, seconds a step by part, hours in all."""

    memory: dict[str, float]
    seconds: dict[str, float]
    limits: dict[str, str]  # part of `seconds` -> what sets it
    tokens_per_second: float  # generated, all GPUs together, while generating
    hours: float
    gpus: int
    gpu: GPU
    held: int  # GPUs, a server's for sampling too

    @property
    def total(self) -> float:
        """GiB at the fuller of the two moments: sampling, updating."""
        turns = [sum(self.memory.get(part, 0) for part in parts) for parts in (SAMPLING, UPDATING)]
        return sum(self.memory.values()) - min(turns)

    @property
    def limit(self) -> str:
        """What sets most of a step's time."""
        return self.limits.get(max(self.seconds, key=self.seconds.get), "")

    @property
    def room(self) -> float:
        """GiB of a GPU that are left, negative where it is too small."""
        return self.gpu.memory - self.total


def plan(
    profile: Profile, *, gpus: int = 1, gpu: str | GPU = "H100", engine: Engine = "kit",
    sharded: bool = False, vllm_share: float = 0.3, prompt_length: int = 200,
    mean_share: float = 0.5, reached: float = REACHED,
) -> Plan:  # fmt: skip
    """Count what a run of the profile takes on `gpus` of a kind; judges and embedders are left out.

    Args:
        gpu: a name of `GPUS`, or another one's data.
        engine: "kit" takes one GPU; "trl+vllm-server" samples on as many others.
        sharded: weights, gradients and optimiser are spread over the GPUs (ZeRO-3, FSDP).
        prompt_length: tokens, with the chat template.
        mean_share: mean length of a completion, as a share of `max_completion_length`.
        reached: share of the hardware's limits.
    """
    for name, known in ((gpu, GPUS), (engine, get_args(Engine))):
        if isinstance(name, str) and name not in known:
            raise ValueError(f"{name!r} cannot be planned: choose among {', '.join(known)}.")
    if engine == "kit" and (gpus > 1 or sharded):
        raise ValueError("the kit's own trainer runs on one GPU, unsharded: choose engine 'trl'.")
    machine = GPUS[gpu] if isinstance(gpu, str) else gpu
    memory = _memory(profile, gpus, engine, sharded, prompt_length)
    if engine == "trl+vllm":
        memory["vLLM"] = vllm_share * machine.memory
    config, shape = profile.config, shape_of(profile.policy, profile.revision)
    mean = mean_share * config.max_completion_length
    width, arithmetic = _widths(profile)
    cached = width if engine in ("kit", "trl") else arithmetic

    def sampling(rows: float, batches: int) -> tuple[float, str]:
        """Seconds for `batches` of `rows` completions, one after the other, and what sets them."""
        weights = config.max_completion_length * shape.parameters * arithmetic
        cache = rows * mean * (prompt_length + mean / 2) * shape.cache_bytes(cached)
        tokens = rows * mean + rows / config.num_generations * prompt_length
        read = (weights + cache) / machine.bandwidth / 1e9
        computed = 2 * shape.parameters * tokens / machine.tflops / 1e12
        reads = "reading the weights, once a token" if weights > cache else "reading the cache"
        return batches * max(read, computed) / reached, ARITHMETIC if computed > read else reads

    rows, kit = config.generation_batch_size / gpus, engine == "kit"
    chunks, prompts = (config.rollout_chunks, rows / config.num_generations) if kit else (1, rows)
    scored = kit and profile.device != "cpu"  # what another backend has sampled, see `backends`
    per_token = (4 if profile.lora_rank else 6) * config.num_iterations
    per_token += 2 * ((config.updates_per_step > 1) + bool(config.beta) + scored)
    update = shape.parameters * (rows * mean + prompts * prompt_length) * per_token
    generating, why = sampling(rows / chunks, chunks)
    seconds = {"generation": generating, "update": update / machine.tflops / 1e12 / reached}
    limits = {"generation": why, "update": ARITHMETIC}
    if gpus > 1:
        _, passes = config.shared_by(gpus)
        lora = shape.lora_parameters_per_rank * profile.lora_rank * 4
        sent = 2 * (lora or shape.parameters * width)
        if sharded:
            sent = passes * (2 * shape.parameters * arithmetic + sent / 2)
        sent *= config.updates_per_step * (gpus - 1) / gpus
        speed, limits["exchange"] = (
            (machine.link, "the link between GPUs") if gpus <= NODE
            else (min(machine.link, NETWORK), "the network between nodes")
        )  # fmt: skip
        seconds["exchange"] = sent / speed / 1e9 / reached
    together = _evaluated_at_once(profile)  # by one process, the others wait
    answers = (prompts * (1 + config.num_generations_eval) for prompts in _evaluated(config))
    # sharded, nothing is evaluated
    evaluating = 0 if sharded else sum(sampling(together, -(-n // together))[0] for n in answers)
    hours = (config.max_steps * sum(seconds.values()) + evaluating) / 3600
    per_second = config.generation_batch_size * mean / seconds["generation"]
    held = gpus * (1 + (engine == "trl+vllm-server"))
    return Plan(memory, seconds, limits, per_second, hours, gpus, machine, held)


def _evaluated_at_once(profile: Profile) -> int:
    """Completions in a batch of `evaluate`, greedy ones too."""
    config, samples = profile.config, profile.config.num_generations_eval
    batch = max(1, config.evaluation_batch_size // samples) * (1 + samples)
    return at_once(batch, config.max_completion_length, profile.device)


def plan_here(profile: Profile) -> Plan:
    """The plan of a run on this machine: a few steps and a part of an evaluation are timed.

    Memory is counted as in `plan`. That a step gets cheaper as groups lose their spread, since
    nothing is learnt from them, or dearer as answers get longer, is left out.
    """
    policy, task, config = profile.load_policy(), profile.load_task(), profile.config
    short = replace(config, max_steps=5, eval_prompts=0, max_generated_tokens=None)
    rewards = [accuracy_reward, format_reward]
    with tempfile.TemporaryDirectory() as folder:
        rows = train(policy, task, rewards, short, output_dir=folder, seed=0).history[-3:]
    most, some, took = min(config.eval_prompts, len(task.test)), 0, 0.0
    while took < 5 and some < most:  # many at once take less time each
        some, started = min(4 * some or 16, most), time.perf_counter()
        evaluate(policy, task.test, replace(config, eval_prompts=some, eval_prompts_between=None))
        took = time.perf_counter() - started
    prompts = sum(min(prompts, len(task.test)) for prompts in _evaluated(config))
    seconds = median(row["step_time"] for row in rows)
    mean = median(row["completions/mean_length"] for row in rows)
    free = psutil.virtual_memory().available / GIB
    lengths = map(len, policy.encode(task.train["prompt"][:256]))
    counted = plan(profile, gpu=GPU("this machine", free, 1.0, 1.0), prompt_length=max(lengths))
    return replace(
        counted, seconds={"generation and update": seconds}, limits={},
        tokens_per_second=config.generation_batch_size * mean / seconds,
        hours=(config.max_steps * seconds + prompts * took / max(some, 1)) / 3600,
    )  # fmt: skip


def _evaluated(config: GRPOConfig) -> list[int]:
    """How many prompts each evaluation of a run has."""
    ends = [config.eval_prompts] * (config.eval_on_start + 1)
    between, few = config.eval_prompts_between, config.eval_prompts
    times = (config.max_steps - 1) // (config.eval_steps or config.max_steps)
    return ends + [few if between is None else between] * times


def _widths(profile: Profile) -> tuple[int, int]:
    """Bytes of a weight (and of a number in the cache), and of a number that is computed with."""
    return 4 if profile.dtype == "float32" else 2, 4 if profile.device == "cpu" else 2


def _memory(profile: Profile, gpus: int, engine: str, sharded: bool, prompt: int) -> dict:
    """GiB of a GPU by part, vLLM's left out."""
    config, full, kit = profile.config, not profile.lora_rank, engine == "kit"
    shape, (width, arithmetic) = shape_of(profile.policy, profile.revision), _widths(profile)
    spread, longest = gpus if sharded else 1, prompt + config.max_completion_length
    weights = shape.parameters * width / spread
    lora = shape.lora_parameters_per_rank * profile.lora_rank * 4
    trained = weights if full else lora / spread
    rows, _ = config.shared_by(gpus)
    if kit and profile.device == "cpu":  # it passes over a large batch in parts
        each = config.max_completion_length + prompt / config.num_generations
        rows = min(rows, math.ceil(PASS_TOKENS / each))
    prompts = max(1, rows // config.num_generations) if kit else rows  # TRL runs one a completion
    tokens = rows * config.max_completion_length + prompts * prompt
    # Both trainers take the head in tiles; its gradient is summed beside that of the embedding.
    head = full * shape.config.vocab_size * shape.config.hidden_size
    own = engine in ("kit", "trl")  # else vLLM samples, with a cache of its own
    sampled = own * config.generation_batch_size // (config.rollout_chunks if kit else gpus)
    if not sharded:  # else nothing is evaluated
        answers = config.eval_prompts * (1 + config.num_generations_eval)
        sampled = max(sampled, min(_evaluated_at_once(profile), answers))
    parts = {
        "weights": weights + lora,
        "optimiser": 2 * trained,
        "reference": weights if config.beta and full else 0,
        "gradients": trained,
        "16-bit weights": weights / 2 if width > arithmetic else 0,
        "activations": shape.activation_bytes(tokens, rows, longest, arithmetic),
        "logits": (2 * LOGITS_BUDGET[profile.device != "cpu"] + head) * 4,
        "cache of sampling": sampled * longest * shape.cache_bytes(width),
        "weights gathered to sample": weights * gpus if sharded and engine == "trl" else 0,
        "reserve": (PROCESS if profile.device == "cpu" else RESERVE) * GIB,
    }
    return {part: size / GIB for part, size in parts.items() if size}


def check_room(profile: Profile, **options: Any) -> None:
    """Raise ValueError, with what to lower, where a run (see `plan`) needs more than is free here.

    The environment's GRPO_KIT_SKIP_PLAN=1 skips the check.
    """
    on_cpu = profile.device == "cpu"
    here = on_cpu or torch.cuda.is_available()  # without a GPU `load_policy` raises
    if os.environ.get("GRPO_KIT_SKIP_PLAN") == "1" or not here:
        return
    free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info()[0]
    name = f"{'this machine' if on_cpu else 'the GPU here'}, as it is now,"
    needed = plan(profile, gpu=GPU(name, free / GIB, 1.0, 1.0), **options)
    if needed.room < 0:
        raise ValueError(f"{advice(profile, needed)} (GRPO_KIT_SKIP_PLAN=1 begins all the same.)")


def advice(profile: Profile, needed: Plan) -> str:
    """Whether it fits, in a sentence; where it does not, what to lower first."""
    if needed.room >= 0:
        return f"It fits: {needed.total:.1f} of {needed.gpu.memory:.0f} GiB."
    rows, _ = profile.config.shared_by(needed.gpus)
    weights = "train LoRA weights (lora_rank=32), take a smaller model or spread it (--sharded)"
    batch = f"lower per_device_train_batch_size ({rows}) and raise gradient_accumulation_steps"
    remedies = {
        **dict.fromkeys(("weights", "optimiser", "gradients", "16-bit weights"), weights),
        **dict.fromkeys(("activations", "logits"), batch),
        "reference": "leave out the KL term (beta=0)",
        "cache of sampling": "lower generation_batch_size or raise rollout_chunks",
        "weights gathered to sample": "sample by vLLM",
        "vLLM": "lower vLLM's share (--vllm-share), or give vLLM a GPU of its own",
    }
    largest = sorted(needed.memory, key=needed.memory.get, reverse=True)
    helps = dict.fromkeys(remedies[part] for part in largest if part in remedies)
    parts = ", ".join(f"{part} {needed.memory[part]:.1f}" for part in largest[:4])
    return (
        f"It does not fit: {needed.total:.1f} GiB are needed ({parts}), and {needed.gpu.name} has "
        f"{needed.gpu.memory:.0f}. What helps: {'; '.join(list(helps)[:3])}."
    )


def growth(profile: Profile, most: int, price: float | None = None, **options: Any) -> Table:
    """Plans for 1, 2, 4, … `most` GPUs, a row each: what they take, and what sets a step's time.

    `options`: those of `plan`, with an `engine` of several GPUs; `price` of an hour of one GPU.
    """
    names = ("GPUs", "nodes", "GiB of each", "s per step", "hours", "times as fast", "set by")
    rows = Table(*names, *["cost"] * (price is not None))
    first = None
    for gpus in (2**i for i in range(most.bit_length())):
        try:
            needed = plan(profile, gpus=gpus, **options)
        except ValueError as error:
            rows.add_row(str(gpus), str(-(-gpus // NODE)), *"––––", str(error))
            continue
        first = first or needed
        took = [f"{sum(needed.seconds.values()):.1f}", f"{needed.hours:.2f}",
                f"{first.hours / needed.hours:.1f}"]  # fmt: skip
        fits = needed.limit if needed.room >= 0 else f"does not fit in {needed.gpu.memory:.0f} GiB"
        cost = [] if price is None else [f"{needed.hours * needed.held * price:,.2f}"]
        rows.add_row(str(gpus), str(-(-gpus // NODE)), f"{needed.total:.0f}", *took, fits, *cost)
    return rows


def table(needed: Plan, price: float | None = None) -> Table:
    """The plan as a table for a terminal; `price` of an hour of one GPU."""
    lines = {part: f"{gib:.2f} GiB" for part, gib in needed.memory.items()}
    lines["in all, of one"] = f"{needed.total:.1f} of {needed.gpu.memory:.0f} GiB"
    lines |= {f"{part}, per step": f"{seconds:.2f} s" for part, seconds in needed.seconds.items()}
    lines["tokens a second, sampling"] = f"{needed.tokens_per_second:,.0f}"
    took = f"{needed.hours:.2f} h" if needed.hours >= 1 else f"{60 * needed.hours:.1f} min"
    lines["the run, evaluations too"] = took
    if price is not None:
        lines["cost"] = f"{needed.hours * needed.held * price:,.2f}"
    rows = Table("", Column(justify="right"), title=f"{needed.held} x {needed.gpu.name}")
    for name, amount in lines.items():
        rows.add_row(name, amount, end_section=name == "in all, of one")
    return rows
