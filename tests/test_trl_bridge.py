"""Under TRL the same run: every field arrives or is refused, rewards and files are the same."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from toy import configure, files_up_to, logged, weights_of, without_times
from two_processes import LETTERS

from grpo_kit import trl_bridge
from grpo_kit.config import GRPOConfig
from grpo_kit.paths import data_dir
from grpo_kit.rewards import DiversityReward, accuracy_reward, format_reward
from grpo_kit.rewards.scoring import RewardError
from grpo_kit.runs import CHECKPOINT, RUN
from grpo_kit.tasks import Task
from grpo_kit.tasks.word_problems import word_problems

SCRIPT = Path(__file__).with_name("two_processes.py")


def small(**changes) -> GRPOConfig:
    return configure(**{"max_steps": 2, "eval_steps": 1, **changes})


def few_rows(n: int) -> Task:
    task = word_problems()
    return dataclasses.replace(task, train=task.train.select(range(n)))


def trainer_of(policy, folder, *rewards, task=None, **changes):
    given = policy, task or word_problems(), rewards or [format_reward], small(**changes)
    return trl_bridge.grpo_trainer(*given, output_dir=str(folder))


OTHER = {
    "learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1,
    "adam_beta1": 0.8, "adam_beta2": 0.99, "max_grad_norm": 0.5, "num_generations": 2,
    "generation_batch_size": 16, "num_iterations": 2, "max_completion_length": 9,
    "temperature": 0.7, "loss_type": "dr_grpo", "epsilon": 0.1, "epsilon_high": 0.3, "beta": 0.1,
    "delta": 3.0, "top_entropy_quantile": 0.2, "use_bias_correction_kl": False,
    "importance_sampling_level": "sequence", "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum", "mask_truncated_completions": True,
}  # fmt: skip


@pytest.fixture
def trl_config(policy, tmp_path):
    """TRL's config for changes to ours; a name that ends in `_` is an override."""

    def make(**changes):
        overrides = {k[:-1]: changes.pop(k) for k in list(changes) if k.endswith("_")}
        overrides["output_dir"] = str(tmp_path)
        return trl_bridge.trl_config(small(**changes), policy, **overrides)

    return make


def test_what_is_called_alike_arrives(trl_config):
    args = trl_config(**OTHER)
    config = small(**OTHER)
    for name in trl_bridge.SAME:
        assert getattr(args, name) == getattr(config, name), name
    assert set(OTHER) | {"top_p", "top_k"} == set(trl_bridge.SAME)
    assert args.max_steps == config.max_steps * 2, "TRL counts optimiser steps"
    assert args.logging_steps == args.save_steps == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reward_weights": (1, 0.5), "run_name_": "a"},
         {"reward_weights": [1.0, 0.5], "run_name": "a"}),
        ({"save_steps": 0}, {"save_steps": 2, "vllm_importance_sampling_correction": False}),
        ({"importance_sampling_cap": 3.0, "use_vllm_": True},
         {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 3.0,
          "vllm_importance_sampling_mode": "token_truncate"}),
    ],
)  # fmt: skip
def test_what_has_another_name_arrives_too(trl_config, changes, expected):
    args = trl_config(**changes)
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic_sampling_rounds": 2}, "dynamic_sampling_rounds is 2, .* choose 0"),
        ({"importance_sampling_cap": 2.0}, "importance_sampling_cap is 2.0, .* add use_vllm=True"),
        ({"baseline": "others"}, "baseline is 'others', .* or --engine kit"),
        ({"max_generated_tokens": 100}, "max_generated_tokens is 100, .* give max_steps"),
        ({"max_steps_": 3, "beta_": 1}, "beta, max_steps: that is the config's to say"),
    ],
)
def test_what_trl_cannot_do_or_the_config_decides_is_refused(trl_config, changes, message):
    with pytest.raises(ValueError, match=message):
        trl_config(**changes)


@pytest.mark.parametrize("hook", ["advantages", "surrogate", "aggregate", "batch_source"])
def test_hooks_are_refused_with_what_to_do_instead(hook, trl_config, policy, tmp_path):
    options = {"output_dir": tmp_path, "seed": 0, hook: len}
    with pytest.raises(ValueError, match=f"^{hook} is a hook .*: change the config, or"):
        trl_bridge.train(policy, few_rows(2), [format_reward], small(), **options)
    trl_config(**{f"{hook}_": None})


