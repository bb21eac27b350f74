"""GSM8K: 7,473 train and 1,319 test grade-school problems with worked solutions.

Source: Cobbe et al. 2021 (arXiv 2110.14168), MIT licence; the gold answer follows `####`. The rows
come from the Hub, or from a folder with `train.jsonl` and `test.jsonl`, one object with `question`
and `answer` a line.
"""

from __future__ import annotations

import os

from grpo_kit.tasks import Task, read_splits
from grpo_kit.tasks.answers import parse_number

HUB_NAME = "openai/gsm8k"
HUB_REVISION = "740312add88f781978c0658806c59bc2815b9866"
URL = "https://github.com/openai/grade-school-math"
SYSTEM_PROMPT = (
    "You are a helpful assistant that solves maths problems step by step. First think about the "
    "reasoning, then give the final answer as a single number. Enclose the reasoning in "
    "<think> </think> tags and the answer in <answer> </answer> tags, like this: "
    "<think>reasoning here</think><answer>answer here</answer>"
)


def gsm8k(folder: str | os.PathLike | None = None) -> Task:
    """GSM8K as a task, from `folder` or else from the Hub at the pinned commit.

    Columns: `prompt` (system message, then the question), `answer` (the gold number without commas
    or units), `question`, and `solution` (as published, with `<<48/2=24>>` annotations, up to
    `####`). Raises what `read_splits` raises.
    """
    source = {"name": "GSM8K", "url": URL}
    source |= {"hub_name": HUB_NAME, "config": "main", "revision": HUB_REVISION}
    splits = read_splits(folder, ("train", "test"), _row, ("question", "answer"), **source)
    return Task("gsm8k", *splits)


def _row(row: dict) -> dict:
    solution, mark, gold = row["answer"].rpartition("####")
    number = parse_number(gold)
    if not mark or number is None:
        raise ValueError(f"{row['answer']!r:.200} does not end in '####' and a number")
    system = {"role": "system", "content": SYSTEM_PROMPT}
    return {
        "prompt": [system, {"role": "user", "content": row["question"]}],
        "answer": str(number),
        "question": row["question"],
        "solution": solution.strip(),
    }
