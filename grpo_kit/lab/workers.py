"""Where the runs of a grid are made: on this machine, or on a Ray cluster (also under Slurm)."""

import os
from collections.abc import Callable, Sequence
from functools import partial

from grpo_kit.lab.grid import Job, Progress, in_processes, usual_processes
from grpo_kit.paths import write_atomic
from grpo_kit.profiles import Profile

RETRIES = 3  # of a run whose worker died


def runner(on: str, profile: Profile, processes: int | None = None) -> Callable:
    """What makes the runs of a grid: processes of this machine ("here"), or "ray"."""
    if on not in ("here", "ray"):
        raise ValueError(f"on is {on!r}: choose 'here' or 'ray'.")
    if on == "ray" and processes:
        raise ValueError("processes are counted on this machine only: leave them out with 'ray'.")
    here = partial(in_processes, processes=processes or usual_processes(profile))
    return on_ray if on == "ray" else here


def on_ray(jobs: Sequence[Job]) -> list[str]:
    """Each job as a task of the cluster at RAY_ADDRESS, or of one started here.

    A task whose worker dies is tried again, and goes on from the run's last checkpoint where that
    machine sees it. The record comes back with the task, so machines need not share a disk. Returns
    a sentence for each run that failed. RuntimeError where Ray is missing.
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
        progress = Progress(len(tasks))
        while tasks:
            (task,), _ = ray.wait(list(tasks))
            job, why = tasks.pop(task), ""
            try:
                text = ray.get(task)
                job.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(job.path, text)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                why = str(cause).strip().splitlines()[0]
                failed.append(f"{job}: {why}")
            progress.line(job, why)
    finally:
        if started:
            ray.shutdown()
    return failed