def test_history_and_run_file_have_the_form_of_the_kits(policy, tmp_path):
    run = trl_bridge.train(
        policy, word_problems(), [accuracy_reward, format_reward],
        small(gradient_accumulation_steps=2, per_device_train_batch_size=2), output_dir=tmp_path,
        seed=1, measure=lambda policy: {"meta/p_yes": 0.5},
    )  # fmt: skip
    assert [row["step"] for row in run.history] == [0, 1, 2], "generation batches, not updates"
    assert logged(tmp_path) == run.history
    written = json.loads((tmp_path / RUN).read_text())
    assert written["history"] == run.history and written["start"] == run.start
    assert written["config"] == json.loads(json.dumps(dataclasses.asdict(run.config)))
    assert written["seed"] == 1
    assert run.start["rewards"] == ["accuracy_reward", "format_reward"]
    assert run.start["batch_source"].startswith("TRL 1.")
    for row in run.history:
        assert {"eval/greedy", "eval/pass@1", "eval/pass@2", "meta/p_yes"} <= set(row)
        assert all(isinstance(value, (int, float)) for value in row.values())
    assert {"reward", "reward_std", "entropy", "grad_norm", "completions/mean_length", "step_time",
            "rewards/format_reward/mean"} <= set(run.history[1])  # fmt: skip
    lengths = [round(8 * row["completions/mean_length"]) for row in run.history[1:]]
    assert [row["num_generated_tokens"] for row in run.history] == [0, lengths[0], sum(lengths)]


def four_epochs(policy, folder, resume=False, breaks=0, **changes):
    """Four steps, an epoch each: of three rows a step takes two."""
    asked = []

    def noted(prompts, completions, **columns):
        asked.append([prompt[-1]["content"] for prompt in prompts])
        if len(asked) == breaks:
            raise KeyboardInterrupt
        return [float(len(str(text)) % 5) for text in completions]

    run = trl_bridge.train(
        policy, few_rows(3), [noted], small(max_steps=4, **changes), output_dir=folder, seed=1,
        resume=resume,
    )  # fmt: skip
    return run, asked


def test_a_killed_and_resumed_run_equals_an_unbroken_one_in_prompts_too(new_policy, tmp_path):
    """From the last whole checkpoint; one that was left half written is passed over."""
    whole, asked = four_epochs(new_policy(), tmp_path / "whole")
    assert len({tuple(batch) for batch in asked}) > 1, "epochs in orders of their own"
    folder = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        four_epochs(new_policy(), folder, breaks=3)
    assert trl_bridge.last_checkpoint(folder).name == "checkpoint-2"
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-3")
    unfinished = folder / "checkpoint-3" / trl_bridge.IDENTITY
    unfinished.unlink()  # as where another process could not save its part
    assert trl_bridge.last_checkpoint(folder).name == "checkpoint-2"
    policy, again = new_policy(), new_policy()
    resumed, asked_again = four_epochs(policy, folder, resume=True)
    assert asked_again == asked[2:]
    assert without_times(resumed.history) == without_times(whole.history)
    assert logged(folder) == resumed.history

    finished, nothing = four_epochs(again, folder, resume=True)
    assert nothing == [] and finished.history == resumed.history
    assert torch.equal(weights_of(again), weights_of(policy))


def test_a_run_of_the_kits_trainer_is_not_begun_anew(policy, tmp_path):
    (tmp_path / CHECKPOINT).touch()
    with pytest.raises(ValueError, match=r"a run by the kit's trainer: .* \(--engine kit\)"):
        four_epochs(policy, tmp_path, resume=True)


@pytest.mark.parametrize(("limit", "what"), [(2_300, "row"), (20_000, "checkpoint")])  # bytes
def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_goes_on(
    limit, what, new_policy, tmp_path
):
    policy = new_policy()
    with pytest.raises(KeyboardInterrupt):
        four_epochs(policy, tmp_path, breaks=3)
    told = f"cannot write the {what} of step 3 .*File too large.*make room, then resume from check"
    with files_up_to(limit), pytest.raises(RuntimeError, match=told):
        four_epochs(new_policy(), tmp_path, resume=True)
    resumed, _ = four_epochs(new_policy(), tmp_path, resume=True)
    unbroken, _ = four_epochs(new_policy(), tmp_path / "whole")
    assert without_times(resumed.history) == without_times(unbroken.history)


