"""When do several seeds bear a claim out? One rule for a whole table of claims.

A claim says where the mean of a metric's values lies, one value a seed: above 0, below 0, within
`MARGIN` of 0, or within a number's tolerance. It is

- *reproduced* where it has at least `MIN_SEEDS` values, Student's t-test rejects that their mean
  lies outside the claimed region at 5 %, corrected (Holm) for all claims of the table that have
  enough values, and the 95 % bootstrap interval of the median lies wholly within the region;
- *contradicted* likewise, where the test rejects that the mean lies inside, corrected for all, and
  the interval lies wholly beyond one bound;
- *inconclusive* otherwise.

So the chance that a table in which nothing is true has even one claim "reproduced" is at most 5 %,
whatever the number of claims and however they depend on each other; the same for "contradicted".
It rests on values that are spread normally. Simulated tables of 12 false claims with five seeds
kept it as well, to within 0.2 %, where the spread has heavy tails, is the difference of two skewed
or of two even ones, or is rounded so that up to 9 in 10 values are exactly 0. They did not keep it
for values that are themselves spread evenly (10 %; with ten seeds 7 %) or skewed (exponential: 42 %
on the side of the short tail, and hardly less with ten). Differences paired by seed of arms that do
not differ are symmetric; a metric's own values need not be. No rule free of such an assumption does
with five seeds: their signs alone bear no p below 1/32, which is what equal values are given.

The interval alone would not do: five values' percentile interval of the median is [min, max], and
five null differences have one sign in 1 of 16 claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit
from scipy.stats import bootstrap

MIN_SEEDS = 5
MARGIN = 0.05  # what counts as unchanged, in shares and accuracies
RESAMPLES = 9999  # of scipy's bootstrap

Expects = str | Mapping[str, float]


def interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median of `values` with its 95 % percentile-bootstrap interval: median, low, high, n.

    low and high are NaN for fewer than two values. Raises ValueError for none.
    """
    if not len(values):
        raise ValueError("there is no value to summarise; give at least one.")
    low = high = math.nan
    if len(values) > 1:
        low, high = bootstrap(
            (np.asarray(values, dtype=float),),
            np.median,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return {"median": float(np.median(values)), "low": float(low), "high": float(high),
            "n": len(values)}  # fmt: skip


def effect_size(values: Sequence[float]) -> float:
    """Hedges' g of paired differences: their mean in standard deviations, corrected for few seeds.

    g = mean / sd · (1 - 3 / (4 (n - 1) - 1)), sd with n - 1. Of two values the correction leaves
    nothing, and one has no spread: 0 and NaN. Equal values: 0 where they are 0, else ±inf. Source:
    Hedges 1981, Distribution theory for Glass's estimator of effect size (the approximate factor).
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return math.nan
    if values.min() == values.max():
        return math.copysign(math.inf, values[0]) if values[0] else 0.0
    return float(values.mean() / values.std(ddof=1) * (1 - 3 / (4 * (n - 1) - 1)))


def region(expects: Expects) -> tuple[float, float]:
    """The open interval in which a claim puts the mean.

    `expects`: "rises", "falls", "stays" (within `MARGIN` of 0), or {"value": v, "within": w}, in
    the metric's unit, w > 0. Raises ValueError for anything else.
    """
    named = {
        "rises": (0.0, math.inf), "falls": (-math.inf, 0.0), "stays": (-MARGIN, MARGIN)
    }  # fmt: skip
    if isinstance(expects, str) and expects in named:
        return named[expects]
    if isinstance(expects, Mapping) and set(expects) == {"value", "within"}:
        value, within = expects["value"], expects["within"]
        if all(isinstance(x, int | float) for x in (value, within)):
            if math.isfinite(value) and 0 < within < math.inf:
                return float(value - within), float(value + within)
    raise ValueError(
        f"a claim expects {expects!r}; say rises, falls, stays, or a number with its tolerance, "
        "{value: 0.8, within: 0.05}, the tolerance above 0."
    )


def p_values(values: Sequence[float], expects: Expects) -> tuple[float, float]:
    """p-values against and for a claim's negation, by Student's one-sample t: (inside, outside).

    inside: how likely values at least so far inside the region are where the mean lies outside it;
    the larger of two one-sided tests where the region has two bounds (TOST, Schuirmann 1987).
    outside: the reverse; twice the smaller where it has two bounds, at most 1.

    Equal values have no spread to go by: that all n lie on one side has a chance of 2^-n (sign
    test), which is their p there, and 1 on the other side; exactly on a bound both are 1, as they
    speak for neither. (1, 1) as well for fewer than two values, and where one is not finite.
    """
    bounds = region(expects)
    if len(values) < 2:
        return 1.0, 1.0
    inside, outside = _t_tests(np.asarray(values, dtype=float), *bounds)
    return float(inside), float(outside)


def _t_tests(values: np.ndarray, low, high) -> tuple[np.ndarray, np.ndarray]:
    """`p_values` of `values` (..., n), n > 1, for regions from `low` to `high` (...)."""
    n = values.shape[-1]

    def tail(distance):
        """p-value of a mean beyond a bound, `distance` on this side of it."""
        p = stdtr(n - 1, -distance / error)
        p = np.where(equal & (p == 0), 0.5**n, p)
        return np.where(np.isnan(p) | ~finite, 1.0, p)  # NaN: equal values on the bound

    finite = np.isfinite(values).all(-1)
    equal = values.min(-1) == values.max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        # rounding would give equal values a mean beside them and a spread
        mean = np.where(equal, values[..., 0], values.mean(-1))
        error = np.where(equal, 0.0, values.std(-1, ddof=1)) / math.sqrt(n)
        inside = np.maximum(tail(mean - low), tail(high - mean))
        outside = np.minimum(tail(low - mean), tail(mean - high))
    two = np.isfinite(low) & np.isfinite(high)
    return inside, np.minimum(1.0, np.where(two, 2 * outside, outside))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order: the k-th smallest of m times m - k + 1, at
    least the one before it, at most 1.

    To call those at most alpha true errs at all with a chance of at most alpha, however the claims
    depend on each other. Source: Holm 1979, A simple sequentially rejective multiple test
    procedure.
    """
    return _holm(np.asarray(p_values, dtype=float)).tolist()


def _holm(p: np.ndarray) -> np.ndarray:
    """`holm` along the last axis of `p` (..., claims)."""
    order = np.argsort(p, axis=-1)
    steps = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(steps, axis=-1), -1)
    return np.minimum(1.0, adjusted)


