"""Behaviour that only a GPU can show; each test skips where there is none."""

import copy
import dataclasses
import math
import warnings

import pytest
import torch

from grpo_kit import backends, training, trl_bridge
from grpo_kit.lab import scaling
from grpo_kit.models import Policy, load_policy
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


@pytest.mark.parametrize("backend", ["static", "continuous", "vllm"])
def test_greedy_answers_are_those_of_the_plain_path(backend):
    """In 16 bits a near-tie may fall otherwise: nine answers of ten have to be the same."""
    if backend == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: pip install vllm")
    policy = base()
    policy = Policy(copy.deepcopy(policy.model).to(torch.bfloat16), policy.tokenizer)
    rows = policy.encode(PROFILES["tiny"].load_task().test["prompt"][:64])
    plain, other = (
        backends.greedy(policy, name, max_new_tokens=48, context=256)(rows)
        for name in ("plain", backend)
    )
    same = sum(a == b for a, b in zip(plain, other, strict=True))
    assert same >= 0.9 * len(rows)


def test_auto_backends_are_made_for_a_gpu_and_none_falls_back():
    policy = base(dtype="half", lora_rank=4)
    assert backends.choose(policy) == "continuous" and backends.choose(base()) == "plain"
    rows = policy.encode(PROFILES["tiny"].load_task().test["prompt"][:8])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for backend in ("continuous", "static"):
            rollouts = backends.sample(policy, rows, 4, backend=backend, max_new_tokens=24)
            assert len(rollouts.completion_lists()) == 32


def test_the_limits_of_a_gpu_are_measured_in_the_type_that_it_trains_in():
    limits = scaling.measure_limits()
    assert limits["bytes_per_second"] > 1e11 and limits["flops_per_second"] > 1e12
