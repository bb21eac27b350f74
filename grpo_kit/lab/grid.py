"""The runs of an experiment: arms times seeds, from the same weights, on the same prompts.

A finished run is a file (see `records`), made again only if its config has changed; a killed run
goes on from its last checkpoint.
"""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from multiprocessing.connection import wait
from pathlib import Path

import cloudpickle

from grpo_kit.config import GRPOConfig
from grpo_kit.course.runner import usable_cores
from grpo_kit.lab import records
from grpo_kit.lab.records import Record, fingerprint, path_of
from grpo_kit.models import Policy
from grpo_kit.paths import data_dir, make_output_dir, results_dir, sha256_of, writing
from grpo_kit.profiles import Profile
from grpo_kit.runs import CHECKPOINT, Run
from grpo_kit.tasks import Task
from grpo_kit.tiny.world import recipe
from grpo_kit.training import train

PICKLED = "job.pickle"  # a job on its way to another process
FRESH = 100  # the first seed that nobody had looked at when claims were written


@dataclass(frozen=True)
class Trained:
    """A finished run with the policy that it trained, and the untrained one as `base`."""

    run: Run
    policy: Policy
    base: Policy
    task: Task
    profile: Profile
    config: GRPOConfig


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    rewards: Callable[[Profile, GRPOConfig, Policy], list[Callable]]  # called anew for each run
    changes: Mapping[str, object] = field(default_factory=dict)  # to the config
    options: Mapping[str, object] = field(default_factory=dict)  # hashed: of rewards, batch source
    batch_source: Callable[[Profile], Callable] | None = None  # makes what `train` takes
    train: Callable[..., Run] = train  # or `trl_bridge.train`
    profile: Mapping[str, object] = field(default_factory=dict)  # changes to the profile


