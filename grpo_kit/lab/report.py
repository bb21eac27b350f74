"""The report: every stored run beside what the sources claim, as one page and as Markdown.

Nothing on it is typed: verdicts are `claims`', numbers and curves `summary`'s, and machines,
versions and commits are those that the runs wrote down. Words, order and looks are in
`templates/`. What cannot be used is said in a sentence, and the rest comes out all the same.

`report.html` is one file that needs neither network nor scripts, on a screen of any width, light or
dark. `report.md` is shorter and has its figures beside it. The same inputs give the same bytes.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from grpo_kit.course.plots import CURVE_LABELS, X_LABELS, arm_bands
from grpo_kit.lab.bands import Row
from grpo_kit.lab.claims import EVIDENCE, Judged, hardware, judge_claims, load_claims
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import command_of, format_seeds
from grpo_kit.lab.records import Record, by_arm, fingerprint, slug
from grpo_kit.lab.statistics import MARGIN, MIN_SEEDS
from grpo_kit.lab.summary import cell, is_clear, number, summarise
from grpo_kit.paths import make_output_dir, results_dir, write_atomic

VERDICTS = ("reproduced", "contradicted", "inconclusive", "not run here")
HEADINGS = {
    "basic": "Plain GRPO",
    "variants": "Variants side by side",
    "diversity": "Diversity reward",
    "judge": "LLM judge",
    "verification": "Self-verification",
    "meta": 'P("Yes") as reward',
    "flow": "Flow-GRPO",
    "engines": "The kit and TRL",
    "published": "Real models",
}
AXES = {"variants": ("step", "num_generated_tokens", "seconds")}  # others: the experiment's own
COST = {"tokens": "generated tokens", "seconds": "seconds"}  # of a run, evaluations left out
FOLD = 30  # more rows of notebooks than these, and those inside their bands are folded
INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE = dict.fromkeys(INK, "#22262b") | {
    "axes.facecolor": "none", "savefig.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "svg.fonttype": "none",
    "svg.hashsalt": "grpo-kit",  # else ids differ from one drawing to the next
}  # fmt: skip
DARK = {  # what a dark page has in place of ink and of matplotlib's ten colours
    "#22262b": "#d6dae0", "#1f77b4": "#5ab0f0", "#ff7f0e": "#ffa24d", "#2ca02c": "#5fd16a",
    "#d62728": "#ff6b6b", "#9467bd": "#b892e0", "#8c564b": "#c99a8b", "#e377c2": "#f09bd6",
    "#7f7f7f": "#b5b5b5", "#bcbd22": "#d6d65c", "#17becf": "#4fd6e3",
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
        output_dir: made where it is missing.
        results: a folder of records, by default the reported ones.
        claims: a YAML file, by default the shipped one.
        notebooks: executed notebooks compared with the reported ones, a row a number.
        problems: sentences to be shown among those on files and claims that cannot be used.
        page: whether to write `report.html`; without, the path is that of `report.md`.

    Each file is written whole or not at all, the page last. Raises RuntimeError where the folder
    cannot be written. Files and claims that cannot be used are named on the page.
    """
    folder = make_output_dir(output_dir)
    content = context(results, claims, notebooks, problems)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "slug": slug, "cell": _cell, "setting": _setting, "prose": _prose
    }  # fmt: skip
    make_output_dir(folder / "figures")
    for panel in content["panels"]:
        for figure in filter(None, panel["figures"]):
            write_atomic(folder / figure["file"], figure["png"])
    for name in ("report.md", "report.html")[: 1 + page]:
        write_atomic(folder / name, environment.get_template(f"{name}.j2").render(content))
    return folder / name


def context(
    results: str | Path | None = None,
    claims: str | Path | None = None,
    notebooks: Sequence[Row] = (),
    problems: Iterable[str] = (),
) -> dict:
    """All that the templates show; `problems` has a sentence for each thing that is not."""
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
    panels, undrawn = panels_of(records)
    counts = Counter(one.verdict for one in judged)
    machines = {one.hardware for one in judged if one.hardware}
    return {
        "problems": problems + wrong + unjudged + undrawn,
        "runs": len(records),
        "origin": origin(records),
        "counts": {verdict: counts[verdict] for verdict in VERDICTS},
        "groups": _grouped(judged),
        "several_machines": len(machines) > 1,
        "panels": panels,
        "notebooks": sorted(notebooks, key=lambda row: row.inside),
        "fold": FOLD,
        "commands": [command for panel in panels for command in panel["commands"]],
        "min_seeds": MIN_SEEDS,
        "margin": MARGIN,
    }


