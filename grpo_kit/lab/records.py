"""One finished run, one JSON object: a file at first, then a line among those of its experiment.

A run writes `<results>/<profile>/<experiment>/<arm>/seed-<k>.json`; `gather` moves such files into
`<results>/<profile>/<experiment>.jsonl.gz`. Its `checksum` tells whether it is what a run wrote.
"""

import contextlib
import datetime
import gzip
import hashlib
import json
import math
import platform
import re
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from grpo_kit.config import GRPOConfig, reason
from grpo_kit.paths import results_dir, write_atomic

CHECKOUT = Path(__file__).resolve().parents[2]
BASES = ("data/tiny-base*", "data/smol-svamp", "data/smol-skills")
NOTEBOOKS = "notebooks"  # the "experiment" of what notebooks measured, see `bands`
LATE = 20  # steps
REACHED = 0.8  # of accuracy, see `Record.steps`
COSTS = ("tokens", "updates", "seconds")  # the names of `Record.cost`
PACKAGES = ("grpo-kit", "torch", "transformers", "numpy", "sentence-transformers", "trl")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished run, with the fields of its file in their order."""

    schema: Literal[1] = 1
    experiment: str
    arm: str
    profile: str
    seed: int
    config: dict  # all that decides what the run does and is not code
    start: dict  # batch source, rewards, hashes of prompts and first weights
    versions: dict[str, str]
    commit: str
    machine: dict
    finished: str  # the day, ISO
    seconds: float  # wall time of its steps, without evaluations
    evaluation: dict  # metric -> value at the end, on "eval/n" held-out rows
    history: list[dict]  # the rows that `train` logged
    samples: list[dict] = Field(default_factory=list)  # a few held-out answers to read
    evaluator: int = 1  # `Experiment.evaluator` when it was measured

    def logged(self, metric: str) -> list[float]:
        """All values of `metric` in the history, in order."""
        return [row[metric] for row in self.history if row.get(metric) is not None]

    def end(self, metric: str) -> float | None:
        """What was measured of the trained policy, or logged last; None where it never was."""
        values = self.logged(metric)
        return self.evaluation.get(metric, values[-1] if values else None)

    def change(self, metric: str) -> float | None:
        """The last value of `metric` minus the first; None where it was logged less than twice."""
        values = self.logged(metric)
        return values[-1] - values[0] if len(values) > 1 else None

    def late(self, metric: str) -> float | None:
        """The mean of `metric` over the last `LATE` steps, at most half of them."""
        values = self.logged(metric)
        return fmean(values[-min(LATE, (len(values) + 1) // 2) :]) if values else None

    def curve(self, metric: str) -> dict[int, float]:
        """Step -> `metric`, where an evaluation logged it, of the same test problems throughout."""
        between = metric.replace("eval/", "between/", 1)
        rows = [(row["step"], row.get(between, row.get(metric))) for row in self.history]
        return {step: value for step, value in rows if value is not None}

    def rise(self, metric: str) -> float | None:
        """How far the best of `metric` lies above its first value; best of means of two in turn."""
        first, *later = self.curve(metric).values() or [None]
        return max(_in_twos(later)) - first if later else None

    def fall(self, metric: str) -> float | None:
        """The last of `metric` minus its best, of means of two evaluations in turn: at most 0."""
        values = _in_twos([*self.curve(metric).values()])
        return values[-1] - max(values) if len(values) > 1 else None

    def steps(self, metric: str) -> float | None:
        """Steps until `metric` has first come to `REACHED`; all of them, where it never did."""
        curve = [*self.curve(metric).items()]
        if curve and curve[0][1] >= REACHED:
            return float(curve[0][0])
        for (step, value), (later, next_value) in pairwise(curve):
            if value < REACHED <= next_value:
                return step + (later - step) * (REACHED - value) / (next_value - value)
        return float(curve[-1][0]) if curve else None

    @property
    def course(self) -> list[tuple]:
        """Tokens and accuracy at each step: equal for two runs only where these did the same."""
        return [(row["num_generated_tokens"], row.get("eval/pass@1")) for row in self.history]

    @property
    def cost(self) -> tuple[int, int, float]:
        """Generated tokens, optimiser steps, and seconds of training."""
        last = self.history[-1]
        config = GRPOConfig(**{k: v for k, v in self.config.items() if hasattr(GRPOConfig, k)})
        return last["num_generated_tokens"], last["step"] * config.updates_per_step, self.seconds

    def path(self, results: str | Path) -> Path:
        return path_of(results, self.profile, self.experiment, self.arm, self.seed)

    def as_stored(self) -> dict:
        content = rounded(asdict(self))
        content["config_hash"] = fingerprint(content["config"])
        return content | {"checksum": fingerprint(content)}

    def write(self, results: str | Path) -> Path:
        """Write the file under `results`, whole or not at all; return its path."""
        path = self.path(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(self.as_stored(), ensure_ascii=False) + "\n")
        return path


STORED = TypeAdapter(Record)


def path_of(results: str | Path, profile: str, experiment: str, arm: str, seed: int) -> Path:
    return Path(results) / profile / experiment / slug(arm) / f"seed-{seed}.json"


def slug(arm: str) -> str:
    """The arm's name as a folder's: "truth 10 %" -> "truth-10"."""
    return "-".join("".join(c if c.isalnum() else " " for c in arm).split()) or "arm"


def fingerprint(content: object) -> str:
    """Sixteen hex digits of SHA-256 over the content as JSON with sorted keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(value: object) -> object:
    """`value` as it is stored: floats at six significant digits, None for NaN and infinity."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def where_it_ran(device: str = "cpu") -> dict:
    """The fields of a `Record` on code and machine; a GPU is named only if `device` is one."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    about = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", about.read_text()) if about.exists() else []
    accelerator = {"cpu": "none", "mps": "Apple GPU"}.get(device)
    if accelerator is None:  # without it `load_policy` says what is missing
        accelerator = torch.cuda.get_device_name(device) if torch.cuda.is_available() else "none"
    machine = {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "accelerator": accelerator,
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    today = f"{datetime.date.today()}"
    return {"versions": versions, "commit": commit(), "machine": machine, "finished": today}


def commit(checkout: str | Path = CHECKOUT) -> str:
    """The checkout's commit, with "+" where code or base differ from it; "" outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "grpo_kit/lab/records.py")
        changed = git("status", "--porcelain", "--", "grpo_kit", *BASES)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _in_twos(values: list[float]) -> list[float]:
    """Means of each two in turn: the best of many single evaluations is partly luck."""
    return [fmean(pair) for pair in pairwise(values)] or values


REMEDY = "delete it and run the experiment again, or take it from version control."


def _parsed(text: str | bytes) -> Record:
    """The record in a file or line. Raises ValueError, KeyError for one that cannot be trusted."""
    content = json.loads(text)
    record = STORED.validate_python(content)
    checksum = fingerprint({k: v for k, v in content.items() if k != "checksum"})
    if checksum != content["checksum"]:
        raise ValueError("it was edited after the run had written it")
    if not record.history and record.experiment != NOTEBOOKS:
        raise ValueError("it has no history")
    if not all("step" in row and "num_generated_tokens" in row for row in record.history):
        raise ValueError("its history lacks steps or tokens")
    return record


def read(path: str | Path) -> Record:
    """The record in a file. Raises ValueError, in one sentence, for one that cannot be trusted."""
    path = Path(path)
    try:
        record = _parsed(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is no whole result file ({reason(error)}): {REMEDY}") from None
    if (place := record.path(path.parents[3])) != path:
        raise ValueError(f"{path} holds the run that belongs in {place}: move or delete it.")
    return record


def gathered_path(results: str | Path, profile: str, experiment: str) -> Path:
    return Path(results) / profile / f"{experiment}.jsonl.gz"


def read_gathered(path: Path) -> tuple[list[Record], list[str]]:
    """The records in the lines of a file, and a sentence on each line that cannot be used."""
    if not path.exists():
        return [], []
    state = path.stat()
    return _read_gathered(path, state.st_mtime_ns, state.st_size)


@cache
def _read_gathered(path: Path, *state: int) -> tuple[list[Record], list[str]]:
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        return [], [f"{path} is no whole file of results ({error}): {REMEDY}"]
    found, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            record = _parsed(line)
            if gathered_path(path.parents[1], record.profile, record.experiment) != path:
                raise ValueError(f"it is of {record.experiment!r}, profile {record.profile!r}")
            found.append(record)
        except (ValueError, KeyError, RecursionError) as error:
            problems.append(f"line {number} of {path} is no whole result ({reason(error)}).")
    return found, problems


def find(results: str | Path, profile: str, experiment: str, arm: str, seed: int) -> Record | None:
    """The stored record of a run; ValueError for a file that cannot be trusted."""
    path = path_of(results, profile, experiment, arm, seed)
    if path.exists():
        return read(path)
    found, problems = read_gathered(gathered_path(results, profile, experiment))
    if problems:
        raise ValueError(problems[0])
    return next((one for one in found if (one.arm, one.seed) == (arm, seed)), None)


def load(
    results: str | Path | None = None, profile: str = "*", experiment: str = "*"
) -> tuple[list[Record], list[str]]:
    """All records under a folder, by default the reported ones, and a sentence on each bad one.

    A run's own file takes the place of its line among the gathered ones: it is newer.
    """
    results, found, problems = Path(results or results_dir()), {}, []
    for path in sorted(results.glob(f"{profile}/{experiment}.jsonl.gz")):
        gathered, wrong = read_gathered(path)
        found |= {one.path(results): one for one in gathered}
        problems += wrong
    for path in sorted(results.glob(f"{profile}/{experiment}/*/seed-*.json")):
        try:
            found[path] = read(path)
        except ValueError as error:
            problems.append(str(error))
    return [found[path] for path in sorted(found)], problems


def gather(results: str | Path) -> list[Path]:
    """Move the files of finished runs among the lines of their experiments; returns the new files.

    What cannot be read stays where it is. Nothing is lost if this is interrupted.
    """
    results, written, own = Path(results), [], defaultdict(dict)
    for path in results.glob("*/*/*/seed-*.json"):
        with contextlib.suppress(ValueError):
            own[path.parents[1]][path] = read(path)
    for folder, files in sorted(own.items()):
        path = gathered_path(results, *folder.parts[-2:])
        before, problems = read_gathered(path)
        if problems:  # a bad line would be lost
            continue
        lines = {one.path(results): one for one in before} | files
        stored = [
            json.dumps(lines[place].as_stored(), ensure_ascii=False) for place in sorted(lines)
        ]
        write_atomic(path, gzip.compress("".join(f"{line}\n" for line in stored).encode(), mtime=0))
        for place, record in files.items():
            if read(place) == record:  # else made again in the meantime
                place.unlink()
        for empty in (*filter(Path.is_dir, folder.iterdir()), folder):
            if not any(empty.iterdir()):
                empty.rmdir()
        written.append(path)
    return written


def by_arm(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Arm -> seed -> record, seeds in order."""
    arms: dict[str, dict[int, Record]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        arms.setdefault(record.arm, {})[record.seed] = record
    return arms
