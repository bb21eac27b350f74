"""Compare what the notebooks measured with bands around what is reported.

Every notebook leaves `result.json`. Those of several seeds are stored as records of the
"experiment" `notebooks`.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas as pd

from grpo_kit.lab.records import NOTEBOOKS, Record, by_arm, load, where_it_ran
from grpo_kit.profiles import PROFILES

COMPARED = {  # the numbers that are compared, by the last part of their names
    "eval/greedy", "eval/pass@1", "eval/tool_errors", "pass@1", "distance", "meta/p_yes",
    "rewards/accuracy_reward/mean", "rewards/quality_judge_reward/mean", "verdicts/accuracy",
    "verdicts/yes_rate", "eval/mean_length", "eval/turns", "length", "styles", "entropy",
}  # fmt: skip
# of a share, or of a longer quantity relative to itself; where seeds spread by 0.05, two of them
# differ by more in one case of 1,400
TOLERANCE = 0.24


@dataclass(frozen=True)
class Row:
    """A number of a notebook: as reported (the mean of seeds), its band, and this run's."""

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


def compare(
    folder: str | Path, notebooks: Iterable[str], profile: str, results: str | Path | None = None
) -> tuple[list[Row], list[str]]:
    """The numbers of `notebooks`, executed into `folder`, beside the reported ones of `profile`.

    Also returns a sentence for each unusable file and each notebook that is not reported.
    """
    records, problems = load(results, profile, NOTEBOOKS)
    rows, arms = [], by_arm(records)
    for notebook in notebooks if records or problems else ():
        by_seed, here = arms.get(notebook, {}), {}
        if not by_seed:
            problems.append(f"notebook {notebook} is not reported on profile {profile!r}.")
            continue
        try:
            here = numbers(read_result(folder, notebook))
        except ValueError as error:
            problems.append(str(error))
        for name in next(iter(by_seed.values())).evaluation:
            mean = fmean(r.evaluation[name] for r in by_seed.values() if name in r.evaluation)
            reach = TOLERANCE * max(1.0, abs(mean))
            rows.append(Row(notebook, name, mean, mean - reach, mean + reach, here.get(name)))
    return rows, problems


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
