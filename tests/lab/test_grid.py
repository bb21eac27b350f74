"""Runs of a grid: each is made once, a killed one goes on, another config is another run."""

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from grpo_kit.lab import grid
from grpo_kit.lab.grid import (
    Arm,
    Experiment,
    command_of,
    format_seeds,
    parse_seeds,
    run_grid,
)
from grpo_kit.lab.records import read
from grpo_kit.profiles import PROFILES


def even(prompts, completions, completion_ids, **columns):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def odd(prompts, completions, completion_ids, **columns):
    return [1 - share for share in even(prompts, completions, completion_ids)]


@pytest.fixture
def profile(saved_policy):
    config = dataclasses.replace(
        PROFILES["smoke"].config,
        max_steps=2,
        max_completion_length=6,
        eval_prompts=2,
        save_steps=1,
    )
    return dataclasses.replace(PROFILES["smoke"], policy=str(saved_policy), config=config)


@pytest.fixture
def experiment():
    def measure(trained):
        both = (trained.policy, trained.base)
        assert not torch.equal(*(p.model.get_input_embeddings().weight for p in both))
        assert trained.run.history[-1]["step"] == 2 and trained.task.name == "word_problems"
        return {"beta": trained.config.beta}

    arms = {
        "even": Arm(lambda *given: [even]),
        "odd, held": Arm(lambda *given: [odd], {"beta": 0.1}),
    }
    return Experiment(
        "odd or even?", arms, measure, show=lambda t: [{"prompt": "p", "completion": "c"}]
    )


def timeless(record):
    return [{k: v for k, v in row.items() if k != "step_time"} for row in record.history]


def test_runs_are_made_once_and_start_from_the_same_weights(experiment, profile, tmp_path, capsys):
    where = {"results": tmp_path / "results", "work": tmp_path / "work"}
    first = run_grid("parity", experiment, profile, [0], **where)
    assert [(r.arm, r.seed, r.evaluation["beta"]) for r in first] == [
        ("even", 0, 0.0), ("odd, held", 0, 0.1)
    ]  # fmt: skip
    assert first[0].start["first weights"] == first[1].start["first weights"]
    assert first[0].start["rewards"] == ["even"] and first[0].config["max_steps"] == 2
    assert first[0].seconds > 0 and first[0].samples == [{"prompt": "p", "completion": "c"}]
    again = run_grid("parity", experiment, profile, [0, 1], **where)
    assert [r for r in again if r.seed == 0] == first and len(again) == 4
    said = capsys.readouterr().out
    assert "parity: 2 of 4 runs are finished" in said and "[1/2] parity, even, seed 1" in said
    assert len(list((tmp_path / "results" / "smoke" / "parity").rglob("*.json"))) == 4


def test_another_config_is_run_again_and_says_what_changed(experiment, profile, tmp_path, capsys):
    where = {"results": tmp_path / "results", "work": tmp_path / "work", "arms": ["even"]}
    (first,) = run_grid("parity", experiment, profile, [0], **where)
    warmer = dataclasses.replace(experiment, changes={"temperature": 1.5})
    (second,) = run_grid("parity", warmer, profile, [0], **where)
    assert "temperature 1.0 there, 1.5 here" in capsys.readouterr().out
    assert second.config_hash != first.config_hash and second.history != first.history
    path = second.path(tmp_path / "results")
    path.write_text(path.read_text()[:-30])  # cut short: made again
    (third,) = run_grid("parity", warmer, profile, [0], **where)
    assert "no whole result file" in capsys.readouterr().out
    assert timeless(third) == timeless(second)


def test_a_broken_run_goes_on_from_its_checkpoint(experiment, profile, tmp_path):
    """What was kept of the first attempt is its own; an unbroken run has the same numbers."""
    work = tmp_path / "work"
    (whole,) = run_grid(
        "parity", experiment, profile, [0], results=tmp_path / "a", work=work / "a", arms=["even"]
    )
    calls = []

    def breaks(*arguments, **columns):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return even(*arguments, **columns)

    breaks.__name__ = "even"
    broken = dataclasses.replace(experiment, arms={"even": Arm(lambda *given: [breaks])})
    where = {"results": tmp_path / "b", "work": work / "b"}
    with pytest.raises(KeyboardInterrupt):
        run_grid("parity", broken, profile, [0], **where)
    assert not list((tmp_path / "b").rglob("*.json"))
    (resumed,) = run_grid("parity", broken, profile, [0], **where)
    assert len(calls) == 3, "one step was lost, not two"

    assert timeless(resumed) == timeless(whole)


