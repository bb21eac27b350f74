"""Greedy accuracy of a policy on a whole test set, as papers report it. `grpo-kit evaluate`.

Papers count in two ways: *strict* wants the answer between `<answer>` tags, *lenient* takes what
looks like the final answer. A measure of one's own takes the place of both. Each share has Wilson's
95 % interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from scipy.stats import binomtest
from tqdm import tqdm

from grpo_kit.generation import check_lengths, reply
from grpo_kit.lab.records import where_it_ran
from grpo_kit.models import Policy
from grpo_kit.profiles import Profile
from grpo_kit.rewards.rules import accuracy_reward, lenient_accuracy_reward
from grpo_kit.rewards.scoring import check_columns, reward_name, score_texts
from grpo_kit.training import warn_if_graded

READINGS = {"strict": accuracy_reward, "lenient": lenient_accuracy_reward}


def evaluate_test_set(
    policy: Policy, rows: Sequence[dict], correct: Callable = accuracy_reward, *,
    max_new_tokens: int, batch_size: int = 64,
) -> dict[str, float]:  # fmt: skip
    """Greedy accuracy on `rows`: the share for which the reward `correct` is 1.

    Returns the shares `strict` and `lenient`, or one by the name of another `correct`, of the `n`
    rows that are scored; the ends of their intervals (`strict/low`, …); `truncated` (share cut
    off); `mean_length` (tokens). Raises ValueError where the rows lack what `correct` needs, or it
    scores none.
    """
    rows = list(rows)
    prompts = [row["prompt"] for row in rows]
    # of all, before the first is answered
    check_lengths(policy.model, policy.encode(prompts), max_new_tokens)
    readings = READINGS if correct is accuracy_reward else {reward_name(correct): correct}
    check_columns(correct, list(rows[0]), "the test set")
    values, lengths, cut = [], [], 0
    for start in tqdm(range(0, len(rows), batch_size), "test set"):
        batch = slice(start, start + batch_size)
        rollouts = reply(policy, prompts[batch], max_new_tokens=max_new_tokens, do_sample=False)
        ids = rollouts.completion_lists()
        scores = score_texts(policy.decode(ids), ids, rows[batch], list(readings.values()))
        values.append(scores)
        lengths += map(len, ids)
        cut += sum(completion[-1] not in policy.eos_token_ids for completion in ids)
    scored = torch.cat(values)
    scored = scored[~scored.isnan().any(1)]
    if not len(scored):
        raise ValueError(
            f"{reward_name(correct)} scores no row: give rows with an `answer`, or "
            "say what is right by another reward."
        )
    warn_if_graded(correct, scored[:, 0])
    n, result = len(scored), {}
    for name, right in zip(readings, (scored == 1).sum(0).tolist(), strict=True):
        low, high = binomtest(right, n).proportion_ci(method="wilson")
        result |= {name: right / n, f"{name}/low": low, f"{name}/high": high}
    about = {"truncated": cut / len(rows), "mean_length": sum(lengths) / len(rows), "n": n}
    return result | about


def evaluate_profile(
    profile: Profile, task: str | None = None, *, correct: Callable = accuracy_reward,
    rows: int | None = None, max_new_tokens: int | None = None,
) -> dict:  # fmt: skip
    """Evaluate a profile's policy on a test set; returns the numbers and where they were measured.

    The rows are those that the profile's own data hold out, or those of `task`. Only the first
    `rows` are answered, with at most `max_new_tokens` each. Raises as `evaluate_test_set`.
    """
    task = task or profile.task
    if task in profile.adapters:  # the warm-up for that task
        profile = replace(profile, task=task)
    # before the model: a file may be missing
    test_set = replace(profile, task=task).load_task().test
    if rows is not None:
        test_set = test_set.select(range(min(rows, len(test_set))))
    limit = max_new_tokens or profile.config.max_completion_length
    policy = profile.load_policy()
    accuracy = evaluate_test_set(policy, test_set, correct, max_new_tokens=limit)
    about = {"task": profile.data or task, "policy": Path(profile.policy).name}
    about["adapter"] = profile.adapter
    return about | accuracy | where_it_ran(profile.device)


def in_words(measured: dict) -> str:
    """Each reading with its interval, a line each."""
    lines = []
    for reading in (name.removesuffix("/low") for name in measured if name.endswith("/low")):
        share, low, high = (measured[reading + end] for end in ("", "/low", "/high"))
        lines.append(f"{reading:8} {share:.3f} [{low:.3f}, {high:.3f}]")
    return "\n".join([*lines, f"n {measured['n']}, cut off {measured['truncated']:.1%}"])
