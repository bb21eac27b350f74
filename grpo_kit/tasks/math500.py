"""MATH-500: 500 competition problems to evaluate on, answers in LaTeX.

Source: Hendrycks et al. 2021 (arXiv 2103.03874, MIT licence), the 500 test problems that Lightman
et al. 2023 (arXiv 2305.20050) held out. The kit carries no copy: rows come from the Hugging Face
Hub or from a local folder with `test.jsonl`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from grpo_kit.tasks.gsm8k import SYSTEM_PROMPT
from grpo_kit.tasks.source import read_splits

if TYPE_CHECKING:
    import datasets

HUB_NAME = "HuggingFaceH4/MATH-500"
HUB_REVISION = "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"


def math500(
    path_or_name: str | os.PathLike = HUB_NAME, *, revision: str | None = None
) -> datasets.Dataset:
    """The rows: `prompt` (as GSM8K's, but for "a single number"), `answer`, `subject`, `level`.

    Raises what `read_splits` raises, and ValueError for rows that are not MATH-500's.
    """
    import datasets

    if revision is None and path_or_name == HUB_NAME:
        revision = HUB_REVISION
    read = read_splits(
        path_or_name,
        ("test",),
        config=None,
        revision=revision,
        of="a MATH-500 folder",
        url=f"https://huggingface.co/datasets/{HUB_NAME}",
    )
    system = SYSTEM_PROMPT.replace(" as a single number", "")
    rows = []
    for number, row in enumerate(read["test"], start=1):
        if not isinstance(row, dict) or not all(
            isinstance(row.get(name), str) and row[name] for name in ("problem", "answer")
        ):
            raise ValueError(
                f"row {number} is {row!r:.200}: expected the texts `problem` and `answer`"
            )
        rows.append(
            {
                "prompt": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": row["problem"]},
                ],
                "answer": row["answer"],
                "subject": str(row.get("subject", "")),
                "level": str(row.get("level", "")),
            }
        )
    if not rows:
        raise ValueError("this MATH-500 has no rows: fetch the data again")
    return datasets.Dataset.from_list(rows)
