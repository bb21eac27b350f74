"""Under TRL the same run: every field arrives or is refused, rewards and files are the same."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from two_processes import Letters

from grpo_kit import trl_bridge
from grpo_kit.config import GRPOConfig
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES
from grpo_kit.rewards import DiversityReward, accuracy_reward, format_reward
from grpo_kit.runs import HISTORY, RUN
from grpo_kit.tasks import Task
from grpo_kit.tasks.word_problems import word_problems

SMALL = GRPOConfig(
    max_steps=2,
    learning_rate=1e-3,
    num_generations=4,
    generation_batch_size=8,
    max_completion_length=8,
    eval_prompts=4,
    num_generations_eval=2,
    eval_steps=1,
    save_steps=1,
)
SCRIPT = Path(__file__).with_name("two_processes.py")


def small(**changes) -> GRPOConfig:
    return dataclasses.replace(SMALL, **changes)


# --- the config -----------------------------------------------------------------------------------


def test_every_field_is_mapped_or_refused():
    known = (*trl_bridge.SAME, *trl_bridge.REFUSED, *trl_bridge.OURS)
    assert sorted(known) == sorted(field.name for field in dataclasses.fields(GRPOConfig))


OTHER = {
    "learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 3, "weight_decay": 0.1,
    "adam_beta1": 0.8, "adam_beta2": 0.99, "max_grad_norm": 0.5, "num_generations": 2,
    "generation_batch_size": 16, "num_iterations": 2, "max_completion_length": 9,
    "temperature": 0.7, "loss_type": "cispo", "epsilon": 0.1, "epsilon_high": 5.0, "beta": 0.1,
    "use_bias_correction_kl": False, "importance_sampling_level": "sequence",
    "scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum",
    "mask_truncated_completions": True,
}  # fmt: skip


def test_what_is_called_alike_arrives(policy, tmp_path):
    config = small(**OTHER)
    args = trl_bridge.trl_config(config, policy, output_dir=str(tmp_path))
    for name in trl_bridge.SAME:
        assert getattr(args, name) == getattr(config, name), name
    assert set(OTHER) | {"top_p", "top_k"} == set(trl_bridge.SAME)
    assert args.max_steps == config.max_steps * 2, "TRL counts optimiser steps"
    assert args.logging_steps == args.save_steps == 2
    weighted = trl_bridge.trl_config(
        small(reward_weights=(1.0, 0.5), save_steps=0),
        policy,
        output_dir=str(tmp_path),
        run_name="a",
    )
    assert weighted.reward_weights == [1.0, 0.5] and weighted.run_name == "a"
    assert weighted.save_steps == 2, "at the end"
    assert not weighted.vllm_importance_sampling_correction
    static = trl_bridge.trl_config(
        small(sampling_backend="static"), policy, output_dir=str(tmp_path)
    )
    assert static.cache_implementation == "static" and args.cache_implementation is None
    corrected = trl_bridge.trl_config(
        small(importance_sampling_cap=2.0), policy, output_dir=str(tmp_path), use_vllm=True
    )
    assert corrected.vllm_importance_sampling_correction
    assert corrected.vllm_importance_sampling_mode == "token_truncate"
    assert corrected.vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dynamic_sampling_rounds": 2}, "dynamic_sampling_rounds is 2, which TRL's trainer does"),
        ({"importance_sampling_cap": 2.0}, "only where vLLM samples: add use_vllm=True"),
        ({"sampling_backend": "continuous"}, "TRL turns the weights themselves into 16 bits"),
        (
            {"max_generated_tokens": 100, "lr_scheduler_type": "constant"},
            "TRL counts steps only: give max_steps",
        ),
    ],
)
def test_what_trl_cannot_do_is_refused_in_a_sentence(policy, tmp_path, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        trl_bridge.trl_config(small(**changes), policy, output_dir=str(tmp_path))


@pytest.mark.parametrize("name", ["max_steps", "temperature", "logging_steps"])
def test_what_the_config_decides_is_not_overridden(policy, tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}: that is the config's to say"):
        trl_bridge.trl_config(SMALL, policy, output_dir=str(tmp_path), **{name: 3})


@given(processes=st.integers(1, 8), rows=st.integers(1, 32), passes=st.integers(1, 12))
def test_an_optimiser_step_has_as_many_completions_whoever_shares_them(processes, rows, passes):
    config = small(
        num_generations=2,
        generation_batch_size=2 * rows * passes,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
    )
    if (rows * passes) % processes:
        with pytest.raises(
            ValueError, match=f"{processes} processes cannot share the {rows * passes} "
        ):
            config.shared_by(processes)
        return
    device, accumulated = config.shared_by(processes)
    assert device * accumulated * processes == rows * passes
    assert device <= rows, "no more memory than one process needs"
    assert config.shared_by(1) == (rows, passes)


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(new_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    return trl_bridge.train(
        new_policy(), word_problems(), [accuracy_reward, format_reward],
        small(gradient_accumulation_steps=2, per_device_train_batch_size=2), output_dir=folder,
        seed=1, measure=lambda policy: {"meta/p_yes": 0.5},
    )  # fmt: skip


def test_history_and_run_file_have_the_form_of_the_kits(run):
    assert [row["step"] for row in run.history] == [0, 1, 2], "generation batches, not updates"
    lines = (run.output_dir / HISTORY).read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.history
    told = json.loads((run.output_dir / RUN).read_text())
    assert told["history"] == run.history and told["seed"] == 1 and told["start"] == run.start
    assert told["config"] == json.loads(json.dumps(dataclasses.asdict(run.config)))
    assert run.start["rewards"] == ["accuracy_reward", "format_reward"]
    assert run.start["batch_source"].startswith("TRL 1.")
    for row in run.history:
        assert {"eval/greedy", "eval/pass@1", "eval/pass@2", "meta/p_yes"} <= set(row)
        assert all(isinstance(value, (int, float)) for value in row.values())
    assert {"reward", "reward_std", "entropy", "grad_norm", "completions/mean_length", "step_time",
            "rewards/format_reward/mean"} <= set(run.history[1])  # fmt: skip
    lengths = [round(8 * row["completions/mean_length"]) for row in run.history[1:]]
    assert [row["num_generated_tokens"] for row in run.history] == [0, lengths[0], sum(lengths)]


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if "time" not in k} for row in rows]


def few_rows(n: int = 3) -> Task:
    task = word_problems()
    return Task(task.name, task.train.select(range(n)), task.test)


def trained(policy, folder, resume=False, breaks=0, **changes):
    """Four steps, an epoch each: of three rows a step takes two."""
    asked = []

    def noted(prompts, completions, **columns):
        asked.append([prompt[-1]["content"] for prompt in prompts])
        if len(asked) == breaks:
            raise KeyboardInterrupt
        return [float(len(str(text)) % 5) for text in completions]

    run = trl_bridge.train(
        policy, few_rows(), [noted], small(max_steps=4, **changes), output_dir=folder, seed=1,
        resume=resume,
    )  # fmt: skip
    return run, asked


def test_a_killed_and_resumed_run_equals_an_unbroken_one_in_prompts_too(new_policy, tmp_path):
    """From the last whole checkpoint; one that was left half written is passed over."""
    whole, asked = trained(new_policy(), tmp_path / "whole")
    assert len({tuple(batch) for batch in asked}) > 1, "epochs in orders of their own"
    folder = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        trained(new_policy(), folder, breaks=3)
    assert trl_bridge.last_checkpoint(folder).name == "checkpoint-2"
    half = folder / "checkpoint-3"
    half.mkdir()
    (half / "trainer_state.json").write_text('{"global_st')
    policy = new_policy()
    resumed, asked_again = trained(policy, folder, resume=True)
    assert asked_again == asked[2:]
    assert without_times(resumed.history) == without_times(whole.history)
    lines = (folder / HISTORY).read_text().splitlines()
    assert [json.loads(line) for line in lines] == resumed.history

    again = new_policy()
    finished, nothing = trained(again, folder, resume=True)
    assert nothing == [] and finished.history == resumed.history
    ours, theirs = again.model.state_dict(), policy.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_run_is_not_resumed_and_a_new_one_begins_with_an_empty_folder(new_policy, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(new_policy(), tmp_path, breaks=4)
    assert trl_bridge.last_checkpoint(tmp_path).name == "checkpoint-3"
    with pytest.raises(ValueError, match="another configuration .*learning_rate 0.001 there"):
        trained(new_policy(), tmp_path, resume=True, learning_rate=0.002)
    history = tmp_path / HISTORY
    for name, message in (
        (HISTORY, "holds a checkpoint of step 3 and the history of another run"),
        (trl_bridge.STARTED, "checkpoint-3, but not the files of its run"),
    ):
        kept = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=message):
            trained(new_policy(), tmp_path, resume=True)
        (tmp_path / name).write_text(kept)
    with pytest.raises(KeyboardInterrupt):
        trained(new_policy(), tmp_path, breaks=1)
    assert trl_bridge.last_checkpoint(tmp_path) is None
    assert [json.loads(line)["step"] for line in history.read_text().splitlines()] == [0]


def test_a_loss_that_is_not_finite_ends_the_run_with_a_sentence(policy, tmp_path):
    trainer = trl_bridge.grpo_trainer(
        policy, word_problems(), [format_reward], small(), output_dir=str(tmp_path)
    )
    whole = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: whole(*a, **k) * float("nan")
    with pytest.raises(
        RuntimeError, match="not finite at step 1: lower learning_rate; no checkpoint"
    ):
        trainer.train()


@pytest.mark.parametrize(
    ("values", "error", "sentence"),
    [
        (lambda n: [float("inf")] * n, ValueError, "the reward odd returned inf"),
        (lambda n: [0.0] * (n - 1), ValueError, "the reward odd returned 7 values for 8 comp"),
        (lambda n: ["good"] * n, TypeError, "the reward odd returned 'good'"),
    ],
)
def test_rewards_are_held_to_the_protocol(policy, tmp_path, values, error, sentence):
    def odd(completions, **columns):
        return values(len(completions))

    with pytest.raises(error, match=sentence):
        trl_bridge.train(policy, word_problems(), [odd], SMALL, output_dir=tmp_path, seed=0)


def test_a_coroutine_may_be_a_reward(policy, tmp_path):
    async def slow(completions, **columns):
        return [0.5] * len(completions)

    run = trl_bridge.train(
        policy, word_problems(), [slow], small(max_steps=1), output_dir=tmp_path, seed=0
    )
    assert run.history[-1]["rewards/slow/mean"] == 0.5


def test_fewer_rows_than_a_step_takes_are_told(policy, tmp_path):
    with pytest.raises(ValueError, match="has 1 rows to learn from, and TRL takes 2 different"):
        trl_bridge.grpo_trainer(
            policy, few_rows(1), [format_reward], SMALL, output_dir=str(tmp_path)
        )


def test_nothing_is_dropped_out(policy, tmp_path):
    """The kit trains without dropout, since with it the policy is another at every pass."""
    attention = policy.model.model.layers[0].self_attn
    attention.attention_dropout = 0.5
    trl_bridge.grpo_trainer(
        policy, word_problems(), [format_reward], SMALL, output_dir=str(tmp_path)
    )
    assert attention.attention_dropout == 0.0


def test_what_one_reward_cannot_score_is_out_of_its_group(policy, tmp_path):
    """TRL alone counts a None beside other rewards as 0."""
    tables = []

    def half(completions, **columns):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    def watched(completions, **columns):
        return [None] * len(completions)

    trainer = trl_bridge.grpo_trainer(
        policy, word_problems(), [format_reward, half, watched],
        small(max_steps=1, eval_prompts=0, reward_weights=(1, 1, 0)),
        output_dir=str(tmp_path), save_strategy="no",
    )  # fmt: skip
    plain = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: tables.append(plain(*given)) or tables[-1]
    trainer.train()
    missing = tables[0].isnan()
    assert missing[1::2].all() and not missing[::2, :2].any(), (
        "a reward of weight 0 is only watched"
    )


def test_a_run_that_nothing_can_be_scored_of_stops_with_a_sentence(policy, tmp_path):
    def unable(completions, **columns):
        return [None] * len(completions)

    with pytest.raises(RuntimeError, match=r"no completion could be scored for 2 .* what unable"):
        trl_bridge.train(
            policy, word_problems(), [unable], small(max_steps=5, max_unscored_steps=2),
            output_dir=tmp_path, seed=0,
        )  # fmt: skip


def test_the_reference_is_the_policy_as_it_is_now(policy, tmp_path):
    """TRL loads one by name, which is what the policy once was."""
    with torch.no_grad():
        policy.model.get_input_embeddings().weight += 0.1
    trainer = trl_bridge.grpo_trainer(
        policy, word_problems(), [format_reward], small(beta=0.1), output_dir=str(tmp_path)
    )
    ours, theirs = policy.model.state_dict(), trainer.ref_model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (tmp_path / "reference").exists()


def test_policy_task_rewards_and_config_are_checked_first(policy, tmp_path):
    with pytest.raises(ValueError, match="there are no rewards"):
        trl_bridge.grpo_trainer(policy, word_problems(), [], SMALL, output_dir=str(tmp_path))

    def needs(completions, reference, **columns): ...

    with pytest.raises(ValueError, match="needs a column 'reference'"):
        trl_bridge.grpo_trainer(policy, word_problems(), [needs], SMALL, output_dir=str(tmp_path))


def test_a_grid_makes_runs_by_trl_beside_the_kits(saved_policy, tmp_path):
    """They are records of the same form, and their checkpoints do not stay."""
    from grpo_kit.lab.grid import Arm, Experiment, run_grid

    profile = dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy), config=SMALL)
    rewards = lambda *given: [format_reward]  # noqa: E731
    arms = {
        "kit": Arm(rewards),
        "TRL": Arm(rewards, options={"engine": "TRL"}, train=trl_bridge.train),
    }
    experiment = Experiment("?", arms)
    where = {"results": tmp_path / "results", "work": tmp_path / "work"}
    kit, by_trl = run_grid("both", experiment, profile, [0], **where)
    assert set(kit.evaluation) <= set(by_trl.evaluation)
    assert by_trl.start["batch_source"].startswith("TRL") and by_trl.seconds > 0
    assert not list((tmp_path / "work").rglob("checkpoint*"))


# --- several processes ----------------------------------------------------------------------------


def launch(*arguments) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
         "0", "--standalone", str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_rewards_of_two_processes_equal_those_of_one_though_a_group_lies_in_both(tmp_path):
    """24 completions in groups of 8: the second group is split between the processes."""
    process = launch("rewards", tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]
    ranks = json.loads((tmp_path / "seen.json").read_text())
    assert [row["rank"] for row in ranks] == [0, 1]
    steps = [[rank["seen"][i : i + 2] for i in (0, 2)] for rank in ranks]
    weights = set()
    for first, second in zip(*steps, strict=True):
        for mine, theirs in zip(first, second, strict=True):
            assert len(mine["values"]) == len(theirs["values"]) == 12
        names = ("prompts", "completions", "answer")
        batch = {name: first[0][name] + second[0][name] for name in names}
        batch["completion_ids"] = None
        assert [len(set(batch["answer"][i : i + 8])) for i in (0, 8, 16)] == [1, 1, 1]
        assert first[0]["values"] + second[0]["values"] == accuracy_reward(**batch)
        done, of = first[0]["steps"]
        state = SimpleNamespace(global_step=done, max_steps=of)
        reward = DiversityReward(8, Letters(), weight_start=0.5, weight_end=0.1)
        alone = reward(**batch, trainer_state=state)
        weights.add(done / of)
        assert first[1]["values"] + second[1]["values"] == pytest.approx(alone)
    assert len(weights) == 2, "its weight falls with the steps of the run"


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_where_one_process_is_killed_the_other_says_so_and_the_run_can_be_resumed(killed, tmp_path):
    process = launch("train", tmp_path, 8)
    checkpoint = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    waited = time.monotonic()
    while not checkpoint.exists() and time.monotonic() - waited < 240:
        assert process.poll() is None, process.communicate()[0][-2000:]
        time.sleep(0.2)
    os.kill(int((tmp_path / f"pid-{killed}").read_text()), signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    told = (tmp_path / f"said-{1 - killed}").read_text()
    assert "another process of this run has ended" in told and "resume, from checkpoint-" in told
    last = trl_bridge.last_checkpoint(tmp_path / "run")
    step = int(last.name.split("-")[1])
    assert f"from {last.name} " in told and step >= 2
    if killed == 0:
        return  # once is enough
    process = launch("train", tmp_path, 8, "resume")
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / HISTORY).read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(9))


# --- shipped launch configs -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero3", "DEEPSPEED")]
)
def test_the_launch_configs_are_what_accelerate_reads(name, kind):
    """They could not be run here: that takes several GPUs."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    read = load_config_from_file(str(data_dir() / "accelerate" / f"{name}.yaml"))
    assert read.distributed_type == kind and read.mixed_precision == "bf16"
    written = yaml.safe_load((data_dir() / "accelerate" / f"{name}.yaml").read_text())
    known = {action.dest for action in launch_command_parser()._actions}
    for part in ("fsdp_config", "deepspeed_config"):
        assert set(written.get(part, {})) <= known, "a key that accelerate would pass over"
    if name == "fsdp2":
        assert read.fsdp_config["fsdp_version"] == 2
    if name == "zero3":
        assert read.deepspeed_config["zero_stage"] == 3