def test_another_run_is_not_resumed_and_a_new_one_begins_with_an_empty_folder(new_policy, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        four_epochs(new_policy(), tmp_path, breaks=4)
    assert trl_bridge.last_checkpoint(tmp_path).name == "checkpoint-3"
    with pytest.raises(ValueError, match="another configuration .*learning_rate 0.001 there"):
        four_epochs(new_policy(), tmp_path, resume=True, learning_rate=0.002)
    with pytest.raises(KeyboardInterrupt):
        four_epochs(new_policy(), tmp_path, breaks=1)
    assert trl_bridge.last_checkpoint(tmp_path) is None
    assert [row["step"] for row in logged(tmp_path)] == [0]


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(policy, tmp_path):
    trainer = trainer_of(policy, tmp_path)
    whole = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: whole(*a, **k) * math.nan
    with pytest.raises(RuntimeError, match="not finite at step 1: lower learning_rate"):
        trainer.train()


def test_rewards_are_held_to_the_protocol_and_may_be_coroutines(policy, tmp_path):
    async def odd(completions, **columns):
        return [0.0, math.inf] * (len(completions) // 2)

    async def unable(completions, **columns):
        return [None] * len(completions)

    with pytest.raises(ValueError, match="the reward odd returned inf for completion 1"):
        trainer_of(policy, tmp_path, odd).train()
    with pytest.raises(RuntimeError, match="no completion could be scored for 2 .* what unable"):
        trainer_of(policy, tmp_path, unable, max_steps=5, max_unscored_steps=2).train()


def test_a_reward_that_raises_is_named_with_its_step(policy, tmp_path):
    calls = []

    def breaks(completions, **columns):
        calls.append(1)
        return [1 / (2 - len(calls))] * len(completions)

    message = "the reward breaks raised ZeroDivisionError.* at step 2; resume from checkpoint-2 in"
    with pytest.raises(RewardError, match=message):
        changes = {"num_iterations": 2, "save_steps": 1, "eval_prompts": 0}
        trainer_of(policy, tmp_path, breaks, **changes).train()


@pytest.mark.parametrize("bf16", [True, False])
def test_bfloat16_reaches_trl_and_nothing_is_dropped_out(policy, tmp_path, bf16):
    """The kit trains without dropout, since with it the policy is another at every pass."""
    attention = policy.model.model.layers[0].self_attn
    attention.attention_dropout = 0.5
    assert trainer_of(policy, tmp_path, bf16=bf16).args.bf16 == bf16
    assert attention.attention_dropout == 0.0


def test_what_one_reward_cannot_score_is_out_of_its_group(policy, tmp_path):
    """TRL alone counts a None beside other rewards as 0."""
    scores = []

    def half(completions, **columns):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    def watched(completions, **columns):
        return [None] * len(completions)

    trainer = trainer_of(
        policy, tmp_path, format_reward, half, watched, max_steps=1, eval_prompts=0,
        reward_weights=(1, 1, 0),
    )  # fmt: skip
    plain = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: scores.append(plain(*given)) or scores[-1]
    trainer.train()
    missing = scores[0].isnan()
    assert missing[1::2].all()
    assert not missing[::2, :2].any(), "a reward of weight 0 is only watched"


def test_the_reference_is_the_policy_as_it_is_now(policy, tmp_path):
    """TRL loads one by name, which is what the policy once was."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight += 0.1
    trainer = trainer_of(policy, tmp_path, beta=0.1)
    ours, theirs = policy.model.state_dict(), trainer.ref_model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert trainer.ref_model is not policy.model


def test_policy_task_rewards_and_config_are_checked_first(policy, tmp_path):
    def needs(completions, reference, **columns): ...

    with pytest.raises(ValueError, match="needs a column 'reference'"):
        trainer_of(policy, tmp_path, needs)
    with pytest.raises(ValueError, match="has 1 rows to learn from, TRL takes 2 at each step"):
        trainer_of(policy, tmp_path, task=few_rows(1))


@pytest.mark.slow
def test_rewards_of_two_processes_equal_those_of_one_though_a_group_lies_in_both(tmp_path):
    """24 completions in groups of 8: the second group is split between the processes."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
         "0", "--standalone", str(SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    ranks = json.loads((tmp_path / "seen.json").read_text())
    weights = set()
    for step in (0, 1):
        # what either process saw of either reward in this step: 12 completions each
        (accuracy, diversity), theirs = (rank[2 * step : 2 * step + 2] for rank in ranks)
        assert len(accuracy["values"]) == len(theirs[0]["values"]) == 12
        batch = {
            name: accuracy[name] + theirs[0][name] for name in ("prompts", "completions", "answer")
        }
        assert [len(set(batch["answer"][i : i + 8])) for i in (0, 8, 16)] == [1, 1, 1]
        batch["completion_ids"] = None
        assert accuracy["values"] + theirs[0]["values"] == accuracy_reward(**batch)
        state = SimpleNamespace(**accuracy["state"])
        reward = DiversityReward(8, LETTERS, weight_start=0.5, weight_end=0.1)
        alone = reward(**batch, trainer_state=state)
        assert diversity["values"] + theirs[1]["values"] == pytest.approx(alone)
        weights.add(state.global_step / state.max_steps)
    assert len(weights) == 2, "its weight falls with the steps of the run"


def test_the_launch_config_is_what_accelerate_reads():
    """It could not be run here: that takes several GPUs."""
    path = data_dir() / "accelerate" / "ddp.yaml"
    config = load_config_from_file(str(path))
    assert config.distributed_type == "MULTI_GPU" and config.mixed_precision == "bf16"


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_weights_are_refused_before_a_model_is_loaded(kind, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(ValueError, match=f"ACCELERATE_USE_{kind} is set.*ddp.yaml, or give"):
        trl_bridge.join()
