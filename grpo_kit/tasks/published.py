"""GSM8K: 7,473 train and 1,319 test grade-school problems with worked solutions.

Shipped as published (Cobbe et al. 2021, arXiv 2110.14168, MIT licence): the gold answer follows
`####` in the solution.
"""

import gzip
import json

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task, chat
from grpo_kit.tasks.answers import parse_number

SYSTEM_PROMPT = (
    "You are a helpful assistant that solves maths problems step by step. First think about the "
    "reasoning, then give the final answer as a single number. Enclose the reasoning in "
    "<think> </think> tags and the answer in <answer> </answer> tags, like this: "
    "<think>reasoning here</think><answer>answer here</answer>"
)


def gsm8k() -> Task:
    """Columns: `prompt`, `answer` (the gold number), `question`, `solution` (up to `####`)."""
    from datasets import Dataset

    splits = {}
    for split in ("train", "test"):
        packed = (data_dir() / "gsm8k" / f"{split}.jsonl.gz").read_bytes()
        lines = gzip.decompress(packed).decode().strip().split("\n")
        splits[split] = Dataset.from_list([_row(**json.loads(line)) for line in lines])
    return Task("gsm8k", **splits)


def _row(question: str, answer: str) -> dict:
    solution, _, gold = answer.rpartition("####")
    row = {"prompt": chat(SYSTEM_PROMPT, question), "answer": str(parse_number(gold))}
    return row | {"question": question, "solution": solution.strip()}
