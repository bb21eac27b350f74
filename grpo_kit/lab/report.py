"""The report: every stored run beside what the sources claim, as Markdown with figures.

`write_results` renews the one beside the reported results, and the figures of the page there.

All numbers are computed. A file or a claim that cannot be used becomes a sentence under "Problems",
and the rest is shown.
"""

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from matplotlib import style
from matplotlib.figure import Figure

from grpo_kit.course import plots
from grpo_kit.course.plots import arm_bands, forest
from grpo_kit.lab import bench, dials
from grpo_kit.lab.claims import (
    Judged,
    claims_text,
    forest_rows,
    judge_claims,
    load_claims,
    reported_claims,
    risk_of,
)
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import command_of
from grpo_kit.lab.records import CHECKOUT, Record, fingerprint, gather
from grpo_kit.lab.statistics import ALPHA, VERDICTS
from grpo_kit.lab.summary import markdown_table, plain, reported, summarise, summary_text
from grpo_kit.paths import make_output_dir, results_dir, sha256_of, write_atomic
from grpo_kit.visible import visible

COUNTED = (*VERDICTS, "inconclusive", "not tested", "not run here")
INTRODUCTION = """\
# What was claimed, and what came out

`grpo-kit results` computes all numbers, figures and verdicts here from the stored runs and the list
of claims (`data/claims.yaml`). Notebook 07 derives the rule behind the verdicts. After a verdict
stands where another δ, the other grading or greedy answers would change it. A star marks a
prediction of ours, or our reading of a paper. Each run names its commit, versions, machine and
settings.
"""
SPEED = """\
`grpo-kit bench` measures one training step of the kit and of TRL in turn, with the same model,
prompts and update. The model is the shipped base, or has random weights in one of three shapes, so
that completions hardly end early and the kit saves less. "MiB" is the most memory of a process with
one trainer alone, imports included. [The page of GPUs](gpu/README.md) has what `make gpu` measures.
"""
DRAWN = {  # the arms of an experiment that the page draws; the report draws all
    "basic": ["plain"],
    "judge": ["judge added", "judge only", "only correct", "KL"],
    "verification": ["generate", "self-verify", "mixed"],
    "meta": ["labels", "P(Yes) alone", "random", "our defaults"],
    "label-free": ["labels", "majority", "self-certainty", "likelihood", "random"],
    "flow": ["trajectory", "offline traces"],
}
STYLE = ["grpo_kit.course.figures", {"axes.facecolor": "none"}]


def write_results(checkout: str | Path = CHECKOUT) -> Path:
    """Gather finished runs, renew the report beside the results, its figures and the page's.

    Returns the report. ValueError if a result or a claim cannot be used.
    """
    results = Path(checkout) / "data" / "results"
    gather(results)
    _, problems = reported_claims(results)
    if problems:
        raise ValueError(" ".join(problems))
    draw_figures(results)
    return write_report(results, results)


def draw_figures(results: Path) -> None:
    """Renew the figures that only pages show: chosen arms, all dials, a judge that is outwitted."""
    figures = results / "figures"
    for name, arms in DRAWN.items():
        summary = reported(name, results=results)
        curves = {m: {a: of[a] for a in arms if a in of} for m, of in summary["curves"].items()}
        shown = curves, summary["x"]
        picture(figures / f"page-{name}.png", partial(arm_bands, *shown), shown, "")
    stored = reported("judge", results=results)["curves"]
    score = stored["rewards/quality_judge_reward/mean"]["judge only"]
    score["values"] = [[reward + 0.5 for reward in of] for of in score["values"]]  # of -0.5..0.5
    accuracy = stored["eval/pass@1"]["judge only"]
    lines = {"the judge's score (1: full marks)": score, "accuracy on held-out problems": accuracy}
    draw = partial(_rise_and_fall, lines)
    picture(figures / "rise-and-fall.png", draw, lines, "", dpi=150)
    if found := dials.reported_dials(results):
        draw = partial(dials.all_dials, found)
        picture(figures / "dials.png", draw, [found, sha256_of(dials.__file__)], "")


def _rise_and_fall(lines: Mapping[str, dict]) -> Figure:
    figure = arm_bands({"": lines}, "training step")
    title = "The judge's score rises and stays, accuracy collapses"
    figure.axes[0].set(title=title, ylim=(0, 1), ylabel="share, or score from 0 to 1")
    return figure


