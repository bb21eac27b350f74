"""When do several seeds support a claim? One rule for a whole table of claims.

A claim says where the mean of a metric's values lies, one value per seed: above 0, below 0, within
`MARGIN` of 0, or within a number's tolerance. A claim with at least `MIN_SEEDS` values is

- *reproduced* if Student's t-test rejects at 5 %, corrected (Holm) for all tested claims of the
  table, that the mean lies outside the claimed region, and the 95 % bootstrap interval of the
  median lies wholly inside it;
- *contradicted* if the test rejects in the same way that the mean lies inside, and the interval
  lies wholly beyond one bound;
- *inconclusive* otherwise.

If no claim of a table is true, the chance that any is "reproduced" is at most 5 %; the same holds
for "contradicted". This assumes normally spread values. In simulations it also held for heavy tails
and for differences of skewed values, but not for evenly spread values (10 %) and skewed ones
(exponential: 42 %). Differences of equal arms are symmetric; a metric's own values need not be.
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
RESAMPLES = 9999  # scipy's default

Expects = str | Mapping[str, float]


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median of `values` with its 95 % percentile-bootstrap interval: median, low, high, n.

    low and high are NaN for fewer than two values. Raises ValueError for none.
    """
    if not len(values):
        raise ValueError("there is no value to summarise; give at least one.")
    values = np.asarray(values, dtype=float)
    n = len(values)
    low = high = math.nan
    if n > 5 and np.isfinite(values).all():
        rng = np.random.default_rng(0)
        resampled = bootstrap((values,), np.median, method="percentile", rng=rng)
        low, high = resampled.confidence_interval
    elif n > 1:  # more than 2.5 % of the resamples have the least value as their median: 5.8 % at 5
        low, high = values.min(), values.max()
    return {"median": float(np.median(values)), "low": float(low), "high": float(high), "n": n}


def effect_size(values: Sequence[float]) -> float:
    """Hedges' g of paired differences: mean / sd (with n - 1) · (1 - 3 / (4 (n - 1) - 1)).

    NaN for one value; for equal values 0 where they are 0, else ±inf. Source: Hedges 1981,
    Distribution theory for Glass's estimator of effect size (the approximate factor).
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

    `expects`: "rises", "falls", "stays" (within `MARGIN` of 0), or {"value": v, "within": w} in the
    metric's unit, w > 0. Raises ValueError for anything else.
    """
    match expects:
        case "rises":
            return 0.0, math.inf
        case "falls":
            return -math.inf, 0.0
        case "stays":
            return -MARGIN, MARGIN
        case {"value": int() | float() as value, "within": int() | float() as within, **rest}:
            if not rest and math.isfinite(value) and 0 < within < math.inf:
                return float(value - within), float(value + within)
    raise ValueError(
        f"a claim expects {expects!r}; say rises, falls, stays, or a number with its tolerance, "
        "{value: 0.8, within: 0.05}, the tolerance above 0."
    )


def p_values(values: Sequence[float], expects: Expects) -> tuple[float, float]:
    """(inside, outside): p-values that the mean lies in the region, or not, by Student's t-test.

    Of a region with two bounds inside is the larger of two one-sided tests (TOST, Schuirmann 1987),
    outside twice the smaller. Equal values have no spread: their p is 2^-n on their side (sign
    test), else 1. (1, 1) for fewer than two values, or if one is not finite.
    """
    low, high = region(expects)
    if len(values) < 2:
        return 1.0, 1.0
    inside, outside = _t_tests(np.asarray(values, dtype=float), low, high)
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


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p-values (..., m): the k-th smallest times m - k + 1, rising, at most 1.

    However the claims depend on each other, calling those at most alpha true errs with a chance of
    at most alpha. Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, axis=-1)
    steps = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(steps, axis=-1), -1)
    return np.minimum(1.0, adjusted)


@dataclass(frozen=True)
class Judgement:
    """What the seeds say about one claim."""

    verdict: str  # "reproduced", "contradicted" or "inconclusive"
    median: float
    low: float  # of the median's 95 % bootstrap interval
    high: float
    n: int  # number of seeds
    effect: float  # Hedges' g
    p: float  # corrected, of the side that was decided, else the smaller; NaN: too few seeds
    reason: str = ""  # why it is inconclusive


