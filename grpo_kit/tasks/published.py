"""Published tasks, shipped, from the Hub, or from a folder with `train.jsonl` and `test.jsonl`.

GSM8K (shipped): 7,473 train and 1,319 test grade-school problems with worked solutions; the gold
answer follows `####` (Cobbe et al. 2021, arXiv 2110.14168, MIT licence). MATH (Hub): 12,000
competition problems to learn from (Hendrycks et al. 2021, arXiv 2103.03874, MIT licence) and
MATH-500 to evaluate on, the 500 that Lightman et al. 2023 (arXiv 2305.20050) held out; answers in
LaTeX.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task, chat
from grpo_kit.tasks.answers import parse_number

if TYPE_CHECKING:
    from datasets import Dataset

# On the Hub: name, commit.
MATH_500 = ("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be")
# Not pinned: instead, `competition_math` checks that no test problem is among the rows.
MATH_TRAIN = ("rasbt/math_full_minus_math500", None)

SYSTEM_PROMPT = (
    "You are a helpful assistant that solves maths problems step by step. First think about the "
    "reasoning, then give the final answer as a single number. Enclose the reasoning in "
    "<think> </think> tags and the answer in <answer> </answer> tags, like this: "
    "<think>reasoning here</think><answer>answer here</answer>"
)


def gsm8k(folder: str | os.PathLike | None = None) -> Task:
    """GSM8K as it is shipped, or from `folder`, as github.com/openai/grade-school-math has it.

    Columns: `prompt`, `answer` (the gold number), `question`, and `solution` (as published, up to
    `####`). Raises FileNotFoundError for a missing file, ValueError for no row or a bad one, by its
    number.
    """
    folder = folder or data_dir() / "gsm8k"
    splits = ("train", "test")
    return Task("gsm8k", *(_read(folder, split, ("gsm8k",), _gsm8k_row) for split in splits))


def competition_math(folder: str | os.PathLike | None = None) -> Task:
    """MATH, with the columns and errors of `math500`; ValueError for a problem in both splits."""
    test, train = math500(folder), _read(folder, "train", MATH_TRAIN, _math_row)
    test_problems = {prompt[-1]["content"] for prompt in test["prompt"]}
    if shared := sum(prompt[-1]["content"] in test_problems for prompt in train["prompt"]):
        raise ValueError(f"{shared} train problems are test problems too: take MATH without them.")
    return Task("competition_math", train, test)


def math500(folder: str | os.PathLike | None = None) -> Dataset:
    """MATH-500: `prompt`, `answer` (LaTeX), `subject`, `level`.

    Raises as `gsm8k`, and RuntimeError where the Hub does not give the rows.
    """
    return _read(folder, "test", MATH_500, _math_row)


def _gsm8k_row(row: dict) -> dict:
    question, answer = _texts(row, "question", "answer")
    solution, mark, gold = answer.rpartition("####")
    number = parse_number(gold)
    if not mark or number is None:
        raise ValueError(f"{answer!r:.200} does not end in '####' and a number")
    row = {"prompt": chat(SYSTEM_PROMPT, question), "answer": str(number)}
    return row | {"question": question, "solution": solution.strip()}


def _math_row(row: dict) -> dict:
    problem, answer = _texts(row, "problem", "answer")
    prompt = chat(SYSTEM_PROMPT.replace(" as a single number", ""), problem)
    subject, level = row.get("subject") or row.get("type") or "", row.get("level", "")
    return {"prompt": prompt, "answer": answer, "subject": str(subject), "level": str(level)}


def _texts(row: dict, *columns: str) -> list[str]:
    texts = [row.get(column) for column in columns] if isinstance(row, dict) else [None]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{row!r:.200} lacks the texts {' and '.join(columns)}")
    return texts


def _read(folder, split: str, on_hub: tuple, convert: Callable[[dict], dict]) -> Dataset:
    """The rows of a split, each made by `convert` from a published one."""
    from datasets import Dataset

    if folder is None:
        published = _from_hub(split, *on_hub)
    else:
        file = Path(folder).expanduser() / f"{split}.jsonl"
        packed = file.with_name(f"{file.name}.gz")
        if not file.is_file() and not packed.is_file():
            remedy = f"put the rows of {on_hub[0]} there, one a line"
            raise FileNotFoundError(f"there is no file {str(file)!r}: {remedy}.")
        file = file if file.is_file() else packed
        content = file.read_bytes()
        try:
            text = (gzip.decompress(content) if file == packed else content).decode()
        except (EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(file)!r} is damaged ({error}): fetch it again.") from None
        published = [line for line in text.split("\n") if line.strip()]
    rows = []
    for i, row in enumerate(published, start=1):
        try:
            rows.append(convert(json.loads(row) if isinstance(row, str) else row))
        except ValueError as error:
            raise ValueError(f"row {i} of {split}: {error}") from None
    if not rows:
        raise ValueError(f"the {split} split of {on_hub[0]} is empty: fetch the data again")
    return Dataset.from_list(rows)


def _from_hub(split: str, name: str, commit: str | None) -> Iterable[dict]:
    import datasets
    import huggingface_hub

    try:
        # load_dataset retries an unreachable Hub for half a minute; one request tells at once.
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            huggingface_hub.HfApi().dataset_info(name, revision=commit, timeout=10)
        return datasets.load_dataset(name, split=split, revision=commit)
    except Exception as error:  # whatever the network, the Hub or its cache raises
        problem = f"the Hub did not give the dataset {name!r} ({type(error).__name__})"
        remedy = "set HF_HUB_OFFLINE=1 if it is in the cache"
        folder = "pass a local folder with train.jsonl and test.jsonl"
        raise RuntimeError(f"{problem}: {folder}, or {remedy}.") from error