def test_two_arms_that_would_share_a_folder_are_named():
    arm = Arm(lambda *given: [even])
    with pytest.raises(ValueError, match="'truth 1 %' and 'truth, 1' would share the folder 'trut"):
        Experiment("?", {"truth 1 %": arm, "truth, 1": arm})


@pytest.mark.parametrize(
    ("given", "seeds"), [("0-4", [0, 1, 2, 3, 4]), ("3", [3]), ("0, 2,5-6", [0, 2, 5, 6])]
)
def test_seeds_are_numbers_and_ranges(given, seeds):
    assert parse_seeds(given) == seeds


@given(seeds=st.sets(st.integers(0, 30), min_size=1))
def test_seeds_are_written_as_they_are_read(seeds):
    text = format_seeds(seeds)
    assert parse_seeds(text) == sorted(seeds)
    assert text.count(",") == sum(seed + 1 not in seeds for seed in seeds) - 1, "the shortest way"


def test_the_command_that_makes_runs_names_them():
    assert command_of("flow", "tiny") == "grpo-kit run flow --profile tiny --seeds 0-4"
    assert command_of("meta", "paper", (7, 5, 6), ["truth 1 %"]) == (
        'grpo-kit run meta --profile paper --seeds 5-7 --arm "truth 1 %"'
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("0-4,3", "seeds overlap: 3 is given twice"),
        ("1,1", "seeds overlap: 1 is given twice"),
        ("five", "--seeds is 'five'; give numbers and ranges, such as 0-4"),
        ("4-", "--seeds is '4-'"),
        ("-1", "--seeds is '-1'"),
        ("²", "--seeds is '²'"),
        ("", "--seeds is ''"),
        ("4-0", "there are no seeds"),
    ],
)
def test_wrong_seeds_are_named(given, sentence):
    with pytest.raises(ValueError, match="seeds") as caught:
        parse_seeds(given)
    assert sentence in str(caught.value)


def test_wrong_arms_and_a_missing_budget_are_named(experiment, profile, tmp_path):
    def refused(match, *, seeds=(0,), of=experiment, **options):
        with pytest.raises(ValueError, match=match):
            run_grid("parity", of, profile, seeds, results=tmp_path, work=tmp_path, **options)

    refused("no arm 'prime': choose among even, odd, held", arms=["prime"])
    refused("arms overlap: 'even' is given twice", arms=["even", "even"])
    refused("there are no seeds", seeds=[])
    refused("seeds overlap", seeds=[0, 0])
    budget = dataclasses.replace(experiment, x="num_generated_tokens")
    refused("no such number for profile 'smoke'", of=budget)


STEPS = """
import json, sys, time
from pathlib import Path
arm, seed = (sys.argv[sys.argv.index(name) + 1] for name in ("--arm", "--seeds"))
print("steps of", arm)
if arm == "fails":
    sys.exit("error: it did not work")
time.sleep({seconds})
Path({out!r}, arm + seed).touch()
"""


def jobs_of(tmp_path, *arms):
    config = PROFILES["smoke"].config
    return [
        grid.Job(arm, seed, config, tmp_path / f"{arm}{seed}-work")
        for arm in arms
        for seed in (0, 1)
    ]


def test_processes_share_the_work_and_one_that_fails_does_not_stop_the_rest(tmp_path, capsys):
    command = [sys.executable, "-c", STEPS.format(seconds=0.2, out=str(tmp_path))]
    failed = grid._run_processes("x", jobs_of(tmp_path, "fails", "works"), 2, command)
    assert len(failed) == 2
    assert "fails, seed 0: error: it did not work (exit code 1, " in "".join(failed)
    assert (tmp_path / "works0").exists() and (tmp_path / "works1").exists()
    assert "steps of works" in (tmp_path / "works0-work" / "log.txt").read_text()
    assert "x: 4 of 4 runs" in capsys.readouterr().out


