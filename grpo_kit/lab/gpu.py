"""What a GPU shows in a few minutes: `grpo-kit gpu`, a list of jobs in order of value.

Each leaves a JSON file. On a CPU each has a small form, which shows only that it works.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from grpo_kit.lab import bench, planner
from grpo_kit.lab.records import CHECKOUT, load, slug, where_it_ran
from grpo_kit.lab.report import arms_of
from grpo_kit.lab.summary import markdown_table, with_parts
from grpo_kit.models import load_policy
from grpo_kit.paths import data_dir, make_output_dir, results_dir, write_atomic

ON_GPU, LORA = bench.DEVICE == "cuda", {"dtype": "half", "lora_rank": 32}


class Job(NamedTuple):
    seconds: int  # an estimate for an H100
    make: Callable[[Path], dict]  # gets the folder of results, returns what is stored
    resumes: bool = False  # so it is worth beginning with a minute left


def card(results: Path) -> dict[str, float]:
    """Bytes a second of a copy, and FLOP/s of a product (on a GPU in bfloat16): medians."""
    size = 2**13 if ON_GPU else 2**9
    source = torch.ones(2, size, size, device=bench.DEVICE)
    given = {"source": source, "target": torch.empty_like(source)}
    given["factor"] = source[0].bfloat16() if ON_GPU else source[0]
    copied, multiplied = (
        Timer(work, globals=given).blocked_autorange().median
        for work in ("target.copy_(source)", "factor @ factor")
    )
    return {"bandwidth": 2 * source.nbytes / copied, "flops": 2 * size**3 / multiplied}


def command(said: str, arguments: Sequence[str], results: Path) -> dict[str, list[str]]:
    """Run Python with these arguments; returns the lines of its output that match `said`."""
    own = [one.format(results=results.resolve(), data=data_dir()) for one in arguments]
    env = os.environ | {"GRPO_KIT_DEVICE": bench.DEVICE, "GRPO_KIT_CHAOS_DEVICE": bench.DEVICE}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([sys.executable, *own], cwd=CHECKOUT, env=env, **output)
    lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    if not (found := [line for line in lines if re.search(said, line)]):
        raise RuntimeError(lines[-1])
    return {"said": [line.strip("| ").replace(" | ", " ") for line in found]}


def steps(name: str, loading: dict, results: Path) -> dict:
    """A step beside TRL's, in turn, with the share of the card's limit and a profile."""
    config, task = bench.step_config(3, 64, 256), bench.word_problems()
    if name == bench.SMOLLM2 or not ON_GPU:
        config = replace(config, max_completion_length=64 if ON_GPU else 8)
    else:  # TRL's logits of all 64 would fill the card
        config = replace(config, per_device_train_batch_size=16, gradient_accumulation_steps=4)
    with tempfile.TemporaryDirectory() as folder:
        model = bench.make_model(Path(folder), name if ON_GPU else "tiny")
        policy = load_policy(model, device=bench.DEVICE, **loading)
        with torch.profiler.profile() as profile:
            next(bench.kit_steps(policy, config, task))
        del policy  # the card may have no room for a third one
        result = bench.compare_steps(model, config, task, **loading)
        result["share_of_limit"] = shares(folder, result, bool(loading), **card(results))
    by = f"self_{'device' if ON_GPU else 'cpu'}_time_total"
    return result | {"profile": profile.key_averages().table(sort_by=by, row_limit=10)}


def shares(folder: str, result: dict, lora: bool, *, bandwidth: float, flops: float) -> dict:
    """Least seconds of sampling and of the update on this card, by the kit's seconds."""
    model, rows, length = planner.model_of(folder), result["completions"], result["mean_length"]
    n, prompt = model.num_parameters(), result["prompt_length"]
    read = 2 * n + rows * (prompt + length / 2) * planner.cache_bytes(model, 2)
    sampling = length * max(read / bandwidth, 2 * n * rows / flops)
    update = (4 if lora else 6) * n * rows * (length + prompt / 8) / flops  # a prompt once a group
    taken = result["median_seconds"]["kit"]
    return {"generation": sampling / taken["generation"], "update": update / taken["update"]}


PROFILE, TRIALS, GSM8K = ("smol", 12, "long-gsm8k") if ON_GPU else ("smoke", 1, "long-svamp")
SMALL_WARM_UP, WARM_UP = "svamp --steps 1 --output runs/warm", "gsm8k --output {data}/smol-gsm8k"
MEASURED = "t/(strict|lenient) |pass@8"  # rows of the table of a run
TESTS = "-m pytest -sm gpu tests/test_gpu.py -k"
RUN = f"-m grpo_kit run --profile {PROFILE} --processes 1 --output {{results}} --seeds"
MAIN = "00 01 01b 02 03 04 05 06 07"
NOTEBOOKS = f"-m grpo_kit reproduce --jobs 1 --profile {PROFILE} --output runs/gpu"
PRETRAIN = f"-m grpo_kit pretrain --base smollm2 --task {WARM_UP if ON_GPU else SMALL_WARM_UP}"


