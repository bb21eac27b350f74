"""Chain word problems of the tiny world, as shipped or freshly generated.

"Mia has 12 coins. Mia finds 7. Mia loses 4. How many coins does Mia have?" Train and test are split
by a hash of the numbers (`grpo_kit.tiny.problems`), so they never share a problem.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from grpo_kit.paths import data_dir
from grpo_kit.tasks import Task
from grpo_kit.tiny.problems import make_problem

SHIPPED_DIFFICULTIES = (2, 3)
SHIPPED_ROWS = {"train": 4000, "test": 500}


def make_rows(split: str, n: int, difficulties: Sequence[int], seed: int = 0) -> list[dict]:
    """`n` distinct problems: `question`, `answer` (str), `difficulty` (steps), `numbers`.

    `numbers` is the chain by itself, `12+7-4`; no two rows share it.
    """
    rng = random.Random(f"{split}-{seed}")
    rows: dict[str, dict] = {}
    for _ in range(20 * n):
        if len(rows) == n:
            return list(rows.values())
        problem = make_problem(rng, rng.choice(list(difficulties)), split)
        numbers = f"{problem.start}" + "".join(f"{o}{a}" for o, a in problem.steps)
        rows.setdefault(
            numbers,
            {
                "question": problem.question,
                "answer": str(problem.answer),
                "difficulty": len(problem.steps),
                "numbers": numbers,
            },
        )
    raise ValueError(
        f"there are fewer than {n} distinct {split} problems of difficulties "
        f"{list(difficulties)}; ask for fewer rows or a higher difficulty."
    )


def word_problems(
    difficulties: Sequence[int] = SHIPPED_DIFFICULTIES,
    *,
    n_train: int | None = None,
    n_test: int | None = None,
) -> Task:
    """Word problems of the given difficulties (steps of the chain).

    For 2 and 3 steps, which the tiny base was warmed up on, the shipped rows are taken; other
    difficulties are generated, from a fixed seed.

    Returns a task with columns `prompt` (one user message), `answer` (str), `difficulty` (int)
    and `numbers`. Raises ValueError for no difficulty, one below 1, or too many rows.
    """
    from datasets import Dataset

    if not difficulties or min(difficulties) < 1:
        raise ValueError(f"difficulties are {difficulties!r}; give at least one, each 1 or more.")
    splits = {}
    for split, n in (("train", n_train), ("test", n_test)):
        n = SHIPPED_ROWS[split] if n is None else n
        rows = []
        if set(difficulties) <= set(SHIPPED_DIFFICULTIES):
            lines = (data_dir() / "word_problems" / f"{split}.jsonl").read_text().splitlines()
            rows = [r for line in lines if (r := json.loads(line))["difficulty"] in difficulties]
        if len(rows) < n:
            rows = make_rows(split, n, difficulties)
        splits[split] = Dataset.from_list(
            [
                {
                    "prompt": [{"role": "user", "content": row["question"]}],
                    **{k: row[k] for k in ("answer", "difficulty", "numbers")},
                }
                for row in rows[:n]
            ]
        )
    return Task("word_problems", **splits)
