"""The loop: what it logs and refuses, and that a killed run goes on as an unbroken one."""

import asyncio
import dataclasses
import json
import math
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from grpo_kit import objective, training
from grpo_kit.config import GRPOConfig
from grpo_kit.generation import completion_logps, generate
from grpo_kit.models import Policy, load_policy
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.tasks import Task
from grpo_kit.training import Learner, PromptBatches, PromptOrder, evaluate, pass_at_k, score, train

CONFIG = GRPOConfig(
    max_steps=3,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    num_generations=4,
    generation_batch_size=8,
    max_completion_length=8,
    eval_prompts=2,
    num_generations_eval=2,
    save_steps=1,
)


def configure(**changes) -> GRPOConfig:
    return dataclasses.replace(CONFIG, **changes)


def rows(n: int) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"{'a' * i} {i}"}], "answer": str(i), "row": i}
            for i in range(n)
        ]
    )


@pytest.fixture
def task() -> Task:
    return Task("toy", rows(6), rows(3))


def vowels(prompts, completions, completion_ids, **columns):
    """A reward with spread in every group: the share of even token ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def nothing(prompts, completions, completion_ids, **columns):
    return [None] * len(completions)


def weights_of(policy):
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def without_time(history):
    return [{k: v for k, v in row.items() if k != "step_time"} for row in history]


# --- learning -------------------------------------------------------------------------------------


def test_a_reward_that_can_be_raised_is_raised(policy, task, tmp_path):
    config = configure(max_steps=25, generation_batch_size=32, learning_rate=5e-3, eval_prompts=0)
    run = train(policy, task, [vowels], config, output_dir=tmp_path, seed=0)
    _, rewards = run.series("reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_history_has_trls_names_and_is_written_as_it_goes(policy, task, tmp_path, capsys):
    run = train(policy, task, [vowels, format_reward], CONFIG, output_dir=tmp_path, seed=0)
    last = run.history[-1]
    for name in (
        "reward reward_std frac_reward_zero_std completions/mean_length "
        "completions/clipped_ratio entropy grad_norm step_time clip_ratio/region_mean "
        "rewards/vowels/mean rewards/format_reward/mean eval/greedy eval/pass@1 eval/pass@2"
    ).split():
        assert math.isfinite(last[name]), name
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.history
    assert json.loads((tmp_path / "run.json").read_text())["history"] == run.history
    bar = capsys.readouterr().out.split("\r")[-1]
    assert bar.startswith("grpo: 100%") and "3/3" in bar and "pass@1=" in bar


def test_gradient_norm_is_positive_where_the_loss_is_zero(policy, task, tmp_path):
    run = train(policy, task, [vowels], configure(loss_type="grpo"), output_dir=tmp_path, seed=0)
    for row in run.history[1:]:
        assert abs(row["loss"]) < 1e-5 < 1e-3 < row["grad_norm"]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo"])
def test_micro_batches_make_the_same_update(new_policy, task, tmp_path, loss_type):
    """4 at a time are whole groups, 2 at a time cut them; only bnpo is local by definition."""
    results = []
    for size in (8, 4, 2):
        policy = new_policy()
        config = configure(
            max_steps=1,
            loss_type=loss_type,
            epsilon_high=5.0 if loss_type == "cispo" else None,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            eval_prompts=0,
            max_grad_norm=0.0,
        )
        run = train(policy, task, [vowels], config, output_dir=tmp_path / str(size), seed=0)
        results.append(run.history[-1]["grad_norm"])
    tolerance = 0.5 if loss_type == "bnpo" else 1e-4
    assert results[1] == pytest.approx(results[0], rel=tolerance)
    assert results[2] == pytest.approx(results[0], rel=tolerance)


def batch_of(policy, task, reward, config, seed: int = 0, *others):
    prompts = PromptBatches(policy, task, [reward, *others], config, seed)
    generator = torch.Generator().manual_seed(seed)
    state = SimpleNamespace(global_step=0, max_steps=config.max_steps)
    (batch,) = prompts(generator, state, {})
    return batch


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo"])
def test_leaving_out_groups_without_spread_changes_no_gradient(new_policy, task, loss_type):
    """Against a loss over all rows, each run by itself through the model."""

    def first_group_only(completion_ids, **columns):
        return [float(i) if i < 4 else 1.0 for i in range(len(completion_ids))]

    config = configure(loss_type=loss_type, epsilon_high=5.0, max_grad_norm=0.0)
    policy = new_policy()
    batch = batch_of(policy, task, first_group_only, config)
    assert (batch.advantages != 0).tolist() == [True] * 4 + [False] * 4
    rollouts = batch.rollouts
    logps = torch.zeros(rollouts.mask.shape)
    for i in range(8):
        own = completion_logps(policy.model, rollouts.select(torch.tensor([i])), pad_token_id=0)[0]
        logps = logps.index_put((torch.tensor(i), torch.arange(own.shape[1])), own[0])
    loss = objective.policy_loss(
        logps,
        None,
        batch.advantages,
        rollouts.mask,
        loss_type=loss_type,
        epsilon_high=5.0,
        max_completion_length=config.max_completion_length,
        num_items_in_batch=rollouts.mask.sum(),
    )
    loss.backward()
    wanted = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm().item()
    fresh = new_policy()
    stats = Learner(fresh, config).update(batch)
    assert stats["grad_norm"] == pytest.approx(wanted, rel=1e-4)
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_optimiser_steps_of_one_batch_divide_by_an_even_share_of_its_tokens(
    new_policy, task, monkeypatch
):
    divisors = []

    def spy(*arguments, **options):
        divisors.append(float(options["num_items_in_batch"]))
        return real(*arguments, **options)

    real = objective.policy_loss
    monkeypatch.setattr(training.objective, "policy_loss", spy)
    config = configure(per_device_train_batch_size=4)
    policy = new_policy()
    batch = batch_of(policy, task, vowels, config)
    Learner(policy, config).update(batch)
    assert divisors == [batch.rollouts.mask.sum().item() / 2] * 2


def test_training_takes_log_probabilities_at_the_sampler_s_temperature(new_policy, task):
    """Else the truncated importance weights of an on-policy batch would not be 1."""
    norms = []
    for cap in (None, 100.0):
        config = configure(temperature=0.6, importance_sampling_cap=cap, max_grad_norm=0.0)
        policy = new_policy()
        batch = batch_of(policy, task, vowels, config)
        norms.append(Learner(policy, config).update(batch)["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_truncated_importance_weights_reach_the_loss(new_policy, task):
    norms = []
    for shift in (0.0, 1.0):
        config = configure(importance_sampling_cap=2.0, max_grad_norm=0.0)
        policy = new_policy()
        batch = batch_of(policy, task, vowels, config)
        batch.rollouts.logps.sub_(shift)  # e times less likely to the sampler: capped at 2
        norms.append(Learner(policy, config).update(batch)["grad_norm"])
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-4)


def test_completions_cut_off_at_the_limit_can_be_left_out(new_policy, task):
    config = configure(max_completion_length=4, mask_truncated_completions=True)
    policy = new_policy()
    batch = batch_of(policy, task, vowels, config)
    assert not batch.rollouts.finished.any()  # so nothing at all is learnt from
    before = weights_of(policy)
    assert Learner(policy, config).update(batch)["grad_norm"] == 0.0
    assert torch.equal(before, weights_of(policy))
    batch.rollouts.finished[:] = True
    assert Learner(policy, config).update(batch)["grad_norm"] > 0.0


def test_groups_without_spread_change_nothing(policy, task, tmp_path):
    before = weights_of(policy)

    def same(prompts, completions, completion_ids, **columns):
        return [0.5] * len(completions)

    run = train(policy, task, [same], CONFIG, output_dir=tmp_path, seed=0)
    assert torch.equal(before, weights_of(policy))
    assert run.history[-1]["frac_reward_zero_std"] == 1.0
    assert run.history[-1]["grad_norm"] == 0.0


def test_fresh_rollouts_come_from_the_updated_weights(policy, task, tmp_path, monkeypatch):
    """What the sampler noted in each step is what the weights of that moment say."""
    real, moments = Learner.update, []

    def spy(learner, batch, **options):
        with torch.no_grad():
            logps, _ = completion_logps(policy.model, batch.rollouts, pad_token_id=0)
        torch.testing.assert_close(logps, batch.rollouts.logps, atol=1e-4, rtol=1e-4)
        moments.append(weights_of(policy))
        return real(learner, batch, **options)

    monkeypatch.setattr(Learner, "update", spy)
    config = configure(learning_rate=3e-2, eval_prompts=0)
    train(policy, task, [vowels], config, output_dir=tmp_path, seed=0)
    assert len(moments) == 3 and not torch.equal(moments[0], moments[1])


def test_what_is_left_out_is_not_in_the_divisor_either(new_policy, task):
    """The gradient stays what it is when a completion that is left out gets shorter."""
    config = configure(mask_truncated_completions=True, max_grad_norm=0.0)
    norms = []
    for length in (8, 1):
        policy = new_policy()
        batch = batch_of(policy, task, vowels, config)
        batch.rollouts.finished[:] = torch.arange(8) % 2 == 0
        batch.rollouts.mask[1::2, length:] = False
        norms.append(Learner(policy, config).update(batch)["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4) and norms[0] > 0


def test_the_reward_of_a_batch_is_the_weighted_sum_of_its_columns(policy, task):
    batch = batch_of(policy, task, vowels, configure(reward_weights=(0.5,)))
    assert batch.rewards.tolist() == pytest.approx((0.5 * batch.rewards_per_func[:, 0]).tolist())
    assert batch.metrics()["reward"] == pytest.approx(0.5 * batch.rewards_per_func.mean().item())
    assert batch.rewards_per_func.max() > batch.rewards_per_func.min()


def test_second_update_from_one_batch_has_a_ratio(policy, task, tmp_path):
    config = configure(num_iterations=2, learning_rate=3e-2, max_steps=1, eval_prompts=0)
    run = train(policy, task, [vowels], config, output_dir=tmp_path, seed=0)
    once = run.history[-1]["clip_ratio/region_mean"]
    assert once > 0, "after a large first step the second one should meet the clip"


def test_reference_kl_is_zero_at_first_and_grows(policy, task, tmp_path):
    config = configure(beta=0.01, learning_rate=1e-2)
    run = train(policy, task, [vowels], config, output_dir=tmp_path, seed=0)
    _, kl = run.series("kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[-1] > 1e-4


def test_dynamic_sampling_replaces_groups_without_spread(policy, task, tmp_path):
    def spread_for_even_rows(prompts, completions, completion_ids, *, row, **columns):
        return [(i % 2) * 1.0 if number % 2 == 0 else 0.0 for i, number in enumerate(row)]

    config = configure(dynamic_sampling_rounds=5, eval_prompts=0, max_steps=2)
    run = train(policy, task, [spread_for_even_rows], config, output_dir=tmp_path, seed=0)
    assert all(row["frac_reward_zero_std"] == 0 for row in run.history[1:])


def test_truncated_importance_sampling_changes_nothing_when_sampler_and_trainer_agree(
    new_policy, task, tmp_path
):
    norms = []
    for cap in (None, 2.0):
        config = configure(max_steps=1, importance_sampling_cap=cap, eval_prompts=0)
        run = train(new_policy(), task, [vowels], config, output_dir=tmp_path, seed=0)
        norms.append(run.history[-1]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


# --- kill and resume ------------------------------------------------------------------------------


@pytest.mark.parametrize("killed_in_step", [0, 1, 3])
def test_a_killed_and_resumed_run_equals_an_unbroken_one(
    new_policy, task, tmp_path, killed_in_step
):
    config = configure(max_steps=4, save_steps=2, num_iterations=2, eval_steps=1)
    whole_policy = new_policy()
    whole = train(whole_policy, task, [vowels], config, output_dir=tmp_path / "whole", seed=1)

    class Killed(BaseException):
        pass

    calls = iter(range(100))

    def deadly(prompts, completions, completion_ids, **columns):
        if next(calls) == killed_in_step:
            raise Killed
        return vowels(prompts, completions, completion_ids)

    deadly.__name__ = "vowels"
    with pytest.raises(Killed):
        train(new_policy(), task, [deadly], config, output_dir=tmp_path / "broken", seed=1)
    again = new_policy()
    resumed = train(
        again, task, [vowels], config, output_dir=tmp_path / "broken", seed=1, resume=True
    )
    assert without_time(resumed.history) == without_time(whole.history)
    assert torch.equal(weights_of(again), weights_of(whole_policy))
    assert not list((tmp_path / "broken").glob("*.partial"))


def test_resuming_another_configuration_lists_the_differences(policy, task, tmp_path):
    train(policy, task, [vowels], CONFIG, output_dir=tmp_path, seed=0)
    other = configure(learning_rate=2e-3, beta=0.1)
    with pytest.raises(ValueError, match=r"learning_rate 0.001 there, 0.002 here; beta 0.0 there"):
        train(policy, task, [vowels], other, output_dir=tmp_path, seed=0, resume=True)


def test_the_prompt_order_visits_every_row_once_an_epoch_in_changing_order():
    order = PromptOrder(5, seed=0)
    epochs = [order.take(5) for _ in range(3)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    later = PromptOrder(5, seed=0)
    later.taken = 7
    assert later.take(3) == epochs[1][2:]


# --- rewards --------------------------------------------------------------------------------------


def scored(policy, task, *rewards):
    prompts = policy.encode(task.train["prompt"])
    rollouts = generate(
        policy.model,
        prompts,
        2,
        max_new_tokens=6,
        eos_token_ids=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
    )
    examples = [task.train[i] for i in range(len(prompts)) for _ in range(2)]
    return score(policy, rollouts, examples, rewards)


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("chunks", [1, 2])
def test_every_completion_meets_the_columns_of_its_own_prompt(
    policy, task, monkeypatch, rounds, chunks
):
    """A sampler that answers with the prompt itself: what is scored must belong to the row."""
    real = training.generate

    def parrot(model, prompt_ids, *arguments, **options):
        rollouts = real(model, prompt_ids, *arguments, **options)
        width = rollouts.mask.shape[1]
        for i, prompt in enumerate(rollouts.prompt_index.tolist()):
            own = (prompt_ids[prompt] * width)[:width]
            rollouts.completion_ids[i] = torch.tensor(own)
        return rollouts

    seen = []

    def compare(prompts, completions, completion_ids, *, row, **columns):
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            asked = policy.encode([prompt])[0]
            assert ids == (asked * len(ids))[: len(ids)]
        seen.extend(row)
        return [(i % 2) * float(number % 2) for i, number in enumerate(row)]

    monkeypatch.setattr(training, "generate", parrot)
    batch_of(
        policy, task, compare, configure(dynamic_sampling_rounds=rounds, rollout_chunks=chunks)
    )
    assert len(set(seen)) >= 2


def test_every_row_is_scored_with_its_own_columns(policy, task):
    def echo(prompts, completions, completion_ids, *, row, **columns):
        for prompt, number in zip(prompts, row, strict=True):
            assert prompt[0]["content"].endswith(f" {number}")
        return row

    assert scored(policy, task, echo)[:, 0].tolist() == [i for i in range(6) for _ in range(2)]


def test_coroutine_rewards_run_together_and_beside_the_others(policy, task):
    """Each waits for the other and for the plain one; one after another they would wait forever."""
    here = {name: asyncio.Event() for name in "ab"}
    plain = threading.Event()

    def make(name, other):
        async def reward(prompts, completions, completion_ids, **columns):
            here[name].set()
            await asyncio.wait_for(here[other].wait(), 20)
            assert await asyncio.to_thread(plain.wait, 20)
            return [1.0] * len(completions)

        return reward

    def last(prompts, completions, completion_ids, **columns):
        plain.set()
        return [2.0] * len(completions)

    table = scored(policy, task, make("a", "b"), make("b", "a"), last)
    assert table.tolist() == [[1.0, 1.0, 2.0]] * 12


def test_a_part_is_judged_while_the_next_is_sampled(policy, task, monkeypatch):
    """The first part's reward waits until the second is being sampled."""
    calls, sampled, second = [], [], threading.Event()

    def generate_and_tell(*arguments, **options):
        if sampled:
            second.set()
        sampled.append(1)
        return generate(*arguments, **options)

    async def judge(prompts, completions, completion_ids, **columns):
        calls.append(len(completions))
        assert await asyncio.to_thread(second.wait, 20)
        return [float(ids[-1]) for ids in completion_ids]

    def first_token(prompts, completions, completion_ids, **columns):
        return [float(ids[0]) for ids in completion_ids]

    monkeypatch.setattr(training, "generate", generate_and_tell)
    config = configure(rollout_chunks=3)
    batch = batch_of(policy, task, judge, config, 0, first_token)
    assert len(calls) > 1 and sum(calls) == config.generation_batch_size
    assert all(n % config.num_generations == 0 for n in calls), "complete groups"
    expected = [[ids[-1], ids[0]] for ids in batch.rollouts.completion_lists()]
    assert batch.rewards_per_func.tolist() == expected
    assert len(set(batch.rewards_per_func[:, 0].tolist())) > 1, "or their order would not matter"


