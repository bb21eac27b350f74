"""Rewards are called by TRL's protocol, beside one another, and held to what they may return."""

import asyncio
import math
import threading
import time
from functools import partial

import pytest

from grpo_kit.rewards import accuracy_reward
from grpo_kit.rewards.scoring import check_columns, reward_names, score_texts

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
    late = make("a", "a")  # a function that returns an awaitable is awaited too
    assert scored(lambda **columns: late(**columns)).tolist() == [[1.0]] * N


def test_a_failing_reward_does_not_wait_for_a_judge():
    async def judge(**columns):
        await asyncio.sleep(60)

    started = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        scored(judge, lambda **columns: 1 / 0)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([1.0], ValueError, f"the reward bad returned 1 values for {N} completions"),
        ([math.nan] * N, ValueError, "the reward bad returned nan for completion 0.* None"),
        ([0.0, -math.inf] * 3, ValueError, "the reward bad returned -inf for completion 1"),
        (["good"] * N, TypeError, "the reward bad returned 'good' for completion 0.* None"),
        (7, TypeError, "the reward bad returned a int.* list"),
    ],
)
def test_a_bad_reward_is_named(values, error, message):
    def bad(**columns):
        return values

    with pytest.raises(error, match=message):
        scored(bad)


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="accuracy_reward needs a column 'answer'.* prompt, row."):
        check_columns(accuracy_reward, ["prompt", "row"], "task 'toy'")
    check_columns(accuracy_reward, ["prompt", "answer"], "task 'toy'")
    check_columns(lambda completions, trainer_state, log_metric, extra=1, **_: [], [], "task 'toy'")


def test_rewards_go_by_the_names_of_functions_and_classes_each_by_its_own():
    class Judge:
        def __call__(self, **columns): ...

    halves = [partial(accuracy_reward, **{}) for _ in range(2)]

    def accuracy_reward_2(**columns): ...

    names = reward_names([Judge(), accuracy_reward_2, accuracy_reward, *halves])
    numbered = ["accuracy_reward_2", "accuracy_reward", "accuracy_reward_3", "accuracy_reward_4"]
    assert names == ["Judge", *numbered]
