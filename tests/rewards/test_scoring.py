"""Rewards are called by TRL's protocol, side by side, and held to what they may be and return."""

import asyncio
import math
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from toy import TASK, Letters, configure

from grpo_kit.rewards import (
    CertaintyReward,
    DiversityReward,
    MajorityReward,
    MetaEvaluationReward,
    accuracy_reward,
)
from grpo_kit.rewards.scoring import (
    RewardError,
    check_columns,
    check_rewards,
    reward_names,
    score_texts,
)
from grpo_kit.training import PromptBatches

N = 6
TEXTS = [f"text {i}" for i in range(N)]
IDS = [[i] * (i + 1) for i in range(N)]
EXAMPLES = [{"prompt": [{"role": "user", "content": f"{i}?"}], "row": i} for i in range(N)]


def scored(*rewards, **options):
    return score_texts(TEXTS, IDS, EXAMPLES, rewards, **options)


def test_every_row_is_scored_with_its_own_columns():
    def echo(prompts, completions, completion_ids, *, row, trainer_state, log_metric):
        rows = zip(prompts, completions, completion_ids, strict=True)
        for i, (prompt, completion, ids) in enumerate(rows):
            assert prompt[0]["content"] == f"{i}?" and ids == IDS[i] and row[i] == i
            assert completion == [{"role": "assistant", "content": f"text {i}"}]
        log_metric("seen", trainer_state)
        return row

    logged = {}
    rewards_per_func = scored(echo, lambda **_: [None, 2] * 3, state=7, logged=logged)
    assert rewards_per_func[:, 0].tolist() == list(range(N)) and logged == {"seen": [7.0]}
    assert rewards_per_func[:, 1].tolist() == pytest.approx([math.nan, 2] * 3, nan_ok=True)


def test_coroutine_rewards_run_together_and_beside_the_others():
    """Each waits for the other and for the plain one; one after another they would wait forever."""
    here = {name: asyncio.Event() for name in "ab"}
    plain = threading.Event()

    def make(name, other):
        async def reward(**columns):
            here[name].set()
            await asyncio.wait_for(here[other].wait(), 20)
            assert await asyncio.to_thread(plain.wait, 20)
            return [1.0] * N

        return reward

    def last(**columns):
        plain.set()
        return [2.0] * N

    assert scored(make("a", "b"), make("b", "a"), last).tolist() == [[1.0, 1.0, 2.0]] * N


def test_a_failing_reward_is_named_with_its_error_and_does_not_wait_for_a_judge():
    async def judge(**columns):
        await asyncio.sleep(60)

    def hasty(**columns):
        return 1 / 0

    started = time.monotonic()
    with pytest.raises(RewardError, match="the reward hasty raised ZeroDivisionError: div") as info:
        scored(judge, hasty)
    assert time.monotonic() - started < 30
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_a_coroutine_that_fails_is_named_with_its_error():
    async def absent(answer, **columns):
        return answer

    with pytest.raises(RewardError, match="the reward absent raised TypeError: .* 'answer'"):
        scored(partial(absent))


VALUES = [0.5, -1.0, 2.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor(VALUES), torch.tensor(VALUES, dtype=torch.bfloat16).requires_grad_(),
        np.array(VALUES), np.array(VALUES, dtype=np.float32), tuple(VALUES), list(np.array(VALUES)),
        list(torch.tensor(VALUES)),
    ],
)  # fmt: skip
def test_a_tensor_or_array_of_one_dimension_is_taken_like_a_list(values):
    assert scored(lambda **_: values)[:, 0].tolist() == VALUES


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1.0], ValueError, f"returned 1 values for {N} completions; return one for each"),
        (torch.ones(N, 1), TypeError, "returned a Tensor; return a list"),
        ([math.nan] * N, ValueError, "returned nan for completion 0.* None"),
        (torch.tensor([0, math.nan] * 3), ValueError, "returned nan for completion 1.* None"),
        ([1, "7", 1, 1, 1, 1], TypeError, "returned '7' for completion 1.*, not text"),
        ("123456", TypeError, "returned a str; return a list with a number"),
        ((1.0 for _ in range(N)), TypeError, "returned a generator; return a list"),
        (None, TypeError, "returned a NoneType; return a list"),
        ([1e39] * N, ValueError, r"returned 1e\+39 for completion 0; return a smaller number"),
        ([10**400] * N, TypeError, "returned 1000.* for completion 0; return a number"),
    ],
)
def test_what_a_reward_may_not_return_is_named(values, error, message):
    def bad(**columns):
        return values

    with pytest.raises(error, match=f"the reward bad {message}"):
        scored(bad)


