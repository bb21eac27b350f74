"""Runs of a grid: each is made once, a killed one goes on, another config is another run."""

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import DEFAULT, Mock

import cloudpickle
import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from toy import even_ids, without_times

from grpo_kit.lab import grid
from grpo_kit.lab.grid import Arm, Experiment, Job, format_seeds, parse_seeds, run_grid
from grpo_kit.lab.records import read
from grpo_kit.paths import writing
from grpo_kit.profiles import PROFILES


def odd(prompts, completions, completion_ids, **columns):
    return [1 - share for share in even_ids(prompts, completions, completion_ids)]


def raising(*arguments, **columns):
    raise ValueError("no reward today")


def measure(trained):
    both = (trained.policy, trained.base)
    assert not torch.equal(*(p.model.get_input_embeddings().weight for p in both))
    assert trained.run.history[-1]["step"] == 2 and trained.task.name == "word_problems"
    return {"beta": trained.config.beta}


PARITY = Experiment(
    "odd or even?",
    {"even": Arm(lambda *given: [even_ids]), "odd, held": Arm(lambda *given: [odd], {"beta": 0.1})},
    measure,
    show=lambda trained: [{"prompt": "p", "completion": "c"}],
)


@pytest.fixture
def made(profile, tmp_path):
    """Make runs of an experiment with the folders of this test."""

    def make(experiment=PARITY, seeds=(0,), arms=("even",), **options):
        options = {"results": tmp_path / "results", "work": tmp_path / "work", **options}
        return run_grid("parity", experiment, profile, seeds, arms=arms, **options)

    return make


def test_runs_are_made_once_and_start_from_the_same_weights(made, tmp_path, capsys):
    first = made(arms=None)
    assert [(r.arm, r.evaluation["beta"]) for r in first] == [("even", 0.0), ("odd, held", 0.1)]
    assert first[0].start["first weights"] == first[1].start["first weights"]
    assert first[0].start["rewards"] == ["even_ids"] and first[0].config["max_steps"] == 2
    assert first[0].seconds > 0 and first[0].samples == [{"prompt": "p", "completion": "c"}]
    again = made(seeds=[0, 1])
    assert again[0] == first[0] and [r.seed for r in again] == [0, 1]
    output = capsys.readouterr().out
    assert "parity: 1 of 2 runs are finished" in output and "[1/1] even, seed 1: pass@1 " in output


def test_another_config_is_run_again_and_says_what_changed(made, tmp_path, capsys):
    (first,) = made()
    warmer = dataclasses.replace(PARITY, changes={"temperature": 1.5})
    (second,) = made(warmer)
    assert "temperature 1.0 there, 1.5 here" in capsys.readouterr().out
    assert second.config != first.config and second.history != first.history
    path = second.path(tmp_path / "results")
    path.write_text(path.read_text()[:-30])  # cut short: made again
    (third,) = made(warmer)
    assert "no whole result file" in capsys.readouterr().out
    assert without_times(third.history) == without_times(second.history)


def test_a_broken_run_goes_on_from_its_checkpoint(made, tmp_path):
    """What was kept of the first attempt is its own; an unbroken run has the same numbers."""
    (whole,) = made(results=tmp_path / "whole", work=tmp_path / "whole-work")
    breaks = Mock(wraps=even_ids, side_effect=[DEFAULT, KeyboardInterrupt, DEFAULT])
    breaks.__name__ = "even_ids"
    broken = dataclasses.replace(PARITY, arms={"even": Arm(lambda *given: [breaks])})
    with pytest.raises(KeyboardInterrupt):
        made(broken)
    assert not list((tmp_path / "results").rglob("*.json"))
    (resumed,) = made(broken)
    assert breaks.call_count == 3, "one step was lost, not two"
    assert without_times(resumed.history) == without_times(whole.history)


def test_one_failing_run_does_not_stop_the_rest(made, tmp_path):
    arms = {"breaks": Arm(lambda *given: [raising]), "even": PARITY.arms["even"]}
    with pytest.raises(RuntimeError, match="1 of 2 runs failed, .*: breaks, seed 0: .*no reward"):
        made(dataclasses.replace(PARITY, arms=arms), arms=None)
    assert [path.parent.name for path in (tmp_path / "results").rglob("*.json")] == ["even"]


def test_a_run_that_another_process_is_making_is_left_to_it(made, profile, tmp_path):
    job = Job("parity", PARITY, profile, "even", 0, tmp_path / "results", tmp_path / "work")
    with (
        writing(job.folder, "record"),
        pytest.raises(RuntimeError, match="another process writes a record to"),
    ):
        made()
    (job.folder / "job.pickle").touch()
    made()
    assert job.is_finished() and not list(job.folder.glob("*.p*")), "no checkpoint, no job"


@given(seeds=st.sets(st.integers(0, 30), min_size=1))
def test_seeds_are_written_as_they_are_read(seeds):
    text = format_seeds(seeds)
    assert parse_seeds(text) == parse_seeds(f"{text},{text}") == sorted(seeds)
    assert text.count(",") == sum(seed + 1 not in seeds for seed in seeds) - 1, "the shortest way"


@pytest.mark.parametrize("wrong", ["five", "4-", "-1", "²", "", "4-0"])
def test_wrong_seeds_are_named(wrong):
    with pytest.raises(ValueError, match=re.escape(f"--seeds is {wrong!r}")):
        parse_seeds(wrong)


