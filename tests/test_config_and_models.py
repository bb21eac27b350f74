"""Profiles and policies: what loads from a folder, and what is said where it cannot."""

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch

from grpo_kit.flow import GENERAL
from grpo_kit.models import frozen_copy, load_policy, reference_of
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import LocalJudge
from grpo_kit.rewards.judge import quality_prompt, tiny_prompt


@pytest.fixture
def folder(policy, tmp_path):
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_policy_loads_again_from_its_folder(policy, folder):
    again = load_policy(folder)
    prompt = [[{"role": "user", "content": "Mia has 3 coins."}]]
    assert again.encode(prompt) == policy.encode(prompt)
    ids = torch.tensor(policy.encode(prompt))
    torch.testing.assert_close(again.model(ids).logits, policy.model(ids).logits)
    assert again.eos_token_ids == [policy.tokenizer.eos_token_id]
    assert again.context_length == 512


def test_several_eos_ids_of_the_generation_config_are_all_used(policy):
    policy.model.generation_config.eos_token_id = [9, 7]
    assert policy.eos_token_ids == sorted({7, 9, policy.tokenizer.eos_token_id})


def test_lora_trains_its_own_weights_alone(folder):
    policy = load_policy(folder, lora_rank=2)
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_stays_what_the_policy_was(folder, lora_rank):
    policy = load_policy(folder, lora_rank=lora_rank)
    ids = torch.tensor(policy.encode([[{"role": "user", "content": "Mia has 12 coins."}]]))
    before = policy.model(ids).logits.detach()
    reference = reference_of(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    with reference() as model, torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before)
    assert not torch.allclose(policy.model(ids).logits, before)
    if lora_rank:  # no second copy of the weights
        with reference() as model:
            assert model is policy.model


def test_a_frozen_copy_is_independent(policy):
    copy = frozen_copy(policy)
    assert not any(p.requires_grad for p in copy.model.parameters())
    with torch.no_grad():
        next(policy.model.parameters()).add_(1.0)
    ours, theirs = next(policy.model.parameters()), next(copy.model.parameters())
    assert not torch.equal(ours, theirs)


