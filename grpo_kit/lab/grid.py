"""Experiments and how their runs are made: arms times seeds, several at a time, each run once.

One run of each of two rewards tells next to nothing: seeds differ more than rewards do. So an
experiment trains every arm from the same weights with the same seeds, hence on the same prompts in
the same order, and differences are taken seed by seed. A finished run is a file (see `records`) and
is not made again unless its config has changed; a killed one goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from grpo_kit.config import GRPOConfig
from grpo_kit.lab.records import (
    Record,
    fingerprint,
    path_of,
    read,
    rounded,
    slug,
    where_it_ran,
)
from grpo_kit.models import Policy
from grpo_kit.paths import data_dir, make_output_dir, results_dir, write_atomic
from grpo_kit.profiles import Profile
from grpo_kit.tasks import Task
from grpo_kit.training import CHECKPOINT, HISTORY, Run, train

Rewards = Callable[[Profile, GRPOConfig, Policy], list[Callable]]
WORK = Path("runs/grid")  # checkpoints and logs of runs under way


@dataclass(frozen=True)
class Trained:
    """A finished run with the policy that it made, and the policy that it began with."""

    run: Run
    policy: Policy
    base: Policy
    task: Task
    profile: Profile
    config: GRPOConfig


@dataclass(frozen=True)
class Arm:
    """One way to train.

    `rewards` are made anew for a run; `changes` are to the config; `collector`, made for a profile,
    is how its steps collect what they learn from (see `train`). `train` makes the run: the kit's,
    or `trl_bridge.train`, which is called alike. `options` tell what rewards and collector are made
    with, and by what they are trained: other options are another run. `profile` changes the
    profile's choice of policy and task, for arms of several models.
    """

    rewards: Rewards
    changes: Mapping[str, object] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    collector: Callable[[Profile], Callable] | None = None
    train: Callable[..., Run] = train
    profile: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A question, its arms, the baseline first, and how it is run and measured.

    Args:
        question: what it asks.
        arms: name -> arm.
        measure: numbers of each trained policy, beside those of its last evaluation.
        sizes: profile's name -> what that profile's config is changed to: steps, batch, tokens.
        changes: to the config, for all profiles and arms; an arm's own come after.
        curves: metrics whose curves the report draws.
        watch: makes, from profile, base, task and config, what `train` measures at every
            evaluation.
        evaluations: the policy is evaluated after every 1/`evaluations` of the steps.
        x: what curves are drawn over: "step", or "num_generated_tokens" where arms have equal
            budgets of tokens and so unequal steps.
        task: loaded in place of the profile's.
        show: a few held-out answers of the trained policy to read.

    Raises ValueError for two arms whose names would be one folder's.
    """

    question: str
    arms: Mapping[str, Arm]
    measure: Callable[[Trained], dict[str, float]] = lambda trained: {}
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    changes: Mapping[str, object] = field(default_factory=dict)
    curves: Sequence[str] = ("reward", "eval/pass@1", "entropy", "completions/mean_length")
    watch: Callable[[Profile, Policy, Task, GRPOConfig], Callable] | None = None
    evaluations: int = 6
    x: str = "step"
    task: Callable[[], Task] | None = None
    show: Callable[[Trained], list[dict]] = lambda trained: []

    def __post_init__(self) -> None:
        arms: dict[str, str] = {}
        for arm in self.arms:
            if slug(arm) in arms:
                raise ValueError(
                    f"arms {arms[slug(arm)]!r} and {arm!r} would share the folder {slug(arm)!r}: "
                    "give one another name."
                )
            arms[slug(arm)] = arm

    def config(self, profile: Profile, arm: str) -> GRPOConfig:
        """The config of an arm's runs. Raises ValueError where the budget of tokens is missing."""
        config = dataclasses.replace(profile.config, **self.sizes.get(profile.name, {}))
        if self.x == "num_generated_tokens" and config.max_generated_tokens is None:
            raise ValueError(
                "this experiment compares arms that have generated the same number of tokens, "
                f"and has no such number for profile {profile.name!r}: choose another profile, or "
                "give max_generated_tokens in the experiment's sizes."
            )
        every = max(1, config.max_steps // self.evaluations)
        config = dataclasses.replace(config, **{"eval_steps": every, **self.changes})
        return dataclasses.replace(config, **self.arms[arm].changes)

    def profile(self, profile: Profile, arm: str) -> Profile:
        """`profile` as an arm's runs take it: with the arm's policy and task.

        Raises ValueError for an arm with a policy of its own on a profile without a GPU.
        """
        changes = self.arms[arm].profile
        if "policy" in changes and profile.device == "cpu":
            raise ValueError(
                f"arm {arm!r} trains {changes['policy']}, which wants a GPU: choose --profile "
                "colab (16 GB) or paper (80 GB)."
            )
        return dataclasses.replace(profile, **changes)

    def identity(self, profile: Profile, arm: str) -> dict:
        """All that decides what an arm's runs do and is not code: a `Record`'s config."""
        profile = self.profile(profile, arm)
        chosen = dataclasses.asdict(profile)
        for name in ("name", "machine", "config", "threads", "data"):
            del chosen[name]
        config = dataclasses.asdict(self.config(profile, arm))
        del config["save_steps"]  # when a checkpoint is saved decides nothing
        task = self.task.__name__ if self.task else profile.task
        shipped = {"base": shipped_files(profile.policy), "data": shipped_files(task)}
        identity = {**chosen, "task": task, **shipped, "options": self.arms[arm].options, **config}
        return rounded(identity)


@functools.cache
def shipped_files(folder: str) -> str | None:
    """A hash of the weights and rows in a folder of the kit's data; None where there is none."""
    path = data_dir() / folder
    if "/" in folder or not path.is_dir():
        return None
    files = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".jsonl", ".sqlite"))
    return fingerprint([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])


