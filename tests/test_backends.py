"""Whatever samples, greedy answers are the plain loop's, token by token (PITFALLS 22)."""

import pytest
import torch

from grpo_kit import backends
from grpo_kit.backends import BACKENDS, choose, sample
from grpo_kit.config import PROFILES
from grpo_kit.generation import completion_logps


@pytest.fixture(scope="module")
def base():
    return PROFILES["tiny"].load_policy()


@pytest.fixture(scope="module")
def prompts(base):
    return base.encode(PROFILES["tiny"].load_task().test["prompt"][:12])


@pytest.mark.parametrize("backend", ["static", "continuous"])
def test_greedy_answers_are_those_of_the_plain_path(base, prompts, backend):
    """Ragged prompts, answers of different lengths, one limit that cuts some off."""
    for limit in (6, 40):
        plain = sample(base, prompts, max_new_tokens=limit, do_sample=False)
        other = sample(base, prompts, backend=backend, max_new_tokens=limit, do_sample=False)
        assert other.completion_lists() == plain.completion_lists()
        assert torch.equal(other.finished, plain.finished)
        torch.testing.assert_close(other.logps, plain.logps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.entropies, plain.entropies, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["static", "continuous"])
def test_samples_are_groups_with_the_models_own_log_probabilities(base, prompts, backend):
    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        return sample(
            base, prompts[:3], 4, backend=backend, max_new_tokens=24, temperature=1.3,
            generator=generator,
        )  # fmt: skip

    rollouts = draw(0)
    assert rollouts.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    lists = rollouts.completion_lists()
    assert len({tuple(ids) for ids in lists}) > 6, "sampled, not greedy"
    assert all((ids[-1] in base.eos_token_ids) == bool(done)
               for ids, done in zip(lists, rollouts.finished, strict=True))  # fmt: skip
    with torch.no_grad():
        logps, _ = completion_logps(
            base.model, rollouts, temperature=1.3, pad_token_id=base.pad_token_id
        )
    torch.testing.assert_close(rollouts.logps, logps)
    assert draw(1).completion_lists() != lists


def test_the_choice_is_continuous_batching_on_a_gpu_else_the_plain_path(base, monkeypatch):
    assert choose(base) == "plain" and choose(base, "static") == "static"
    monkeypatch.setattr(type(base), "device", torch.device("cuda"))
    assert choose(base) == "continuous" and choose(base, "plain") == "plain"
    with pytest.raises(ValueError, match="sampling_backend is 'fast'; choose one of auto, plain"):
        choose(base, "fast")


def test_where_a_backend_fails_the_plain_one_takes_over_and_says_so(base, prompts, monkeypatch):
    def failing(*given):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(backends, "_by_transformers", failing)
    with pytest.warns(UserWarning, match="'static' failed .*no kernel.* the plain one samples"):
        other = sample(base, prompts, backend="static", max_new_tokens=8, do_sample=False)
    plain = sample(base, prompts, max_new_tokens=8, do_sample=False)
    assert other.completion_lists() == plain.completion_lists()
    assert BACKENDS[0] == "plain"
