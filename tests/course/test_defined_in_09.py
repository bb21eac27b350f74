"""What notebook 09 defines is what the package does; advantages, surrogate: beside those of 01."""

import re

from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import code_cells, defined_in, markdown

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


@given(shown, st.randoms())
def test_a_cured_reward_of_09_gives_each_answer_its_own_value(answers, rng):
    """Whoever its neighbours are; the sick one does not."""
    own, batch = defined_in("09"), columns_of_09(answers)
    order = rng.sample(range(len(answers)), len(answers))
    shuffled = {name: [column[i] for i in order] for name, column in batch.items()}
    for reward in (own.accuracy, own.ordered_accuracy, own.near_or_0, own.late_is_none):
        values, moved = reward(**batch), reward(**shuffled)
        assert moved == [values[i] for i in order] and len(values) == len(answers)
    assert own.ordered_accuracy(**batch) == own.accuracy(**batch) == accuracy_reward(**batch)
    assert sorted(own.fast_accuracy(**batch)) == sorted(own.accuracy(**batch))


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