def _grouped(judged: Iterable[Judged]) -> dict[str, list[dict]]:
    """Heading -> rows of the table of claims, in the claims' order."""
    groups: dict[str, list[dict]] = {}
    for one in judged:
        name = one.claim.experiment
        groups.setdefault(HEADINGS.get(name, name), []).append(claim_row(one))
    return groups


def claim_row(one: Judged) -> dict:
    """What the table of claims says of one."""
    claim, found = one.claim, one.judgement
    row = {
        "claim": claim,
        "evidence": EVIDENCE[claim.evidence],
        "printed": claim.paper.split("; ") if claim.printed else [],
        "expects": claim.direction,
        "verdict": one.verdict,
        "hardware": one.hardware,
        "here": "",
        "reason": "",
    }
    if found is None:
        return row
    several = f" [{number(found.low, '+')}, {number(found.high, '+')}]" if found.n > 1 else ""
    p = "p < 0.001" if found.p < 0.001 else f"p = {number(found.p)}"
    return row | {
        "here": number(found.median, "+") + several,
        "seeds": f"{found.n} seed{'s' * (found.n != 1)}",
        "statistics": f"g = {number(found.effect, '+')}, {p}",
        "reason": found.reason,
    }


# --- experiments ----------------------------------------------------------------------------------


def panels_of(records: Iterable[Record]) -> tuple[list[dict], list[str]]:
    """A panel for each experiment and profile that has records, and sentences on what has none."""
    runs: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        runs.setdefault((record.experiment, record.profile), []).append(record)
    order = list(EXPERIMENTS)
    panels, problems = [], []
    for name, profile in sorted(runs, key=lambda run: (order.index(run[0]), run[1])):
        try:
            panels.append(panel(name, profile, runs[name, profile]))
        except KeyError as error:
            problems.append(
                f"Runs of {name!r} on profile {profile!r} lack {error}, so that they have no "
                f"panel: delete them and run `{command_of(name, profile)}` again."
            )
    return panels, problems


def panel(name: str, profile: str, records: Sequence[Record]) -> dict:
    """What the report shows of one experiment's records on one profile.

    Raises KeyError where they lack what is drawn or counted.
    """
    experiment = EXPERIMENTS[name]
    axes = AXES.get(name, (experiment.x,))
    summaries = {x: summarise(records, experiment, x) for x in axes}
    summary, arms = summaries[axes[0]], by_arm(records)
    alike: dict[tuple[int, ...], list[str]] = {}  # seeds -> the arms that have these
    for arm, seeds in summary["seeds"].items():
        alike.setdefault(tuple(seeds), []).append(arm)
    first = {arm: next(iter(arms[arm].values())) for arm in summary["final"]}
    settings = {arm: _settings(record) for arm, record in first.items()}
    keys = list(dict.fromkeys(key for one in settings.values() for key in one))
    differing = [key for key in keys if len({str(one.get(key)) for one in settings.values()}) > 1]
    final = {
        metric: {arm: cell(row.get(metric)) for arm, row in summary["final"].items()}
        for metric in dict.fromkeys(m for row in summary["final"].values() for m in row)
    }
    return {
        "id": f"{profile}-{name}",
        "name": name,
        "profile": profile,
        "heading": HEADINGS.get(name, name),
        "question": experiment.question,
        "seeds": "; ".join(
            format_seeds(seeds) + f" ({' · '.join(of)})" * (len(alike) > 1)
            for seeds, of in alike.items()
        ),
        "arms": list(first),
        "figures": [
            figure(f"{profile}-{name}{f'-{x}' * (x != axes[0])}", summaries[x], x) for x in axes
        ],
        "final": {_short(m): row for m, row in final.items() if m not in COST},
        "cost": {title: final[m] for m, title in COST.items() if m in final},
        "baseline": next(iter(experiment.arms)),
        "difference": _differences(summary["difference"]),
        "samples": {arm: record.samples for arm, record in first.items() if record.samples},
        "sampled_seed": {arm: record.seed for arm, record in first.items()},
        "common": {k: v for k, v in next(iter(settings.values())).items() if k not in differing},
        "differing": {k: {arm: one.get(k) for arm, one in settings.items()} for k in differing},
        "commands": [
            command_of(name, profile, seeds, of if len(alike) > 1 else ())
            for seeds, of in alike.items()
        ],
        "origin": origin(records),
    }


def _settings(record: Record) -> dict:
    started = {key: record.start[key] for key in ("collector", "rewards") if key in record.start}
    return {**started, **record.config}


