"""Did the notebooks measure what they are reported to? Their numbers beside bands of several seeds.

Every notebook leaves `result.json`. The reported ones, of five seeds, are stored as records of the
"experiment" `notebooks`, an arm a notebook. A run of one's own is compared with the band in which
one more seed is expected: on the same CPU it repeats the reported numbers of its seed, on another
rounding makes other samples of it, as another seed would.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from grpo_kit.reproduction.records import Record, by_arm, load, where_it_ran
from grpo_kit.reproduction.statistics import prediction_band

EXPERIMENT = "notebooks"
# What is compared of all that a notebook writes down: the last part of a number's name.
QUANTITIES = (
    "eval/greedy", "eval/pass@1", "eval/mean_length", "eval/turns", "eval/tool_errors",
    "pass@1", "length", "distance", "styles", "entropy", "rewards/accuracy_reward/mean",
    "rewards/quality_judge_reward/mean", "verdicts/accuracy", "verdicts/yes_rate", "meta/p_yes",
)  # fmt: skip
SPREAD = 0.01  # the least that seeds are taken to differ by, of 128 held-out rows one is 0.008


@dataclass(frozen=True)
class Row:
    """One number of a notebook: reported (of the same seed, else the median), expected, found."""

    notebook: str
    quantity: str
    reported: float
    low: float
    high: float
    here: float | None

    @property
    def inside(self) -> bool:
        return self.here is not None and self.low <= self.here <= self.high


def numbers(result: Mapping, prefix: str = "") -> dict[str, float]:
    """The compared numbers of a `result.json`, names of nested ones joined by " · "."""
    found: dict[str, float] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key} · ")
        elif key in QUANTITIES and isinstance(value, (int, float)):
            found[prefix + key] = float(value)
    return found


def read_result(folder: str | Path, notebook: str) -> dict | None:
    """What a notebook executed into `folder` wrote down, None where it did not come to that.

    Raises ValueError for a file that is no JSON.
    """
    path = Path(folder) / notebook / "result.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): execute the notebook again.") from None


def store(folder: str | Path, seconds: Mapping[str, float], results: str | Path) -> list[Path]:
    """Store what notebooks executed into `folder` found as reported results; returns the files.

    `seconds`: notebook -> its time. Notebooks that compare nothing are left out.
    """
    paths = []
    for notebook, time in seconds.items():
        result = read_result(folder, notebook)
        if result is None or not (found := numbers(result)):
            continue
        plain = {k: v for k, v in result.items() if isinstance(v, (int, float, str))}
        record = Record(
            experiment=EXPERIMENT,
            arm=notebook,
            profile=result["profile"],
            seed=result["seed"],
            config=plain,
            start={},
            seconds=time,
            evaluation=found,
            history=[],
            **where_it_ran(),
        )
        paths.append(record.write(results))
    return paths


def compare(
    folder: str | Path, notebooks: Iterable[str], profile: str, results: str | Path | None = None
) -> tuple[list[Row], list[str]]:
    """The numbers of `notebooks`, executed into `folder`, beside the reported ones of `profile`.

    Bands are those in which all numbers of an honest run lie together with a chance of 95 % (see
    `statistics.prediction_band`). Also returns a sentence for each notebook or file that could not
    be compared. A number that was reported and is missing here is outside.
    """
    records, problems = load(results, profile, EXPERIMENT)
    reported = by_arm(records)
    pairs = []
    for notebook in notebooks:
        if notebook not in reported:
            problems.append(
                f"nothing is reported of notebook {notebook} on profile {profile!r}: its numbers "
                "are not compared."
            )
            continue
        found = read_result(folder, notebook) or {}
        here = numbers(found)
        of_seed = reported[notebook]
        for name in next(iter(of_seed.values())).evaluation:
            values = [r.evaluation[name] for r in of_seed.values() if name in r.evaluation]
            same = of_seed.get(found.get("seed"))
            pairs.append((notebook, name, values, same, here.get(name)))
    rows = []
    for notebook, name, values, same, here in pairs:
        low, high = prediction_band(values, comparisons=len(pairs), floor=SPREAD)
        told = same.evaluation[name] if same else median(values)
        rows.append(Row(notebook, name, told, low, high, here))
    return rows, problems


def show(rows: Iterable[Row], problems: Iterable[str]) -> None:
    """Print one table: reported, band, this run, inside or not."""
    from rich.console import Console
    from rich.table import Table

    rows, console = list(rows), Console()
    if rows:
        table = Table("notebook", "quantity", title="reported and measured")
        for name in ("reported", "band", "this run", "inside?"):
            table.add_column(name, justify="right")
        for row in rows:
            here = "missing" if row.here is None else f"{row.here:.3g}"
            mark = "[green]yes[/]" if row.inside else "[red]NO[/]"
            band = f"{row.low:.3g} to {row.high:.3g}"
            table.add_row(row.notebook, row.quantity, f"{row.reported:.3g}", band, here, mark)
        console.print(table)
        outside = sum(not row.inside for row in rows)
        console.print(f"{len(rows) - outside} of {len(rows)} numbers are inside their bands")
    for problem in problems:
        console.print(problem)
