"""A folder of a run: written as it goes, taken up after a kill, never mixed with another."""

import json
from pathlib import Path

import pytest
import torch
from toy import TASK, configure, even_ids, files_up_to

from grpo_kit.models import load_policy
from grpo_kit.runs import CHECKPOINT, HISTORY, RunFiles
from grpo_kit.training import train

CPU = torch.device("cpu")


def files(folder, seed=0, **changes) -> RunFiles:
    return RunFiles(folder, configure(**changes), seed, {"rewards": ["even_ids"]})


def row(step: int) -> dict:
    return {"step": step, "num_generated_tokens": 10 * step, "reward": step / 4}


def killed_after(folder, step: int) -> RunFiles:
    """A run of `step` steps with a checkpoint at the second."""
    run = files(folder)
    run.begin()
    for done in range(1, step + 1):
        run.log(row(done))
        if done == 2:
            run.save_checkpoint(2, weights={"w": torch.tensor([1.5])})
    return run


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("last_line", ["", '{"step": 4, "rew', "\0\0\0"])
def test_a_run_is_taken_up_after_its_checkpoint_and_loses_half_a_line(tmp_path, last_line):
    killed_after(tmp_path, 3)
    with open(tmp_path / HISTORY, "a") as file:
        file.write(last_line)
    (tmp_path / f".{CHECKPOINT}.1.partial").write_text("half")
    run = files(tmp_path)
    state = run.resume(CPU)
    assert state["step"] == 2 and state["weights"]["w"].item() == 1.5
    assert run.run.history == [row(1), row(2)] and run.tokens == 20
    run.log(row(3))
    assert steps_in(tmp_path / HISTORY) == [1, 2, 3]
    assert not list(tmp_path.glob(".*partial"))
    assert "resume from the checkpoint of step 2" in run.remedy


@pytest.mark.parametrize("history", [None, "", '{"step": 1}\n', '{"step": 1}\n{"ste'])
def test_a_checkpoint_brings_its_own_history_back(tmp_path, history):
    """Beside that of a run that was started in the same folder and killed, say."""
    killed_after(tmp_path, 3)
    (tmp_path / HISTORY).unlink()
    if history is not None:
        (tmp_path / HISTORY).write_text(history)
    files(tmp_path).resume(CPU)
    assert steps_in(tmp_path / HISTORY) == [1, 2]


def test_a_full_disk_leaves_the_last_checkpoint_good_and_says_so(tmp_path):
    """Torch hides the reason."""
    run = killed_after(tmp_path, 3)
    with files_up_to(2_000), pytest.raises(RuntimeError) as raised:
        run.save_checkpoint(3, weights={"w": torch.ones(10_000)})
    said = str(raised.value)
    assert said.startswith(f"cannot write the checkpoint of step 3 to {tmp_path} (File too large)")
    assert "nothing that was saved is lost; make room, then resume from the check" in said
    assert not list(tmp_path.glob(".*partial"))
    assert files(tmp_path).resume(CPU)["step"] == 2


def damaged(path, how) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[{"flipped": middle, "cut": 0, "at its end": -30}[how]] ^= 1
    path.write_bytes(content[:middle] if how == "cut" else content)


@pytest.mark.parametrize("how", ["flipped", "cut", "at its end"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(tmp_path, how):
    run = killed_after(tmp_path, 3)
    run.save_checkpoint(3, weights={"w": torch.arange(1000.0)})
    assert [path.name for path in tmp_path.glob("*.pt")] == [CHECKPOINT], "one checkpoint"
    damaged(tmp_path / CHECKPOINT, how)
    history = (tmp_path / HISTORY).read_text()
    with pytest.raises(RuntimeError, match=f"{CHECKPOINT} is damaged.*delete it to start again"):
        files(tmp_path).resume(CPU)
    assert (tmp_path / HISTORY).read_text() == history
    (tmp_path / CHECKPOINT).unlink()
    assert files(tmp_path).resume(CPU) is None


def test_a_folder_has_one_writer_at_a_time(saved_policy, tmp_path):
    folder = tmp_path / "run"

    def second(prompts, completions, **columns):
        with pytest.raises(RuntimeError, match="another process writes a run to"):
            train(load_policy(saved_policy), TASK, [even_ids], **options)
        return even_ids(prompts, completions, **columns)

    options = {"config": configure(max_steps=1), "output_dir": folder, "seed": 0}
    run = train(load_policy(saved_policy), TASK, [second], **options)
    assert len(run.history) == 2 and steps_in(folder / HISTORY) == [0, 1]
    train(load_policy(saved_policy), TASK, [even_ids], **options)  # it is free again
