"""The planner: counted sizes are those of real models, and what it says helps does help."""

import dataclasses
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from grpo_kit.lab import planner, scaling
from grpo_kit.lab.planner import GIB, GPU, GPUS, Shape, advice, check_room, plan, shape_of
from grpo_kit.paths import results_dir
from grpo_kit.profiles import PROFILES, Profile

PAPER = PROFILES["paper"]
SMALL = {
    "vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "tie_word_embeddings": False,
}  # fmt: skip


def changed(profile, **config):
    return dataclasses.replace(profile, config=dataclasses.replace(profile.config, **config))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (hf.Qwen2Config(**SMALL), (48, 24)),
        (hf.Qwen3Config(**{**SMALL, "head_dim": 20, "tie_word_embeddings": True}), (80, 40)),
        (hf.LlamaConfig(**SMALL), (48, 24)),
    ],
)
def test_weights_are_those_of_the_model_and_lora_weights_those_that_peft_adds(config, shape):
    model = hf.AutoModelForCausalLM.from_config(config)
    small = Shape(config)
    assert small.parameters == sum(p.numel() for p in model.parameters())
    assert (small.query_size, small.key_value_size) == shape
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    added = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert small.lora_parameters_per_rank * 8 == added


def test_known_models_have_the_published_number_of_parameters():
    billions = [shape_of(name).parameters / 1e9 for name in planner.MODELS]
    assert billions == pytest.approx([0.1345, 0.494, 1.54, 7.62, 32.8], rel=0.005)
    assert {p.policy for p in PROFILES.values()} <= {*planner.MODELS, "tiny-base"}


@pytest.mark.parametrize(
    "changes", [{}, {"hidden_size": 128, "intermediate_size": 512, "num_key_value_heads": 4}]
)
@pytest.mark.parametrize(("width", "lora_rank"), [(2, 0), (4, 0), (2, 8)])  # LoRA: 16 bits
def test_activations_are_what_autograd_keeps(width, changes, lora_rank):
    """Within a tenth: the last normalisation and the positions are not counted."""
    config = hf.Qwen2Config(**{**SMALL, **changes}, attn_implementation="sdpa")
    model = hf.Qwen2Model(config).train()
    if lora_rank:
        adapter = LoraConfig(r=lora_rank, target_modules="all-linear")
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
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=width == 2):
            model(input_ids=torch.zeros_like(mask), attention_mask=mask, use_cache=False)
        return sum(size for place, size in storages.items() if place not in weights)

    short, middle, long = kept(128), kept(256), kept(384)
    squared = (long - 2 * middle + short) / 2 / 128**2  # bytes of two rows a token squared
    per_token = ((middle - short) / 128 - squared * (256 + 128)) / 2
    shape = Shape(config)
    assert shape.activation_bytes(1, 0, 0, width) == pytest.approx(per_token, rel=0.13)
    assert shape.activation_bytes(0, 2, 1, width) == pytest.approx(squared)


def test_parts_add_up_by_hand():
    """Full weights in float32: 4 bytes each for weights and gradients, 8 for Adam's two moments."""
    needed = plan(PAPER, gpu="H200")
    memory, n = needed.memory, shape_of(PAPER.policy).parameters
    assert memory["weights"] == memory["gradients"] == pytest.approx(4 * n / GIB)
    assert memory["optimiser"] == pytest.approx(8 * n / GIB) and "reference" not in memory
    held = plan(changed(PAPER, beta=0.1), gpu="H200").memory
    assert held["reference"] == pytest.approx(4 * n / GIB)
    one, spread = (plan(PAPER, gpus=g, engine="trl", sharded=g > 1).memory for g in (1, 8))
    assert spread["optimiser"] == pytest.approx(n / GIB)
    assert one["activations"] == spread["activations"], "fewer passes, not smaller ones"
    lora = plan(PROFILES["colab"], gpu="T4").memory
    assert lora["gradients"] < 0.1 * lora["weights"]

    turns = [sum(memory.get(part, 0) for part in p) for p in (planner.SAMPLING, planner.UPDATING)]
    rest = {"weights", "optimiser", "reserve"}
    assert set(memory) == rest | {*planner.SAMPLING[:1], *planner.UPDATING}
    assert needed.total == pytest.approx(sum(memory[part] for part in rest) + max(turns))


MEASURED = json.loads((results_dir() / "bench" / "scaling.json").read_text())["rows"]


@pytest.mark.parametrize(("row", "point"), [*zip(MEASURED, scaling.points(), strict=True)])
def test_memory_is_what_was_measured_on_a_cpu(row, point, tmp_path):
    """Peaks of whole processes, 0.3 to 135 million parameters, as `bench --scaling` stored them."""
    axis, size, config = point
    assert (axis, size) == (row["axis"], row["size"])
    profile = Profile("bench", config, policy=size)
    machine, prompt_length = GPU("a CPU", 16, 1, 1), round(row["prompt_length"])
    with mock.patch.object(planner, "shape_of", lambda *_: Shape(scaling.shape(size))):
        needed = plan(profile, gpu=machine, prompt_length=prompt_length)
    assert needed.total * 1024 == pytest.approx(row["peak_mib"]["kit"], rel=0.12)