@dataclass(frozen=True)
class Judgement:
    """What the seeds say of one claim."""

    verdict: str
    """"reproduced", "contradicted" or "inconclusive"."""
    median: float
    low: float
    """Lower end of the median's 95 % bootstrap interval."""
    high: float
    n: int
    """Number of seeds."""
    effect: float
    """Hedges' g of the values, from 0."""
    p: float
    """Corrected p-value of the side that was decided, of the nearer one where none was; NaN where
    there were too few seeds to test."""
    reason: str = ""
    """Why it is inconclusive."""


def judge(table: Sequence[tuple[Sequence[float], Expects]], alpha: float = 0.05) -> list[Judgement]:
    """The verdicts on a whole table of claims together, by this module's rule.

    `table`: for each claim its values, one a seed, and what it expects (see `region`). Raises
    ValueError for a claim without a value, and for what `region` does not know.
    """
    bounds = np.array([region(expects) for _, expects in table]).reshape(-1, 2)
    lengths = np.array([len(values) for values, _ in table], dtype=int)
    tested = lengths >= MIN_SEEDS
    p = np.full((len(table), 2), np.nan)
    for n in set(lengths[tested].tolist()):
        rows = np.array([values for values, _ in table if len(values) == n], dtype=float)
        p[lengths == n] = np.stack(_t_tests(rows, *bounds[lengths == n].T), axis=-1)
    p[tested] = _holm(p[tested].T).T
    return [
        _decide(values, *rest, alpha, int(tested.sum()))
        for (values, _), *rest in zip(table, bounds.tolist(), p.tolist(), strict=True)
    ]


