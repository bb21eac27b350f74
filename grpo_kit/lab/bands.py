"""Compare what the notebooks measured with bands of the reported seeds.

Every notebook leaves `result.json`. Those of several seeds are stored as records of the
"experiment" `notebooks`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import pandas as pd
from scipy.stats import norm

from grpo_kit.lab.records import NOTEBOOKS, Record, by_arm, load, where_it_ran
from grpo_kit.lab.statistics import ALPHA, MIN_SEEDS, prediction_band
from grpo_kit.profiles import PROFILES

COMPARED = {  # the numbers that are compared, by the last part of their names
    "eval/greedy", "eval/pass@1", "eval/tool_errors", "pass@1", "distance", "meta/p_yes",
    "rewards/accuracy_reward/mean", "rewards/quality_judge_reward/mean", "verdicts/accuracy",
    "verdicts/yes_rate", "eval/mean_length", "eval/turns", "length", "styles", "entropy",
}  # fmt: skip
SPREAD = 0.01  # the least spread assumed between seeds; one of 128 held-out rows is 0.008
# assumed below `MIN_SEEDS`: of a share, or of a longer quantity relative to itself
UNKNOWN_SPREAD = 0.05


@dataclass(frozen=True)
class Row:
    """A number of a notebook: reported (for its seed, else the median), its band, this run's."""

    notebook: str
    quantity: str
    reported: float
    low: float
    high: float
    here: float | None

    @property
    def inside(self) -> bool:
        return self.here is not None and self.low <= self.here <= self.high

    def __str__(self) -> str:
        here = "missing" if self.here is None else f"{self.here:.3g}"
        return f"{self.quantity} is {here}, its band is {self.low:.3g} to {self.high:.3g}"


def numbers(result: dict) -> dict[str, float]:
    """The compared numbers of a `result.json`, names of nested ones joined by " · "."""
    found = {}
    for name, value in pd.json_normalize(result, sep=" · ").iloc[0].items() if result else ():
        if name.split(" · ")[-1] in COMPARED and isinstance(value, (int, float)):
            found[name] = float(value)
    return found


def read_result(folder: str | Path, notebook: str) -> dict:
    """The `result.json` of a notebook run into `folder`, or {}; ValueError for a broken one."""
    path = Path(folder) / notebook / "result.json"
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return result | {key: result[key] for key in ("profile", "seed")}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no notebook's result: execute the notebook again.") from None


def store(folder: str | Path, seconds: Mapping[str, float], results: str | Path) -> list[Path]:
    """Store the compared numbers of notebooks, executed in `seconds` into `folder`; the files."""
    paths = []
    for notebook, time in seconds.items():
        result = read_result(folder, notebook)
        if measured := numbers(result):
            plain = {k: v for k, v in result.items() if isinstance(v, (int, float, str))}
            record = Record(
                experiment=NOTEBOOKS, arm=notebook, profile=result["profile"], seed=result["seed"],
                config=plain, start={}, seconds=time, evaluation=measured, history=[],
                **where_it_ran(PROFILES[result["profile"]].device),
            )  # fmt: skip
            paths.append(record.write(results))
    return paths


def usual_seconds(profile: str, results: str | Path | None = None) -> dict[str, float]:
    """How long each reported notebook took, the median of its seeds."""
    records, _ = load(results, profile, NOTEBOOKS)
    arms = by_arm(records).items()
    return {arm: median(one.seconds for one in by_seed.values()) for arm, by_seed in arms}


def compare(
    folder: str | Path, notebooks: Iterable[str], profile: str, results: str | Path | None = None
) -> tuple[list[Row], list[str]]:
    """The numbers of `notebooks`, executed into `folder`, beside the reported ones of `profile`.

    All numbers of an honest run lie in their bands with a chance of 95 %. Below `MIN_SEEDS` that
    holds if the spread is `UNKNOWN_SPREAD`. Also returns a sentence for each unusable file and each
    notebook that is not reported.
    """
    records, problems = load(results, profile, NOTEBOOKS)
    compared, arms = [], by_arm(records)
    for notebook in notebooks if records or problems else ():
        by_seed, result = arms.get(notebook, {}), {}
        if not by_seed:
            problems.append(f"notebook {notebook} is not reported on profile {profile!r}.")
            continue
        try:
            result = read_result(folder, notebook)
        except ValueError as error:
            problems.append(str(error))
        here = numbers(result)
        for name in next(iter(by_seed.values())).evaluation:
            values = {s: r.evaluation[name] for s, r in by_seed.items() if name in r.evaluation}
            usual = values.get(result.get("seed"), median(values.values()))
            compared.append((notebook, name, usual, [*values.values()], here.get(name)))
    rows = []
    for notebook, name, usual, values, measured in compared:
        low, high = _band(values, len(compared))
        rows.append(Row(notebook, name, usual, low, high, measured))
    return rows, problems


def _band(values: list[float], comparisons: int) -> tuple[float, float]:
    if len(values) >= MIN_SEEDS:
        return prediction_band(values, comparisons, floor=SPREAD)
    mean = fmean(values)
    spread = UNKNOWN_SPREAD * max(1.0, abs(mean)) * math.sqrt(1 + 1 / len(values))
    return norm.interval(1 - ALPHA / comparisons, mean, spread)


def show(rows: list[Row], problems: Iterable[str]) -> None:
    """Print how many numbers are inside their bands, each that is not, and the problems."""
    outside = [row for row in rows if not row.inside]
    equal = sum(math.isclose(r.here, r.reported, rel_tol=1e-5) for r in rows if r.here is not None)
    inside = f"{len(rows) - len(outside)} of {len(rows)} numbers are inside their bands"
    lines = [f"{inside}, {equal} equal the reported ones"]
    lines += [f"outside: {row.notebook}, {row}" for row in outside]
    nothing = "nothing is reported of this profile: no number is compared"
    for line in [*(lines if rows else ()), *problems] or [nothing]:
        print(line)
