"""What a GPU shows in a few minutes: `grpo-kit gpu`, a list of jobs in order of value.

Each is a command, and leaves a JSON file with the lines of its output that matter. On a CPU each
has a small form, which shows only that it works.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from grpo_kit.lab import bench
from grpo_kit.lab.records import CHECKOUT, load, slug, where_it_ran
from grpo_kit.lab.report import arms_of
from grpo_kit.lab.summary import markdown_table
from grpo_kit.paths import data_dir, make_output_dir, results_dir, write_atomic

ON_GPU = bench.DEVICE == "cuda"


class Job(NamedTuple):
    seconds: int  # an estimate for an H100
    said: str  # an expression: the lines of the output to show
    arguments: str  # of Python
    resumes: bool = False  # so it is worth beginning with a minute left


PROFILE, TRIALS, GSM8K = ("smol", 12, "long-gsm8k") if ON_GPU else ("smoke", 1, "long-svamp")
SMALL_WARM_UP, WARM_UP = "svamp --steps 1 --output runs/warm", "gsm8k --output {data}/smol-gsm8k"
MEASURED = "t/(strict|lenient) |pass@8"  # rows of the table of a run
TESTS = "-m pytest -sm gpu tests/test_gpu.py -k"
STEP = "-m grpo_kit.lab.gpu"  # see `step`
RUN = f"-m grpo_kit run --profile {PROFILE} --processes 1 --output {{results}} --seeds"
MAIN = "00 01 01b 02 03 04 05 06 07"
NOTEBOOKS = f"-m grpo_kit reproduce --jobs 1 --profile {PROFILE} --output runs/gpu"
PRETRAIN = f"-m grpo_kit pretrain --base smollm2 --task {WARM_UP if ON_GPU else SMALL_WARM_UP}"
JOBS = {
    "GPU tests": Job(60, "passed|skipped", f"{TESTS} learns"),
    "step, SmolLM2": Job(80, "MiB", f"{STEP} SmolLM2"),
    "step, 1.5B": Job(160, "MiB", f"{STEP} Qwen/Qwen2.5-1.5B"),
    "step, 1.5B LoRA": Job(160, "MiB", f"{STEP} Qwen/Qwen2.5-1.5B 32"),
    "step, 0.5B": Job(120, "MiB", f"{STEP} Qwen/Qwen2.5-0.5B-Instruct"),
    "step, 0.5B LoRA": Job(120, "MiB", f"{STEP} Qwen/Qwen2.5-0.5B-Instruct 32"),
    "colab in 16 GB": Job(200, "passed|skipped|most memory", f"{TESTS} colab"),
    "GSM8K, warm-up": Job(120, "greedy", PRETRAIN, resumes=True),
    "GSM8K, seed 0": Job(240, MEASURED, f"{RUN} 0 {GSM8K}", resumes=True),
    "SVAMP, seed 0": Job(400, MEASURED, f"{RUN} 0 long-svamp", resumes=True),
    "GSM8K, seeds 1 and 2": Job(400, MEASURED, f"{RUN} 1-2 {GSM8K}", resumes=True),
    "SVAMP, seeds 1 and 2": Job(800, MEASURED, f"{RUN} 1-2 long-svamp", resumes=True),
    "notebooks 08, 09": Job(300, " ok, | failed,", f"{NOTEBOOKS} 08 09"),
    "notebooks 00 to 07": Job(900, " ok, | failed,", f"{NOTEBOOKS} {MAIN}"),
    "chaos": Job(120, "trials", f"tests/chaos.py {TRIALS} 0 {os.devnull}"),
}


def step(name: str, lora_rank: int = 0) -> str:
    """A step of 64 completions beside TRL's, of a model of the planner's or the benchmark's."""
    config, task = bench.step_config(3, 64, 256), bench.word_problems()
    if name == bench.SMOLLM2 or not ON_GPU:
        config = replace(config, max_completion_length=64 if ON_GPU else 8)
    else:  # TRL's logits of all 64 would fill the card
        config = replace(config, per_device_train_batch_size=16, gradient_accumulation_steps=4)
    loading = {"dtype": "half", "lora_rank": lora_rank} if lora_rank else {}
    with tempfile.TemporaryDirectory() as folder:
        model = bench.make_model(Path(folder), name if ON_GPU else "tiny")
        found = bench.compare_steps(model, config, task, **loading)
    kit, trl = (found["median_seconds"][trainer]["step"] for trainer in ("kit", "trl"))
    memory = "{kit:,.0f} MiB, TRL {trl:,.0f} MiB".format(**found["peak_mib"])
    tokens = found["completions"] * found["mean_length"] / kit
    return f"{kit:.2f} s ({tokens:,.0f} tokens/s), TRL {trl:.2f} s; {memory}"


