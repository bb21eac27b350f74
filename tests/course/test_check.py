"""The exercises' checks: what they say to right, wrong, missing and broken answers."""

import re
from itertools import accumulate
from statistics import median

import pytest
import torch

from grpo_kit.course import check
from grpo_kit.objective import group_advantages
from grpo_kit.rewards import group_similarities

EXERCISES = {name: one for name, one in vars(check).items() if isinstance(one, check.Exercise)}
each = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)


def unfinished(*args, **kwargs): ...


def refusing(*args, **kwargs):
    raise NotImplementedError


def broken(*args, **kwargs):
    raise KeyError("x")


@each
@pytest.mark.parametrize("stub", [unfinished, refusing, lambda *a, **k: ...])
def test_a_stub_is_not_done(exercise, stub):
    verdict = exercise(stub)
    assert verdict.state == "not done" and not verdict and repr(verdict).startswith("…")


@each
def test_a_function_that_raises_is_wrong_and_named(exercise):
    verdict = exercise(broken)
    assert verdict.state == "wrong" and "KeyError" in verdict.message


@each
@pytest.mark.parametrize("answer", ["text", 3.0, [1.0], object(), torch.zeros(7), [[None]]])
def test_any_other_answer_is_wrong_and_nothing_is_raised(exercise, answer):
    assert exercise(lambda *a, **k: answer).state == "wrong"