@dataclass(frozen=True)
class Experiment:
    """A question, its arms by name, the baseline first, and how they are run and measured."""

    question: str
    arms: Mapping[str, Arm]
    measure: Callable[[Trained], dict[str, float]] = lambda trained: {}  # besides an evaluation
    sizes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # profile -> changes
    changes: Mapping[str, object] = field(default_factory=dict)  # to every config, before a size's
    curves: Sequence[str] = ("reward", "eval/pass@1", "entropy", "completions/mean_length")
    # makes the `measure` of a run by its profile, base, task, config and seed, and, with True, the
    # one for its start and end where more is drawn there
    watch: Callable[[Profile, Policy, Task, GRPOConfig, int, bool], Callable | None] | None = None
    evaluations: int = 6  # in equal steps, besides the first
    x: str = "step"  # of curves; "num_generated_tokens" where arms have equal budgets of tokens
    task: Callable[[], Task] | None = None  # in place of the profile's
    skills: bool = False  # wants a policy that can judge, verify or plan, see `with_skills`
    show: Callable[[Trained], list[dict]] = lambda trained: []  # a few held-out answers to read
    evaluator: int = 1  # raised when its runs are measured otherwise, though trained alike
    turned: str = ""  # of a dial: what its settings change, see `lab.dials`
    settings: Sequence[str] = ()  # of a dial, each of which every arm is trained in
    shown: str = "eval/pass@1"  # of a dial: the metric that is drawn, and
    of: str = "end"  # whether its value at the end or its change

    def setting(self, profile: Profile, arm: str) -> tuple[Profile, GRPOConfig]:
        """The profile with the arm's policy and task, and the config of the arm's runs.

        Raises ValueError where the profile lacks the GPU or the budget of tokens that they want.
        """
        changes = dict(self.arms[arm].profile)
        if "revision" in changes and profile.device == "cpu":
            raise ValueError(f"arm {arm!r} wants a GPU: choose --profile colab or paper.")
        if self.skills:
            profile = profile.with_skills()
        size = self.sizes.get(profile.name, {})
        config = dataclasses.replace(profile.config, **{**self.changes, **size})
        if self.x == "num_generated_tokens" and config.max_generated_tokens is None:
            lacks = f"profile {profile.name!r} sets no max_generated_tokens"
            raise ValueError(f"{lacks}, and arms are compared at that: choose another profile.")
        equal = max(1, config.max_steps // self.evaluations)
        every = size.get("eval_steps", config.eval_steps or equal)  # a size's 0: at the end alone
        rest = {"eval_steps": every, **self.arms[arm].changes}
        if shares := changes.pop("shares", None):
            profile = profile.with_shares(real=True, **shares)
        return dataclasses.replace(profile, **changes), dataclasses.replace(config, **rest)

    def identity(self, profile: Profile, arm: str) -> dict:
        """All that decides what an arm's runs do and is not code: a `Record`'s config."""
        chosen, config = map(dataclasses.asdict, self.setting(profile, arm))
        for name in ("name", "config", "threads", "device"):
            del chosen[name]
        data, test, share = (chosen.pop(name) for name in ("data", "test", "test_share"))
        if shares := chosen.pop("shares"):
            chosen["world"] = recipe(**shares)
        if adapters := chosen.pop("adapters"):
            chosen["adapter"] = shipped_files(adapters[chosen["task"]])
        del config["save_steps"]  # when a checkpoint is saved decides nothing
        task = self.task.__name__ if self.task else chosen["task"]
        policy = chosen["policy"]
        shipped = {"base": shipped_files(policy), "data": shipped_files(task)}
        if not shipped["base"] and Path(policy).is_dir():  # the same folder has several paths
            shipped |= {"base": files_hash(policy), "policy": Path(policy).name}
        if data:
            rows = [name and (files_hash(name) or name) for name in (data, test)]
            shipped["data"] = [*rows, share]
        options = self.arms[arm].options
        return records.rounded({**chosen, "task": task, **shipped, "options": options, **config})


SHIPPED = (".safetensors", ".jsonl", ".gz", ".sqlite")


@cache
def shipped_files(folder: str) -> str | None:
    """A hash of the weights and rows in a folder of the kit's data; None where there is none."""
    path = data_dir() / folder
    if "/" in folder or not path.is_dir():
        return None
    files = sorted(p for p in path.iterdir() if p.suffix in SHIPPED)
    return fingerprint([sha256_of(file) for file in files])


def files_hash(data: str) -> str | None:
    """A hash of a reader's own file, or of all files in a folder; None for a name on the Hub."""
    path = Path(data).expanduser()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    states = [(file, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return fingerprint([_hashed(*state) for state in states]) if files else None


@cache
def _hashed(file: Path, *state: int) -> str:
    return sha256_of(file)


def outdated(record: Record, experiment: Experiment, profile: Profile) -> str:
    """How this version's run would differ from the record, in a sentence; empty if it would not."""
    if record.arm not in experiment.arms:
        return f"there is no arm {record.arm!r} any more."
    if record.evaluator != experiment.evaluator:
        now = f"here it would be by evaluator {experiment.evaluator}"
        return f"it was measured by evaluator {record.evaluator}, {now}."
    # a setting that the record does not know yet has no effect at its default
    known = dataclasses.asdict(GRPOConfig()) | record.config
    differences = [
        f"{key} {known.get(key)!r} there, {value!r} here"
        for key, value in experiment.identity(profile, record.arm).items()
        if known.get(key) != value
    ]
    return f"it is of another config ({', '.join(differences)})." if differences else ""


@dataclass(frozen=True, eq=False)
class Job:
    """A run to be made of the experiment called `name`."""

    name: str
    experiment: Experiment
    profile: Profile
    arm: str
    seed: int
    results: Path
    work: Path

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"

    def in_words(self) -> str:
        """What the finished run measured: "pass@1 0.91, 48 s"."""
        record = self.record()
        measured = record.evaluation.get("eval/pass@1")
        accuracy = "" if measured is None else f"pass@1 {measured:.3f}, "
        return f"{accuracy}{record.seconds:.0f} s"

    def record(self) -> Record | None:
        """The stored run, if there is one; ValueError for one that cannot be trusted."""
        return records.find(self.results, self.profile.name, self.name, self.arm, self.seed)

    @cached_property
    def folder(self) -> Path:
        """The folder of the run under way; another config has another."""
        config_hash = fingerprint(self.experiment.identity(self.profile, self.arm))
        file = path_of(self.work, self.profile.name, self.name, self.arm, self.seed)
        return file.with_name(f"{file.stem}-{config_hash[:6]}")

    def is_finished(self) -> bool:
        """Whether it is stored as this version would make it; prints why not, where it is."""
        try:
            record = self.record()
            why = record and outdated(record, self.experiment, self.profile)
        except ValueError as error:
            why = str(error)
        if why:
            print(f"{self}: {why} The run is made again.", flush=True)
        return why == ""

    def run(self) -> None:
        """Make the run, or go on with a killed one; RuntimeError where another process makes it."""
        with writing(self.folder, "record"):
            trained = self._train()
            history, last = trained.run.history, trained.run.history[-1]
            evaluation = {k: v for k, v in last.items() if k.startswith("eval/") or k == "entropy"}
            Record(
                experiment=self.name, arm=self.arm, profile=self.profile.name, seed=self.seed,
                config=self.experiment.identity(self.profile, self.arm),
                start=trained.run.start, history=history,
                seconds=sum(row.get("step_time", 0.0) for row in history),
                evaluation={**evaluation, **self.experiment.measure(trained)},
                samples=self.experiment.show(trained), evaluator=self.experiment.evaluator,
                **records.where_it_ran(self.profile.device),
            ).write(self.results)  # fmt: skip
            for done_with in (CHECKPOINT, PICKLED):
                (self.folder / done_with).unlink(missing_ok=True)
            for checkpoint in self.folder.glob("checkpoint-*"):  # TRL's
                shutil.rmtree(checkpoint)

    def _train(self) -> Trained:
        experiment, arm = self.experiment, self.experiment.arms[self.arm]
        profile, config = experiment.setting(self.profile, self.arm)
        task = (experiment.task or profile.load_task)()
        base, policy = profile.load_policy(), profile.load_policy()
        rewards = arm.rewards(profile, config, policy)
        options = {"output_dir": self.folder, "seed": self.seed, "resume": True}
        ends = None
        if experiment.watch:
            watch = partial(experiment.watch, profile, base, task, config, self.seed)
            options["measure"], ends = watch(False), watch(True)
        if arm.batch_source:
            options["batch_source"] = arm.batch_source(profile)
        run = arm.train(policy, task, rewards, config, **options)
        if ends:
            run.history[0] |= ends(base)
            run.history[-1] |= ends(policy)
        return Trained(run, policy, base, task, profile, config)


def parse_seeds(text: str) -> list[int]:
    """ "0-4" or "0,2,5-7" as numbers, each once. Raises ValueError for anything else."""
    seeds: set[int] = set()
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        numbers = range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1) if bounds else ()
        if not numbers:
            raise ValueError(f"--seeds is {text!r}; give numbers and ranges: 0-4, or 0,2,5-7.")
        seeds.update(numbers)
    return sorted(seeds)


def format_seeds(seeds: Iterable[int]) -> str:
    """Seeds as `parse_seeds` reads them, in the shortest way: "0-4,7"."""
    seeds = sorted(set(seeds))
    firsts = [seed for seed in seeds if seed - 1 not in seeds]
    lasts = [seed for seed in seeds if seed + 1 not in seeds]
    ranges = zip(firsts, lasts, strict=True)
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)


def usual_seeds(profile: str) -> range:
    """The seeds of reported runs, where no claim says which."""
    return range(FRESH, FRESH + 5) if profile == "tiny" else range(5)


def command_of(name: str, profile: str, seeds: Iterable[int] | None = None, arms=()) -> str:
    """The command that makes these runs, of all arms and the usual seeds unless some are given."""
    seeds = seeds or usual_seeds(profile)
    options = "".join(f' --arm "{arm}"' for arm in arms)
    return f"grpo-kit run {name} --profile {profile} --seeds {format_seeds(seeds)}{options}"


def usual_processes(profile: Profile) -> int:
    """How many runs at a time: one for each core that this process may use, one for a GPU."""
    return usable_cores() if profile.device == "cpu" else 1


class Progress:
    """Prints a line for each run that has ended, and keeps what is said of those that failed."""

    def __init__(self, runs: int) -> None:
        self.runs, self.ended, self.failed = runs, 0, []

    def line(self, job: Job, why: str = "") -> None:
        """`why`: the reason where the run failed."""
        self.ended += 1
        if why:
            self.failed.append(f"{job}: {why}")
        text = f"failed, {why}" if why else job.in_words()
        print(f"[{self.ended}/{self.runs}] {job}: {text}", flush=True)


def here(jobs: Sequence[Job]) -> list[str]:
    """Make one run after the other, in this process; returns a sentence on each that failed."""
    progress = Progress(len(jobs))
    for job in jobs:
        why = ""
        try:
            job.run()
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error)
        progress.line(job, why)
    return progress.failed