def stored(file: Path) -> dict | None:
    return json.loads(file.read_text()) if file.exists() else None


def run(minutes: float, output: Path) -> Iterator[str]:
    """Make the missing jobs, as many as the minutes allow; yields a line on each."""
    ends = time.monotonic() + 60 * minutes
    folder = make_output_dir(output / slug(torch.cuda.get_device_name() if ON_GPU else "cpu"))
    for name, job in JOBS.items():
        file, left = folder / f"{slug(name)}.json", ends - time.monotonic()
        if "failed" not in (stored(file) or {"failed": True}):
            yield f"{name}: stored"
        elif left < (60 if job.resumes else job.seconds) * ON_GPU:
            yield f"{name}: takes about {job.seconds} s, left for the next time"
        else:
            yield f"{name}: {_made(name, file, max(left, 1.0))}"


def _made(name: str, file: Path, seconds: float) -> str:
    """Run a job's command and store what it says; how it ended, in words."""
    job, began = JOBS[name], time.monotonic()
    file.unlink(missing_ok=True)
    places = {"results": file.parent.resolve(), "data": data_dir()}
    own = [one.format(**places) for one in job.arguments.split()]
    env = os.environ | {"GRPO_KIT_DEVICE": bench.DEVICE, "GRPO_KIT_CHAOS_DEVICE": bench.DEVICE}
    options = {"cwd": CHECKOUT, "env": env, "start_new_session": True, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, *own], **options) as process:
        try:
            lines = process.communicate(timeout=seconds)[0].strip().splitlines()
        except subprocess.TimeoutExpired:
            return "the minutes are spent; what it has saved is taken up the next time"
        finally:  # also on Ctrl-C, and with all that it has started
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    made = {"job": name, "seconds": time.monotonic() - began} | where_it_ran(bench.DEVICE)
    if found := [line for line in lines if re.search(job.said, line)]:
        made["said"] = [line.strip("| ").replace(" | ", " ") for line in found]
    else:
        last = lines[-1] if lines else f"exit code {process.returncode}"
        made |= {"failed": True, "said": [f"failed, {last}"]}
    write_atomic(file, json.dumps(made, indent=1) + "\n")
    return "; ".join(made["said"])


def write_page(output: Path) -> Path:
    """Renew the tables and figures of `README.md` in `output`, for all cards that were measured."""
    cards = sorted({path.parent for path in output.glob("*/*.json")}) or [output / "no GPU yet"]
    rows, parts = [["job", *(path.name for path in cards)]], []
    for name in JOBS:
        results = [stored(folder / f"{slug(name)}.json") for folder in cards]
        said = (
            f"{'; '.join(r['said'])} ({r['seconds']:.0f} s)" if r else "not run" for r in results
        )
        rows.append([name, *said])
    for folder in cards:
        for name in ("long-gsm8k", "long-svamp"):
            own = "\n".join(arms_of(name, load(folder, PROFILE, name)[0], folder))
            parts.append(own.replace("](figures", f"]({folder.name}/figures"))
    text = (results_dir() / "gpu" / "README.md").read_text(encoding="utf-8")
    tables = {"jobs": markdown_table(*rows), "runs": "\n".join(parts).strip() or "Not run."}
    for name, part in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{part}\n{end}{after}"
    write_atomic(output / "README.md", text)
    return output / "README.md"


if __name__ == "__main__":
    print(step(sys.argv[1], *map(int, sys.argv[2:])))
