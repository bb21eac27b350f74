"""Train the shipped tiny base from a seed: `grpo-kit pretrain --output base --seed 0`.

One supervised run in five phases: copying; drills; every skill in one reliable style; all reliable
styles and many sums; the full mixture of `skills`. Two copies of the model share the rows of every
batch and average their weights every `AVERAGE_EVERY` steps (local SGD, arXiv 1805.09767). Half an
hour on one core.
"""

import copy
import itertools
import random
import re
import time
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import AddedToken
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo_kit.models import Policy, save_policy
from grpo_kit.paths import make_output_dir
from grpo_kit.tiny.skills import SHIPPED, Shares, sample_conversation

PHASES = {"copy": 64, "drill": 640, "reliable": 2560, "practice": 3072, "mixture": 7168}  # steps
STEPS = sum(PHASES.values())
LEARNING_RATE = 1.2e-3  # reached after WARM_STEPS, held, and lowered to 0 over the mixture
WARM_STEPS = 30
BETAS = (0.9, 0.98)
COPIES = 2  # of the model; the shipped base was made with two
BATCH = 16  # rows, of all copies together
POOL = 64  # batches cut from one sorted pool of conversations
AVERAGE_EVERY = 16  # steps between two averages of the copies' weights
COPY_SHARE = 0.125  # of the rows between first and last phase are random tokens, to be copied
COPY_LENGTH = 24
# About a row's mean of counted tokens; it divides every loss. With the batch's own number, the
# batches of short replies (rows are sorted) made short replies far too likely.
TOKENS = 32
VOCABULARY = 1024
BREVITY_STEPS = 8 * POOL  # of the question about brevity
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<response>", "</response>")
NUMBERS = tuple(f"{space}{number}" for number in range(100) for space in ("", " "))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(seed: int = 0, n_conversations: int = 8000) -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE tokenizer, of at most `VOCABULARY` tokens, trained on the mixture.

    Every number is one token, so that a copy is one look-up. The answer tags are ordinary tokens:
    special ones would vanish from decoded completions, and every reward with them.
    """
    rng = random.Random(f"tokenizer-{seed}")
    tags = re.compile("|".join(map(re.escape, TAGS)))
    pieces = (
        piece
        for _ in range(n_conversations)
        for message in sample_conversation(rng)
        for piece in tags.split(message["content"])  # so that no merge is spent on their letters
    )
    blank = Qwen2Tokenizer(
        vocab={PAD: 0, END: 1}, merges=[], unk_token=PAD, pad_token=PAD, eos_token=END,
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=512,
    )  # fmt: skip
    room = VOCABULARY - len(TAGS) - len(NUMBERS)
    tokenizer = blank.train_new_from_iterator(
        pieces, room, new_special_tokens=list(ROLES), show_progress=False
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*TAGS, *NUMBERS)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen2ForCausalLM:
    """The base before its warm-up, in float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, vocab_size=len(tokenizer),
        initializer_range=0.06, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.2
            layer.mlp.down_proj.weight *= 0.1
        embed_words_alike(model, tokenizer)
        plant_induction_head(model, seed)
    return model


def embed_words_alike(model, tokenizer) -> None:
    """Start " 12" and "12", " lamp" and "(lamp" from nearly the same embedding."""
    vocabulary, weight = tokenizer.get_vocab(), model.model.embed_tokens.weight
    for token, i in vocabulary.items():
        if token[0] in "Ġ ":
            for variant in (token[1:], f"({token[1:]}"):
                if (other := vocabulary.get(variant)) is not None:
                    weight[other] = 0.9 * weight[i] + 0.3 * weight[other]


