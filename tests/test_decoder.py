"""Each family's rows in a batch are what they would be alone, by our decoder or transformers'."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from toy import plain_logps
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_kit import decoder
from grpo_kit.decoder import can_read
from grpo_kit.generation import completion_logps, generate
from grpo_kit.profiles import PROFILES

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
SLIDING = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
OURS = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": ROPE}),
    "pad": ("llama", {"pad_token_id": 7, "tie_word_embeddings": True}),  # it stands in a prompt
}
THEIRS = {
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "gemma": ("gemma", {"head_dim": 8}),
    "mistral": ("mistral", SLIDING),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "sliding qwen2": ("qwen2", SLIDING),
}
PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15], [20]]


def make(name: str, **changes):
    kind, options = (OURS | THEIRS)[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | options | changes))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases too, or some would do nothing
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def gradients(model, score) -> dict:
    model.zero_grad()
    score.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", OURS | THEIRS)
def test_each_family_samples_as_its_rows_alone_would(family, monkeypatch):
    """Left padding and the rows that leave the batch shift nothing, wherever positions come in."""
    part_tokens = {"qwen2": 1, "qwen3": 40}.get(family, decoder.PART_TOKENS)
    monkeypatch.setattr(decoder, "PART_TOKENS", part_tokens)
    model = make(family)
    assert can_read(model) == (family in OURS)
    options = {"max_new_tokens": 12, "eos_token_ids": range(1, 5), "pad_token_id": 7}
    options["generator"] = torch.Generator().manual_seed(0)
    together = generate(model, PROMPTS, 6, greedy_first=True, **options)
    assert len(set(together.lengths.tolist())) > 3
    logps, entropies = completion_logps(model, together, pad_token_id=7)
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    close((logps, entropies), (together.logps, together.entropies))
    weights, plain = torch.linspace(-1, 1, logps.numel()).view_as(logps), 0.0
    for i, row in enumerate(together.completion_lists()):
        prompt = PROMPTS[i // 6]
        alone = plain_logps(model, prompt, row)
        close(logps[i, : len(row)], alone)
        plain = plain + (alone * weights[i, : len(row)]).sum()
        if i % 6 == 0:
            ids = torch.tensor([prompt])
            theirs = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                eos_token_id=[1, 2, 3, 4], pad_token_id=7,
            )  # fmt: skip
            assert row == theirs[0, len(prompt) :].tolist()
    expected = gradients(model, plain)
    close(gradients(model, (logps * weights).sum()), expected, atol=1e-3, rtol=1e-3)


def test_what_it_does_not_know_is_left_to_transformers(monkeypatch):
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for name, changes in (
        ("qwen2", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": dynamic}),
        ("llama", {"attention_bias": True}),
    ):
        assert not can_read(make(name, **changes)), changes
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
