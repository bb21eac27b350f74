"""Greedy accuracy of a policy on a published test set, as papers report it. `grpo-kit evaluate`.

Graded twice, since papers count both ways: *strict* wants the answer between `<answer>` tags,
*lenient* takes what looks like the final answer. Each has n and Wilson's 95 % interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scipy.stats import binomtest
from tqdm import tqdm

from grpo_kit import tasks
from grpo_kit.generation import check_lengths, reply
from grpo_kit.lab.records import where_it_ran
from grpo_kit.models import Policy
from grpo_kit.profiles import Profile
from grpo_kit.rewards.rules import means_the_same
from grpo_kit.tasks.answers import extract_answer, is_correct
from grpo_kit.tasks.published import math500


def grade_number(text: str, gold: str) -> tuple[bool, bool]:
    """(strict, lenient) for an answer that is a number."""
    return is_correct(extract_answer(text), gold), is_correct(extract_answer(text, True), gold)


def grade_maths(text: str, gold: str) -> tuple[bool, bool]:
    """(strict, lenient) for an answer in LaTeX; without tags lenient reads the whole text."""
    tagged = extract_answer(text)
    strict = means_the_same(tagged, gold)
    return strict, strict or means_the_same(text if tagged is None else tagged, gold, prose=True)


# By task or test set.
GRADES = {"word_problems": grade_number, "svamp": grade_number, "gsm8k": grade_number,
          "math500": grade_maths}  # fmt: skip


def load_test_set(name: str, folder: Path | None = None) -> Sequence[dict]:
    """Rows of math500 or of a task that `tasks.load` knows, from a folder or the Hub."""
    return math500(folder) if name == "math500" else tasks.load(name, folder).test


def evaluate_test_set(
    policy: Policy, rows: Sequence[dict], grade: Callable[[str, str], tuple[bool, bool]], *,
    max_new_tokens: int, batch_size: int = 64,
) -> tuple[dict[str, float], list[str]]:  # fmt: skip
    """Greedy accuracy on `rows` (with `prompt` and `answer`).

    Returns the shares `strict` and `lenient`, the ends of their intervals (`strict/low`, …),
    `truncated` (share cut off), `mean_length` (tokens) and `n`; and the first three answers.
    """
    rows = list(rows)
    prompts = [row["prompt"] for row in rows]
    # of all, before the first is answered
    check_lengths(policy.model, policy.encode(prompts), max_new_tokens)
    grades, lengths, cut, shown = [], [], 0, []
    for start in tqdm(range(0, len(rows), batch_size), "test set"):
        batch = slice(start, start + batch_size)
        rollouts = reply(policy, prompts[batch], max_new_tokens=max_new_tokens, do_sample=False)
        ids = rollouts.completion_lists()
        texts = policy.decode(ids)
        shown += texts[: 3 - len(shown)]
        grades += [grade(text, row["answer"]) for text, row in zip(texts, rows[batch], strict=True)]
        lengths += map(len, ids)
        cut += sum(completion[-1] not in policy.eos_token_ids for completion in ids)
    n, result = len(rows), {}
    for name, graded in zip(("strict", "lenient"), zip(*grades, strict=True), strict=True):
        low, high = binomtest(sum(graded), n).proportion_ci(method="wilson")
        result |= {name: sum(graded) / n, f"{name}/low": low, f"{name}/high": high}
    return result | {"truncated": cut / n, "mean_length": sum(lengths) / n, "n": n}, shown


def evaluate_profile(
    profile: Profile, task: str | None = None, folder: Path | None = None, *,
    rows: int | None = None, max_new_tokens: int | None = None,
) -> dict:  # fmt: skip
    """Evaluate a profile's policy on a test set; returns the numbers and where they were measured.

    `task` and its `folder` are by default the profile's. Only the first `rows` are answered, with
    at most `max_new_tokens` each. Raises as `evaluate_test_set`.
    """
    task = task or profile.task
    if task in profile.adapters:  # the warm-up for that task
        profile = replace(profile, task=task)
    test_set = load_test_set(task, folder)  # before the model: the folder may be missing
    if rows is not None:
        test_set = test_set.select(range(min(rows, len(test_set))))
    limit = max_new_tokens or profile.config.max_completion_length
    policy, grade = profile.load_policy(), GRADES[task]
    accuracy, answers = evaluate_test_set(policy, test_set, grade, max_new_tokens=limit)
    about = {"task": task, "policy": Path(profile.policy).name, "adapter": profile.adapter}
    return about | accuracy | {"answers": answers} | where_it_ran(profile.device)


def in_words(measured: dict) -> str:
    """Both readings with their intervals, a line each."""
    lines = []
    for reading in ("strict", "lenient"):
        share, low, high = (measured[reading + end] for end in ("", "/low", "/high"))
        lines.append(f"{reading:8} {share:.3f} [{low:.3f}, {high:.3f}]")
    return "\n".join([*lines, f"n {measured['n']}, cut off {measured['truncated']:.1%}"])