# --- one run --------------------------------------------------------------------------------------


def run_arm(
    name: str,
    experiment: Experiment,
    arm: str,
    seed: int,
    profile: Profile,
    results: str | Path,
    work: str | Path = WORK,
) -> Record:
    """Make one run of `experiment`, called `name`, and write its record; go on with a killed one.

    Checkpoints and `history.jsonl` are in a folder of `work`, whose name has the config's hash; the
    checkpoint goes when the record is there. Raises RuntimeError where another process makes it.
    """
    folder = make_output_dir(work_of(work, name, experiment, arm, seed, profile))
    with _alone(folder):
        config, origin = experiment.config(profile, arm), where_it_ran(profile.device)
        profile = experiment.profile(profile, arm)
        commits = _commits(folder / "commits.txt", origin["commit"])
        task, base = (experiment.task or profile.load_task)(), profile.load_policy()
        policy, way = profile.load_policy(), experiment.arms[arm]
        run = way.train(
            policy,
            task,
            way.rewards(profile, config, policy),
            config,
            output_dir=folder,
            seed=seed,
            resume=True,
            measure=experiment.watch and experiment.watch(profile, base, task, config),
            **({"collector": way.collector(profile)} if way.collector else {}),
        )
        trained = Trained(run, policy, base, task, profile, config)
        record = record_of(name, arm, experiment, trained, origin | {"commit": commits})
        record.write(results)
        (folder / CHECKPOINT).unlink(missing_ok=True)
        for checkpoint in folder.glob("checkpoint-*"):  # TRL's
            shutil.rmtree(checkpoint)
        return record


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. Raises RuntimeError where one is there."""
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RuntimeError(
            f"another process is making the run in {folder}: wait for it, or end it."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _commits(file: Path, now: str) -> str:
    """The commits that a run has been made with, all of them where it was taken up again."""
    before = file.read_text().split() if file.exists() else []
    made_with = list(dict.fromkeys([*before, *now.split()]))
    write_atomic(file, "\n".join(made_with))
    return ", ".join(made_with)


def work_of(
    work: str | Path, name: str, experiment: Experiment, arm: str, seed: int, profile: Profile
) -> Path:
    """The folder of a run under way; another config has another."""
    hashed = fingerprint(experiment.identity(profile, arm))
    return Path(work) / profile.name / name / slug(arm) / f"seed-{seed}-{hashed[:6]}"


def record_of(
    name: str, arm: str, experiment: Experiment, trained: Trained, origin: dict
) -> Record:
    """The record of a finished run: measured now, by the trained policy. `origin`: see
    `where_it_ran`."""
    run, last = trained.run, trained.run.history[-1]
    evaluation = {k: v for k, v in last.items() if k.startswith("eval/") or k == "entropy"}
    return Record(
        experiment=name,
        arm=arm,
        profile=trained.profile.name,
        seed=run.seed,
        config=experiment.identity(trained.profile, arm),
        start=run.start,
        seconds=sum(row.get("step_time", 0.0) for row in run.history),
        evaluation={**evaluation, **experiment.measure(trained)},
        history=run.history,
        samples=experiment.show(trained),
        **origin,
    )


# --- the grid -------------------------------------------------------------------------------------


def parse_seeds(text: str) -> list[int]:
    """ "0-4" or "0,2,5-7" as numbers. Raises ValueError for anything else, also for overlaps."""
    seeds: list[int] = []
    for part in text.split(","):
        written = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if not written:
            raise ValueError(
                f"--seeds is {text!r}; give numbers and ranges, such as 0-4 or 0,2,5-7"
            )
        first, last = int(written[1]), int(written[2] or written[1])
        seeds += range(first, last + 1)
    _check_given("seeds", seeds)
    return seeds


def format_seeds(seeds: Iterable[int]) -> str:
    """Seeds as `parse_seeds` reads them, in the shortest way: "0-4,7"."""
    seeds = sorted(set(seeds))
    firsts = [seed for seed in seeds if seed - 1 not in seeds]
    lasts = [seed for seed in seeds if seed + 1 not in seeds]
    ranges = zip(firsts, lasts, strict=True)
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def command_of(name: str, profile: str, seeds: Iterable[int] = range(5), arms=()) -> str:
    """What makes these runs, of all arms unless some are given."""
    options = "".join(f' --arm "{arm}"' for arm in arms)
    return f"grpo-kit run {name} --profile {profile} --seeds {format_seeds(seeds)}{options}"


def _check_given(what: str, given: Sequence) -> None:
    if not len(given):
        raise ValueError(f"there are no {what}; give at least one.")
    twice = [repr(one) for one, count in Counter(given).items() if count > 1]
    if twice:
        raise ValueError(f"{what} overlap: {', '.join(twice)} is given twice; give each once.")


@dataclass(frozen=True)
class Job:
    """A run to be made, and how far it has come."""

    arm: str
    seed: int
    config: GRPOConfig
    folder: Path

    def done(self) -> float:
        """The share of the run that is behind it, 0 to 1."""
        try:
            rows = (self.folder / HISTORY).read_text().splitlines()
            row = json.loads(rows[-1])
        except (OSError, ValueError, IndexError):  # not begun, or in the middle of a line
            return 0.0
        tokens = self.config.max_generated_tokens
        share = row["num_generated_tokens"] / tokens if tokens else 0.0
        return min(1.0, max(share, row["step"] / self.config.max_steps))


def run_grid(
    name: str,
    experiment: Experiment,
    profile: Profile,
    seeds: Sequence[int],
    *,
    results: str | Path | None = None,
    work: str | Path = WORK,
    arms: Sequence[str] | None = None,
    processes: int = 1,
    command: Sequence[str] = (),
) -> list[Record]:
    """Make the runs that are missing among `arms` times `seeds`; return the records of all.

    With one process the runs are made here, one after the other. With more each is a process of its
    own: `command` with `--arm`, `--seeds` and `--processes 1`, its output in `log.txt` of the run's
    folder. A run that fails does not stop the others.

    Raises ValueError for no seed, seeds or arms that repeat, and an unknown arm; RuntimeError,
    naming them, where runs have failed.
    """
    arms = list(experiment.arms) if arms is None else list(arms)
    if unknown := [arm for arm in arms if arm not in experiment.arms]:
        raise ValueError(
            f"experiment {name!r} has no arm {unknown[0]!r}: choose among "
            f"{', '.join(experiment.arms)}."
        )
    _check_given("seeds", seeds)
    _check_given("arms", arms)
    results = make_output_dir(results or results_dir())
    missing = []
    for seed in seeds:
        for arm in arms:
            job = Job(
                arm,
                seed,
                experiment.config(profile, arm),
                work_of(work, name, experiment, arm, seed, profile),
            )
            path = path_of(results, profile.name, name, arm, seed)
            if not _is_finished(path, experiment, profile):
                missing.append(job)
    there = len(arms) * len(seeds) - len(missing)
    if there:
        print(f"{name}: {there} of {there + len(missing)} runs are finished", flush=True)
    if processes == 1:
        failed = []
        for i, job in enumerate(missing, 1):
            print(f"[{i}/{len(missing)}] {name}, {job.arm}, seed {job.seed}", flush=True)
            try:
                run_arm(name, experiment, job.arm, job.seed, profile, results, work)
            except (RuntimeError, ValueError, OSError) as error:
                if len(missing) == 1:
                    raise
                failed.append(f"{job.arm}, seed {job.seed}: {error}")
    else:
        failed = _run_processes(name, missing, processes, command) if missing else []
    if failed:
        raise RuntimeError(
            f"{len(failed)} of {len(missing)} runs failed, the others are stored: "
            f"{'; '.join(failed)}"
        )
    return [read(path_of(results, profile.name, name, arm, seed)) for seed in seeds for arm in arms]


def _is_finished(path: Path, experiment: Experiment, profile: Profile) -> bool:
    """Whether the file holds that run; says why not, where there is a file."""
    if not path.exists():
        return False
    try:
        there = read(path)
        why = outdated(there, experiment, profile)
    except ValueError as error:
        why = str(error)
    if why:
        print(f"{path}: {why} The run is made again.", flush=True)
    return not why


def outdated(record: Record, experiment: Experiment, profile: Profile) -> str:
    """What is different in what this version would run, in a sentence; empty where nothing is.

    A setting that the record does not know yet has no effect at its default.
    """
    if record.arm not in experiment.arms:
        return f"there is no arm {record.arm!r} any more."
    wanted = experiment.identity(profile, record.arm)
    default = dataclasses.asdict(GRPOConfig())
    known = default | record.config
    if changed := [key for key in wanted if known.get(key) != wanted[key]]:
        differences = ", ".join(
            f"{key} {known.get(key)!r} there, {wanted[key]!r} here" for key in changed
        )
        return f"it is of another config ({differences})."
    return ""


def _run_processes(name: str, jobs: list[Job], processes: int, command: Sequence[str]) -> list[str]:
    """Run `jobs`, at most `processes` at a time, with a bar over all of their steps.

    Returns a sentence for each that failed.
    """
    waiting, running, failed = list(jobs), {}, []
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    share = "{percentage:3.0f}% |{bar}| {desc} [{elapsed}<{remaining}]"
    begun = sum(job.done() for job in jobs)  # of runs that were killed
    bar = tqdm(total=len(jobs), initial=begun, bar_format=share, file=sys.stdout, mininterval=1)
    ended = 0
    before = signal.signal(signal.SIGTERM, _end)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                job = waiting.pop(0)
                job.folder.mkdir(parents=True, exist_ok=True)
                with open(job.folder / "log.txt", "a") as log:
                    running[job] = subprocess.Popen(
                        [*command, "--arm", job.arm, "--seeds", str(job.seed), "--processes", "1"],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
            time.sleep(0.5)
            for job, process in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    ended += 1
                    if process.returncode:
                        said = _last_line(job.folder, process.returncode)
                        failed.append(f"{job.arm}, seed {job.seed}: {said}")
            under_way = ended + sum(job.done() for job in [*running, *waiting])
            bar.set_description_str(f"{name}: {ended} of {len(jobs)} runs", refresh=False)
            bar.update(max(0.0, under_way - bar.n))
    finally:  # what they have not saved yet is at most `save_steps` steps
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
        bar.close()
        signal.signal(signal.SIGTERM, before)
    return failed


def _end(number: int, frame: object) -> None:
    """End by an exception, so that what has been started is ended, too."""
    sys.exit(128 + number)


def _last_line(folder: Path, code: int) -> str:
    lines = (folder / "log.txt").read_text(errors="replace").replace("\r", "\n").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    return f"{said[-1] if said else 'nothing was said'} (exit code {code}, {folder / 'log.txt'})"
