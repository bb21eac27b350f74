"""Sample groups of completions, and score given ones.

`generate` works with any transformers causal LM: `decoder` runs Llama and Qwen on a CPU, where
answers that begin alike are run once until they differ, transformers runs the others. Each prompt
runs once for its group, a row that has ended leaves the batch, and log-probabilities come along.
`completion_logps` scores completions with gradient, and runs each prompt once as well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from grpo_kit.config import MOST_AT_ONCE, GRPOConfig
from grpo_kit.decoder import GroupedDecoding, by_length, can_read, equal_rank, filler, packed_states
from grpo_kit.models import Policy, evaluating, unwrapped

# Logits of a chunk: 16 MiB of float32 on a CPU, 256 MiB on an accelerator, where small chunks would
# read the head's weights more often than they compute. A pass holds up to four such tensors.
LOGITS_BUDGET = (2**22, 2**26)


@dataclass(frozen=True)
class Rollouts:
    """Completions of P prompts, N rows in all; `generate` puts the rows of a prompt together."""

    prompt_ids: list[list[int]]  # P
    prompt_index: Tensor  # (N,) long, the prompt of each row
    completion_ids: Tensor  # (N, T) long, padded right
    mask: Tensor  # (N, T) bool, True at generated tokens, the EOS included
    logps: Tensor  # (N, T) float, nats, of the distribution sampled from; 0 where masked
    entropies: Tensor  # (N, T) float, nats
    finished: Tensor  # (N,) bool, False where the token limit cut the row off

    @property
    def lengths(self) -> Tensor:
        """(N,) long, tokens of each completion, EOS included."""
        return self.mask.sum(dim=1)

    def completion_lists(self) -> list[list[int]]:
        """The completions as lists of ids, without padding, EOS included."""
        rows = zip(self.completion_ids.tolist(), self.lengths.tolist(), strict=True)
        return [ids[:length] for ids, length in rows]

    def select(self, rows: Tensor) -> Rollouts:
        """The given rows (long indices), trimmed to the longest, with the prompts they use."""
        width = max(int(self.lengths[rows].max()), 1) if len(rows) else 1
        used, prompt_index = torch.unique(self.prompt_index[rows], return_inverse=True)
        by_token = (self.completion_ids, self.mask, self.logps, self.entropies)
        cut = (tensor[rows, :width] for tensor in by_token)
        prompt_ids = [self.prompt_ids[i] for i in used.tolist()]
        return Rollouts(prompt_ids, prompt_index, *cut, self.finished[rows])

    @staticmethod
    def given(
        prompt_ids: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], policy: Policy,
        *, logps: Sequence[Sequence[float]] | None = None,
        entropies: Sequence[Sequence[float]] | None = None,
        finished: Sequence[bool] | None = None,
    ) -> Rollouts:  # fmt: skip
        """Completions that come from elsewhere, one a prompt; equal prompts are run once.

        Where they are not known log-probabilities are NaN, entropies 0, and a completion is
        finished if it ends in an EOS.
        """
        device, ends, none = policy.device, {*policy.eos_token_ids}, [[]] * len(completions)
        prompts: dict[tuple[int, ...], int] = {}
        prompt_index = [prompts.setdefault(tuple(ids), len(prompts)) for ids in prompt_ids]
        lengths = torch.tensor([len(ids) for ids in completions], device=device)
        width = max(int(lengths.max()), 1)
        if finished is None:
            finished = [ids[-1] in ends for ids in completions]

        def padded(rows: Sequence, fill: float) -> Tensor:
            filled = [[*row, *[fill] * (width - len(row))] for row in rows]
            return torch.tensor(filled, device=device)

        return Rollouts(
            [list(ids) for ids in prompts],
            torch.tensor(prompt_index, device=device),
            padded(completions, policy.pad_token_id),
            torch.arange(width, device=device) < lengths[:, None],
            padded(none, torch.nan) if logps is None else padded(logps, 0.0),
            padded(none if entropies is None else entropies, 0.0),
            torch.tensor(finished, device=device),
        )

    @staticmethod
    def concatenate(parts: Sequence[Rollouts]) -> Rollouts:
        """Several batches as one, padded to the longest."""
        width = max(part.mask.shape[1] for part in parts)
        by_token = []
        for name in ("completion_ids", "mask", "logps", "entropies"):
            values = (getattr(part, name) for part in parts)
            by_token.append(torch.cat([pad(v, (0, width - v.shape[1])) for v in values]))
        prompt_ids, prompt_index = [], []
        for part in parts:
            prompt_index.append(part.prompt_index + len(prompt_ids))
            prompt_ids += part.prompt_ids
        finished = torch.cat([part.finished for part in parts])
        return Rollouts(prompt_ids, torch.cat(prompt_index), *by_token, finished)


@torch.no_grad()
def generate(
    model,
    prompt_ids: Sequence[Sequence[int]],
    num_generations: int | Sequence[int] = 1,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    do_sample: bool = True,
    greedy_first: bool = False,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """Sample `num_generations` completions of every prompt.

    Args:
        prompt_ids: P lists of token ids, of any lengths.
        num_generations: G, or one number a prompt; the result has N = P * G rows, or their sum.
        eos_token_ids: any of these ends a row.
        pad_token_id: fills what is left of a row; may be an EOS, masks do not depend on it.
        do_sample: False takes the most likely token.
        greedy_first: so does the first row of every prompt, the others are sampled.
        temperature: divides the logits; `logps` are of the same distribution.
        generator: source of the random numbers, on the model's device or on the CPU.

    Raises ValueError for no prompt, an empty or too long one, or a temperature of 0.
    """
    check_lengths(model, prompt_ids, max_new_tokens)
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; for the likeliest token, do_sample=False.")
    device = next(model.parameters()).device
    repeats = torch.as_tensor(num_generations, device=device)
    prompt_index = torch.arange(len(prompt_ids), device=device).repeat_interleave(repeats)
    n = len(prompt_index)
    rows = torch.arange(n, device=device)  # the rows still in the batch
    completion_ids = torch.full((n, max_new_tokens), pad_token_id, device=device)
    mask = torch.zeros((n, max_new_tokens), dtype=torch.bool, device=device)
    logps, entropies = torch.zeros((2, n, max_new_tokens), device=device)
    finished = torch.zeros(n, dtype=torch.bool, device=device)
    eos = torch.tensor(list(eos_token_ids), device=device)
    drawn = torch.full((n,), do_sample, device=device)  # not the likeliest token
    if greedy_first:
        drawn[1:] &= prompt_index[1:] == prompt_index[:-1]
        drawn[0] = False
    draws, uniform = int(drawn.sum()), torch.zeros(n, device=device)
    with evaluating(model):  # no dropout in what is meant to be the policy's own distribution
        if can_read(model):
            dtype = arithmetic(model.get_output_embeddings().weight)
            decoding = GroupedDecoding(model, dtype, prompt_ids, prompt_index, max_new_tokens)
        else:
            decoding = _CachedDecoding(model, prompt_ids, prompt_index, pad_token_id)
        for t in range(max_new_tokens):
            branch = decoding.branch  # of each row: those that are equal so far may share one
            scores = decoding.logits.float() / temperature
            scores -= scores.amax(dim=1, keepdim=True)
            weights = scores.exp()  # the probabilities times their total
            cumulative = weights.cumsum(dim=1)
            total = cumulative[:, -1]
            if draws < n:
                tokens = scores.argmax(dim=-1)[branch]
            if draws:  # by inverting the distribution function
                # drawn for all rows, so that a row's number does not depend on who has left
                source = generator.device if generator else device
                uniform[drawn] = torch.rand(draws, generator=generator, device=source).to(device)
                found = _drawn(cumulative, uniform[rows] * total[branch], branch)
                tokens = torch.where(drawn[rows], found, tokens) if draws < n else found
            completion_ids[rows, t] = tokens
            mask[rows, t] = True
            logps[rows, t] = scores[branch, tokens] - total.log()[branch]
            # a token that cannot come adds nothing: 0 times a finite number
            scores.clamp_(min=torch.finfo(torch.float32).min)
            mean = torch.bmm(weights[:, None], scores[:, :, None])[:, 0, 0] / total
            entropies[rows, t] = (total.log() - mean)[branch]

            ended = torch.isin(tokens, eos)
            finished[rows[ended]] = True
            kept = (~ended).nonzero()[:, 0]
            if not len(kept) or t + 1 == max_new_tokens:
                break
            rows = rows[kept]
            decoding.step(kept, tokens[kept])
    by_token = (tensor[:, : t + 1] for tensor in (completion_ids, mask, logps, entropies))
    return Rollouts([list(ids) for ids in prompt_ids], prompt_index, *by_token, finished)


def _drawn(cumulative: Tensor, thresholds: Tensor, branch: Tensor) -> Tensor:
    """For each row's threshold (N,) the token whose share of its branch's (B, V) it falls into."""
    rank = equal_rank(branch)
    sought = thresholds.new_zeros(len(cumulative), int(rank.max()) + 1)
    sought[branch, rank] = thresholds
    # right=True steps over tokens of probability 0
    found = torch.searchsorted(cumulative, sought, right=True)[branch, rank]
    return found.clamp(max=cumulative.shape[1] - 1)


class _CachedDecoding:
    """The rows being sampled, with transformers' cache, for models that `decoder` cannot read.

    The same interface as `GroupedDecoding`, but each row is a branch of its own.
    """

    def __init__(self, model, prompt_ids, prompt_index: Tensor, pad_token_id: int) -> None:
        prompts = prompt_ids, pad_token_id, prompt_index.device
        output, attention = _prefill(model, *prompts, logits_to_keep=1)
        self.model, self.cache_name = model, cache_name(model)
        self.cache = getattr(output, self.cache_name)
        self.cache.batch_select_indices(prompt_index)  # each prompt's cache for all of its group
        self.attention = attention[prompt_index]
        self.logits = output.logits[prompt_index, -1]
        self.branch = torch.arange(len(prompt_index), device=prompt_index.device)

    def step(self, kept: Tensor, tokens: Tensor) -> None:
        """Run the newest tokens (B,) of the rows that stay, `kept` (B,)."""
        if len(kept) < len(self.branch):
            self.cache.batch_select_indices(kept)
            self.attention, self.branch = self.attention[kept], self.branch[: len(kept)]
        self.attention = pad(self.attention, (0, 1), value=1)
        positions = self.attention.sum(dim=1, keepdim=True) - 1
        where = {"attention_mask": self.attention, "position_ids": positions, "use_cache": True}
        where[self.cache_name] = self.cache
        output = self.model(input_ids=tokens[:, None], **where)
        self.logits = output.logits[:, -1]


def sample(
    policy: Policy, prompt_ids: Sequence, num_generations: int | Sequence[int] = 1,
    *, batch_size: int | None = None, **options,
) -> Rollouts:  # fmt: skip
    """Sample from `policy` by `generate`, in its arithmetic and with its end and padding ids.

    With `batch_size`, in parts of whole groups, each of about so many completions.
    """
    options |= {"eos_token_ids": policy.eos_token_ids, "pad_token_id": policy.pad_token_id}
    prompts = max(1, batch_size // num_generations if batch_size else len(prompt_ids))  # of a part
    parts = []
    for start in range(0, max(len(prompt_ids), 1), prompts):
        part = prompt_ids[start : start + prompts]
        with policy.autocast():
            parts.append(generate(policy.model, part, num_generations, **options))
    return Rollouts.concatenate(parts)


def sample_groups(
    policy: Policy, prompt_ids: Sequence, config: GRPOConfig, generator: torch.Generator
) -> Rollouts:
    """Sample a group for every prompt (token ids), with the config's size, length, temperature."""
    return sample(
        policy, prompt_ids, config.num_generations, batch_size=MOST_AT_ONCE, generator=generator,
        max_new_tokens=config.max_completion_length, temperature=config.temperature,
    )  # fmt: skip


