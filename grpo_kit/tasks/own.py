"""A reader's own data: a file, a folder or a data set of the Hub becomes a task.

A row has its question in the column `prompt`, `question` or `problem`: text, or a list of messages
with `role` and `content`. Its gold answer is in `answer`: text, a number, or nothing, which is not
scored; of GSM8K's answers it is what follows `####`. Rewards get every column.
"""

from __future__ import annotations

import csv
import hashlib
import json
import numbers
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from grpo_kit.tasks import Task, chat

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = (".jsonl", ".json", ".csv", ".parquet")
QUESTIONS = ("prompt", "question", "problem")


def read_task(
    data: str | os.PathLike, test: str | os.PathLike | None = None, test_share: float = 0.2,
    system: str | None = None,
) -> Task:  # fmt: skip
    """The task of a file of `KINDS`, or of a folder or a Hub name that `datasets` reads.

    A Hub name may end in @REVISION. The test rows are those of `test`, else the test split of
    `data`, else about `test_share` of its rows, by a hash of the question. A tested question is not
    learnt from. Text is asked after the prompt `system`. A line on stdout says what was read.
    Raises ValueError, by file and row, for what cannot be used.
    """
    name, splits = Path(data).name, _splits(data, system)
    held_out, how = _held_out(splits, name, test, test_share, system)
    rows = _split(splits, "train", name)
    tested = {_question(row) for row in held_out}
    learnt = [row for row in rows if _question(row) not in tested]
    said = f"{name}: {len(learnt)} rows to learn from, {len(held_out)} held out{how}"
    if not how and len(learnt) < len(rows):
        said += f", {len(rows) - len(learnt)} left out, since their questions are tested"
    if not learnt or not held_out:
        raise ValueError(f"{said}: give more rows, another test_share, or other test rows.")
    _say(said, learnt + held_out, system)
    return Task(name, _dataset(learnt, name), _dataset(held_out, name))


def read_rows(
    data: str | os.PathLike, test: str | os.PathLike | None = None, test_share: float = 0.2,
    system: str | None = None,
) -> Dataset:  # fmt: skip
    """The test rows alone, those that `read_task` holds out; prints and raises as it does."""
    name = Path(data).name
    rows, how = _held_out(_splits(data, system), name, test, test_share, system)
    _say(f"{name}: {len(rows)} test rows{how}", rows, system)
    return _dataset(rows, name)


def _held_out(
    splits: dict[str, list[dict]], name: str, test: str | os.PathLike | None, test_share: float,
    system: str | None,
) -> tuple[list[dict], str]:  # fmt: skip
    """The test rows, and how they were chosen where that was by a share."""
    if not 0 < test_share < 1:
        raise ValueError(f"test_share is {test_share}; give a share between 0 and 1, such as 0.2.")
    if test is not None:
        return _split(_splits(test, system), "test", Path(test).name), ""
    if "test" in splits or len(splits) > 1:
        return _split(splits, "test", name), ""
    rows = _split(splits, "train", name)
    return [row for row in rows if _place(row) < test_share], " by a hash of the question"


def _split(splits: dict[str, list[dict]], wanted: str, name: str) -> list[dict]:
    """The rows of the split `wanted`, or of the only one."""
    if wanted not in splits and len(splits) > 1:
        raise ValueError(f"{name} has the splits {', '.join(splits)}: it needs one named {wanted}.")
    return splits.get(wanted) or next(iter(splits.values()))


def _question(row: dict) -> str:
    """The text of the prompt; spaces and line breaks make no difference."""
    return " ".join(word for message in row["prompt"] for word in message["content"].split())


def _place(row: dict) -> float:
    """A number in 0..1 by the question alone: whatever other rows there are, on every machine."""
    return int(hashlib.sha256(_question(row).encode()).hexdigest()[:8], 16) / 16**8


def _say(said: str, rows: list[dict], system: str | None) -> None:
    """Print what was read, once, however often a process reads it."""
    missing = sum(row.get("answer", "") is None for row in rows)
    said += f"; {missing} without an answer, not scored" if missing else ""
    if system and any(row["prompt"][0]["content"] == system for row in rows):
        said += f"; system prompt of each: {shorten(system, 60, placeholder=' …')!r}"
    _print_once(f"{said}.")


_print_once = cache(print)


def _dataset(rows: list[dict], name: str) -> Dataset:
    from datasets import Dataset

    try:
        return Dataset.from_list(rows)
    except (TypeError, ValueError, OverflowError) as error:  # a column of several kinds
        raise ValueError(f"{name} cannot be read ({error}): give a column one kind.") from None


