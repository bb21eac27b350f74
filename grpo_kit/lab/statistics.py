"""When do several seeds decide a claim? One rule, read off one interval, see `judge`.

The interval is Student's, of the mean over seeds, so wide that with a chance of 95 % all of a
family's intervals hold their true means at once (Bonferroni); where they do, all verdicts are
right. So at most 5 % of families get a false one, if values are normal, heavy-tailed or differences
between arms; not if they are evenly spread (11 %) or skewed (exponential: 30 %).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

MIN_SEEDS = 5
ALPHA = 0.05
DELTA = 0.03  # the smallest difference that matters, in shares and accuracies
VERDICTS = ("reproduced", "contradicted", "no effect")
SHARES = ("eval/", "judge/", "verdicts/", "of_n/", "test_set/")  # metrics that begin so are shares
COUNTS = ("length", "turns")  # but for those with such a word
ONE_SIDED = {"rises": (0.0, math.inf), "falls": (-math.inf, 0.0)}

Expects = str | Mapping[str, float]


def interval(values: Sequence[float], claims: int = 1) -> dict[str, float]:
    """Mean, `low` and `high` of its 1 - `ALPHA` / `claims` interval by Student's t, median, n.

    NaN for the bounds of one value. Equal values are their own interval.
    """
    values = np.asarray(values, dtype=float)
    n, mean = len(values), values.mean()
    half = math.nan
    if n > 1 and np.isfinite(values).all():
        half = half_width(values.std(ddof=1), n, claims)
    if values.min() == values.max():  # rounding would give equal values a mean beside them
        mean, half = values[0], 0.0 if n > 1 else math.nan
    return {
        "mean": float(mean), "low": float(mean - half), "high": float(mean + half),
        "median": float(np.median(values)), "n": n,
    }  # fmt: skip


def is_share(metric: str) -> bool:
    return metric.startswith(SHARES) and not any(count in metric for count in COUNTS)


def within(metric: str, found: Mapping[str, float], least: float = 0.0) -> dict[str, float]:
    """The `interval` of a metric, cut where a share (`least` .. 1) or a count cannot lie."""
    if not metric.startswith(SHARES):
        return dict(found)
    most = 1.0 if is_share(metric) else math.inf
    return {**found, "low": max(found["low"], least), "high": min(found["high"], most)}


def half_width(sd, n, claims: int = 1):
    """How far the interval of `interval` reaches to either side, for values of this spread."""
    return t.ppf(1 - ALPHA / (2 * claims), n - 1) * sd / n**0.5


def region(expects: Expects, delta: float = DELTA) -> tuple[float, float]:
    """The open interval in which a claim puts the mean: "stays" within `delta` of 0, "keeps" above.

    Raises ValueError for what is neither rises, falls, stays, keeps, nor {"value": v, "within": w}.
    """
    match expects:
        case "stays":
            return -delta, delta
        case "keeps":
            return -delta, math.inf
        case str() if expects in ONE_SIDED:
            return ONE_SIDED[expects]
        case {"value": int() | float() as value, "within": int() | float() as within, **rest}:
            if not rest and math.isfinite(value) and 0 < within < math.inf:
                return float(value - within), float(value + within)
    choice = "say rises, falls, stays, keeps, or {value: 0.8, within: 0.05}, the tolerance above 0."
    raise ValueError(f"a claim expects {expects!r}; {choice}")


def readings(low, high, expects: Expects, delta: float = DELTA) -> tuple:
    """Whether intervals from `low` to `high`, numbers or arrays, say each of `VERDICTS`."""
    least, most = region(expects, delta)
    nothing = (-delta < low) & (high < delta) & (str(expects) in ONE_SIDED)
    inside, outside = (least < low) & (high < most), (high <= least) | (most <= low)
    return inside & ~nothing, outside & ~nothing, nothing


@dataclass(frozen=True)
class Judgement:
    """What the seeds say about one claim."""

    verdict: str  # one of `VERDICTS`, or "inconclusive"
    mean: float
    low: float  # of the mean's interval, as wide as the family asks
    high: float
    median: float
    n: int  # number of seeds
    sd: float  # standard deviation over seeds; NaN for one
    claims: int  # of its family
    reason: str = ""  # why it is inconclusive, where too few seeds have run


def judge(table: Sequence[tuple], claims: int | None = None) -> list[Judgement]:
    """The verdicts on a family of claims: (values, one a seed; what they are to do; delta) each.

    With `MIN_SEEDS` values a claim is *reproduced* if the mean's interval, for as many `claims` as
    there are, lies in its `region`, and *contradicted* if it lies outside. A claim that something
    rises or falls has *no effect* if it lies within ± delta, on whichever side of 0: two one-sided
    tests (Schuirmann 1987). Else it is *inconclusive*. Raises ValueError as `region`.
    """
    claims = claims or len(table)
    judgements = []
    for values, expects, delta in table:
        found = interval(values, claims)
        said = readings(found["low"], found["high"], expects, delta)
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        verdict, reason = "inconclusive", ""
        if len(values) < MIN_SEEDS:
            seeds = f"{len(values)} seed{'s' * (len(values) != 1)}"
            reason = f"{seeds}, {MIN_SEEDS} are needed"
        elif any(said):
            verdict = VERDICTS[said.index(True)]
        judgements.append(Judgement(verdict, **found, sd=sd, claims=claims, reason=reason))
    return judgements


def power(sd: float, n: int, expects: Expects = "rises", delta=DELTA, claims: int = 1) -> float:
    """The chance that n seeds of this spread call a claim reproduced that is just true enough.

    The true mean is `delta` on the claimed side, 0 for "stays" and "keeps", or the claimed value.
    NaN without a spread, 0 for fewer than `MIN_SEEDS` seeds. ± 0.01, by 10,000 simulated samples.
    """
    if n < MIN_SEEDS or not math.isfinite(sd):
        return 0.0 if n < MIN_SEEDS else math.nan
    just = {"rises": delta, "falls": -delta, "stays": 0.0, "keeps": 0.0}
    true = just[expects] if isinstance(expects, str) else expects["value"]
    rng = np.random.default_rng(0)
    means = true + sd / math.sqrt(n) * rng.normal(size=10_000)
    sds = sd * np.sqrt(rng.chisquare(n - 1, size=10_000) / (n - 1))
    half = half_width(1.0, n, claims) * sds
    return float(readings(means - half, means + half, expects, delta)[0].mean())
