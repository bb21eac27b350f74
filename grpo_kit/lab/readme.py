"""The results page, `data/results/README.md`: its tables are computed from the stored results.

A part between `<!-- name -->` and `<!-- /name -->` is computed; the rest is left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from grpo_kit.lab import bench, scaling
from grpo_kit.lab.claims import claims_text, reported_claims
from grpo_kit.lab.report import VERDICTS, write_report
from grpo_kit.lab.skill_runs import skills_text
from grpo_kit.lab.statistics import power
from grpo_kit.lab.summary import markdown_table, reported, summary_text
from grpo_kit.paths import results_dir, write_atomic

MEASURES = ("eval/pass@1", "eval/greedy", "eval/pass@8", "eval/mean_length", "seconds")


def write_results(results: str | Path | None = None) -> list[Path]:
    """Renew the computed parts of the results page, and the report beside it; returns both files.

    Raises ValueError if a result file cannot be used, a claim cannot be judged, or the page lacks
    a part; then nothing is written.
    """
    folder = Path(results or results_dir())
    page = folder / "README.md"
    text = with_parts(page.read_text(encoding="utf-8"), parts(folder))
    report = write_report(folder, folder, page=False)
    write_atomic(page, text)
    return [page, report]


def parts(results: str | Path | None = None) -> dict[str, str]:
    """Name -> Markdown of each computed part. Raises ValueError, as `write_results` does."""
    folder = Path(results or results_dir())
    judged, problems = reported_claims(folder)
    if problems:
        raise ValueError(" ".join(problems))
    verdicts = [one.verdict for one in judged]
    tested = sum(one.claim.profile == "tiny" and bool(one.judgement) for one in judged)
    skills, step, growth = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("skills/skills.json", "bench/bench.json", "bench/scaling.json")
    )
    chances = [
        [f"{effect}", *(f"{power(effect, n, tested):.0%}" for n in (5, 10))] for effect in (2, 3, 4)
    ]
    computed = {
        "verdicts": markdown_table(VERDICTS, [f"{verdicts.count(name)}" for name in VERDICTS]),
        "power": markdown_table(["true difference", "five seeds", "ten seeds"], *chances),
        "basic": summary_text(reported("basic", results=folder), MEASURES),
        "engines": summary_text(reported("engines", results=folder), MEASURES),
        "skills": skills_text(skills),
        "step": bench.report(step),
        "growth": scaling.report(growth),
    }
    for name in dict.fromkeys(one.claim.experiment for one in judged):
        ids = [j.claim.id for j in judged if j.claim.experiment == name and j.judgement]
        computed[name] = claims_text(judged, *ids) if ids else "None has been run yet.\n"
    return computed


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks. Raises ValueError for a part without them."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the page needs one part between {begin} and {end}; add them.")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{part}\n{end}{rest.partition(end)[2]}"
    return text