def test_a_folder_without_safetensors_is_told_as_such(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(RuntimeError, match="taken as safetensors only"):
        load_policy(folder)


def test_an_interrupted_download_is_told(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(RuntimeError, match="the download was probably interrupted; delete that"):
        load_policy(folder)


def test_tokenizer_and_model_of_different_revisions_are_told(policy, folder):
    tokenizer = copy.deepcopy(policy.tokenizer)
    tokenizer.add_tokens([f"new {i}" for i in range(500)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ValueError, match=r"has \d+ tokens and the model \d+: they are of different"
    ):
        load_policy(folder)


def test_what_is_loaded_from_the_hub_names_its_commit_s_folder(policy, tmp_path, monkeypatch):
    """A cache as the Hub's library fills it, without the Hub: vLLM then takes the same commit."""
    commit = "c" * 40
    snapshot = tmp_path / "models--own--tiny" / "snapshots" / commit
    policy.model.save_pretrained(snapshot)
    policy.tokenizer.save_pretrained(snapshot)
    code = (
        "from grpo_kit.models import load_policy;"
        f"print(load_policy('own/tiny', revision='{commit}').model.config._name_or_path)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.stdout.split()[-1:] == [str(snapshot)], done.stderr


QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('no system role') }}", "refuses these messages .no system role."),
        ("{{ messages[-1].content }}{% if add_generation_prompt %}A:{% endif %}",
         "leaves out the system message, which the task needs"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not open an answer"),
    ],
)  # fmt: skip
def test_a_template_without_what_the_task_says_is_refused(policy, template, sentence):
    policy.check_template(QUESTION)
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.chat_template = template
    with pytest.raises(ValueError, match=sentence):
        policy.check_template(QUESTION)
    if "refuses" in sentence:
        with pytest.raises(ValueError, match=sentence):
            policy.encode([QUESTION])


def test_the_token_that_ends_a_turn_ends_a_completion_whatever_the_eos_is(policy):
    """Qwen2.5's base models name another token as EOS."""
    end = policy.tokenizer.eos_token_id
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    other = policy.tokenizer.pad_token
    policy.tokenizer.eos_token = other
    policy.model.generation_config.eos_token_id = policy.tokenizer.pad_token_id
    assert policy.eos_token_ids == sorted({end, policy.tokenizer.pad_token_id})


def test_a_model_that_can_be_had_nowhere_is_told_in_a_sentence():
    with pytest.raises(RuntimeError, match="no local folder and the Hub cannot be reached"):
        load_policy("nobody/no-such-model")


def test_a_tokenizer_without_chat_template_is_refused(policy, tmp_path):
    policy.model.save_pretrained(tmp_path)
    tokenizer = policy.tokenizer
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        tokenizer.save_pretrained(tmp_path)
    finally:
        tokenizer.chat_template = template
    with pytest.raises(ValueError, match="has no chat template"):
        load_policy(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("name", ["colab", "paper"])
def test_a_profile_for_a_gpu_says_so_where_there_is_none(name):
    with pytest.raises(RuntimeError, match="torch sees no CUDA GPU here"):
        PROFILES[name].load_policy()


def test_a_profile_whose_base_is_missing_says_how_to_build_it():
    profile = dataclasses.replace(PROFILES["tiny"], policy="no-such-base")
    with pytest.raises(RuntimeError, match="grpo-kit pretrain"):
        profile.load_policy()


def test_profiles_are_told_without_loading_anything_heavy():
    code = (
        "import grpo_kit.config, sys; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_adapter_begins_the_same_each_time_and_leaves_the_random_numbers_alone(folder):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first = load_policy(folder, lora_rank=2).model.state_dict()
    assert torch.equal(torch.rand(3), expected)
    second = load_policy(folder, lora_rank=2).model.state_dict()
    adapters = [name for name in first if "lora_A" in name]
    assert adapters and all(torch.equal(first[name], second[name]) for name in adapters)


def test_each_profile_has_a_judge(new_policy, monkeypatch):
    policy = new_policy()
    frozen = PROFILES["tiny"].load_judge(policy)
    assert isinstance(frozen, LocalJudge) and frozen.prompt is tiny_prompt
    assert frozen.policy.model is not policy.model
    assert PROFILES["colab"].load_judge(policy).prompt is quality_prompt

    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="JUDGE_KEY .* is not set"):
        PROFILES["paper"].load_judge(policy)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert PROFILES["paper"].load_judge(policy).base_url == "http://127.0.0.1:8000/v1"
    monkeypatch.setenv("GRPO_KIT_JUDGE_URL", "http://10.0.0.1:9000/v1")
    judge = PROFILES["paper"].load_judge(policy)
    assert (judge.model, judge.base_url) == ("Qwen/Qwen3-32B", "http://10.0.0.1:9000/v1")


def test_each_profile_has_agents_around_its_planner(new_policy, monkeypatch):
    policy = new_policy()
    tiny = PROFILES["tiny"].load_agents(policy, max_turns=3)
    assert tiny.planner.policy is policy and tiny.max_turns == 3
    assert tiny.executor.model.model is not policy.model
    assert tiny.toolkit.names == ["lookup", "calculator"]
    assert PROFILES["colab"].load_agents(policy).planner.prompts is GENERAL

    monkeypatch.delenv("ROLES_KEY", raising=False)
    with pytest.raises(ValueError, match="ROLES_KEY .* is not set"):
        PROFILES["paper"].load_agents(policy)
    monkeypatch.setenv("ROLES_KEY", "secret")
    role = PROFILES["paper"].load_agents(policy).verifier.model
    assert (role.model, role.base_url) == ("Qwen/Qwen2.5-7B-Instruct", "http://127.0.0.1:8000/v1")
