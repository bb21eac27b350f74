"""Ways to sample made for a GPU, behind one function; `generation.generate` is the plain one.

- "plain": the kit's own loop. Prompts are run once, rows leave when they end.
- "static": transformers' `generate` with a cache of fixed size, whose decode step it compiles.
- "continuous": transformers' continuous batching: a new row takes the place of one that ended.
- "vllm": vLLM, for a policy that is only evaluated. (One that is trained is sampled by vLLM under
  TRL's trainer, which keeps its weights up to date there.)

Whatever sampled, log-probabilities and entropies are those of the model on the very ids, so that
training need not know.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from grpo_kit.generation import Rollouts, check_lengths, completion_logps, generate, left_pad
from grpo_kit.models import Policy, save_policy

BACKENDS = ("plain", "static", "continuous")  # of a policy that is trained
VLLM_SHARE = 0.4  # of the GPU, beside the policy itself
Lists = list[list[int]]


def choose(policy: Policy, wanted: str = "auto", *, trained: bool = True) -> str:
    """The backend that samples: `wanted`; of "auto" on a CPU the plain one.

    On a GPU "auto" is vLLM where it is installed and the policy is not trained, else continuous
    batching for weights of 16 bits, and the static cache for others (they are computed with in 16
    bits by autocast, which does not reach the thread that continuous batching runs in).

    Raises ValueError for another name, RuntimeError for vLLM where it is not installed.
    """
    known = BACKENDS if trained else (*BACKENDS, "vllm")
    if wanted not in ("auto", *known):
        raise ValueError(f"sampling_backend is {wanted!r}; choose one of auto, {', '.join(known)}.")
    installed = find_spec("vllm") is not None
    if wanted == "vllm" and not installed:
        raise RuntimeError(
            "sampling by vLLM needs vLLM, which is not installed: pip install vllm, on Linux with "
            "a GPU; or choose another way to sample."
        )
    if wanted != "auto":
        return wanted
    if policy.device.type != "cuda":
        return "plain"
    if installed and not trained:
        return "vllm"
    return "static" if policy.model.dtype == torch.float32 else "continuous"


def sample(
    policy: Policy,
    prompt_ids: Sequence[Sequence[int]],
    num_generations: int = 1,
    *,
    backend: str = "plain",
    max_new_tokens: int,
    do_sample: bool = True,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """`generate` by a backend of `BACKENDS`; arguments and result are those of `generate`.

    Where another one than the plain fails (a kernel that this GPU lacks, say), the plain one takes
    over, with a warning; not where memory is short, which it would be there, too.
    """
    plain = dict(
        max_new_tokens=max_new_tokens,
        eos_token_ids=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
        do_sample=do_sample,
        temperature=temperature,
        generator=generator,
    )
    if backend != "plain":
        check_lengths(policy.model, prompt_ids, max_new_tokens)
        try:
            rows = [list(ids) for ids in prompt_ids for _ in range(num_generations)]
            found = _by_transformers(
                policy, rows, backend, max_new_tokens, do_sample, temperature, generator
            )
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                raise
            warnings.warn(
                f"sampling by the backend {backend!r} failed ({type(error).__name__}: "
                f"{str(error).splitlines()[0][:120] if str(error) else ''}): the plain one samples "
                "instead; sampling_backend='plain' leaves this out.",
                stacklevel=2,
            )
        else:
            return _as_rollouts(policy, prompt_ids, num_generations, found, temperature)
    with policy.autocast():
        return generate(policy.model, prompt_ids, num_generations, **plain)


def _by_transformers(
    policy: Policy,
    rows: list[list[int]],
    backend: str,
    max_new_tokens: int,
    do_sample: bool,
    temperature: float,
    generator: torch.Generator | None,
) -> Lists:
    """The completions of the rows, each up to its first EOS.

    Raises RuntimeError for rows without one: continuous batching runs in another thread, whose
    errors it keeps to itself.
    """
    from transformers import GenerationConfig

    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0} if do_sample else {}
    config = GenerationConfig(
        do_sample=do_sample,
        max_new_tokens=max_new_tokens,
        eos_token_id=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
        **({"cache_implementation": "static"} if backend == "static" else {}),
        **sampling,
    )
    device = policy.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if generator is not None:
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
        with torch.no_grad(), policy.autocast(), _undisturbed(policy) as model:
            if backend == "continuous":
                outputs = model.generate_batch(
                    inputs=rows,
                    generation_config=config,
                    continuous_batching_config=_cache_for(rows, max_new_tokens, device),
                    progress_bar=False,
                )
                found = [list(output.generated_tokens) for output in outputs.values()]
                errors = [output.error for output in outputs.values() if output.error]
            else:
                ids, attention = left_pad(rows, policy.pad_token_id, device)
                output = model.generate(ids, attention_mask=attention, generation_config=config)
                found, errors = output[:, ids.shape[1] :].tolist(), []
    return _up_to_the_end(policy, rows, found, errors)


def _cache_for(rows: Lists, max_new_tokens: int, device: torch.device) -> Any:
    """Continuous batching's settings: on a CPU a cache for these rows.

    By itself it takes nine tenths of the memory that is free. A GPU's is the trainer's alone while
    it samples, and is handed back; that of a CPU is also others'.
    """
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig()
    if device.type == "cpu":
        pages = sum(math.ceil((len(ids) + max_new_tokens) / config.page_size) for ids in rows)
        config.num_blocks = 2 * pages  # it keeps a part free
        config.max_batch_tokens = max(len(rows), min(1024, sum(map(len, rows))))
    return config


def _up_to_the_end(policy: Policy, rows: Lists, found: Lists, errors: Sequence[str] = ()) -> Lists:
    """What was found for each row up to its first EOS. Raises RuntimeError where a row has none."""
    if errors or len(found) != len(rows) or not all(found):
        answered = sum(map(bool, found))
        raise RuntimeError(
            f"{answered} of {len(rows)} rows were answered{': ' if errors else ''}"
            f"{errors[0] if errors else ''}"
        )
    eos = set(policy.eos_token_ids)
    ends = [next((i + 1 for i, t in enumerate(ids) if t in eos), len(ids)) for ids in found]
    return [ids[:end] for ids, end in zip(found, ends, strict=True)]


@contextmanager
def _undisturbed(policy: Policy) -> Iterator[Any]:
    """The model that generates, in eval mode and without the settings that were saved with it.

    transformers takes what a generation config leaves open from the model's own; that of
    Qwen2.5-Instruct has a repetition penalty, with which it would be another distribution.
    """
    from transformers import GenerationConfig

    model = policy.model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own, was_training = inner.generation_config, model.training
    inner.generation_config = GenerationConfig()
    model.eval()
    try:
        yield inner
    finally:
        inner.generation_config = own
        model.train(was_training)


def greedy(policy: Policy, backend: str, *, max_new_tokens: int, context: int) -> Callable:
    """A function of rows of prompt ids: the most likely completion of each, up to its first EOS.

    `context`: the longest prompt and completion together, in tokens; vLLM makes room for it. It
    has the policy's weights as they are now.
    """
    if backend != "vllm":
        options = {"backend": backend, "max_new_tokens": max_new_tokens, "do_sample": False}
        return lambda rows: sample(policy, rows, **options).completion_lists()

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=str(save_policy(policy, folder)),
            dtype=str(policy.half or policy.model.dtype).removeprefix("torch."),
            generation_config="vllm",  # not what was saved with the model
            gpu_memory_utilization=VLLM_SHARE,
            max_model_len=min(context, policy.context_length),
        )
    wanted = SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        stop_token_ids=policy.eos_token_ids,
        detokenize=False,
    )

    def answer(rows: Lists) -> Lists:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in rows], wanted)
        return _up_to_the_end(policy, rows, [list(one.outputs[0].token_ids) for one in outputs])

    return answer


def _as_rollouts(
    policy: Policy,
    prompt_ids: Sequence[Sequence[int]],
    num_generations: int,
    found: list[list[int]],
    temperature: float,
) -> Rollouts:
    device, width = policy.device, max(map(len, found))
    lengths = torch.tensor([len(ids) for ids in found], device=device)
    padded = [ids + [policy.pad_token_id] * (width - len(ids)) for ids in found]
    mask = torch.arange(width, device=device) < lengths[:, None]
    eos = set(policy.eos_token_ids)
    rollouts = Rollouts(
        [list(ids) for ids in prompt_ids],
        torch.arange(len(prompt_ids), device=device).repeat_interleave(num_generations),
        torch.tensor(padded, device=device),
        mask,
        torch.zeros(mask.shape, device=device),
        torch.zeros(mask.shape, device=device),
        torch.tensor([ids[-1] in eos for ids in found], device=device),
    )
    with torch.no_grad(), policy.autocast():
        logps, entropies = completion_logps(
            policy.model, rollouts, temperature=temperature, pad_token_id=policy.pad_token_id
        )
    rollouts.logps.copy_(logps)
    rollouts.entropies.copy_(entropies)
    return rollouts
