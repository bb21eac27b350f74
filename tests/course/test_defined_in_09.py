"""What notebook 09 defines is what the package does."""

import re

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import SOLUTION, code_cells, defined_in, markdown

from grpo_kit import objective
from grpo_kit.course import check
from grpo_kit.rewards import accuracy_reward

shown = st.lists(
    st.tuples(st.sampled_from(["7", "12", "8.0", "no", ""]), st.booleans(), st.integers(0, 30)),
    min_size=1, max_size=8,
)  # fmt: skip


def columns_of_09(answers):
    """Completions of each number, tagged or not, after some words; the right one is 7 or 12."""
    texts = [
        "so " * words + (f"<answer>{number}</answer>" if tagged else number)
        for number, tagged, words in answers
    ]
    return {
        "prompts": [[{"role": "user", "content": "?"}]] * len(texts),
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [list(range(words + 3)) for _, _, words in answers],
        "answer": ["7" if words % 2 else "12" for _, _, words in answers],
    }


@given(shown)
def test_the_accuracy_of_09_equals_the_package(answers):
    batch = columns_of_09(answers)
    assert defined_in("09").accuracy(**batch) == accuracy_reward(**batch)


@given(shown, st.randoms())
def test_a_cured_reward_of_09_gives_each_answer_its_own_value(answers, rng):
    """Whoever its neighbours are; the sick one does not."""
    own, batch = defined_in("09"), columns_of_09(answers)
    order = rng.sample(range(len(answers)), len(answers))
    shuffled = {name: [column[i] for i in order] for name, column in batch.items()}
    for reward in (own.accuracy, own.ordered_accuracy, own.near_or_0, own.late_is_none):
        values, moved = reward(**batch), reward(**shuffled)
        assert moved == [values[i] for i in order] and len(values) == len(answers)
    assert own.ordered_accuracy(**batch) == own.accuracy(**batch)
    assert sorted(own.fast_accuracy(**batch)) == sorted(own.accuracy(**batch))


def test_the_advantage_and_the_surrogate_of_09_equal_the_package():
    own, mask = defined_in("09"), torch.ones(4, 2, dtype=torch.bool)
    advantages = own.advantages(rewards := torch.tensor([1.0, 0.0, 0.5, torch.nan]), 4)
    torch.testing.assert_close(advantages, objective.group_advantages(rewards, 4))
    logps = torch.tensor([[0.3, -0.3], [0.3, -0.3], [0.1, 0.0], [0.0, 0.3]])
    batch = logps, torch.zeros(4, 2), advantages, mask
    torch.testing.assert_close(own.surrogate(*batch), objective.surrogate(*batch))


def test_a_fault_that_an_answer_of_09_shows_is_the_one_that_was_trained():
    code = "\n".join(cell.source for cell in code_cells("09_clinic"))
    answers = re.findall(
        r"<summary>Answer</summary>(.*?)</details>", markdown("09_clinic"), re.DOTALL
    )
    shown = [
        fence for text in answers for fence in re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    ]
    assert len(shown) >= 7
    assert all(fence in code for fence in shown)


def test_the_exercises_of_09_are_what_the_package_and_the_cure_do():
    assert check.zero_spread(solution_of_09("zero_spread"))
    own, put_back = defined_in("09"), solution_of_09("put_back")
    batch = columns_of_09([("7", True, 5), ("12", True, 2), ("8.0", False, 9), ("7", True, 1)])
    order = sorted(range(4), key=lambda i: len(batch["completions"][i][0]["content"]))
    assert put_back(own.fast_accuracy(**batch), order) == own.accuracy(**batch)


def solution_of_09(name):
    (source,) = (s for s in SOLUTION.findall(markdown("09_clinic")) if f"def {name}(" in s)
    namespace = {}
    exec(source, namespace)
    return namespace[name]