def python(seconds: int, said: str, arguments: str, resumes: bool = False) -> Job:
    return Job(seconds, partial(command, said, arguments.split()), resumes)


JOBS = {
    "card": Job(20, card),
    "GPU tests": python(60, "passed|skipped", f"{TESTS} learns"),
    "step, SmolLM2": Job(60, partial(steps, bench.SMOLLM2, {})),
    "step, 1.5B": Job(120, partial(steps, "Qwen/Qwen2.5-1.5B", {})),
    "step, 1.5B LoRA": Job(120, partial(steps, "Qwen/Qwen2.5-1.5B", LORA)),
    "step, 0.5B": Job(80, partial(steps, "Qwen/Qwen2.5-0.5B-Instruct", {})),
    "step, 0.5B LoRA": Job(80, partial(steps, "Qwen/Qwen2.5-0.5B-Instruct", LORA)),
    "colab in 16 GB": python(200, "passed|skipped|most memory", f"{TESTS} colab"),
    "GSM8K, warm-up": python(120, "greedy", PRETRAIN, resumes=True),
    "GSM8K, seed 0": python(240, MEASURED, f"{RUN} 0 {GSM8K}", resumes=True),
    "SVAMP, seed 0": python(400, MEASURED, f"{RUN} 0 long-svamp", resumes=True),
    "GSM8K, seeds 1 and 2": python(400, MEASURED, f"{RUN} 1-2 {GSM8K}", resumes=True),
    "SVAMP, seeds 1 and 2": python(800, MEASURED, f"{RUN} 1-2 long-svamp", resumes=True),
    "notebooks 08, 09": python(300, " ok, | failed,", f"{NOTEBOOKS} 08 09"),
    "notebooks 00 to 07": python(900, " ok, | failed,", f"{NOTEBOOKS} {MAIN}"),
    "chaos": python(120, "trials", f"tests/chaos.py {TRIALS} 0 {os.devnull}"),
}


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
    """Make a job in a process of its own; how it ended, in words."""
    file.unlink(missing_ok=True)
    own = [sys.executable, "-m", "grpo_kit.lab.gpu", name, file]
    with subprocess.Popen(own, start_new_session=True) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "the minutes are spent; what it has saved is taken up the next time"
        finally:  # also on Ctrl-C, and with all that it has started
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return in_words(stored(file) or {"said": ["failed, its process died"]})


def in_words(result: dict) -> str:
    """What a job has measured, in a line."""
    if "flops" in result:
        return f"{result['bandwidth'] / 1e12:.2f} TB/s, {result['flops'] / 1e12:.3g} TFLOP/s"
    if "share_of_limit" not in result:
        return "; ".join(result["said"])
    kit, trl = (result["median_seconds"][name]["step"] for name in ("kit", "trl"))
    limit = "sampling {generation:.0%}, update {update:.0%} of the limit"
    memory = "{kit:,.0f} MiB, TRL {trl:,.0f} MiB".format(**result["peak_mib"])
    speed = f"{kit:.2f} s ({result['completions'] * result['mean_length'] / kit:,.0f} tokens/s)"
    return f"{speed}, TRL {trl:.2f} s; {limit.format(**result['share_of_limit'])}; {memory}"


def write_page(output: Path) -> Path:
    """Renew the tables and figures of `README.md` in `output`, for all cards that were measured."""
    cards = sorted({path.parent for path in output.glob("*/*.json")}) or [output / "no GPU yet"]
    rows, parts = [["job", *(path.name for path in cards)]], []
    for name in JOBS:
        results = [stored(folder / f"{slug(name)}.json") for folder in cards]
        said = (f"{in_words(r)} ({r['seconds']:.0f} s)" if r else "not run" for r in results)
        rows.append([name, *said])
    for folder in cards:
        for name in ("long-gsm8k", "long-svamp"):
            own = "\n".join(arms_of(name, load(folder, PROFILE, name)[0], folder))
            parts.append(own.replace("](figures", f"]({folder.name}/figures"))
    text = (results_dir() / "gpu" / "README.md").read_text(encoding="utf-8")
    tables = {"jobs": markdown_table(*rows), "runs": "\n".join(parts).strip() or "Not run."}
    write_atomic(output / "README.md", with_parts(text, tables))
    return output / "README.md"


if __name__ == "__main__":  # in a process of `_made`
    name, file, began = sys.argv[1], Path(sys.argv[2]), time.monotonic()
    try:
        made = JOBS[name].make(file.parent)
    except Exception as error:  # whatever it meets, the next job is made
        made = {"failed": True, "said": [f"failed, {type(error).__name__}: {error}"]}
    made |= {"job": name, "seconds": time.monotonic() - began} | where_it_ran(bench.DEVICE)
    write_atomic(file, json.dumps(made, indent=1) + "\n")
