"""The page of results, `data/results/README.md`: its tables are computed from the stored runs.

A part between `<!-- name -->` and `<!-- /name -->` is computed; the rest is written by hand.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from grpo_kit.course.plots import arm_bands
from grpo_kit.lab import dials
from grpo_kit.lab.claims import Judged, families_of, judged_again, reported_claims, risk_of
from grpo_kit.lab.records import CHECKOUT, gather
from grpo_kit.lab.report import COUNTED, picture, write_report
from grpo_kit.lab.statistics import ALPHA, DELTA
from grpo_kit.lab.summary import markdown_table, reported
from grpo_kit.paths import sha256_of, write_atomic

DRAWN = {  # the arms of an experiment that the page draws, where these are not all
    "basic": ["plain"],
    "judge": ["plain", "judge added", "judge only", "only correct"],
    "verification": ["generate", "self-verify", "mixed"],
    "meta": ["labels", "P(Yes) alone", "random", "our defaults", "truth 10 %"],
    "label-free": ["labels", "majority", "self-certainty", "likelihood", "random"],
    "flow": ["trajectory", "offline traces"],
}


def write_results(checkout: str | Path = CHECKOUT) -> list[Path]:
    """Gather finished runs, renew the results page, the report beside it and their figures.

    Returns the two pages. ValueError if a result, a claim or the page cannot be used.
    """
    results = Path(checkout) / "data" / "results"
    gather(results)
    page, text = results / "README.md", results_page(results)
    report = write_report(results, results)
    draw_figures(results)
    write_atomic(page, text)
    return [page, report]


def draw_figures(results: Path) -> None:
    """Renew the page's own figures, those of single experiments beside the report's."""
    stored = reported("judge", results=results, x="step")["curves"]
    score = stored["rewards/quality_judge_reward/mean"]["judge only"]
    accuracy = stored["eval/pass@1"]["judge only"]
    score["values"] = [[reward + 0.5 for reward in of] for of in score["values"]]  # of -0.5..0.5
    lines = {"the judge's score (1 = full marks)": score, "accuracy on held-out problems": accuracy}
    draw = partial(_rise_and_fall, lines)
    shown = [lines, sha256_of(__file__)]
    picture(results / "figures" / "rise-and-fall.png", draw, shown, "", dpi=150)
    for name, arms in DRAWN.items():
        summary = reported(name, results=results)
        curves = {m: {a: of[a] for a in arms if a in of} for m, of in summary["curves"].items()}
        draw = partial(arm_bands, curves, summary["x"])
        picture(results / "figures" / f"page-{name}.png", draw, [curves, summary["x"]], "")
    if found := dials.reported_dials(results):
        draw = partial(dials.all_dials, found)
        picture(results / "figures" / "dials.png", draw, [found, sha256_of(dials.__file__)], "")


def _rise_and_fall(lines: Mapping[str, dict]) -> Figure:
    figure = arm_bands({"": lines}, "training step")
    title = "The judge's score rises and stays, accuracy collapses"
    figure.axes[0].set(title=title, ylim=(0, 1), ylabel="share, or score from 0 to 1")
    return figure


def results_page(results: Path) -> str:
    """The page as it is, with the tables of today. Raises ValueError, as `write_results` does."""
    judged, problems = reported_claims(results)
    if problems:
        raise ValueError(" ".join(problems))
    counts = [[one.verdict for one in judged].count(verdict) for verdict in COUNTED]
    families = families_of(judged)
    rate = (
        f"They are judged in {families} families, one an experiment and profile. If differences "
        f"are roughly normal, all intervals of one hold at once with a chance of {1 - ALPHA:.0%}. "
        f"Where some seeds collapse it is less. {len(judged_again(judged))} claims were "
        "*inconclusive* and got a second try, with fresh seeds. So the chance that any verdict of "
        f"the table is false is at most {risk_of(judged):.0%}.\n"
    )
    real = [one for one in judged if one.claim.profile == "smol"]
    parts = {
        "verdicts": f"{markdown_table(COUNTED, counts)}\n{rate}",
        "claims": verdicts_table(one for one in judged if one not in real and one.judgement),
        "real": verdicts_table(real),
    }
    return with_parts((results / "README.md").read_text(encoding="utf-8"), parts)


def verdicts_table(judged: Iterable[Judged]) -> str:
    """Claims in short: id, verdict, statement, the number that decides, and how many seeds it has.

    Marked are predictions of ours, and a δ that is not the usual one.
    """
    rows = []
    for one in judged:
        claim, found, here = one.claim, one.judgement, one.here
        ours = " *(ours)*" if claim.evidence == "I" else ""
        if found:
            here = f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
        if claim.delta != DELTA:
            here += f" (δ {claim.delta:g})"
        seeds = found.n if found else ""
        rows.append((claim.id, one.verdict_text, claim.statement + ours, here, seeds))
    return markdown_table(("id", "verdict", "claim", "mean [interval]", "n"), *rows)


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks. Raises ValueError for a part without them."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"a page needs one part between {begin} and {end}; add them.")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{part}\n{end}{after}"
    return text
