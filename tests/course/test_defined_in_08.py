"""What notebook 08 defines is what the package does; advantages, surrogate: beside those of 01."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in

from grpo_kit.lab import planner
from grpo_kit.profiles import PROFILES


def test_the_bytes_of_08_are_those_that_the_planner_counts():
    model, parts = planner.model_of(PROFILES["paper"].policy), planner.memory_of(PROFILES["paper"])
    counted = sum(parts[part] for part in ("weights", "gradients", "optimiser"))
    assert defined_in("08").training_bytes(model.num_parameters()) / planner.GIB == pytest.approx(
        counted
    )


@given(st.floats(1e6, 1e12), st.floats(1.0, 4.0), st.floats(0, 1e8), st.integers(1, 4096))
def test_the_floor_of_08_is_the_slower_of_reading_and_computing(n, width, cache, rows):
    card = {"bandwidth": 1e12, "flops": 1e14}
    floor = defined_in("08").decode_floor(n, width * n, cache, rows, **card)
    reading, computing = (width * n + rows * cache) / 1e12, 2 * n * rows / 1e14
    assert floor == pytest.approx(max(reading, computing))
