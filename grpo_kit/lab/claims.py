"""Published claims beside what the runs here say: `data/claims.yaml` judged by the records.

A claim names the runs that test it, the number that it is about and where that number is claimed to
lie. All claims of one profile are judged together (see `statistics.judge`), so that a table of many
claims has no more false verdicts than a table of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import Experiment, command_of
from grpo_kit.lab.records import Record, by_arm
from grpo_kit.lab.statistics import Judgement, judge, region
from grpo_kit.paths import data_dir
from grpo_kit.profiles import PROFILES

EVIDENCE = {
    "P": "the paper's text", "F": "the paper's figure", "C": "public code",
    "S": "a second-hand summary", "I": "inferred",
}  # fmt: skip


OWN = "yours"  # the source of a claim that names none


class Claim(BaseModel):
    """One published claim; `data/claims.yaml` explains the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    statement: str
    experiment: str
    arm: str
    metric: str
    expects: str | dict[str, float]
    seed: str = ""
    source: str = OWN
    evidence: Literal["P", "F", "C", "S", "I"] = "I"
    profile: str = "tiny"
    of: Literal["end", "change"] = "end"
    minus: str | None = None
    against: str | None = None
    printed: dict[str, list[float]] = {}

    @field_validator("expects")
    @classmethod
    def _is_a_region(cls, expects):
        region(expects)
        return expects

    @property
    def command(self) -> str:
        """What makes its runs, and no others."""
        return command_of(self.experiment, self.profile, arms=self.arms)

    @property
    def arms(self) -> list[str]:
        """The arms whose runs test it."""
        return [arm for arm in (self.against, self.arm) if arm]

    @property
    def number(self) -> str:
        """The number it is about, in words: "eval/pass@1 of diversity minus plain"."""
        name = self.metric.removeprefix("eval/")
        if self.minus:
            name = f"{name} minus {self.minus.removeprefix('eval/')}"
        if self.of == "change":
            name = f"change of {name}"
        return f"{name}, {self.arm}" + (f" minus {self.against}" if self.against else "")

    @property
    def paper(self) -> str:
        """What is printed in the source, or else its direction."""
        numbers = [f"{of}: {' → '.join(f'{v:g}' for v in vs)}" for of, vs in self.printed.items()]
        return "; ".join(numbers) or self.direction

    @property
    def direction(self) -> str:
        """Where the number is claimed to lie: "rises", or "0.066 ± 0.03"."""
        if isinstance(self.expects, str):
            return self.expects
        return f"{self.expects['value']:g} ± {self.expects['within']:g}"

    def values(self, records: Iterable[Record]) -> list[float]:
        """The number of every seed that its arms have in common; none where nothing was run.

        From the records of its experiment and profile. Raises ValueError, in a sentence, where a
        run lacks the number.
        """
        arms = by_arm(records)
        here, there = arms.get(self.arm, {}), arms.get(self.against or self.arm, {})
        seeds = [seed for seed in here if seed in there]
        if self.against is None:
            return [self._of(here[seed]) for seed in seeds]
        return [self._of(here[seed]) - self._of(there[seed]) for seed in seeds]

    def _of(self, record: Record) -> float:
        def value(metric: str) -> float:
            try:
                found = record.change(metric) if self.of == "change" else record.evaluation[metric]
            except KeyError:
                known = {key for row in record.history for key in row} | set(record.evaluation)
                raise ValueError(
                    f"claim {self.id!r} is about the metric {metric!r}, which runs of "
                    f"{self.experiment!r} do not have; they have {', '.join(sorted(known))}."
                ) from None
            if found is None:
                raise ValueError(
                    f"claim {self.id!r} is about the metric {metric!r}, which was not a number in "
                    f"{record.arm!r}, seed {record.seed}."
                )
            return found

        return value(self.metric) - (value(self.minus) if self.minus else 0.0)


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict: "reproduced", "contradicted", "inconclusive", or "not run here".

    `judgement`, with the numbers, is None where nothing has been run. `hardware`: the accelerator
    or processor of the runs.
    """

    claim: Claim
    verdict: str
    judgement: Judgement | None = None
    hardware: str = ""

    @property
    def here(self) -> str:
        """What was measured: the median over seeds, and its interval; or the command to run."""
        if self.judgement is None:
            return f"`{self.claim.command}`"
        j = self.judgement
        text = f"{j.median:+.3g}"
        return text + (f" [{j.low:+.3g}, {j.high:+.3g}]" if j.n > 1 else "")


def load_claims(path: str | Path | None = None) -> tuple[list[Claim], list[str]]:
    """The claims of a YAML file, by default the shipped one, and a sentence for each mistake in it.

    A claim that cannot be read, has the id of another, or names an experiment, arm or profile that
    there is not, is left out. Raises ValueError for a file that is no list.
    """
    path = Path(path or data_dir() / "claims.yaml")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read as YAML: {first}.") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds no list of claims; each begins with `- id:`.")
    claims: dict[str, Claim] = {}
    problems = []
    for i, entry in enumerate(entries, 1):
        name = entry.get("id", f"number {i}") if isinstance(entry, dict) else f"number {i}"
        try:
            claim = Claim.model_validate(entry)
            check_claim(claim, EXPERIMENTS)
            if claim.id in claims:
                raise ValueError("there is another claim of this id.")
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"])) or "the entry"
            problems.append(f"claim {name!r} in {path.name}: {place}: {wrong['msg']}.")
        except ValueError as error:
            problems.append(f"claim {name!r} in {path.name}: {error}")
        else:
            claims[claim.id] = claim
    return list(claims.values()), problems


def arms_with_claims(experiment: str, profile: str) -> list[str]:
    """The arms whose runs test shipped claims, in the experiment's order.

    Raises ValueError where there are none.
    """
    claims, _ = load_claims()
    named = {
        arm
        for claim in claims
        if (claim.experiment, claim.profile) == (experiment, profile)
        for arm in claim.arms
    }
    if not named:
        raise ValueError(f"no claim is tested by runs of {experiment!r} on profile {profile!r}.")
    return [arm for arm in EXPERIMENTS[experiment].arms if arm in named]


def check_claim(claim: Claim, experiments: Mapping[str, Experiment]) -> None:
    """Raise ValueError where experiment, arm or profile is none that there is."""
    if claim.experiment not in experiments:
        raise ValueError(
            f"there is no experiment {claim.experiment!r}: choose among {', '.join(experiments)}."
        )
    arms = experiments[claim.experiment].arms
    if claim.arm == claim.against:
        raise ValueError(f"it compares {claim.arm!r} with itself: name another arm as `against`.")
    for arm in (claim.arm, claim.against):
        if arm is not None and arm not in arms:
            raise ValueError(
                f"experiment {claim.experiment!r} has no arm {arm!r}: choose among "
                f"{', '.join(arms)}."
            )
    if claim.profile not in PROFILES:
        raise ValueError(
            f"there is no profile {claim.profile!r}: choose among {', '.join(PROFILES)}."
        )


def judge_claims(
    claims: Sequence[Claim], records: Iterable[Record]
) -> tuple[list[Judged], list[str]]:
    """Verdicts on all claims, in their order, and a sentence for each that could not be judged.

    Published claims of one profile are one table of `judge`, and those of one's own another.
    """
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        runs.setdefault((record.profile, record.experiment), []).append(record)
    tables: dict[tuple[str, bool], list[tuple[Claim, list[float], str]]] = {}
    problems, judged = [], {}
    for claim in claims:
        there = runs.get((claim.profile, claim.experiment), [])
        try:
            values = claim.values(there)
        except ValueError as error:
            problems.append(str(error))
            continue
        if values:
            table = tables.setdefault((claim.profile, claim.source == OWN), [])
            table.append((claim, values, hardware(there)))
        else:
            judged[claim.id] = Judged(claim, "not run here")
    for table in tables.values():
        judgements = judge([(values, claim.expects) for claim, values, _ in table])
        for (claim, _, machine), judgement in zip(table, judgements, strict=True):
            judged[claim.id] = Judged(claim, judgement.verdict, judgement, machine)
    return [judged[claim.id] for claim in claims if claim.id in judged], problems


def hardware(records: Iterable[Record]) -> str:
    """The accelerators of runs, or their processors where they had none."""
    names = {
        record.machine.get("processor", "not known")
        if record.machine.get("accelerator", "none") == "none"
        else record.machine["accelerator"]
        for record in records
    }
    return ", ".join(sorted(names))


def reported_claims(
    results: str | Path | None = None, path: str | Path | None = None
) -> tuple[list[Judged], list[str]]:
    """The shipped claims judged by the reported results, and a sentence for each problem."""
    claims, wrong = load_claims(path)
    records, broken = load_current(results)
    judged, unjudged = judge_claims(claims, records)
    return judged, wrong + broken + unjudged


def claims_text(judged: Iterable[Judged], *only: str) -> str:
    """Markdown: claim, what is printed, what was measured, verdict; of all, or of the ids `only`.

    Raises ValueError for an id that is not there.
    """
    rows = {one.claim.id: one for one in judged}
    if unknown := [name for name in only if name not in rows]:
        raise ValueError(f"there is no judged claim {unknown[0]!r}; there are {', '.join(rows)}.")
    lines = ["| claim | printed | here | verdict |", "|---|---|---|---|"]
    for name in only or rows:
        one = rows[name]
        of = f"{one.claim.number}: " if one.judgement else ""
        lines.append(
            f"| {one.claim.statement} | {one.claim.paper} | {of}{one.here} | **{one.verdict}** |"
        )
    return "\n".join(lines) + "\n"
