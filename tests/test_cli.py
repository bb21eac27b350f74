"""The command line: quick to answer, plain about mistakes."""

import json
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from toy import logged
from typer.testing import CliRunner

from grpo_kit import training
from grpo_kit.cli import app
from grpo_kit.course import runner
from grpo_kit.lab import bands, report
from grpo_kit.tiny import pretrain as warm_up


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_command_explains_itself():
    commands = [one.name or one.callback.__name__ for one in app.registered_commands]
    text = invoke("--help").stdout
    for command in (name.replace("_", "-") for name in commands):
        assert command in text and invoke(command, "--help").exit_code == 0


def test_an_interrupted_command_says_what_is_kept_and_how_to_go_on(monkeypatch):
    monkeypatch.setattr("grpo_kit.lab.planner.plan", Mock(side_effect=KeyboardInterrupt))
    result = invoke("plan", "--profile", "tiny")
    assert result.exit_code == 130 and "`train` goes on with --resume" in result.stderr


def test_command_line_tasks_and_rewards_import_nothing_heavy(run_python):
    heavy = "torch transformers trl datasets papermill matplotlib pandas numpy"
    code = "import grpo_kit.cli, grpo_kit.tasks.published, grpo_kit.rewards, sys"
    assert not {*heavy.split()} & {*run_python(f"{code}; print(*sys.modules)").split()}


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("train --profile huge", "'huge' is not one of 'smoke', 'tiny', 'smol', 'colab', 'paper'"),
        ("train --policy nowhere", "no folder 'nowhere'; a name on the Hub is OWNER/NAME"),
        ("train --policy a_run/nowhere", "there is no folder 'a_run/nowhere'"),
        ("train --set beta", "--set is 'beta': give NAME=VALUE, such as learning_rate=1e-5"),
        ("train --set beta=much", "beta is 'much'; it should be a valid number"),
        ("train --set beta=[1", "--set is 'beta=[1': "),
        ("train --test a_file", "--test are rows beside those of --data"),
        ("compare a_file.py", "a_file.py has no `arms`: add a dict such as"),
        ("train --engine trl --replay", "--replay is for the kit's trainer"),
        ("train --data a_file", "a_file is of an unknown kind: give .jsonl"),
        ("train --profile smoke --output a_file/out", "cannot write to the output folder"),
        ("train --output a_run", "go on with it (--resume), delete it, or"),
        ("run sing", "there is no experiment 'sing': choose among basic, rare, variants"),
        ("run judge --arm none", "experiment 'judge' has no arm 'none': choose among"),
        ("run judge --claims --arm plain", "leave out --arm, or --claims"),
        ("run judge --claims --profile smoke", "no claim is tested by runs of"),
        ("run verification --profile colab", "profile 'colab' sets no max_generated_tokens"),
        ("evaluate --task mmlu", "unknown task 'mmlu': choose one of word_problems, svamp, gsm8k"),
        ("evaluate --output .", ". is a folder; name a file for the numbers"),
        ("reproduce", "no notebooks in"),
        ("train --seed 99999999999999999999", "'--seed'"),
    ],
)
def test_a_mistake_ends_in_one_sentence_and_exit_code_2(command, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRPO_KIT_DEBUG", raising=False)
    (tmp_path / "a_file").touch()
    (tmp_path / "a_file.py").touch()
    saved = tmp_path / "a_run" / "checkpoint.pt"
    saved.parent.mkdir(), saved.write_bytes(b"of hours")
    done = invoke(*command.split())
    assert done.exit_code == 2 and [*saved.parent.iterdir()] == [saved]
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, "a traceback was printed"
    assert done.stdout == ""


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 54 MiB. 50 MiB is free",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        "Expected mha_graph.execute(handle, workspace).is_good() to be true",
    ],
)
def test_a_full_gpu_ends_in_one_sentence(said, monkeypatch, tmp_path):
    """torch's own words for it fill a screen."""
    error = RuntimeError(f"{said}. Process 1 has 11 GiB in use. See documentation")
    monkeypatch.setattr("grpo_kit.cli.make_output_dir", Mock(side_effect=error))
    done = invoke("evaluate", "--output", tmp_path / "x" / "e.json")
    assert done.exit_code == 2
    assert f"{said}: run fewer at once" in done.stderr and "Process" not in done.stderr


def test_the_kits_trainer_in_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = invoke("train", "--output", tmp_path / "out")
    assert done.exit_code == 2 and "add --engine trl" in done.stderr


IDEA = """
def short(completion_ids, **columns):
    return [-0.01 * len(ids) for ids in completion_ids]
"""


