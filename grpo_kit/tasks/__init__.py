"""Tasks: one file each; every task gives train and test rows in the form that the rewards read.

A row has `prompt` (a list of `{"role", "content"}` messages), `answer` (str, the gold answer) and
whatever other columns the task's rewards need. `datasets` is imported only when a task is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Task:
    """A named pair of datasets: `train` to learn from, `test` held out."""

    name: str
    train: datasets.Dataset
    test: datasets.Dataset
