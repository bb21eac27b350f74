"""What notebook 05 defines is what the package does; its surrogate beside those of 01."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in


@given(st.integers(0, 1000), st.integers(1, 64))
def test_the_coin_of_05_is_fair_seeded_by_the_step_and_blind(step, n):
    state, coin = SimpleNamespace(global_step=step), defined_in("05").coin
    first = coin(completions=["yes"] * n, trainer_state=state, prompts=["a"] * n)
    assert first == coin(completions=["no"] * n, trainer_state=state, prompts=["b"] * n)
    assert len(first) == n and {*first} <= {0.0, 1.0}