def test_no_more_processes_run_at_a_time_than_were_asked_for(tmp_path):
    """Each writes when it began and ended, in wall time."""
    code = (
        "import sys, time, pathlib\n"
        "arm, seed = (sys.argv[sys.argv.index(n) + 1] for n in ('--arm', '--seeds'))\n"
        "began = time.time(); time.sleep(0.4)\n"
        f"pathlib.Path({str(tmp_path)!r}, arm + seed).write_text(f'{{began}} {{time.time()}}')\n"
    )
    jobs = jobs_of(tmp_path, "a", "b")
    assert grid._run_processes("x", jobs, 1, [sys.executable, "-c", code]) == []
    times = [
        tuple(map(float, (tmp_path / f"{job.arm}{job.seed}").read_text().split())) for job in jobs
    ]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(times)))


def test_one_failing_run_does_not_stop_the_rest_here_either(experiment, profile, tmp_path):
    def breaks(*arguments, **columns):
        raise ValueError("no reward today")

    arms = {"breaks": Arm(lambda *given: [breaks]), "even": experiment.arms["even"]}
    broken = dataclasses.replace(experiment, arms=arms)
    where = {"results": tmp_path / "results", "work": tmp_path / "work"}
    with pytest.raises(RuntimeError, match="1 of 2 runs failed, the others are stored: breaks, se"):
        run_grid("parity", broken, profile, [0], **where)
    assert [path.parent.name for path in (tmp_path / "results").rglob("*.json")] == ["even"]


def test_a_run_that_another_process_is_making_is_left_to_it(experiment, profile, tmp_path):
    where = {"results": tmp_path / "results", "work": tmp_path / "work", "arms": ["even"]}
    folder = grid.work_of(tmp_path / "work", "parity", experiment, "even", 0, profile)
    folder.mkdir(parents=True)
    with FileLock(folder / "lock"), pytest.raises(RuntimeError, match="another process is making"):
        run_grid("parity", experiment, profile, [0], **where)
    (made,) = run_grid("parity", experiment, profile, [0], **where)
    assert made.arm == "even" and not (folder / "checkpoint.pt").exists()
    made.path(tmp_path / "results").unlink()
    (again,) = run_grid("parity", experiment, profile, [0], **where)
    seconds = [[row.get("step_time") for row in one.history] for one in (made, again)]
    assert seconds[0] != seconds[1], "deleted, it is trained again and not only written again"


def test_the_commits_of_a_run_that_was_taken_up_again_are_all_named(tmp_path):
    file = tmp_path / "commits.txt"
    assert grid._commits(file, "aaa") == "aaa" and grid._commits(file, "aaa") == "aaa"
    assert grid._commits(file, "bbb+") == "aaa, bbb+" and grid._commits(file, "") == "aaa, bbb+"


def test_how_far_a_run_is_can_be_read_from_its_history(tmp_path):
    config = dataclasses.replace(PROFILES["smoke"].config, max_steps=10)
    job = grid.Job("a", 0, config, tmp_path)
    assert job.done() == 0.0
    rows = [{"step": step, "num_generated_tokens": 100 * step} for step in range(5)]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert job.done() == 0.4
    limited = dataclasses.replace(config, max_generated_tokens=500, lr_scheduler_type="constant")
    assert dataclasses.replace(job, config=limited).done() == 0.8
    (tmp_path / "history.jsonl").write_text('{"step": 3, "num')
    assert job.done() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_ends_the_grid_ends_its_processes_and_the_same_command_goes_on(number, tmp_path):
    """The real command; the signal reaches the grid alone, as from a service or `kill`."""
    command = [
        sys.executable, "-m", "grpo_kit.cli", "run", "basic", "--profile", "smoke", "--seeds",
        "0-1", "--output", str(tmp_path / "results"), "--work", str(tmp_path / "work"),
        "--processes", "2",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # else it would be ignored where it is in these tests, as in a shell's background
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    began = time.monotonic()
    while not list(tmp_path.glob("work/**/history.jsonl")) and time.monotonic() - began < 200:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(number)
    process.wait(60)
    assert process.returncode != 0
    for lock in tmp_path.glob("work/**/lock"):  # held by a process for as long as it lives
        with FileLock(lock, timeout=10):
            pass
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 seeds, 3 steps of 16 answers, profile smoke" in done.stdout
    records = [read(path) for path in sorted((tmp_path / "results").rglob("seed-*.json"))]
    assert [record.seed for record in records] == [0, 1]
    assert all(record.history[-1]["step"] == 3 and len(record.samples) == 3 for record in records)
    assert all(record.machine["threads"] == 1 for record in records)
