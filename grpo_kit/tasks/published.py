"""Published problems, shipped with the kit: GSM8K and SVAMP.

GSM8K (Cobbe et al. 2021, arXiv 2110.14168, MIT licence) has 7,473 train and 1,319 test grade-school
problems with worked solutions. SVAMP (Patel et al. 2021, arXiv 2103.07191, MIT licence) has 1,000
short ones; `data/svamp/README.md` says how they were split.
"""

import gzip
import json
from collections.abc import Callable

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task, chat
from grpo_kit.tasks.answers import parse_number

SYSTEM_PROMPT = (
    "You are a helpful assistant that solves maths problems step by step. First think about the "
    "reasoning, then give the final answer as a single number. Enclose the reasoning in "
    "<think> </think> tags and the answer in <answer> </answer> tags, like this: "
    "<think>reasoning here</think><answer>answer here</answer>"
)
SVAMP_PROMPT = (
    "Work the problem out, then give the number: <think>steps</think><answer>number</answer>"
)


def gsm8k() -> Task:
    """Columns: `prompt`, `answer` (the gold number), `question`, `solution` (up to `####`)."""
    return _task("gsm8k", "gsm8k", _gsm8k_row)


def svamp() -> Task:
    """700 train and 300 test rows, no body on both sides, whatever its numbers.

    Columns: `prompt`, `answer` (the number as published, which is wrong for `chal-680`),
    `question`, `solution` (the equation worked out, `3 + 4 = 7, 7 * 2 = 14`), `id` and `kind`.
    """
    # the rows lie a folder deeper: stored runs are known by the published file alone
    return _task("svamp", "svamp/rows", _svamp_row)


def _task(name: str, folder: str, row_of: Callable[..., dict]) -> Task:
    """The rows of `folder` in the data, made of the lines of a file for each split."""
    from datasets import Dataset

    splits = {}
    for split in ("train", "test"):
        packed = (data_dir() / folder / f"{split}.jsonl.gz").read_bytes()
        lines = gzip.decompress(packed).decode().strip().split("\n")
        splits[split] = Dataset.from_list([row_of(**json.loads(line)) for line in lines])
    return Task(name, **splits)


def _gsm8k_row(question: str, answer: str) -> dict:
    solution, _, gold = answer.rpartition("####")
    row = {"prompt": chat(SYSTEM_PROMPT, question), "answer": str(parse_number(gold))}
    return row | {"question": question, "solution": solution.strip()}


def _svamp_row(**columns: str) -> dict:
    return {"prompt": chat(SVAMP_PROMPT, columns["question"]), **columns}
