"""Train the shipped tiny base from a seed: `grpo-kit pretrain --output base --seed 0`.

Supervised warm-up on generated conversations, in five phases of one run: copying; drills in sums
and recall; every skill in one reliable style; all reliable styles and many more sums; and the full
mixture of `skills`, whose shares the model takes on. The loss counts the assistant's tokens alone.
(Without drills 1,300 steps taught the styles and no sums; after 3,300 steps in all, sums were right
when the likeliest token was taken, and wrong half the time when sampled.) Progress and the time
left are shown.

Two processes share the work: each takes steps of its own on half the rows of every batch, and now
and then the weights are averaged (local SGD, arXiv 1805.09767), with nobody waiting at each step.
The number of processes is part of the recipe, as another number is another run.
"""

import copy
import io
import itertools
import json
import multiprocessing
import random
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.tiny.skills import sample_conversation

if TYPE_CHECKING:
    from grpo_kit.models import Policy

PHASES = {"copy": 64, "drill": 640, "reliable": 2560, "practice": 3072, "mixture": 7168}  # steps
STEPS = sum(PHASES.values())
# reached after WARM_STEPS, held, and let down to 0 over the mixture
LEARNING_RATE = 1.2e-3
PROCESSES = 2
BATCH = 16  # rows, of all processes together
POOL = 64  # batches cut from one sorted pool of conversations
STATE_EVERY = 80  # steps between two saved states, a multiple of AVERAGE_EVERY
AVERAGE_EVERY = 16  # steps between two averages of the processes' weights
WARM_STEPS = 30
COPY_SHARE = 0.125  # of the rows between first and last phase are random tokens, to be copied
COPY_LENGTH = 24
# About the mean of a row's counted tokens, by which the loss is divided in every batch. With the
# batch's own number, batches of short replies, sorted as they are, made these far too likely.
TOKENS = 32
VOCABULARY = 1024
STATE_FILE = "warm-up.pt"
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

    Every number of a problem is one token, so that to copy it is to look up one token. (Qwen2's
    cuts digits apart, so they are added to it, with and without the space before.)

    The answer tags are ordinary tokens: as special tokens they would vanish from decoded
    completions and every reward with them.
    """
    rng = random.Random(f"tokenizer-{seed}")
    special = [PAD, END, *ROLES]
    corpus = (
        message["content"] for _ in range(n_conversations) for message in sample_conversation(rng)
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS) - len(NUMBERS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tags = re.compile("|".join(map(re.escape, TAGS)))
    # cut at the tags, so that no merge is spent on their letters
    pieces = (piece for text in corpus for piece in tags.split(text))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer()._tokenizer.pre_tokenizer
    bpe.train_from_iterator(pieces, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (*TAGS, *NUMBERS)]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen2ForCausalLM:
    """The base before its warm-up: Qwen2's architecture, under a million parameters, fp32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
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
    """Let the model start with what takes small ones longest to find: looking up and copying.

    An induction head (Olsson et al., arXiv 2209.11895) finds where the present token stood before
    and predicts what followed it there. It needs two heads to agree, and until they do nothing is
    gained: 800 steps of warm-up had not found it. Here a head of the first layer attends to the
    token before, through the biases alone, and writes what that was into directions of its own; a
    head of the second layer compares them with the present token, at the low frequencies of the
    rotary embedding, which distance turns little, and adds the token found to the prediction.
    """
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    half = width // 2
    basis, _ = torch.linalg.qr(
        torch.randn(
            config.hidden_size,
            config.hidden_size,
            generator=torch.Generator().manual_seed(seed + 1),
        )
    )
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


