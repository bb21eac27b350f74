"""A reader's own data: a file, a folder or a data set of the Hub becomes a task.

`datasets` reads it. A row has its question in the column `prompt`, `question` or `problem`: text,
or a list of messages with `role` and `content`. Its gold answer is in `answer`: text, a number, or
nothing, which is not scored; of GSM8K's answers it is what follows `####`. Rewards get every
column.
"""

from __future__ import annotations

import hashlib
import numbers
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_kit.tasks import Task, chat

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
QUESTIONS = ("prompt", "question", "problem")


def read_task(
    data: str | os.PathLike, test: str | os.PathLike | None = None, test_share: float = 0.2,
    system: str | None = None,
) -> Task:  # fmt: skip
    """The task of a file of `KINDS`, or of a folder or a Hub name that `datasets` reads.

    A Hub name may end in @REVISION. The test rows are those of `test`, else the test split of
    `data`, else about `test_share` of its rows, by a hash of the question. A tested question is not
    learnt from. Text is asked after the prompt `system`. A line on stdout says what was read.
    Raises ValueError, by source and row, for what cannot be used.
    """
    name, splits, how = Path(data).name, _splits(data, system), ""
    if test is not None:
        held_out = _split(_splits(test, system), "test", Path(test).name)
    elif "test" in splits or len(splits) > 1:
        held_out = _split(splits, "test", name)
    else:
        how = " by a hash of the question"
        (rows,) = splits.values()
        held_out = _where(rows, lambda question: _place(question) < test_share)
    tested = {_question(prompt) for prompt in held_out["prompt"]}
    learnt = _where(_split(splits, "train", name), lambda question: question not in tested)
    said = f"{name}: {len(learnt)} rows to learn from, {len(held_out)} held out{how}"
    if not len(held_out):
        raise ValueError(f"{said}: give more rows, another test_share, or other test rows.")
    _print_once(f"{said}.")
    return Task(name, learnt, held_out)


_print_once = cache(print)  # however often a process reads it


def _split(splits: dict[str, Dataset], wanted: str, name: str) -> Dataset:
    """The rows of the split `wanted`, or of the only one."""
    if wanted not in splits and len(splits) > 1:
        raise ValueError(f"{name} has the splits {', '.join(splits)}: it needs one named {wanted}.")
    return splits.get(wanted) or next(iter(splits.values()))


def _where(rows: Dataset, keep: Callable[[str], bool]) -> Dataset:
    """The rows whose questions are to be kept."""
    return rows.select([i for i, prompt in enumerate(rows["prompt"]) if keep(_question(prompt))])


def _question(prompt: list[dict]) -> str:
    """The text of the prompt; spaces and line breaks make no difference."""
    return " ".join(word for message in prompt for word in message["content"].split())


def _place(question: str) -> float:
    """A number in 0..1 by the question alone: whatever other rows there are, on every machine."""
    return int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) / 16**8


# --- from a source to rows ------------------------------------------------------------------------


def _splits(data: str | os.PathLike, system: str | None) -> dict[str, Dataset]:
    """The rows of each split; those of a file are the only one."""
    import datasets

    path = Path(data).expanduser()
    kind = KINDS.get(path.suffix.lower())
    if path.is_file() and kind is None:
        raise ValueError(f"{path.name} is of an unknown kind: give {', '.join(KINDS)}.")
    try:
        if kind == "csv" and not path.is_dir():
            found = _table(path)
        elif kind and not path.is_dir():
            found = datasets.load_dataset(kind, data_files=str(path))
        elif any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
        else:
            source, _, revision = (path, "", "") if path.is_dir() else str(data).partition("@")
            found = datasets.load_dataset(str(source), revision=revision or None)
    except Exception as error:  # whatever the network, the Hub, the cache or a reader raises
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".") or "it has no rows"
        remedy = "give a file in UTF-8, a folder, or a name on the Hub."
        raise ValueError(f"{data} cannot be read ({reason}): {remedy}") from error
    found = found if isinstance(found, dict) else {"train": found}
    return {split: _prepared(rows, f"{data}, {split}", system) for split, rows in found.items()}


def _table(file: Path) -> Dataset:
    """The rows of a CSV file, each cell as text: 007 and NA stay what they are."""
    import pandas as pd
    from datasets import Dataset

    options = {"dtype": str, "keep_default_na": False, "skipinitialspace": True}
    table = pd.read_csv(file, encoding="utf-8-sig", **options)
    if not isinstance(table.index, pd.RangeIndex):
        raise ValueError("rows have more cells than the header")
    return Dataset.from_pandas(table)


def _prepared(rows: Dataset, source: str, system: str | None) -> Dataset:
    """The rows with messages as `prompt`, and with `answer` as text where they have that column."""
    names = rows.column_names
    asked = next((name for name in QUESTIONS if name in names), None)
    if asked is None:
        found = f"{source} has the columns {', '.join(names)}"
        raise ValueError(f"{found}: give rows with a column `question` or `prompt`.")
    own: dict[str, list] = {"prompt": [], "answer": []}
    answers = rows["answer"] if "answer" in names else [None] * len(rows)
    for i, (question, answer) in enumerate(zip(rows[asked], answers, strict=True), start=1):
        where = f"row {i} of {source} has as"
        if isinstance(question, str) and question.strip():
            question = chat(system, question) if system else [{"role": "user", "content": question}]
        if not _are_messages(question):
            found = f"{where} `{asked}` {question!r:.80}"
            raise ValueError(f"{found}: give text, or messages with role and content.")
        if not isinstance(answer, str | numbers.Number | None):
            raise ValueError(f"{where} `answer` {answer!r:.80}: give text, a number or nothing.")
        text = "" if answer is None or answer != answer else str(answer)  # NaN is nothing, too
        own["prompt"].append(question)
        own["answer"].append(text.rpartition("####")[2].strip() or None)
    for name in ("prompt", "answer") if "answer" in names else ("prompt",):
        kept = rows.remove_columns(name) if name in names else rows
        rows = kept.add_column(name, own[name])
    return rows


def _are_messages(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return False
    parts = [message.get(part) for message in value for part in ("role", "content")]
    return bool(parts) and all(isinstance(part, str) for part in parts)
