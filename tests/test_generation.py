"""The sampler against single rows, and the scorer against a plain log-softmax."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from toy import plain_logps

from grpo_kit import decoder, generation
from grpo_kit.generation import Rollouts, completion_logps, generate

PROMPTS = [[7, 8, 9], [10, 11, 12, 13, 14, 15], [20]]
EOS = range(60)  # with a policy without taste: rows end early, late and not at all


def sample(policy, prompts=PROMPTS, num_generations=1, seed=None, **options) -> Rollouts:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    defaults = {"max_new_tokens": 12, "eos_token_ids": EOS, "pad_token_id": policy.pad_token_id}
    options = defaults | options
    return generate(policy.model, prompts, num_generations, generator=generator, **options)


def greedy(policy, *arguments, **options) -> list[list[int]]:
    return sample(policy, *arguments, do_sample=False, **options).completion_lists()


@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), order=st.permutations(PROMPTS))
def test_sampled_rows_do_not_depend_on_who_leaves_the_batch(new_policy, seed, order):
    """Compaction and other prompts' lengths never reach a row: only its own uniforms do."""
    policy = new_policy()
    short, long = (
        sample(policy, order, 2, seed, eos_token_ids=ids).completion_lists() for ids in (EOS, [])
    )
    for cut, whole in zip(short, long, strict=True):
        end = next((i for i, token in enumerate(whole) if token in EOS), len(whole) - 1)
        assert cut == whole[: end + 1]


def test_every_eos_id_stops_a_row_and_is_counted(policy):
    rollouts = sample(policy, PROMPTS, 8)
    seen = set()
    for row, finished in zip(rollouts.completion_lists(), rollouts.finished.tolist(), strict=True):
        assert finished == (row[-1] in EOS)
        assert not set(EOS) & set(row[:-1])
        assert finished or len(row) == 12
        seen |= set(EOS) & set(row)
    assert len(seen) >= 2, "the sample should end on more than one EOS id"


def test_mask_counts_the_eos_even_where_it_is_the_padding_id(policy):
    token = greedy(policy)[0][0]
    ends = {"eos_token_ids": [token], "pad_token_id": token}
    rollouts = sample(policy, PROMPTS[:1], do_sample=False, **ends)
    assert rollouts.lengths.tolist() == [1] and rollouts.finished.all()


@pytest.mark.parametrize("pad", [0, 7])  # inside a completion, or its end
def test_completions_from_elsewhere_are_masked_by_their_lengths(policy, pad):
    asked = SimpleNamespace(device=policy.device, pad_token_id=pad, eos_token_ids=[7])
    rollouts = Rollouts.given([[1], [2]], [[5, 0, 7], [7]], asked)
    assert rollouts.mask.tolist() == [[True] * 3, [True, False, False]]
    assert rollouts.completion_lists() == [[5, 0, 7], [7]] and rollouts.finished.all()
    assert rollouts.logps.isnan().all() and not rollouts.entropies.any()


def test_sampling_follows_the_distribution(policy):
    n = 4000
    rollouts = sample(policy, PROMPTS[:1], n, max_new_tokens=1, temperature=0.5)
    expected = torch.softmax(policy.model(torch.tensor(PROMPTS[:1])).logits[0, -1] / 0.5, -1)
    counts = torch.bincount(rollouts.completion_ids[:, 0], minlength=len(expected)) / n
    likely = expected > 0.02
    error = (expected * (1 - expected) / n).sqrt()
    assert likely.any() and ((counts - expected).abs() < 5 * error)[likely].all()


