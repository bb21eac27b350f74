"""The page of results, `data/results/README.md`: its tables are computed from the stored runs.

A part between `<!-- name -->` and `<!-- /name -->` is computed; the rest is written by hand.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from grpo_kit.course.plots import arm_bands
from grpo_kit.lab import bench
from grpo_kit.lab.claims import claims_text, reported_claims
from grpo_kit.lab.records import CHECKOUT
from grpo_kit.lab.report import COUNTED, picture, write_report
from grpo_kit.lab.summary import markdown_table, reported, summary_text
from grpo_kit.paths import write_atomic

MEASURES = ("eval/pass@1", "eval/greedy", "eval/pass@8", "eval/mean_length", "seconds")
SVAMP = ("eval/pass@1", "eval/greedy", "eval/pass@8", "after/pass@64", "tokens", "seconds")


def write_results(checkout: str | Path = CHECKOUT) -> list[Path]:
    """Renew the results page, the report beside it and their figures; returns the two pages.

    ValueError before anything is written, if a result, a claim or the page cannot be used.
    """
    results = Path(checkout) / "data" / "results"
    page, text = results / "README.md", results_page(results)
    report = write_report(results, results)
    stored = reported("judge", results=results, x="step")["curves"]
    score = stored["rewards/quality_judge_reward/mean"]["judge only"]
    accuracy = stored["eval/pass@1"]["judge only"]
    score["values"] = [[reward + 0.5 for reward in of] for of in score["values"]]  # of -0.5..0.5
    lines = {"the judge's score (1 = full marks)": score, "accuracy on held-out problems": accuracy}
    draw = partial(_rise_and_fall, lines)
    picture(results / "figures" / "rise-and-fall.png", draw, lines, "", dpi=150)
    write_atomic(page, text)
    return [page, report]


def _rise_and_fall(lines: Mapping[str, dict]) -> Figure:
    figure = arm_bands({"": lines}, "training step")
    figure.axes[0].set(title="The score goes on rising, accuracy collapses", ylim=(0, 1))
    return figure


def results_page(results: Path) -> str:
    """The page as it is, with the tables of today. Raises ValueError, as `write_results` does."""
    judged, problems = reported_claims(results)
    if problems:
        raise ValueError(" ".join(problems))
    verdicts = [one.verdict for one in judged]
    parts = {
        "verdicts": markdown_table(COUNTED, map(verdicts.count, COUNTED)),
        "step": bench.report(json.loads((results / "bench" / "bench.json").read_bytes())),
    }
    for name in ("basic", "engines"):
        parts[name] = summary_text(reported(name, results=results), MEASURES)
    for name in ("basic", "rare"):
        parts[f"{name}-smol"] = summary_text(reported(name, "smol", results), SVAMP)
    for name in dict.fromkeys(one.claim.experiment for one in judged):
        own = [one for one in judged if one.claim.experiment == name and one.judgement]
        parts[name] = claims_text(own) if own else "None has been run yet.\n"
    return with_parts((results / "README.md").read_text(encoding="utf-8"), parts)


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks. Raises ValueError for a part without them."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"a page needs one part between {begin} and {end}; add them.")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{part}\n{end}{after}"
    return text
