"""What notebook 04 defines is what the package does."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in
from toy import items_of

from grpo_kit import self_verification as sv
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.training import PromptBatches

counts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


@given(counts, st.integers(0, 9))
def test_the_stages_of_the_notebook_count_as_the_package_does(sizes, n):
    items = [item for query, counts in enumerate(sizes) for item in items_of(query, *counts)]
    own = defined_in("04")
    count, kept, packaged = own.labels, own.filtered(items), sv.filter_queries(items)
    assert count(kept) == count(packaged)
    parts, theirs = own.diverse(kept), sv.diversify(packaged)
    assert [count(part) for part in parts] == [count(part) for part in theirs]
    assert count(own.balanced_items(*parts, n)) == count(sv.balance(*theirs, n))
    chosen = own.process(items, n, random.Random(n))
    assert count(chosen) == count(sv.post_process(items, n, n=n))
    assert set(chosen) <= set(items)


def drawn(source, steps: int) -> list:
    """What a source yields in its first steps, as numbers that two sources can be compared by."""
    generator, found = torch.Generator().manual_seed(5), []
    for step in range(steps):
        state = SimpleNamespace(global_step=step, max_steps=steps, progress=step / steps)
        metrics = {}
        for batch in source(generator, state, metrics):
            prompts = [example["prompt"] for example in batch.examples]
            found.append((batch.rollouts.completion_lists(), prompts, batch.advantages.tolist()))
        found.append(metrics["generated_tokens"])
    return found


@pytest.mark.parametrize("strategy", list(sv.STRATEGIES))
def test_the_batch_source_of_the_notebook_yields_what_the_package_yields(strategy, monkeypatch):
    """Token by token, where both choose items by one rule; also after its state was restored."""
    profile, own = PROFILES["smoke"], defined_in("04")
    # `defined_in` runs definitions alone, and the schedules are a dict
    monkeypatch.setitem(own.OwnVerdicts.__init__.__globals__, "SCHEDULES", sv.STRATEGIES)
    task, rewards = profile.load_task(), [accuracy_reward, format_reward]

    def prompts():
        return PromptBatches(profile.load_policy(), task, rewards, profile.config, seed=3)

    def choose(items, n):  # the rightest and the most wrong, without chance
        items = sorted(map(tuple, items))
        both = [[item for item in items if item[-1] is label][: n // 2] for label in (True, False)]
        return sum(both, []) if all(both) else []

    def mine(items, n, rng):
        return [own.Item(*item) for item in choose(items, n)]

    def theirs(items, seed, n):
        given = [(item.question, item.answer, item.correct) for item in items]
        return [sv.VerificationItem(q, q, a, c) for q, a, c in choose(given, n)]

    source = own.OwnVerdicts(prompts(), strategy, mine)
    packaged = sv.SelfVerification(prompts(), strategy, post_process=theirs)
    assert drawn(source, 5) == drawn(packaged, 5)
    restored = own.OwnVerdicts(prompts(), strategy, mine)
    restored.load_state_dict(source.state_dict())
    assert restored.state_dict() == source.state_dict()
    assert drawn(restored, 5) == drawn(source, 5)