@settings(max_examples=40)
@given(
    gpus=st.sampled_from([1, 2, 4, 8]),
    gpu=st.sampled_from(sorted(GPUS)),
    engine=st.sampled_from(["trl", "trl+vllm"]),
    sharded=st.booleans(),
    name=st.sampled_from(sorted(PROFILES)),
)
def test_more_gpus_compute_no_longer_and_never_need_more_each(gpus, gpu, engine, sharded, name):
    options = {"gpu": gpu, "engine": engine, "sharded": sharded}
    one, two = (plan(PROFILES[name], gpus=n, **options) for n in (gpus, 2 * gpus))
    for part in ("generation", "update"):
        assert two.seconds[part] <= one.seconds[part] * (1 + 1e-9)
    assert {*two.limits} == {*two.seconds} == {*one.seconds, "exchange"}
    assert two.total <= one.total + 1e-9
    assert two.tokens_per_second >= one.tokens_per_second
    assert all(value > 0 for value in (*one.memory.values(), *one.seconds.values(), one.hours))


def test_times_and_the_cache_by_hand():
    """One batch of 64 on a GPU of round numbers, half of what it could do reached."""
    profile = changed(
        PROFILES["colab"], generation_batch_size=64, max_completion_length=400, max_steps=10,
        eval_prompts=64, num_generations_eval=7, eval_steps=4, eval_on_start=True,
    )  # fmt: skip
    on = {"gpu": GPU("round", 100, 1000, 100), "prompt_length": 100, "reached": 0.5}
    needed = plan(profile, mean_share=0.5, **on)
    shape = shape_of(profile.policy, profile.revision)
    n, token = shape.parameters, shape.cache_bytes(2)
    at_once = 2**16 // 400  # more than the 128 of a CPU
    assert token == 2 * 24 * 128 * 2, "keys and values, of 24 blocks with 2 heads of 64"
    assert needed.memory["cache of sampling"] == pytest.approx(at_once * 500 * token / GIB)

    def generation(rows):
        read = 400 * 2 * n + rows * 200 * (100 + 100) * token
        computed = 2 * n * (rows * 200 + rows / 8 * 100)
        return max(read / 1e12, computed / 1e14) / 0.5

    tokens = 64 * 200 + 8 * 100
    assert needed.seconds["generation"] == pytest.approx(generation(64))
    assert needed.tokens_per_second == pytest.approx(64 * 200 / generation(64))
    update = n * tokens * (4 + 2) / 1e14 / 0.5  # no gradient of frozen weights; scored anew
    assert needed.seconds["update"] == pytest.approx(update)
    evaluations = 4 * 4 * generation(at_once)  # at 0, 4, 8 and 10; 64 x (7 + 1) answers
    hours = (10 * (generation(64) + update) + evaluations) / 3600
    assert needed.hours == pytest.approx(hours)
    fewer = plan(changed(profile, eval_prompts_between=16), **on)
    assert needed.hours - fewer.hours == pytest.approx(2 * (4 - 1) * generation(at_once) / 3600)
    whole = dataclasses.replace(profile, lora_rank=0, dtype="float32")
    for one, per_token in ((whole, 6 + 2), (changed(whole, beta=0.1), 6 + 2 + 2)):
        needed = plan(one, **on)
        assert needed.seconds["update"] == pytest.approx(n * tokens * per_token / 1e14 / 0.5)


def test_what_gpus_exchange_by_hand():
    """By the ring each GPU sends 2 (g - 1) / g of the gradients; sharded, the weights as well."""
    profile = changed(PAPER, generation_batch_size=64, per_device_train_batch_size=4,
                      gradient_accumulation_steps=16)  # fmt: skip
    machine = GPU("round", 100, 1000, 100, link=200)
    n = shape_of(profile.policy).parameters

    def sent(gpus, **options):
        needed = plan(profile, gpus=gpus, gpu=machine, engine="trl", reached=0.5, **options)
        return needed.seconds["exchange"] * 0.5 * 1e9, needed.limits["exchange"]

    assert sent(4) == (pytest.approx(2 * 3 / 4 * 4 * n / 200), "the link between GPUs")
    assert sent(16) == (pytest.approx(2 * 15 / 16 * 4 * n / 50), "the network between nodes")
    passes = 4  # 64 completions, 4 a pass on each of 4 GPUs
    each = 2 * 2 * n + 4 * n  # 16-bit weights forwards and backwards, the gradients once
    assert sent(4, sharded=True)[0] == pytest.approx(3 / 4 * passes * each / 200)
    lora = dataclasses.replace(profile, lora_rank=8)
    added = shape_of(profile.policy).lora_parameters_per_rank * 8
    machine = machine._replace(link=10.0)
    needed = plan(lora, gpus=16, gpu=machine, engine="trl", reached=0.5)
    assert needed.seconds["exchange"] == pytest.approx(2 * 15 / 16 * 4 * added / 10e9 / 0.5)


