"""Ways to sample made for a GPU, behind one function; `generation.generate` is the plain one.

"static" is transformers' `generate` with a compiled cache of fixed size; "continuous" its batching
that fills the place of a row that ended; "vllm" is for a policy that is only evaluated.
Log-probabilities and entropies are always those of the model on the sampled ids.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import GenerationConfig

from grpo_kit.config import FULL, GRPOConfig
from grpo_kit.generation import Rollouts, check_lengths, completion_logps, generate, left_pad
from grpo_kit.models import Policy, evaluating, save_policy, unwrapped

BACKENDS = ("plain", "static", "continuous")  # of a policy that is trained
VLLM_SHARE = 0.4  # of the GPU, beside the policy itself
Lists = list[list[int]]


def choose(policy: Policy, wanted: str = "auto", *, trained: bool = True) -> str:
    """The backend that samples: `wanted`, or for "auto" the one that suits the machine.

    "auto" is plain on a CPU. On a GPU it is vLLM where installed and the policy is not trained;
    else continuous batching for 16-bit weights and plain for float32, since autocast does not reach
    the thread of continuous batching. RuntimeError for vLLM where it is not installed.
    """
    known = ("auto", *BACKENDS) if trained else ("auto", *BACKENDS, "vllm")
    if wanted not in known:
        raise ValueError(f"sampling_backend is {wanted!r}; choose one of {', '.join(known)}.")
    installed = find_spec("vllm") is not None
    if wanted == "vllm" and not installed:
        raise RuntimeError("the backend vllm needs vLLM, which is not installed: pip install vllm.")
    if wanted != "auto":
        return wanted
    if policy.device.type != "cuda":
        return "plain"
    if installed and not trained:
        return "vllm"
    return "plain" if policy.model.dtype == torch.float32 else "continuous"


def sample(
    policy: Policy, prompt_ids: Sequence, num_generations: int = 1, *, backend="plain", **options
) -> Rollouts:
    """`generate` by a backend of `BACKENDS`; options are those of `generate`.

    Where another backend fails (this GPU lacks a kernel, say), the plain one takes over with a
    warning; not where memory is short, which it would need, too.
    """
    options["pad_token_id"] = policy.pad_token_id
    if backend != "plain":
        check_lengths(policy.model, prompt_ids, options["max_new_tokens"])
        rows = [list(ids) for ids in prompt_ids for _ in range(num_generations)]
        try:
            completions = _by_transformers(policy, rows, backend, **options)
        except Exception as error:
            if any(sign in str(error) for sign in FULL):
                raise
            first_line = str(error).partition("\n")[0][:120]
            warnings.warn(
                f"sampling by the backend {backend!r} failed ({type(error).__name__}: {first_line})"
                ": the plain one samples instead; sampling_backend='plain' leaves this out.",
                stacklevel=2,
            )
        else:
            rollouts = Rollouts.given(prompt_ids, completions, policy, num_generations)
            scoring = {"temperature": options.get("temperature", 1.0)}
            scoring["pad_token_id"] = policy.pad_token_id
            with torch.no_grad(), policy.autocast():
                logps, entropies = completion_logps(policy.model, rollouts, **scoring)
            return replace(rollouts, logps=logps, entropies=entropies)
    options["eos_token_ids"] = policy.eos_token_ids
    with policy.autocast():
        return generate(policy.model, prompt_ids, num_generations, **options)


def sample_groups(
    policy: Policy, prompt_ids: Sequence, config: GRPOConfig, generator: torch.Generator
) -> Rollouts:
    """A group of completions of every prompt (token ids), by the config's backend."""
    return sample(
        policy, prompt_ids, config.num_generations,
        backend=choose(policy, config.sampling_backend), generator=generator,
        max_new_tokens=config.max_completion_length, temperature=config.temperature,
    )  # fmt: skip


