"""The runs of a grid on a Ray cluster: `grpo-kit run NAME --on ray`. Ray runs on Slurm, too."""

import os
import sys
from collections.abc import Sequence

from tqdm import tqdm

from grpo_kit.paths import write_atomic

RETRIES = 3  # of a run whose worker died


def on_ray(name: str, jobs: Sequence) -> list[str]:
    """Each job (`grid.Job`) as a task of the cluster at RAY_ADDRESS, or of one started here.

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
