"""The command line: quick to answer, plain about mistakes."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from grpo_kit.cli import app

COMMANDS = (
    "reproduce", "notebooks", "train", "run", "report", "results", "skill-runs", "pretrain",
    "bench",
)  # fmt: skip


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter, since this one has long imported everything."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment},
    )


def test_help_names_every_command():
    done = run_python("-m", "grpo_kit.cli", "--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command in done.stdout


def test_the_command_line_imports_nothing_heavy():
    heavy = ("torch", "transformers", "datasets", "papermill", "matplotlib", "pandas", "numpy")
    code = f"import grpo_kit.cli, sys; print([m for m in {heavy} if m in sys.modules])"
    assert run_python("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--profile", "huge"], "unknown profile 'huge': choose one of"),
        (["train", "--profile", "smoke", "--steps", "0"], "--steps is 0"),
        (["reproduce", "--notebooks", "nowhere"], "there are no notebooks in nowhere"),
        (["pretrain", "--output", "a_file/out"], "cannot write to the output folder a_file/out"),
        (["pretrain", "--problems", "1"], "--problems is 1"),
        (["pretrain", "--processes", "0"], "processes is 0"),
        (["bench", "--policy", "nowhere"], "--policy is nowhere, which is no folder"),
        (["skill-runs", "--skill", "sing"], "there is no skill 'sing'"),
        (["run", "sing"], "there is no experiment 'sing': choose among basic, variants, diversity"),
        (["run", "judge", "--profile", "huge"], "unknown profile 'huge': choose one of"),
        (["run", "judge", "--seeds", "0-4,3"], "seeds overlap: 3 is given twice"),
        (["run", "judge", "--arm", "none"], "experiment 'judge' has no arm 'none': choose among"),
        (["run", "judge", "--processes", "0"], "--processes is 0"),
        (["run", "judge", "--output", "a_file/out"], "cannot write to the output folder a_file/out"),
        (["run", "verification", "--profile", "colab"], "no such number for profile 'colab'"),
        (["report", "--claims", "nowhere"], "nowhere cannot be read as YAML"),
        (["train", "--policy", "nowhere"], "--policy is nowhere, which is no folder"),
    ],
)
def test_a_mistake_ends_in_one_sentence_and_exit_code_2(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRPO_KIT_DEBUG", raising=False)
    (tmp_path / "a_file").touch()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, "a traceback was printed"
    assert done.stdout == ""


def test_debug_shows_the_traceback(tmp_path):
    (tmp_path / "a_file").touch()
    arguments = ("-m", "grpo_kit.cli", "pretrain", "--output", str(tmp_path / "a_file"))
    assert "Traceback" in run_python(*arguments, GRPO_KIT_DEBUG="1").stderr
    plain = run_python(*arguments, GRPO_KIT_DEBUG="0")
    assert "Traceback" not in plain.stderr and plain.returncode == 2


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
def test_reproduce_passes_its_options_on_and_fails_when_a_notebook_failed(
    status, code, tmp_path, monkeypatch
):
    from grpo_kit import notebooks

    seen = []

    def execute(paths, output, profile):
        seen.append(([path.name for path in paths], str(output), profile))
        return [notebooks.Result(path.stem, status) for path in paths]

    monkeypatch.setattr(notebooks, "execute", execute)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    for name in ("00_a.ipynb", "01_b.ipynb"):
        (tmp_path / "notebooks" / name).touch()
    options = ["reproduce", "01", "--profile", "smoke", "--output", "out"]
    assert CliRunner().invoke(app, options).exit_code == code
    assert seen == [(["01_b.ipynb"], "out", "smoke")]


def test_pretrain_writes_a_base_and_its_card(tmp_path, monkeypatch):
    from grpo_kit.tiny import pretrain as warm_up

    make = warm_up.make_tokenizer
    monkeypatch.setattr(warm_up, "make_tokenizer", lambda seed: make(seed, n_conversations=300))
    monkeypatch.setattr(warm_up, "BATCH", 2)
    folder = tmp_path / "base"
    arguments = ["pretrain", "--steps", "2", "--processes", "1", "--problems", "2"]
    done = CliRunner().invoke(app, [*arguments, "--output", str(folder)])
    assert done.exit_code == 0, done.output
    assert "| solve | pass@1 |" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").is_file() and not (folder / "warm-up.pt").exists()
