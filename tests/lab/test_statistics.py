"""Verdicts on claims: how often they are wrong where the truth is known, and their arithmetic."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grpo_kit.lab.statistics import (
    MARGIN,
    effect_size,
    holm,
    interval,
    judge,
    p_values,
    power,
    prediction_band,
    region,
)

CLAIMS, SEEDS = 12, 5


def verdicts(grids: np.ndarray, expects: list) -> np.ndarray:
    """Verdicts (grids, claims) on values (grids, claims, seeds), a table a grid."""
    return np.array([[j.verdict for j in judge(list(zip(g, expects, strict=True)))] for g in grids])


def assert_few_are_false(judged: np.ndarray) -> None:
    """At most 5 % of tables have a wrong verdict of either kind, but for 1 time in 1,000."""
    limit = stats.binom.isf(1e-3, len(judged), 0.05) / len(judged)
    for verdict in ("reproduced", "contradicted"):
        assert (judged == verdict).any(axis=1).mean() <= limit


# Values (grids, claims, seeds) with mean 0.
NULL = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, size=shape),
    "difference of skewed": lambda rng, shape: (
        rng.exponential(size=shape) - rng.exponential(size=shape)
    ),
    "steps, 4 in 10 exactly 0": lambda rng, shape: np.round(rng.normal(size=shape)) / 128,
    "claims that share their seeds' luck": lambda rng, shape: (
        0.9 * rng.normal(size=(shape[0], 1, shape[2])) + 0.4 * rng.normal(size=shape)
    ),
}


@pytest.mark.parametrize("spread", NULL)
def test_a_table_of_false_claims_has_a_false_verdict_in_at_most_one_of_twenty(spread):
    grids = NULL[spread](np.random.default_rng(1), (500, CLAIMS, SEEDS))
    judged = verdicts(grids, ["rises", "falls"] * (CLAIMS // 2))
    assert_few_are_false(judged)
    if spread == "normal":  # and the five percent are made use of
        assert (judged == "reproduced").any(axis=1).mean() > 0.03


@pytest.mark.parametrize("mean", [MARGIN, -MARGIN])
def test_a_mean_exactly_on_the_margin_is_seldom_said_to_stay_or_to_leave(mean):
    grids = mean + 0.01 * np.random.default_rng(3).normal(size=(500, CLAIMS, SEEDS))
    assert_few_are_false(verdicts(grids, ["stays"] * CLAIMS))


def test_true_claims_in_a_table_do_not_make_its_false_ones_true():
    rng, true = np.random.default_rng(4), 4
    expects = ["rises", "falls", "stays", {"value": 0.8, "within": 0.1}] + ["rises"] * 8
    grids = rng.normal(size=(500, CLAIMS, SEEDS))
    grids[:, 0] += 6
    grids[:, 1] -= 6
    grids[:, 2] *= 0.01
    grids[:, 3] = 0.8 + 0.01 * grids[:, 3]
    judged = verdicts(grids, expects)
    assert_few_are_false(judged[:, true:])
    assert ((judged[:, :true] == "reproduced").mean(axis=0) > 0.9).all()
    assert not (judged[:, :true] == "contradicted").any()


def test_claims_that_are_the_reverse_of_the_truth_are_contradicted():
    values = np.random.default_rng(5).normal(size=SEEDS)
    table = [(values - 20, "rises"), (values + 20, "falls"), (values + 20, "stays"),
             (values - 20, {"value": 0, "within": 1})]  # fmt: skip
    for judgement in judge(table):
        assert judgement.verdict == "contradicted" and not judgement.reason and judgement.p <= 0.05


@pytest.mark.parametrize("n", [1, 4])
def test_fewer_than_five_seeds_are_never_enough_and_do_not_count_in_the_correction(n):
    enough = [1.0, 1.1, 1.2, 1.0, 1.1]
    few, other = judge([(100 + np.arange(n) / 1000, "rises"), (enough, "rises")])
    assert few.verdict == "inconclusive" and few.n == n and math.isnan(few.p)
    assert few.reason == f"{n} seed{'s' if n > 1 else ''}, 5 are needed"
    assert other.verdict == "reproduced" and other.p == p_values(enough, "rises")[0]


def test_an_inconclusive_claim_says_why():
    values, crossing = [1.0, 1.5, 2.0, 0.1, 0.3], [-0.2, 1, 1.1, 1.2, 1.3]
    assert judge([(values, "rises")])[0].verdict == "reproduced"
    first, *_ = judge([(values, "rises"), *[([0.0] * 5, "rises")] * 9])
    assert first.reason == f"corrected for 10 claims p = {10 * p_values(values, 'rises')[0]:.3g}"
    for values, expects, reason in (
        (crossing, "rises", "the interval of the seeds crosses the bound"),
        (crossing, "falls", "the interval of the seeds crosses the bound"),
        ([0.0] * 5, "rises", "p = 1"),
        ([1.0, math.nan, 1.0, 1.0, 1.0], "rises", "a seed's value is not finite"),
    ):
        (judgement,) = judge([(values, expects)])
        assert judgement.verdict == "inconclusive" and judgement.reason == reason


def test_a_judgement_carries_interval_effect_and_corrected_p():
    rng = np.random.default_rng(6)
    rows = [rng.normal(size=n) + 2 for n in (1, 2, 4, 5, 6, 7)] + [np.full(5, 0.1)]
    judgements = judge([(row, "rises") for row in rows])
    for row, judgement in zip(rows, judgements, strict=True):
        numbers = {name: getattr(judgement, name) for name in ("median", "low", "high", "n")}
        assert numbers == pytest.approx(interval(row), abs=0, rel=0, nan_ok=True)
        assert judgement.effect == pytest.approx(effect_size(row), nan_ok=True)
    enough = [(row, j) for row, j in zip(rows, judgements, strict=True) if len(row) >= 5]
    expected = holm([p_values(row, "rises")[0] for row, _ in enough])
    assert [j.p for _, j in enough] == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 9])
def test_intervals_are_those_of_the_percentile_bootstrap(n):
    """Up to five values they are the least and the largest, found without resampling."""
    for seed, values in enumerate(np.random.default_rng(7).normal(size=(5, n))):
        rng = np.random.default_rng(0 if n > 5 else seed)
        expected = stats.bootstrap((values,), np.median, method="percentile", rng=rng)
        low, high = expected.confidence_interval
        both = {"median": np.median(values), "low": low, "high": high, "n": n}
        assert interval(values) == pytest.approx(both, abs=0, rel=3e-16)


value = st.floats(-3, 3).map(lambda x: round(x, 2))
values = st.lists(value, min_size=1, max_size=5)
claim = st.tuples(values, st.sampled_from(["rises", "falls", "stays"]))


@settings(max_examples=50)
@given(st.lists(claim, min_size=1, max_size=6), st.lists(claim, max_size=6))
def test_more_claims_never_turn_inconclusive_into_a_verdict(table, more):
    for alone, among in zip(judge(table), judge(table + more), strict=False):
        assert among.verdict in (alone.verdict, "inconclusive")
        assert math.isnan(alone.p) or among.p >= alone.p


@pytest.mark.parametrize("shift", [-0.3, -0.04, 0.0, 0.02, 0.3])
def test_p_values_are_those_of_one_sample_t_tests(shift):
    values = shift + 0.05 * np.random.default_rng(8).normal(size=6)

    def p(bound: float, side: str) -> float:
        return stats.ttest_1samp(values, bound, alternative=side).pvalue

    above, below = p(0, "greater"), p(0, "less")
    assert p_values(values, "rises") == pytest.approx((above, below))
    assert p_values(values, "falls") == pytest.approx((below, above))
    within = max(p(-MARGIN, "greater"), p(MARGIN, "less"))
    beyond = min(1, 2 * min(p(-MARGIN, "less"), p(MARGIN, "greater")))
    assert p_values(values, "stays") == pytest.approx((within, beyond))
    moved = p_values(values + 0.7, {"value": 0.7, "within": MARGIN})
    assert moved == pytest.approx((within, beyond))


def test_equal_values_speak_for_their_side_and_on_the_bound_for_neither():
    for tenth in (0.1, 0.3, 0.7):  # their mean is not exact
        assert p_values([tenth] * 3, "rises") == (1 / 8, 1)
        assert p_values([tenth] * 3, "falls") == (1, 1 / 8)
        assert p_values([tenth] * 3, {"value": 0, "within": tenth}) == (1, 1)
    assert p_values([0.2] * 5, "stays") == (1, 2 / 32)
    assert p_values([0.0] * 5, "rises") == p_values([0.0] * 5, "falls") == (1, 1)
    (alone,) = judge([([0.0] * 5, "stays")])
    assert alone.verdict == "reproduced" and alone.p == 1 / 32
    many = judge([([0.0] * 5, e) for e in ("rises", "falls", "stays")])
    assert {j.verdict for j in many} == {"inconclusive"}
    for values in ([math.inf] * 5, [1.0, 1.0, math.nan]):
        assert p_values(values, "rises") == p_values(values, "stays") == (1, 1)


def test_holm_agrees_with_a_calculation_by_hand():
    # sorted 0.005 · 4, 0.01 · 3, 0.03 · 2, and 0.04 · 1, which is raised to the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.02]) == 0.02 and holm([]).size == 0 and holm([0.6, 0.7]).tolist() == [1, 1]


def test_effect_is_hedges_g():
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2 * (1 - 3 / 7))
    # the exact factor is gamma(m/2) / (sqrt(m/2) gamma((m-1)/2)), m = n - 1
    values = np.random.default_rng(9).normal(size=10) + 1
    exact = math.gamma(4.5) / (math.sqrt(4.5) * math.gamma(4))
    d = values.mean() / values.std(ddof=1)
    assert effect_size(values) == pytest.approx(d * exact, rel=2e-3)
    assert effect_size(-values) == -effect_size(values)
    assert effect_size([0.0] * 5) == 0
    assert effect_size([0.1] * 3) == math.inf and effect_size([-0.1] * 3) == -math.inf
    assert all(math.isnan(effect_size(few)) for few in ([], [1.0], [1.0, math.nan]))


def test_what_is_no_region_is_refused():
    assert judge([]) == [] and region({"value": 1, "within": 0.25}) == (0.75, 1.25)
    numbers = [{"value": 1}, {"value": "1"}, {"value": math.nan}, {"value": 1, "x": 1}]
    wrong = [number | {"within": 1} for number in numbers[1:]]
    for expects in ("grows", None, 0.5, {}, numbers[0], {"value": 1, "within": 0}, *wrong):
        with pytest.raises(ValueError, match="say rises, falls, stays"):
            region(expects)


@pytest.mark.parametrize("n", [4, 5, 6, 9])
def test_power_counts_the_verdicts_of_judge(n):
    draws = np.random.default_rng(11).normal(size=(60, 2, n))
    draws[:, 0] += 0.9
    # of sorted values the resamples are those of `power`
    tables = [[(np.sort(row), "rises") for row in grid] for grid in draws]
    share = np.mean([judge(table)[0].verdict == "reproduced" for table in tables])
    assert n == 4 or 0.1 < share < 0.9
    assert power(0.9, n, claims=2, grids=60, seed=11) == pytest.approx(share)


def test_an_honest_new_run_leaves_any_of_its_bands_at_most_once_in_twenty():
    rng, comparisons, trials = np.random.default_rng(10), 8, 1500
    runs = rng.normal(size=(trials, comparisons, SEEDS))
    new = rng.normal(size=(trials, comparisons))
    bands = np.array([[prediction_band(row, comparisons) for row in rows] for rows in runs])
    left = ((new < bands[..., 0]) | (new > bands[..., 1])).any(-1).mean()
    share = 1 - (1 - 0.05 / comparisons) ** comparisons
    low, high = stats.binom.interval(0.999, trials, share)  # but for 1 time in 1,000
    assert low <= left * trials <= high


def test_band_agrees_with_a_calculation_by_hand_and_widens_with_floor_and_comparisons():
    low, high = prediction_band([1.0, 2.0, 3.0])
    half = stats.t.ppf(0.975, 2) * math.sqrt(4 / 3)
    assert (low, high) == pytest.approx((2 - half, 2 + half))
    assert prediction_band([1.0, 2.0, 3.0], floor=0.5) == (low, high)
    assert prediction_band([1.0, 2.0, 3.0], floor=2.0)[1] == pytest.approx(2 + 2 * half)
    _, wider = prediction_band([1.0, 2.0, 3.0], comparisons=10)
    assert wider == pytest.approx(2 + stats.t.ppf(0.9975, 2) * math.sqrt(4 / 3))