def test_a_function_that_returns_an_awaitable_is_awaited_too(policy, task):
    async def reward(prompts, completions, completion_ids, **columns):
        return [1.0] * len(completions)

    table = scored(policy, task, lambda **arguments: reward(**arguments))
    assert table.tolist() == [[1.0]] * 12


def test_a_failing_reward_does_not_wait_for_a_judge(policy, task):
    async def judge(prompts, completions, completion_ids, **columns):
        await asyncio.sleep(60)

    def failing(prompts, completions, completion_ids, **columns):
        raise RuntimeError("no luck")

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="no luck"):
        scored(policy, task, judge, failing)
    assert time.monotonic() - started < 30


def test_an_unscored_completion_leaves_its_siblings_alone(new_policy, task, tmp_path):
    """The siblings' advantages are those of a group that never had the unscored completion."""
    from grpo_kit.objective import combine_rewards, group_advantages

    def gap(prompts, completions, completion_ids, **columns):
        return [None if i == 1 else float(i) for i in range(len(completions))]

    table = scored(new_policy(), task, vowels, gap)
    advantages = group_advantages(combine_rewards(table), 4)
    rest = group_advantages(combine_rewards(table)[[0, 2, 3]], 3)
    assert advantages[1] == 0
    torch.testing.assert_close(advantages[[0, 2, 3]], rest)


