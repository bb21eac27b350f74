"""What notebook 07 defines is what the package does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_notebooks import defined_in

from grpo_kit.lab import statistics


@given(
    st.lists(st.integers(-9, 9), min_size=5, max_size=10),
    st.integers(1, 30),
    st.sampled_from(["rises", "falls", "stays", "keeps"]),
)
def test_the_rule_of_07_is_the_one_that_the_package_judges_by(values, claims, expects):
    (judgement,) = statistics.judge([(values, expects, 2.0)], claims)
    low, high = defined_in("07").interval(values, claims)
    assert (low, high) == pytest.approx((judgement.low, judgement.high))
    ends = judgement.low, judgement.high
    assert defined_in("07").verdict(*ends, expects, 2.0) == judgement.verdict