def _by_transformers(
    policy: Policy, rows: Lists, backend: str, generator=None, do_sample=True, **options
) -> Lists:
    """The completions of the rows, each up to its first EOS."""
    options |= {"do_sample": do_sample} | ({"top_p": 1.0, "top_k": 0} if do_sample else {})
    options["cache_implementation"] = "static" if backend == "static" else None
    config = GenerationConfig(eos_token_id=policy.eos_token_ids, **options)
    device, errors = policy.device, []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if generator is not None:
            drawn = torch.randint(2**62, (1,), generator=generator, device=generator.device)
            torch.manual_seed(int(drawn))
        with torch.no_grad(), policy.autocast(), _without_saved_settings(policy) as model:
            if backend == "static":
                ids, attention = left_pad(rows, policy.pad_token_id, device)
                output = model.generate(ids, attention_mask=attention, generation_config=config)
                completions = output[:, ids.shape[1] :].tolist()
            else:
                paged = _cache_for(rows, config.max_new_tokens)
                settings = {"generation_config": config, "continuous_batching_config": paged}
                outputs = model.generate_batch(inputs=rows, progress_bar=False, **settings).values()
                errors = [output.error for output in outputs if output.error]
                completions = [list(output.generated_tokens) for output in outputs]
    return _up_to_eos(policy, rows, completions, errors)


def _cache_for(rows: Lists, max_new_tokens: int) -> Any:
    """What the rows need: by default it takes nine tenths of the memory that this process leaves,
    whoever else holds some of it, half of that for masks.
    """
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig()
    page = getattr(config, "page_size", None) or config.block_size  # its name before 5.18
    pages = sum(math.ceil((len(ids) + max_new_tokens) / page) for ids in rows)
    config.num_blocks = 2 * pages  # it keeps a part free
    config.max_batch_tokens = max(len(rows), min(1024, sum(map(len, rows))))
    return config


def _up_to_eos(policy: Policy, rows: Lists, completions: Lists, errors: Sequence = ()) -> Lists:
    """Each completion up to its first EOS; RuntimeError where rows were not answered."""
    if errors or len(completions) != len(rows) or not all(completions):
        answered = f"{sum(map(bool, completions))} of {len(rows)} rows were answered"
        raise RuntimeError(": ".join([answered, *errors[:1]]))
    eos = set(policy.eos_token_ids)
    ends = [next((i + 1 for i, t in enumerate(ids) if t in eos), len(ids)) for ids in completions]
    return [ids[:end] for ids, end in zip(completions, ends, strict=True)]


@contextmanager
def _without_saved_settings(policy: Policy) -> Iterator[Any]:
    """The model in eval mode, with an empty generation config.

    transformers would fill gaps from the saved one: Qwen2.5-Instruct's has a repetition penalty.
    """
    inner = unwrapped(policy.model)
    saved, inner.generation_config = inner.generation_config, GenerationConfig()
    try:
        with evaluating(policy.model):
            yield inner
    finally:
        inner.generation_config = saved


def greedy(policy: Policy, backend: str, *, max_new_tokens: int, context: int) -> Callable:
    """A function of rows of prompt ids: the most likely completion of each, up to its first EOS.

    `context` is what vLLM makes room for, in tokens; it keeps the weights as they are now.
    """
    if backend != "vllm":
        options = {"backend": backend, "max_new_tokens": max_new_tokens, "do_sample": False}
        return lambda rows: sample(policy, rows, **options).completion_lists()

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=str(save_policy(policy, folder)),
            dtype=str(policy.half or policy.model.dtype).removeprefix("torch."),
            generation_config="vllm",  # not the one that was saved with the model
            gpu_memory_utilization=VLLM_SHARE,
            max_model_len=min(context, policy.context_length),
        )
    ends = {"max_tokens": max_new_tokens, "stop_token_ids": policy.eos_token_ids}
    params = SamplingParams(temperature=0.0, detokenize=False, **ends)

    def answer(rows: Lists) -> Lists:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in rows], params)
        return _up_to_eos(policy, rows, [list(one.outputs[0].token_ids) for one in outputs])

    return answer