def _decide(
    values: Sequence[float], bounds: list[float], p: list[float], alpha: float, claims: int
) -> Judgement:
    """The verdict on one claim of `claims`, of its corrected p-values `p`, inside and outside."""
    found, effect = _interval(values), effect_size(values)
    (low, high), (inside, outside), n = bounds, p, found["n"]
    verdict, decided, reason = "inconclusive", min(p), ""
    if n < MIN_SEEDS:
        reason = f"{n} seed{'s' * (n != 1)}, {MIN_SEEDS} are needed"
    elif math.isnan(effect):
        reason = "a seed's value is not finite"
    elif inside <= alpha and low < found["low"] and found["high"] < high:
        verdict, decided = "reproduced", inside
    elif outside <= alpha and (found["high"] < low or high < found["low"]):
        verdict, decided = "contradicted", outside
    elif decided <= alpha:
        reason = "the interval of the seeds crosses the bound"
    else:
        reason = f"corrected for {claims} claims " * (claims > 1) + f"p = {decided:.3g}"
    return Judgement(verdict=verdict, effect=effect, p=decided, reason=reason, **found)


def _interval(values: Sequence[float]) -> dict[str, float]:
    """`interval(values)` but for rounding, without resampling where the result is known.

    The least of n values is the median of a resample with a chance of 5.8 % for n = 5, more for
    fewer, and 0.9 % or less beyond: up to five, the 2.5 % percentile of medians is the least value
    and the 97.5 % percentile the largest.
    """
    n = len(values)
    if n < 2 or (n > 5 and np.isfinite(values).all()):
        return interval(values)
    return {"median": float(np.median(values)), "low": float(np.min(values)),
            "high": float(np.max(values)), "n": n}  # fmt: skip


def power(effect: float, n: int = 5, claims: int = 1, grids: int = 1000, seed: int = 0) -> float:
    """The chance that `judge` calls one true claim reproduced, of a table in which no other is.

    `effect`: the true mean difference in standard deviations of differences, normally spread, of a
    claim that it "rises"; `n` seeds; `claims` in the table, the other ones with mean 0. Estimated
    from `grids` tables: ± 0.03 for 1,000.
    """
    if n < MIN_SEEDS:
        return 0.0
    draws = np.random.default_rng(seed).normal(size=(grids, claims, n))
    draws[:, 0] += effect
    inside, _ = _t_tests(draws, 0.0, math.inf)
    passed = draws[:, 0][_holm(inside)[:, 0] <= 0.05]
    doubtful = passed.min(-1) <= 0  # else the interval, too, is above 0
    return float((np.sum(~doubtful) + np.sum(_lower_ends(passed[doubtful]) > 0)) / grids)


def _lower_ends(rows: np.ndarray) -> np.ndarray:
    """Lower ends of the intervals of `rows` (k, n), all with the same resamples.

    Of sorted values a resample's median is the mean of the two in the middle of its sorted places,
    so these are found once for all rows. `interval` of a sorted row gives the same.
    """
    n = rows.shape[-1]
    places = np.sort(np.random.default_rng(0).integers(0, n, (RESAMPLES, n)), axis=-1)
    middle = places[:, [(n - 1) // 2, n // 2]]
    return np.array([np.percentile(row[middle].mean(-1), 2.5) for row in np.sort(rows, axis=-1)])


def prediction_band(
    values: Sequence[float], comparisons: int = 1, floor: float = 0.0, alpha: float = 0.05
) -> tuple[float, float]:
    """Where one more run's value is expected, given those of n runs alike: (low, high).

    mean ± t(1 - alpha / (2 · comparisons); n - 1) · max(sd, floor) · sqrt(1 + 1/n). The chance that
    such a run leaves any of `comparisons` bands is at most `alpha` where values are spread normally
    (Bonferroni). `floor`: a spread, in the metric's unit, below which few runs are alike by luck.
    One value gives (-inf, inf). Raises ValueError for none.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if not n:
        raise ValueError("there is no run to expect another one from; give at least two.")
    if n < 2:
        return -math.inf, math.inf
    t = stdtrit(n - 1, 1 - alpha / (2 * comparisons))
    half = float(t * max(values.std(ddof=1), floor) * math.sqrt(1 + 1 / n))
    return float(values.mean()) - half, float(values.mean()) + half
