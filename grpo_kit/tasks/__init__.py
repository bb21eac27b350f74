"""Tasks: every task gives train and test rows in the form that the rewards read.

A row has `prompt` (a list of `{"role", "content"}` messages), `answer` (str, the gold answer) and
other columns that rewards need. `datasets` is imported only when a task is built.
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
    """A named pair of datasets: `train` to learn from, `test` held out.

    Raises TypeError for rows that are no `datasets.Dataset`.
    """

    name: str
    train: datasets.Dataset
    test: datasets.Dataset

    def __post_init__(self):
        for split, rows in (("train", self.train), ("test", self.test)):
            if not isinstance(getattr(rows, "column_names", None), list):
                found = f"the {split} rows of task {self.name!r} are a {type(rows).__name__}"
                raise TypeError(f"{found}: give a Dataset, by datasets.Dataset.from_list(rows).")


def load(name: str) -> Task:
    """A task by name: word_problems, svamp or gsm8k. Raises ValueError for other names."""
    from grpo_kit.tasks.published import gsm8k, svamp
    from grpo_kit.tasks.word_problems import word_problems

    tasks = {"word_problems": word_problems, "svamp": svamp, "gsm8k": gsm8k}
    if name not in tasks:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(tasks)}.")
    return tasks[name]()


def system_prompt(name: str) -> str | None:
    """What the prompts of a task begin with, or None where they are the question alone.

    That of GSM8K asks for "a single number": for others give rows whose prompts are messages.
    """
    from grpo_kit.tasks.published import SVAMP_PROMPT, SYSTEM_PROMPT

    return {"gsm8k": SYSTEM_PROMPT, "svamp": SVAMP_PROMPT}.get(name)


def split_of(key: str) -> str:
    """The split of a generated problem: "test" for a tenth of all keys, else "train"."""
    return "test" if hashlib.sha256(key.encode()).digest()[0] % 10 == 0 else "train"


def chat(system: str, question: str) -> list[dict]:
    """The prompt of a question after a system message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def shipped(name: str) -> Task:
    """A generated task as it is shipped: one user message a row, and the row's other columns."""
    from datasets import Dataset

    splits = {}
    for split in ("train", "test"):
        lines = (data_dir() / name / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        splits[split] = Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row.pop("question")}], **row} for row in rows]
        )
    return Task(name, **splits)
