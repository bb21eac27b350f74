"""One finished run, one JSON file: what it was, where it ran, what came out.

`data/results/<profile>/<experiment>/<arm>/seed-<k>.json` are the reported results. Every table,
figure and verdict of the kit is computed from these files, so a file says enough to tell whether it
still is what the code would run (`config_hash`) and whether it is what a run wrote (`checksum`).
A run on another machine or profile lands beside in the same form.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path

from grpo_kit.paths import results_dir, write_atomic

SCHEMA = 1
CHECKOUT = Path(__file__).resolve().parents[2]
NOTEBOOKS = "notebooks"  # the "experiment" of what notebooks measured, see `bands`
PACKAGES = ("grpo-kit", "torch", "transformers", "numpy", "sentence-transformers", "trl")


@dataclass(frozen=True)
class Record:
    """A finished run.

    `config`: all that decides what the run does and is not code; `config_hash` is its fingerprint.
    `start`: what it began from: collector, rewards, hashes of prompts and weights. `seconds`: wall
    time of its steps, evaluations left out. `evaluation`: metric -> value at the end, on
    `evaluation["eval/n"]` held-out rows; `history`: the rows that `train` logged, at six
    digits; `samples`: a few held-out answers to read.
    """

    experiment: str
    arm: str
    profile: str
    seed: int
    config: dict
    start: dict
    versions: dict[str, str]
    commit: str
    machine: dict
    finished: str  # the day, ISO
    seconds: float
    evaluation: dict[str, float]
    history: list[dict]
    samples: list[dict] = field(default_factory=list)

    @property
    def config_hash(self) -> str:
        return fingerprint(rounded(self.config))

    def series(self, metric: str) -> dict[float, float]:
        """Step -> value of one metric, where it was logged and a number."""
        return {row["step"]: row[metric] for row in self.history if row.get(metric) is not None}

    def change(self, metric: str) -> float:
        """The last value of `metric` minus the first. KeyError where it was never logged."""
        values = list(self.series(metric).values())
        if not values:
            raise KeyError(metric)
        return values[-1] - values[0]

    def path(self, results: str | Path) -> Path:
        return path_of(results, self.profile, self.experiment, self.arm, self.seed)

    def write(self, results: str | Path) -> Path:
        """Write under `results`, whole or not at all; returns the file's path."""
        content = {"schema": SCHEMA, **asdict(self), "config_hash": self.config_hash}
        content = rounded(content)
        content["checksum"] = fingerprint(content)
        # a row of the history a line: short enough to store, and a diff can be read
        rows = ",\n  ".join(json.dumps(row) for row in content.pop("history"))
        head = json.dumps(content, indent=1, ensure_ascii=False)
        path = self.path(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f'{head[:-2]},\n "history": [\n  {rows}\n ]\n}}\n')
        return path


def path_of(results: str | Path, profile: str, experiment: str, arm: str, seed: int) -> Path:
    return Path(results) / profile / experiment / slug(arm) / f"seed-{seed}.json"


def slug(arm: str) -> str:
    """The arm's name as a folder's: "truth 10 %" -> "truth-10"."""
    kept = "".join(c if c.isalnum() else " " for c in arm)
    return "-".join(kept.split()) or "arm"


def fingerprint(content: object) -> str:
    """Sixteen hex digits of SHA-256 over the content as JSON with sorted keys."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rounded(value: object) -> object:
    """As it is stored: with floats at six significant digits, as a history is mostly digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def where_it_ran(device: str = "cpu") -> dict:
    """The fields of a `Record` that tell of code and machine: versions, commit, machine, day.

    `device`: what runs are on; a GPU beside that is not used is not named.
    """
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "commit": commit(),
        "machine": {
            "processor": processor(),
            "accelerator": "none" if device == "cpu" else torch.cuda.get_device_name(device),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
        },
        "finished": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """The name of this machine's processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit(checkout: str | Path = CHECKOUT) -> str:
    """The checkout's commit, with "+" where code or base differ from it; "" outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "grpo_kit/lab/records.py")
        changed = git("status", "--porcelain", "--", "grpo_kit", "data/tiny-base")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def read(path: str | Path) -> Record:
    """The record in a file. Raises ValueError, in one sentence, for one that cannot be trusted."""
    path = Path(path)
    again = "delete it and run the experiment again, or take it from version control"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        schema = content.pop("schema")
    except (ValueError, AttributeError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is no whole result file ({error}): {again}.") from None
    if schema != SCHEMA:
        raise ValueError(
            f"{path} is of schema {schema!r}, this reads {SCHEMA}: run the experiment again, or "
            "read it with the version of the kit that wrote it."
        )
    checksum, stated = content.pop("checksum", None), content.pop("config_hash", None)
    names = {f.name for f in fields(Record)}
    if missing := sorted(names - set(content)):
        raise ValueError(f"{path} lacks {', '.join(missing)}: {again}.")
    if not content["history"] and content["experiment"] != NOTEBOOKS:
        raise ValueError(f"{path} has no history: {again}.")
    if fingerprint(content["config"]) != stated:
        raise ValueError(
            f"{path} was edited: its config has not the hash that its run wrote: {again}."
        )
    if fingerprint({"schema": schema, **content, "config_hash": stated}) != checksum:
        raise ValueError(f"{path} was edited after the run had written it: {again}.")
    return Record(**{name: content[name] for name in names})


def load(
    results: str | Path | None = None, profile: str = "*", experiment: str = "*"
) -> tuple[list[Record], list[str]]:
    """All records under a folder, and a sentence for each file that cannot be used.

    By default the reported ones. Two files with the same seed of an arm are named, and the first
    one is taken.
    """
    records: dict[tuple, Record] = {}
    problems = []
    results = Path(results or results_dir())
    for path in sorted(results.glob(f"{profile}/{experiment}/*/seed-*.json")):
        try:
            record = read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        key = record.profile, record.experiment, record.arm, record.seed
        if key in records:
            problems.append(
                f"{path} holds seed {record.seed} of {record.experiment}, {record.arm!r}, which "
                f"{records[key].path(results)} holds too: seeds of an arm must differ; delete one."
            )
        elif record.path(results) != path:
            problems.append(
                f"{path} holds {record.experiment}, {record.arm!r}, seed {record.seed}; its place "
                f"is {record.path(results)}: move it there."
            )
        else:
            records[key] = record
    return list(records.values()), problems


def by_arm(records: Iterable[Record]) -> dict[str, dict[int, Record]]:
    """Arm -> seed -> record, seeds in order."""
    arms: dict[str, dict[int, Record]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        arms.setdefault(record.arm, {})[record.seed] = record
    return arms
