"""Tool questions of the tiny world: what is asked for stands in a catalogue, not in the question.

"What do 3 of the lamp cost after the discount of the shop?" takes one to four calls of two tools,
`lookup` in the catalogue and `calculator`, and which comes next depends on what the last returned.
A row names its catalogue; `lookup` searches that one alone. Train and test catalogues are split by
a hash of their facts (`grpo_kit.tasks.tool_world`), so they never share one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task
from grpo_kit.tasks.tool_world import ask_again, make_tool_question

SHIPPED_CATALOGUES = {"train": 400, "test": 100}
QUESTIONS_EACH = {"train": 10, "test": 5}
Fact = tuple[int, str, str]  # catalogue, name, what `lookup` returns


def catalogue_path() -> Path:
    """The shipped catalogues of all rows: an SQLite file, which `flow.Lookup` reads."""
    return data_dir() / "tool_questions" / "catalogue.sqlite"


def make_rows(
    split: str, catalogues: int, each: int, seed: int = 0
) -> tuple[list[dict], list[Fact]]:
    """`each` questions about each of `catalogues` catalogues, shuffled, and all their facts.

    A row has `question`, `answer` (str), `catalogue` (int, from 0 in "train", from 1,000,000 in
    "test"), `kind` (one of `tool_world.KINDS`) and `calls` (how many it takes). No two are alike.
    """
    rng = random.Random(f"tool-questions-{split}-{seed}")
    first = 1_000_000 if split == "test" else 0
    rows: list[dict] = []
    facts: list[Fact] = []
    for catalogue in range(first, first + catalogues):
        question = make_tool_question(rng, split)
        facts += [(catalogue, name, text) for name, text in question.catalogue.items()]
        texts: set[str] = set()
        while len(texts) < each:
            if question.text not in texts:
                rows.append(
                    {
                        "question": question.text,
                        "answer": str(question.answer),
                        "catalogue": catalogue,
                        "kind": question.kind,
                        "calls": len(question.plan),
                    }
                )
            texts.add(question.text)
            question = ask_again(question, rng)
    rng.shuffle(rows)
    return rows, facts


def tool_questions(*, n_train: int | None = None, n_test: int | None = None) -> Task:
    """The shipped tool questions, the first `n_train` and `n_test` of them; None means all.

    Returns a task with columns `prompt` (the question, one user message), `answer` (str),
    `catalogue` (int), `kind` (str) and `calls` (int, 1 to 4). Raises ValueError for more rows than
    there are.
    """
    from datasets import Dataset

    splits = {}
    for split, n in (("train", n_train), ("test", n_test)):
        lines = (data_dir() / "tool_questions" / f"{split}.jsonl").read_text().splitlines()
        if n is not None and not 1 <= n <= len(lines):
            raise ValueError(
                f"n_{split} is {n}; {len(lines)} {split} questions are shipped, ask for 1 to "
                f"{len(lines)}."
            )
        rows = [json.loads(line) for line in lines[:n]]
        splits[split] = Dataset.from_list(
            [{"prompt": [{"role": "user", "content": row.pop("question")}], **row} for row in rows]
        )
    return Task("tool_questions", **splits)
