"""What the README says was measured, written into it from the reported results.

A part between `<!-- name -->` and `<!-- /name -->` is computed; the rest is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_kit.lab.claims import claims_text, reported_claims
from grpo_kit.lab.experiments import load_current
from grpo_kit.lab.records import Record
from grpo_kit.lab.report import write_report
from grpo_kit.lab.statistics import interval
from grpo_kit.lab.summary import cell
from grpo_kit.paths import results_dir, write_atomic


def write_results(readme: str | Path, results: str | Path | None = None) -> list[Path]:
    """Renew the computed parts of `readme`, and the report beside the results; returns the files.

    Raises ValueError where a result file cannot be used, a claim cannot be judged, or the README
    lacks a part; then nothing is written.
    """
    readme, results = Path(readme), Path(results or results_dir())
    text = with_parts(readme.read_text(encoding="utf-8"), parts(results))
    report = write_report(results, results, page=False)
    write_atomic(readme, text)
    return [readme, report]


def parts(results: str | Path | None = None) -> dict[str, str]:
    """Name -> Markdown of each computed part. Raises ValueError, as `write_results` does."""
    judged, problems = reported_claims(results)
    basic, broken = load_current(results, "tiny", "basic")
    if problems or broken:
        raise ValueError(" ".join(dict.fromkeys(problems + broken)))
    mutants = json.loads((Path(results or results_dir()) / "mutants.json").read_text())
    return {
        "claims": claims_text(judged),
        "basic": before_and_after(basic),
        "mutants": mutants_text(mutants),
    }


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks. Raises ValueError for a part without them."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the README needs one part between {begin} and {end}; add them.")
        text = re.sub(
            f"{begin}.*?{end}",
            lambda _, p=part, b=begin, e=end: f"{b}\n\n{p}\n{e}",
            text,
            flags=re.S,
        )
    return text


def before_and_after(records: list[Record]) -> str:
    """Markdown: every `eval/` metric before the first and after the last step, over seeds."""
    if not records:
        raise ValueError("no run of 'basic' is stored: `grpo-kit run basic` makes them.")
    names = [n for n in records[0].evaluation if n.startswith("eval/") and n != "eval/n"]
    steps = records[0].config["max_steps"]
    lines = [
        f"{len(records)} seeds, {steps} steps of {records[0].config['generation_batch_size']} "
        "answers; median and 95 % bootstrap interval over seeds, "
        f"{records[0].evaluation['eval/n']} held-out problems.",
        "",
        "| held-out | before | after |",
        "|---|---|---|",
    ]
    for name in names:
        values = [list(record.series(name).values()) for record in records]
        row = [cell(interval([series[i] for series in values])) for i in (0, -1)]
        lines.append(f"| {name.removeprefix('eval/')} | {' | '.join(row)} |")
    seconds = cell(interval([record.seconds for record in records]))
    return "\n".join(lines) + f"\n\nSeconds of a run's steps: {seconds}.\n"


def mutants_text(mutants: Sequence[Mapping]) -> str:
    """Markdown: deliberate breaks of the kit, and the test that noticed each."""
    lines = ["| break | noticed by |", "|---|---|"]
    for mutant in mutants:
        path, _, test = mutant["killed_by"].partition("::")
        by = f"`{path}`: `{test}`" if mutant["killed"] else "**none**"
        lines.append(f"| {mutant['what']} | {by} |")
    return "\n".join(lines) + "\n"
