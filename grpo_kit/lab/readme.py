"""The page of results, `data/results/README.md`: its tables are computed from the stored runs.

A part between `<!-- name -->` and `<!-- /name -->` is computed; the rest is written by hand.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from matplotlib.figure import Figure

from grpo_kit.course.plots import arm_bands, forest
from grpo_kit.lab import dials
from grpo_kit.lab.claims import (
    Judged,
    families_of,
    forest_rows,
    judged_again,
    reported_claims,
    risk_of,
)
from grpo_kit.lab.experiments import EXPERIMENTS
from grpo_kit.lab.records import CHECKOUT, gather
from grpo_kit.lab.report import COUNTED, picture, write_report
from grpo_kit.lab.statistics import ALPHA, DELTA
from grpo_kit.lab.summary import markdown_table, reported
from grpo_kit.paths import sha256_of, write_atomic
from grpo_kit.profiles import PROFILES

DRAWN = {  # the arms of an experiment that the page draws, where these are not all
    "basic": ["plain"],
    "judge": ["judge added", "judge only", "only correct", "KL"],
    "verification": ["generate", "self-verify", "mixed"],
    "meta": ["labels", "P(Yes) alone", "random", "our defaults"],
    "label-free": ["labels", "majority", "self-certainty", "likelihood", "random"],
    "flow": ["trajectory", "offline traces"],
}


def write_results(checkout: str | Path = CHECKOUT) -> list[Path]:
    """Gather finished runs, renew the results page, the report beside it and their figures.

    Returns the two pages. ValueError if a result, a claim or the page cannot be used.
    """
    results = Path(checkout) / "data" / "results"
    gather(results)
    judged, problems = reported_claims(results)
    if problems:
        raise ValueError(" ".join(problems))
    page = results / "README.md"
    text = results_page(page.read_text(encoding="utf-8"), judged)
    report = write_report(results, results)
    draw_figures(results, judged)
    write_atomic(page, text)
    return [page, report]


def draw_figures(results: Path, judged: Iterable[Judged]) -> None:
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
    real = [one for one in judged if one.claim.profile == "smol" and one.judgement]
    if rows := forest_rows(real, *(one.claim.id for one in real)):
        picture(results / "figures" / "real.png", partial(forest, rows), rows, "")
    if found := dials.reported_dials(results):
        draw = partial(dials.all_dials, found)
        picture(results / "figures" / "dials.png", draw, [found, sha256_of(dials.__file__)], "")


def _rise_and_fall(lines: Mapping[str, dict]) -> Figure:
    figure = arm_bands({"": lines}, "training step")
    title = "The judge's score rises and stays, accuracy collapses"
    figure.axes[0].set(title=title, ylim=(0, 1), ylabel="share, or score from 0 to 1")
    return figure


def results_page(text: str, judged: list[Judged]) -> str:
    """The page's `text`, with the tables of today."""
    counts = [[one.verdict for one in judged].count(verdict) for verdict in COUNTED]
    kept = [one for one in judged if one.verdict == "reproduced"]
    harmless = sum(map(harms_not, kept))
    ours = sum(one.claim.evidence == "I" for one in kept if not harms_not(one))
    rate = (
        f"Of the *reproduced*, {len(kept) - harmless - ours} are claims of papers, {ours} are "
        f"predictions of ours, and {harmless} say only that an arm does *no harm*, as one that "
        "does nothing would.\n\n"
        f"Each of {families_of(judged)} families, an experiment on a profile, may hold a false "
        f"verdict with a chance of {ALPHA:.0%}, more where some seeds collapse; "
        f"{len(judged_again(judged))} claims got a second try, with fresh seeds (*2nd*). So the "
        f"chance of *any* false verdict is at most {risk_of(judged):.0%}, if differences are "
        "roughly normal. [The report](report.md) names those not run; most need a GPU.\n"
    )
    real = [one for one in judged if one.claim.profile == "smol"]
    parts = {
        "verdicts": f"{markdown_table(COUNTED, counts)}\n{rate}",
        "claims": verdicts_table(one for one in judged if one not in real and one.judgement),
        "real": verdicts_table(real),
    }
    return with_parts(text, parts)


def harms_not(one: Judged) -> bool:
    """Whether it is reproduced as one that does nothing would be."""
    return one.verdict == "reproduced" and one.claim.expects in ("stays", "keeps")


def verdicts_table(judged: Iterable[Judged]) -> str:
    """Claims in short, by experiment: id, verdict, statement, the number that decides, its seeds.

    Claims of papers have arXiv's numbers; those of ours have a star.
    """
    rows, groups = [], defaultdict(list)
    for one in judged:
        groups[one.claim.experiment, one.claim.profile].append(one)
    for of, group in groups.items():
        papers = {one.claim.id: re.findall(r"\d{4}\.\d{5}", one.claim.source)[:1] for one in group}
        common = {*chain(*(papers[one.claim.id] for one in group if one.claim.evidence != "I"))}
        source = f"; arXiv {min(common)}" if len(common) == 1 else ""
        rows.append((f"**{of[0]}**", "", settings_of(*of) + source, "", ""))
        for one in group:
            claim, found, here, seeds = one.claim, one.judgement, "–", ""
            own = "*" * (claim.evidence == "I")
            if found:
                here = f"{found.mean:+.3f} [{found.low:.3f}, {found.high:.3f}]"
                seeds = f"{found.n}{', 2nd' * claim.again}"
            if claim.delta != DELTA:
                here += f" (δ {claim.delta:g})"
            verdict = one.verdict_text.replace("**", "").replace("at the edge", "edge")
            if harms_not(one):
                verdict = verdict.replace("reproduced", "reproduced: no harm", 1)
            said = [] if own or source else papers[claim.id]
            statement = " ".join([claim.statement, *map("({})".format, said)])
            rows.append((claim.id + own, verdict, statement, here, seeds))
    return markdown_table(("id", "verdict", "claim", "mean [interval]", "n"), *rows)


def settings_of(experiment: str, profile: str) -> str:
    """Length, batch and learning rates of an experiment's arms."""
    of = EXPERIMENTS[experiment]
    configs = [of.setting(PROFILES[profile], arm)[1] for arm in of.arms]
    first, rates = configs[0], sorted({config.learning_rate for config in configs})
    length = (
        f"{first.max_generated_tokens:,} tokens" if of.x != "step" else f"{first.max_steps} steps"
    )
    shown = ", ".join(f"{rate:g}" for rate in rates)
    return f"{length}, {first.generation_batch_size} a step, rate {shown}"


def with_parts(text: str, parts: Mapping[str, str]) -> str:
    """`text` with each part between its marks. Raises ValueError for a part without them."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"a page needs one part between {begin} and {end}; add them.")
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n\n{part}\n{end}{after}"
    return text