@style.context(STYLE, after_reset=True)
def write_report(
    output_dir: str | Path, results: str | Path | None = None, claims: str | Path | None = None,
    problems: Iterable[str] = (),
) -> Path:  # fmt: skip
    """Write `report.md` and `figures/*.png`; return the path of the first.

    `results`, `claims`: a folder of records and a YAML file, by default the shipped ones;
    `problems`: sentences to show beside those on files and claims. RuntimeError if `output_dir`
    cannot be written.
    """
    folder = make_output_dir(output_dir)
    (records, broken), (entries, wrong) = load_current(results), load_claims(claims)
    judged, unjudged = judge_claims(entries, records)
    problems = [*problems, *broken, *wrong, *unjudged]
    if not records:
        where = results or results_dir()
        problems.append(f"No run is stored under {where}: `grpo-kit run NAME` makes them.")
    text = [INTRODUCTION, counts_text(judged)]
    if rows := forest_rows(judged):
        alt = "Mean difference of each claim and its interval, in units of what matters"
        path = folder / "figures" / "claims.png"
        text.append(picture(path, partial(forest, rows), rows, alt))
    if problems:
        text += ["## Problems\n", "".join(f"- {plain(problem)}\n" for problem in problems)]
    text += ["## Claims\n", claims_text(judged)]
    for name, experiment in EXPERIMENTS.items():
        if runs := [record for record in records if record.experiment == name]:
            text += [f"## {name}\n", f"{experiment.question}\n", *arms_of(name, runs, folder)]
    speed = Path(results or results_dir()) / "bench" / "bench.json"
    if speed.exists():
        text += [f"## Speed\n\n{SPEED}", bench.report(json.loads(speed.read_bytes()))]
    path = folder / "report.md"
    write_atomic(path, visible("\n".join(text), newline="\n"))
    return path


def counts_text(judged: list[Judged]) -> str:
    """Markdown: how many claims have which verdict, and how sure all of them are together."""
    verdicts = [one.verdict for one in judged]
    kept = [one.claim.expects for one in judged if one.verdict == "reproduced"]
    harmless = kept.count("stays") + kept.count("keeps")
    return (
        f"{markdown_table(COUNTED, map(verdicts.count, COUNTED))}\n"
        f"{harmless} of the *reproduced* say only that an arm does *no harm*, as one that does "
        "nothing would. The claims of an experiment on a profile hold a false verdict with a "
        f"chance of {ALPHA:.0%}, more if one got a second try or some seeds collapse. So the "
        f"chance of *any* false verdict is at most {risk_of(judged):.0%}, if differences are "
        "roughly normal. Most claims that were not run need a GPU.\n"
    )


def arms_of(name: str, records: list[Record], folder: Path) -> list[str]:
    """Figure, table and command of an experiment's runs, for each profile."""
    by_profile, parts = defaultdict(list), []
    for record in records:
        by_profile[record.profile].append(record)
    for profile, runs in sorted(by_profile.items(), reverse=True):
        summary = summarise(runs, EXPERIMENTS[name])
        curves = {metric: arms for metric, arms in summary["curves"].items() if arms}
        parts.append(f"### {name}, profile {profile}\n")
        if curves:
            shown = {"curves": curves, "x": summary["x"]}
            alt = "Curves of all arms: medians of the seeds, of up to eight arms with ranges"
            path = folder / "figures" / f"{profile}-{name}.png"
            parts.append(picture(path, partial(arm_bands, **shown), shown, alt))
        seeds = sorted({record.seed for record in runs})
        if EXPERIMENTS[name].turned:
            parts.append(dials.dial_text(runs, EXPERIMENTS[name], summary))
        else:
            parts.append(summary_text(summary))
        command = command_of(name, profile, seeds)
        parts += [f"{len(runs)} runs, made by `{command}`\n"]
    return parts


def picture(path: Path, draw: Callable[[], Figure], shown: object, alt: str, dpi: int = 80) -> str:
    """Write a PNG of the numbers `shown`; returns Markdown that shows it.

    Its description is a hash of them and of the code that draws: it is drawn anew where one of
    these has changed since it was written, or since the shipped one of its name was.
    """
    make_output_dir(path.parent)
    drawn = fingerprint([shown, sha256_of(plots.__file__)])
    shipped = results_dir() / "figures" / path.name
    for known in filter(Path.exists, (path, shipped)):
        if drawn.encode() in (content := known.read_bytes())[:1000]:
            write_atomic(path, content)
            return f"![{alt}](figures/{path.name})\n"
    png, about = io.BytesIO(), {"Description": drawn, "Software": None}
    draw().savefig(png, format="png", dpi=dpi, facecolor="white", metadata=about)
    write_atomic(path, png.getvalue())
    return f"![{alt}](figures/{path.name})\n"
