"""The forward pass of a Llama-like model written out, for CPUs.

With a small model, or one token a row, a CPU spends as long on what transformers does around the
arithmetic as on the arithmetic. Here all tokens lie packed in one row, so no linear layer sees
padding, and while sampling what the rows of a group have in common is computed once. Gradients
reach the weights. A model with LoRA weights that are not merged goes through transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_kit.models import unwrapped

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTATIONS = ("default", "linear", "llama3", "yarn")  # those that do not change with the length
PART_TOKENS = 640  # least padded tokens of a part that is scored by itself
# (layer, q, k, v), each (M, heads, D) -> (M, heads of q, D): mixes values of what a token may see
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def can_read(model) -> bool:
    """Whether `Decoder` computes what this model does: transformers' own code, on a CPU."""
    inner = unwrapped(model)
    known = type(inner).__name__ in FAMILIES and type(inner).__module__.startswith("transformers.")
    if not known or next(model.parameters()).device.type != "cpu":
        return False
    config, rotation = inner.config, inner.model.rotary_emb.rope_type
    ends = (type(inner.model.embed_tokens), type(inner.get_output_embeddings()))
    layers = [_linears(layer) for layer in inner.model.layers]
    return (
        ends == (torch.nn.Embedding, torch.nn.Linear)
        and all(type(linear) is torch.nn.Linear for layer in layers for linear in layer)
        and all(linear.bias is None for layer in layers for linear in layer[3:])
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and config.hidden_act == "silu"
        and rotation in ROTATIONS
    )


def _linears(layer) -> list:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            mlp.gate_proj, mlp.up_proj, mlp.down_proj]  # fmt: skip


