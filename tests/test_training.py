"""The loop: what it learns from, logs and refuses; a killed run goes on as an unbroken one."""

import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from toy import TASK, all_right, configure, even_ids, killed_in, logged, weights_of, without_times

from grpo_kit import generation, objective
from grpo_kit.generation import completion_logps
from grpo_kit.models import Policy
from grpo_kit.objective import BASELINES, LOSS_TYPES
from grpo_kit.rewards import accuracy_reward, format_reward
from grpo_kit.runs import CHECKPOINT
from grpo_kit.tasks import Task
from grpo_kit.training import Learner, PromptBatches, evaluate, pass_at_k, train


def batch_of(policy, config, *rewards):
    prompts = PromptBatches(policy, TASK, rewards or [even_ids], config, seed=0)
    state = SimpleNamespace(global_step=0, max_steps=config.max_steps)
    (batch,) = prompts(torch.Generator().manual_seed(0), state, {})
    return batch


def grad_norm(policy, change=lambda batch: None, **changes) -> float:
    """Of an update from one batch, to which `change` was made first."""
    config = configure(max_grad_norm=0.0, **changes)
    batch = batch_of(policy, config)
    change(batch)
    return Learner(policy, config).update(batch)["grad_norm"]


def test_a_reward_that_can_be_raised_is_raised(policy, tmp_path):
    config = configure(max_steps=25, generation_batch_size=32, learning_rate=5e-3, eval_prompts=0)
    run = train(policy, TASK, [even_ids], config, output_dir=tmp_path, seed=0)
    _, rewards = run.series("reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_history_has_trls_names_and_is_written_as_it_goes(policy, tmp_path, capsys):
    config = configure(loss_type="grpo")
    run = train(policy, TASK, [even_ids, format_reward], config, output_dir=tmp_path, seed=0)
    names = (
        "reward reward_std frac_reward_zero_std completions/mean_length completions/clipped_ratio "
        "entropy grad_norm step_time clip_ratio/region_mean rewards/even_ids/mean "
        "rewards/format_reward/mean eval/greedy eval/pass@1 eval/pass@2"
    )
    assert all(math.isfinite(run.history[-1][name]) for name in names.split())
    # on-policy the loss says nothing: the gradient does
    assert all(abs(row["loss"]) < 1e-5 < 1e-3 < row["grad_norm"] for row in run.history[1:])
    assert logged(tmp_path) == run.history
    assert json.loads((tmp_path / "run.json").read_text())["history"] == run.history
    assert run.series("step") == ([0, 1, 2, 3], [0, 1, 2, 3]) and run.series("none") == ([], [])
    bar = capsys.readouterr().out.split("\r")[-1]
    assert bar.startswith("grpo: 100%") and "3/3" in bar and "pass@1=" in bar


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_make_the_same_update(new_policy, loss_type):
    """4 at a time are whole groups, 2 at a time cut them; only bnpo is local by definition."""

    def norm(size, **kind):
        batch = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        kind |= {"loss_type": loss_type, "epsilon_high": 5.0}
        return grad_norm(new_policy(), **batch, **kind)

    for kind in ({}, {"importance_sampling_level": "sequence", "beta": 0.05}):
        whole, *parts = (norm(size, **kind) for size in (8, 4, 2))
        assert parts == pytest.approx([whole] * 2, rel=0.5 if loss_type == "bnpo" else 1e-4)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_leaving_out_groups_without_spread_changes_no_gradient(new_policy, loss_type):
    """Against a loss over all rows."""

    def first_group_only(completion_ids, **columns):
        return [float(i) if i < 4 else 1.0 for i in range(len(completion_ids))]

    kind = {"loss_type": loss_type, "epsilon_high": 5.0}
    config, policy = configure(max_grad_norm=0.0, **kind), new_policy()
    batch = batch_of(policy, config, first_group_only)
    assert (batch.advantages != 0).tolist() == [True] * 4 + [False] * 4
    logps, _ = completion_logps(policy.model, batch.rollouts, pad_token_id=0)
    loss = objective.policy_loss(
        logps, None, batch.advantages, batch.rollouts.mask, max_completion_length=8, **kind
    )
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm().item()
    stats = Learner(new_policy(), config).update(batch)
    assert stats["grad_norm"] == pytest.approx(expected, rel=1e-4)
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-6)