@dataclasses.dataclass(frozen=True, eq=False)
class Pretended(Job):
    """A job that takes no training: it notes when it ran, or fails."""

    def in_words(self) -> str:
        return "it worked"

    def run(self) -> None:
        began = time.time()
        print("steps of", self.arm, flush=True)
        if self.arm == "fails":
            raise RuntimeError("it did not work")
        if self.arm == "dies":
            os._exit(9)
        if self.arm == "is killed":
            os.kill(os.getpid(), 9)
        time.sleep(0.2)
        (self.results / f"{self.seed}.txt").write_text(f"{began} {time.time()}")


@pytest.mark.slow
def test_processes_share_the_work_and_one_that_fails_does_not_stop_the_rest(tmp_path, capsys):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    arms = dict.fromkeys(("fails", "dies", "is killed", "works"), PARITY.arms["even"])
    experiment, where = Experiment("?", arms), (tmp_path, tmp_path / "work")
    given = [("fails", 0), ("dies", 0), ("is killed", 0), ("works", 1), ("works", 2), ("works", 3)]
    jobs = [Pretended("x", experiment, PROFILES["smoke"], *one, *where) for one in given]
    failed = sorted(grid.in_processes(jobs, 2))
    assert failed[0].startswith("dies, seed 0: its process ended with exit code 9 (")
    assert failed[1].startswith("fails, seed 0: error: it did not work (")
    assert failed[2].startswith("is killed, seed 0: its process was killed by signal 9, perhaps")
    assert "in run\nRuntimeError" in (jobs[0].folder / "log.txt").read_text()
    assert "steps of works" in (jobs[-1].folder / "log.txt").read_text()
    assert len(re.findall(r"\[\d/6\] works, seed \d: it worked", capsys.readouterr().out)) == 3
    times = [tuple(map(float, file.read_text().split())) for file in tmp_path.glob("*.txt")]
    assert len(times) == 3
    at_once = [sum(begin <= start < end for begin, end in times) for start, _ in times]
    assert max(at_once) <= 2, "no more at a time than were asked for"


def test_what_cannot_be_sent_to_a_process_is_named(tmp_path):
    def locked(**columns):
        return [float(lock.locked())]

    lock = threading.Lock()
    arms = {"locked": Arm(lambda *given: [locked])}
    job = Job("x", Experiment("?", arms), PROFILES["smoke"], "locked", 0, tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="locked, seed 0 cannot be sent to a process .*: make"):
        grid.in_processes([job], 1)


def test_a_grid_may_be_run_from_any_thread():
    with ThreadPoolExecutor() as threads:
        assert threads.submit(grid.in_processes, [], 2).result() == []


@pytest.mark.slow
def test_what_ends_the_grid_ends_its_processes_and_the_same_command_goes_on(tmp_path):
    """The real command; the signal reaches the grid alone, as from a service or `kill`."""
    grid = f"{sys.executable} -m grpo_kit.cli run basic --profile smoke --arm plain --seeds 0-1"
    folders = f"--output {tmp_path / 'results'} --work {tmp_path / 'work'}"
    command = f"{grid} --processes 2 {folders}".split()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began = time.monotonic()
    while not list(tmp_path.glob("work/**/history.jsonl")) and time.monotonic() - began < 200:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.terminate()
    process.wait(60)
    assert process.returncode != 0
    for lock in tmp_path.glob("work/**/.record.lock"):  # held by a process for as long as it lives
        with FileLock(lock, timeout=10):
            pass
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps of 16 answers, profile smoke" in done.stdout
    records = [read(path) for path in sorted((tmp_path / "results").rglob("seed-*.json"))]
    assert [record.seed for record in records] == [0, 1]
    assert all(record.history[-1]["step"] == 3 and len(record.samples) == 3 for record in records)
    assert all(record.machine["threads"] == 1 for record in records)


def test_more_is_drawn_where_a_run_starts_and_ends_than_between(made):
    """The claims compare start and end, which all arms of a seed share; curves need less."""
    drawn = {False: 2.0, True: 16.0}

    def watch(profile, base, task, config, seed, ends):
        return lambda policy: {"draws": drawn[ends], "seed": float(seed)}

    each = dataclasses.replace(PARITY, watch=watch, evaluations=2)
    (record, other) = made(each, seeds=[3], arms=None)
    assert [row["draws"] for row in record.history] == [16.0, 2.0, 16.0]
    assert {row["seed"] for row in record.history} == {3.0}
    start, of_other = ({**r.history[0], "step_time": 0} for r in (record, other))
    assert start == of_other, "all arms of a seed have one start"
    alike = dataclasses.replace(each, watch=lambda *a: None if a[-1] else lambda p: {"draws": 2.0})
    (record,) = made(alike, seeds=[4])
    assert [row["draws"] for row in record.history] == [2.0, 2.0, 2.0]


def test_runs_that_another_evaluator_measured_are_made_again(made, profile):
    (record,) = made()
    assert record.evaluator == 1 and grid.outdated(record, PARITY, profile) == ""
    newer = dataclasses.replace(PARITY, evaluator=2)
    sentence = "it was measured by evaluator 1, here it would be by evaluator 2."
    assert grid.outdated(record, newer, profile) == sentence
    (record,) = made(newer)
    assert record.evaluator == 2
