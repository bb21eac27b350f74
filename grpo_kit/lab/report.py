"""The report: every stored run beside what the sources claim, as one page and as Markdown.

All numbers are computed; the templates hold words and looks. A file or claim that cannot be used
becomes a sentence, and the rest is shown. The page needs neither network nor scripts.
"""

import base64
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt
from matplotlib import style
from matplotlib.figure import Figure

from grpo_kit.course import replay
from grpo_kit.course.plots import CURVE_LABELS, X_LABELS, arm_bands, arm_points, forest
from grpo_kit.lab.bands import Row
from grpo_kit.lab.claims import EVIDENCE, Judged, forest_rows, hardware, judge_claims, load_claims
from grpo_kit.lab.experiments import EXPERIMENTS, load_current
from grpo_kit.lab.grid import command_of
from grpo_kit.lab.records import Record, by_arm, fingerprint, slug
from grpo_kit.lab.statistics import MIN_SEEDS, VERDICTS
from grpo_kit.lab.summary import cell, markdown_table, number, plain, summarise, summary_text
from grpo_kit.paths import make_output_dir, results_dir, write_atomic
from grpo_kit.runs import REPLAY
from grpo_kit.visible import shortened, visible

COUNTED = (*VERDICTS, "inconclusive", "not run here")
HEADINGS = {
    "basic": "Plain GRPO", "rare": "Few right answers", "variants": "Variants side by side",
    "diversity": "Diversity reward", "judge": "LLM judge", "verification": "Self-verification",
    "meta": 'P("Yes") as reward', "flow": "Flow-GRPO", "tools": "Flow-GRPO, three tools",
    "brevity": "A second question: is it short?", "label-free": "Rewards without labels",
    "corrections": "The corrections, one by one", "engines": "The kit and TRL",
    "published": "Real models",
}  # fmt: skip
AXES = {"variants": ("step", "num_generated_tokens", "seconds")}  # others: the experiment's own
MANY = 12  # arms whose curves can be told apart
ENDS = {"eval/pass@1": "accuracy", "entropy": "entropy", "eval/mean_length": "length"}
STYLE = ["grpo_kit.course.figures", {
    "axes.facecolor": "none", "savefig.facecolor": "none", "svg.fonttype": "none",
    "svg.hashsalt": "grpo-kit",  # without it, ids differ from one drawing to the next
}]  # fmt: skip
HTML = {  # what Markdown cannot say of the page
    f"<strong>({'|'.join(COUNTED)}|outside)</strong>":
        lambda match: f'<b class="chip {slug(match[1])}">{match[1]}</b>',
    r"(<tr>\s*)<td>(.*?)</td>": r'\1<th scope="row">\2</th>',
    r"<table>(?=\s*<thead>\s*<tr>\s*<th>verdict<)": '<table class="claims">',
    r"(?<= )--[a-z]+": r"<span>\g<0></span>",  # an option is not broken at its hyphens
    r"(?s)<table>.*?</table>": r'<div class="scroll" tabindex="0">\g<0></div>',
}  # fmt: skip


def write_report(
    output_dir: str | Path, results: str | Path | None = None, claims: str | Path | None = None,
    notebooks: Sequence[Row] = (), problems: Iterable[str] = (), page: bool = True,
) -> Path:  # fmt: skip
    """Write `report.md`, `figures/*.png` and, for a `page`, `report.html`; return the last's path.

    `results`, `claims`: a folder of records and a YAML file, by default the shipped ones;
    `notebooks`: executed ones compared with the reported ones; `problems`: sentences to show beside
    those on files and claims. Of runs below `output_dir` that were recorded it makes and links the
    replays. RuntimeError if `output_dir` cannot be written.
    """
    folder = make_output_dir(output_dir)
    replays, untold = write_replays(folder)
    content = context(results, claims, notebooks, [*problems, *untold]) | {"replays": replays}
    loader = PackageLoader("grpo_kit.lab")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "slug": slug, "plain": plain, "shortened": shortened}
    text, shell = (environment.get_template(f"report.{kind}.j2") for kind in ("md", "html"))
    make_output_dir(folder / "figures")
    figures = chain(*(panel["figures"] for panel in content["panels"]))
    for figure in filter(None, (content["forest"], *figures)):
        write_atomic(folder / figure["file"], figure["png"])
    write_atomic(folder / "report.md", visible(text.render(content), newline="\n"))
    if not page:
        return folder / "report.md"
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    body = markdown.render(visible(text.render(content, page=True), newline="\n"))
    for pattern, html in HTML.items():
        body = re.sub(pattern, html, body)
    write_atomic(folder / "report.html", shell.render(body=body))
    return folder / "report.html"