def test_training_takes_log_probabilities_at_the_sampler_s_temperature(new_policy):
    """Else the truncated importance weights of an on-policy batch would not be 1."""
    for temperature, cap in ((0.6, 100.0), (1.0, 2.0)):
        plain = grad_norm(new_policy(), temperature=temperature)
        weighted = grad_norm(new_policy(), temperature=temperature, importance_sampling_cap=cap)
        assert weighted == pytest.approx(plain, rel=1e-4)


def test_only_the_least_sure_tokens_are_learnt_from(new_policy):
    """Half of them by their entropies, beside a loss over the tokens chosen by hand."""
    config, policy = configure(max_grad_norm=0.0, top_entropy_quantile=0.5), new_policy()
    batch = batch_of(policy, config)
    logps, entropies = completion_logps(policy.model, batch.rollouts, pad_token_id=0)
    mask = batch.rollouts.mask
    chosen = mask & (entropies > entropies[mask].median())
    surrogate = objective.surrogate(logps, None, batch.advantages, mask) * chosen
    (surrogate.sum() / mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()]).norm().item()
    stats = Learner(new_policy(), config).update(batch)
    assert stats["grad_norm"] == pytest.approx(expected, rel=1e-3)


def test_importance_weights_of_the_sampler_reach_the_update(new_policy):
    """Cut to the cap of the config; a token that no sampler scored weighs as any other."""

    def sampled_with(offset):
        def change(batch):
            batch.rollouts.logps.sub_(offset)

        return change

    def norm(offset):
        return grad_norm(new_policy(), sampled_with(offset), importance_sampling_cap=2.0)

    plain = grad_norm(new_policy())
    assert norm(math.log(3)) == pytest.approx(2 * plain), "pi_train / pi_rollout is 3 everywhere"
    assert norm(math.log(1.5)) == pytest.approx(1.5 * plain)
    assert norm(math.nan) == plain, "`Rollouts.given` has NaN"


def test_a_batch_source_may_weigh_tokens(new_policy):
    """As the package's own weights do."""

    def weighted(batch):
        batch.token_weights = batch.rollouts.mask * 3.0

    plain = grad_norm(new_policy())
    assert grad_norm(new_policy(), weighted) == pytest.approx(3 * plain)


def test_a_dual_clip_acts_from_the_second_update_on(new_policy):
    def norm(updates, delta):
        options = {"learning_rate": 0.5, "epsilon": 0.01, "num_iterations": updates}
        return grad_norm(new_policy(), delta=delta, **options)

    assert norm(1, 1.02) == norm(1, None)
    assert norm(2, 1.02) != pytest.approx(norm(2, None), rel=0.01)


def test_what_is_left_out_is_not_in_the_divisor_either(new_policy):
    """The gradient is the same when completions that were cut off, and left out, get shorter."""

    def norm_with(length):
        def cut(batch):
            batch.rollouts.finished[:] = torch.arange(8) % 2 == 0
            batch.rollouts.mask[1::2, length:] = False

        return grad_norm(new_policy(), cut, mask_truncated_completions=True)

    assert norm_with(1) == pytest.approx(norm_with(8), rel=1e-4) and norm_with(8) > 0


