"""The path of a real model, without the Hub: a small Qwen2 of random weights with a tokenizer and a
chat template of its own, real GSM8K rows, LoRA; trained, saved, loaded, evaluated.
"""

import dataclasses
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toy import even_ids  # random weights answer nothing right: a reward with spread
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from grpo_kit import cli, training, trl_bridge
from grpo_kit.models import load_policy, save_policy
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.tasks.published import SYSTEM_PROMPT

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def folder(gsm8k_folder, tmp_path_factory):
    """Tokenizer of 3,000 tokens, trained on GSM8K's questions; two layers of random weights."""
    lines = (gsm8k_folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[:1000]
    texts = [json.loads(line)["question"] + json.loads(line)["answer"] for line in lines]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([SYSTEM_PROMPT, *texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    folder = tmp_path_factory.mktemp("real") / "qwen2"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def profile(folder, gsm8k_folder):
    """The profile `colab`, moved to this machine."""
    short = dataclasses.replace(
        PROFILES["colab"].config, max_steps=1, learning_rate=1e-3, num_generations=4,
        generation_batch_size=8, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_completion_length=24, eval_prompts=4, num_generations_eval=2,
    )  # fmt: skip
    return dataclasses.replace(
        PROFILES["colab"], policy=str(folder), revision=None, device="cpu", dtype="float32",
        lora_rank=4, data=str(gsm8k_folder), config=short,
    )  # fmt: skip


def test_a_real_row_becomes_a_prompt_in_the_models_own_form(profile):
    policy, task = profile.load_policy(), profile.load_task()
    assert len(task.train) == 7473 and len(task.test) == 1319
    (ids,) = policy.encode(task.test["prompt"][:1])
    text = policy.tokenizer.decode(ids)
    assert text == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
        f"<|im_start|>user\n{task.test[0]['question']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids.count(policy.tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


@pytest.fixture(params=["kit", "trl"])
def trained(request, profile, tmp_path):
    """A policy with LoRA weights, after a step of either engine."""
    policy, task = profile.load_policy(), profile.load_task()
    few = dataclasses.replace(task, train=task.train.select(range(16)))
    train = {"kit": training.train, "trl": trl_bridge.train}[request.param]
    run = train(
        policy, few, [accuracy_reward, format_reward, even_ids], profile.config,
        output_dir=tmp_path / "run", seed=0,
    )  # fmt: skip
    assert run.history[-1]["eval/n"] == 4 and run.history[-1]["grad_norm"] > 0
    return policy


def test_only_lora_weights_are_trained_and_merged_ones_answer_the_same(trained, folder, tmp_path):
    base = load_policy(folder).model.state_dict()
    frozen = [(name, p) for name, p in trained.model.named_parameters() if not p.requires_grad]
    for name, p in frozen:
        name = name.replace("base_model.model.", "").replace(".base_layer", "")
        assert torch.equal(base[name], p)
    assert len(frozen) > 20
    moved = [p for name, p in trained.model.named_parameters() if "lora_B" in name]
    assert moved and any(p.abs().max() > 0 for p in moved)

    trained.model.save_pretrained(tmp_path / "adapter")
    as_warm_up = load_policy(folder, adapter=tmp_path / "adapter").model
    assert all(p.requires_grad for p in as_warm_up.parameters()), "all learn from there"
    merged = load_policy(save_policy(trained, tmp_path / "merged"))
    assert not hasattr(merged.model, "disable_adapter") and (tmp_path / "merged").is_dir()
    ids = torch.tensor(merged.encode([[{"role": "user", "content": "What is 40 + 8?"}]]))
    trained.model.eval()
    with torch.no_grad():
        ours, theirs = trained.model(ids).logits, merged.model(ids).logits
        before = load_policy(folder).model.eval()(ids).logits
    for others in (theirs, as_warm_up(ids).logits):
        torch.testing.assert_close(ours, others, rtol=1e-4, atol=1e-5)
    assert (theirs - before).abs().max() > 1e-4
    assert hasattr(trained.model, "disable_adapter"), "the policy itself stays as it is"


def test_the_command_line_takes_a_local_folder_for_model_and_data(folder, gsm8k_folder, tmp_path):
    done = CliRunner().invoke(cli.app, [
        "evaluate", "--policy", str(folder), "--task", "gsm8k", "--data", str(gsm8k_folder),
        "--rows", "4", "--max-new-tokens", "8", "--output", str(tmp_path / "out.json"),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    accuracy = json.loads((tmp_path / "out.json").read_text())
    assert accuracy["adapter"] is None and accuracy["machine"]["threads"] >= 1
    assert accuracy["n"] == 4 and accuracy["strict"] == accuracy["strict/low"] == 0
    assert 0.3 < accuracy["strict/high"] < 0.6 and 0 <= accuracy["lenient"] <= 1
    assert "strict" in done.output and "n 4" in done.output
