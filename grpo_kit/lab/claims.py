"""Published claims, `data/claims.yaml`, judged by the records of the runs that test them.

The claims of one method on one profile are a family (`statistics.judge`), so that many claims
together have no more false verdicts than one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from grpo_kit.config import reason
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import FRESH, command_of, usual_seeds
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import DELTA, Judgement, judge, power, region
from grpo_kit.lab.summary import cell, markdown_table, number
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES

OF = {"end": "", "change": "change of ", "late": "late "}


class Claim(BaseModel):
    """One published claim; `data/claims.yaml` explains the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    statement: str
    experiment: str
    arm: str
    metric: str = Field(min_length=1)
    expects: str | dict[str, float]  # a `region`
    source: str
    seed: str = ""
    evidence: Literal["P", "F", "C", "S", "I"] = "I"
    profile: str = "tiny"
    of: Literal["end", "change", "late"] = "end"
    minus: str | None = None
    against: str | None = None
    delta: float = DELTA  # the smallest difference that matters, in the metric's unit
    n: int | None = None  # on profile "tiny" that many fresh seeds decide; None: all that ran
    printed: dict[str, list[float]] = {}

    @property
    def arms(self) -> list[str]:
        return [arm for arm in (self.against, self.arm) if arm]

    @property
    def seeds(self) -> range | None:
        """The seeds that were chosen to decide it; None where any may."""
        planned = self.n and self.profile == "tiny"
        return range(FRESH, FRESH + self.n) if planned else None

    @property
    def command(self) -> str:
        return command_of(self.experiment, self.profile, self.seeds, self.arms)

    @property
    def number(self) -> str:
        """In words: "pass@1, diversity minus plain"."""
        name = " minus ".join(m.removeprefix("eval/") for m in (self.metric, self.minus) if m)
        arms = " minus ".join(reversed(self.arms))
        return f"{OF[self.of]}{name}, {arms}"

    @property
    def direction(self) -> str:
        """Where the number is claimed to lie: "rises", or "0.066 ± 0.03"."""
        if isinstance(self.expects, str):
            return self.expects
        return f"{self.expects['value']:g} ± {self.expects['within']:g}"

    @property
    def band(self) -> str:
        """The smallest difference that matters, or the tolerance."""
        within = self.delta if isinstance(self.expects, str) else self.expects["within"]
        return f"± {within:g}"

    @property
    def paper(self) -> str:
        """The numbers that its source prints, or else the direction."""
        numbers = [f"{of}: {' → '.join(f'{v:g}' for v in vs)}" for of, vs in self.printed.items()]
        return "; ".join(numbers) or self.direction

    def values(self, records: Iterable[Record]) -> list[float]:
        """The number for every seed that its arms share; ValueError if a run lacks it."""
        arms = by_arm(records)
        own, other = arms.get(self.arm, {}), arms.get(self.against or self.arm, {})
        own = {s: r for s, r in own.items() if self.seeds is None or s in self.seeds}
        pairs = [(record, other[seed]) for seed, record in own.items() if seed in other]
        return [self._of(r) - (self._of(base) if self.against else 0.0) for r, base in pairs]

    def _of(self, record: Record) -> float:
        values = []
        for metric in filter(None, (self.metric, self.minus)):
            if (value := getattr(record, self.of)(metric)) is None:
                run = f"{record.arm!r}, seed {record.seed}"
                known = ", ".join(sorted({*record.evaluation, *chain(*record.history)}))
                raise ValueError(f"claim {self.id!r}: {run}, has no {metric!r}; it has {known}.")
            values.append(value)
        return values[0] - sum(values[1:])


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict; no `judgement` if nothing has been run."""

    claim: Claim
    verdict: str = "not run here"
    judgement: Judgement | None = None

    @property
    def here(self) -> str:
        return cell(vars(self.judgement), "+") if self.judgement else f"`{self.claim.command}`"

    @property
    def statistics(self) -> str:
        one, claim = self.judgement, self.claim
        chance = power(one.sd, one.n, claim.expects, claim.delta, one.claims)
        seeds = f"{one.n} seed{'s' * (one.n != 1)}, sd {number(one.sd)}"
        return f"{seeds}, power {chance:.0%}" if one.n > 1 else seeds


def load_claims(path: str | Path | None = None) -> tuple[list[Claim], list[str]]:
    """The valid claims of a YAML file, by default the shipped one; a sentence on what is not."""
    path = Path(path or data_dir() / "claims.yaml")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        return [], [f"{path} cannot be read as YAML: {error}".splitlines()[0]]
    if not isinstance(entries, list):
        return [], [f"{path} holds no list of claims; each begins with `- id:`."]
    claims: dict[str, Claim] = {}
    problems = []
    for i, entry in enumerate(entries, 1):
        given = entry.get("id") if isinstance(entry, dict) else None
        name = given[:80] if isinstance(given, str) else f"number {i}"  # else, perhaps a bomb
        try:
            claim = Claim.model_validate(entry)
            _check(claim, claims)
            claims[claim.id] = claim
        except ValueError as error:
            problems.append(f"claim {name!r} in {path.name}: {reason(error)}")
    return list(claims.values()), problems


def _check(claim: Claim, others: Iterable[str]) -> None:
    """ValueError for an unknown name or region, a repeated id, an arm that is its own baseline."""
    region(claim.expects)
    if not 0 < claim.delta < math.inf:
        raise ValueError(f"delta is {claim.delta}: give the smallest difference that matters.")
    names = [("experiment", claim.experiment, EXPERIMENTS), ("profile", claim.profile, PROFILES)]
    if claim.experiment in EXPERIMENTS:
        names += [("arm", arm, EXPERIMENTS[claim.experiment].arms) for arm in claim.arms]
    for kind, name, known in names:
        if name not in known:
            raise ValueError(f"there is no {kind} {name!r}: choose among {', '.join(known)}.")
    if claim.arm == claim.against:
        raise ValueError(f"it compares {claim.arm!r} with itself: name another arm as `against`.")
    if claim.id in others:
        raise ValueError("there is another claim of this id.")


def planned(experiment: str, profile: str) -> tuple[list[str], range]:
    """Arms whose runs test shipped claims, in order, and their seeds; ValueError for no claim."""
    tested = [c for c in load_claims()[0] if (c.experiment, c.profile) == (experiment, profile)]
    if not tested:
        raise ValueError(f"no claim is tested by runs of {experiment!r} on profile {profile!r}.")
    arms = [arm for arm in EXPERIMENTS[experiment].arms if any(arm in c.arms for c in tested)]
    chosen = filter(None, (c.seeds for c in tested))
    return arms, max(chosen, key=len, default=usual_seeds(profile))


def judge_claims(claims: list[Claim], records: Iterable[Record]) -> tuple[list[Judged], list[str]]:
    """Verdicts on all claims, in their order, and a sentence for each that could not be judged.

    A family: claims of one method (`seed`), experiment and profile.
    """
    runs, families = defaultdict(list), defaultdict(list)
    for record in records:
        runs[record.profile, record.experiment].append(record)
    problems, judged = [], {}
    for claim in claims:
        try:
            values = claim.values(runs[claim.profile, claim.experiment])
            judged[claim.id] = Judged(claim)
        except ValueError as error:
            values = []
            problems.append(str(error))
        families[claim.profile, claim.experiment, claim.seed].append((claim, values))
    for family in families.values():  # as large as it is written, whatever has been run of it
        tested = [(claim, values) for claim, values in family if values]
        table = [(values, claim.expects, claim.delta) for claim, values in tested]
        for (claim, values), judgement in zip(tested, judge(table, len(family)), strict=True):
            if claim.seeds and len(values) < claim.n:
                why = f"{len(values)} of {claim.n} planned seeds have run"
                judgement = replace(judgement, verdict="inconclusive", reason=why)
            judged[claim.id] = Judged(claim, judgement.verdict, judgement)
    return [*judged.values()], problems


def reported_claims(results: str | Path | None = None) -> tuple[list[Judged], list[str]]:
    """The shipped claims judged by the reported results, and a sentence for each problem."""
    claims, wrong = load_claims()
    records, broken = load_current(results)
    judged, unjudged = judge_claims(claims, records)
    return judged, wrong + broken + unjudged


def forest_rows(judged: Iterable[Judged], *only: str) -> list[tuple]:
    """What `plots.forest` draws: the claims whose interval is known, as differences from 0.

    All by their ids, or those of the ids `only` by their statements.
    """
    rows, by_id = [], {one.claim.id: one for one in judged}
    for one in (by_id[name] for name in only or by_id):
        found, expects = one.judgement, one.claim.expects
        if found is None or not math.isfinite(found.low):
            continue
        value, unit = 0.0, one.claim.delta
        if not isinstance(expects, str):
            value, unit = expects["value"], expects["within"]
        bounds = {name: getattr(found, name) - value for name in ("mean", "low", "high")}
        label = fill(one.claim.statement, 46) if only else one.claim.id
        rows.append((label, one.claim.direction, one.verdict, bounds, unit))
    return rows


def claims_text(judged: Iterable[Judged], details: bool = False) -> str:
    """Markdown table of judged claims; `details`: with id, source, seeds and power."""
    rows = []
    for one in judged:
        verdict, statement, here = f"**{one.verdict}**", one.claim.statement, one.here
        if one.judgement:
            here = f"{one.claim.number}: {one.here}"
        if details:
            statement += f" ({one.claim.id}; {one.claim.source})"
        if details and one.judgement:
            here += f" ({one.statistics})"
            verdict += f"; {one.judgement.reason}" if one.judgement.reason else ""
        rows.append((verdict, statement, one.claim.paper, here, one.claim.band))
    return markdown_table(("verdict", "claim", "claimed", "here", "matters from"), *rows)