@pytest.mark.parametrize(
    ("exercise", "answer", "words"),
    [
        (check.pass_at_k, lambda n, c, k: 1 - (1 - c / n) ** k, "replacement|right one"),
        (check.pass_at_k, lambda n, c, k: c / n, "expected"),
        (check.leave_one_out, lambda r, g: r - r.mean(), "others"),
        (
            check.clipped_away,
            lambda ratio, advantages, epsilon: (ratio - 1).abs() > epsilon,
            "value 3: expected 0, got 1",
        ),
        (check.token_weights, lambda mask, name, limit: mask / mask.sum(), "grpo"),
        (check.token_weights, lambda mask, name, limit: mask, "grpo"),
        (
            check.paired_median,
            lambda there, here: median(there.values()) - median(here.values()),
            "Difference first",
        ),
        (
            check.paired_median,
            lambda there, here: median(there.get(s, 0) - here.get(s, 0) for s in there | here),
            "both arms",
        ),
        (
            check.paired_median,
            lambda there, here: (
                median(a - b for a, b in zip(there.values(), here.values(), strict=True))
                if there.keys() == here.keys()
                else 0.2
            ),
            "by seed, not by place",
        ),
        (check.any_false, lambda alpha, m: min(1, alpha * m), "1 - alpha"),
        (check.any_false, lambda alpha, m: alpha, "1 - alpha"),
        (check.holm, lambda ps: [min(1, p * len(ps)) for p in ps], "m - 1 times"),
        (
            check.holm,
            lambda ps: [min(1, p * (len(ps) - sorted(ps).index(p))) for p in ps],
            "below the one before",
        ),
        (
            check.holm,
            lambda ps: list(accumulate((p * (len(ps) - i) for i, p in enumerate(sorted(ps))), max)),
            "in which they came",
        ),
        (check.training_bytes, lambda n, width: 3 * n * width, "four numbers a weight"),
        (check.training_bytes, lambda n, width: 16 * n, "that of each of the four"),
        (
            check.decode_floor,
            lambda n, w, c, rows, b, f: max(w / b, 2 * n * rows / f),
            "cache to be read",
        ),
        (check.decode_floor, lambda n, w, c, rows, b, f: (w + rows * c) / b, "takes longer"),
        (check.split_groups, lambda rows, processes, size: processes - 1, "no group is split"),
        (check.split_groups, lambda rows, processes, size: int(rows % size > 0), "fill two"),
        (check.leave_one_out_similarity, group_similarities, "others"),
        (check.rarity, lambda s, n: [1 - s.count(x) / len(s) for x in s], "within each group"),
        (check.gated_advantage, lambda a, b, w, n: group_advantages(a + w * b, n), "mean bonus"),
        (
            check.gated_advantage,
            lambda a, b, w, n: group_advantages(a, n) + w * b * a,
            "mean bonus of 0.2",
        ),
        (
            check.judgement_rewards,
            lambda given: [sum(scores.values()) / len(scores) / 4 - 0.75 for scores in given],
            "missing",
        ),
        (check.judgement_rewards, lambda given: [0.5] * len(given), "worst"),
        (check.fence, lambda text: text, "plain closing tag"),
        (check.fence, lambda text: text.replace("</response>", "<_/response>", 1), "every one"),
        (check.fence, lambda text: text.replace("</response>", "[response]"), "capitals"),
        (
            check.fence,
            lambda text: re.sub(r"<\s*/\s*response\s*>", "", text, flags=re.IGNORECASE),
            "letters",
        ),
        (check.fence, lambda text: text.replace("<", "("), "must stay"),
        (check.fence, lambda text: text.split("</response")[0], "letters"),
        (check.fence, lambda text: "" if "response" in text.lower() else text, "letters"),
        (
            check.fence,
            lambda text: text.replace("<", "<_") if "esp" in text.lower() else [][1],
            "IndexError",
        ),
        (check.gated_quality, lambda accuracy, quality: quality, "least"),
        (
            check.gated_quality,
            lambda accuracy, quality: [
                q if a else -0.5 for a, q in zip(accuracy, quality, strict=True)
            ],
            "nobody knows",
        ),
        (
            check.verdict_rewards,
            lambda texts, correct: [
                float(("yes" in t.lower()) == c) for t, c in zip(texts, correct, strict=True)
            ],
            "last one counts",
        ),
        (
            check.verdict_rewards,
            lambda texts, correct: [
                float(t.lower().rstrip(".").endswith("yes") == c)
                for t, c in zip(texts, correct, strict=True)
            ],
            "<think>|holds no No",
        ),
        (check.balanced, lambda right, wrong, n: [right[:n], wrong[:n]], "n // 2 of each"),
        (check.balanced, lambda right, wrong, n: [right[: n // 2], wrong[: n // 2]], "start again"),
        (
            check.balanced,
            lambda right, wrong, n: [
                [pool[i % len(pool)] for i in range(n // 2)] if pool else []
                for pool in (right, wrong)
            ],
            "constant verdict",
        ),
        (
            check.pick,
            lambda answers, verdicts: max(range(len(answers)), key=lambda i: sum(verdicts[i])),
            "Equal answers",
        ),
        (check.p_yes, lambda logits, yes, no: logits.softmax(-1)[:, yes].sum(1), "two tokens"),
        (
            check.p_yes,
            lambda logits, yes, no: logits[:, yes].exp().sum(1) / logits[:, yes + no].exp().sum(1),
            "overflow",
        ),
        (check.meta_rewards, lambda p, weights: p.log() @ torch.tensor(weights), "infinity|weight"),
        (check.stop_early, lambda values, patience: values.index(max(values)), "over"),
        (
            check.stop_early,
            lambda values, patience: max(range(len(values)), key=lambda i: (values[i], i)),
            "first",
        ),
    ],
)
def test_typical_mistakes_get_a_hint(exercise, answer, words):
    verdict = exercise(answer)
    assert verdict.state == "wrong"
    assert any(word in verdict.message for word in words.split("|"))


def test_an_unread_answer_must_be_paid_0():
    def skip(completions, answer, **columns):
        numbers = [c[0]["content"].removeprefix("<answer>")[:-9] for c in completions]
        return [
            max(0.0, 1 - abs(int(n) - int(a)) / 10) if n.isdigit() else None
            for n, a in zip(numbers, answer, strict=True)
        ]

    verdict = check.near_miss_reward(skip)
    assert verdict.state == "wrong" and "pay 0" in verdict.message


def test_a_wrong_answer_is_told_with_its_input_and_what_was_expected():
    def holm(p_values):
        return [p * len(p_values) for p in p_values]

    said = check.holm(holm).message
    assert said.startswith("holm([0.01, 0.04]): value 1: expected 0.04, got 0.08. The smallest")


def test_a_solution_that_changes_its_arguments_spoils_no_later_check():
    def solution(rewards, num_generations):
        others = (rewards.view(-1, num_generations).sum(1, keepdim=True) - rewards.view(
            -1, num_generations)) / (num_generations - 1)  # fmt: skip
        return rewards - others.view(-1)

    check.leave_one_out(lambda rewards, num_generations: rewards.zero_())
    verdict = check.leave_one_out(solution)
    assert verdict and repr(verdict).startswith("✔ right")
