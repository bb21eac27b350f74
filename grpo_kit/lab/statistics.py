"""When do several seeds support a claim? One rule for a whole table of claims, see `judge`.

Wrong verdicts of either kind occur in at most 5 % of tables if values are normal, heavy-tailed, or
differences between arms; not if they are evenly spread (10 %) or skewed (exponential: 42 %).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr
from scipy.stats import bootstrap, t

MIN_SEEDS = 5
MARGIN = 0.05  # what counts as unchanged, in shares and accuracies
ALPHA = 0.05
RESAMPLES = 9999  # scipy's default
REGIONS = {"rises": (0.0, math.inf), "falls": (-math.inf, 0.0), "stays": (-MARGIN, MARGIN)}

Expects = str | Mapping[str, float]


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median, `low` and `high` of its 95 % percentile-bootstrap interval (NaN for one value), n."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    # up to five values more than 2.5 % of the resamples have the least one as their median
    low, high = (values.min(), values.max()) if n > 1 else (math.nan, math.nan)
    if n > 5 and np.isfinite(values).all():
        rng = np.random.default_rng(0)
        resampled = bootstrap((values,), np.median, method="percentile", rng=rng)
        low, high = resampled.confidence_interval
    return {"median": float(np.median(values)), "low": float(low), "high": float(high), "n": n}


def effect_size(values: Sequence[float]) -> float:
    """Hedges' g of paired differences (Hedges 1981): the mean in standard deviations, corrected.

    NaN for one value; ±inf for equal values, 0 where all are 0.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if n < 2 or not np.isfinite(values).all():
        return math.nan
    if values.min() == values.max():
        return math.copysign(math.inf, values[0]) if values[0] else 0.0
    return float(values.mean() / values.std(ddof=1) * (1 - 3 / (4 * (n - 1) - 1)))


def region(expects: Expects) -> tuple[float, float]:
    """The open interval in which a claim puts the mean; "stays" is within `MARGIN` of 0.

    Raises ValueError for what is neither in `REGIONS` nor {"value": v, "within": w}.
    """
    match expects:
        case str() if expects in REGIONS:
            return REGIONS[expects]
        case {"value": int() | float() as value, "within": int() | float() as within, **rest}:
            if not rest and math.isfinite(value) and 0 < within < math.inf:
                return float(value - within), float(value + within)
    choice = "say rises, falls, stays, or {value: 0.8, within: 0.05}, the tolerance above 0."
    raise ValueError(f"a claim expects {expects!r}; {choice}")


def p_values(values: Sequence[float] | np.ndarray, expects: Expects) -> tuple:
    """(inside, outside): p-values that the mean lies in the claimed region, and outside of it.

    `values`: (..., n), one p-value a row. Student's t-test. With two bounds `inside` is the larger
    of two one-sided p (Schuirmann 1987), `outside` twice the smaller. Equal values: 2^-n on their
    side (sign test), else 1. (1, 1) if one is not finite. There have to be two values.
    """
    values, (low, high) = np.asarray(values, dtype=float), region(expects)
    n = values.shape[-1]
    finite, equal = np.isfinite(values).all(-1), values.min(-1) == values.max(-1)

    def tail(distance):
        """p-value of a mean beyond a bound, `distance` on this side of it."""
        p = stdtr(n - 1, -distance / error)
        p = np.where(equal & (p == 0), 0.5**n, p)
        return np.where(np.isnan(p) | ~finite, 1.0, p)  # NaN: equal values on the bound

    with np.errstate(divide="ignore", invalid="ignore"):
        # rounding would give equal values a mean beside them and a spread
        mean = np.where(equal, values[..., 0], values.mean(-1))
        error = np.where(equal, 0.0, values.std(-1, ddof=1)) / math.sqrt(n)
        inside = np.maximum(tail(mean - low), tail(high - mean))
        outside = np.minimum(tail(low - mean), tail(mean - high))
    both = math.isfinite(low) and math.isfinite(high)
    return inside, np.minimum(1.0, outside * (1 + both))


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Holm's adjusted p-values (..., m): the k-th smallest times m - k + 1, rising, at most 1.

    They hold however the claims depend on each other. Source: Holm 1979.
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


