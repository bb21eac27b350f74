"""The supervised warm-up of a real model, on LoRA weights.

`grpo-kit pretrain --base smollm2 --task svamp` and `--task skills` rebuild the shipped adapters.
Without a warm-up, sampled answers of SmolLM2 are hardly ever right, and GRPO has nothing to raise.
Supervised learning is GRPO's update with every advantage at 1: the gradient is that of the mean
log-probability of the texts' tokens. So the loop is `train`, with a batch source of texts.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from grpo_kit import smollm2, tasks
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import Rollouts
from grpo_kit.models import Policy, load_policy
from grpo_kit.paths import data_dir, make_output_dir, write_atomic
from grpo_kit.rewards import accuracy_reward
from grpo_kit.tiny.skills import SHIPPED, Shares, sample_conversation
from grpo_kit.training import Batch, PromptBatches, train

Conversation = list[dict[str, str]]  # messages; the assistant's are learnt


@dataclass(frozen=True)
class Recipe:
    """The texts of a warm-up and its settings; `task` has the problems it is evaluated on."""

    task: str
    texts: Callable[[random.Random], Iterator[Conversation]]  # endless, of training problems
    steps: int
    batch: int = 16
    learning_rate: float = 1e-3
    lora_rank: int = 16
    max_completion_length: int = 64


def svamp_texts(rng: random.Random) -> Iterator[Conversation]:
    """Epochs of worked equations; an equation that misses the published answer is left out."""
    rows = [row for row in tasks.load("svamp").train if row["solution"].endswith(row["answer"])]
    while True:
        for row in rng.sample(rows, len(rows)):
            solved = f"<think>{row['solution']}</think><answer>{row['answer']}</answer>"
            yield [*row["prompt"], {"role": "assistant", "content": solved}]


def gsm8k_texts(rng: random.Random) -> Iterator[Conversation]:
    """Epochs of the published solutions, without their calculator's marks `<<3*4=12>>`."""
    rows = list(tasks.load("gsm8k").train)
    while True:
        for row in rng.sample(rows, len(rows)):
            steps = re.sub("<<.*?>>", "", row["solution"])
            solved = f"<think>{steps}</think><answer>{row['answer']}</answer>"
            yield [*row["prompt"], {"role": "assistant", "content": solved}]


def skills_texts(rng: random.Random, shares: Shares = SHIPPED) -> Iterator[Conversation]:
    """The tiny world's mixture: solve in several styles, verify, Yes or No, judge, plan."""
    while True:
        yield sample_conversation(rng, shares=shares)


RECIPES = {
    "svamp": Recipe("svamp", svamp_texts, steps=130),
    "skills": Recipe("word_problems", skills_texts, steps=400),
    # two epochs of 7,473 solutions; for a GPU, not shipped
    "gsm8k": Recipe("gsm8k", gsm8k_texts, 234, batch=64, lora_rank=64, max_completion_length=200),
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
    """The token ids of each reply, with its end of turn, after those of the messages before it."""
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


def warm_up(name: str, output_dir: str | Path, seed: int = 0, **changes: Any) -> dict:
    """Train SmolLM2's LoRA weights by the recipe `name`; save them (bfloat16) with `card.json`.

    `changes` are fields of `Recipe`. After a kill, the same call continues from the last checkpoint
    in `output_dir/run`. Returns the card: the recipe, the seconds of its steps, the measurements.
    """
    recipe = replace(RECIPES[name], **changes)
    folder = make_output_dir(output_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(smollm2.NAME, device=device, lora_rank=recipe.lora_rank)
    texts = recipe.texts(random.Random(f"{name}-{seed}"))
    replies = take_replies(policy, texts, recipe.steps * recipe.batch)
    config = GRPOConfig(
        max_steps=recipe.steps, generation_batch_size=recipe.batch, num_generations=recipe.batch,
        learning_rate=recipe.learning_rate, lr_scheduler_type="cosine",
        warmup_steps=recipe.steps // 10, bf16="auto", save_steps=10,
        max_completion_length=recipe.max_completion_length,
        eval_prompts=min(100, 4 * recipe.steps), eval_steps=math.ceil(recipe.steps / 4),
    )  # fmt: skip
    run = train(
        policy, tasks.load(recipe.task), [accuracy_reward], config,
        output_dir=folder / "run", seed=seed, resume=True,
        batch_source=partial(GivenTexts, replies=replies),
    )  # fmt: skip
    about = {"name": name, **asdict(recipe), "texts": recipe.texts.__name__, "seed": seed}
    about["base"] = smollm2.ON_HUB
    about["learnt_tokens"] = sum(row.get("learnt_tokens", 0) for row in run.history)
    about["seconds"] = round(sum(row.get("step_time", 0.0) for row in run.history), 1)
    measured = [row for row in run.history if "eval/greedy" in row]
    about["evaluations"] = [
        {k: v for k, v in row.items() if k == "step" or k.startswith("eval/")} for row in measured
    ]
    model = policy.model.to(torch.bfloat16)
    model.peft_config["default"].base_model_name_or_path = smollm2.ON_HUB
    model.save_pretrained(folder, save_embedding_layers=False)  # else peft asks the Hub
    write_atomic(folder / "card.json", json.dumps(about, indent=1) + "\n")
    return about


def more_skills(shares: Shares, steps: int, seed: int) -> Policy:
    """SmolLM2, warmed up for the skills, after `steps` more batches of 16 replies, shares changed.

    A dial turns them so on a real model, see `tiny.world.make_world`: all weights are trained.
    """
    policy = load_policy(smollm2.NAME, adapter=data_dir() / "smol-skills")
    texts = skills_texts(random.Random(f"skills-{seed}"), shares)
    config = GRPOConfig(
        max_steps=steps, generation_batch_size=16, num_generations=16, learning_rate=5e-5,
        lr_scheduler_type="cosine", bf16="auto", eval_prompts=0, eval_on_start=False, save_steps=0,
    )  # fmt: skip
    source = partial(GivenTexts, replies=take_replies(policy, texts, steps * 16))
    with TemporaryDirectory() as folder:
        options = {"output_dir": folder, "seed": seed, "batch_source": source}
        train(policy, tasks.load("word_problems"), [accuracy_reward], config, **options)
    return policy
