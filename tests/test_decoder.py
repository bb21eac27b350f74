"""The decoder written out computes what transformers does, for each family that it reads."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_kit import generation, models
from grpo_kit.decoder import can_read
from grpo_kit.generation import completion_logps, generate
from grpo_kit.models import faster_in_bfloat16
from grpo_kit.profiles import PROFILES

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
KINDS = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": ROPE}),
    "pad": ("llama", {"pad_token_id": 4, "tie_word_embeddings": True}),  # it stands in a prompt
}
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


def make(name: str, **changes):
    kind, options = KINDS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | options | changes))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases too, or some would do nothing
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def sampled(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    options = {"max_new_tokens": 12, "eos_token_ids": [1, 2], "pad_token_id": 0}
    return generate(model, PROMPTS, [4, 1, 3], generator=generator, **options)


@pytest.fixture(params=KINDS)
def model(request):
    return make(request.param)


def scores(model, rollouts):
    """Log-probabilities, entropies, and the gradient of a mixture of the former."""
    model.zero_grad()
    logps, entropies = completion_logps(model, rollouts, temperature=0.7, pad_token_id=0)
    (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return logps.detach(), entropies, gradients


def test_samples_and_scores_are_those_of_transformers(model, monkeypatch):
    assert can_read(model)
    ours = sampled(model)
    assert 1 < int(ours.lengths.min()) + 1 < int(ours.lengths.max()) + 1, "rows leave one by one"
    logps, entropies, gradients = scores(model, ours)
    monkeypatch.setattr(generation, "can_read", lambda model: False)
    theirs = sampled(model)
    assert torch.equal(ours.completion_ids, theirs.completion_ids)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-4)
    close((ours.logps, ours.entropies), (theirs.logps, theirs.entropies))
    *expected_scores, expected_gradients = scores(model, ours)
    close([logps, entropies], expected_scores)
    close(gradients, expected_gradients, rtol=1e-3, atol=1e-3)


def test_what_it_does_not_know_is_left_to_transformers(monkeypatch):
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for name, changes in (
        ("qwen2", sliding),
        ("qwen2", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": dynamic}),
        ("llama", {"attention_bias": True}),
    ):
        assert not can_read(make(name, **changes)), changes
    other = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 64}
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **other)).eval()
    assert not can_read(gpt2) and sampled(gpt2).lengths.min() > 0
    for target in ("q_proj", "down_proj", "lm_head", "embed_tokens"):
        adapted = get_peft_model(make("llama"), LoraConfig(r=2, target_modules=[target]))
        assert not can_read(adapted), target
    copied = make("llama")
    monkeypatch.setattr(type(copied), "__module__", "somebody.elses")
    assert not can_read(copied)


def test_bfloat16_moves_little():
    """Log-probabilities by 0.01 in the mean, and hardly a greedy answer."""
    policy, task = PROFILES["tiny"].load_policy(), PROFILES["tiny"].load_task()
    prompts = policy.encode(task.test["prompt"][:16])
    options = {"max_new_tokens": 40, "eos_token_ids": policy.eos_token_ids, "pad_token_id": 0}

    def answers() -> list:
        return generate(policy.model, prompts, do_sample=False, **options).completion_lists()

    rollouts = generate(policy.model, prompts, 4, **options)
    exact, greedy = completion_logps(policy.model, rollouts, pad_token_id=0)[0], answers()
    with torch.autocast("cpu", torch.bfloat16):
        close, again = completion_logps(policy.model, rollouts, pad_token_id=0)[0], answers()
    assert 0 < (exact - close).abs()[rollouts.mask].mean() < 0.01
    assert sum(map(list.__eq__, greedy, again)) >= 14


def test_auto_is_what_one_product_says_and_a_large_model_is_told(policy, monkeypatch, capsys):
    policy.compute_in("auto")
    assert policy.half == (torch.bfloat16 if faster_in_bfloat16() else None)
    policy.compute_in(False)
    assert policy.half is None

    monkeypatch.setattr(models, "bfloat16_speedup", lambda: 0.4)
    policy.compute_in("auto")
    assert not policy.bf16 and not capsys.readouterr().out
    monkeypatch.setattr(policy.model, "num_parameters", lambda: 134_515_008)
    policy.compute_in("auto")
    assert "in bfloat16 this CPU is 0.4 times as fast" in capsys.readouterr().out
