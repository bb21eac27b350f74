"""The planner: counted sizes are those of real models."""

import dataclasses
import json

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from grpo_kit.lab import bench, planner
from grpo_kit.lab.planner import GIB, activation_bytes, cache_bytes, memory_of, plan
from grpo_kit.paths import results_dir
from grpo_kit.profiles import PROFILES, Profile

PAPER = PROFILES["paper"]
SMALL = {
    "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "tie_word_embeddings": False,
}  # fmt: skip


def changed(profile, **config):
    return dataclasses.replace(profile, config=dataclasses.replace(profile.config, **config))


def test_known_models_have_the_published_number_of_parameters():
    billions = [planner.model_of(name).num_parameters() / 1e9 for name in planner.MODELS]
    assert billions == pytest.approx([0.1345, 0.494, 1.54], rel=0.005)
    assert {p.policy for p in PROFILES.values()} <= {*planner.MODELS, "tiny-base"}


@pytest.mark.parametrize(
    ("config", "key_value_size"),
    [
        (hf.Qwen2Config(**SMALL), 24),
        (hf.Qwen3Config(**{**SMALL, "head_dim": 20, "tie_word_embeddings": True}), 40),
        (hf.LlamaConfig(**SMALL), 24),
    ],
)
def test_weights_cache_and_lora_weights_are_those_of_the_model(config, key_value_size, tmp_path):
    model = hf.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    assert cache_bytes(model, 2) == 2 * 3 * key_value_size * 2, "keys and values of three blocks"
    profile = dataclasses.replace(PROFILES["colab"], policy=str(tmp_path), lora_rank=8)
    memory = memory_of(profile)
    count = sum(p.numel() for p in model.parameters())
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    added = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert memory["weights"] * GIB == pytest.approx(2 * count + 4 * added)
    assert memory["gradients"] * GIB == pytest.approx(4 * added)
    assert memory["optimiser"] * GIB == pytest.approx(8 * added)


def test_activations_are_what_autograd_keeps():
    """Of LoRA weights in 16 bits; for others see the memory of whole processes below.

    Within a tenth: the last normalisation and the positions are not counted.
    """
    config = hf.Qwen2Config(**SMALL, attn_implementation="sdpa")
    counted, model = hf.Qwen2ForCausalLM(config), hf.Qwen2Model(config).train()
    adapter = LoraConfig(r=8, target_modules="all-linear")
    model = get_peft_model(model.to(torch.bfloat16), adapter)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def kept(tokens: int) -> int:
        """Of two rows, one of them padded."""
        storages = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        mask = torch.ones(2, tokens, dtype=torch.long)
        mask[0, :5] = 0
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            model(input_ids=torch.zeros_like(mask), attention_mask=mask, use_cache=False)
        return sum(size for place, size in storages.items() if place not in weights)

    short, middle, long = kept(128), kept(256), kept(384)
    squared = (long - 2 * middle + short) / 2 / 128**2  # bytes of two rows a token squared
    per_token = ((middle - short) / 128 - squared * (256 + 128)) / 2
    assert activation_bytes(counted, 1, 0, 0, 2) == pytest.approx(per_token, rel=0.13)
    assert activation_bytes(counted, 0, 2, 1, 2) == pytest.approx(squared)


def test_parts_add_up_by_hand():
    """Full weights in float32: 4 bytes each for weights and gradients, 8 for Adam's two moments."""
    needed, n = plan(PAPER, "H100"), planner.model_of(PAPER.policy).num_parameters()
    memory = needed.memory
    assert memory["weights"] == memory["gradients"] == pytest.approx(4 * n / GIB)
    assert memory["optimiser"] == pytest.approx(8 * n / GIB) and "reference" not in memory
    assert memory_of(changed(PAPER, beta=0.1))["reference"] == pytest.approx(4 * n / GIB)
    turns = [sum(memory[part] for part in of) for of in (planner.SAMPLING, planner.UPDATING)]
    rest = {"weights", "optimiser", "reserve"}
    assert set(memory) == rest | {*planner.SAMPLING, *planner.UPDATING}
    assert needed.total == pytest.approx(sum(memory[part] for part in rest) + max(turns))


SHAPES = json.loads((results_dir() / "bench" / "bench.json").read_text())["shapes"]


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: row["name"])
def test_memory_is_what_was_measured_on_a_cpu(row, tmp_path):
    """Peaks of whole processes, 0.9 to 135 million parameters, as `grpo-kit bench` stored them."""
    bench.config_of(row["name"]).save_pretrained(tmp_path)
    config, _ = bench.setting_of(row["name"], 3)
    memory = memory_of(Profile("bench", config, policy=str(tmp_path)), round(row["prompt_length"]))
    total = planner.Plan(memory, has=0.0).total
    assert total * 1024 == pytest.approx(row["peak_mib"]["kit"], rel=0.12)


def test_a_model_that_cannot_be_counted_is_refused(tmp_path):
    hf.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model of type 'gpt2' cannot be planned"):
        plan(dataclasses.replace(PAPER, policy=str(tmp_path)))
