"""What a run leaves in its folder, and how it is resumed; the kit's loop and TRL's use it.

`history.jsonl` grows by a line per step, `checkpoint.pt` is replaced whole, `run.json` comes at the
end. A run can be killed at any instant and resumed from its checkpoint.
"""

import dataclasses
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from grpo_kit.config import GRPOConfig
from grpo_kit.paths import make_output_dir, replacing, write_atomic

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


class RunFiles:
    """Writes a run's folder. Raises RuntimeError where that cannot be written."""

    def __init__(self, output_dir: str | Path, config: GRPOConfig, seed: int, start: dict) -> None:
        self.folder = make_output_dir(output_dir)
        self.run = Run(self.folder, config, seed, start=start)
        self.remedy = "there is no checkpoint yet, start again"  # the end of an error's sentence
        for unfinished in self.folder.glob(f".{CHECKPOINT}.*.partial"):  # of a run that was killed
            unfinished.unlink()

    @property
    def state(self) -> dict:
        """Config, seed, start and history so far, as JSON has them."""
        state = {"config": dataclasses.asdict(self.run.config), "seed": self.run.seed}
        state |= {"start": self.run.start, "history": self.run.history}
        return json.loads(json.dumps(state))

    def begin(self, state: dict | None = None, checkpoint: str = "") -> None:
        """Start the history anew or, given the `state` in a checkpoint, go on from there.

        Raises ValueError where the folder holds another run: other config, seed or start.
        """
        if state is not None:
            self._check_same_run(state)
            self.run.history = state["history"]
            self.remedy = f"resume from {checkpoint} in {self.folder}"
        else:
            (self.folder / REPLAY).unlink(missing_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in self.run.history)
        write_atomic(self.folder / HISTORY, lines)

    def _check_same_run(self, state: dict) -> None:
        runs = (state, self.state)
        before, now = ({**run["config"], "seed": run["seed"], **run["start"]} for run in runs)
        if changed := [name for name, value in now.items() if before.get(name) != value]:
            both = "; ".join(f"{k} {before.get(k)!r} there, {now[k]!r} here" for k in changed)
            problem = f"{self.folder} holds a run of another configuration ({both})"
            raise ValueError(f"{problem}: resume with the same one, or choose another folder.")

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return self.run.history[-1]["num_generated_tokens"] if self.run.history else 0

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
        """Write `state`, tensors and plain values, and the run's own: whole or not at all.

        Raises RuntimeError where it cannot be written.
        """
        try:
            with replacing(self.folder / CHECKPOINT) as file:
                torch.save({**self.state, "step": step, **state}, file)
        except (OSError, RuntimeError) as error:
            raise self.unwritten(f"checkpoint of step {step}", error) from error
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
        try:
            torch.load(checkpoint, weights_only=True, map_location="meta")  # all but the numbers
            with zipfile.ZipFile(checkpoint) as file:
                damaged = file.testzip() is not None  # torch itself compares no checksum
        except Exception:  # which one depends on where it is damaged
            damaged = True
        if damaged:
            problem = f"{checkpoint} is damaged, it does not read back as it was saved"
            raise RuntimeError(f"{problem}: delete it to start again.")
        state = torch.load(checkpoint, weights_only=True, map_location=device)
        self.begin(state, f"the checkpoint of step {state['step']}")
        return state

    def finish(self) -> Run:
        """Write `run.json`."""
        write_atomic(self.folder / RUN, json.dumps(self.state, indent=1))
        return self.run
