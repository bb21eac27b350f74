"""How many of a published test set a policy gets right, as papers report it. `grpo-kit evaluate`.

Greedy, read twice, since published numbers are given both ways: *strict* wants the answer between
`<answer>` tags, *lenient* takes what looks like the final answer. Each with n and a 95 % interval
(Wilson's); baselines differ between sources, so run them in the same harness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from scipy.stats import binomtest
from tqdm import tqdm

from grpo_kit import backends
from grpo_kit.models import Policy
from grpo_kit.rewards.maths import means_the_same
from grpo_kit.tasks.answers import extract_answer, is_correct

Grade = Callable[[str, str], tuple[bool, bool]]


def grade_number(text: str, gold: str) -> tuple[bool, bool]:
    """(strict, lenient) for an answer that is a number: GSM8K's, word problems'."""
    return is_correct(extract_answer(text), gold), is_correct(extract_answer(text, True), gold)


def grade_maths(text: str, gold: str) -> tuple[bool, bool]:
    """(strict, lenient) for an answer in LaTeX. Raises what `means_the_same` raises.

    Lenient looks for the answer between the tags, too, and without them in the whole text.
    """
    tagged = extract_answer(text)
    strict = means_the_same(tagged, gold)
    return strict, strict or means_the_same(text if tagged is None else tagged, gold, prose=True)


def _gsm8k(folder: Path | None):
    from grpo_kit.tasks.gsm8k import gsm8k

    return (gsm8k(folder) if folder else gsm8k()).test


def _math500(folder: Path | None):
    from grpo_kit.tasks.competition_math import math500

    return math500(folder) if folder else math500()


def _word_problems(folder: Path | None):
    from grpo_kit.tasks.word_problems import word_problems

    if folder:
        raise ValueError("the word problems come with the kit: leave out --data.")
    return word_problems().test


GRADES: dict[str, Grade] = {  # of a task's answers
    "word_problems": grade_number,
    "gsm8k": grade_number,
    "competition_math": grade_maths,
}
TESTS: dict[str, tuple[Callable, Grade]] = {  # name -> (rows, of a folder or the Hub; how graded)
    "word_problems": (_word_problems, GRADES["word_problems"]),
    "gsm8k": (_gsm8k, GRADES["gsm8k"]),
    "math500": (_math500, GRADES["competition_math"]),
}


def exam(
    policy: Policy,
    rows: Sequence[dict],
    grade: Grade,
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    backend: str = "auto",
    progress: bool = True,
) -> dict[str, float]:
    """Greedy accuracy on `rows` (with `prompt` and `answer`), strict and lenient.

    `backend` answers, see `backends.choose`; the bar shows which.

    Returns `strict` and `lenient` (shares), the ends of their intervals as `strict/low`,
    `strict/high` and so on, `truncated` (share of answers that `max_new_tokens` cut off),
    `mean_length` (tokens) and `n`. Raises ValueError for no rows, and what `backends.choose`
    raises.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows to evaluate on.")
    backend = backends.choose(policy, backend, trained=False)
    asked = policy.encode([row["prompt"] for row in rows])
    context = max(map(len, asked)) + max_new_tokens
    answer = backends.greedy(policy, backend, max_new_tokens=max_new_tokens, context=context)
    right: dict[str, int] = {"strict": 0, "lenient": 0}
    cut = tokens = 0
    bar = tqdm(total=len(rows), desc=f"exam, sampling {backend}", disable=not progress)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        found = answer(asked[start : start + batch_size])
        for text, row in zip(policy.decode(found), part, strict=True):
            for name, correct in zip(right, grade(text, row["answer"]), strict=True):
                right[name] += correct
        cut += sum(ids[-1] not in policy.eos_token_ids for ids in found)
        tokens += sum(map(len, found))
        bar.update(len(part))
    bar.close()
    n, result = len(rows), {}
    for name, count in right.items():
        interval = binomtest(count, n).proportion_ci(method="wilson")
        result |= {name: count / n, f"{name}/low": interval.low, f"{name}/high": interval.high}
    return result | {"truncated": cut / n, "mean_length": tokens / n, "n": n}
