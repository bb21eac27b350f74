"""Published claims, `data/claims.yaml`, judged by the records of the runs that test them.

The claims of one experiment on one profile are a family (`statistics.judge`), so that many claims
together have no more false verdicts than one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from grpo_kit.config import reason
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import FRESH, command_of, usual_seeds
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import (
    ALPHA,
    DELTA,
    MIN_SEEDS,
    Judgement,
    is_share,
    judge,
    region,
)
from grpo_kit.lab.summary import cell, markdown_table, number
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES

OF = {"end": "", "change": "change of ", "late": "late ", "rise": "rise of ", "fall": "fall of ",
      "steps": "steps to 0.8 "}  # fmt: skip
READINGS = {  # of the same answers, by the other grading, and of greedy ones
    "eval/pass@1": {"lenient": "eval/lenient/pass@1", "greedy": "eval/greedy"},
    "eval/lenient/pass@1": {"strict": "eval/pass@1", "greedy": "eval/lenient/greedy"},
}
EDGES = (4 / 3, 2 / 3)  # a verdict that changes with delta times one of these is at the edge


class Mechanism(BaseModel):
    """What has to act before a correction is tested: the mean of |metric| over an arm's steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metric: str
    least: float = Field(gt=0)
    arm: str | None = None  # the claim's own


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
    of: Literal["end", "change", "late", "rise", "fall", "steps"] = "end"
    minus: str | None = None
    against: str | None = None
    # the smallest difference that matters, in the metric's unit
    delta: float = Field(DELTA, gt=0, allow_inf_nan=False)
    n: int | None = Field(
        None, ge=MIN_SEEDS
    )  # that many fresh seeds decide, from `first` on; None: all that ran
    first: int = FRESH
    again: bool = False  # older fresh seeds left it inconclusive: these are a second try
    acts: Mechanism | None = None
    printed: dict[str, list[float]] = {}

    @property
    def arms(self) -> list[str]:
        return [arm for arm in (self.against, self.arm) if arm]

    @property
    def seeds(self) -> range | None:
        """The seeds that were chosen to decide it; None where any may."""
        return range(self.first, self.first + self.n) if self.n else None

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
    def paper(self) -> str:
        """Where the number is claimed to lie, and those that its source prints."""
        numbers = [f"{of}: {' → '.join(f'{v:g}' for v in vs)}" for of, vs in self.printed.items()]
        return "; ".join([self.direction, *numbers])

    @property
    def same(self) -> tuple:
        """What two claims of one number share."""
        return (self.experiment, self.profile, self.arm, self.against, self.metric, self.minus,
                self.of, self.seeds)  # fmt: skip

    def pairs(self, records: Iterable[Record]) -> list[tuple[Record, Record]]:
        """The runs of its arm and of the other, or the same twice, for each seed that both have."""
        arms = by_arm(records)
        own, other = arms.get(self.arm, {}), arms.get(self.against or self.arm, {})
        own = {s: r for s, r in own.items() if self.seeds is None or s in self.seeds}
        return [(record, other[seed]) for seed, record in own.items() if seed in other]

    def values(self, pairs: Iterable[tuple[Record, Record]]) -> list[float]:
        """The number for every pair of runs; ValueError if a run lacks it."""
        return [self._of(r) - (self._of(base) if self.against else 0.0) for r, base in pairs]

    def readings(self, pairs: Iterable[tuple[Record, Record]]) -> dict[str, list[float]]:
        """The number by the other grading and of greedy answers, where runs have these."""
        found = {}
        for name, metric in READINGS.get(self.metric, {}).items():
            other = self.model_copy(update={"metric": metric})
            if self.minus or self.of in ("rise", "fall", "steps") and name == "greedy":
                continue
            with suppress(ValueError):
                if not other.without_room(pairs):
                    found[name] = other.values(pairs)
        return found

    def idle(self, pairs: list[tuple[Record, Record]], records: Iterable[Record]) -> str:
        """Why these runs cannot test it: nothing acted. Empty where something did."""
        if self.against and all(a.course == b.course for a, b in pairs):
            return f"{self.arm!r} and {self.against!r} made the same runs"
        if self.acts:
            arm = self.acts.arm or self.arm
            runs = [r for r in records if r.arm == arm and (not self.seeds or r.seed in self.seeds)]
            logged = [abs(value) for run in runs for value in run.logged(self.acts.metric)]
            mean = fmean(logged) if logged else 0.0
            if mean < self.acts.least:
                return f"{self.acts.metric} of {arm!r} is {number(mean)}, below {self.acts.least:g}"
        return ""

    def without_room(self, pairs: list[tuple[Record, Record]]) -> str:
        """Why a share cannot rise by delta above the other arm's; empty where it can."""
        if self.of == "end" and self.against and not self.minus:
            mean = fmean(self._of(base) for _, base in pairs)
            if is_share(self.metric) and mean > 1 - self.delta:
                return f"{self.against!r} is at {number(mean)}: there is no room to rise"
        return ""

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
    """A claim with its verdict; no `judgement` before all its planned seeds have run."""

    claim: Claim
    verdict: str = "not run here"
    judgement: Judgement | None = None
    readings: Mapping[str, Judgement] = field(default_factory=dict)  # see `Claim.readings`
    at_edge: bool = False  # another delta, see `EDGES`, would change the verdict
    waits: str = ""  # how many of the planned seeds have run, where some have

    @property
    def here(self) -> str:
        return cell(vars(self.judgement), "+") if self.judgement else f"`{self.claim.command}`"

    @property
    def verdict_text(self) -> str:
        """The verdict, and what else it hangs on: "**no effect**, at the edge; greedy: ..."."""
        text = f"**{self.verdict}**" + ", at the edge" * self.at_edge
        if why := self.waits or self.verdict == "inconclusive" and self.judgement.reason:
            text += f": {why}"
        others = [(name, one.verdict) for name, one in self.readings.items()]
        return "; ".join([text, *(f"{name}: {v}" for name, v in others if v != self.verdict)])


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


