"""Policies: what loads from a folder, what ends a completion, and what is said where it cannot."""

import copy

import pytest
import torch

from grpo_kit.models import load_policy, reference_of

PROMPT = [{"role": "user", "content": "Mia has 3 coins."}]


@pytest.fixture
def own_tokenizer(policy):
    """The policy's tokenizer, which a test may change."""
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    return policy.tokenizer


def test_every_eos_and_the_token_that_ends_a_turn_end_a_completion(policy, own_tokenizer):
    """Qwen2.5's base models end a turn by a token that they do not name as EOS."""
    end_of_turn = own_tokenizer.eos_token_id
    own_tokenizer.eos_token = own_tokenizer.pad_token
    policy.model.generation_config.eos_token_id = [9, 7]
    assert policy.eos_token_ids == sorted({7, 9, end_of_turn, own_tokenizer.pad_token_id})


def test_lora_trains_its_own_weights_alone_and_begins_the_same_each_time(saved_policy):
    before = torch.get_rng_state()
    models = [load_policy(saved_policy, lora_rank=2).model for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before), "it leaves the random numbers alone"
    first, second = ({n: p for n, p in m.named_parameters() if p.requires_grad} for m in models)
    assert first and all("lora" in name for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_reference_stays_what_the_policy_was(saved_policy, lora_rank):
    policy = load_policy(saved_policy, lora_rank=lora_rank)
    ids = torch.tensor(policy.encode([PROMPT]))
    before = policy.model(ids).logits.detach()
    model, context = reference_of(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    with context(), torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before)
        assert (model is policy.model) == bool(lora_rank), "with LoRA no second copy of the weights"
    assert not torch.allclose(policy.model(ids).logits, before)


def test_a_folder_that_cannot_be_used_says_why(saved_policy, own_tokenizer):
    """Three faults, each met before the one above it."""

    def refused(message):
        with pytest.raises((RuntimeError, ValueError), match=message):
            load_policy(saved_policy)

    own_tokenizer.add_tokens([f"new {i}" for i in range(500)])
    own_tokenizer.save_pretrained(saved_policy)
    refused(r"has \d+ tokens and the model \d+: .*fetch both")
    (saved_policy / "chat_template.jinja").unlink(missing_ok=True)
    own_tokenizer.chat_template = None
    own_tokenizer.save_pretrained(saved_policy)
    refused("has no chat template")
    weights = saved_policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    refused("cannot load .*safetensors only.: fetch it again")


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="holds no model, it has no config.json: give a folder"):
        load_policy(tmp_path)
    with pytest.raises(RuntimeError, match="no local folder and the Hub cannot be reached"):
        load_policy("nobody/no-such-model")


QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "refuses these messages .no system role."),
        ("{{ messages[-1].content }}{% if add_generation_prompt %}A:{% endif %}",
         "leaves out the system message: move its text"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not open an answer"),
    ],
)  # fmt: skip
def test_a_template_without_what_the_task_says_is_refused(policy, own_tokenizer, template, message):
    policy.check_template(QUESTION)
    own_tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        policy.check_template(QUESTION)
    if "refuses" in message:
        with pytest.raises(ValueError, match=message):
            policy.encode([QUESTION])