def test_rewards_settings_and_a_model_of_ones_own_are_trained_with(
    tmp_path, monkeypatch, saved_policy
):
    trained = Mock()
    monkeypatch.setattr(training, "train", trained)
    (tmp_path / "my_idea.py").write_text(IDEA)
    options = ("--reward", "accuracy", "--reward", f"{tmp_path / 'my_idea.py'}:short")
    options += ("--policy", saved_policy, "--steps", 7)
    options += ("--set", "learning_rate=1e-5", "--set", "loss_type=dr_grpo")
    done = invoke("train", "--profile", "smoke", "--output", tmp_path / "out", *options)
    assert done.exit_code == 0, done.output[-1000:]
    policy, _, rewards, config = trained.call_args.args
    assert [reward.__name__ for reward in rewards] == ["accuracy_reward", "short"]
    assert (config.learning_rate, config.loss_type, config.max_steps) == (1e-5, "dr_grpo", 7)
    assert policy.model.config._name_or_path == str(saved_policy)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["kit", "trl"])
def test_a_policy_is_trained_by_either_engine(engine, tmp_path):
    command = f"train --engine {engine} --profile smoke --steps 2"
    done = invoke(*command.split(), "--output", tmp_path)
    assert done.exit_code == 0, done.output[-1000:]
    last = logged(tmp_path)[-1]
    assert last["step"] == 2 and "rewards/format_reward/mean" in last
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_the_module_is_the_command_and_debug_shows_the_traceback():
    command = [sys.executable, "-m", "grpo_kit", "evaluate", "--task", "mmlu"]
    options = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, env={**os.environ, "GRPO_KIT_DEBUG": "1"}, **options)
    assert "unknown task 'mmlu'" in done.stderr and "Traceback" in done.stderr
    assert done.returncode != 2


@pytest.fixture
def reproduce(tmp_path, monkeypatch):
    """Call `reproduce` in a folder of two notebooks that take no time; output and executions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    for name in ("00_a.ipynb", "01_b.ipynb"):
        (tmp_path / "notebooks" / name).touch()

    def call(*options, error="", rows=(), problems=()):
        def results(paths, *arguments, **options):
            return [runner.Result(path.stem, 2.0, error) for path in paths]

        execute = Mock(side_effect=results)
        monkeypatch.setattr(runner, "execute", execute)
        monkeypatch.setattr(bands, "compare", lambda *given: (list(rows), list(problems)))
        monkeypatch.setattr(report, "write_report", Mock(return_value="report.md"))
        return invoke("reproduce", "--output", "out", *options), execute.call_args

    return call


@pytest.mark.parametrize(
    ("error", "here", "problems", "code"),
    [
        ("", 0.9, [], 0),
        ("", 0.7, [], 1),
        ("", None, [], 1),
        ("cell [3] broke", 0.9, [], 1),
        ("", 0.9, ["a file was edited"], 1),
    ],
)
def test_reproduce_fails_with_a_notebook_or_a_number(error, here, problems, code, reproduce):
    """The number is outside its band, missing, or could not be compared."""
    row = bands.Row("01_b", "pass@1", reported=0.9, low=0.8, high=1.0, here=here)
    given = {"error": error, "rows": [row], "problems": problems}
    done, executed = reproduce("01", "--profile", "smoke", **given)
    assert done.exit_code == code, done.output
    assert [path.name for path in executed.args[0]] == ["01_b.ipynb"]
    reported = report.write_report.call_args.kwargs["problems"]
    failed = [f"notebook 01_b failed: {error}"] * bool(error)
    assert reported == problems + failed + [f"outside: 01_b, {row}"] * (here != 0.9)
    assert "report.md" in done.output and ("outside: 01_b" in done.output) == (here != 0.9)


def test_reproduce_with_a_seed_injects_it_and_stores_what_was_asked_for(reproduce, monkeypatch):
    stored = Mock(return_value=["a.json"])
    monkeypatch.setattr(bands, "store", stored)
    done, executed = reproduce("--seed", 3, "--store")
    assert done.exit_code == 0, done.output
    assert executed.args[2] == "tiny" and executed.kwargs["parameters"] == {"SEED": 3}
    assert stored.call_args.args[1] == {"00_a": 2.0, "01_b": 2.0} and "stored a.json" in done.output


def test_pretrain_writes_a_base_and_its_card(tmp_path, monkeypatch):
    make = warm_up.make_tokenizer
    monkeypatch.setattr(warm_up, "make_tokenizer", lambda seed: make(seed, n_conversations=300))
    monkeypatch.setattr(warm_up, "BATCH", 2)
    folder = tmp_path / "base"
    done = invoke("pretrain", "--steps", 2, "--output", folder)
    assert done.exit_code == 0, done.output
    card = json.loads((folder / "card.json").read_text())
    assert card["steps"] == 2 and card["loss"] > 0
    assert (folder / "model.safetensors").is_file()


def test_plan_says_whether_a_run_fits():
    fits = invoke("plan", "--profile", "colab", "--gpu", "T4")
    assert fits.exit_code == 0 and "It fits" in fits.output
    small = invoke("plan", "--profile", "paper", "--gpu", "T4")
    assert small.exit_code == 1 and "It does not fit" in small.output
    here = invoke("plan", "--profile", "tiny")
    assert here.exit_code == 0 and "GiB of main memory: this profile runs on a CPU" in here.output