def _check(claim: Claim, others: Mapping[str, Claim]) -> None:
    """ValueError for an unknown name or region, a repeated id or number, an arm beside itself."""
    region(claim.expects)
    names = [("experiment", claim.experiment, EXPERIMENTS), ("profile", claim.profile, PROFILES)]
    if claim.experiment in EXPERIMENTS:
        known = EXPERIMENTS[claim.experiment].arms
        acting = claim.acts and claim.acts.arm
        names += [("arm", arm, known) for arm in [*claim.arms, acting] if arm]
    for kind, name, known in names:
        if name not in known:
            raise ValueError(f"there is no {kind} {name!r}: choose among {', '.join(known)}.")
    if claim.arm == claim.against:
        raise ValueError(f"it compares {claim.arm!r} with itself: name another arm as `against`.")
    if claim.id in others:
        raise ValueError("there is another claim of this id.")
    for other in others.values():
        if other.same == claim.same:
            raise ValueError(f"it judges the same number as {other.id!r}: make one row of the two.")


def planned(experiment: str, profile: str) -> dict[str, list[int]]:
    """Arm -> the seeds of its runs that test shipped claims; ValueError for no claim."""
    tested = [c for c in load_claims()[0] if (c.experiment, c.profile) == (experiment, profile)]
    if not tested:
        raise ValueError(f"no claim is tested by runs of {experiment!r} on profile {profile!r}.")
    seeds = defaultdict(set)
    for claim in tested:
        for arm in claim.arms:
            seeds[arm] |= {*(claim.seeds or usual_seeds(profile))}
    return {arm: sorted(seeds[arm]) for arm in EXPERIMENTS[experiment].arms if arm in seeds}