def test_what_more_gpus_bring_and_what_sets_the_limit():
    def rows(profile, **options):
        columns = planner.growth(profile, 64, 2.0, engine="trl", **options).columns
        return dict(zip((c.header for c in columns), ([*c.cells] for c in columns), strict=True))

    paper = rows(PAPER)
    assert paper["GPUs"] == ["1", "2", "4", "8", "16", "32", "64"]
    assert paper["nodes"] == ["1", "1", "1", "1", "2", "4", "8"]
    assert paper["set by"][0] == "arithmetic" and paper["times as fast"][0] == "1.0"
    assert paper["set by"][-1] == "reading the weights, once a token"
    spread = rows(PAPER, sharded=True)
    assert spread["set by"][4] == "the network between nodes"
    assert float(spread["GiB of each"][-1]) < float(paper["GiB of each"][-1])
    large = dataclasses.replace(PAPER, policy="Qwen/Qwen2.5-7B-Instruct")
    assert rows(large)["set by"] == ["does not fit in 80 GiB"] * 7
    uneven = changed(PAPER, generation_batch_size=24, per_device_train_batch_size=8,
                     gradient_accumulation_steps=3)  # fmt: skip
    assert "16 processes cannot share the 24 completions" in rows(uneven)["set by"][4]


def test_a_servers_gpus_cost_as_much_and_where_weights_are_spread_nothing_is_evaluated():
    def cost(**options):
        needed = plan(PAPER, gpus=8, **options)
        (cell,) = list(planner.table(needed, 2.0).columns[1].cells)[-1:]
        return float(cell), needed

    alone, needed = cost(engine="trl")
    both, apart = cost(engine="trl+vllm-server")
    assert alone == pytest.approx(needed.hours * 8 * 2, abs=0.01)
    assert both == pytest.approx(apart.hours * 16 * 2, abs=0.01)
    spread = plan(PAPER, gpus=8, engine="trl", sharded=True)
    steps = PAPER.config.max_steps * sum(spread.seconds.values()) / 3600
    assert spread.hours == pytest.approx(steps) and needed.hours > steps
    many = changed(PROFILES["tiny"], num_generations_eval=256)
    assert plan(many).hours > plan(PROFILES["tiny"]).hours


def test_every_profile_fits_on_its_gpu():
    for name, gpu in (("colab", "T4"), ("paper", "H100"), ("paper", "A100-80")):
        needed = plan(PROFILES[name], gpu=gpu)
        assert needed.room > 0, advice(PROFILES[name], needed)


def test_what_it_says_to_lower_makes_it_fit():
    needed = plan(PAPER, gpu="A100-40")
    text = advice(PAPER, needed)
    assert needed.room < 0 and f"{needed.total:.1f} GiB" in text and "A100-40 has 40" in text
    assert "lower per_device_train_batch_size (8)" in text
    lowered = changed(PAPER, per_device_train_batch_size=2, gradient_accumulation_steps=384)
    needed = plan(lowered, gpu="A100-40")
    assert needed.room > 0 and advice(lowered, needed).startswith("It fits")

    needed, lowered = (plan(PAPER, engine="trl+vllm", vllm_share=share) for share in (0.3, 0.2))
    assert needed.room < 0 and "--vllm-share" in advice(PAPER, needed)
    assert lowered.room > 0 and lowered.memory["vLLM"] == pytest.approx(16)


def test_a_gpu_or_machine_without_room_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.delenv("GRPO_KIT_SKIP_PLAN", raising=False)
    free = SimpleNamespace(available=3 * GIB)
    monkeypatch.setattr(planner.psutil, "virtual_memory", lambda: free)
    with pytest.raises(ValueError, match="GiB are needed .* this machine, as it is now, has 3"):
        check_room(PROFILES["smol"])
    check_room(PROFILES["tiny"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * GIB, 80 * GIB))
    total = plan(PAPER, gpu="H100").total
    with pytest.raises(ValueError, match=rf"{total:.1f} GiB are needed .* as it is now, has 8"):
        check_room(PAPER)
    check_room(PROFILES["tiny"])
    monkeypatch.setenv("GRPO_KIT_SKIP_PLAN", "1")
    check_room(PAPER)


def test_what_cannot_be_planned_is_refused(tmp_path):
    hf.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a model of type 'gpt2' cannot be planned"):
        plan(dataclasses.replace(PAPER, policy=str(tmp_path)))
    with pytest.raises(ValueError, match="one GPU, unsharded: choose engine 'trl'"):
        plan(PAPER, gpus=2)
