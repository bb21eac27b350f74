"""Verdicts on claims: how often they are wrong where the truth is known, and their arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_kit.lab.statistics import DELTA, interval, judge, power, region

CLAIMS, SEEDS = 10, 5


def verdicts(families: np.ndarray, expects: list, delta: float = DELTA) -> np.ndarray:
    """Verdicts (families, claims) on values (families, claims, seeds)."""
    judged = (judge([(v, e, delta) for v, e in zip(f, expects, strict=True)]) for f in families)
    return np.array([[one.verdict for one in family] for family in judged])


def assert_few_are_false(false: np.ndarray) -> None:
    """At most 5 % of families (families, claims) hold a false verdict, but for 1 time in 1,000."""
    limit = stats.binom.isf(1e-3, len(false), 0.05) / len(false)
    assert false.any(axis=1).mean() <= limit


# Values (families, claims, seeds) with mean 0.
NULL = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, size=shape),
    "difference of skewed": lambda rng, shape: (
        rng.exponential(size=shape) - rng.exponential(size=shape)
    ),
    "claims that share their seeds' luck": lambda rng, shape: (
        0.9 * rng.normal(size=(shape[0], 1, shape[2])) + 0.4 * rng.normal(size=shape)
    ),
}


@pytest.mark.parametrize("spread", NULL)
def test_a_family_of_false_claims_has_a_false_verdict_in_at_most_one_of_twenty(spread):
    families = NULL[spread](np.random.default_rng(1), (500, CLAIMS, SEEDS))
    judged = verdicts(families, ["rises", "falls"] * (CLAIMS // 2))
    assert_few_are_false((judged == "reproduced") | (judged == "contradicted"))
    if spread == "normal":  # and the five percent are made use of
        assert (judged != "inconclusive").any(axis=1).mean() > 0.02


LARGE, UNSURE = [0.10, 0.11, 0.12, 0.11, 0.10], [0.02, 0.04, 0.03, 0.02, 0.04]
SMALL = [0.010, 0.011, 0.012, 0.011, 0.010]  # sure, and too little


@pytest.mark.parametrize(
    ("values", "expects", "verdict"),
    [
        (LARGE, "rises", "reproduced"), (LARGE, "falls", "contradicted"),
        (LARGE, "stays", "contradicted"), (LARGE, {"value": 0.1, "within": 0.05}, "reproduced"),
        (LARGE, {"value": 0.2, "within": 0.05}, "contradicted"),
        (SMALL, "rises", "no effect"), (SMALL, "falls", "no effect"),
        (SMALL, "stays", "reproduced"), (SMALL, "keeps", "reproduced"),
        ([0.00, -0.01, 0.01, 0.00, 0.00], "rises", "no effect"),
        (UNSURE, "stays", "inconclusive"), (UNSURE, "keeps", "reproduced"),
        ([-value for value in LARGE], "keeps", "contradicted"),
        ([-value for value in UNSURE], "keeps", "inconclusive"),
        ([0.9, 0.01, -0.01, 0.02, 0.0], "rises", "inconclusive"),
        ([0.0] * 5, "rises", "no effect"), ([0.1] * 5, "rises", "reproduced"),
        ([-0.7] * 5, "rises", "contradicted"),
    ],
)  # fmt: skip
def test_the_verdict_is_what_the_interval_says(values, expects, verdict):
    assert judge([(values, expects, DELTA)])[0].verdict == verdict


@pytest.mark.parametrize("n", [1, 4])
def test_fewer_than_five_seeds_are_never_enough(n):
    values, enough = 100 + np.arange(n) / 1000, [1.0, 1.1, 1.2, 1.0, 1.1]
    few, other = judge([(values, "rises", DELTA), (enough, "rises", DELTA)])
    assert few.verdict == "inconclusive" and few.n == n
    assert few.reason == f"{n} seed{'s' if n > 1 else ''}, 5 are needed"
    assert other.verdict == "reproduced"


@pytest.mark.parametrize("n", [2, 5, 9])
@pytest.mark.parametrize("claims", [1, 7])
def test_intervals_are_those_of_students_t(n, claims):
    values = np.random.default_rng(7).normal(size=n)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / claims)
    both = {"mean": values.mean(), "low": low, "high": high, "median": np.median(values), "n": n}
    assert interval(values, claims) == pytest.approx(both)
    (judgement,) = judge([(values, "rises", DELTA)], claims)
    assert {name: getattr(judgement, name) for name in both} == pytest.approx(both)
    assert judgement.sd == pytest.approx(values.std(ddof=1))


def test_equal_values_are_their_own_interval_and_one_value_has_none():
    for tenth in (0.1, 0.3, 0.7):  # their mean is not exact
        found = interval([tenth] * 6)
        assert found["low"] == found["mean"] == found["high"] == tenth
    assert math.isnan(interval([0.5])["low"]) and interval([0.5])["mean"] == 0.5
    assert math.isnan(interval([0.5, math.inf])["high"])


values = st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), min_size=1, max_size=7)
claim = st.tuples(values, st.sampled_from(["rises", "falls", "stays", "keeps"]), st.just(0.5))


@settings(max_examples=50, deadline=None)
@given(st.lists(claim, min_size=1, max_size=4), st.lists(claim, max_size=4))
def test_more_claims_never_turn_inconclusive_into_a_verdict(family, more):
    for alone, among in zip(judge(family), judge(family + more), strict=False):
        assert among.verdict in (alone.verdict, "inconclusive")


def test_what_is_no_region_is_refused():
    assert judge([]) == [] and region({"value": 1, "within": 0.25}) == (0.75, 1.25)
    assert region("stays", 0.2) == (-0.2, 0.2)
    assert region("keeps", 0.2) == (-0.2, math.inf)
    numbers = [{"value": 1}, {"value": "1"}, {"value": math.nan}, {"value": 1, "x": 1}]
    wrong = [number | {"within": 1} for number in numbers[1:]]
    for expects in ("grows", None, 0.5, {}, numbers[0], {"value": 1, "within": 0}, *wrong):
        with pytest.raises(ValueError, match="say rises, falls, stays"):
            region(expects)


@pytest.mark.parametrize(
    ("expects", "true"),
    [("rises", DELTA), ("falls", -DELTA), ("stays", 0), ({"value": 0.5, "within": 0.03}, 0.5)],
)
@pytest.mark.parametrize("n", [5, 10])
def test_power_is_the_share_of_true_claims_that_judge_calls_reproduced(expects, true, n):
    sd = 0.016
    families = true + sd * np.random.default_rng(11).normal(size=(400, 1, n))
    share = (verdicts(np.repeat(families, 3, 1), [expects] * 3)[:, 0] == "reproduced").mean()
    assert 0.1 < share
    assert power(sd, n, expects, DELTA, claims=3) == pytest.approx(share, abs=0.09)


def test_power_without_a_spread_or_enough_seeds():
    assert power(0.01, 4) == 0 and math.isnan(power(math.nan, 5))
    assert power(0.0, 5, "stays") == 1
