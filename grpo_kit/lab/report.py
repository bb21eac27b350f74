"""The report: every stored run beside what the sources claim, as one page and as Markdown.

Nothing on it is typed: verdicts come from `claims`, numbers and curves from `summary`, machines,
versions and commits from the records. Words and looks are in `templates/`. Whatever cannot be used
is named in a sentence, and the rest is shown all the same.

`report.html` is one file that needs neither network nor scripts, on a screen of any width, light or
dark. `report.md` is shorter and has its figures beside it. The same inputs give the same bytes.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median

from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt
from matplotlib import style
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from grpo_kit.course.plots import CURVE_LABELS, X_LABELS, arm_bands
from grpo_kit.lab.bands import Row
from grpo_kit.lab.claims import EVIDENCE, hardware, judge_claims, load_claims
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import command_of, format_seeds
from grpo_kit.lab.records import Record, by_arm, fingerprint, slug
from grpo_kit.lab.statistics import MARGIN, MIN_SEEDS
from grpo_kit.lab.summary import by_metric, cell, is_clear, number, summarise
from grpo_kit.paths import make_output_dir, results_dir, write_atomic

VERDICTS = ("reproduced", "contradicted", "inconclusive", "not run here")
VERDICT = re.compile(f"<strong>({'|'.join(VERDICTS)}|outside)</strong>")
HEADINGS = {
    "basic": "Plain GRPO", "variants": "Variants side by side", "diversity": "Diversity reward",
    "judge": "LLM judge", "verification": "Self-verification", "meta": 'P("Yes") as reward',
    "flow": "Flow-GRPO", "engines": "The kit and TRL", "published": "Real models",
}  # fmt: skip
AXES = {"variants": ("step", "num_generated_tokens", "seconds")}  # others: the experiment's own
COST = {"tokens": "generated tokens", "seconds": "seconds"}  # of a run, evaluations left out
INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE = dict.fromkeys(INK, "#22262b") | {
    "axes.facecolor": "none", "savefig.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "grpo-kit",  # without it, ids differ from one drawing to the next
}  # fmt: skip


def write_report(
    output_dir: str | Path,
    results: str | Path | None = None,
    claims: str | Path | None = None,
    notebooks: Sequence[Row] = (),
    problems: Iterable[str] = (),
    page: bool = True,
) -> Path:
    """Write `report.md`, `figures/*.png` and `report.html` into a folder; returns the last's path.

    Args:
        output_dir: made if it is missing.
        results, claims: a folder of records and a YAML file, by default the shipped ones.
        notebooks: executed notebooks compared with the reported ones, a row a number.
        problems: sentences to show beside those on files and claims that cannot be used.
        page: whether to write `report.html`; without, the path is that of `report.md`.

    Each file is written whole or not at all. Raises RuntimeError if the folder cannot be written.
    """
    folder = make_output_dir(output_dir)
    content = context(results, claims, notebooks, problems)
    environment = Environment(
        loader=PackageLoader("grpo_kit.lab"), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "slug": slug, "cell": _cell, "setting": _setting}
    text, shell = (environment.get_template(f"report.{kind}.j2") for kind in ("md", "html"))
    make_output_dir(folder / "figures")
    for figure in (figure for panel in content["panels"] for figure in panel["figures"]):
        write_atomic(folder / figure["file"], figure["png"])
    write_atomic(folder / "report.md", text.render(content))
    if not page:
        return folder / "report.md"
    to_html = MarkdownIt("commonmark", {"html": True}).enable("table")
    body = to_html.render(text.render(content, page=True))
    body = VERDICT.sub(lambda v: f'<b class="chip {slug(v[1])}">{v[1]}</b>', body)
    body = re.sub(r"<table>(?=\s*<thead>\s*<tr>\s*<th>claim<)", '<table class="claims">', body)
    write_atomic(folder / "report.html", shell.render(body=body))
    return folder / "report.html"


def context(results=None, claims=None, notebooks=(), problems=()) -> dict:
    """All that the templates show, from the arguments of `write_report`."""
    records, broken = load_current(results)
    problems = [*problems, *broken]
    if not records:
        problems.append(
            f"No run is stored under {results or results_dir()}: `grpo-kit run NAME` makes them."
        )
    try:
        entries, wrong = load_claims(claims)
    except ValueError as error:
        entries, wrong = [], [str(error)]
    judged, unjudged = judge_claims(entries, records)
    problems += wrong + unjudged
    runs, groups, panels = defaultdict(list), defaultdict(list), []
    for record in records:
        runs[list(EXPERIMENTS).index(record.experiment), record.profile].append(record)
    for _, of in sorted(runs.items()):
        name, profile = of[0].experiment, of[0].profile
        try:
            panels.append(panel(name, profile, of))
        except KeyError as error:
            problems.append(
                f"Runs of {name!r} on profile {profile!r} lack {error}, so that they have no "
                f"panel: delete them and run `{command_of(name, profile)}` again."
            )
    for one in judged:
        groups[HEADINGS[one.claim.experiment]].append(one)
    counts = Counter(one.verdict for one in judged)
    outside, inside = ([row for row in notebooks if row.inside == of] for of in (False, True))
    folds = {"": outside, f"{len(inside)} inside their bands": inside}
    return {
        "problems": problems, "runs": len(records), "groups": groups, "panels": panels,
        "origin": origin(records) if records else {},
        "counts": {verdict: counts[verdict] for verdict in VERDICTS},
        "machines": len({one.hardware for one in judged if one.hardware}),
        "notebooks": {title: rows for title, rows in folds.items() if rows},
        "evidence": EVIDENCE, "min_seeds": MIN_SEEDS, "margin": MARGIN,
    }  # fmt: skip


def panel(name: str, profile: str, records: Sequence[Record]) -> dict:
    """What the report shows of one experiment on one profile; KeyError if a record lacks it."""
    experiment = EXPERIMENTS[name]
    axes = AXES.get(name, (experiment.x,))
    summaries = {x: summarise(records, experiment, x) for x in axes}
    summary, arms = summaries[axes[0]], by_arm(records)
    seeds = defaultdict(list)  # seeds -> the arms that have these
    for arm, of in summary["seeds"].items():
        seeds[tuple(of)].append(arm)
    several = len(seeds) > 1
    first = {arm: next(iter(arms[arm].values())) for arm in summary["final"]}
    configs = {
        arm: {key: r.start[key] for key in ("collector", "rewards") if key in r.start} | r.config
        for arm, r in first.items()
    }
    settings = {
        key: {arm: config.get(key) for arm, config in configs.items()}
        for key in dict.fromkeys(key for config in configs.values() for key in config)
    }
    differing = {k: row for k, row in settings.items() if len(set(map(str, row.values()))) > 1}
    final = by_metric(summary["final"], cell)
    difference = by_metric(summary["difference"], _difference)
    ends = {x: "" if x == axes[0] else f"-{x}" for x in axes}
    figures = [figure(f"{profile}-{name}{ends[x]}", summaries[x], x) for x in axes]
    return {
        "id": f"{profile}-{name}", "name": name, "profile": profile, "heading": HEADINGS[name],
        "question": experiment.question, "baseline": next(iter(experiment.arms)),
        "arms": list(first), "differing": differing, "origin": origin(records),
        "seeds": "; ".join(
            format_seeds(of) + f" ({' · '.join(arms)})" * several for of, arms in seeds.items()
        ),
        "figures": [figure for figure in figures if figure],
        "final": {metric: row for metric, row in final.items() if metric not in COST},
        "cost": {title: final[metric] for metric, title in COST.items() if metric in final},
        "difference": {COST.get(metric, metric): row for metric, row in difference.items()},
        "samples": {f"{a}, seed {r.seed}": r.samples for a, r in first.items() if r.samples},
        "common": {k: configs[next(iter(first))].get(k) for k in settings if k not in differing},
        "commands": [
            command_of(name, profile, of, arms if several else ()) for of, arms in seeds.items()
        ],
    }  # fmt: skip


def _difference(values: dict | None) -> str:
    return cell(values, "+") + ("" if values is None or is_clear(values) else " ?")


def origin(records: Sequence[Record]) -> dict[str, str]:
    """On what runs ran, with what, and when; where they differ, all is named."""

    def all_of(values: Iterable[object]) -> str:
        return " / ".join(sorted({str(value) for value in values}))

    commits = [re.sub(r"^(\w{7})\w*", r"\1", r.commit) or "not known" for r in records]
    versions = {name: [] for record in records for name in record.versions}
    for name, version in (pair for record in records for pair in record.versions.items()):
        versions[name].append(version)
    days = sorted(record.finished for record in records)
    return {
        "machine": hardware(records),
        "threads": all_of(record.machine["threads"] for record in records),
        "commit": all_of(commits),
        "versions": ", ".join(f"{name} {all_of(of)}" for name, of in versions.items()),
        "finished": " to ".join(dict.fromkeys((days[0], days[-1]))),
    }


def figure(name: str, summary: dict, x: str) -> dict | None:
    """An experiment's curves over `x`, drawn, and in words; None if nothing was logged."""
    curves = {metric: arms for metric, arms in summary["curves"].items() if arms}
    if not curves:
        return None
    ends = [
        f"{CURVE_LABELS.get(metric, (metric,))[0]} at the end: "
        + ", ".join(
            f"{arm} {number(median(v[-1] for v in c['values']))}" for arm, c in arms.items()
        )
        for metric, arms in curves.items()
    ]
    over = X_LABELS.get(x, x)
    return {
        "over": over,
        "file": f"figures/{name}.png",
        "alt": f"Curves over {over}, medians of seeds: {'; '.join(ends)}.",
        **draw(curves, x),
    }


