"""A warm-up learns given replies by `train`: the supervised gradient, files, a card."""

import itertools
import json
import random
from functools import partial

import pytest
import torch
from toy import TASK, configure, even_ids, weights_of

from grpo_kit import smollm2, tasks, warm_up
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import Rollouts, completion_logps
from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir
from grpo_kit.tiny.skills import Shares
from grpo_kit.training import train
from grpo_kit.warm_up import RECIPES, GivenTexts, replies_of


def texts(rng):
    while True:
        number = rng.randrange(100)
        yield [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def replies(policy):
    given = itertools.islice(texts(random.Random(0)), 24)
    return [pair for messages in given for pair in replies_of(policy, messages)]


def test_the_update_is_that_of_supervised_learning(policy, replies, tmp_path):
    prompts, completions = zip(*replies[:8], strict=True)
    rollouts = Rollouts.given(prompts, completions, policy)
    logps, _ = completion_logps(policy.model, rollouts, pad_token_id=policy.pad_token_id)
    (-logps[rollouts.mask].mean()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    policy.model.zero_grad()
    config = configure(eval_prompts=0, max_steps=1, max_grad_norm=0.0)
    options = {"output_dir": tmp_path, "seed": 0}
    options["batch_source"] = partial(GivenTexts, replies=replies)
    run = train(policy, TASK, [even_ids], config, **options)
    assert run.history[-1]["grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
    assert run.history[-1]["learnt_tokens"] == rollouts.mask.sum()


def test_a_warm_up_saves_weights_that_load_and_a_card(monkeypatch, tmp_path):
    """The tiny base stands in for SmolLM2; called again it trains nothing anew."""
    base = partial(load_policy, data_dir() / "tiny-base")
    monkeypatch.setattr(warm_up, "load_policy", lambda name, **options: base(**options))
    few = {"eval_prompts": 4, "num_generations_eval": 2}
    monkeypatch.setattr(warm_up, "GRPOConfig", lambda **fields: GRPOConfig(**fields | few))
    made = [warm_up.warm_up("skills", tmp_path, steps=1, batch=4) for _ in range(2)]
    assert made[0] == made[1] == json.loads((tmp_path / "card.json").read_text())
    assert [row["step"] for row in made[0]["evaluations"]] == [0, 1]
    warm = base(adapter=tmp_path)
    assert not torch.equal(weights_of(warm), weights_of(base()))


def test_every_reply_of_a_conversation_is_learnt_after_what_stands_before_it(policy):
    messages = [
        {"role": "user", "content": "1?"}, {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "no"},
    ]  # fmt: skip
    (one, first), (both, second) = replies_of(policy, messages)
    assert policy.decode([first, second]) == ["yes", "no"]
    assert first[-1] == second[-1] == policy.end_of_turn
    assert both[: len(one) + len(first)] == one + first


@pytest.mark.parametrize("name", RECIPES)
def test_texts_are_of_train_problems(name):
    rng, recipe = random.Random(1), RECIPES[name]
    given = [*itertools.islice(recipe.texts(rng), 300)]
    assert all(messages[-1]["role"] == "assistant" for messages in given)
    test = {prompt[-1]["content"] for prompt in tasks.load(recipe.task).test["prompt"]}
    assert not test & {message["content"] for messages in given for message in messages}


@pytest.mark.parametrize("name", ["svamp", "skills"])
def test_the_shipped_warm_ups_are_of_todays_recipes(name):
    folder = data_dir() / f"smol-{name}"
    card, recipe = json.loads((folder / "card.json").read_text()), RECIPES[name]
    for field in ("task", "steps", "batch", "learning_rate", "lora_rank"):
        assert card[field] == getattr(recipe, field)
    assert (folder / "adapter_model.safetensors").stat().st_size < 10e6
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == smollm2.ON_HUB and config["r"] == recipe.lora_rank


def test_a_real_model_goes_on_with_other_shares(monkeypatch):
    """The tiny base stands in for SmolLM2."""
    base = partial(load_policy, data_dir() / "tiny-base")
    monkeypatch.setattr(warm_up, "load_policy", lambda name, adapter: base())
    shares = Shares(checks={"recompute": 0.0, "rash": 1.0, "sloppy": 0.0})
    policy = warm_up.more_skills(shares, 1, 0)
    assert not torch.equal(weights_of(policy), weights_of(base()))
    given = itertools.islice(warm_up.skills_texts(random.Random(0), shares), 300)
    checks = [one[-1]["content"] for one in given if "Is it correct? Check" in one[-2]["content"]]
    assert checks and all("Looks" in said for said in checks)
