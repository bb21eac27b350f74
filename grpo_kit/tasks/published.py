"""Published tasks: GSM8K, to learn from, and the test set MATH-500.

GSM8K (shipped): 7,473 train and 1,319 test grade-school problems with worked solutions; the gold
answer follows `####` (Cobbe et al. 2021, arXiv 2110.14168, MIT licence). MATH-500 (Hub): the 500
competition problems with answers in LaTeX that Lightman et al. 2023 (arXiv 2305.20050) held out of
MATH (Hendrycks et al. 2021, arXiv 2103.03874, MIT licence).
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task, chat
from grpo_kit.tasks.answers import parse_number

if TYPE_CHECKING:
    from datasets import Dataset

# On the Hub: name, commit.
MATH_500 = ("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be")

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
    folder = Path(folder or data_dir() / "gsm8k").expanduser()
    rows = (_read(folder / f"{split}.jsonl", _gsm8k_row) for split in ("train", "test"))
    return Task("gsm8k", *rows)


def math500(folder: str | os.PathLike | None = None) -> Dataset:
    """MATH-500 from the Hub, or `test.jsonl` of a folder, with the columns `prompt` and `answer`.

    Raises as `gsm8k`, and RuntimeError where the Hub does not give the file.
    """
    if folder is not None:
        return _read(Path(folder).expanduser() / "test.jsonl", _math_row)
    from huggingface_hub import hf_hub_download

    name, commit = MATH_500
    try:
        file = hf_hub_download(name, "test.jsonl", repo_type="dataset", revision=commit)
    except Exception as error:  # whatever the network, the Hub or its cache raises
        problem = f"the Hub did not give {name} ({type(error).__name__})"
        raise RuntimeError(f"{problem}: pass a local folder with its test.jsonl.") from error
    return _read(Path(file), _math_row)


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
    return {"prompt": prompt, "answer": answer}


def _texts(row: dict, *columns: str) -> list[str]:
    texts = [row.get(column) for column in columns] if isinstance(row, dict) else [None]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{row!r:.200} lacks the texts {' and '.join(columns)}")
    return texts


def _read(file: Path, convert: Callable[[dict], dict]) -> Dataset:
    """The rows of a file of JSON lines, which may be packed, each made by `convert`."""
    from datasets import Dataset

    packed = file.with_name(f"{file.name}.gz")
    if not file.is_file() and not packed.is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r}: put the rows there, one a line.")
    file = file if file.is_file() else packed
    content = file.read_bytes()
    try:
        text = (gzip.decompress(content) if file == packed else content).decode()
    except (EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(file)!r} is damaged ({error}): fetch it again.") from None
    rows = []
    for i, line in enumerate(filter(str.strip, text.split("\n")), start=1):
        try:
            rows.append(convert(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"row {i} of {file.name}: {error}") from None
    if not rows:
        raise ValueError(f"{str(file)!r} is empty: fetch it again.")
    return Dataset.from_list(rows)
