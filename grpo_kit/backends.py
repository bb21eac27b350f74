"""Ways to sample made for a GPU, behind one function; `generation.generate` is the plain one.

- "plain": the kit's own loop. Prompts are run once, rows leave when they end.
- "static": transformers' `generate` with a cache of fixed size, whose decode step it compiles.
- "continuous": transformers' continuous batching: a new row takes the place of one that ended.

Whatever sampled, log-probabilities and entropies are those of the model on the very ids, so that
training need not know. (vLLM samples under TRL's trainer, which keeps its weights up to date.)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from grpo_kit.generation import Rollouts, check_lengths, completion_logps, generate, left_pad
from grpo_kit.models import Policy

BACKENDS = ("plain", "static", "continuous")


def choose(policy: Policy, wanted: str = "auto") -> str:
    """The backend that samples: `wanted`, or of "auto" continuous batching on a GPU, else plain.

    Raises ValueError for another name.
    """
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(
            f"sampling_backend is {wanted!r}; choose one of auto, {', '.join(BACKENDS)}."
        )
    if wanted == "auto":
        return "continuous" if policy.device.type == "cuda" else "plain"
    return wanted


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
    over, with a warning.
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
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
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
) -> list[list[int]]:
    """The completions of the rows, each up to its first EOS."""
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
        was_training = policy.model.training
        policy.model.eval()
        try:
            with torch.no_grad(), policy.autocast():
                if backend == "continuous":
                    outputs = policy.model.generate_batch(
                        inputs=rows, generation_config=config, progress_bar=False
                    )
                    found = [list(output.generated_tokens) for output in outputs.values()]
                else:
                    ids, attention = left_pad(rows, policy.pad_token_id, device)
                    output = policy.model.generate(
                        ids, attention_mask=attention, generation_config=config
                    )
                    found = output[:, ids.shape[1] :].tolist()
        finally:
            policy.model.train(was_training)
    eos = set(policy.eos_token_ids)
    ends = [next((i + 1 for i, t in enumerate(ids) if t in eos), len(ids)) for ids in found]
    return [ids[:end] for ids, end in zip(found, ends, strict=True)]


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