def draw(curves: Mapping, x: str = "step") -> dict[str, str | bytes]:
    """`arm_bands` as `png` on white; `wide` and `narrow`: addresses that hold a transparent SVG.

    Does not depend on matplotlib's settings, and leaves them as they are.
    """
    with style.context(STYLE, after_reset=True):
        drawn = arm_bands(curves, x)
        wide = _svg(_reflowed(drawn, 2))
        layout, png = drawn.get_layout_engine(), io.BytesIO()
        drawn.set_layout_engine("none")  # as it is laid out now
        drawn.savefig(png, format="png", dpi=110, facecolor="white")
        drawn.set_layout_engine(layout)
        narrow = _svg(_reflowed(drawn, 1))
    # a third of the bytes with few colours: the pictures are committed with every result
    picture, about = io.BytesIO(), PngInfo()
    about.add_text("Description", fingerprint({"curves": curves, "x": x}))
    Image.open(png).convert("RGB").quantize(128).save(picture, "png", optimize=True, pnginfo=about)
    return {"png": picture.getvalue(), "wide": wide, "narrow": narrow}


def _reflowed(drawn: Figure, columns: int) -> Figure:
    """The figure with its panels, and the names of its legend, in rows of `columns`."""
    columns = min(columns, len(drawn.axes))
    rows = -(-len(drawn.axes) // columns)
    grid = drawn.add_gridspec(rows, columns)
    for axes, place in zip(drawn.axes, grid, strict=False):
        axes.set_subplotspec(place)
    legend = drawn.legends[0]
    names = [text.get_text() for text in legend.get_texts()]
    legend.remove()
    across = min(len(names), 2 * columns)
    drawn.legend(legend.legend_handles, names, loc="outside lower center", ncols=across)
    drawn.get_layout_engine().set(w_pad=0.08, h_pad=0.1)  # inches
    width = 4.8 if columns > 1 else 4.2
    drawn.set_size_inches(width * columns, 2.9 * rows + 0.25 * math.ceil(len(names) / across))
    return drawn


def _svg(drawn: Figure) -> str:
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn.savefig(file, format="svg", metadata=nothing)
    short = re.sub(r"\d+\.\d{2,}", lambda place: f"{float(place[0]):.4g}", file.getvalue())
    return f"data:image/svg+xml;base64,{base64.b64encode(short.encode()).decode()}"


def _cell(text: object) -> str:
    """Text that neither ends a cell of a Markdown table nor is markup."""
    return " ".join(escape(str(text), quote=False).replace("|", "\\|").split())


def _setting(value: object) -> str:
    """A setting's value: lists without brackets, and "–" for none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value))
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
