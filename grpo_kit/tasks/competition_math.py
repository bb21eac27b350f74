"""MATH: 12,000 competition problems to learn from and MATH-500 to evaluate on, answers in LaTeX.

Source: Hendrycks et al. 2021 (arXiv 2103.03874, MIT licence); the test problems are the 500 that
Lightman et al. 2023 (arXiv 2305.20050) held out. The rows come from the Hub, or from a folder with
`train.jsonl` and `test.jsonl`, one object with `problem` and `answer` a line.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from grpo_kit.tasks import Task, read_splits
from grpo_kit.tasks.gsm8k import SYSTEM_PROMPT

if TYPE_CHECKING:
    import datasets

HUB_NAME = "HuggingFaceH4/MATH-500"
HUB_REVISION = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
# Not pinned: instead, `competition_math` checks that no test problem is among the rows.
TRAIN_HUB_NAME = "rasbt/math_full_minus_math500"


def competition_math(folder: str | os.PathLike | None = None) -> Task:
    """MATH as a task, both splits with the columns of `math500`.

    Raises what `read_splits` raises, and ValueError where a problem is in both splits.
    """
    test, train = math500(folder), _read(folder, "train", TRAIN_HUB_NAME)
    test_problems = {prompt[-1]["content"] for prompt in test["prompt"]}
    if shared := sum(prompt[-1]["content"] in test_problems for prompt in train["prompt"]):
        problem = f"{shared} of the {len(test)} test problems are among those to learn from"
        raise ValueError(f"{problem}: take MATH without MATH-500.")
    return Task("competition_math", train, test)


def math500(folder: str | os.PathLike | None = None) -> datasets.Dataset:
    """The test rows: `prompt`, `answer`, `subject`, `level`. Raises what `read_splits` raises."""
    return _read(folder, "test", HUB_NAME, HUB_REVISION)


def _read(folder, split: str, hub_name: str, revision: str | None = None) -> datasets.Dataset:
    source = {"name": "MATH", "url": f"https://huggingface.co/datasets/{hub_name}"}
    source |= {"hub_name": hub_name, "revision": revision}
    return read_splits(folder, (split,), _row, ("problem", "answer"), **source)[0]


def _row(row: dict) -> dict:
    system = {"role": "system", "content": SYSTEM_PROMPT.replace(" as a single number", "")}
    return {
        "prompt": [system, {"role": "user", "content": row["problem"]}],
        "answer": row["answer"],
        "subject": str(row.get("subject") or row.get("type") or ""),
        "level": str(row.get("level", "")),
    }
