"""The planner: counted sizes are those of real models, and what it says helps does help."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_kit.lab.planner import (
    GIB,
    GPU,
    GPUS,
    SAMPLING,
    SHAPES,
    UPDATING,
    Shape,
    advice,
    check_room,
    plan,
    shape_of,
)
from grpo_kit.profiles import PROFILES

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
@pytest.mark.parametrize("lora_rank", [0, 8])
def test_activations_are_what_autograd_keeps(width, changes, lora_rank):
    """Within a tenth: the last normalisation and the positions are not counted."""
    config = Qwen2Config(**{**SMALL, **changes}, attn_implementation="sdpa")
    model = Qwen2Model(config).train()
    if lora_rank:
        if width == 4:
            pytest.skip("LoRA is trained in 16 bits")
        adapter = LoraConfig(r=lora_rank, target_modules="all-linear")
        model = get_peft_model(model.to(torch.bfloat16), adapter)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(tokens: int) -> int:
        """Of two rows, one of them padded."""
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        mask = torch.ones(2, tokens, dtype=torch.long)
        mask[0, :5] = 0
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=width == 2):
            output = model(input_ids=torch.zeros_like(mask), attention_mask=mask, use_cache=False)
            del output
        return sum(storages.values())

    short, middle, long = kept(128), kept(256), kept(384)
    squared = (long - 2 * middle + short) / 2 / 128**2  # bytes of two rows a token squared
    a_token = ((middle - short) / 128 - squared * (256 + 128)) / 2
    shape = Shape.of(config)
    assert shape.activation_bytes(width) == pytest.approx(a_token, rel=0.13)
    assert 2 * shape.mask_bytes(1, width) == pytest.approx(squared)


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


def test_times_and_the_cache_by_hand():
    """One batch of 64 on a GPU of round numbers, half of what it could do reached."""
    config = dataclasses.replace(
        PROFILES["colab"].config, generation_batch_size=64, max_completion_length=400, max_steps=10,
        eval_prompts=64, num_generations_eval=7, eval_steps=4, eval_on_start=True,
    )  # fmt: skip
    profile = dataclasses.replace(PROFILES["colab"], config=config)
    machine = GPU("round", 100, 1000, 100)
    made = plan(profile, gpu=machine, prompt_length=100, mean_share=0.5, reached=0.5)
    shape = shape_of(profile)
    n, token = shape.parameters, shape.cache_bytes(2)
    assert token == 2 * 24 * 128 * 2, "keys and values, of 24 blocks with 2 heads of 64"
    assert made.memory["cache of sampling"] == pytest.approx(128 * 500 * token / GIB)

    def generation(rows):
        read = 400 * 2 * n + rows * 200 * (100 + 100) * token
        computed = 2 * n * (rows * 200 + rows / 8 * 100)
        return max(read / 1e12, computed / 1e14) / 0.5

    tokens = 64 * 200 + 8 * 100
    assert made.seconds["generation"] == pytest.approx(generation(64))
    assert made.tokens_per_second == pytest.approx(64 * 200 / generation(64))
    update = n * tokens * (4 + 2) / 1e14 / 0.5  # no gradient of frozen weights; scored anew
    assert made.seconds["update"] == pytest.approx(update)
    evaluations = 4 * 4 * generation(128)  # at 0, 4, 8 and 10; 64 x (7 + 1) answers, 128 at once
    hours = (10 * (generation(64) + update) + evaluations) / 3600
    assert made.hours == pytest.approx(hours)
    whole = dataclasses.replace(profile, lora_rank=0, dtype="float32")
    held = dataclasses.replace(whole, config=dataclasses.replace(config, beta=0.1))
    for one, a_token in ((whole, 6 + 2), (held, 6 + 2 + 2)):
        made = plan(one, gpu=machine, prompt_length=100, reached=0.5)
        assert made.seconds["update"] == pytest.approx(n * tokens * a_token / 1e14 / 0.5)


def test_sampling_and_updating_take_turns_in_memory():
    made = plan(PROFILES["paper"], gpu="H200")
    turns = [sum(made.memory.get(part, 0) for part in parts) for parts in (SAMPLING, UPDATING)]
    rest = {"weights", "optimiser", "reserve"}
    assert set(made.memory) == rest | {*SAMPLING[:1], *UPDATING}
    assert made.total == pytest.approx(sum(made.memory[part] for part in rest) + max(turns))


def test_every_profile_fits_on_the_machine_that_it_names():
    for name, gpu in (("colab", "T4"), ("paper", "H100"), ("paper", "A100-80")):
        made = plan(PROFILES[name], gpu=gpu)
        assert made.room > 0, advice(PROFILES[name], made)
        assert f"{GPUS[gpu].memory + (gpu == 'T4'):.0f} GB" in PROFILES[name].machine


def test_a_plan_has_the_rows_that_trls_trainer_has():
    one = plan(PROFILES["paper"], gpu="H200", engine="trl").memory["activations"]
    eight = plan(PROFILES["paper"], gpus=8, gpu="H200", engine="trl").memory["activations"]
    assert one == eight, "more processes make fewer passes, not smaller ones"


def test_vllms_share_is_of_the_gpu_and_can_be_lowered_until_it_fits():
    beside = {"gpu": "H100", "engine": "trl+vllm"}
    assert plan(PROFILES["paper"], **beside).room < 0
    lowered = plan(PROFILES["paper"], vllm_share=0.2, **beside)
    assert lowered.room > 0 and lowered.memory["vLLM"] == pytest.approx(16)


def test_what_it_says_to_lower_makes_it_fit():
    profile = PROFILES["paper"]
    made = plan(profile, gpu="A100-40")
    told = advice(profile, made)
    assert made.room < 0 and told.startswith(f"It does not fit: {made.total:.1f} GiB are needed")
    assert "A100-40 has 40" in told and "lower per_device_train_batch_size (8)" in told
    config = dataclasses.replace(
        profile.config, per_device_train_batch_size=2, gradient_accumulation_steps=384
    )
    lowered = dataclasses.replace(profile, config=config)
    made = plan(lowered, gpu="A100-40")
    assert made.room > 0 and advice(lowered, made).startswith("It fits")


def test_a_gpu_without_room_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.delenv("GRPO_KIT_SKIP_PLAN", raising=False)
    total = plan(PROFILES["paper"], gpu="H100").total
    with pytest.raises(
        ValueError,
        match=rf"It does not fit: {total:.1f} GiB are needed .* the GPU here, as it is now, has 8",
    ):
        check_room(PROFILES["paper"], 8)
    check_room(PROFILES["tiny"], 8)
    with pytest.raises(ValueError, match="lower vLLM's share .--vllm-share., or give"):
        colab = dataclasses.replace(PROFILES["colab"].config, per_device_train_batch_size=1)
        check_room(dataclasses.replace(PROFILES["paper"], config=colab), 40, engine="trl+vllm")
    monkeypatch.setenv("GRPO_KIT_SKIP_PLAN", "1")
    check_room(PROFILES["paper"], 8)


def test_a_model_of_another_kind_is_told(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    profile = dataclasses.replace(PROFILES["paper"], policy=str(tmp_path))
    with pytest.raises(ValueError, match="models of type 'gpt2' cannot be planned"):
        plan(profile)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gpu": "Z80"}, "unknown GPU 'Z80': choose among T4"),
        ({"engine": "verl"}, "unknown engine 'verl': choose among kit, trl"),
        ({"gpus": 2}, "2 GPUs: the kit's own trainer runs on one, choose engine 'trl'"),
        ({"gpus": 0, "engine": "trl"}, "gpus is 0, it must be at least 1"),
        ({"mean_share": 0}, "more than 0, at most 1"),
        ({"vllm_share": 30, "engine": "trl+vllm"}, "more than 0, at most 1"),
    ],
)
def test_what_does_not_go_together_is_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(PROFILES["paper"], **options)
