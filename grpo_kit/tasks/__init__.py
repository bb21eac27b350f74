"""Tasks: one file each; every task gives train and test rows in the form that the rewards read.

A row has `prompt` (a list of `{"role", "content"}` messages), `answer` (str, the gold answer) and
whatever other columns the task's rewards need. `datasets` is imported only when a task is built.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_kit.paths import data_dir

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Task:
    """A named pair of datasets: `train` to learn from, `test` held out."""

    name: str
    train: datasets.Dataset
    test: datasets.Dataset


def split_of(key: str) -> str:
    """The split of a generated problem: "test" for a tenth of all keys, else "train"."""
    return "test" if hashlib.sha256(key.encode()).digest()[0] % 10 == 0 else "train"


def shipped_rows(task: str, split: str) -> list[dict]:
    """The shipped rows of a generated task, with a `question` in place of the prompt."""
    path = data_dir() / task / f"{split}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def as_dataset(rows: list[dict]) -> datasets.Dataset:
    """The rows with `prompt`, one user message, in place of `question`."""
    from datasets import Dataset

    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row.pop("question")}], **row} for row in rows]
    )