def test_groups_without_spread_change_nothing(policy, tmp_path):
    before = weights_of(policy)
    same = [lambda completions, **columns: [0.5] * len(completions)]
    run = train(policy, TASK, same, configure(), output_dir=tmp_path, seed=0)
    assert torch.equal(before, weights_of(policy))
    assert run.history[-1]["frac_reward_zero_std"] == 1.0
    assert run.history[-1]["grad_norm"] == 0.0


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_reward_of_a_batch_is_the_weighted_sum_of_its_columns(policy, baseline):
    """And is compared with what the config says."""
    config = configure(reward_weights=(0.5,), baseline=baseline)
    batch = batch_of(policy, config)
    rewards = batch.rewards_per_func
    assert batch.rewards.tolist() == pytest.approx((0.5 * rewards[:, 0]).tolist())
    assert batch.metrics()["reward"] == pytest.approx(0.5 * rewards.mean().item())
    expected = objective.group_advantages(batch.rewards, config.num_generations, baseline=baseline)
    assert torch.equal(batch.advantages, expected) and batch.advantages.any()


def test_second_update_from_one_batch_has_a_ratio(policy, monkeypatch):
    spy = Mock(wraps=objective.loss_by)
    monkeypatch.setattr(objective, "loss_by", spy)
    config = configure(num_iterations=2, learning_rate=3e-2)
    stats = Learner(policy, config).update(batch_of(policy, config))
    first, second = ({"logps": call.args[2], **call.kwargs} for call in spy.call_args_list)
    torch.testing.assert_close(second["old_logps"], first["logps"])
    assert not torch.allclose(second["old_logps"], second["logps"], atol=0.1)
    assert stats["clip_ratio/region_mean"] > 0, "the second should meet the clip"


def test_float16_arithmetic_scales_the_loss_and_learns_the_same(new_policy, tmp_path, monkeypatch):
    """As on a GPU without bfloat16; here on the CPU, which has both."""
    policies, runs = [new_policy(), new_policy()], []
    for policy in policies:
        config = configure(max_steps=2)
        runs.append(train(policy, TASK, [even_ids], config, output_dir=tmp_path, seed=0))
        monkeypatch.setattr(Policy, "half", torch.float16)
    assert runs[1].series("loss_scale") == ([1, 2], [4096.0] * 2)
    plain, halved = map(weights_of, policies)
    assert (plain - halved).abs().max() < 5e-3


def test_a_step_that_overflows_is_skipped_and_the_next_is_scaled_less(policy, monkeypatch):
    monkeypatch.setattr(Policy, "half", torch.float16)
    learner = Learner(policy, configure())
    learner.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = weights_of(policy)
    stats = learner.update(batch_of(policy, configure()))
    assert stats["loss_scale"] == 2.0**39 and "grad_norm" not in stats
    assert torch.equal(weights_of(policy), before)


@pytest.mark.parametrize("killed_in_step", [0, 1, 3])
def test_a_killed_and_resumed_run_equals_an_unbroken_one(new_policy, tmp_path, killed_in_step):
    config = configure(max_steps=4, save_steps=2, num_iterations=2, eval_steps=1)
    whole_policy, policy = new_policy(), new_policy()
    whole = train(whole_policy, TASK, [even_ids], config, output_dir=tmp_path / "whole", seed=1)
    options = {"output_dir": tmp_path / "broken", "seed": 1}
    with pytest.raises(KeyboardInterrupt):
        train(new_policy(), TASK, [killed_in(killed_in_step)], config, **options)
    resumed = train(policy, TASK, [even_ids], config, **options, resume=True)
    assert without_times(resumed.history) == without_times(whole.history)
    assert torch.equal(weights_of(policy), weights_of(whole_policy))


def test_fewer_problems_are_asked_between_the_ends_of_a_run(policy, tmp_path):
    """What is measured of a policy is logged beside, whatever kind of number it is."""
    config = configure(max_steps=2, eval_steps=1, eval_prompts=3, eval_prompts_between=1)
    numbers = {"a": np.float32(0.5), "b": torch.tensor(2)}
    run = train(
        policy, TASK, [even_ids], config, output_dir=tmp_path, seed=0, measure=lambda _: numbers
    )
    assert [row["a"] + row["b"] for row in logged(tmp_path)] == [2.5] * 3
    assert [row["eval/n"] for row in run.history] == [3, 1, 3]
    assert [row.get("between/n") for row in run.history] == [1, None, 1]
    steps, lengths = run.series("eval/mean_length")  # of the first problem, at the ends too
    assert steps == [0, 1, 2] and lengths[::2] == [
        r["between/mean_length"] for r in run.history[::2]
    ]


