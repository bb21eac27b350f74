"""Who makes the runs of a grid: this process, several of this machine, a Ray cluster, or Slurm.

Each takes jobs (`grid.Job`) and returns a sentence for each that failed; the others go on.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from jinja2 import Environment, PackageLoader
from tqdm import tqdm

from grpo_kit.paths import write_atomic

RETRIES = 3  # of a run whose Ray worker died


def here(name: str, jobs: Sequence) -> list[str]:
    """One run after the other; an only one that fails raises what it raised."""
    failed = []
    for i, job in enumerate(jobs, 1):
        print(f"[{i}/{len(jobs)}] {name}, {job}", flush=True)
        try:
            job.run()
        except (RuntimeError, ValueError, OSError) as error:
            if len(jobs) == 1:
                raise
            failed.append(f"{job}: {error}")
    return failed


def in_processes(name: str, jobs: Sequence, processes: int, command: Sequence[str]) -> list[str]:
    """`command` with `--arm` and `--seeds` for each job, `processes` at a time, each with a log.

    Whatever ends this function ends the processes too.
    """
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    running, stopping = set(), threading.Event()

    def make(job) -> str:
        job.folder.mkdir(parents=True, exist_ok=True)
        path = job.folder / "log.txt"
        options = ["--arm", job.arm, "--seeds", str(job.seed), "--processes", "1"]
        with open(path, "a") as log:
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([*command, *options], env=env, **output)
        running.add(process)
        if stopping.is_set():  # since this process began
            process.terminate()
        code = process.wait()
        running.discard(process)
        last = re.split(r"[\r\n]+", path.read_text(errors="replace").strip())[-1].strip()
        return f"{job}: {last} (exit code {code}, {path})" if code else ""

    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    bar = tqdm(total=len(jobs), desc=name, unit="run", file=sys.stdout)
    try:
        with bar, ThreadPoolExecutor(processes) as pool:
            futures = [pool.submit(make, job) for job in jobs]
            try:
                for _ in as_completed(futures):
                    bar.update()
            finally:
                stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(running):
                    process.terminate()
    finally:
        signal.signal(signal.SIGTERM, before)
    return [sentence for future in futures if (sentence := future.result())]


def on_ray(name: str, jobs: Sequence) -> list[str]:
    """Each job as a task of the Ray cluster at RAY_ADDRESS, or of one started on this machine.

    A task whose worker dies is tried again, and goes on from the run's last checkpoint where that
    machine sees it. The record comes back with the task, so machines need not share a disk.
    RuntimeError where Ray is missing.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        why = "Ray is not installed: pip install 'grpo-kit[ray]', or leave out --on ray."
        raise RuntimeError(why) from None

    def make(job) -> str:
        job.run()
        return job.path.read_text()

    started, tasks, failed = not ray.is_initialized(), {}, []
    if started:
        ray.init(log_to_driver=False)
    try:
        for job in jobs:
            threads, gpus = job.profile.threads or 1, int(job.profile.device != "cpu")
            # a worker of its own: what a run leaves in memory ends with it
            needs = {"num_cpus": threads, "num_gpus": gpus, "max_calls": 1}
            tasks[ray.remote(max_retries=RETRIES, **needs)(make).remote(job)] = job
        with tqdm(total=len(tasks), desc=name, unit="run", file=sys.stdout) as bar:
            while tasks:
                (task,), _ = ray.wait(list(tasks))
                job = tasks.pop(task)
                try:
                    text = ray.get(task)
                    job.path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomic(job.path, text)
                except ray.exceptions.RayError as error:
                    why = getattr(error, "cause", None) or error
                    failed.append(f"{job}: {str(why).strip().splitlines()[0]}")
                bar.update()
    finally:
        if started:
            ray.shutdown()
    return failed


def submission(name: str, jobs: Sequence, command: Sequence[str], work: Path) -> str:
    """Write a job-array script, a task for each job, into `work`; returns how to submit it."""
    if not jobs:
        return "all runs are finished: there is nothing to submit."
    profile = jobs[0].profile
    loader = PackageLoader("grpo_kit.lab")
    templates = Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
    text = templates.get_template("slurm.sh.j2").render(
        name=f"grpo-kit-{name}", last=len(jobs) - 1, work=work, here=shlex.quote(os.getcwd()),
        gpu=profile.device != "cpu", threads=profile.threads or 1, command=shlex.join(command),
        arms=shlex.join(job.arm for job in jobs), seeds=" ".join(str(job.seed) for job in jobs),
    )  # fmt: skip
    path = work / f"{name}.sbatch"
    write_atomic(path, text)
    return f"{len(jobs)} runs to be made: sbatch {path}, then the same command without --on slurm."