def reply(
    policy: Policy,
    conversations: Sequence[list[dict]],
    num_generations: int = 1,
    *,
    batch_size: int = 64,
    **options,
) -> Rollouts:
    """Let `policy` answer each conversation (messages), a batch at a time.

    `batch_size` is in completions; the options are those of `generate`.
    """
    ids = policy.encode(conversations)
    return sample(policy, ids, num_generations, batch_size=batch_size, **options)


def completion_logps(
    model, rollouts: Rollouts, *, temperature: float = 1.0, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the completions under `model`, with gradient, and entropies, without.

    (N, T) float32, nats, at `temperature`; 0 where masked. Each prompt runs once for its group.
    """
    decoder, head = _decoder_and_head(model)
    mask = rollouts.mask
    if can_read(model):
        states, targets, which = packed_states(model, arithmetic(head.weight), rollouts)
        place = mask.flatten().nonzero()[:, 0]
    else:
        states, place = _cached_states(decoder, rollouts, pad_token_id)
        targets, which = rollouts.completion_ids.flatten()[place], slice(None)
    scores = token_logps(head, states, targets, temperature)
    empty = torch.zeros(mask.numel(), device=mask.device)
    logps, entropies = (empty.index_put((place,), x[which]).view(mask.shape) for x in scores)
    return logps, entropies


def _cached_states(decoder, rollouts: Rollouts, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """The states (M, H) that predict the unmasked tokens, and the tokens' places in the flat mask.

    By transformers' own cache, for models that `decoder` cannot read.
    """
    mask, width = rollouts.mask, rollouts.mask.shape[1]
    prompts, prompt_attention = _prefill(decoder, rollouts.prompt_ids, pad_token_id, mask.device)
    name = cache_name(decoder)
    hidden, places = [], []  # of the unmasked tokens: (M, H), and index into the flat (N, T)
    for rows in by_length(rollouts.lengths):
        index = rollouts.prompt_index[rows]
        part_width = max(int(rollouts.lengths[rows].max()), 1)
        part_mask = mask[rows, :part_width]
        states = prompts.last_hidden_state[index, -1:]  # predicts the first token
        if part_width > 1:
            cache = copy.copy(getattr(prompts, name))  # the prompts' own stays as it is
            cache.layers = [copy.copy(layer) for layer in cache.layers]
            cache.batch_select_indices(index)
            attention = prompt_attention[index]
            steps = torch.arange(part_width - 1, device=mask.device)
            rest = decoder(
                input_ids=rollouts.completion_ids[rows, : part_width - 1],
                attention_mask=torch.cat([attention, part_mask[:, :-1].long()], dim=1),
                position_ids=attention.sum(dim=1, keepdim=True) + steps,
                use_cache=True,
                **{name: cache},
            )
            states = torch.cat([states, rest.last_hidden_state], dim=1)
        hidden.append(states[part_mask])
        row, column = part_mask.nonzero(as_tuple=True)
        places.append(rows[row] * width + column)
    return torch.cat(hidden), torch.cat(places)


def arithmetic(weight: Tensor) -> torch.dtype:
    """The type of products with a weight: autocast's where it is on, else the weight's own."""
    device = weight.device.type
    on = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else weight.dtype


def cache_name(model) -> str:
    """What a model calls its cache, as an argument and in its output."""
    parameters = inspect.signature(type(unwrapped(model)).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24


def token_logps(head, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities (M,) of `targets` (M,) and entropies (M,), in nats, from hidden (M, H).

    float32 whatever the model's type; the entropies carry no gradient. The logits are computed a
    chunk of rows at a time, and where there are several chunks again in the backward pass.

    Raises ValueError for a head that is not a plain linear layer.
    """
    if type(head) is not torch.nn.Linear:
        problem = f"the model's head is a {type(head).__name__}, not a plain Linear"
        raise ValueError(f"{problem}: train without an adapter on the head.")
    m, dtype, on_cpu = len(targets), arithmetic(head.weight), hidden.device.type == "cpu"
    rest = filler(m, dtype) if on_cpu else 0
    hidden, targets = pad(hidden, (0, 0, 0, rest)), pad(targets, (0, rest))

    def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # the weights are converted here, so that their gradients add up in their own type
        bias = None if head.bias is None else head.bias.to(dtype)
        logits = linear(hidden.to(dtype), head.weight.to(dtype), bias).float()
        log_probs = torch.log_softmax(logits / temperature, dim=-1)
        with torch.no_grad():
            entropies = -(log_probs.exp() * log_probs).nan_to_num(nan=0.0).sum(dim=-1)
        return log_probs.gather(1, targets[:, None])[:, 0], entropies

    size = max(1, LOGITS_BUDGET[not on_cpu] // head.weight.shape[0])
    chunks = [*zip(hidden.split(size), targets.split(size), strict=True)]
    with torch.autocast(hidden.device.type, enabled=False):
        if len(chunks) > 1:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            scores = [checkpoint(of_chunk, *chunk, **options) for chunk in chunks]
        else:
            scores = [of_chunk(*chunk) for chunk in chunks]
    logps, entropies = (torch.cat(parts)[:m] for parts in zip(*scores, strict=True))
    return logps, entropies


def _decoder_and_head(model):
    """The transformer without its head, and the head; LoRA weights stay in place in both."""
    inner = unwrapped(model)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if (value := getattr(inner.config, name, None)) not in (None, 1.0):
            problem = f"{type(inner).__name__} changes its logits after the head ({name}={value})"
            raise ValueError(f"{problem}, which scoring leaves out: take a model without it.")
    return inner.get_decoder(), inner.get_output_embeddings()


def _prefill(
    model, prompt_ids, pad_token_id: int, device, use_cache: bool = True, **options
) -> tuple[Any, Tensor]:
    """What the model says to left-padded prompts, its cache included, and their attention mask."""
    ids, attention = left_pad(prompt_ids, pad_token_id, device)
    # They count from the first real token: padding on the left shifts nothing.
    positions = (attention.cumsum(dim=1) - 1).clamp(min=0)
    where = {"attention_mask": attention, "position_ids": positions, "use_cache": use_cache}
    return model(input_ids=ids, **where, **options), attention


def left_pad(prompt_ids: Sequence[Sequence[int]], pad_token_id: int, device) -> tuple[Tensor, ...]:
    """Prompts as ids (P, L) padded on the left, and the attention mask (P, L) of 0 and 1."""
    width = max(map(len, prompt_ids))
    padded = [[pad_token_id] * (width - len(ids)) + list(ids) for ids in prompt_ids]
    attention = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    return torch.tensor(padded, device=device), torch.tensor(attention, device=device)


@torch.no_grad()
def last_logits(policy: Policy, ids: Sequence[Sequence[int]], count: int = 1) -> Tensor:
    """Logits (N, count, V) float32 after each of the last `count` tokens of N texts, as ids.

    In evaluation mode, in which a live policy under TRL is not, and in the policy's arithmetic.
    """
    given = ids, policy.pad_token_id, policy.device
    with evaluating(policy.model), policy.autocast():
        output, _ = _prefill(policy.model, *given, use_cache=False, logits_to_keep=count)
    return output.logits.float()


def fitting_batches(policy: Policy, ids: Sequence[list], batch_size: int) -> Iterator[list[int]]:
    """Places of the texts that fit into the context, shortest first: that pads little."""
    fitting = [i for i, text in enumerate(ids) if 0 < len(text) <= policy.context_length]
    fitting.sort(key=lambda i: len(ids[i]))
    for start in range(0, len(fitting), batch_size):
        yield fitting[start : start + batch_size]


def check_lengths(model, prompt_ids: Sequence, max_new_tokens: int, what: str = "prompt") -> None:
    """Raise ValueError for no prompt, an empty one, or one that leaves no room for a completion."""
    if not len(prompt_ids):
        raise ValueError("there are no prompts; give at least one.")
    lengths = [len(ids) for ids in prompt_ids]
    if min(lengths) == 0:
        raise ValueError(f"{what} {lengths.index(0)} is empty; give it at least one token.")
    context, longest = getattr(model.config, "max_position_embeddings", None), max(lengths)
    if context is not None and longest + max_new_tokens > context:
        given = f"{what} {lengths.index(longest)} has {longest} tokens, which with a completion of"
        excess = f"{max_new_tokens} exceeds the model's context of {context}"
        raise ValueError(f"{given} {excess}: shorten it or lower max_completion_length.")
