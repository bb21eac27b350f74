"""Train the shipped tiny base from a seed: `grpo-kit pretrain --output base --seed 0`.

Supervised warm-up on generated conversations, the loss on the assistant's tokens only. Three phases
in one run: equations alone, then every skill in its reliable styles, then the full mixture of
`skills`, whose shares the model takes on. (Without the first, 1,300 steps taught the styles and no
sums.) Progress and the time left are shown.

Under `torchrun --nproc-per-node 2 -m grpo_kit.cli pretrain` each process takes half the rows of
every batch and the gradients are added up: the same run, up to rounding.
"""

import io
import os
import random
import time
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_kit.paths import make_output_dir, write_atomic

from .skills import sample_conversation

STEPS = 3600
BATCH = 32
POOL = 32  # batches cut from one sorted pool of conversations
STATE_EVERY = 100  # steps between two saved states
LEARNING_RATE = 2e-3
PHASE_SHARES = {"drill": 0.3, "reliable": 0.4, "mixture": 0.3}  # of the steps, in this order
VOCABULARY = 512
PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<response>", "</response>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(seed: int = 0, n_conversations: int = 8000) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens, digits single, trained on the mixture.

    The answer tags are ordinary tokens: as special tokens they would vanish from decoded
    completions and every reward with them.
    """
    rng = random.Random(f"tokenizer-{seed}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, *ROLES]
    corpus = (
        message["content"] for _ in range(n_conversations) for message in sample_conversation(rng)
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    for tag in TAGS:  # cut out of the corpus, so that no merge is spent on their letters
        corpus = _without(corpus, tag)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _without(texts, tag):
    return (text.replace(tag, " ") for text in texts)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    """The untrained base: Qwen2's architecture, under a million parameters, fp32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


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


def batch_pool(tokenizer, seed: int, index: int, phase: str) -> list[tuple]:
    """`POOL` batches of (ids, attention mask, labels), each (BATCH, L), rows of similar length.

    Which conversations they hold depends on the arguments alone, so that a warm-up that was killed
    goes on with the texts that it would have seen.
    """
    rng = random.Random(f"warm-up-{seed}-{index}")
    rows = encode(tokenizer, [sample_conversation(rng, phase) for _ in range(BATCH * POOL)])
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


def phase_at(done: float) -> str:
    """The phase of the warm-up when the share `done` of its steps has been made."""
    for phase, share in PHASE_SHARES.items():
        done -= share
        if done < 0:
            return phase
    return phase


def pretrain(
    output_dir: str | Path, *, seed: int = 0, steps: int | None = None, threads: int | None = None
) -> dict:
    """Train the tiny base and save it (bf16 safetensors, tokenizer) to `output_dir`.

    The state is kept in `output_dir/warm-up.pt` while it runs; called again after a kill with the
    same seed and steps, it goes on from there.

    Returns a dict: `seed`, `steps`, `seconds` (with those before a kill), `loss` (mean of the last
    tenth of the steps, nats a token), `parameters`. Raises RuntimeError when `output_dir` cannot be
    written and ValueError for fewer than one step or a state of another warm-up.
    """
    steps = STEPS if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps is {steps}; the warm-up needs at least 1 step.")
    output_dir = make_output_dir(output_dir)
    if threads:
        torch.set_num_threads(threads)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")

    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    # biases and norm weights are not decayed
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=min(0.05, 200 / steps)
    )
    state_file, first, spent, losses = output_dir / "warm-up.pt", 0, 0.0, []
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if (state["seed"], state["steps"]) != (seed, steps):
            raise ValueError(
                f"{state_file} belongs to a warm-up of seed {state['seed']} and {state['steps']} "
                f"steps, not of seed {seed} and {steps}: delete it or choose another folder."
            )
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
    for step in progress:
        if step // POOL != pool_index:
            pool_index = step // POOL
            pool = batch_pool(tokenizer, seed, pool_index, phase_at(pool_index * POOL / steps))
        ids, attention, labels = (tensor[rank::world] for tensor in pool[step % POOL])
        hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state
        targets = labels[:, 1:]
        counted = targets != -100  # only these positions meet the vocabulary
        logits = model.lm_head(hidden[:, :-1][counted])
        loss = torch.nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        loss = _add_up(model, loss.detach(), counted.sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0:
            recent = losses[-50:]
            progress.set_postfix(
                loss=f"{sum(recent) / len(recent):.3f}", phase=phase_at(step / steps)
            )
        if (step + 1) % STATE_EVERY == 0 and step + 1 < steps and rank == 0:
            state = {"seed": seed, "steps": steps, "step": step + 1, "losses": losses}
            state["seconds"] = spent + time.monotonic() - started
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            buffer = io.BytesIO()
            torch.save(state | {"schedule": schedule.state_dict()}, buffer)
            write_atomic(state_file, buffer.getvalue())
    seconds = spent + time.monotonic() - started

    if rank == 0:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.to(torch.bfloat16).save_pretrained(output_dir)
        tokenizer.save_pretrained(output_dir)
        state_file.unlink(missing_ok=True)
    tail = losses[-max(1, steps // 10) :]
    return {
        "seed": seed,
        "steps": steps,
        "seconds": seconds,
        "loss": sum(tail) / len(tail),
        "parameters": model.num_parameters(),
    }


def _add_up(model, loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Sums of all processes to means: sets the gradients, returns the loss a token."""
    gradients = [p.grad for p in model.parameters()]
    flat = torch.cat([*(g.flatten() for g in gradients), loss[None], count[None].float()])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(flat)
    flat /= flat[-1].clone()
    parts = flat[:-2].split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return flat[-2]
