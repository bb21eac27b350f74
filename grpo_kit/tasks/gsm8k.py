"""GSM8K: 7,473 train and 1,319 test grade-school problems with worked solutions.

Source: Cobbe et al. 2021 (arXiv 2110.14168), MIT licence; the gold answer follows `####`. The kit
carries no copy: the rows come from the Hugging Face Hub or from a local folder with `train.jsonl`
and `test.jsonl`, one object with `question` and `answer` a line.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo_kit.tasks import Task
from grpo_kit.tasks.answers import parse_number
from grpo_kit.tasks.source import read_splits

if TYPE_CHECKING:
    import datasets

HUB_NAME = "openai/gsm8k"
HUB_REVISION = "740312add88f781978c0658806c59bc2815b9866"

SYSTEM_PROMPT = (
    "You are a helpful assistant that solves maths problems step by step. First think about the "
    "reasoning, then give the final answer as a single number. Enclose the reasoning in "
    "<think> </think> tags and the answer in <answer> </answer> tags, like this: "
    "<think>reasoning here</think><answer>answer here</answer>"
)


def gsm8k(
    path_or_name: str | os.PathLike = HUB_NAME,
    *,
    revision: str | None = None,
    n_train: int | None = None,
    n_test: int | None = None,
    seed: int = 0,
) -> Task:
    """Load GSM8K as a task.

    Args:
        path_or_name: a local folder, or else a dataset on the Hub with the config "main".
        revision: commit on the Hub; None means the pinned one for `openai/gsm8k`.
        n_train, n_test: how many rows to draw (by `seed`, kept in order); None means all.
        seed: of the draw.

    Each row has `prompt` (system message, then the question), `answer` (the gold number without
    commas or units), `question`, and `solution` (the worked solution as published, with its
    `<<48/2=24>>` annotations, up to `####`).

    Raises FileNotFoundError for a folder without its files, RuntimeError where the Hub does not
    give the dataset, ValueError for rows that are not GSM8K's or more rows asked for than there
    are. HF_HUB_OFFLINE=1 is honoured: the Hub's cache is used, and nothing else.
    """
    if revision is None and path_or_name == HUB_NAME:
        revision = HUB_REVISION
    read = read_splits(
        path_or_name,
        ("train", "test"),
        config="main",
        revision=revision,
        of="a GSM8K folder",
        url="https://github.com/openai/grade-school-math",
    )
    return Task(
        name="gsm8k",
        train=_dataset(read["train"], "train", n_train, seed),
        test=_dataset(read["test"], "test", n_test, seed),
    )


def _dataset(source: Iterable, split: str, n: int | None, seed: int) -> datasets.Dataset:
    import datasets

    rows = [_row(row, f"row {i} of {split}") for i, row in enumerate(source, start=1)]
    if n is not None:
        if not 1 <= n <= len(rows):
            raise ValueError(f"n_{split}={n} must be between 1 and the {len(rows)} rows of {split}")
        rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), n))]
    if not rows:
        raise ValueError(f"the {split} split of this GSM8K is empty: fetch the data again")
    return datasets.Dataset.from_list(rows)


def _row(row: object, where: str) -> dict:
    """Turn a published row into the task's columns; `where` names it in errors."""
    texts = isinstance(row, dict) and [row.get("question"), row.get("answer")]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} is {row!r:.200}: expected the texts `question` and `answer`")
    solution, mark, gold = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"{where} has no '####' before its gold answer: {row['answer']!r:.200}")
    number = parse_number(gold)
    if number is None:
        raise ValueError(f"{where} has a gold answer that is not a number: {gold.strip()!r:.200}")
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": row["question"]},
        ],
        "answer": str(number),
        "question": row["question"],
        "solution": solution.strip(),
    }
