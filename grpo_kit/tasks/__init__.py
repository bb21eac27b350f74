"""Tasks: one file each; every task gives train and test rows in the form that the rewards read.

A row has `prompt` (a list of `{"role", "content"}` messages), `answer` (str, the gold answer) and
other columns that rewards need. `datasets` is imported only when a task is built.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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


def load(name: str, folder: str | os.PathLike | None = None) -> Task:
    """A task by name: word_problems, or gsm8k or competition_math from `folder` or the Hub.

    Raises ValueError for another name or for a `folder` of word problems.
    """
    from grpo_kit.tasks.competition_math import competition_math
    from grpo_kit.tasks.gsm8k import gsm8k
    from grpo_kit.tasks.word_problems import word_problems

    if name == "word_problems" and folder:
        raise ValueError(f"the word problems come with the kit: leave out --data {folder}.")
    tasks = {"word_problems": word_problems, "gsm8k": gsm8k, "competition_math": competition_math}
    if name not in tasks:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(tasks)}.")
    return tasks[name](folder) if folder else tasks[name]()


def split_of(key: str) -> str:
    """The split of a generated problem: "test" for a tenth of all keys, else "train"."""
    return "test" if hashlib.sha256(key.encode()).digest()[0] % 10 == 0 else "train"


def shipped(task: str, split: str, n: int | None = None) -> datasets.Dataset:
    """The first `n` shipped rows of a generated task (None: all), with one user message each."""
    from datasets import Dataset

    path = data_dir() / task / f"{split}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:n]]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row.pop("question")}], **row} for row in rows]
    )


def read_splits(
    folder, splits, convert: Callable, columns: Sequence[str], *, name: str, url: str, **on_hub
) -> list[datasets.Dataset]:
    """The rows of each split, from `<split>.jsonl` in `folder`, or from the Hub where it is None.

    `convert` makes a row of a published one whose `columns` hold texts; `url` is for errors;
    `on_hub` has `hub_name` and may have `config` and `revision`.

    Raises FileNotFoundError for missing files, RuntimeError where the Hub does not give the
    dataset, ValueError for no row or a bad one, by its number.
    """
    import datasets

    files = [f"{split}.jsonl" for split in splits]
    if folder is None:
        published = _from_hub(files, **on_hub)
    else:
        folder = Path(folder).expanduser()
        if missing := [file for file in files if not (folder / file).is_file()]:
            problem = f"lacks {' and '.join(missing)}" if folder.is_dir() else "is not a folder"
            wanted = f"a folder of {name} holds {' and '.join(files)}, as published at {url}"
            raise FileNotFoundError(f"{str(folder)!r} {problem}: {wanted}")
        texts = [(folder / file).read_text(encoding="utf-8") for file in files]
        published = {split: text.split("\n") for split, text in zip(splits, texts, strict=True)}

    result = []
    for split in splits:
        rows = []
        for i, row in enumerate(published[split], start=1):
            if row == "":  # after the last line of a file
                continue
            try:
                row = json.loads(row) if isinstance(row, str) else row
                values = [row.get(name) for name in columns] if isinstance(row, dict) else [None]
                if not all(isinstance(value, str) and value for value in values):
                    raise ValueError(f"{row!r:.200} lacks the texts {' and '.join(columns)}")
                rows.append(convert(row))
            except ValueError as error:
                raise ValueError(f"row {i} of {split}: {error}") from None
        if not rows:
            raise ValueError(f"the {split} split of this {name} is empty: fetch the data again")
        result.append(datasets.Dataset.from_list(rows))
    return result


def _from_hub(files: Sequence[str], hub_name: str, config=None, revision=None) -> dict:
    import datasets
    import huggingface_hub

    try:
        # load_dataset retries an unreachable Hub for half a minute; one request tells at once.
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().dataset_info(hub_name, revision=revision, timeout=10)
        return datasets.load_dataset(hub_name, config, revision=revision)
    except Exception as error:  # whatever the network, the Hub or its cache raises
        problem = f"the Hub did not give the dataset {hub_name!r} ({type(error).__name__})"
        remedy = f"check the network, or pass a local folder with {' and '.join(files)}"
        hint = "set HF_HUB_OFFLINE=1 if it is in the cache"
        raise RuntimeError(f"{problem}: {remedy}; {hint}") from error