class _Product:
    """Linear layers that read the same input, as one product with their weights."""

    def __init__(self, dtype: torch.dtype, *linears) -> None:
        weights = [linear.weight.to(dtype) for linear in linears]
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        biases = [linear.bias for linear in linears]
        self.bias = None if biases[0] is None else torch.cat(biases).to(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _Block:
    """Weights of one layer."""

    def __init__(self, layer, dtype: torch.dtype) -> None:
        q, k, v, out, gate, up, down = _linears(layer)
        norms = (getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm"))
        self.query_norm, self.key_norm = (norm and norm.weight for norm in norms)  # Qwen3's
        self.attention_norm = layer.input_layernorm.weight
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.qkv, self.out = _Product(dtype, q, k, v), _Product(dtype, out)
        self.gate_up, self.down = _Product(dtype, gate, up), _Product(dtype, down)


class Decoder:
    """The layers of `model` with its weights as they are now.

    Products with weights are in `dtype`, attention in float32: its gradient is ten times as fast.
    """

    def __init__(self, model, dtype: torch.dtype) -> None:
        inner = unwrapped(model)
        config, decoder = inner.config, inner.model
        self.dtype, self.eps = dtype, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = decoder.layers[0].self_attn.head_dim
        self.embedding, self.norm = decoder.embed_tokens, decoder.norm.weight
        self.rotation = decoder.rotary_emb
        self.blocks = [_Block(layer, dtype) for layer in decoder.layers]

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (M, H) of M tokens (long) at their positions (long)."""
        m, rest = len(ids), filler(len(ids), self.dtype)
        ids, positions = F.pad(ids, (0, rest)), F.pad(positions, (0, rest))
        cos, sin = (t[0, :, None] for t in self.rotation(self.embedding.weight, positions[None]))
        half, rotated = self.head_dim // 2, self.heads + self.kv_heads
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1).to(self.dtype)
        cos, x = cos.to(self.dtype), self.embedding(ids)
        for i, block in enumerate(self.blocks):
            inputs = self._normed(x, block.attention_norm)
            heads = block.qkv(inputs).view(m + rest, -1, self.head_dim)
            qk, v = heads[:, :rotated], heads[:, rotated:]
            if block.query_norm is not None:
                q, k = qk[:, : self.heads], qk[:, self.heads :]
                q, k = self._normed(q, block.query_norm), self._normed(k, block.key_norm)
                qk = torch.cat((q, k), dim=1)
            qk = qk * cos + qk.roll(half, -1) * sin
            qk, v = qk[:m].float(), v[:m].float()
            mixed = attend(i, qk[:, : self.heads], qk[:, self.heads :], v).flatten(1)
            x = x + block.out(F.pad(mixed, (0, 0, 0, rest)).to(self.dtype))
            gate, up = block.gate_up(self._normed(x, block.mlp_norm)).chunk(2, dim=-1)
            x = x + block.down(F.silu(gate) * up)
        return self._normed(x, self.norm)[:m]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight.float(), self.eps).to(self.dtype)


def filler(rows: int, dtype: torch.dtype) -> int:
    """Rows to add to a 16-bit product: for each new shape a CPU writes code and keeps it."""
    if dtype == torch.float32:
        return 0
    return -rows % (16 if rows <= 256 else 128)


class _Prompts:
    """Prompts: their `ids` packed in one row, and values of these tokens padded to one width."""

    def __init__(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        self.ids = torch.tensor([i for ids in prompt_ids for i in ids])
        self.lengths = torch.tensor([len(ids) for ids in prompt_ids])
        self.last = self.lengths.cumsum(0) - 1  # the place of each one's last token in the row
        self.mask = torch.arange(int(self.lengths.max())) < self.lengths[:, None]
        self.places = self.mask.flatten().nonzero()[:, 0]
        self.positions = self.places % self.mask.shape[1]

    def pad(self, packed: Tensor) -> Tensor:
        """(M, heads, D) as (B, heads, width, D), 0 where there is no token."""
        rows = packed.new_zeros(self.mask.numel(), *packed.shape[1:])
        rows = rows.index_copy(0, self.places, packed)
        return rows.view(*self.mask.shape, *packed.shape[1:]).transpose(1, 2)

    def pack(self, padded: Tensor) -> Tensor:
        """The reverse of `pad`."""
        return padded.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


class PackedCompletions:
    """Prompts and the completions of their groups in one row: what they share is run once.

    Completions of a prompt that begin alike are one until they differ. `states` (N, T): which of
    the row's hidden states predicts each token of a completion.
    """

    def __init__(self, rollouts) -> None:
        prompt_index, completion_ids = rollouts.prompt_index, rollouts.completion_ids
        self.prompts, columns = _Prompts(rollouts.prompt_ids), max(int(rollouts.lengths.max()), 1)
        sizes = self.prompts.lengths[prompt_index]  # of each row's prompt
        run = (rollouts.lengths - 1).clamp(min=0)  # the last token predicts nothing
        self.states = torch.zeros(len(run), columns, dtype=torch.long)
        self.states[:, 0] = self.prompts.last[prompt_index]
        tokens, positions = [self.prompts.ids], [self.prompts.positions]
        n = len(self.prompts.ids)
        firsts: list[Tensor] = []  # of each beginning, a row that has it
        for t in range(columns - 1):
            rows = (t < run).nonzero()[:, 0]
            begun, which = equal_pairs(self.states[rows, t], completion_ids[rows, t])
            firsts.append(torch.empty_like(begun).index_copy_(0, which, rows))
            tokens.append(completion_ids[firsts[-1], t])
            positions.append(sizes[firsts[-1]] + t)
            self.states[rows, t + 1] = n + which
            n += len(begun)
        self.ids, self.positions = torch.cat(tokens), torch.cat(positions)

        self.parts: list[tuple] = []  # of rows alike in length: their states, prompts, mask
        starts, padded = torch.empty_like(run), 0  # where each row begins among all padded ones
        for rows in by_length(run):
            width, index = max(int(run[rows].max()), 1), prompt_index[rows]
            longest = int(sizes[rows].max())
            seen = self.prompts.mask[index, None, :longest].expand(-1, width, -1)
            causal = torch.ones(width, width, dtype=torch.bool).tril().expand(len(rows), -1, -1)
            own = F.pad(self.states[rows], (0, 1))[:, 1 : width + 1]
            self.parts.append((own, index, longest, torch.cat([seen, causal], dim=2)[:, None]))
            starts[rows] = padded + torch.arange(len(rows)) * width
            padded += len(rows) * width
        places = [starts[first] + t for t, first in enumerate(firsts)]
        self.places = torch.cat(places) if places else starts[:0]  # of beginnings, likewise

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped, n = q.shape[1] != k.shape[1], len(self.prompts.places)
        prompts = [self.prompts.pad(x[:n]) for x in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*prompts, is_causal=True, enable_gqa=grouped)
        of_prompts, rows = self.prompts.pack(mixed), []
        for states, index, longest, mask in self.parts:
            of_rows = (x.index_select(0, states.flatten()) for x in (q, k, v))
            query, *own = (x.view(*states.shape, *x.shape[1:]).transpose(1, 2) for x in of_rows)
            pairs = zip(prompts[1:], own, strict=True)
            key, value = (torch.cat([x[index, :, :longest], y], dim=2) for x, y in pairs)
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=grouped
            )
            rows.append(mixed.transpose(1, 2).flatten(0, 1))
        return torch.cat([of_prompts, torch.cat(rows).index_select(0, self.places)])


def equal_pairs(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The different pairs of a state and the token that follows, (P,), and which one each is, (B,).

    A pair is the number state * 2**32 + token.
    """
    return (states * 2**32 + tokens).unique(return_inverse=True)


def by_length(lengths: Tensor) -> tuple[Tensor, ...]:
    """Row indices by length, in one to eight parts of about `PART_TOKENS` padded tokens or more."""
    parts = len(lengths) * int(lengths.max()) // PART_TOKENS
    return lengths.argsort(stable=True).tensor_split(min(max(parts, 1), 8, len(lengths)))


def packed_states(model, dtype: torch.dtype, rollouts) -> tuple[Tensor, Tensor, Tensor]:
    """What predicts the unmasked tokens (M), of those equal so far once (P).

    The hidden states (P, H), the tokens (P,) that they predict, and which one each of M is, (M,).
    """
    packed = PackedCompletions(rollouts)
    with torch.autocast("cpu", enabled=False):
        states = Decoder(model, dtype)(packed.ids, packed.positions, packed.attend)
    real = rollouts.mask[:, : packed.states.shape[1]]
    tokens = rollouts.completion_ids[:, : packed.states.shape[1]][real]
    pairs, which = equal_pairs(packed.states[real], tokens)
    return states.index_select(0, pairs >> 32), pairs % 2**32, which


class GroupedDecoding:
    """The rows being sampled; `logits` (B, V) of the token that comes next on each of B branches.

    Rows of a prompt that are equal so far share a branch, which is computed once: at first each
    prompt is one, and a branch divides where its rows differ. The cache holds each prompt once, and
    slots for its branches: a step's attention to a prompt is one product for all of them.
    """

    def __init__(self, model, dtype, prompt_ids, prompt_index: Tensor, room: int) -> None:
        with torch.autocast("cpu", enabled=False):
            self.decoder, head = Decoder(model, dtype), model.get_output_embeddings()
        self.head, self.bias = head.weight.to(dtype), head.bias
        packed = _Prompts(prompt_ids)
        self.hidden = torch.zeros(packed.mask.shape).masked_fill(~packed.mask, -torch.inf)
        self.prompts: list[tuple[Tensor, Tensor]] = []  # of each layer, keys and values

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (packed.pad(t) for t in (q, k, v))
            self.prompts.append((k.transpose(2, 3).contiguous(), v.contiguous()))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return packed.pack(mixed)

        with torch.autocast("cpu", enabled=False):
            states = self.decoder(packed.ids, packed.positions, attend)[packed.last]
        self.logits, self.branch = self._logits(states), prompt_index  # of each row
        self.positions, self.length = packed.lengths, 0
        n, heads, width = len(prompt_ids), self.decoder.kv_heads, self.decoder.head_dim
        self.slots, self.room = torch.arange(n), 1  # of each branch; slots a prompt
        # keys and values of each layer by time, so that a step writes them in one place
        self.cache = torch.empty(len(self.prompts), 2, room, n, heads, self.room, width)

    def _logits(self, states: Tensor) -> Tensor:
        padded = F.pad(states, (0, 0, 0, filler(len(states), states.dtype)))
        return F.linear(padded, self.head, self.bias)[: len(states)].float()

    def step(self, kept: Tensor, tokens: Tensor) -> None:
        """Run the newest tokens (B,) of the rows that stay, `kept` (B,)."""
        pairs, self.branch = equal_pairs(self.branch[kept], tokens)
        self._divide(pairs >> 32)
        self.length += 1
        with torch.autocast("cpu", enabled=False):
            states = self.decoder(pairs % 2**32, self.positions, self._attend)
            self.logits = self._logits(states)
        self.positions = self.positions + 1

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.cache[layer]
        prompt_keys, prompt_values = (x.flatten(0, 1) for x in self.prompts[layer])
        _, prompts, heads, rows, width = keys.shape
        shared = q.shape[1] // heads  # queries that read the same key

        def by_slot(x: Tensor) -> Tensor:
            """(B, heads, D) as (P, heads of keys, R, shared, D)."""
            dense = x.new_zeros(prompts * rows, *x.shape[1:]).index_copy_(0, self.slots, x)
            return dense.view(prompts, rows, heads, -1, width).transpose(1, 2)

        keys[self.length - 1], values[self.length - 1] = (by_slot(x)[:, :, :, 0] for x in (k, v))
        own_keys, own_values = (x[: self.length].flatten(1, 3) for x in (keys, values))
        queries = (by_slot(q) * width**-0.5).reshape(prompts * heads, rows * shared, width)
        seen = torch.bmm(queries, prompt_keys).view(prompts, heads, rows * shared, -1)
        seen = (seen + self.hidden[:, None, None]).flatten(0, 1)
        own = torch.bmm(queries.view(-1, shared, width), own_keys.permute(1, 2, 0))
        scores = torch.cat((seen, own.view(*seen.shape[:2], -1)), -1).softmax(-1)
        seen, own = scores.split((seen.shape[-1], self.length), -1)
        mixed = torch.bmm(seen, prompt_values).view(-1, shared, width)
        own = own.unflatten(1, (rows, shared)).flatten(0, 1)
        mixed = torch.baddbmm(mixed, own, own_values.transpose(0, 1))
        mixed = mixed.view(prompts, heads, rows, -1).transpose(1, 2).reshape(prompts * rows, -1)
        return mixed.index_select(0, self.slots).view_as(q)

    def _divide(self, parents: Tensor) -> None:
        """Go on with a branch for each of `parents` (B,), ascending; one that divides is repeated.

        The first of each stays in its slot, the others get a copy of it in a free one. Where these
        run out, or are too many, the cache is made anew with as many as are needed.
        """
        self.positions = self.positions[parents]
        old, before, size = self.cache, self.slots[parents], self.room
        used, prompt = (before // size).unique(return_inverse=True)
        needed = 1 << (int(prompt.bincount().max()) - 1).bit_length()
        if needed > size or 2 * len(used) * needed <= old.shape[3] * size:
            moved = torch.ones(len(parents), dtype=torch.bool)
            self.room, self.slots = needed, prompt * needed + equal_rank(prompt)
            shape = *old.shape[:3], len(used), old.shape[4], needed, old.shape[6]
            self.cache = old.new_empty(shape)
            self.prompts = [(keys[used], values[used]) for keys, values in self.prompts]
            self.hidden = self.hidden[used]
        else:
            moved = equal_rank(parents) > 0
            free = torch.ones(old.shape[3], size, dtype=torch.bool)
            free.view(-1)[before] = False
            free = free.argsort(dim=1, descending=True, stable=True)
            prompt = before[moved] // size
            self.slots = before.clone()
            self.slots[moved] = prompt * size + free[prompt, equal_rank(prompt)]
        if self.length and moved.any():
            places = _places(old, before[moved])
            new = self.cache.flatten(3, 5)[:, :, : self.length]
            copied = old.flatten(3, 5)[:, :, : self.length].index_select(3, places)
            new.index_copy_(3, _places(self.cache, self.slots[moved]), copied)


def _places(cache: Tensor, slots: Tensor) -> Tensor:
    """Where the heads of slots (B,) lie in a cache flattened over prompts, heads and slots."""
    heads, room = cache.shape[4:6]
    prompt, slot = slots // room, slots % room
    return ((prompt[:, None] * heads + torch.arange(heads)) * room + slot[:, None]).flatten()


def equal_rank(index: Tensor) -> Tensor:
    """The place of each entry among those equal to it."""
    counts, order = index.bincount(), index.argsort(stable=True)
    rank = torch.empty_like(order)
    first = (counts.cumsum(0) - counts)[index[order]]
    rank[order] = torch.arange(len(order), device=index.device) - first
    return rank