def test_dropout_is_off_while_sampling_and_back_on_after(policy):
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    expected = greedy(policy)
    policy.model.train()
    assert greedy(policy) == expected
    assert policy.model.training


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "no prompts"), ([[1], []], "prompt 1 is empty"), ([[1] * 505], "exceeds the model's")],
)
def test_prompts_that_cannot_run_are_refused_in_a_sentence(policy, prompts, message):
    with pytest.raises(ValueError, match=message):
        sample(policy, prompts)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_scorer_agree_with_a_plain_log_softmax(policy, temperature):
    rollouts = sample(policy, PROMPTS, 3, temperature=temperature)
    options = {"temperature": temperature, "pad_token_id": policy.pad_token_id}
    logps, entropies = completion_logps(policy.model, rollouts, **options)
    torch.testing.assert_close(logps, rollouts.logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropies, rollouts.entropies, atol=1e-4, rtol=1e-4)
    for i, row in enumerate(rollouts.completion_lists()):
        expected = plain_logps(policy.model, PROMPTS[i // 3], row, temperature)
        torch.testing.assert_close(logps[i, : len(row)], expected, atol=1e-5, rtol=1e-5)
        assert not logps[i, len(row) :].any()


def test_rows_that_are_equal_so_far_run_once(policy, monkeypatch):
    """As many tokens as there are beginnings."""
    run, forward = [], decoder.Decoder.__call__

    def counted(self, ids, *arguments):
        run.append(len(ids))
        return forward(self, ids, *arguments)

    monkeypatch.setattr(decoder.Decoder, "__call__", counted)
    rollouts = sample(policy, PROMPTS, 9, seed=0, temperature=0.2)
    prompts, rows = rollouts.prompt_index.tolist(), rollouts.completion_lists()
    beginnings = {
        (prompt, *row[:length])
        for prompt, row in zip(prompts, rows, strict=True)
        for length in range(1, len(row))
    }
    together = sum(len(row) - 1 for row in rows)
    assert sum(run[1:]) == len(beginnings) < 0.9 * together


def plain_token_logps(head, hidden, targets, temperature):
    log_probs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
    entropies = -(log_probs.exp() * log_probs).sum(1)
    return log_probs.gather(1, targets[:, None])[:, 0], entropies.detach()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 13])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float32, False, 1e-5), (torch.float32, True, 3e-2), (torch.bfloat16, False, 3e-2)],
)
def test_chunked_scores_equal_plain_ones(monkeypatch, bias, rows, dtype, autocast, tolerance):
    """And so do their gradients."""
    monkeypatch.setattr(generation, "LOGITS_BUDGET", (5 * 40, 5 * 40))
    torch.manual_seed(rows)
    head = torch.nn.Linear(16, 40, bias=bias).to(dtype)
    hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    targets, weights = torch.randint(40, (rows,)), torch.randn(rows)
    results = []
    for score in (plain_token_logps, generation.token_logps):
        with torch.autocast("cpu", enabled=autocast):
            logps, entropies = score(head, hidden, targets, 0.7)
        assert logps.dtype == entropies.dtype == torch.float32
        gradients = torch.autograd.grad((logps * weights).sum(), [hidden, *head.parameters()])
        results.append((logps.detach(), entropies, *gradients))
    for plain, chunked in zip(*results, strict=True):
        torch.testing.assert_close(plain, chunked, atol=tolerance, rtol=tolerance)


def test_no_tensor_of_the_loss_step_is_larger_than_the_budget_allows(monkeypatch):
    """Of 300 x 2000 logits, a budget of 10,000 may hold 5 rows in one tensor."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if isinstance(output, torch.Tensor):
                sizes.append(output.untyped_storage().nbytes() // 4)
            return output

    monkeypatch.setattr(generation, "LOGITS_BUDGET", (10_000, 10_000))
    head = torch.nn.Linear(4, 2000, bias=False)
    hidden = torch.randn(300, 4, requires_grad=True)
    with Watch():
        logps, _ = generation.token_logps(head, hidden, torch.randint(2000, (300,)), 1.0)
        logps.sum().backward()
    assert 10_000 <= max(sizes) <= 20_000


def test_a_head_that_is_not_linear_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="head is a Sequential.*plain Linear"):
        generation.token_logps(torch.nn.Sequential(), torch.zeros(1, 2), torch.tensor([0]), 1.0)
