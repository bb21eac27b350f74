"""MATH: 12,000 competition problems to learn from and MATH-500 to evaluate on, answers in LaTeX.

Source: Hendrycks et al. 2021 (arXiv 2103.03874, MIT licence); the 500 test problems are those that
Lightman et al. 2023 (arXiv 2305.20050) held out, the others are MATH without them. The kit carries
no copy: rows come from the Hugging Face Hub or from a local folder with `train.jsonl` and
`test.jsonl`, one object with `problem` and `answer` a line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo_kit.tasks import Task
from grpo_kit.tasks.gsm8k import SYSTEM_PROMPT
from grpo_kit.tasks.source import read_splits

if TYPE_CHECKING:
    import datasets

HUB_NAME = "HuggingFaceH4/MATH-500"
HUB_REVISION = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
# Its newest revision: that no test problem is among its rows is checked instead.
TRAIN_HUB_NAME = "rasbt/math_full_minus_math500"


def competition_math(folder: str | os.PathLike | None = None) -> Task:
    """Load MATH as a task: rows as `math500` has them, from `folder` or else from the Hub.

    Raises what `math500` raises, and ValueError where a problem is both learnt from and tested.
    """
    test = math500(folder or HUB_NAME)
    train = _dataset(_read(folder or TRAIN_HUB_NAME, "train", None), "train")
    tested = {row["prompt"][-1]["content"] for row in test}
    if twice := sum(row["prompt"][-1]["content"] in tested for row in train):
        raise ValueError(
            f"{twice} of the {len(test)} test problems are among those to learn from: take MATH "
            "without MATH-500."
        )
    return Task(name="competition_math", train=train, test=test)


def math500(
    path_or_name: str | os.PathLike = HUB_NAME, *, revision: str | None = None
) -> datasets.Dataset:
    """The test rows: `prompt` (GSM8K's, less "as a single number"), `answer`, `subject`, `level`.

    Raises what `read_splits` raises, and ValueError for rows that are not MATH's.
    """
    if revision is None and path_or_name == HUB_NAME:
        revision = HUB_REVISION
    return _dataset(_read(path_or_name, "test", revision), "test")


def _read(path_or_name: str | os.PathLike, split: str, revision: str | None) -> Iterable:
    read = read_splits(
        path_or_name,
        (split,),
        config=None,
        revision=revision,
        of="a folder of MATH",
        url=f"https://huggingface.co/datasets/{HUB_NAME if split == 'test' else TRAIN_HUB_NAME}",
    )
    return read[split]


def _dataset(source: Iterable, split: str) -> datasets.Dataset:
    import datasets

    rows = [_row(row, f"row {i} of {split}") for i, row in enumerate(source, start=1)]
    if not rows:
        raise ValueError(f"the {split} split of this MATH is empty: fetch the data again")
    return datasets.Dataset.from_list(rows)


def _row(row: object, where: str) -> dict:
    texts = isinstance(row, dict) and [row.get(name) for name in ("problem", "answer")]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{where} is {row!r:.200}: expected the texts `problem` and `answer`")
    system = SYSTEM_PROMPT.replace(" as a single number", "")
    return {
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": row["problem"]},
        ],
        "answer": row["answer"],
        "subject": str(row.get("subject") or row.get("type") or ""),
        "level": str(row.get("level", "")),
    }
