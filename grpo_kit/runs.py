"""What a run leaves in its folder, and how it is resumed; the kit's loop and TRL's use it.

`history.jsonl` grows by a line per step, `checkpoint.pt` is replaced whole, `run.json` comes at the
end. A run can be killed at any instant and resumed from its checkpoint.
"""

import dataclasses
import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_kit.config import GRPOConfig
from grpo_kit.paths import make_output_dir, write_atomic, writing

CHECKPOINT, HISTORY, RUN = "checkpoint.pt", "history.jsonl", "run.json"
REPLAY = "replay.jsonl"  # see course.replay


@dataclass
class Run:
    """`history`: a plain dict per step with TRL's metric names; `start`: what it began from."""

    output_dir: Path
    config: GRPOConfig
    seed: int
    history: list[dict] = field(default_factory=list)
    start: dict = field(default_factory=dict)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, where it was logged, see `value_of`."""
        rows = [row for row in self.history if name in row]
        return [row["step"] for row in rows], [value_of(row, name) for row in rows]


def value_of(row: dict, name: str) -> float | None:
    """A row's metric, of the same held-out problems in all rows of a run; None without one.

    Evaluations at the ends of a run may take more problems than those between, see `evaluate`.
    """
    return row.get(name.replace("eval/", "between/"), row.get(name))


def one_writer(train: Callable) -> Callable:
    """`train`, while nobody else writes a run into its `output_dir`."""

    @functools.wraps(train)
    def held(*arguments: Any, output_dir: str | Path, **options: Any) -> Run:
        with writing(output_dir):
            return train(*arguments, output_dir=output_dir, **options)

    return held


def is_intact(checkpoint: Path) -> bool:
    """Whether a checkpoint reads back as it was saved: torch writes a zip file with checksums."""
    try:
        torch.load(checkpoint, weights_only=True, map_location="meta")  # all but the numbers
        with zipfile.ZipFile(checkpoint) as file:
            return file.testzip() is None
    except Exception:  # what a damaged zip file raises depends on where it is damaged
        return False


def _lines(history: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in history)


def _digest(history: list[dict]) -> str:
    return hashlib.sha256(_lines(history).encode()).hexdigest()


class RunFiles:
    """Writes a run's folder. Raises RuntimeError where that cannot be written."""

    def __init__(self, output_dir: str | Path, config: GRPOConfig, seed: int, start: dict) -> None:
        self.folder = make_output_dir(output_dir)
        self.run = Run(self.folder, config, seed, start=start)
        self.remedy = "there is no checkpoint yet, start again"  # the end of an error's sentence
        for unfinished in self.folder.glob(f".{CHECKPOINT}.*.partial"):  # of a run that was killed
            unfinished.unlink()

    @property
    def identity(self) -> dict:
        """Config, seed and start, as JSON has them: a run with the same ones is the same run."""
        identity = {"config": dataclasses.asdict(self.run.config), "seed": self.run.seed}
        return json.loads(json.dumps(identity | {"start": self.run.start}))

    def begin(self, identity: dict | None = None, step: int = 0, checkpoint: str = "") -> None:
        """Start the history anew or, given the `identity` of a checkpoint, go on after its `step`.

        Raises ValueError where the folder holds another run.
        """
        if identity is not None:
            self._check_same_run(identity)
            self.run.history = self._rows_up_to(step, identity.get("history"))
            self.remedy = f"resume from {checkpoint} in {self.folder}"
        else:
            (self.folder / REPLAY).unlink(missing_ok=True)
        write_atomic(self.folder / HISTORY, _lines(self.run.history))

    def _check_same_run(self, identity: dict) -> None:
        runs = (identity, self.identity)
        before, now = ({**run["config"], "seed": run["seed"], **run["start"]} for run in runs)
        if changed := [name for name, value in now.items() if before.get(name) != value]:
            both = "; ".join(f"{k} {before.get(k)!r} there, {now[k]!r} here" for k in changed)
            problem = f"{self.folder} holds a run of another configuration ({both})"
            raise ValueError(f"{problem}: resume with the same one, or choose another folder.")

    def _rows_up_to(self, step: int, digest: str | None) -> list[dict]:
        rows: list[dict] = []
        try:
            for line in (self.folder / HISTORY).read_text().splitlines():
                if (row := json.loads(line))["step"] > step:
                    break
                rows.append(row)
        except (OSError, ValueError, TypeError, KeyError):  # a kill may have cut the last line
            pass
        if not rows or rows[-1]["step"] != step or digest not in (None, _digest(rows)):
            problem = f"a checkpoint of step {step}, but its {HISTORY} is missing, cut or changed"
            remedy = "delete it to start again, or choose another folder"
            raise ValueError(f"{self.folder} holds {problem}: {remedy}.")
        return rows

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return self.run.history[-1]["num_generated_tokens"] if self.run.history else 0

    @property
    def digest(self) -> str:
        """Of the history so far."""
        return _digest(self.run.history)

    def log(self, row: dict) -> None:
        self.run.history.append(row)
        try:
            with open(self.folder / HISTORY, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise self.unwritten(f"row of step {row['step']}", error) from error

    def count_unscored(self, row: dict, scored: bool, names: list[str]) -> None:
        """Count in `row` steps without a score; RuntimeError at `max_unscored_steps` in a row."""
        if scored:
            return
        last = self.run.history[-1] if self.run.history else {}
        row["unscored_steps"] = unscored = last.get("unscored_steps", 0) + 1
        if unscored >= self.run.config.max_unscored_steps:
            self.log(row)
            steps = f"{unscored} steps in a row (up to step {row['step']})"
            remedy = f"look at what {', '.join(names)} return; {self.remedy}"
            raise RuntimeError(f"no completion could be scored for {steps}: {remedy}.")

    def save_checkpoint(self, step: int, **state: Any) -> None:
        """Write `state`, tensors and plain values, with the run's identity: whole or not at all.

        It is read back before it takes the place of the last one. Raises RuntimeError where it
        cannot be written.
        """
        checkpoint, content = self.folder / CHECKPOINT, {**self.identity, "step": step, **state}
        content["history"] = self.digest
        temporary = self.folder / f".{CHECKPOINT}.{os.getpid()}.partial"
        try:
            with open(temporary, "wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            if not is_intact(temporary):
                raise OSError("it does not read back as it was written")
            os.replace(temporary, checkpoint)
        except (OSError, RuntimeError) as error:
            raise self.unwritten(f"checkpoint of step {step}", error) from error
        finally:
            temporary.unlink(missing_ok=True)
        self.remedy = f"resume from the checkpoint of step {step} in {self.folder}"

    def unwritten(self, what: str, error: Exception) -> RuntimeError:
        """What to raise where a file cannot be written; libraries have words of their own."""
        cause = error if isinstance(error, OSError) else error.__context__ or error
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        problem = f"cannot write the {what} to {self.folder} ({reason})"
        kept = f"nothing that was saved is lost; make room, then {self.remedy}"
        return RuntimeError(f"{problem}: {kept}.")

    def resume(self, device: torch.device) -> dict[str, Any] | None:
        """Begin after the last checkpoint and return its state; without one, start anew: None.

        Raises RuntimeError where it is damaged, ValueError where TRL's trainer made it.
        """
        checkpoint = self.folder / CHECKPOINT
        if not checkpoint.exists():
            if any(self.folder.glob("checkpoint-*")):
                problem = f"{self.folder} holds a run by TRL's trainer"
                raise ValueError(f"{problem}: resume with that (--engine trl), or choose another.")
            return self.begin()
        if not is_intact(checkpoint):
            problem = f"{checkpoint} is damaged, it does not read back as it was saved"
            raise RuntimeError(f"{problem}: delete it to start again.")
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        self.begin(state, state["step"], f"the checkpoint of step {state['step']}")
        return state

    def finish(self) -> Run:
        """Write `run.json`."""
        content = self.identity | {"history": self.run.history}
        write_atomic(self.folder / RUN, json.dumps(content, indent=1))
        return self.run
