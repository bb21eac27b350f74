"""What notebook 02 defines is what the package does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in
from torch.testing import assert_close

from grpo_kit.rewards import group_similarities, linear_weight


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 8]), st.floats(0, 1))
def test_similarities_and_weight_of_the_notebook_equal_the_package(seed, size, progress):
    embeddings = torch.randn(4 * size, 5, generator=torch.Generator().manual_seed(seed))
    expected = group_similarities(embeddings, size)
    assert_close(defined_in("02").similarities(embeddings, size), expected)
    assert defined_in("02").weight(progress) == pytest.approx(linear_weight(progress))