def write_replays(folder: Path) -> tuple[list[str], list[str]]:
    """Write `replay.html` beside each recording below `folder`; the files, and what went wrong."""
    files, problems = [], []
    for recording in sorted(folder.rglob(REPLAY)):
        try:
            write_atomic(file := recording.with_name("replay.html"), replay.page(recording.parent))
            files.append(file.relative_to(folder).as_posix())
        except ValueError as error:
            problems.append(str(error))
    return files, problems


def context(results=None, claims=None, notebooks=(), problems=()) -> dict:
    """All that the templates show, from the arguments of `write_report`."""
    (records, broken), (entries, wrong) = load_current(results), load_claims(claims)
    judged, unjudged = judge_claims(entries, records)
    problems = [*problems, *broken, *wrong, *unjudged]
    if not records:
        place = results or results_dir()
        problems.append(f"No run is stored under {place}: `grpo-kit run NAME` makes them.")
    runs, groups, panels = defaultdict(list), defaultdict(list), []
    for record in records:
        runs[list(EXPERIMENTS).index(record.experiment), record.profile].append(record)
    for _, of in sorted(runs.items()):
        name, profile = of[0].experiment, of[0].profile
        try:
            panels.append(panel(name, profile, of))
        except KeyError as error:
            remedy = f"delete them and run `{command_of(name, profile)}` again."
            problems.append(f"Runs of {name!r} on profile {profile!r} lack {error}: {remedy}")
    for one in judged:
        groups[HEADINGS[one.claim.experiment]].append(one)
    counts = Counter(one.verdict for one in judged)
    return {
        "problems": problems, "groups": groups, "panels": panels, "evidence": EVIDENCE,
        "counts": {verdict: counts[verdict] for verdict in COUNTED},
        "worlds": Counter(one.agreement for one in judged if one.second and one.second.judgement),
        "machines": len({one.hardware for one in judged if one.hardware}),
        "origin": origin(records) if records else "", "notebooks": notebooks,
        "min_seeds": MIN_SEEDS, "forest": draw_claims(judged),
    }  # fmt: skip


def panel(name: str, profile: str, records: Sequence[Record]) -> dict:
    """What the report shows of one experiment on one profile; KeyError if a record lacks it."""
    experiment, arms = EXPERIMENTS[name], by_arm(records)
    summaries = [summarise(records, experiment, x) for x in AXES.get(name, (experiment.x,))]
    summary, label = summaries[0], f"{profile}-{name}"
    seeds = defaultdict(list)  # seeds -> the arms that have these
    for arm, of in summary["seeds"].items():
        seeds[tuple(of)].append(arm)
    first = {arm: next(iter(arms[arm].values())) for arm in summary["final"]}
    return {
        "id": label, "name": name, "profile": profile, "heading": HEADINGS[name],
        "question": experiment.question, "origin": origin(records), "settings": _settings(first),
        "figures": [draw_ends(label, summary["final"])] if len(first) > MANY else [
            draw(label + f"-{s['x']}" * (s is not summary), s["curves"], s["x"])
            for s in summaries
            if any(s["curves"].values())
        ],
        "numbers": summary_text(summary),
        "samples": {f"{a}, seed {r.seed}": r.samples for a, r in first.items() if r.samples},
        "commands": [
            command_of(name, profile, of, arms if len(seeds) > 1 else ())
            for of, arms in seeds.items()
        ],
    }  # fmt: skip


