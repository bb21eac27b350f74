"""What notebooks define is what the package does; formulas, hooks, batch sources, the agent."""

import random
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import code_cells, defined_in, markdown, with_gradient
from torch.testing import assert_close
from toy import items_of

from grpo_kit import flow, hooks, objective
from grpo_kit import self_verification as sv
from grpo_kit.lab import planner, surrogates
from grpo_kit.lab.ideas import load_file
from grpo_kit.lab.records import CHECKOUT
from grpo_kit.models import frozen_copy
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.tasks.tool_questions import catalogue_path, tool_questions
from grpo_kit.training import PromptBatches, train

seeds = st.integers(0, 10_000)


# --- 01, 01b --------------------------------------------------------------------------------------


def batch_of(seed: int, spread: float):
    """(logps, old_logps, advantages, mask) of four answers, masked tokens included."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand((4, 6), generator=generator)
    old = logps + spread * torch.randn((4, 6), generator=generator)
    mask = torch.arange(6)[None] < torch.randint(1, 7, (4, 1), generator=generator)
    return logps, old, torch.randn(4, generator=generator), mask


@pytest.mark.parametrize("notebook", ["08", "09"])
@given(seeds, st.sampled_from([2, 3, 8]), st.floats(0, 1))
def test_advantages_of_the_notebooks_equal_the_package_where_not_all_are_scored(
    notebook, seed, size, missing
):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(4 * size, generator=generator)
    rewards[torch.rand(4 * size, generator=generator) < missing] = torch.nan
    own, expected = defined_in(notebook), objective.group_advantages(rewards, size)
    assert_close(own.advantages(rewards, size), expected)


SURROGATES = {  # of a notebook -> of the package
    ("01b", "clip_higher"): partial(objective.surrogate, epsilon_high=0.28),
    ("01b", "cispo"): partial(objective.surrogate, loss_type="cispo", epsilon_high=5.0),
    ("01b", "sapo"): surrogates.sapo,
    ("01b", "sequence_mask"): surrogates.off_policy_mask,
}


@pytest.mark.parametrize(("notebook", "name"), SURROGATES)
@given(seeds, st.sampled_from([0.1, 0.5, 1.5]))
def test_surrogates_of_the_notebooks_equal_the_package(notebook, name, seed, spread):
    logps, *others, mask = batch_of(seed, spread)

    def loss(function):
        return lambda *batch: (function(*batch) * mask).sum()

    mine = with_gradient(loss(getattr(defined_in(notebook), name)), logps, *others, mask)
    packaged = SURROGATES[notebook, name]
    assert_close(mine, with_gradient(loss(packaged), logps, *others, mask))


AGGREGATES = (
    ("01", "aggregate"),
    ("01b", "aggregate"),
    ("01b", "token_mean"),
    ("01b", "constant_divisor"),
)


def test_the_hooks_of_the_notebooks_are_ones_that_train_takes_and_may_save_work_with():
    """Their batches may be cut into parts, and rows without advantage left out."""
    for notebook, name in (*SURROGATES, ("01b", "no_clip"), ("05", "cispo")):
        hooks.check_hook("surrogate", getattr(defined_in(notebook), name))
        assert hooks.ignores_zero_advantages(getattr(defined_in(notebook), name))
    for notebook, name in AGGREGATES:
        hooks.check_hook("aggregate", getattr(defined_in(notebook), name))
        assert hooks.adds_up(getattr(defined_in(notebook), name))
    for name in ("advantages", "no_std", "maxrl"):
        hooks.check_hook("advantages", getattr(defined_in("01b"), name))


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_loop_of_01_makes_the_run_that_train_makes(beta, tmp_path, monkeypatch):
    own, profile = defined_in("01"), PROFILES["smoke"]
    task, config = profile.load_task(), profile.with_config(
        loss_type="grpo", beta=beta, use_bias_correction_kl=False, num_iterations=2, max_steps=2,
        lr_scheduler_type="constant", warmup_steps=0, eval_steps=1, eval_prompts=0,
    ).config  # fmt: skip
    names = {
        "config": config, "task": task, "held_out": list(task.test.select(range(4))), "SEED": 3,
        "G": 4, "LIMIT": 48, "UPDATES": 2, "BETA": beta, "steps": 2, "answers": 16,
    }  # fmt: skip
    for name, value in names.items():  # what the notebook's parameters and settings set
        monkeypatch.setitem(own.my_train.__globals__, name, value)
    mine = own.my_train(profile.load_policy())
    given = {"output_dir": tmp_path, "seed": 3, "measure": own.evaluate}
    theirs = train(profile.load_policy(), task, [accuracy_reward], config, **given).history
    compared = (
        "reward",
        "completions/mean_length",
        "frac_reward_zero_std",
        "grad_norm",
        "eval/pass@1",
    )
    for one, other in zip(mine, theirs, strict=True):
        found = {name: one[name] for name in compared if name in one}
        assert found == pytest.approx({name: other[name] for name in found}, rel=2e-3)
    assert {*compared} <= {*mine[-1]}


# --- 04 -------------------------------------------------------------------------------------------

counts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8)


@given(counts, st.integers(0, 9))
def test_the_stages_of_the_notebook_count_as_the_package_does(sizes, n):
    items = [item for query, counts in enumerate(sizes) for item in items_of(query, *counts)]
    own = defined_in("04")
    count, kept, packaged = own.count_labels, own.filtered(items), sv.filter_queries(items)
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
    """Token by token, where both choose items by one rule."""
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


# --- 06 -------------------------------------------------------------------------------------------


def notebook_06(**names) -> SimpleNamespace:
    """The notebook's functions, with the variables that they read."""
    functions = defined_in("06")
    functions.play.__globals__.update(names)
    return functions