def judge_claims(claims: list[Claim], records: Iterable[Record]) -> tuple[list[Judged], list[str]]:
    """Verdicts on all claims, in their order, and a sentence for each that could not be judged.

    A family: the claims of one experiment on one profile, as many as are written, run or not.
    """
    runs, families = defaultdict(list), defaultdict(list)
    for record in records:
        runs[record.profile, record.experiment].append(record)
    problems, judged = [], {}
    for claim in claims:
        own = runs[claim.profile, claim.experiment]
        pairs = claim.pairs(own)
        try:
            values = claim.values(pairs)
            judged[claim.id] = Judged(claim)
        except ValueError as error:
            values = []
            problems.append(str(error))
        families[claim.profile, claim.experiment].append((claim, pairs, values))
    for (profile, experiment), family in families.items():
        for claim, pairs, values in family:
            if values:
                own = runs[profile, experiment]
                judged[claim.id] = _judged(claim, pairs, values, own, len(family))
    return [*judged.values()], problems


def _judged(claim: Claim, pairs: list, values: list[float], records: list, size: int) -> Judged:
    def by(values: list[float], delta: float = claim.delta) -> Judgement:
        return judge([(values, claim.expects, delta)], size)[0]

    if claim.seeds and len(values) < claim.n:
        return Judged(claim, waits=f"{len(values)} of {claim.n} planned seeds have run")
    one = by(values)
    why = claim.idle(pairs, records)
    if claim.expects == "rises" and one.verdict in ("no effect", "inconclusive"):
        why = why or claim.without_room(pairs)
    if why:
        return Judged(claim, "not tested", replace(one, reason=why))
    readings = {name: by(others) for name, others in claim.readings(pairs).items()}
    at_edge = any(by(values, claim.delta * times).verdict != one.verdict for times in EDGES)
    return Judged(claim, one.verdict, one, readings, at_edge)


def risk_of(judged: Iterable[Judged]) -> float:
    """The chance that any verdict is false, at most, if differences are roughly normal.

    `ALPHA` for each family, and once more the share of each claim that got a second try.
    """
    found = [one for one in judged if one.judgement]
    families = {(one.claim.profile, one.claim.experiment) for one in found}
    again = sum(ALPHA / one.judgement.claims for one in found if one.claim.again)
    return min(1.0, len(families) * ALPHA + again)


def reported_claims(results: str | Path | None = None) -> tuple[list[Judged], list[str]]:
    """The shipped claims judged by the reported results, and a sentence for each problem."""
    claims, wrong = load_claims()
    records, broken = load_current(results)
    judged, unjudged = judge_claims(claims, records)
    return judged, wrong + broken + unjudged


def forest_rows(judged: Iterable[Judged], *only: str) -> list[tuple]:
    """What `plots.forest` draws: the claims whose interval is known, as differences from 0.

    All by their ids, or those of the ids `only` by method (if it has a name) and statement.
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
        seed, said = one.claim.seed, one.claim.statement
        method = f"{seed}: " if seed[:1].isalpha() and seed not in said else ""
        label = fill(method + said, 46) if only else one.claim.id
        rows.append((label, one.claim.direction, one.verdict, bounds, unit))
    return rows


def claims_text(judged: Iterable[Judged]) -> str:
    """Markdown table of judged claims, with id, source, seeds and δ; a star: by no paper."""
    rows = []
    for one in judged:
        claim, found, verdict, here = one.claim, one.judgement, one.verdict_text, one.here
        own = "*" * (claim.evidence == "I")
        statement = f"{claim.statement} ({claim.id}; {claim.source}){own}"
        if found:
            seeds = f"{found.n} seed{'s' * (found.n != 1)}, sd {number(found.sd)}"
            here = f"{claim.number}: {here} ({seeds}, δ {claim.delta:g})"
            verdict += f": {found.reason}" if one.verdict == "not tested" else ""
        rows.append((verdict, statement, f"{claim.experiment}, {claim.profile}", claim.paper, here))
    return markdown_table(("verdict", "claim", "runs", "claimed", "here"), *rows)