def in_processes(jobs: Sequence[Job], processes: int) -> list[str]:
    """Make the runs in `processes` processes, each of which makes one after the other.

    A run writes a log beside its checkpoint. What ends this function ends the processes too.
    """
    waiting, busy, progress = list(jobs), {}, Progress(len(jobs))
    in_main = threading.current_thread() is threading.main_thread()  # others set no handlers
    if in_main:
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    workers = [_worker() for _ in jobs[:processes]]
    idle = list(workers)
    try:
        while waiting or busy:
            while waiting and idle:
                worker, job = idle.pop(), waiting.pop(0)
                file = make_output_dir(job.folder) / PICKLED
                file.write_bytes(_pickled(job))
                file.with_name("log.txt").touch()
                print(file.resolve(), file=worker.stdin, flush=True)
                busy[worker.stdout] = worker, job
            for stdout in wait(list(busy)):
                (worker, job), why = busy.pop(stdout), ""
                if (reply := stdout.readline().strip()) != "made":
                    log = job.folder / "log.txt"
                    last = log.read_text(errors="replace").strip().splitlines()[-1:]
                    why = f"{''.join(last) if reply else _end_of(worker)} ({log})"
                if not reply and waiting:  # it has ended
                    workers.append(worker := _worker())
                idle.append(worker)
                progress.line(job, why)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.communicate()  # waits, and closes its pipes
        if in_main:
            signal.signal(signal.SIGTERM, before)
    return progress.failed