def judge(table: Sequence[tuple[Sequence[float], Expects]], alpha: float = 0.05) -> list[Judgement]:
    """The verdicts on a whole table of claims together, by this module's rule.

    `table`: for each claim its values, one per seed, and what it expects (see `region`). Raises
    ValueError for a claim without a value, and for what `region` does not know.
    """
    bounds = np.array([region(expects) for _, expects in table]).reshape(-1, 2)
    lengths = np.array([len(values) for values, _ in table], dtype=int)
    tested = lengths >= MIN_SEEDS
    p = np.full((len(table), 2), np.nan)
    for n in set(lengths[tested].tolist()):
        rows = np.array([values for values, _ in table if len(values) == n], dtype=float)
        p[lengths == n] = np.stack(_t_tests(rows, *bounds[lengths == n].T), axis=-1)
    p[tested] = holm(p[tested].T).T
    return [
        _decide(values, *rest, alpha, int(tested.sum()))
        for (values, _), *rest in zip(table, bounds.tolist(), p.tolist(), strict=True)
    ]


def _decide(
    values: Sequence[float], bounds: list[float], p: list[float], alpha: float, claims: int
) -> Judgement:
    """The verdict on one claim of `claims`, from its corrected p-values `p`: inside, outside."""
    spread, effect = interval(values), effect_size(values)
    (low, high), (inside, outside), n = bounds, p, len(values)
    verdict, decided, reason = "inconclusive", min(p), ""
    if n < MIN_SEEDS:
        reason = f"{n} seed{'s' * (n != 1)}, {MIN_SEEDS} are needed"
    elif math.isnan(effect):
        reason = "a seed's value is not finite"
    elif inside <= alpha and low < spread["low"] and spread["high"] < high:
        verdict, decided = "reproduced", inside
    elif outside <= alpha and (spread["high"] < low or high < spread["low"]):
        verdict, decided = "contradicted", outside
    elif decided <= alpha:
        reason = "the interval of the seeds crosses the bound"
    else:
        reason = f"corrected for {claims} claims " * (claims > 1) + f"p = {decided:.3g}"
    return Judgement(verdict=verdict, effect=effect, p=decided, reason=reason, **spread)


def power(effect: float, n: int = 5, claims: int = 1, grids: int = 1000, seed: int = 0) -> float:
    """The chance that `judge` calls the only true claim of a table of `claims` reproduced.

    `effect`: its true mean difference in standard deviations over `n` seeds; it is a claim that a
    metric "rises". Estimated from `grids` simulated tables: ± 0.03 for 1,000.
    """
    if n < MIN_SEEDS:
        return 0.0
    draws = np.random.default_rng(seed).normal(size=(grids, claims, n))
    draws[:, 0] += effect
    inside, _ = _t_tests(draws, 0.0, math.inf)
    passed = draws[:, 0][holm(inside)[:, 0] <= 0.05]
    doubtful = passed.min(-1) <= 0  # else the interval, too, is above 0
    return float((np.sum(~doubtful) + np.sum(_lower_ends(passed[doubtful]) > 0)) / grids)


def _lower_ends(rows: np.ndarray) -> np.ndarray:
    """`low` of the `interval` of each sorted row (k, n), with the same resamples for all."""
    n = rows.shape[-1]
    places = np.sort(np.random.default_rng(0).integers(0, n, (RESAMPLES, n)), axis=-1)
    middle = places[:, [(n - 1) // 2, n // 2]]  # a resample's median is the mean of these two
    return np.array([np.percentile(row[middle].mean(-1), 2.5) for row in np.sort(rows, axis=-1)])


def prediction_band(
    values: Sequence[float], comparisons: int = 1, floor: float = 0.0, alpha: float = 0.05
) -> tuple[float, float]:
    """Where one more run's value is expected, given those of n runs alike: (low, high).

    mean ± t(1 - alpha / (2 · comparisons); n - 1) · max(sd, floor) · sqrt(1 + 1/n): a normally
    spread run leaves any of `comparisons` bands with a chance of at most `alpha` (Bonferroni). One
    value gives (-inf, inf). Raises ValueError for none.
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