def test_what_a_reward_logs_is_in_the_history(new_policy, task, tmp_path):
    """TRL's `log_metric`: the mean of a step's values, beside the built-in metrics."""

    def telling(prompts, completions, completion_ids, trainer_state, log_metric, **columns):
        log_metric("telling/step", trainer_state.global_step)
        log_metric("telling/step", trainer_state.global_step + 1)
        return [float(len(ids) % 2) for ids in completion_ids]

    config = configure(max_steps=2)
    run = train(new_policy(), task, [telling], config, output_dir=tmp_path, seed=0)
    assert run.series("telling/step") == ([1, 2], [0.5, 1.5])


def test_rewards_can_be_normalised_before_they_are_summed(new_policy, task, tmp_path):
    def loud(prompts, completions, completion_ids, **columns):
        return [100.0 * (i % 3) for i in range(len(completions))]

    seen = {}
    for name in ("sum_then_normalize", "normalize_then_sum"):
        config = configure(max_steps=1, multi_objective_aggregation=name)
        run = train(new_policy(), task, [vowels, loud], config, output_dir=tmp_path / name, seed=0)
        seen[name] = run.history[-1]
    assert len({row["grad_norm"] for row in seen.values()}) == 2
    assert len({row["reward"] for row in seen.values()}) == 1
    with pytest.raises(ValueError, match="multi_objective_aggregation is 'both'"):
        configure(multi_objective_aggregation="both")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1.0], ValueError, "the reward bad returned 1 values for 12 completions"),
        ([float("nan")] * 12, ValueError, "the reward bad returned nan for completion 0"),
        (["good"] * 12, TypeError, "the reward bad returned 'good' for completion 0"),
        (7, TypeError, "the reward bad returned a int"),
    ],
)
def test_a_bad_reward_is_named(policy, task, values, error, message):
    def bad(prompts, completions, completion_ids, **columns):
        return values

    with pytest.raises(error, match=message):
        scored(policy, task, bad)


