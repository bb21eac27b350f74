"""Machines by name: each profile has its policy, judge and agents, or says what is missing."""

import dataclasses

import pytest

from grpo_kit.flow import GENERAL
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import LocalJudge
from grpo_kit.rewards.judge import quality_prompt, tiny_prompt
from grpo_kit.tiny import world
from grpo_kit.warm_up import more_skills


@pytest.mark.parametrize("device", ["cuda:99", "tpu"])
def test_a_device_that_is_not_here_is_named(device):
    smol = dataclasses.replace(PROFILES["smol"], device=device)
    with pytest.raises(RuntimeError, match=f"no device '{device}' here.*GRPO_KIT_DEVICE=cpu"):
        smol.load_policy()
    on_cpu, there = (EXPERIMENTS["basic"].identity(p, "plain") for p in (PROFILES["smol"], smol))
    assert on_cpu == there, "a record says where it ran, and is of the same run"


def test_the_environment_names_the_device_of_the_real_model(run_python):
    code = "from grpo_kit.profiles import PROFILES as p; print(p['smol'].device, p['tiny'].device)"
    assert run_python(code, GRPO_KIT_DEVICE="mps").strip() == "mps cpu"


def test_each_profile_has_a_judge(policy, monkeypatch):
    frozen = PROFILES["tiny"].load_judge(policy)
    assert isinstance(frozen, LocalJudge) and frozen.prompt is tiny_prompt
    assert frozen.policy.model is not policy.model
    assert PROFILES["colab"].load_judge(policy).prompt is quality_prompt

    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert PROFILES["paper"].load_judge(policy).base_url == "http://127.0.0.1:8000/v1"
    monkeypatch.setenv("GRPO_KIT_JUDGE_URL", "http://10.0.0.1:9000/v1")
    judge = PROFILES["paper"].load_judge(policy)
    assert (judge.model, judge.base_url) == ("Qwen/Qwen3-32B", "http://10.0.0.1:9000/v1")


def test_each_profile_has_agents_around_its_planner(policy):
    tiny = PROFILES["tiny"].load_agents(policy, max_turns=3)
    assert tiny.planner.policy is policy and tiny.max_turns == 3
    assert tiny.executor.policy.model is not policy.model
    assert tiny.toolkit.names == ["lookup", "calculator"]
    assert PROFILES["colab"].load_agents(policy).planner.prompts is GENERAL


def test_smollm2_alone_is_warmed_up_and_for_the_task_at_hand(tmp_path):
    smol = PROFILES["smol"]
    assert smol.adapter == "smol-svamp" and smol.with_skills().adapter == "smol-skills"
    assert smol.with_skills().config.max_steps < smol.config.max_steps
    assert PROFILES["tiny"].with_skills() is PROFILES["tiny"] and PROFILES["tiny"].adapter is None
    assert smol.with_policy(str(tmp_path)).adapter is None
    assert smol.with_policy("HuggingFaceTB/SmolLM2-135M-Instruct").adapter == "smol-svamp"
    with pytest.raises(ValueError, match="warmed up for svamp, word_problems, not for gsm8k"):
        dataclasses.replace(smol, task="gsm8k").load_policy()


def test_an_adapter_that_does_not_fit_is_named(saved_policy):
    wrong = {"word_problems": "smol-skills"}
    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy), adapters=wrong)
    with pytest.raises(ValueError, match="smol-skills cannot be added to this model"):
        profile.load_policy()


def test_a_dial_of_the_world_turns_a_real_model_too_and_a_lesson_leaves_it(monkeypatch):
    smol, checks, made = PROFILES["smol"].with_skills(), {"recompute": 1.0, "rash": 0.0}, []
    assert smol.with_shares(checks=checks) == smol
    turned, tiny = smol.with_shares(real=True, checks=checks), data_dir() / "tiny-base"
    monkeypatch.setattr(world, "make_world", lambda **given: made.append(given) or tiny)
    turned.load_policy()
    assert made[0].pop("make") is more_skills and world.recipe(**made[0])["checks"] == checks
    assert world.recipe(**made[0])["base"] != world.recipe(checks=checks)["base"]