def encode(tokenizer, conversations: list[list[dict]]) -> list[tuple[list[int], list[bool]]]:
    """Token ids of each conversation as the chat template writes it, and which the loss counts."""
    contents = [message["content"] for messages in conversations for message in messages]
    encoded = iter(tokenizer(contents, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    rows = []
    for messages in conversations:
        ids: list[int] = []
        counted: list[bool] = []
        for message in messages:
            body = [*next(encoded), end]
            ids += [tokenizer.convert_tokens_to_ids(f"<|{message['role']}|>"), *body]
            counted += [False] + [message["role"] == "assistant"] * len(body)
        rows.append((ids, counted))
    return rows


def copy_row(token_ids: list[int], rng: random.Random) -> tuple[list[int], list[bool]]:
    """Random tokens twice, the second time counted."""
    ids = rng.sample(token_ids, COPY_LENGTH)
    return ids * 2, [False] * COPY_LENGTH + [True] * COPY_LENGTH


def batch_pool(tokenizer, seed: int, index: int, phase: str) -> list[tuple]:
    """`POOL` batches of (ids, attention mask, labels), each (BATCH, L), rows of similar length.

    Which rows they hold depends on the arguments alone, so that a warm-up that was killed goes on
    with the texts that it would have seen.
    """
    rng = random.Random(f"warm-up-{seed}-{index}")
    copies = {"copy": 1.0, "mixture": 0.0}.get(phase, COPY_SHARE)
    n_copies = int(copies * BATCH * POOL)
    special = set(tokenizer.all_special_ids)
    plain = [i for i in range(len(tokenizer)) if i not in special]
    rows = [copy_row(plain, rng) for _ in range(n_copies)]
    conversations = [sample_conversation(rng, phase) for _ in range(BATCH * POOL - n_copies)]
    rows += encode(tokenizer, conversations) if conversations else []
    rows.sort(key=lambda row: len(row[0]))
    batches = []
    for start in range(0, len(rows), BATCH):
        chunk = rows[start : start + BATCH]
        width = max(len(ids) for ids, _ in chunk)
        ids = torch.full((BATCH, width), tokenizer.pad_token_id)
        labels = torch.full((BATCH, width), -100)
        for i, (row, counted) in enumerate(chunk):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, : len(row)] = torch.where(torch.tensor(counted), torch.tensor(row), -100)
        batches.append((ids, (ids != tokenizer.pad_token_id).long(), labels))
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


def pretrain(
    output_dir: str | Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    processes: int | None = None,
    threads: int | None = None,
) -> dict:
    """Train the tiny base and save it (bf16 safetensors, tokenizer) to `output_dir`.

    The state is kept in `output_dir/warm-up.pt` while it runs; called again after a kill with the
    same arguments, it goes on from there. `threads` are those of each process.

    Returns a dict: `seed`, `steps`, `processes`, `seconds` (with those before a kill), `loss` (mean
    of the last tenth of the steps, nats a token), `parameters`. Raises RuntimeError when
    `output_dir` cannot be written and ValueError for fewer than one step or process, more processes
    than rows, or a state of another warm-up.
    """
    recipe = {
        "seed": seed,
        "steps": STEPS if steps is None else steps,
        "processes": PROCESSES if processes is None else processes,
    }
    if recipe["steps"] < 1:
        raise ValueError(f"steps is {steps}; the warm-up needs at least 1 step.")
    if not 1 <= recipe["processes"] <= BATCH:
        raise ValueError(
            f"processes is {processes}; the {BATCH} rows of a batch can be shared by 1 to {BATCH}."
        )
    output_dir = make_output_dir(output_dir)
    load_state(output_dir, recipe)  # another warm-up's is refused before anything starts
    if recipe["processes"] == 1:
        return _warm_up(0, output_dir, recipe, threads)
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _warm_up_with_others,
            (f"file://{folder}/meeting", results, output_dir, recipe, threads),
            nprocs=recipe["processes"],
        )
    return results.get()


def load_state(output_dir: Path, recipe: dict) -> dict | None:
    """The state of a warm-up that was stopped; ValueError if it is not of `recipe`."""
    file = output_dir / STATE_FILE
    if not file.exists():
        return None
    state = torch.load(file, weights_only=True)
    if (found := {name: state[name] for name in recipe}) != recipe:
        told = [", ".join(f"{k} {v}" for k, v in kind.items()) for kind in (found, recipe)]
        raise ValueError(
            f"{file} belongs to a warm-up of {told[0]}, not of {told[1]}: delete it or choose "
            "another folder."
        )
    return state


