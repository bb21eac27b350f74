"""With every backend, greedy answers are the plain loop's, token by token (PITFALLS 22)."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_kit import backends
from grpo_kit.backends import choose, greedy, sample
from grpo_kit.generation import completion_logps
from grpo_kit.models import Policy, load_policy
from grpo_kit.profiles import PROFILES

both = pytest.mark.parametrize("backend", ["static", "continuous"])


@pytest.fixture(scope="module")
def prompts(base):
    return base.encode(PROFILES["tiny"].load_task().test["prompt"][:12])


@both
@pytest.mark.parametrize("limit", [6, 40])
def test_greedy_answers_are_those_of_the_plain_path(base, prompts, backend, limit):
    """Ragged prompts, answers of different lengths; the short limit cuts some off."""
    options = {"max_new_tokens": limit, "do_sample": False}
    plain, other = (sample(base, prompts, backend=b, **options) for b in ("plain", backend))
    assert other.completion_lists() == plain.completion_lists()
    assert torch.equal(other.finished, plain.finished)
    torch.testing.assert_close(other.logps, plain.logps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other.entropies, plain.entropies, rtol=1e-4, atol=1e-4)


@both
def test_samples_are_groups_with_the_models_own_log_probabilities(base, prompts, backend):
    def draw(seed):
        options = {"backend": backend, "max_new_tokens": 24, "temperature": 1.3}
        generator = torch.Generator().manual_seed(seed)
        return sample(base, prompts[:3], 4, **options, generator=generator)

    rollouts = draw(0)
    assert rollouts.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    lists = rollouts.completion_lists()
    assert len({tuple(ids) for ids in lists}) > 6, "sampled, not greedy"
    assert [ids[-1] in base.eos_token_ids for ids in lists] == rollouts.finished.tolist()
    options = {"temperature": 1.3, "pad_token_id": base.pad_token_id}
    with torch.no_grad():
        logps, _ = completion_logps(base.model, rollouts, **options)
    torch.testing.assert_close(rollouts.logps, logps)
    assert draw(1).completion_lists() != lists


@both
def test_settings_saved_with_the_model_do_not_change_the_samples(backend, prompts):
    """Qwen2.5-Instruct comes with a repetition penalty."""
    policy = PROFILES["tiny"].load_policy()
    options = {"max_new_tokens": 24, "do_sample": False}
    plain = sample(policy, prompts, **options)
    saved = {"repetition_penalty": 1.5, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    policy.model.generation_config.update(do_sample=True, **saved)
    other = sample(policy, prompts, backend=backend, **options)
    assert other.completion_lists() == plain.completion_lists()
    assert policy.model.generation_config.repetition_penalty == 1.5, "it is put back"


def test_lora_weights_are_sampled_with(prompts):
    policy = dataclasses.replace(PROFILES["tiny"], lora_rank=4).load_policy()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05, generator=generator)
    options = {"max_new_tokens": 24, "do_sample": False}
    plain, other = (sample(policy, prompts, backend=b, **options) for b in ("plain", "static"))
    assert other.completion_lists() == plain.completion_lists()


def test_the_choice_is_by_machine_weights_and_what_is_installed(base, monkeypatch):
    assert choose(base) == "plain" and choose(base, "static") == "static"
    monkeypatch.setattr(type(base), "device", torch.device("cuda"))
    assert choose(base) == "plain", "float32 weights, 16-bit arithmetic"
    assert choose(base, "plain") == "plain"
    half = Policy(copy.deepcopy(base.model).to(torch.bfloat16), base.tokenizer)
    assert choose(half) == "continuous"
    monkeypatch.setattr(backends, "find_spec", lambda name: name == "vllm")
    assert choose(half) == "continuous" and choose(half, trained=False) == "vllm"
    with pytest.raises(ValueError, match="sampling_backend is 'vllm'; choose one of auto, plain"):
        choose(base, "vllm")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs vLLM, which is not installed: pip install"):
        choose(base, "vllm", trained=False)


def test_continuous_batching_takes_memory_for_its_rows_and_no_more():
    """By itself it would take nine tenths of what is free."""
    rows = [[1] * 30] * 12 + [[1] * 300]
    config = backends._cache_for(rows, 40)
    assert 12 * 70 + 340 <= config.num_blocks * config.page_size <= 2 * 14 * config.page_size
    assert len(rows) <= config.max_batch_tokens <= 1024


BROKEN = SimpleNamespace(error="no kernel image is available", generated_tokens=[])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [({}, "0 of 3 rows were answered"), (dict.fromkeys("abc", BROKEN), "no kernel")],
)
def test_the_plain_one_replaces_one_that_fails(base, prompts, monkeypatch, outputs, message):
    monkeypatch.setattr(base.model, "generate_batch", lambda **given: outputs)
    options = {"max_new_tokens": 8, "do_sample": False}
    with pytest.warns(UserWarning, match=f"'continuous' failed .*{message}.* the plain one"):
        other = sample(base, prompts[:3], backend="continuous", **options)
    plain = sample(base, prompts[:3], **options)
    assert other.completion_lists() == plain.completion_lists()


@pytest.mark.parametrize("message", ["CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_where_memory_is_short_nothing_takes_over(base, prompts, monkeypatch, message):
    full = SimpleNamespace(error=message, generated_tokens=[])
    monkeypatch.setattr(base.model, "generate_batch", lambda **given: {"0": full})
    with pytest.raises(RuntimeError, match=message):
        sample(base, prompts[:1], backend="continuous", max_new_tokens=8)


def test_vllm_answers_with_the_policys_weights_as_they_are_now(base, prompts, monkeypatch):
    """vLLM itself needs a GPU; a stand-in takes its arguments."""
    arguments = {}

    class LLM:
        def __init__(self, model, **options):
            arguments.update(options)
            self.policy = load_policy(model)

        def generate(self, prompts, params):
            arguments.update(params)
            rows = [prompt["prompt_token_ids"] for prompt in prompts]
            answer = greedy(self.policy, "plain", max_new_tokens=params["max_tokens"], context=0)
            outputs = ([SimpleNamespace(token_ids=ids)] for ids in answer(rows))
            return [SimpleNamespace(outputs=output) for output in outputs]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=dict))
    limits = {"max_new_tokens": 16, "context": 100}
    vllm, plain = (greedy(base, backend, **limits) for backend in ("vllm", "plain"))
    assert vllm(prompts) == plain(prompts)
    expected = {"generation_config": "vllm", "dtype": "float32", "max_model_len": 100}
    expected |= {"temperature": 0.0, "stop_token_ids": base.eos_token_ids}
    assert expected.items() <= arguments.items()
