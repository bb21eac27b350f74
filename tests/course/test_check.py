"""The exercises' checks: what they say to right, wrong, missing and broken answers."""

import re
from itertools import cycle, islice
from operator import sub
from statistics import fmean

import pytest
import torch

from grpo_kit.course import check
from grpo_kit.objective import group_advantages
from grpo_kit.rewards import group_similarities

EXERCISES = {name: one for name, one in vars(check).items() if isinstance(one, check.Exercise)}
each = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)


def refusing(*args, **kwargs):
    raise NotImplementedError


@each
@pytest.mark.parametrize("stub", [refusing, lambda *a, **k: None, lambda *a, **k: ...])
def test_a_stub_is_not_done(exercise, stub):
    verdict = exercise(stub)
    assert verdict.state == "not done" and not verdict and repr(verdict).startswith("…")


@each
@pytest.mark.parametrize("answer", ["text", 3.0, [1.0], object(), torch.zeros(7), [[None]]])
def test_any_other_answer_is_wrong_and_nothing_is_raised(exercise, answer):
    assert exercise(lambda *a, **k: answer).state == "wrong"
    assert "raised KeyError: 'x'" in exercise(lambda *a, **k: {}["x"]).message


def reward_by(accept):
    """A reward of verdicts that takes `accept` of a text for its verdict."""
    return lambda texts, correct: [
        float(accept(text.lower()) == label) for text, label in zip(texts, correct, strict=True)
    ]


def skipping(completions, answer, **columns):
    numbers = [c[0]["content"].removeprefix("<answer>")[:-9] for c in completions]
    return [max(0.0, 1 - abs(int(n) - 12) / 10) if n.isdigit() else None for n in numbers]


MISTAKES = {  # those that are typical
    "near_miss_reward": [skipping],
    "pass_at_k": [lambda n, c, k: 1 - (1 - c / n) ** k, lambda n, c, k: c / n],
    "leave_one_out": [lambda r, g: r - r.mean()],
    "clipped_away": [lambda ratio, advantages, epsilon: (ratio - 1).abs() > epsilon],
    "token_weights": [lambda mask, name, limit: mask / mask.sum(), lambda mask, name, limit: mask],
    "leave_one_out_similarity": [group_similarities],
    "rarity": [lambda styles, n: [1 - styles.count(x) / len(styles) for x in styles]],
    "gated_advantage": [lambda right, bonus, w, n: group_advantages(right + w * bonus, n),
                        lambda right, bonus, w, n: group_advantages(right, n) + w * bonus * right],
    "judgement_rewards": [lambda given: [sum(s.values()) / len(s) / 4 - 0.75 for s in given],
                          lambda given: [0.5] * len(given)],
    "fence": [lambda text: text,
              lambda text: text.replace("</response>", "<_/response>", 1),
              lambda text: text.replace("</response>", "[response]"),
              lambda text: re.sub(r"<\s*/\s*response\s*>", "", text, flags=re.IGNORECASE),
              lambda text: text.replace("<", "("),
              lambda text: text.split("</response")[0],
              lambda text: "" if "response" in text.lower() else text,
              lambda text: text.replace("<", "<_") if "esp" in text.lower() else [][1]],
    "gated_quality": [lambda right, quality: quality, lambda right, quality: [
        q if a else -0.5 for a, q in zip(right, quality, strict=True)]],
    "verdict_rewards": [reward_by(lambda text: "yes" in text),
                        reward_by(lambda text: text.rstrip(".").endswith("yes"))],
    "balanced": [lambda right, wrong, n: [right[:n], wrong[:n]],
                 lambda right, wrong, n: [right[: n // 2], wrong[: n // 2]],
                 lambda *pools: [list(islice(cycle(pool), pools[2] // 2)) for pool in pools[:2]]],
    "pick": [lambda answers, verdicts: max(range(len(answers)), key=lambda i: sum(verdicts[i]))],
    "p_yes": [lambda z, yes, no: z.softmax(-1)[:, yes].sum(1),
              lambda z, yes, no: z[:, yes].exp().sum(1) / z[:, yes + no].exp().sum(1)],
    "meta_rewards": [lambda p, weights: p.log() @ torch.tensor(weights)],
    "stop_early": [lambda values, patience: values.index(max(values)),
                   lambda values, patience: max(range(len(values)), key=lambda i: (values[i], i))],
    "paired_mean": [
        lambda there, here: fmean(there.values()) - fmean(here.values()),
        lambda there, here: fmean(there.get(s, 0) - here.get(s, 0) for s in there | here),
        lambda there, here: fmean(map(sub, there.values(), here.values())) if 0 in here else 0.2],
    "any_false": [lambda alpha, m: min(1, alpha * m), lambda alpha, m: alpha],
    "reading": [lambda low, high, delta: "reproduced" if high < 0 else "no effect",
                lambda low, high, delta: "no effect" if low < 0 < high else "reproduced",
                lambda low, high, delta: "inconclusive" if high > -delta else "reproduced"],
    "training_bytes": [lambda n, width: 3 * n * width, lambda n, width: 16 * n],
    "decode_floor": [lambda n, w, c, rows, b, f: max(w / b, 2 * n * rows / f),
                     lambda n, w, c, rows, b, f: (w + rows * c) / b],
    "zero_spread": [lambda rewards, n: float(len(set(rewards)) == 1),
                    lambda rewards, n: sum(sum(rewards[i:i + n]) in (0, n) for i in
                                           range(0, len(rewards), n)) / (len(rewards) / n),
                    lambda rewards, n: sum(len(set(rewards[i::n])) == 1 for i in
                                           range(len(rewards) // n)) / (len(rewards) / n)],
    "tell": [lambda row: "healthy" if row["loss"] else "no-spread",
             lambda row: "vanishing-gradient" if row["grad_norm"] == 0 else "healthy",
             lambda row: "not-finite" if row["loss"] != row["loss"] else "healthy",
             lambda row: "no-spread" if row["frac_reward_zero_std"] > 0.5 else "healthy"],
    "split_groups": [lambda rows, processes, size: processes - 1,
                     lambda rows, processes, size: int(rows % size > 0)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mistake"), [(name, one) for name, mistakes in MISTAKES.items() for one in mistakes]
)
def test_a_typical_mistake_is_wrong_and_gets_the_hint_of_its_case(name, mistake):
    verdict = EXERCISES[name](mistake)
    assert verdict.state == "wrong"
    hinted = any(verdict.message.endswith(hint) for hint in EXERCISES[name].cases)
    assert hinted or "raised IndexError" in verdict.message


def test_a_wrong_answer_is_told_with_its_input_and_what_was_expected():
    def paired_mean(arm, baseline):
        return arm[0]

    said = check.paired_mean(paired_mean).message
    assert said.startswith("paired_mean({0: 0.5, 1: 0.7, 2: 0.6}, {0: 0.4, 1: 0.5, 2: 0.3}): ")
    assert said.endswith("expected 0.2, got 0.5. The mean of .1, .2, .3.")


def test_a_solution_that_changes_its_arguments_spoils_no_later_check():
    check.leave_one_out(lambda rewards, n: rewards.zero_())
    verdict = check.leave_one_out(lambda r, n: group_advantages(r, n, "none") * n / (n - 1))
    assert verdict and repr(verdict).startswith("✔ right")