def _settings(records: Mapping[str, Record]) -> str:
    """Markdown: the settings in which arms differ, values unlike the first arm's in bold."""
    configs = {}
    for arm, record in records.items():
        started = {name: record.start.get(name) for name in ("batch_source", "rewards")}
        configs[arm] = started | record.config
    rows = []
    for key in dict.fromkeys(chain(*configs.values())):
        first, *others = (_setting(config.get(key)) for config in configs.values())
        if any(other != first for other in others):
            bold = [other if other == first else f"**{other}**" for other in others]
            rows.append([f"`{key}`", first, *bold])
    return markdown_table(["setting", *records], *rows) if rows else ""


def _setting(value: object) -> str:
    """A setting's value: lists without brackets, and "–" for none."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value))
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def origin(records: Sequence[Record]) -> str:
    """Markdown: on what runs ran, with what, and when; where they differ, all is named."""

    def each(values: Iterable[object]) -> str:
        return " / ".join(sorted(set(map(str, values))))

    commits = [re.sub(r"^(\w{7})\w*", r"\1", r.commit) or "not known" for r in records]
    names = dict.fromkeys(chain(*(r.versions for r in records)))
    of = {n: each(r.versions[n] for r in records if n in r.versions) for n in names}
    days = sorted(r.finished for r in records)
    return markdown_table(
        ["runs", len(records)],
        ["machine", hardware(records)],
        ["threads", each(r.machine["threads"] for r in records)],
        ["commit", each(commits)],
        ["versions", ", ".join(f"{name} {versions}" for name, versions in of.items())],
        ["finished", " to ".join(dict.fromkeys((days[0], days[-1])))],
    )


def draw_claims(judged: Iterable[Judged]) -> dict[str, str | bytes] | None:
    """The claims' means and intervals as a figure, see `drawn`; None where nothing was run."""
    rows = forest_rows(judged)
    if not rows:
        return None
    words = "; ".join(
        f"{name} {verdict}: {number(found['mean'], '+')}" for name, _, verdict, found, _ in rows
    )
    with style.context(STYLE, after_reset=True):
        return drawn("claims", forest(rows), {"alt": f"Mean differences. {words}."}, rows)


def draw(name: str, curves: Mapping, x: str = "step") -> dict[str, str | bytes]:
    """Curves as a figure, see `drawn`, and in words, as `alt`."""
    over = X_LABELS.get(x, x)
    curves = {metric: arms for metric, arms in curves.items() if arms}
    ends = (
        f"{CURVE_LABELS.get(metric, (metric,))[0]} at the end: "
        + ", ".join(f"{a} {number(median(v[-1] for v in c['values']))}" for a, c in arms.items())
        for metric, arms in curves.items()
    )
    words = f"Curves over {over}, medians of seeds: {'; '.join(ends)}."
    with style.context(STYLE, after_reset=True):
        caption = f"Over {over}: median of the seeds, band from the lowest to the highest."
        words = {"caption": caption, "alt": words}
        return drawn(name, arm_bands(curves, x), words, {"curves": curves, "x": x})


def draw_ends(name: str, final: Mapping) -> dict[str, str | bytes]:
    """Where arms end, as a figure, see `drawn`: the curves of many would hide each other."""
    ends = {arm: {metric: of[metric] for metric in ENDS if metric in of}
            for arm, of in final.items()}  # fmt: skip
    words = "; ".join(
        f"{title}: " + ", ".join(f"{arm} {cell(of.get(metric))}" for arm, of in ends.items())
        for metric, title in ENDS.items()
    )
    with style.context(STYLE, after_reset=True):
        caption = "At the end: mean over the seeds and its 95 % interval."
        return drawn(name, arm_points(ends, ENDS), {"caption": caption, "alt": words}, ends)


def drawn(name: str, figure: Figure, words: dict[str, str], shown: object) -> dict:
    """`words` with the figure as `png`, to be `file`, and as `svg`, an address that holds it."""
    svg, png = io.BytesIO(), io.BytesIO()
    about = {"Description": fingerprint(shown), "Software": None}
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=80, facecolor="white", metadata=about)
    address = f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}"
    return {**words, "file": f"figures/{name}.png", "svg": address, "png": png.getvalue()}