def test_sharded_runs_are_known_by_what_accelerate_sets(monkeypatch):
    assert not trl_bridge.is_sharded()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert trl_bridge.is_sharded()


def test_vllm_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(trl_bridge, "is_vllm_available", lambda: False)
    with pytest.raises(
        RuntimeError, match=r"needs vLLM, which is not installed: pip install .trl\[vllm\]"
    ):
        trl_bridge.vllm_options("colocate")
    monkeypatch.setattr(trl_bridge, "is_vllm_available", lambda: True)
    assert trl_bridge.vllm_options("server") == {"use_vllm": True, "vllm_mode": "server"}
    beside = trl_bridge.vllm_options("colocate", 0.2)
    assert beside["vllm_gpu_memory_utilization"] == 0.2
    with pytest.raises(ValueError, match="vLLM's mode is 'else'; choose colocate or server"):
        trl_bridge.vllm_options("else")
    with pytest.raises(ValueError, match="vLLM's share of a GPU is 20; give one between 0 and 1"):
        trl_bridge.vllm_options("colocate", 20)


def test_vllm_of_another_version_is_told(monkeypatch):
    """By TRL, which knows its versions."""
    from trl import import_utils

    monkeypatch.setattr(import_utils, "_is_package_available", lambda *a, **k: (True, "0.1.0"))
    with pytest.warns(UserWarning, match=r"supports vLLM versions from .* You have version 0.1.0"):
        trl_bridge.vllm_options("colocate")