def test_steps_without_any_score_are_counted_and_then_stop_the_run(policy, task, tmp_path):
    before = weights_of(policy)
    with pytest.raises(RuntimeError, match="could be scored for 3 steps in a row"):
        train(policy, task, [nothing], configure(max_steps=9), output_dir=tmp_path, seed=0)
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").open()]
    assert [row.get("unscored_steps") for row in history[1:]] == [1, 2, 3]
    assert not [name for row in history for name in row if name.startswith("reward")]  # never 0
    assert torch.equal(before, weights_of(policy))


KILLED_RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from test_training import configure, rows, vowels
from grpo_kit.models import Policy, load_policy
from grpo_kit.tasks import Task
from grpo_kit.training import train
task = Task("toy", rows(6), rows(3))
train(load_policy(sys.argv[2]), task, [vowels], configure(max_steps=40), output_dir=sys.argv[3],
      seed=1)
"""


@pytest.mark.slow
def test_a_run_killed_by_the_system_at_a_random_moment_goes_on_as_if_unbroken(
    saved_policy, task, tmp_path
):
    history = tmp_path / "broken" / "history.jsonl"
    arguments = [str(Path(__file__).parent), str(saved_policy), str(history.parent)]
    child = subprocess.Popen([sys.executable, "-c", KILLED_RUN, *arguments])
    while not (history.exists() and len(history.read_text().splitlines()) >= 3):
        assert child.poll() is None, "ended before it could be killed"
        time.sleep(0.005)
    delay = random.SystemRandom().uniform(0, 0.5)
    time.sleep(delay)
    child.kill()
    assert child.wait() == -signal.SIGKILL

    config = configure(max_steps=40)
    runs = [
        train(
            load_policy(saved_policy),
            task,
            [vowels],
            config,
            output_dir=tmp_path / name,
            seed=1,
            resume=True,
        )
        for name in ("whole", "broken")
    ]
    assert without_time(runs[0].history) == without_time(runs[1].history), f"after {delay} s"
    assert not list((tmp_path / "broken").glob("*.partial"))


# --- bad input ------------------------------------------------------------------------------------


def test_a_reward_without_its_column_is_named_with_the_columns_there_are(policy, task, tmp_path):
    bare = Task("bare", task.train.remove_columns("answer"), task.test)
    with pytest.raises(ValueError, match="accuracy_reward needs a column 'answer'.*prompt, row"):
        train(policy, bare, [accuracy_reward], CONFIG, output_dir=tmp_path, seed=0)


def test_an_empty_dataset_is_refused(policy, task, tmp_path):
    empty = Task("empty", task.train.select([]), task.test)
    with pytest.raises(ValueError, match="train rows of task 'empty' are empty"):
        train(policy, empty, [vowels], CONFIG, output_dir=tmp_path, seed=0)


def test_a_prompt_beyond_the_context_is_refused_before_any_step(policy, task, tmp_path):
    with pytest.raises(ValueError, match="exceeds the model's context of 512"):
        config = configure(max_completion_length=510)
        train(policy, task, [vowels], config, output_dir=tmp_path, seed=0)
    assert not (tmp_path / "history.jsonl").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_any_step(policy, task, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="cannot write to the output folder"):
        train(policy, task, [vowels], CONFIG, output_dir=tmp_path / "file" / "run", seed=0)


def test_a_checkpoint_of_another_reward_task_or_model_is_refused(new_policy, task, tmp_path):
    config = configure(max_steps=1, eval_prompts=0)
    train(new_policy(), task, [vowels], config, output_dir=tmp_path, seed=0)
    other = Task("toy", rows(5), rows(3))
    for policy, of, rewards, told in (
        (new_policy(), task, [format_reward], r"rewards \['vowels'\] there, \['format_reward'\]"),
        (new_policy(), other, [vowels], "prompts '[0-9a-f]{12}' there"),
        (new_policy(1), task, [vowels], "first weights '[0-9a-f]{12}' there"),
    ):
        with pytest.raises(ValueError, match=told):
            train(policy, of, rewards, config, output_dir=tmp_path, seed=0, resume=True)


def test_a_checkpoint_older_than_the_history_beside_it_is_refused(
    new_policy, task, tmp_path, monkeypatch
):
    config = configure(eval_prompts=0, max_steps=4, save_steps=2)
    train(new_policy(), task, [vowels], config, output_dir=tmp_path, seed=0)

    def deadly(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Learner, "update", deadly)
    with pytest.raises(KeyboardInterrupt):
        train(new_policy(), task, [vowels], config, output_dir=tmp_path, seed=0)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="a checkpoint of step 4 and the history of another"):
        train(new_policy(), task, [vowels], config, output_dir=tmp_path, seed=0, resume=True)


def test_a_test_prompt_that_is_too_long_is_told_before_the_first_step(policy, task, tmp_path):
    long = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "a 1 " * 600}], "answer": "1", "row": 0}]
    )
    with pytest.raises(ValueError, match="test prompt 0 has .* exceeds the model's context"):
        train(
            policy,
            Task("toy", task.train, long),
            [vowels],
            configure(eval_on_start=False),
            output_dir=tmp_path,
            seed=0,
        )
    assert not (tmp_path / "history.jsonl").exists()


def test_a_full_disk_leaves_the_last_checkpoint_good(policy, task, tmp_path, monkeypatch):
    train(policy, task, [vowels], CONFIG, output_dir=tmp_path, seed=0)
    good = (tmp_path / "checkpoint.pt").read_bytes()

    def full(state, path):
        path.write_bytes(b"half a check")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        train(policy, task, [vowels], CONFIG, output_dir=tmp_path, seed=0)
    assert (tmp_path / "checkpoint.pt").read_bytes() == good
    assert not list(tmp_path.glob(".*partial"))


def test_a_loss_that_is_not_finite_stops_before_the_update(policy, task, tmp_path, monkeypatch):
    before = weights_of(policy)
    real = training.objective.policy_loss
    monkeypatch.setattr(
        training.objective, "policy_loss", lambda *a, **k: real(*a, **k) * float("nan")
    )
    with pytest.raises(RuntimeError, match="not finite.* lower learning_rate.* at step 1"):
        train(policy, task, [vowels], CONFIG, output_dir=tmp_path, seed=0)
    assert torch.equal(before, weights_of(policy))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_generations": 1}, "num_generations is 1; a group of one"),
        ({"loss_type": "ppo"}, "loss_type is 'ppo'; it should be 'grpo', 'bnpo'"),
        ({"loss_type": "cispo"}, "'cispo' needs epsilon_high"),
        (
            {"importance_sampling_level": "x"},
            "importance_sampling_level is 'x'; .*'token' or 'sequence'",
        ),
        ({"scale_rewards": "std"}, "scale_rewards is 'std'; .*'group', 'batch', 'none'"),
        ({"reward_weights": (0.0, 0.0)}, "nothing would be learnt"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
        ({"num_generations_eval": 0}, "num_generations_eval is 0"),
        ({"dynamic_sampling_rounds": -1}, "dynamic_sampling_rounds is -1"),
        ({"generation_batch_size": 10}, "must be a multiple of num_generations"),
        ({"per_device_train_batch_size": 3}, "is not a multiple of"),
        ({"top_p": 0.9}, "top_p is 0.9 .* use top_p=1.0"),
        ({"top_k": 5}, "top_k is 5; .* top_k=0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"max_steps": 0}, "max_steps is 0"),
    ],
)
def test_a_config_that_cannot_run_says_why(changes, message):
    with pytest.raises(ValueError, match=message):
        configure(**changes)


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(8, 0, 8, 0.0), (8, 8, 1, 1.0), (8, 2, 1, 0.25), (4, 2, 2, 5 / 6), (8, 1, 8, 1.0)],
)
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_one(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_evaluation_is_repeatable_and_leaves_the_policy_alone(policy, task):
    before = weights_of(policy)
    first, again = (evaluate(policy, task.test, CONFIG, seed=3) for _ in range(2))
    assert first == again and first["eval/n"] == 2
    assert torch.equal(before, weights_of(policy))


def test_evaluation_counts_what_the_reward_calls_right(policy, task):
    def all_right(prompts, completions, completion_ids, **columns):
        return [1.0] * len(completions)

    result = evaluate(policy, task.test, CONFIG, correct=all_right)
    assert result["eval/greedy"] == result["eval/pass@1"] == result["eval/pass@2"] == 1.0


def test_float16_arithmetic_scales_the_loss_and_learns_the_same(
    new_policy, task, tmp_path, monkeypatch
):
    """As on a GPU without bfloat16; here on the CPU, which has both."""
    plain = new_policy()
    train(plain, task, [vowels], configure(max_steps=2), output_dir=tmp_path / "plain", seed=0)
    monkeypatch.setattr(Policy, "half", torch.float16)
    halved = new_policy()
    run = train(
        halved, task, [vowels], configure(max_steps=2), output_dir=tmp_path / "half", seed=0
    )
    assert [row["loss_scale"] for row in run.history[1:]] == [4096.0] * 2
    assert (weights_of(plain) - weights_of(halved)).abs().max() < 5e-3


def test_a_step_whose_gradient_overflows_is_skipped_and_the_next_is_scaled_less(
    new_policy, task, tmp_path, monkeypatch
):
    monkeypatch.setattr(Policy, "half", torch.float16)
    policy = new_policy()
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, _, enabled: real(device, 2.0**40))
    before = weights_of(policy)
    run = train(policy, task, [vowels], configure(max_steps=1), output_dir=tmp_path, seed=0)
    assert run.history[-1]["loss_scale"] == 2.0**39 and "grad_norm" not in run.history[-1]
    assert torch.equal(weights_of(policy), before)
