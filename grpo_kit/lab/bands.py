"""Did the notebooks measure what they are reported to? Their numbers beside bands of several seeds.

Every notebook leaves `result.json`. The reported ones, of five seeds, are stored as records of the
"experiment" `notebooks`, an arm a notebook. A run of one's own is compared with the band in which
one more seed is expected: on the same CPU it repeats the reported numbers of its seed, on another
rounding makes other samples of it, as another seed would.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from grpo_kit.lab.records import NOTEBOOKS, Record, by_arm, load, where_it_ran
from grpo_kit.lab.statistics import MIN_SEEDS, prediction_band

# What is compared of all that a notebook writes down: the last part of a number's name.
QUANTITIES = (
    "eval/greedy", "eval/pass@1", "eval/mean_length", "eval/turns", "eval/tool_errors",
    "pass@1", "length", "distance", "styles", "entropy", "rewards/accuracy_reward/mean",
    "rewards/quality_judge_reward/mean", "verdicts/accuracy", "verdicts/yes_rate", "meta/p_yes",
)  # fmt: skip
SPREAD = 0.01  # the least that seeds are taken to differ by, of 128 held-out rows one is 0.008
LENGTHS = ("eval/mean_length", "length", "eval/turns", "styles", "entropy")  # others: 0 to 1
SIGNED = ("rewards/quality_judge_reward/mean",)  # -0.5 to 0.5


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

    @property
    def binds(self) -> bool:
        """Whether the band leaves out anything that the quantity could be."""
        low, high = _range(self.quantity)
        return self.low > low or self.high < high


def _range(quantity: str) -> tuple[float, float]:
    name = quantity.split(" · ")[-1]
    if name in SIGNED:
        return -0.5, 0.5
    return 0.0, math.inf if name in LENGTHS else 1.0


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

    Raises ValueError for a file that is none of a notebook's.
    """
    path = Path(folder) / notebook / "result.json"
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not {"profile", "seed"} <= set(result):
            raise ValueError("it lacks profile or seed")
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is no result of a notebook ({error}): execute the notebook again."
        ) from None
    return result


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
            experiment=NOTEBOOKS,
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
    `statistics.prediction_band`), as far as the quantity can go. Also returns a sentence for each
    file that cannot be used and each notebook of which fewer than `MIN_SEEDS` seeds are reported. A
    number that was reported and is missing here is outside. Nothing at all where nothing is
    reported of the profile.
    """
    records, problems = load(results, profile, NOTEBOOKS)
    reported = by_arm(records)
    if not records and not problems:
        return [], []
    pairs = []
    for notebook in notebooks:
        of_seed = reported.get(notebook, {})
        if len(of_seed) < MIN_SEEDS:
            problems.append(
                f"{len(of_seed)} seeds of notebook {notebook} are reported for profile "
                f"{profile!r}, {MIN_SEEDS} are needed: its numbers are not compared."
            )
            continue
        try:
            found = read_result(folder, notebook) or {}
        except ValueError as error:
            problems.append(str(error))
            found = {}
        here, same = numbers(found), of_seed.get(found.get("seed"))
        for name in next(iter(of_seed.values())).evaluation:
            values = [r.evaluation[name] for r in of_seed.values() if name in r.evaluation]
            told = same.evaluation.get(name) if same else None
            pairs.append((notebook, name, values, told, here.get(name)))
    rows = []
    for notebook, name, values, told, here in pairs:
        band = prediction_band(values, comparisons=len(pairs), floor=SPREAD)
        least, most = _range(name)
        low, high = max(band[0], least), min(band[1], most)
        rows.append(Row(notebook, name, median(values) if told is None else told, low, high, here))
    return rows, problems


def show(rows: Iterable[Row], problems: Iterable[str]) -> None:
    """Print one table: reported, band, this run, inside or not."""
    from rich.console import Console
    from rich.table import Table

    rows, problems, console = list(rows), list(problems), Console()
    if not rows and not problems:
        console.print("nothing is reported of this profile: no number is compared")
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
        inside, binding = (sum(getattr(row, name) for row in rows) for name in ("inside", "binds"))
        same = sum(row.here is not None and math.isclose(row.here, row.reported, rel_tol=1e-5)
                   for row in rows)  # fmt: skip
        console.print(
            f"{inside} of {len(rows)} numbers are inside their bands, {same} equal the reported "
            f"ones; {len(rows) - binding} bands are so wide that they leave out nothing",
            soft_wrap=True,
        )
    for problem in problems:
        console.print(problem, soft_wrap=True)