def judge(table: Sequence[tuple[Sequence[float], Expects]]) -> list[Judgement]:
    """The verdicts on a table of claims, each given by its values, one per seed, and its `region`.

    With `MIN_SEEDS` values a claim is *reproduced* if the t-test, Holm-corrected over all tested
    claims, puts the mean inside the region at `ALPHA`, and the median's interval lies inside it;
    *contradicted* if both lie outside; else *inconclusive*. Raises ValueError as `region`.
    """
    enough = [len(values) >= MIN_SEEDS for values, _ in table]
    p = np.array([p_values(*claim) for claim, tested in zip(table, enough, strict=True) if tested])
    corrected = iter(holm(p.reshape(-1, 2).T).T.tolist())
    judgements = []
    for (values, expects), tested in zip(table, enough, strict=True):
        (low, high), spread, effect = region(expects), interval(values), effect_size(values)
        inside, outside = next(corrected) if tested else (math.nan, math.nan)
        verdict, decided, reason = "inconclusive", min(inside, outside), ""
        if not tested:
            reason = f"{len(values)} seed{'s' * (len(values) != 1)}, {MIN_SEEDS} are needed"
        elif math.isnan(effect):
            reason = "a seed's value is not finite"
        elif inside <= ALPHA and low < spread["low"] and spread["high"] < high:
            verdict, decided = "reproduced", inside
        elif outside <= ALPHA and (spread["high"] < low or high < spread["low"]):
            verdict, decided = "contradicted", outside
        elif decided <= ALPHA:
            reason = "the interval of the seeds crosses the bound"
        else:
            reason = f"corrected for {len(p)} claims " * (len(p) > 1) + f"p = {decided:.3g}"
        judgements.append(Judgement(verdict, **spread, effect=effect, p=decided, reason=reason))
    return judgements


def power(effect: float, n: int = 5, claims: int = 1, grids: int = 1000, seed: int = 0) -> float:
    """The chance that `judge` calls the only true claim of `claims` reproduced: a metric "rises".

    `effect`: the mean in standard deviations over `n` seeds. ± 0.03 for 1,000 simulated `grids`.
    """
    if n < MIN_SEEDS:
        return 0.0
    draws = np.random.default_rng(seed).normal(size=(grids, claims, n))
    draws[:, 0] += effect
    inside, _ = p_values(draws, "rises")
    rows = np.sort(draws[:, 0][holm(inside)[:, 0] <= ALPHA], axis=-1)
    # `low` of `interval` has to be above 0, too; here with the same resamples for all rows
    places = np.sort(np.random.default_rng(0).integers(0, n, (RESAMPLES, n)), axis=-1)
    middle = places[:, [(n - 1) // 2, n // 2]]  # a resample's median is the mean of these two
    above = (row[0] > 0 or np.percentile(row[middle].mean(-1), 2.5) > 0 for row in rows)
    return sum(map(bool, above)) / grids


def prediction_band(
    values: Sequence[float], comparisons: int = 1, floor: float = 0.0
) -> tuple[float, float]:
    """Where one more run's value is expected, given those of n runs alike: (low, high).

    mean ± t(1 - ALPHA / (2 · comparisons); n - 1) · max(sd, floor) · sqrt(1 + 1/n): a normally
    spread run leaves any of `comparisons` bands with a chance of at most `ALPHA` (Bonferroni).
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    scale = max(values.std(ddof=1), floor) * math.sqrt(1 + 1 / n)
    band = t.interval(1 - ALPHA / comparisons, n - 1, loc=values.mean(), scale=scale)
    return tuple(map(float, band))