def test_the_prompts_come_once_an_epoch_in_changing_order(policy):
    prompts, later = (PromptBatches(policy, TASK, [even_ids], configure(), 0) for _ in range(2))
    epochs = [prompts.take(6) for _ in range(3)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    later.load_state_dict({"taken": 8})
    assert later.take(8) == epochs[1][2:] + epochs[2][:4]


def test_a_checkpoint_of_another_reward_task_or_model_is_refused(new_policy, tmp_path):
    options = {"config": configure(max_steps=1, eval_prompts=0), "output_dir": tmp_path, "seed": 0}
    train(new_policy(), TASK, [even_ids], **options)
    fewer = Task("toy", TASK.train.select(range(5)), TASK.test)
    relabelled = Task("toy", TASK.train.map(lambda row: {"row": row["row"] + 1}), TASK.test)
    for policy, task, rewards, message in (
        (new_policy(), TASK, [format_reward], r"rewards \['even_ids'\] there, \['format_reward'\]"),
        (new_policy(), fewer, [even_ids], "data '[0-9a-f]{12}' there"),
        (new_policy(), relabelled, [even_ids], "data '[0-9a-f]{12}' there"),
        (new_policy(1), TASK, [even_ids], "first weights '[0-9a-f]{12}' there"),
    ):
        with pytest.raises(ValueError, match=message):
            train(policy, task, rewards, **options, resume=True)
    (tmp_path / CHECKPOINT).rename(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match=r"a run by TRL's trainer: .* \(--engine trl\)"):
        train(new_policy(), TASK, [even_ids], **options, resume=True)


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("at_once", [256, 5])  # 5: one group in a part
def test_every_completion_meets_the_columns_of_its_own_prompt(policy, monkeypatch, rounds, at_once):
    """A sampler that answers with the prompt itself: what is scored must belong to the row."""
    real = generation.generate

    def parrot(model, prompt_ids, *arguments, **options):
        rollouts = real(model, prompt_ids, *arguments, **options)
        width = rollouts.mask.shape[1]
        for i, prompt in enumerate(rollouts.prompt_index.tolist()):
            rollouts.completion_ids[i] = torch.tensor((prompt_ids[prompt] * width)[:width])
        return rollouts

    seen = []

    def compare(prompts, completions, completion_ids, *, row, **columns):
        seen.extend(zip(prompts, row, completion_ids, strict=True))
        return [(i % 2) * float(number % 2) for i, number in enumerate(row)]

    monkeypatch.setattr(generation, "generate", parrot)
    monkeypatch.setattr(generation, "MOST_AT_ONCE", at_once)
    config = configure(dynamic_sampling_rounds=rounds)
    batch = batch_of(policy, config, compare)
    for prompt, number, ids in seen:
        assert prompt[0]["content"].endswith(f" {number}")
        assert ids == (policy.encode([prompt])[0] * len(ids))[: len(ids)]
    assert len({number for _, number, _ in seen}) >= 2
    if rounds:  # DAPO: what has no spread was replaced
        assert batch.metrics()["frac_reward_zero_std"] == 0 and len(seen) > len(batch.rewards)


def by_turns(name, even, odd):
    """A reward of this name that gives one and the other value by turns."""

    def reward(completions, **columns):
        return [odd if i % 2 else even for i in range(len(completions))]

    reward.__name__ = name
    return reward


ALL_WRONG = by_turns("accuracy_reward", 0.0, 0.0), by_turns("format_reward", 0.0, 0.1)
EQUAL_SUMS = by_turns("first", 0.0, 1.0), by_turns("second", 0.5, 0.0)  # 1 x 1 = 2 x 0.5


@pytest.mark.parametrize(
    ("rewards", "changes", "sampled_again"),
    [
        (ALL_WRONG, {}, True),
        (ALL_WRONG, {"dynamic_sampling_metric": "accuracy_reward"}, True),
        (ALL_WRONG, {"dynamic_sampling_metric": "reward"}, False),
        (EQUAL_SUMS, {}, True),
        (EQUAL_SUMS, {"multi_objective_aggregation": "normalize_then_sum"}, False),
    ],
)
def test_a_group_whose_metric_has_no_spread_is_sampled_again(
    policy, rewards, changes, sampled_again
):
    """DAPO's rule is 0 < number right < G: formats that differ do not keep an all-wrong group."""
    config = configure(dynamic_sampling_rounds=1, reward_weights=(1, 2), **changes)
    batch = batch_of(policy, config, *rewards)
    assert (batch.generated_tokens > int(batch.rollouts.mask.sum())) == sampled_again


def test_a_task_without_answers_is_trained_and_says_what_is_not_measured(policy, tmp_path):
    task = Task("bare", TASK.train, TASK.test.remove_columns("answer"))
    with pytest.warns(UserWarning, match="'bare' have nothing in a column 'answer': accuracy"):
        run = train(policy, task, [even_ids], configure(), output_dir=tmp_path, seed=0)
    assert not any("eval/pass@1" in row for row in run.history)


def test_what_a_reward_logs_is_in_the_history_and_replaces_nothing(policy, tmp_path):
    """TRL's `log_metric`: the mean of a step's values, beside the built-in metrics."""

    def telling(completions, trainer_state, log_metric, **columns):
        log_metric("telling/step", trainer_state.global_step)
        log_metric("telling/step", trainer_state.global_step + 1)
        for name in ("step", "num_generated_tokens", "reward", "loss"):
            log_metric(name, 99.0)
        return [float(i % 2) for i in range(len(completions))]

    run = train(policy, TASK, [telling], configure(max_steps=2), output_dir=tmp_path, seed=0)
    assert run.series("telling/step") == ([1, 2], [0.5, 1.5])
    assert run.series("reward") == ([1, 2], [0.5, 0.5])
    assert all(row["loss"] != 99 for row in run.history[1:])


def test_steps_in_a_row_without_any_score_stop_the_run(policy, tmp_path):
    scores = iter([None, 0.5, None, None, None])

    def unable(completions, **columns):
        return [next(scores)] * len(completions)

    before = weights_of(policy)
    message = r"for 3 steps in a row \(up to step 5\).* what unable return; there is no checkpoint"
    with pytest.raises(RuntimeError, match=message):
        config = configure(max_steps=9, save_steps=0)
        train(policy, TASK, [unable], config, output_dir=tmp_path, seed=0)
    history = logged(tmp_path)[1:]
    assert [row.get("unscored_steps") for row in history] == [1, None, 1, 2, 3]
    assert [row["step"] for row in history if "reward" in row] == [2], "never 0"
    assert torch.equal(before, weights_of(policy))


def test_a_loss_that_is_not_finite_stops_before_the_update(policy, tmp_path, monkeypatch):
    before, real = weights_of(policy), objective.loss_by
    monkeypatch.setattr(objective, "loss_by", lambda *a, **k: real(*a, **k) * math.nan)
    with pytest.raises(RuntimeError, match="not finite.* lower learning_rate.* at step 1"):
        train(policy, TASK, [even_ids], configure(), output_dir=tmp_path, seed=0)
    assert torch.equal(before, weights_of(policy))


BARE = Task("bare", TASK.train.remove_columns("answer"), TASK.test)
EMPTY = Task("empty", TASK.train.select([]), TASK.test)
LONG = {"prompt": [{"role": "user", "content": "a 1 " * 600}], "answer": "1", "row": 0}
TOO_LONG = Task("toy", TASK.train, Dataset.from_list([LONG]))
GOLD = Task("gold", TASK.train.add_column("completions", ["right"] * len(TASK.train)), TASK.test)
PLAIN = Task("plain", Dataset.from_dict({"prompt": ["1 + 1?"], "answer": ["2"]}), TASK.test)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (BARE, {}, "accuracy_reward needs a column 'answer'.*prompt, row"),
        (EMPTY, {}, "train rows of task 'empty' are empty"),
        (GOLD, {}, "'gold' have the column 'completions', which rewards get.*; rename it"),
        (PLAIN, {}, "'plain' have no column 'prompt' of messages; give each row .*role"),
        (TASK, {"reward_weights": (1, 2)}, "reward_weights has 2 values for 1 rewards"),
        (TASK, {"dynamic_sampling_metric": "acc"}, "metric is 'acc'; choose one of 'accuracy_re"),
        (TASK, {"max_completion_length": 510}, "exceeds the model's context of 512"),
        (TOO_LONG, {"eval_on_start": False}, "test prompt 0 .* exceeds the model's context"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(policy, tmp_path, task, changes, message):
    with pytest.raises(ValueError, match=message):
        train(policy, task, [accuracy_reward], configure(**changes), output_dir=tmp_path, seed=0)
    assert not (tmp_path / "history.jsonl").exists()


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(8, 0, 8, 0.0), (8, 8, 1, 1.0), (8, 2, 1, 0.25), (4, 2, 2, 5 / 6), (8, 1, 8, 1.0)],
)
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_one(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_evaluation_counts_what_the_reward_calls_right_and_is_repeatable(policy):
    first, again = (evaluate(policy, TASK.test, configure(), seed=3) for _ in range(2))
    assert first == again and first["eval/n"] == 2
    between = evaluate(policy, TASK.test, configure(eval_prompts_between=1), seed=3)
    alone = evaluate(policy, TASK.test.select([0]), configure(), seed=3)
    assert between["between/mean_length"] == alone["eval/mean_length"]

    def right(prompts, row, **columns):
        return [(1.0, 0.5, None)[i] for i in row]

    result = evaluate(
        policy, TASK.test.remove_columns("answer"), configure(eval_prompts=3), correct=right
    )
    assert result["eval/n"] == 2, "a row that is not scored is left out"
    assert result["eval/greedy"] == result["eval/pass@1"] == result["eval/pass@2"] == 0.5
    assert "eval/lenient/greedy" not in result

    def half(prompts, **columns):
        return [0.5] * len(prompts)

    with pytest.warns(UserWarning, match="half is 0.5 at most; what says what is right has to be"):
        assert evaluate(policy, TASK.test, configure(), correct=half)["eval/pass@1"] == 0


def test_a_right_answer_without_its_tags_is_right_by_the_lenient_reading_alone(policy, monkeypatch):
    monkeypatch.setattr(policy, "decode", lambda ids: ["so it is 0", "<answer>0</answer>", "1"] * 2)
    result = evaluate(policy, TASK.test, configure(eval_prompts_between=1))
    read = [
        result[f"{part}/{name}"]
        for part in ("eval", "between")
        for name in ("greedy", "pass@1", "lenient/greedy", "lenient/pass@1")
    ]
    assert read == [0, 0.25, 0.5, 0.5, 0, 0.5, 1, 0.5]


def test_what_is_right_is_part_of_the_run(new_policy, tmp_path):
    bare = Task("bare", BARE.train, TASK.test.remove_columns("answer"))
    given = {"config": configure(), "output_dir": tmp_path, "seed": 0}
    run = train(new_policy(), bare, [even_ids], **given, correct=all_right)
    assert run.history[-1]["eval/pass@1"] == 1.0 and run.start["correct"] == "all_right"
    assert "correct" not in train(new_policy(), TASK, [even_ids], **given).start
    with pytest.raises(ValueError, match="correct None there, 'all_right' here"):
        train(new_policy(), bare, [even_ids], **given, correct=all_right, resume=True)
    with pytest.raises(TypeError, match="correct is 'accuracy'; give a reward, such as"):
        train(new_policy(), TASK, [even_ids], **given, correct="accuracy")