def test_a_reward_that_changes_what_it_is_given_changes_it_for_nobody_else():
    def spoiling(prompts, completions, completion_ids, row, **columns):
        completions[0][0]["content"] = "spoilt"
        for given in (prompts, completions, completion_ids, row):
            given.clear()
        return [0.0] * N

    def reading(completions, completion_ids, row, **columns):
        assert completions[0][0]["content"] == "text 0" and completion_ids == IDS
        return row

    assert scored(spoiling, reading)[:, 1].tolist() == list(range(N))


def test_an_error_inside_a_reward_is_named_with_its_line_whatever_its_kind():
    def empty(**columns):
        return [next(iter([]))]

    with pytest.raises(RewardError, match=r"empty raised StopIteration \(test_scoring.py, line"):
        scored(empty)


def test_a_reward_without_columns_is_shown_how_to_take_them():
    def brief(completions):
        return [-len(completion) for completion in completions]

    message = r"brief lacks .*passed prompts, .*, answer, too: write def brief\(completions, \*\*"
    with pytest.raises(TypeError, match=message):
        check_columns(brief, ["prompt", "answer"], "task 'toy'")
    check_columns(accuracy_reward, ["prompt", "answer"], "task 'toy'")
    check_columns(lambda completions, trainer_state, log_metric, extra=1, **_: [], [], "task 'toy'")


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (accuracy_reward, "`rewards` is one function, not a list: give a list of functions"),
        ("accuracy_reward", "`rewards` is a str, not a list"),
        ([accuracy_reward, "format_reward"], r"rewards\[1\] is 'format_reward', not a funct"),
        ([1.0], r"rewards\[0\] is 1.0, not a function"),
        ([MajorityReward], r"is the class MajorityReward: give an object of it, MajorityReward\("),
    ],
)
def test_what_is_no_list_of_functions_is_refused_in_a_sentence(rewards, message, policy):
    for check in (check_rewards, lambda _: PromptBatches(policy, TASK, rewards, configure(), 0)):
        with pytest.raises(TypeError, match=message):
            check(rewards)
    with pytest.raises(ValueError, match="there are no rewards: give a list of functions"):
        check_rewards([])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: DiversityReward(4, Letters(), weight_end=math.nan), "weight_end must be"),
        (lambda _: DiversityReward(4, Letters(), weight_start=math.inf), "weight_start and"),
        (lambda p: MetaEvaluationReward(p, ["a", "b"], [1.0]), "1 weights for 2 questions"),
        (lambda p: MetaEvaluationReward(p, []), "there are no questions; give one"),
        (lambda p: MetaEvaluationReward(p, transform="logit"), "choose 'log' or 'p'"),
        (lambda p: MetaEvaluationReward(p, truth_fraction=10), "a share from 0 to 1"),
        (lambda p: CertaintyReward(p, "entropy"), "'entropy'; choose one of self-certainty"),
    ],
)
def test_a_setting_that_cannot_be_is_named(make, message, policy):
    with pytest.raises(ValueError, match=message):
        make(policy)


def test_rewards_go_by_the_names_of_functions_and_classes_each_by_its_own():
    class Judge:
        def __call__(self, **columns): ...

    halves = [partial(accuracy_reward, **{}) for _ in range(2)]
    numbered = ["accuracy_reward", "accuracy_reward_2", "accuracy_reward_3"]
    assert reward_names([Judge(), accuracy_reward, *halves]) == ["Judge", *numbered]