def _pickled(job: Job) -> bytes:
    try:
        return cloudpickle.dumps(job)
    except Exception as error:
        remedy = "make locks, files and connections inside the function that uses them"
        raise RuntimeError(f"{job} cannot be sent to a process ({error}): {remedy}.") from error


def _end_of(worker: subprocess.Popen) -> str:
    """How a process ended that said nothing."""
    if (code := worker.wait()) >= 0:
        return f"its process ended with exit code {code}"
    remedy = "perhaps for memory: with --processes 1 the same command goes on"
    return f"its process was killed by signal {-code}, {remedy}"


def _worker() -> subprocess.Popen:
    """A process that makes the runs whose pickled jobs it is told, and says "made" or "failed"."""
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # modules of a reader's functions
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "grpo_kit.lab.grid"], **pipes, env=env)


def _work() -> None:
    replies = os.fdopen(os.dup(1), "w")  # what a run or a tool prints goes to the run's log
    for line in sys.stdin:
        file, reply = Path(line.rstrip("\n")), "failed"
        with open(file.with_name("log.txt"), "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            cloudpickle.loads(file.read_bytes()).run()
            reply = "made"
        except (RuntimeError, ValueError, OSError) as error:
            traceback.print_exc()
            print(f"\nerror: {error}")
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        print(reply, file=replies, flush=True)


def run_grid(
    name: str, experiment: Experiment, profile: Profile, seeds: Sequence[int], *,
    arms: Sequence[str] | None = None, results: str | Path | None = None,
    work: str | Path = "runs/grid", processes: int = 0,
) -> list[Record]:  # fmt: skip
    """Make the runs of `arms` times `seeds` that are missing; return the records of all.

    So many `processes` at a time; 0: one run after the other, here. A run that fails does not stop
    the others. RuntimeError names those that failed, ValueError a wrong arm, before any run.
    """
    arms = list(dict.fromkeys(experiment.arms if arms is None else arms))
    if len({records.slug(arm) for arm in experiment.arms}) < len(experiment.arms):
        raise ValueError(f"two arms of {name!r} would share a folder: rename one.")
    for arm in arms:
        if arm not in experiment.arms:
            known = ", ".join(experiment.arms)
            raise ValueError(f"experiment {name!r} has no arm {arm!r}: choose among {known}.")
        experiment.identity(profile, arm)  # raises where a setting is missing
    where = make_output_dir(results or results_dir()), Path(work)
    jobs = [Job(name, experiment, profile, arm, seed, *where) for seed in seeds for arm in arms]
    missing = [job for job in jobs if not job.is_finished()]
    print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs are finished", flush=True)
    failed = in_processes(missing, processes) if processes else here(missing)
    if failed:
        count = f"{len(failed)} of {len(missing)} runs failed"
        raise RuntimeError(f"{count}, the others are stored: {'; '.join(failed)}")
    return [job.record() for job in jobs]


if __name__ == "__main__":  # in a process of `in_processes`
    with suppress(KeyboardInterrupt):  # who interrupts the grid hears of it there
        _work()
