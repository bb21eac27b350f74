"""GSM8K: 7,473 train and 1,319 test grade-school problems with worked solutions.

Source: Cobbe et al. 2021 (arXiv 2110.14168), MIT licence; the gold answer follows `####`. The kit
carries no copy: the rows come from the Hugging Face Hub or from a local folder with `train.jsonl`
and `test.jsonl`, one object with `question` and `answer` a line.
"""

from __future__ import annotations

import os
import random

from grpo_kit.tasks import Task
from grpo_kit.tasks.answers import parse_number
from grpo_kit.tasks.source import read_splits

HUB_NAME = "openai/gsm8k"
HUB_REVISION = "740312add88f781978c0658806c59bc2815b9866"
URL = "https://github.com/openai/grade-school-math"
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
    """Load GSM8K from a local folder, or else from the dataset of that name on the Hub.

    `revision` is a commit on the Hub; None means the pinned one for `openai/gsm8k`. `n_train` and
    `n_test` rows are drawn by `seed` and kept in order; None means all.

    Columns: `prompt` (system message, then the question), `answer` (the gold number without commas
    or units), `question`, and `solution` (as published, with `<<48/2=24>>` annotations, up to
    `####`). Raises what `read_splits` raises, and ValueError for more rows than there are.
    """
    if revision is None and path_or_name == HUB_NAME:
        revision = HUB_REVISION
    source = {"name": "GSM8K", "url": URL, "config": "main", "revision": revision}
    columns = ("question", "answer")
    train, test = read_splits(path_or_name, ("train", "test"), _row, columns, **source)

    def draw(rows, split: str, n: int | None):
        if n is None:
            return rows
        if not 1 <= n <= len(rows):
            raise ValueError(f"n_{split}={n} must be between 1 and the {len(rows)} rows of {split}")
        return rows.select(sorted(random.Random(seed).sample(range(len(rows)), n)))

    return Task("gsm8k", draw(train, "train", n_train), draw(test, "test", n_test))


def _row(row: dict) -> dict:
    solution, mark, gold = row["answer"].rpartition("####")
    number = parse_number(gold)
    if not mark:
        raise ValueError(f"has no '####' before its gold answer: {row['answer']!r:.200}")
    if number is None:
        raise ValueError(f"has a gold answer that is not a number: {gold.strip()!r:.200}")
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return {
        "prompt": [system, {"role": "user", "content": row["question"]}],
        "answer": str(number),
        "question": row["question"],
        "solution": solution.strip(),
    }