# --- from a source to rows ------------------------------------------------------------------------


def _splits(data: str | os.PathLike, system: str | None) -> dict[str, list[dict]]:
    """The rows of each split; those of a file are the only one."""
    path = Path(data).expanduser()
    if path.is_file() or path.suffix.lower() in KINDS:
        return {"train": _rows(_read(path), path.name, system)}
    import datasets

    source, _, revision = (path, "", None) if path.is_dir() else str(data).partition("@")
    try:
        if any((path / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(source), revision=revision or None)
    except Exception as error:  # whatever the network, the Hub, the cache or a reader raises
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        where = "" if path.is_dir() else "there is no such file, and "
        problem = f"{data} cannot be read ({where}datasets says: {reason})"
        raise ValueError(f"{problem}: give a file, a folder, or a name on the Hub.") from error
    found = found if isinstance(found, dict) else {"train": found}
    return {split: _rows(own.to_list(), f"{data}, {split}", system) for split, own in found.items()}


def _read(file: Path) -> list[dict]:
    """The rows of a file, each by column."""
    kind, rows = file.suffix.lower(), []
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r}: give the path of your data.")
    if kind not in KINDS:
        raise ValueError(f"{file.name} is of an unknown kind: give {', '.join(KINDS)} or a folder.")
    try:
        if kind == ".parquet":
            from pyarrow.parquet import read_table

            return read_table(file).to_pylist()
        if kind == ".json" and (text := file.read_text("utf-8-sig")).lstrip().startswith("["):
            return json.loads(text)
        with open(file, encoding="utf-8-sig", newline="") as lines:
            read = _cells(lines) if kind == ".csv" else map(json.loads, filter(str.strip, lines))
            rows.extend(read)  # keeps those before an error
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "msg", error)  # of JSON without its place, which is in that line
        problem = f"{file.name} cannot be read after {len(rows)} rows ({reason})"
        raise ValueError(f"{problem}: correct it, or write it anew as {kind} in UTF-8.") from None
    return rows


def _cells(lines: Iterable[str]) -> Iterator[dict]:
    """Rows of cells under a header; an empty cell is None, and NA is text."""
    csv.field_size_limit(2**31 - 1)
    table = csv.DictReader(lines, strict=True)
    table.fieldnames = [name.strip() for name in table.fieldnames or ()]
    named = [name for name in table.fieldnames if name]  # an index, or empty columns, have none
    if len(set(named)) < len(named):
        raise ValueError(f"two columns have one name: {', '.join(named)}")
    for row in table:
        if None in row or None in row.values():  # the reader's mark of too many or too few
            raise ValueError(f"line {table.line_num} has not as many cells as the header")
        yield {name: row[name] or None for name in named}


def _rows(table: list, source: str, system: str | None) -> list[dict]:
    """Rows with `prompt`, with `answer` where the source has that column, and its other columns."""
    columns: dict[str, None] = {}
    for i, row in enumerate(table, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"row {i} of {source} is {row!r:.80}: give an object with columns.")
        columns |= dict.fromkeys(row)
    asked = next((name for name in QUESTIONS if name in columns), None)
    if asked is None:
        found = f"has the columns {', '.join(columns)}" if table else "has no rows"
        raise ValueError(f"{source} {found}: give rows with a column `question` or `prompt`.")
    rows = []
    for i, given in enumerate(table, start=1):
        row = {name: given.get(name) for name in columns}
        question, answer, where = row[asked], row.get("answer"), f"row {i} of {source} has as"
        if isinstance(question, str) and question.strip():
            question = chat(system, question) if system else [{"role": "user", "content": question}]
        if not _are_messages(question):
            found = f"{where} `{asked}` {question!r:.80}"
            raise ValueError(f"{found}: give text, or messages with role and content.")
        if not isinstance(answer, str | numbers.Number | None):
            raise ValueError(f"{where} `answer` {answer!r:.80}: give text, a number or nothing.")
        row["prompt"] = question
        if "answer" in row:
            text = "" if answer is None or answer != answer else str(answer)  # NaN is nothing, too
            row["answer"] = text.rpartition("####")[2].strip() or None
        rows.append(row)
    return rows


def _are_messages(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return False
    parts = [message.get(part) for message in value for part in ("role", "content")]
    return bool(parts) and all(isinstance(part, str) for part in parts)
