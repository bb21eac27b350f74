"""The supervised warm-up of a real model, on LoRA weights.

`grpo-kit pretrain --base smollm2 --task svamp` and `--task skills` rebuild the shipped adapters.
Without one, SmolLM2 hardly ever solves a problem when it is sampled, and GRPO has nothing to raise.
Learning from given texts is GRPO's update where every advantage is 1: then its gradient is that of
the mean log-probability of their tokens. So the loop is `train`, with texts for a batch source.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_kit import smollm2, tasks
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import Rollouts, completion_logps
from grpo_kit.models import Policy, load_policy
from grpo_kit.paths import make_output_dir, write_atomic
from grpo_kit.rewards import accuracy_reward
from grpo_kit.tiny import card as skills_card
from grpo_kit.tiny.skills import sample_conversation
from grpo_kit.training import Batch, PromptBatches, train

Conversation = list[dict[str, str]]  # messages; the assistant's are learnt
HELD_OUT = 64  # conversations that the loss is measured on


@dataclass(frozen=True)
class Recipe:
    """What a warm-up learns and how; `task` has the problems that it is evaluated on."""

    task: str
    texts: Callable[[random.Random, str], Iterator[Conversation]]  # endless, of a split
    steps: int
    batch: int = 16
    learning_rate: float = 1e-3
    lora_rank: int = 16


def svamp_texts(rng: random.Random, split: str) -> Iterator[Conversation]:
    """Epochs of worked equations; an equation that misses the published answer is left out."""
    rows = [r for r in getattr(tasks.load("svamp"), split) if r["solution"].endswith(r["answer"])]
    while True:
        for row in rng.sample(rows, len(rows)):
            solved = f"<think>{row['solution']}</think><answer>{row['answer']}</answer>"
            yield [*row["prompt"], {"role": "assistant", "content": solved}]


def skills_texts(rng: random.Random, split: str) -> Iterator[Conversation]:
    """The tiny world's mixture: solve in several styles, verify, Yes or No, judge, plan."""
    while True:  # always of train problems; others than the warm-up's, by another generator
        yield sample_conversation(rng)


RECIPES = {
    "svamp": Recipe("svamp", svamp_texts, steps=130),
    "skills": Recipe("word_problems", skills_texts, steps=400),
}


class GivenTexts:
    """A batch source (see `PromptBatches`): replies to imitate, each with an advantage of 1."""

    name = "texts"

    def __init__(self, prompts: PromptBatches, replies: Sequence[tuple[list[int], list[int]]]):
        self.prompts, self.replies = prompts, replies
        # `prompts.taken` counts the replies here
        self.state_dict, self.load_state_dict = prompts.state_dict, prompts.load_state_dict

    def __call__(self, generator: Any, state: Any, metrics: dict) -> Iterator[Batch]:
        first, size = self.prompts.taken, self.prompts.config.generation_batch_size
        self.prompts.taken += size
        prompts, replies = zip(*self.replies[first : first + size], strict=True)
        rollouts, ones = Rollouts.given(prompts, replies, self.prompts.policy), torch.ones(size)
        metrics |= {"generated_tokens": 0, "learnt_tokens": int(rollouts.mask.sum())}
        yield Batch(rollouts, [], ones[:, None][:, :0], ones, ones, 1, [{}] * size)


def replies_of(policy: Policy, messages: Conversation) -> Iterator[tuple[list[int], list[int]]]:
    """Of each reply in a conversation: token ids of what is before, and its own with its end."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            ids = policy.tokenizer(message["content"], add_special_tokens=False)["input_ids"]
            yield policy.encode([messages[:i]])[0], [*ids, policy.end_of_turn]


def take_replies(policy: Policy, texts: Iterator[Conversation], count: int) -> list:
    """At least `count` replies as `GivenTexts` takes them, of the next conversations."""
    replies: list = []
    while len(replies) < count:
        replies += replies_of(policy, next(texts))
    return replies


@torch.no_grad()
def loss_on(replies: Sequence[tuple[list[int], list[int]]], policy: Policy) -> dict[str, float]:
    """`eval/loss`: nats a token of given replies."""
    total = tokens = 0.0
    for start in range(0, len(replies), 16):
        rollouts = Rollouts.given(*zip(*replies[start : start + 16], strict=True), policy)
        with policy.autocast():
            pad = policy.pad_token_id
            total -= completion_logps(policy.model, rollouts, pad_token_id=pad)[0].sum().item()
        tokens += rollouts.mask.sum().item()
    return {"eval/loss": total / tokens}


def warm_up(
    name: str, output_dir: str | Path, seed: int = 0, problems: int = 100, **changes: Any
) -> dict:
    """Train SmolLM2's LoRA weights by the recipe `name`; save them (bfloat16) with `card.json`.

    `problems`: how many test problems a skill is measured on; `changes` are the recipe's. Called
    again after a kill, it goes on from its last checkpoint, in `output_dir/run`. Returns the card:
    the recipe, the seconds of its steps, and what was measured.
    """
    recipe = replace(RECIPES[name], **changes)
    folder = make_output_dir(output_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(smollm2.NAME, device=device, lora_rank=recipe.lora_rank)
    texts = recipe.texts(random.Random(f"{name}-{seed}"), "train")
    replies = take_replies(policy, texts, recipe.steps * recipe.batch)
    held = recipe.texts(random.Random(f"{name}-{seed}-held-out"), "test")
    held_out = [pair for _ in range(HELD_OUT) for pair in replies_of(policy, next(held))]
    config = GRPOConfig(
        max_steps=recipe.steps, generation_batch_size=recipe.batch, num_generations=recipe.batch,
        learning_rate=recipe.learning_rate, lr_scheduler_type="cosine",
        warmup_steps=recipe.steps // 10, bf16="auto", max_completion_length=64,
        eval_prompts=100, eval_steps=math.ceil(recipe.steps / 4), save_steps=10,
    )  # fmt: skip
    run = train(
        policy, tasks.load(recipe.task), [accuracy_reward], config,
        output_dir=folder / "run", seed=seed, resume=True, measure=partial(loss_on, held_out),
        batch_source=partial(GivenTexts, replies=replies),
    )  # fmt: skip
    about = {"name": name, **asdict(recipe), "texts": recipe.texts.__name__, "seed": seed}
    about |= {"base": smollm2.ON_HUB, "held_out": HELD_OUT}
    about["learnt_tokens"] = sum(row.get("learnt_tokens", 0) for row in run.history)
    about["seconds"] = round(sum(row.get("step_time", 0.0) for row in run.history), 1)
    measured = [row for row in run.history if "eval/loss" in row]
    about["evaluations"] = [
        {k: v for k, v in row.items() if k == "step" or k.startswith("eval/")} for row in measured
    ]
    if name == "skills":
        about["skills"] = skills_card.measure(policy, n=problems)
    model = policy.model.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = smollm2.ON_HUB
    model.save_pretrained(folder, save_embedding_layers=False)  # else peft asks the Hub
    write_atomic(folder / "card.json", json.dumps(about, indent=1) + "\n")
    write_atomic(folder / "README.md", card_text(about))  # in place of peft's
    return about


def card_text(card: dict) -> str:
    """The model card, Markdown, of a warm-up's `card.json`."""
    about = {"version": smollm2.VERSION, "sha256": smollm2.SHA256, "limits": skills_card.LIMITS}
    return skills_card.TEMPLATES.get_template("smollm2.md.j2").render(card, **about)
