"""The planner: counted sizes are those of real models, and what it says helps does help."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_kit.config import PROFILES
from grpo_kit.plan import GIB, GPUS, SHAPES, Shape, advice, check_room, plan, shape_of

SMALL = {
    "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = [
    (Qwen2Config, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3ForCausalLM),
    (LlamaConfig, LlamaForCausalLM),
]


def count(model, trained_only: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained_only)


@pytest.mark.parametrize(("config", "model"), FAMILIES)
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"head_dim": 20}])
def test_parameters_are_those_of_the_model(config, model, changes):
    if config is Qwen2Config and "head_dim" in changes:
        pytest.skip("Qwen2 has no head_dim of its own")
    made = config(**{**SMALL, **changes})
    with torch.device("meta"):
        assert Shape.of(made).parameters == count(model(made))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-1.5B", 1.54),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen3-32B", 32.8),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_profiles_models_are_known_without_the_hub():
    for profile in PROFILES.values():
        assert shape_of(profile).parameters > 0


@pytest.mark.parametrize("rank", [4, 32])
def test_lora_weights_are_those_that_peft_adds(rank):
    model = get_peft_model(
        Qwen2ForCausalLM(Qwen2Config(**SMALL)), LoraConfig(r=rank, target_modules="all-linear")
    )
    assert Shape.of(Qwen2Config(**SMALL)).lora_parameters(rank) == count(model, trained_only=True)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_size": 128, "intermediate_size": 512},
        {"num_hidden_layers": 6, "num_key_value_heads": 4},
    ],
)
def test_activations_are_what_autograd_keeps(width, changes):
    """Within a tenth: the last normalisation and the positions are not counted."""
    config = Qwen2Config(**{**SMALL, **changes}, attn_implementation="sdpa")
    model = Qwen2Model(config).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(tokens: int) -> int:
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=width == 2):
            output = model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            del output
        return sum(storages.values())

    a_token = (kept(256) - kept(128)) / 128
    assert Shape.of(config).activation_bytes(width) == pytest.approx(a_token, rel=0.11)


def test_parts_add_up_by_hand():
    """Full weights in float32: 4 bytes each for weights and gradients, 8 for Adam's two moments."""
    profile = PROFILES["paper"]
    memory = plan(profile, gpu="H200").memory
    n = SHAPES[profile.policy].parameters
    assert memory["weights"] == memory["gradients"] == pytest.approx(4 * n / GIB)
    assert memory["optimiser"] == pytest.approx(8 * n / GIB) and "reference" not in memory
    held = dataclasses.replace(profile, config=dataclasses.replace(profile.config, beta=0.1))
    assert plan(held, gpu="H200").memory["reference"] == pytest.approx(4 * n / GIB)
    spread = plan(profile, gpu="H200", gpus=8, engine="trl", sharded=True).memory
    assert spread["optimiser"] == pytest.approx(n / GIB)
    lora = plan(PROFILES["colab"], gpu="T4").memory
    assert lora["gradients"] < 0.1 * lora["weights"]


@given(
    gpus=st.sampled_from([1, 2, 4, 8]),
    gpu=st.sampled_from(sorted(GPUS)),
    engine=st.sampled_from(["trl", "trl+vllm"]),
    sharded=st.booleans(),
    name=st.sampled_from(sorted(PROFILES)),
)
def test_more_gpus_are_never_slower_and_never_need_more_each(gpus, gpu, engine, sharded, name):
    given_ = {"gpu": gpu, "engine": engine, "sharded": sharded}
    one, two = (plan(PROFILES[name], gpus=n, **given_) for n in (gpus, 2 * gpus))
    assert two.hours <= one.hours * (1 + 1e-9)
    assert two.total <= one.total + 1e-9
    assert two.tokens_per_second >= one.tokens_per_second
    assert all(value > 0 for value in (*one.memory.values(), *one.seconds.values(), one.hours))


def test_what_it_says_to_lower_makes_it_fit():
    profile = PROFILES["paper"]
    made = plan(profile, gpu="H100")
    told = advice(profile, made)
    assert made.room < 0 and told.startswith(f"It does not fit: {made.total:.1f} GiB are needed")
    assert "a H100 has 80" in told and "lower per_device_train_batch_size (16)" in told
    config = dataclasses.replace(
        profile.config, per_device_train_batch_size=8, gradient_accumulation_steps=96
    )
    lowered = dataclasses.replace(profile, config=config)
    made = plan(lowered, gpu="H100")
    assert made.room > 0 and advice(lowered, made).startswith("It fits")


def test_a_gpu_without_room_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.delenv("GRPO_KIT_SKIP_PLAN", raising=False)
    with pytest.raises(
        ValueError, match=r"It does not fit: 83\.\d GiB are needed .* GPU here has 8"
    ):
        check_room(PROFILES["paper"], 8)
    check_room(PROFILES["tiny"], 8)
    with pytest.raises(ValueError, match="lower vllm_gpu_memory_utilization|activations"):
        check_room(PROFILES["paper"], 40, engine="trl+vllm")
    monkeypatch.setenv("GRPO_KIT_SKIP_PLAN", "1")
    check_room(PROFILES["paper"], 8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpu": "Z80"}, "unknown GPU 'Z80': choose among T4"),
        ({"engine": "verl"}, "unknown engine 'verl': choose among kit, trl"),
        ({"gpus": 2}, "2 GPUs: the kit's own trainer runs on one, choose engine 'trl'"),
        ({"gpus": 0, "engine": "trl"}, "gpus is 0, it must be at least 1"),
        ({"mean_share": 0}, "more than 0, at most 1"),
    ],
)
def test_what_does_not_go_together_is_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(PROFILES["paper"], **options)