def _differences(table: Mapping[str, Mapping[str, dict]]) -> dict[str, dict[str, str]]:
    """Metric -> arm -> difference from the baseline, marked where it may be chance."""
    return {
        COST.get(metric, _short(metric)): {
            arm: cell(row.get(metric), "+")
            + ("" if metric not in row or is_clear(row[metric]) else " ?")
            for arm, row in table.items()
        }
        for metric in dict.fromkeys(metric for row in table.values() for metric in row)
    }


def origin(records: Iterable[Record]) -> dict[str, str]:
    """On what runs ran, with what, and when; where they differ, all is named."""
    records = list(records)
    if not records:
        return {}
    packages = dict.fromkeys(name for record in records for name in record.versions)
    days = sorted({record.finished for record in records})
    return {
        "machine": hardware(records),
        "threads": _all(record.machine["threads"] for record in records),
        "commit": _all(_abbreviated(record.commit) for record in records),
        "versions": ", ".join(
            f"{name} {_all(r.versions[name] for r in records if name in r.versions)}"
            for name in packages
        ),
        "finished": " to ".join(dict.fromkeys((days[0], days[-1]))),
    }


def _abbreviated(commit: str) -> str:
    return commit.rstrip("+")[:7] + "+" * commit.endswith("+") if commit else "not known"


def _all(values: Iterable[object]) -> str:
    return " / ".join(sorted({str(value) for value in values}))


# --- figures --------------------------------------------------------------------------------------


def figure(name: str, summary: dict, x: str) -> dict | None:
    """An experiment's curves over `x`, drawn, and in words; None where nothing was logged."""
    curves = {metric: arms for metric, arms in summary["curves"].items() if arms}
    if not curves:
        return None
    said = [
        f"{CURVE_LABELS.get(metric, (metric,))[0]} at the end: "
        + ", ".join(f"{arm} {number(_last(curve))}" for arm, curve in arms.items())
        for metric, arms in curves.items()
    ]
    over = X_LABELS.get(x, x)
    return {
        "over": over,
        "file": f"figures/{name}.png",
        "alt": f"Curves over {over}, medians of seeds: {'; '.join(said)}.",
        **draw(curves, x),
    }


def draw(curves: Mapping, x: str = "step") -> dict[str, str | bytes]:
    """`arm_bands` as `png` on white, and as addresses that hold an SVG: `wide` and `narrow`, and
    both `_dark`.

    Leaves matplotlib's settings as they are, and does not depend on them.
    """
    with style.context(STYLE, after_reset=True):
        drawn = arm_bands(curves, x)
        layout = drawn.get_layout_engine()
        svg = {"wide": _svg(_reflowed(drawn, 2))}
        drawn.set_layout_engine("none")  # as it is laid out now
        png = io.BytesIO()
        drawn.savefig(png, format="png", dpi=110, facecolor="white")
        drawn.set_layout_engine(layout)
        svg["narrow"] = _svg(_reflowed(drawn, 1))
    svg |= {f"{name}_dark": _darkened(text) for name, text in svg.items()}
    shown = fingerprint({"curves": curves, "x": x})
    return {"png": _few_colours(png, shown), **{name: _address(text) for name, text in svg.items()}}


def _reflowed(drawn: Figure, columns: int) -> Figure:
    """The figure with its panels, and the names of its legend, in rows of `columns`."""
    columns = min(columns, len(drawn.axes))
    rows = -(-len(drawn.axes) // columns)
    grid = drawn.add_gridspec(rows, columns)
    for i, axes in enumerate(drawn.axes):
        axes.set_subplotspec(grid[i])
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
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn.savefig(file, format="svg", metadata=none)
    return re.sub(r"\d+\.\d{2,}", lambda place: f"{float(place[0]):.4g}", file.getvalue())


def _darkened(svg: str) -> str:
    return re.sub("#[0-9a-f]{6}", lambda found: DARK.get(found[0], found[0]), svg)


def _few_colours(png: io.BytesIO, description: str) -> bytes:
    """The picture in a third of the bytes: these are committed with every result."""
    file, about = io.BytesIO(), PngInfo()
    about.add_text("Description", description)
    Image.open(png).convert("RGB").quantize(128).save(file, "png", optimize=True, pnginfo=about)
    return file.getvalue()


def _address(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _last(curve: dict) -> float:
    return median(values[-1] for values in curve["values"])


# --- words ----------------------------------------------------------------------------------------


def _short(metric: str) -> str:
    return metric.removeprefix("eval/")


def _cell(text: object) -> str:
    """Text that neither ends a cell of a Markdown table nor is markup."""
    return " ".join(escape(str(text), quote=False).replace("|", "\\|").split())


def _prose(text: str) -> Markup:
    """A sentence as HTML, with what stands in backticks as code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", escape(text)))


def _setting(value: object) -> str:
    """A setting's value: lists without brackets, and "–" for none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value))
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