def _warm_up_with_others(
    rank: int, meeting: str, results, output_dir: Path, recipe: dict, threads: int | None
) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=recipe["processes"]
    )
    result = _warm_up(rank, output_dir, recipe, threads)
    if rank == 0:
        results.put(result)
    torch.distributed.destroy_process_group()


def _warm_up(rank: int, output_dir: Path, recipe: dict, threads: int | None) -> dict:
    """The share of process `rank` in the warm-up; the first one shows, keeps and saves."""
    seed, steps, processes = recipe["seed"], recipe["steps"], recipe["processes"]
    if threads:
        torch.set_num_threads(threads)
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    # biases and norm weights are not decayed
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=1.0,  # times what the schedule says
        betas=(0.9, 0.98),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(  # it is asked once more after the last step
        optimizer, lambda step: rate_at(min(step, steps - 1), steps)
    )
    first, spent, losses = 0, 0.0, []
    if state := load_state(output_dir, recipe):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first, spent, losses = state["step"], state["seconds"], state["losses"]

    started, pool_index, pool = time.monotonic(), -1, []
    progress = tqdm(
        range(first, steps),
        desc="pretrain",
        initial=first,
        total=steps,
        mininterval=5,
        disable=rank > 0,
    )
    parent = multiprocessing.parent_process() if processes > 1 else None
    for step in progress:
        if parent and step % AVERAGE_EVERY == 0 and not parent.is_alive():
            raise SystemExit("the process that started this one was killed")
        if step // POOL != pool_index:
            pool_index = step // POOL
            pool = batch_pool(tokenizer, seed, pool_index, phase_at(pool_index * POOL, steps))
        ids, attention, labels = (tensor[rank::processes] for tensor in pool[step % POOL])
        targets = labels[:, 1:]
        counted = targets != -100  # only these positions meet the vocabulary
        hidden = model.model(input_ids=ids, attention_mask=attention, use_cache=False)[0]
        logits = model.lm_head(hidden[:, :-1][counted])
        loss = torch.nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
        (loss / (TOKENS * len(ids))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item() / int(counted.sum()))
        if processes > 1 and ((step + 1) % AVERAGE_EVERY == 0 or step + 1 == steps):
            average(model)
        if step % 20 == 0:
            recent = losses[-50:]
            progress.set_postfix(
                loss=f"{sum(recent) / len(recent):.3f}", phase=phase_at(step, steps)
            )
        if (step + 1) % STATE_EVERY == 0 and step + 1 < steps and rank == 0:
            state = recipe | {"step": step + 1, "losses": losses}
            state["seconds"] = spent + time.monotonic() - started
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            buffer = io.BytesIO()
            torch.save(state | {"schedule": schedule.state_dict()}, buffer)
            write_atomic(output_dir / STATE_FILE, buffer.getvalue())
    seconds = spent + time.monotonic() - started

    if rank == 0:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.to(torch.bfloat16).save_pretrained(output_dir)
        tokenizer.save_pretrained(output_dir)
        (output_dir / STATE_FILE).unlink(missing_ok=True)
    tail = losses[-max(1, steps // 10) :]
    return recipe | {
        "seconds": seconds,
        "loss": sum(tail) / len(tail),
        "parameters": model.num_parameters(),
    }


def warm_up_more(policy: "Policy", seed: int, steps: int = POOL) -> "Policy":
    """A frozen copy of a tiny policy after `steps` more batches of the mixture, drawn from `seed`.

    Another model of the same skills: where several evaluators or judges are wanted, one base and
    copies of it would all say the same.
    """
    from grpo_kit.models import Policy

    model = copy.deepcopy(policy.model).train().requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE / 2, betas=(0.9, 0.98))
    for i in range(steps):
        if i % POOL == 0:
            pool = batch_pool(policy.tokenizer, seed, i // POOL, "mixture")
        ids, attention, labels = pool[i % POOL]
        model(input_ids=ids, attention_mask=attention, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE / 2 * (1 - i / steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return Policy(model.eval().requires_grad_(False), policy.tokenizer)


def average(model) -> None:
    """Set the weights of every process to their mean over all processes."""
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.distributed.all_reduce(weights)
    torch.nn.utils.vector_to_parameters(
        weights / torch.distributed.get_world_size(), model.parameters()
    )