def plant_induction_head(model, seed: int) -> None:
    """Set two heads to look up and copy, which 800 steps of warm-up had not learnt.

    A head of the first layer attends to the previous token and writes it into separate directions.
    A head of the second layer compares these with the current token and copies the token that
    followed it earlier (Olsson et al., arXiv 2209.11895).
    """
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    half = width // 2
    generator = torch.Generator().manual_seed(seed + 1)
    square = (config.hidden_size, config.hidden_size)
    basis, _ = torch.linalg.qr(torch.randn(square, generator=generator))
    token, token_before, copied = basis.T[: 3 * width].split(width)
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    norm = model.model.embed_tokens.weight.norm(dim=1).mean() / width**0.5

    back = model.model.layers[0].self_attn
    sharp = 6.0 * (torch.arange(half) < half // 2)
    back.k_proj.bias[:half] = sharp
    back.q_proj.bias[:half] = sharp * torch.cos(frequencies)
    back.q_proj.bias[half:width] = -sharp * torch.sin(frequencies)
    back.q_proj.weight[:width] *= 0.2
    back.v_proj.weight[:width] = token
    back.o_proj.weight[:, :width] = 2 * norm * token_before.T

    match = model.model.layers[1].self_attn
    slow = 3.0 * (torch.arange(half) >= half // 2 - 1).repeat(2)[:, None]
    match.q_proj.weight[:width] = slow * token
    match.k_proj.weight[:width] = slow * token_before
    match.v_proj.weight[:width] = copied
    match.o_proj.weight[:, :width] = 6 * norm * copied.T


def encode(tokenizer, messages: list[dict]) -> tuple[list[int], list[int]]:
    """A conversation as the chat template writes it, and its labels: -100 but for replies."""
    contents = tokenizer([m["content"] for m in messages], add_special_tokens=False)["input_ids"]
    ids, labels = [], []
    for message, content in zip(messages, contents, strict=True):
        turn = [*content, tokenizer.eos_token_id]
        ids += [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>"), *turn]
        labels += [-100, *(turn if message["role"] == "assistant" else [-100] * len(turn))]
    return ids, labels


def padded(rows, value: int) -> torch.Tensor:
    return pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=value)


def batch_pool(
    tokenizer, seed: int, index: int, phase: str, shares: Shares = SHIPPED
) -> list[tuple]:
    """`POOL` batches of (ids, attention mask, labels), each (BATCH, L), rows of similar length.

    They depend on the arguments alone: a resumed warm-up sees the same texts.
    """
    rng = random.Random(f"warm-up-{seed}-{index}")
    share = {"copy": 1.0, "mixture": 0.0, "brevity": 0.0}.get(phase, COPY_SHARE)
    n_copies = int(share * BATCH * POOL)
    plain = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    copies = [rng.sample(plain, COPY_LENGTH) for _ in range(n_copies)]
    rows = [(ids * 2, [-100] * COPY_LENGTH + ids) for ids in copies]  # the second time counted
    texts = [sample_conversation(rng, phase, shares) for _ in range(BATCH * POOL - n_copies)]
    rows += [encode(tokenizer, messages) for messages in texts]
    rows.sort(key=lambda row: len(row[0]))
    batches, pad = [], tokenizer.pad_token_id
    for start in range(0, len(rows), BATCH):
        ids, labels = zip(*rows[start : start + BATCH], strict=True)
        ids = padded(ids, pad)
        batches.append((ids, (ids != pad).long(), padded(labels, -100)))
    rng.shuffle(batches)
    return batches


def phase_at(step: int, steps: int) -> str:
    """The phase of step `step` of a warm-up of `steps`, of which each phase has its share."""
    ends = zip(PHASES, itertools.accumulate(PHASES.values()), strict=True)
    return next(phase for phase, end in ends if step * STEPS < end * steps)


def rate_at(step: int, steps: int) -> float:
    """The learning rate of step `step` of `steps`."""
    left = (steps - step) * STEPS / (steps * PHASES["mixture"])
    return LEARNING_RATE * min((step + 1) / WARM_STEPS, left, 1.0)


def pretrain(output_dir: str | Path, *, seed: int = 0, steps: int = STEPS) -> dict:
    """Train the tiny base on one thread and save it (bf16, with its tokenizer) to `output_dir`.

    Returns the seed, the steps, `seconds`, `loss` (of the last tenth of the steps, nats a token)
    and the number of `parameters`. With fewer steps each phase keeps its share of them.
    """
    folder = make_output_dir(output_dir)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(seed)
    models = [make_model(tokenizer, seed) for _ in range(COPIES)]
    optimizers = [make_optimizer(model) for model in models]
    losses, started = [], time.monotonic()
    progress = tqdm(range(steps), desc="pretrain", mininterval=5)
    for step in progress:
        if step % POOL == 0:
            phase = phase_at(step, steps)
            pool = batch_pool(tokenizer, seed, step // POOL, phase)
        for i in range(COPIES):
            rows = [tensor[i::COPIES] for tensor in pool[step % POOL]]
            losses.append(update(models[i], optimizers[i], rows, rate_at(step, steps)))
        if (step + 1) % AVERAGE_EVERY == 0 or step + 1 == steps:
            average_weights(models)
        progress.set_postfix_str(f"loss {fmean(losses[-50:]):.3f}, phase {phase}", refresh=False)

    seconds, loss = time.monotonic() - started, fmean(losses[-max(1, len(losses) // 10) :])
    model = models[0]
    save_policy(Policy(model.to(torch.bfloat16), tokenizer), folder)
    result = {"seed": seed, "steps": steps, "seconds": seconds, "loss": loss}
    return result | {"parameters": model.num_parameters()}


def make_optimizer(model) -> torch.optim.AdamW:
    """AdamW that decays no biases and no norm weights."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)


@torch.no_grad()
def average_weights(models: list) -> None:
    """Give every model the mean of all models' weights; optimiser states stay as they are."""
    for weights in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(weight / len(models) for weight in weights)
        for weight in weights:
            weight.copy_(mean)


def update(model, optimizer, batch, rate: float) -> float:
    """One step on a batch of (ids, attention mask, labels); the mean loss, nats a token."""
    ids, attention, labels = batch
    targets = labels[:, 1:]
    counted = targets != -100  # only these positions meet the vocabulary
    hidden = model.model(input_ids=ids, attention_mask=attention, use_cache=False)[0]
    logits = model.lm_head(hidden[:, :-1][counted])
    loss = torch.nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
    descend(model, optimizer, loss / (TOKENS * len(ids)), rate)
    return loss.item() / len(logits)


def descend(model, optimizer, loss: torch.Tensor, rate: float) -> None:
    """One optimiser step, with the gradient clipped at 1."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def warm_up_more(
    policy: Policy, seed: int, steps: int = POOL, phase: str = "mixture", shares: Shares = SHIPPED
) -> Policy:
    """A frozen copy of a tiny policy after `steps` more batches of `phase`.

    On the mixture it keeps its skills, but its judgements differ from those of the policy. With
    other `shares` it adopts these.
    """
    model = copy.deepcopy(policy.model).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS)
    for i in tqdm(range(steps), desc=f"warm-up, {phase}", mininterval=5, disable=steps <= POOL):
        if i % POOL == 0:
            pool = batch_pool(policy.tokenizer, seed, i // POOL, phase, shares)
        ids, attention, labels = pool[i % POOL]
        loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
        descend(model, optimizer, loss, LEARNING_RATE / 2 * (1 - i / steps))
    return Policy(model.eval().requires_grad_(False), policy.tokenizer)