@pytest.mark.slow
def test_the_agent_of_06_plays_as_the_packages():
    """Greedy: the same calls, results and outputs. Sampled: the rows are each episode's ids."""
    policy, rows = PROFILES["tiny"].load_policy(), [tool_questions().test[i] for i in range(8)]
    limits = {"max_new_tokens": 48, "temperature": 1.0}
    own = notebook_06(
        PROMPTS=vars(flow.TINY), MAX_TURNS=6, frozen=frozen_copy(policy), replies={}, limits=limits,
        profile=PROFILES["tiny"], find=flow.Lookup(catalogue_path()),
    )  # fmt: skip
    own = notebook_06(TOOLS={"lookup": own.lookup, "calculator": own.calculator})
    theirs = flow.play(
        PROFILES["tiny"].load_agents(policy), rows, do_sample=False, max_new_tokens=48
    )
    mine = own.play(policy, rows, do_sample=False)
    assert [one.output for one in mine] == [one.output for one in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one.memory == [f"{step.call} -> {step.result}" for step in other.memory.steps]
        packaged = [turn.completion_ids for turn in other.turns]
        assert [turn.completion_lists()[0] for turn in one.turns] == packaged

    sampled = own.play(policy, rows[:2], 3, generator=torch.Generator().manual_seed(0))
    batch, index = own.turn_rows(sampled)
    ids = iter(batch.completion_lists())
    prompts = iter(batch.prompt_index.tolist())
    for i, one in enumerate(sampled):
        assert (index == i).sum() == len(one.turns) == len(one.memory)
        for turn in one.turns:
            assert next(ids) == turn.completion_lists()[0]
            assert batch.prompt_ids[next(prompts)] == turn.prompt_ids[0]
    assert len({id(one.memory) for one in sampled}) == 6  # no memory is shared


# --- 08, 09 ---------------------------------------------------------------------------------------


def test_the_bytes_of_08_are_those_that_the_planner_counts():
    model, parts = planner.model_of(PROFILES["paper"].policy), planner.memory_of(PROFILES["paper"])
    counted = sum(parts[part] for part in ("weights", "gradients", "optimiser"))
    assert defined_in("08").training_bytes(model.num_parameters()) / planner.GIB == pytest.approx(
        counted
    )


def test_the_stale_sampler_of_08_is_the_one_of_the_stored_runs(tmp_path, monkeypatch):
    own, profile = defined_in("08"), PROFILES["tiny"]
    small = {"max_steps": 3, "generation_batch_size": 32, "eval_prompts": 0, "learning_rate": 1e-3}
    config, task = profile.with_config(**small).config, profile.load_task()
    variables = own.StaleSampler.__call__.__globals__
    monkeypatch.setitem(variables, "config", config)
    stored = load_file(str(CHECKOUT / "data/results/stale/stale.py"))["StaleSampler"]
    histories = []
    for where, sampler in (("own", own.StaleSampler), ("stored", stored)):
        source = partial(sampler, every=2, cap=2.0)
        options = {"output_dir": tmp_path / where, "seed": 0, "batch_source": source}
        run = train(profile.load_policy(), task, [accuracy_reward], config, **options)
        assert run.series("off")[1][-1] > 0, "the sampler lags behind"
        histories.append([row | {"step_time": 0} for row in run.history])
    assert histories[0] == histories[1]


shown = st.lists(
    st.tuples(st.sampled_from(["7", "12", "8.0", "no", ""]), st.booleans(), st.integers(0, 30)),
    min_size=1, max_size=8,
)  # fmt: skip


def columns_of_09(answers):
    """Completions of each number, tagged or not, after some words; the right one is 7 or 12."""
    texts = [
        "so " * words + (f"<answer>{number}</answer>" if tagged else number)
        for number, tagged, words in answers
    ]
    return {
        "prompts": [[{"role": "user", "content": "?"}]] * len(texts),
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [list(range(words + 3)) for _, _, words in answers],
        "answer": ["7" if words % 2 else "12" for _, _, words in answers],
    }


@given(shown, st.randoms())
def test_a_cured_reward_of_09_gives_each_answer_its_own_value(answers, rng):
    """Whoever its neighbours are; the sick one does not."""
    own, batch = defined_in("09"), columns_of_09(answers)
    order = rng.sample(range(len(answers)), len(answers))
    shuffled = {name: [column[i] for i in order] for name, column in batch.items()}
    for reward in (own.accuracy, own.ordered_accuracy, own.near_or_0, own.late_is_none):
        values, moved = reward(**batch), reward(**shuffled)
        assert moved == [values[i] for i in order] and len(values) == len(answers)
    assert own.ordered_accuracy(**batch) == own.accuracy(**batch) == accuracy_reward(**batch)
    assert sorted(own.fast_accuracy(**batch)) == sorted(own.accuracy(**batch))


def test_a_fault_that_an_answer_of_09_shows_is_the_one_that_was_trained():
    code = "\n".join(cell.source for cell in code_cells("09_clinic"))
    answers = re.findall(
        r"<summary>Answer</summary>(.*?)</details>", markdown("09_clinic"), re.DOTALL
    )
    shown = [
        fence for text in answers for fence in re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    ]
    assert len(shown) >= 7
    assert all(fence in code for fence in shown)
